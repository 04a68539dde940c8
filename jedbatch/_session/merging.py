"""`Merging`: whether the operations of a function without cells become larger nodes.

A function in plain `jax.numpy` is recorded operation by operation, and may take twice as long to
run as one with cells. Where nobody has chosen a granularity, its first minibatches are therefore
recorded once more, in the way of `granularity="auto"` (see `_record.granularity.fuse`), as soon as
there is enough to see, and the two graphs are compared before a program is made. Operations are
merged from then on if that makes nodes, batches and types fewer by a stated part; if not, or if the
function calls cells, nothing changes. It is decided once.

Where operations that follow on each other are always different ones, as in expressions of single
operations, there is nothing to merge, and a node an operation is what cells would give.
"""

from collections.abc import Sequence

from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._graph.types import operation_of
from jedbatch._record.granularity.fuse import Blocks
from jedbatch._record.registry import Registry
from jedbatch._schedule.heuristics import agenda
from jedbatch._schedule.policy import schedule

MIN_INSTANCES = 8  # recorded in both ways before it is decided
MIN_NODES = 512  # recorded before that is begun
FEWER = 2 / 3  # merging pays if this part of nodes and of batches is left, or less


class Merging:
    """What the first minibatches of a function say.

    Args:
      registry: where types are interned.

    Attributes:
      blocks: that merge operations, and learn from these minibatches.
      is_decided: whether enough has been met.
      pays: whether operations are to be merged.
    """

    def __init__(self, registry: Registry):
        self.blocks = Blocks(registry)
        self.is_decided = False
        self.pays = False
        self._num_nodes = 0
        self._num_compared = 0

    def asks(self, records: Sequence[Record]) -> bool:
        """Returns whether to record these new instances again, with `blocks`, and compare them."""
        graph = records[0].whole
        if len(graph.node_type) <= len(records):  # one operation or none
            return False
        if any(_is_cell(graph, t) for t in graph.present_types):
            self.is_decided = True
        self._num_nodes += len(graph.node_type)
        return not self.is_decided and self._num_nodes >= MIN_NODES

    def compare(self, records: Sequence[Record], merged: Sequence[Record]) -> None:
        """Decides, if enough has been met, by the instances at hand recorded in both ways."""
        before, after = records[0].whole, merged[0].whole
        self._num_compared += len(records)
        if self._num_compared < MIN_INSTANCES:
            return
        self.is_decided = True
        counts = zip(_counts(before), _counts(after), strict=True)
        (types, types_left), *others = counts
        self.pays = types_left <= types and all(left <= FEWER * num for num, left in others)


def _is_cell(graph: Graph, node_type: int) -> bool:
    key = operation_of(graph.types[node_type]).key[0]
    return isinstance(key, tuple) and key[0] == "cell"


def _counts(graph: Graph) -> tuple[int, int, int]:
    """(types, nodes, batches) of a graph."""
    return len(graph.present_types), len(graph.node_type), len(schedule(graph, agenda))
