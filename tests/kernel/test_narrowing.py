"""Loops in lock step that narrow, against one lane after the other and a simulation of counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.divergent import (
    CHEAP,
    check_counts_and_bounds,
    close,
    loop,
    over_lanes,
    run_counted,
    walk,
)
from jax import lax

from jedbatch._jaxpr.lane_loops import LoopOfLanes
from jedbatch._jaxpr.narrowing import narrowed, narrower_widths
from jedbatch._jaxpr.program_counters import LaneRule

pytestmark = pytest.mark.unoptimized

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(4, 4)) / 2, jnp.float32)
COUNTS = {
    "geometric": RNG.geometric(1 / 9, 600),
    "log-normal": np.exp(RNG.normal(size=512) + 2).astype(int),
    "none": np.zeros(512, int),
    "equal": np.full(512, 9),
    "one long": np.where(np.arange(512) == 100, 200, 1),
    "two kinds": np.where(np.arange(512) % 3, 40, 3),
}


def sorting(x):
    """Returns the same; no kernel sorts, so loops narrow (see `test_packed_loops`)."""
    return jnp.where(jnp.sort(x).sum() > 1e9, 0, x)


def steps(n, x):
    """As many steps as a number says; a part of the carry is changed by nobody."""

    def body(carry):
        i, x, kept = carry
        return i + 1, jnp.tanh(sorting(x) @ W) + kept / (i + 1.0), kept

    return lax.while_loop(lambda carry: carry[0] < n, body, (0, x, x[0]))


def simulated(trips, widths, price):
    """Returns (width, steps, lanes needed) of each loop, one lane of which counts as one."""
    left, found = np.array(trips), []
    for width, few in zip(widths, [*widths[1:], 0], strict=True):
        wasted = ran = needed = 0
        while (left > 0).sum() > few or ((left > 0).any() and wasted < price(width, few)):
            wasted += width - (left > 0).sum()
            needed += (left > 0).sum()
            left = np.maximum(left - 1, 0)
            ran += 1
        found.append((width, ran, needed))
        left = left[left > 0]
    return found


@pytest.mark.parametrize("counts", COUNTS)
def test_loops_give_what_they_give_one_by_one_in_the_steps_that_are_simulated(counts):
    n = jnp.asarray(COUNTS[counts], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(len(n), 4)), jnp.float32)
    found, ran = run_counted(steps, n, x)
    close(found, loop(steps, n, x))
    widths = [len(n), len(n) // 4, len(n) // 16]
    work = {count.work for count in ran} or {1}
    assert len(work) == 1
    # Constants and carries of a lane: n, i, a vector, and a number.
    row_bytes = 4 + 4 + 16 + 4
    price = lambda _, few: (2 * CHEAP.step_work + few * row_bytes) / max(work)  # noqa: E731
    expected = simulated(COUNTS[counts], widths, price)
    assert {(c.width, c.steps, c.needed) for c in ran} == {x for x in expected if x[1]}
    assert ran.needed == COUNTS[counts].sum()
    if counts == "equal":
        assert [(c.width, c.steps) for c in ran] == [(512, 9)]  # nobody is moved
    if counts == "log-normal":
        assert ran.lanes < 0.5 * 512 * COUNTS[counts].max()


def test_what_is_lost_is_at_most_twice_the_least():
    """Steps for lanes that are done, and moves, cost at most twice what the better of both does."""
    work, step_work = 100, 3e3
    widths = [512, *narrower_widths(512, work, step_work)]
    assert widths == [512, 128, 32]
    price = 2 * step_work / work
    for seed in range(20):
        rng = np.random.default_rng(seed)
        trips = rng.geometric(1 / rng.integers(2, 40), 512) + rng.integers(0, 5)
        (_, wide, needed), *after = simulated(trips, widths[:2], lambda *_: price)
        lost = 512 * wide - needed + (price if after[0][1] else 0)
        waiting = 512 * trips.max() - trips.sum()
        several = np.sort(trips)[-129]  # by then no more than 128 are left
        moving = price + (512 * several - np.minimum(trips, several).sum())
        assert lost <= 2 * min(waiting, moving) + 512


def test_which_loops_narrow():
    assert narrower_widths(256, 263, 5e4) == [64]
    assert narrower_widths(1024, 263, 5e4) == [256, 64]
    assert narrower_widths(1 << 16, 263, 5e4) == [1 << 14, 1 << 12]
    assert narrower_widths(64, 10**6, 5e4) == []  # fewer lanes take as long
    assert narrower_widths(1024, 20, 5e4) == []  # a step is started for longer than it runs
    n, x = jnp.asarray(COUNTS["geometric"], jnp.int32), jnp.ones((600, 4), jnp.float32)
    assert {c.width for c in run_counted(steps, n, x)[1]} == {600, 150, 37}
    assert run_counted(steps, n, x, mode="lockstep")[1] == ()
    without = LaneRule(step_work=3e3, nests=False)  # as on a GPU
    assert {c.width for c in run_counted(steps, n, x, rule=without)[1]} == {600, 128}
    assert 128 in {
        c.width for c in run_counted(steps, n, x, mode="lanes")[1]
    }  # refilled, as it was told


def test_nan_random_keys_and_derivatives_are_those_of_each_lane():
    n = jnp.asarray(COUNTS["geometric"], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(600, 4)), jnp.float32).at[7].set(np.nan)
    close(run_counted(steps, n, x)[0], loop(steps, n, x))

    keys = jax.random.split(jax.random.key(0), 600)
    found, ran = run_counted(walk, keys, n, rule=LaneRule(step_work=2e3))
    assert len({c.width for c in ran}) > 1
    close(found, loop(walk, keys, n))

    x = jnp.asarray(RNG.normal(size=(600, 4)), jnp.float32)
    run = over_lanes(steps, n, x, mode="auto", rule=CHEAP)
    push = lambda fn: lambda n, x, t: jax.jvp(lambda x: fn(n, x)[1], (x,), (t,))[1]  # noqa: E731
    tangents = jnp.asarray(RNG.normal(size=x.shape), jnp.float32)
    close(jax.jit(push(run))(n, x, tangents), loop(push(steps), n, x, tangents))


def test_loops_in_scan_and_light_loops_inside():
    """A loop in `scan` narrows; one with little work inside of it does not."""

    def inside(n, x):
        def body(carry):
            i, x = carry
            y = lax.while_loop(lambda c: c[0] < i % 3, lambda c: (c[0] + 1, c[1] / 2), (0, 1.0))[1]
            for _ in range(8):
                x = jnp.tanh(sorting(x) @ W) + y
            return i + 1, x

        def step(x, _):
            return lax.while_loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x))[1], x.sum()

        return jax.jit(lambda x: lax.scan(step, x, None, length=2))(x)

    n = jnp.asarray(COUNTS["geometric"], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(600, 4)), jnp.float32)
    found, ran = run_counted(inside, n, x, rule=LaneRule(step_work=5e4, nest_work=1e9))
    close(found, loop(inside, n, x))
    assert {c.width for c in ran} == {600, 150, 37}
    assert ran.needed == 2 * int(n.sum())


def rk4(n, stiffness):
    """As many steps of Runge and Kutta as a number says, for an oscillator."""

    def slope(y):
        x, v = y
        return jnp.stack([v, stiffness * (1 - x * x) * v - x])

    def step(carry):
        i, y = carry
        h = 1 / (10 + stiffness)
        a = slope(y)
        b = slope(y + h / 2 * a)
        c = slope(y + h / 2 * b)
        d = slope(y + h * c)
        y = y + h / 6 * (a + 2 * b + 2 * c + d)
        for _ in range(4):  # as much work as a step with an estimate of its error
            y = y + 0 * slope(y)
        return i + 1, y

    return lax.while_loop(lambda carry: carry[0] < n, step, (jnp.int32(0), jnp.ones(2)))[1]


@pytest.mark.parametrize("kind", ["rows", "cells"])
def test_other_counts_compile_nothing_and_bounds_name_the_instance(kind):
    check_counts_and_bounds(rk4, kind)


def test_moved_lanes_that_are_done_repeat_no_step():
    """Lanes that are put together beside those that go on are not written."""
    start = [jnp.arange(256, dtype=jnp.int32) % 7]
    own = [jnp.where(jnp.arange(256) % 50 == 3, 300, 0)]
    loop = LoopOfLanes(lambda own, carry: carry[0] < own[0], lambda own, carry: [carry[0] + 1], own)
    ends = narrowed(
        loop,
        start,
        loop.more(own, start),
        [64],
        body_work=10**6,
        step_work=1.0,
    )
    expected = np.where(np.arange(256) % 50 == 3, 300, np.arange(256) % 7)
    np.testing.assert_array_equal(ends[0], expected)
