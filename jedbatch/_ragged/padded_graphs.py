"""Graphs of nodes on padded arrays, made of graphs of nodes on arrays of any length.

A graph of symbolic shapes holds for all lengths. For those of an instance, each of its nodes has a
type for the capacities of the arrays that it reads (see `_ragged.padded_types`), and reads lengths
behind its operands. All else is as it was recorded, so that graphs of many instances are made at
once, without running Python for every node.

Letters: `B` instances, `N` nodes, `Y` symbols, by name.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.types import LENGTH, ValueType
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._jaxpr.transfers import fetched
from jedbatch._ragged.padded_types import padded_kind
from jedbatch._ragged.regions import Regions
from jedbatch._support.types import Array


class PaddedInputs(NamedTuple):
    """Arrays of an instance, or parts of them, that are padded to one shape and stacked.

    Attributes:
      parts: (number of the array, indices that lead to the part that is meant).
      shape: of each.
    """

    parts: tuple[tuple[int, tuple[Any, ...]], ...]
    shape: tuple[int, ...]


class AddedArrays(NamedTuple):
    """The arrays that padded nodes read, behind those of an instance.

    Attributes:
      symbols: by number among those of the instance; the first array has their values, int32[...].
      inputs: each is an array.
    """

    symbols: tuple[int, ...]
    inputs: tuple[PaddedInputs, ...]

    @property
    def number(self) -> int:
        """How many arrays there are."""
        return 1 + len(self.inputs)


class RaggedInstance(NamedTuple):
    """An instance with arrays of any length.

    Attributes:
      symbols: names, of which its arrays have the lengths.
      sizes: the capacity of each.
      guarded: whether a length is 0.
      num_arrays: how many arrays it has.
    """

    symbols: Sequence[str]
    sizes: Sequence[int]
    guarded: bool
    num_arrays: int


def padded_graph(
    regions: Regions, graph: Graph, instances: Sequence[RaggedInstance]
) -> tuple[Graph, list[AddedArrays]]:
    """Returns a graph of nodes on padded arrays, and the arrays that it reads of each instance.

    Args:
      regions: the regions met so far.
      graph: of the instances, with nodes on arrays of any length.
      instances: in the same order.
    """
    number: dict[str, int] = {}
    for instance in instances:
        for name in instance.symbols:
            number.setdefault(name, len(number))
    own_numbers = [[number[s] for s in instance.symbols] for instance in instances]
    every = np.zeros((len(instances), len(number) + 1), np.int64)  # with a column for `guarded`
    for row, own, instance in zip(every, own_numbers, instances, strict=True):
        row[own] = instance.sizes
        row[-1] = instance.guarded
    sizes, size_of = np.unique(every, axis=0, return_inverse=True)
    size_of = size_of.ravel()

    node_type, of_node, symbol = _padded_types(regions, graph, sizes, size_of, number)
    owner = graph.node_instance
    reader = np.repeat(owner, of_node)

    # Lengths follow the inputs that were recorded.
    is_read = np.zeros((len(instances), len(number)), bool)
    is_read[reader, symbol] = True
    place = is_read.cumsum(1) - 1
    input_ptr = graph.input_ptr + pointers(is_read.sum(1))
    moved = input_ptr[:-1] - graph.input_ptr[:-1]

    arity = np.diff(graph.operand_ptr)
    operand_ptr = pointers(arity + of_node)
    operand = np.empty(operand_ptr[-1], np.int32)
    recorded = graph.operand - np.where(graph.operand < 0, np.repeat(moved[owner], arity), 0)
    operand[ranges(operand_ptr[:-1], arity)] = recorded
    first = graph.input_ptr[1:] + moved
    operand[ranges(operand_ptr[:-1] + arity, of_node)] = -1 - first[reader] - place[reader, symbol]
    of_outputs = np.repeat(moved, np.diff(graph.output_ptr))
    outputs = graph.outputs - np.where(graph.outputs < 0, of_outputs, 0)

    chunks: list[InputRows] = []
    added = []
    kinds = _PaddedKinds([dict(zip(number, own, strict=False)) for own in sizes.tolist()])
    for i, instance in enumerate(instances):
        own = [k for k, n in enumerate(own_numbers[i]) if is_read[i, n]]
        own.sort(key=own_numbers[i].__getitem__)
        sizes_of = int(size_of[i])
        recorded_chunks, of_instance = _padded_inputs(
            graph.chunks[i], [kinds.find(c.type, sizes_of) for c in graph.chunks[i]], instance
        )
        chunks += recorded_chunks
        if own:
            chunks.append(InputRows(LENGTH, np.arange(len(own)), instance.num_arrays))
        added.append(AddedArrays(tuple(own), of_instance))
    whole = Graph(
        regions.registry.types,
        node_type,
        operand_ptr,
        operand,
        tuple(chunks),
        outputs.astype(np.int32),
        graph.node_ptr,
        input_ptr,
        graph.output_ptr,
    )
    return whole, added


def _padded_types(
    regions: Regions,
    graph: Graph,
    sizes: np.ndarray,
    size_of: np.ndarray,
    number: Mapping[str, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns int32[N] types of nodes, int64[N] how many lengths each reads, and their symbols.

    Args:
      regions: the regions met so far.
      graph: of nodes on arrays of any length.
      sizes: int64[K, Y + 1], capacities of symbols, and whether a length may be 0.
      size_of: int64[B], the row of each instance.
      number: of each symbol.
    """
    both, which = np.unique(
        graph.node_type.astype(np.int64) * len(sizes) + size_of[graph.node_instance],
        return_inverse=True,
    )
    types: list[int] = []
    read: list[list[int]] = []  # symbols
    for type_id, k in zip(*(x.tolist() for x in np.divmod(both, len(sizes))), strict=True):
        if not regions.is_ragged(type_id):
            types.append(type_id)
            read.append([])
            continue
        ragged, row = regions.ragged_type(type_id), sizes[k].tolist()
        names = [number[s] for s in ragged.symbols]
        padded = regions.padded.padded(ragged, tuple([row[n] for n in names]), bool(row[-1]))
        types.append(padded.id)
        read.append([names[n] for n in padded.lengths])
    counts = np.array(list(map(len, read)), np.int64)
    symbols = np.array([s for own in read for s in own], np.int64)
    of_node = counts[which]
    found = symbols[ranges(pointers(counts)[which], of_node)]
    return np.array(types, np.int32)[which], of_node, found


