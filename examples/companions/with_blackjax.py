"""Chains of BlackJAX's No-U-Turn sampler, whose trajectories differ in length from draw to draw.

A chain is an instance, with a random key of its own. Under `vmap` every chain waits in every draw
for the longest trajectory of all; here chains go on by themselves, if a step has work enough.
"""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np

import jedbatch

DRAWS = 4


def chain(data, seed):
    def log_density(weights):
        logits = data["features"] @ weights
        return -jnp.sum(jnp.logaddexp(0.0, logits) - data["labels"] * logits) - weights @ weights

    sampler = blackjax.nuts(log_density, step_size=0.2, inverse_mass_matrix=jnp.ones(3))

    def draw(state, key):
        state, info = sampler.step(key, state)
        return state, (state.position, info.num_integration_steps)

    keys = jax.random.split(jax.random.wrap_key_data(seed), DRAWS)
    _, (positions, steps) = jax.lax.scan(draw, sampler.init(jnp.zeros(3)), keys)
    return positions, steps


rng = np.random.default_rng(0)
data = {
    "features": jnp.asarray(rng.normal(size=(20, 3)), jnp.float32),
    "labels": jnp.asarray(rng.random(20) < 0.5, jnp.float32),
}
seeds = jax.random.key_data(jax.random.split(jax.random.key(1), 8))
sample_all = jedbatch.batch(chain, in_axes=(None, 0))
draws, steps = sample_all(data, seeds)  # [8, 4, 3], and leapfrog steps of each draw [8, 4]
print(draws.mean((0, 1)), steps)
