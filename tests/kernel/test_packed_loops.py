"""Loops in one kernel, against one lane after the other and a simulation of counts."""

import functools

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

from jedbatch._jaxpr.interpret import work
from jedbatch._jaxpr.packed_loops import EXCHANGE, PLACES, packs
from jedbatch._jaxpr.program_counters import LaneRule
from jedbatch._jaxpr.single_kernel import MOST_ELEMENTS, MOST_PRODUCTS, with_sums

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(4, 4)) / 2, jnp.float32)
COUNTS = {
    "geometric": RNG.geometric(1 / 9, 300),
    "log-normal": np.exp(RNG.normal(size=256) + 2).astype(int),
    "none": np.zeros(128, int),
    "equal": np.full(128, 9),
    "one long": np.where(np.arange(128) == 100, 200, 1),
    "two kinds": np.where(np.arange(256) % 3, 40, 3),
}


def has_kernel(lowered):
    return 'xla_cpu_small_call = "true"' in lowered.as_text()


def repeated(change):
    """Returns a loop that changes a vector as often as a number says, and keeps a part of it."""

    def run(n, x):
        def body(carry):
            i, x, kept = carry
            return i + 1, change(x) + kept / (i + 1.0), kept

        return lax.while_loop(lambda carry: carry[0] < n, body, (0, x, x[0]))

    return run


steps = repeated(lambda x: jnp.tanh(x @ W))


def simulated(trips):
    """Returns (lanes, steps, steps needed): of all together, and of some at a time."""
    left = np.array(trips)
    first = after = wasted = needed = 0
    while (left > 0).any() and wasted < EXCHANGE * (left > 0).sum():
        wasted += (left <= 0).sum()
        needed += (left > 0).sum()
        left = left - 1
        first += 1
    waiting = list(left[left > 0])
    rest = sum(waiting)
    running = []
    while waiting or running:
        while waiting and len(running) < PLACES:
            running.append(waiting.pop(0))
        trip = min(running) if waiting else max(running)
        after += trip
        running = [n - trip for n in running if n > trip]
    return {(len(trips), first, needed), (PLACES, after, rest)}


@pytest.mark.parametrize("counts", COUNTS)
def test_loops_give_what_they_give_one_by_one_in_the_steps_that_are_simulated(counts):
    n = jnp.asarray(COUNTS[counts], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(len(n), 4)), jnp.float32)
    found, ran = run_counted(steps, n, x)
    close(found, loop(steps, n, x))
    assert {(c.width, c.steps, c.needed) for c in ran} == {
        x for x in simulated(COUNTS[counts]) if x[1]
    }
    assert ran.needed == COUNTS[counts].sum()
    if counts == "equal":
        assert [(c.width, c.steps) for c in ran] == [(128, 9)]  # nobody is exchanged
    if counts == "log-normal":
        assert ran.lanes < 0.5 * 256 * COUNTS[counts].max()


def test_which_loops_are_packed():
    assert packs(256, 263, 5e4)
    assert packs(64, 30, 5e4)
    assert not packs(32, 10**6, 5e4)  # too few for places to be refilled
    assert not packs(256, 2, 5e4)  # a step is started for longer than it runs
    assert not packs(1 << 16, 263, 5e4)  # cores share a step of all
    n, x = jnp.asarray(COUNTS["geometric"], jnp.int32), jnp.ones((300, 4), jnp.float32)
    widths = lambda fn, **how: {c.width for c in run_counted(fn, n, x, **how)[1]}  # noqa: E731
    assert widths(steps) == {300, PLACES}
    assert widths(repeated(jnp.sort)) == set()  # no kernel sorts
    assert widths(steps, mode="lockstep") == set()
    without = LaneRule(step_work=3e3, nests=False)  # as on a GPU
    assert PLACES not in widths(steps, rule=without)


def test_versions_of_xla_that_nobody_has_tried_have_no_kernels(monkeypatch):
    n, x = jnp.asarray(COUNTS["geometric"], jnp.int32), jnp.ones((300, 4), jnp.float32)
    versions = {"0.10.2": True, "0.12.9": True, "0.13.0": False, "1.0": False}
    for version, is_tried in versions.items():
        monkeypatch.setattr(jax.lib, "__version__", version)
        run = jax.jit(over_lanes(steps, n, x, mode="auto", rule=CHEAP))
        assert has_kernel(run.lower(n, x)) == is_tried


def at_one_place(x):
    return x.at[1].set(x.sum())


