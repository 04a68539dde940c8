"""A data pipeline of Grain whose workers plan minibatches.

`batched.planner` is a function from a list of instances to a plan as plain data. Grain calls it
where batches are made, here in threads of this process; `mp_prefetch` would do it in others.
"""

import grain
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
trees = [((1, 2), 3), (4, (5, (6, 7))), (8, 1), ((3, 5), (2, 6))] * 4

encode_all = jedbatch.batch(encode)
planner = encode_all.planner(params, trees[:4])  # a minibatch like later ones
dataset = grain.MapDataset.source(trees).shuffle(seed=0).batch(4, batch_fn=planner)


@jax.jit
def step(params, plan):
    loss, gradient = jax.value_and_grad(lambda p: jnp.square(encode_all.apply(p, plan)).mean())(
        params
    )
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


losses = []
for prepared in dataset.to_iter_dataset():
    loss, params = step(params, planner.attach(prepared))
    losses.append(loss)
print("losses", *losses)
