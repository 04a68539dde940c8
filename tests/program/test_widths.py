"""Widths of chunks: those worth compiling, and minibatches that want wider ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, assert_no_recompile, loop, number

import jedbatch
from jedbatch._kernel.target import TARGETS
from jedbatch._layout.bucketing import Buckets

COUNT, LEAVES, FEW = 8, 48, 2


@jedbatch.cell
def leaf(params, x):
    return jnp.tanh(params["w"] * x)


@jedbatch.cell
def node(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["u"])


def encode(params, tree):
    if isinstance(tree, float):
        return leaf(params, tree)
    return node(params, *(encode(params, child) for child in tree))


def chain(leaves):
    tree = leaves[0]
    for x in leaves[1:]:
        tree = tree, x
    return tree


def balanced(leaves):
    half = len(leaves) // 2
    return (balanced(leaves[:half]), balanced(leaves[half:])) if half else leaves[0]


def trees(seed, num_balanced):
    leaves = np.random.default_rng(seed).normal(size=(COUNT, LEAVES)).tolist()
    shapes = [balanced] * num_balanced + [chain] * (COUNT - num_balanced)
    return [shape(x) for shape, x in zip(shapes, leaves, strict=True)]


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"w": (4,), "u": (8, 4)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_narrower_chunks_cover_the_same_lanes(name):
    target = TARGETS[name]
    for widths in (target.heavy, target.light):
        buckets = Buckets(widths)
        trips = buckets.cover(np.arange(1, 3 * widths[-1]))
        for n in range(1, len(widths)):
            narrow = buckets.narrowed(trips, n)
            assert not narrow[:, n:].any()
            assert (narrow >= 0).all()
            assert np.array_equal(buckets.lanes(narrow), buckets.lanes(trips))
            within = ~trips[:, n:].any(axis=1)
            assert np.array_equal(narrow[within], trips[within])


def test_widths_that_are_no_multiples_are_refused():
    buckets = Buckets((4, 6))
    with pytest.raises(ValueError, match=r"6 lanes are not a whole number of chunks of \(4,\)"):
        buckets.narrowed(np.array([[0, 1]]), 1)


def test_few_wide_batches_are_cut_and_many_get_a_program(params, monkeypatch):
    """Results and gradients are the loop's whichever program a minibatch is run by."""
    monkeypatch.setenv("JEDBATCH_CHECK", "1")  # every table is verified, too
    batched = jedbatch.batch(encode)
    step = jax.jit(jax.value_and_grad(lambda p, plan: number(batched.apply(p, plan))))
    plans = [batched.plan(params, trees(i, n)) for i, n in enumerate((0, FEW, COUNT))]
    chains, mixed, wide = [plan.static.signature for plan in plans]
    assert mixed == chains != wide
    place = mixed.kernels.index
    for plan in plans:
        signature, placed = plan.static.signature, plan.host.placed
        for kernel, needed in zip(placed.kernels, placed.widest, strict=True):
            assert needed <= signature.widest[place(kernel)]
    alone = jedbatch.batch(encode).plan(params, trees(1, FEW))
    assert np.array_equal(alone.layout.lane, plans[1].layout.lane)
    assert alone.layout.trips.sum() < plans[1].layout.trips.sum()
    for i, (plan, n) in enumerate(zip(plans, (0, FEW, COUNT), strict=True)):
        instances = trees(i, n)
        value, slope = step(params, plan)
        expected = lambda p, x=instances: number(loop(encode, p, x))  # noqa: E731
        assert_close(value, expected(params), 1e-5)
        assert_close(slope, jax.grad(expected)(params), 1e-4)
        assert_close(batched(params, instances), loop(encode, params, instances), 1e-5)
    assert step._cache_size() == 2
    with assert_no_recompile():
        step(params, batched.plan(params, trees(3, FEW)))


def test_a_width_that_saves_little_is_not_compiled(params):
    """One chunk of 512 leaves among hundreds of small ones; more of them in flat trees."""
    target = dataclasses.replace(TARGETS["cpu"], name="wide", light=(8, 64, 512))
    rng = np.random.default_rng(0)
    long = [chain(rng.normal(size=LEAVES * 8).tolist()) for _ in range(2)]
    flat = [balanced(rng.normal(size=LEAVES * 8).tolist()) for _ in range(2)]
    for instances, spared in (long, True), (flat, False):
        plan = jedbatch.batch(encode, target=target).plan(params, instances)
        sizes, batch_type = np.diff(plan.schedule.node_ptr), plan.schedule.batch_type
        for k, kernel in enumerate(plan.static.signature.kernels):
            used = kernel.buckets.cover(sizes[batch_type == k]).any(axis=0)
            best = 1 + int(np.flatnonzero(used)[-1])
            compiled = plan.static.signature.widest[k]
            is_leaf = kernel.node_type.name == "leaf"
            assert compiled < best if spared and is_leaf else compiled >= best
