"""Nodes whose values cannot be cut into tiles, as one node with all between them.

Attention in a function without a cell is a node for each of its operations, and the scores that one
gives and another reads are an array [n, n], which has no tiles (see `_ragged.tile_steps`). All
nodes that read or give such values run as one, inside of which the values stay:

    q kᵀ [n, n]  →  softmax [n, n]  →  · v [n, 4]          one node that reads q, k and v

What lies on a path from one of them to another is part of it, too. So are the nodes of two such
groups of which each reads what the other one gives. Where such values travel from node to node of
trees, what becomes one node is another one for every tree. So there are a few types of such nodes,
and if there were more, there are none from then on.
"""

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import pointers
from jedbatch._graph.prune import without_unread
from jedbatch._graph.record import Record
from jedbatch._graph.types import NodeType, ValueType, operation_of
from jedbatch._graph.union_find import UnionFind
from jedbatch._ragged.regions import Regions
from jedbatch._ragged.tile_steps import why_uncut

SHOWN = 3  # operations that the name of a node has
MAX_MEMBERS = 64  # that a node may have


def run_members(
    node_types: Sequence[NodeType],
    members: Sequence[tuple[int, tuple[Any, ...]]],
    shared: Mapping[int, Any],
    operands: Mapping[int, Any],
) -> list[list[Any]]:
    """Returns the results of nodes that are part of another one.

    Args:
      node_types: of each.
      members: for each (id of its type, what it reads: operands of the whole by number, results
        of members by (member, number)).
      shared: the values that all instances share, by id.
      operands: of the whole, by number.
    """
    results: list[list[Any]] = []
    for node_type, (_, reads) in zip(node_types, members, strict=True):
        args = [shared[s] for s in node_type.shared]
        args += [operands[r] if isinstance(r, int) else results[r[0]][r[1]] for r in reads]
        closed = operation_of(node_type).jaxpr
        results.append(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))
    return results


def with_joined_nodes(regions: Regions, records: Sequence[Record]) -> Sequence[Record]:
    """Returns records in which nodes with values that cannot be cut are one, if that has tiles.

    Args:
      regions: the regions met so far.
      records: of all instances of one graph, in order.
    """
    whole = records[0].whole
    types = list(filter(regions.is_ragged, whole.present_types))
    if not (regions.tiles.rows and regions.tiles.joins_nodes):
        return records
    if not any(regions.tiles.is_many(regions.on_tiles(t)) for t in types):
        return records
    if not any(_is_uncut(kind) for t in types for kind in whole.types[t].results):
        return records
    joined = _Joining(regions, without_unread(whole)).graph()
    return records if joined is None else [replace(record, whole=joined) for record in records]


class _Unit(NamedTuple):
    """A node of the graph as it will be.

    Attributes:
      type: the id of its type.
      reads: inputs, and values of the recorded graph.
      makes: values of the recorded graph that are its results.
    """

    type: int
    reads: Sequence[int]
    makes: Sequence[int]


