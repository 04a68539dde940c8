"""What is compiled, and how often."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_no_recompile
from cases.models import random_params

import jedbatch
from jedbatch.data import synthetic_treebank
from jedbatch.models import tree


def make(hidden=8):
    cells = tree.plain_cells(500, 5, hidden)
    return jedbatch.batch(tree.scorer(cells)), random_params(cells)


def minibatches(seed, size, count):
    trees = synthetic_treebank(size * count, seed=seed)
    return [trees[i : i + size] for i in range(0, len(trees), size)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [(1, 300), (16, 40)])
def test_unseen_topologies_compile_nothing_after_one_epoch(size, count):
    score, params = make()

    @jax.jit
    def step(params, plan):
        return jax.grad(lambda p: score.apply(p, plan)[:, 0].sum())(params)

    for minibatch in minibatches(seed=1, size=size, count=count):  # the warm-up epoch
        step(params, score.plan(params, minibatch))
        score(params, minibatch)
    before = score.compilations
    with assert_no_recompile():
        for minibatch in minibatches(seed=2, size=size, count=30):
            step(params, score.plan(params, minibatch))
            score(params, minibatch)
    assert score.compilations == before


@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_lists_of_results_compile_nothing_new():
    """However many results there are."""
    fn = lambda params, n: [jnp.sin(params * i) for i in range(n)]  # noqa: E731
    batched = jedbatch.batch(fn, out_axes=None)
    for n in (8, 70, 3, 40):
        batched(jnp.ones(2), list(range(n)))
    with assert_no_recompile():
        batched(jnp.ones(2), [3, 17, 5, 5, 8])


def test_compilations_are_counted():
    score, params = make()
    (minibatch,) = minibatches(seed=3, size=4, count=1)
    assert score.compilations == 0
    score(params, minibatch)
    assert score.compilations == 1
    jax.grad(lambda p: score(p, minibatch).sum())(params)
    assert score.compilations == 3


def test_arenas_are_updated_in_place():
    """No copy of a whole arena in the compiled programs.

    XLA may copy small tables and rows; an arena has more elements than any of those here.
    """
    hidden, num_lanes = 16, 1024
    score, params = make(hidden)
    (minibatch,) = minibatches(seed=4, size=32, count=1)
    plan = score.plan(params, minibatch)
    assert min(plan.static.signature.rows[1:2]) >= num_lanes

    def loss(params, plan):
        return score.apply(params, plan)[:, 0].sum()

    for run in (loss, jax.grad(loss)):
        text = jax.jit(run).lower(params, plan).compile().as_text()
        loops = text[: text.index("ENTRY")]  # an arena may be copied once, before the loops
        copied = []
        for line in loops.splitlines():
            name, _, what = line.strip().partition(" = ")
            shape, _, operation = what.partition(" ")
            if operation.startswith("copy("):
                size = np.prod([int(n) for n in shape[4:].split("]")[0].split(",") if n.isdigit()])
                if shape.startswith("f32[") and size >= num_lanes * hidden:
                    copied.append((name, shape))
        assert not copied


def test_equal_minibatches_share_one_plan_structure():
    score, params = make()
    (minibatch,) = minibatches(seed=5, size=4, count=1)
    one, two = score.plan(params, minibatch), score.plan(params, minibatch)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(two))


def test_planning_needs_no_compilation():
    score, params = make()
    first, second = minibatches(seed=6, size=4, count=2)
    score.plan(params, first)
    with assert_no_recompile():
        score.plan(params, second)


def test_shapes_are_enough_to_plan():
    score, params = make()
    (minibatch,) = minibatches(seed=7, size=4, count=1)
    plan = score.plan(jax.eval_shape(lambda: params), minibatch)
    np.testing.assert_array_equal(score.apply(params, plan), score(params, minibatch))


def num_conditions(num_types):
    """How many conditions of loops XLA compiles, where instances have so many types of nodes."""
    cells = [
        jedbatch.cell(lambda w, x, i=i: jnp.tanh(w[i] * x) + x, name=f"cell{i}")
        for i in range(num_types)
    ]

    def fn(w, x):
        for cell in cells:
            x = cell(w, x)
        return x.sum()

    batched = jedbatch.batch(fn, target=jedbatch.Target.named("cpu"))
    w, xs = jnp.linspace(0.5, 1, num_types), np.ones((3, 4), np.float32)
    plan = batched.plan(w, xs)
    assert len(plan.static.signature.kernels) >= num_types
    step = jax.jit(jax.grad(lambda w, plan: batched.apply(w, plan).sum()))
    text = step.lower(w, plan).compile().as_text()
    computations = re.split(r"\n\n", text)
    found = set()
    for computation in computations:
        head, _, body = computation.partition("{\n")
        if "-> pred[] " in head and "fused" in head and "compare" in body:
            body = re.sub(r", metadata=\{[^}]*\}", "", body)
            names = {}
            name_of = lambda m, names=names: names.setdefault(m[0], f"%{len(names)}")  # noqa: E731
            found.add(re.sub(r"%[\w.\-]+", name_of, body))
    assert found
    return len(found)


def test_all_loops_over_chunks_have_the_same_few_conditions():
    """XLA compiles equal ones once: opcodes are numbers that it does not know."""
    assert num_conditions(6) == num_conditions(12)
