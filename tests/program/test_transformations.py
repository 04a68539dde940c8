"""Under JAX's transformations a batched function is like any JAX function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_close, loop, mostly_slow, number
from jax.test_util import check_grads

import jedbatch


@pytest.fixture(scope="module")
def case():
    fn, params, instances = programs.tree_cells(5, seed=1)
    return fn, params, instances, jedbatch.batch(fn)


def test_jit(case):
    fn, params, instances, batched = case
    got = jax.jit(lambda p: batched(p, instances))(params)
    assert_close(got, loop(fn, params, instances), 1e-5)


@pytest.mark.parametrize(
    "make", mostly_slow([programs.mixed, programs.dropout, programs.no_work], "no_work")
)
def test_recording_inside_a_transformation(make):
    """Single operations and constants, recorded while JAX traces the caller."""
    fn, params, instances = make(4, seed=3)
    batched = jedbatch.batch(fn)
    slope = jax.grad(lambda p: number(loop(fn, p, instances)))(params)
    got = jax.jit(jax.grad(lambda p: number(batched(p, instances))))(params)
    assert_close(got, slope, 1e-5)
    again = jax.grad(lambda p: number(batched(p, instances)))(params)  # nothing traced was kept
    assert_close(again, slope, 1e-5)


def test_jit_of_a_train_step(case):
    fn, params, instances, batched = case

    @jax.jit
    def step(params, plan):
        value, slope = jax.value_and_grad(lambda p: number(batched.apply(p, plan)))(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, slope)

    value, updated = step(params, batched.plan(params, instances))
    expected, slope = jax.value_and_grad(lambda p: number(loop(fn, p, instances)))(params)
    assert_close(value, expected, 1e-5)
    assert_close(updated, jax.tree.map(lambda p, g: p - 0.1 * g, params, slope), 1e-5)


def test_vmap_over_params(case):
    fn, params, instances, batched = case
    many = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), params)
    expected = jax.vmap(lambda p: loop(fn, p, instances))(many)
    assert_close(jax.vmap(lambda p: batched(p, instances))(many), expected, 1e-5)
    slope = jax.vmap(jax.grad(lambda p: number(loop(fn, p, instances))))(many)
    assert_close(jax.vmap(jax.grad(lambda p: number(batched(p, instances))))(many), slope, 1e-5)


def test_checkpoint(case):
    fn, params, instances, batched = case
    slope = jax.grad(lambda p: number(loop(fn, p, instances)))(params)
    run = jax.checkpoint(lambda p: number(batched(p, instances)))
    assert_close(jax.grad(run)(params), slope, 1e-5)


def test_vjp_and_jacrev(case):
    fn, params, instances, batched = case
    few = {"b": params["b"]}

    def by_loop(b):
        return loop(fn, {**params, **b}, instances)

    def by_batch(b):
        return batched({**params, **b}, instances)

    assert_close(jax.jacrev(by_batch)(few), jax.jacrev(by_loop)(few), 1e-5)
    value, pull = jax.vjp(by_batch, few)
    expected, pull_loop = jax.vjp(by_loop, few)
    assert_close(value, expected, 1e-5)
    assert_close(pull(value), pull_loop(expected), 1e-5)


@pytest.mark.slow
def test_hessian(case):
    """Forward over reverse, and reverse over reverse."""
    fn, params, instances, batched = case
    of = lambda run: lambda b: number(run({**params, "b": b}))  # noqa: E731
    by_loop = of(lambda p: loop(fn, p, instances))
    by_batch = of(lambda p: batched(p, instances))
    assert_close(jax.hessian(by_batch)(params["b"]), jax.hessian(by_loop)(params["b"]), 1e-4)


def test_numerical_gradients(x64):
    fn, params, instances = programs.several_results(4, seed=2)
    params = jax.tree.map(lambda p: p.astype(np.float64), params)
    batched = jedbatch.batch(fn)
    check_grads(lambda p: number(batched(p, instances)), (params,), order=1, modes=["rev"])


def test_tracers_of_outer_transformations(case):
    """What the function closes over may be traced."""
    fn, params, instances, _ = case

    def total(run):
        def loss(w):
            return number(run(lambda p, t: fn(p, t) * w + jnp.sin(w)))

        return loss

    w = jnp.float32(0.3)
    by_loop = total(lambda fn: loop(fn, params, instances))
    by_batch = total(lambda fn: jedbatch.batch(fn)(params, instances))
    assert_close(jax.value_and_grad(by_batch)(w), jax.value_and_grad(by_loop)(w), 1e-5)
    assert_close(jax.jit(by_batch)(w), by_loop(w), 1e-5)
    ws = jnp.arange(3.0)
    assert_close(jax.vmap(by_batch)(ws), jax.vmap(by_loop)(ws), 1e-5)


def test_a_function_batched_once_sees_new_tracers():
    """Tracers are no part of what is remembered."""
    cell = jedbatch.cell(lambda p, x: p * x)
    box = []
    batched = jedbatch.batch(lambda p, n: cell(p, n) * box[-1] if n < 5 else cell(p, n))

    def run(w, instances=(1.0, 2.0)):
        box.append(w)
        return batched(jnp.ones(2), instances).sum()

    assert float(jax.grad(lambda w: run(w * w))(3.0)) == 36
    assert float(jax.grad(lambda w: run(w * w))(4.0)) == 48
    assert float(run(None, [6.0, 7.0])) == 26  # not in a program that needs a tracer
    assert float(jax.grad(lambda w: run(w * w))(5.0)) == 60


def test_instances_may_be_traced():
    """Arrays of instances under grad, jit and vmap."""
    fn = lambda p, x: jnp.sin(p * x["a"]) + x["b"][0]  # noqa: E731
    p = jnp.arange(1.0, 3.0)
    xs = [{"a": jnp.ones(2) * i, "b": [jnp.float32(i)]} for i in range(3)]
    batched = jedbatch.batch(fn)
    run = lambda xs: number(batched(p, xs))  # noqa: E731
    by_loop = lambda xs: number(loop(fn, p, xs))  # noqa: E731
    assert_close(jax.grad(run)(xs), jax.grad(by_loop)(xs), 1e-5)
    assert_close(jax.jit(jax.grad(run))(xs), jax.grad(by_loop)(xs), 1e-5)
    many = jax.tree.map(lambda x: jnp.stack([x, x + 1]), xs)
    assert_close(jax.vmap(run)(many), jax.vmap(by_loop)(many), 1e-5)


def test_a_batched_function_inside_a_scan(case):
    fn, params, instances, batched = case
    plan = batched.plan(params, instances)

    def descend(params, _):
        slope = jax.grad(lambda p: number(batched.apply(p, plan)))(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, slope), slope["b"].sum()

    def by_loop(params):
        slope = jax.grad(lambda p: number(loop(fn, p, instances)))(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, slope)

    got, _ = jax.lax.scan(descend, params, length=2)
    assert_close(got, by_loop(by_loop(params)), 1e-5)


def test_a_plan_is_a_pytree(case):
    _, params, instances, batched = case
    plan = batched.plan(params, instances)
    leaves, structure = jax.tree.flatten(plan)
    again = jax.tree.unflatten(structure, leaves)
    np.testing.assert_array_equal(batched.apply(params, again), batched.apply(params, plan))
    assert "did not survive flattening" in str(again)
    assert again.graph is None
    assert again.schedule is None
