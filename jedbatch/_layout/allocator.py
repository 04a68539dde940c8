"""Placing blocks of rows that live for a while so that few rows are needed in all.

Block i has `size[i]` rows next to each other and is alive from step `first[i]`, which writes it,
to step `last[i]`, the last that reads it, both included. Blocks that are alive at the same step
must not overlap; all others may share rows. Wanted are offsets with a low peak.

No peak is below the most rows that are alive at one step (`live_bound`), and often rows are free
but not next to each other. Think of time as one axis and of rows as the other: blocks are
rectangles that move along the rows only. To pack them optimally (dynamic storage allocation) is
NP-hard.

We follow the NNC tensor allocation algorithm, which thinks in two graphs:

- The *interference graph* joins blocks that are alive at the same step. The block with most
  edges is placed first, as in register allocation: it is what others have to avoid. Many have
  as many edges, so ties matter. The larger goes first, then the one with the smaller index, and
  with a block go up to two larger ones that interfere neither with it nor with each other, so
  that a large place is there for smaller ones to reuse.
- The *allocation graph* says what is reused: an edge of weight w leads from a block to a later
  one that takes over w of its rows. Rows of a large block flow to several small ones side by
  side; a small block's place is extended by rows of its neighbours.

Where we depart from it: NNC grows the allocation graph by inserting blocks into one of its edges,
so that apart from its companions a block inherits from one block only. Chains whose blocks get
smaller took up to seven times the bound. Here a block takes the lowest rows that are free for its
whole life, whoever had them, so the allocation graph is implied by the offsets. In the right order
this always leads to the optimum (the optimum's own order by offset), so we search for a better
order as "squeaky wheel optimization" does: what reached the peak is placed earlier next time,
by half, three quarters or one quarter of the way to the front in turn.

Minibatches come fast, so `allocate` first tries what is cheap: a linear *scan* through time, which
gives each block the smallest gap that fits. If it comes within 2 % of the live bound, that will
do, and this is the usual case. If not, three orders are tried, by size (`by_size`) and by edges
without and with companions; if the best is still more than 5 % above the bound, the search starts
from each. The lowest peak wins, the first of equals. With more than `MAX_BLOCKS` blocks, or
`MAX_EDGES` edges in the interference graph, the scan has to do.

Loops need no copies: a chain of blocks of which each lives until the next is written, block t over
the steps t and t + 1, alternates between two places, whatever its length. NNC unrolls loops to
this end; here they come unrolled.

References:
  The NNC Tensor Allocation Algorithm: https://libnnc.org/tech/nnc-alloc/
  D. E. Joslin, D. P. Clements: Squeaky Wheel Optimization. JAIR 10, 1999.
"""

import dataclasses
from bisect import bisect_left, insort

import numpy as np

PEAK_TOLERANCE = 0.02  # a peak this close to the live bound is good enough
SEARCH_TOLERANCE = 0.05  # the same, before a search for better orders
SEARCH_PLACEMENTS = 24  # placements that this search tries from each order
MAX_VISITED_EDGES = 1 << 16  # edges of the interference graph that it looks at from each order
MAX_EDGES = 1 << 17  # most edges of the interference graph for anything but the scan
MAX_BLOCKS = 1 << 12  # and most blocks
EARLIER_RANKS = 0.5, 0.25, 0.75  # where a block that reached the peak goes, as a part of its rank


