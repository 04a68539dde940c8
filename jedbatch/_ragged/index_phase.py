"""Phases by index: rows of instances that are read or written by index, of all instances at once.

See `_ragged.indexing`. Such a phase has no loop, so that JAX differentiates it: the transpose of a
gather is a scatter, and the other way round. What else is in it (zeros to add to, the shape of
indices) is computed for all rows side by side.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jedbatch._jaxpr.interpret import Bindings, value_of
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._jaxpr.versions import Atom, Equation
from jedbatch._program.arenas import take
from jedbatch._ragged.indexing import NamedRows, find_indexing, run_indexed
from jedbatch._ragged.packing import PackedBatch, ragged_axis
from jedbatch._ragged.phases import Phase
from jedbatch._ragged.row_rules import run_row
from jedbatch._support.types import Array, AxisSize


class IndexPhase:
    """A phase by index."""

    def __init__(self, phase: Phase):
        self.phase = phase
        self._indexed = {id(eqn) for eqn in phase.indexed}

    def run(
        self,
        batch: PackedBatch,
        shared: Sequence[jax.Array],
        reads: Sequence[jax.Array],
        number: int,
    ) -> list[Array]:
        """Returns the variables that the phase writes: packed rows, or [K, ...]."""
        phase = self.phase
        env = dict(zip((*phase.shared, *phase.reads), (*shared, *reads), strict=True))
        step = _Step(batch, env, phase.shared)
        for eqn in phase.equations:
            if id(eqn) in self._indexed:
                out = [step.indexed(eqn)]
            elif eqn.primitive.name == "dim_as_value":
                out = [step.counts(eqn.params["dim"]).astype(eqn.outvars[0].aval.dtype)]
            else:
                out = step.by_row(eqn)
            step.env.update(zip(eqn.outvars, out, strict=True))
        return [step.env[v] for v in phase.writes]


class _Step:
    """The values of a phase while it runs.

    Attributes:
      batch: the minibatch.
      env: values by variable: packed rows, [K, ...], or as they are where all instances share them.
      shared: the variables that all instances share.
    """

    def __init__(self, batch: PackedBatch, env: Bindings, shared: Sequence[Atom]):
        self.batch, self.env, self.shared = batch, env, frozenset(shared)

    @property
    def _is_on_gpu(self) -> bool:
        return self.batch.capacity.target.control == "switch"

    def counts(self, extent: AxisSize) -> jax.Array:
        """Returns int32[K]: an extent of every call."""
        counts = jnp.asarray(extent_at(extent, self.batch.lengths()), jnp.int32)
        return jnp.broadcast_to(counts, (self.batch.capacity.calls,))

    def value(self, atom: Atom) -> tuple[Array, bool]:
        """Returns (the value of a variable or literal, whether calls have values of their own)."""
        own = not isinstance(atom, Literal) and atom not in self.shared
        return value_of(atom, self.env), own

    def by_row(self, eqn: Equation) -> list[Array]:
        """Returns the results of a row-wise equation for every row, or for every call."""
        batch, (out, *_) = self.batch, eqn.outvars
        axis = ragged_axis(out)
        if axis is None:
            positions, call = jnp.zeros(batch.capacity.calls, jnp.int32), None
        else:
            e = batch.index(out.aval.shape[axis])
            positions, call = batch.positions(e), batch.get("call", e)
        values, axes = [], []
        for atom in eqn.invars:
            x, own = self.value(atom)
            if own and call is not None and ragged_axis(atom) is None:
                x = take(x, call)
            values.append(x)
            axes.append(0 if own else None)

        def lane(position: Any, *values: Any) -> list[Array]:
            return run_row(eqn, values, position)

        return jax.vmap(lane, in_axes=(0, *axes), axis_size=len(positions))(positions, *values)

    def indexed(self, eqn: Equation) -> Array:
        """Returns the result of a gather or scatter, packed."""
        batch, (table, indices, *updates) = self.batch, eqn.invars
        indexing = find_indexing(eqn)
        assert indexing is not None
        e = batch.index(indices.aval.shape[indexing.batch])
        call = batch.get("call", e)
        exist = jnp.arange(batch.capacity.rows[e]) < batch.total(e)
        extent = table.aval.shape[indexing.axis]
        if ragged_axis(table) is None:
            counts = jnp.full(len(call), extent, jnp.int32)
            starts, every = call * extent, batch.capacity.calls * extent
        else:
            t = batch.index(extent)
            starts, counts = take(batch.get("starts", t), call), take(self.counts(extent), call)
            every = batch.capacity.rows[t]
        is_ended = bool(batch.capacity.slots) and self._is_on_gpu
        named = NamedRows(starts, counts, exist, every, is_ended)
        values = [self._long(table, indexing.axis), self._long(indices, indexing.batch)]
        values += [self._long(v, indexing.dimensions[indexing.batch]) for v in updates]
        out, result = run_indexed(eqn, values, named), eqn.outvars[0]
        axis = ragged_axis(result)
        if axis is not None:
            rows = jnp.moveaxis(out, axis, 0)
            if is_ended and not updates:  # indices repeat the last, and so does what they read
                return rows
            return self._ending(batch.index(result.aval.shape[axis]), rows)
        out = jnp.moveaxis(out, indexing.axis, 0)
        out = out.reshape(batch.capacity.calls, extent, *out.shape[1:])
        return jnp.moveaxis(out, 1, indexing.axis + 1)

    def _long(self, variable: Atom, axis: int) -> Array:
        """Returns a variable of one long instance, with the rows of all along an axis."""
        x, own = self.value(variable)
        if ragged_axis(variable) is None:
            if not own:
                x = jnp.broadcast_to(x, (self.batch.capacity.calls, *jnp.shape(x)))
            x = jnp.moveaxis(x, axis + 1, 1)
            x = lax.collapse(x, 0, 2)
        return jnp.moveaxis(x, 0, axis)

    def _ending(self, e: int, rows: Array) -> Array:
        """Returns packed rows; those beyond the last repeat it where all rows are one block.

        What these send back, zeros, a GPU would add to the last one after the other. XLA:CPU
        computes what is selected again for each reader.
        """
        if not self.batch.capacity.slots or not len(rows):
            return rows
        total = self.batch.total(e)
        if not self._is_on_gpu:
            row = jnp.arange(len(rows), dtype=jnp.int32)
            return take(rows, jnp.minimum(row, jnp.maximum(total - 1, 0)))
        exist = (jnp.arange(len(rows)) < total).reshape(-1, *[1] * (rows.ndim - 1))
        last = lax.dynamic_slice_in_dim(rows, jnp.maximum(total - 1, 0), 1)
        return jnp.where(exist, rows, lax.stop_gradient(last))
