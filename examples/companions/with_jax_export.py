"""One file of StableHLO, written with `jax.export`, that computes every topology.

`jax.export` writes a program for arrays of given shapes. The schedule of a batched function is
data to its program, so one export serves trees that were not there when it was written. A process
that reads it needs neither the model's Python nor the platform that it was written on.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch


@jedbatch.cell
def phrase(params, left, right):
    return jnp.tanh(params["compose"] @ jnp.concatenate([left, right]))


def encode(params, tree):
    if isinstance(tree, int):
        return params["embed"][tree]
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]))


rng = np.random.default_rng(0)
shapes = {"embed": (9, 4), "compose": (4, 8)}
params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
encode_all = jedbatch.batch(encode)

# Where the model is: `save` writes the same bytes to a file.
examples = [((1, 2), 3), (4, 5)]
exported = encode_all.export(
    params, examples, batch_size=4, gradient=True, platforms=("cpu", "cuda", "tpu")
)
data = exported.serialize()

# Elsewhere: trees come as graphs, which `encode_all.graph`, another program or a file makes.
trees = [(1, (2, (3, 4))), ((5, 6), (7, 8)), 0]
loaded = jedbatch.Exported.deserialize(data)
plan = loaded.plan(encode_all.graph(params, trees), gradient=True)
result = loaded.apply(params, plan)  # [3, 4]
gradient = jax.grad(lambda params: loaded.apply(params, plan).sum())(params)
print(loaded.platforms, result)
