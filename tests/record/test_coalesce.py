"""Contraction of operations, on graphs that are evaluated node by node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._graph.paths import longest_paths
from jedbatch._graph.straight import calls_of, inputs_of, straight
from jedbatch._graph.types import operation_of
from jedbatch._record.passes.blocks import Blocks
from jedbatch._record.passes.coalesce import Coalescing

STEPS = (
    lambda a, b: jnp.tanh(a * 0.5 + b),
    lambda a, b: jnp.sin(a) * b - a,
    lambda a, b: jnp.abs(a - b) * jnp.cos(b),
    lambda a, b: a + b,
)


def dag(_, instance):
    """Each step reads what any steps before have made."""
    x, steps = instance
    values = [x, jnp.sin(x)]
    for kind, *reads in steps:
        values.append(STEPS[kind](*[values[-1 - r % len(values)] for r in reads]))
    return values[-1], values[len(values) // 2]


def dags(rng, count):
    """Instances of 1 to 20 steps; steps mostly read what was made last."""

    def step():
        near = 3 if rng.random() < 0.8 else 50
        return (int(rng.integers(len(STEPS))), *rng.integers(near, size=2).tolist())

    x = rng.normal(size=3).astype(np.float32)
    return [(x, tuple(step() for _ in range(int(rng.integers(1, 20))))) for _ in range(count)]


def grids(rng, count):
    """Instances of one to four rows and columns."""
    x = rng.normal(size=3).astype(np.float32)
    return [(x, *rng.integers(1, 5, size=2).tolist()) for _ in range(count)]


def grid(_, instance):
    """A value reads its neighbours above and to the left."""
    x, rows, columns = instance
    above = [x * k for k in range(columns)]
    for _ in range(rows):
        left = jnp.cos(above[0])
        for k in range(columns):
            left = above[k] = jnp.tanh(left * 0.5 + above[k]) - jnp.sin(above[k])
    return above[-1], above[0]


def results(graph, instances):
    """What the instances return, each node computed by itself."""
    inputs = []
    for (x, *_), chunks in zip(instances, graph.chunks, strict=True):
        for chunk in chunks:
            inputs += [x] * len(chunk) if chunk.leaf is not None else list(chunk.rows)

    def run(node_type, operands):
        closed = operation_of(graph.types[node_type]).jaxpr
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands)

    values = straight(calls_of(graph), inputs_of(inputs), run)
    return np.stack([values[r] for r in graph.outputs.tolist()])


def longest(graph):
    return int(longest_paths(len(graph.node_type), *graph.edges).max(initial=0))


@pytest.mark.parametrize(("fn", "sample"), [(dag, dags), (grid, grids)])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_is_computed_by_fewer_nodes_of_no_more_types(fn, sample, seed):
    rng = np.random.default_rng(seed)
    minibatches = [sample(rng, int(rng.integers(2, 9))) for _ in range(5)]
    batched = jedbatch.batch(fn, granularity="cell", out_axes=None)
    session, _ = batched._core.session(((),))
    coalescing = Coalescing(session.registry, asked=True)
    for minibatch in minibatches:
        graph = batched.plan((), minibatch, gradient=False).graph
        merged = coalescing.merge(graph)
        merged.check()
        expected = results(graph, minibatch)
        np.testing.assert_allclose(results(merged, minibatch), expected, rtol=1e-5, atol=1e-6)
        assert len(merged.present_types) <= len(graph.present_types)
        assert len(merged.node_type) <= 0.8 * len(graph.node_type)
        assert longest(merged) <= longest(graph)


def test_loops_in_loops_do_not_become_types_of_their_own():
    """Two operations that follow on each other in turn are one node for each round."""

    def fn(x, lengths):
        for length in lengths:
            for _ in range(length):
                x = jnp.sin(jnp.tanh(x))
            x = jnp.cos(x)
        return x

    rng = np.random.default_rng(0)
    batched = jedbatch.batch(fn, granularity="auto")
    for _ in range(3):
        instances = [tuple(rng.integers(1, 9, 4).tolist()) for _ in range(8)]
        plan = batched.plan(jnp.ones(3), instances, gradient=False)
        assert len(plan.graph.present_types) <= 3
    expected = jnp.stack([fn(jnp.ones(3), lengths) for lengths in instances])
    np.testing.assert_allclose(batched.apply(jnp.ones(3), plan), expected, rtol=1e-5)


def test_what_was_learned_does_not_make_circles():
    """Two joins that do not touch each other in one minibatch do in the next."""

    def fn(_, instance):
        x, y, first, second = instance
        p, q = jnp.tanh(x), jnp.cos(x)
        r = p * (q if first else y)
        s = (p if second else y) - q
        return r, s, jnp.abs(p), jnp.abs(p), jnp.sinh(q), jnp.sinh(q)

    rng = np.random.default_rng(0)
    batched = jedbatch.batch(fn, granularity="auto", out_axes=None)
    for flags in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x = rng.normal(size=(3, 2, 2)).astype(np.float32)
        instances = [(*row, *flags) for row in x]
        batched.plan((), instances, gradient=False).graph.check()
        for got, instance in zip(batched((), instances), instances, strict=True):
            np.testing.assert_allclose(got, fn((), instance), rtol=1e-5)


def test_operands_that_some_instances_lack_do_not_multiply_types():
    parts = [jnp.sin, jnp.cos, jnp.tanh, jnp.abs, jnp.exp, jnp.square]

    def fn(_, instance):
        x, flags = instance
        return jnp.stack([f(x) if flag else x for f, flag in zip(parts, flags, strict=True)])

    rng = np.random.default_rng(0)
    x = rng.normal(size=3).astype(np.float32)
    instances = [(x, tuple(rng.integers(2, size=6).tolist())) for _ in range(16)]
    graph = jedbatch.batch(fn, granularity="auto").plan((), instances, gradient=False).graph
    assert len(graph.present_types) <= len(parts) + 1


@pytest.mark.parametrize("seed", range(20))
def test_merged_blocks_against_one_block_after_the_other(seed):
    rng = np.random.default_rng(seed)
    preds = [rng.integers(-6, k, rng.integers(1, 4)).tolist() for k in range(12)]
    graph = jedbatch.Graph.from_dag(
        rng.integers(3, size=12), preds, inputs=[np.zeros((6, 2), np.float32)]
    )
    new = np.unique(rng.integers(8, size=12), return_inverse=True)[1]
    merged = Blocks.of(graph).merged(new)
    patterns = dict(merged.patterns())
    for b in range(new.max() + 1):
        members = np.flatnonzero(new == b).tolist()
        slots = {n: k for k, n in enumerate(members)}
        outside, written = {}, []
        for r in (r for n in members for r in preds[n]):
            written.append(slots[r] if r in slots else -1 - outside.setdefault(r, len(outside)))
        read = merged.blocks.operand[merged.blocks.ptr[b] : merged.blocks.ptr[b + 1]].tolist()
        if len(members) == 1:
            assert read == preds[members[0]]
            assert b not in patterns
        else:
            assert read == list(outside)
            assert patterns[b].reads == tuple(written)
            assert patterns[b].types == tuple(graph.node_type[members].tolist())
        assert [merged.blocks.slot[n] for n in members] == list(range(len(members)))
        assert (merged.blocks.maker[members] == b).all()
