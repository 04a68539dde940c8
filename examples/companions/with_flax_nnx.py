"""A tree encoder whose layers are modules of Flax NNX, trained by its optimizer.

A module is a pytree of its parameters, so it is passed as the shared argument, and a cell may call
any part of it.
"""

import jax.numpy as jnp
import optax
from flax import nnx

import jedbatch


class Encoder(nnx.Module):
    """The layers of the model, not its recursion."""

    def __init__(self, words: int, size: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(words, size, rngs=rngs)
        self.compose = nnx.Linear(2 * size, size, rngs=rngs)


@jedbatch.cell
def word(model, index):
    return model.embed(jnp.asarray(index))


@jedbatch.cell
def phrase(model, left, right):
    return nnx.tanh(model.compose(jnp.concatenate([left, right])))


def encode(model, tree):
    if isinstance(tree, int):
        return word(model, tree)
    return phrase(model, encode(model, tree[0]), encode(model, tree[1]))


def loss(model):
    return jnp.square(encode_all(model, trees) - 0.5).mean()


encode_all = jedbatch.batch(encode)
trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
model = Encoder(9, 4, nnx.Rngs(0))
before = encode_all(model, trees)  # [3, 4]

optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
losses = []
for _ in range(3):
    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)  # changes the model in place
    losses.append(value)
after = encode_all(model, trees)
print("losses", *losses)
