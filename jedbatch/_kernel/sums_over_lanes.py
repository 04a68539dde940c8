"""Sums over the lanes that are alive, of products of several rows of each: gradients of weights.

XLA:CPU masks what lanes that are not alive may hold, which are matrices here, and multiplies by a
third of the speed of the compiled core, which reads rows where they are, and leaves out lanes that
are not alive (see `_support/c/weight_gradients.c`).
"""

from typing import Any

from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from jedbatch._jaxpr.native_calls import register_call
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._support.types import Array


def sum_of_products(alive: Array, rows: Array, cotangents: Array) -> Array:
    """Returns [m, n], the sum of the products of rows and cotangents.

    Args:
      alive: bool[lanes], which lanes count.
      rows: [lanes, m].
      cotangents: [lanes, n], of the same type.
    """
    total: Array = row_products_p.bind(alive, rows, cotangents)
    return total


def _products(alive: Array, rows: Array, cotangents: Array) -> Array:
    first, second = (where_alive(alive[:, None], x) for x in (rows, cotangents))
    highest = lax.Precision.HIGHEST
    return lax.dot_general(first, second, (((0,), (0,)), ((), ())), precision=highest)


row_products_p = Primitive("row_products")


@row_products_p.def_abstract_eval
def _type_of_products(alive: Any, rows: Any, cotangents: Any) -> ShapedArray:
    return ShapedArray((rows.shape[1], cotangents.shape[1]), rows.dtype)


register_call(row_products_p, _products)
