"""Executables where another device is the default one; `test_executables.py` runs it."""

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

for first in (here, other):
    for sizes in ({}, {"leaf": 80_000}):  # large arenas are handed from call to call
        with jax.default_device(first):
            data = batched.export(P, TREES, gradient=True, sizes=sizes, compiled=True).serialize()
        for then in (here, other):
            with jax.default_device(then):
                there = Exported.deserialize(data)
                plan = there.plan(graph, gradient=True)
                for params in (numbers, jax.device_put(numbers, then)):
                    for _ in range(2):
                        got = there(params, graph)
                        assert_close(got, values, rtol=1e-6)
                        assert got.devices() == {then}
                    moving = jax.tree.map(jnp.asarray, params)
                    back = slope_of(there.apply, moving, plan)
                    assert_close(back, slope, rtol=1e-5)
                assert there.compilations == {}
                elsewhere = jax.device_put(numbers, here if then is other else other)
                assert_close(there(elsewhere, graph), values, rtol=1e-6)
                assert there.compilations == {"inference": 1}

both = Exported.deserialize(batched.export(P, TREES, compiled=True).serialize())
for then in (other, here, other):  # loaded for either
    with jax.default_device(then):
        assert both(numbers, graph).devices() == {then}
assert both.compilations == {}
