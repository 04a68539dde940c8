"""Gradients of consts: from the rows that they met, and the cotangents of what came of it.

That of a matrix is one product of all rows with all cotangents. What JAX makes of a product under
`vmap` is this product too, but with rows of lists it sums over an axis that XLA:CPU has to move
first, which takes longer than the product.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.gates import Gates
from jedbatch._jaxpr.interpret import inlined, run_equations, shape_of
from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.sums import added
from jedbatch._jaxpr.versions import Equation
from jedbatch._jaxpr.zeros import Sources
from jedbatch._kernel.products import is_lopsided
from jedbatch._kernel.sums_over_lanes import sum_of_products
from jedbatch._support.types import Array

MOST_SUMMED = 1 << 16  # numbers of a matrix; XLA multiplies larger ones faster, on several threads


class MatrixProduct(NamedTuple):
    """A product of a vector, or of the rows of a matrix, with a matrix among the consts.

    Attributes:
      row_axis: the axis of the rows over which it sums.
      weight_axis: that of the const.
      weight_first: whether the const is its first factor.
      precision: of the product.
    """

    row_axis: int
    weight_axis: int
    weight_first: bool
    precision: Any

    @staticmethod
    def of(eqn: Equation, is_const: Callable[[Any], bool]) -> "MatrixProduct | None":
        """Returns what an equation is; None if it is no such product of equal floats."""
        if eqn.primitive.name != "dot_general":
            return None
        (sums, batch), sides = eqn.params["dimension_numbers"], eqn.invars
        kinds = {str(x.aval.dtype) for x in (*sides, *eqn.outvars)}
        which = [k for k, x in enumerate(sides) if is_const(x)]
        if len(which) != 1 or any(batch) or [*map(len, sums)] != [1, 1] or len(kinds) != 1:
            return None
        (weight,) = which
        row, const = sides[1 - weight].aval, sides[weight].aval
        if not kinds <= {"float32", "float64"} or row.ndim not in (1, 2) or const.ndim != 2:
            return None
        if is_lopsided(eqn.params["precision"]):
            return None
        (row_axis,), (weight_axis,) = sums[1 - weight], sums[weight]
        return MatrixProduct(row_axis, weight_axis, weight == 0, eqn.params["precision"])

    def gradient(self, rows: Array, cotangents: Array) -> Array:
        """The gradient of the const, from rows and cotangents of all lanes."""
        factors = self.factors(rows, cotangents)
        return lax.dot_general(*factors, (((0,), (0,)), ((), ())), precision=self.precision)

    def sum(self, alive: Array, rows: Array, cotangents: Array) -> Array:
        """The same, of the lanes that are alive, bool[lanes]."""
        first, second = self.factors(rows, cotangents)
        return sum_of_products(jnp.repeat(alive, len(first) // len(alive)), first, second)

    def factors(self, rows: Array, cotangents: Array) -> tuple[Array, Array]:
        """Two matrices of which the sum of products over their first axes is the gradient."""
        if rows.ndim == 3:
            rows = jnp.moveaxis(rows, 1 + self.row_axis, 2)
            cotangents = jnp.moveaxis(cotangents, 1, 2) if self.weight_first else cotangents
            rows, cotangents = (x.reshape(-1, x.shape[2]) for x in (rows, cotangents))
        return (rows, cotangents) if self.weight_axis == 0 else (cotangents, rows)


@dataclass(frozen=True, eq=False)
class Tap:
    """A place where consts meet rows.

    Attributes:
      consts: positions of the consts there that have a gradient.
      fixed: positions of those that have none (integers, and constants).
      cotangents: which of the rows the sweep leaves behind hold its results' cotangents.
      shapes: of these cotangents.
      sources: for each of these the results of the kernel whose cotangents it is made of.
      rows: maps (operands, saved) of one lane to the other things it reads.
      apply: maps (consts, fixed, rows) of one lane to its results that have a cotangent.
      linear: zero rows give zero, so lanes that never ran may hold zeros.
      look_up: its gradient is a scatter.
      scale: it multiplies a row by a const of its shape, element by element.
      product: of a row or rows with a matrix, which it is; None of other operations.
      gated: the same as `apply`, with bool[] for each result besides, whether it is alive. Nothing
        comes back from those that are not. None if derivatives are finite, or there is one result.
    """

    consts: tuple[int, ...]
    fixed: tuple[int, ...]
    cotangents: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    sources: tuple[Sources, ...]
    rows: Callable
    apply: Callable
    linear: bool = True
    look_up: bool = False
    scale: bool = False
    product: MatrixProduct | None = None
    gated: Callable | None = None

    def gradient(
        self,
        consts: Sequence[Array],
        rows: Array,
        cotangents: Sequence[Array],
        alive: Sequence[Array] = (),
    ) -> list[Array]:
        """Gradients of its consts, summed over lanes; all but `consts` are batched.

        `alive`, bool[lanes], says of each result whether it has a cotangent; it is read if the tap
        is `gated`.
        """
        if self.scale:  # XLA:CPU sums products over lanes 15 times as fast by a product
            (row,), (cotangent,) = rows, cotangents
            terms = (row * cotangent).reshape(len(row), -1)
            ones = jnp.ones(len(row), terms.dtype)
            total = jnp.dot(ones, terms, precision=jax.lax.Precision.HIGHEST)
            return [total.reshape(row.shape[1:])]
        if self.product is not None:
            (row,), (cotangent,) = rows, cotangents
            return [self.product.gradient(row, cotangent)]
        fixed = [consts[c] for c in self.fixed]

        def batched(moving):
            if self.gated is not None:
                return jax.vmap(functools.partial(self.gated, moving, fixed))(rows, list(alive))
            lane = functools.partial(self.apply, moving, fixed)
            return jax.vmap(lane, axis_size=len(cotangents[0]))(rows)

        _, vjp = jax.vjp(batched, [consts[c] for c in self.consts])
        return vjp(list(cotangents))[0]

    def sum_of_block(
        self, consts: Sequence[Array], alive: Array, rows: Sequence[Array], cotangents: Array
    ) -> list[Array] | None:
        """Gradients of its consts from a block of lanes, if that is one call; None if it is not.

        It is if several rows of each lane are multiplied by a matrix that is not large: XLA:CPU
        takes three times as long, and has to mask them before.
        """
        if self.product is None or len(self.shapes[0]) != 2 or 0 in self.shapes[0]:
            return None
        if consts[self.consts[0]].size > MOST_SUMMED:
            return None
        return [self.product.sum(alive, rows[0], cotangents.reshape(-1, *self.shapes[0]))]

    def refuse(self, consts: Sequence[Kind], rows: Sequence[Any], results: Sequence[Any]) -> None:
        """Raises the error of JAX if there is no gradient of its consts.

        `rows` and `results` are the variables of one lane.
        """
        lane, back = (
            [jax.ShapeDtypeStruct((1, *v.aval.shape), v.aval.dtype) for v in variables]
            for variables in (rows, results)
        )
        alive = [jax.ShapeDtypeStruct((1,), jnp.bool_)] * len(back)
        given = list(itertools.starmap(jax.ShapeDtypeStruct, consts))
        jax.eval_shape(self.gradient, given, lane, back, alive)

    def added(
        self,
        total: Sequence[Array],
        consts: Sequence[Array],
        rows: Array,
        cotangents: Sequence[Array],
        alive: Sequence[Array],
        all_lanes: bool,
    ) -> list[Array]:
        """The gradients of its consts added to `total`; those of look-ups row by row.

        Over all lanes, numbers of 16 bits are added up in float32: GPUs have no atomic addition of
        them, and lanes that never ran all add their zeros to the same row.
        """
        given = [consts[c].dtype for c in self.consts]
        if self.look_up and all_lanes:
            consts, cotangents = _widened(consts), _widened(cotangents)
        if not self.look_up or given != [consts[c].dtype for c in self.consts]:
            gradient = self.gradient(consts, rows, cotangents, alive)
            return [x + y.astype(x.dtype) for x, y in zip(total, gradient, strict=True)]
        closed = inlined(jax.make_jaxpr(self.gradient)(consts, rows, cotangents))
        return added(closed, jax.tree.leaves((consts, rows, cotangents)), total)


def alike(*atoms: Any) -> bool:
    """Returns whether all are arrays of single or double precision, of one shape."""
    kinds = {(atom.aval.shape, atom.aval.dtype) for atom in atoms}
    ((shape, dtype), *rest) = kinds
    return not rest and bool(shape) and dtype in (np.float32, np.float64)


def gated_function(
    eqn: Equation,
    results: Sequence[Any],
    consts: Sequence[Any],
    rows: Sequence[Any],
    over_lanes: Callable,
) -> Callable | None:
    """Returns an operation as a function with gates inside; None if it needs none.

    Args:
      eqn: the operation.
      results: those of its results that are differentiated.
      consts: variables that it reads, which all lanes share.
      rows: the others.
      over_lanes: from a program of one lane to one for many.

    Returns:
      From (values of consts that have a gradient, of the others, of rows, bool[] for each result
      that has a cotangent) to these results.
    """
    gates = Gates.find([eqn], results, consts)
    if not gates.has_gates_inside(eqn):
        return None
    given = [*consts, *rows]

    def run(values: Sequence[Array], alive: Sequence[Array]) -> list[Array]:
        env = dict(zip(given, values, strict=True))

        def rule(eqn: Equation, values: list[Array]) -> Sequence[Array]:
            return list(eqn.primitive.bind(*values, **eqn.params))

        run_equations([eqn], env, gates.rule(rule, alive))
        return [env[v] for v in results]

    flags = [jax.ShapeDtypeStruct((), jnp.bool_) for _ in results]
    closed = over_lanes(jax.make_jaxpr(run)(list(map(shape_of, given)), flags))

    def gated(moving: Array, fixed: Array, rows: Array, alive: Array) -> list[Array]:
        given = *moving, *fixed, *rows, *alive
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *given)

    return gated


def _widened(arrays: Sequence[Array]) -> list[Array]:
    """Returns arrays of which those of 16-bit floats are in float32."""
    narrow = (jnp.bfloat16, jnp.float16)
    return [x.astype(jnp.float32) if x.dtype in narrow else x for x in arrays]
