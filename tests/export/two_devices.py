"""Exported models where another device is the default one; `test_export.py` runs it."""

import jax
import jax.numpy as jnp
import numpy as np
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch import Exported

P = {"w": jnp.linspace(-0.5, 0.5, 32).reshape(8, 4), "e": jnp.sin(jnp.arange(36.0)).reshape(9, 4)}
LEAF = jedbatch.cell(lambda p, i: p["e"][i], name="leaf")
ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(jnp.concatenate([x, y]) @ p["w"]), name="add")
TREES = [((1, 2), 3), 4, ((5, 6), (7, 8)), (1, (2, (3, 4)))]


def encode(p, tree):
    return LEAF(p, tree) if isinstance(tree, int) else ADD(p, *(encode(p, t) for t in tree))


def slope_of(apply, params, *plan):
    return jax.grad(lambda p: jnp.square(apply(p, *plan)).sum())(params)


batched = jedbatch.batch(encode)
numbers, graph = jax.tree.map(np.asarray, P), batched.graph(P, TREES)
values = loop(encode, P, TREES)
slope = slope_of(lambda p: loop(encode, p, TREES), P)
here, other = jax.devices()

with jax.default_device(other):
    data = batched.export(P, TREES, gradient=True, sizes={"leaf": 80_000}).serialize()
there = Exported.deserialize(data)
plan = there.plan(graph, gradient=True)
for then in (here, other, here):
    with jax.default_device(then):
        for params in (numbers, jax.device_put(numbers, then)):
            got = there(params, graph)  # large arenas are handed from call to call
            assert_close(got, values, rtol=1e-6)
            assert got.devices() == {then}
        assert_close(slope_of(there.apply, jax.device_put(numbers, then), plan), slope, rtol=1e-5)
        elsewhere = here if then is other else other
        got = there(jax.device_put(numbers, elsewhere), graph)
        assert_close(got, values, rtol=1e-6)
        assert got.devices() == {elsewhere}
