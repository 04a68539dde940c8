"""Graphs that hardly batch.

Every node type is compiled and scheduled by itself. A graph is *degenerate* if it has many types of
which most have few nodes; then instances differ in something that makes types: shapes, the number
of operands, or what operations close over. What it is shows in the operation with most types.
"""

from dataclasses import dataclass

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.types import NodeType

MAX_TYPES = 40  # that are fine however few nodes they have
MIN_INSTANCES = 8  # from which on a minibatch can be told to batch badly
ENOUGH_INSTANCES = 16  # a type need not have more nodes than a quarter of so many instances,
VERY_MANY_TYPES = 100  # or, where there are more types than this, which take minutes to compile,
MORE_INSTANCES = 64  # a quarter of so many
LIST_SHARE = 1 / 16  # of all types, for a list to be named that others follow from


@dataclass(frozen=True)
class Degeneracy:
    """A degenerate plan.

    Attributes:
      num_types: node types of the minibatch.
      median: nodes of a type, at the median.
      name: of the operation with most types of those whose types differ in how many operands they
        have, if there is one with a good part of all types, since the shapes of others follow from
        that; else of that with most types.
      types: its types, by their ids.
    """

    num_types: int
    median: int
    name: str
    types: dict[int, NodeType]

    @staticmethod
    def of(graph: Graph) -> "Degeneracy | None":
        """Returns how a graph is degenerate; None if it is not."""
        if graph.num_instances < MIN_INSTANCES or len(graph.types) <= MAX_TYPES:
            return None
        counts = np.asarray(graph.nodes_per_type)
        used = np.flatnonzero(counts)
        if len(used) <= MAX_TYPES:
            return None
        median = int(np.median(counts[used]))
        enough = ENOUGH_INSTANCES if len(used) <= VERY_MANY_TYPES else MORE_INSTANCES
        if median >= min(graph.num_instances, enough) // 4:
            return None
        by_name: dict[str, dict[int, NodeType]] = {}
        for t in used.tolist():
            by_name.setdefault(graph.types[t].name, {})[t] = graph.types[t]
        found = [Degeneracy(len(used), median, name, types) for name, types in by_name.items()]
        many = LIST_SHARE * len(used)
        lists = [x for x in found if x._has_many_arities and len(x.types) >= many]
        return max(lists or found, key=lambda x: len(x.types))

    def __str__(self) -> str:
        nodes = "node" if self.median == 1 else "nodes"
        return f"{self.num_types} node types, most of which have at most {self.median} {nodes}"

    @property
    def _has_many_arities(self) -> bool:
        arities = {len(t.operands) for t in self.types.values()}
        return len(arities) > 2 and len(arities) ** 2 > len(self.types)  # maybe of two lists

    @property
    def difference(self) -> tuple[str, str]:
        """(what the types of the operation differ in, what to write instead)."""
        arities = [len(t.operands) for t in self.types.values()]
        kinds = {t.operands for t in self.types.values()}
        if self._has_many_arities:
            return (
                f"how many operands they have ({min(arities)} to {max(arities)})",
                "Put what is done with a list into a cell that is given its elements, "
                "`jedbatch.cell(lambda params, *elements: ...)`, of which all lengths share types "
                "if JAX computes what follows from the length (`jnp.sqrt(n)`, not `np.sqrt(n)`); "
                "or fold the list by a cell of two operands, or pad it to a few lengths",
            )
        if len(kinds) > len(self.types) // 2:
            shown = ", ".join(sorted({str(t) for t in self.types.values()})[:3])
            return (
                f"the shapes of what they read ({shown}, ...)",
                "Pad arrays to a few shapes, or put what is done to arrays of one instance into "
                "operations that keep their length apart from their rows",
            )
        return (
            "what they close over, such as constants and parameters",
            "Pass what differs from instance to instance as an array, or as a positional argument "
            "of a cell",
        )
