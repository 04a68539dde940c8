"""Searches in sorted tables that differ in length, against the loop over instances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check
from jax import lax

import jedbatch


def searches(lengths, others, seed=0):
    """Instances ([n] with places that are equal and some that are no number, [m])."""
    rng = np.random.default_rng(seed)
    made = []
    for n, m in zip(lengths, others, strict=True):
        x, y = (np.round(rng.normal(size=k), 1).astype(np.float32) for k in (n, m))
        x[::4], y[1::3] = x[:1], np.nan
        made.append((x, np.concatenate([y, x[:2]])))
    return made


def search(table, y, side="left"):
    """The places of `jnp.searchsorted`, by counting: numbers come before what is none."""
    if jnp.ndim(y):
        return jax.vmap(lambda v: search(table, v, side))(y)
    if side == "left":
        return ((table < y) | (jnp.isnan(y) & ~jnp.isnan(table))).sum()
    return ((table <= y) | jnp.isnan(y)).sum()


def found(x, y):
    table, count = jnp.sort(x), (4 * jnp.sort(jnp.abs(x))).astype(jnp.int32)
    return {
        "left": search(table, y),
        "right": search(table, y, side="right"),
        "of integers": search(count, jnp.arange(5), side="right"),
        "shifted": search(table[1:], 0.2),
        "one by one": jax.vmap(lambda v: search(table, v))(y),
        "in a loop": lax.fori_loop(0, y.shape[0], lambda i, n: n + search(table, y[i]), 0),
    }


def test_counting_gives_the_places_of_jax():
    for x, y in searches([4, 7, 1], [3, 5, 4]):
        table = jnp.sort(x)
        for side in ("left", "right"):
            np.testing.assert_array_equal(search(table, y, side), jnp.searchsorted(table, y, side))


@pytest.mark.parametrize("method", ["scan", "compare_all"])
def test_searches_of_jax_are_grouped_by_shapes(method):
    """JAX makes a number of the length of the table."""

    def fn(pair):
        return jnp.searchsorted(jnp.sort(pair[0]), pair[1], method=method)

    batched = jedbatch.batch(fn, in_axes=0, out_axes=None)
    instances = searches([4, 7, 3], [3, 5, 4])
    assert_close(batched(instances), [fn(tuple(map(jnp.asarray, x))) for x in instances], 0)
    assert "test_searches.py" in batched.plan(instances).host.apart


@pytest.mark.filterwarnings("ignore:the reverse of")
def test_places_in_tables():
    batched = jedbatch.batch(lambda pair: found(*pair), in_axes=0, out_axes=None)
    for seed, lengths in enumerate(([4, 7, 3], [3, 5, 4], [3, 2, 6])):
        instances = searches(lengths, lengths[::-1], seed)
        before = batched.compilations
        results = batched(instances)
        assert_close(results, [found(*map(jnp.asarray, pair)) for pair in instances], 0)
        assert [x.dtype for x in jax.tree.leaves(results)] == [
            x.dtype for pair in instances for x in jax.tree.leaves(jax.eval_shape(found, *pair))
        ]
        assert batched.plan(instances).host.apart is None
        assert seed == 0 or batched.compilations == before


def test_gradients_of_what_is_found():
    """Between points that differ in number, as `jnp.interp` does, also inside."""

    def between(w, x, y):
        points = jnp.sort(x)
        i = jnp.clip(search(points, y), 1, x.shape[0] - 1)
        share = (y - points[i - 1]) / (points[i] - points[i - 1])
        values = jnp.sin(w * x)
        return (values[i - 1] + share * (values[i] - values[i - 1])).sum()

    def fn(w, pair):
        return between(w, *pair), (jax.grad(between, 1)(w, *pair) ** 2).sum()

    rng = np.random.default_rng(0)
    pairs = [
        tuple(rng.normal(size=k).astype(np.float32) for k in shape)
        for shape in ((4, 2), (3, 5), (6, 1))
    ]
    batched = check(fn, jnp.float32(0.7), pairs, rtol=1e-3)
    assert batched.plan(jnp.float32(0.7), pairs).host.apart is None
