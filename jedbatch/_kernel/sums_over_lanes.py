"""Sums over the lanes that are alive: what gradients of weights are made of, by one call for all.

In blocks of lanes, XLA:CPU masks what lanes that are not alive may hold, multiplies, and adds a
matrix to the sum, block after block. Products of so few lanes run at a third of the speed of larger
ones, and those of some more on several threads, which costs what it gains. The compiled core reads
rows where they are, and leaves out lanes that are not alive (see `_support/c/weight_gradients.c`).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jedbatch._jaxpr.native_calls import over_lanes_of, register_lowering
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._support.types import Array


def sum_of_products(alive: Array, rows: Array, cotangents: Array) -> Array:
    """Returns [m, n], the sum of the products of rows and cotangents.

    Args:
      alive: bool[lanes], which lanes count.
      rows: [lanes, m].
      cotangents: [lanes, n], of the same type.
    """
    (total,) = row_products_p.bind(alive, rows, cotangents)
    return total


def sums_of_rows(alive: Array, rows: Array, numbers: Array, count: int, clamps: bool) -> Array:
    """Returns [count, ...], the sums of rows that have the same number.

    Args:
      alive: bool[lanes], which lanes count.
      rows: [lanes, ...].
      numbers: int32[lanes], which sum a row belongs to.
      count: of sums.
      clamps: whether the nearest sum takes the place of one that does not exist, or none.
    """
    (totals,) = row_sums_p.bind(alive, rows, numbers, count=count, clamps=clamps)
    return totals


def _living(alive: Array, rows: Array) -> Array:
    """Returns rows, zeros in lanes that do not count."""
    return where_alive(alive.reshape(-1, *[1] * (rows.ndim - 1)), rows)


def _products(alive: Array, rows: Array, cotangents: Array) -> list[Array]:
    given = _living(alive, rows), _living(alive, cotangents)
    highest = lax.Precision.HIGHEST
    return [lax.dot_general(*given, (((0,), (0,)), ((), ())), precision=highest)]


def _sums(alive: Array, rows: Array, numbers: Array, count: int, clamps: bool) -> list[Array]:
    last = count - 1
    numbers = jnp.clip(numbers, 0, last) if clamps else jnp.where(numbers < 0, count, numbers)
    totals = jnp.zeros((count, *rows.shape[1:]), rows.dtype)
    return [totals.at[numbers].add(_living(alive, rows), mode="drop")]


row_products_p = Primitive("row_products")
row_products_p.multiple_results = True
row_sums_p = Primitive("row_sums")
row_sums_p.multiple_results = True


@row_products_p.def_abstract_eval
def _type_of_products(alive: Any, rows: Any, cotangents: Any) -> list[ShapedArray]:
    return [ShapedArray((rows.shape[1], cotangents.shape[1]), rows.dtype)]


@row_sums_p.def_abstract_eval
def _type_of_sums(alive: Any, rows: Any, numbers: Any, count: int, clamps: bool) -> Any:
    return [ShapedArray((count, *rows.shape[1:]), rows.dtype)]


def _product_tangents(primals: Any, tangents: Any) -> Any:
    alive, rows, cotangents = primals
    _, moving_rows, moving_cotangents = tangents
    parts = []
    if type(moving_rows) is not ad.Zero:
        parts.append(sum_of_products(alive, moving_rows, cotangents))
    if type(moving_cotangents) is not ad.Zero:
        parts.append(sum_of_products(alive, rows, moving_cotangents))
    return row_products_p.bind(*primals), [sum(parts[1:], parts[0])]


def _sum_tangents(primals: Any, tangents: Any, **params: Any) -> Any:
    alive, _, numbers = primals
    pushed = row_sums_p.bind(alive, tangents[1], numbers, **params)
    return row_sums_p.bind(*primals, **params), pushed


def _attributes(count: int, clamps: bool) -> dict[str, Any]:
    return {"clamps": np.array([clamps], np.int64)}


for _primitive, _operations, _numbers, _tangents in (
    (row_products_p, _products, dict, _product_tangents),
    (row_sums_p, _sums, _attributes, _sum_tangents),
):
    _primitive.def_impl(_operations)
    register_lowering(_primitive, _primitive.name, _operations, _numbers)
    ad.primitive_jvps[_primitive] = _tangents
    batching.primitive_batchers[_primitive] = over_lanes_of(_operations)
