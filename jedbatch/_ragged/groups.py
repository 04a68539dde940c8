"""Groups: which calls run side by side, padded to one length.

Where a program has loops, calls run a few at a time, as often as there are calls of about a length,
and the lengths are chosen by those of the first minibatch (see `fitted_lengths`).

A GPU starts the kernels of a phase in the time in which it computes the attention of hundreds of
rows, and a loop costs it more than that. So for a target that asks for it (`Target.straight_rows`),
and where rows are read or written by index, on a CPU too (`Target.straight_indexed_rows`), row-wise
phases run on all rows at once (of a microbatch, see `_ragged.microbatches`), and phases over
instances on a few groups of calls, each padded to one length and with so many slots:

    lengths     32                    96
    slots       [a ·] [b b] [· ·]     [c c c c] [· · · ·]

How long the slots of each group are, and how many there are, is chosen by what they cost for one
minibatch, and fits others: a call runs in the first group with a slot that is long enough.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LENGTH_STEP = 16  # lengths are multiples of it
SLOT_STEP = 8  # numbers of slots are
GROUP_HEADROOM = 1.25  # slots by the calls there are, and longest slots by the longest of them
START_PAIRS = 100_000  # pairs of rows computed while a group is started, on an H100
MAX_PAIRS_PER_ROW = 128  # pairs of rows for each row that may be computed together,
MAX_PAIRS_PER_INDEXED_ROW = 32  # the same for `Target.straight_indexed_rows`: 4 million in all
LENGTHS_PER_OCTAVE = 8  # that a program with loops may choose from
LEAST_SAVED = 2000  # pairs of rows, for one more length to be worth compiling
MAX_LENGTH_STEP = 4  # times the next smaller length: what may come is not padded to more

Groups = tuple[tuple[int, ...], tuple[int, ...]]  # (length of a slot, slots) of each, ascending


def find_groups(longest: np.ndarray, least: int) -> Groups:
    """Returns the cheapest groups for calls.

    Args:
      longest: int[K], rows of each call.
      least: the length of the longest slots at least.
    """
    rounded = -(-np.maximum(longest, 1) // LENGTH_STEP) * LENGTH_STEP
    lengths, counts = np.unique(rounded, return_counts=True)
    lengths[-1] = max(int(lengths[-1]), least)

    def cost(length: int, calls: int) -> float:
        return START_PAIRS + _num_slots(calls) * length * length

    cheapest = _cheapest(lengths, counts, cost)
    return tuple(n for n, _ in cheapest), tuple(_num_slots(calls) for _, calls in cheapest)


class LengthCosts(NamedTuple):
    """The costs by which the lengths are chosen that calls are padded to.

    Attributes:
      headroom: the last length is for calls so many times as long as these.
      power: of the length, that the work of a call grows with.
      saving: the part of the work without padding that one more length must save.
    """

    headroom: float
    power: int
    saving: float


def fitted_lengths(longest: np.ndarray, shortest: int, costs: LengthCosts) -> tuple[int, ...]:
    """Returns the lengths that calls are padded to, where any number may run with each: ascending.

    There are more of them where calls are many, and few where they are alike, since each is a
    program of its own to compile.

    Args:
      longest: int[K], rows of each call.
      shortest: that all lengths are multiples of.
      costs: of lengths.
    """
    headroom, power, least = costs
    grid = np.array(row_lengths(shortest, headroom * int(longest.max()), LENGTHS_PER_OCTAVE))
    lengths, counts = np.unique(grid[np.searchsorted(grid, longest)], return_counts=True)
    saving = max(LEAST_SAVED, least * float(counts @ lengths.astype(float) ** power))

    def cost(length: int, calls: int) -> float:
        return saving + calls * float(length) ** power

    fitted: list[int] = []
    before = shortest
    for length in (*(n for n, _ in _cheapest(lengths, counts, cost)), int(grid[-1])):
        while length > MAX_LENGTH_STEP * before:
            before *= MAX_LENGTH_STEP
            fitted.append(before)
        if length not in fitted:
            fitted.append(length)
        before = length
    return tuple(fitted)


def row_lengths(shortest: int, longest: float, steps: int) -> tuple[int, ...]:
    """Returns lengths, ascending, the last for `longest` at least.

    There are so many between a power of two and the next, all of them multiples of `shortest`.
    """
    lengths = [shortest]
    while lengths[-1] < longest:
        octave = shortest << ((lengths[-1] // shortest).bit_length() - 1)
        lengths.append(lengths[-1] + max(shortest, octave // steps))
    return tuple(lengths)


def _cheapest(
    lengths: np.ndarray, counts: np.ndarray, cost: Callable[[int, int], float]
) -> list[tuple[int, int]]:
    """Returns groups of the least cost in all: (length, calls) of each, ascending.

    Args:
      lengths: int[L] of calls, ascending.
      counts: int[L], calls of each length.
      cost: from the length of a group and its calls to its cost.
    """
    totals = [0, *np.cumsum(counts).tolist()]
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for end, length in enumerate(lengths.tolist(), 1):
        options = []
        for begin in range(end):
            calls = totals[end] - totals[begin]
            so_far, groups = best[begin]
            options.append((so_far + cost(length, calls), [*groups, (length, calls)]))
        best.append(min(options))
    return best[-1][1]


def _num_slots(calls: int) -> int:
    return -(-int(calls * GROUP_HEADROOM) // SLOT_STEP) * SLOT_STEP


def longest_slot(rows: int) -> int:
    """Returns the length of the longest slots of a new program, for calls of up to `rows` rows."""
    return -(-int(rows * GROUP_HEADROOM) // LENGTH_STEP) * LENGTH_STEP


def pairs_in(groups: Groups) -> int:
    """Returns the number of pairs of rows in all slots."""
    return sum(slots * length * length for length, slots in zip(*groups, strict=True))


def slots_of(longest: np.ndarray, groups: Groups) -> np.ndarray | None:
    """Returns int[K], the slot in which each call runs; None if there are too few slots."""
    slot_of_call = np.full(len(longest), -1)
    waiting = np.argsort(longest, kind="stable")
    first = 0
    for length, slots in zip(*groups, strict=True):
        fitting = int(np.searchsorted(longest[waiting], length, side="right"))
        placed = waiting[: min(fitting, slots)]
        slot_of_call[placed] = first + np.arange(len(placed))
        waiting = waiting[len(placed) :]
        first += slots
    return None if len(waiting) else slot_of_call