def _padded_inputs(
    chunks: Sequence[InputRows], kinds: Sequence[ValueType | None], instance: RaggedInstance
) -> tuple[list[InputRows], tuple[PaddedInputs, ...]]:
    """Returns the inputs of an instance as padded ones, and the arrays that they are read from.

    Args:
      chunks: the inputs.
      kinds: of each, padded; None of those that are not ragged.
      instance: that they are of.
    """
    pairs = list(zip(kinds, chunks, strict=True))
    grouped = [(k, [c for _, c in own]) for k, own in itertools.groupby(pairs, lambda x: x[0])]
    num_added = 1 + sum(kind is not None for kind, _ in grouped)
    inputs: list[PaddedInputs] = []
    padded: list[InputRows] = []
    for kind, members in grouped:
        if kind is not None:
            parts = [(c.leaf, c.path) for c in members]
            inputs.append(PaddedInputs(tuple(parts), kind.shape))  # type: ignore[arg-type]
            leaf = instance.num_arrays + len(inputs)
            padded.append(InputRows(kind, np.arange(len(parts)), leaf))
            continue
        for chunk in members:
            if chunk.leaf is not None and chunk.leaf >= instance.num_arrays:  # of a call
                chunk = replace(chunk, leaf=chunk.leaf + num_added)
            padded.append(chunk)
    return padded, tuple(inputs)


