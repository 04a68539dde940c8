"""Residuals: products and large reductions are kept for the reverse, the rest is computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch
from jedbatch import testing

CELLS = {
    "softmax": (lambda w, x: jax.nn.softmax(x @ w) * x, {"reduce_max", "reduce_sum"}),
    "logsumexp": (lambda w, x: jax.nn.logsumexp(x[None] + w, axis=1), {"reduce_max", "reduce_sum"}),
    "norm": (lambda w, x: w @ x * jax.lax.rsqrt(jnp.sum(x * x)), {"reduce_sum"}),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("size", [2, 8])
def test_large_reductions_are_not_done_again(name, size):
    fn, reductions = CELLS[name]
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(size, size)), "float32")
    instances = [rng.normal(size=size).astype("float32") for _ in range(5)]
    batched = jedbatch.batch(jedbatch.cell(fn))
    gradient = jax.grad(lambda w: jnp.sin(batched(w, instances)).sum())(w)
    loop = jax.grad(lambda w: sum(jnp.sin(fn(w, x)).sum() for x in instances))(w)
    assert_close(gradient, loop, 1e-5)
    (kernel,) = batched.plan(w, instances, gradient=True).static.signature.kernels
    (forward, _), (backward, _), _ = kernel.reverse.programs
    assert reductions <= {eqn.primitive.name for eqn in forward.eqns}
    saved = [shape for shape, _ in kernel.reverse.saved]
    if size == 8:
        assert not any(eqn.primitive.name == "reduce_max" for eqn in backward.eqns)
        assert sum(len(shape) == (name == "logsumexp") for shape in saved) >= len(reductions)
    elif name == "logsumexp":
        assert any(eqn.primitive.name == "reduce_max" for eqn in backward.eqns)


def test_random_keys_that_a_branch_reads_are_kept():
    """A key that the cell makes is read again in reverse, where it is a row of integers."""

    @jedbatch.cell
    def noisy(w, key, x):
        coin, drawn = jax.random.split(key)
        noise = lambda x: jnp.tanh(w @ x) * jax.random.normal(drawn, x.shape)  # noqa: E731
        return drawn, jax.lax.cond(jax.random.bernoulli(coin), noise, lambda x: x @ w, x)

    def walk(w, instance):
        key, x = instance
        for _ in range(3):
            key, x = noisy(w, key, x)
        return x

    instances = [(jax.random.key(k), jnp.full(2, k + 1.0)) for k in range(5)]
    testing.check_against_loop(walk, jnp.array([[0.5, 1.0], [-1.0, 0.25]]), instances)
