"""Running a row-wise equation for one row.

Along the ragged axis of its arrays, such an equation does the same to every row (see
`axis_rules`). So it can be run without knowing how many rows there are: the axis is left
out, and all rows of all instances run side by side.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from jedbatch._jaxpr.interpret import ELEMENTWISE_OPERATIONS, interpret
from jedbatch._jaxpr.padding.axis_rules import (
    REDUCTIONS,
    CannotMergeError,
    is_look_up,
)
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes
from jedbatch._jaxpr.versions import Equation, OpenProgram
from jedbatch._support.types import Array, AxisSize

Number = Callable[[Any], int]  # the size of an extent


def one(extent: AxisSize) -> int:
    """Returns the extent of a ragged axis in one row."""
    return 1


def bind_rows(eqn: Equation, values: Sequence[jax.Array], number: Number) -> list[Array]:
    """Returns the results of an equation on values whose ragged axes have these extents."""
    if eqn.primitive.name == "custom_jvp_call":
        return list(_with_rule(eqn, number)(*values))
    params = {name: substituted(value, number) for name, value in eqn.params.items()}
    if eqn.primitive.name == "jit":
        inner = eqn.params["jaxpr"]
        return evaluate_rows(inner.jaxpr, inner.consts, values, number)
    out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate_rows(
    jaxpr: OpenProgram, consts: Sequence[jax.Array], args: Sequence[jax.Array], number: Number
) -> list[Array]:
    """Returns the results of a program on values whose ragged axes have these extents."""
    return interpret(jaxpr, consts, args, lambda eqn, values: bind_rows(eqn, values, number))


def _with_rule(eqn: Equation, number: Number) -> Callable:
    """Returns a function with a derivative rule, for other extents."""
    closed, rule_of = eqn.params["call_jaxpr"], eqn.params["jvp_jaxpr_fun"]

    @jax.custom_jvp
    def call(*values):
        return tuple(evaluate_rows(closed.jaxpr, closed.consts, values, number))

    @call.defjvp
    def _(primals, tangents):
        jaxpr, consts, zeros = rule_of.call_wrapped(*[False] * len(primals))
        out = evaluate_rows(jaxpr, consts, (*primals, *tangents), number)
        moving = iter(out[len(zeros) :])
        primals_out = out[: len(zeros)]
        tangents_out = [
            jnp.zeros_like(x) if zero else next(moving)
            for x, zero in zip(primals_out, zeros, strict=True)
        ]
        return tuple(primals_out), tuple(tangents_out)

    return call


def run_row(eqn: Equation, values: Sequence[jax.Array], position: Array) -> list[Array]:
    """Returns the results of a row-wise equation for one row, which comes without its axis."""
    name, (out, *_) = eqn.primitive.name, eqn.outvars
    axes = [ragged_axes(v.aval.shape) for v in eqn.invars]
    if not is_ragged(out.aval.shape):  # a number made of extents
        return bind_rows(eqn, values, one)
    (axis,) = ragged_axes(out.aval.shape)
    if name == "iota" and eqn.params["dimension"] == axis:
        shape = [d for a, d in enumerate(eqn.params["shape"]) if a != axis]
        return [jnp.full(shape, position, eqn.params["dtype"])]
    if name in ELEMENTWISE_OPERATIONS:
        return bind_rows(
            eqn,
            [_flat(x, operand_axes, axis) for x, operand_axes in zip(values, axes, strict=True)],
            one,
        )
    if name in REDUCTIONS:
        operand_axes = axes[0][0]
        params = eqn.params | {"axes": tuple(a - (a > operand_axes) for a in eqn.params["axes"])}
        return bind_rows(eqn.replace(params=params), values, one)
    if name == "dot_general":
        return [_product_of_row(eqn, values, axes)]
    if is_look_up(eqn):
        results = [look_up(eqn, values, position)]
    else:
        operands_whole = [
            lax.expand_dims(x, operand_axes) for x, operand_axes in zip(values, axes, strict=True)
        ]
        results = bind_rows(eqn, operands_whole, one)
    pairs = zip(results, eqn.outvars, strict=True)
    return [lax.squeeze(x, ragged_axes(v.aval.shape)) for x, v in pairs]


def _flat(x: Array, axes: Sequence[int], axis: int) -> Array:
    """Returns an operand of an elementwise operation without the axis of rows."""
    return x if axes or not jnp.ndim(x) else lax.squeeze(x, (axis,))


def look_up(eqn: Equation, values: Sequence[Array], position: Array) -> Array:
    """Returns row `position` of a slice of a table, or of rows gathered from it."""
    name, params = eqn.primitive.name, eqn.params
    if name == "gather":
        table, indices = values
        (axis,) = ragged_axes(params["slice_sizes"])
        numbers = params["dimension_numbers"]
        moves = np.array([a == axis for a in numbers.start_index_map], indices.dtype)
        exact = params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
        if not (moves.any() and exact):
            raise CannotMergeError("`gather` of rows that no index leads to")
        return lax.gather(
            table,
            indices + jnp.broadcast_to(moves * position.astype(indices.dtype), indices.shape),
            numbers,
            substituted(params["slice_sizes"], one),
            mode="clip",
        )
    if name == "dynamic_slice":  # which moves its start to where all rows fit
        raise CannotMergeError("`dynamic_slice` of as many rows as an array has")
    (table,) = values
    starts = list(params["start_indices"])
    (axis,) = ragged_axes(eqn.outvars[0].aval.shape)
    if is_ragged(starts):
        raise CannotMergeError("`slice` that begins at a row which depends on the instance")
    strides = params["strides"] or (1,) * len(starts)
    row = lax.dynamic_slice_in_dim(table, starts[axis] + strides[axis] * position, 1, axis)
    limits = list(params["limit_indices"])
    starts[axis], limits[axis] = 0, 1
    return lax.slice(row, starts, limits, [1 if a == axis else s for a, s in enumerate(strides)])


def _product_of_row(
    eqn: Equation, values: Sequence[jax.Array], axes: Sequence[Sequence[int]]
) -> Array:
    """Returns a matrix product of a row, which comes without its axis."""
    dimension_numbers = [
        tuple(
            tuple(a - sum(b < a for b in dropped) for a in dims[side] if a not in dropped)
            for side, dropped in enumerate(axes)
        )
        for dims in eqn.params["dimension_numbers"]
    ]
    left, right = values
    dimensions: Any = tuple(dimension_numbers)
    return lax.dot_general(
        left,
        right,
        dimensions,
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )


def substituted(value: Array, number: Callable[[Any], int]) -> Any:
    """A parameter of a primitive with numbers for extents."""
    if type(value) is tuple:
        return tuple(substituted(x, number) for x in value)
    if type(value) not in (int, str, bool, type(None)) and is_symbolic_dim(value):
        return number(value)
    return value
