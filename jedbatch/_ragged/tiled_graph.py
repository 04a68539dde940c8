"""Graphs of nodes on tiles, of instances of any length.

A *template* is the graph of an instance whose nodes are not repeated yet: it holds for all lengths.
With `k` tiles of the rows of an array, a node of it becomes

    ONCE        1 node
    BY_TILE     k nodes, one for each tile
    COMBINED    k - 1 nodes, which combine the results of k tiles two by two

and so do inputs. Operands of node t of the second kind are linear functions of t, so that graphs
are made of templates without running Python for every node.

Letters: `M` nodes, `E` operands, `I` inputs, `O` outputs of templates, `S` symbols of instances,
`B` instances; `N` nodes of the graph.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.types import NodeType, ValueType

ONCE, BY_TILE, COMBINED, IF_NONE = range(4)


@dataclass(frozen=True, eq=False)
class TileInput:
    """Inputs of a template that depend on lengths.

    Attributes:
      type: of each, with the rows of a tile.
      kind: ONCE, BY_TILE, or IF_NONE: there is one if there is no tile.
      symbol: number of the symbol whose tiles they are.
      leaf: the array that they are rows of, counted behind the arrays of the instance.
      row: the row, if there is one.
      identity: the value, if it is there where there is no tile.
    """

    type: ValueType
    kind: int
    symbol: int
    leaf: int = 0
    row: int = 0
    identity: np.ndarray | None = None

    def __len__(self) -> int:
        return 1

    def rows(self, count: int, num_arrays: int) -> InputRows | None:
        """Returns the inputs of an instance, with so many tiles; None if there are none."""
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
class TileTemplate:
    """The graph of an instance for all lengths. Values and inputs are numbered as in a graph.

    Attributes:
      node_type: int32[M].
      kind: int64[M], how often each node is repeated.
      symbol: int64[M], by whose tiles; -1 for nodes that are there once.
      results: int64[M], of each node.
      arity: int64[M], of each node.
      operand: int64[E], what nodes read. Combined ones have their parts twice: those of the left
        and those of the right.
      inputs: in order.
      input_kind, input_symbol: int64[I], of each.
      identity: int64[M], the first input in the place of a combined node where there is no tile.
      outputs: int64[O].
      output_symbol: int64[O], whose tiles make up the result; -1 if it is one value.
      num_symbols: how many there are.
    """

    node_type: np.ndarray
    kind: np.ndarray
    symbol: np.ndarray
    results: np.ndarray
    arity: np.ndarray
    operand: np.ndarray
    inputs: tuple[InputRows | TileInput, ...]
    input_kind: np.ndarray
    input_symbol: np.ndarray
    identity: np.ndarray
    outputs: np.ndarray
    output_symbol: np.ndarray
    num_symbols: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, np.ndarray))


def repeat_nodes(
    types: tuple[NodeType, ...],
    templates: Sequence[TileTemplate],
    tiles: Sequence[Sequence[int]],
    num_arrays: Sequence[int],
) -> Graph:
    """Returns the graph of instances.

    Args:
      types: of nodes.
      templates: of each instance.
      tiles: how many tiles there are, for each symbol of each instance.
      num_arrays: arrays of each instance, behind which those of tiles are.
    """
    nodes = [len(t.kind) for t in templates]
    values = pointers(np.array([t.results.sum() for t in templates]))[:-1]
    inputs = pointers(np.array([len(t.input_kind) for t in templates]))[:-1]
    symbols = pointers(np.array([t.num_symbols for t in templates]))[:-1]
    count_of = np.append(np.array([k for ks in tiles for k in ks], np.int64), 1)  # -1: once

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(t, name) for t in templates])

    def of_symbols(name: str) -> np.ndarray:
        column = joined(name)
        moved = column + np.repeat(symbols, [len(getattr(t, name)) for t in templates])
        return np.where(column < 0, -1, moved)

    def of_values(name: str) -> np.ndarray:
        column = joined(name)
        sizes = [len(getattr(t, name)) for t in templates]
        return column + np.where(column < 0, -np.repeat(inputs, sizes), np.repeat(values, sizes))

    # Inputs: where those of each of a template begin, and how far apart they are.
    input_kind, input_tiles = joined("input_kind"), count_of[of_symbols("input_symbol")]
    input_count = np.where(input_kind == BY_TILE, input_tiles, 1)
    input_count = np.where(input_kind == IF_NONE, input_tiles == 0, input_count)
    input_begin = pointers(input_count)

    # Nodes, and their results.
    kind, results = joined("kind"), joined("results")
    num_tiles = count_of[of_symbols("symbol")]
    counts = np.where(kind == COMBINED, np.maximum(num_tiles - 1, 0), num_tiles)
    node_begin, value_begin = pointers(counts), pointers(counts * results)
    maker = np.repeat(np.arange(len(kind)), results)
    result = ranges(np.zeros(len(kind), np.int64), results)
    base = value_begin[maker] + result
    step = np.where(kind == BY_TILE, results, 0)[maker]

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

    arity, operand = joined("arity"), of_values("operand")
    operand_begin = pointers(arity)
    combined = kind[maker] == COMBINED
    if combined.any():  # they give the result of the last node, of the only tile, or nothing
        nodes_of, parts = maker[combined], result[combined]
        number = num_tiles[nodes_of]
        only, _ = located(operand[operand_begin[nodes_of] + parts])
        identity = joined("identity") + np.repeat(inputs, nodes)
        nothing = -1 - (input_begin[np.maximum(identity[nodes_of], 0)] + parts)
        last = base[combined] + (number - 2) * results[nodes_of]
        base[combined] = np.select([number == 0, number == 1], [nothing, only], last)

    node = np.repeat(np.arange(len(kind)), counts)
    place = np.arange(len(node)) - node_begin[node]
    arities = arity[node]
    entry = ranges(operand_begin[node], arities)
    bases, steps = located(operand)
    reader = np.repeat(np.arange(len(kind)), arity)
    nth = np.repeat(place, arities)
    read = bases[entry] + nth * steps[entry]
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

    outputs, output_symbol = of_values("outputs"), of_symbols("output_symbol")
    output_count = np.where(output_symbol < 0, 1, count_of[output_symbol])
    output_bases, output_steps = located(outputs)
    which_output = np.repeat(np.arange(len(outputs)), output_count)
    nth = ranges(np.zeros(len(outputs), np.int64), output_count)

    def ends(begin: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Returns where instances end, from where what they have begins."""
        return begin[pointers(np.array(sizes))]

    chunks = []
    for template, own_tiles, arrays in zip(templates, tiles, num_arrays, strict=True):
        for x in template.inputs:
            rows = x.rows(own_tiles[x.symbol], arrays) if isinstance(x, TileInput) else x
            if rows is not None:
                chunks.append(rows)
    return Graph(
        types,
        joined("node_type")[node],
        pointers(arities),
        read.astype(np.int32),
        tuple(chunks),
        (output_bases[which_output] + nth * output_steps[which_output]).astype(np.int32),
        ends(node_begin, nodes),
        ends(input_begin, [len(t.input_kind) for t in templates]),
        ends(pointers(output_count), [len(t.outputs) for t in templates]),
    )
