"""Where every node of a scheduled graph is computed.

XLA compiles kernels of fixed width, batches have any number of nodes. Each batch is therefore
cut into chunks whose widths come from the short ladder of its type, and every type numbers its
*lanes*, one per node and some for padding, in the order in which they run:

    batches of type t      5 nodes      3 nodes         1 node
    chunks                 [ 8       ]  [2 ]  [2 ]      [2 ]
    lanes                  0 1 2 3 4·   8 9   10·       12·         · repeats a live lane

The nodes of a batch run in ascending order, so a node's lane follows from its batch, and the
result `s` of type `t` in lane `i` is row `base[t, s] + i` of the arena of its value type. How a
batch is cut depends on its size alone, never on what was compiled before: the same minibatch
gives the same bits in every program.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jedbatch._graph import Graph
from jedbatch._paths import pointers, ranges
from jedbatch._schedule import Schedule

CHUNK = 9e5  # floating-point operations a core does while a chunk is started


@dataclass(frozen=True)
class Ladder:
    """The widths of chunks of one node type.

    Attributes:
      widths: in lanes, ascending; each is a program of its own to compile.
      overhead: what starting a chunk costs, in lanes.
    """

    widths: tuple[int, ...]
    overhead: int = 4

    @functools.cached_property
    def _cheapest(self) -> np.ndarray:
        """int32[2 * widest + 1, widths]: chunks that cover n lanes at least cost."""
        most = 2 * self.widths[-1]
        cost = np.zeros(most + 1)
        trips = np.zeros((most + 1, len(self.widths)), np.int32)
        for n in range(1, most + 1):
            left = [max(0, n - w) for w in self.widths]
            costs = [cost[k] + self.overhead + w for k, w in zip(left, self.widths, strict=True)]
            best = int(np.argmin(costs))
            cost[n] = costs[best]
            trips[n] = trips[left[best]]
            trips[n, best] += 1
        return trips

    def cover(self, sizes: np.ndarray) -> np.ndarray:
        """int32[len(sizes), widths]: chunks of each width that a batch of each size takes."""
        widest = self.widths[-1]
        full = np.maximum(0, (sizes - widest) // widest)
        trips = self._cheapest[sizes - full * widest]
        trips[:, -1] += full.astype(np.int32)
        return trips

    def lanes(self, trips: np.ndarray) -> np.ndarray:
        """Lanes in chunks of each width, padding included."""
        return trips[..., : len(self.widths)] @ np.array(self.widths)


FINE = Ladder((2, 8, 32, 128, 512))
COARSE = Ladder((8, 64, 512), 64)
BLOCKS = Ladder((8, 64, 512))  # of lanes whose weight gradients are computed together
NUM_WIDTHS = len(FINE.widths)  # of the longest ladder


@functools.cache
def ladder_for(work: int) -> Ladder:
    """The ladder for a lane of so many floating-point operations.

    Light lanes are padded generously and compiled in few widths; heavy ones are not.
    """
    overhead = 4
    while overhead < 64 and overhead * work < CHUNK:
        overhead *= 2
    return Ladder(FINE.widths if overhead <= 16 else COARSE.widths, overhead)


@dataclass(frozen=True, eq=False)
class Layout:
    """Lanes of a scheduled graph.

    Attributes:
      trips: int32[S, NUM_WIDTHS], chunks of each width of every batch.
      start: int64[S], the lane of its type in which each batch begins.
      lane_ptr: int64[T + 1], the lanes of each type, padding included.
      lane_node: int32[lanes], the node whose operands are read in each lane.
      lane: int64[N], the lane of its type in which each node is computed.
    """

    trips: np.ndarray
    start: np.ndarray
    lane_ptr: np.ndarray
    lane_node: np.ndarray
    lane: np.ndarray

    @property
    def lanes(self) -> np.ndarray:
        """int64[T], lanes of each type."""
        return np.diff(self.lane_ptr)

    def check(self, graph: Graph) -> None:
        """Raises `ValueError` unless every node has one lane of its own."""
        place = self.lane_ptr[graph.node_type] + self.lane
        if len(np.unique(place)) != len(place):
            raise ValueError("not a valid layout: two nodes share a lane")
        if (self.lane_node[place] != np.arange(len(place))).any():
            raise ValueError("not a valid layout: a lane computes another node")


def assign_lanes(graph: Graph, schedule: Schedule, ladders: Sequence[Ladder | None]) -> Layout:
    """Cuts the batches of a schedule into chunks and numbers the lanes of every type.

    `ladders` has the ladder of each type id, or None where a type has no nodes.
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

    within = ranges(np.zeros(len(schedule), np.int64), padded[by_type])
    last = (sizes[by_type] - 1).repeat(padded[by_type])
    first = schedule.node_ptr[:-1][by_type].repeat(padded[by_type])
    lane_node = schedule.node[first + np.minimum(within, last)]
    lane = np.empty(len(graph.node_type), np.int64)
    lane[schedule.node] = ranges(start, sizes)
    return Layout(trips, start, lane_ptr, lane_node, lane)
