"""Graphs of nodes on tiles, of instances of any length.

A *template* is the graph of an instance whose nodes are not repeated yet: it holds for all lengths.
With `k` tiles of the rows of an array, a node of it becomes

    ONCE        1 node
    BY_TILE     k nodes, one for each tile
    COMBINED    k - 1 nodes, which combine the results of k tiles two by two
    JOINED      1 node, which reads all k tiles of what it reads, and gives k of each result

and so do inputs, once or by tile. Operands of node t of the second kind are linear functions of t,
so that graphs are made of templates without running Python for every node. A node of the last kind
has room for a few more tiles (see `_ragged.joined_tiles`).

Letters: `M` nodes, `E` operands, `I` inputs, `O` outputs of templates, `S` symbols of instances,
`B` instances; `N` nodes of the graph.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.types import ValueType
from jedbatch._ragged.joined_tiles import tiles_joined
from jedbatch._ragged.tile_types import TileTypes

ONCE, BY_TILE, COMBINED, JOINED, IF_NONE = range(5)


@dataclass(frozen=True, eq=False)
class TileInput:
    """Inputs of a template that depend on lengths.

    Attributes:
      type: of each, with the rows of a tile.
      kind: ONCE, BY_TILE, or IF_NONE: there is one if there is no tile.
      symbols: the numbers of the symbols whose tiles they are, those of one after those of another.
      leaf: the array that they are rows of, counted behind the arrays of the instance.
      row: the row, if there is one.
      identity: the value, if it is there where there is no tile.
    """

    type: ValueType
    kind: int
    symbols: tuple[int, ...]
    leaf: int = 0
    row: int = 0
    identity: np.ndarray | None = None

    def rows(self, tiles: Sequence[int], num_arrays: int) -> InputRows | None:
        """Returns the inputs of an instance, given the tiles of its symbols; None if none."""
        count = sum([tiles[symbol] for symbol in self.symbols])
        if self.kind == IF_NONE:
            assert self.identity is not None
            return None if count else InputRows(self.type, self.identity[None])
        if self.kind == ONCE:
            return InputRows(self.type, np.array([self.row]), num_arrays + self.leaf)
        return InputRows(self.type, _all(count), num_arrays + self.leaf) if count else None


@functools.lru_cache(maxsize=1024)
def _all(count: int) -> np.ndarray:
    return np.arange(count)


@dataclass(frozen=True, eq=False)
class TileTemplates:
    """The graphs of instances for all lengths, one after the other.

    Values, inputs and symbols are numbered as in the graph of each instance.

    Attributes:
      node_type: int32[M].
      kind: int64[M], how often each node is repeated.
      symbol: int64[M], by whose tiles; -1 for nodes that are there once.
      results: int64[M], of each node.
      arity: int64[M], of each node.
      operand: int64[E], what nodes read. Combined ones have their parts twice: those of the left
        and those of the right. Joined ones have values without rows first.
      joined_symbol: int64[E], by whose tiles joined nodes read an operand, or whose value it is; -1
        of other operands.
      inputs: of each instance, in order.
      input_kind, input_symbol: int64[I], of each input.
      identity: int64[M], where there is no tile, the first input in the place of a combined node,
        or of what a joined one reads.
      outputs: int64[O].
      output_symbol: int64[O], whose tiles make up the result; -1 if it is one value.
      num_symbols: int64[B].
      node_ptr, input_ptr, output_ptr: int64[B + 1], those of each instance.
    """

    node_type: np.ndarray
    kind: np.ndarray
    symbol: np.ndarray
    results: np.ndarray
    arity: np.ndarray
    operand: np.ndarray
    joined_symbol: np.ndarray
    inputs: Sequence[tuple[InputRows | TileInput, ...]]
    input_kind: np.ndarray
    input_symbol: np.ndarray
    identity: np.ndarray
    outputs: np.ndarray
    output_symbol: np.ndarray
    num_symbols: np.ndarray
    node_ptr: np.ndarray
    input_ptr: np.ndarray
    output_ptr: np.ndarray

    @functools.cached_property
    def operand_ptr(self) -> np.ndarray:
        """int64[B + 1], the operands of each instance."""
        return pointers(self.arity)[self.node_ptr]

    def output_symbols(self, instance: int) -> list[int]:
        """Returns whose tiles make up the results of an instance."""
        return self.output_symbol[slice(*self.output_ptr[instance : instance + 2])].tolist()

    @functools.cached_property
    def reader(self) -> np.ndarray:
        """int64[E], the node that reads each operand."""
        return np.repeat(np.arange(len(self.arity)), self.arity)

    def symbol_values(self, values: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns values of the symbols of nodes and of operands, given those of each instance.

        Returns:
          int64[M], of joined nodes the largest, and 1 of nodes without a symbol; int64[E], 1 of
          operands that are not joined.
        """
        flat = np.array([*(x for own in values for x in own), 1], np.int64)
        base = np.repeat(pointers(self.num_symbols)[:-1], np.diff(self.node_ptr))
        of_nodes = flat[np.where(self.symbol < 0, -1, self.symbol + base)]
        joined = np.flatnonzero(self.joined_symbol >= 0)
        of_operands = np.ones(len(self.operand), np.int64)
        if len(joined):
            reader = self.reader[joined]
            of_operands[joined] = flat[self.joined_symbol[joined] + base[reader]]
            np.maximum.at(of_nodes, reader, of_operands[joined])
        return of_nodes, of_operands

    def count_rows(
        self, lengths: Sequence[Sequence[int]], tiles: Sequence[Sequence[int]], size: int
    ) -> tuple[int, int]:
        """Returns (rows that exist, rows computed) of all nodes on tiles.

        Args:
          lengths: of the symbols of each instance.
          tiles: of so many rows.
          size: rows of a tile.
        """
        num_tiles, _ = self.symbol_values(tiles)
        num_tiles = np.where(self.kind == JOINED, tiles_joined(num_tiles), num_tiles)
        on_tiles = (self.kind == BY_TILE) | (self.kind == JOINED)
        exist, _ = self.symbol_values(lengths)
        return int(exist[on_tiles].sum()), int(num_tiles[on_tiles].sum()) * size

    def joined(self, tiles: Sequence[Sequence[int]], types: TileTypes) -> "JoinedNodes":
        """Returns how nodes join tiles, given the tiles of the symbols of each instance."""
        most, of_operands = self.symbol_values(tiles)
        (nodes,) = np.nonzero(self.kind == JOINED)
        room, guarded = np.ones(len(self.kind), np.int64), most == 0
        room[nodes] = tiles_joined(most[nodes])
        guarded[self.reader[of_operands == 0]] = True
        node_type, singles = self.node_type.copy(), np.zeros((2, len(self.kind)), np.int64)
        kinds = np.stack([self.node_type[nodes], room[nodes], guarded[nodes]], axis=1)
        distinct, which = np.unique(kinds, axis=0, return_inverse=True)
        for k, (type_id, count, none) in enumerate(distinct.tolist()):
            own = nodes[which.ravel() == k]
            node_type[own] = types.joining(type_id, count, bool(none))
            singles[:, own] = np.array(types.singles[type_id])[:, None]
        return JoinedNodes(node_type, room, singles[0], singles[1], most, of_operands)

    @staticmethod
    def select(parts: Sequence[tuple["TileTemplates", int]]) -> "TileTemplates":
        """Returns the templates of some instances, in this order."""
        first = parts[0][0]
        numbers = [i for _, i in parts]
        if all(t is first for t, _ in parts) and numbers == list(range(len(first.inputs))):
            return first

        def joined(name: str, ptr: str) -> np.ndarray:
            ends = [(t, *getattr(t, ptr)[i : i + 2].tolist()) for t, i in parts]
            return np.concatenate([getattr(t, name)[a:b] for t, a, b in ends])

        def counted(ptr: str) -> np.ndarray:
            ends = [getattr(t, ptr)[i : i + 2] for t, i in parts]
            return pointers(np.array([b - a for a, b in ends]))

        of_nodes = ("node_type", "kind", "symbol", "results", "arity", "identity")
        of_inputs, of_outputs = ("input_kind", "input_symbol"), ("outputs", "output_symbol")
        return TileTemplates(
            operand=joined("operand", "operand_ptr"),
            joined_symbol=joined("joined_symbol", "operand_ptr"),
            inputs=[t.inputs[i] for t, i in parts],
            num_symbols=np.array([t.num_symbols[i] for t, i in parts]),
            node_ptr=counted("node_ptr"),
            input_ptr=counted("input_ptr"),
            output_ptr=counted("output_ptr"),
            **{name: joined(name, "node_ptr") for name in of_nodes},
            **{name: joined(name, "input_ptr") for name in of_inputs},
            **{name: joined(name, "output_ptr") for name in of_outputs},
        )


