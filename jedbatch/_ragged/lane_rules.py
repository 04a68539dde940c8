"""Running operations of symbolic shape, for one row or for one instance.

An equation on arrays of n rows can be run in two ways without knowing n:

- `run_row`: for one row, where it is row-wise (see `_ragged.axis_rules`): the axis is left out, and
  all rows of all instances run side by side.
- `Padded`: for one instance whose arrays have room for more rows than there are. The rows
  behind the last one hold anything finite, so whatever takes rows together is told to leave them
  out: a sum sees zeros there, a maximum -inf, a sort puts them last.

A user's code never sees the room: it asks for n by `x.shape[0]`, and gets the instance's own.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.interpret import scan_parts, value_of
from jedbatch._jaxpr.symbolic_dims import extent_at, is_ragged, ragged_axes, substituted
from jedbatch._ragged.axis_rules import (
    CUMULATIVE,
    ELEMENTWISE,
    REDUCTIONS,
    CannotMergeError,
    is_look_up,
    mixed_axes,
)
from jedbatch._ragged.tiling import SHAPED, TILE, Axes

Number = Callable[[Any], int]  # what to take for an extent


def one(extent: Any) -> int:
    """The extent of a ragged axis in one row."""
    return 1


def bind(eqn: Any, values: Sequence[Any], number: Number) -> list[Any]:
    """The results of an equation on values whose ragged axes have these extents."""
    if eqn.primitive.name == "custom_jvp_call":
        return list(_with_rule(eqn, number)(*values))
    params = {name: substituted(value, number) for name, value in eqn.params.items()}
    if eqn.primitive.name == "jit":
        inner = eqn.params["jaxpr"]
        return evaluate(inner.jaxpr, inner.consts, values, number)
    out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], number: Number) -> list[Any]:
    """The results of a program on values whose ragged axes have these extents."""
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [value_of(v, env) for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, values, number), strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def _with_rule(eqn: Any, number: Number) -> Callable:
    """A function with a derivative of its own, for other extents."""
    closed, rule_of = eqn.params["call_jaxpr"], eqn.params["jvp_jaxpr_fun"]

    @jax.custom_jvp
    def call(*values):
        return tuple(evaluate(closed.jaxpr, closed.consts, values, number))

    @call.defjvp
    def _(primals, tangents):
        jaxpr, consts, zeros = rule_of.call_wrapped(*[False] * len(primals))
        out = evaluate(jaxpr, consts, (*primals, *tangents), number)
        moving = iter(out[len(zeros) :])
        primals_out = out[: len(zeros)]
        tangents_out = [
            jnp.zeros_like(x) if zero else next(moving)
            for x, zero in zip(primals_out, zeros, strict=True)
        ]
        return tuple(primals_out), tuple(tangents_out)

    return call


# --- one row ----------------------------------------------------------------------------


def run_row(eqn: Any, values: Sequence[Any], position: Any) -> list[Any]:
    """The results of a row-wise equation for the row at a position; rows come without an axis."""
    name, (out, *_) = eqn.primitive.name, eqn.outvars
    axes = [ragged_axes(v.aval.shape) for v in eqn.invars]
    if not is_ragged(out.aval.shape):  # a number made of extents
        return bind(eqn, values, one)
    (axis,) = ragged_axes(out.aval.shape)
    if name == "iota" and eqn.params["dimension"] == axis:
        shape = [d for a, d in enumerate(eqn.params["shape"]) if a != axis]
        return [jnp.full(shape, position, eqn.params["dtype"])]
    if name in ELEMENTWISE:
        return bind(eqn, [_flat(x, mine, axis) for x, mine in zip(values, axes, strict=True)], one)
    if name in REDUCTIONS:
        mine = axes[0][0]
        params = eqn.params | {"axes": tuple(a - (a > mine) for a in eqn.params["axes"])}
        return bind(eqn.replace(params=params), values, one)
    if name == "dot_general":
        return [_product_of_row(eqn, values, axes)]
    if is_look_up(eqn):
        found = [_look_up(eqn, values, position)]
    else:
        whole = [lax.expand_dims(x, mine) for x, mine in zip(values, axes, strict=True)]
        found = bind(eqn, whole, one)
    pairs = zip(found, eqn.outvars, strict=True)
    return [lax.squeeze(x, ragged_axes(v.aval.shape)) for x, v in pairs]


def _flat(x: Any, axes: Sequence[int], axis: int) -> Any:
    """An operand of an elementwise operation without the axis of rows."""
    return x if axes or not jnp.ndim(x) else lax.squeeze(x, (axis,))


def _look_up(eqn: Any, values: Sequence[Any], position: Any) -> Any:
    """Row `position` of what is taken out of a table."""
    name, params = eqn.primitive.name, eqn.params
    if name == "gather":
        table, indices = values
        (axis,) = ragged_axes(params["slice_sizes"])
        numbers = params["dimension_numbers"]
        moves = np.array([a == axis for a in numbers.start_index_map], indices.dtype)
        exact = params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
        if not (moves.any() and exact):
            raise CannotMergeError("`gather` of rows that no index leads to")
        return lax.gather(
            table,
            indices + jnp.broadcast_to(moves * position.astype(indices.dtype), indices.shape),
            numbers,
            substituted(params["slice_sizes"], one),
            mode="clip",
        )
    if name == "dynamic_slice":  # which moves its start to where all rows fit
        raise CannotMergeError("`dynamic_slice` of as many rows as an array has")
    (table,) = values
    starts = list(params["start_indices"])
    (axis,) = ragged_axes(eqn.outvars[0].aval.shape)
    if is_ragged(starts):
        raise CannotMergeError("`slice` that begins at a row which depends on the instance")
    strides = params["strides"] or (1,) * len(starts)
    row = lax.dynamic_slice_in_dim(table, starts[axis] + strides[axis] * position, 1, axis)
    limits = list(params["limit_indices"])
    starts[axis], limits[axis] = 0, 1
    return lax.slice(row, starts, limits, [1 if a == axis else s for a, s in enumerate(strides)])


def _product_of_row(eqn: Any, values: Sequence[Any], axes: Sequence[Sequence[int]]) -> Any:
    """A product of a row, which has lost its axis."""
    kept = [
        tuple(
            tuple(a - sum(b < a for b in mine) for a in dims[side] if a not in mine)
            for side, mine in enumerate(axes)
        )
        for dims in eqn.params["dimension_numbers"]
    ]
    left, right = values
    dimensions: Any = tuple(kept)
    return lax.dot_general(
        left,
        right,
        dimensions,
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )


# --- one instance, with room ---------------------------------------------------------------


class Padded:
    """Runs equations for one instance whose arrays have room.

    Attributes:
      sizes: the room for every symbol.
      lengths: what the instance has of it: a scalar array for every symbol.
      guarded: whether a length may be 0. Then even the first entry holds nothing, a maximum is
        -inf and a sum 0, and 0 / 0 where nothing is would make NaN of gradients.
      tiles: the axes of variables along which only a tile is there (see `_ragged.tiling`), of so
        many rows from `offset` on.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        lengths: Mapping[str, Any],
        guarded: bool,
        tiles: Axes | None = None,
        offset: Any = 0,
    ):
        self.sizes, self.lengths, self.guarded = sizes, lengths, guarded
        self.tiles, self.offset = tiles or {}, offset

    def size(self, extent: Any) -> int:
        """The room for an extent."""
        return extent_at(extent, self.sizes)

    def length(self, extent: Any) -> Any:
        """The extent itself."""
        return jnp.asarray(extent_at(extent, self.lengths), jnp.int32)

    def exists(self, shape: Sequence[Any], axis: int) -> Any:
        """Which entries along a ragged axis are there; broadcasts against the padded shape."""
        index = lax.iota(jnp.int32, self.size(shape[axis]))
        there = index < self.length(shape[axis])
        return lax.expand_dims(there, [a for a in range(len(shape)) if a != axis])

    def masked(self, x: Any, shape: Sequence[Any], axes: Sequence[int], value: Any) -> Any:
        """An array with a value wherever nothing is there."""
        for axis in axes:
            x = jnp.where(self.exists(shape, axis), x, jnp.asarray(value, x.dtype))
        return x

    def run(self, eqn: Any, values: Sequence[Any]) -> list[Any]:
        """The results of an equation."""
        name = eqn.primitive.name
        if name == "dim_as_value":
            return [self.length(eqn.params["dim"]).astype(eqn.outvars[0].aval.dtype)]
        if is_look_up(eqn):
            return [self._look_up(eqn, values)]
        mixed = mixed_axes(eqn)
        if not mixed:
            if eqn.outvars[0] in self.tiles:
                return self._tile(eqn, values)
            if self.guarded and name in ELEMENTWISE:
                values = [self._guard(x, eqn.outvars[0].aval.shape) for x in values]
            return bind(eqn, values, self.size)
        if name in REDUCTIONS or name in CUMULATIVE or name == "top_k":
            return self._reduce(eqn, values, [a for _, a in mixed])
        return _RULES[name](self, eqn, values, mixed)

    def _tile(self, eqn: Any, values: Sequence[Any]) -> list[Any]:
        """The results of an equation for a tile."""
        name, params = eqn.primitive.name, dict(eqn.params)
        (axis,) = self.tiles[eqn.outvars[0]]
        if name in SHAPED:
            shape = list(params[SHAPED[name]])
            shape[axis] = TILE
            params[SHAPED[name]] = tuple(shape)
            eqn = eqn.replace(params=params)
        elif self.guarded and name in ELEMENTWISE:
            shape = [TILE if a == axis else d for a, d in enumerate(eqn.outvars[0].aval.shape)]
            values = [self._guard(x, shape) for x in values]
        out = bind(eqn, values, self.size)
        if name == "iota" and params["dimension"] == axis:
            out = [out[0] + self.offset.astype(out[0].dtype)]
        return out

    def _guard(self, x: Any, shape: Sequence[Any]) -> Any:
        """An operand with ones wherever the result is nothing."""
        if not jnp.issubdtype(x.dtype, jnp.inexact) or jnp.ndim(x) != len(shape):
            return x
        x = jnp.broadcast_to(x, substituted(tuple(shape), self.size))
        return self.masked(x, shape, ragged_axes(shape), 1)

    def _look_up(self, eqn: Any, values: Sequence[Any]) -> Any:
        (axis,) = ragged_axes(eqn.outvars[0].aval.shape)
        extent = eqn.outvars[0].aval.shape[axis]
        last = jnp.maximum(self.length(extent) - 1, 0)
        positions = jnp.minimum(lax.iota(jnp.int32, self.size(extent)), last)
        rows = jax.vmap(lambda position: _look_up(eqn, values, position))(positions)
        return jnp.moveaxis(lax.squeeze(rows, (axis + 1,)), 0, axis)

    def _reduce(self, eqn: Any, values: Sequence[Any], axes: Sequence[int]) -> list[Any]:
        name, (x, *rest) = eqn.primitive.name, values
        if name in REDUCTIONS or name == "top_k" or eqn.params["reverse"]:
            x = self.masked(x, eqn.invars[0].aval.shape, axes, identity_of(name, x.dtype))
        return bind(eqn, [x, *rest], self.size)

    def _sort(self, eqn, values, mixed):
        shape, axis = eqn.invars[0].aval.shape, eqn.params["dimension"]
        missing = jnp.broadcast_to(~self.exists(shape, axis), values[0].shape)
        params = eqn.params
        keys = params["num_keys"] + 1
        return lax.sort((missing, *values), axis, params["is_stable"], keys)[1:]

    def _reverse(self, eqn, values, mixed):
        (x,), shape = values, eqn.invars[0].aval.shape
        for axis in eqn.params["dimensions"]:
            if (0, axis) in mixed:
                last = self.length(shape[axis]) - 1
                x = self._take(x, last - lax.iota(jnp.int32, x.shape[axis]), axis)
            else:
                x = lax.rev(x, (axis,))
        return [x]

    def _take(self, x: Any, indices: Any, axis: int) -> Any:
        """Entries along an axis; the nearest where there is none."""
        return jnp.take(x, jnp.clip(indices, 0, max(0, x.shape[axis] - 1)), axis, mode="clip")

    def _concatenate(self, eqn, values, mixed):
        axis, out = eqn.params["dimension"], eqn.outvars[0].aval
        joined = jnp.zeros(substituted(out.shape, self.size), out.dtype)
        begin = jnp.int32(0)
        for v, x in zip(eqn.invars, values, strict=True):  # what has no row is written over
            joined = lax.dynamic_update_slice_in_dim(joined, x, begin, axis)
            begin = begin + self.length(v.aval.shape[axis])
        return [joined]

    def _slice(self, eqn, values, mixed):
        (x,), params, out = values, eqn.params, eqn.outvars[0].aval.shape
        starts, limits = list(params["start_indices"]), list(params["limit_indices"])
        strides = list(params["strides"] or (1,) * len(starts))
        for _, axis in mixed:
            steps = strides[axis] * lax.iota(jnp.int32, self.size(out[axis]))
            x = self._take(x, self.length(starts[axis]) + steps, axis)
            starts[axis], limits[axis], strides[axis] = 0, out[axis], 1
        bounds = (substituted(tuple(p), self.size) for p in (starts, limits, strides))
        return [lax.slice(x, *bounds)]

    def _dynamic_slice(self, eqn, values, mixed):
        (x, *starts), sizes = values, list(eqn.params["slice_sizes"])
        for _, axis in mixed:
            room = self.length(eqn.invars[0].aval.shape[axis]) - self.length(sizes[axis])
            start = jnp.clip(starts[axis], 0, jnp.maximum(room, 0))
            sizes[axis] = self.size(sizes[axis])
            x = self._take(x, start + lax.iota(jnp.int32, sizes[axis]), axis)
            starts[axis] = jnp.zeros_like(starts[axis])
        return [lax.dynamic_slice(x, starts, substituted(tuple(sizes), self.size))]

    def _gather(self, eqn, values, mixed):
        (x, indices), params = values, eqn.params
        numbers, shape = params["dimension_numbers"], eqn.invars[0].aval.shape
        if any(i == 1 for i, _ in mixed):
            raise CannotMergeError("`gather` by indices of ragged length")
        exact = params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
        there: Any = True
        for _, axis in mixed:
            if axis not in numbers.start_index_map or exact:
                continue
            k = numbers.start_index_map.index(axis)
            if params["slice_sizes"][axis] != 1:
                raise CannotMergeError("`gather` of several rows that may be out of bounds")
            wanted, last = indices[..., k], self.length(shape[axis]) - 1
            there = there & (wanted >= 0) & (wanted <= last)
            indices = indices.at[..., k].set(jnp.clip(wanted, 0, jnp.maximum(last, 0)))
        sizes = substituted(params["slice_sizes"], self.size)
        out = lax.gather(x, indices, numbers, sizes, mode="clip")
        if there is not True and params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            batch = [a for a in range(out.ndim) if a not in numbers.offset_dims]
            there = lax.broadcast_in_dim(there, out.shape, batch)
            fill = params["fill_value"]
            if fill is None:
                fill = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else _lowest(x.dtype)
            out = jnp.where(there, out, jnp.asarray(fill, out.dtype))
        return [out]

    def _dot(self, eqn, values, mixed):
        sides = [
            self.masked(x, v.aval.shape, [a for i, a in mixed if i == side], 0)
            for side, (x, v) in enumerate(zip(values, eqn.invars, strict=True))
        ]
        return bind(eqn, sides, self.size)

    def _pad(self, eqn, values, mixed):
        (x, value), config = values, eqn.params["padding_config"]
        for _, axis in mixed:
            low, _, inside = config[axis]
            if is_ragged((low, inside)) or inside:
                raise CannotMergeError("`pad` before or between rows by a ragged number")
        axes = [a for _, a in mixed]
        return bind(eqn, [self.masked(x, eqn.invars[0].aval.shape, axes, value), value], self.size)

    def _conv(self, eqn, values, mixed):
        if any(i for i, _ in mixed):
            raise CannotMergeError("`conv_general_dilated` with a ragged kernel")
        x = self.masked(values[0], eqn.invars[0].aval.shape, [a for _, a in mixed], 0)
        return bind(eqn, [x, *values[1:]], self.size)

    def _reshape(self, eqn, values, mixed):
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        leading = [all(d == 1 for d in s[: ragged_axes(s)[0]]) for s in (before, after)]
        if len(ragged_axes(before)) != 1 or len(ragged_axes(after)) != 1 or not all(leading):
            raise CannotMergeError("`reshape` that merges rows into an axis before them")
        return bind(eqn, values, self.size)

    def _random_bits(self, eqn, values, mixed):
        return bind(eqn, values, self.size)  # those of the rows that exist come first

    def _scan(self, eqn, values, mixed):
        params, closed = eqn.params, eqn.params["jaxpr"]
        cuts = tuple(itertools.accumulate(scan_parts(eqn)))
        consts, init, xs = values[: cuts[0]], values[cuts[0] : cuts[1]], values[cuts[1] :]
        length = self.length(params["length"])
        first = [x[length - 1 if params["reverse"] else 0] for x in xs]

        def step(carry, given):
            index, *rows = given
            alive = index < length  # steps that are none repeat the first one
            before = carry
            carry = [jnp.where(alive, x, y) for x, y in zip(carry, init, strict=True)]
            rows = [jnp.where(alive, x, y) for x, y in zip(rows, first, strict=True)]
            out = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *consts, *carry, *rows)
            new, ys = out[: len(carry)], out[len(carry) :]
            kept = [jnp.where(alive, a, b) for a, b in zip(new, before, strict=True)]
            return kept, ys

        steps = lax.iota(jnp.int32, self.size(params["length"]))
        carry, ys = lax.scan(step, init, [steps, *xs], reverse=params["reverse"])
        return [*carry, *ys]


_RULES: dict[str, Callable] = {
    "sort": Padded._sort,
    "rev": Padded._reverse,
    "concatenate": Padded._concatenate,
    "slice": Padded._slice,
    "dynamic_slice": Padded._dynamic_slice,
    "gather": Padded._gather,
    "dot_general": Padded._dot,
    "pad": Padded._pad,
    "conv_general_dilated": Padded._conv,
    "reshape": Padded._reshape,
    "scan": Padded._scan,
    "random_bits": Padded._random_bits,
}


def identity_of(name: str, dtype: Any) -> Any:
    """What leaves the result of a reduction as it is."""
    if name in ("reduce_max", "argmax", "cummax", "cumlogsumexp", "top_k"):
        return _lowest(dtype)
    if name in ("reduce_min", "argmin", "cummin"):
        return _highest(dtype)
    return 1 if name in ("reduce_prod", "cumprod", "reduce_and") else 0


def _lowest(dtype: Any) -> Any:
    if dtype == np.bool_:
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise CannotMergeError("an extreme of complex numbers")
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise CannotMergeError("an extreme of complex numbers")
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
