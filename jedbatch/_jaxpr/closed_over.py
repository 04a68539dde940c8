"""Arrays with respect to which nothing has a derivative.

A rule of the user's (`jax.custom_vjp`, `jax.custom_jvp`) says nothing of arrays that its function
closes over. In reverse it is an error if their cotangents are asked for. Forwards, the state of a
whole program is pushed at once, arrays with zero tangents too: there the tangent of what depends on
them is NaN if theirs is not zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jedbatch._jaxpr.versions import ClosedProgram
from jedbatch._support.types import Array
from jedbatch.errors import EscapedValueError


@jax.custom_jvp
def closed_over(x: jax.Array) -> jax.Array:
    """x, which has no derivative."""
    return x


@closed_over.defjvp
def _push(primals, tangents):
    return primals[0], zero_or_nan_p.bind(tangents[0])


def _zero_or_nan(slope: Array) -> Array:
    return jnp.where(slope == 0, slope, jnp.nan)


def without_tracers(program: ClosedProgram) -> Any:
    """Returns a program for a derivative; raises `EscapedValueError` if it reads what is gone."""
    for const in program.consts:
        if isinstance(const, Tracer):
            raise EscapedValueError(
                "a derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) reads a value of type "
                f"{const.aval.str_short()} of the cell, loop or branch that its function was made "
                "in. JAX runs rules when it differentiates, as under `jax.jit`, where such values "
                "are gone; expected rules that read their arguments. Pass the value to the "
                "function as an argument, keep it as a residual, and return None for its gradient."
            )
    return program


def _refuse(*_):
    raise jax.errors.UnexpectedTracerError(
        "a function with a derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) was differentiated "
        "with respect to an array that it closes over; expected arguments only, since its rule "
        "says nothing of other arrays. Pass the array as an argument, and return its gradient from "
        "the rule."
    )


zero_or_nan_p = Primitive("zero_or_nan")
zero_or_nan_p.def_impl(_zero_or_nan)
zero_or_nan_p.def_abstract_eval(lambda slope: slope)
batching.defvectorized(zero_or_nan_p)
ad.primitive_jvps[zero_or_nan_p] = lambda primals, tangents: (
    zero_or_nan_p.bind(*primals),
    zero_or_nan_p.bind(ad.instantiate_zeros(tangents[0])),
)
ad.primitive_transposes[zero_or_nan_p] = _refuse
mlir.register_lowering(zero_or_nan_p, mlir.lower_fun(_zero_or_nan, multiple_results=False))
