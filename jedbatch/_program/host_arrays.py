"""Inputs and outputs of arenas: values of instances as rows, and rows as results."""

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._graph.graph import are_whole
from jedbatch._graph.inputs import InputColumns, InputRows
from jedbatch._graph.record import Record
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.derivatives import DifferentiableProgram, bind_program
from jedbatch._jaxpr.storage import Kind, from_stored, is_key, stored, stored_kind
from jedbatch._jaxpr.transfers import fetched, unguarded
from jedbatch._program.output_spec import OutputSpec, PaddedPlace, Slice
from jedbatch._program.plan import input_name
from jedbatch._program.returned import split_outputs, stacked
from jedbatch._program.signature import Signature
from jedbatch._support.types import Array, Dtype


def assemble(
    rooms: Mapping[Kind, int],
    records: Sequence[Record],
    arrays: Sequence[Sequence[Array]],
    numbers: Sequence[int] | None = None,
) -> dict[str, Array]:
    """Returns the input rows of each arena, up to capacity.

    Args:
      rooms: the capacity of each arena (see `Signature.input_rooms`).
      records: of the instances.
      arrays: of the instances.
      numbers: of the instances, for messages.
    """
    columns = _held_by_all(records)
    if columns is not None:
        return {
            input_name(kind): pack_rows(kind, columns.get(kind, ()), room)
            for kind, room in rooms.items()
        }
    rows: Array
    parts = collections.defaultdict(list)
    numbers = range(len(records)) if numbers is None else numbers
    kinds: dict[int, Kind] = {}  # by the id of the type: of many chunks, few have another one
    for i, record, instance_arrays in zip(numbers, records, arrays, strict=True):
        for chunk in record.whole.chunks[record.index]:
            rows = chunk.rows if chunk.leaf is None else rows_of_inputs(chunk, instance_arrays, i)
            kind = kinds.get(id(chunk.type))
            if kind is None:
                kind = kinds[id(chunk.type)] = stored(chunk.type)
            parts[kind].append(rows)
    inputs: dict[str, Array] = {}
    for kind, room in rooms.items():
        inputs[input_name(kind)] = pack_rows(kind, parts[kind], room)
    return inputs


class Assembly:
    """How the inputs of instances become rows, for when they come again with other arrays.

    Numbers that the graphs hold are rows once and for all. Whole arrays are joined, and written to
    where they belong.

    Args:
      rooms, records: as of `assemble`.
    """

    def __init__(self, rooms: Mapping[Kind, int], records: Sequence[Record]):
        self._rooms, self._records = rooms, records
        self._held: dict[Kind, np.ndarray] = {}
        self._whole: dict[Kind, tuple[list[tuple[int, int]], Any]] = {}
        parts: dict[Kind, list[tuple[int, InputRows]]] = {kind: [] for kind in rooms}
        for i, record in enumerate(records):
            for chunk in record.whole.chunks[record.index]:
                parts[stored(chunk.type)].append((i, chunk))
        self._is_able = all(
            chunk.leaf is None or (chunk.rows is None and not chunk.path)
            for of_kind in parts.values()
            for _, chunk in of_kind
        )
        for kind, of_kind in parts.items() if self._is_able else ():
            later = np.zeros((1, *kind[0]), kind[1])
            rows: list[Any] = [later if x.leaf is not None else x.rows for _, x in of_kind]
            ends = itertools.accumulate(map(len, rows))
            whole = [
                (i, chunk.leaf, end - 1)
                for (i, chunk), end in zip(of_kind, ends, strict=True)
                if chunk.leaf is not None
            ]
            if len(whole) < len(rows):
                self._held[kind] = pack_rows(kind, rows, rooms[kind])
            if whole:
                numbers = [row for *_, row in whole]
                is_all = numbers == list(range(len(whole)))
                place = slice(len(whole)) if is_all else np.array(numbers)
                self._whole[kind] = [(i, leaf) for i, leaf, _ in whole], place

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, about."""
        of_whole = sum(100 * len(arrays) for arrays, _ in self._whole.values())
        return of_whole + sum(x.nbytes for x in self._held.values())

    def rows(
        self, arrays: Sequence[Sequence[Array]], numbers: Sequence[int] | None = None
    ) -> dict[str, Array]:
        """Returns what `assemble` does."""
        if not self._is_able:
            return assemble(self._rooms, self._records, arrays, numbers)
        found: dict[Kind, np.ndarray] = {}
        for kind, room in self._rooms.items():
            held = self._held.get(kind)
            found[kind] = np.zeros((room, *kind[0]), kind[1]) if held is None else held.copy()
        for kind, (which, place) in self._whole.items():
            joined = _joined([arrays[i][leaf] for i, leaf in which], kind)
            if joined is None:
                return assemble(self._rooms, self._records, arrays, numbers)
            found[kind][place] = joined
        return {input_name(kind): rows for kind, rows in found.items()}


def _joined(arrays: Sequence[Array], kind: Kind) -> np.ndarray | None:
    """Returns arrays as rows [k, *shape]; None unless they are NumPy's and fit the dtype."""
    shape, dtype = kind
    if set(map(type, arrays)) != {np.ndarray}:
        return None
    has_rows = bool(shape and shape[0])
    size = len(arrays), *shape
    rows = np.concatenate(arrays).reshape(size) if has_rows else np.array(arrays)
    is_whole = rows.dtype.kind in "iu"  # no rounded ones, such as of int64 and uint64 together
    return rows if rows.dtype == dtype or (is_whole and _fits(rows, dtype)) else None


