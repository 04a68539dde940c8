"""Shapes in signatures, by jaxtyping and beartype, of cells and of the function that is batched.

They are checked while an instance is recorded, when shapes are known and values are not. A letter
stands for one number in all arguments of a call. Lengths that differ from instance to instance are
numbers that nobody knows, so they are written `_` or `...` here.
"""

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jaxtyping import Array, Float, jaxtyped

import jedbatch

Params = dict[str, Array]
Tree = int | tuple


@jedbatch.cell
@jaxtyped(typechecker=beartype)
def phrase(params: Params, left: Float[Array, " h"], right: Float[Array, " h"]):
    return jnp.tanh(params["compose"] @ jnp.concatenate([left, right]))


@jaxtyped(typechecker=beartype)
def encode(params: Params, tree: Tree) -> Float[Array, "4"]:
    if isinstance(tree, int):
        return params["embed"][tree]
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]))


@jaxtyped(typechecker=beartype)
def pool(params: Params, words: Float[Array, "_ 4"]) -> Float[Array, "4"]:
    return jnp.tanh(words @ params["embed"].T).mean(0) @ params["embed"]


rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
params = {"embed": draw(9, 4), "compose": draw(4, 8)}
trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
encode_all = jedbatch.batch(encode)
result = encode_all(params, trees)  # [3, 4]
gradient = jax.grad(lambda params: encode_all(params, trees).sum())(params)
pooled = jedbatch.batch(pool)(params, [draw(5, 4), draw(2, 4)])  # [2, 4]
print(result)
