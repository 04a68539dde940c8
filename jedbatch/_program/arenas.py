"""Rows of arenas in JAX: making arenas, reading rows and writing them."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.uninitialized import uninitialized
from jedbatch._layout.access import BROADCAST, SLICE, STRIDE
from jedbatch._program.tables import TableLayout
from jedbatch._support.types import Array, Dtype


def row(form: TableLayout, table: Array, name: tuple, *index: int, start: Array = 0, size: int = 0):
    """`table[name][*index, start : start + size]`; to the end of the row without a size."""
    shape = form.places[name][1]
    return slice_rows(table, form.offset(name, *index) + start, size or shape[-1])


def number_at(table: Array, place: Array) -> Array:
    """Returns int32[], the number in some place of a table, of which XLA need not know which."""
    return slice_rows(table, place, 1)[0]


def take(arena: Array, rows: Array) -> Array:
    """Rows of an arena, known to exist."""
    return jnp.asarray(arena).at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


def slice_rows(arena: Array, start: Array, size: int) -> Array:
    """Consecutive rows of an arena."""
    return lax.dynamic_slice_in_dim(arena, start, size, allow_negative_indices=False)


def put(arena: Array, rows: Array, start: Array) -> Array:
    """The arena with consecutive rows replaced."""
    rows = rows.astype(arena.dtype)
    return lax.dynamic_update_slice_in_dim(arena, rows, start, 0, allow_negative_indices=False)


def broadcast_flags(flags: Array, x: Array) -> Array:
    """Flags of the leading axes of x, in as many dimensions as x has."""
    return flags.reshape(*flags.shape, *[1] * (x.ndim - flags.ndim))


def read(arena: Array, first: Array, mode: int, width: int) -> Array:
    """Rows of an arena from the first one on, as many as there are lanes (see `_layout.access`)."""
    if mode == SLICE:
        return slice_rows(arena, first, width)
    if mode == BROADCAST:
        return jnp.broadcast_to(slice_rows(arena, first, 1), (width, *arena.shape[1:]))
    return slice_rows(arena, first, STRIDE * width)[::STRIDE]


def zeros(rows: int, kind: tuple[tuple[int, ...], Dtype]) -> Array:
    """An arena of zeros."""
    shape, dtype = kind
    return jnp.zeros((rows, *shape), dtype)


def empty(
    rows: int,
    kind: tuple[tuple[int, ...], Dtype],
    *name: Any,
    number: Array | None = None,
    filled: Array | None = None,
) -> Array:
    """An arena, any of whose rows is read only after it is written.

    `name`, and with it `number`, are its own, and rows behind those `filled` are zeros (see
    `uninitialized`).
    """
    shape, dtype = kind
    return uninitialized((rows, *shape), dtype, " ".join(map(str, name)), number, filled)
