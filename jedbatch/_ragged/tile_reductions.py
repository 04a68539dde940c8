"""Reductions over the rows of arrays, tile by tile.

The sum of the rows of an array is that of the sums of its tiles. A tile gives the *parts* of a
reduction; those of two neighbouring tiles are combined to those of both, until there are those of
all rows. Rows of the last tile beyond the last row of the array are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.monoids import JOINED_BY, PLACES, REDUCTIONS, identity_of
from jedbatch._jaxpr.padding.row_rules import bind_rows
from jedbatch._jaxpr.versions import Equation
from jedbatch._support.types import Array, Dtype


@dataclass(frozen=True)
class TileRows:
    """The rows of a tile.

    Attributes:
      size: how many there are, `T`.
      start: int32[], the place of the first one in its array.
      count: int32[], how many of them the array has.
    """

    size: int
    start: Array
    count: Array

    def exist(self, ndim: int, axis: int) -> Array:
        """Returns bool[1, ..., T, ..., 1]: which rows there are, along an axis."""
        flags = jnp.arange(self.size, dtype=jnp.int32) < self.count
        return flags.reshape([self.size if a == axis else 1 for a in range(ndim)])


@dataclass(frozen=True)
class TileReduction:
    """A reduction over the rows of an array, tile by tile.

    Attributes:
      dtypes: of the parts that a tile gives; None for that of the result.
      reduce: maps (operands, their axes, rows) to the parts.
      combine: the parts of two tiles, to those of both.
      identity: the parts of no tile, or None.
      finish: maps the parts of all tiles to the result.
      finishes: whether it does something.
    """

    dtypes: tuple[Dtype | None, ...]
    reduce: Callable[..., Sequence[Array]]
    combine: Callable[..., Sequence[Array]]
    identity: tuple[Any, ...] | None
    finish: Callable[..., Array] = lambda x: x
    finishes: bool = False


def _masked(x: Array, axis: int, rows: TileRows, identity: Any) -> Array:
    """Returns rows, those beyond the last one replaced."""
    x = jnp.asarray(x)
    return jnp.where(rows.exist(x.ndim, axis), x, jnp.asarray(identity, x.dtype))


def _simple(eqn: Equation, stopped: bool) -> TileReduction:
    """A reduction whose results for two tiles are combined by one operation."""
    name = eqn.primitive.name
    identity = identity_of(REDUCTIONS[name], eqn.invars[0].aval.dtype)
    join = JOINED_BY[REDUCTIONS[name]]

    def reduce(operands: Sequence[Array], axes: Any, rows: TileRows) -> Sequence[Array]:
        ((_, axis),) = axes
        return bind_rows(eqn, [_masked(operands[0], axis, rows, identity)], lambda _: rows.size)

    return TileReduction((None,), reduce, lambda a, b: [join(a, b)], (identity,))


def _product(eqn: Equation, stopped: bool) -> TileReduction:
    """A matrix product that sums over rows."""

    def reduce(operands: Sequence[Array], axes: Any, rows: TileRows) -> Sequence[Array]:
        masked = list(operands)
        for i, axis in axes:
            masked[i] = _masked(operands[i], axis, rows, 0)
        return bind_rows(eqn, masked, lambda _: rows.size)

    return TileReduction((None,), reduce, lambda a, b: [lax.add(a, b)], (0,))


@jax.custom_jvp
def _tangent_of(x: Array) -> Array:
    """Zeros that move as x does."""
    return jnp.zeros_like(x)


@_tangent_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return jnp.zeros_like(primals[0]), tangents[0]


def _extreme(eqn: Equation, stopped: bool) -> TileReduction:
    """A maximum or minimum; JAX's derivative is the mean of those of all rows that reach it.

    So parts are the maximum, how many rows reach it, and zeros that move as the sum of these does.
    """
    if stopped or not has_gradient(eqn.outvars[0].aval.dtype):
        return _simple(eqn, stopped)
    name, reduced_axes = eqn.primitive.name, eqn.params["axes"]
    dtype = eqn.invars[0].aval.dtype
    of_counts = np.promote_types(dtype, np.float32)  # of few bits there are no large ones
    identity, choose = identity_of(REDUCTIONS[name], dtype), JOINED_BY[REDUCTIONS[name]]

    def reduce(operands: Sequence[Array], axes: Any, rows: TileRows) -> Sequence[Array]:
        ((_, axis),) = axes
        x = operands[0]
        still = lax.stop_gradient(_masked(x, axis, rows, identity))
        (most,) = bind_rows(eqn, [still], lambda _: rows.size)
        reach = (still == jnp.expand_dims(most, reduced_axes)) & rows.exist(x.ndim, axis)
        moved = _masked(_tangent_of(x), axis, rows, 0) * reach.astype(dtype)
        return most, reach.astype(of_counts).sum(reduced_axes), moved.sum(reduced_axes)

    def combine(*parts: Array) -> Sequence[Array]:
        (m, c, z), (n, d, y) = parts[:3], parts[3:]
        most = lax.stop_gradient(choose(m, n))
        left, right = (lax.stop_gradient(x) == most for x in (m, n))
        count = left.astype(of_counts) * c + right.astype(of_counts) * d
        return most, count, left.astype(dtype) * z + right.astype(dtype) * y

    def finish(most: Array, count: Array, moved: Array) -> Array:
        mean = moved.astype(of_counts) / lax.stop_gradient(jnp.where(count == 0, 1, count))
        return lax.stop_gradient(most) + mean.astype(dtype)

    return TileReduction((None, of_counts, None), reduce, combine, (identity, 0, 0), finish, True)


def _place_of_extreme(eqn: Equation, stopped: bool) -> TileReduction:
    """The place of the first maximum or minimum."""
    name, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    index_dtype = eqn.params["index_dtype"]
    identity = identity_of(PLACES[name], dtype)
    better = lax.gt if name == "argmax" else lax.lt

    def reduce(operands: Sequence[Array], axes: Any, rows: TileRows) -> Sequence[Array]:
        ((_, axis),) = axes
        x = _masked(operands[0], axis, rows, identity)
        (place,) = bind_rows(eqn, [x], lambda _: rows.size)
        most = jnp.take_along_axis(x, jnp.expand_dims(place, axis), axis)
        return jnp.squeeze(most, axis), place + rows.start.astype(index_dtype)

    def combine(m: Array, i: Array, n: Array, j: Array) -> Sequence[Array]:
        is_later = better(n, m) | ((n != n) & (m == m))
        return jnp.where(is_later, n, m), jnp.where(is_later, j, i)

    return TileReduction((dtype, None), reduce, combine, None, lambda _, place: place, True)


REDUCED_IN_TILES: dict[str, Callable[[Equation, bool], TileReduction]] = {
    **dict.fromkeys(REDUCTIONS, _simple),
    **dict.fromkeys(("reduce_max", "reduce_min"), _extreme),
    **dict.fromkeys(PLACES, _place_of_extreme),
    "dot_general": _product,
}
