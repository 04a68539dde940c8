"""Reductions over the elements of a list that exist, where there is room for more.

Elements that do not exist may hold anything. They change neither results nor derivatives.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.monoids import JOINED_BY, identity_of
from jedbatch._support.types import Array

MAX_UNROLLED = 64  # steps of a chain that are compiled one by one
MAX_SUMMED_ONE_BY_ONE = 8  # rows


def flags_of_rows(exists: Array, x: Array) -> Array:
    """Flags of the rows of an array, with as many axes as it has."""
    return exists.reshape(-1, *[1] * (x.ndim - 1))


def without_others(x: Array, exists: Array) -> Array:
    """x; no cotangent reaches elements that do not exist, as zero times infinity would."""
    if not has_gradient(x.dtype):
        return x
    return jnp.where(flags_of_rows(exists, x), x, lax.stop_gradient(x))


def _sum(x: Array, exists: Array) -> Array:
    zero = identity_of("add", x.dtype)
    return lax.reduce(jnp.where(flags_of_rows(exists, x), x, zero), zero, lax.add, (0,))


@jax.custom_jvp
def _sum_of_few(x: Array, exists: Array) -> Array:
    """The sum of the rows that exist, in their order.

    XLA:CPU makes a loop of all of it; for `jnp.sum` it writes the rows with zeros between them.
    """
    rows = [jnp.where(exists[k], x[k], jnp.zeros_like(x[k])) for k in range(len(exists))]
    return functools.reduce(lax.add, rows)


@_sum_of_few.defjvp
def _sum_of_few_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Of the rows at once, as that of each is a row among zeros, transposed."""
    x, exists = primals
    return _sum_of_few(x, exists), jnp.where(flags_of_rows(exists, x), tangents[0], 0).sum(0)


def reduced(op: str, values: Sequence[Array], exists: Array) -> Array:
    """The reduction of the elements that exist, after a base (see `Expression.reduction`)."""
    join, (x, *base) = JOINED_BY[op], values
    if op == "add":
        few = len(exists) <= MAX_SUMMED_ONE_BY_ONE and x.dtype in (np.float32, np.float64)
        total = _sum_of_few(x, exists) if few else _sum(x, exists)
        return join(*base, total) if base else total
    total, begin = (base[0], 0) if base else (x[0], 1)

    def step(total: Array, element: tuple[Array, Array]) -> tuple[Array, None]:
        value, there = element
        return jnp.where(there, join(total, value), total), None

    if len(exists) > MAX_UNROLLED:
        total = jnp.broadcast_to(lax.convert_element_type(total, x.dtype), x.shape[1:])
        return lax.scan(step, total, (x[begin:], exists[begin:]))[0]
    for k in range(begin, len(exists)):
        total, _ = step(total, (x[k], exists[k]))
    return total
