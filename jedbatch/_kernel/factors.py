"""Products of two matrices of each lane, with factors laid out as XLA:CPU multiplies them fastest.

In `A @ B` the axis that is summed over is the last one of the first factor; in `A.T @ B`, which is
half of the reverse of such a product, it is not. Many small matrices of the latter kind XLA:CPU
multiplies element by element, which takes 1.2 times as long for 64 by 64 and 13 times for 4 by 4.
So the first factor is transposed before. XLA would make one operation of both again, if there were
no barrier between them.

Other products do not gain: those of a matrix of the lane with a vector, and those with a matrix
that all lanes share, of which XLA makes one large product.
"""

import collections
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Var

from jedbatch._jaxpr.interpret import as_call, is_inexact, reads
from jedbatch._jaxpr.versions import Equation
from jedbatch._kernel.products import is_lopsided
from jedbatch._support.types import Array


def with_summed_last(program: Jaxpr, shared: Collection[Var]) -> Jaxpr:
    """Returns a program of a lane whose products sum over the last axes of their first factors.

    Args:
      program: of a lane.
      shared: its variables that are the same for all lanes.
    """
    same = {*program.constvars, *shared}
    times = collections.Counter(v for v in program.outvars if isinstance(v, Var))
    times.update(v for eqn in program.eqns for v in reads(eqn))
    eqns: list[Equation | None] = []
    products: dict[Var, int] = {}  # the places of those with a factor of a lane, by result
    transposes: dict[Var, Equation] = {}
    eqn: Equation
    for eqn in program.eqns:
        if same.issuperset(reads(eqn)):
            same.update(eqn.outvars)
        elif _is_product(eqn):
            products[eqn.outvars[0]] = len(eqns)
        elif eqn.primitive.name == "transpose":
            (v,), (result,) = reads(eqn), eqn.outvars
            product = eqns[products[v]] if v in products and times[v] == 1 else None
            if product is not None and _swaps(product, eqn.params["permutation"]):
                eqns[products.pop(v)] = None
                products[result] = len(eqns)
                eqn = _swapped(product, result)
            else:
                transposes[result] = eqn
        eqns.append(eqn)
    for place in products.values():
        product = eqns[place]
        assert product is not None
        if same.isdisjoint(reads(product)) and _sums_elsewhere(product, transposes):
            eqns[place] = as_call(product, _product(product))
    return program.replace(eqns=[eqn for eqn in eqns if eqn is not None])


def _is_product(eqn: Equation) -> bool:
    """Returns whether an equation is a product of numbers with one precision, on one device."""
    return (
        eqn.primitive.name == "dot_general"
        and is_inexact(eqn.outvars[0])
        and not is_lopsided(eqn.params["precision"])
        and eqn.params.get("out_sharding") is None
    )


def _swaps(product: Equation, permutation: Sequence[int]) -> bool:
    """Returns whether a product that is transposed is that of its factors the other way round."""
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    start, ndim = len(batch), product.outvars[0].aval.ndim
    end = product.invars[0].aval.ndim - len(summed)  # of the axes of the first factor
    expected = *range(start), *range(end, ndim), *range(start, end)
    return tuple(permutation) == expected


def _swapped(product: Equation, result: Var) -> Equation:
    """Returns a product with its factors swapped, as XLA does with one that is transposed."""
    (summed, batch), (first, second) = product.params["dimension_numbers"], product.invars
    params = {**product.params, "dimension_numbers": (summed[::-1], batch[::-1])}
    return product.replace(invars=[second, first], outvars=[result], params=params)


def _sums_elsewhere(eqn: Equation, transposes: dict[Var, Equation]) -> bool:
    """Returns whether a product is one of matrices, the first of them summed over other axes."""
    return not _sums_last(eqn, transposes) and min(_free(eqn, 0), _free(eqn, 1)) > 1


def _sums_last(eqn: Equation, transposes: dict[Var, Equation]) -> bool:
    """Returns whether the first factor of a product is summed over its last axes.

    XLA looks through transposes.
    """
    source, axes = eqn.invars[0], tuple(eqn.params["dimension_numbers"][0][0])
    ndim = source.aval.ndim
    while isinstance(source, Var) and source in transposes:
        axes = tuple(transposes[source].params["permutation"][axis] for axis in axes)
        (source,) = transposes[source].invars
    return axes == tuple(range(ndim - len(axes), ndim))


def _free(eqn: Equation, factor: int) -> int:
    """Returns how many numbers of a factor are not summed up, in each of its batch."""
    summed, batch = (axes[factor] for axes in eqn.params["dimension_numbers"])
    shape = eqn.invars[factor].aval.shape
    return math.prod(n for axis, n in enumerate(shape) if axis not in (*summed, *batch))


def _product(eqn: Equation) -> Callable[..., Array]:
    """Returns the function of an equation that transposes its first factor before."""
    params: dict[str, Any] = eqn.params
    (summed, others), (batch, others_batch) = params["dimension_numbers"]

    def product(first: Array, second: Array) -> Array:
        free = [axis for axis in range(first.ndim) if axis not in (*batch, *summed)]
        turned = lax.optimization_barrier(jnp.transpose(first, (*batch, *free, *summed)))
        last = tuple(range(first.ndim - len(summed), first.ndim))
        return lax.dot_general(
            turned,
            second,
            ((last, others), (tuple(range(len(batch))), others_batch)),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )

    return product
