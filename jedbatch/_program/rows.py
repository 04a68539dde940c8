"""Rows that a chunk reads from arrays, all at once, and rows that it writes, in place.

The lanes of a chunk follow one another from a lane on. What they read is listed in a table; what
they write lies together.

XLA:CPU updates an array in place only where it sees that everything has been read before: not if it
fuses reading some rows with writing others. So all that a chunk writes is written by one primitive,
which depends on all that was read. It is compiled as one call of a function that copies memory
(see `_jaxpr.native_calls`), or elsewhere as a loop of one trip, with which XLA fuses nothing. For
XLA:GPU they are operations like others, behind a barrier.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jedbatch._jaxpr.native_calls import over_lanes_of, register_lowering
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._kernel.target import Target
from jedbatch._program.arenas import put, slice_rows, take
from jedbatch._support.types import Array

SUMMED_BY_CALLS = (np.dtype(np.float32), np.dtype(np.float64))


class Read(NamedTuple):
    """Rows that a chunk reads from an array.

    For lane l the rows table[offset + k * stride + l] for every k < length.

    Attributes:
      array: position of the array.
      offset: in the table, of what lane 0 reads.
      stride: in the table, from one row that a lane reads to the next.
      length: rows that a lane reads; None for one, which is not a list.
      is_sum: whether their sum is wanted, taken in their order.
      may_lack: whether some of them may not exist, whose numbers are negative then; of sums.
    """

    array: int
    offset: int
    stride: int = 0
    length: int | None = None
    is_sum: bool = False
    may_lack: bool = False


class Write(NamedTuple):
    """Where a chunk writes rows: from row base + stride * lane on, or, if there is an offset, from
    row table[offset + lane] on.

    Attributes:
      array: position of the array.
      base, stride, offset: see above.
    """

    array: int
    base: int = 0
    stride: int = 1
    offset: int | None = None


def take_rows(
    target: Target,
    table: Array,
    lane: Array,
    arrays: Sequence[Any],
    reads: Sequence[Read],
    width: int,
) -> list[Array]:
    """Returns what each of `reads` says of `width` lanes, known to exist.

    Args:
      target: what the program is for.
      table: int32[Z].
      lane: the first lane, int32[].
      arrays: with rows.
      reads: what to read.
      width: how many lanes.

    Returns:
      For each read [width, ...], or [width, length, ...] if it is of a list.
    """
    if target.control == "switch" or not reads:
        return _taken(table, lane, *arrays, reads=tuple(reads), width=width)
    wanted = sorted({read.array for read in reads})
    summed = [read.is_sum and arrays[read.array].dtype not in SUMMED_BY_CALLS for read in reads]
    params = [
        read._replace(array=wanted.index(read.array), is_sum=read.is_sum and not here)
        for read, here in zip(reads, summed, strict=True)
    ]
    outs = take_rows_p.bind(
        table,
        jnp.asarray(lane, jnp.int32),
        *[arrays[a] for a in wanted],
        reads=tuple(params),
        width=width,
    )
    return [_total(x) if here else x for x, here in zip(outs, summed, strict=True)]


def put_rows(
    target: Target,
    table: Array,
    lane: Array,
    arrays: Sequence[Any],
    rows: Sequence[Array],
    writes: Sequence[Write],
) -> list[Any]:
    """Returns arrays to which the rows of a chunk are written; no two write the same row.

    Args:
      target: what the program is for.
      table: int32[Z].
      lane: the first lane, int32[].
      arrays: that are written to, and others.
      rows: what to write.
      writes: where.
    """
    arrays = list(arrays)
    rows = [x.astype(arrays[w.array].dtype) for x, w in zip(rows, writes, strict=True)]
    if target.control == "switch" or not writes:
        return _scattered(table, lane, arrays, rows, writes)
    wanted = sorted({w.array for w in writes})
    outs = put_rows_p.bind(
        table,
        jnp.asarray(lane, jnp.int32),
        *[arrays[a] for a in wanted],
        *rows,
        writes=tuple(w._replace(array=wanted.index(w.array)) for w in writes),
    )
    for a, x in zip(wanted, outs, strict=True):
        arrays[a] = x
    return arrays


def after(target: Target, read: Any) -> Any:
    """Returns what a chunk has read, with which XLA:GPU fuses nothing that is written."""
    return lax.optimization_barrier(read) if target.control == "switch" else read


# --- as operations of XLA ---


def _taken(
    table: Array, lane: Array, *arrays: Array, reads: Sequence[Read], width: int
) -> list[Array]:
    return [_read(table, lane, arrays[read.array], read, width) for read in reads]


def _read(table: Array, lane: Array, array: Array, read: Read, width: int) -> Array:
    if read.length is None:
        return take(array, slice_rows(table, read.offset + lane, width))
    if read.is_sum:
        columns = [read.offset + k * read.stride + lane for k in range(read.length)]
        rows_read = [slice_rows(table, column, width) for column in columns]
        if read.may_lack:
            return functools.reduce(jnp.add, [_existing(array, rows) for rows in rows_read])
        return functools.reduce(jnp.add, [take(array, rows) for rows in rows_read])
    rows = table[read.offset : read.offset + read.length * read.stride]
    rows = lax.dynamic_slice(
        rows.reshape(read.length, read.stride),
        (jnp.zeros_like(lane), lane),
        (read.length, width),
        allow_negative_indices=False,
    )
    return take(array, rows.T)


def _existing(array: Array, rows: Array) -> Array:
    """Rows of an array, zeros where a number is negative."""
    there = (rows >= 0).reshape(-1, *[1] * (array.ndim - 1))
    return where_alive(there, take(array, jnp.maximum(rows, 0)))


def _total(lists: Array) -> Array:
    """Returns sums of the rows of lists, taken in their order."""
    return functools.reduce(jnp.add, [lists[:, k] for k in range(lists.shape[1])])


def _first(table: Array, lane: Array, write: Write) -> Array:
    if write.offset is None:
        return write.base + lane * write.stride
    return slice_rows(table, write.offset + lane, 1)[0]


def _put_one_by_one(table: Array, lane: Array, *given: Array, writes: Sequence[Write]) -> Any:
    """Writes rows by a loop of one trip, of which XLA must not know that it is one."""
    num_arrays = len(given) - len(writes)

    def once(carry: Any) -> Any:
        at, arrays = carry[0], list(carry[1])
        for x, write in zip(given[num_arrays:], writes, strict=True):
            arrays[write.array] = put(arrays[write.array], x, _first(table, at, write))
        return at + 1, arrays

    return lax.while_loop(lambda carry: carry[0] == lane, once, (lane, [*given[:num_arrays]]))[1]


def _scattered(
    table: Array, lane: Array, arrays: list[Any], rows: Sequence[Array], writes: Sequence[Write]
) -> list[Any]:
    """Writes all rows of an array by one kernel."""
    by_array: dict[int, list[tuple[Any, Any]]] = {}
    for x, write in zip(rows, writes, strict=True):
        by_array.setdefault(write.array, []).append((x, _first(table, lane, write)))
    for a, several in by_array.items():
        if len(several) == 1:
            arrays[a] = put(arrays[a], *several[0])
            continue
        place = jnp.concatenate([first + jnp.arange(len(x)) for x, first in several])
        arrays[a] = (
            arrays[a]
            .at[place]
            .set(
                jnp.concatenate([x for x, _ in several]),
                mode="promise_in_bounds",
                unique_indices=True,
                wrap_negative_indices=False,
            )
        )
    return arrays


# --- as calls ---

take_rows_p = Primitive("take_rows")
take_rows_p.multiple_results = True
put_rows_p = Primitive("put_rows")
put_rows_p.multiple_results = True


@take_rows_p.def_abstract_eval
def _types_taken(table, lane, *arrays, reads, width):
    return [
        ShapedArray(
            (width, *(() if read.length is None or read.is_sum else (read.length,)), *x.shape[1:]),
            x.dtype,
        )
        for read in reads
        for x in [arrays[read.array]]
    ]


@put_rows_p.def_abstract_eval
def _types_put(table, lane, *given, writes):
    return [ShapedArray(x.shape, x.dtype) for x in given[: len(given) - len(writes)]]


def _numbers_of_reads(*, reads: Sequence[Read], width: int) -> dict[str, Any]:
    numbers = [(r.array, r.offset, r.stride, r.length or 1, r.is_sum) for r in reads]
    return {"reads": np.array(numbers, np.int64).ravel()}


def _numbers_of_writes(*, writes: Sequence[Write]) -> dict[str, Any]:
    numbers = [(*w[:3], -1 if w.offset is None else w.offset) for w in writes]
    num_arrays = 1 + max(w.array for w in writes)
    return {
        "writes": np.array(numbers, np.int64).ravel(),
        "aliases": {2 + a: a for a in range(num_arrays)},
    }


def _take_tangents(primals: Any, tangents: Any, *, reads: Sequence[Read], width: int) -> Any:
    table, lane = primals[:2]
    outs = take_rows_p.bind(*primals, reads=reads, width=width)
    moving = [a for a, t in enumerate(tangents[2:]) if type(t) is not ad.Zero]
    out_tangents = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    of_reads = [i for i, read in enumerate(reads) if read.array in moving]
    if of_reads:
        pushed = take_rows_p.bind(
            table,
            lane,
            *[tangents[2 + a] for a in moving],
            reads=tuple(reads[i]._replace(array=moving.index(reads[i].array)) for i in of_reads),
            width=width,
        )
        for i, x in zip(of_reads, pushed, strict=True):
            out_tangents[i] = x
    return outs, out_tangents


def _put_tangents(primals: Any, tangents: Any, *, writes: Sequence[Write]) -> Any:
    table, lane, *given = primals
    num_arrays = len(given) - len(writes)
    outs = put_rows_p.bind(*primals, writes=writes)
    is_moving = [type(t) is not ad.Zero for t in tangents[2:]]
    written = zip(writes, is_moving[num_arrays:], strict=True)
    moved = {write.array for write, moves in written if moves}
    moving = [a for a in range(num_arrays) if is_moving[a] or a in moved]
    of_writes = [i for i, write in enumerate(writes) if write.array in moving]
    renumbered = [writes[i]._replace(array=moving.index(writes[i].array)) for i in of_writes]
    out_tangents = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    if moving:
        places = [*moving, *(num_arrays + i for i in of_writes)]
        pushed = put_rows_p.bind(
            table,
            lane,
            *[ad.instantiate_zeros(tangents[2 + i]) for i in places],
            writes=tuple(renumbered),
        )
        for a, x in zip(moving, pushed, strict=True):
            out_tangents[a] = x
    return outs, out_tangents


for _primitive, _operations, _numbers, _tangents in (
    (take_rows_p, _taken, _numbers_of_reads, _take_tangents),
    (put_rows_p, _put_one_by_one, _numbers_of_writes, _put_tangents),
):
    _primitive.def_impl(_operations)
    register_lowering(_primitive, _primitive.name, _operations, _numbers)
    ad.primitive_jvps[_primitive] = _tangents
    batching.primitive_batchers[_primitive] = over_lanes_of(_operations)
