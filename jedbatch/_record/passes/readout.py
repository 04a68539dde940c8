"""Read-outs: what instances do after their last cell becomes one node.

A model calls its cells and then does a few operations with the last states: a score, a softmax, its
logarithm. Recorded one by one, a dozen of them are a dozen types to compile and a dozen batches for
what is one small computation. If the operations at the end of all instances are the same, those
that depend on each other become one node.

Nothing that runs before depends on them, so that merging them never makes anything wait.

Only functions with cells, or with arrays whose length differs, have read-outs, and only where
nobody has chosen a granularity. Operations on such arrays are left as they are unless they become
nodes on tiles (see `_ragged.tile_types`), and so are loops and branches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Primitive

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import pointers
from jedbatch._graph.rewrite import Rewrite, rewrite
from jedbatch._graph.types import operation_of
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.interpret import performs
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.operations.operators import PICK
from jedbatch._record.passes.patterns import Pattern, merged_call_spec
from jedbatch._record.types.registry import Registry

MOST_OPERATIONS = 64  # of a read-out
MOST_PATTERNS = 4  # in which they read each other, before they are left alone
CONTROL_FLOW = ("while", "scan", "cond")


class ReadoutPart(NamedTuple):
    """Operations of a read-out that become one node.

    Attributes:
      node_type: of the node.
      operands: what it reads, as positions among what all operations read.
      values: those of their results that are read elsewhere or returned, counted in the read-out.
    """

    node_type: int
    operands: tuple[int, ...]
    values: tuple[int, ...]


class Ends(NamedTuple):
    """The last nodes of each instance, of the same types (I instances, L nodes, E operands).

    Attributes:
      types: of the nodes.
      first: int64[I], the first of them.
      first_value: int64[I], the first value that they make.
      operand: int64[I, E], what they read.
      reads: int64[I, E], the same as `Pattern.reads`, but for `-1 - e` where e is the first operand
        that is the same value.
    """

    types: tuple[int, ...]
    first: np.ndarray
    first_value: np.ndarray
    operand: np.ndarray
    reads: np.ndarray


class Readouts:
    """Merges the read-outs of instances. Belongs to one registry.

    Those of earlier instances are others once fewer operations turn out to be the same at the end
    of all instances, or more results of theirs to be read.
    """

    def __init__(self, registry: Registry):
        self.registry = registry
        self._length: int | None = None  # operations of the read-out, once there were instances
        self._returned: frozenset[int] = frozenset()
        self._parts: dict[tuple, list[ReadoutPart]] = {}
        self._is_plain: list[bool] = []
        self._is_cell: list[bool] = []
        self._takes_ragged = False

    def take_ragged(self) -> None:
        """Takes operations on arrays of any length for others from now on, after cells."""
        if not self._takes_ragged:
            self._takes_ragged = True
            self.registry.assumptions.fail("types")
            self._length, self._returned = None, frozenset()
            for known in (self._parts, self._is_plain, self._is_cell):
                known.clear()

    def merge(self, graph: Graph) -> Graph:
        """Returns a graph of instances with their read-outs merged."""
        if self._length is not None and self._length < 2:
            return graph
        if not len(graph.node_type) or (self._length is None and graph.num_instances < 2):
            return graph
        self._look()
        if not any(self._is_cell[t] for t in graph.present_types):
            return graph
        length = self._common(graph)
        if self._length is None or length < self._length:
            self.registry.assumptions.fail("types", self._length is not None)
            self._length = length
            self._parts.clear()
            self._returned = frozenset()
        if self._length < 2:
            return graph
        ends = _ends(graph, self._length)
        returned = self._returned.union(_returned(graph, ends))
        if returned != self._returned:
            self.registry.assumptions.fail("types", bool(self._parts))
            self._parts.clear()
            self._returned = returned
        patterns, which = _distinct(ends.reads)
        keys = [(ends.types, tuple(reads)) for reads in patterns.tolist()]
        if len(self._parts.keys() | keys) > MOST_PATTERNS:
            self.registry.assumptions.fail("types", bool(self._parts))
            self._length = 0
            return graph
        for key in keys:
            if key not in self._parts:
                self._parts[key] = self._find_parts(graph, *key)
        merged = _merged(graph, ends, [self._parts[key] for key in keys], which)
        return rewrite(graph, merged, self.registry.types)

    def _look(self) -> None:
        """Finds out what new types are."""
        for node_type in self.registry.node_types[len(self._is_plain) :]:
            key = operation_of(node_type).key[0]
            origin = key[0] if isinstance(key, tuple) else key
            kind = origin[0] if isinstance(origin, tuple) else origin
            is_packed = not self._takes_ragged and any(
                is_ragged(t.shape) for t in (*node_type.operands, *node_type.results)
            )
            self._is_cell.append(kind == "cell" or is_packed)
            self._is_plain.append(
                (isinstance(kind, Primitive) or kind in ("custom", PICK))
                and not is_packed
                and not performs(operation_of(node_type).jaxpr, *CONTROL_FLOW)
            )

    def _common(self, graph: Graph) -> int:
        """Returns how many operations at the end of all instances are the same."""
        sizes = np.diff(graph.node_ptr)
        if not sizes.all():
            return 0
        is_plain = np.array(self._is_plain)[graph.node_type]
        others = np.where(is_plain, -1, np.arange(len(is_plain)))
        last = np.maximum.reduceat(others, graph.node_ptr[:-1])
        length = int(np.minimum(graph.node_ptr[1:] - 1 - last, sizes).min())
        length = min(length, MOST_OPERATIONS if self._length is None else self._length)
        types = graph.node_type[graph.node_ptr[1:, None] - np.arange(1, length + 1)]
        differs = np.flatnonzero((types != types[0]).any(axis=0))
        return int(differs[0]) if len(differs) else length

    def _find_parts(
        self, graph: Graph, types: tuple[int, ...], reads: tuple[int, ...]
    ) -> list[ReadoutPart]:
        """Returns the nodes that operations become, of which these are the types and operands."""
        node_types = [graph.types[t] for t in types]
        made = pointers(np.array([len(t.results) for t in node_types])).tolist()
        read = pointers(np.array([len(t.operands) for t in node_types])).tolist()
        maker = [n for n, t in enumerate(node_types) for _ in t.results]
        connected: UnionFind[int] = UnionFind()
        for n in range(len(types)):
            for r in reads[read[n] : read[n + 1]]:
                if r >= 0:
                    connected.union(n, maker[r])
        members: dict[int, list[int]] = {}
        for n in range(len(types)):
            members.setdefault(connected.find(n), []).append(n)
        parts = []
        for part in members.values():
            values = [v for n in part for v in range(made[n], made[n + 1])]
            operands = [e for n in part for e in range(read[n], read[n + 1])]
            left = [v for v in values if v in self._returned] or values[-1:]
            if len(part) == 1:
                parts.append(ReadoutPart(types[part[0]], tuple(operands), tuple(values)))
                continue
            once = {~reads[e]: e for e in operands if reads[e] < 0}
            parts.append(
                ReadoutPart(
                    self._node_type(
                        [types[n] for n in part], [reads[e] for e in operands], values, left
                    ),
                    tuple(once),
                    tuple(left),
                )
            )
        return parts

    def _node_type(
        self,
        types: Sequence[int],
        reads: Sequence[int],
        values: Sequence[int],
        left: Sequence[int],
    ) -> int:
        """Returns the id of the type that computes what some operations do."""
        slot = {v: k for k, v in enumerate(values)}
        place = {r: k for k, r in enumerate(dict.fromkeys(r for r in reads if r < 0))}
        written = tuple(slot[r] if r >= 0 else -1 - place[r] for r in reads)
        leaving = sum(1 << slot[v] for v in left)
        pattern = Pattern(tuple(types), written)
        return merged_call_spec(self.registry, pattern, leaving).node_type


def _ends(graph: Graph, length: int) -> Ends:
    """Returns the last nodes of each instance."""
    first = graph.node_ptr[1:] - length
    types = tuple(graph.node_type[first[0] : first[0] + length].tolist())
    count = sum(len(graph.types[t].operands) for t in types)
    operand = graph.operand[graph.operand_ptr[first][:, None] + np.arange(count)].astype(np.int64)
    first_value = graph.value_ptr[first]
    is_inside = operand >= first_value[:, None]
    reads = np.where(is_inside, operand - first_value[:, None], -1 - _first_equal(operand))
    return Ends(types, first, first_value, operand, reads)


def _first_equal(rows: np.ndarray) -> np.ndarray:
    """Returns for each element the position of the first one in its row that is equal."""
    order = np.argsort(rows, axis=1, kind="stable")
    ascending = np.take_along_axis(rows, order, axis=1)
    is_new = np.ones(rows.shape, bool)
    is_new[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    run = np.maximum.accumulate(np.where(is_new, np.arange(rows.shape[1]), 0), axis=1)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, run, axis=1), axis=1)
    return first


def _returned(graph: Graph, ends: Ends) -> set[int]:
    """Returns which results of the last nodes instances return, counted from the first one."""
    owner = np.repeat(np.arange(graph.num_instances), np.diff(graph.output_ptr))
    place = graph.outputs - ends.first_value[owner]
    return set(np.unique(place[place >= 0]).tolist())


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns distinct rows, and which of them each row is."""
    if (rows == rows[0]).all():
        return rows[:1], np.zeros(len(rows), np.int64)
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    return distinct, which.ravel()


