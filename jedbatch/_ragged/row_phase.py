"""Phases over rows: what is done to every row alike, for the rows of all instances.

Such a phase is a kernel whose lanes are rows (see `_kernel.kernel`), so that its weights' gradients
are taken from all rows at once. It runs in blocks of a few widths (`Target.blocks`: 512, 64 and 8
rows on a CPU); how many of each there are is data, so few rows are computed that nobody reads.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.interpret import value_of
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.vjp import Reverse, differentiable
from jedbatch._layout.bucketing import Ladder
from jedbatch._program.arenas import cut, put, spread, take
from jedbatch._program.execute import each_block, tap_gradient
from jedbatch._ragged.axis_rules import is_look_up
from jedbatch._ragged.lane_rules import run_row
from jedbatch._ragged.packing import Here, ragged_axis, row_shape
from jedbatch._ragged.phases import Phase
from jedbatch._record.registry import Operation


class OverRows:
    """A phase over rows: a kernel whose lanes are rows.

    Its operands are, of each row, what the phase reads; its position, if that matters; and
    extents that it needs as numbers.
    """

    def __init__(self, phase: Phase):
        self.phase = phase
        self._extents = [
            e.params["dim"] for e in phase.equations if e.primitive.name == "dim_as_value"
        ]
        self._placed = any(is_look_up(e) or e.primitive.name == "iota" for e in phase.equations)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The program of one row."""
        phase = self.phase
        operands = [ValueType(row_shape(v), v.aval.dtype) for v in phase.reads]
        operands += [ValueType((), np.dtype(np.int32))] * (len(self._extents) + self._placed)
        results = tuple(ValueType(row_shape(v), v.aval.dtype) for v in phase.writes)
        jaxpr = jax.make_jaxpr(self._lane)(
            [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in phase.shared],
            [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands],
        )
        shared = tuple(range(len(phase.shared)))
        operation = Operation(("rows", phase), jaxpr)
        return Kernel(NodeType("rows", operation, tuple(operands), shared, results))

    def _lane(self, shared: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        phase = self.phase
        env = dict(zip(phase.shared, shared, strict=True))
        env.update(zip(phase.reads, operands, strict=False))
        extents = iter(operands[len(phase.reads) :])
        position = operands[-1] if self._placed else None
        for eqn in phase.equations:
            if eqn.primitive.name == "dim_as_value":
                env[eqn.outvars[0]] = next(extents).astype(eqn.outvars[0].aval.dtype)
                continue
            values = [value_of(v, env) for v in eqn.invars]
            env.update(zip(eqn.outvars, run_row(eqn, values, position), strict=True))
        return [env[v] for v in phase.writes]

    def run(self, here: Here, env: dict[Any, Any]) -> list[Any]:
        """What the phase writes, packed."""
        phase = self.phase
        e = here.index(phase.extent)
        lengths = here.lengths()
        operands = [env[v] for v in phase.reads]
        operands += [jnp.asarray(extent_at(d, lengths), jnp.int32) for d in self._extents]
        by_row = [ragged_axis(v) is not None for v in phase.reads] + [False] * len(self._extents)
        if self._placed:
            operands.append(here.positions(e))
            by_row.append(True)
        consts = self.kernel.prologue([env[v] for v in phase.shared])
        room = here.room
        return rows_function(self.kernel, room.rows[e], room.blocks, tuple(by_row))(
            consts, operands, here.get("call", e), here.total(e), here.trips(e)
        )


def rows_function(
    kernel: Kernel, room: int, blocks: Ladder | None, by_row: tuple[bool, ...]
) -> Any:
    """`run(consts, operands, call, total, trips)`: the results of a kernel for every row.

    Args:
      kernel: its lanes are rows.
      room: capacity of rows, R.
      blocks: how rows are cut into blocks; None if they are not.
      by_row: for each operand, whether it has a row for every row, [R, ...], or for every call.

    Rows in the room for them that do not exist repeat the last one if they are not cut into blocks,
    and may be anything otherwise.
    """

    def operands_of(operands, call, total, lane, width):
        there = lane + jnp.arange(width) < total
        calls = cut(call, lane, width)
        found = []
        for x, rows in zip(operands, by_row, strict=True):
            if not rows:
                found.append(take(x, calls))
                continue
            x = cut(x, lane, width)
            if blocks is not None:  # the first row of a block exists
                x = jnp.where(spread(there, x), x, x[:1])
            found.append(x)
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
        state = each_block(blocks, room, trips, block, empty)
        return state[: len(kernel.results)], state[len(kernel.results) :]

    @jax.custom_vjp
    def run(consts, operands, call, total, trips):
        return forwards(consts, operands, call, total, trips, saving=False)[0]

    def save(*primals):
        primals = custom_vjp_primal_tree_values(primals)
        consts, operands, call, total, trips = primals
        results, saved = forwards(consts, operands, call, total, trips, saving=True)
        return results, (*primals, results, saved)

    def reverse(kept, given):
        consts, operands, call, total, trips, results, saved = kept
        back = kernel.reverse
        prepared = back.prepare(consts)
        moving = [j for j, t in enumerate(kernel.operands) if differentiable(t)]
        exists = [not isinstance(x, SymbolicZero) for x in given]
        if any(exists[s] for s in back.refused):
            Reverse(kernel, list(back.refused))  # raises the error of JAX

        def block(width, lane, state):
            sums, rooms = list(state[0]), list(state[1])
            there = lane + jnp.arange(width) < total
            mine = operands_of(operands, call, total, lane, width)
            made = [cut(x, lane, width) for x in results]
            old = [cut(x, lane, width) for x in rooms[: len(back.saved)]]
            cotangents: list[Any] = [None] * len(given)
            alive = {}
            for s in back.returned:
                alive[s] = there & exists[s]
                x = cut(given[s], lane, width) if exists[s] else zeros_of(s, width)
                cotangents[s] = where_alive(spread(alive[s], x), x)
            run = jax.vmap(back.backward, in_axes=(None, None, 0, 0, 0, 0, 0), axis_size=width)
            sent, rows = run(consts, prepared, mine, made, old, cotangents, alive)
            for k, (j, x) in enumerate(zip(moving, sent, strict=True)):
                if not any(exists[s] for s in back.flow[j]):
                    continue
                x = where_alive(spread(there, x), x)
                if by_row[j]:
                    sums[k] = put(sums[k], x, lane)
                else:
                    sums[k] = sums[k].at[cut(call, lane, width)].add(x)
            for place, x in zip(back.rooms, rows, strict=True):
                rooms[place] = put(rooms[place], x, lane)
            return sums, rooms

        def zeros_of(s, width):
            return jnp.zeros((width, *kernel.results[s].shape), kernel.results[s].dtype)

        sums = [jnp.zeros_like(operands[j]) for j in moving]
        rooms = [*saved, *(jnp.zeros((room, *shape), dtype) for shape, dtype in back.extra)]
        sums, rooms = each_block(blocks, room, trips, block, (sums, rooms))
        gradients: list[Any] = [None] * kernel.num_consts
        for tap in back.taps:
            if not any(exists[s] for some in tap.sources for s in some):
                continue
            for c in tap.consts:
                if gradients[c] is None:
                    gradients[c] = jnp.zeros(*kernel.const_kinds[c])

            def rows_of(lane, width, tap=tap):
                mine = operands_of(operands, call, total, lane, width)
                old = [cut(x, lane, width) for x in rooms[: len(back.saved)]]
                return jax.vmap(tap.rows, axis_size=width)(mine, old)

            def cotangents_of(lane, width, tap=tap):
                return [cut(rooms[back.rooms[c]], lane, width) for c in tap.cotangents]

            def alive_of(lane, width, tap=tap):
                there = lane + jnp.arange(width) < total
                return [there & any(exists[s] for s in some) for some in tap.sources]

            gradients = tap_gradient(
                tap, consts, rows_of, cotangents_of, alive_of, blocks, room, trips, gradients
            )
        of_operands: list[Any] = [None] * len(operands)
        for j, x in zip(moving, sums, strict=True):
            of_operands[j] = x if any(exists[s] for s in back.flow[j]) else None
        return gradients, of_operands, None, None, None

    run.defvjp(save, reverse, symbolic_zeros=True)
    return run
