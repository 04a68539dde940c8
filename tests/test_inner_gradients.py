"""Gradients inside of cells, and gradients of these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import check

import jedbatch

RANDOM = np.random.default_rng(0)
PARAMS = {
    "a": jnp.asarray(RANDOM.normal(size=(3, 3)), jnp.float32),
    "w": jnp.asarray(RANDOM.normal(size=(3, 4)), jnp.float32),
    "v": jnp.asarray(RANDOM.normal(size=4), jnp.float32),
}
XS = [RANDOM.normal(size=3).astype(np.float32) for _ in range(2)]


def energy(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def quadratic(p, x):
    return jax.grad(lambda y: y @ p["a"] @ y)(x)


def energy_and_forces(p, x):
    return jax.value_and_grad(energy, argnums=1)(p, x)


def curvature_along(p, x):
    return jax.jvp(jax.grad(lambda y: energy(p, y)), (x,), (x,))[1]


def with_a_branch_that_returns_nothing(p, x):
    jax.lax.cond(x.sum() > 0, lambda: None, lambda: None)
    return energy(p, x)


def with_weights_in_a_loop(p, x):
    """Of the results of the loop one is not returned."""
    return jax.lax.scan(lambda c, w: (jnp.tanh(c * w), c * w), x, p["w"].T)[0]


@pytest.mark.parametrize(
    "fn",
    [
        quadratic,
        energy_and_forces,
        curvature_along,
        with_a_branch_that_returns_nothing,
        with_weights_in_a_loop,
    ],
)
def test_gradients_in_cells(fn):
    check(jedbatch.cell(fn), PARAMS, XS, rtol=1e-4)
