"""Loops in lock step that narrow: once few lanes are left, a step runs these and no others.

Where a step of a loop has little work, exchanging lanes after every few steps would cost more than
waiting does (see `divergent.refilled`), and yet a step of all lanes takes nearly as much time for
each that is done as for each that goes on. So all lanes run in lock step until no more than one in
`NARROWER` goes on; these are put together, run to their end, at which they narrow once more where
they are many, and what they carry is written to where they were.

Putting lanes together costs, too, and the next step may be the last. As one who rents until the
rents add up to the price, and then buys, lanes run in lock step until what was computed for those
that were done is as much as putting the others together costs: whatever comes, they lose at most
twice as much as they would if that were known. Where all lanes take as many steps, nothing is
computed for one that is done, and none is ever moved.

Source: A. Karlin, M. Manasse, L. Rudolph, D. Sleator. Competitive Snoopy Caching. Algorithmica,
1988: renting until the rents add up to the price.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.lane_loops import LoopOfLanes, where_lanes
from jedbatch._jaxpr.lane_steps import is_counting, tell
from jedbatch._support.types import Array

NARROWER = 4  # as many lanes as are left when they are put together
WIDEST = 128  # of so many lanes a step takes hardly longer than of one in `NARROWER` of them
LEVELS = 2  # times that lanes are put together at most: each is one more copy of the loop
STARTS = 2.0  # of steps, as long as it takes to put lanes together


def narrower_widths(size: int, body_work: int, step_work: float) -> list[int]:
    """Returns of how many lanes the loops are that follow one of `size` lanes; none if it is light.

    A narrower loop saves time as long as a step's lanes do more than starting a step costs.

    Args:
      size: how many lanes there are.
      body_work: floating-point operations of a step of a lane.
      step_work: those that are done while a step is started.
    """
    found: list[int] = []
    while size >= WIDEST and size * body_work >= step_work and len(found) < LEVELS:
        size //= NARROWER
        found.append(size)
    return found


def narrowed(
    loop: LoopOfLanes,
    start: Sequence[Array],
    goes_on: Array,
    widths: Sequence[int],
    body_work: int,
    step_work: float,
) -> list[Array]:
    """Runs a loop for many lanes until all are done.

    Args:
      loop: that runs.
      start: carries at first, [N, ...] each.
      goes_on: bool[N], which lanes run.
      widths: of how many lanes the loops are that follow, see `narrower_widths`.
      body_work: floating-point operations of a step of a lane.
      step_work: those that are done while a step is started.

    Returns:
      The carries [N, ...] at the end.
    """
    more, step, _ = loop
    tally = jnp.zeros((1 + len(widths), 3), jnp.int32) if is_counting() else None

    def run(
        own: Sequence[Array],
        carry: Sequence[Array],
        goes_on: Array,
        tally: Array | None,
        widths: Sequence[int],
        level: int,
    ) -> tuple[list[Array], Array | None]:
        size, few = len(goes_on), widths[0] if widths else 0
        row_bytes = sum(x.nbytes // size for x in (*own, *carry))
        price = (STARTS * step_work + few * row_bytes) / max(1, body_work)

        def waits(left: Array, wasted: Array) -> Array:
            return (left > few) | ((left > 0) & (wasted < price))

        now = LoopOfLanes(more, step, own)
        goes_on, ends, left, tally = in_lock_step(now, goes_on, carry, waits, tally, level)
        if not widths:
            return ends, tally

        def put_together(state: Any) -> Any:
            ends, tally, _ = state
            (lane,) = jnp.nonzero(goes_on, size=few, fill_value=size)
            lane = lane.astype(jnp.int32)
            given = rows_at(own, lane), rows_at(ends, lane), lane < size
            carry, tally = run(*given, tally, widths[1:], level + 1)
            pairs = zip(ends, carry, strict=True)
            ends = [x.at[lane].set(y, mode="drop", unique_indices=True) for x, y in pairs]
            return ends, tally, jnp.int32(0)

        # A loop of one trip or none: on a CPU a conditional would copy what it returns.
        state = ends, tally, left
        ends, tally, _ = lax.while_loop(lambda state: state[-1] > 0, put_together, state)
        return ends, tally

    ends, tally = run(loop.own, start, goes_on, tally, widths, 0)
    if tally is not None:
        tell("loop", [(0, body_work, width) for width in (len(start[0]), *widths)], tally)
    return ends


def in_lock_step(
    loop: LoopOfLanes,
    goes_on: Array,
    carry: Sequence[Array],
    waits: Callable[[Array, Array], Array],
    tally: Array | None,
    row: int = 0,
) -> tuple[Array, list[Array], Array, Array | None]:
    """Runs all lanes in lock step as long as it is worth to wait.

    Args:
      loop: that runs.
      goes_on: bool[N], which lanes go on.
      carry: carries at first, [N, ...] each.
      waits: from int32[], how many lanes go on, and f32[], how many steps of lanes were computed
        for those that were done, to bool[].
      tally: int32[rows, 3], the steps, lanes and lanes needed so far; None if nobody counts.
      row: of the tally, to count in.

    Returns:
      (which lanes go on, their carries, how many go on, the tally) after the steps.
    """
    more, step, own = loop
    size = len(goes_on)

    def one_step(state: Any) -> Any:
        goes_on, carry, left, wasted, tally = state
        tally = counted(tally, row, goes_on)
        carry = where_lanes(goes_on, step(own, carry), carry)
        goes_on = goes_on & more(own, carry)
        wasted = wasted + (size - left).astype(jnp.float32)
        return goes_on, carry, goes_on.sum(dtype=jnp.int32), wasted, tally

    state = goes_on, list(carry), goes_on.sum(dtype=jnp.int32), jnp.float32(0), tally
    state = lax.while_loop(lambda state: waits(state[2], state[3]), one_step, state)
    goes_on, ends, left, _, tally = state
    return goes_on, ends, left, tally


def counted(tally: Array | None, row: int, goes_on: Array) -> Array | None:
    """Returns counts to which a step of some lanes was added."""
    if tally is None:
        return None
    counts = [1, len(goes_on), goes_on.sum(dtype=jnp.int32)]
    return tally.at[row].add(jnp.stack([jnp.int32(x) for x in counts]))


def rows_at(arrays: Sequence[Array], lane: Array) -> list[Array]:
    """Returns the rows of some lanes; of a lane that there is not, those of the last one."""
    return [x.at[lane].get(mode="clip") for x in arrays]
