"""Assertions and dataclasses of chex: in cells they run once for each type of node.

`chex.assert_shape` and its like look at shapes alone, so they may stand anywhere in a batched
function. Assertions about values belong outside, where there are values.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jedbatch


@chex.dataclass(frozen=True)
class Params:
    """The parameters of the model."""

    embed: chex.Array  # [words, size]
    compose: chex.Array  # [size, 2 size]


@jedbatch.cell
def phrase(params, left, right):
    chex.assert_rank([left, right], 1)
    chex.assert_equal_shape([left, right])
    return jnp.tanh(params.compose @ jnp.concatenate([left, right]))


def encode(params, tree):
    if isinstance(tree, int):
        return params.embed[tree]
    state = phrase(params, encode(params, tree[0]), encode(params, tree[1]))
    chex.assert_shape(state, (4,))
    return state


rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
params = Params(embed=draw(9, 4), compose=draw(4, 8))
trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
encode_all = jedbatch.batch(encode)
result = encode_all(params, trees)  # [3, 4]
chex.assert_tree_all_finite(result)
slopes = jax.grad(lambda params: encode_all(params, trees).sum())(params)
gradient = [slopes.embed, slopes.compose]
print(result)