def _held_by_all(records: Sequence[Record]) -> dict[Kind, list[np.ndarray]] | None:
    """Returns the input rows of all instances by kind.

    None where some are not held by the graphs, or where instances have inputs of other types.
    """
    inputs = records[0].whole.inputs if records else ()
    if isinstance(inputs, InputColumns) and are_whole([(r.whole, r.index) for r in records]):
        kinds = list(map(stored, inputs.types))
        if len(set(kinds)) == len(kinds):
            return {kind: [rows] for kind, rows in zip(kinds, inputs.columns, strict=True)}
    held = [record.held for record in records]
    if None in held:
        return None
    types = held[0][0]  # type: ignore[index]
    kinds = list(map(stored, types))
    alike = [of_record[0] for of_record in held].count(types) == len(held)  # type: ignore[index]
    if not alike or len(set(kinds)) < len(kinds):
        return None
    return {kind: [x[1][j] for x in held] for j, kind in enumerate(kinds)}  # type: ignore[index]


def pack_rows(kind: Kind, parts: Sequence[Array], capacity: int) -> Array:
    """Returns parts [k, *shape], traced or not, as one array [capacity, *shape], 0 beyond them."""
    shape, dtype = kind
    count = sum(map(len, parts))
    if any(isinstance(x, Tracer) for x in parts):
        packed = jnp.concatenate([jnp.asarray(x, dtype) for x in parts])
        return jnp.pad(packed, [(0, capacity - count), *[(0, 0)] * len(shape)])
    rows = np.zeros((capacity, *shape), dtype)
    if parts:
        np.concatenate(parts, out=rows[:count], casting="unsafe")
    return rows


def rows_of_inputs(chunk: InputRows, arrays: Sequence[Array], instance: int) -> Array:
    """The values of some inputs [k, *shape]."""
    if chunk.leaf is None:
        return chunk.rows
    if chunk.leaf >= len(arrays):  # the result of a region, to be written there
        return np.zeros((1, *chunk.type.shape), chunk.type.dtype)
    array = arrays[chunk.leaf]
    if isinstance(array, list):  # rows of an earlier round, traced one by one
        return stacked([array[i] for i in (chunk.path if chunk.rows is None else chunk.rows)])
    if type(array) is np.ndarray:  # as loaders make them: in place as it is, and never keys
        _check_range(array, chunk.type.dtype, instance)
    elif is_key(chunk.type.dtype):
        array = jax.random.key_data(array)
        array = array if isinstance(array, Tracer) else fetched(array)
    elif not isinstance(array, Tracer):
        array = fetched(array)
        _check_range(array, chunk.type.dtype, instance)
    if chunk.rows is not None:
        return array[chunk.rows]
    for index in chunk.path:
        array = array[index]
    return array[None]


def _fits(array: np.ndarray, dtype: Dtype) -> bool:
    """Returns whether whole numbers fit a dtype, if they are such."""
    if array.dtype.kind not in "iu" or array.dtype == dtype or not array.size:
        return True
    info = np.iinfo(dtype)
    return bool(info.min <= array.min() and array.max() <= info.max)


def _check_range(array: np.ndarray, dtype: Dtype, instance: int) -> None:
    """Raises `OverflowError` if 64-bit integers do not fit 32 bits."""
    if not _fits(array, dtype):
        raise OverflowError(
            f"instance {instance} has {array.dtype} values from {array.min()} to {array.max()}, "
            f"which do not fit the {dtype} that JAX computes in; use smaller numbers, or "
            "`jax.config.update('jax_enable_x64', True)`."
        )


