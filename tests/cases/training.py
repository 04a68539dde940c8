"""Training of models on minibatches, for tests: with one compiled step, as users train."""

from typing import NamedTuple

import jax
import numpy as np
import optax


class Trained(NamedTuple):
    """The parameters, mean losses and shares of right answers by epoch, and late compilations."""

    params: dict
    losses: list
    right: list
    compiled: int  # after the first epoch


def train(score, params, instances, items, *, size, epochs, rate=0.01):
    """Adam on minibatches of `size`, always the same; `items` are scored in each instance."""
    optimizer = optax.adam(rate)

    @jax.jit
    def step(params, state, plan):
        def loss(params):
            scores = score.apply(params, plan).sum(axis=0)
            return scores[0] / size, scores

        (_, scores), slope = jax.value_and_grad(loss, has_aux=True)(params)
        changes, state = optimizer.update(slope, state)
        return optax.apply_updates(params, changes), state, scores

    minibatches = [instances[i : i + size] for i in range(0, len(instances), size)]
    state, history, programs = optimizer.init(params), [], []
    for _ in range(epochs):
        epoch = []
        for minibatch in minibatches:
            params, state, scores = step(params, state, score.plan(params, minibatch))
            epoch.append(scores)
        history.append(np.sum(epoch, axis=0) / sum(map(items, instances)))
        programs.append(score.compilations + step._cache_size())
    losses, right = np.transpose(history).tolist()
    return Trained(params, losses, right, programs[-1] - programs[0])
