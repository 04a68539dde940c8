"""Cells of Flax in double precision with NumPy, and tagged parts of parameters as arrays."""

import jax
import numpy as np


def double(params):
    """Parameters in double precision."""
    return jax.tree.map(np.float64, params)


def single(params):
    """Parameters as a model wants them."""
    return jax.tree.map(np.float32, params)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def lstm(p, state, x):
    """The next (h, c), gate by gate."""
    h, c = state
    gate = lambda name, of: of(x @ p[f"i{name}"]["kernel"] + linear(p[f"h{name[0]}"], h))  # noqa: E731
    c = gate("f_", sigmoid) * c + gate("i", sigmoid) * gate("g", np.tanh)
    return gate("o", sigmoid) * np.tanh(c), c


def lstm_states(p, xs, state):
    """h and c after each input."""
    states = []
    for x in xs:
        state = lstm(p, state, x)
        states.append(state)
    return states


def gru(p, h, x):
    """The next h, gate by gate."""
    xs = np.split(linear(p["dense_i"], x), 3)
    hs = np.split(h @ p["dense_h"]["kernel"], 3)
    r, z = sigmoid(xs[0] + hs[0]), sigmoid(xs[1] + hs[1])
    return (1 - z) * np.tanh(xs[2] + r * hs[2]) + z * h


def score(logits, labels):
    """[sum of cross-entropies, right ones] of rows of logits."""
    picked = logits[np.arange(len(labels)), labels]
    loss = (np.log(np.exp(logits).sum(axis=1)) - picked).sum()
    return np.float32([loss, (logits.argmax(axis=1) == labels).sum()])
