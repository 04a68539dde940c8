"""The values that a program returns, in pieces that are differentiated or not.

A program returns rows of each arena. A loss may read some results and not others, and JAX tells us
which, as long as they reach it one by one: as pieces, which are a row for each instance, or single
rows where there is a list of results, and in a lazy scope.

A program may have been made for more instances than there are, and return more rows. Outside of
`jax.jit`, JAX would compile what cuts them off for each number of instances. On a CPU they are cut
off by NumPy instead, which copies nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import Kind, stored_kind
from jedbatch._jaxpr.transfers import fetched, handed_over
from jedbatch._program.output_spec import OutputSpec, PaddedPlace, Slice
from jedbatch._program.placement import Placement
from jedbatch._support.types import Array, Dtype

ROWS_PER_BLOCK = 64  # rows taken out of an array at a time

Pieces = tuple[list[Array], ...]  # of each arena


def split_outputs(outputs: Sequence[Any], form: OutputSpec, arenas: Sequence[Kind]) -> Pieces:
    """The rows returned from each arena, as many as there are instances at a time or one by one.

    Devices of a mesh return lists of them: as many at a time already, or all of an arena.
    """
    batch = form.batch
    if batch is None:
        lists = [rows if isinstance(rows, list) else [rows] for rows in outputs]
        return tuple([row for rows in several for row in unstacked(rows)] for several in lists)
    if any(isinstance(rows, list) for rows in outputs):
        return tuple(outputs)
    pairs = zip(outputs, leaf_numbers(form, arenas), strict=True)
    return tuple(
        [_some(rows, i * batch, batch) for i in range(len(numbers))] for rows, numbers in pairs
    )


def _some(rows: Array, first: int, count: int) -> Array:
    if len(rows) == count:
        return rows
    if is_on_cpu(rows):
        view = fetched(rows)[first : first + count]
        return jax.device_put(view, rows.sharding if rows.committed else None)
    # `rows[a:b]` costs three times as much outside of jit
    return jax.lax.slice_in_dim(rows, first, first + count)


def is_on_cpu(x: Array) -> bool:
    """Returns whether an array is known and on the host or one CPU."""
    if not isinstance(x, jax.Array):  # cotangents may be arrays of NumPy
        return True
    if isinstance(x, Tracer):
        return False
    devices = x.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def joined(
    arenas: Sequence[Kind], cotangents: Pieces, batch: int | None, rooms: Sequence[int]
) -> tuple[Array | None, ...]:
    """For each arena the cotangents of its rows; None for numbers that have none.

    Those of pieces are None where there is none. Where pieces are several rows, an arena has room
    for more, which are zeros.
    """
    arrays: list[Array | None] = []
    for (shape, dtype), pieces, room in zip(arenas, cotangents, rooms, strict=True):
        if not has_gradient(dtype):
            arrays.append(None)
        elif batch is not None:
            arrays.append(_end_to_end(pieces, batch, (room, *shape), dtype))
        else:
            nothing = jnp.zeros(shape, dtype)
            full = [nothing if x is None else x for x in pieces]
            arrays.append(stacked(full) if full else nothing[None][:0])
    return tuple(arrays)


def joined_pieces(
    arenas: Sequence[Kind], cotangents: Pieces, batch: int | None, counts: Sequence[int]
) -> Pieces:
    """The same for the devices of a mesh, as pieces of so many rows; nothing in place of None."""
    found = []
    for (shape, dtype), pieces, count in zip(arenas, cotangents, counts, strict=True):
        nothing = jnp.zeros(shape if batch is None else (count, *shape), dtype)
        full = [nothing if x is None else x for x in pieces] if has_gradient(dtype) else []
        found.append([stacked(full)] if batch is None and full else full)
    return tuple(found)


def _end_to_end(
    pieces: Sequence[Array | None], batch: int, shape: tuple[int, ...], dtype: Dtype
) -> Array:
    """Returns pieces of as many rows each one after the other, with zeros where there are none."""
    if len(pieces) == 1 and pieces[0] is not None and batch == shape[0]:
        return pieces[0]
    if all(x is None or is_on_cpu(x) for x in pieces):
        rows = np.zeros(shape, dtype)
        for i, x in enumerate(pieces):
            if x is not None:
                rows[i * batch : (i + 1) * batch] = fetched(x)
        return rows
    lengths = [batch] * len(pieces) + [shape[0] - batch * len(pieces)]
    nothing = [jnp.zeros((length, *shape[1:]), dtype) for length in lengths]
    given = zip([*pieces, None], nothing, strict=True)
    return jnp.concatenate([zeros if x is None else x for x, zeros in given])


def leaf_numbers(form: OutputSpec, arenas: Sequence[Kind]) -> list[np.ndarray]:
    """For each arena, int[pieces], the number of the result that each piece belongs to.

    Results that have no cotangent, and ragged ones, do not count.
    """
    numbers: dict[Kind, list[int]] = {kind: [] for kind in arenas}
    for places in form.places:
        count = 0
        for kind, place in places:
            if isinstance(place, Slice | tuple):
                continue
            stored = place.kind if isinstance(place, PaddedPlace) else kind
            numbers[stored_kind(stored)].append(count)
            count += has_gradient(kind[1])
    return [np.array(numbers[kind], np.int64) for kind in arenas]


def results_of_rows(placed: Placement, form: OutputSpec) -> list[np.ndarray]:
    """The results that rows returned belong to (see `find_readers`)."""
    return [np.repeat(x, form.batch or 1) for x in leaf_numbers(form, placed.arenas)]


def told_apart(placed: Placement, form: OutputSpec) -> list[np.ndarray]:
    """The same; nothing if all are of one."""
    numbers = results_of_rows(placed, form)
    return numbers if any(x.any() for x in numbers) else []


@jax.jit
def _put_on_top(*rows: Array) -> Array:
    return jnp.stack(rows)


def stacked(rows: Sequence[Array]) -> Array:
    """Rows, at least one, as an array, by programs that serve any number of them."""
    blocks = []
    for start in range(0, len(rows), ROWS_PER_BLOCK):
        piece = list(rows[start : start + ROWS_PER_BLOCK])
        count = len(piece)
        if len(rows) > ROWS_PER_BLOCK:
            piece += [piece[0]] * (ROWS_PER_BLOCK - count)
        blocks.append(_put_on_top(*piece)[:count])
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks)


@functools.partial(jax.jit, static_argnums=2)
def some_rows(rows: Array, start: Array, count: int) -> list[Array]:
    """`count` rows of an array from `start` on, one by one."""
    piece = jax.lax.dynamic_slice_in_dim(rows, start, count)
    return [piece[i] for i in range(count)]


def unstacked(rows: Array) -> list[Array]:
    """The rows of an array one by one, by programs that serve arrays of any length."""
    block = min(ROWS_PER_BLOCK, len(rows))
    results: list[Array] = []
    for start in range(0, len(rows), block or 1):
        start = min(start, len(rows) - block)
        results[start:] = some_rows(rows, handed_over(np.int32(start)), block)
    return results