class JoinedNodes(NamedTuple):
    """How nodes of templates join tiles.

    Attributes:
      node_type: int32[M], the types of nodes, of those that join tiles for so many.
      room: int64[M], how many tiles they read of each array; 1 of other nodes.
      single_operands, single_results: int64[M], how many values there are ahead of tiles; 0 of
        other nodes.
      num_tiles: int64[M], how many tiles there are, of those that nodes join the most of an array;
        1 of nodes that are there once.
      operand_tiles: int64[E], how many there are of an operand of nodes that join them, or of the
        array that an operand is the length of; 1 of other operands.
    """

    node_type: np.ndarray
    room: np.ndarray
    single_operands: np.ndarray
    single_results: np.ndarray
    num_tiles: np.ndarray
    operand_tiles: np.ndarray


def repeat_nodes(
    tile_types: TileTypes,
    templates: TileTemplates,
    tiles: Sequence[Sequence[int]],
    num_arrays: Sequence[int],
) -> Graph:
    """Returns the graph of instances.

    Args:
      tile_types: of nodes.
      templates: of the instances.
      tiles: how many tiles there are, for each symbol of each instance.
      num_arrays: arrays of each instance, behind which those of tiles are.
    """
    joined = templates.joined(tiles, tile_types)
    node_ptr, input_ptr, output_ptr = templates.node_ptr, templates.input_ptr, templates.output_ptr
    nodes, outputs_of = np.diff(node_ptr), np.diff(output_ptr)
    values = pointers(templates.results)[node_ptr[:-1]]
    inputs, symbols = input_ptr[:-1], pointers(templates.num_symbols)[:-1]
    count_of = np.append(np.array([k for ks in tiles for k in ks], np.int64), 1)  # -1: once

    def of_symbols(column: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.where(column < 0, -1, column + np.repeat(symbols, sizes))

    def of_values(column: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return column + np.where(column < 0, -np.repeat(inputs, sizes), np.repeat(values, sizes))

    # Inputs: where those of each of a template begin, and how far apart they are.
    input_kind = templates.input_kind
    input_tiles = count_of[of_symbols(templates.input_symbol, np.diff(input_ptr))]
    input_count = np.where(input_kind == BY_TILE, input_tiles, 1)
    input_count = np.where(input_kind == IF_NONE, input_tiles == 0, input_count)
    input_begin = pointers(input_count)

    # Nodes, and their results.
    kind, results = templates.kind, templates.results
    num_tiles = joined.num_tiles
    counts = np.where(kind == COMBINED, np.maximum(num_tiles - 1, 0), num_tiles)
    counts = np.where(kind == JOINED, 1, counts)
    width = results + (results - joined.single_results) * (joined.room - 1)  # values of a node
    node_begin, value_begin = pointers(counts), pointers(counts * width)
    maker = np.repeat(np.arange(len(kind)), results)
    result = ranges(np.zeros(len(kind), np.int64), results)
    tiled = np.maximum(result - joined.single_results[maker], 0)  # results that are tiles, before
    base = value_begin[maker] + result + tiled * (joined.room - 1)[maker]
    step = np.where(kind == BY_TILE, results, 0)[maker]
    step = np.where((kind == JOINED)[maker] & (result >= joined.single_results[maker]), 1, step)

    def located(references: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where the values of references begin, and how far apart they are."""
        of_input = -1 - np.minimum(references, -1)
        own = np.maximum(references, 0)
        if not len(base):
            bases, steps = np.zeros_like(own), np.zeros_like(own)
        else:
            bases, steps = base[own], step[own]
        if len(input_kind):
            bases = np.where(references < 0, -1 - input_begin[of_input], bases)
            steps = np.where(references < 0, -1 * (input_kind[of_input] == BY_TILE), steps)
        return bases, steps

    arity = templates.arity
    operand = of_values(templates.operand, np.diff(templates.operand_ptr))
    operand_begin = pointers(arity)
    combined = kind[maker] == COMBINED
    if combined.any():  # they give the result of the last node, of the only tile, or nothing
        nodes_of, parts = maker[combined], result[combined]
        number = num_tiles[nodes_of]
        only, _ = located(operand[operand_begin[nodes_of] + parts])
        identity = templates.identity + np.repeat(inputs, nodes)
        nothing = -1 - (input_begin[np.maximum(identity[nodes_of], 0)] + parts)
        last = base[combined] + (number - 2) * results[nodes_of]
        base[combined] = np.select([number == 0, number == 1], [nothing, only], last)

    node = np.repeat(np.arange(len(kind)), counts)
    place = np.arange(len(node)) - node_begin[node]
    arities = (arity + (arity - joined.single_operands) * (joined.room - 1))[node]
    nth = np.repeat(place, arities)
    if (kind == JOINED).any():
        entry, nth_tile = _joined_entries(templates, joined, node, arities)
        nth += nth_tile
    else:
        entry = ranges(operand_begin[node], arities)
    bases, steps = located(operand)
    reader = np.repeat(np.arange(len(kind)), arity)
    read = bases[entry] + nth * steps[entry]
    own = np.flatnonzero(joined.operand_tiles[entry] == 0)
    if len(own):
        array = entry[own] - operand_begin[reader[entry[own]]]
        array -= joined.single_operands[reader[entry[own]]]
        own, array = own[array >= 0], array[array >= 0]  # but for lengths
        of_input = (templates.identity + np.repeat(inputs, nodes))[reader[entry[own]]] + array
        read[own] = -1 - input_begin[of_input]
    combining = kind[reader] == COMBINED
    if combining.any():
        position = np.arange(len(reader)) - operand_begin[reader]
        mine = np.flatnonzero(combining[entry])
        e = entry[mine]
        reading = reader[e]
        right, part = np.divmod(position[e], results[reading])
        which = 2 * nth[mine] + right
        earlier = value_begin[reading] + (which - num_tiles[reading]) * results[reading] + part
        read[mine] = np.where(which < num_tiles[reading], bases[e] + which * steps[e], earlier)

    outputs = of_values(templates.outputs, outputs_of)
    output_symbol = of_symbols(templates.output_symbol, outputs_of)
    output_count = np.where(output_symbol < 0, 1, count_of[output_symbol])
    output_bases, output_steps = located(outputs)
    which_output = np.repeat(np.arange(len(outputs)), output_count)
    nth = ranges(np.zeros(len(outputs), np.int64), output_count)

    chunks = []
    for of_instance, own_tiles, arrays in zip(templates.inputs, tiles, num_arrays, strict=True):
        for x in of_instance:
            rows = x.rows(own_tiles, arrays) if isinstance(x, TileInput) else x
            if rows is not None:
                chunks.append(rows)
    return Graph(
        tile_types.registry.types,
        joined.node_type[node],
        pointers(arities),
        read.astype(np.int32),
        tuple(chunks),
        (output_bases[which_output] + nth * output_steps[which_output]).astype(np.int32),
        node_begin[node_ptr],
        input_begin[input_ptr],
        pointers(output_count)[output_ptr],
    )


def _joined_entries(
    templates: TileTemplates, joined: JoinedNodes, node: np.ndarray, arities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (which operand of the templates, which tile of it) each operand of nodes is.

    Args:
      templates: of nodes.
      joined: how some join tiles.
      node: int64[N], the node of the templates that each node is.
      arities: int64[N], the operands of each.
    """
    reader = np.repeat(node, arities)
    position = ranges(np.zeros(len(node), np.int64), arities)
    behind = position - joined.single_operands[reader]
    is_tile = (templates.kind[reader] == JOINED) & (behind >= 0)
    array, tile = np.divmod(behind, joined.room[reader])
    entry = np.where(is_tile, joined.single_operands[reader] + array, position)
    entry += pointers(templates.arity)[reader]
    last = np.maximum(joined.operand_tiles[entry] - 1, 0)  # which is read again
    return entry, np.where(is_tile, np.minimum(tile, last), 0)