BODIES = {
    "a product with a shared matrix": lambda x: jnp.tanh(x @ W),
    "a product of vectors": lambda x: jnp.tanh(x * (x @ x)),
    "a product of matrices": lambda x: jnp.tanh(
        (x.reshape(2, 2) @ W[:2, :2] @ x.reshape(2, 2)).reshape(4)
    ),
    "functions": lambda x: jnp.sin(x) + jnp.exp(-x * x) + jnp.log1p(abs(x)) ** 0.3,
    "reductions": lambda x: x - x.max() + x.argmax() / 9 + jnp.cumsum(x)[::-1] / 9,
    "rows at places": lambda x: jnp.tanh(x[jnp.array([2, 0, 1, 3])] + x[x.argmax()]),
    "one place": lambda x: jnp.tanh(at_one_place(x)),
    "a place of the lane": lambda x: jnp.tanh(x.at[x.argmax()].set(0.5)),
    "sorting": lambda x: jnp.tanh(jnp.sort(x)),
    "a branch": lambda x: lax.cond(x[0] > 0, jnp.tanh, lambda x: x / 2, x),
    "a loop": lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x + i), x),
    "a scan": lambda x: lax.scan(lambda c, y: (jnp.tanh(c + y), c), x[0], x)[1],
    "random numbers": lambda x: jnp.tanh(x + jax.random.normal(jax.random.key(0), (4,))),
    "whole numbers": lambda x: (x.astype(jnp.int32) // 3 % 5 ^ 3) + jnp.tanh(x),
    "solving": lambda x: jnp.tanh(jnp.linalg.solve(9 * jnp.eye(4) + W, x)),
    "complex numbers": lambda x: jnp.tanh(jnp.real(jnp.exp(1j * x))),
    "half precision": lambda x: jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32),
}
NOT_IN_KERNELS = {
    "a place of the lane",
    "sorting",
    "solving",
    "complex numbers",
    "half precision",
    "no elements",
}


@pytest.mark.parametrize("body", BODIES)
def test_bodies_compile_and_give_what_they_give_one_by_one(body):
    """XLA refuses what a kernel cannot have, so what is packed must be known to compile."""
    fn = repeated(BODIES[body])
    n = jnp.asarray(RNG.geometric(1 / 5, 96), jnp.int32)
    x = jnp.asarray(RNG.normal(size=(96, 4)), jnp.float32)
    (looped,) = [e for e in jax.make_jaxpr(fn)(n[0], x[0]).eqns if e.primitive.name == "while"]
    rule = LaneRule(step_work=90.0 * sum(map(work, looped.params["body_jaxpr"].jaxpr.eqns)))
    run = jax.jit(over_lanes(fn, n, x, mode="auto", rule=rule))
    close(run(n, x), loop(fn, n, x), 2e-2 if body == "half precision" else 1e-5)
    assert has_kernel(run.lower(n, x)) == (body not in NOT_IN_KERNELS)


@pytest.mark.parametrize(
    ("shapes", "dimensions"),
    [
        pytest.param(((4,), (4, 3)), (((0,), (0,)), ((), ())), id="vector, matrix"),
        pytest.param(((3, 4), (4, 5)), (((1,), (0,)), ((), ())), id="matrices"),
        pytest.param(((2, 3, 4), (4, 5, 2)), (((2,), (0,)), ((0,), (2,))), id="of several"),
        pytest.param(((2, 3), (4, 5)), (((), ()), ((), ())), id="outer"),
        pytest.param(((2, 3, 4), (3, 2, 4)), (((0, 1), (1, 0)), ((2,), (2,))), id="two axes"),
    ],
)
def test_products_are_sums(shapes, dimensions):
    x, y = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes)
    product = lambda x, y: lax.dot_general(x, y, dimensions)  # noqa: E731
    nested = jax.make_jaxpr(jax.jit(product))(x, y)
    program = with_sums(nested)
    (found,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, x, y)
    close(found, product(x, y))
    is_small = found.size * np.prod([x.shape[i] for i in dimensions[0][0]]) <= MOST_PRODUCTS
    is_sum = "dot_general" not in str(program)
    assert is_sum == is_small


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x - x.sum(), id="a sum"),
        pytest.param(lambda x: jnp.tanh(x @ jnp.full((len(x), len(x)), 0.1)), id="a product"),
    ],
)
@pytest.mark.parametrize("size", [2, 5, 16, 31, 33, 64, 257, 512])
def test_large_values_are_in_no_kernel(change, size):
    """XLA reduces them by a library, which it cannot call from a kernel."""
    n, x = jnp.arange(64, dtype=jnp.int32), jnp.ones((64, size), jnp.float32)
    fn = lambda n, x: repeated(change)(n, x)[1]  # noqa: E731
    program = jax.make_jaxpr(fn)(n[0], x[0])
    (looped,) = [e for e in program.eqns if e.primitive.name == "while"]
    rule = LaneRule(step_work=60.0 * sum(map(work, looped.params["body_jaxpr"].jaxpr.eqns)))
    run = jax.jit(over_lanes(fn, n, x, mode="auto", rule=rule))
    close(run(n, x), loop(fn, n, x), 1e-4)
    if size * PLACES > MOST_ELEMENTS:
        assert not has_kernel(run.lower(n, x))
    elif size == 2:
        assert has_kernel(run.lower(n, x))


