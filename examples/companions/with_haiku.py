"""A tree encoder of Haiku modules.

Modules of Haiku find their parameters in a context. A function of one node is transformed, and its
`apply`, which takes the parameters, is the cell.
"""

import haiku as hk
import jax
import jax.numpy as jnp

import jedbatch

SIZE = 4


def compose(left, right):
    return jnp.tanh(hk.Linear(SIZE)(jnp.concatenate([left, right])))


embedding = hk.without_apply_rng(hk.transform(lambda index: hk.Embed(9, SIZE)(index)))
composer = hk.without_apply_rng(hk.transform(compose))
word, phrase = jedbatch.cell(embedding.apply), jedbatch.cell(composer.apply)


def encode(params, tree):
    if isinstance(tree, int):
        return word(params["word"], tree)
    return phrase(params["phrase"], encode(params, tree[0]), encode(params, tree[1]))


keys = jax.random.split(jax.random.key(0))
params = {
    "word": embedding.init(keys[0], 0),
    "phrase": composer.init(keys[1], jnp.zeros(SIZE), jnp.zeros(SIZE)),
}
trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
encode_all = jedbatch.batch(encode)
result = encode_all(params, trees)  # [3, 4]
gradient = jax.grad(lambda params: encode_all(params, trees).sum())(params)
print(result)
