"""Associative scans along axes of which the extent is not known.

`jax.lax.associative_scan` combines neighbours, scans half as many, and so on: a recursion in Python
over numbers of rows. Here rows are combined one after the other, which gives the same but for
rounding, since the operation is associative, and combines every row once.

JAX asks for the number of rows, to refuse what is none, and gets one that no array has. Then the
recursion begins by asking whether there are fewer than two rows, for then there is nothing to do.
An extent that is asked so scans the rows, and says yes.
"""

from collections.abc import Callable
from types import FrameType

import jax.numpy as jnp
from jax import lax

from jedbatch._support.types import Array

ANY_NUMBER = (1 << 31) - 1  # were it taken for the number of rows, no array would be large enough


def is_associative_scan(frame: FrameType | None) -> bool:
    """Returns whether `jax.lax.associative_scan` asks for a number of rows."""
    if frame is not None and frame.f_code.co_name == "is_constant_dim":
        frame = frame.f_back
    names = ("associative_scan", "associative_scan.<locals>.<genexpr>")
    return frame is not None and frame.f_code.co_qualname in names and is_of_jax(frame)


def scanned_in_place(frame: FrameType) -> bool:
    """Replaces rows by their scan, if it is JAX's recursion over them that asks; whether it is."""
    if frame.f_code.co_qualname != "associative_scan.<locals>._scan" or not is_of_jax(frame):
        return False
    names = frame.f_locals
    names["elems"][:] = scan_in_order(names["combine"], names["elems"], names["axis"])
    return True


def is_of_jax(frame: FrameType) -> bool:
    """Returns whether a frame belongs to JAX."""
    return is_jax(frame.f_globals.get("__name__", ""))


def is_jax(module: str) -> bool:
    """Returns whether a module belongs to JAX."""
    return module.startswith("jax.")


def scan_in_order(combine: Callable, elems: list[Array], axis: int) -> list[Array]:
    """Returns what an associative scan gives; there must be a row.

    Args:
      combine: from two lists of arrays to one, for any number of rows.
      elems: arrays, as long as each other along the axis.
      axis: to scan along.
    """

    def step(before: list[Array], row: list[Array]) -> tuple[list[Array], list[Array]]:
        after = combine(before, [lax.expand_dims(x, (axis,)) for x in row])
        return after, [lax.squeeze(x, (axis,)) for x in after]

    first = [lax.slice_in_dim(x, 0, 1, axis=axis) for x in elems]
    rest = [jnp.moveaxis(lax.slice_in_dim(x, 1, None, axis=axis), axis, 0) for x in elems]
    _, scanned = lax.scan(step, first, rest)
    scanned = [jnp.moveaxis(x, 0, axis) for x in scanned]
    return [lax.concatenate(pair, axis) for pair in zip(first, scanned, strict=True)]
