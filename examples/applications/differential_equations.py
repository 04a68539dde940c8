"""Differential equations: networks of oscillators, stiff to different degrees, in one batch.

Van der Pol's oscillators that pull at each other. Networks differ in stiffness by a factor of 100,
and an explicit solver with an adaptive step size, that of Diffrax here, takes more steps for those
that are stiffer. Numbers have 64 bits; the tests use 32.

    python examples/applications/differential_equations.py [--quick] [--write]
"""

import diffrax
import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

BLOCK = 16  # networks that the sorted rival solves together

# --- one network ---


def field(t, state, args):
    stiffness, pull = args
    x, v = state
    return jnp.stack([v, stiffness * (1 - x**2) * v - x + pull @ x])


def solve(params, stiffness):
    """Returns the last state [2, oscillators], and how many steps were tried."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=params["until"],
        dt0=1e-3,
        y0=jnp.stack([params["start"], jnp.zeros_like(params["start"])]),
        args=(stiffness, params["pull"]),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-6),
        max_steps=4096,
    )
    return solution.ys[-1], solution.stats["num_steps"]


# --- `vmap` ---

by_vmap = jax.jit(jax.vmap(solve, (None, 0)))

# --- sorted ---


@jax.jit
def in_order(params, stiffness):
    """Networks that are about as stiff are solved together, block after block."""
    order = jnp.argsort(stiffness)
    results = jax.lax.map(lambda s: solve(params, s), stiffness[order], batch_size=BLOCK)
    return jax.tree.map(lambda x: jnp.zeros_like(x).at[order].set(x), results)


# --- `lax.map` ---


@jax.jit
def one_by_one(params, stiffness):
    return jax.lax.map(lambda s: solve(params, s), stiffness)


# --- networks ---


def make(quick):
    rng = np.random.default_rng(0)
    count, size, until, many = (5, 3, 0.1, 2) if quick else (256, 32, 5.0, 8)
    pull = rng.normal(size=(size, size)) / (10 * np.sqrt(size))
    params = {
        "start": jnp.linspace(2.0, 1.0, size),
        "pull": jnp.asarray(pull, float),
        "until": jnp.asarray(until, float),
    }
    draws = rng.uniform(0, 2, (measuring.WARM + many, count))
    minibatches = list(jnp.asarray(10**draws, float))

    def sides():
        for function in (by_vmap, in_order, one_by_one):
            function.clear_cache()
        arrays = lambda _, minibatch: minibatch
        return {
            "jedbatch": Side(arrays, jedbatch.batch(solve)),
            "`vmap`": Side(arrays, by_vmap),
            "sorted by stiffness": Side(arrays, in_order),
            "`lax.map`": Side(arrays, one_by_one, few=2),
        }

    def loop(params, minibatch):
        results = [solve(params, stiffness) for stiffness in minibatch]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    return Application(params, minibatches, loop, sides, rtol=1e-3)


def illustrate(axis):
    """Steps by stiffness."""
    application = make(False)
    for stiffness in application.minibatches:
        steps = by_vmap(application.params, stiffness)[1]
        axis.plot(stiffness, steps, ".", color="C0", alpha=0.3)
    axis.set(xlabel="stiffness", ylabel="steps", xscale="log", ylim=(0, None))


SHARES = {
    "jedbatch": ["one network"],
    "`vmap`": ["one network", "`vmap`"],
    "sorted by stiffness": ["one network", "sorted"],
    "`lax.map`": ["one network", "`lax.map`"],
}

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
