"""Gradients inside of cells, and gradients of these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, mostly_slow

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


def leapfrog(p, x):
    """A step of Hamiltonian Monte Carlo that is accepted or not."""

    def step(_, state):
        x, momentum = state
        momentum = momentum - 0.1 * energy_and_forces(p, x)[1]
        return x + 0.2 * momentum, momentum

    y, momentum = jax.lax.fori_loop(0, 3, step, (x, jnp.ones(3)))
    gain = energy(p, x) + 1.5 - energy(p, y) - momentum @ momentum / 2
    return jnp.where(jnp.log(jax.random.uniform(jax.random.key(3))) < gain, y, x)


def residual_of_an_equation(p, x):
    """The loss of a physics-informed network: u'' + u² at points of a line."""

    def u(t):
        return jnp.tanh(t * p["v"] + p["w"][0]) @ p["v"]

    return jax.vmap(lambda t: jax.grad(jax.grad(u))(t) + u(t) ** 2)(x)


def hessian_times_forces(p, x):
    return jax.hessian(energy, argnums=1)(p, x) @ energy_and_forces(p, x)[1]


@pytest.mark.parametrize(
    "fn",
    mostly_slow(
        [
            quadratic,
            energy_and_forces,
            curvature_along,
            leapfrog,
            residual_of_an_equation,
            hessian_times_forces,
            with_a_branch_that_returns_nothing,
            with_weights_in_a_loop,
        ],
        "quadratic",
        "curvature_along",
        "with_weights_in_a_loop",
    ),
)
def test_gradients_in_cells(fn):
    check(jedbatch.cell(fn), PARAMS, XS, rtol=1e-4)


def of_what_is_squeezed(p, x):
    """In the gradient is a `jit` without results, as all that it returns is known beforehand."""
    return jax.grad(lambda y: jnp.squeeze(jnp.tanh(y)) @ p["a"][0])(x)


@pytest.mark.parametrize("fn", [of_what_is_squeezed, with_a_branch_that_returns_nothing])
def test_operations_without_results(fn):
    """Outside of cells there is no node for them."""
    check(fn, PARAMS, XS, rtol=1e-4)
    types = jedbatch.batch(fn, granularity="cell").plan(PARAMS, XS).graph.types
    assert all(node_type.results for node_type in types)