def results_from(
    form: OutputSpec,
    signature: Signature,
    outputs: Sequence[Array],
    packed: Sequence[Sequence[Any]] = (),
) -> Any:
    """Returns results made of the outputs of each arena and the packed results of regions.

    Arenas return rows or, already, pieces of them (see `_program.returned`).
    """
    if not any(isinstance(x, list) for x in outputs):
        outputs = split_outputs(outputs, form, signature.arenas)
    cut = _cut_out(form, packed)

    def leaf(kind: Kind, place: Any) -> Any:
        if isinstance(place, Slice):
            return cut[place]
        if isinstance(place, PaddedPlace):
            return existing(place, None)
        return from_stored(arena[stored_kind(kind)][place], ValueType(*kind))

    def existing(place: PaddedPlace, batch: int | None) -> Array:
        padded = arena[stored_kind(place.kind)][place.first // (batch or 1)]
        if not isinstance(padded, Tracer):
            padded = _on_host(padded)
        shape = place.shape if batch is None else (batch, *place.shape)
        return jnp.asarray(padded[tuple(map(slice, shape))])

    arena = dict(zip(signature.arenas, outputs, strict=True))
    if form.batch is not None:
        (structure,), (places,) = form.structures, form.places
        leaves = []
        for kind, first in places:
            if isinstance(first, tuple):
                leaves.append(jnp.stack([cut[place] for place in first]))
                continue
            if isinstance(first, PaddedPlace):
                leaves.append(existing(first, form.batch))
                continue
            rows = arena[stored_kind(kind)][first // form.batch]
            leaves.append(from_stored(rows, ValueType(*kind)))
        return jax.tree.unflatten(structure, leaves)
    results = [
        jax.tree.unflatten(
            structure,
            [leaf(kind, place) for kind, place in places],
        )
        for structure, places in zip(form.structures, form.places, strict=True)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *results) if form.is_list_stacked else results


@unguarded
def _cut_out(form: OutputSpec, packed: Sequence[Sequence[Any]]) -> dict[Slice, Array]:
    """Returns the ragged results of instances, by place."""
    places: dict[tuple[int, int], dict[Slice, None]] = {}
    for _, place in itertools.chain.from_iterable(form.places):
        for at in place if isinstance(place, tuple) else (place,):
            if isinstance(at, Slice):
                places.setdefault((at.stage, at.result), {})[at] = None
    found: dict[Slice, Array] = {}
    for (stage, result), slices in places.items():
        rows = packed[stage][result]
        if isinstance(rows, Tracer):
            parts = bind_program(_cutting(list(slices)), [rows])
        else:
            parts = [_part(fetched(rows), place) for place in slices]
        found |= zip(slices, parts, strict=True)
    return found


def _cutting(places: Sequence[Slice]) -> DifferentiableProgram:
    """Returns how packed rows become results, as a program of its own.

    JAX would pull each cotangent back by a program for its place and length.
    """

    def run(rows: Array) -> list[Array]:
        rows = _on_host(rows)
        return [_part(rows, place) for place in places]

    @unguarded
    def pull_back(args: Sequence[Array], _: Any, cotangents: Sequence[Any], __: Any) -> list[Array]:
        received = [x for x in zip(places, cotangents, strict=True) if x[1] is not None]
        on_host = not any(isinstance(c, Tracer) for _, c in received)
        xp: Any = np if on_host else jnp
        total = xp.zeros(args[0].shape, args[0].dtype)
        for place, cotangent in received:
            entries = fetched(cotangent) if on_host else cotangent
            entries = xp.moveaxis(entries, place.axes, range(len(place.axes)))
            count = math.prod(place.shape[axis] for axis in place.axes)
            part = entries.reshape(count, *total.shape[1:])
            where = slice(place.start, place.start + count)
            if on_host:
                total[where] += part
            else:
                total = total.at[where].add(part)
        return [jnp.asarray(total)]

    return DifferentiableProgram(run, pull_back)


def _part(rows: Any, place: Slice) -> Array:
    """Returns the result of an instance, some of the rows, traced or on the host."""
    sizes = [place.shape[axis] for axis in place.axes]
    rows = rows[place.start : place.start + math.prod(sizes)]
    xp = np if isinstance(rows, np.ndarray) else jnp
    entries = rows.reshape(*sizes, *rows.shape[1:])
    return jnp.asarray(xp.moveaxis(entries, range(len(sizes)), place.axes))


def rows_apart(rows: np.ndarray | list[np.ndarray]) -> list[np.ndarray]:
    """The rows of an array one by one, all of them arrays; those that are apart as they are."""
    return rows if isinstance(rows, list) else [rows[i, ...] for i in range(len(rows))]


def rows_on_host(outputs: Sequence[Array]) -> list[list[np.ndarray]]:
    """Returns the rows of each arena one by one, as arrays of NumPy, once they are computed."""
    return [[rows[i, ...] for i in range(len(rows))] for rows in map(fetched, outputs)]


def _on_host(rows: Array) -> Any:
    """Rows where any number of them is taken out without compiling anything, if they are known."""
    return rows if isinstance(rows, Tracer) else fetched(rows)
