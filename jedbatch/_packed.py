"""Running a program in phases on the rows of all instances, one after the other.

The rows of an array [n, ...] of all instances are *packed*: instance after instance, with nothing
in between. How many there are is data. An array has room for more, and loops run over the rows that
exist: row-wise phases in blocks of 512, 64 and 8 rows, so that at most seven rows are computed that
nobody reads; phases over instances by length, a few instances at a time, each in room for 8, 16,
32, … rows. So a program is compiled once for all combinations of lengths.

    lengths         3, 1, 2
    packed rows     a0 a1 a2 b0 c0 c1 ·  ·        first rows 0, 3, 4
    over rows       [block of 8            ]
    over instances  [a0 a1 a2 · ] [b0 · · · ] [c0 c1 · · ]

A row phase is a kernel whose lanes are rows (see `_cells`): its weights' gradients are taken from
all rows at once. The reverse of a phase over instances computes the phase again, so that nothing
quadratic in a length outlives the few instances at hand.

Letters: `K` calls (instances, or parts of instances that run a program), `R` room for rows.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._along import is_look_up
from jedbatch._cells import Kernel, differentiable
from jedbatch._execute import cut, each_block, put, row, take, tap_gradient
from jedbatch._extents import extent_at, ragged_axes
from jedbatch._graph import NodeType, ValueType
from jedbatch._jaxpr import has_gradient, value_of
from jedbatch._ladder import BLOCKS
from jedbatch._lanes import Padded, run_row
from jedbatch._phases import Phase, Phased
from jedbatch._program import TableForm
from jedbatch._registry import Operation

TOGETHER = 256  # padded rows of the instances that run at the same time
SHORTEST = 8  # the least room for the rows of an instance


@dataclass(frozen=True)
class Room:
    """What a packed program is compiled for.

    Attributes:
      calls: capacity of calls, K.
      rows: capacity of rows, for each extent of the program.
      longest: the greatest length there is room for, a power of two.
      guarded: whether a length may be 0.
    """

    calls: int
    rows: tuple[int, ...]
    longest: int
    guarded: bool

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The rooms for the rows of an instance."""
        steps = (self.longest // SHORTEST).bit_length()
        return tuple(SHORTEST << i for i in range(steps))

    @functools.cached_property
    def together(self) -> tuple[int, ...]:
        """How many instances run at a time, for each of these rooms."""
        return tuple(min(max(1, TOGETHER // n), self.calls) for n in self.lengths)


class Packed:
    """A program in phases, ready to run on packed rows.

    Attributes:
      phased: the program.
      extents: of the rows it keeps, in the order of `Room.rows`.
    """

    def __init__(self, phased: Phased):
        self.phased = phased
        self.extents = phased.extents
        self._phases = [
            _Instances(p, self) if p.extent is None else _Rows(p, self) for p in phased.phases
        ]

    def form(self, room: Room) -> TableForm:
        """Where things are in the table of a minibatch."""
        form = TableForm()
        form.add(("lengths",), len(self.phased.symbols), room.calls)
        form.add(("order",), room.calls + sum(g - 1 for g in room.together))
        form.add(("trips",), len(room.lengths))
        form.add(("calls",), 1)
        for e, rows in enumerate(room.rows):
            form.add(("starts", e), room.calls)
            form.add(("call", e), rows)
            form.add(("total", e), 1)
            form.add(("blocks", e), len(BLOCKS.widths))
        return form

    def row_counts(self, lengths: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """int[K] for each extent: rows of every call."""
        calls = len(next(iter(lengths.values())))
        return [
            np.broadcast_to(np.maximum(0, extent_at(e, lengths)), (calls,)) for e in self.extents
        ]

    def table(self, room: Room, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        """The int32 table of calls whose symbols have these values, int[calls] each."""
        form = self.form(room)
        table = np.zeros(form.size, np.int32)
        stacked = np.stack([lengths[s] for s in self.phased.symbols])
        calls = stacked.shape[1]
        form.view(table, "lengths")[:, :calls] = stacked
        form.view(table, "lengths")[:, calls:] = stacked[:, :1]
        form.view(table, "calls")[:] = calls
        order = form.view(table, "order")
        order[:] = room.calls
        longest = stacked.max(axis=0)
        first = 0
        for c, (most, group) in enumerate(zip(room.lengths, room.together, strict=True)):
            mine = np.flatnonzero((longest <= most) & (longest > (most // 2 if c else -1)))
            trips = -(-len(mine) // group)
            form.view(table, "trips")[c] = trips
            order[first : first + len(mine)] = mine
            first += trips * group
        for e, counts in enumerate(self.row_counts(lengths)):
            total = int(counts.sum())
            starts = np.cumsum(counts) - counts
            form.view(table, "starts", e)[:calls] = starts
            call = form.view(table, "call", e)
            call[:total] = np.repeat(np.arange(calls), counts)
            call[total:] = call[max(0, total - 1)]
            form.view(table, "total", e)[:] = total
            form.view(table, "blocks", e)[:] = BLOCKS.cover(np.array([total]))[0]
        return table

    def run(
        self, room: Room, shared: Sequence[Any], operands: Sequence[Any], table: Any
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
        env.update(zip(phased.operands, operands, strict=True))
        here = _Here(self, room, self.form(room), table)
        for phase in self._phases:
            env.update(zip(phase.phase.writes, phase.run(here, env), strict=True))
        return [
            self._returned(here, v, env.get(v) if v in env else value_of(v, env))
            for v in phased.jaxpr.outvars
        ]

    def _returned(self, here: "_Here", variable: Any, value: Any) -> Any:
        if variable in here.shared_variables:  # the same for every call
            return jnp.broadcast_to(value, (here.room.calls, *jnp.shape(value)))
        return value


class _Here:
    """What the phases of one run have in common.

    Attributes:
      room, form, table: of this minibatch.
    """

    def __init__(self, packed: Packed, room: Room, form: TableForm, table: Any):
        self.packed, self.room, self.form, self.table = packed, room, form, table
        phased = packed.phased
        known = [*phased.jaxpr.constvars, *phased.jaxpr.invars[: phased.num_shared]]
        known += [v for eqn in phased.before for v in eqn.outvars]
        self.shared_variables = {v for v in phased.jaxpr.outvars if v in set(known)}

    def get(self, *name: Any, start: Any = 0, size: int = 0) -> Any:
        """A part of the table."""
        return row(self.form, self.table, name, start=start, size=size)

    def index(self, extent: Any) -> int:
        """The number of an extent."""
        return self.packed.extents.index(extent)

    def total(self, e: int) -> Any:
        """Rows there are of an extent."""
        return self.get("total", e)[0]

    def lengths(self) -> dict[str, Any]:
        """int32[K], what every call has for each symbol."""
        symbols = self.packed.phased.symbols
        return {
            s: row(self.form, self.table, ("lengths",), i, start=0, size=self.room.calls)
            for i, s in enumerate(symbols)
        }

    def positions(self, e: int) -> Any:
        """int32[R], the place of every row in its instance."""
        starts = take(self.get("starts", e), self.get("call", e))
        return jnp.arange(self.room.rows[e], dtype=jnp.int32) - starts


def _ragged_axis(variable: Any) -> int | None:
    """The ragged axis of a variable that is kept; None if it has none."""
    axes = ragged_axes(variable.aval.shape)
    return axes[0] if axes else None


def _row_shape(variable: Any) -> tuple[int, ...]:
    """The shape of a variable without its ragged axis."""
    axis = _ragged_axis(variable)
    return tuple(d for a, d in enumerate(variable.aval.shape) if a != axis)


def _spread(flags: Any, x: Any) -> Any:
    """Flags [width] in as many dimensions as x has."""
    return flags.reshape(-1, *[1] * (x.ndim - 1))


def _without_cotangents(values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents of those values that have one, None for the others."""
    return [c if has_gradient(x.dtype) else None for x, c in zip(values, cotangents, strict=True)]


# --- phases over rows ------------------------------------------------------------------------


class _Rows:
    """A phase over rows: a kernel whose lanes are rows.

    Its operands are, of each row, what the phase reads; its position, if that matters; and
    extents that it needs as numbers.
    """

    def __init__(self, phase: Phase, packed: Packed):
        self.phase = phase
        self._extents = [
            e.params["dim"] for e in phase.equations if e.primitive.name == "dim_as_value"
        ]
        self._placed = any(is_look_up(e) or e.primitive.name == "iota" for e in phase.equations)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The program of one row."""
        phase = self.phase
        operands = [ValueType(_row_shape(v), v.aval.dtype) for v in phase.reads]
        operands += [ValueType((), np.dtype(np.int32))] * (len(self._extents) + self._placed)
        results = tuple(ValueType(_row_shape(v), v.aval.dtype) for v in phase.writes)
        jaxpr = jax.make_jaxpr(self._lane)(
            [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in phase.shared],
            [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands],
        )
        shared = tuple(range(len(phase.shared)))
        operation = Operation(("rows", id(phase)), jaxpr)
        return Kernel(NodeType("rows", operation, tuple(operands), shared, results))

    def _lane(self, shared: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        phase = self.phase
        env = dict(zip(phase.shared, shared, strict=True))
        for v, x in zip(phase.reads, operands, strict=False):
            axis = _ragged_axis(v)
            env[v] = x if axis is None else lax.expand_dims(x, (axis,))
        extents = iter(operands[len(phase.reads) :])
        position = operands[-1] if self._placed else None
        for eqn in phase.equations:
            if eqn.primitive.name == "dim_as_value":
                env[eqn.outvars[0]] = next(extents).astype(eqn.outvars[0].aval.dtype)
                continue
            values = [value_of(v, env) for v in eqn.invars]
            env.update(zip(eqn.outvars, run_row(eqn, values, position), strict=True))
        return [lax.squeeze(env[v], (_ragged_axis(v),)) for v in phase.writes]

    def run(self, here: _Here, env: dict[Any, Any]) -> list[Any]:
        """What the phase writes, packed."""
        phase = self.phase
        e = here.index(phase.extent)
        lengths = here.lengths()
        operands = [env[v] for v in phase.reads]
        operands += [jnp.asarray(extent_at(d, lengths), jnp.int32) for d in self._extents]
        by_row = [_ragged_axis(v) is not None for v in phase.reads] + [False] * len(self._extents)
        if self._placed:
            operands.append(here.positions(e))
            by_row.append(True)
        consts = self.kernel.prologue([env[v] for v in phase.shared])
        return _rows_function(self.kernel, here.room.rows[e], tuple(by_row))(
            consts, operands, here.get("call", e), here.total(e), here.get("blocks", e)
        )


def _rows_function(kernel: Kernel, room: int, by_row: tuple[bool, ...]) -> Any:
    """`run(consts, operands, call, total, trips)`: the results of a kernel for every row.

    Args:
      kernel: its lanes are rows.
      room: capacity of rows, R.
      by_row: for each operand, whether it has a row for every row, [R, ...], or for every call.
    """

    def operands_of(operands, call, total, lane, width):
        there = lane + jnp.arange(width) < total
        calls = cut(call, lane, width)
        found = []
        for x, rows in zip(operands, by_row, strict=True):
            if not rows:
                found.append(take(x, calls))
                continue
            x = cut(x, lane, width)  # the first row of a block exists
            found.append(jnp.where(_spread(there, x), x, x[:1]))
        return found

    def forwards(consts, operands, call, total, trips, saving):
        kinds = [(t.shape, t.dtype) for t in kernel.results]
        kinds += kernel.reverse.saved if saving else ()
        run = kernel.reverse.save if saving else kernel.forward

        def block(width, lane, state):
            mine = operands_of(operands, call, total, lane, width)
            out = jax.vmap(run, in_axes=(None, 0), axis_size=width)(consts, mine)
            rows = [*out[0], *out[1]] if saving else out
            return [put(x, y, lane) for x, y in zip(state, rows, strict=True)]

        empty = [jnp.zeros((room, *shape), dtype) for shape, dtype in kinds]
        state = each_block(BLOCKS, room, trips, block, empty)
        return state[: len(kernel.results)], state[len(kernel.results) :]

    @jax.custom_vjp
    def run(consts, operands, call, total, trips):
        return forwards(consts, operands, call, total, trips, False)[0]

    def save(consts, operands, call, total, trips):
        results, saved = forwards(consts, operands, call, total, trips, True)
        return results, (consts, operands, call, total, trips, results, saved)

    def reverse(kept, given):
        consts, operands, call, total, trips, results, saved = kept
        back = kernel.reverse
        prepared = back.prepare(consts)
        moving = [j for j, t in enumerate(kernel.operands) if differentiable(t)]

        def block(width, lane, state):
            sums, rooms = list(state[0]), list(state[1])
            there = lane + jnp.arange(width) < total
            mine = operands_of(operands, call, total, lane, width)
            made = [cut(x, lane, width) for x in results]
            old = [cut(x, lane, width) for x in rooms[: len(back.saved)]]
            cotangents = []
            for t, x in zip(kernel.results, given, strict=True):
                x = cut(x, lane, width) if differentiable(t) else None
                cotangents.append(x if x is None else jnp.where(_spread(there, x), x, 0))
            run = jax.vmap(back.backward, in_axes=(None, None, 0, 0, 0, 0), axis_size=width)
            sent, rows = run(consts, prepared, mine, made, old, cotangents)
            for k, (j, x) in enumerate(zip(moving, sent, strict=True)):
                if by_row[j]:
                    sums[k] = put(sums[k], x, lane)
                else:
                    sums[k] = sums[k].at[cut(call, lane, width)].add(x)
            for place, x in zip(back.rooms, rows, strict=True):
                rooms[place] = put(rooms[place], x, lane)
            return sums, rooms

        sums = [jnp.zeros_like(operands[j]) for j in moving]
        rooms = [*saved, *(jnp.zeros((room, *shape), dtype) for shape, dtype in back.extra)]
        sums, rooms = each_block(BLOCKS, room, trips, block, (sums, rooms))
        gradients = [jnp.zeros(*kind) for kind in kernel.const_kinds]
        for tap in back.taps:

            def rows_of(lane, width, tap=tap):
                mine = operands_of(operands, call, total, lane, width)
                old = [cut(x, lane, width) for x in rooms[: len(back.saved)]]
                return jax.vmap(tap.rows, axis_size=width)(mine, old)

            def cotangents_of(lane, width, tap=tap):
                return [cut(rooms[back.rooms[c]], lane, width) for c in tap.cotangents]

            gradients = tap_gradient(
                tap, consts, rows_of, cotangents_of, room, total, trips, gradients
            )
        of_operands: list[Any] = [None] * len(operands)
        for j, x in zip(moving, sums, strict=True):
            of_operands[j] = x
        return _without_cotangents(consts, gradients), of_operands, None, None, None

    run.defvjp(save, reverse)
    return run


# --- phases over instances ---------------------------------------------------------------------


class _Instances:
    """A phase over instances: a few of about the same length at a time, in room for their rows."""

    def __init__(self, phase: Phase, packed: Packed):
        self.phase = phase
        self.is_ragged = any(
            ragged_axes(v.aval.shape)
            for eqn in phase.equations
            for v in (*eqn.invars, *eqn.outvars)
            if hasattr(v.aval, "shape")
        )

    def run(self, here: _Here, env: dict[Any, Any]) -> list[Any]:
        """What the phase writes: packed, or [K, ...]."""
        shared = [env[v] for v in self.phase.shared]
        operands = [env[v] for v in self.phase.reads]
        return self._function(here)(shared, operands, here.table)

    def _lane(self, room: Room, most: int, lengths, shared, operands) -> list[Any]:
        """One instance in room for its rows."""
        phase = self.phase
        sizes = dict.fromkeys(lengths, most)
        padded = Padded(sizes, lengths, room.guarded)
        env = dict(zip(phase.shared, shared, strict=True))
        for v, x in zip(phase.reads, operands, strict=True):
            axis = _ragged_axis(v)
            env[v] = x if axis is None else jnp.moveaxis(x, 0, axis)
        for eqn in phase.equations:
            values = [value_of(v, env) for v in eqn.invars]
            env.update(zip(eqn.outvars, padded.run(eqn, values), strict=True))
        return [
            env[v] if _ragged_axis(v) is None else jnp.moveaxis(env[v], _ragged_axis(v), 0)
            for v in phase.writes
        ]

    def _function(self, here: _Here) -> Any:
        """`run(shared, operands, table)` with the reverse rule of the phase."""
        phase, room, packed = self.phase, here.room, here.packed
        moving_shared = [i for i, v in enumerate(phase.shared) if has_gradient(v.aval.dtype)]
        moving = [i for i, v in enumerate(phase.reads) if has_gradient(v.aval.dtype)]
        returned = [i for i, v in enumerate(phase.writes) if has_gradient(v.aval.dtype)]

        def rows_of(here, variable, calls, lengths, most):
            """(int32[G, most], bool[G, most]): rows of calls, and which of them exist."""
            extent = variable.aval.shape[_ragged_axis(variable)]
            e = here.index(extent)
            size = extent_at(extent, dict.fromkeys(packed.phased.symbols, most))
            index = lax.iota(jnp.int32, size)[None]
            counts = jnp.maximum(extent_at(extent, lengths), 0)
            counts = jnp.broadcast_to(counts, calls.shape)[:, None]
            rows = take(here.get("starts", e), calls)[:, None] + jnp.minimum(index, counts - 1)
            last = jnp.maximum(here.total(e) - 1, 0)
            return jnp.clip(rows, 0, last), index < counts

        def gathered(here, variable, x, calls, lengths, most):
            if _ragged_axis(variable) is None:
                return take(x, calls)
            return take(x, rows_of(here, variable, calls, lengths, most)[0])

        def group(here, first, size):
            """(calls, which of them exist, their lengths) from a place of the order on."""
            calls = here.get("order", start=first, size=size)
            alive = calls < room.calls
            calls = jnp.where(alive, calls, calls[0])  # the first of a group exists
            return calls, alive, {s: take(x, calls) for s, x in here.lengths().items()}

        def lanes(most, lengths, shared, blocks):
            lane = functools.partial(self._lane, room, most)
            return jax.vmap(lane, in_axes=(0, None, 0))(lengths, shared, blocks)

        def scattered(here, variable, x, new, calls, alive, lengths, most, add):
            """X with what a group has computed."""
            if _ragged_axis(variable) is None:
                where = jnp.where(alive, calls, len(x))
            else:
                rows, there = rows_of(here, variable, calls, lengths, most)
                where = jnp.where(there & alive[:, None], rows, len(x))
            at = x.at[where]
            return (at.add if add else at.set)(new.astype(x.dtype), mode="drop")

        def each_group(here, state, body):
            """Runs `body(most, first, size, state)` for every group of instances."""
            first = jnp.int32(0)
            trips = here.get("trips")
            for c, (most, size) in enumerate(zip(room.lengths, room.together, strict=True)):
                state, first = lax.fori_loop(
                    0,
                    trips[c],
                    lambda _, s, most=most, size=size: (body(most, s[1], size, s[0]), s[1] + size),
                    (state, first),
                )
            return state

        def empty(here, variables):
            found = []
            for v in variables:
                axis = _ragged_axis(v)
                lead = room.calls if axis is None else room.rows[here.index(v.aval.shape[axis])]
                found.append(jnp.zeros((lead, *_row_shape(v)), v.aval.dtype))
            return found

        @jax.custom_vjp
        def run(shared, operands, table):
            here = _Here(packed, room, packed.form(room), table)

            def body(most, first, size, state):
                calls, alive, lengths = group(here, first, size)
                blocks = [
                    gathered(here, v, x, calls, lengths, most)
                    for v, x in zip(phase.reads, operands, strict=True)
                ]
                made = lanes(most, lengths, shared, blocks)
                return [
                    scattered(here, v, x, new, calls, alive, lengths, most, False)
                    for v, x, new in zip(phase.writes, state, made, strict=True)
                ]

            return each_group(here, empty(here, phase.writes), body)

        def save(shared, operands, table):
            return run(shared, operands, table), (shared, operands, table)

        def reverse(kept, given):
            shared, operands, table = kept
            here = _Here(packed, room, packed.form(room), table)

            def body(most, first, size, state):
                of_shared, of_operands = state
                calls, alive, lengths = group(here, first, size)
                blocks = [
                    gathered(here, v, x, calls, lengths, most)
                    for v, x in zip(phase.reads, operands, strict=True)
                ]

                def forward(some_shared, some_blocks):
                    full, rest = list(shared), list(blocks)
                    for i, x in zip(moving_shared, some_shared, strict=True):
                        full[i] = x
                    for i, x in zip(moving, some_blocks, strict=True):
                        rest[i] = x
                    made = lanes(most, lengths, full, rest)
                    return [made[i] for i in returned]

                _, pull_back = jax.vjp(
                    forward, [shared[i] for i in moving_shared], [blocks[i] for i in moving]
                )
                cotangents = []
                for i in returned:
                    v = phase.writes[i]
                    x = gathered(here, v, given[i], calls, lengths, most)
                    there = alive
                    if _ragged_axis(v) is not None:
                        there = rows_of(here, v, calls, lengths, most)[1] & alive[:, None]
                    there = there.reshape(*there.shape, *[1] * (x.ndim - there.ndim))
                    cotangents.append(jnp.where(there, x, 0))
                sent_shared, sent = pull_back(cotangents)
                of_shared = [a + b for a, b in zip(of_shared, sent_shared, strict=True)]
                of_operands = [
                    scattered(here, phase.reads[i], x, new, calls, alive, lengths, most, True)
                    for i, x, new in zip(moving, of_operands, sent, strict=True)
                ]
                return of_shared, of_operands

            start = (
                [jnp.zeros_like(shared[i]) for i in moving_shared],
                [jnp.zeros_like(operands[i]) for i in moving],
            )
            of_shared, of_operands = each_group(here, start, body)
            all_shared: list[Any] = [None] * len(shared)
            for i, x in zip(moving_shared, of_shared, strict=True):
                all_shared[i] = x
            all_operands: list[Any] = [None] * len(operands)
            for i, x in zip(moving, of_operands, strict=True):
                all_operands[i] = x
            return all_shared, all_operands, None

        run.defvjp(save, reverse)
        return run