def _merged(
    graph: Graph, ends: Ends, parts: Sequence[Sequence[ReadoutPart]], which: np.ndarray
) -> Rewrite:
    """Returns the last nodes as the parts of a pattern, `which` for each instance."""
    first = pointers(np.array([len(several) for several in parts])[which])  # part of each instance
    node_type, arity, made = np.empty((3, int(first[-1])), np.int64)
    placed = []  # (instances, their nodes, what these are)
    for k, several in enumerate(parts):
        instances = np.flatnonzero(which == k)
        for j, part in enumerate(several):
            nodes = first[instances] + j
            node_type[nodes], arity[nodes] = part.node_type, len(part.operands)
            made[nodes] = len(part.values)
            placed.append((instances, nodes, part))
    kept = np.ones(len(graph.node_type), bool)
    kept[ends.first[:, None] + np.arange(len(ends.types))] = False
    operand_ptr, new_value = pointers(arity), graph.num_values + pointers(made)
    operand, value = np.empty(int(operand_ptr[-1]), np.int64), np.arange(graph.num_values)
    for instances, nodes, part in placed:
        columns = operand_ptr[nodes][:, None] + np.arange(len(part.operands))
        operand[columns] = ends.operand[instances][:, list(part.operands)]
        for k, v in enumerate(part.values):
            value[ends.first_value[instances] + v] = new_value[nodes] + k
    anchor = np.repeat(graph.node_ptr[1:] - 1, np.diff(first))
    return Rewrite(kept, anchor, node_type, operand_ptr, operand, value)
