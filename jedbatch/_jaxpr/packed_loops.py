"""Loops with little work on a CPU: some lanes at a time, exchanged inside of one kernel.

A step of a loop with little work takes as long as its kernels take to begin, so lanes that are done
are not worth exchanging, unless the exchange costs next to nothing and so does a step of few lanes.
Both hold where the loop over steps and the loop that exchanges lanes are one kernel (see
`single_kernel`): a step of sixteen lanes then takes about a sixteenth of the time of one of 256,
and an exchange a microsecond or less.

At first all lanes run in lock step, as where all take as many steps no other order is faster. As
one who rents until the rents add up to the price, and then buys, they do so until what was computed
for lanes that were done is as much as exchanging the others costs: whatever comes, they lose at
most twice as much as they would if that were known. Then these run `PLACES` at a time: as soon as
one is done, what it carries is written to where it was, and the next that waits takes its place.

Source: A. Karlin, M. Manasse, L. Rudolph, D. Sleator. Competitive Snoopy Caching. Algorithmica,
1988: renting until the rents add up to the price.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.lane_loops import (
    LoopOfLanes,
    as_function,
    like_last,
    one_of,
    where_lanes,
    with_copies,
)
from jedbatch._jaxpr.lane_steps import is_counting, tell
from jedbatch._jaxpr.single_kernel import (
    in_kernel,
    reading,
    rows_at,
    runs_in_kernel,
    where_one,
    with_rows_at,
    with_sums,
)
from jedbatch._support.types import Array

PLACES = 16  # lanes that run at the same time, once not all do
FEWEST = 4  # times as many lanes as places, for a loop to be packed
MOST_LANES = 1 << 12  # beyond which the cores of a CPU share a step of lock step
EXCHANGE = 8  # steps of a lane, as long as it takes to exchange one
LEAST_WORK = 1 / 32  # of a step of all lanes, in starts of steps, for a kernel to be worth making


def packs(size: int, body_work: int, step_work: float) -> bool:
    """Returns whether a loop is worth packing that can be one kernel.

    Args:
      size: how many lanes there are.
      body_work: floating-point operations of a step of a lane.
      step_work: those that are done while a step is started.
    """
    return FEWEST * PLACES <= size <= MOST_LANES and size * body_work >= LEAST_WORK * step_work


def in_lock_step(
    loop: LoopOfLanes,
    carry: Sequence[Array],
    goes_on: Array,
    waits: Callable[[Array, Array], Array],
) -> tuple[Array, list[Array], Array, Array | None]:
    """Runs all lanes in lock step as long as it is worth to wait.

    Args:
      loop: that runs.
      carry: carries at first, [N, ...] each.
      goes_on: bool[N], which lanes run.
      waits: from int32[], how many lanes go on, and f32[], how many steps of lanes were computed
        for those that were done, to bool[].

    Returns:
      (bool[N] which lanes go on, their carries, how many go on, int32[3] the steps, lanes and
      lanes needed, or None if nobody counts).
    """
    more, step, own = loop
    size = len(goes_on)

    def one_step(state: Any) -> Any:
        goes_on, carry, left, wasted, tally = state
        tally = _counted(tally, goes_on)
        carry = where_lanes(goes_on, step(own, carry), carry)
        goes_on = goes_on & more(own, carry)
        wasted = wasted + (size - left).astype(jnp.float32)
        return goes_on, carry, goes_on.sum(dtype=jnp.int32), wasted, tally

    tally = jnp.zeros(3, jnp.int32) if is_counting() else None
    state = goes_on, list(carry), goes_on.sum(dtype=jnp.int32), jnp.float32(0), tally
    state = lax.while_loop(lambda state: waits(state[2], state[3]), one_step, state)
    goes_on, ends, left, _, tally = state
    return goes_on, ends, left, tally


def _counted(tally: Array | None, goes_on: Array) -> Array | None:
    """Returns counts to which a step of some lanes was added."""
    if tally is None:
        return None
    needed = goes_on.sum(dtype=jnp.int32)
    return tally + jnp.stack([jnp.int32(1), jnp.int32(len(goes_on)), needed])


def exchanged(
    loop: LoopOfLanes,
    ends: Sequence[Array],
    left: Array,
    num_left: Array,
    counts: bool,
) -> tuple[list[Array], Array | None]:
    """Runs the lanes that go on, `PLACES` at a time, by operations that a kernel can have.

    Args:
      loop: whose programs a kernel can have.
      ends: what lanes carry, [N, ...] each.
      left: int32[N], the lanes that go on; N from `num_left` on.
      num_left: int32[], how many these are.
      counts: whether to count.

    Returns:
      (the carries [N, ...] at the end, int32[3] as `in_lock_step` counts).
    """
    more, step, own = loop
    size = len(ends[0])
    places = jnp.arange(PLACES, dtype=jnp.int32)

    def changes(state: Any) -> Array:
        """Returns bool[PLACES], where a lane is done that is not written, or one can come."""
        lane, goes_on, next_one, *_ = state
        return ~goes_on & ((lane < size) | (next_one < num_left))

    def exchange(state: Any) -> Any:
        lane, goes_on, next_one, mine, carry, ends = state
        place = jnp.where(changes(state), places, PLACES - 1).min()
        (old,), carried = rows_at([lane], place), rows_at(carry, place)
        row = jnp.minimum(old, size - 1)
        ends = with_rows_at(ends, where_one(old < size, carried, rows_at(ends, row)), row)
        comes = next_one < num_left
        (new,) = rows_at([left], jnp.minimum(next_one, size - 1))
        row = jnp.minimum(new, size - 1)
        carry = with_rows_at(carry, where_one(comes, rows_at(ends, row), carried), place)
        mine = with_rows_at(mine, where_one(comes, rows_at(own, row), rows_at(mine, place)), place)
        now = [jnp.where(comes, new, jnp.int32(size)), comes]
        lane, goes_on = with_rows_at([lane, goes_on], now, place)
        return lane, goes_on, next_one + comes.astype(jnp.int32), mine, carry, ends

    def exchange_all(state: Any) -> Any:
        return lax.while_loop(lambda state: changes(state).any(), exchange, state)

    def until_one_leaves(state: Any) -> Any:
        (lane, goes_on, next_one, mine, carry, ends), count = state

        def none_leaves(state: Any) -> Array:
            goes_on = state[0]
            return goes_on.all() | (goes_on.any() & (next_one >= num_left))

        def one_step(state: Any) -> Any:
            goes_on, carry, count = state
            count = _counted(count, goes_on)
            carry = where_lanes(goes_on, step(mine, carry), carry)
            return goes_on & more(mine, carry), carry, count

        goes_on, carry, count = lax.while_loop(none_leaves, one_step, (goes_on, carry, count))
        return exchange_all((lane, goes_on, next_one, mine, carry, ends)), count

    nobody = jnp.full(PLACES, size, jnp.int32), jnp.zeros(PLACES, bool), jnp.int32(0)
    first = [x[:PLACES] for x in own], [x[:PLACES] for x in ends], list(ends)
    count = jnp.zeros(3, jnp.int32) if counts else None
    state = exchange_all((*nobody, *first)), count
    state = lax.while_loop(lambda state: state[0][1].any(), until_one_leaves, state)
    (*_, written), count = state
    return list(written), count


class PackableLoop:
    """A loop with little work, which may be one that a kernel can run.

    Args:
      programs: its condition and its body, closed programs of one lane.
      num_cond: how many constants the condition has.
      consts: these, and those of the body: [N, ...] of lanes, or of all lanes.
      in_batched: which of them are of lanes.
    """

    def __init__(
        self,
        programs: tuple[Any, Any],
        num_cond: int,
        consts: Sequence[Array],
        in_batched: Sequence[bool],
    ):
        self._functions = tuple(map(as_function, programs))
        self._with_sums = tuple(as_function(with_sums(x)) for x in programs)
        self._num_cond, self._consts, self._in_batched = num_cond, consts, in_batched

    def _loop(self, functions: tuple[Callable, ...], consts: Sequence[Array]) -> LoopOfLanes:
        cond, body = functions
        return LoopOfLanes.of(cond, body, self._num_cond, consts, self._in_batched)

    def runs_in_kernel(self, start: Sequence[Array]) -> bool:
        """Returns whether the condition and a step can be parts of a kernel.

        Args:
          start: carries at first, [N, ...] each.
        """

        def both(consts: Sequence[Array], carry: Sequence[Array]) -> Any:
            more, step, own = self._loop(self._with_sums, consts)
            return more(own, carry), step(own, carry)

        def kind(x: Array, is_of_lanes: bool) -> jax.ShapeDtypeStruct:
            shape = (PLACES, *jnp.shape(x)[1:]) if is_of_lanes else jnp.shape(x)
            return jax.ShapeDtypeStruct(shape, jax.typeof(x).dtype)

        consts = list(map(kind, self._consts, self._in_batched))
        kinds = consts, [kind(x, True) for x in start]
        return runs_in_kernel(jax.make_jaxpr(both)(*kinds))

    def run(self, start: Sequence[Array], body_work: int) -> list[Array]:
        """Runs the loop until all lanes are done; one of those like the last, for all.

        It is differentiated in lock step.

        Args:
          start: carries at first, [N, ...] each.
          body_work: floating-point operations of a step of a lane, for counts of steps.

        Returns:
          The carries [N, ...] at the end.
        """

        @jax.custom_jvp
        def run(consts: Sequence[Array], start: Sequence[Array]) -> list[Array]:
            return self._run(consts, start, body_work)

        @run.defjvp
        def push(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *xs: self._run_in_lock_step(*xs)[0], primals, tangents)

        return run(list(map(jnp.asarray, self._consts)), list(start))

    def _run_in_lock_step(
        self, consts: Sequence[Array], start: Sequence[Array]
    ) -> tuple[list[Array], Array | None]:
        """Returns the carries at the end, and counts; all lanes run until the last one is done."""
        loop = self._loop(self._functions, consts)
        goes_on = loop.more(loop.own, start)
        _, ends, _, count = in_lock_step(loop, start, goes_on, lambda left, _: left > 0)
        return ends, count

    def _run(self, consts: Sequence[Array], start: Sequence[Array], body_work: int) -> list[Array]:
        size, num_consts, counts = len(start[0]), len(consts), is_counting()
        loop = self._loop(self._functions, consts)
        repeats = like_last([*loop.own, *start])
        goes_on, ends, num_left, first = in_lock_step(
            loop,
            start,
            loop.more(loop.own, start) & one_of(repeats),
            lambda left, wasted: wasted < EXCHANGE * left,
        )

        def in_places(*operands: Array) -> list[Array]:
            consts, (left, num_left, *ends) = operands[:num_consts], operands[num_consts:]
            loop = self._loop(self._with_sums, consts)
            num_left = reading(num_left, operands)
            outs, count = exchanged(loop, ends, left, num_left, counts)
            return [*outs, *([] if count is None else [count])]

        def otherwise(*operands: Array) -> list[Array]:
            consts, ends = operands[:num_consts], operands[num_consts + 2 :]
            outs, count = self._run_in_lock_step(consts, ends)
            return [*outs, *([] if count is None else [count])]

        def exchange(state: Any) -> Any:
            ends, _, num_left = state
            (left,) = jnp.nonzero(goes_on, size=size, fill_value=size)
            operands = *consts, left.astype(jnp.int32), num_left, *ends
            found = in_kernel(in_places, otherwise)(*operands)
            return found[: len(ends)], found[len(ends) :], jnp.int32(0)

        # A loop of one trip or none: on a CPU a conditional would copy what it returns.
        after = [jnp.zeros(3, jnp.int32)] if counts else []
        state = ends, after, num_left
        ends, after, _ = lax.while_loop(lambda state: state[-1] > 0, exchange, state)
        if first is not None:
            parts = [(0, body_work, size), (0, body_work, PLACES)]
            tell("loop", parts, jnp.stack([first, *after]))
        return with_copies(repeats, ends)
