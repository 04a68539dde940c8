"""The ragged parts of an instance's graph, taken out of it.

What an instance does to arrays whose length differs from instance to instance is recorded like
everything else, with symbols for the lengths (see `_jaxpr.symbolic_dims`). Such nodes do not go
through the scheduler: instances that do the same run side by side whatever their lengths (see
`_ragged.packed_program`), and first of all. So a recorded graph is cut in two:

    ragged nodes and what they depend on  →  calls of regions; run first
    everything else                       →  a graph, for which results of regions are inputs

A *region* is a connected part of the first kind, as a program. Calls of one region, in whatever
instances and however many in each (the sentences at the leaves of a tree), run together. Arrays
have symbols of their own, so that what is done to two sentences of a tree is recorded with n for
one and m for the other: parts that differ in the names of symbols only are calls of one region (see
`_ragged.renaming`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
from jedbatch._graph.types import ValueType, operation_of
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes, symbols_in
from jedbatch._jaxpr.versions import without_consts
from jedbatch._ragged.packed_program import PackedProgram
from jedbatch._ragged.padded_loops import find_limit, loops_to_lengths
from jedbatch._ragged.phases import find_phases
from jedbatch._ragged.renaming import Renaming, written_type
from jedbatch._ragged.tile_types import RaggedNodeType, TileTypes
from jedbatch._record.registry import Registry
from jedbatch._support.types import AxisSize


class Region:
    """A program of ragged arrays that calls of many instances run together.

    Attributes:
      id: position among the regions of a session.
      shared: ids of the shared values it reads, its first arguments.
      operands, results: value types of a call. A table is a result with a row for every entry.
      shapes: of the results, as the function has them.
      packed: the program.
      operand_names: of the operands among the inputs of a plan.
      operand_extents: for each operand the number of its extent; None if it is not ragged.
      order: for each symbol of the program, its number among those of a call.
    """

    def __init__(
        self,
        id: int,
        shared: Sequence[int],
        operands,
        results,
        shapes,
        packed: PackedProgram,
        order,
    ):
        self.id = id
        self.order: tuple[int, ...] = tuple(order)
        self.shared = tuple(shared)
        self.operands: tuple[ValueType, ...] = tuple(operands)
        self.results: tuple[ValueType, ...] = tuple(results)
        self.shapes: tuple[tuple[AxisSize, ...], ...] = tuple(shapes)
        self.packed = packed
        self.operand_names = tuple(
            f"region {id}, operand {k}: {kind}" for k, kind in enumerate(self.operands)
        )
        self.operand_extents = tuple(
            packed.extents.index(kind.shape[0]) if is_ragged(kind.shape) else None
            for kind in self.operands
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols whose values a call must bring."""
        return self.packed.phased.symbols


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a region by one instance.

    Attributes:
      region: that is called.
      operands: where each operand comes from, one row each.
      leaves: for each symbol, an array of the instance whose length it is.
    """

    region: Region
    operands: tuple[InputRows, ...]
    leaves: tuple[int, ...]

    def lengths(self, arrays: Sequence[jax.Array]) -> list[int]:
        """The value of every symbol, for the arrays of an instance."""
        return [len(arrays[leaf]) for leaf in self.leaves]


def some_are_ragged(records: Iterable[Record]) -> bool:
    """Returns whether some of the records are `RaggedRecord`s: a look at their few classes."""
    return any(issubclass(kind, RaggedRecord) for kind in set(map(type, records)))


@dataclass(frozen=True, eq=False)
class RaggedRecord(Record):
    """The record of an instance with ragged arrays.

    Attributes:
      calls: of regions. Their results are inputs of the graph: what an `InputRows` names as leaf
        `num_arrays + k` is result number k of all calls.
      num_arrays: arrays of the instance.
      ragged: for each leaf of the function's result that has a ragged axis, (its position, call,
        result).
      places: (call, result) of each number k.
    """

    calls: tuple[Call, ...] = ()
    num_arrays: int = 0
    ragged: tuple[tuple[int, int, int], ...] = ()
    places: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def form(self) -> Hashable:
        """Equal for instances whose graphs differ in the values of their inputs alone.

        Those call the same regions, and read the same results of them.
        """
        leaves = [chunk.leaf for chunk in self.whole.chunks[self.index]]
        results = tuple([None if k is None else max(-1, k - self.num_arrays) for k in leaves])
        regions = tuple([call.region.id for call in self.calls])
        return super().form, results, regions, self.places, self.ragged


class Regions:
    """The regions met so far.

    Numbers in a function are operands of what reads them, and most are the same in all instances
    (the divisor of a score, an epsilon). Those are constants of a region, until they differ.

    Parts that would be a region of their own for nearly every instance are left in the graph, for
    nodes on tiles (see `_ragged.tile_types`).

    Attributes:
      tiles: types of nodes on tiles.
      limit: from a type to the operand that its nodes, loops, count to; None of others.
    """

    def __init__(self, registry: Registry):
        self.registry = registry
        self.regions: list[Region] = []
        self._ids: dict[Hashable, Region] = {}
        self._ragged: dict[int, bool] = {}
        self.limit = functools.cache(lambda type_id: find_limit(registry.node_types[type_id]))
        self._renamed: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._canonical: dict[Hashable, int] = {}
        self._numbers: dict[tuple[Hashable, int], bytes | None] = {}  # None where they differ
        self._differing = 0
        self.tiles = TileTypes(registry)

    @property
    def revision(self) -> int:
        """How often what was taken of numbers and of programs has been found not to hold."""
        return self._differing + self.tiles.revision

    def is_ragged(self, type_id: int) -> bool:
        """Returns whether nodes of a type read or give ragged values, or ask for an extent."""
        if type_id not in self._ragged:
            node_type = self.registry.node_types[type_id]
            operation = operation_of(node_type)
            self._ragged[type_id] = any(
                is_ragged(t.shape) for t in (*node_type.operands, *node_type.results)
            ) or bool(symbols_in(operation.jaxpr))
        return self._ragged[type_id]

    def stops(self, type_id: int) -> bool:
        """Returns whether nothing comes back through nodes of a type."""
        node_type = self.registry.node_types[type_id]
        equations = without_consts(operation_of(node_type).jaxpr).eqns
        stops = [eqn.primitive.name for eqn in equations] == ["stop_gradient"]
        return stops or not any(has_gradient(t.dtype) for t in node_type.results)

    def renamed(self, type_id: int) -> tuple[int, tuple[str, ...]]:
        """Returns (a number equal for types that differ in the names of symbols only, these)."""
        if type_id not in self._renamed:
            key, symbols = written_type(self.registry, type_id)
            number = self._canonical.setdefault(key, len(self._canonical))
            self._renamed[type_id] = number, symbols
        return self._renamed[type_id]

    def on_tiles(self, type_id: int) -> RaggedNodeType:
        """Returns a type of ragged nodes as `tiles` knows it."""
        number, symbols = self.renamed(type_id)
        return RaggedNodeType(number, type_id, symbols)

    def cut(
        self, record: Record, num_arrays: int, leaf_of: Mapping[str, Sequence[int]]
    ) -> "Cut | Uncut | None":
        """Returns the graph of a record with ragged nodes, to be cut; None if it has none.

        Args:
          record: of an instance.
          num_arrays: how many arrays the instance has.
          leaf_of: those whose length each symbol is.
        """
        graph = Graph.select([(record.whole, record.index)])
        returned = any(is_ragged(shape) for shape, _ in record.types)
        if not (returned or self._ragged_ones(graph)):
            return None
        graph = without_unread(graph)  # JAX asks for extents to see which starts are negative
        types = self._ragged_ones(graph)
        loops = types and loops_to_lengths(graph, self.limit, self.is_ragged)
        if types and not loops and self.tiles.all_wanted(list(map(self.on_tiles, types))):
            outputs = graph.outputs[graph.outputs < 0].tolist()
            kinds = [c.type for c in graph.inputs for _ in range(len(c))] if outputs else []
            if not any(is_ragged(kinds[-1 - v].shape) for v in outputs):
                return Uncut(graph, record, num_arrays, leaf_of)
        return Cut(self, graph, record, num_arrays, leaf_of)

    def _ragged_ones(self, graph: Graph) -> list[int]:
        """Returns the types of ragged nodes in a graph."""
        return list(filter(self.is_ragged, set(graph.node_type.tolist())))

    def has_tiles(self, subgraph: "_Subgraph") -> bool:
        """Returns whether the nodes of a connected part become nodes on tiles."""
        limits = ((refs, self.limit(t)) for t, refs in subgraph.nodes)
        read = [refs[k] for refs, k in limits if k is not None and not isinstance(refs[k], int)]
        if any(self.is_ragged(subgraph.nodes[maker][0]) for maker, _ in read):
            return False  # a loop to a length, whose room is known in a region alone
        return self.tiles.wanted(self._ragged_types(subgraph))

    def _ragged_types(self, subgraph: "_Subgraph") -> list[RaggedNodeType]:
        types = dict.fromkeys(t for t, _ in subgraph.nodes)
        return [self.on_tiles(t) for t in types if self.is_ragged(t)]

    def note(self, subgraph: "_Subgraph") -> None:
        """Takes note of a part, and of the numbers among its operands, which may be constants."""
        self.tiles.note(subgraph.key, self._ragged_types(subgraph))
        if self.has_tiles(subgraph):
            return
        for k, number in subgraph.numbers.items():
            value = number.tobytes()
            if self._numbers.setdefault((subgraph.key, k), value) not in (value, None):
                self._numbers[subgraph.key, k] = None
                self._differing += 1

    def fixed(self, subgraph: "_Subgraph") -> dict[int, np.ndarray]:
        """Returns the numbers among the operands of a call that were the same in all calls."""
        numbers = subgraph.numbers.items()
        return {k: x for k, x in numbers if self._numbers[subgraph.key, k] is not None}

    def region(self, key: Hashable, symbols: Sequence[str], make: Callable[[], tuple]) -> Region:
        """Returns the region of a key; `make()` gives its (shared, operands, program, shapes).

        `symbols` are those of the call, in the order of their numbers.
        """
        region = self._ids.get(key)
        if region is None:
            shared, operands, closed, shapes = make()
            packed = PackedProgram(find_phases(closed, len(shared)), self.registry.keys.jaxpr_key)
            packed.try_out([self.registry.shared[s].aval for s in shared])
            results = [ValueType(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
            order = map(list(symbols).index, packed.phased.symbols)
            region = Region(len(self.regions), shared, operands, results, shapes, packed, order)
            self._ids[key] = region
            self.regions.append(region)
        return region


@dataclass(frozen=True, eq=False)
class _Subgraph:
    """A connected part of a graph, apart from where in the graph it is.

    Attributes:
      nodes: (type, what it reads) of each: operands by number, results by (node, number).
      sources: where operands come from.
      returned: the results: (node, number), or the number of an operand.
      stopped: of each result, whether nothing comes back to it.
      symbols: in the order in which they come up.
      key: equal for calls that differ in values and in the names of symbols alone.
    """

    nodes: tuple[tuple[int, tuple[Any, ...]], ...]
    sources: tuple[InputRows, ...]
    returned: tuple[Any, ...]
    stopped: tuple[bool, ...]
    symbols: tuple[str, ...]
    key: Hashable

    @property
    def kinds(self) -> tuple[ValueType, ...]:
        """The value types of operands."""
        return tuple(source.type for source in self.sources)

    @functools.cached_property
    def numbers(self) -> dict[int, np.ndarray]:
        """The operands that are numbers, which the function or the instance has brought."""
        numbers = {}
        for k, source in enumerate(self.sources):
            number = source.leaf is None and source.type.shape == ()
            if number and not is_key(source.type.dtype):
                assert source.rows is not None
                numbers[k] = source.rows[0]
        return numbers


@dataclass(frozen=True, eq=False)
class Uncut:
    """The graph of one instance of which all ragged nodes become nodes on tiles.

    Attributes:
      graph: of the instance.
      record: of the instance.
      num_arrays: how many arrays it has.
      leaf_of: those whose length each symbol is.
    """

    graph: Graph
    record: Record
    num_arrays: int
    leaf_of: Mapping[str, Sequence[int]]

    def note(self) -> None:
        """Does nothing, since there are no regions."""

    def result(self) -> RaggedRecord:
        """Returns the record."""
        form = self.record.structure, self.record.types
        return RaggedRecord(self.graph, 0, *form, (), self.num_arrays)


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
        self.parts = self._parts()
        self.leaving = self._leaving()
        # Arrays of the instance that are returned as they are, each by a part without nodes.
        ragged_inputs = dict.fromkeys(v for v in self.outputs if v < 0 and self._is_ragged_input(v))
        self.leaving += [[v] for v in ragged_inputs]
        parts = [*self.parts, *([] for _ in ragged_inputs)]
        self.subgraphs = [self._subgraph(*pair) for pair in zip(parts, self.leaving, strict=True)]

    def _is_ragged_input(self, value: int) -> bool:
        return is_ragged(self.inputs[-1 - value].type.shape)

    def _stopped(self) -> set[int]:
        """Returns the values to which nothing comes back from results of the graph."""
        if not any(map(self.regions.stops, set(self.types))):
            return set()
        moving, begin = set(self.outputs), self.graph.value_ptr.tolist()
        for node in reversed(range(len(self.types))):
            values = range(begin[node], begin[node + 1])
            if not (moving.isdisjoint(values) or self.regions.stops(self.types[node])):
                moving.update(self.reads[node])
        return set(range(len(self.maker))) - moving

    def _parts(self) -> list[list[int]]:
        """Returns connected nodes that are ragged or that ragged ones depend on."""
        inside = [self.regions.is_ragged(t) for t in self.types]
        for node in loops_to_lengths(self.graph, self.regions.limit, self.regions.is_ragged):
            inside[node] = True
        for node in reversed(range(len(inside))):
            if inside[node]:
                for value in self.reads[node]:
                    if value >= 0:
                        inside[self.maker[value]] = True
        connected: UnionFind[int] = UnionFind()
        for node in np.flatnonzero(inside).tolist():
            for value in self.reads[node]:
                if value >= 0:
                    connected.union(node, self.maker[value])
        groups: dict[int, list[int]] = {}
        for node in np.flatnonzero(inside).tolist():
            groups.setdefault(connected.find(node), []).append(node)
        return list(groups.values())

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
        kept = [k for k, part in enumerate(self.subgraphs) if not self.regions.has_tiles(part)]
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
        """Takes note of the numbers that ragged nodes read."""
        for subgraph in self.subgraphs:
            self.regions.note(subgraph)

    def _subgraph(self, part: list[int], leaving: list[int]) -> _Subgraph:
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
            key += [Renaming(number).written((t.shape, t.dtype, t.weak)) for t in kinds]
        sources = tuple(self.inputs[-1 - v] for v in operand)
        returned = tuple(place[v] if v >= 0 else operand[v] for v in leaving)
        stopped = tuple(v in self.stopped for v in leaving)
        key_written = tuple(key), returned, stopped
        return _Subgraph(tuple(nodes), sources, returned, stopped, tuple(number), key_written)

    def _call(self, subgraph: _Subgraph) -> Call:
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
                results_made: list[list[Any]] = []
                for node_type, (_, refs) in zip(node_types, subgraph.nodes, strict=True):
                    args = [values[s] for s in node_type.shared]
                    args += [
                        read[r] if isinstance(r, int) else results_made[r[0]][r[1]] for r in refs
                    ]
                    operation = operation_of(node_type)
                    closed = operation.jaxpr
                    results_made.append(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))
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
