"""Encodings of a frontier: what a learned policy sees.

An encoding says a few words about each type that has ready nodes:

    base   which types are ready
    max    and which of them has the most ready nodes (all that do, if several)
    sort   and their order by the number of ready nodes (equal ones share a place)
    phase  and how far each has come: how much shorter than the longest path left is the longest
           that begins in one of its ready nodes (0, 1, 2 to 3, or more edges: tallest, low, lower,
           far); which has most nodes that begin such a path (many); and whether the paths of all
           of these, some or none go on with another type (turning, mixed, steady); and whether
           all longest chains of the type begin in ready nodes (sure: the bound will fall)

The first three are those of ED-Batch. They cannot tell the beginning of a computation from its
end: if the roles of two types are swapped half way, what was right becomes wrong. `phase` can.

Source: Chen et al., ED-Batch, ICML 2023, section 2 and appendix A.4; `phase` is ours.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from jedbatch._schedule.frontier import Frontier
from jedbatch._support.types import Array

CODES = 64  # what an encoding may say about a type

Code = tuple[int, ...]  # for each ready type, CODES * its number + what is said about it
Encoder = Callable[[Frontier, Sequence[int]], list[int]]


def base(frontier: Frontier, ready: Sequence[int]) -> list[int]:
    """Nothing more than which types are ready."""
    return [0] * len(ready)


def most(frontier: Frontier, ready: Sequence[int]) -> list[int]:
    """1 for the types with the most ready nodes."""
    num_ready = frontier.num_ready
    largest = max(num_ready)
    return [int(num_ready[t] == largest) for t in ready]


def sort(frontier: Frontier, ready: Sequence[int]) -> list[int]:
    """For each, how many types have more ready nodes (the last code is for all from there on)."""
    num_ready = frontier.num_ready
    counts = sorted((num_ready[t] for t in ready), reverse=True)
    return [min(counts.index(num_ready[t]), CODES - 1) for t in ready]


def packed(low: Array, many: Array, turn: Array, sure: Array) -> Array:
    """The code of `phase`: of numbers, or of arrays of them.

    `low` is 0 if tallest, 1 if low, 2 if lower, 3 if far; `turn` is 0 if steady, 1 if mixed, 2 if
    turning; `many` and `sure` are 0 or 1. Of what is far no more is said than whether it is sure.
    """
    return 12 * low + (low < 3) * (6 * many + 2 * turn) + sure


GAPS = (1, 2, 4)  # edges below the longest path from which a type is low, lower, far


def phase(frontier: Frontier, ready: Sequence[int]) -> list[int]:
    """For each, how far the type has come (see `packed`)."""
    heights = list(map(frontier.tallest, ready))
    top, most_nodes = max(heights)[0], max([n for _, n, _ in heights])
    return [
        packed(bisect_right(GAPS, top - h), n == most_nodes, (k > 0) + (k == n), sure)
        for (h, n, k), sure in zip(heights, map(frontier.shortens, ready), strict=True)
    ]


ENCODINGS: dict[str, Encoder] = {"base": base, "max": most, "sort": sort, "phase": phase}
PLACES = ("1st", "2nd", "3rd", *(f"{n}th" for n in range(4, CODES + 1)))
WORDS: dict[str, dict[int, str]] = {
    "base": {0: ""},
    "max": {0: "", 1: "most"},
    "sort": dict(enumerate(PLACES)),
    "phase": {
        packed(low, many, turn, sure): " ".join(
            filter(None, [gap, "many" * many, turning if low < 3 else "", "sure" * sure])
        )
        for low, gap in enumerate(("tallest", "low", "lower", "far"))
        for many in ((0, 1) if low < 3 else (0,))
        for turn, turning in enumerate(("steady", "mixed", "turning") if low < 3 else ("",))
        for sure in (0, 1)
    },
}


def encode(encoding: str, frontier: Frontier, ready: Sequence[int], numbers: Sequence[int]) -> Code:
    """Returns an encoding of a frontier, in terms of a machine's types."""
    words = ENCODINGS[encoding](frontier, ready)
    code = [CODES * numbers[t] + c for t, c in zip(ready, words, strict=True)]
    code.sort()
    return tuple(code)