class _Joining:
    """A graph, some nodes of which become one.

    Attributes:
      types: of nodes.
      reads: what each reads.
      makers: the nodes that each reads from.
      maker, value_ptr: of values.
      is_uncut: of values, whether they cannot be cut into tiles.
    """

    def __init__(self, regions: Regions, graph: Graph):
        self.regions, self.whole = regions, graph
        self.types: list[int] = graph.node_type.tolist()
        begin, operand = graph.operand_ptr.tolist(), graph.operand.tolist()
        self.reads = [operand[a:b] for a, b in itertools.pairwise(begin)]
        self.maker: list[int] = graph.value_node.tolist()
        self.value_ptr: list[int] = graph.value_ptr.tolist()
        self.makers = [{self.maker[v] for v in read if v >= 0} for read in self.reads]
        kinds = {t: graph.types[t].results for t in graph.present_types}
        uncut = {t: [_is_uncut(kind) for kind in results] for t, results in kinds.items()}
        self.is_uncut = [x for t in self.types for x in uncut[t]]

    def graph(self) -> Graph | None:
        """Returns the graph with nodes joined; None if no instance has some to join."""
        whole = self.whole
        nodes, of_outputs = whole.node_ptr.tolist(), whole.output_ptr.tolist()
        outputs: list[int] = whole.outputs.tolist()
        place: dict[int, int] = {}
        units: list[_Unit] = []
        node_ptr, num_values = [0], 0
        for i, (a, b) in enumerate(itertools.pairwise(nodes)):
            for unit in self._units(range(a, b), outputs[slice(*of_outputs[i : i + 2])]):
                place.update((v, num_values + k) for k, v in enumerate(unit.makes))
                num_values += len(unit.makes)
                units.append(unit)
            node_ptr.append(len(units))
        if len(units) == len(self.types):
            return None

        def moved(references: Iterable[int]) -> np.ndarray:
            return np.array([v if v < 0 else place[v] for v in references], np.int32)

        return Graph(
            self.regions.registry.types,
            np.array([unit.type for unit in units], np.int32),
            pointers(np.array([len(unit.reads) for unit in units], np.int64)),
            moved(v for unit in units for v in unit.reads),
            whole.inputs,
            moved(outputs),
            np.array(node_ptr),
            whole.input_ptr,
            whole.output_ptr,
        )

    def _units(self, nodes: range, outputs: Sequence[int]) -> list[_Unit]:
        """Returns the nodes of an instance as they will be, in order."""
        groups: UnionFind[int] = UnionFind()
        joined = set()
        for node in nodes:
            for v in self.reads[node]:
                if v >= 0 and self.is_uncut[v]:
                    groups.union(node, self.maker[v])
                    joined |= {node, self.maker[v]}
        alone = [self._alone(node) for node in nodes]
        if not joined or any(v >= 0 and self.is_uncut[v] for v in outputs):
            return alone
        order = self._ordered(nodes, groups, joined)
        while order is None:  # groups read what others give, and the other way round
            first, *rest = joined
            for node in rest:
                groups.union(first, node)
            order = self._ordered(nodes, groups, joined)
        read_by: dict[int, set[int]] = {}
        for node in nodes:
            for v in self.reads[node]:
                read_by.setdefault(v, set()).add(node)
        returned = set(outputs)
        units = []
        for members in order:
            if len(members) == 1:
                units.append(alone[members[0] - nodes.start])
                continue
            inside = set(members)
            made = (v for node in members for v in range(*self.value_ptr[node : node + 2]))
            leaving = [v for v in made if v in returned or not read_by.get(v, inside) <= inside]
            unit = self._joined(members, leaving)
            if unit is None:
                return alone
            units.append(unit)
        return units

    def _alone(self, node: int) -> _Unit:
        made = range(*self.value_ptr[node : node + 2])
        return _Unit(self.types[node], self.reads[node], made)

    def _ordered(
        self, nodes: range, groups: UnionFind[int], joined: set[int]
    ) -> list[list[int]] | None:
        """Returns the groups of nodes, each after those that it reads; None if there is no order.

        What lies between nodes of a group is added to it, and to the nodes that are joined.
        """
        while True:
            members: dict[int, list[int]] = {}
            for node in sorted(joined):
                members.setdefault(groups.find(node), []).append(node)
            between = {node: m[0] for m in members.values() for node in self._between(m)}
            if not between:
                break
            for node, first in between.items():
                groups.union(node, first)
            joined |= set(between)
        unit = {node: m[0] for m in members.values() for node in m}
        parts = {m[0]: m for m in members.values()}
        waiting: dict[int, set[int]] = {}
        readers: dict[int, list[int]] = {}
        for node in nodes:
            own = unit.get(node, node)
            read = {unit.get(m, m) for m in self.makers[node]} - {own}
            waiting.setdefault(own, set()).update(read)
        for own, read in waiting.items():
            for other in read:
                readers.setdefault(other, []).append(own)
        ready = [own for own, read in waiting.items() if not read]
        heapq.heapify(ready)
        order = []
        while ready:
            own = heapq.heappop(ready)
            order.append(parts.get(own, [own]))
            for reader in readers.get(own, ()):
                waiting[reader].discard(own)
                if not waiting[reader]:
                    heapq.heappush(ready, reader)
        return order if len(order) == len(waiting) else None

    def _between(self, members: Sequence[int]) -> set[int]:
        """Returns the nodes on paths from one of some nodes to another, but for these."""
        after, before = set(members), set(members)
        for node in range(members[0], members[-1]):
            if not after.isdisjoint(self.makers[node]):
                after.add(node)
        for node in range(members[-1], members[0], -1):
            if node in before:
                before |= self.makers[node]
        return (after & before).difference(members)

    def _joined(self, nodes: Sequence[int], leaving: Sequence[int]) -> _Unit | None:
        """Returns nodes as one, of which some values leave; None if it has no tiles."""
        registry, tiles = self.regions.registry, self.regions.tiles
        if len(nodes) > MAX_MEMBERS:
            return None
        place: dict[int, tuple[int, int]] = {}
        operand: dict[int, int] = {}
        kind_of: dict[int, int] = {}
        members = []
        for i, node in enumerate(nodes):
            node_type = registry.node_types[self.types[node]]
            kinds = registry.kinds_of(node_type.operands)
            for v, kind in zip(self.reads[node], kinds, strict=True):
                if v not in place:
                    kind_of[operand.setdefault(v, len(operand))] = kind
            read = [place[v] if v in place else operand[v] for v in self.reads[node]]
            members.append((self.types[node], tuple(read)))
            made = range(*self.value_ptr[node : node + 2])
            place.update((v, (i, k)) for k, v in enumerate(made))
        returned = tuple([place[v] for v in leaving])
        node_types = [registry.node_types[t] for t, _ in members]
        shared = tuple(dict.fromkeys(s for t in node_types for s in t.shared))

        def call(shared_values: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
            env = dict(zip(shared, shared_values, strict=True))
            results = run_members(node_types, members, env, dict(enumerate(operands)))
            return tuple([results[i][k] for i, k in returned])

        key = "joined nodes", tuple(members), returned
        read_kinds = tuple([kind_of[k] for k in range(len(operand))])
        spec = registry.call_spec(_name(node_types), key, call, shared, read_kinds)
        lines = (registry.lines.get(t, "") for t, _ in members)
        registry.lines[spec.node_type] = next(filter(None, lines), "")
        ragged = self.regions.on_tiles(spec.node_type)
        if isinstance(tiles.nodes(ragged), str):
            return None
        if not tiles.note_joined(ragged, [self.regions.on_tiles(t) for t, _ in members]):
            return None
        return _Unit(spec.node_type, list(operand), leaving)


def _name(node_types: Sequence[NodeType]) -> str:
    """Returns the name of nodes of some types that are one."""
    names = list(dict.fromkeys(t.name for t in node_types))
    return " + ".join(names[:SHOWN]) + " + …" * (len(names) > SHOWN)


def _is_uncut(kind: ValueType) -> bool:
    return why_uncut(kind.shape, kind.dtype) is not None
