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


def spin_and_choose(w, n, x):
    return choose(w, n % 4, spin(w, n, x))


def instances(count, most):
    numbers = rng.integers(0, most, count)
    return numbers, [(int(n), rng.normal(size=8).astype(np.float32)) for n in numbers]


def batched(cell, **options):
    return jedbatch.batch(lambda w, x: cell(w, *x), control_flow="lanes", **options)


def test_loops_need_the_steps_of_their_lanes():
    numbers, given = instances(256, 12)
    ran = batched(spin)
    counts = ran.lane_steps(W, given)
    assert {(x.what, x.cell.split("(")[0]) for x in counts} == {("block", "spin")}
    assert counts.needed == numbers.sum()  # a chunk of 256: none is there to fill it up
    assert counts.steps >= numbers.max()
    assert counts.needed <= counts.lanes == sum(x.steps * x.width for x in counts)
    assert counts.lanes <= numbers.max() * 256
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
    alike = 2 * trips.count(trips[-1])  # nodes that read what the last one reads, or its equal
    assert ran.lane_steps(xs).needed == 2 * sum(trips) - (alike - 1) * trips[-1]
    for found in ran(xs):
        np.testing.assert_array_equal(found, np.ones((20, 8)))


def test_nodes_with_zeros_of_different_signs_are_not_alike():
    def invert(x):
        return lax.while_loop(lambda x: jnp.abs(x) < 1, lambda x: 1 / x, x)

    xs = [np.float32(x) for x in (0.0, -0.0, 0.25, -0.0, 0.0)]
    found = jedbatch.batch(jedbatch.cell(invert), in_axes=0, control_flow="lanes")(xs)
    np.testing.assert_array_equal(found, [np.inf, -np.inf, 4, -np.inf, np.inf])


@pytest.mark.parametrize("mode", ["auto", "lanes"])
def test_nodes_alike_may_have_different_tangents(mode):
    def shrink(x):
        return lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x * jnp.cos(x) / 2, x)

    xs = jnp.full((80, 2), 3.0).at[3].set(7.0)
    tangents = jnp.asarray(np.random.default_rng(5).normal(size=xs.shape), xs.dtype)
    batched = jedbatch.batch(jedbatch.cell(shrink), in_axes=0, control_flow=mode)
    got = jax.jvp(batched, (xs,), (tangents,))[1]
    expected = jax.jvp(lambda xs: lax.map(shrink, xs), (xs,), (tangents,))[1]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


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
    parts = [ran.lane_steps(W, given[k : k + 32]) for k in (0, 32, 64)]
    assert {x.what for x in counts} == {x.what for part in parts for x in part}
    assert counts.needed == numbers.sum()
    assert counts.steps == sum(part.steps for part in parts)
    assert ran.compilations == 0
    with pytest.raises(ValueError, match="`lane_steps` got batch_size=0"):
        ran.lane_steps(W, given, batch_size=0)


# --- what calls say ---


def test_rounds_say_which_form_runs():
    """Branches of fewer than 64 run in lock step."""
    _, given = instances(70, 6)
    ran = batched(spin_and_choose)
    ran(W, given)
    forms = {t.name: how for t, how in ran.last_rounds.forms.items()}
    assert forms["spin"]["loops", 64] == "by lanes"
    assert forms["spin"]["loops", 8] == "by lanes"
    assert forms["choose"] == {("branches", 64): "by lanes", ("branches", 8): "in lock step"}
    shown = "loops by lanes where 8 or 64 run"
    assert shown in str(ran.last_rounds)
    assert f"lanes     spin: {shown}" in str(ran.plan(W, given))
    assert ran.last_rounds.lane_steps is None


def test_no_form_where_nothing_is_decided():
    ran = jedbatch.batch(lambda w, x: jnp.tanh(x[1] @ w))
    _, given = instances(9, 6)
    ran(W, given)
    assert not ran.last_rounds.forms
    assert len(str(ran.last_rounds).splitlines()) == 2 + len(ran.last_rounds[0].ran)


def trips_of(numbers):
    """Of `spin_in_spin`: each trip of the outer loop is two blocks."""
    return sum(2 * n + n * (n - 1) // 2 for n in numbers.tolist())


def test_calls_count_steps_without_compiling_again():
    ran = batched(spin_in_spin, count_steps=True)
    mapped = jedbatch.batch(
        lambda w, n, x: spin_in_spin(w, n, x), (None, 0, 0), control_flow="lanes", count_steps=True
    )
    for _ in range(2):
        numbers, given = instances(40, 7)
        rows = jnp.asarray(numbers), jnp.stack([x for _, x in given])
        expected = [spin_in_spin(W, *x) for x in given]
        for fn, args in ((ran, (W, given)), (mapped, (W, *rows))):
            np.testing.assert_allclose(fn(*args), expected, rtol=1e-5, atol=1e-6)
            counts = fn.last_rounds.lane_steps
            assert counts.needed == trips_of(numbers)
            assert str(counts) in str(fn.last_rounds)
    assert ran.compilations == mapped.compilations == 1
    assert counts == mapped.lane_steps(W, *rows)
    empty = ran(W, [(0, x) for _, x in given])
    np.testing.assert_allclose(empty, [x for _, x in given])
    assert ran.last_rounds.lane_steps.needed == 0


def test_rounds_of_decisions_count_steps():
    def decides(w, instance):
        n, x = instance
        x = spin(w, n, x)
        return spin(w, 2, x) if x[0] > 0 else x

    ran = jedbatch.batch(decides, control_flow="lanes", count_steps=True)
    for _ in range(4):  # of which the first are recorded by Python
        numbers, given = instances(64, 9)
        ran(W, given)
        twice = sum(float(spin(W, n, x)[0]) > 0 for n, x in given)
        assert ran.last_rounds.lane_steps.needed == numbers.sum() + 2 * twice


def test_calls_that_are_traced_or_exported_count_nothing():
    _, given = instances(64, 9)
    ran = batched(spin, count_steps=True)
    found = jax.jit(lambda w: ran(w, given))(W)
    np.testing.assert_allclose(found, batched(spin)(W, given), rtol=1e-5, atol=1e-6)
    assert ran.last_rounds.lane_steps is None
    with pytest.raises(ValueError, match="batched with count_steps=True"):
        ran.export(W, given)
    with pytest.raises(TypeError, match="`batch` got count_steps=2"):
        jedbatch.batch(spin, count_steps=2)
