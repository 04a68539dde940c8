"""Running a program in phases on the packed rows of all instances.

Row-wise phases run in blocks of rows (see `_ragged.row_phase`), phases over instances by length, a
few instances at a time (see `_ragged.instance_phase`). Loops run over what exists, so a program is
compiled once for all combinations of lengths. Nothing is padded from one instance to another.

Letters: `K` calls (instances, or parts of instances that run a program), `R` room for rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from jedbatch._jaxpr.interpret import has_gradient, value_of
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._kernel.target import CPU
from jedbatch._program.tables import TableForm
from jedbatch._ragged.groups import places_in, slots_of
from jedbatch._ragged.instance_phase import InstancePhase
from jedbatch._ragged.packing import PackedBatch, RowCapacity, ragged_axis, row_shape, table_form
from jedbatch._ragged.phases import PhasedProgram
from jedbatch._ragged.row_phase import RowPhase
from jedbatch._ragged.tiling import TILE


class PackedProgram:
    """A program in phases, ready to run on packed rows.

    Attributes:
      phased: the program.
      extents: of the rows it keeps, in the order of `RowCapacity.rows`.
    """

    def __init__(self, phased: PhasedProgram):
        self.phased = phased
        self.extents = phased.extents
        self._phases = [
            InstancePhase(p) if p.extent is None else RowPhase(p) for p in phased.phases
        ]

    def form(self, room: RowCapacity) -> TableForm:
        """Where things are in the table of a minibatch."""
        return table_form(room, len(self.phased.symbols))

    def row_counts(self, lengths: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """int[K] for each extent: rows of every call."""
        calls = len(next(iter(lengths.values())))
        return [
            np.broadcast_to(np.maximum(0, extent_at(e, lengths)), (calls,)) for e in self.extents
        ]

    def table(self, room: RowCapacity, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        """The int32 table of calls whose symbols have these values, int[calls] each."""
        form = self.form(room)
        table = np.zeros(form.size, np.int32)
        stacked = np.stack([lengths[s] for s in self.phased.symbols])
        calls = stacked.shape[1]
        form.view(table, "lengths")[:, :calls] = stacked
        form.view(table, "lengths")[:, calls:] = stacked[:, :1]
        form.view(table, "calls")[:] = calls
        longest = stacked.max(axis=0)
        slots = slots_of(longest, room.groups) if room.slots else None
        if slots is not None:
            form.view(table, "slot")[:calls] = slots
            form.view(table, "order")[:] = room.calls
            form.view(table, "order")[slots] = np.arange(calls)
        else:
            assert not room.slots  # there is a slot for every call
            self._write_order(room, longest, form.view(table, "order"), form.view(table, "trips"))
        for e, counts in enumerate(self.row_counts(lengths)):
            total = int(counts.sum())
            starts = np.cumsum(counts) - counts
            form.view(table, "starts", e)[:calls] = starts
            call = form.view(table, "call", e)
            call[:total] = np.repeat(np.arange(calls), counts)
            call[total:] = call[max(0, total - 1)]
            form.view(table, "total", e)[:] = total
            if slots is not None:
                rooms = [extent_at(self.extents[e], self._padded(n)) for n in room.lengths]
                places = places_in(slots, rooms, room.slots, counts)
                places = np.append(places, places[-1] if total else 0)
                form.view(table, "place", e)[:] = places[np.minimum(np.arange(room.rows[e]), total)]
            else:
                form.view(table, "blocks", e)[:] = room.target.blocks.cover(np.array([total]))[0]
        return table

    def _padded(self, length: int) -> dict[str, int]:
        """The symbols of a call in room for so many rows."""
        return dict.fromkeys(self.phased.symbols, length)

    @staticmethod
    def _write_order(
        room: RowCapacity, longest: np.ndarray, order: np.ndarray, trips: np.ndarray
    ) -> None:
        """Writes which calls run one after the other, by length, and how often they do."""
        order[:] = room.calls
        first = 0
        least = (-1, *room.lengths)
        for c, (most, group) in enumerate(zip(room.lengths, room.together, strict=True)):
            mine = np.flatnonzero((longest <= most) & (longest > least[c]))
            trips[c] = -(-len(mine) // group)
            order[first : first + len(mine)] = mine
            first += int(trips[c]) * group

    def try_out(self, shared: Sequence[Any]) -> None:
        """Traces a run and its reverse, so that what cannot be run raises its error now.

        `shared` are the shapes of what all calls share.
        """
        widest = CPU.blocks.widths[-1]
        room = RowCapacity(2, (widest,) * len(self.extents), (CPU.shortest, 2 * TILE), True, CPU)
        table = jax.ShapeDtypeStruct((self.form(room).size,), np.int32)
        operands = []
        for v in self.phased.operands:
            lead = room.calls if ragged_axis(v) is None else widest
            operands.append(jax.ShapeDtypeStruct((lead, *row_shape(v)), v.aval.dtype))

        def slope(shared, operands, table):
            def inexact(shared, operands):
                found = self.run(room, shared, operands, table)
                return [x for x in found if has_gradient(x.dtype)]

            out, pull_back = jax.vjp(inexact, list(shared), list(operands))
            return pull_back(out)

        jax.eval_shape(slope, list(shared), operands, table)

    def run(
        self, room: RowCapacity, shared: Sequence[Any], operands: Sequence[Any], table: Any
    ) -> list[Any]:
        """The results: packed rows [R, ...] or [K, ...], by the kind of the result.

        Args:
          room: what to compile for.
          shared: the values all calls share.
          operands: of all calls: packed rows where ragged, [K, ...] elsewhere.
          table: see `table`.
        """
        phased = self.phased
        env = dict(zip(phased.jaxpr.constvars, phased.consts, strict=True))
        env.update(zip(phased.jaxpr.invars[: phased.num_shared], shared, strict=True))
        before = phased.jaxpr.replace(
            constvars=[],
            invars=list(env),
            eqns=list(phased.before),
            outvars=[v for eqn in phased.before for v in eqn.outvars],
        )
        made = jax.core.eval_jaxpr(before, [], *env.values())
        env.update(zip(before.outvars, made, strict=True))
        known = set(env)
        env.update(zip(phased.operands, operands, strict=True))
        here = PackedBatch(self.extents, phased.symbols, room, table)
        for phase in self._phases:
            env.update(zip(phase.phase.writes, phase.run(here, env), strict=True))

        def returned(atom: Any) -> Any:
            value = value_of(atom, env)
            if isinstance(atom, Var) and atom not in known:
                return value
            return jnp.broadcast_to(value, (room.calls, *jnp.shape(value)))  # alike for all calls

        return list(map(returned, phased.jaxpr.outvars))
