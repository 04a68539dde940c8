"""Operations along a list for which the order of its elements counts, where there is room for more.

Places of extremes, sorts, reversed lists, rows at positions, and cumulative sums and products.
Elements that do not exist come last, may hold anything, and change neither results nor derivatives.
In results they are like the first element: what is computed of them goes wrong only where that of
the first does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.list_reductions import filled, flags_of_rows
from jedbatch._jaxpr.monoids import CUMULATIVE, MONOIDS, PLACES
from jedbatch._support.types import Array, Dtype

ALONG_LISTS = frozenset({*PLACES, *CUMULATIVE, "sort", "rev"})


def axes_of(name: str, params: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Returns the parameter that has the axes of an operation, and the axes."""
    if name in PLACES:
        parameter = "axes"
    elif name == "rev":
        parameter = "dimensions"
    else:
        parameter = "dimension" if name == "sort" else "axis"
    axes = params[parameter]
    return parameter, axes if isinstance(axes, tuple) else (axes,)


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
            made = of_rows(elements, exists)
            return made if name in PLACES else _like_the_first(made, exists)
        parts = jnp.moveaxis(elements, axis + 1, 1)
        each = parts.shape[1]
        rows = parts.reshape(-1, *parts.shape[2:])
        made = of_rows(rows, jnp.repeat(exists, each))
        if name in PLACES:
            return made
        return jnp.moveaxis(_like_the_first(made.reshape(parts.shape), exists), 1, axis + 1)

    def of_rows(x: Array, exists: Array) -> Array:
        if name == "sort":
            other = jnp.broadcast_to(flags_of_rows(~exists, x), x.shape)
            order = {"is_stable": params["is_stable"], "num_keys": 2}
            return lax.sort((other, x), dimension=0, **order)[1]
        if name == "rev":
            return _reversed(x, exists)
        x = filled(MONOIDS[name], x, exists)
        if name in PLACES:
            place_of: Any = getattr(lax, name)
            return place_of(x, 0, params["index_dtype"])
        cumulate: Any = getattr(lax, name)
        if not params["reverse"]:
            return cumulate(x, axis=0)
        # From the last that exists on: how equal extremes share a derivative depends on the number
        # of rows before them.
        return _reversed(cumulate(_reversed(x, exists), axis=0), exists)

    return run


def _reversed(x: Array, exists: Array) -> Array:
    """x, with the rows that exist in reverse."""
    return jnp.where(flags_of_rows(exists, x), x[exists.sum() - 1 - jnp.arange(len(x))], x)


def _like_the_first(x: Array, exists: Array) -> Array:
    """x, whose rows that do not exist are like the first, and take no part in derivatives."""
    return jnp.where(flags_of_rows(exists, x), x, lax.stop_gradient(x[:1]))


def positions_like(
    shape: tuple[int, ...], dtype: Dtype
) -> Callable[[Sequence[Array], Array], Array]:
    """Returns what makes the positions of elements as arrays of a shape, of flags alone."""

    def run(_: Sequence[Array], exists: Array) -> Array:
        places = jnp.where(exists, lax.iota(dtype, len(exists)), jnp.zeros((), dtype))
        return lax.broadcast_in_dim(places, (len(exists), *shape), (0,))

    return run


def in_order(
    name: str, params: Mapping[str, Any], result: int
) -> Callable[[Sequence[Array], Array], Array]:
    """Returns one result of a sort of several arrays along a list, or of the first in order.

    Args:
      name: of the operation, "sort" or "top_k".
      params: its parameters.
      result: its number.
    """

    def sort(values: Sequence[Array], exists: Array) -> Array:
        other = jnp.broadcast_to(flags_of_rows(~exists, values[0]), values[0].shape)
        order = {"is_stable": params["is_stable"], "num_keys": params["num_keys"] + 1}
        return _like_the_first(lax.sort((other, *values), dimension=0, **order)[result + 1], exists)

    def first(values: Sequence[Array], exists: Array) -> Array:
        # Of equal ones those that come first are taken, which exist.
        x = filled(MONOIDS[name], values[0], exists)
        found = lax.top_k(jnp.moveaxis(x, 0, -1), params["k"])[result]
        return jnp.moveaxis(found, -1, params["axis"])

    return sort if name == "sort" else first


def rows_at(
    mode: Any, fill: Any, batch: tuple[int, ...] | None
) -> Callable[[Sequence[Array], Array], Array]:
    """Returns what reads rows of a list at positions, of the rows and the positions.

    Args:
      mode: what is read at positions that are not in the list.
      fill: what is there if nothing is read.
      batch: axes of the result along which positions lie; None if there is one for each element.
    """

    def run(values: Sequence[Array], exists: Array) -> Array:
        rows, places = values[0], values[1][..., 0]
        last = exists.sum(dtype=np.int32) - 1
        places = places.astype(jnp.promote_types(places.dtype, np.int32))
        found = rows[jnp.clip(places, 0, last.astype(places.dtype))]
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            there = (places >= 0) & (places <= last.astype(places.dtype))
            there = there.reshape(*there.shape, *[1] * (found.ndim - there.ndim))
            found = jnp.where(there, found, jnp.asarray(fill, found.dtype))
        if batch is None:
            return _like_the_first(found, exists)
        return jnp.moveaxis(found, tuple(range(places.ndim)), batch)

    return run


def row_at(axis: int, sizes: Sequence[int]) -> Callable[[Sequence[Array], Array], Array]:
    """Returns a dynamic slice of one row of a list, stacked along an axis, of the rows and starts.

    As in JAX, a start outside of the list is that of the nearest row.
    """

    def run(values: Sequence[Array], exists: Array) -> Array:
        rows, *starts = values
        most = min(len(rows) - 1, jnp.iinfo(starts[axis].dtype).max)  # it may be of few bits
        place = jnp.clip(starts[axis], 0, most).astype(np.int32)
        place = jnp.minimum(place, exists.sum(dtype=np.int32) - 1)
        row = lax.dynamic_index_in_dim(rows, place, keepdims=False)
        others = [k for k in range(len(sizes)) if k != axis]
        starts_left, sizes_left = [starts[k] for k in others], [sizes[k] for k in others]
        part = lax.dynamic_slice(row, starts_left, sizes_left) if others else row
        return jnp.expand_dims(part, axis)

    return run