UNREAD = {
    "a constant": (jnp.zeros(3), lambda x, kept: kept),
    "other kinds": ([jnp.zeros(3), True, 0, 0.5, jax.random.key(0)], lambda x, kept: kept),
    "what no result needs": (jnp.zeros(3), lambda x, kept: kept + x[0]),
    "no elements": (jnp.zeros((0, 3)), lambda x, kept: kept + x[0]),
    "complex numbers": (jnp.zeros(3, complex), lambda x, kept: kept),
    "half precision": (jnp.zeros(3, jnp.bfloat16), lambda x, kept: kept),
}


@pytest.mark.parametrize("what", UNREAD)
def test_loops_may_carry_what_nothing_reads(what):
    """XLA aborts the process where a kernel has an operand on which none of its results depends."""
    first, change = UNREAD[what]

    def fn(n, x):
        def body(carry):
            i, x, kept = carry
            return i + 1, jnp.tanh(x @ W), change(x, kept)

        return lax.while_loop(lambda carry: carry[0] < n, body, (0, x, first))[:2]

    n = jnp.asarray(RNG.geometric(1 / 5, 96), jnp.int32)
    x = jnp.asarray(RNG.normal(size=(96, 4)), jnp.float32)
    run = jax.jit(over_lanes(fn, n, x, mode="auto", rule=CHEAP))
    close(run(n, x), loop(fn, n, x))
    assert has_kernel(run.lower(n, x)) == (what not in NOT_IN_KERNELS)


def test_constants_are_operands_of_kernels():
    """XLA put some of them into the kernel, and aborted, as it then no longer reads them."""
    n = jnp.asarray(RNG.geometric(1 / 5, 300), jnp.int32)
    with jax.enable_x64(True):
        x, m = jnp.ones((300, 4)), jnp.asarray(RNG.integers(0, 9, (300, 7)), jnp.uint64)

        def fn(n, x, m):
            def body(carry):
                return carry[0] + 1, jnp.tanh(lax.cumsum(m)[:4].astype(x.dtype)) + carry[1] / 2

            return lax.while_loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x))

        run = over_lanes(fn, n, x, m, mode="auto", rule=LaneRule(step_work=1e3))
        run = jax.jit(functools.partial(run, n, x, m))
        assert has_kernel(run.lower())
        close(run(), loop(fn, n, x, m))


def test_nan_random_keys_and_lanes_that_do_not_run():
    n = jnp.asarray(COUNTS["geometric"], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(300, 4)), jnp.float32).at[7].set(np.nan)
    close(run_counted(steps, n, x)[0], loop(steps, n, x))
    keys = jax.random.split(jax.random.key(0), 300)
    run = jax.jit(over_lanes(walk, keys, n, mode="auto", rule=LaneRule(step_work=2e3)))
    close(run(keys, n), loop(walk, keys, n))
    assert has_kernel(run.lower(keys, n))


@jax.custom_jvp
def with_rule(x):
    return jnp.tanh(x)


@with_rule.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.tanh(x), jnp.sort(t) * (1 - jnp.tanh(x) ** 2)  # no kernel sorts


@pytest.mark.parametrize("fn", [steps, repeated(with_rule)], ids=["tanh", "a rule"])
def test_transformations_see_no_kernel(fn):
    n = jnp.asarray(COUNTS["geometric"], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(300, 4)), jnp.float32)
    tangents = jnp.asarray(RNG.normal(size=x.shape), jnp.float32)
    run = over_lanes(fn, n, x, mode="auto", rule=CHEAP)
    push = lambda fn: lambda n, x, t: jax.jvp(lambda x: fn(n, x)[1], (x,), (t,))[1]  # noqa: E731
    close(jax.jit(push(run))(n, x, tangents), loop(push(fn), n, x, tangents), 1e-4)
    many = jnp.stack([x, x + 1])
    expected = [loop(fn, n, rows) for rows in many]
    found = jax.jit(jax.vmap(lambda x: run(n, x)))(many)
    close(found, jax.tree.map(lambda *rows: jnp.stack(rows), *expected))


def orbit(n, stiffness):
    """As many steps as a number says, for an oscillator."""

    def step(carry):
        i, (x, v) = carry
        for _ in range(10):
            x, v = x + 1e-3 * v, v + 1e-3 * (stiffness * (1 - x * x) * v - x)
        return i + 1, (x, v)

    start = 0, (jnp.float32(2), jnp.float32(0))
    return lax.while_loop(lambda carry: carry[0] < n, step, start)[1]


@pytest.mark.parametrize("kind", ["rows", "cells"])
def test_other_counts_compile_nothing_and_bounds_name_the_instance(kind):
    check_counts_and_bounds(orbit, kind)
