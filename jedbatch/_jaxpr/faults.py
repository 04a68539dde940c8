"""Cells that make NaNs, found where `jax_debug_nans` or `jax_debug_infs` is set.

A program runs all batches of all cells, so its results do not say whose they were. Where JAX finds
a fault in them, the same function runs once more, one operation after the other.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


def located(compiled: Callable, function: Callable) -> Callable:
    """Returns the compiled function; errors about faults in its results say where these come from.

    Args:
      compiled: takes positional arguments, none of which is donated where faults are looked for.
      function: does the same, operation by operation.
    """

    def call(*args: Any) -> Any:
        try:
            return compiled(*args)
        except FloatingPointError:
            with jax.disable_jit():
                function(*args)
            raise

    return call


@contextlib.contextmanager
def made_in(what: object) -> Iterator[None]:
    """Adds to errors about faults whose operations ran."""
    try:
        yield
    except FloatingPointError as error:
        error.add_note(f"This happened in {what}.")
        raise
