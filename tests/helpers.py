"""The judge of everything: the plain Python loop over instances."""

import contextlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

import jedbatch


def loop(fn, params, instances):
    """`fn` of every instance, one by one, stacked."""
    results = [fn(params, instance) for instance in instances]
    return jax.tree.map(lambda *rows: jnp.stack([jnp.asarray(r) for r in rows]), *results)


def number(result):
    """A sum of the real parts of a result under fixed random weights: all of it counts."""
    total = 0.0
    for path, x in jax.tree.leaves_with_path(result):
        if has_gradient(x):
            seed = zlib.crc32(jax.tree_util.keystr(path).encode())
            weight = np.random.default_rng(seed).normal(size=x.shape).astype(x.dtype)
            wide = jnp.promote_types(x.dtype, "float32")
            total = total + (x * weight).astype(wide).sum()
    return total


def has_gradient(x):
    """True of arrays of real and complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def assert_close(got, expected, rtol):
    """Trees of arrays agree in structure, shape, dtype and value.

    The tolerance is relative to the largest element, since sums are taken in another order.
    """
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        where = jax.tree_util.keystr(path)
        a, b = jnp.asarray(a), jnp.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        if a.dtype == jax.dtypes.float0:
            continue
        if has_gradient(a):
            wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
            a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            scale = np.abs(b[np.isfinite(b)]).max(initial=1e-3)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale, err_msg=where)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=where)


def check(
    fn,
    params,
    instances,
    *,
    rtol=1e-5,
    gradients=True,
    thorough=False,
    plans=True,
    alone=None,
    **options,
):
    """Values and gradients of a batched function are those of the loop.

    With `thorough` also by plan and apply, by both under `jax.jit`, and by the other executor.
    Without `plans`, for functions that decide on computed values, it is called only.
    `alone` is what the loop calls, such as `jax.jit(fn)` where operations one by one take long.
    Returns the batched function.
    """
    alone = fn if alone is None else alone

    def judge(params):
        result = loop(alone, params, instances)
        return number(result), result

    if gradients:
        slope, expected = jax.grad(judge, has_aux=True, allow_int=True)(params)
    else:
        expected = loop(alone, params, instances)

    def agree(run):
        assert_close(run(params), expected, rtol)
        if gradients:
            assert_close(jax.grad(lambda p: number(run(p)), allow_int=True)(params), slope, rtol)

    batched = jedbatch.batch(fn, **options)
    agree(lambda p: batched(p, instances))
    if not plans:
        return batched
    plan = batched.plan(params, instances)
    plan.graph.check()
    plan.schedule.check(plan.graph)
    plan.layout.check(plan.graph)
    if thorough:
        agree(lambda p: batched.apply(p, plan))
        agree(lambda p: jax.jit(batched.apply)(p, plan))
        one_by_one = jedbatch.batch(fn, executor="dispatch", **options)
        agree(lambda p: one_by_one(p, instances))
    return batched


@contextlib.contextmanager
def compilations():
    """Yields a list that grows by one entry for everything XLA compiles inside."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        monitoring.unregister_event_duration_listener(listen)


def random_tree(rng, size, leaf):
    """A nested pair of `size` leaves, each made by `leaf()`."""
    if size == 1:
        return leaf()
    left = int(rng.integers(1, size))
    return random_tree(rng, left, leaf), random_tree(rng, size - left, leaf)


def random_dag(rng, num_nodes, num_types, most=3):
    """(types, predecessors) of a random graph whose nodes read up to `most` earlier nodes."""
    types = rng.integers(0, num_types, num_nodes)
    preds = [
        sorted(rng.choice(n, int(rng.integers(0, min(most, n) + 1)), replace=False).tolist())
        for n in range(num_nodes)
    ]
    return types, preds


def fewest(graph, weights=None):
    """The fewest batches of Algorithm 1, or what they cost, by exhaustive search."""
    num_nodes = len(graph.node_type)
    weights = np.ones(len(graph.types)) if weights is None else weights
    maker, reader = graph.edges
    before = [0] * num_nodes
    for m, r in zip(maker.tolist(), reader.tolist(), strict=True):
        before[r] |= 1 << m
    types = graph.node_type.tolist()
    least, level = {0: 0.0}, {0}
    while level:
        following = set()
        for done in level:
            ready = [n for n in range(num_nodes) if not done >> n & 1 and not before[n] & ~done]
            for t in {types[n] for n in ready}:
                after = done | sum(1 << n for n in ready if types[n] == t)
                cost = least[done] + weights[t]
                if cost < least.get(after, np.inf):
                    least[after] = cost
                    following.add(after)
        level = following
    return least[(1 << num_nodes) - 1]
