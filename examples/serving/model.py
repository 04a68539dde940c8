"""A model to be served: trees of words, in JSON as `[[1, 2], 3]`."""

import jax
import jax.numpy as jnp

import jedbatch


@jedbatch.cell
def phrase(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["compose"])


def encode(params, tree):
    if isinstance(tree, int):
        return params["embedding"][tree]
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]))


def checked(tree):
    """The tree that a value of JSON is; an error for others, which clients see."""
    if isinstance(tree, list) and len(tree) == 2:
        return checked(tree[0]), checked(tree[1])
    if type(tree) is int and 0 <= tree < 9:
        return tree
    raise ValueError(f"got {tree!r:.20}; expected a word, 0 to 8, or a list of two trees")


encode_all = jedbatch.batch(encode)
embedding, compose = (jax.random.normal(jax.random.key(n), (n, 4)) for n in (9, 8))
params = {"embedding": embedding, "compose": compose / 2}  # or `jedbatch.serve.load_params(file)`
instances = [(1, 2), ((3, 4), 5), (6, ((7, 8), (0, 1)))]  # that programs are compiled for
