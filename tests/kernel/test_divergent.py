"""Loops and branches that values decide on, over many lanes, against one lane after the other."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.divergent import loop, over_lanes, walk
from cases.helpers import check
from jax import lax

import jedbatch
from jedbatch._jaxpr.program_counters import BRANCH_LANES, LaneRule

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(4, 4)) / 2, jnp.float32)


def steps(n, x):
    """As many steps as a number says."""

    def body(carry):
        i, x = carry
        return i + 1, jnp.tanh(x @ W) + x[::-1] / (i + 1.0)

    return lax.while_loop(lambda carry: carry[0] < n, body, (0, x))


def newton(x):
    """As many steps as it takes; the carry has an integer, a float and a vector."""

    def more(carry):
        guess, i, _ = carry
        return (jnp.abs(guess * guess - x) > 1e-4 * x) & (i < 60)

    def body(carry):
        guess, i, seen = carry
        return (guess + x / guess) / 2, i + 1, seen.at[i % 4].set(guess)

    return lax.while_loop(more, body, (x * 30.0, 0, jnp.zeros(4)))


def inside(n, x):
    """A loop in a loop in `scan` in `jit`, with a branch in it."""

    def inner(k, x):
        return lax.fori_loop(0, k, lambda _, x: x @ W, x)

    def body(carry):
        i, x = carry
        x = lax.cond(i % 2 == 0, lambda x: inner(i, x), lambda x: jnp.sin(x), x)
        return i + 1, x

    def step(x, _):
        return lax.while_loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x))[1], x.sum()

    return jax.jit(lambda x: lax.scan(step, x, None, length=2))(x)


COUNTS = {
    "geometric": rng.geometric(1 / 6, 150),
    "none": np.zeros(80, int),
    "equal": np.full(64, 5),
    "one": np.eye(1, 100, 50, dtype=int)[0] * 40,
    "more than half": np.where(np.arange(90) % 3, 9, 1),
}


@pytest.mark.parametrize("nests", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_loops_give_what_they_give_one_by_one(counts, nests):
    n = jnp.asarray(COUNTS[counts], jnp.int32)
    x = jnp.asarray(rng.normal(size=(len(n), 4)), jnp.float32)
    rule = LaneRule(nests=nests)
    ours, theirs = jax.jit(over_lanes(steps, n, x, rule=rule))(n, x), loop(steps, n, x)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


def test_loops_end_by_what_they_compute_and_nest():
    x = jnp.asarray(np.exp(rng.normal(size=100) * 6), jnp.float32)
    for ours, theirs in zip(jax.jit(over_lanes(newton, x))(x), loop(newton, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    n = jnp.asarray(rng.integers(0, 5, 80), jnp.int32)
    x = jnp.asarray(rng.normal(size=(80, 4)), jnp.float32)
    for ours, theirs in zip(
        jax.jit(over_lanes(inside, n, x))(n, x), loop(inside, n, x), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_each_lane_has_random_numbers_of_its_own():
    keys = jax.random.split(jax.random.key(0), 100)
    n = jnp.asarray(rng.geometric(1 / 4, 100), jnp.int32)
    ours = jax.jit(over_lanes(walk, keys, n))(keys, n)
    np.testing.assert_allclose(ours, loop(walk, keys, n), rtol=1e-6)


def test_nan_in_one_lane_stays_there():
    n = jnp.asarray(COUNTS["geometric"], jnp.int32)
    x = jnp.ones((len(n), 4)).at[7].set(jnp.nan)
    out = jax.jit(over_lanes(steps, n, x))(n, x)[1]
    assert np.isnan(out[7]).all()
    assert np.isfinite(np.delete(out, 7, axis=0)).all()


def counted(seen, x):
    """The value, while a host counts the lanes that it is computed for."""

    def note(x):
        seen.append(math.prod(x.shape))
        return x

    return jax.pure_callback(note, x, x, vmap_method="broadcast_all")


def test_few_steps_are_run_for_lanes_that_are_done():
    def run(mode):
        seen = []

        def fn(n):
            def body(carry):
                i, x = carry
                return counted(seen, i) + 1, x @ jnp.ones((64, 64))

            return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), jnp.zeros(64)))[0]

        n = jnp.asarray(np.random.default_rng(1).geometric(1 / 20, 512), jnp.int32)
        np.testing.assert_array_equal(jax.jit(over_lanes(fn, n, mode=mode))(n), n)
        jax.effects_barrier()
        return sum(seen) / int(n.sum()), int(n.max()) / float(n.mean())

    in_lock_step, most = run("lockstep")
    assert in_lock_step == pytest.approx(most)
    assert most > 5
    by_lanes, _ = run("lanes")
    assert by_lanes < 1.7


def test_few_lanes_do_not_run_in_wide_steps():
    """Of 40 lanes 2 go on, in steps of 4 lanes."""
    seen = []

    def fn(n):
        def body(carry):
            i, x = carry
            return counted(seen, i) + 1, jnp.tanh(x @ jnp.ones((128, 128)))

        return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), jnp.ones(128)))

    n = jnp.full(40, 2, jnp.int32).at[jnp.array([7, 30])].set(35).at[-1].set(1)
    steps, x = jax.jit(over_lanes(fn, n, mode="auto"))(n)
    np.testing.assert_array_equal(steps, n)
    np.testing.assert_allclose(x, loop(lambda n: fn(n)[1], n), rtol=1e-6)
    jax.effects_barrier()
    assert sum(seen) == 2 * 40 + 33 * 4 + int(n.sum())  # those of the judge, one by one


def switch(index, x):
    branches = [lambda x, i=i: jnp.tanh(x @ (W + i)) if i else (x * 0, x)[1] for i in range(3)]
    return lax.switch(index, branches, x)


@pytest.mark.parametrize("size", [64, 65, 200])
def test_branches_give_what_they_give_one_by_one(size):
    for index in (rng.integers(-1, 5, size), np.zeros(size, int), np.full(size, 2)):
        index = jnp.asarray(index, jnp.int32)
        x = jnp.asarray(rng.normal(size=(size, 4)), jnp.float32)
        ours = jax.jit(over_lanes(switch, index, x))(index, x)
        np.testing.assert_allclose(ours, loop(switch, index, x), rtol=1e-5, atol=1e-6)


def test_each_branch_runs_for_its_own_lanes():
    seen = [[], [], []]

    def fn(index, x):
        return lax.switch(index, [functools.partial(counted, s) for s in seen], x)

    index = jnp.asarray(rng.permutation(np.repeat([0, 1, 2], [150, 40, 0])), jnp.int32)
    x = jnp.arange(190.0)
    np.testing.assert_array_equal(jax.jit(over_lanes(fn, index, x))(index, x), x)
    jax.effects_barrier()
    steps = [-(-150 // BRANCH_LANES), -(-40 // BRANCH_LANES), 0]
    assert [sum(s) for s in seen] == [n * BRANCH_LANES for n in steps]


def test_forward_mode_is_that_of_one_by_one():
    n = jnp.asarray(COUNTS["geometric"], jnp.int32)
    x = jnp.asarray(rng.normal(size=(len(n), 4)), jnp.float32)
    index = n % 3

    for fn, whole in ((lambda n, x: steps(n, x)[1], n), (switch, index)):
        run = over_lanes(fn, whole, x)
        ours = jax.jvp(lambda x, run=run, whole=whole: run(whole, x), (x,), (x + 1,))[1]
        theirs = loop(
            lambda n, x, fn=fn: jax.jvp(functools.partial(fn, n), (x,), (x + 1,))[1], whole, x
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# --- in batched functions ---

EXPERTS = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)


@jedbatch.cell
def expert(params, index, x):
    def use(i):
        return lambda x: jnp.tanh(x @ params[i])

    return lax.switch(index, list(map(use, range(3))), x)


@jedbatch.cell
def settle(params, x):
    """Steps until little changes."""

    def body(carry):
        x, _, i = carry
        new = jnp.tanh(x @ params[0]) / 2
        return new, jnp.abs(new - x).max(), i + 1

    return lax.while_loop(lambda c: (c[1] > 1e-3) & (c[2] < 90), body, (x, jnp.float32(1), 0))[0]


def of_experts(params, instance):
    index, x = instance
    return expert(params, index, expert(params, 2 - index, x))


def instances(count):
    return [(int(rng.integers(3)), rng.normal(size=4).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("control_flow", ["auto", "lanes", "lockstep"])
def test_branches_are_differentiated(control_flow):
    batched = jedbatch.batch(of_experts, control_flow=control_flow)
    given = instances(100)
    shown = str(batched.plan(EXPERTS, given))
    assert ("lanes     expert: without lock step" in shown) == (control_flow != "lockstep")

    def by_loop(params):
        one = jax.jit(of_experts)
        return jnp.stack([one(params, x) for x in given])

    def loss(fn, params):
        return jnp.square(fn(params)).sum()

    def ours(params):
        return batched(params, given)

    np.testing.assert_allclose(ours(EXPERTS), by_loop(EXPERTS), rtol=1e-5, atol=1e-6)
    direction = jnp.ones_like(EXPERTS)
    for derivative in (
        lambda fn: jax.grad(functools.partial(loss, fn))(EXPERTS),
        lambda fn: jax.jvp(fn, (EXPERTS,), (direction,))[1],
        lambda fn: jax.jvp(jax.grad(functools.partial(loss, fn)), (EXPERTS,), (direction,))[1],
    ):
        np.testing.assert_allclose(derivative(ours), derivative(by_loop), rtol=1e-3, atol=1e-4)


def test_loops_in_cells_compile_once_and_rows_of_arrays_are_mapped():
    batched = jedbatch.batch(lambda params, x: settle(params, settle(params, x) * 3))
    for count in (70, 300, 300):
        given = list((3 * rng.normal(size=(count, 4))).astype(np.float32))
        compiled = batched.compilations
        ours = batched(EXPERTS, given)
        one = jax.jit(batched._core.fn)
        theirs = jnp.stack([one(EXPERTS, x) for x in given])
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert batched.compilations == compiled
    rows = jnp.stack(list(map(jnp.asarray, given)))
    np.testing.assert_allclose(batched(EXPERTS, rows), ours, rtol=1e-5, atol=1e-6)
    assert (
        "mapped" in batched._core.sessions[next(iter(batched._core.sessions))].programs.compilations
    )
    with pytest.raises(ValueError, match=r"`batch` got control_flow='both'; expected"):
        jedbatch.batch(of_experts, control_flow="both")


def test_rows_of_arrays_are_differentiated_through_branches():
    weights = jnp.asarray(rng.normal(size=(3, 32, 32)) / 6, jnp.float32)
    batched = jedbatch.batch(expert, in_axes=(None, 0, 0))
    index = jnp.asarray(rng.integers(0, 3, 300), jnp.int32)
    x = jnp.asarray(rng.normal(size=(300, 32)), jnp.float32)
    assert batched(weights, index, x).shape == (300, 32)
    assert (
        "mapped" in batched._core.sessions[next(iter(batched._core.sessions))].programs.compilations
    )

    def by_vmap(params):
        return jnp.square(jax.vmap(expert, (None, 0, 0))(params, index, x)).sum()

    def ours(params):
        return jnp.square(batched(params, index, x)).sum()

    for derivative in (jax.grad, lambda fn: lambda p: jax.jvp(fn, (p,), (p,))[1]):
        expected = derivative(by_vmap)(weights)
        np.testing.assert_allclose(derivative(ours)(weights), expected, rtol=1e-3, atol=1e-4)


def shrink(weights, x):
    """Steps until an array is small; also how many."""

    def body(carry):
        return jnp.tanh(weights @ carry[0]), carry[1] + 1

    return lax.while_loop(
        lambda c: (jnp.abs(c[0]).max() > 0.1) & (c[1] < 20), body, (x, jnp.int32(0))
    )


def trip_counts_scale(params, x):
    return params["out"] @ x * shrink(params["in"], x)[1]


def what_loops_give_is_stopped(params, x):
    return params["out"] @ lax.stop_gradient(jnp.sin(shrink(params["in"], params["in"] @ x)[0]))


def weights_of_loops_are_stopped(params, x):
    still = jnp.tanh(lax.stop_gradient(params["in"])) / 2
    return params["out"] @ shrink(still, x)[0] + params["in"] @ x


def weights_of_loops_are_global(params, x):
    return params["out"] @ shrink(W / 2, x)[0]


def a_loop_is_in_a_scan(params, x):
    def step(x, _):
        return jnp.tanh(params["in"] @ x), shrink(params["in"], x)[0]

    x, steps = lax.scan(step, x, None, length=2)
    return params["out"] @ x + lax.stop_gradient(steps).sum()


@pytest.mark.parametrize("cell", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        trip_counts_scale,
        what_loops_give_is_stopped,
        weights_of_loops_are_stopped,
        weights_of_loops_are_global,
        a_loop_is_in_a_scan,
    ],
)
def test_gradients_flow_around_loops(fn, cell, monkeypatch):
    """As JAX has it, where loops with shared values are no cells of their own, and where they are.

    There the loop is a node, which is not differentiated by what it shares.
    """
    if cell:
        monkeypatch.setitem(globals(), "shrink", jedbatch.cell(shrink))
    params = {"in": W, "out": W.T}
    given = [jnp.asarray(rng.normal(size=4), jnp.float32) for _ in range(5)]
    batched = jedbatch.batch(fn)

    def by_loop(params):
        return jnp.square(jnp.stack([fn(params, x) for x in given])).sum()

    found = jax.grad(lambda params: jnp.square(batched(params, given)).sum())(params)
    expected = jax.grad(by_loop)(params)
    for name in params:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_loops_that_shared_values_lead_through_have_no_reverse_mode():
    batched = jedbatch.batch(lambda params, x: shrink(lax.stop_gradient(W) + params, x)[0])
    with pytest.raises(ValueError, match=r"(?i)reverse-mode") as caught:
        jax.grad(lambda params: batched(params, [W[0], W[1]]).sum())(W)
    assert "was differentiated: it depends on result 0 of `while(" in caught.value.__notes__[0]


def test_what_prints_in_a_branch_still_does(capfd):
    def fn(x):
        return lax.cond(x > 0, lambda x: (jax.debug.print("seen {x}", x=x), x)[1], jnp.sin, x)

    x = jnp.ones(80)
    np.testing.assert_array_equal(jax.jit(over_lanes(fn, x))(x), x)
    jax.effects_barrier()
    assert "seen 1.0" in capfd.readouterr().out


def test_branches_for_platforms_are_no_decisions():
    """`jnp.diag` has a `cond` whose branch depends on the platform alone."""

    @jedbatch.cell
    def scaled(params, x):
        return x @ jnp.diag(params @ x)

    def twice(params, x):
        return scaled(params, scaled(params, x))

    xs = [rng.normal(size=4).astype(np.float32) for _ in range(3)]
    batched = check(twice, EXPERTS[0], xs, rtol=1e-4)
    assert "without lock step" not in str(batched.plan(EXPERTS[0], xs))
