"""A tree encoder whose cells are modules of Flax Linen.

A Linen module takes its parameters by `apply`, so a cell is a function that applies it. The
parameters of all modules are one dict, the shared argument.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

import jedbatch

SIZE = 4
embed, dense = nn.Embed(9, SIZE), nn.Dense(SIZE)


@jedbatch.cell
def word(params, index):
    return embed.apply(params["embed"], index)


@jedbatch.cell
def phrase(params, left, right):
    return nn.tanh(dense.apply(params["dense"], jnp.concatenate([left, right])))


def encode(params, tree):
    if isinstance(tree, int):
        return word(params, jnp.int32(tree))
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]))


keys = jax.random.split(jax.random.key(0))
params = {
    "embed": embed.init(keys[0], jnp.int32(0)),
    "dense": dense.init(keys[1], jnp.zeros(2 * SIZE)),
}
trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
encode_all = jedbatch.batch(encode)
result = encode_all(params, trees)  # [3, 4]
gradient = jax.grad(lambda params: encode_all(params, trees).sum())(params)
print(result)