class _PaddedKinds:
    """The types of inputs, padded.

    Args:
      capacities: the capacity of every symbol, for each of the combinations that there are.
    """

    def __init__(self, capacities: Sequence[Mapping[str, int]]):
        self._capacities = capacities
        self._known: dict[tuple[int, int], ValueType | None] = {}
        self._kinds: dict[ValueType, ValueType] = {}  # each once

    def find(self, kind: ValueType, combination: int) -> ValueType | None:
        """Returns a type for a combination of capacities; None if it is not ragged."""
        key = id(kind), combination
        if key not in self._known:
            found = None
            if is_ragged(kind.shape):
                found = padded_kind(kind, self._capacities[combination])
                found = self._kinds.setdefault(found, found)
            self._known[key] = found
        return self._known[key]


def added_arrays(
    instances: Sequence[tuple[AddedArrays, Sequence[Array], Sequence[int]]],
) -> list[list[Any]]:
    """Returns the arrays that padded nodes read, behind those of each instance.

    A minibatch has thousands of them (the sequences at the leaves of trees), so that those of one
    type are padded at once.

    Args:
      instances: what is added to each, its arrays, and the values of its symbols.
    """
    alike: dict[tuple, list[tuple[int, int, list[np.ndarray]]]] = {}
    added: list[list[Any]] = []
    for i, (own, arrays, lengths) in enumerate(instances):
        added.append([np.array([lengths[k] for k in own.symbols], np.int32)])
        for inputs in own.inputs:
            parts = [_part(arrays[leaf], path) for leaf, path in inputs.parts]
            kind = _common_type(parts, inputs.shape)
            if kind is None:
                added[i].append(_stacked([padded_rows(x, inputs.shape) for x in parts]))
            else:
                alike.setdefault(kind, []).append((i, len(added[i]), parts))
                added[i].append(None)
    for (_, shape), places in alike.items():
        rows = _padded_together([x for _, _, parts in places for x in parts], shape[0])
        begin = 0
        for i, k, parts in places:
            added[i][k] = rows[begin : begin + len(parts)]
            begin += len(parts)
    return added


def _part(array: Array, path: Sequence[Any]) -> Array:
    if not isinstance(array, Tracer):
        array = fetched(array)
    return functools.reduce(lambda x, index: x[index], path, array)


def _common_type(parts: Sequence[Array], shape: tuple[int, ...]) -> tuple | None:
    """Returns (dtype, padded shape) of arrays of NumPy of which only rows are padded, or None."""
    if set(map(type, parts)) != {np.ndarray} or {x.shape[1:] for x in parts} != {shape[1:]}:
        return None
    dtypes = {x.dtype for x in parts}
    return (*dtypes, shape) if len(dtypes) == 1 else None


def _padded_together(arrays: Sequence[np.ndarray], capacity: int) -> np.ndarray:
    """Returns [len(arrays), capacity, ...]; rows beyond the last repeat it, or are 0."""
    lengths = np.array(list(map(len, arrays)))
    rows = np.concatenate([*arrays, np.zeros((1, *arrays[0].shape[1:]), arrays[0].dtype)])
    last = np.where(lengths > 0, np.cumsum(lengths) - 1, len(rows) - 1)
    first = np.where(lengths > 0, np.cumsum(lengths) - lengths, len(rows) - 1)
    return rows[np.minimum(first[:, None] + np.arange(capacity), last[:, None])]


def padded_rows(x: Array, shape: Sequence[int]) -> Array:
    """Returns an array with rows of a shape along every axis: the last is repeated, or 0."""
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    for axis, (count, capacity) in enumerate(zip(x.shape, shape, strict=True)):
        if count == 0 < capacity:
            x = xp.zeros((*x.shape[:axis], capacity, *x.shape[axis + 1 :]), x.dtype)
        elif count != capacity:
            x = xp.take(x, np.minimum(np.arange(capacity), count - 1), axis=axis)
    return x


def _stacked(arrays: Sequence[Array]) -> Array:
    xp: Any = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
    return xp.stack(arrays)
