"""The loop over single instances, with its cells compiled by `jax.jit`.

Outside of a batched function a cell is the function that it wraps, whose operations JAX runs one by
one: a loop that calls it is no rival. Cells are found by name in the module of the function, which
has compiled ones in their place while the loop runs, and only then, as the batched function reads
it.
"""

import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax


def compiled_cells(fn: Callable[..., Any], module: types.ModuleType) -> Callable[..., Any] | None:
    """Returns a function that calls compiled cells; None if its module has none by name.

    Args:
      fn: of one instance, or a cell itself.
      module: where it was found.
    """
    if _is_cell(fn):
        return _compiled(fn)
    cells = {name: _compiled(x) for name, x in vars(module).items() if _is_cell(x)}

    def call(*args: Any) -> Any:
        with mock.patch.dict(vars(module), cells):
            return fn(*args)

    return call if cells else None


def _is_cell(x: object) -> bool:
    return callable(x) and callable(getattr(getattr(x, "cell", None), "fn", None))


def _compiled(cell: Any) -> Callable[..., Any]:
    """Returns a cell that is compiled for each choice of what is no array or number in its call."""

    @functools.cache
    def program(structure: Any, fixed: tuple, static: tuple) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            leaves = list(values)
            for place, x in fixed:
                leaves.insert(place, x)
            args, named = jax.tree.unflatten(structure, leaves)
            return cell.cell.fn(*args, **named, **dict(static))

        return jax.jit(run)

    def call(*args: Any, **named: Any) -> Any:
        arrays = {k: x for k, x in named.items() if any(map(_is_array, jax.tree.leaves(x)))}
        static = [(k, x) for k, x in named.items() if k not in arrays]
        leaves, structure = jax.tree.flatten((args, arrays))
        fixed = [(i, x) for i, x in enumerate(leaves) if not _is_value(x)]
        values = [x for x in leaves if _is_value(x)]
        return program(structure, tuple(fixed), tuple(static))(*values)

    return call


def _is_value(x: object) -> bool:
    return _is_array(x) or isinstance(x, bool | int | float | complex)


def _is_array(x: object) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")
