"""Known paths: what instances record between decisions, kept from call to call.

A pure function does the same whenever instances differ in the contents of their arrays alone, as
long as the values that it decides on are the same. So what it records is a tree of *segments*: in
each, it records something and asks for a value, and the answer says which segment comes next.

    record ─ a > 0? ─┬─ True  ─ record ─ b > 0? ─ ...
                     └─ False ─ record ─ done

What instances go through is kept once they were met before. When the same was recorded in two
calls, others of their kind go through it without Python (see `_control_flow.following`). Answers
are bools and ints; a function that reads anything else, such as `float(x)`, has no known paths, nor
has one that decides on shared arguments.

Values of a path are numbered in the order in which they are recorded, and inputs in the order in
which they are read first, from 0.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import PyTreeDef

from jedbatch._control_flow.depths import MAX_STEPS, ROW_WORK
from jedbatch._jaxpr.identity import typed
from jedbatch._jaxpr.storage import is_key, stored
from jedbatch._record.instance_arrays import is_array
from jedbatch._record.registry import Registry
from jedbatch._session.indices import kinds_looked_up
from jedbatch._session.program_cache import ProgramCache

MAX_USES = 256  # of a guess, before they count half
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of guesses cut short: few are planned
FEW_USES = 4  # of a guess, after which another answer is not expected instead
MIN_CALLS = 2  # in which the same was recorded, before Python runs no more
MAX_CHANGES = 4  # of types, from call to call, before nothing is learned
MAX_BALANCE = 16  # instances
MAX_BYTES = 1 << 24  # of what is known of one key
SEGMENT_BYTES = 1 << 10  # of a segment, roughly, besides its arrays


class InstanceResult(NamedTuple):
    """The result of an instance; see `_graph.record`."""

    structure: PyTreeDef
    types: tuple[tuple, ...]
    references: tuple[int, ...]


class Written(NamedTuple):
    """The recording of a segment.

    Attributes:
      calls: int64[N], the types of nodes.
      references: int64[R], what they read: values, and inputs as `-1 - i`.
      groups: int64[I], of its inputs.
      inputs: how these are read, or what they are.
      num_values: how many results there are.
    """

    calls: np.ndarray
    references: np.ndarray
    groups: np.ndarray
    inputs: Sequence[Any]
    num_values: int

    def like(self, other: "Written") -> bool:
        """Returns whether another one records the same, numbers and arrays that it brings too."""
        if self.num_values != other.num_values:
            return False
        columns = zip(self[:3], other[:3], strict=True)
        same = all(np.array_equal(x, y) for x, y in columns)
        return same and all(map(_same_input, self.inputs, other.inputs))


def _same_input(x: Any, y: Any) -> bool:
    """Returns whether two inputs of one group are the same."""
    if type(x) is tuple:  # where in an array of the instance
        return type(y) is tuple and x == y
    if x is y or (is_array(x) and is_key(x.dtype)):
        return x is y
    found = np.asarray(x), np.asarray(y)
    if not found[0].ndim:  # numbers, for which JAX has types of its own
        return typed(found[0].item()) == typed(found[1].item())
    return found[0].tobytes() == found[1].tobytes()


@dataclass(eq=False, slots=True)
class PathSegment:
    """The part of a recording between two decisions of an instance.

    Attributes:
      begin: the numbers of its first value and its first input.
      written: what it records.
      read: int64[_], the groups of the inputs that it reads.
      asked: the value that is asked for at its end; None at the end of the function.
      result: what the function returns there.
      after: the next segment, by answer.
      likely: the answer that is expected.
      guess: what is expected from here on, if that was asked for.
    """

    begin: tuple[int, int]
    written: Written
    read: np.ndarray
    asked: int | None
    result: InstanceResult | None = None
    after: "dict[int, PathSegment]" = field(default_factory=dict)
    likely: int = 0
    guess: "Guess | None" = None

    def like(self, other: "PathSegment") -> bool:
        """Returns whether another one is the same, as it is for a pure function."""
        if (self.begin, self.asked) != (other.begin, other.asked):
            return False
        try:
            return self.result == other.result and self.written.like(other.written)
        except Exception:  # of a comparison of what containers hold besides their leaves
            return False

    @property
    def calls(self) -> list[int]:
        """The types of the nodes that it records."""
        return self.written.calls.tolist()

    @property
    def nbytes(self) -> int:
        """Bytes, roughly."""
        arrays = *self.written[:3], *self.written.inputs
        return SEGMENT_BYTES + sum(getattr(x, "nbytes", 0) for x in arrays)


class Guess:
    """The segments that are likely to come, one after the other.

    Attributes:
      path: the segments.
      answers: that are expected where they ask; the last may have none.
      stops: how many instances went on to each of them, and no further.
    """

    def __init__(self, first: PathSegment, programs: ProgramCache):
        """Makes a guess.

        Args:
          first: the segment that certainly comes.
          programs: say what must not run for nothing, and how much work there is.
        """
        self.path = [first]
        self.answers: list[int] = []
        self._work = [0.0]
        while len(self.path) < MAX_STEPS and self.path[-1].after:
            segment = self.path[-1]
            following = segment.after[segment.likely]
            kernels = list(_kernels(following, programs))
            is_refused = any(kernel.cares_for_values for kernel in kernels)
            if is_refused or _may_look_up_absent_rows(following, programs.registry):
                break
            self.answers.append(segment.likely)
            self.path.append(following)
            self._work.append(sum(kernel.lane_work + ROW_WORK for kernel in kernels))
        self.stops = [0] * len(self.path)
        self._others: collections.Counter[tuple[int, int]] = collections.Counter()
        self._blocks: dict[int, PathBlock] = {}

    def block(self, size: int) -> "PathBlock":
        """Returns the first segments, put together."""
        found = self._blocks.get(size)
        if found is None:
            found = self._blocks[size] = PathBlock.of(self.path[:size], self.answers)
        return found

    @property
    def is_sure(self) -> bool:
        """Returns whether instances have gone on as expected, and nothing else."""
        return self.stops[-1] == sum(self.stops) > 0

    def size_worth(self, instances: int, round_work: float) -> int:
        """Returns how many segments are worth running, as far as is known.

        Every segment that runs for nothing costs its work, and every further round what a host
        does for it. Of the ways to cut the segments into rounds one is taken that is expected to
        cost least.

        Args:
          instances: that go on from here.
          round_work: floating-point operations done while a host does what a round takes.
        """
        uses = sum(self.stops)
        if not uses or self.stops[-1] == uses:
            return len(self.path)
        stops = np.array(self.stops)
        reached = instances * stops[::-1].cumsum()[::-1] / uses
        sizes = [size for size in SIZES if size < len(reached)] + [len(reached)]
        left = np.append(reached, 0.0)[sizes]  # that need another round
        work = np.cumsum(self._work)[np.array(sizes) - 1]
        used = np.cumsum(reached * self._work)[np.array(sizes) - 1]
        rounds = round_work * (1 - np.exp(-left))
        costs = np.zeros(len(sizes))
        for k in range(len(sizes) - 2, -1, -1):
            wasted = left[k] * (work[k + 1 :] - work[k]) - (used[k + 1 :] - used[k])
            costs[k] = (wasted + rounds[k + 1 :] + costs[k + 1 :]).min()
        return sizes[int((instances * work - used + rounds + costs).argmin())]

    def note(self, place: int, answer: int | None) -> None:
        """Notes that an instance went on as expected up to a place in the path.

        Args:
          place: of the last segment that it is known to have come to.
          answer: there, if it was another than expected; None if it ended, or nothing is known.
        """
        self.stops[place] += 1
        if answer is not None and place < len(self.answers):
            self._others[place, answer] += 1

    def settle(self, programs: ProgramCache) -> None:
        """Expects other answers from now on where most were others than expected."""
        if sum(self.stops) > MAX_USES:
            self.stops = [n // 2 for n in self.stops]
            self._others = collections.Counter({k: n // 2 for k, n in self._others.items()})
        for (place, answer), count in self._others.items():
            segment = self.path[place]
            is_most = count > FEW_USES + 2 * sum(self.stops[place + 1 :])
            if is_most and answer in segment.after and segment.likely == self.answers[place]:
                segment.likely = answer
                self.path[0].guess = self._turned(programs)
                break

    def _turned(self, programs: ProgramCache) -> "Guess":
        """Returns what is expected by now, with what was noted as far as it stays the same."""
        other = Guess(self.path[0], programs)
        pairs = zip(self.path[1:], other.path[1:], strict=False)
        last = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))
        other.stops[:last] = self.stops[:last]
        went_on = self._others[last, other.answers[last]] if last < len(other.answers) else 0
        other.stops[last] = sum(self.stops[last:]) - went_on
        if went_on:
            other.stops[last + 1] = went_on
        return other


class PathBlock(NamedTuple):
    """Segments, one after the other, as they are recorded together.

    Attributes:
      path: the segments.
      answers: that are expected of all that ask but the last.
      written: all that they record, references as they are numbered in the path.
      new: int64[R], 1 where values of the block are read.
      new_inputs: int64[R], 1 where inputs of the block are read.
      relative: references counted from the first value and input of the block.
      older: what else is read, once each.
      older_at: where in the references that is, and which of them it is.
      asked: int64[A], values that are asked for, counted from the first one of the block.
    """

    path: Sequence[PathSegment]
    answers: list[int]
    written: Written
    new: np.ndarray
    new_inputs: np.ndarray
    relative: np.ndarray
    older: list[int]
    older_at: tuple[np.ndarray, np.ndarray]
    asked: np.ndarray

    @staticmethod
    def of(path: Sequence[PathSegment], answers: list[int]) -> "PathBlock":
        """Puts segments together."""
        parts = [segment.written for segment in path]
        calls, references, groups = (np.concatenate([p[k] for p in parts]) for k in range(3))
        inputs = [x for p in parts for x in p.inputs]
        written = Written(calls, references, groups, inputs, sum(p.num_values for p in parts))
        value, number = path[0].begin
        is_new, is_new_input = references >= value, references < -number
        at = np.flatnonzero(~is_new & ~is_new_input)
        older, which = np.unique(references[at], return_inverse=True)
        relative = references + np.where(is_new, -value, number)
        return PathBlock(
            path,
            answers[: len(path) - 1],
            written,
            is_new.astype(np.int64),
            is_new_input.astype(np.int64),
            relative,
            older.tolist(),
            (at, which),
            np.array([x.asked for x in path if x.asked is not None], np.int64) - value,
        )


@dataclass(eq=False, slots=True)
class KnownPaths:
    """The paths that instances of one key took.

    Attributes:
      first: the segment that they begin with; None if nothing was learned.
      calls: in how many calls it was learned: what did the same in several is taken to be pure.
      met: how much had been met, of types and the like, before any of it was recorded.
      changes: how often it was recorded otherwise, since more had been met.
      learns: whether it is any use to learn more.
      balance: how many instances were done along known paths, less others, within bounds.
      nbytes: of the segments, roughly.
    """

    first: PathSegment | None = None
    calls: int = 0
    met: int = 0
    changes: int = 0
    learns: bool = True
    balance: int = 0
    nbytes: int = SEGMENT_BYTES

    @property
    def is_sure(self) -> bool:
        """Whether instances may be taken to do what is known."""
        return self.first is not None and self.calls >= MIN_CALLS

    def note(self, done: bool) -> None:
        """Notes whether an instance was done along known paths; forgets all if few ever are."""
        self.balance = min(self.balance + 1, MAX_BALANCE) if done else self.balance - 1
        if self.balance < -MAX_BALANCE:
            self.forget()

    def forget(self) -> None:
        """Forgets all, and learns no more."""
        self.first, self.learns, self.nbytes = None, False, SEGMENT_BYTES

    def learn(
        self, path: Sequence[PathSegment], answers: Sequence[int], met: tuple[int, int]
    ) -> None:
        """Adds a path; forgets all if the function did something else before.

        Args:
          path: the segments from the first one to the end.
          answers: of all but the last.
          met: how much had been met before the call, and now.
        """
        known = None
        for k, segment in enumerate(path):
            before, known = known, self.first if known is None else known.after.get(answers[k - 1])
            if known is None:
                known = segment
                self.nbytes += segment.nbytes
                if before is None:
                    self.first, self.met = known, met[0]
                else:
                    if not before.after:
                        before.likely = answers[k - 1]
                    before.after[answers[k - 1]] = known
            elif not known.like(segment):
                same_types = np.array_equal(known.written.calls, segment.written.calls)
                self._change(is_pure=not same_types and self.met < met[1])
                if self.learns:
                    self.learn(path, answers, met)
                return
        if self.nbytes > MAX_BYTES:
            self.forget()

    def _change(self, is_pure: bool) -> None:
        """Begins again with nothing; forgets all of a function that may not be pure.

        Some operations become others when they are met again, or on another number: the first of
        them are recorded as they came.
        """
        self.changes += self.calls > 0
        if not is_pure or self.changes > MAX_CHANGES:
            self.forget()
        self.first, self.calls, self.nbytes = None, 0, SEGMENT_BYTES


def _may_look_up_absent_rows(segment: PathSegment, registry: Registry) -> bool:
    """Returns whether a segment may look up rows of tables by numbers of an instance's arrays.

    Where another comes instead, there need not be such rows. Those by numbers that functions bring
    were there.
    """
    kinds = kinds_looked_up(registry, set(segment.calls))
    read = map(registry.groups.__getitem__, segment.read.tolist() if kinds else ())
    of_arrays = [kind for how, kind, *_ in read if how == "leaf"]
    return any(stored(registry.value_types[kind]) in kinds for kind in of_arrays)


def _kernels(segment: PathSegment, programs: ProgramCache) -> Iterator[Any]:
    """Yields the kernels of the calls of a segment."""
    for spec in segment.calls:
        yield programs.kernel(spec)
