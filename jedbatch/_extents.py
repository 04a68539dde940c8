"""Extents that differ from instance to instance, as JAX's symbolic dimensions.

An array [n, 128] whose n is another number in every instance is traced once, with a symbol for n.
JAX then says of every operation how its shape depends on n (`n`, `n + 1`, `2*n`, or not at all),
and a value of n, where a computation needs one (the divisor of a mean), is an operation of its own,
`dim_as_value`. An extent of which JAX knows no number is called *ragged* here, and so is the axis
it is the extent of.

Source: the symbolic shapes of `jax.export`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.export import is_symbolic_dim


def is_ragged(shape: Sequence[Any]) -> bool:
    """Whether an extent of a shape is symbolic."""
    return any(type(d) is not int and is_symbolic_dim(d) for d in shape)


def ragged_axes(shape: Sequence[Any]) -> tuple[int, ...]:
    """The axes of a shape whose extents are symbolic."""
    return tuple(i for i, d in enumerate(shape) if type(d) is not int and is_symbolic_dim(d))


def extent_at(extent: Any, values: Mapping[str, Any]) -> Any:
    """An extent where its symbols have these values: numbers, or arrays of them."""
    if not is_symbolic_dim(extent):
        return extent
    return eval(_compiled(str(extent)), _FUNCTIONS, dict(values))


def shape_at(shape: Sequence[Any], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """A shape where its symbols have these values."""
    return tuple(extent_at(d, values) for d in shape)


@functools.cache
def _compiled(text: str) -> Any:
    """An extent, as JAX writes it, as Python's code."""
    return compile(text.replace("^", "**"), "extent", "eval")


def _mod(a: Any, b: Any) -> Any:
    return a % b


def _floordiv(a: Any, b: Any) -> Any:
    return a // b


def _chosen(by_python: Any, by_array: Any) -> Any:
    def choose(a: Any, b: Any) -> Any:
        numbers = isinstance(a, int) and isinstance(b, int)
        return by_python(a, b) if numbers else by_array(a, b)

    return choose


_FUNCTIONS = {
    "__builtins__": {},
    "mod": _mod,
    "floordiv": _floordiv,
    "max": _chosen(max, jnp.maximum),
    "min": _chosen(min, jnp.minimum),
}


def symbols_in(value: Any) -> frozenset[str]:
    """The symbols in the extents that a parameter of a primitive has somewhere inside."""
    if isinstance(value, tuple | list):
        return frozenset().union(*map(symbols_in, value))
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        jaxpr = getattr(value, "jaxpr", value)
        inside = [symbols_in(v.aval.shape) for v in (*jaxpr.invars, *jaxpr.outvars)]
        inside += [symbols_in(tuple(eqn.params.values())) for eqn in jaxpr.eqns]
        return frozenset().union(*inside)
    if type(value) in (int, str, bool, type(None)) or not is_symbolic_dim(value):
        return frozenset()
    return frozenset(_compiled(str(value)).co_names) - _FUNCTIONS.keys()


def substituted(value: Any, number: Callable[[Any], int]) -> Any:
    """A parameter of a primitive with numbers for extents."""
    if type(value) is tuple:
        return tuple(substituted(x, number) for x in value)
    if type(value) not in (int, str, bool, type(None)) and is_symbolic_dim(value):
        return number(value)
    return value
