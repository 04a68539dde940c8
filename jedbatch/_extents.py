"""Extents that differ from instance to instance, as JAX's symbolic dimensions.

An array [n, 128] whose n is another number in every instance is traced once, with a symbol for n.
JAX then says of every operation how its shape depends on n (`n`, `n + 1`, `2*n`, or not at all),
and a value of n, where a computation needs one (the divisor of a mean), is an operation of its own,
`dim_as_value`. An extent of which JAX knows no number is called *ragged* here, and so is the axis
it is the extent of.

A symbol has no value for Python to decide on. JAX answers `n == 2` with False where it cannot know,
and takes every extent to be 1 at least. Here both are errors (`LengthDecisionError`), unless JAX
itself asks: whoever decides on lengths is run for every length by itself.

Source: the symbolic shapes of `jax.export`.
"""

import copy
import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim, symbolic_shape

TRUSTED = ("jax", "jaxlib", "numpy", "opt_einsum")  # they ask about extents as generally as we do
(_plain,) = symbolic_shape("n")
Base: Any = type(_plain)


class LengthDecisionError(Exception):
    """Python has decided on the length of an array."""


def _deciding(compare: Callable, unsound: Callable[[bool], bool]) -> Callable:
    """A comparison that refuses to give answers which may not hold for all lengths."""
    symmetric = compare in (Base.__eq__, Base.__ne__)

    def method(self: Any, other: Any) -> bool:
        ours, theirs = self, other
        if symmetric and type(other) is Base:  # which knows nothing of us
            ours, theirs = other, self
        found = compare(ours, theirs)
        if unsound(found):
            _refuse(sys._getframe(1))
        return found

    return method


def _refuse(caller: Any) -> None:
    """Raises an error unless it is JAX that asks."""
    module = caller.f_globals.get("__name__", "")
    if module.partition(".")[0] not in TRUSTED and not module.startswith("jedbatch._"):
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        raise LengthDecisionError(f"Python decides on the length of an array at {where}")


def _calculating(calculate: Callable) -> Callable:
    """An operation whose result is an extent that refuses, too."""

    def method(self: Any, *args: Any) -> Any:
        return _watched(calculate(self, *args))

    return method


class Extent(Base):
    """A symbolic dimension on which Python may not decide."""

    __slots__ = ()
    __hash__ = Base.__hash__

    # What follows from a bound above is checked; that there is a row at all is not.
    __eq__ = _deciding(Base.__eq__, lambda found: not found)
    __ne__ = _deciding(Base.__ne__, lambda found: found)
    __gt__ = _deciding(Base.__gt__, lambda found: found)
    __ge__ = _deciding(Base.__ge__, lambda found: found)
    __lt__ = _deciding(Base.__lt__, lambda found: not found)
    __le__ = _deciding(Base.__le__, lambda found: not found)

    __add__ = _calculating(Base.__add__)
    __radd__ = _calculating(Base.__radd__)
    __sub__ = _calculating(Base.__sub__)
    __rsub__ = _calculating(Base.__rsub__)
    __mul__ = _calculating(Base.__mul__)
    __rmul__ = _calculating(Base.__rmul__)
    __pow__ = _calculating(Base.__pow__)
    __floordiv__ = _calculating(Base.__floordiv__)
    __rfloordiv__ = _calculating(Base.__rfloordiv__)
    __mod__ = _calculating(Base.__mod__)
    __rmod__ = _calculating(Base.__rmod__)
    __neg__ = _calculating(Base.__neg__)

    def __bool__(self) -> bool:
        _refuse(sys._getframe(1))
        return True


def _watched(extent: Any) -> Any:
    """The extent as one on which Python may not decide."""
    if type(extent) is Base:
        extent = copy.copy(extent)
        extent.__class__ = Extent
    return extent


def make_symbol(name: str, scope: Any) -> Any:
    """A symbol of a scope of `jax.export`."""
    return _watched(symbolic_shape(name, scope=scope)[0])


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


def grows(extent: Any) -> bool:
    """Whether there is room for an extent where there is room for its symbols.

    `n - 1` and `2*n + m` grow with their symbols; `12 - n` and `mod(n, 4)` do not.
    """
    symbols = sorted(symbols_in(extent))
    for most in (8, 16, 32, 64, 256, 1024):
        few = np.unique(np.r_[1:9, np.linspace(1, most, 17).astype(int)])
        grid = np.meshgrid(*[few[few <= most]] * len(symbols))
        found = extent_at(extent, dict(zip(symbols, grid, strict=True)))
        if np.max(found) > extent_at(extent, dict.fromkeys(symbols, most)):
            return False
    return True


@functools.cache
def _compiled(text: str) -> Any:
    """An extent, as JAX writes it, as Python's code."""
    return compile(text.replace("^", "**"), "extent", "eval")


def _chosen(by_python: Any, by_numpy: Any, by_jax: Any) -> Any:
    def choose(a: Any, b: Any) -> Any:
        if isinstance(a, jax.Array) or isinstance(b, jax.Array):
            return by_jax(a, b)
        arrays = isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        return by_numpy(a, b) if arrays else by_python(a, b)

    return choose


_FUNCTIONS = {
    "__builtins__": {},
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "max": _chosen(max, np.maximum, jnp.maximum),
    "min": _chosen(min, np.minimum, jnp.minimum),
}


def symbols_in(value: Any) -> frozenset[str]:
    """The symbols in the extents that parameters of a primitive have somewhere inside."""
    if isinstance(value, dict):
        return symbols_in(tuple(value.values()))
    if isinstance(value, tuple | list):
        return frozenset().union(*map(symbols_in, value))
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        jaxpr = getattr(value, "jaxpr", value)
        inside = [symbols_in(v.aval.shape) for v in (*jaxpr.invars, *jaxpr.outvars)]
        inside += [symbols_in(eqn.params) for eqn in jaxpr.eqns]
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
