"""Elementwise functions of JAX with a derivative rule of their own."""

import functools
from collections.abc import Callable

import jax

from jedbatch._jaxpr.versions import Equation, without_consts

KNOWN_FUNCTIONS = (jax.nn.relu, jax.nn.relu6)


def known_function(eqn: Equation) -> Callable | None:
    """Returns the function of `KNOWN_FUNCTIONS` that an equation calls; None if it calls none."""
    if eqn.primitive.name != "custom_jvp_call":
        return None
    source = _source(eqn)
    return next((f for f in KNOWN_FUNCTIONS if source and source == _source_of(f)), None)


def _source(eqn: Equation) -> str | None:
    """Returns name, file and line of a function with a derivative rule, if JAX says them."""
    program = without_consts(eqn.params["call_jaxpr"])
    return getattr(getattr(program, "debug_info", None), "func_src_info", None)


@functools.cache
def _source_of(function: Callable) -> str | None:
    (eqn,) = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), "float32")).eqns
    return _source(eqn) if eqn.primitive.name == "custom_jvp_call" else None
