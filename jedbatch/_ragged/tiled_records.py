"""Records of instances whose arrays [n, ...] travel through their graphs as tiles.

Sentences at the leaves of trees run before the graph, all together (see `_ragged.regions`). Where
such arrays are the states of a recursion, as the rows [sites, 4] of every node of a phylogenetic
tree are, what is done to them is another program for every tree. Then nodes on arrays become nodes
on tiles (see `_ragged.tiled_graph`), which are scheduled like all others: types of nodes depend
neither on how long the arrays are nor on the tree.

The rows of the last tile beyond the last row of the array repeat that row, so that what is computed
of them is nothing that is not computed anyway.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.record import Record
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.symbolic_dims import extent_at, is_ragged, ragged_axes
from jedbatch._jaxpr.transfers import fetched
from jedbatch._program.output_spec import TileRun
from jedbatch._program.plan import TiledRows
from jedbatch._ragged.needed_rows import nothing_error
from jedbatch._ragged.regions import RaggedRecord, Regions, some_are_ragged
from jedbatch._ragged.tile_types import ROW_NUMBER, NodeOnTiles, StepOnTiles
from jedbatch._ragged.tiled_graph import (
    BY_TILE,
    COMBINED,
    IF_NONE,
    ONCE,
    TileInput,
    TileTemplate,
    repeat_nodes,
)
from jedbatch._support.caches import Memory
from jedbatch._support.types import Array, AxisSize

MAX_EXPANDED, EXPANDED_BYTES = 4096, 1 << 27  # records for numbers of tiles that are kept
LENGTHS = 0  # the first array behind those of an instance: what depends on lengths, int32[...]


@dataclass(frozen=True)
class TiledArray:
    """An array of an instance as tiles.

    Attributes:
      leaf: number of the array.
      path: indices that lead to the part that is meant, one after the other.
      axis: of the rows.
      symbol: number of the symbol that is their number.
    """

    leaf: int
    path: tuple[Any, ...]
    axis: int
    symbol: int


@dataclass(frozen=True, eq=False)
class TiledRecord(RaggedRecord):
    """The record of an instance with nodes on tiles, for all lengths.

    Attributes:
      template: its graph.
      leaves: for each symbol, an array of the instance whose length it is.
      arrays: the arrays that are read as tiles.
      starts: the symbols of which the first rows of tiles are read, and how many rows they have:
        two arrays for each, behind those.
      lengths: the extents that are read, in terms of symbols, each with their numbers by name.
      nonempty: extents that must not be 0, each with these numbers and the operation that says so.
    """

    template: TileTemplate = None  # type: ignore[assignment]
    leaves: tuple[int, ...] = ()
    arrays: tuple[TiledArray, ...] = ()
    starts: tuple[int, ...] = ()
    lengths: tuple[tuple[AxisSize, dict[str, int]], ...] = ()
    nonempty: tuple[tuple[AxisSize, dict[str, int], str], ...] = ()

    @property
    def num_added(self) -> int:
        """How many arrays there are behind those of the instance."""
        return 1 + len(self.arrays) + 2 * len(self.starts)


@dataclass(frozen=True, eq=False)
class ExpandedRecord(RaggedRecord):
    """The record of an instance with nodes on tiles, for so many rows.

    Attributes:
      rows: (rows that exist, rows computed) of all nodes on tiles.
      runs: the ragged results that tiles make up, by position.
    """

    rows: tuple[int, int] = (0, 0)
    runs: dict[int, TileRun] = field(default_factory=dict)


class Expansion:
    """Graphs of nodes on tiles for the lengths of instances."""

    def __init__(self, regions: Regions):
        self.regions = regions
        self._known: dict[Any, ExpandedRecord] = Memory(
            MAX_EXPANDED,
            EXPANDED_BYTES,
            lambda _, record: record.whole.nbytes_each,
        )

    def expand(
        self, records: Sequence[Record], arrays: Sequence[Sequence[Array]]
    ) -> tuple[Sequence[Record], Sequence[Sequence[Array]]]:
        """Returns the records of instances for their lengths, and their arrays with tiles."""
        if not some_are_ragged(records):
            return records, arrays
        tiled = [i for i, record in enumerate(records) if isinstance(record, TiledRecord)]
        if not tiled:
            return records, arrays
        records, arrays = list(records), list(arrays)
        size = self.regions.tiles.rows
        keys: list[Any] = []
        new: dict[Any, tuple[TiledRecord, list[int]]] = {}
        for i in tiled:
            record: Any = records[i]
            lengths = [len(arrays[i][leaf]) for leaf in record.leaves]
            _refuse_nothing(record, lengths, i, arrays[i])
            returned = any(is_ragged(shape) for shape, _ in record.types)
            numbers = lengths if returned else [-(-n // size) for n in lengths]
            key = record, *numbers
            if key not in self._known:
                new.setdefault(key, (record, lengths))
            keys.append(key)
            arrays[i] = [*arrays[i], *_added(record, arrays[i], lengths, size)]
        fresh = self._expanded(list(new.values()), size)
        made = dict(zip(new, fresh, strict=True))
        for i, key in zip(tiled, keys, strict=True):
            records[i] = made[key] if key in made else self._known[key]
        for key, expanded in made.items():
            self._known[key] = expanded
        return records, arrays

    def _expanded(
        self, new: Sequence[tuple[TiledRecord, list[int]]], size: int
    ) -> list[ExpandedRecord]:
        """Returns records for lengths."""
        if not new:
            return []
        tiles = [[-(-n // size) for n in lengths] for _, lengths in new]
        templates = [record.template for record, _ in new]
        num_arrays = [record.num_arrays for record, _ in new]
        types = self.regions.registry.types
        whole = repeat_nodes(types, templates, tiles, num_arrays)
        records = []
        for k, ((record, lengths), counts) in enumerate(zip(new, tiles, strict=True)):
            runs, kinds = _results(record, lengths, counts, size)
            template = record.template
            by_tile = template.symbol[template.kind == BY_TILE]
            rows = (
                int(np.array(lengths)[by_tile].sum()),
                int(np.array(counts)[by_tile].sum()) * size,
            )
            records.append(
                ExpandedRecord(
                    whole,
                    k,
                    record.structure,
                    kinds,
                    record.calls,
                    record.num_arrays + record.num_added,
                    record.ragged,
                    record.places,
                    rows,
                    runs,
                )
            )
        return records


def _results(
    record: TiledRecord, lengths: Sequence[int], counts: Sequence[int], size: int
) -> tuple[dict[int, TileRun], tuple[Kind, ...]]:
    """Returns (the ragged results that tiles make up, types of all results) of an instance."""
    elsewhere = {position for position, _, _ in record.ragged}
    symbols = iter(record.template.output_symbol.tolist())
    runs: dict[int, TileRun] = {}
    kinds: list[Kind] = []
    for position, (shape, dtype) in enumerate(record.types):
        symbol = -1 if position in elsewhere else next(symbols)
        if symbol >= 0:
            (axis,) = ragged_axes(shape)
            tile = tuple(size if a == axis else d for a, d in enumerate(shape))
            shape = tuple(lengths[symbol] if a == axis else d for a, d in enumerate(shape))
            runs[position] = TileRun(0, counts[symbol], (tile, dtype), shape, axis)
        kinds.append((shape, dtype))
    return runs, tuple(kinds)


def _refuse_nothing(
    record: TiledRecord, lengths: Sequence[int], instance: int, arrays: Sequence[Array]
) -> None:
    """Raises `ValueError` if something is taken of rows that an instance has none of."""
    if all(lengths):
        return
    for extent, numbers, operation in record.nonempty:
        if extent_at(extent, {s: lengths[k] for s, k in numbers.items()}) == 0:
            raise nothing_error(instance, arrays, operation, extent)


def _added(
    record: TiledRecord, arrays: Sequence[Array], lengths: Sequence[int], size: int
) -> list[Array]:
    """Returns the arrays that nodes on tiles read, behind those of the instance."""
    values = [
        extent_at(extent, {s: lengths[k] for s, k in numbers.items()})
        for extent, numbers in record.lengths
    ]
    added: list[Array] = [np.array(values, np.int32)]
    added += [_tiles(arrays[x.leaf], x, size) for x in record.arrays]
    for symbol in record.starts:
        starts = np.arange(0, lengths[symbol], size, dtype=np.int32)
        added += [starts, np.minimum(lengths[symbol] - starts, size)]
    return added


def _tiles(array: Array, part: TiledArray, size: int) -> Array:
    """Returns [k, ...], the tiles of an array or of a part of it; the last row is repeated."""
    if not isinstance(array, Tracer):
        array = fetched(array)
    if part.path:
        array = functools.reduce(lambda x, index: x[index], part.path, array)
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    rows = xp.moveaxis(array, part.axis, 0) if part.axis else array
    count, rest = rows.shape[0], rows.shape[1:]
    missing = -count % size
    if missing and xp is np:
        padded = np.empty((count + missing, *rest), rows.dtype)
        padded[:count], padded[count:] = rows, rows[-1]
        rows = padded
    elif missing:
        rows = jnp.concatenate([rows, jnp.repeat(rows[-1:], missing, 0)])
    tiles = rows.reshape(-1 if count else 0, size, *rest)
    return xp.moveaxis(tiles, 1, 1 + part.axis) if part.axis else tiles


def tiled_rows(records: Sequence[Record], size: int) -> TiledRows | None:
    """Returns what nodes on tiles of so many rows run over; None if there are none."""
    if not some_are_ragged(records):
        return None
    counts = [record.rows for record in records if isinstance(record, ExpandedRecord)]
    return TiledRows(size, *map(sum, zip(*counts, strict=True))) if counts else None


def on_tiles(
    record: RaggedRecord, regions: Regions, leaf_of: Mapping[str, Sequence[int]]
) -> RaggedRecord:
    """Returns the record of an instance whose ragged nodes become nodes on tiles, if it has any."""
    types = set(record.whole.node_type.tolist())
    if not any(map(regions.is_ragged, types)):
        return record
    return _TemplateMaker(record, regions, leaf_of).make()


# What takes the place of nodes of a type, its symbols, and (step, kind, symbol) of its nodes.
_NodesOfType = tuple[NodeOnTiles, list[int], list[tuple[StepOnTiles, int, int]]]


class _TemplateMaker:
    """Makes the template of an instance."""

    def __init__(
        self, record: RaggedRecord, regions: Regions, leaf_of: Mapping[str, Sequence[int]]
    ):
        self.record, self.regions, self.leaf_of = record, regions, leaf_of
        self.tiles = regions.tiles
        self.symbols: dict[str, int] = {}
        self.inputs: list[InputRows | TileInput] = []
        self.input_kind: list[int] = []
        self.input_symbol: list[int] = []
        self.arrays: dict[TiledArray, int] = {}
        self.starts: dict[int, tuple[int, int]] = {}  # places among `inputs`, by symbol
        self._row_refs: dict[int, list[int]] = {}
        self.lengths: dict[tuple[AxisSize, tuple], int] = {}
        self.nonempty: dict[tuple[AxisSize, tuple, str], None] = {}
        self._nodes: dict[int, _NodesOfType] = {}
        self._kinds: dict[int, tuple[int, int, ValueType] | None] = {}  # see `_tiled`
        self.columns: list[tuple[int, int, int, int, int, int]] = []  # of nodes
        self.operand: list[int] = []
        self.num_values = 0

    def make(self) -> TiledRecord:
        """Returns the record, for all lengths."""
        graph: Graph = self.record.whole
        inputs = [ref for chunk in graph.inputs for ref in self._inputs(chunk)]
        values: list[int] = []
        ends = graph.operand_ptr.tolist()
        operands = graph.operand.tolist()
        node_types = graph.node_type.tolist()
        num_results = {
            t: -1 if self.regions.is_ragged(t) else graph.types[t].num_results
            for t in set(node_types)
        }
        for type_id, begin, end in zip(node_types, ends, ends[1:], strict=False):
            read = [values[v] if v >= 0 else inputs[-1 - v] for v in operands[begin:end]]
            results = num_results[type_id]
            if results < 0:
                values += self._on_tiles(type_id, read)
            else:
                values += self._node(type_id, ONCE, -1, results, read)
        outputs = [values[v] if v >= 0 else inputs[-1 - v] for v in graph.outputs.tolist()]
        elsewhere = {position for position, _, _ in self.record.ragged}
        shapes = [s for k, (s, _) in enumerate(self.record.types) if k not in elsewhere]
        output_symbol = [self._symbol_of(s) if is_ragged(s) else -1 for s in shapes]
        return self._record(outputs, output_symbol)

    def _record(self, outputs: list[int], output_symbol: list[int]) -> TiledRecord:
        record = self.record
        node_type, kind, symbol, results, arity, identity = (
            np.array(self.columns, np.int64).reshape(-1, 6).T
        )
        # Arrays behind those of the instance: lengths, tiles, then first rows and their numbers.
        first = 1 + len(self.arrays)
        for k, (start, count) in enumerate(self.starts.values()):
            for ref, leaf in ((start, first + 2 * k), (count, first + 2 * k + 1)):
                self.inputs[ref] = replace(self.inputs[ref], leaf=leaf)
        added = first + 2 * len(self.starts)
        template = TileTemplate(
            node_type.astype(np.int32),
            kind,
            symbol,
            results,
            arity,
            np.array(self.operand, np.int64),
            tuple([_behind(x, record.num_arrays, added) for x in self.inputs]),
            np.array(self.input_kind, np.int64),
            np.array(self.input_symbol, np.int64),
            identity,
            np.array(outputs, np.int64),
            np.array(output_symbol, np.int64),
            len(self.symbols),
        )
        return TiledRecord(
            record.whole,
            record.index,
            record.structure,
            record.types,
            record.calls,
            record.num_arrays,
            record.ragged,
            record.places,
            template,
            tuple(self.leaf_of[s][0] for s in self.symbols),
            tuple(self.arrays),
            tuple(self.starts),
            tuple((extent, dict(numbers)) for extent, numbers in self.lengths),
            tuple((extent, dict(numbers), name) for extent, numbers, name in self.nonempty),
        )

    def _symbol(self, name: str) -> int:
        return self.symbols.setdefault(name, len(self.symbols))

    def _symbol_of(self, shape: Sequence[AxisSize]) -> int:
        """Returns the symbol of the ragged axis of a shape."""
        (axis,) = ragged_axes(shape)
        return self._symbol(str(shape[axis]))

    def _input(self, x: InputRows | TileInput) -> int:
        """Adds an input, or several; returns a reference to the first."""
        first = len(self.input_kind)
        kind, symbol = (x.kind, x.symbol) if isinstance(x, TileInput) else (ONCE, -1)
        self.input_kind += [kind] * len(x)
        self.input_symbol += [symbol] * len(x)
        self.inputs.append(x)
        return -1 - first

    def _inputs(self, chunk: InputRows) -> list[int]:
        """Returns references to the inputs of a chunk of the graph."""
        type_id = id(chunk.type)
        tiled = self._kinds[type_id] if type_id in self._kinds else self._tiled(chunk.type)
        if tiled is None:
            first = self._input(chunk)
            return [first - k for k in range(len(chunk))]
        assert chunk.leaf is not None
        assert chunk.rows is None
        axis, symbol, kind = tiled
        array = TiledArray(chunk.leaf, chunk.path, axis, symbol)
        leaf = 1 + self.arrays.setdefault(array, len(self.arrays))
        self.inputs.append(TileInput(kind, BY_TILE, symbol, leaf))
        self.input_kind.append(BY_TILE)
        self.input_symbol.append(symbol)
        return [-len(self.input_kind)]

    def _tiled(self, value_type: ValueType) -> tuple[int, int, ValueType] | None:
        """Returns (ragged axis, symbol, type of tiles) of inputs; None if they are not ragged."""
        tiled, shape = None, value_type.shape
        if is_ragged(shape):
            (axis,) = ragged_axes(shape)
            kind = ValueType(self.tiles.of_tile(shape), value_type.dtype, value_type.weak)
            tiled = axis, self._symbol_of(shape), kind
        self._kinds[id(value_type)] = tiled
        return tiled

    def _node(
        self,
        type_id: int,
        kind: int,
        symbol: int,
        results: int,
        read: Sequence[int],
        identity: int = -1,
    ) -> range:
        """Adds a node; returns references to its results."""
        self.columns.append((type_id, kind, symbol, results, len(read), identity))
        self.operand += read
        first = self.num_values
        self.num_values = end = first + results
        return range(first, end)

    def _on_tiles(self, type_id: int, read: list[int]) -> list[int]:
        """Adds what takes the place of a ragged node; returns references to its results."""
        known = self._nodes.get(type_id)
        if known is None:
            known = self._nodes[type_id] = self._node_of(type_id)
        node, symbols, steps = known
        slots = read
        if node.lengths or node.nonempty:
            numbers = tuple(zip(node.symbols, symbols, strict=True))
            slots += [self._length(*length, numbers) for length in node.lengths]
            self.nonempty.update(((e, numbers, name), None) for e, name in node.nonempty)
        for step, kind, symbol in steps:
            values = [slots[k] for k in step.reads]
            identity = -1
            if step.combines:
                identity = self._nothing(step, symbol)
            elif step.reads_rows:
                values += self._rows(symbol)
            slots += self._node(step.type, kind, symbol, step.writes, values, identity)
        return [slots[k] for k in node.returned]

    def _node_of(self, type_id: int) -> _NodesOfType:
        """Returns what takes the place of nodes of a type."""
        ragged = self.regions.on_tiles(type_id)
        node = self.tiles.nodes(ragged)
        assert isinstance(node, NodeOnTiles)  # as all ragged nodes that are left
        symbols = list(map(self._symbol, ragged.symbols))
        steps = []
        for step in node.steps:
            symbol = symbols[step.symbol] if step.symbol >= 0 else -1
            kind = COMBINED if step.combines else ONCE if symbol < 0 else BY_TILE
            steps.append((step, kind, symbol))
        return node, symbols, steps

    def _nothing(self, step: StepOnTiles, symbol: int) -> int:
        """Returns the first of the inputs in the place of combined results of no tile."""
        kinds = self.regions.registry.node_types[step.type].results
        refs = [
            self._input(TileInput(kind, IF_NONE, symbol, identity=x))
            for kind, x in zip(kinds, step.identity, strict=True)
        ]
        return -1 - refs[0]

    def _rows(self, symbol: int) -> list[int]:
        """Returns references to the first rows of tiles, and to how many there are."""
        if symbol not in self.starts:
            first = len(self.inputs)
            refs = [self._input(TileInput(ROW_NUMBER, BY_TILE, symbol)) for _ in range(2)]
            self.starts[symbol] = first, first + 1
            self._row_refs[symbol] = refs
        return self._row_refs[symbol]

    def _length(
        self, extent: AxisSize, kind: ValueType, numbers: tuple[tuple[str, int], ...]
    ) -> int:
        """Returns a reference to the value of an extent."""
        key = extent, numbers
        row = self.lengths.setdefault(key, len(self.lengths))
        return self._input(TileInput(kind, ONCE, -1, LENGTHS, row))


def _behind(x: InputRows | TileInput, num_arrays: int, added: int) -> InputRows | TileInput:
    """Returns an input that reads the result of a call behind the arrays added."""
    if isinstance(x, InputRows) and x.leaf is not None and x.leaf >= num_arrays:
        return replace(x, leaf=x.leaf + added)
    return x
