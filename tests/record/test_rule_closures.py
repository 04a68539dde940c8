"""Derivative rules that read arrays besides their arguments, against the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, mostly_slow
from jax import lax

import jedbatch

pytestmark = pytest.mark.unoptimized

WEIGHT = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
MIXES = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32)
INSTANCES = [jnp.asarray(np.random.default_rng(k).normal(size=3), jnp.float32) for k in range(3)]
STATE = {"scale": jnp.ones(3)}


@jax.custom_vjp
def mixed(x):
    """tanh(x G) of an array G that it closes over, with twice the gradient."""
    return jnp.tanh(x @ MIXES)


def mixed_back(kept, slope):
    return (2 * (slope * (1 - kept**2)) @ MIXES.T,)


mixed.defvjp(lambda x: (mixed(x),) * 2, mixed_back)


@jax.custom_vjp
def scaled(x):
    """x, with its gradient multiplied by what is in `STATE` then."""
    return 1.0 * x


scaled.defvjp(lambda x: (scaled(x), None), lambda _, slope: (slope * STATE["scale"],))

CALLS = {
    "plain": lambda w, x: mixed(x @ w),
    "cell": jedbatch.cell(lambda w, x: mixed(x @ w)),
    "jit": lambda w, x: jax.jit(mixed)(x @ w),
    "mapped": lambda w, x: jax.vmap(mixed)(jnp.stack([x, x @ w])),
    "in a loop": lambda w, x: lax.scan(lambda c, i: (mixed(c @ w + i), c), x, jnp.arange(3.0)),
    "in a branch": lambda w, x: lax.cond(x[0] > 0, mixed, jnp.sin, x @ w),
    "array read elsewhere": lambda w, x: mixed(x @ w) + x @ MIXES,
}


def slopes(fn, batched=None):
    """Gradients of the weight and the instances."""

    def loss(weight, instances):
        run = batched or (lambda w, xs: [fn(w, x) for x in xs])
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(run(weight, instances)))

    return jax.grad(loss, argnums=(0, 1))(WEIGHT, INSTANCES)


@pytest.mark.parametrize("name", mostly_slow(CALLS, "plain", "in a loop"))
def test_arrays_that_functions_with_rules_close_over(name):
    fn = CALLS[name]
    batched = jedbatch.batch(fn)
    assert_close(slopes(fn, batched), slopes(fn), 2e-5)


@pytest.mark.parametrize("make", [lambda fn: fn, jedbatch.cell], ids=["plain", "cell"])
def test_rules_read_what_is_there_now(make, monkeypatch):
    inner = make(lambda w, x: scaled(x @ w))
    fn = lambda w, x: inner(w, x)  # noqa: E731
    batched = jedbatch.batch(fn)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(STATE, "scale", jnp.full(3, scale))
        jax.clear_caches()  # JAX keeps rules, too
        assert_close(slopes(fn, batched), slopes(fn), 2e-5)


def test_what_is_differentiated_is_not_taken_for_an_array_without_a_gradient():
    def loss(mixes):
        @jax.custom_vjp
        def inner(x):
            return jnp.tanh(x @ mixes)

        inner.defvjp(lambda x: (inner(x), x), lambda x, slope: (slope @ mixes.T,))
        return jedbatch.batch(inner, in_axes=0)(INSTANCES).sum()

    with pytest.raises(Exception, match=r"closed-over|Leaked|leaked|tracer"):
        jax.grad(loss)(MIXES)
