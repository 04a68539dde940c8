"""Residuals: products and large reductions are kept for the reverse, the rest is computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch

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
