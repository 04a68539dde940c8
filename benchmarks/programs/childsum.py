"""The common parts of child-sum TreeLSTMs, whichever framework their cells are written in.

Trees are `(word, [children])` with 0 to 23 children. For a word with embedding x and children
(h_k, c_k): [i; o; u] = W x + b + U Σ h_k, f_k = V x + d + Y h_k, c = σ(i) tanh(u) + Σ σ(f_k) c_k,
h = σ(o) tanh(c) (Tai et al., 2015). The result is h of the root.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs import forest

WORDS = 500
HIDDEN = 128
MOST_CHILDREN = 23


class Weights(NamedTuple):
    """W [x, 3 h], b [3 h], U [h, 3 h], V [x, h], d [h], Y [h, h], and embeddings [words, x]."""

    embedding: jax.Array
    w: jax.Array
    b: jax.Array
    u: jax.Array
    v: jax.Array
    d: jax.Array
    y: jax.Array


def instances(rng: np.random.Generator, count: int, tiny: bool) -> list[Any]:
    """Random trees of 5 to 40 words, 2 to 12 if `tiny`."""

    def grow(size: int) -> Any:
        left, children = size - 1, []
        most = MOST_CHILDREN if rng.random() < 0.2 else 4
        parts = int(rng.integers(1, min(left, most) + 1)) if left else 0
        cuts = np.sort(rng.choice(left - 1, parts - 1, replace=False)) + 1 if parts > 1 else []
        if parts:
            children = [grow(int(n)) for n in np.diff([0, *cuts, left])]
        return int(rng.integers(WORDS)), tuple(children)

    return [grow(int(rng.integers(*((2, 13) if tiny else (5, 41))))) for _ in range(count)]


prepare = functools.partial(forest.prepare, read=lambda _, node: (0, *node))


def model_of(node: Callable) -> Callable:
    """The model of one tree, h of its root, for a cell of (params, word, states of children)."""

    def encode(params: Any, tree: Any) -> Any:
        word, children = tree
        return node(params, word, [encode(params, child) for child in children])

    return lambda params, tree: encode(params, tree)[0]


def by_hand(weights: Weights, trees: forest.Forest) -> jax.Array:
    """H of the roots, [instances, h]."""

    def state(gates: jax.Array, cells: Any) -> tuple[jax.Array, jax.Array]:
        i, o, u = jnp.split(gates, 3, axis=-1)
        c = jax.nn.sigmoid(i) * jnp.tanh(u) + cells
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def leaf(words: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state(weights.embedding[words] @ weights.w + weights.b, 0.0)

    def node(words: jax.Array, below: Any, parent: jax.Array) -> tuple[jax.Array, jax.Array]:
        (h, c), x = below, weights.embedding[words]
        gates = x @ weights.w + weights.b + forest.total(h, parent, len(words)) @ weights.u
        forget = jax.nn.sigmoid((x @ weights.v + weights.d)[parent] + h @ weights.y)
        return state(gates, forest.total(forget * c, parent, len(words)))

    return forest.climb(trees, leaf, [node])[0]
