"""Loops of other libraries, written for lock step, on lanes that do not wait for each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.helpers import assert_close, compilations, loop
from jax import lax

import jedbatch

eqxi = pytest.importorskip("equinox.internal")
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(4, 4)) / 2, jnp.float32)
PARAMS = {"w": W}
INSTANCES = [(RNG.normal(size=4).astype(np.float32), np.float32(e)) for e in range(9)]


def checkpointed(params, instance):
    """As many steps as the instance says, and the number of them."""
    x, end = instance

    def step(carry):
        n, x = carry
        return n + 1, jnp.tanh(x @ params["w"]) + 0.1

    def goes_on(carry):
        return carry[0] < end

    start = jnp.float32(0), x
    n, x = eqxi.while_loop(goes_on, step, start, max_steps=10, kind="checkpointed", checkpoints=3)
    return x, n


@pytest.mark.parametrize("mode", [pytest.param("lanes", marks=pytest.mark.slow), "lockstep"])
def test_checkpointed_loops_are_the_loops(mode):
    batched = jedbatch.batch(checkpointed, control_flow=mode)
    assert_close(batched(PARAMS, INSTANCES), loop(jax.jit(checkpointed), PARAMS, INSTANCES), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["rows", "arrays", "numbers"])
def test_gradients_of_checkpointed_loops_are_the_loops(given):
    """The loop has an assertion that its end is not differentiated, which is tried for refusals."""
    args: tuple
    if given == "rows":
        args = tuple(map(jnp.stack, zip(*INSTANCES, strict=True)))
        of_rows = lambda p, x, end: checkpointed(p, (x, end))  # noqa: E731
        batched = jedbatch.batch(of_rows, in_axes=(None, 0, 0))
    else:
        end_of = jnp.asarray if given == "arrays" else np.float32
        args = ([(x, end_of(end)) for x, end in INSTANCES],)
        batched = jedbatch.batch(checkpointed)
    ours = jax.grad(lambda p: jnp.square(batched(p, *args)[0]).sum())(PARAMS)
    alone = jax.jit(jax.grad(lambda p, x: jnp.square(checkpointed(p, x)[0]).sum()))
    theirs = jax.tree.map(lambda *xs: sum(xs), *[alone(PARAMS, x) for x in INSTANCES])
    assert_close(ours, theirs, 1e-4)


def test_lanes_leave_a_loop_of_equinox_by_themselves():
    """Few steps are run for lanes that are done."""
    seen = []

    def counted(x):
        seen.append(x.size)
        return x

    def fn(end):
        def step(n):
            return jax.pure_callback(counted, n, n, vmap_method="broadcast_all") + 1

        return eqxi.while_loop(lambda n: n < end, step, jnp.float32(0), max_steps=64, kind="lax")

    ends = jnp.where(jnp.arange(64) % 32 == 7, 60.0, 2.0)
    results = jedbatch.batch(fn, 0, control_flow="lanes")(ends)
    np.testing.assert_array_equal(results, ends)
    steps = sum(seen)
    assert steps < 64 * 60 / 2  # which is what lock step runs, halved


def in_loops(params, n, x):
    """A loop with little work in one with much, n steps, whose lanes leave by themselves."""

    def halve(k, y):
        def step(carry):
            return carry[0] + 1, carry[1] / 2

        start = jnp.int32(0), y
        return eqxi.while_loop(
            lambda c: c[0] < k, step, start, kind="checkpointed", max_steps=8, checkpoints=2
        )[1]

    def step(carry):
        i, x, y = carry
        y = halve((n + i) % 3, y) + 1
        for _ in range(4):
            x = jnp.tanh(x @ params)
        return i + 1, x, y

    start = jnp.int32(0), x, jnp.float32(0)
    return eqxi.while_loop(
        lambda c: c[0] < n, step, start, kind="checkpointed", max_steps=64, checkpoints=2
    )


@pytest.mark.parametrize("mode", ["auto", "lanes", "lockstep"])
def test_loops_of_equinox_in_loops_keep_what_lanes_that_are_done_carry(mode):
    params = jnp.asarray(RNG.normal(size=(64, 64)) / 8, jnp.float32)
    rows = jnp.asarray(RNG.geometric(1 / 4, 72) % 40, jnp.int32), jnp.ones((72, 64), jnp.float32)
    alone = jax.jit(in_loops)
    theirs = [alone(params, *row) for row in zip(*rows, strict=True)]
    ours = jedbatch.batch(in_loops, (None, 0, 0), control_flow=mode)(params, *rows)
    assert_close(ours, jax.tree.map(lambda *xs: jnp.stack(xs), *theirs), 1e-5)


def test_an_error_of_an_instance_is_raised_and_no_other():
    eqx = pytest.importorskip("equinox")

    def root(params, x):
        return jnp.sqrt(eqx.error_if(x, x < 0, "below zero")) @ params["w"]

    batched = jedbatch.batch(root)
    xs = [np.full(4, n, np.float32) for n in range(9)]
    assert_close(batched(PARAMS, xs), loop(root, PARAMS, xs), 1e-5)
    with pytest.raises(Exception, match="below zero"):
        jax.block_until_ready(batched(PARAMS, [*xs[:8], -xs[8]]))


def conjugate_gradients(params, system):
    matrix, vector = system
    return jax.scipy.sparse.linalg.cg(lambda x: matrix @ x + 0.1 * x, vector, tol=1e-5)[0]


def descent(params, system):
    """Steps of Optax until the gradient is small, and how many."""
    matrix, vector = system
    optimizer = optax.adam(0.1)

    def gradient(x):
        return matrix @ x - vector

    def step(carry):
        x, state, n = carry
        updates, state = optimizer.update(gradient(x), state, x)
        return optax.apply_updates(x, updates), state, n + 1

    def goes_on(carry):
        return (jnp.linalg.norm(gradient(carry[0])) > 0.1) & (carry[2] < 200)

    start = jnp.zeros(4), optimizer.init(jnp.zeros(4)), 0
    x, _, n = lax.while_loop(goes_on, step, start)
    return x, n


@pytest.mark.parametrize("fn", [conjugate_gradients, descent], ids=lambda fn: fn.__name__)
def test_solvers_of_any_number_of_instances_compile_once(fn):
    systems = []
    for condition in np.geomspace(1, 20, 12):
        basis, _ = np.linalg.qr(RNG.normal(size=(4, 4)))
        matrix = (basis * np.geomspace(1, condition, 4)) @ basis.T
        systems.append((matrix.astype(np.float32), RNG.normal(size=4).astype(np.float32)))
    batched = jedbatch.batch(fn, out_axes=None)
    run = jax.jit(fn)
    assert_close(batched(PARAMS, systems), [run(PARAMS, x) for x in systems], 1e-3)
    with compilations() as compiled:
        batched(PARAMS, systems[:7])
    assert not compiled


def beam_search(params, source):
    """The words of the best translation, of up to 9, and how likely they are: a beam of 3."""
    h = lax.scan(lambda h, x: (jnp.tanh(x + h @ params["w"]), None), jnp.zeros(4), source)[0]

    def goes_on(carry):
        words, n, *_ = carry
        return (n < 9) & (words[0, jnp.maximum(n - 1, 0)] != 0)

    def step(carry):
        words, n, total, h = carry
        is_done = (n > 0) & (words[:, jnp.maximum(n - 1, 0)] == 0)
        after = jnp.tanh(params["words"][words[:, jnp.maximum(n - 1, 0)]] + h @ params["w"])
        h = jnp.where(is_done[:, None], h, after)
        scores = h @ params["words"].T
        scores = jax.nn.log_softmax(scores.at[:, 0].add(n * jnp.abs(source[0, 0])))
        only_end = jnp.where(jnp.arange(6) == 0, 0.0, -jnp.inf)
        scores = total[:, None] + jnp.where(is_done[:, None], only_end, scores)
        total, best = lax.top_k(scores.ravel(), 3)
        before, word = best // 6, best % 6
        return words[before].at[:, n].set(word), n + 1, total, h[before]

    total = jnp.array([0.0, -jnp.inf, -jnp.inf])  # all begin alike
    start = jnp.full((3, 9), 5), 0, total, jnp.broadcast_to(h, (3, 4))
    words, n, total, _ = lax.while_loop(goes_on, step, start)
    return words[0], n, total[0]


@pytest.mark.parametrize("mode", ["auto", "lanes"])
def test_beam_search_in_a_loop(mode):
    rng = np.random.default_rng(1)
    params = PARAMS | {"words": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)}
    sources = [rng.normal(size=(n, 4)).astype(np.float32) for n in (1, 3, 2, 5, 1, 4, 2, 3)]
    batched, run = jedbatch.batch(beam_search, control_flow=mode), jax.jit(beam_search)
    theirs = [run(params, x) for x in sources]
    assert len({int(n) for _, n, _ in theirs}) > 2
    assert_close(batched(params, sources), jax.tree.map(lambda *xs: jnp.stack(xs), *theirs), 1e-5)
