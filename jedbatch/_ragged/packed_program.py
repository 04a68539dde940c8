"""Running a program in phases on the packed rows of all instances.

Row-wise phases run in blocks of rows (see `_ragged.row_phase`), phases over instances by length, a
few instances at a time (see `_ragged.instance_phase`), phases by index on all rows at once (see
`_ragged.index_phase`). Loops run over what exists, so a program is compiled once for all
combinations of lengths. Nothing is padded from one instance to another. Instead of a loop for each
phase there may be one around all of them, over microbatches (see `_ragged.microbatches`).

Phases that do the same, such as those of the layers of a Transformer, are one function: it is
traced, differentiated and written down for XLA once, and called with the weights of each. XLA puts
the calls in line, and compiles loops and operations that are the same once.

Letters: `K` calls (instances, or parts of instances that run a program), `R` capacity of rows.
"""

import bisect
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var

from jedbatch._jaxpr.interpret import (
    any_performs,
    dependents,
    has_gradient,
    value_of,
)
from jedbatch._jaxpr.padding.axis_rules import TILE_ROWS
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._jaxpr.versions import Atom, OpenProgram
from jedbatch._kernel.target import CPU
from jedbatch._layout.bucketing import blocks_of
from jedbatch._program.arenas import row, take
from jedbatch._program.tables import TableLayout
from jedbatch._ragged.groups import slots_of
from jedbatch._ragged.index_phase import IndexPhase
from jedbatch._ragged.instance_phase import InstancePhase
from jedbatch._ragged.microbatch_loop import MicrobatchLoop
from jedbatch._ragged.microbatches import Microbatches, packed_places
from jedbatch._ragged.needed_rows import extents_of
from jedbatch._ragged.packing import (
    PackedBatch,
    RowCapacity,
    microbatch_form,
    ragged_axis,
    row_shape,
    table_form,
)
from jedbatch._ragged.phases import Phase, PhasedProgram
from jedbatch._ragged.row_phase import RowPhase
from jedbatch._ragged.shared_values import SharedValues
from jedbatch._support.types import Array


