"""Layouts: the lane of every node, the row of every value.

Every type numbers its *lanes*, one per node and some for padding, in the order in which they run:

    batches of type t      5 nodes      3 nodes         1 node
    chunks                 [ 8       ]  [2 ]  [2 ]      [2 ]
    lanes                  0 1 2 3 4·   8 9   10·       12·         · repeats a live lane

The nodes of a batch run in an order (see `_layout.node_order`) that makes operands slices. Its
results are written next to each other: the rows of result `s` of a batch are a *block* as long as
its lanes.

For training every block has rows of its own, which the reverse sweep reads: all results of one
type follow one another in a *space* of theirs, and the row is the lane. In inference, where it
saves much, rows are used again once they are not read any more (see `_layout.allocator`): all
results of one shape and dtype share a space.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.types import NodeType
from jedbatch._layout.allocator import Allocation, allocate
from jedbatch._layout.bucketing import FINE_BUCKETS, NUM_WIDTHS, Buckets
from jedbatch._layout.explain import explain
from jedbatch._layout.live_ranges import find_live_ranges
from jedbatch._layout.node_order import ORDERS, checked_order
from jedbatch._schedule.schedule import Schedule
from jedbatch._support.types import OrderName

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64


ROW_TOLERANCE = 0.1  # of rows over those alive at a time, for which planning looks no further


@dataclass(frozen=True, eq=False)
class Layout:
    """Lanes and rows of a scheduled graph.

    Letters: `S` batches, `N` nodes, `T` types, `R` most results of a type, `V` values, `W` widths.

    Attributes:
      graph, schedule: what is laid out.
      order: how nodes are ordered inside of batches.
      node: int32[N], the nodes of every batch in the order of their lanes.
      trips: int32[S, W], chunks of each width of every batch.
      padded: int64[S], lanes of each batch, padding included.
      start: int64[S], the lane of its type in which each batch begins.
      lane_ptr: int64[T + 1], the lanes of each type, padding included.
      lane_node: int32[lanes], the node whose operands are read in each lane.
      lane: int64[N], the lane of its type in which each node is computed.
      space: int32[T, R], where the results of each type are kept.
      block: int64[S, R], the row of its space in which each block begins.
      rows: int64[spaces], the rows of each space.
    """

    graph: Graph
    schedule: Schedule
    order: str
    node: Int32[np.ndarray, " N"]
    trips: Int32[np.ndarray, "S W"]
    padded: Int64[np.ndarray, " S"]
    start: Int64[np.ndarray, " S"]
    lane_ptr: Int64[np.ndarray, " T+1"]
    lane_node: Int32[np.ndarray, " lanes"]
    lane: Int64[np.ndarray, " N"]
    space: Int32[np.ndarray, "T R"]
    block: Int64[np.ndarray, "S R"]
    rows: Int64[np.ndarray, " spaces"]

    @property
    def lanes(self) -> Int64[np.ndarray, " T"]:
        """int64[T], lanes of each type."""
        return self.lane_ptr[1:] - self.lane_ptr[:-1]

    @functools.cached_property
    def counts(self) -> tuple[int, int, int, tuple[tuple[NodeType, int, int], ...]]:
        """(nodes, batches, lanes, (type, batches, nodes) of every type that runs)."""
        batches = np.bincount(self.schedule.batch_type)
        nodes = self.graph.nodes_per_type
        ran = tuple(
            (self.graph.types[t], int(batches[t]), int(nodes[t])) for t in self.graph.present_types
        )
        return int(nodes.sum()), len(self.schedule), int(self.lane_ptr[-1]), ran

    @functools.cached_property
    def widest(self) -> Int64[np.ndarray, " T"]:
        """int64[T], the number of widths that the chunks of each type need."""
        of_batch = ((self.trips > 0) * np.arange(1, NUM_WIDTHS + 1)).max(axis=1)
        widest = np.zeros(len(self.lane_ptr) - 1, np.int64)
        np.maximum.at(widest, self.schedule.batch_type, of_batch)
        return widest

    @functools.cached_property
    def values(self) -> tuple[Int32[np.ndarray, " V"], Int64[np.ndarray, " V"]]:
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

        Returns:
          The text, a line per batch and operand.
        """
        return explain(self)

    def __str__(self) -> str:
        rows = int(self.rows.sum())
        num_results = int(np.repeat(self.lanes, [t.num_results for t in self.graph.types]).sum())
        return (
            f"Layout of {len(self.node)} nodes in {len(self.start)} batches: order {self.order}, "
            f"{rows} rows for {num_results} results with padding"
        )

    def check(self, graph: Graph) -> None:
        """Raises `ValueError` unless nodes have their own lanes, and live values their own rows.

        Args:
          graph: the graph that was laid out.
        """
        place = self.lane_ptr[graph.node_type] + self.lane
        if len(np.unique(place)) != len(place):
            raise ValueError("not a valid layout: two nodes share a lane")
        if (self.lane_node[place] != np.arange(len(place))).any():
            raise ValueError("not a valid layout: a lane computes another node")
        blocks = find_live_ranges(graph, self.schedule, self.padded)
        space = self.space[self.schedule.batch_type[blocks.batch], blocks.slot]
        first = self.block[blocks.batch, blocks.slot]
        if (first < 0).any() or (first + blocks.size > self.rows[space]).any():
            raise ValueError("not a valid layout: a block lies outside of its space")
        for s in range(len(self.rows)):
            blocks_here = np.flatnonzero(space == s)
            Allocation(first[blocks_here], int(self.rows[s])).check(
                blocks.size[blocks_here], blocks.batch[blocks_here], blocks.last[blocks_here]
            )


