"""Running equations for one instance whose arrays are padded.

The arrays of an instance have a capacity of rows. Those behind the last row that exists hold
anything finite, so operations that take rows together must leave them out: a sum sees zeros there,
a maximum -inf, a sort puts them last.

A user's code never sees the capacity: it asks for n by `x.shape[0]`, and gets the instance's own.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.gates import Gates, has_finite_derivatives
from jedbatch._jaxpr.interpret import ELEMENTWISE_OPERATIONS
from jedbatch._jaxpr.monoids import MONOIDS, identity_of
from jedbatch._jaxpr.padding.axis_rules import (
    CUMULATIVE_OPERATIONS,
    DRAWS,
    REDUCTIONS,
    SCATTERS,
    SHAPE_PARAMETERS,
    TILE_ROWS,
    WINDOWS,
    Axes,
    CannotMergeError,
    is_look_up,
    mixed_axes,
)
from jedbatch._jaxpr.padding.indexing import (
    Mode,
    as_int32,
    clipped,
    clips_well,
    without_unwritten,
)
from jedbatch._jaxpr.padding.padded_loops import LOOPS, Known, note_extent, runs_inside
from jedbatch._jaxpr.padding.row_rules import bind_rows, look_up, substituted
from jedbatch._jaxpr.padding.singular import SINGULAR, positions, without_poles
from jedbatch._jaxpr.symbolic_dims import (
    extent_at,
    is_ragged,
    ragged_axes,
    symbols_in,
)
from jedbatch._jaxpr.versions import Equation, scan_parts
from jedbatch._support.types import Array, AxisSize


class Padded:
    """Runs equations for one instance whose arrays are padded.

    Attributes:
      sizes: the capacity for every symbol.
      lengths: its value for the instance: a scalar array for every symbol.
      guarded: whether a length may be 0. Then even the first entry holds nothing, a maximum is
        -inf and a sum 0, and 0 / 0 where nothing is would make NaN of gradients.
      tiles: the axes of variables along which only a tile is there (see `_ragged.tiling`), of so
        many rows from `offset` on.
      differentiable: whether there is a gradient in reverse mode, so that padding must be finite.
      lanes: the name of the axis of instances that run together; None if this one runs alone.
      alive: whether the instance takes the step of the loop around them; None if there is none.
      chain: ids of equations that write nothing if it does not (see `_jaxpr.padding.padded_loops`).
      positioned: see `_jaxpr.padding.singular`; None in loops, where all may be.
      is_list: whether padding repeats the first row, as that of lists does, in place of the last.
      known: the extents that variables hold as numbers.
      gates: of the equations, if they are differentiated; None elsewhere.
      flags: bool[] for each result that these know, whether something comes back through it.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        lengths: Mapping[str, jax.Array],
        guarded: bool,
        tiles: Axes | None = None,
        offset: Any = 0,
        differentiable: bool = True,
        lanes: str | None = None,
        positioned: frozenset[int] | None = frozenset(),
        is_list: bool = False,
    ):
        self.sizes, self.lengths, self.tiles, self.offset = sizes, lengths, tiles or {}, offset
        self.guarded = guarded and differentiable
        self.differentiable, self.lanes = differentiable, lanes
        self.positioned = positioned if differentiable else frozenset()
        self.is_list = is_list
        self.alive: Any = None
        self.chain: frozenset[int] = frozenset()
        self.known: Known = {}
        self.gates: Gates | None = None
        self.flags: Sequence[jax.Array] = ()

    def within(self, alive: Any, chain: frozenset[int], known: Known) -> "Padded":
        """Returns the same for the equations of a loop or branch."""
        inner = copy.copy(self)
        inner.alive, inner.chain, inner.known = alive, chain, known
        inner.positioned = None if self.differentiable else frozenset()
        return inner

    def size(self, extent: AxisSize) -> int:
        """Returns the capacity for an extent."""
        return extent_at(extent, self.sizes)

    def length(self, extent: AxisSize) -> jax.Array:
        """Returns the extent itself."""
        return jnp.asarray(extent_at(extent, self.lengths), jnp.int32)

    def exists(self, shape: Sequence[AxisSize], axis: int) -> jax.Array:
        """Returns which entries along a ragged axis exist; broadcasts against the padded shape."""
        index = lax.iota(jnp.int32, self.size(shape[axis]))
        there = index < self.length(shape[axis])
        return lax.expand_dims(there, [a for a in range(len(shape)) if a != axis])

    def masked(
        self, x: Array, shape: Sequence[AxisSize], axes: Sequence[int], value: Array
    ) -> Array:
        """Returns an array with a value in its padding."""
        for axis in axes:
            x = jnp.where(self.exists(shape, axis), x, jnp.asarray(value, x.dtype))
        return x

    def run(self, eqn: Equation, values: Sequence[jax.Array]) -> list[Array]:
        """Returns the results of an equation."""
        name = eqn.primitive.name
        note_extent(eqn, self)
        if name == "dim_as_value":
            return [self.length(eqn.params["dim"]).astype(eqn.outvars[0].aval.dtype)]
        if is_look_up(eqn):
            rule = Padded._look_up if name == "gather" else _RULES[name]
            return rule(self, eqn, values, [])
        if runs_inside(eqn):
            return LOOPS[name](self, eqn, values)
        mixed = mixed_axes(eqn)
        if id(eqn) in self.chain:
            return _RULES[name](self, eqn, values, mixed)
        if not mixed:
            if name in SINGULAR and (self.positioned is None or id(eqn) in self.positioned):
                values = without_poles(self, eqn, values)
            if eqn.outvars[0] in self.tiles:
                return self._tile(eqn, values)
            if self.guarded and name in ELEMENTWISE_OPERATIONS:
                values = [self._guard(x, eqn.outvars[0].aval.shape) for x in values]
            out = bind_rows(eqn, values, self.size)
            return [positions(self, eqn, out[0])] if name == "iota" else out
        if name in REDUCTIONS or name in CUMULATIVE_OPERATIONS or name == "top_k":
            return self._reduce(eqn, values, [a for _, a in mixed])
        if name not in _RULES:
            raise CannotMergeError(f"`{name}` of rows together")
        return _RULES[name](self, eqn, values, mixed)

    def _tile(self, eqn: Equation, values: Sequence[jax.Array]) -> list[Array]:
        """Returns the results of an equation for a tile."""
        name, params = eqn.primitive.name, dict(eqn.params)
        (axis,) = self.tiles[eqn.outvars[0]]
        if name in SHAPE_PARAMETERS:
            shape = list(params[SHAPE_PARAMETERS[name]])
            shape[axis] = TILE_ROWS
            params[SHAPE_PARAMETERS[name]] = tuple(shape)
            eqn = eqn.replace(params=params)
        elif self.guarded and name in ELEMENTWISE_OPERATIONS:
            shape = [TILE_ROWS if a == axis else d for a, d in enumerate(eqn.outvars[0].aval.shape)]
            values = [self._guard(x, shape) for x in values]
        out = bind_rows(eqn, values, self.size)
        return [positions(self, eqn, out[0])] if name == "iota" else out

    def _guard(self, x: Array, shape: Sequence[AxisSize]) -> Array:
        """Returns an operand with ones wherever the result is padding."""
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or jnp.ndim(x) != len(shape):
            return x
        x = jnp.broadcast_to(x, substituted(tuple(shape), self.size))
        return self.masked(x, shape, ragged_axes(shape), 1)

    def _places(self, extent: AxisSize) -> jax.Array:
        """Returns the places of rows, in padding that of the row it repeats."""
        return self.copied(lax.iota(jnp.int32, self.size(extent)), extent)

    def copied(self, places: jax.Array, extent: AxisSize) -> jax.Array:
        """Returns places along an axis, in its padding that of the row that it repeats."""
        last = jnp.maximum(self.length(extent) - 1, 0).astype(places.dtype)
        if not self.is_list:
            return jnp.minimum(places, last)
        return jnp.where(places <= last, places, jnp.zeros_like(places))

    def _look_up(self, eqn, values, mixed):
        (axis,) = ragged_axes(eqn.outvars[0].aval.shape)
        places = self._places(eqn.outvars[0].aval.shape[axis])
        rows = jax.vmap(lambda position: look_up(eqn, values, position))(places)
        return [jnp.moveaxis(lax.squeeze(rows, (axis + 1,)), 0, axis)]

    def _reduce(
        self, eqn: Equation, values: Sequence[jax.Array], axes: Sequence[int]
    ) -> list[Array]:
        name, (x, *initial_values) = eqn.primitive.name, values
        shape = eqn.invars[0].aval.shape
        if name in CUMULATIVE_OPERATIONS:  # rows that exist come first, in the order as alone
            reverse = eqn.params["reverse"]
            x = self._flipped(x, shape, axes) if reverse else x
            if name == "cumprod" and self.differentiable:  # or products in padding may be infinite
                x = self.masked(x, shape, axes, identity_of(MONOIDS[name], x.dtype))
            forwards = eqn.replace(params=eqn.params | {"reverse": False})
            (found,) = bind_rows(forwards, [x], self.size)
            return [self._flipped(found, shape, axes) if reverse else found]
        x = self.masked(x, shape, axes, identity_of(MONOIDS[name], x.dtype))
        if name == "top_k":  # of instances that have fewer rows there are none
            lacking = [self.size(eqn.params["k"]) - x.shape[a] for a in axes]
            config = [
                (0, max(0, lacking[axes.index(a)]) if a in axes else 0, 0) for a in range(x.ndim)
            ]
            x = lax.pad(x, identity_of(MONOIDS[name], x.dtype), config)
        return bind_rows(eqn, [x, *initial_values], self.size)

    def _sort(self, eqn, values, mixed):
        shape, axis = eqn.invars[0].aval.shape, eqn.params["dimension"]
        missing = jnp.broadcast_to(~self.exists(shape, axis), values[0].shape)
        params = eqn.params
        keys = params["num_keys"] + 1
        return lax.sort((missing, *values), axis, params["is_stable"], keys)[1:]

    def _reverse(self, eqn, values, mixed):
        (x,), axes = values, eqn.params["dimensions"]
        ragged = [a for a in axes if (0, a) in mixed]
        x = self._flipped(x, eqn.invars[0].aval.shape, ragged)
        return [lax.rev(x, tuple(a for a in axes if a not in ragged))]

    def _flipped(self, x: Array, shape: Sequence[AxisSize], axes: Sequence[int]) -> Array:
        """Returns an array with the entries that exist along ragged axes in reverse."""
        for axis in axes:
            last = self.length(shape[axis]) - 1
            x = self._take(x, last - lax.iota(jnp.int32, x.shape[axis]), axis)
        return x

    def _take(self, x: jax.Array, indices: jax.Array, axis: int) -> jax.Array:
        """Returns entries along an axis; the nearest where there is none."""
        return jnp.take(x, jnp.clip(indices, 0, max(0, x.shape[axis] - 1)), axis, mode="clip")

    def _concatenate(self, eqn, values, mixed):
        axis, out = eqn.params["dimension"], eqn.outvars[0].aval
        joined = jnp.zeros(substituted(out.shape, self.size), out.dtype)
        begin = jnp.int32(0)
        for v, x in zip(eqn.invars, values, strict=True):  # what has no row is written over
            joined = lax.dynamic_update_slice_in_dim(joined, x, begin, axis)
            begin = begin + self.length(v.aval.shape[axis])
        return [joined]

    def _repeat(self, eqn, values, mixed):
        (x,), reps = values, list(eqn.params["reps"])
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        for _, axis in mixed:
            places = lax.iota(jnp.int32, self.size(after[axis]))
            x = self._take(x, places % jnp.maximum(self.length(before[axis]), 1), axis)
            reps[axis] = 1
        return [jnp.tile(x, reps)]

    def _slice(self, eqn, values, mixed):
        (x,), params, out = values, eqn.params, eqn.outvars[0].aval.shape
        starts, limits = list(params["start_indices"]), list(params["limit_indices"])
        strides = list(params["strides"] or (1,) * len(starts))
        of_tables = set(ragged_axes(out)).difference(ragged_axes(eqn.invars[0].aval.shape))
        for axis in of_tables.union(axis for _, axis in mixed):
            steps = strides[axis] * self._places(out[axis])
            x = self._take(x, self.length(starts[axis]) + steps, axis)
            starts[axis], limits[axis], strides[axis] = 0, out[axis], 1
        bounds = (substituted(tuple(p), self.size) for p in (starts, limits, strides))
        return [lax.slice(x, *bounds)]

    def _dynamic_slice(self, eqn, values, mixed):
        (x, *starts), sizes = values, list(eqn.params["slice_sizes"])
        of_tables = set(ragged_axes(sizes)).difference(ragged_axes(eqn.invars[0].aval.shape))
        for axis in of_tables.union(axis for _, axis in mixed):
            last_start = self.length(eqn.invars[0].aval.shape[axis]) - self.length(sizes[axis])
            steps = self._places(sizes[axis])
            sizes[axis] = self.size(sizes[axis])
            x = self._take(x, clipped(starts[axis], last_start) + steps, axis)
            starts[axis] = jnp.zeros_like(starts[axis])
        return [lax.dynamic_slice(x, starts, substituted(tuple(sizes), self.size))]

    def _dynamic_update_slice(self, eqn, values, mixed):
        x, update, *starts = map(jnp.asarray, values)
        shape, rows = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
        places = zip(starts, shape, rows, strict=True)
        starts = [clipped(s, self.length(a) - self.length(b)) for s, a, b in places]
        inside: Any = True if id(eqn) not in self.chain else self.alive
        ragged = [a for a in ragged_axes(rows) if rows[a] != shape[a]]
        for axis in ragged:  # so many rows that they may not fit in from their start on
            steps = lax.iota(jnp.int32, x.shape[axis]) - starts[axis]
            update = self._take(update, steps, axis)
            there = (steps >= 0) & (steps < self.length(rows[axis]))
            inside &= lax.expand_dims(there, [a for a in range(x.ndim) if a != axis])
            starts[axis] = jnp.int32(0)
        if inside is not True:
            before = lax.dynamic_slice(x, starts, update.shape)
            update = jnp.where(inside, update, before)
        return [lax.dynamic_update_slice(x, update, starts)]

    def _gather(self, eqn, values, mixed):
        (x, indices), params = values, eqn.params
        numbers, shape = params["dimension_numbers"], eqn.invars[0].aval.shape
        if any(i == 1 for i, _ in mixed):
            raise CannotMergeError("`gather` by indices of ragged length")
        indices = as_int32(indices)
        exact = params["mode"] == Mode.PROMISE_IN_BOUNDS
        there: Any = True
        for _, axis in mixed:
            if axis not in numbers.start_index_map:
                continue
            k = numbers.start_index_map.index(axis)
            if params["slice_sizes"][axis] != 1:
                if exact:
                    continue
                raise CannotMergeError("`gather` of several rows that may be out of bounds")
            inside, nearest = self._bounded(indices[..., k], shape[axis])
            there, indices = there & inside, indices.at[..., k].set(nearest)
        sizes = substituted(params["slice_sizes"], self.size)
        out = lax.gather(x, indices, numbers, sizes, mode="clip")
        if there is not True and params["mode"] != Mode.CLIP:
            rows = eqn.invars[1].aval.shape[:-1]
            for axis in ragged_axes(rows):  # what padding of the indices leads to is finite
                there |= ~self.exists(rows, axis)
            batch = [a for a in range(out.ndim) if a not in numbers.offset_dims]
            there = lax.broadcast_in_dim(
                jnp.broadcast_to(there, indices.shape[:-1]), out.shape, batch
            )
            fill = params["fill_value"]
            other = lax.stop_gradient(out) if exact else jnp.asarray(fill, out.dtype)
            out = jnp.where(there, out, other)
        return [out]

    def _bounded(self, positions: Array, extent: AxisSize) -> tuple[jax.Array, jax.Array]:
        """Returns (whether there are rows at these positions, the nearest rows there are)."""
        last = (self.length(extent) - 1).astype(positions.dtype)
        inside = (positions >= 0) & (positions <= last)
        return inside, jnp.clip(positions, 0, jnp.maximum(last, 0))

    def _scatter(self, eqn, values, mixed):
        (x, indices, updates), params = map(jnp.asarray, values), dict(eqn.params)
        shapes, name = [v.aval.shape for v in eqn.invars], eqn.primitive.name
        clips = params["mode"] == Mode.CLIP
        if clips and not clips_well(eqn):
            raise CannotMergeError(f"`{name}` to the nearest rows")
        indices = as_int32(indices)
        written: Any = jnp.ones(indices.shape[:-1], bool)
        if id(eqn) in self.chain:
            written &= self.alive
        for axis in ragged_axes(shapes[1]):
            written &= self.exists(shapes[1][:-1], axis)
        numbers = params["dimension_numbers"]
        if any(i == 2 and a in numbers.update_window_dims for i, a in mixed):
            numbers, indices, written = self._as_single_rows(eqn, indices, mixed)
        named = numbers.scatter_dims_to_operand_dims
        if not named:
            raise CannotMergeError(f"`{name}` of rows that no index leads to")
        for k, axis in enumerate(named):
            if clips or is_ragged((shapes[0][axis],)):
                inside, nearest = self._bounded(indices[..., k], shapes[0][axis])
                written &= self.length(shapes[0][axis]) > 0 if clips else inside
                indices = indices.at[..., k].set(nearest)
        nowhere = x.shape[named[0]]
        indices = indices.at[..., 0].set(jnp.where(written, indices[..., 0], nowhere))
        batch = [a for a in range(updates.ndim) if a not in numbers.update_window_dims]
        written = lax.broadcast_in_dim(written, updates.shape, batch)
        updates = without_unwritten(eqn, updates, written)
        params.update(mode=Mode.FILL_OR_DROP, indices_are_sorted=False, dimension_numbers=numbers)
        return bind_rows(eqn.replace(params=params), [x, indices, updates], self.size)

    def _as_single_rows(self, eqn, indices, mixed):
        """Returns (numbers, indices, which are written) of a scatter of consecutive rows."""
        numbers = eqn.params["dimension_numbers"]
        shape, _, rows = (v.aval.shape for v in eqn.invars)
        inserted, named = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
        window = [a for a in range(len(shape)) if a not in inserted]
        of_window = dict(zip(numbers.update_window_dims, window, strict=True))
        axes = [a for i, a in mixed if i == 2 and a in of_window]  # of the updates
        if indices.ndim > 1 or len(axes) > 1 or of_window[axes[0]] not in named:
            raise CannotMergeError(f"`{eqn.primitive.name}` of several rows, at several places")
        (along,) = axes
        axis = of_window[along]
        k, count = named.index(axis), self.length(rows[along])
        steps = lax.iota(jnp.int32, self.size(rows[along]))
        written = (indices[k] >= 0) & (indices[k] + count <= self.length(shape[axis]))
        places = jnp.broadcast_to(indices, (len(steps), len(indices)))
        numbers = lax.ScatterDimensionNumbers(
            tuple(a for a in numbers.update_window_dims if a != along),
            tuple(sorted((*inserted, axis))),
            named,
        )
        return numbers, places.at[:, k].add(steps), written & (steps < count)

    def _dot(self, eqn, values, mixed):
        sides = [
            self.masked(x, v.aval.shape, [a for i, a in mixed if i == side], 0)
            for side, (x, v) in enumerate(zip(values, eqn.invars, strict=True))
        ]
        return bind_rows(eqn, sides, self.size)

    def _pad(self, eqn, values, mixed):
        (x, value), config = values, eqn.params["padding_config"]
        for _, axis in mixed:
            low, _, inside = config[axis]
            if is_ragged((low, inside)) or inside:
                raise CannotMergeError("`pad` before or between rows by a ragged number")
        axes = [a for _, a in mixed]
        return bind_rows(
            eqn, [self.masked(x, eqn.invars[0].aval.shape, axes, value), value], self.size
        )

    def _conv(self, eqn, values, mixed):
        params, kernel = eqn.params, eqn.invars[1].aval.shape
        if any(i for i, _ in mixed):
            raise CannotMergeError("`conv_general_dilated` with a ragged kernel")
        inputs, kernel_axes, outputs = params["dimension_numbers"]
        spatial = {a: j for j, a in enumerate(inputs[2:])}
        reach = [
            (kernel[b] - 1) * dilation + 1
            for b, dilation in zip(kernel_axes[2:], params["rhs_dilation"], strict=True)
        ]
        out = [eqn.outvars[0].aval.shape[b] for b in outputs[2:]]
        dilations, strides = params["lhs_dilation"], params["window_strides"]
        windows = {a: (reach[j], strides[j], dilations[j], out[j]) for a, j in spatial.items()}
        padding = {a: params["padding"][j] for a, j in spatial.items()}
        x, padding = self._below(eqn, values[0], mixed, windows, padding, 0)
        of_axes = tuple(padding[a] for a in inputs[2:])
        return bind_rows(
            eqn.replace(params={**params, "padding": of_axes}), [x, *values[1:]], self.size
        )

    def _window(self, eqn, values, mixed):
        (x,), params = values, eqn.params
        sizes = zip(params["window_dimensions"], params["window_dilation"], strict=True)
        reach = [(size - 1) * dilation + 1 for size, dilation in sizes]
        rest = params["window_strides"], params["base_dilation"], eqn.outvars[0].aval.shape
        windows = dict(enumerate(zip(reach, *rest, strict=True)))
        nothing = identity_of(MONOIDS[eqn.primitive.name], x.dtype)
        x, padding = self._below(
            eqn, x, mixed, windows, dict(enumerate(params["padding"])), nothing
        )
        of_axes = tuple(padding[a] for a in range(x.ndim))
        return bind_rows(eqn.replace(params={**params, "padding": of_axes}), [x], self.size)

    def _below(
        self,
        eqn: Equation,
        x: Array,
        mixed: Sequence[tuple[int, int]],
        windows: Mapping[int, tuple[AxisSize, ...]],
        padding: Mapping[int, Sequence[AxisSize]],
        nothing: Array,
    ) -> tuple[Array, dict[int, Sequence[AxisSize]]]:
        """Returns (an array for a window to move over, the padding that is left to it).

        Args:
          eqn: of the window.
          x: the array.
          mixed: see `mixed_axes`.
          windows: (rows that it covers, stride, dilation of the rows, extent of the result) by
            axis.
          padding: (before, behind) by axis. Where it depends on the length, rows are moved instead.
          nothing: stands in rows that do not exist.
        """
        shape, left = eqn.invars[0].aval.shape, dict(padding)
        for _, axis in mixed:
            if not symbols_in(tuple(padding[axis])):
                x = self.masked(x, shape, [axis], nothing)
                continue
            reach, stride, dilation, extent = windows[axis]
            if dilation != 1:
                name = eqn.primitive.name
                raise CannotMergeError(f"`{name}` with padding that depends on the length")
            count = max(0, self.size(extent) - 1) * stride + reach
            places = lax.iota(jnp.int32, count) - self.length(padding[axis][0])
            there = (places >= 0) & (places < self.length(shape[axis]))
            there = lax.expand_dims(there, [a for a in range(x.ndim) if a != axis])
            x = jnp.where(there, self._take(x, places, axis), jnp.asarray(nothing, x.dtype))
            left[axis] = (0, 0)
        return x, left

    def _cholesky(self, eqn, values, mixed):
        (x,), (v,) = values, eqn.invars
        return bind_rows(eqn, [self._with_identity(x, v.aval.shape)], self.size)

    def _eigh(self, eqn, values, mixed):
        """Eigenvalues that exist come first: those of the padding are larger, and all differ."""
        (x,), shape, params = values, eqn.invars[0].aval.shape, eqn.params
        if params["subset_by_index"] is not None or not params["sort_eigenvalues"]:
            raise CannotMergeError("`eigh` of some eigenvalues, or in any order")
        axes = [a for a in ragged_axes(shape) if a >= len(shape) - 2]
        x = self.masked(x, shape, axes, 0)
        bound = 1 + 2 * lax.stop_gradient(jnp.abs(x).sum(-1).max(-1))[..., None, None]
        size = x.shape[-1]
        diagonal = jnp.diag(1 + jnp.arange(1, size + 1, dtype=bound.dtype) / size)
        there = self.exists(shape, len(shape) - 1)
        return bind_rows(eqn, [jnp.where(there, x, (bound * diagonal).astype(x.dtype))], self.size)

    def _triangular_solve(self, eqn, values, mixed):
        (x, b), (v, w) = values, eqn.invars
        b = self.masked(b, w.aval.shape, [a for i, a in mixed if i == 1], 0)
        return bind_rows(eqn, [self._with_identity(x, v.aval.shape), b], self.size)

    def _with_identity(self, x: Array, shape: Sequence[AxisSize]) -> Array:
        """Returns matrices that are the identity in their padding, and 0 beside it.

        A factor of such a matrix, or the solution of its system, is that of the part that exists
        and that of the padding side by side.
        """
        axes = [a for a in ragged_axes(shape) if a >= len(shape) - 2]
        beyond = jnp.eye(x.shape[-1], dtype=x.dtype)
        for axis in axes:
            x = jnp.where(self.exists(shape, axis), x, beyond)
        return x

    def _reshape(self, eqn, values, mixed):
        (x,) = values
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if eqn.params.get("dimensions") is not None:
            raise CannotMergeError("`reshape` that permutes ragged axes")
        if not any(set(ragged_axes(s)) - {_first_axis(s)} for s in (before, after)):
            return bind_rows(eqn, values, self.size)
        # Where each entry is among those that exist, and where such an entry is in the padding.
        sizes = substituted(after, self.size)
        place = jnp.zeros(sizes, jnp.int32)
        for axis, extent in enumerate(after):
            place = place * self.length(extent) + lax.broadcasted_iota(jnp.int32, sizes, axis)
        flat, stride = jnp.zeros(sizes, jnp.int32), 1
        for extent, size in zip(reversed(before), reversed(x.shape), strict=True):
            count = jnp.maximum(self.length(extent), 1)
            flat += stride * lax.rem(place, count)
            place, stride = lax.div(place, count), stride * size
        return [jnp.take(x.reshape(-1), flat, axis=0, mode="clip")]

    def _draw(self, eqn, values, mixed):
        return bind_rows(eqn, values, self.size)  # those of the rows that exist come first

    def _scan(self, eqn, values, mixed):
        params, closed = eqn.params, eqn.params["jaxpr"]
        cuts = tuple(itertools.accumulate(scan_parts(eqn)))
        consts, init, xs = values[: cuts[0]], values[cuts[0] : cuts[1]], values[cuts[1] :]
        length = self.length(params["length"])
        first = [x[length - 1 if params["reverse"] else 0] for x in xs]
        gates = None
        if self.gates is not None and not has_finite_derivatives([eqn]):
            gates = self.gates.inside(eqn, closed, closes=True)
        begin, first = (list(map(lax.stop_gradient, x)) for x in (init, first))

        def step(carry, index_and_rows):
            index, *rows = index_and_rows
            alive = index < length  # steps that are none repeat the first one
            before = carry
            carry = [jnp.where(alive, x, y) for x, y in zip(carry, begin, strict=True)]
            rows = [jnp.where(alive, x, y) for x, y in zip(rows, first, strict=True)]
            args = [*consts, *carry, *rows]
            if gates is None:
                out = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
            else:
                out = gates.run_inside(closed, args, [flag & alive for flag in self.flags])
            new, ys = out[: len(carry)], out[len(carry) :]
            carry_out = [jnp.where(alive, a, b) for a, b in zip(new, before, strict=True)]
            return carry_out, ys

        steps = lax.iota(jnp.int32, self.size(params["length"]))
        carry, ys = lax.scan(step, init, [steps, *xs], reverse=params["reverse"])
        return [*carry, *ys]


_RULES: dict[str, Callable] = {
    "sort": Padded._sort,
    "rev": Padded._reverse,
    "cholesky": Padded._cholesky,
    "eigh": Padded._eigh,
    "triangular_solve": Padded._triangular_solve,
    "concatenate": Padded._concatenate,
    "tile": Padded._repeat,
    "slice": Padded._slice,
    "dynamic_slice": Padded._dynamic_slice,
    "dynamic_update_slice": Padded._dynamic_update_slice,
    "gather": Padded._gather,
    **dict.fromkeys(SCATTERS, Padded._scatter),
    "dot_general": Padded._dot,
    "pad": Padded._pad,
    "conv_general_dilated": Padded._conv,
    **dict.fromkeys(WINDOWS, Padded._window),
    "reshape": Padded._reshape,
    "scan": Padded._scan,
    **dict.fromkeys(DRAWS, Padded._draw),
}


def _first_axis(shape: Sequence[AxisSize]) -> int:
    """Returns the first axis of a shape that is not of one entry."""
    return next((a for a, d in enumerate(shape) if type(d) is not int or d != 1), 0)
