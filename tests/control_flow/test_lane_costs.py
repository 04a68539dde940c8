"""Which block of lanes runs next: steps as a simulator of queues counts them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.loops import loop_in_loop
from jax import lax

import jedbatch
from jedbatch._jaxpr.lane_steps import counting
from jedbatch._jaxpr.program_counters import (
    LaneRule,
    _cut_for,
    chooser,
    run_lanes,
    steps_of,
)

# Programs of lanes are compiled as users do in `test_program_counters.py`.
SIZE = 37
STEP_WORK = 300.0  # little, for blocks of these programs to have several widths


def instances(size=SIZE, most=7):
    rng = np.random.default_rng(0)
    numbers = jnp.asarray(rng.integers(0, most, size), jnp.int32)
    return numbers, jnp.asarray(np.random.default_rng(1).normal(size=(size, 4)), jnp.float32)


def counted(fn, n, x):
    """Returns (results of lanes, counts by block and width)."""
    program, shape = jax.make_jaxpr(fn, return_shape=True)(n[0], x[0])
    rule = LaneRule(STEP_WORK)
    with counting() as counter:
        counter.begin()
        outs = jax.jit(lambda *xs: run_lanes(program, xs, [True, True], len(n), rule=rule))(n, x)
        jax.block_until_ready(outs)
        jax.effects_barrier()
    found = {(b - 1, width): row for (_, _, b, _, width), row in counter.found.items()}
    return jax.tree.unflatten(jax.tree.structure(shape), outs), found


def blocks_in(fn, n, x):
    """Returns (the blocks of a function at which lanes wait, their steps)."""
    program, found = jax.make_jaxpr(fn)(n[0], x[0]), []
    jax.eval_shape(lambda *xs: found.append(_cut_for(program, xs, [True, True])), n, x)
    between = found[0].blocks[1:-1]
    return between, steps_of(between, len(n), STEP_WORK)


def visits_of(often):
    """Returns the blocks of `loop_in_loop` that a lane visits, and its trips in each in a row."""
    visits = []
    for i in range(often):
        inner = (i * often) % 5
        visits += [[0, 1], *([[1, inner]] if inner else []), [2, 1]]
    return visits


def simulated(blocks, steps, lanes):
    """Returns int64[K, 3], the counts of each step, where lanes make some visits in queues."""
    choose = jax.jit(chooser(steps))
    counts = np.zeros((len(steps), 3), np.int64)
    left = [list(map(list, visits)) for visits in lanes]
    queues = [[] for _ in blocks]

    def arrive(lane):
        if left[lane]:
            queues[left[lane][0][0]].append(lane)

    for lane in range(len(lanes)):
        arrive(lane)
    while any(queues):
        waiting = np.array(list(map(len, queues)), np.int32)
        step = int(choose(waiting))
        block, width = steps[step]
        taken, queues[block] = queues[block][:width], queues[block][width:]
        assert taken, "nobody waits there"
        full, wasted = min(width, int(waiting.sum())), 0
        stay, trips = list(taken), 0
        repeats, work = blocks[block].repeats, blocks[block].work
        while stay and (not trips or (repeats and wasted * work < STEP_WORK)):
            counts[step] += 1, width, len(stay)
            for lane in stay:
                left[lane][0][1] -= 1
            trips, stay = trips + 1, [lane for lane in stay if left[lane][0][1]]
            wasted += full - len(stay)
        for lane in taken:
            if not left[lane][0][1]:
                left[lane].pop(0)
            arrive(lane)
    return counts


def test_steps_are_those_of_queues():
    """The function in Python tells for each lane which blocks it visits."""
    n, x = instances(70, 9)
    blocks, steps = blocks_in(loop_in_loop, n, x)
    assert len(steps) > len(blocks) == 3
    lanes = [visits_of(often) for often in n.tolist()]
    expected = simulated(blocks, steps, lanes)
    outs, found = counted(loop_in_loop, n, x)
    ours = [found[step] for step in steps]
    np.testing.assert_array_equal(ours, expected)
    assert expected[:, 2].sum() == sum(trips for visits in lanes for _, trips in visits)
    theirs = [jax.jit(loop_in_loop)(a, b) for a, b in zip(n, x, strict=True)]
    for a, b in zip(outs, map(np.stack, zip(*theirs, strict=True)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- what is chosen ---


def test_most_lanes_run_in_the_widest_step_that_they_fill():
    steps = [(b, width) for b in range(2) for width in (4, 16, 64)]
    choose = chooser(steps)
    for waiting, step in {
        (64, 0): (0, 64),
        (20, 44): (1, 16),
        (33, 32): (0, 16),
        (3, 4): (1, 4),
        (1, 1): (0, 4),
    }.items():
        assert steps[int(choose(jnp.array(waiting, jnp.int32)))] == step
    assert int(choose(jnp.zeros(2, jnp.int32))) == len(steps)


def test_nested_maps_of_lanes():
    """An outer `vmap` over lanes with program counters."""
    n, x = instances(8, 4)
    program = jax.make_jaxpr(loop_in_loop)(n[0], x[0])
    rule = LaneRule(STEP_WORK)
    lanes = functools.partial(run_lanes, program, in_batched=[True, True], size=8, rule=rule)
    both = jax.jit(jax.vmap(lambda x: lanes(args=[n, x])[1]))(jnp.stack([x, 2 * x]))
    for ours, given in zip(both, (x, 2 * x), strict=True):
        theirs = np.stack([loop_in_loop(a, b)[1] for a, b in zip(n, given, strict=True)])
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_single_block_needs_no_choice():
    def spin(n, x):
        return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, jnp.sin(c[1])), (n, x))[1]

    n, x = instances()
    blocks, steps = blocks_in(spin, n, x)
    lanes = [[[0, often]] if often else [] for often in n.tolist()]
    expected = simulated(blocks, steps, lanes)
    ours, found = counted(spin, n, x)
    np.testing.assert_allclose(ours, [spin(a, b) for a, b in zip(n, x, strict=True)], rtol=1e-5)
    np.testing.assert_array_equal([found[step] for step in steps], expected)
    assert expected[:, 2].sum() == n.sum()


# --- in batched functions ---

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(8, 8)) / 4, jnp.float32)
TARGET = jedbatch.Target("small", step_work=500.0)


@jedbatch.cell
def spin_in_spin(w, n, x):
    def body(carry):
        i, x = carry
        x = lax.fori_loop(0, i, lambda _, x: jnp.tanh(x @ w), x)
        return i + 1, jnp.sin(x @ w)

    return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]


def rows(count=64):
    draws = np.random.default_rng(1)
    return jnp.asarray(draws.integers(0, 7, count)), jnp.asarray(draws.normal(size=(count, 8)), "f")


@pytest.mark.parametrize("lanes", [True, False])
def test_there_are_no_policies_for_lanes(lanes):
    fn = jedbatch.batch(lambda w, n, x: spin_in_spin(w, n, x), (None, 0, 0))
    with pytest.raises(TypeError, match=r"`learn` got lanes=.*leave the option out"):
        fn.learn(W, *rows(4), lanes=lanes)
    with pytest.raises(TypeError, match=r"`batch` got lane_policy=.*leave the option out"):
        jedbatch.batch(lambda w, n, x: x, (None, 0, 0), lane_policy=len)


def test_lanes_or_lock_step_by_what_a_step_costs():
    """`auto` runs by lanes where a step costs little, and in lock step where it costs much."""
    given, counts = rows(), {}
    for step_work in (100.0, 1e9):
        target = jedbatch.Target("some", step_work=step_work)
        fn = jedbatch.batch(lambda w, n, x: spin_in_spin(w, n, x), (None, 0, 0), target=target)
        counts[step_work] = fn.lane_steps(W, *given)
    assert {x.what for x in counts[100.0]} == {"block"}
    assert not counts[1e9]
