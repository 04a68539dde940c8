"""A tree encoder that is a module of Equinox; its methods are cells.

A module is a pytree, so it is the shared argument as it is, and `self` of a cell that is a method.
`eqx.filter_grad` leaves out what is no array, such as activations.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

import jedbatch


class Encoder(eqx.Module):
    """A model of one tree."""

    embed: eqx.nn.Embedding
    compose: eqx.nn.Linear
    activation: Callable

    def __init__(self, words, size, key):
        keys = jax.random.split(key)
        self.embed = eqx.nn.Embedding(words, size, key=keys[0])
        self.compose = eqx.nn.Linear(2 * size, size, key=keys[1])
        self.activation = jnp.tanh

    @jedbatch.cell
    def word(self, index):
        return self.embed(index)

    @jedbatch.cell
    def phrase(self, left, right):
        return self.activation(self.compose(jnp.concatenate([left, right])))

    def __call__(self, tree):
        if isinstance(tree, int):
            return self.word(tree)
        return self.phrase(self(tree[0]), self(tree[1]))


encode_all = jedbatch.batch(Encoder.__call__)
trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
model = Encoder(9, 4, jax.random.key(0))
result = encode_all(model, trees)  # [3, 4]
slopes = eqx.filter_grad(lambda model: encode_all(model, trees).sum())(model)
gradient = jax.tree.leaves(slopes)
print(result)
