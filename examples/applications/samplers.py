"""Samplers: chains of the No-U-Turn sampler, whose trajectories differ in length from draw to draw.

The posterior of a logistic regression whose weights have a common scale, which is sampled too. The
sampler is BlackJAX's (Hoffman and Gelman, 2014): it doubles a trajectory until that turns back. A
chain is an instance with a random key of its own. Numbers have 64 bits, as is usual for posteriors;
the tests use 32.

    python examples/applications/samplers.py [--quick] [--write]
"""

import blackjax
import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

DRAWS = 10

# --- one chain ---


def log_density(data, position):
    """Of the logarithm of the scale, and weights in units of it."""
    log_scale, weights = position[0], position[1:]
    logits = data["features"] @ (jnp.exp(log_scale) * weights)
    likelihood = jnp.sum(data["labels"] * logits - jnp.logaddexp(0.0, logits))
    return likelihood - 0.5 * weights @ weights - 0.5 * log_scale**2


def chain(data, seed):
    """Returns the mean of the draws [dimensions], and leapfrog steps of each."""
    size = data["features"].shape[1] + 1
    density = lambda position: log_density(data, position)
    sampler = blackjax.nuts(density, step_size=0.08, inverse_mass_matrix=jnp.ones(size))

    def draw(state, key):
        state, info = sampler.step(key, state)
        return state, (state.position, info.num_integration_steps)

    keys = jax.random.split(jax.random.wrap_key_data(seed), DRAWS)
    _, (positions, steps) = jax.lax.scan(draw, sampler.init(jnp.zeros(size)), keys)
    return positions.mean(0), steps


# --- `vmap` ---

by_vmap = jax.jit(jax.vmap(chain, (None, 0)))

# --- `lax.map` ---


@jax.jit
def one_by_one(data, seeds):
    return jax.lax.map(lambda seed: chain(data, seed), seeds)


# --- a posterior ---


def make(quick):
    rng = np.random.default_rng(0)
    count, points, dimensions, many = (5, 6, 2, 2) if quick else (100, 300, 20, 8)
    data = {
        "features": jnp.asarray(rng.normal(size=(points, dimensions)), float),
        "labels": jnp.asarray(rng.random(points) < 0.5, float),
    }
    keys = jax.random.split(jax.random.key(1), (measuring.WARM + many, count))
    minibatches = list(jax.random.key_data(keys))

    def sides():
        for function in (by_vmap, one_by_one):
            function.clear_cache()
        seeds = lambda _, minibatch: minibatch
        return {
            "jedbatch": Side(seeds, jedbatch.batch(chain)),
            "`vmap`": Side(seeds, by_vmap),
            "`lax.map`": Side(seeds, one_by_one, few=2),
        }

    def loop(data, minibatch):
        results = [chain(data, seed) for seed in minibatch]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    return Application(data, minibatches, loop, sides, rtol=1e-3)


def illustrate(axis):
    """Lengths of trajectories."""
    application = make(False)
    steps = np.concatenate([by_vmap(application.params, m)[1] for m in application.minibatches])
    axis.hist(steps.ravel(), bins=np.arange(0, steps.max() + 2, 2))
    axis.set(xlabel="leapfrog steps", ylabel="draws")


SHARES = {
    "jedbatch": ["one chain"],
    "`vmap`": ["one chain", "`vmap`"],
    "`lax.map`": ["one chain", "`lax.map`"],
}

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
