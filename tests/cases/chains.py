"""An LSTM over sentences of any length, and sentences, for tests of memory."""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch

HIDDEN = 4


@jedbatch.cell
def embed(params, word):
    return params["embedding"][word]


@jedbatch.cell
def step(params, h, c, x):
    i, f, o, u = jnp.split(jnp.concatenate([x, h]) @ params["w"] + params["b"], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def encode(params, words):
    h, c = embed(params, words[0]), embed(params, words[0])
    for word in words[1:]:
        h, c = step(params, h, c, embed(params, word))
    return h


def make_params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embedding": jax.random.normal(keys[0], (20, HIDDEN)),
        "w": jax.random.normal(keys[1], (2 * HIDDEN, 4 * HIDDEN)) / 2,
        "b": jax.random.normal(keys[2], (4 * HIDDEN,)),
    }


def sentences(seed, count, longest=12):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, count)
    return [tuple(rng.integers(0, 20, n).tolist()) for n in lengths]