@dataclasses.dataclass(frozen=True, eq=False)
class Allocation:
    """The places of blocks.

    Attributes:
      offset: int64[N], the first row of each block; 0 for a block without rows.
      peak: rows needed in all.
    """

    offset: np.ndarray
    peak: int

    def check(self, size: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        """Raises `ValueError` if two live blocks overlap or the peak is not what they need."""
        size, first, last = _blocks(size, first, last)
        end = self.offset + size
        for i in np.flatnonzero(size).tolist():
            meets = (first <= last[i]) & (first[i] <= last) & (size > 0)
            meets &= (self.offset < end[i]) & (self.offset[i] < end)
            meets[i] = False
            if meets.any():
                rows = [
                    f"block {j} has rows {self.offset[j]} to {end[j]} over steps {first[j]} to "
                    f"{last[j]}"
                    for j in (i, int(meets.argmax()))
                ]
                raise ValueError(f"live blocks overlap: {' and '.join(rows)}.")
        if self.peak != end.max(initial=0) or (self.offset < 0).any():
            raise ValueError(
                f"rows {self.offset.min(initial=0)} to {end.max(initial=0)} are in use; expected "
                f"rows 0 to {self.peak}."
            )

    def __str__(self) -> str:
        """`3 blocks in 8 rows, at 0 0 4`."""
        at = [str(offset) for offset in self.offset[:16].tolist()]
        more = " …" if len(self.offset) > len(at) else ""
        return f"{len(self.offset)} blocks in {self.peak} rows, at {' '.join(at) or '-'}{more}"


def allocate(
    size: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    *,
    slack: float = PEAK_TOLERANCE,
) -> Allocation:
    """Offsets for blocks of rows such that few rows are needed, fast; see the top of the module.

    The peak is within `slack` of the live bound or no higher than that of `by_size`, unless there
    are more than `MAX_BLOCKS` blocks, or `MAX_EDGES` pairs of blocks that are alive at the same
    step.

    Args:
      size: int[N], rows of each block.
      first: int[N], the step that writes it.
      last: int[N], the last step that reads it.
      slack: a peak of `1 + slack` times the live bound is good enough; the larger, the faster.

    Returns:
      The `Allocation`, the same for the same arguments.

    Raises:
      ValueError: if a block has a negative size or ends before it begins.

    Examples:
      >>> print(allocate([8, 4, 4], first=[0, 2, 2], last=[1, 3, 3]))
      3 blocks in 8 rows, at 0 0 4
    """
    size, first, last = _blocks(size, first, last)
    best, bound = _scan_through_time(size, first, last)
    enough = (1 + slack) * bound
    if best.peak <= enough:
        return best
    pairs = int(_degree(first, last).sum()) // 2
    if pairs > MAX_EDGES or len(size) > MAX_BLOCKS:
        return best
    near = _Interference.of(first, last)
    orders = [_by_size(size), *(_by_edges(size, first, last, most) for most in (1, 3))]
    for turn in range(1 + min(SEARCH_PLACEMENTS, MAX_VISITED_EDGES // max(pairs, 1))):
        for k, order in enumerate(orders):
            allocation = near.place(size, order)
            if allocation.peak < best.peak:
                best = allocation
            if best.peak <= enough:
                return best
            at_peak = (allocation.offset + size)[order] == allocation.peak
            rank = np.arange(len(order)) + 0.5
            rank[at_peak] *= EARLIER_RANKS[turn % len(EARLIER_RANKS)]
            orders[k] = order[rank.argsort(kind="stable")]
        enough = (1 + max(slack, SEARCH_TOLERANCE)) * bound
    return best


def by_size(size: np.ndarray, first: np.ndarray, last: np.ndarray) -> Allocation:
    """Greedy by size, the baseline: the largest first, each as low as its lifetime allows."""
    size, first, last = _blocks(size, first, last)
    return _Interference.of(first, last).place(size, _by_size(size))


def live_bound(size: np.ndarray, first: np.ndarray, last: np.ndarray) -> int:
    """The most rows alive at one step, which no allocation can do without."""
    size, first, last = _blocks(size, first, last)
    begin, end = first.argsort(), last.argsort()
    begun = size[begin].cumsum()
    freed = np.concatenate([[0], size[end].cumsum()])
    return int((begun - freed[last[end].searchsorted(first[begin])]).max(initial=0))


def _blocks(size, first, last) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments as int64[N]; raises `ValueError` if these are no blocks."""
    size, first, last = (np.asarray(x, np.int64) for x in (size, first, last))
    if not size.shape == first.shape == last.shape == (size.size,):
        raise ValueError(
            f"`size`, `first` and `last` have the shapes {size.shape}, {first.shape} and "
            f"{last.shape}; expected three vectors of one length."
        )
    wrong = np.flatnonzero((size < 0) | (last < first))
    if len(wrong):
        i = wrong[0]
        raise ValueError(
            f"block {i} has {size[i]} rows from step {first[i]} to {last[i]}; expected no negative "
            "size and a last step that is not before the first."
        )
    return size, first, last


def _scan_through_time(
    size: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[Allocation, int]:
    """Each block in the smallest gap that fits when its time comes, the larger of a step first.

    Returns:
      (The places, the `live_bound`).
    """
    begin = np.lexsort((-size, first))
    begin = begin[size[begin] > 0]
    end = begin[last[begin].argsort(kind="stable")]
    ended = last[end].searchsorted(first[begin]).tolist()  # blocks that ended before each
    ending, rows, offsets = end.tolist(), size.tolist(), [0] * len(size)
    gaps = _Gaps()
    peak = freed = 0
    for i, before in zip(begin.tolist(), ended, strict=True):
        for j in ending[freed:before]:
            gaps.give(offsets[j], offsets[j] + rows[j])
        freed = before
        offsets[i] = gaps.take(rows[i])
        if gaps.top > peak:
            peak = gaps.top
    return Allocation(np.array(offsets, np.int64), peak), live_bound(size, first, last)


class _Gaps:
    """Free rows: gaps that touch no other, and all from `top` on."""

    def __init__(self):
        self.top = 0
        self.by_length: list[tuple[int, int]] = []  # (length, first row), ascending
        self.end: dict[int, int] = {}  # of the gap that begins there
        self.begin: dict[int, int] = {}  # of the gap that ends there

    def take(self, rows: int) -> int:
        """The first of rows in the smallest gap that fits, in the lowest of equal ones."""
        at = bisect_left(self.by_length, (rows, 0))
        if at == len(self.by_length):
            self.top += rows
            return self.top - rows
        length, low = self.by_length.pop(at)
        del self.end[low], self.begin[low + length]
        if length > rows:
            self._add(low + rows, low + length)
        return low

    def give(self, low: int, high: int) -> None:
        """Makes rows free, together with the gaps that they touch."""
        if high in self.end:
            high = self._drop(high, self.end[high])[1]
        if low in self.begin:
            low = self._drop(self.begin[low], low)[0]
        if high == self.top:
            self.top = low
        else:
            self._add(low, high)

    def _add(self, low: int, high: int) -> None:
        insort(self.by_length, (high - low, low))
        self.end[low], self.begin[high] = high, low

    def _drop(self, low: int, high: int) -> tuple[int, int]:
        del self.by_length[bisect_left(self.by_length, (high - low, low))]
        del self.end[low], self.begin[high]
        return low, high


@dataclasses.dataclass(frozen=True, eq=False)
class _Interference:
    """The interference graph of blocks, which are numbered here as they begin.

    Attributes:
      block: int64[N], the block of each number.
      earlier: for each number those below it that are still alive when it begins.
      later: for each number the end of those above it that begin while it is alive.
    """

    block: np.ndarray
    earlier: list[list[int]]
    later: list[int]

    @classmethod
    def of(cls, first: np.ndarray, last: np.ndarray) -> "_Interference":
        """The graph of blocks with these lifetimes."""
        block = first.argsort(kind="stable")
        ends = last[block].tolist()
        alive: list[int] = []
        earlier = []
        for number, begin in enumerate(first[block].tolist()):
            alive = [other for other in alive if ends[other] >= begin]
            earlier.append(alive)
            alive = [*alive, number]
        return cls(block, earlier, first[block].searchsorted(ends, "right").tolist())

    def place(self, size: np.ndarray, order: np.ndarray) -> Allocation:
        """One block after the other in the lowest rows that are free over its whole life."""
        number = np.empty_like(self.block)
        number[self.block] = np.arange(len(number))
        rows: list[tuple[int, int] | None] = [None] * len(number)
        for i, length in zip(number[order].tolist(), size[order].tolist(), strict=True):
            near = [rows[j] for j in self.earlier[i]]
            near += rows[i + 1 : self.later[i]]
            at = 0
            for low, high in sorted(filter(None, near)):
                if low - at >= length:
                    break
                if high > at:
                    at = high
            rows[i] = at, at + length
        offset = np.empty_like(self.block)
        offset[self.block] = [placed[0] for placed in rows if placed]
        offset[size == 0] = 0
        return Allocation(offset, int((offset + size).max(initial=0)))


def _degree(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int64[N], how many others are alive at a step at which a block is."""
    begun = np.sort(first).searchsorted(last, "right")
    return begun - np.sort(last).searchsorted(first) - 1


def _by_size(size: np.ndarray) -> np.ndarray:
    """int64[N], the largest block first."""
    return (-size).argsort(kind="stable")


def _by_edges(size: np.ndarray, first: np.ndarray, last: np.ndarray, most: int) -> np.ndarray:
    """int64[N], the order of NNC, with companions up to a tuple of `most` blocks."""
    degree = _degree(first, last)
    order = np.lexsort((-size, -degree))
    if most == 1:
        return order
    largest = np.lexsort((-degree, -size))
    remaining = np.ones(len(size), bool)
    sequence: list[int] = []
    for i in order.tolist():
        if not remaining[i]:
            continue
        together, fits = [i], remaining & (size > size[i])
        remaining[i] = False
        while len(together) < most:
            fits &= remaining & ((first > last[together[-1]]) | (last < first[together[-1]]))
            if not fits.any():
                break
            together.append(int(largest[fits[largest].argmax()]))
            remaining[together[-1]] = False
        sequence += sorted(together, key=first.__getitem__)
    return np.array(sequence, np.int64)
