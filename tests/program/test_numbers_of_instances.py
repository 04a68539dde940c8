"""Stacked results of any number of instances, by programs made for more of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close as assert_within
from cases.helpers import assert_no_recompile, random_tree

import jedbatch

P = jnp.array([0.5, 0.7, 0.9])
assert_close = functools.partial(assert_within, rtol=1e-5)


@jedbatch.cell
def joined_states(params, left, right):
    return jnp.tanh(params * (left + right)), left * right


def fold(params, tree):
    """Two results of one kind, one of another, a flag and a random key."""

    def state(tree):
        if isinstance(tree, tuple):
            return joined_states(params, state(tree[0])[0], state(tree[1])[0])
        return params * tree, params + tree

    a, b = state(tree)
    return {"a": a, "b": b, "c": a.sum(), "is": b[0] > 0, "key": jax.random.key(3)}


def loop(params, trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *[fold(params, tree) for tree in trees])


def trees(count, seed):
    rng = np.random.default_rng(seed)
    return [random_tree(rng, 4, lambda: np.float32(rng.normal())) for _ in range(count)]


def by_data(results):
    """Results, the keys as their data."""
    return {**results, "key": jax.random.key_data(results["key"])}


LOSSES = {
    "all": lambda r: (r["a"] ** 2).sum() + (r["b"] * r["c"][:, None]).sum(),
    "one": lambda r: (r["b"][:, 0] ** 3).sum(),
    "last": lambda r: r["c"][-1] ** 2,
}


@pytest.fixture(scope="module")
def fold_all():
    """The function batched, compiled for 8 instances, with gradients of each loss."""
    batched = jedbatch.batch(fold)
    batched(P, trees(8, 0))
    for loss in LOSSES.values():
        jax.grad(lambda p, loss=loss: loss(batched(p, trees(8, 0))))(P)
    return batched


@pytest.mark.parametrize("count", [1, 3, 7])
def test_fewer_instances_compile_nothing(fold_all, count):
    """Neither for values nor for gradients, whatever a loss reads."""
    compiled = fold_all.compilations
    given = trees(count, count)
    with assert_no_recompile():
        results = fold_all(P, given)
    assert_close(by_data(results), by_data(loop(P, given)))
    for loss in LOSSES.values():
        own = jax.grad(lambda p, loss=loss: loss(fold_all(p, given)))(P)
        assert_close(own, jax.grad(lambda p, loss=loss: loss(loop(p, given)))(P))
    assert fold_all.compilations == compiled


def test_cotangents_of_numpy(fold_all):
    """Arrays of NumPy are pulled back, of which JAX makes none of its own."""
    given, read = trees(5, 2), lambda results: (results["a"], results["b"])
    rng = np.random.default_rng(0)
    sent = tuple(rng.normal(size=(5, len(P))).astype(np.float32) for _ in range(2))
    pulled, expected = (
        jax.vjp(lambda p, run=run: read(run(p, given)), P)[1](sent) for run in (fold_all, loop)
    )
    assert_close(pulled, expected)


def test_plans_of_fewer_instances(fold_all):
    """Called, compiled, mapped and differentiated in forward mode."""
    given, others = trees(5, 9), jnp.stack([P, P * 1.5])
    plan = fold_all.plan(P, given)
    loss = LOSSES["all"]
    for run in (fold_all.apply, jax.jit(fold_all.apply)):
        assert_close(by_data(run(P, plan)), by_data(loop(P, given)))
        gradient = jax.grad(lambda p, run=run: loss(run(p, plan)))(P)
        assert_close(gradient, jax.grad(lambda p: loss(loop(p, given)))(P))
    mapped = jax.vmap(lambda p: fold_all(p, given)["b"])(others)
    assert_close(mapped, jnp.stack([loop(p, given)["b"] for p in others]))
    both = [jax.jvp(lambda p, f=f: f(p, given)["a"], (P,), (P,)) for f in (fold_all, loop)]
    assert_close(*both)


def test_results_can_be_given_away(fold_all):
    """Donated results leave others as they are, and outlive the call; a device stays the same."""
    device = jax.devices()[-1]
    given = trees(7, 2)
    results = fold_all(jax.device_put(P, device), given)
    assert results["a"].committed
    assert results["a"].devices() == {device}
    gone = jax.jit(lambda x: x * 0 - 5, donate_argnums=0)(results.pop("a"))
    assert (gone == -5).all()
    assert_close(results["b"], loop(P, given)["b"])


def test_programs_grow_by_a_factor():
    """One more instance in each call: the numbers that programs are made for double."""
    batched = jedbatch.batch(fold)
    plans = [batched.plan(P, trees(count, 0)) for count in range(1, 31)]
    made = {sum(plan.static.signature.returned.values()) for plan in plans}
    assert made == {5 * count for count in (1, 2, 4, 8, 16, 32)}


def test_the_program_for_just_as_many_comes_first():
    """Beside one for more of them."""
    batched = jedbatch.batch(fold)
    for count in (8, 30, 8):
        plan = batched.plan(P, trees(count, count), gradient=False)
    assert set(plan.static.signature.returned.values()) <= {8, 16}


def test_rounds_of_fewer_instances():
    """Of a function that decides on values: so many and more share programs."""

    def halve(params, x):
        state = params * x
        while float(jax.lax.stop_gradient(state.sum())) > 1:
            state = state * 0.4
        return state, state * 2

    def halve_each(params, given):
        return tuple(map(jnp.stack, zip(*[halve(params, x) for x in given], strict=True)))

    batched = jedbatch.batch(halve)
    given = [np.full(3, k, np.float32) for k in range(7)]
    batched(P, given)
    jax.grad(lambda p: batched(p, given)[1].sum())(P)
    compiled = batched.compilations
    for count in (5, 6):
        assert_close(batched(P, given[:count]), halve_each(P, given[:count]))
        jax.grad(lambda p, count=count: batched(p, given[:count])[1].sum())(P)
    assert batched.compilations == compiled
