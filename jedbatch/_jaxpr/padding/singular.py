"""Operations whose derivatives may be infinite in the padding of an instance, and only there.

Padding repeats the last row, or in lists the first, so that what is computed of it is what that row
has, and as finite. So it has the position of that row, too: for the distances of points,

    r = sqrt(|x_i - x_j|² + (i == j))

the pair of the last row and its copy would have the distance 0 if their positions differed. Nothing
comes back to r there, but 0 times an infinite slope is no number, and the last row is sent it. With
weights of neighbours alone, where |i - j| < 2, a copy further on would have none.

Operations that take rows together and keep their axis make other rows of padding, as differences of
neighbours do. What depends on them is followed through the equations of a phase, and singular
operations read a number in their padding at which they and their slopes are finite.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.interpret import names_in, reads
from jedbatch._jaxpr.padding.axis_rules import REDUCTIONS, TILE_ROWS, mixed_axes
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes
from jedbatch._jaxpr.versions import Equation
from jedbatch._support.types import Array

# By operation, the operands at which its derivative may be infinite.
SINGULAR: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        names_in(
            "acos acosh asin atanh cbrt digamma erf_inv integer_pow lgamma log log1p rsqrt sqrt"
        ),
        (0,),
    ),
    **dict.fromkeys(names_in("atan2 igamma igammac polygamma pow"), (0, 1)),
    **dict.fromkeys(names_in("div rem"), (1,)),
}
FINITE_AT = 0.5  # all of these, with their derivatives,
ACOSH_FINITE_AT = 2.0  # but one


def positioned(equations: Sequence[Equation]) -> frozenset[int]:
    """Returns the ids of singular equations that read what is no copy of a row in padding."""
    known: set[Any] = set()
    found = set()
    for eqn in equations:
        name = eqn.primitive.name
        depends = not known.isdisjoint(reads(eqn))
        if not depends and name not in REDUCTIONS and name != "dot_general":
            depends = bool(mixed_axes(eqn))
        if depends:
            known.update(v for v in eqn.outvars if is_ragged(v.aval.shape))
            if name in SINGULAR:
                found.add(id(eqn))
    return frozenset(found)


def makes_others(equations: Sequence[Equation]) -> bool:
    """Returns whether some equation makes rows in padding that are no copies of others."""
    together = (*REDUCTIONS, "dot_general")
    return any(eqn.primitive.name not in together and mixed_axes(eqn) for eqn in equations)


def positions(padded: Any, eqn: Equation, counted: Array) -> Array:
    """Returns positions along an axis; in padding, where it matters, that of the row it repeats.

    Args:
      padded: the rules that the equation runs by, see `_jaxpr.padding.padded_rules`.
      eqn: an `iota`.
      counted: its result, from 0 on in a tile, too.
    """
    result, axis = eqn.outvars[0], eqn.params["dimension"]
    extent = result.aval.shape[axis]
    if axis in padded.tiles.get(result, ()):
        counted = counted + padded.offset.astype(counted.dtype)
    if not padded.differentiable or not is_ragged((extent,)):
        return counted
    return padded.copied(counted, extent)


def without_poles(padded: Any, eqn: Equation, values: Sequence[Array]) -> list[Array]:
    """Returns the operands of a singular equation, with ordinary numbers in the padding.

    Args:
      padded: the rules it runs by, see `_jaxpr.padding.padded_rules`.
      eqn: of one instance.
      values: its operands.
    """
    shape, result = [], eqn.outvars[0]
    ordinary = ACOSH_FINITE_AT if eqn.primitive.name == "acosh" else FINITE_AT
    tile = padded.tiles.get(result, ())
    for a, d in enumerate(result.aval.shape):
        shape.append(TILE_ROWS if a in tile else padded.size(d))

    def guarded(x: Array) -> Array:
        if not shape or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        x = jnp.broadcast_to(x, shape)
        for a in ragged_axes(result.aval.shape):
            places = lax.broadcasted_iota(jnp.int32, shape, a) + (padded.offset if a in tile else 0)
            there = places < padded.length(result.aval.shape[a])
            x = jnp.where(there, x, jnp.asarray(ordinary, x.dtype))
        return x

    # What is the same for all rows is finite.
    operands = [k for k in SINGULAR[eqn.primitive.name] if is_ragged(eqn.invars[k].aval.shape)]
    return [guarded(x) if k in operands else x for k, x in enumerate(values)]
