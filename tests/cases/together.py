"""The model that several processes train, and its data."""

import jax
import jax.numpy as jnp
import numpy as np
from cases.helpers import random_tree

import jedbatch

H, WORDS = 4, 9
RNG = np.random.default_rng(0)
PARAMS = {
    name: (RNG.normal(size=shape) * 0.5).astype(np.float32)  # of NumPy: no device is known yet
    for name, shape in {"e": (WORDS, H), "w": (2 * H, 5 * H), "u": (H, H)}.items()
}


def read(p, word):
    return p["e"][word], jnp.zeros(H)


def combine(p, left, right):
    """A binary TreeLSTM."""
    i, f, g, o, u = jnp.split(jnp.concatenate([left[0], right[0]]) @ p["w"], 5)
    state = jnp.tanh(u) / (1 + jnp.exp(-i)) + left[1] / (1 + jnp.exp(-f)) + right[1] * jnp.tanh(g)
    return jnp.tanh(state) / (1 + jnp.exp(-o)), state


def encode_with(scale, cell=jedbatch.cell):
    """The model with some constant, and with cells of some kind."""

    @cell
    def project(p, state):
        return jnp.tanh(scale * state[0] @ p["u"]), state[1]

    leaf, compose = cell(read), cell(combine)

    def visit(p, tree):
        if isinstance(tree, int):
            return leaf(p, tree)
        if len(tree) == 1:
            return project(p, visit(p, tree[0]))
        return compose(p, visit(p, tree[0]), visit(p, tree[1]))

    def encode(p, tree):
        return visit(p, tree)[0]

    return encode


encode = encode_with(1.0)
by_calls = encode_with(1.0, jax.jit)  # the same without jedbatch, quick where it loops


def trees(count, seed, size=7):
    """Trees of words; every fifth leaf is projected."""
    rng = np.random.default_rng(seed)

    def word():
        i = int(rng.integers(WORDS))
        return (i,) if rng.integers(5) == 0 else i

    return [(random_tree(rng, size, word),) for _ in range(count)]


def without(tree):
    """The same without projections."""
    if isinstance(tree, int):
        return tree
    parts = [without(x) for x in tree]
    return parts[0] if len(parts) == 1 else tuple(parts)
