"""Products of a vector of each lane and a matrix that all lanes share, by calls of the core.

XLA:CPU copies the matrix to the order in which it reads it, each time, and runs products on several
threads that are too small for it. Chunks are often narrow: 8 rows by [256, 512] take it three times
as long as they do the compiled core (see `_support/c/products.c`). Large products, and those by
matrices that do not fit into the cache of a core, are XLA's.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Primitive, Var

from jedbatch._jaxpr.interpret import as_call, reads
from jedbatch._jaxpr.native_calls import register_call
from jedbatch._jaxpr.versions import Equation
from jedbatch._support.types import Array

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
MATRIX_BYTES = 1 << 20


def with_calls(program: Jaxpr, shared: Collection[Var], most_work: int) -> Jaxpr:
    """Returns a program of a lane whose small products by shared matrices are calls.

    Args:
      program: of a lane.
      shared: its variables that are the same for all lanes.
      most_work: multiplications of all lanes up to which a product is a call.
    """
    same = {*program.constvars, *shared}
    eqns: list[Equation] = []
    eqn: Equation
    for eqn in program.eqns:
        if same.issuperset(reads(eqn)):
            same.update(eqn.outvars)
        elif (first := _rows(eqn, same)) is not None:
            eqn = as_call(eqn, _product(first, most_work, eqn.params["precision"]))
        eqns.append(eqn)
    return program.replace(eqns=eqns)


def _rows(eqn: Equation, same: Collection[Var]) -> int | None:
    """Returns which factor is of a lane, of a product by a shared matrix [m, n]; None of others."""
    if eqn.primitive.name != "dot_general" or not _is_plain(eqn.params["precision"]):
        return None
    summed, batch = eqn.params["dimension_numbers"]
    kinds = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    if any(batch) or len(kinds) > 1 or not kinds.issubset(DTYPES):
        return None
    if eqn.params.get("out_sharding") is not None:
        return None
    if not all(isinstance(v, Var) for v in eqn.invars):
        return None
    for rows, matrix in ((0, 1), (1, 0)):
        vector, weight = eqn.invars[rows], eqn.invars[matrix]
        last, shape = vector.aval.ndim - 1, weight.aval.shape
        size = math.prod(shape) * weight.aval.dtype.itemsize
        is_here = weight in same and vector not in same and len(shape) == 2
        leads = rows == 0 or last == 0
        if is_here and leads and (summed[rows], summed[matrix]) == ((last,), (0,)):
            return rows if 0 < size <= MATRIX_BYTES else None
    return None


def _is_plain(precision: object) -> bool:
    """Returns whether a product may be computed in the precision of its factors."""
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(x is None or isinstance(x, lax.Precision) for x in each)


@functools.cache
def _product(first: int, most_work: int, precision: Any) -> Callable[[Array, Array], Array]:
    """Returns the product of two factors of which `first` is that of the lane."""

    def by_xla(rows: Array, matrix: Array) -> Array:
        summed = ((rows.ndim - 1,), (0,))
        return lax.dot_general(rows, matrix, (summed, ((), ())), precision=precision)

    multiply = jax.custom_batching.custom_vmap(by_xla)

    @multiply.def_vmap
    def over_lanes(lanes: int, batched: Any, rows: Array, matrix: Array) -> Any:
        work = math.prod(rows.shape) * matrix.shape[-1]
        if batched[1] or not batched[0] or work > most_work:
            axes = [0 if x else None for x in batched]
            return jax.vmap(by_xla, axes)(rows, matrix), True
        product = times_matrix_p.bind(rows.reshape(-1, rows.shape[-1]), matrix)
        return product.reshape(*rows.shape[:-1], matrix.shape[-1]), True

    def product(*factors: Array) -> Array:
        result: Array = multiply(factors[first], factors[1 - first])
        return result

    return product


times_matrix_p = Primitive("times_matrix")


@times_matrix_p.def_abstract_eval
def _type(rows: Any, matrix: Any) -> ShapedArray:
    return ShapedArray((rows.shape[0], matrix.shape[1]), rows.dtype)


def _multiply(rows: Array, matrix: Array) -> Array:
    return lax.dot(rows, matrix, precision=lax.Precision.HIGHEST)


register_call(times_matrix_p, _multiply)