def assign_lanes(
    graph: Graph,
    schedule: Schedule,
    buckets_by_type: Sequence[Buckets | None],
    order: str = "auto",
    node: np.ndarray | None = None,
    weight: np.ndarray | None = None,
) -> Layout:
    """Cuts the batches of a schedule into chunks and numbers the lanes of every type.

    Every value has a row of its own.

    Args:
      graph: the graph.
      schedule: its batches.
      buckets_by_type: the buckets of each type id, or None for a type without nodes.
      order: of the nodes inside of batches.
      node: int32[N], the nodes in this order, if it is known.
      weight: int64[N], lanes that each node takes one after the other, if they are several. Then
        `lane` is the first one of each, and `lane_node` is left out.
    """
    node = ORDERS[order](graph, schedule) if node is None else node
    node_ptr = schedule.node_ptr
    if weight is not None:
        node_ptr = pointers(weight[node])[node_ptr]
    counts = graph.results_per_type
    space = _spaces(counts.tobytes())
    trips, padded, start, lane_ptr = _cut(graph, schedule, node_ptr, buckets_by_type)
    block = start[:, None].repeat(space.shape[1], axis=1)
    rows = (lane_ptr[1:] - lane_ptr[:-1]).repeat(counts)
    if weight is None:
        first = start + lane_ptr[schedule.batch_type]
        lane_node, lane = _number_lanes(node, node_ptr, start, first, padded)
    else:
        lane_node, lane = np.zeros(0, np.int32), np.empty(len(node), np.int64)
        sizes = np.diff(schedule.node_ptr)
        lane[node] = pointers(weight[node])[:-1] + (start - node_ptr[:-1]).repeat(sizes)
    lanes = trips, padded, start, lane_ptr, lane_node, lane
    return Layout(graph, schedule, order, node, *lanes, space, block, rows)


def _cut(
    graph: Graph,
    schedule: Schedule,
    node_ptr: np.ndarray,
    buckets_by_type: Sequence[Buckets | None],
) -> tuple[np.ndarray, ...]:
    """Returns (trips, lanes of each batch with padding, start, lane_ptr); see `Layout`."""
    sizes = node_ptr[1:] - node_ptr[:-1]
    trips = np.zeros((len(schedule), NUM_WIDTHS), np.int32)
    padded = np.zeros(len(schedule), np.int64)
    numbers: dict[Buckets | None, int] = {}
    number_of = [numbers.setdefault(buckets, len(numbers)) for buckets in buckets_by_type]
    number = np.array(number_of, np.int64)[schedule.batch_type]
    for buckets, k in numbers.items():
        if buckets is None:
            continue
        (batch_ids,) = (number == k).nonzero()
        chunks = buckets.cover(sizes[batch_ids])
        trips[batch_ids, : chunks.shape[1]] = chunks
        padded[batch_ids] = buckets.lanes(chunks)
    by_type = np.argsort(schedule.batch_type, kind="stable")
    begins = pointers(padded[by_type])[:-1]
    total = np.bincount(schedule.batch_type, weights=padded, minlength=len(graph.types))
    lane_ptr = pointers(total.astype(np.int64))
    start = np.empty(len(schedule), np.int64)
    start[by_type] = begins - lane_ptr[schedule.batch_type[by_type]]
    return trips, padded, start, lane_ptr


