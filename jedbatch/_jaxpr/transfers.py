"""Transfers between host and device, where `jax.transfer_guard("disallow")` is set.

A program takes arrays of NumPy as they are, which is the fastest way and an implicit transfer. Who
forbids those means their own by accident, not the tables of a plan: these are put on the device by
`jax.device_put`, an explicit one, as soon as a guard is set, and arrays are read by
`jax.device_get`. Tracing a cell, what runs between two decisions of Python, and what pulls
cotangents back, have constants that JAX hands over for us; they run unguarded. Transfers in the
user's function are left to the guard, and so is everything where explicit ones are forbidden too.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

Given = ParamSpec("Given")
Found = TypeVar("Found")
IMPLICIT = ("log", "disallow")  # guards that let explicit transfers pass


def _guards() -> tuple[str | None, str | None]:
    """Returns the guards set in this thread: (from host to device, from device to host)."""
    config: Any = jax.config
    return config.jax_transfer_guard_host_to_device, config.jax_transfer_guard_device_to_host


def handed_over(values: Any) -> Any:
    """The same pytree, its arrays of NumPy put on the device if a transfer guard is set."""
    if _guards()[0] in (None, "allow"):
        return values
    with jax.ensure_compile_time_eval():
        return jax.tree.map(
            lambda x: jax.device_put(x) if isinstance(x, (np.ndarray, np.generic)) else x, values
        )


def fetched(array: object) -> np.ndarray:
    """An array of JAX as one of NumPy; an explicit transfer if a guard is set."""
    return np.asarray(array) if _guards()[1] in (None, "allow") else jax.device_get(array)


def unguarded(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """A function of ours whose implicit transfers pass."""

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        to_device, to_host = _guards()
        if to_device not in IMPLICIT and to_host not in IMPLICIT:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if to_device in IMPLICIT:
                stack.enter_context(jax.transfer_guard_host_to_device("allow"))
            if to_host in IMPLICIT:
                stack.enter_context(jax.transfer_guard_device_to_host("allow"))
            return function(*args, **kwargs)

    return run
