"""Minibatches cut over two cores, against the loop over instances; `test_cores.py` runs it."""

import jedbatch  # first: nothing that is imported may have JAX make its devices

MESH = jedbatch.cores(2)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cases.helpers import assert_close, loop  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from jedbatch.data import synthetic_treebank  # noqa: E402

ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(jnp.concatenate([x, y]) @ p["w"]), name="add")
WORD = jedbatch.cell(lambda p, i: p["e"][i], name="word")
PARAMS = {
    "w": jnp.linspace(-0.5, 0.5, 32).reshape(8, 4),
    "e": jnp.sin(jnp.arange(36.0)).reshape(9, 4),
}


def encode(p, tree):
    if isinstance(tree, int):
        return WORD(p, tree)
    return ADD(p, encode(p, tree[0]), encode(p, tree[1]))


def unlabelled(tree):
    if len(tree) == 2:
        return tree[1] % 9
    return unlabelled(tree[1]), unlabelled(tree[2])


trees = list(map(unlabelled, synthetic_treebank(64)))
minibatches = [trees[i : i + 16] for i in range(0, 64, 16)]
batched = jedbatch.batch(encode)
everywhere = jax.device_put(PARAMS, NamedSharding(MESH, PartitionSpec()))
batched.warm(everywhere, trees[:32], batch_size=16, mesh=MESH, gradient=True)
traced = []


@jax.jit
def step(params, plan):
    traced.append(plan)
    return jax.value_and_grad(lambda p: jnp.square(batched.apply(p, plan)).sum())(params)


counts = []
for few in minibatches:
    plan = batched.plan(everywhere, few, mesh=MESH)
    assert len(plan.shards) == 2
    expected = jax.value_and_grad(lambda p, few=few: jnp.square(loop(encode, p, few)).sum())
    assert_close(step(everywhere, plan), expected(PARAMS), rtol=1e-4)
    assert_close(batched.apply(everywhere, plan), loop(encode, PARAMS, few), rtol=1e-5)
    counts.append(batched.compilations)
assert len(traced) == 1, len(traced)
assert counts == counts[:1] * 4, counts

assert MESH.shape == {"cores": 2}
assert [d.platform for d in MESH.devices.flat] == ["cpu"] * 2
assert np.array_equal(jedbatch.cores(1).devices, MESH.devices[:1])
