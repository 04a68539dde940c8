"""Cutting a recorded graph in two: calls of regions, and the graph that is left.

See `_ragged.regions`.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers
from jedbatch._graph.prune import without_unread
from jedbatch._graph.record import Record
from jedbatch._graph.types import NodeType, operation_of
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.padding.padded_loops import loops_to_lengths
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes
from jedbatch._ragged.regions import Call, RaggedRecord, Regions, Subgraph
from jedbatch._record.identity.primitives import numbered
from jedbatch._support.types import AxisSize


def cut_graphs(
    regions: Regions,
    records: Sequence[Record],
    num_arrays: Sequence[int],
    leaf_of: Sequence[Mapping[str, Sequence[int]] | None],
    turn_to: Callable[[int], None],
) -> "list[Cut | Uncut | None]":
    """Returns the graphs of records with ragged nodes, to be cut; None of one that has none.

    Args:
      regions: the regions met so far.
      records: of all instances of one graph, in order.
      num_arrays: how many arrays each has.
      leaf_of: for each, the arrays whose length each symbol is; None if it has no symbols.
      turn_to: called with the number of the instance at hand.
    """
    if None not in leaf_of:
        whole = _uncut(regions, without_unread(records[0].whole))
        if whole is not None:
            return [
                Uncut(whole, i, record, count)
                for i, (record, count) in enumerate(zip(records, num_arrays, strict=True))
            ]
    cuts: list[Cut | Uncut | None] = []
    for i, (record, count, leaves) in enumerate(zip(records, num_arrays, leaf_of, strict=True)):
        turn_to(i)
        cuts.append(None if leaves is None else _cut_graph(regions, record, count, leaves))
    return cuts


def _cut_graph(
    regions: Regions, record: Record, num_arrays: int, leaf_of: Mapping[str, Sequence[int]]
) -> "Cut | Uncut | None":
    graph = Graph.select([(record.whole, record.index)])
    returned = any(is_ragged(shape) for shape, _ in record.types)
    if not (returned or any(map(regions.is_ragged, graph.present_types))):
        return None
    graph = without_unread(graph)  # JAX asks for extents to see which starts are negative
    if _uncut(regions, graph) is not None:
        return Uncut(graph, 0, record, num_arrays)
    return Cut(regions, graph, record, num_arrays, leaf_of)


def _uncut(regions: Regions, graph: Graph) -> Graph | None:
    """Returns a graph if all ragged nodes are to be padded, and all instances have some."""
    types = list(filter(regions.is_ragged, graph.present_types))
    if not types or not regions.padded.all_wanted(list(map(regions.ragged_type, types))):
        return None
    is_ragged_type = np.zeros(len(graph.types), bool)
    is_ragged_type[types] = True
    before = pointers(is_ragged_type[graph.node_type])
    if not np.diff(before[graph.node_ptr]).all():
        return None
    if loops_to_lengths(graph, regions.limit, regions.is_ragged):
        return None
    outputs = graph.outputs[graph.outputs < 0].tolist()
    kinds = [c.type for c in graph.inputs for _ in range(len(c))] if outputs else []
    return None if any(is_ragged(kinds[-1 - v].shape) for v in outputs) else graph


@dataclass(frozen=True, eq=False)
class Uncut:
    """The graph of one instance of which all ragged nodes are to be padded.

    Attributes:
      graph, index: the instance is number `index` of this graph.
      record: of the instance.
      num_arrays: how many arrays it has.
    """

    graph: Graph
    index: int
    record: Record
    num_arrays: int

    def note(self) -> None:
        """Does nothing, since there are no regions."""

    def result(self) -> RaggedRecord:
        """Returns the record."""
        record = replace(self.record, whole=self.graph, index=self.index)
        return RaggedRecord.of(record, self.num_arrays)


class Cut:
    """The graph of one instance, to be cut in two.

    First, the numbers in it are noted, of all instances; what they tell decides what is a constant
    of a region.
    """

    def __init__(
        self,
        regions: Regions,
        graph: Graph,
        record: Record,
        num_arrays: int,
        leaf_of: Mapping[str, Sequence[int]],
    ):
        self.regions, self.graph, self.record = regions, graph, record
        self.num_arrays, self.leaf_of = num_arrays, leaf_of
        self.types = graph.node_type.tolist()
        self.reads = [
            graph.operand[a:b].tolist()
            for a, b in zip(graph.operand_ptr[:-1], graph.operand_ptr[1:], strict=True)
        ]
        self.maker = graph.value_node.tolist()
        self.inputs = [_single(chunk, k) for chunk in graph.inputs for k in range(len(chunk))]
        self.outputs = graph.outputs.tolist()
        self.stopped = self._stopped()
        self.ragged_inputs = [
            [v] for v in dict.fromkeys(self.outputs) if v < 0 and self._is_ragged_input(v)
        ]
        self.parts = self._parts(self._ragged_nodes())
        self.leaving, self.subgraphs = self._subgraphs()

    def _subgraphs(self) -> tuple[list[list[int]], list[Subgraph]]:
        """Returns (the values of each part that are read elsewhere or returned, the parts).

        Arrays of the instance that are returned as they are, are parts without nodes.
        """
        leaving = self._leaving() + self.ragged_inputs
        nodes = [*self.parts, *([] for _ in self.ragged_inputs)]
        return leaving, [self._subgraph(*pair) for pair in zip(nodes, leaving, strict=True)]

    def _is_ragged_input(self, value: int) -> bool:
        return is_ragged(self.inputs[-1 - value].type.shape)

    def _stopped(self) -> set[int]:
        """Returns the values to which nothing comes back from results of the graph."""
        if not any(map(self.regions.stopped, set(self.types))):
            return set()
        moving, begin = set(self.outputs), self.graph.value_ptr.tolist()
        for node in reversed(range(len(self.types))):
            values = range(begin[node], begin[node + 1])
            if not moving.isdisjoint(values):
                stopped = self.regions.stopped(self.types[node])
                moving.update(r for k, r in enumerate(self.reads[node]) if k not in stopped)
        return set(range(len(self.maker))) - moving

    def _ragged_nodes(self) -> list[int]:
        """Returns the nodes that are ragged or that ragged ones depend on."""
        inside = [self.regions.is_ragged(t) for t in self.types]
        for node in loops_to_lengths(self.graph, self.regions.limit, self.regions.is_ragged):
            inside[node] = True
        for node in reversed(range(len(inside))):
            if inside[node]:
                for value in self.reads[node]:
                    if value >= 0:
                        inside[self.maker[value]] = True
        return np.flatnonzero(inside).tolist()

    def _parts(self, nodes: Sequence[int]) -> list[list[int]]:
        """Returns the connected parts that some nodes are."""
        connected: UnionFind[int] = UnionFind()
        for node in nodes:
            for value in self.reads[node]:
                if value >= 0:
                    connected.union(node, self.maker[value])
        groups: dict[int, list[int]] = {}
        for node in nodes:
            groups.setdefault(connected.find(node), []).append(node)
        return list(groups.values())

    def _whole_parts(self) -> list[list[int]] | None:
        """Returns the parts that all nodes are; None if some are not to join ragged ones."""
        regions, inside = self.regions, {node for part in self.parts for node in part}
        rest = [self.types[node] for node in range(len(self.types)) if node not in inside]
        is_light = sum(map(regions.work, rest)) <= regions.rest_work
        if not (is_light and all(map(regions.joins, set(rest)))):
            return None
        parts = self._parts(range(len(self.types)))
        if any(map(inside.isdisjoint, parts)) or any(map(regions.is_padded, self.subgraphs)):
            return None
        return parts

    def _leaving(self) -> list[list[int]]:
        """Returns the values of each part that are read elsewhere or returned."""
        graph = self.graph
        inside = {node for part in self.parts for node in part}
        read_outside = set(self.outputs)
        for node, read in enumerate(self.reads):
            if node not in inside:
                read_outside.update(read)
        leaving = []
        for part in self.parts:
            first = graph.value_ptr[part].tolist()
            counts = graph.num_results[part].tolist()
            values = (range(a, a + n) for a, n in zip(first, counts, strict=True))
            leaving.append([v for v in itertools.chain(*values) if v in read_outside])
        return leaving

    def result(self) -> RaggedRecord:
        """Returns the record, cut in two.

        Raises:
          CannotMergeError: a ragged node cannot run for several lengths together.
        """
        graph = self.graph
        kept = [k for k, part in enumerate(self.subgraphs) if not self.regions.is_padded(part)]
        if kept and not self.regions.packs:
            raise CannotMergeError(
                self.regions.padded.apart or "no nodes on padded arrays do what is done"
            )
        parts = [self.parts[k] for k in kept if k < len(self.parts)]
        subgraphs, leaving_parts = (
            [self.subgraphs[k] for k in kept],
            [self.leaving[k] for k in kept],
        )
        inside = {node for part in parts for node in part}
        outer = [node for node in range(len(self.types)) if node not in inside]
        calls: list[Call] = []
        leaves_as: dict[int, tuple[int, int]] = {}  # (call, result) of values that leave
        for subgraph, leaving in zip(subgraphs, leaving_parts, strict=True):
            leaves_as.update((v, (len(calls), k)) for k, v in enumerate(leaving))
            calls.append(self._call(subgraph))

        # Values are numbered anew: results of the nodes left; inputs with results of calls behind.
        number: dict[int, int] = {}
        for node in outer:
            for v in range(int(graph.value_ptr[node]), int(graph.value_ptr[node + 1])):
                number[v] = len(number)
        ragged = []
        outputs: list[int] = []
        places: list[tuple[int, int]] = []
        chunks: list[InputRows] = []

        def renumbered(v: int) -> int:
            if v in number:
                return number[v]
            if v < 0:
                chunks.append(self.inputs[-1 - v])
            else:
                call, k = leaves_as[v]
                kind = calls[call].region.results[k]
                chunks.append(InputRows(kind, None, self.num_arrays + len(places)))
                places.append((call, k))
            number[v] = -len(chunks)
            return number[v]

        operands = [[renumbered(v) for v in self.reads[node]] for node in outer]
        for position, v in enumerate(self.outputs):
            call, k = leaves_as.get(v, (0, 0))
            if v in leaves_as and is_ragged(calls[call].region.results[k].shape):
                ragged.append((position, call, k))
            else:
                outputs.append(renumbered(v))
        flat = [v for read in operands for v in read]
        remainder = Graph(
            graph.types,
            graph.node_type[outer],
            pointers(np.array([len(read) for read in operands], np.int64)),
            np.array(flat, np.int32),
            tuple(chunks),
            np.array(outputs, np.int32),
        )
        return RaggedRecord(
            remainder,
            0,
            self.record.structure,
            self.record.types,
            tuple(calls),
            self.num_arrays,
            tuple(ragged),
            tuple(places),
        )

    def note(self) -> None:
        """Takes note of the numbers that ragged nodes read; the rest of the graph may join them."""
        self.regions.note(self.subgraphs)
        if not self.regions.joins_rest:
            return
        parts = self._whole_parts()
        if parts is None:
            self.regions.leave_rest()
        else:
            self.parts = parts
            self.leaving, self.subgraphs = self._subgraphs()
            self.regions.note_whole(self.subgraphs)

    def _subgraph(self, part: list[int], leaving: list[int]) -> Subgraph:
        """Returns a connected part, apart from its place."""
        graph = self.graph
        place: dict[int, Any] = {}  # (node, result) by value
        operand: dict[int, int] = {}  # position by input
        number: dict[str, int] = {}  # of symbols
        nodes: list[tuple[int, tuple]] = []
        key: list[Hashable] = []
        renamed = self.regions.renamed
        for i, node in enumerate(part):
            refs = tuple(
                [
                    place[v] if v >= 0 else operand.setdefault(v, len(operand))
                    for v in self.reads[node]
                ]
            )
            nodes.append((self.types[node], refs))
            same, symbols = renamed(self.types[node])
            key.append((same, refs, *[number.setdefault(s, len(number)) for s in symbols]))
            a, b = graph.value_ptr[node : node + 2].tolist()
            place.update((v, (i, v - a)) for v in range(a, b))
        if not part:
            operand.update((v, k) for k, v in enumerate(leaving))
            kinds = [self.inputs[-1 - v].type for v in leaving]
            key += [numbered((t.shape, t.dtype, t.weak), number) for t in kinds]
        sources = tuple(self.inputs[-1 - v] for v in operand)
        returned = tuple(place[v] if v >= 0 else operand[v] for v in leaving)
        stopped = tuple(v in self.stopped for v in leaving)
        key_written = tuple(key), returned, stopped
        return Subgraph(tuple(nodes), sources, returned, stopped, tuple(number), key_written)

    def _call(self, subgraph: Subgraph) -> Call:
        """Returns a connected part as a call of a region."""
        registry, sources = self.regions.registry, subgraph.sources
        kinds = subgraph.kinds
        constants = self.regions.fixed(subgraph)
        moving = [k for k in range(len(sources)) if k not in constants]

        def make() -> tuple:
            node_types = [registry.node_types[t] for t, _ in subgraph.nodes]
            shared = list(dict.fromkeys(s for t in node_types for s in t.shared))

            def compute(shared_values, operand_values):
                values = dict(zip(shared, shared_values, strict=True))
                read = dict(zip(moving, operand_values, strict=True))
                read.update((k, x.item() if kinds[k].weak else x) for k, x in constants.items())
                results_made = _run_nodes(node_types, subgraph.nodes, values, read)
                results = [
                    read[r] if isinstance(r, int) else results_made[r[0]][r[1]]
                    for r in subgraph.returned
                ]
                for k, stopped in enumerate(subgraph.stopped):
                    results[k] = jax.lax.stop_gradient(results[k]) if stopped else results[k]
                shapes[:] = [x.shape for x in results]
                return list(map(_entries_as_rows, results))

            shapes: list[tuple[AxisSize, ...]] = []
            avals = [registry.shared[s].aval for s in shared]
            operand_types = [kinds[k] for k in moving]
            operands = [
                jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak) for t in operand_types
            ]
            return shared, operand_types, jax.make_jaxpr(compute)(avals, operands), shapes

        constants_key = tuple((k, x.tobytes()) for k, x in constants.items())
        region = self.regions.region((subgraph.key, constants_key), subgraph.symbols, make)
        leaves = tuple(self.leaf_of[subgraph.symbols[k]][0] for k in region.order)
        return Call(region, tuple(sources[k] for k in moving), leaves)


def _run_nodes(
    node_types: Sequence[NodeType],
    nodes: Sequence[tuple[int, tuple[Any, ...]]],
    shared: Mapping[int, Any],
    operands: Mapping[int, Any],
) -> list[list[Any]]:
    """Returns the results of the nodes of a connected part.

    Args:
      node_types: of each.
      nodes: for each (id of its type, what it reads: operands of the part by number, results of
        nodes by (node, number)).
      shared: the values that all instances share, by id.
      operands: of the part, by number.
    """
    results: list[list[Any]] = []
    for node_type, (_, reads) in zip(node_types, nodes, strict=True):
        args = [shared[s] for s in node_type.shared]
        args += [operands[r] if isinstance(r, int) else results[r[0]][r[1]] for r in reads]
        closed = operation_of(node_type).jaxpr
        results.append(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))
    return results


def _entries_as_rows(x: jax.Array) -> jax.Array:
    """Returns a table [..., n, ..., m, ...] as rows [n·m, ...]; any other array as it is."""
    axes = ragged_axes(x.shape)
    if len(axes) < 2:
        return x
    x = jnp.moveaxis(x, axes, range(len(axes)))
    return x.reshape(math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :])


def _single(chunk: InputRows, k: int) -> InputRows:
    """Returns row k of some inputs."""
    if chunk.rows is None:
        return chunk
    return replace(chunk, rows=chunk.rows[k : k + 1])