@functools.lru_cache(256)
def _spaces(results_per_type: bytes) -> np.ndarray:
    """Returns int32[T, R], a space for each result of each type or -1."""
    counts = np.frombuffer(results_per_type, np.int32)
    most = int(counts.max(initial=0))
    space = np.full((len(counts), most), -1, np.int32)
    filled = np.arange(most) < counts[:, None]
    space[filled] = np.arange(int(filled.sum()))
    space.flags.writeable = False  # of many layouts
    return space


def _number_lanes(
    node: np.ndarray, node_ptr: np.ndarray, start: np.ndarray, first: np.ndarray, padded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int32[lanes], the node of every lane; int64[N], the lane of every node).

    Lanes beyond the nodes of a batch compute the last one again.

    Args:
      node: int32[N], the nodes of every batch.
      node_ptr: int64[S + 1], where those of each begin.
      start: int64[S], the lane of its type in which each batch begins.
      first: int64[S], the same among the lanes of all types.
      padded: int64[S], lanes of each batch.
    """
    lane_node, lane = np.empty(int(padded.sum()), np.int32), np.empty(len(node), np.int64)
    sizes, places = node_ptr[1:] - node_ptr[:-1], np.arange(len(node))
    lane[node] = places + (start - node_ptr[:-1]).repeat(sizes)
    lane_node[places + (first - node_ptr[:-1]).repeat(sizes)] = node
    lane_node[ranges(first + sizes, padded - sizes)] = node[node_ptr[1:] - 1].repeat(padded - sizes)
    return lane_node, lane


def share_rows(
    layout: Layout, arena: np.ndarray, num_arenas: int, slack: float = ROW_TOLERANCE
) -> Layout:
    """Returns the layout with rows used again after their last read.

    `arena`, int32[T, R], is where the results of each type may be kept; blocks in one arena share
    its rows. Peaks may be above what is alive at a time by `slack`, a share of it.
    """
    graph, schedule = layout.graph, layout.schedule
    blocks = find_live_ranges(graph, schedule, layout.padded)
    where = arena[schedule.batch_type[blocks.batch], blocks.slot]
    block = np.full_like(layout.block, -1)
    rows = np.zeros(num_arenas, np.int64)
    for a in range(num_arenas):
        block_ids = np.flatnonzero(where == a)
        allocation = allocate(
            blocks.size[block_ids], blocks.batch[block_ids], blocks.last[block_ids], slack=slack
        )
        block[blocks.batch[block_ids], blocks.slot[block_ids]] = allocation.offset
        rows[a] = allocation.peak
    return replace(layout, space=arena.astype(np.int32), block=block, rows=rows)


def layout(
    graph: Graph, schedule: Schedule, *, order: OrderName = "auto", reuse: bool = True
) -> Layout:
    """Returns lanes and rows of a scheduled graph.

    Args:
      graph: any graph; in a bare one all results count as equally large.
      schedule: its batches.
      order: of the nodes inside of batches: "append", as they were recorded; "longest", those with
        the longest way to go first; "reader", as they are read; "pq", as a PQ-tree plans them;
        or "auto", which is "longest" where types make chains and "append" elsewhere.
      reuse: whether rows are used again after their last read, as in inference.

    Returns:
      The layout; print its `explain()`.

    Raises:
      TypeError: these are no graph and no schedule.
      ValueError: there is no such order, or this is no schedule of the graph.

    Examples:
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
    buckets = [FINE_BUCKETS if n else None for n in graph.nodes_per_type]
    lanes = assign_lanes(graph, schedule, buckets, order)
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
