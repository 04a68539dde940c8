"""What derivative rules of the user's may not read: values that are gone when JAX runs them."""

from typing import Any

import jax
from jax.core import Tracer

from jedbatch._jaxpr.versions import ClosedProgram
from jedbatch.errors import EscapedValueError


def value_that_is_gone(x: Tracer) -> EscapedValueError:
    """Returns the error of a derivative rule that reads a traced value."""
    return EscapedValueError(
        "a function with a derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) holds a value of "
        f"type {jax.typeof(x).str_short()} of the instance, cell, loop or branch that it was made "
        "in. JAX runs rules when it differentiates, as under `jax.jit`, where such values are "
        "gone; expected functions and rules that read their arguments. Pass the value to the "
        "function as an argument, keep it as a residual, and return None for its gradient."
    )


def without_tracers(program: ClosedProgram) -> Any:
    """Returns a program for a derivative; raises `EscapedValueError` if it reads what is gone."""
    for const in program.consts:
        if isinstance(const, Tracer):
            raise value_that_is_gone(const)
    return program
