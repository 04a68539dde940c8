"""Counts of steps and lanes, against those of the loop over instances."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jedbatch

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(8, 8)) / 4, jnp.float32)


@jedbatch.cell
def spin(w, n, x):
    return lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)


@jedbatch.cell
def halve(x):
    return lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x)


@jedbatch.cell
def choose(w, n, x):
    return lax.switch(n, [lambda x, i=i: jnp.tanh(x @ (w + i)) for i in range(4)], x)


@jedbatch.cell
def spin_in_spin(w, n, x):
    """n trips, of which each runs one more step than that before; step and trip are blocks."""

    def body(carry):
        i, x = carry
        x = lax.fori_loop(0, i, lambda _, x: jnp.tanh(x @ w), x)
        return i + 1, jnp.sin(x @ w)

    return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]


def instances(count, most):
    numbers = rng.integers(0, most, count)
    return numbers, [(int(n), rng.normal(size=8).astype(np.float32)) for n in numbers]


def batched(cell, **options):
    return jedbatch.batch(lambda w, x: cell(w, *x), control_flow="lanes", **options)


def test_loops_need_the_steps_of_their_lanes():
    numbers, given = instances(256, 12)
    ran = batched(spin)
    counts = ran.lane_steps(W, given)
    assert {(x.what, x.cell.split("(")[0]) for x in counts} == {("loop", "spin")}
    assert counts.needed == numbers.sum()  # a chunk of 256: none is there to fill it up
    assert counts.steps >= numbers.max()
    assert counts.needed <= counts.lanes == sum(x.steps * x.width for x in counts)
    assert counts.lanes < numbers.max() * 256
    assert f"{counts.lanes} lanes, {numbers.sum()} needed" in str(counts)
    assert ran.compilations == 0


@pytest.mark.parametrize("cell", [spin, spin_in_spin])
def test_nodes_that_fill_up_a_chunk_take_no_step(cell):
    """A chunk of 64 for 40 of them, of which the last takes most steps."""
    numbers, given = instances(39, 9)
    numbers, given = [*numbers.tolist(), 12], [*given, (12, np.ones(8, np.float32))]
    ran = batched(cell)
    trips = [n if cell is spin else 2 * n + n * (n - 1) // 2 for n in numbers]
    assert ran.lane_steps(W, given).needed == sum(trips)
    expected = [cell(W, *x) for x in given]
    np.testing.assert_allclose(ran(W, given), expected, rtol=1e-5, atol=1e-6)


def test_nodes_alike_have_the_results_of_the_one_that_runs():
    xs = [np.full(8, 2.0 ** (i % 11), np.float32) for i in range(20)]
    ran = jedbatch.batch(lambda x: [halve(x), halve(x)], in_axes=0, control_flow="lanes")
    trips = [i % 11 for i in range(20)]
    assert ran.lane_steps(xs).needed == 2 * sum(trips) - trips[-1]  # the last node is there twice
    for found in ran(xs):
        np.testing.assert_array_equal(found, np.ones((20, 8)))


@pytest.mark.parametrize("nested", [False, True])
def test_loops_that_read_nothing_of_a_node_run_once(nested):
    def grow(x):
        return lax.while_loop(lambda x: x < 10, lambda x: 2 * x + 1, x)

    def grow_again(x):
        return lax.while_loop(lambda x: x < 99, lambda x: grow(x) + x, x)

    @jedbatch.cell
    def scaled(x):
        return (grow_again if nested else grow)(jnp.float32(0)) * x

    xs = [np.full(8, 1.0 + i, np.float32) for i in range(5)]
    found = jedbatch.batch(scaled, in_axes=0, control_flow="lanes")(xs)
    np.testing.assert_array_equal(found, [scaled(x) for x in xs])


def test_branches_need_their_lanes():
    numbers, given = instances(256, 4)
    counts = batched(choose).lane_steps(W, given)
    taken = collections.Counter(numbers.tolist())
    assert {x.number: x.needed for x in counts} == taken
    assert all(x.lanes == x.steps * x.width for x in counts)
    assert all(x.steps == -(-taken[x.number] // x.width) for x in counts)
    assert len({x.work for x in counts}) == 1


def test_blocks_need_what_lanes_go_through():
    numbers, given = instances(256, 7)
    counts = batched(spin_in_spin).lane_steps(W, given)
    assert {x.what for x in counts} == {"block"}
    needed = collections.Counter()
    for x in counts:
        needed[x.number] += x.needed
    inner = sum(n * (n - 1) // 2 for n in numbers.tolist())
    # Before the inner loop and after it each trip of the outer one is a block.
    assert sorted(needed.values()) == sorted([inner, numbers.sum(), numbers.sum()])
    assert counts.needed == inner + 2 * numbers.sum() <= counts.lanes


def test_rows_of_arrays_and_rounds_are_counted():
    numbers, given = instances(64, 9)
    rows = jnp.asarray(numbers), jnp.stack([x for _, x in given])
    mapped = jedbatch.batch(lambda w, n, x: spin(w, n, x), (None, 0, 0), control_flow="lanes")
    assert mapped.lane_steps(W, *rows).needed == numbers.sum()

    def decides(w, instance):
        n, x = instance
        return spin(w, n if x.sum() > 1e9 else n + 1, x)

    counts = jedbatch.batch(decides, control_flow="lanes").lane_steps(W, given)
    assert counts.needed == numbers.sum() + 64


def test_what_runs_in_lock_step_is_not_counted_and_tracers_are_refused():
    _, given = instances(64, 9)
    fn = lambda w, x: spin(w, *x)  # noqa: E731
    assert not jedbatch.batch(fn, control_flow="lockstep").lane_steps(W, given)
    with pytest.raises(TypeError, match=r"`lane_steps` got values that JAX traces; expected"):
        jax.jit(lambda w: batched(spin).lane_steps(w, given))(W)


def test_streams_are_counted():
    numbers, given = instances(96, 9)
    ran = batched(spin)
    counts = ran.lane_steps(W, given, batch_size=32)
    assert {x.what for x in counts} == {"block"}
    assert counts.needed == numbers.sum()
    assert counts.steps < sum(numbers[k : k + 32].max() for k in (0, 32, 64))
    assert ran.compilations == 0
    with pytest.raises(ValueError, match="`lane_steps` got batch_size=0"):
        ran.lane_steps(W, given, batch_size=0)
