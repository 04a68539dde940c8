"""`max_steps`: loops that do not end are stopped, and the error names the instances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jedbatch
from jedbatch._jaxpr.bounded import bounded
from jedbatch.errors import UnfinishedLoopError

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(4, 4)) / 3, jnp.float32)
BOUND = 7


# --- programs of one lane ---


def halve(n, x):
    return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, jnp.tanh(c[1] @ W)), (n, x))


def nested(n, x):
    """A loop in a scan in a branch in a loop, in calls and a checkpoint."""

    def step(x, k):
        return jax.checkpoint(lambda x: jax.jit(halve)(n - k, x)[1])(x), k

    def body(carry):
        i, x = carry
        x = lax.cond(i % 2 == 0, lambda x: lax.scan(step, x, jnp.arange(3))[0], jnp.sin, x)
        return i + 1, x

    return lax.while_loop(lambda c: c[0] < 3, body, (0, x))


def by_count(n, x):
    return n, lax.fori_loop(0, n, lambda i, x: jnp.sin(x) + i, x)


def counted(n):
    """n, by loops in conditions of each other, the innermost in a branch in a scan."""

    def at_least(i, _):
        loop = functools.partial(lax.while_loop, lambda i: i < n, lambda i: i + 1)
        return lax.cond(i < n, loop, lambda i: i, i), None

    def innermost(i):
        return i < lax.scan(at_least, 0, None, length=2)[0]

    return lax.while_loop(innermost, lambda i: i + 1, 0)


def in_conditions(n, x):
    def body(carry):
        i, x = carry
        return i + 1, jnp.tanh(x @ W)

    return lax.while_loop(lambda c: c[0] < counted(n), body, (0, x))


PROGRAMS = {
    "halve": halve,
    "nested": nested,
    "by count": by_count,
    "in conditions": in_conditions,
}
X = jnp.asarray(rng.normal(size=4), jnp.float32)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bound_changes_nothing_until_it_is_met(name):
    fn = PROGRAMS[name]
    closed = bounded(jax.make_jaxpr(fn)(0, X), BOUND)
    run = jax.jit(functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts))
    for n in range(BOUND + 3):
        *outs, stopped = run(n, X)
        assert bool(stopped) == (n > BOUND)
        if n <= BOUND:
            expected = jax.jit(fn)(n, X)
            np.testing.assert_allclose(outs[1], expected[1], rtol=1e-5)
            np.testing.assert_array_equal(outs[0], expected[0])
        else:
            assert np.isnan(outs[1]).all()


def test_whole_numbers_are_those_of_the_last_step():
    closed = bounded(jax.make_jaxpr(halve)(0, X), BOUND)
    left, _, stopped = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, jnp.int32(100), X)
    assert (int(left), bool(stopped)) == (100 - BOUND, True)


def test_loops_that_cannot_be_reached_are_refused():
    @jax.custom_vjp
    def solve(x):
        return lax.while_loop(lambda x: x.sum() > 1e-3, lambda x: x / 2, x)

    solve.defvjp(lambda x: (solve(x), None), lambda _, c: (c,))
    batched = jedbatch.batch(jedbatch.cell(solve), in_axes=0, max_steps=9)
    with pytest.raises(ValueError, match=r"inside of `custom_vjp_call`.* Bound that loop"):
        batched([np.ones(3, np.float32)])


# --- batched functions ---


@jedbatch.cell
def settle(w, n, x):
    """n steps; negative n never ends."""

    def body(carry):
        i, x = carry
        return i + 1, jnp.tanh(x @ w)

    return lax.while_loop(lambda c: c[0] != n, body, (0, x))[1]


@jedbatch.cell
def twice(w, n, x):
    """As many steps, in loops in a loop."""

    def body(carry):
        i, x = carry
        return i + 1, lax.fori_loop(0, i, lambda _, x: x @ w, x)

    return lax.while_loop(lambda c: c[0] != n, body, (0, x))[1]


@jedbatch.cell
def asked(w, n, x):
    """As many steps, with a loop in the condition; for negative n only that one never ends."""

    def goes_on(carry):
        return carry[0] < lax.while_loop(lambda i: i != n, lambda i: i + 1, 0)

    def body(carry):
        i, x = carry
        return i + 1, jnp.tanh(x @ w)

    return lax.while_loop(goes_on, body, (0, x))[1]


def one(w, instance, cell=settle):
    n, x = instance
    return cell(w, n, cell(w, jnp.minimum(abs(n), 3), x))


def instances(count, never=()):
    numbers = rng.integers(0, BOUND + 1, count)
    numbers[list(never)] = -1
    return [(int(n), rng.normal(size=4).astype(np.float32)) for n in numbers]


@pytest.mark.parametrize("control_flow", ["auto", "lanes", "lockstep"])
@pytest.mark.parametrize(
    "cell", [settle, twice, asked], ids=["loop", "loops in a loop", "loop in a condition"]
)
def test_errors_name_the_instances(control_flow, cell):
    fn = functools.partial(one, cell=cell)
    batched = jedbatch.batch(fn, control_flow=control_flow, max_steps=BOUND)
    given = instances(90)
    theirs = jnp.stack([jax.jit(fn)(W, x) for x in given[:20]])
    np.testing.assert_allclose(batched(W, given)[:20], theirs, rtol=1e-5, atol=1e-6)
    compiled = batched.compilations
    with pytest.raises(UnfinishedLoopError, match=r"max_steps=7, .*instances 4, 30, 77") as caught:
        batched(W, instances(90, [30, 77, 4]))
    assert caught.value.instances == (4, 30, 77)
    np.testing.assert_allclose(batched(W, given)[:20], theirs, rtol=1e-5, atol=1e-6)
    assert batched.compilations == compiled


@pytest.mark.parametrize("control_flow", ["lanes", "lockstep"])
def test_loops_with_loops_in_their_conditions_have_derivatives(control_flow):
    fn = functools.partial(one, cell=asked)
    batched = jedbatch.batch(fn, control_flow=control_flow, max_steps=BOUND)
    given = instances(9)
    plan, stopped = batched.plan(W, given), batched.plan(W, instances(9, [2]))
    slope = jax.jvp(lambda w: batched.apply(w, plan), (W,), (W,))[1]
    theirs = jnp.stack([jax.jvp(lambda w, x=x: fn(w, x), (W,), (W,))[1] for x in given])
    np.testing.assert_allclose(slope, theirs, rtol=1e-4, atol=1e-5)
    slope = jax.jvp(lambda w: batched.apply(w, stopped), (W,), (W,))[1]
    np.testing.assert_array_equal(np.isnan(slope).all(1), np.arange(9) == 2)


def test_plans_raise_where_they_can_and_give_nan_where_not():
    batched = jedbatch.batch(one, max_steps=BOUND)
    given = instances(12, [5])
    plan = batched.plan(W, given, gradient=False)
    with pytest.raises(UnfinishedLoopError, match=r"`settle\(.*in instance 5\."):
        batched.apply(W, plan)
    out = jax.jit(batched.apply)(W, plan)
    assert np.isnan(out[5]).all()
    assert np.isfinite(np.delete(out, 5, axis=0)).all()
    slope = jax.jvp(lambda w: batched.apply(w, plan), (W,), (W,))[1]
    assert np.isnan(slope[5]).all()


@pytest.mark.slow
def test_exported_functions_give_nan():
    batched = jedbatch.batch(one, max_steps=BOUND)
    given = instances(6, [2])
    exported = batched.export(W, given, gradient=False)
    out = exported(W, batched.graph(W, given))
    assert np.isnan(out[2]).all()
    theirs = [jax.jit(one)(W, x) for i, x in enumerate(given) if i != 2]
    np.testing.assert_allclose(np.delete(out, 2, axis=0), theirs, rtol=1e-5, atol=1e-6)


def test_rows_of_arrays_are_named():
    batched = jedbatch.batch(lambda w, n, x: settle(w, n, x), in_axes=(None, 0, 0), max_steps=BOUND)
    n = jnp.asarray(rng.integers(0, BOUND, 70), jnp.int32)
    x = jnp.asarray(rng.normal(size=(70, 4)), jnp.float32)
    assert batched(W, n, x).shape == (70, 4)
    with pytest.raises(UnfinishedLoopError, match="instances 0, 69"):
        batched(W, n.at[0].set(100).at[69].set(-1), x)
    out = jax.jit(lambda n: batched(W, n, x))(n.at[3].set(-1))
    np.testing.assert_array_equal(np.isnan(out).any(1), np.arange(70) == 3)


def count_to(n):
    return lax.while_loop(lambda i: i != n, lambda i: i + 1, 0)


ANYWHERE = {  # the program, its shared argument; instances, of which number 1 may not end
    "shared": (lambda n, x: x * count_to(n), [(3, [1.0, 2.0]), (-1, [1.0, 2.0])]),
    "shared, in a call": (
        lambda n, x: x * jax.jit(count_to)(n),
        [(3, [1.0, 2.0]), (-1, [1.0, 2.0])],
    ),
    "a number": (lambda p, n: p * count_to(n), [(2, [1, 3]), (2, [1, -1])]),
    "rows of any length": (
        lambda p, x: lax.scan(lambda c, n: (c + count_to(n), c), 0, x)[0] * p,
        [
            (2, [np.array([1, 2, 3]), np.array([2])]),
            (2, [np.array([1, 2, 3]), np.array([2, -1])]),
        ],
    ),
}


@pytest.mark.parametrize("name", ANYWHERE)
def test_loops_are_bounded_wherever_they_are_computed(name):
    fn, ((ends, good), (never, bad)) = ANYWHERE[name]
    batched = jedbatch.batch(fn, max_steps=BOUND)
    theirs = jnp.stack([jnp.asarray(fn(ends, x)) for x in good])
    np.testing.assert_allclose(batched(jnp.int32(ends), good), theirs)
    with pytest.raises(UnfinishedLoopError, match="max_steps=7") as caught:
        batched(jnp.int32(never), bad)
    assert 1 in caught.value.instances


def test_rounds_have_the_same_bound():
    def decide(w, instance):
        n, x = instance
        steps = 0
        while steps != n and bool(jnp.abs(x).max() >= 0):
            x = settle(w, jnp.int32(2), x)
            steps += 1
        return settle(w, jnp.int32(steps), x)

    batched = jedbatch.batch(decide, max_steps=BOUND)
    given = instances(6)
    assert batched(W, given).shape == (6, 4)
    with pytest.raises(UnfinishedLoopError, match="instance 3 needs values") as caught:
        batched(W, instances(6, [3]))
    assert caught.value.instances == (3,)

    def loops(w, instance):
        n, x = instance
        if jnp.abs(x).max() >= 0:
            x = settle(w, n, x)
        return x * (1 if x.sum() > 0 else 2)

    with pytest.raises(UnfinishedLoopError, match=r"`settle\(.*instances 1, 4\.") as caught:
        jedbatch.batch(loops, max_steps=BOUND)(W, instances(6, [4, 1]))


def test_wrong_bounds_are_refused():
    for wrong, error in ((0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"`batch` got max_steps=.*expected a whole number from 1"):
            jedbatch.batch(one, max_steps=wrong)
