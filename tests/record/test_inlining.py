"""Functions of whole instances under `jax.jit` and `jax.checkpoint`, against the plain loop."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import random_tree

import jedbatch
from jedbatch.testing import assert_close, compilations

RNG = np.random.default_rng(0)
P = {
    "leaves": jnp.asarray(RNG.normal(size=(5, 4)), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32),
}


@jedbatch.cell
def leaf(p, word):
    return jnp.tanh(p["leaves"][word])


@jedbatch.cell
def node(p, left, right):
    return jnp.tanh(p["w"] @ jnp.concatenate([left, right]))


def encode(p, tree):
    if isinstance(tree, tuple):
        return node(p, *(encode(p, child) for child in tree))
    return leaf(p, tree)


def score(p, tree):
    return encode(p, tree).sum()


def minibatch(seed):
    rng = np.random.default_rng(seed)
    leaf = lambda: np.int32(rng.integers(5))  # noqa: E731
    return [random_tree(rng, int(size), leaf) for size in rng.integers(2, 10, size=6)]


def types_of(plan):
    return {plan.graph.types[t].label for t in plan.graph.present_types}


compiled = jax.jit(score)
WRAPPED = {
    "checkpoint": jax.checkpoint(score),
    "jit": lambda p, tree: compiled(p, tree),
    "Equinox": eqx.filter_jit(score),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_functions_of_whole_trees_have_few_types_and_stop_compiling(name):
    batched = jedbatch.batch(WRAPPED[name])
    loss = jax.value_and_grad(lambda p, trees: batched(p, trees).sum())
    of_loop = jax.value_and_grad(lambda p, trees: sum(score(p, tree) for tree in trees))
    for seed in range(4):  # after three it is known that merging operations pays
        loss(P, minibatch(seed))
    for seed in range(4, 7):
        with compilations() as late:
            found = loss(P, minibatch(seed))
        assert not late
        assert_close(found, of_loop(P, minibatch(seed)), rtol=1e-4)
    assert len(types_of(batched.plan(P, minibatch(7)))) == 3


def test_cells_of_a_compiled_function_are_cells():
    trees = minibatch(0)
    plain, batched = (jedbatch.batch(f) for f in (score, compiled))
    assert types_of(batched.plan(P, trees)) == types_of(plain.plan(P, trees))
    assert_close(batched(P, trees), jnp.stack([score(P, tree) for tree in trees]), rtol=1e-5)


def test_functions_of_several_shapes_stay_nodes():
    @jax.jit
    def squares(x):
        return (x * x + x).sum()

    xs = [RNG.normal(size=(2, size)).astype(np.float32) for size in range(1, 7)]
    batched = jedbatch.batch(lambda p, x: p["w"].sum() * squares(x))
    assert sum("squares" in label for label in types_of(batched.plan(P, xs))) == len(xs)
    assert_close(batched(P, xs), P["w"].sum() * jnp.stack([squares(x) for x in xs]), rtol=1e-5)
