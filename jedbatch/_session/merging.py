"""`Merging`: whether the operations of a function without cells become larger nodes.

A function in plain `jax.numpy` is recorded operation by operation, and may take twice as long to
run as one with cells. Where nobody has chosen a granularity, its first minibatches are therefore
recorded once more, in the way of `granularity="auto"` (see `_record.granularity.fuse`), as soon as
there is enough to see, and the two graphs are compared before a program is made. Operations are
merged from then on if that makes nodes, batches and types fewer by a stated part; if not, or if the
function calls cells, nothing changes. It is decided once.

What is merged is still recorded operation by operation where an instance has not been met before,
at about ten microseconds each. If that goes on, it is warned of.

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
from jedbatch._session.degenerate import warn_once
from jedbatch.errors import NoCellsWarning

MIN_INSTANCES = 8  # recorded in both ways before it is decided
MIN_NODES = 512  # recorded before that is begun
SLOW_PLANS = 8  # in a row, of which each
MANY_OPERATIONS = 4096  # were recorded for
MANY_A_NODE = 4  # and so many became a node
FEWER = 2 / 3  # merging pays if this part of nodes and of batches is left, or less


class Merging:
    """The comparison of granularities on the first minibatches of a function.

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


class Unmarked:
    """How much is recorded of a function that has no cells, though it has something to mark.

    Args:
      registry: which warnings there have been.
      blocks: that merge operations.
    """

    def __init__(self, registry: Registry, blocks: Blocks):
        self._warned = registry.warned
        self._blocks = blocks
        self._in_a_row = 0

    def note(self, records: Sequence[Record]) -> None:
        """Notes the new instances of a minibatch; warns if there are many again and again."""
        num_operations = self._blocks.num_operations
        num_nodes = len(records[0].whole.node_type) if records else 0
        many = num_operations >= max(MANY_OPERATIONS, MANY_A_NODE * num_nodes)
        self._in_a_row = self._in_a_row + 1 if records and many else 0
        if self._in_a_row < SLOW_PLANS:
            return
        block = self._blocks.largest
        most = len(block.pattern.types)
        warn_once(
            NoCellsWarning,
            f"{self._in_a_row} minibatches in a row were recorded operation by operation, the last "
            f"one as {num_operations} of them, about ten microseconds each, and merged into "
            f"{num_nodes} nodes. A call of a cell is recorded at once: write `@jedbatch.cell` on "
            f"what is done for one node, such as the {most} operations in `{block.name}` "
            f"({block.line})",
            self._warned,
        )


def _is_cell(graph: Graph, node_type: int) -> bool:
    key = operation_of(graph.types[node_type]).key[0]
    return isinstance(key, tuple) and key[0] == "cell"


def _counts(graph: Graph) -> tuple[int, int, int]:
    """(types, nodes, batches) of a graph."""
    return len(graph.present_types), len(graph.node_type), len(schedule(graph, agenda))
