"""Plans of a few instances whose graphs have the form of others, against plans made anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch

P = {"table": jnp.linspace(-1, 1, 36).reshape(9, 4), "w": jnp.linspace(-1, 1, 32).reshape(8, 4)}
SHAPES = [(((1, 2), 3), 4), ((1, 2), (3, 4)), (1, 2)]


@jedbatch.cell
def word(params, number, vector):
    return params["table"][number] + vector


@jedbatch.cell
def phrase(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["w"])


def encode(params, instance):
    tree, vector = instance

    def visit(tree):
        if isinstance(tree, int):
            return word(params, tree, vector)
        return phrase(params, visit(tree[0]), visit(tree[1]))

    return visit(tree)


def instances(shapes, seed):
    """Trees of some shapes with other words, and a vector with each."""
    draws = np.random.default_rng(seed)

    def with_words(shape):
        if isinstance(shape, int):
            return int(draws.integers(9))
        return tuple(map(with_words, shape))

    return [(with_words(x), draws.normal(size=4).astype(np.float32)) for x in shapes]


def written(plan):
    """All that a plan is made of."""
    graph, schedule, layout = plan.graph, plan.schedule, plan.layout
    recorded = graph.node_type, graph.operand_ptr, graph.operand, graph.outputs, graph.node_ptr
    inputs = [x.rows if x.leaf is None else (x.leaf, x.path) for x in graph.inputs]
    arrays = (*recorded, schedule.batch_type, schedule.node, layout.lane, plan.table)
    arrays += (*plan.inputs.values(), *([] if plan.reverse_table is None else [plan.reverse_table]))
    return [x.tolist() for x in arrays], [x if type(x) is tuple else x.tolist() for x in inputs]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES])
def test_they_are_the_same(shapes, gradient):
    batched = jedbatch.batch(encode)
    for seed in range(3):
        few = instances(shapes, seed)
        plan = batched.plan(P, few, gradient=gradient)
        anew = jedbatch.batch(encode).plan(P, few, gradient=gradient)
        assert written(plan) == written(anew)
        plan.graph.check()
        assert (plan.host.seconds["schedule"] == 0) == (seed > 0)  # it was not scheduled again
        assert plan.host.num_known == 0


def test_forms_are_told_apart():
    batched = jedbatch.batch(encode)
    plans = [batched.plan(P, instances([shape], 0)) for shape in SHAPES]
    assert len({tuple(plan.graph.operand.tolist()) for plan in plans}) == len(SHAPES)
    assert all(plan.host.seconds["schedule"] > 0 for plan in plans)
    plan = batched.plan(P, instances(SHAPES[::-1], 0))
    assert plan.host.seconds["schedule"] > 0
    jedbatch.testing.check_plan(plan)


def test_values_and_gradients_are_those_of_the_loop():
    batched = jedbatch.batch(encode)
    for seed in range(2):
        few = instances(SHAPES, seed)

        def loss(params, encode_all, few=few):
            return (jnp.stack(encode_all(params, few)) ** 2).sum()

        by_loop = jax.grad(loss)(P, lambda params, few: [encode(params, x) for x in few])
        assert_close(
            jax.grad(loss)(P, lambda params, few: list(batched(params, few))), by_loop, rtol=1e-5
        )
    assert batched.compilations == 2  # of values, and of gradients


def test_tracers_of_an_outer_transformation_are_not_kept():
    few = instances(SHAPES[:1], 0)

    def scaled(scale):
        return jedbatch.batch(lambda params, x: encode(params, x) * scale)(P, few).sum()

    for scale in (1.0, 3.0):
        assert_close(jax.grad(scaled)(scale), encode(P, few[0]).sum(), rtol=1e-5)


def test_rows_that_are_not_there_are_refused():
    batched = jedbatch.batch(encode)
    (tree, vector) = instances([(1, 2)], 0)[0]
    batched.plan(P, [(tree, vector)])
    with pytest.raises(IndexError, match="row 9 of a table of 9 rows"):
        batched.plan(P, [((9, 1), vector)])
