"""The products of a cell with weights: finding them.

A cell's program is a jaxpr. A *product* in it has a value that depends on the instance, its row
value, on one side, a matrix that depends on shared values only on the other, and sums over one
axis of each. What looks like a product but is unusual (integers, batched axes, weights of more
dimensions, weak types) is not taken for one, so that code for products leaves it alone.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Var

from jedbatch._jaxpr.gates import with_derived
from jedbatch._jaxpr.interpret import (
    Bindings,
    dependents,
    reads,
    shape_of,
    used_variables,
    value_of,
)
from jedbatch._jaxpr.versions import ClosedProgram, Equation
from jedbatch._support.types import Array


class Kind(NamedTuple):
    """The properties that products which are put together agree in.

    Attributes:
      dtypes: of row value, weight and result.
      free: shape of the row value without `row_axis`, the axis summed over.
      columns_first: the columns are the first axis of the result, not the last.
      precision, preferred: parameters of the product.
    """

    dtypes: tuple[Any, Any, Any]
    free: tuple[int, ...]
    row_axis: int
    columns_first: bool
    precision: Any
    preferred: Any

    @property
    def axis(self) -> int:
        """The axis of the result that columns are packed along."""
        return 0 if self.columns_first else len(self.free)

    def zeros(self, size: int) -> np.ndarray:
        """A column of zeros; no operation, so that it counts as shared."""
        shape = (size, *self.free) if self.columns_first else (*self.free, size)
        return np.zeros(shape, self.dtypes[2])

    def multiply(self, row: Array, weight: Array) -> Array:
        """The product with a weight [K, N]; of stacked vectors [k, K] too."""
        row_axis = self.row_axis + row.ndim - len(self.free) - 1
        (a, i), (b, j) = (row, row_axis), (weight, 0)
        if self.columns_first:
            (a, i), (b, j) = (b, j), (a, i)
        return lax.dot_general(
            a,
            b,
            (((i,), (j,)), ((), ())),
            precision=self.precision,
            preferred_element_type=self.preferred,
        )


class Product(NamedTuple):
    """A product of a row value and a weight matrix.

    Attributes:
      row, weight, result: variables.
      weight_axis: the axis of the weight that is summed over.
    """

    row: Array
    weight: Array
    result: Any
    weight_axis: int
    kind: Kind

    @staticmethod
    def of(eqn: Equation, shared: set[Var], moving: set[Var]) -> "Product | None":
        """The product that an equation is, if any; matrices and inexact numbers only."""
        if eqn.primitive.name != "dot_general":
            return None
        sides = list(zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=True))
        if not all(isinstance(v, Var) for v in eqn.invars):
            return None
        weight_first = eqn.invars[0] in shared
        (weight, weight_dims), (row, row_dims) = sides if weight_first else sides[::-1]
        result = eqn.outvars[0]
        avals = row.aval, weight.aval, result.aval
        if (
            weight not in shared
            or row not in moving
            or len(weight_dims) != 1
            or weight.aval.ndim != 2
            or weight.aval.size == 0
            or any(eqn.params["dimension_numbers"][1])
            or eqn.params.get("out_sharding") is not None
            or is_lopsided(eqn.params["precision"])
            or any(a.weak_type or not jax.dtypes.issubdtype(a.dtype, np.inexact) for a in avals)
        ):
            return None
        (row_axis,) = row_dims
        free = row.aval.shape[:row_axis] + row.aval.shape[row_axis + 1 :]
        precision, preferred = eqn.params["precision"], eqn.params["preferred_element_type"]
        dtypes = avals[0].dtype, avals[1].dtype, avals[2].dtype
        kind = Kind(dtypes, free, row_axis, weight_first and free != (), precision, preferred)
        return Product(row, weight, result, weight_dims[0], kind)

    @property
    def sums_in_full(self) -> bool:
        """Returns whether weights may be added up: they have the precision of the result."""
        return bool(self.kind.dtypes[1] == self.kind.dtypes[2])

    @property
    def height(self) -> int:
        """The rows of the weight [K, N]."""
        return self.weight.aval.shape[self.weight_axis]

    @property
    def width(self) -> int:
        """The columns of the weight [K, N]."""
        return self.weight.aval.shape[1 - self.weight_axis]

    def matrix(self, env: Bindings) -> Array:
        """The weight [K, N]."""
        weight = env[self.weight]
        return lax.transpose(weight, (1, 0)) if self.weight_axis else weight


def is_lopsided(precision: object) -> bool:
    """True of a pair of different precisions for the two sides of a product."""
    return isinstance(precision, tuple) and len(set(precision)) > 1


class CellProgram:
    """The program of a cell and what depends on what.

    Attributes:
      jaxpr: without equations that no result depends on.
      shared: variables that depend on shared values and constants only.
      products: the products of a row value and a weight, by result.
      times: how often each variable is read.
      reader: an equation that reads it.
      maker: the equation that makes it.
    """

    def __init__(self, closed: ClosedProgram, num_shared: int):
        used = used_variables(closed.jaxpr)
        eqns = [eqn for eqn in closed.jaxpr.eqns if used.intersection(eqn.outvars)]
        self.jaxpr = jaxpr = closed.jaxpr.replace(eqns=eqns)
        self.consts = closed.consts
        self.shared = set(with_derived(eqns, [*jaxpr.constvars, *jaxpr.invars[:num_shared]]))
        moving = dependents(jaxpr, jaxpr.invars[num_shared:])
        candidates = (Product.of(eqn, self.shared, moving) for eqn in eqns)
        self.products = {p.result: p for p in candidates if p is not None}
        self.times = Counter(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
        self.times.update(v for v in jaxpr.outvars if isinstance(v, Var))
        self.reader = {v: eqn for eqn in eqns for v in reads(eqn)}
        self.maker = {v: eqn for eqn in eqns for v in eqn.outvars}

    def traced(self, run: Callable[[Bindings], None]) -> Any:
        """The closed jaxpr of a function that adds all results to the values by variable."""

        def evaluate(*args: Any) -> list[Array]:
            env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
            env.update(zip(self.jaxpr.invars, args, strict=True))
            run(env)
            return [value_of(v, env) for v in self.jaxpr.outvars]

        return jax.make_jaxpr(evaluate)(*map(shape_of, self.jaxpr.invars))

    def adds_up(self, v: Var) -> Any:
        """The sum of two variables that is the only reader of a variable, or None."""
        eqn = self.reader.get(v)
        return eqn.outvars[0] if self.times[v] == 1 and eqn and adds(eqn) else None


def adds(eqn: Equation) -> bool:
    """True of additions of two variables of one type."""
    avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    alike = len({(a.shape, a.dtype, a.weak_type) for a in avals}) == 1
    return eqn.primitive.name == "add" and alike and all(isinstance(x, Var) for x in eqn.invars)


def join(parts: Sequence[Array], axis: int) -> Array:
    """Some arrays one after another."""
    return lax.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def split_sizes(x: Array, sizes: Sequence[int], axis: int) -> Sequence[Any]:
    """Pieces of some sizes."""
    return lax.split(x, sizes, axis) if len(sizes) > 1 else [x]


def sum_of(values: Sequence[jax.Array]) -> Array:
    """The sum, from left to right."""
    return functools.reduce(lax.add, values)
