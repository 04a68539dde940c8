"""Operations along a list for which the order of its elements counts, where there is room for more.

Places of extremes, sorts, reversed lists, and cumulative sums and products. Elements that do not
exist come last, may hold anything, and change neither results nor derivatives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.list_reductions import FUNCTIONS
from jedbatch._support.types import Array

PLACES = {"argmax": "max", "argmin": "min"}
CUMULATIVE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}
ALONG_LISTS = frozenset({*PLACES, *CUMULATIVE, "sort", "rev"})


def axis_of(name: str, params: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the parameter that has the axis of an operation, and the axis; -1 for several."""
    if name in PLACES:
        parameter = "axes"
    elif name == "rev":
        parameter = "dimensions"
    else:
        parameter = "dimension" if name == "sort" else "axis"
    axes = params[parameter]
    if not isinstance(axes, tuple):
        return parameter, axes
    return parameter, axes[0] if len(axes) == 1 else -1


def along_list(
    name: str, params: Mapping[str, Any], axis: int | None
) -> Callable[[Sequence[Array], Array], Array]:
    """Returns an operation along a list, of an array of its elements and flags of those that exist.

    Args:
      name: of the operation.
      params: its parameters.
      axis: of elements that have rows along it, of which the list is put together; or None.
    """

    def run(values: Sequence[Array], exists: Array) -> Array:
        (elements,) = values
        if axis is None:
            return of_rows(elements, exists)
        parts = jnp.moveaxis(elements, axis + 1, 1)
        each = parts.shape[1]
        rows = parts.reshape(-1, *parts.shape[2:])
        made = of_rows(rows, jnp.repeat(exists, each))
        if name in PLACES:
            return made
        return jnp.moveaxis(made.reshape(parts.shape), 1, axis + 1)

    def of_rows(x: Array, exists: Array) -> Array:
        there = jnp.broadcast_to(exists.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
        if name == "sort":
            order = {"is_stable": params["is_stable"], "num_keys": 2}
            return lax.sort((~there, x), dimension=0, **order)[1]
        if name == "rev":
            place = exists.sum() - 1 - jnp.arange(len(x))
            return jnp.where(there, x[place], x)
        reduction = PLACES.get(name) or CUMULATIVE[name]
        filled = jnp.where(there, x, jnp.asarray(FUNCTIONS[reduction][2](x.dtype), x.dtype))
        if name in PLACES:
            place_of: Any = getattr(lax, name)
            return place_of(filled, 0, params["index_dtype"])
        cumulate: Any = getattr(lax, name)
        return cumulate(filled, axis=0, reverse=params["reverse"])

    return run


def row_at(axis: int, sizes: Sequence[int]) -> Callable[[Sequence[Array], Array], Array]:
    """Returns a dynamic slice of one row of a list, stacked along an axis, of the rows and starts.

    As in JAX, a start outside of the list is that of the nearest row.
    """

    def run(values: Sequence[Array], exists: Array) -> Array:
        rows, *starts = values
        place = jnp.clip(starts[axis], 0, exists.sum().astype(starts[axis].dtype) - 1)
        row = lax.dynamic_index_in_dim(rows, place, keepdims=False)
        others = [k for k in range(len(sizes)) if k != axis]
        part = lax.dynamic_slice(row, [starts[k] for k in others], [sizes[k] for k in others])
        return jnp.expand_dims(part, axis)

    return run
