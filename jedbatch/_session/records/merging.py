"""`Merging`: whether the operations of a function without cells become larger nodes.

A function in plain `jax.numpy` is recorded operation by operation, and may take twice as long to
run as one with cells. Where nobody has chosen a granularity, its first minibatches are therefore
looked at in the way of `granularity="auto"` (see `_record.passes.coalesce`), as soon as there is
enough to see, and the two graphs are compared before a program is made. Operations are
merged from then on if that makes nodes, batches and types fewer by a stated part; if not, or if the
function calls cells, nothing changes. It is decided once.

What is merged is still recorded operation by operation where an instance has not been met before,
at ten microseconds or more each. Where that are many, it is warned of, with the functions that most
of them are performed in and what they cost.

Where operations that follow on each other are always different ones, as in expressions of single
operations, there is nothing to merge, and a node an operation is what cells would give. But a call
of a cell is recorded at once, so such operations are warned of, too.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jedbatch._graph.degeneracy import Degeneracy
from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._record.passes.coalesce import has_cells
from jedbatch._record.run.units import Unit
from jedbatch._record.types.registry import Registry
from jedbatch._schedule.heuristics import agenda
from jedbatch._schedule.policy import schedule
from jedbatch._session.records.degenerate import warn_once
from jedbatch.errors import NoCellsWarning

MIN_INSTANCES = 8  # recorded in both ways before it is decided
MIN_NODES = 512  # recorded before that is begun
MANY_OPERATIONS = 2048  # of a minibatch that are worth a warning,
MOST_NAMED, MIN_PART = 3, 0.1  # which names so many functions, each with so much of them
FEWER = 2 / 3  # merging pays if this part of nodes and of batches is left, or less,
MIN_NODES_OF_A_TYPE = 2  # on average, or instances would be types of their own


class Merging:
    """The comparison of granularities on the first minibatches of a function.

    Attributes:
      is_decided: whether enough has been met.
      pays: whether operations are to be merged.
      has_cells: whether the function calls some.
    """

    def __init__(self) -> None:
        self.is_decided = False
        self.pays = False
        self.has_cells = False
        self._num_nodes = 0
        self._num_compared = 0

    def asks(self, records: Sequence[Record]) -> bool:
        """Returns whether to merge nodes of these new instances, too, and compare."""
        graph = records[0].whole
        if len(graph.node_type) <= len(records):  # one operation or none
            return False
        if has_cells(graph):
            self.is_decided = self.has_cells = True
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
        self.pays &= types_left * MIN_NODES_OF_A_TYPE <= len(after.node_type)


def warn_if_costly(
    graph: Graph,
    merged: Graph,
    seconds: float,
    registry: Registry,
    units: Callable[[], Counter[Unit]],
) -> None:
    """Warns of many operations that calls of cells would take the place of.

    Args:
      graph: of the new instances of a minibatch, with a node for each operation.
      merged: the same as it is planned, with operations merged if that pays.
      seconds: that recording them has taken.
      registry: has the lines of operations, and which warnings there have been.
      units: counts operations by what would be a cell of them.
    """
    total, num_nodes = len(graph.node_type), len(merged.node_type)
    if NoCellsWarning in registry.warned or total < MANY_OPERATIONS:
        return
    if Degeneracy.of(merged) is not None:  # which is warned of first
        return
    counts = units() if num_nodes < total else Counter()
    part = MIN_PART * counts.total()
    named = [u for u, num in counts.most_common(MOST_NAMED) if num >= part]
    cures = []
    if parts := [u for u in named if not u.is_whole]:
        cures.append(f"write `@jedbatch.cell` above {_places(parts)}")
    if wholes := [u for u in named if u.is_whole]:
        cures.append(
            "make a function with `@jedbatch.cell` above it of what is done for one node in "
            f"{_places(wholes)}"
        )
    if not cures and num_nodes == total:
        cures.append(
            f"call cells, such as `jedbatch.cell(jnp.add)`, in place of {_single(merged, registry)}"
        )
    a_node = f"{1e6 * seconds / num_nodes:.0f} µs for each of the {num_nodes} nodes"
    merged_into = f", or {a_node} that they were merged into" if num_nodes < total else ""
    warn_once(
        NoCellsWarning,
        f"a minibatch was recorded operation by operation: {total} of them, in "
        f"{1e3 * seconds:.0f} ms, {1e6 * seconds / total:.1f} µs each{merged_into}. "
        "A call of a cell is recorded at once, in about one: "
        f"{'; '.join(cures) or 'write `@jedbatch.cell` above what is done for one node'}",
        registry.warned,
    )


def _single(graph: Graph, registry: Registry) -> str:
    """Returns the names of the operations that most nodes are, and where each was met first."""
    counts = np.bincount(graph.node_type, minlength=len(graph.types))
    counts[[not t.operands for t in graph.types]] = 0  # shared values
    most = np.argsort(-counts, kind="stable")[:MOST_NAMED].tolist()
    names = [(str(graph.types[t]), registry.lines.get(t)) for t in most if counts[t]]
    return ", ".join(f"`{name}` ({line})" if line else f"`{name}`" for name, line in names)


def _places(units: Sequence[Unit]) -> str:
    return ", ".join(f"`{u.name}` ({u.line})" for u in units)


def _counts(graph: Graph) -> tuple[int, int, int]:
    """(types, nodes, batches) of a graph."""
    return len(graph.present_types), len(graph.node_type), len(schedule(graph, agenda))
