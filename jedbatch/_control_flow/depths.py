"""How many steps to run ahead: as many as earlier calls say, or else twice as many each time.

A step that is run ahead for nothing costs what its lanes cost; a round more costs what the host
does for it. Where a loop was met in earlier calls, it is known how many steps instances went on
there. So as many steps are run ahead as make the work for nothing, as expected from these calls,
cost no more than a round, nor more than what is of use. Where nothing is known, or all that is
known is behind, the number of steps doubles while more than half of them are of use, and halves
otherwise. It bounds what earlier calls say, too, as long as most steps of this call were for
nothing: instances may go on, and yet not as foreseen.

Source: renting or buying skis (Karlin et al., 1988): paying for what may be useless until that has
cost as much as what it saves is at most twice as much as the best.
"""

import collections
from collections.abc import Hashable, Iterable, MutableMapping, Sequence

import numpy as np

from jedbatch._program.round_template import RoundTemplate

FIRST_STEPS = 2  # that are run ahead at first
MAX_STEPS = 64  # that are run ahead at most
NUM_CALLS = 3  # the latest ones, which are remembered
ROUND_WORK = 1e8  # floating-point operations done while a host does what a round takes
ROW_WORK = 2e3  # of reading and writing the rows of a lane


class Depths:
    """How many steps the fibres of a call go on, counted from the first decision of each.

    Fibres are by number. A loop is known by the types of nodes in its steps.
    """

    def __init__(self, memory: MutableMapping[Hashable, tuple[np.ndarray, ...]]):
        """Makes one for a call, given the counts of the latest calls, which it adds to."""
        self._memory = memory
        self._most = FIRST_STEPS
        self._taken: collections.Counter[int] = collections.Counter()
        self._open: dict[Hashable, set[int]] = {}  # fibres that are in a loop
        self._ended: dict[Hashable, list[int]] = {}  # steps of those that have left one
        self._used: collections.Counter[Hashable] = collections.Counter()  # of use, less others

    def note_round(self, fibers: Iterable[int]) -> None:
        """Notes that fibres wait for the end of a step."""
        self._taken.update(fibers)

    def most(self, template: RoundTemplate, fibers: Sequence[int]) -> int:
        """Returns how many steps to run ahead of a round.

        Args:
          template: of the round.
          fibers: that wait for it.
        """
        key = template.placed.type_ids
        before = self._memory.get(key)
        if before is None:
            return self._most
        begin = min(self._taken[fiber] for fiber in fibers)
        goes_on = steps_of_use(np.concatenate(before), begin)
        if not len(goes_on):
            return self._most
        lanes = zip(template.lanes, template.placed.kernels, strict=True)
        work = sum(n * (kernel.lane_work + ROW_WORK) for n, kernel in lanes)
        used, wasted = goes_on.cumsum(), (1 - goes_on).cumsum()
        is_worth_it = (work * wasted <= ROUND_WORK) & (wasted <= used)  # up to some step
        most = self._most if self._used[key] < 0 else MAX_STEPS
        return max(1, min(most, int(is_worth_it.sum())))

    def note(
        self, template: RoundTemplate, fibers: Sequence[int], ahead: int, done: np.ndarray
    ) -> None:
        """Notes how many steps were of use.

        Args:
          template: of the round.
          fibers: that waited for it.
          ahead: steps that ran ahead.
          done: int64[F], how many of them each fibre took.
        """
        used, foreseen = int(done.sum()), ahead * len(done)
        self._most = next_most(self._most, used, foreseen)
        key, taken = template.placed.type_ids, self._taken
        self._used[key] += 2 * used - foreseen
        still_open = self._open.setdefault(key, set())
        for fiber, steps in zip(fibers, done.tolist(), strict=True):
            taken[fiber] += steps
            if steps < ahead:
                still_open.discard(fiber)
                self._ended.setdefault(key, []).append(taken[fiber])
            else:
                still_open.add(fiber)

    def finish(self) -> None:
        """Remembers what was noted, for later calls."""
        for key, fibers in self._open.items():
            counts = [*self._ended.get(key, ()), *(self._taken[fiber] for fiber in fibers)]
            before = self._memory.get(key, ())
            self._memory[key] = (*before[1 - NUM_CALLS :], np.array(counts))


def steps_of_use(counts: np.ndarray, begin: int) -> np.ndarray:
    """Returns which share of those that are left after so many steps takes each step that follows.

    Args:
      counts: int64[_], the steps that each took.
      begin: the number of steps before.
    """
    left = counts[counts >= begin] - begin
    goes_on = np.bincount(left, minlength=1)[::-1].cumsum()[::-1]
    return goes_on[1:] / max(1, len(left))


def next_most(most: int, used: int, foreseen: int) -> int:
    """Returns how many steps to run ahead next, given how many were of use."""
    return min(MAX_STEPS, 2 * most) if 2 * used >= foreseen else max(1, most // 2)
