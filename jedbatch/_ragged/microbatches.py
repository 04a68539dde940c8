"""Microbatches: the calls of a minibatch in parts that run one after another.

Where a program over packed rows has no loops, each of its operations runs over all rows, and what
one writes has left the caches of a CPU when the next one reads it. So calls are distributed among
microbatches, each of which runs through the whole program; the gradients of what they share are
added up. Microbatches are made alike, so that one program serves each of them:

    calls           a7 b2 c4 d1 e5 f3        rows 7, 2, 4, 1, 5, 3, room for 12 in a microbatch
    microbatches    a7 c4 d1 | e5 f3 b2

How many there are is data. The largest call goes first, each to the one that has the fewest rows
(Graham, 1969).
"""

import heapq
import math
import operator
from collections.abc import Sequence

import numpy as np

from jedbatch._ragged.groups import Groups

Microbatches = tuple[np.ndarray, ...]  # int[calls], the calls of each, ascending
FINE_STEPS = 16  # rows that there may be room for between a power of two and the next
LEAST_STEP = 16  # rows of which they are multiples
ROUNDING = 1e-9  # of sums of parts of what there is room for


def fine_rows(need: float) -> int:
    """Returns a number of rows, rounded up to one of sixteen for each power of two."""
    step = max(LEAST_STEP, (1 << max(0, int(need).bit_length() - 1)) // FINE_STEPS)
    return -(-int(np.ceil(need)) // step) * step


def evenly_distributed(counts: np.ndarray, number: int) -> Microbatches:
    """Returns calls in so many microbatches of about as many rows.

    Args:
      counts: int[E, K], rows of each extent, for every call.
      number: of microbatches.
    """
    totals = np.maximum(1, counts.sum(1))
    found = _greedy(counts, totals, len(counts.T), np.zeros(len(counts.T), int), [], number)
    assert found is not None
    return found


def distributed(
    counts: np.ndarray,
    longest: np.ndarray,
    rows: Sequence[int],
    calls: int,
    groups: Groups,
    most: int,
) -> Microbatches | None:
    """Returns calls in as few microbatches as are found, each of which there is room for.

    None if there are more than `most`.

    Args:
      counts: int[E, K], rows of each extent, for every call.
      longest: int[K], the greatest length of each call.
      rows: of each extent that a microbatch has room for.
      calls: that it has room for.
      groups: the slots that it has for calls.
      most: microbatches at most.
    """
    lengths, slots = groups
    room = np.array(rows)
    if (counts > room[:, None]).any() or longest.max() > lengths[-1]:
        return None
    group = np.searchsorted(lengths, longest)
    slots_from = np.cumsum(slots[::-1])[::-1].tolist()  # those of each group and longer ones
    totals, least = counts.sum(1), max(1, -(-len(longest) // calls))
    for total, there in zip(totals.tolist(), rows, strict=True):
        least = max(least, -(-total // there) if there else 1)
    for g, there in enumerate(slots_from):
        least = max(least, -(-int((group >= g).sum()) // there))
    for number in range(least, most + 1):
        found = _greedy(counts, room, calls, group, slots_from, number)
        if found is not None:
            return found
    return None


def _greedy(
    counts: np.ndarray,
    room: np.ndarray,
    calls: int,
    group: np.ndarray,
    slots_from: Sequence[int],
    number: int,
) -> Microbatches | None:
    """Returns calls in so many microbatches; None if some call finds no room.

    Args:
      counts: int[E, K].
      room: int[E], rows of a microbatch.
      calls: of a microbatch.
      group: int[K], of the shortest slots that are long enough for each call.
      slots_from: the number of slots of each group and of longer ones; nothing for any number.
      number: of microbatches.
    """
    sizes = counts / np.maximum(1, room)[:, None]
    largest_first = np.argsort(-sizes.max(0, initial=0), kind="stable").tolist()
    size_of, group_of = sizes.T.tolist(), group.tolist()
    used = [[0.0] * len(sizes) for _ in range(number)]
    slots_left = [[*slots_from] for _ in range(number)]
    members: list[list[int]] = [[] for _ in range(number)]
    emptiest = [(0.0, m) for m in range(number)]  # a heap
    most = 1 + ROUNDING if slots_from else math.inf
    for k in largest_first:
        passed = []
        while emptiest:
            load, m = heapq.heappop(emptiest)
            would_use = list(map(operator.add, used[m], size_of[k]))
            load_then = max(would_use, default=0.0)
            needed = group_of[k] + 1
            if load_then <= most and len(members[m]) < calls and all(slots_left[m][:needed]):
                break
            passed.append((load, m))
        else:
            return None
        used[m] = would_use
        members[m].append(k)
        if slots_from:
            slots_left[m][:needed] = [n - 1 for n in slots_left[m][:needed]]
        for entry in (*passed, (load_then, m)):
            heapq.heappush(emptiest, entry)
    return tuple(np.sort(np.array(m, int)) for m in members if m)


def places_of_calls(microbatches: Microbatches, calls: int) -> np.ndarray:
    """Returns int[K]: where each call is, if every microbatch has room for so many."""
    places = np.zeros(sum(map(len, microbatches)), int)
    for m, members in enumerate(microbatches):
        places[members] = m * calls + np.arange(len(members))
    return places


def packed_places(counts: np.ndarray, microbatches: Microbatches, rows: int) -> np.ndarray:
    """Returns int[R]: where each row is, if every microbatch has room for so many.

    Args:
      counts: int[K], rows of each call, of which they are in the order of calls.
      microbatches: the calls of each.
      rows: that each has room for.
    """
    starts = np.zeros(len(counts), int)
    for m, members in enumerate(microbatches):
        own = counts[members]
        starts[members] = m * rows + np.cumsum(own) - own
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within
