"""Templates of recorded graphs: what graphs of nodes on arrays become, for all lengths.

A ragged node becomes a few nodes on tiles, the same for every node of its type. So what stands for
a type is written down once, as rows of a table, and the nodes of all instances that were recorded
together are looked up in it at once. Values and inputs are numbered anew; a node that returns what
it has read is left out of account, and who reads its result reads that instead.

Letters: `B` instances; `N` nodes, `V` values and `I` inputs of the recorded graph; `M` nodes of
the templates; `Y` symbols, by name.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes
from jedbatch._ragged.regions import Regions
from jedbatch._ragged.tile_types import ROW_NUMBER, NodeOnTiles
from jedbatch._ragged.tiled_graph import (
    BY_TILE,
    COMBINED,
    IF_NONE,
    JOINED,
    ONCE,
    TileInput,
    TileTemplates,
)
from jedbatch._support.types import AxisSize

LENGTHS = 0  # the first array behind those of an instance: what depends on lengths, int32[...]
OPERAND, LENGTH, RESULT, ROWS = range(4)  # where a node on tiles finds what it reads
Numbers = dict[str, int]  # of symbols, by the names that an extent has for them


class TiledArrays(NamedTuple):
    """Arrays of an instance whose tiles become one array, one after the other.

    Attributes:
      parts: (number of the array, indices that lead to the part that is meant, axis of the rows).
      symbols: for each, the number of the symbol that is how many rows it has.
      whole: the numbers, if all are arrays as they are, with rows along the first axis.
    """

    parts: tuple[tuple[int, tuple[Any, ...], int], ...]
    symbols: tuple[int, ...]
    whole: tuple[int, ...] | None


class TemplateForm(NamedTuple):
    """The symbols and arrays of the template of one instance.

    Attributes:
      symbols: the names of symbols, in the order of their numbers.
      arrays: that are read as tiles.
      starts: the symbols of which the first rows of tiles are read, and how many rows they have:
        an array for each, behind those.
      lengths: the extents that are read, in terms of symbols.
      nonempty: extents that must not be 0, each with the operation that says so.
    """

    symbols: tuple[str, ...]
    arrays: tuple[TiledArrays, ...]
    starts: tuple[int, ...]
    lengths: tuple[tuple[AxisSize, Numbers], ...]
    nonempty: tuple[tuple[AxisSize, Numbers, str], ...]

    @property
    def num_added(self) -> int:
        """How many arrays there are behind those of the instance."""
        return 1 + len(self.arrays) + len(self.starts)


class _Table:
    """The nodes in place of those of each kind, a type and a number of operands.

    Attributes:
      begin, count: int64[kinds], the rows of each.
      columns: of rows, int64[6, rows]: type, how often, symbol, results, arity, and whether the
        row reads which rows those of a tile are.
      identity: of rows, the values of no tile, results of nodes or what they read.
      identity_names: for each of them, one row after the other, the symbol of the tiles.
      read_begin, reads: the rows of (where it is found, position or step, result, symbol of tiles
        that are joined or -1) that each reads.
      lengths: int64[kinds], how many extents the nodes read.
      returned_begin, returned: rows of the same for the results that a recorded node had.
      nodes: (what takes the place of nodes, numbers of its symbols); None of those that stay.
    """

    def __init__(
        self, graph: Graph, regions: Regions, kinds: Sequence[tuple[int, int]], names: "_Names"
    ):
        columns: list[tuple[int, int, int, int, int, int]] = []
        reads: list[tuple[int, int, int, int]] = []
        returned: list[tuple[int, int, int]] = []
        self.identity: list[tuple[np.ndarray, ...]] = []
        names_of: list[int] = []
        self.nodes: list[tuple[NodeOnTiles, list[int]] | None] = []
        begin, read_begin, returned_begin, lengths = [0], [0], [0], []
        for type_id, arity in kinds:
            operands = [(OPERAND, k, 0) for k in range(arity)]
            if regions.is_ragged(type_id):
                ragged = regions.on_tiles(type_id)
                node = regions.tiles.nodes(ragged)
                assert isinstance(node, NodeOnTiles)  # as all ragged nodes that are left
                symbols = list(map(names.number, ragged.symbols))
                slots = operands + [(LENGTH, k, 0) for k in range(len(node.lengths))]
                for k, step in enumerate(node.steps):
                    rows_of = [symbols[s] if s >= 0 else -1 for s in step.rows_of]
                    rows_of += [-1] * (len(step.reads) - len(rows_of))
                    own = [(*slots[s], n) for s, n in zip(step.reads, rows_of, strict=True)]
                    symbol = symbols[step.symbol] if step.symbol >= 0 else -1
                    kind = COMBINED if step.combines else ONCE if symbol < 0 else BY_TILE
                    kind = JOINED if step.joins else kind
                    has_rows = step.reads_rows and not step.combines
                    own += [(ROWS, 0, 0, -1), (ROWS, 1, 0, -1)] if has_rows else []
                    reads += own
                    read_begin.append(len(reads))
                    columns.append((step.type, kind, symbol, step.writes, len(own), has_rows))
                    self.identity.append(step.identity)
                    count = len(step.identity)
                    names_of += rows_of[len(rows_of) - count :] if step.joins else [symbol] * count
                    slots += [(RESULT, k, r) for r in range(step.writes)]
                returned += [slots[s] for s in node.returned]
                lengths.append(len(node.lengths))
                self.nodes.append((node, symbols))
            else:
                results = graph.types[type_id].num_results
                reads += [(*place, -1) for place in operands]
                read_begin.append(len(reads))
                columns.append((type_id, ONCE, -1, results, arity, 0))
                self.identity.append(())
                returned += [(RESULT, 0, r) for r in range(results)]
                lengths.append(0)
                self.nodes.append(None)
            begin.append(len(columns))
            returned_begin.append(len(returned))
        self.begin, self.count = np.array(begin[:-1]), np.diff(begin)
        self.columns = np.array(columns, np.int64).reshape(-1, 6).T
        self.read_begin = np.array(read_begin)
        self.reads = np.array(reads, np.int64).reshape(-1, 4).T
        self.lengths = np.array(lengths, np.int64)
        self.returned_begin = np.array(returned_begin)
        self.returned = np.array(returned, np.int64).reshape(-1, 3).T
        self.num_identity = np.array(list(map(len, self.identity)), np.int64)
        self.identity_begin = pointers(self.num_identity)
        self.identity_names = np.array(names_of, np.int64)


class _Names(dict):
    """Numbers of the names of symbols, in the order in which they come up."""

    def number(self, name: str) -> int:
        """Returns the number of a name."""
        return self.setdefault(name, len(self))

    def of_shape(self, shape: Sequence[AxisSize]) -> int:
        """Returns the number of the symbol of the ragged axis of a shape; -1 if it has none."""
        if not is_ragged(shape):
            return -1
        (axis,) = ragged_axes(shape)
        return self.number(str(shape[axis]))


def make_templates(
    graph: Graph,
    regions: Regions,
    shapes: Sequence[Sequence[tuple[AxisSize, ...]]],
    num_arrays: Sequence[int],
) -> tuple[TileTemplates, list[TemplateForm]]:
    """Returns the templates of instances, and what belongs to each.

    Args:
      graph: of the instances, with nodes on arrays of any length.
      regions: the regions met so far.
      shapes: of the results that the graph of each instance returns.
      num_arrays: of each instance.
    """
    return _Maker(graph, regions, shapes).make(num_arrays)


class _Positions:
    """The nodes of templates: positions.

    Attributes:
      kind: int64[N], the kind of each recorded node.
      first: int64[N + 1], its first position.
      row: int64[M], the row of the table of each position.
      node, instance: int64[M], the recorded node and the instance of each.
      node_instance: int64[N], the instance of each recorded node.
      types, repeats, name, results, arity, reads_rows: int64[M], columns of the table.
      ptr: int64[B + 1], the positions of each instance.
      value_begin: int64[M + 1], the results of positions.
    """

    def __init__(self, graph: Graph, table: _Table, kind: np.ndarray):
        self.kind = kind
        steps = table.count[kind]
        self.first = pointers(steps)
        self.row = ranges(table.begin[kind], steps)
        self.node = np.repeat(np.arange(len(steps)), steps)
        self.node_instance = _owners(graph.node_ptr)
        self.instance = self.node_instance[self.node]
        columns = table.columns[:, self.row]
        self.types, self.repeats, self.name, self.results, self.arity, self.reads_rows = columns
        self.ptr = self.first[graph.node_ptr]
        self.value_begin = pointers(self.results)


class _InputNumbers:
    """Numbers of inputs: those recorded, then what nodes on tiles read besides, node after node.

    Attributes:
      starting: the positions that are the first to read which rows tiles of a symbol are.
      counts: int64[M], inputs that there are because of a position.
      begin: int64[B + 1], the inputs of each instance.
      moved: int64[B + 1], how much further on the recorded inputs of each instance are.
      of_lengths: int64[N], the first input that is an extent read by a node.
      of_position: int64[M], the first input that there is because of a position.
      of_rows: int64[B, Y], the input of the first rows of the tiles of a symbol.
    """

    def __init__(self, graph: Graph, table: _Table, positions: _Positions, num_names: int):
        name, instance = positions.name, positions.instance
        mine = np.flatnonzero(positions.reads_rows)
        by_symbol = instance[mine] * num_names + name[mine]
        self.starting = mine[np.unique(by_symbol, return_index=True)[1]]
        self.counts = table.num_identity[positions.row]
        self.counts[self.starting] = 2
        lengths = pointers(table.lengths[positions.kind])  # extents come before what steps read
        others = pointers(self.counts)
        self.moved = lengths[graph.node_ptr] + others[positions.ptr]
        self.begin = graph.input_ptr + self.moved
        behind = graph.input_ptr[1:]  # the recorded inputs of each instance
        self.of_lengths = behind[positions.node_instance] + lengths[:-1]
        self.of_lengths += others[positions.first[:-1]]
        self.of_position = behind[instance] + lengths[positions.node + 1] + others[:-1]
        self.of_rows = np.full((graph.num_instances, num_names), -1, np.int64)
        starts = instance[self.starting], name[self.starting]
        self.of_rows[starts] = self.of_position[self.starting]


class _Maker:
    """Makes the templates of instances.

    Attributes:
      value_now: int64[V], what each recorded value is now, among all instances.
    """

    def __init__(
        self, graph: Graph, regions: Regions, shapes: Sequence[Sequence[tuple[AxisSize, ...]]]
    ):
        self.graph, self.regions = graph, regions
        self.names = names = _Names()
        arity = np.diff(graph.operand_ptr)
        widest = int(arity.max(initial=0)) + 1
        both = graph.node_type.astype(np.int64) * widest + arity
        distinct, kind = np.unique(both, return_inverse=True)
        kinds = list(zip(*(x.tolist() for x in np.divmod(distinct, widest)), strict=True))
        self.table = _Table(graph, regions, kinds, names)
        tiled = _TiledTypes(regions, names)
        self.of_chunks = [[tiled.find(chunk.type) for chunk in own] for own in graph.chunks]
        self.output_name = np.array([names.of_shape(s) for own in shapes for s in own], np.int64)
        self.positions = _Positions(graph, self.table, kind)
        self.inputs = _InputNumbers(graph, self.table, self.positions, len(names))
        self.value_now = np.empty(graph.num_values, np.int64)
        self._find_values()

    def _find_values(self) -> None:
        graph, table, positions = self.graph, self.table, self.positions
        maker = graph.value_node
        at = table.returned_begin[positions.kind[maker]] + graph.value_slot
        where, which, result = table.returned[:, at]
        step = np.where(where == RESULT, positions.first[maker] + which, 0)
        of_length = -1 - (self.inputs.of_lengths[maker] + which)
        of_step = positions.value_begin[step] + result
        self.value_now[:] = np.where(where == LENGTH, of_length, of_step)
        for v in np.flatnonzero(where == OPERAND).tolist():  # what is read before is known
            reference = graph.operand[graph.operand_ptr[maker[v]] + which[v]]
            self.value_now[v] = self._now(np.array([reference]))[0]

    def _now(self, references: np.ndarray) -> np.ndarray:
        """Returns what references of the recorded graph refer to now, among all instances."""
        now = references.astype(np.int64)
        of_value = np.flatnonzero(now >= 0)
        now[of_value] = self.value_now[now[of_value]]
        of_input = np.flatnonzero(references < 0)
        owner = np.searchsorted(self.graph.input_ptr, -1 - now[of_input], side="right") - 1
        now[of_input] -= self.inputs.moved[owner]
        return now

    def _read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what nodes read, among all instances.

        The second result is the position that reads, the third the name of the symbol of tiles that
        are joined, or -1.
        """
        graph, table, positions, numbered = self.graph, self.table, self.positions, self.inputs
        entries = ranges(table.read_begin[positions.row], positions.arity)
        where, which, result, name = table.reads[:, entries]
        reader = np.repeat(np.arange(len(positions.row)), positions.arity)
        read = np.empty(len(reader), np.int64)
        for place in np.unique(where).tolist():
            mine = np.flatnonzero(where == place)
            k, position = which[mine], reader[mine]
            node = positions.node[position]
            if place == OPERAND:
                read[mine] = self._now(graph.operand[graph.operand_ptr[node] + k])
            elif place == LENGTH:
                read[mine] = -1 - (numbered.of_lengths[node] + k)
            elif place == RESULT:
                read[mine] = positions.value_begin[positions.first[node] + k] + result[mine]
            else:
                starts = positions.instance[position], positions.name[position]
                read[mine] = -1 - (numbered.of_rows[starts] + k)
        return read, reader, name

    def _own(self, references: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Returns references among all instances as references within each."""
        base = self.positions.value_begin[self.positions.ptr]
        return references + np.where(references >= 0, -base[owner], self.inputs.begin[owner])

    def _input_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (how often inputs are repeated, the names of their symbols)."""
        positions, numbered = self.positions, self.inputs
        total, starting = int(numbered.begin[-1]), numbered.starting
        kind, name = np.full(total, ONCE, np.int64), np.full(total, -1, np.int64)
        recorded = np.array(
            [-1 if tiled is None else tiled.name for own in self.of_chunks for tiled in own],
            np.int64,
        )
        recorded = np.repeat(recorded, [len(x) for own in self.graph.chunks for x in own])
        now = np.arange(len(recorded)) + numbered.moved[_owners(self.graph.input_ptr)]
        name[now] = recorded
        kind[now[recorded >= 0]] = BY_TILE
        for k in range(2):
            kind[numbered.of_position[starting] + k] = BY_TILE
            name[numbered.of_position[starting] + k] = positions.name[starting]
        counts = self.table.num_identity[positions.row]
        if_none = ranges(numbered.of_position, counts)
        entries = ranges(self.table.identity_begin[positions.row], counts)
        kind[if_none], name[if_none] = IF_NONE, self.table.identity_names[entries]
        return kind, name

    def _is_used(self, input_name: np.ndarray) -> np.ndarray:
        """Returns bool[B, Y], the symbols of each instance."""
        positions, numbered = self.positions, self.inputs
        used = np.zeros((self.graph.num_instances, len(self.names)), bool)
        for owner, name in (
            (positions.instance, positions.name),
            (_owners(numbered.begin), input_name),
            (_owners(self.graph.output_ptr), self.output_name),
        ):
            used[owner[name >= 0], name[name >= 0]] = True
        for k, entry in enumerate(self.table.nodes):
            if entry is not None:
                owners = np.unique(positions.node_instance[positions.kind == k])
                used[np.ix_(owners, np.array(entry[1], np.int64))] = True
        return used

    def make(self, num_arrays: Sequence[int]) -> tuple[TileTemplates, list[TemplateForm]]:
        """Returns what `make_templates` does."""
        positions, numbered = self.positions, self.inputs
        graph, output_owner = self.graph, _owners(self.graph.output_ptr)
        input_kind, input_name = self._input_columns()
        is_used = self._is_used(input_name)
        symbol = np.where(is_used, is_used.cumsum(1) - 1, -1)

        def numbers(owner: np.ndarray, name: np.ndarray) -> np.ndarray:
            return np.where(name < 0, -1, symbol[owner, name])

        read, reader, joined_name = self._read()
        forms, inputs = self._forms(is_used, symbol, num_arrays)
        has_identity = self.table.num_identity[positions.row] > 0
        own_input = numbered.of_position - numbered.begin[positions.instance]
        templates = TileTemplates(
            positions.types.astype(np.int32),
            positions.repeats,
            numbers(positions.instance, positions.name),
            positions.results,
            positions.arity,
            self._own(read, positions.instance[reader]),
            numbers(positions.instance[reader], joined_name),
            inputs,
            input_kind,
            numbers(_owners(numbered.begin), input_name),
            np.where(has_identity, own_input, -1),
            self._own(self._now(graph.outputs), output_owner),
            numbers(output_owner, self.output_name),
            is_used.sum(1),
            positions.ptr,
            numbered.begin,
            graph.output_ptr,
        )
        return templates, forms

    def _forms(
        self, is_used: np.ndarray, symbol: np.ndarray, num_arrays: Sequence[int]
    ) -> tuple[list[TemplateForm], list[tuple[InputRows | TileInput, ...]]]:
        """Returns what belongs to the templates of instances, and their inputs."""
        spelled, positions = list(self.names), self.positions
        asks = np.array([e is not None and e[0].asks for e in self.table.nodes], bool)
        adds = asks[positions.kind]  # recorded nodes with inputs, or conditions, of their own
        adds[positions.node[self.inputs.counts > 0]] = True
        ends = pointers(adds)[self.graph.node_ptr].tolist()
        nodes = np.flatnonzero(adds).tolist()
        forms, inputs = [], []
        for i, chunks in enumerate(self.graph.chunks):
            own = _InstanceInputs(symbol[i].tolist())
            own.add_recorded(chunks, self.of_chunks[i])
            for node in nodes[ends[i] : ends[i + 1]]:
                self._add_inputs(own, node)
            forms.append(own.form([spelled[k] for k in np.flatnonzero(is_used[i]).tolist()]))
            inputs.append(own.behind(num_arrays[i], forms[-1].num_added))
        return forms, inputs

    def _add_inputs(self, own: "_InstanceInputs", node: int) -> None:
        """Adds the inputs that there are because of a node."""
        table, positions = self.table, self.positions
        entry = table.nodes[positions.kind[node]]
        if entry is not None:
            own.add_lengths(*entry)
        for position in range(*positions.first[node : node + 2].tolist()):
            if self.inputs.counts[position]:
                step = self.regions.registry.node_types[positions.types[position]]
                joins = positions.repeats[position] == JOINED
                row = positions.row[position]
                identity = table.identity[row]
                kinds = (step.operands if joins else step.results)[-len(identity) :]
                names = table.identity_names[slice(*table.identity_begin[row : row + 2])]
                own.add_of_step(kinds, names.tolist() or [int(positions.name[position])], identity)


class _InstanceInputs:
    """The inputs of one instance.

    Args:
      symbols: the number of the symbol of each name; -1 of those that it has not.
    """

    def __init__(self, symbols: Sequence[int]):
        self._symbols = symbols
        self._recorded: list[InputRows | TileInput] = []
        self._added: list[TileInput] = []
        self._arrays: list[TiledArrays] = []
        self._starts: list[int] = []
        self._lengths: dict[tuple[AxisSize, tuple], int] = {}
        self._nonempty: dict[tuple[AxisSize, tuple, str], None] = {}

    def add_recorded(
        self, chunks: Sequence[InputRows], of_chunks: Sequence["_TiledType | None"]
    ) -> None:
        """Adds the inputs that were recorded; neighbours of one type of tile are one array."""
        for tiled, members in itertools.groupby(zip(chunks, of_chunks, strict=True), _type_of_tile):
            if tiled is None:
                self._recorded += [chunk for chunk, _ in members]
                continue
            parts, symbols, is_whole = [], [], True
            for chunk, of_chunk in members:
                assert chunk.leaf is not None
                assert chunk.rows is None
                assert of_chunk is not None
                parts.append((chunk.leaf, chunk.path, of_chunk.axis))
                symbols.append(self._symbols[of_chunk.name])
                is_whole = is_whole and not chunk.path and not of_chunk.axis
            whole = tuple([leaf for leaf, _, _ in parts]) if is_whole else None
            self._arrays.append(TiledArrays(tuple(parts), tuple(symbols), whole))
            self._recorded.append(TileInput(tiled, BY_TILE, tuple(symbols), len(self._arrays)))

    def add_lengths(self, node: NodeOnTiles, names: Sequence[int]) -> None:
        """Adds the extents that a node reads, and those that must not be 0."""
        numbers = tuple([(s, self._symbols[k]) for s, k in zip(node.symbols, names, strict=True)])
        for extent, value_type in node.lengths:
            row = self._lengths.setdefault((extent, numbers), len(self._lengths))
            self._added.append(TileInput(value_type, ONCE, (), LENGTHS, row))
        self._nonempty.update(((extent, numbers, name), None) for extent, name in node.nonempty)

    def add_of_step(
        self, kinds: Sequence[ValueType], names: Sequence[int], identity: Sequence[np.ndarray]
    ) -> None:
        """Adds what stands for values of no tile, of these types; or else which rows tiles are."""
        symbols = [self._symbols[name] for name in names]
        if identity:
            self._added += [
                TileInput(kind, IF_NONE, (symbol,), identity=x)
                for kind, symbol, x in zip(kinds, symbols, identity, strict=True)
            ]
        else:
            leaf = 1 + len(self._arrays) + len(self._starts)
            self._starts += symbols
            self._added.append(TileInput(ROW_NUMBER, BY_TILE, (*symbols, *symbols), leaf))

    def form(self, names: Sequence[str]) -> TemplateForm:
        """Returns what belongs to the template, given the names of its symbols."""
        return TemplateForm(
            tuple(names),
            tuple(self._arrays),
            tuple(self._starts),
            tuple([(extent, dict(numbers)) for extent, numbers in self._lengths]),
            tuple([(extent, dict(numbers), by) for extent, numbers, by in self._nonempty]),
        )

    def behind(self, num_arrays: int, num_added: int) -> tuple[InputRows | TileInput, ...]:
        """Returns the inputs; results of calls are behind the arrays that are added."""
        recorded = [
            replace(x, leaf=x.leaf + num_added)
            if isinstance(x, InputRows) and x.leaf is not None and x.leaf >= num_arrays
            else x
            for x in self._recorded
        ]
        return *recorded, *self._added


class _TiledType(NamedTuple):
    """Inputs whose rows are there as tiles.

    Attributes:
      axis: of the rows.
      name: number of the name of the symbol that is how many there are.
      tile: the type of a tile.
    """

    axis: int
    name: int
    tile: ValueType


class _TiledTypes:
    """The types of inputs, some of which are ragged, as types of tiles."""

    def __init__(self, regions: Regions, names: _Names):
        self._regions, self._names = regions, names
        self._known: dict[int, _TiledType | None] = {}  # by the id of the type
        self._tiles: dict[ValueType, ValueType] = {}

    def find(self, value_type: ValueType) -> _TiledType | None:
        """Returns how rows of a type are there as tiles; None if it is not ragged."""
        if id(value_type) not in self._known:
            tiled, shape = None, value_type.shape
            if is_ragged(shape):
                (axis,) = ragged_axes(shape)
                of_tile = self._regions.tiles.of_tile(shape)
                tile = ValueType(of_tile, value_type.dtype, value_type.weak)
                tile = self._tiles.setdefault(tile, tile)
                tiled = _TiledType(axis, self._names.of_shape(shape), tile)
            self._known[id(value_type)] = tiled
        return self._known[id(value_type)]


def _type_of_tile(pair: tuple[InputRows, _TiledType | None]) -> ValueType | None:
    return None if pair[1] is None else pair[1].tile


def _owners(ptr: np.ndarray) -> np.ndarray:
    """Returns for everything between pointers the number of its row."""
    return np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
