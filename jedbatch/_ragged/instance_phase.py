"""Phases over instances: equations that take the rows of one instance together.

Instances of about the same length run side by side, a few at a time, each padded to one of a few
lengths; how many there are of each is data. Where an instance is longer than a tile, and rows of
what it writes depend on few of the rows it reads, it runs tile by tile (see `_ragged.tiling`).

    over instances  [a0 a1 a2 · ] [b0 · · · ] [c0 c1 · · ]

The reverse computes the phase again, so that nothing quadratic in a length outlives the instances
at hand.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.derivatives import pull_back_some, spread_to
from jedbatch._jaxpr.gates import Gates
from jedbatch._jaxpr.interpret import Rule, has_gradient, run_equations
from jedbatch._jaxpr.padding.axis_rules import MAKE_MORE, TILE_ROWS, Axes
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.padding.singular import positioned
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._jaxpr.symmetric import DifferentiableFunction, refuse_rules
from jedbatch._jaxpr.versions import Atom
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._program.arenas import take
from jedbatch._ragged.instance_rows import InstanceRows, read_instances, write_instances
from jedbatch._ragged.packing import PackedBatch, RowCapacity, ragged_axis
from jedbatch._ragged.phases import Phase
from jedbatch._ragged.tiling import find_tiles
from jedbatch._support.types import Array

LANES = "jedbatch_lanes"  # the name of the axis of instances that run together


@dataclass(frozen=True, eq=False)
class InstanceGroup:
    """Instances that run at the same time.

    Attributes:
      batch: the minibatch.
      capacity: of rows of each instance, where they are not tiles.
      calls: int32[G], their numbers.
      alive: bool[G], whether there is such an instance, and in the reverse, whether something comes
        back to it; if not, another one takes its place.
      lengths: int32[G] for every symbol.
      starts: int32[G] for every extent, the first rows.
      tiles: the axes of variables along which there is a tile only.
      offset: the first row of the tile.
    """

    batch: PackedBatch
    capacity: int
    calls: jax.Array
    alive: jax.Array
    lengths: Mapping[str, jax.Array]
    starts: Sequence[jax.Array]
    tiles: Axes
    offset: jax.Array

    @staticmethod
    def at(
        batch: PackedBatch,
        first: int | jax.Array,
        size: int,
        capacity: int,
        tiles: Axes,
        offset: jax.Array,
        moves: jax.Array | None = None,
    ) -> "InstanceGroup":
        """Returns the instances from a place of the order on.

        `moves`, bool[K], says to which something comes back, if only these are to be run.
        """
        calls = batch.get("order", start=first, size=size)
        alive = calls < batch.capacity.calls
        if moves is not None:
            alive &= moves[jnp.where(alive, calls, 0)]
            stand_in = jnp.argmax(moves).astype(jnp.int32)
        else:
            stand_in = jnp.int32(0) if batch.capacity.slots else calls[0]
        calls = jnp.where(alive, calls, stand_in)  # which may be longer
        lengths = {s: jnp.minimum(take(x, calls), capacity) for s, x in batch.lengths().items()}
        starts = [take(batch.get("starts", e), calls) for e in range(len(batch.extents))]
        return InstanceGroup(batch, capacity, calls, alive, lengths, starts, tiles, offset)

    def rows(self, variable: Atom) -> tuple[InstanceRows, int]:
        """Returns (packed rows of a ragged variable, how many each instance is padded to)."""
        extent = variable.aval.shape[ragged_axis(variable)]
        counts = self.lengths.get(str(extent))
        if counts is None:
            counts = jnp.maximum(extent_at(extent, self.lengths), 0)
            counts = jnp.broadcast_to(counts, self.calls.shape).astype(jnp.int32)
        starts = self.starts[self.batch.index(extent)]
        offset, length = self.offset, TILE_ROWS
        if variable not in self.tiles:
            offset = jnp.int32(0)
            length = extent_at(extent, dict.fromkeys(self.lengths, self.capacity))
        return InstanceRows(starts, counts, self.alive, offset), length

    @property
    def of_calls(self) -> InstanceRows:
        """The rows of what has one for each call."""
        return InstanceRows(self.calls, jnp.ones_like(self.calls), self.alive, jnp.int32(0))

    def read(self, variable: Atom, x: jax.Array, zeros: bool = False) -> jax.Array:
        """Returns [G, rows, ...] or [G, ...] of a variable; rows beyond the last repeat it.

        With `zeros` they are that instead, and so is all that is of no instance.
        """
        if ragged_axis(variable) is None:
            return read_instances(self.of_calls, x, 1, zeros)[:, 0]
        rows, length = self.rows(variable)
        return read_instances(rows, x, length, zeros)

    def write(self, variable: Atom, x: jax.Array, new: jax.Array, add: bool = False) -> jax.Array:
        """Returns x, a variable of all calls, with the rows of the group set, or added to."""
        if ragged_axis(variable) is None:
            return write_instances(self.of_calls, x, new[:, None], add)
        return write_instances(self.rows(variable)[0], x, new, add)

    def among(self, flags: jax.Array) -> jax.Array:
        """Returns bool[G], those of bool[K] that are of the instances that exist."""
        return read_instances(self.of_calls, flags, 1, zeros=True)[:, 0]


class InstancePhase:
    """A phase over instances."""

    def __init__(self, phase: Phase):
        self.phase = phase
        self._functions: dict[RowCapacity, DifferentiableFunction] = {}
        self._tiles = find_tiles(phase)
        self._makes_more = any(eqn.primitive.name in MAKE_MORE for eqn in phase.equations)
        self._positioned = positioned(phase.equations)
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
        if batch.capacity not in self._functions:
            self._functions[batch.capacity] = self._function(batch.without_table())
        return self._functions[batch.capacity]((list(shared), list(reads), batch.table))

    def _function(self, batch: PackedBatch) -> DifferentiableFunction:
        """Returns the phase as a function of (shared values, what it reads, a table)."""

        def run(arguments):
            shared, operands, table = arguments
            return self._forward(batch.reading(table), shared, operands)

        def pull_back(arguments, results, residuals, cotangents, wanted, moves):
            shared, operands, table = arguments
            given = batch.reading(table), shared, operands
            return *self._reverse(*given, cotangents, wanted, moves), None

        def marks(arguments, cotangents):
            return batch.reading(arguments[2]).moving_calls(self.phase.writes, cotangents)

        refuse = functools.partial(
            refuse_rules, "what is done to arrays of any length", self.phase.equations
        )
        kinds = list(map(batch.kind, self.phase.writes))
        return DifferentiableFunction(
            run, lambda arguments: (run(arguments), []), pull_back, refuse, lambda: kinds, marks
        )

    def _forward(
        self, batch: PackedBatch, shared: Sequence[jax.Array], operands: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the variables that the phase writes."""
        phase = self.phase

        def body(group, results):
            blocks = [group.read(v, x) for v, x in zip(phase.reads, operands, strict=True)]
            made = self._lanes(group, shared, blocks)
            return [
                group.write(v, x, new)
                for v, x, new in zip(phase.writes, results, made, strict=True)
            ]

        return self._each_group(batch, list(map(batch.empty, phase.writes)), body)

    def _reverse(
        self, batch: PackedBatch, shared, operands, cotangents, wanted, moves_of
    ) -> tuple[list[Any], list[Any]]:
        """Returns cotangents of the shared values and of the operands, where they are wanted.

        `moves_of`, bool[K] for each result, says to which calls something comes back through it.
        """
        phase, count = self.phase, len(shared)
        moving = [i for i in self._moving_shared if wanted[0][i]]
        moving += [count + i for i in self._moving if wanted[1][i]]
        returned = [i for i in self._returned if cotangents[i] is not None]
        nothing = jnp.zeros(batch.capacity.calls, bool)
        moves = functools.reduce(jnp.logical_or, [moves_of[i] for i in returned], nothing)
        gates = Gates.find(phase.equations, [phase.writes[i] for i in returned], phase.shared)

        def body(group, sums):
            blocks = [group.read(v, x) for v, x in zip(phase.reads, operands, strict=True)]
            flags = [group.among(moves_of[i]) for i in returned]
            sent = [group.read(phase.writes[i], cotangents[i], zeros=True) for i in returned]
            sent = spread_to(sent, returned, cotangents)

            def run(given):
                return self._lanes(group, given[:count], given[count:], gates, flags)

            found = pull_back_some(run, [*shared, *blocks], moving, returned, sent)
            return [
                x + where_alive(moves.any(), found[i])
                if i < count
                else group.write(phase.reads[i - count], x, found[i], add=True)
                for i, x in zip(moving, sums, strict=True)
            ]

        args = [*shared, *operands]
        zeros = [jnp.zeros_like(args[i]) for i in moving]
        sums = self._each_group(batch, zeros, body, moves)
        found = spread_to(sums, moving, args)
        return found[:count], found[count:]

    def _each_group(
        self, batch: PackedBatch, state: Any, body: Callable, moves: jax.Array | None = None
    ) -> Any:
        """Runs `body(group, state)` for all instances, tile by tile where they are long.

        Where each has a slot (see `_ragged.groups`) there are no loops, and no tiles.
        """
        if batch.capacity.slots:
            begins = itertools.accumulate(batch.capacity.slots, initial=0)
            for begin, capacity, size in zip(begins, *batch.capacity.groups, strict=False):
                group = InstanceGroup.at(batch, begin, size, capacity, {}, jnp.int32(0), moves)
                state = body(group, state)
            return state
        trips = batch.get("trips")
        first = jnp.int32(0)
        for c, (capacity, size) in enumerate(
            zip(batch.capacity.lengths, batch.capacity.together, strict=True)
        ):
            tiles = self._tiles if capacity > TILE_ROWS else {}

            def step(_, carry, capacity=capacity, size=size, tiles=tiles):
                state, first = carry
                if not tiles:
                    group = InstanceGroup.at(batch, first, size, capacity, {}, jnp.int32(0), moves)
                    return body(group, state), first + size
                group_call = InstanceGroup.at(batch, first, size, capacity, {}, jnp.int32(0))
                extents = {v.aval.shape[ragged_axis(v)] for v in self.phase.writes}
                longest = jnp.int32(0)
                for extent in extents:
                    longest = jnp.maximum(longest, jnp.max(extent_at(extent, group_call.lengths)))

                def tile(i, state):
                    at = i * TILE_ROWS
                    return body(
                        InstanceGroup.at(batch, first, size, capacity, tiles, at, moves), state
                    )

                return lax.fori_loop(0, -(-longest // TILE_ROWS), tile, state), first + size

            state, first = lax.fori_loop(0, trips[c], step, (state, first))
        return state

    def _lanes(
        self,
        group: InstanceGroup,
        shared: Sequence[Any],
        blocks: Sequence[Any],
        gates: Gates | None = None,
        flags: Sequence[jax.Array] = (),
    ) -> list[Array]:
        """Returns the variables that the phase writes for the instances of a group.

        If they are to be differentiated there are `gates`, and `flags`, bool[G] for each result
        that these know, say to which instances something comes back through it.
        """
        lane = functools.partial(self._lane, group, gates)
        lanes = jax.vmap(lane, in_axes=(0, None, 0, 0), axis_name=LANES)
        return lanes(dict(group.lengths), shared, blocks, list(flags))

    def _lane(
        self, group: InstanceGroup, gates: Gates | None, lengths, shared, blocks, flags
    ) -> list[Array]:
        """Returns the variables that the phase writes for one instance."""
        phase = self.phase
        sizes = dict.fromkeys(lengths, group.capacity)
        guarded = group.batch.capacity.guarded or self._makes_more
        padded = Padded(
            sizes,
            lengths,
            guarded,
            group.tiles,
            group.offset,
            gates is not None,
            LANES,
            self._positioned,
        )
        rule: Rule = padded.run
        if gates is not None:
            pairs = zip(phase.reads, blocks, strict=True)
            blocks = [gates.at(v, x, flags, None) for v, x in pairs]
            padded.gates, padded.flags = gates, flags
            rule = gates.rule(padded.run, flags)
        env = dict(zip(phase.shared, shared, strict=True))
        for v, x in zip(phase.reads, blocks, strict=True):
            axis = ragged_axis(v)
            env[v] = x if axis is None else jnp.moveaxis(x, 0, axis)
        run_equations(phase.equations, env, rule)
        results = []
        for v in phase.writes:
            axis = ragged_axis(v)
            results.append(env[v] if axis is None else jnp.moveaxis(env[v], axis, 0))
        return results
