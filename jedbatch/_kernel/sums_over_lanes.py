"""Sums over the lanes that are alive, of products of several rows of each: gradients of weights.

XLA:CPU masks what lanes that are not alive may hold, which are matrices here, and multiplies by a
third of the speed of the compiled core, which reads rows where they are, and leaves out lanes that
are not alive (see `_support/c/weight_gradients.c`).
"""

from typing import Any

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


def _products(alive: Array, rows: Array, cotangents: Array) -> list[Array]:
    first, second = (where_alive(alive[:, None], x) for x in (rows, cotangents))
    highest = lax.Precision.HIGHEST
    return [lax.dot_general(first, second, (((0,), (0,)), ((), ())), precision=highest)]


row_products_p = Primitive("row_products")
row_products_p.multiple_results = True


@row_products_p.def_abstract_eval
def _type_of_products(alive: Any, rows: Any, cotangents: Any) -> list[ShapedArray]:
    return [ShapedArray((rows.shape[1], cotangents.shape[1]), rows.dtype)]


def _product_tangents(primals: Any, tangents: Any) -> Any:
    alive, rows, cotangents = primals
    _, moving_rows, moving_cotangents = tangents
    parts = []
    if type(moving_rows) is not ad.Zero:
        parts.append(sum_of_products(alive, moving_rows, cotangents))
    if type(moving_cotangents) is not ad.Zero:
        parts.append(sum_of_products(alive, rows, moving_cotangents))
    return row_products_p.bind(*primals), [sum(parts[1:], parts[0])]


row_products_p.def_impl(_products)
register_lowering(row_products_p, row_products_p.name, _products, dict)
ad.primitive_jvps[row_products_p] = _product_tangents
batching.primitive_batchers[row_products_p] = over_lanes_of(_products)
