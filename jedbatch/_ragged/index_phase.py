"""Phases by index: rows of instances that are read or written by index, of all instances at once.

See `padding.indexing`. Such a phase has no loop, so that JAX differentiates it: the transpose of a
gather is a scatter, and the other way round. What else is in it (zeros to add to, the shape of
indices) is computed for all rows side by side. The derivatives of extremes divide by what may be
0, those of products multiply by what may be infinite; they are asked first to which calls something
comes back (see `_jaxpr.gates`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jedbatch._jaxpr.derivatives import pull_back_some
from jedbatch._jaxpr.gates import Gates
from jedbatch._jaxpr.interpret import Bindings, has_gradient, value_of
from jedbatch._jaxpr.padding.indexing import NamedRows, find_indexing, run_indexed
from jedbatch._jaxpr.padding.row_rules import run_row
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._jaxpr.symmetric import DifferentiableFunction, refuse_rules
from jedbatch._jaxpr.versions import Atom, Equation
from jedbatch._program.arenas import take
from jedbatch._ragged.packing import PackedBatch, RowCapacity, ragged_axis
from jedbatch._ragged.phases import Phase
from jedbatch._support.types import Array, AxisSize

DIVIDING = ("scatter-mul", "scatter-min", "scatter-max")


class IndexPhase:
    """A phase by index."""

    def __init__(self, phase: Phase):
        self.phase = phase
        self._indexed = {id(eqn) for eqn in phase.indexed}
        self._functions: dict[RowCapacity, DifferentiableFunction] = {}
        self._divides = any(eqn.primitive.name in DIVIDING for eqn in phase.indexed)
        inexact = [
            [i for i, v in enumerate(variables) if has_gradient(v.aval.dtype)]
            for variables in (phase.shared, phase.reads, phase.writes)
        ]
        self._moving_shared, self._moving, self._returned = inexact

    def run(
        self,
        batch: PackedBatch,
        shared: Sequence[jax.Array],
        reads: Sequence[jax.Array],
        number: int,
    ) -> list[Array]:
        """Returns the variables that the phase writes: packed rows, or [K, ...]."""
        if not self._divides:
            return self._run(batch, shared, reads)
        if batch.capacity not in self._functions:
            self._functions[batch.capacity] = self._function(batch.without_table())
        return self._functions[batch.capacity]((list(shared), list(reads), batch.table))

    def _function(self, batch: PackedBatch) -> DifferentiableFunction:
        """Returns the phase as a function of (shared values, what it reads, a table)."""
        phase = self.phase

        def run(arguments):
            shared, reads, table = arguments
            return self._run(batch.reading(table), shared, reads)

        def pull_back(arguments, results, residuals, cotangents, wanted, moves):
            shared, reads, table = arguments
            # JAX refuses to differentiate products by factors, if an index may come twice.
            moving = [i for i in self._moving_shared if wanted[0][i]]
            moving += [len(shared) + i for i in self._moving if wanted[1][i]]
            returned = [i for i in self._returned if cotangents[i] is not None]
            gates = Gates.find(phase.equations, [phase.writes[i] for i in returned])
            flags = [moves[i] for i in returned]

            def forward(given):
                parts = given[: len(shared)], given[len(shared) :]
                return self._run(batch.reading(table), *parts, gates, flags)

            found = pull_back_some(forward, [*shared, *reads], moving, returned, cotangents)
            return found[: len(shared)], found[len(shared) :], None

        def marks(arguments, cotangents):
            return batch.reading(arguments[2]).moving_calls(phase.writes, cotangents)

        refuse = functools.partial(refuse_rules, "what is read by index", phase.equations)
        kinds = list(map(batch.kind, phase.writes))
        return DifferentiableFunction(
            run, lambda arguments: (run(arguments), []), pull_back, refuse, lambda: kinds, marks
        )

    def _run(
        self,
        batch: PackedBatch,
        shared: Sequence[jax.Array],
        reads: Sequence[jax.Array],
        gates: Gates | None = None,
        flags: Sequence[jax.Array] = (),
    ) -> list[Array]:
        """Returns the variables that the phase writes; `flags`, bool[K] each, are for `gates`."""
        phase = self.phase
        env = dict(zip((*phase.shared, *phase.reads), (*shared, *reads), strict=True))
        step = _Step(batch, env, phase.shared, gates, flags)
        if gates is not None:
            step.env.update((v, step.behind_gate(v, x, always=True)) for v, x in env.items())
        for eqn in phase.equations:
            step.readers = eqn.outvars
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
      gates: of the phase, where it is differentiated and they are needed; None elsewhere.
      flags: bool[K] for each result that these know, the calls to which something comes back.
      readers: the results of the equation that runs.
    """

    def __init__(
        self,
        batch: PackedBatch,
        env: Bindings,
        shared: Sequence[Atom],
        gates: Gates | None,
        flags: Sequence[jax.Array],
    ):
        self.batch, self.env, self.shared = batch, env, frozenset(shared)
        self.gates, self.flags = gates, flags
        self.readers: Sequence[Atom] = ()

    def counts(self, extent: AxisSize) -> jax.Array:
        """Returns int32[K]: an extent of every call."""
        counts = jnp.asarray(extent_at(extent, self.batch.lengths()), jnp.int32)
        return jnp.broadcast_to(counts, (self.batch.capacity.calls,))

    def value(self, atom: Atom) -> tuple[Array, bool]:
        """Returns (the value of a variable or literal, whether calls have values of their own)."""
        own = not isinstance(atom, Literal) and atom not in self.shared
        x = value_of(atom, self.env)
        return x if self.gates is None else self.behind_gate(atom, x), own

    def behind_gate(self, atom: Atom, x: Array, always: bool = False) -> Array:
        """Returns a value as the equation that runs reads it; `always` where the phase reads it."""
        assert self.gates is not None
        flags = [self._of_rows(atom, x) for x in self.flags]
        return self.gates.at(atom, x, flags, None if always else self.readers, always)

    def _of_rows(self, atom: Atom, flags: jax.Array) -> jax.Array:
        """Returns the flags of calls for the rows of a variable, or for all calls together."""
        if isinstance(atom, Literal) or atom in self.shared:
            return flags.any()
        axis = ragged_axis(atom)
        if axis is None:
            return flags
        return take(flags, self.batch.get("call", self.batch.index(atom.aval.shape[axis])))

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
        named = NamedRows(starts, counts, exist, every, batch.capacity.target.control == "switch")
        values = [self._long(table, indexing.axis), self._long(indices, indexing.batch)]
        values += [self._long(v, indexing.dimensions[indexing.batch]) for v in updates]
        out, result = run_indexed(eqn, values, named), eqn.outvars[0]
        axis = ragged_axis(result)
        if axis is not None:
            return jnp.moveaxis(out, axis, 0)
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
