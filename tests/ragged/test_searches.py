"""Binary searches in sorted tables that differ in length, against the loop over instances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check
from jax import lax

import jedbatch

pytestmark = pytest.mark.unoptimized


def searches(lengths, others, seed=0):
    """Instances ([n] with places that are equal and some that are no number, [m])."""
    rng = np.random.default_rng(seed)
    made = []
    for n, m in zip(lengths, others, strict=True):
        x, y = (np.round(rng.normal(size=k), 1).astype(np.float32) for k in (n, m))
        x[::4], y[1::3] = x[:1], np.nan
        made.append((x, np.concatenate([y, x[:2]])))
    return made


def found(x, y):
    table, count = jnp.sort(x), (4 * jnp.sort(jnp.abs(x))).astype(jnp.int32)

    def in_loop(i, total):
        return total + jnp.searchsorted(table, y[i])

    return {
        "left": jnp.searchsorted(table, y),
        "right": jnp.searchsorted(table, y, side="right"),
        "by counting": jnp.searchsorted(table, y, method="compare_all"),
        "unrolled": jnp.searchsorted(table, jnp.array([[0.1, jnp.nan]]), method="scan_unrolled"),
        "of integers": jnp.searchsorted(count, jnp.arange(5), side="right"),
        "shifted": jnp.searchsorted(table[1:], 0.2),
        "one by one": jax.vmap(lambda v: jnp.searchsorted(table, v))(y),
        "tables": jax.vmap(lambda t: jnp.searchsorted(t, y), 1)(jnp.stack([table, 2 * table], 1)),
        "bins": jnp.digitize(y, table),
        "falling bins": jnp.digitize(y, table[::-1], right=True),
        "in a loop": lax.fori_loop(0, y.shape[0], in_loop, 0),
    }


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
        i = jnp.clip(jnp.searchsorted(points, y), 1, x.shape[0] - 1)
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
