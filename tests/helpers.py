"""The judge of everything: the plain Python loop over instances."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch


def loop(fn, shared, instances):
    """`fn` of every instance, stacked."""
    results = [fn(*shared, instance) for instance in instances]
    return jax.tree.map(lambda *rows: jnp.stack([jnp.asarray(r) for r in rows]), *results)


def weights_like(tree, seed=0):
    """Fixed random weights, to turn a result into one number that depends on all of it."""

    def leaf(path, x):
        key = zlib.crc32(jax.tree_util.keystr(path).encode()) + seed
        return np.random.default_rng(key).normal(size=np.shape(x))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def number(result):
    """A weighted sum of the real parts of a result."""
    total = 0.0
    for x, w in zip(jax.tree.leaves(result), jax.tree.leaves(weights_like(result)), strict=True):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            total = (
                total + (x * w.astype(x.dtype)).astype(jnp.promote_types(x.dtype, "float32")).sum()
            )
    return total


def assert_close(got, expected, rtol, atol=None):
    """Trees of arrays agree in structure, dtype and value."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for path, a in jax.tree.leaves_with_path(got):
        b = functools.reduce(
            lambda t, k: t[getattr(k, "key", getattr(k, "idx", None))], path, expected
        )
        a, b = jnp.asarray(a), jnp.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (path, a, b)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            scale = np.abs(b[np.isfinite(b)]).max(initial=1e-3)
            tolerance = rtol * scale if atol is None else atol
            np.testing.assert_allclose(a, b, rtol=rtol, atol=tolerance, err_msg=str(path))
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


def is_float(x):
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)


def check(
    fn, params, instances, *, rtol=1e-5, gradients=True, executors=("fused", "dispatch"), **options
):
    """Values and gradients of a batched function are those of the loop.

    Runs the call itself, plan and apply, and apply under `jax.jit`.
    """
    expected = loop(fn, (params,), instances)
    slopes = None
    if gradients:
        slopes = jax.grad(lambda p: number(loop(fn, (p,), instances)), allow_int=True)(params)
    batched = None
    for executor in executors:
        batched = jedbatch.batch(fn, executor=executor, **options)
        assert_close(batched(params, instances), expected, rtol)
        plan = batched.plan(params, instances)
        plan.graph.check()
        plan.schedule.check(plan.graph)
        assert_close(batched.apply(params, plan), expected, rtol)
        if executor == "fused":
            assert_close(jax.jit(batched.apply)(params, plan), expected, rtol)
        if gradients:

            def by_call(p, batched=batched):
                return number(batched(p, instances))

            def by_plan(p, batched=batched, plan=plan):
                return number(batched.apply(p, plan))

            got = jax.grad(by_call, allow_int=True)(params)
            assert_floats_close(got, slopes, rtol)
            if executor == "fused":
                assert_floats_close(
                    jax.jit(jax.grad(by_plan, allow_int=True))(params), slopes, rtol
                )
    return batched


def assert_floats_close(got, expected, rtol):
    """Gradients agree; those of integers are not looked at."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    floats = [i for i, x in enumerate(expected) if x.dtype != jax.dtypes.float0]
    assert_close([got[i] for i in floats], [expected[i] for i in floats], rtol)
