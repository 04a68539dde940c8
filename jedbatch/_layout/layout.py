"""Where everything is: the lane of every node, the row of every value.

Every type numbers its *lanes*, one per node and some for padding, in the order in which they run:

    batches of type t      5 nodes      3 nodes         1 node
    chunks                 [ 8       ]  [2 ]  [2 ]      [2 ]
    lanes                  0 1 2 3 4·   8 9   10·       12·         · repeats a live lane

The nodes of a batch run in an order (see `_layout.node_order`) that makes operands slices. Its
results are written next to each other: the rows of result `s` of a batch are a *block* as long as
its lanes.

For training every block has rows of its own, which the reverse sweep reads: all results of one
type follow one another in a *space* of theirs, and the row is the lane. In inference, where it
saves much, rows are used again once nobody reads them any more (see `_layout.allocator`): all
results of one shape and dtype share a space.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.paths import pointers, ranges
from jedbatch._layout.access import GATHER, NAMES, find_modes
from jedbatch._layout.allocator import Allocation, allocate
from jedbatch._layout.bucketing import FINE, NUM_WIDTHS, Ladder
from jedbatch._layout.node_order import ORDERS, checked_order
from jedbatch._schedule.schedule import Schedule

SPARE = 0.1  # of rows over those alive at a time, for which planning looks no further


@dataclass(frozen=True, eq=False)
class Layout:
    """Lanes and rows of a scheduled graph.

    Letters: `S` batches, `N` nodes, `T` types, `R` most results of a type, `V` values.

    Attributes:
      graph, schedule: what is laid out.
      order: how nodes are ordered inside of batches.
      node: int32[N], the nodes of every batch in the order of their lanes.
      trips: int32[S, NUM_WIDTHS], chunks of each width of every batch.
      start: int64[S], the lane of its type in which each batch begins.
      lane_ptr: int64[T + 1], the lanes of each type, padding included.
      lane_node: int32[lanes], the node whose operands are read in each lane.
      lane: int64[N], the lane of its type in which each node is computed.
      space: int32[T, R], where the results of each type are kept.
      block: int64[S, R], the row of its space in which each block begins.
      rows: int64[...], the rows of each space.
    """

    graph: Graph
    schedule: Schedule
    order: str
    node: np.ndarray
    trips: np.ndarray
    start: np.ndarray
    lane_ptr: np.ndarray
    lane_node: np.ndarray
    lane: np.ndarray
    space: np.ndarray
    block: np.ndarray
    rows: np.ndarray

    @property
    def lanes(self) -> np.ndarray:
        """int64[T], lanes of each type."""
        return np.diff(self.lane_ptr)

    @functools.cached_property
    def padded(self) -> np.ndarray:
        """int64[S], lanes of each batch, padding included."""
        by_type = np.argsort(self.schedule.batch_type, kind="stable")
        types = self.schedule.batch_type[by_type]
        ends = np.append(self.start[by_type][1:] + self.lane_ptr[types[1:]], self.lane_ptr[-1])
        padded = np.empty(len(self.start), np.int64)
        padded[by_type] = ends - self.start[by_type] - self.lane_ptr[types]
        return padded

    @functools.cached_property
    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """(int32[V], int64[V]): the space and the row in which each value is kept."""
        graph = self.graph
        maker, slot = graph.value_node, graph.value_slot
        batch = self.schedule.batch[maker]
        row = self.block[batch, slot] + self.lane[maker] - self.start[batch]
        return self.space[graph.node_type[maker], slot], row

    def explain(self) -> str:
        """Per batch and operand: whether its rows are a slice, or must be gathered, and why.

        A program may gather what could be a slice, where slices are too rare to be worth compiling
        for; `print(plan)` says how many bytes it reads in which way.
        """
        return _explain(self)

    def __str__(self) -> str:
        rows = int(self.rows.sum())
        own = int(np.repeat(self.lanes, [t.num_results for t in self.graph.types]).sum())
        return (
            f"Layout of {len(self.node)} nodes in {len(self.start)} batches: order {self.order}, "
            f"{rows} rows for {own} results with padding"
        )

    def check(self, graph: Graph) -> None:
        """Raises `ValueError` unless nodes have their own lanes, and live values their own rows."""
        place = self.lane_ptr[graph.node_type] + self.lane
        if len(np.unique(place)) != len(place):
            raise ValueError("not a valid layout: two nodes share a lane")
        if (self.lane_node[place] != np.arange(len(place))).any():
            raise ValueError("not a valid layout: a lane computes another node")
        blocks = find_blocks(graph, self.schedule, self.padded)
        space = self.space[self.schedule.batch_type[blocks.batch], blocks.slot]
        first = self.block[blocks.batch, blocks.slot]
        if (first < 0).any() or (first + blocks.size > self.rows[space]).any():
            raise ValueError("not a valid layout: a block lies outside of its space")
        for s in range(len(self.rows)):
            mine = np.flatnonzero(space == s)
            Allocation(first[mine], int(self.rows[s])).check(
                blocks.size[mine], blocks.batch[mine], blocks.last[mine]
            )


@dataclass(frozen=True, eq=False)
class Blocks:
    """The results of every batch: one block for each of them.

    Attributes:
      batch: int64[K], which batch computes it.
      slot: int64[K], which of its results it holds.
      size: int64[K], rows, padding included.
      last: int64[K], the last batch that reads one of the rows; as many as there are batches if
        one of them is returned.
    """

    batch: np.ndarray
    slot: np.ndarray
    size: np.ndarray
    last: np.ndarray


def last_reads(graph: Graph, schedule: Schedule) -> np.ndarray:
    """int64[V], the last batch that needs each value: its own, or a reader's, or none but the end.

    The number of batches stands for the end, for values that are returned.
    """
    batch = schedule.batch
    last = batch[graph.value_node]
    reader = np.repeat(np.arange(len(batch)), np.diff(graph.operand_ptr))
    read = np.flatnonzero(graph.operand >= 0)
    np.maximum.at(last, graph.operand[read], batch[reader[read]])
    last[graph.outputs[graph.outputs >= 0]] = len(schedule)
    return last


def find_blocks(graph: Graph, schedule: Schedule, padded: np.ndarray) -> Blocks:
    """The blocks of a schedule whose batches have so many lanes."""
    value_last = last_reads(graph, schedule)
    counts = np.array([t.num_results for t in graph.types], np.int64)[schedule.batch_type]
    batch = np.repeat(np.arange(len(schedule)), counts)
    slot = ranges(np.zeros(len(schedule), np.int64), counts)
    last = np.empty(len(batch), np.int64)
    for s in range(int(counts.max(initial=0))):
        has = graph.num_results[schedule.node] > s
        of_node = np.where(has, graph.value_ptr[schedule.node] + s, 0)
        latest = np.maximum.reduceat(value_last[of_node], schedule.node_ptr[:-1])
        mine = np.flatnonzero(slot == s)
        last[mine] = latest[batch[mine]]
    return Blocks(batch, slot, padded[batch], last)


def assign_lanes(
    graph: Graph, schedule: Schedule, ladders: Sequence[Ladder | None], order: str = "auto"
) -> Layout:
    """Cuts the batches of a schedule into chunks and numbers the lanes of every type.

    `ladders` has the ladder of each type id, or None where a type has no nodes. Every value has a
    row of its own.
    """
    sizes = np.diff(schedule.node_ptr)
    trips = np.zeros((len(schedule), NUM_WIDTHS), np.int32)
    padded = np.zeros(len(schedule), np.int64)
    for ladder in {ladder for ladder in ladders if ladder is not None}:
        has = np.array([other == ladder for other in ladders])
        mine = np.flatnonzero(has[schedule.batch_type])
        found = ladder.cover(sizes[mine])
        trips[mine, : found.shape[1]] = found
        padded[mine] = ladder.lanes(found)
    by_type = np.argsort(schedule.batch_type, kind="stable")
    begins = pointers(padded[by_type])[:-1]
    total = np.bincount(schedule.batch_type, weights=padded, minlength=len(graph.types))
    lane_ptr = pointers(total.astype(np.int64))
    start = np.empty(len(schedule), np.int64)
    start[by_type] = begins - lane_ptr[schedule.batch_type[by_type]]

    node = ORDERS[order](graph, schedule)
    within = ranges(np.zeros(len(schedule), np.int64), padded[by_type])
    last = (sizes[by_type] - 1).repeat(padded[by_type])
    first = schedule.node_ptr[:-1][by_type].repeat(padded[by_type])
    lane_node = node[first + np.minimum(within, last)]
    lane = np.empty(len(graph.node_type), np.int64)
    lane[node] = ranges(start, sizes)

    counts = [t.num_results for t in graph.types]
    most = max(counts, default=0)
    space = np.full((len(counts), most), -1, np.int32)
    filled = np.arange(most) < np.array(counts, np.int64).reshape(-1, 1)
    space[filled] = np.arange(int(filled.sum()))
    block = np.repeat(start[:, None], most, axis=1)
    rows = np.repeat(np.diff(lane_ptr), counts)
    return Layout(
        graph, schedule, order, node, trips, start, lane_ptr, lane_node, lane, space, block, rows
    )


def share_rows(layout: Layout, arena: np.ndarray, num_arenas: int, slack: float = SPARE) -> Layout:
    """The layout with rows used again once nobody reads them.

    `arena`, int32[T, R], is where the results of each type may be kept; blocks in one arena share
    its rows. Peaks may be above what is alive at a time by `slack`, a share of it.
    """
    graph, schedule = layout.graph, layout.schedule
    blocks = find_blocks(graph, schedule, layout.padded)
    where = arena[schedule.batch_type[blocks.batch], blocks.slot]
    block = np.full_like(layout.block, -1)
    rows = np.zeros(num_arenas, np.int64)
    for a in range(num_arenas):
        mine = np.flatnonzero(where == a)
        found = allocate(blocks.size[mine], blocks.batch[mine], blocks.last[mine], slack=slack)
        block[blocks.batch[mine], blocks.slot[mine]] = found.offset
        rows[a] = found.peak
    return replace(layout, space=arena.astype(np.int32), block=block, rows=rows)


def layout(graph: Graph, schedule: Schedule, *, order: str = "auto", reuse: bool = True) -> Layout:
    """Where a scheduled graph would be computed and kept.

    Args:
      graph: any graph; in a bare one all results count as equally large.
      schedule: its batches.
      order: of the nodes inside of batches: "append", as they were recorded; "longest", those with
        the longest way to go first; "reader", as they are read; "pq", as a PQ-tree plans them;
        or "auto", which is "longest" where types make chains and "append" elsewhere.
      reuse: whether rows are used again once nobody reads them, as in inference.

    Returns:
      The layout; print its `explain()`.

    Raises:
      TypeError: these are no graph and no schedule.
      ValueError: there is no such order, or this is no schedule of the graph.

    Example:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 0, 1, 1], [[], [], [0], [1]])
      >>> batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
      >>> print(jedbatch.layout(graph, batches).explain())
      Layout of 4 nodes in 2 batches: order auto, 4 rows for 4 results with padding
        batches      nodes        type: how each operand is read
        0            2            type 0: reads nothing
        1            2            type 1: 0 slice

    References:
      Chen et al., ED-Batch, ICML 2023, section 4; the allocator of libnnc.
    """
    checked_order(order, "`layout` got order")
    checks.flag("layout", "reuse", reuse)
    checked_graph("layout", graph)
    instead = "`jedbatch.schedule(graph, policy)` makes one."
    checks.of_type("layout", schedule, Schedule, "a schedule of the graph", instead)
    schedule.check(graph)
    present = np.bincount(graph.node_type, minlength=len(graph.types)) > 0
    lanes = assign_lanes(graph, schedule, [FINE if p else None for p in present], order)
    if not reuse:
        return lanes
    kinds: dict[Any, int] = {}
    arena = np.full(lanes.space.shape, -1)
    for t, node_type in enumerate(graph.types):
        for s in range(node_type.num_results):
            result = node_type.results[s] if node_type.results else None
            kind = result and (result.shape, result.dtype)
            arena[t, s] = kinds.setdefault(kind, len(kinds))
    return share_rows(lanes, arena, len(kinds), slack=0)


# --- explained --------------------------------------------------------------------------


def _explain(layout: Layout) -> str:
    """Per batch and operand: slice or gather, and why."""
    graph, schedule = layout.graph, layout.schedule
    sizes = np.diff(schedule.node_ptr)
    space, row = _places(layout)
    lines: list[tuple[str, list[str]]] = []
    for i, t in enumerate(schedule.batch_type.tolist()):
        nodes = layout.node[schedule.node_ptr[i] : schedule.node_ptr[i + 1]]
        first = graph.operand_ptr[nodes]
        arity = int((graph.operand_ptr[nodes + 1] - first).min())
        operands = (graph.operand[first + j] for j in range(arity))
        words = [_explain_operand(layout, values, space, row) for values in operands]
        lines.append((graph.types[t].name, words))
    text = [str(layout), "  batches      nodes        type: how each operand is read"]
    begin = 0
    for i in range(1, len(lines) + 1):
        if i < len(lines) and lines[i] == lines[begin]:
            continue
        name, words = lines[begin]
        which = f"{begin}" if i == begin + 1 else f"{begin}–{i - 1}"
        most, least = int(sizes[begin:i].max()), int(sizes[begin:i].min())
        count = f"{most}" if most == least else f"{least}–{most}"
        text.append(f"  {which:11}  {count:11}  {name}: {_counted(words) or 'reads nothing'}")
        begin = i
    return "\n".join(text)


def _places(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """(int64[V + I], int64[V + I]): space and row of every value and input; input i is at -1 - i.

    Inputs of one shape and dtype have a space, beyond those of results.
    """
    graph = layout.graph
    space, row = (np.append(x, np.zeros(graph.num_inputs, np.int64)) for x in layout.values)
    kinds: dict[Any, int] = {}
    met: dict[Any, int] = {}
    first = 0
    for chunk in graph.inputs:
        kind = chunk.type.shape, chunk.type.dtype
        mine = -1 - np.arange(first, first + len(chunk))
        space[mine] = len(layout.rows) + kinds.setdefault(kind, len(kinds))
        row[mine] = met.get(kind, 0) + np.arange(len(chunk))
        met[kind] = met.get(kind, 0) + len(chunk)
        first += len(chunk)
    return space, row


def _counted(words: Sequence[str]) -> str:
    """The words in a row, equal neighbours once: `0–1 slice · 2 gather (...)`."""
    parts = []
    begin = 0
    for j in range(1, len(words) + 1):
        if j == len(words) or words[j] != words[begin]:
            which = f"{begin}" if j == begin + 1 else f"{begin}–{j - 1}"
            parts.append(f"{which} {words[begin]}")
            begin = j
    return " · ".join(parts)


def _explain_operand(layout: Layout, values: np.ndarray, space: np.ndarray, row: np.ndarray) -> str:
    """How one operand of one batch is read over its live lanes."""
    inputs = values < 0
    if inputs.any() and not inputs.all():
        return "gather (inputs and results)"
    if len(np.unique(space[values])) == 1:
        everything = np.full((1, 1), len(values))
        mode = int(find_modes(row[values][None], np.zeros(1, np.int64), everything)[0, 0])
        if mode != GATHER:
            return NAMES[mode]
    if len(np.unique(values)) < len(values):
        return "gather (some rows more than once)"
    if inputs.all():
        return "gather (inputs lie in the order of instances)"
    graph = layout.graph
    batches = len(np.unique(layout.schedule.batch[graph.value_node[values]]))
    if batches > 1:
        return f"gather (from {batches} batches)"
    return "gather (in another order than they were computed)"