class PackedProgram:
    """A program in phases, ready to run on packed rows.

    Attributes:
      phased: the program.
      extents: of the rows it keeps, in the order of `RowCapacity.rows`.
      row_wise: the numbers of those that phases run over.

    What follows from operands behind `jax.lax.stop_gradient` alone is read without a derivative:
    there may be loops that have none.
    """

    def __init__(
        self, phased: PhasedProgram, key_of: Callable[[OpenProgram], Hashable] | None = None
    ):
        """Prepares a program.

        Args:
          phased: the program.
          key_of: from a program to a key that is equal for programs that are equal up to the names
            of variables; None if no phases are to be compared.
        """
        self.phased = phased
        self.extents = phased.extents
        self._symbol_of_extent = [
            str(e) if str(e) in phased.symbols else None for e in self.extents
        ]
        over = [phase.extent for phase in phased.phases]
        self.row_wise = [e for e, extent in enumerate(self.extents) if extent in over]
        runners: dict[Hashable, RowPhase | InstancePhase | IndexPhase] = {}
        self._runners: list[RowPhase | InstancePhase | IndexPhase] = []
        self._loops: dict[RowCapacity, MicrobatchLoop] = {}
        defined = {v for eqn in phased.before for v in eqn.outvars}
        defined.update(phased.jaxpr.constvars, phased.jaxpr.invars[: phased.num_shared])
        returned = [v for v in phased.jaxpr.outvars if isinstance(v, Var) and v in defined]
        read = [v for phase in phased.phases for v in phase.shared]
        self._shared = list(dict.fromkeys((*read, *returned)))
        equations = [e for e in phased.jaxpr.eqns if e.primitive.name != "stop_gradient"]
        program = phased.jaxpr.replace(eqns=equations)
        self._moving = dependents(program, phased.jaxpr.invars)
        given = phased.jaxpr.invars[: phased.num_shared]
        self._shared_values = SharedValues(
            phased.jaxpr.replace(invars=given, outvars=self._shared, eqns=phased.before),
            phased.consts,
        )
        for n, phase in enumerate(phased.phases):
            key: Hashable = n
            if key_of is not None and not phase.indexed:
                key = phase.extent, len(phase.shared), key_of(phased.program_of(phase))
            if key not in runners:
                runners[key] = _runner(phase)
            self._runners.append(runners[key])

    @property
    def distinct_phases(self) -> int:
        """The number of phases that are traced: those that are equal count once."""
        return len(set(map(id, self._runners)))

    def form(self, capacity: RowCapacity) -> TableLayout:
        """Returns the layout of the table of a minibatch."""
        symbols = len(self.phased.symbols)
        if capacity.microbatches > 1:
            return microbatch_form(capacity, symbols, self.returned_extents)
        return table_form(capacity, symbols)

    def row_counts(self, lengths: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Returns int[K] for each extent: the rows of every call."""
        calls = len(next(iter(lengths.values())))
        return [
            np.broadcast_to(np.maximum(0, extent_at(e, lengths)), (calls,))
            if symbol is None
            else lengths[symbol]
            for e, symbol in zip(self.extents, self._symbol_of_extent, strict=True)
        ]

    def table(
        self,
        capacity: RowCapacity,
        lengths: Mapping[str, np.ndarray],
        row_counts: Sequence[np.ndarray] | None = None,
        microbatches: Microbatches = (),
    ) -> np.ndarray:
        """Returns the int32 table of calls.

        Args:
          capacity: that it is for.
          lengths: the values of the symbols, int[calls] each.
          row_counts: of these lengths, if they are known.
          microbatches: the calls of each, if there may be several.
        """
        form = self.form(capacity)
        table = np.zeros(form.size, np.int32)
        row_counts = row_counts or self.row_counts(lengths)
        if capacity.microbatches > 1:
            form.view(table, "trips")[:] = len(microbatches)
            of_each = form.view(table, "microbatches")
            for m, members in enumerate(microbatches):
                own_lengths = {s: x[members] for s, x in lengths.items()}
                own_counts = [x[members] for x in row_counts]
                of_each[m] = self.table(capacity.of_one, own_lengths, own_counts)
            for e in self.returned_extents:
                rows = packed_places(row_counts[e], microbatches, capacity.rows[e])
                form.view(table, "packed", e)[: len(rows)] = rows
            return table
        of_symbols = form.view(table, "lengths")
        for i, symbol in enumerate(self.phased.symbols):
            values = lengths[symbol]
            calls = len(values)
            of_symbols[i, :calls] = values
            of_symbols[i, calls:] = values[0]
        form.view(table, "calls")[:] = calls
        longest = self.longest(lengths)
        form.view(table, "order")[:] = capacity.calls
        if capacity.slots:
            slots = slots_of(longest, capacity.groups)
            assert slots is not None  # there is a slot for every call
            form.view(table, "order")[slots] = np.arange(calls)
        else:
            order, trips = self._order(capacity, longest.tolist())
            form.view(table, "order")[: len(order)] = order
            form.view(table, "trips")[:] = trips
        for e, counts in enumerate(row_counts):
            total = int(counts.sum())
            starts = np.cumsum(counts) - counts
            form.view(table, "starts", e)[:calls] = starts
            call = form.view(table, "call", e)
            call[:total] = np.repeat(np.arange(calls), counts)
            call[total:] = call[max(0, total - 1)]
            form.view(table, "total", e)[:] = total
            blocks = capacity.blocks(e)
            if blocks is not None:
                form.view(table, "blocks", e)[:] = blocks_of(total, blocks)
        return table

    @functools.cached_property
    def returned_extents(self) -> tuple[int, ...]:
        """The numbers of the extents that results have."""
        extents = {e for v in self.phased.jaxpr.outvars for e in extents_of(v)}
        return tuple(e for e, extent in enumerate(self.extents) if extent in extents)

    def tables_of_each(self, capacity: RowCapacity, table: np.ndarray) -> list[np.ndarray]:
        """Returns the tables of microbatches, of which that of a minibatch consists."""
        if capacity.microbatches == 1:
            return [table]
        form = self.form(capacity)
        return list(form.view(table, "microbatches")[: int(form.view(table, "trips")[0])])

    def longest(self, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns int[K]: the greatest length of each call that phases over instances know."""
        calls = len(next(iter(lengths.values())))
        known = [lengths[s] for s in sorted(self.phased.padded)]
        if len(known) == 1:
            return known[0]
        return np.max(known, axis=0) if known else np.zeros(calls, np.int64)

    def kept_bytes(self, capacity: RowCapacity) -> int:
        """Returns the bytes of all packed rows that phases hand on to each other."""
        total = 0
        for v in (*self.phased.operands, *(v for p in self.phased.phases for v in p.writes)):
            axis = ragged_axis(v)
            if axis is not None:
                rows = capacity.rows[self.extents.index(v.aval.shape[axis])]
                total += rows * math.prod(row_shape(v)) * np.dtype(v.aval.dtype).itemsize
        return total

    @staticmethod
    def _order(capacity: RowCapacity, longest: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns which calls run one after the other, by length, and how often they do."""
        groups: list[list[int]] = [[] for _ in capacity.lengths]
        for call, length in enumerate(longest):
            groups[bisect.bisect_left(capacity.lengths, length)].append(call)
        order, trips = [], []
        for group, together in zip(groups, capacity.together, strict=True):
            trips.append(-(-len(group) // together))
            order += group + [capacity.calls] * (trips[-1] * together - len(group))
        return order, trips

    def try_out(self, shared: Sequence[jax.Array]) -> None:
        """Traces a run and its reverse, so that what cannot be run raises its error now.

        `shared` are the shapes of what all calls share.
        """
        narrowest = CPU.blocks.widths[0]  # blocks of other widths do the same
        rows, lengths = (narrowest,) * len(self.extents), (CPU.shortest, 2 * TILE_ROWS)
        capacity = RowCapacity(2, rows, lengths, True, CPU)
        table = jax.ShapeDtypeStruct((self.form(capacity).size,), np.int32)
        operands = []
        for v in self.phased.operands:
            lead = capacity.calls if ragged_axis(v) is None else narrowest
            operands.append(jax.ShapeDtypeStruct((lead, *row_shape(v)), v.aval.dtype))

        run = functools.partial(self.run, capacity)

        def slope(shared, operands, table):
            def inexact(shared, operands):
                results = run(shared, operands, table)
                return [x for x in results if has_gradient(x.dtype)]

            out, pull_back = jax.vjp(inexact, list(shared), list(operands))
            return pull_back(out)

        try:
            jax.eval_shape(slope, list(shared), operands, table)
        except (NotImplementedError, ValueError):  # of products and such loops JAX has no gradient
            if not any_performs(self.phased.jaxpr.eqns, "scatter-mul", "while"):
                raise
            jax.jit(run).lower(list(shared), operands, table)  # traces what types alone do not

    def run(
        self,
        capacity: RowCapacity,
        shared: Sequence[Array],
        operands: Sequence[Array],
        table: Array,
    ) -> list[Array]:
        """Returns the results: packed rows [R, ...] or [K, ...], by the kind of the result.

        Args:
          capacity: to compile for.
          shared: the values all calls share.
          operands: of all calls: packed rows where ragged, [K, ...] elsewhere.
          table: see `table`.
        """
        phased = self.phased
        known = self._shared_values.run(shared)
        if capacity.microbatches == 1:
            return self._run_phases(capacity, known, operands, table)
        if capacity not in self._loops:
            self._loops[capacity] = self._loop(capacity)
        results = self._loops[capacity].run(known, operands, table)
        for k, v in enumerate(phased.jaxpr.outvars):
            axis = ragged_axis(v)
            if axis is not None:
                e = self.extents.index(v.aval.shape[axis])
                packed = row(self.form(capacity), table, ("packed", e), start=0)
                results[k] = take(results[k], packed)
        return results

    def _loop(self, capacity: RowCapacity) -> MicrobatchLoop:
        """Returns what runs one microbatch after another."""
        phased = self.phased
        nothing: Any = None
        batch = PackedBatch(self.extents, phased.symbols, capacity, nothing)
        return MicrobatchLoop(
            functools.partial(self._run_phases, capacity.of_one),
            self.form(capacity),
            phased.jaxpr.outvars,
            batch,
            [eqn for phase in phased.phases for eqn in phase.equations],
        )

    def _run_phases(
        self,
        capacity: RowCapacity,
        known: Sequence[Array],
        operands: Sequence[Array],
        table: Array,
    ) -> list[Array]:
        """Returns the results of the phases; `known` are the values of `_shared`."""
        phased = self.phased
        env = dict(zip(self._shared, known, strict=True))
        defined = set(env)
        env.update(zip(phased.operands, operands, strict=True))
        batch = PackedBatch(self.extents, phased.symbols, capacity, table)
        for n, (phase, runner) in enumerate(zip(phased.phases, self._runners, strict=True)):
            shared_values, read = (
                [env[v] if v in self._moving else lax.stop_gradient(env[v]) for v in vs]
                for vs in (phase.shared, phase.reads)
            )
            results = runner.run(batch, shared_values, read, n)
            env.update(zip(phase.writes, results, strict=True))

        def returned(atom: Atom) -> Array:
            value = value_of(atom, env)
            if isinstance(atom, Var) and atom not in defined:
                return value
            # It is alike for all calls.
            return jnp.broadcast_to(value, (capacity.calls, *jnp.shape(value)))

        return list(map(returned, phased.jaxpr.outvars))


def _runner(phase: Phase) -> RowPhase | InstancePhase | IndexPhase:
    """Returns what runs a phase, and all that are equal to it."""
    if phase.indexed:
        return IndexPhase(phase)
    return InstancePhase(phase) if phase.extent is None else RowPhase(phase)
