"""Reductions as monoids: what joins two values, and the identity, which changes no value.

Where there is room for more values than there are, the room is filled with the identity of what
takes them together.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._support.types import Dtype

JOINED_BY: dict[str, Callable] = {
    "add": lax.add,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}
REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
PLACES = {"argmax": "max", "argmin": "min"}
CUMULATIVE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}
WINDOWS = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}
MONOIDS = {**REDUCTIONS, **PLACES, **CUMULATIVE, **WINDOWS, "top_k": "max"}  # by operation
_NUMBERS = {"add": 0, "mul": 1, "or": 0, "xor": 0}


def identity_of(monoid: str, dtype: Dtype) -> np.ndarray:
    """Returns the identity of a monoid, a number of the dtype: the lowest one for a maximum.

    Complex numbers are compared by their real parts, and equal ones of these by the imaginary.
    """
    if monoid in _NUMBERS:
        return np.array(_NUMBERS[monoid], dtype)
    if dtype == np.bool_:
        return np.array(monoid != "max")
    ends: Any
    if jnp.issubdtype(dtype, jnp.integer):
        ends = jnp.iinfo(dtype)
        if monoid == "and":
            return np.array(ends.max if ends.min == 0 else -1, dtype)
    else:
        end = np.inf if monoid == "min" else -np.inf
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        infinite = np.array(complex(end, end) if is_complex else end, dtype)
        if np.isinf(infinite):
            return infinite
        ends = jnp.finfo(dtype)  # it has no infinity
    return np.array(ends.max if monoid == "min" else ends.min, dtype)
