"""Rows read and written by index: gathers and scatters among the rows of an instance.

The edges of a graph are two arrays of indices into its nodes: `x[source]` reads a row of nodes for
every edge, and `jax.ops.segment_sum(messages, target, n)` adds a row of edges to one of nodes. Both
take rows of one axis to rows of another, and both lengths differ from instance to instance.

The packed rows of all instances are the rows of one long instance, in which the rows of each begin
elsewhere. So one gather or scatter serves all, by indices with the first row of their instance
added:

    nodes        a0 a1 a2 b0 b1          first rows 0, 3
    source       2 0 · 1 1 0             of edges: two of a, three of b
    packed       2 0 · 4 4 3

An index that is out of bounds for its instance must not reach the rows of the next one. What is
done with it, the mode of the operation says: a gather fills in a value or takes the nearest row, a
scatter leaves it out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.padding.axis_rules import SCATTERS
from jedbatch._jaxpr.symbolic_dims import ragged_axes
from jedbatch._jaxpr.versions import Equation
from jedbatch._support.types import Array

Mode = lax.GatherScatterMode


@dataclass(frozen=True)
class Indexing:
    """How a gather or scatter names rows.

    Attributes:
      axis: of the array that is read or written, along which an index names one row.
      component: of an index, the number of the entry that does so.
      batch: the ragged axis of the indices.
      dimensions: by axis of the indices, that of the rows read or written, for all but the last.
    """

    axis: int
    component: int
    batch: int
    dimensions: tuple[int, ...]


def find_indexing(eqn: Equation) -> Indexing | None:
    """Returns how an equation names single rows by indices of ragged length; None if it does not.

    None of its arrays has two ragged axes then.
    """
    gathers = eqn.primitive.name == "gather"
    if not gathers and eqn.primitive.name not in SCATTERS:
        return None
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    if any(len(ragged_axes(shape)) > 1 for shape in shapes):
        return None
    table, indices, rows = shapes[0], shapes[1], shapes[-1 if gathers else 2]
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    if gathers:
        named, whole = numbers.start_index_map, numbers.offset_dims
        single = [a for a, size in enumerate(eqn.params["slice_sizes"]) if _is_one(size)]
        repeated = numbers.start_indices_batching_dims
    else:
        named, whole = numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
        single = list(numbers.inserted_window_dims)
        repeated = numbers.scatter_indices_batching_dims
        if mode == Mode.CLIP and not clips_well(eqn):
            return None
    batch = [a for a in ragged_axes(indices) if a not in repeated and a < len(indices) - 1]
    axes = [a for a in ragged_axes(table) or named if a in named and a in single]
    if not batch or not axes:
        return None
    dimensions = tuple(a for a in range(len(rows)) if a not in whole)
    return Indexing(axes[0], named.index(axes[0]), batch[0], dimensions)


def clips_well(eqn: Equation) -> bool:
    """Returns whether a scatter to the nearest rows is one to rows that are found beforehand.

    JAX's derivatives of extremes do not look for the nearest rows, and are infinite there.
    """
    numbers = eqn.params["dimension_numbers"]
    named = numbers.scatter_dims_to_operand_dims
    extreme = eqn.primitive.name in ("scatter-max", "scatter-min")
    return not extreme and set(named) <= set(numbers.inserted_window_dims)


def as_int32(indices: Array) -> Array:
    """Returns indices of a type that holds all places."""
    return indices.astype(jnp.int32) if indices.dtype != jnp.int32 else indices


def clipped(start: Array, last: Array) -> Array:
    """Returns the first row of a part, of which the last place it can be is known."""
    start = start if jnp.dtype(start.dtype).itemsize > 2 else as_int32(start)
    return jnp.clip(start, 0, jnp.maximum(last, 0).astype(start.dtype)).astype(jnp.int32)


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


@dataclass(frozen=True)
class NamedRows:
    """The rows that belong to the instance of each packed row of indices.

    Attributes:
      starts: int32[R], the first of them.
      counts: int32[R], how many there are.
      exist: bool[R], whether there is such a row of indices.
      total: how many rows all instances have, those of no instance among them.
      is_on_gpu: whether nothing is sent back by rows of indices that do not exist: XLA:GPU adds up
        what is sent back to one row, zeros too, one after the other.
    """

    starts: jax.Array
    counts: jax.Array
    exist: jax.Array
    total: int
    is_on_gpu: bool = False


def run_indexed(eqn: Equation, values: Sequence[jax.Array], named: NamedRows) -> Array:
    """Returns the result of a gather or scatter on the packed rows of all instances.

    Args:
      eqn: the equation, of one instance.
      values: its operands, with packed rows in the place of ragged axes.
      named: the rows of the array that is read or written, for every row of indices.
    """
    indexing = find_indexing(eqn)
    assert indexing is not None
    table, indices, *updates = values
    params, mode, batch = dict(eqn.params), eqn.params["mode"], indexing.batch
    if jnp.dtype(indices.dtype).itemsize < 4:
        indices = indices.astype(jnp.int32)
    index = indices[..., indexing.component]

    def by_row(x: jax.Array) -> jax.Array:
        return lax.expand_dims(x, [a for a in range(index.ndim) if a != batch])

    counts, starts, exist = by_row(named.counts), by_row(named.starts), by_row(named.exist)
    last = jnp.maximum(counts - 1, 0)
    inside = (index >= 0) & (index < counts.astype(index.dtype))
    nearest = jnp.clip(index, 0, last.astype(index.dtype)).astype(jnp.int32) + starts
    nearest = jnp.minimum(nearest, max(0, named.total - 1))
    nowhere = named.total + lax.broadcasted_iota(jnp.int32, index.shape, batch)

    def spread(flags: jax.Array, shape: Sequence[int]) -> jax.Array:
        return lax.broadcast_in_dim(flags, shape, indexing.dimensions)

    if updates:
        written = exist & (counts > 0 if mode == Mode.CLIP else inside)
        written = jnp.broadcast_to(written, index.shape)
        index = jnp.where(written, nearest, nowhere)
        params["mode"] = Mode.FILL_OR_DROP
        updates = [without_unwritten(eqn, x, spread(written, x.shape)) for x in updates]
    elif mode == Mode.FILL_OR_DROP:
        index = jnp.where(inside | ~exist, nearest, nowhere)
    else:
        index = nearest
    params["indices_are_sorted"] = False
    component = indexing.component
    indices = indices.astype(jnp.int32)
    clips_others = mode == Mode.CLIP and indices.shape[-1] > 1
    if not updates and named.is_on_gpu and has_gradient(table.dtype) and not clips_others:
        # As XLA does: where the nearest row is read, nothing is sent back to it.
        returns = exist if mode == Mode.CLIP else exist & inside
        sent_to = jnp.where(returns, nearest, nowhere)
        return _gather_of(eqn)(
            table,
            _with_component(indices, component, index),
            _with_component(indices, component, sent_to),
        )
    out = eqn.primitive.bind(table, _with_component(indices, component, index), *updates, **params)
    if not updates and mode not in (Mode.FILL_OR_DROP, Mode.CLIP):
        # As XLA does: the nearest row is read, and nothing is sent back to it.
        out = jnp.where(spread(inside, out.shape), out, lax.stop_gradient(out))
    return out


def _gather_of(eqn: Equation) -> Callable[..., Array]:
    """Returns a gather from (table, indices, indices of the rows that what is sent back goes to).

    The latter name no row of the table where nothing is to be sent back.
    """
    params = {**eqn.params, "indices_are_sorted": False}
    tangents = {**params, "mode": Mode.FILL_OR_DROP, "fill_value": 0}

    @jax.custom_jvp
    def gather(table: Array, indices: Array, sent_to: Array) -> Array:
        return eqn.primitive.bind(table, indices, **params)

    @gather.defjvp
    def push_forward(args: Sequence[Array], pushed: Sequence[Array]) -> tuple[Array, Array]:
        table, indices, sent_to = args
        out = gather(table, indices, sent_to)
        return out, eqn.primitive.bind(pushed[0], sent_to, **tangents)

    return gather


def without_unwritten(eqn: Equation, updates: jax.Array, written: jax.Array) -> jax.Array:
    """Returns updates of a scatter with zeros for those that are left out.

    JAX's derivatives of all but sums divide by what those are compared with, which may be 0.
    """
    if eqn.primitive.name in ("scatter-add", "scatter-sub"):
        return updates
    return jnp.where(written, updates, jnp.zeros_like(updates))


def _with_component(indices: jax.Array, component: int, index: jax.Array) -> jax.Array:
    """Returns indices with one entry of each replaced."""
    index = lax.expand_dims(index, (index.ndim,))
    if indices.shape[-1] == 1:
        return index
    entries = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    return jnp.where(entries == component, index, indices)
