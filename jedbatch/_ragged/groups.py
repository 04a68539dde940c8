"""Groups: which calls run side by side where a program over packed rows has no loops.

A GPU starts the kernels of a phase in the time in which it computes the attention of hundreds of
rows, and a loop costs it more than that. So for a target that asks for it (`Target.straight_rows`)
row-wise phases run on all rows at once, and phases over instances on a few groups of calls, each
padded to one length and with so many slots:

    lengths     32                    96
    slots       [a ·] [b b] [· ·]     [c c c c] [· · · ·]
    packed      a b b c c c c         place of every row among the slots, as data

How long the slots of each group are, and how many there are, is chosen by what they cost for one
minibatch, and fits others: a call runs in the first group with a slot that is long enough.
"""

import itertools
from collections.abc import Sequence

import numpy as np

LENGTH_STEP = 16  # lengths are multiples of it
SLOT_STEP = 8  # numbers of slots are
GROUP_HEADROOM = 1.25  # slots by the calls there are, and longest slots by the longest of them
START_PAIRS = 100_000  # pairs of rows computed while a group is started, on an H100
MAX_PAIRS_PER_ROW = 128  # pairs of rows for each row that may be computed together

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
    totals = [0, *np.cumsum(counts).tolist()]
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for end, length in enumerate(lengths.tolist(), 1):
        options = []
        for begin in range(end):
            slots = _num_slots(totals[end] - totals[begin])
            cost, groups = best[begin]
            cost += START_PAIRS + slots * length * length
            options.append((cost, [*groups, (length, slots)]))
        best.append(min(options))
    cheapest = best[-1][1]
    return tuple(length for length, _ in cheapest), tuple(slots for _, slots in cheapest)


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


def places_in(
    slots: np.ndarray, slot_rows: Sequence[int], sizes: Sequence[int], counts: np.ndarray
) -> np.ndarray:
    """Returns int[rows]: where each packed row is among the rows of all slots.

    Args:
      slots: int[K], of each call.
      slot_rows: rows of a slot of each group.
      sizes: slots of each group.
      counts: int[K], rows of each call.
    """
    begins = [0, *itertools.accumulate(r * s for r, s in zip(slot_rows, sizes, strict=True))]
    firsts = np.array([0, *itertools.accumulate(sizes)])
    group = np.searchsorted(firsts, slots, side="right") - 1
    start = np.array(begins)[group] + (slots - firsts[group]) * np.array([*slot_rows, 0])[group]
    ends = counts.cumsum()
    within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return np.repeat(start, counts) + within
