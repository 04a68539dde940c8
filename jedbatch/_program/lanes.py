"""Running a kernel over lanes: forwards, backwards, and the gradients of its weights.

Lanes are nodes (see `_program.execute`) or rows of packed arrays (see `_ragged.row_phase`). They
differ in where operands and cotangents come from, and in where results go.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.faults import made_in
from jedbatch._jaxpr.unknown_numbers import Starts
from jedbatch._jaxpr.zeros import Sources, where_alive
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.vjp import KernelVjp
from jedbatch._kernel.weight_gradients import Tap
from jedbatch._layout.bucketing import Buckets
from jedbatch._program.arenas import broadcast_flags, slice_rows
from jedbatch._support.types import PyTree

Lane = int | jax.Array  # the first of some lanes
Values = Sequence[jax.Array | None]  # None for what there is none of, or nobody reads
StandIn = tuple[jax.Array, Sequence[jax.Array]]  # (whether some lane is alive, the rows of one)


def run_lanes(
    kernel: Kernel, consts: Values, operands: Values, width: int, keep_residuals: bool
) -> tuple[Values, Values]:
    """Returns (results, residuals) of some lanes.

    If residuals are not kept, whether a loop was stopped is in their place, where loops have a
    bound.
    """
    run: Callable = kernel.reverse.save if keep_residuals else kernel.forward_bounded
    with made_in(f"`{kernel.node_type}`"):
        return jax.vmap(run, in_axes=(None, 0), axis_size=width)(consts, operands)


def reverse_lanes(
    back: KernelVjp,
    consts: Values,
    prepared: tuple[Values, Starts],
    operands: Values,
    results: Values,
    saved: Values,
    cotangents: Values,
    alive: Mapping[int, jax.Array],
    width: int,
) -> tuple[Values, Values]:
    """Returns (cotangents of operands, rows for the taps) of some lanes; see `backward`."""
    run = jax.vmap(back.backward, in_axes=(None, None, 0, 0, 0, 0, 0), axis_size=width)
    with made_in(f"the derivative of `{back.kernel.node_type}`"):
        return run(consts, prepared, operands, results, saved, cotangents, alive)


@dataclass(frozen=True, eq=False)
class Lanes:
    """Lanes that a kernel ran over, from which the gradients of its weights are computed.

    Attributes:
      kernel: that ran.
      consts: it ran with.
      slots: what was saved of every lane, and what the sweep has put in its place.
      operands: from a lane and a width to the operands of lanes.
      alive: from some results, a lane and a width to bool[width]: where one has a cotangent.
      blocks: the widths by which lanes are run over; None for all at once.
      capacity: of lanes.
      more: from the number of a width and blocks of it that are done to whether there is one more.
      cotangents: from a tap, a lane and a width to its cotangents, if not from the slots.
    """

    kernel: Kernel
    consts: Values
    slots: Values
    operands: Callable[[Lane, int], Values]
    alive: Callable[[Sources, Lane, int], jax.Array]
    blocks: Buckets | None
    capacity: int
    more: Callable[[int, jax.Array], jax.Array]
    cotangents: Callable[[Tap, Lane, int], Sequence[jax.Array]] | None = None

    def add_gradients(self, total: Values) -> list[jax.Array | None]:
        """Returns gradients of consts, to which what all tapped operations contribute is added.

        In lanes where a cotangent does not exist, it and the rows may be anything.
        """
        taps = self.kernel.reverse.taps
        stand_ins = list(map(self.stand_in, taps))

        def block(width: int, lane: Lane, total: Values) -> Values:
            for tap, stand_in in zip(taps, stand_ins, strict=True):
                total = self.add_block(tap, stand_in, width, lane, total)
            return total

        found = each_block(self.blocks, self.capacity, self.more, block, list(total))
        return list(found)

    def stand_in(self, tap: Tap) -> StandIn | None:
        """Returns what takes the place of rows of no lane; None if rows of zeros do."""
        if tap.linear:
            return None
        # A row of zeros might not give zero; that of an alive lane will do.
        everywhere = functools.reduce(jnp.logical_or, self._alive(tap, 0, self.capacity))
        return everywhere.any(), self._rows(tap, jnp.argmax(everywhere), 1)

    def add_block(
        self, tap: Tap, stand_in: StandIn | None, width: int, lane: Lane, total: Values
    ) -> list[jax.Array | None]:
        """Returns gradients of consts, to which those of `width` lanes from `lane` on are added.

        `stand_in` is that of the tap.
        """
        alive = self._alive(tap, lane, width)
        rows, given = self._rows(tap, lane, width), self._cotangents(tap, lane, width)
        if self.kernel.in_loops:
            found = tap.sum_of_block(self.consts, alive[0], rows, given[0])
            if found is not None:
                added_up = {c: total[c] + x for c, x in zip(tap.consts, found, strict=True)}
                return [added_up.get(c, x) for c, x in enumerate(total)]
        triples = zip(alive, given, tap.shapes, strict=True)
        cotangent_rows = [
            where_alive(broadcast_flags(flags, x), x).reshape(len(x), *shape)
            for flags, x, shape in triples
        ]
        live = functools.reduce(jnp.logical_or, alive)
        other_rows = [jnp.zeros_like(x) for x in rows] if stand_in is None else stand_in[1]
        rows = [
            jnp.where(broadcast_flags(live, x), x, y) for x, y in zip(rows, other_rows, strict=True)
        ]
        total, consts = list(total), self.consts
        try:
            if stand_in is None:
                added = functools.partial(tap.added, [total[c] for c in tap.consts], consts)
                gradients = added(rows, cotangent_rows, alive, all_lanes=self.blocks is None)
            else:
                found = tap.gradient(consts, rows, cotangent_rows, alive)
                pairs = zip(tap.consts, found, strict=True)
                gradients = [total[c] + where_alive(stand_in[0], x) for c, x in pairs]
        except Exception as error:
            error.add_note(
                "This happened while results were differentiated with respect to what all "
                f"instances share: they depend on it by `{self.kernel.node_type}`. If no gradient "
                "is wanted through it, write `jax.lax.stop_gradient` around it."
            )
            raise
        for c, x in zip(tap.consts, gradients, strict=True):
            total[c] = x
        return total

    def _alive(self, tap: Tap, lane: Lane, width: int) -> list[jax.Array]:
        return [self.alive(sources, lane, width) for sources in tap.sources]

    def _rows(self, tap: Tap, lane: Lane, width: int) -> list[jax.Array]:
        """Returns the rows that the tapped operation met."""
        num_saved = len(self.kernel.reverse.saved)
        saved = [slice_rows(x, lane, width) for x in self.slots[:num_saved]]
        return jax.vmap(tap.rows, axis_size=width)(self.operands(lane, width), saved)

    def _cotangents(self, tap: Tap, lane: Lane, width: int) -> Sequence[jax.Array]:
        """Returns the rows that came back to the tapped operation."""
        if self.cotangents is not None:
            return self.cotangents(tap, lane, width)
        places = [self.kernel.reverse.rooms[c] for c in tap.cotangents]
        return [slice_rows(self.slots[place], lane, width) for place in places]


def each_block(
    buckets: Buckets | None,
    lanes: int,
    more: Callable[[int, jax.Array], jax.Array],
    block: Callable,
    state: PyTree,
) -> Any:
    """Runs `block(width, lane, state)` for block after block of consecutive lanes, wide ones first.

    Args:
      buckets: the widths of blocks; None if all lanes are one block.
      lanes: capacity of lanes.
      more: from the number of a width and blocks of it that are done to whether there is one more.
      block: see above.
      state: before the first block.

    Returns:
      The state after the last block.
    """
    if buckets is None:
        return block(lanes, 0, state)
    first = jnp.int32(0)
    for i, width in reversed([(i, w) for i, w in enumerate(buckets.widths) if w <= lanes]):

        def is_left(carry: Any, i: int = i) -> jax.Array:
            return more(i, carry[0])

        def step(carry: Any, width: int = width) -> Any:
            done, state, first = carry
            return done + 1, block(width, first, state), first + width

        _, state, first = lax.while_loop(is_left, step, (jnp.int32(0), state, first))
    return state
