"""Rows of arenas in JAX: reading them, writing them in place, and keeping the two apart.

An arena is updated in place as long as XLA sees that it is not read afterwards, and does not fuse
reading some of its rows with writing others.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.uninitialized import uninitialized
from jedbatch._kernel.target import Target
from jedbatch._layout.access import BROADCAST, SLICE, STRIDE
from jedbatch._program.tables import TableLayout
from jedbatch._support.types import Array, Dtype, PyTree


def row(form: TableLayout, table: Array, name: tuple, *index: int, start: Array = 0, size: int = 0):
    """`table[name][*index, start : start + size]`; to the end of the row without a size."""
    offset, shape = form.places[name]
    stride = math.prod(shape)
    for i, length in zip(index, shape, strict=False):
        stride //= length
        offset = offset + i * stride
    return slice_rows(table, offset + start, size or shape[-1])


def block(
    form: TableLayout, table: Array, name: tuple, first: int, count: int, *, start: Array, size: int
) -> Array:
    """`table[name][first : first + count, start : start + size]`."""
    offset, (_, lanes) = form.places[name]
    begin = offset + first * lanes
    rows = table[begin : begin + count * lanes].reshape(count, lanes)
    return lax.dynamic_slice(
        rows, (jnp.zeros_like(start), start), (count, size), allow_negative_indices=False
    )


def take(arena: Array, rows: Array) -> Array:
    """Rows of an arena, known to exist."""
    return arena.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


def slice_rows(arena: Array, start: Array, size: int) -> Array:
    """Consecutive rows of an arena."""
    return lax.dynamic_slice_in_dim(arena, start, size, allow_negative_indices=False)


def put(arena: Array, rows: Array, start: Array) -> Array:
    """The arena with consecutive rows replaced."""
    rows = rows.astype(arena.dtype)
    return lax.dynamic_update_slice_in_dim(arena, rows, start, 0, allow_negative_indices=False)


def put_at(target: Target, arenas: list[Any], writes: Sequence[tuple[int, Any, Any]]) -> None:
    """Replaces rows of arenas, for each (arena, rows, first); no two write the same row.

    On a GPU all rows of an arena are written by one kernel.
    """
    by_arena: dict[int, list[tuple[Any, Any]]] = {}
    for a, rows, first in writes:
        by_arena.setdefault(a, []).append((rows, first))
    for a, several in by_arena.items():
        if target.control != "switch" or len(several) == 1:
            for rows, first in several:
                arenas[a] = put(arenas[a], rows, first)
            continue
        place = jnp.concatenate([first + jnp.arange(len(rows)) for rows, first in several])
        rows = jnp.concatenate([rows.astype(arenas[a].dtype) for rows, _ in several])
        arenas[a] = (
            arenas[a]
            .at[place]
            .set(rows, mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False)
        )


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


def isolated(
    target: Target, lane: Array, read: Any, write: Callable, state: PyTree, *, flagged: bool = False
) -> Any:
    """`write(lane, read, state)`, apart from what has been read.

    Otherwise XLA fuses reading rows with writing them and copies the arena to be able to. XLA:CPU
    does so unless writing is a loop of its own, of one trip, which it must not see; XLA:GPU minds a
    barrier.

    The loop counts, or is `flagged`: then what only depends on what has been read leaves it. Small
    programs run a third slower so, where they are fused; but in reverse they are large, and compile
    in 0.8 to 0.9 of the time.
    """
    if target.control == "switch":
        return write(lane, lax.optimization_barrier(read), state)

    def once(carry):
        at, _, state = carry
        return at if flagged else at + 1, False, write(at, read, state)

    def more(carry):
        return carry[1] if flagged else carry[0] == lane

    return lax.while_loop(more, once, (lane, lane >= 0, state))[2]


def zeros(rows: int, kind: tuple[tuple[int, ...], Dtype]) -> Array:
    """An arena of zeros."""
    shape, dtype = kind
    return jnp.zeros((rows, *shape), dtype)


def empty(rows: int, kind: tuple[tuple[int, ...], Dtype], *name: Any) -> Array:
    """An arena, any of whose rows is read only after it is written; `name` is its own."""
    shape, dtype = kind
    return uninitialized((rows, *shape), dtype, " ".join(map(str, name)))
