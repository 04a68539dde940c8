"""Operations outside of cells: what always runs together is one node, with the loop's results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, random_tree

import jedbatch

W = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32),
    "q": jnp.asarray(np.random.default_rng(1).normal(size=4), jnp.float32),
}


@jedbatch.cell
def leaf(w, x):
    return jnp.tanh(w["q"] * x)


@jedbatch.cell
def node(w, left, right):
    return jnp.tanh(w["w"] @ (left + jnp.sin(right)))


def encode(w, tree):
    if isinstance(tree, float):
        return leaf(w, tree)
    return node(w, *(encode(w, child) for child in tree))


def scored(w, instance):
    tree, label = instance
    logits = encode(w, tree) @ w["w"]
    return jax.nn.log_softmax(logits * 0.5)[label]


def several(w, instance):
    """Results that do not depend on each other, one of which is read on the way."""
    h = encode(w, instance[0])
    score = jax.nn.logsumexp(h + w["q"])
    return {"state": h, "score": score, "both": jnp.exp(score) * 2, "norm": jnp.sqrt(h @ h)}


def of_two(w, instance):
    """Operations that read each other in one of two ways, which depend on the instance."""
    tree, label = instance
    h = encode(w, tree)
    a, b = jnp.tanh(h), jnp.sin(h)
    return jnp.exp(a - b if label % 2 else b - a).sum()


def summed(w, instance):
    """With as many additions as there are leaves, then always the same."""
    tree, _ = instance
    states = [encode(w, float(i)) for i in range(len(str(tree)) % 5 + 2)]
    return jax.nn.logsumexp(sum(states[1:], states[0]))


def trees(seed, count=6):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, count)
    return [(random_tree(rng, n, lambda: float(rng.normal())), int(rng.integers(4))) for n in sizes]


def names(plan):
    return {plan.graph.types[t].name for t in plan.graph.present_types}


def num_batches(plan):
    return len(list(plan.schedule.batches))


@pytest.mark.parametrize(("fn", "others"), [(scored, 1), (several, 2), (of_two, 2), (summed, None)])
def test_results_are_those_of_the_loop(fn, others):
    """A node for what depends on each other; the second way that operands are read is a type."""
    batched = check(fn, W, trees(0))
    plan = batched.plan(W, trees(1))
    assert {"leaf"} <= names(plan)
    if others is not None:
        assert len(plan.graph.present_types) <= 2 + others
        ops = jedbatch.batch(fn, granularity="cell").plan(W, trees(1))
        assert len(ops.graph.present_types) >= 6
        assert num_batches(plan) < num_batches(ops)
    else:
        assert "add" in names(plan)
        assert any(".." in name for name in names(plan))


@pytest.mark.parametrize(
    "part",
    [
        lambda x, k: x[k],
        lambda x, k: x[np.int64(k) - 4],
        lambda x, k: x[:, k],
        lambda x, k: x[k, 0],
        lambda x, k: x[k : k + 1, 1:],
    ],
)
def test_places_that_differ_are_data(part):
    def fn(w, instance):
        tree, k = instance
        return part(encode(w, tree)[:, None] * w["w"], k).sum()

    batched = check(fn, W, trees(5, 8), gradients=False)
    assert len(batched.plan(W, trees(6, 8)).graph.present_types) <= 3


def test_numbers_out_of_bounds_read_what_jax_reads():
    def fn(w, instance):
        tree, k = instance
        return encode(w, tree)[3 * k] + (encode(w, tree)[:, None] * w["w"])[1, 3 * k]

    check(fn, W, trees(5, 8), gradients=False)


def test_other_instances_have_more_operations():
    """Instances merged before are recorded again, and nothing is found to be wrong."""

    def fn(w, instance):
        tree, label = instance
        h = encode(w, tree)
        for _ in range(label // 3):
            h = jnp.cos(h)
        return jax.nn.logsumexp(jnp.abs(h) * 2)

    batched = jedbatch.batch(fn)
    same = [(tree, 1) for tree, _ in trees(2)]
    other = [(tree, 5) for tree, _ in trees(3, 2)]
    for minibatch in (same, [*same, *other], other, same):
        plan = batched.plan(W, minibatch)
        expected = np.array([fn(W, x) for x in minibatch])
        np.testing.assert_allclose(batched(W, minibatch), expected, rtol=1e-5)
        assert len(plan.graph.present_types) <= 4
    assert not any("cos" in name for name in names(plan))
    assert any("cos" in name for name in names(batched.plan(W, other)))


def test_operations_between_cells_are_merged():
    def fn(w, tree):
        if isinstance(tree, float):
            return leaf(w, tree)
        left, right = (fn(w, child) for child in tree)
        return node(w, jnp.tanh(left) * 2 + right, right)

    instances = [tree for tree, _ in trees(0)]
    batched = check(fn, W, instances, gradients=False)
    plan = batched.plan(W, [tree for tree, _ in trees(1)])
    assert names(plan) == {"leaf", "node", "tanh..add"}
    apart = jedbatch.batch(fn, granularity="cell").plan(W, instances)
    assert num_batches(batched.plan(W, instances)) < num_batches(apart)


def test_results_that_only_some_instances_return():
    def fn(w, instance):
        tree, label = instance
        h = encode(w, tree)
        total = jnp.exp(h).sum()
        return total if label else jnp.log(total)

    batched = jedbatch.batch(fn)
    for labels in ([0] * 4, [0, 1] * 2, [1] * 4):
        minibatch = [(tree, k) for (tree, _), k in zip(trees(4, 4), labels, strict=True)]
        expected = np.array([fn(W, x) for x in minibatch])
        np.testing.assert_allclose(batched(W, minibatch), expected, rtol=1e-5)


def test_nothing_else_is_merged():
    """Not where there is no cell, nor where a granularity was chosen, nor loops and branches."""
    plain = jedbatch.batch(lambda w, x: jnp.exp(w["q"] * x[0]).sum())
    xs = [(np.float32(k),) for k in range(5)]
    assert not any(".." in name for name in names(plain.plan(W, xs)))
    chosen = jedbatch.batch(scored, granularity="cell")
    assert not any(".." in name for name in names(chosen.plan(W, trees(0))))

    def looping(w, instance):
        h = jnp.exp(encode(w, instance[0]))
        return jax.lax.while_loop(lambda x: x.sum() < 30, lambda x: 2 * x, h)

    found = names(check(looping, W, trees(0), gradients=False).plan(W, trees(0)))
    assert "while" in found
    assert not any(".." in name for name in found)
