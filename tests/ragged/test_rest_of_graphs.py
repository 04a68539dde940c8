"""The rest of a graph joins its ragged parts where instructions cost much, as on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop, number

import jedbatch

W = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)


def arrays(lengths, *more):
    rng = np.random.default_rng(sum(lengths))
    made = [(rng.normal(size=(n, 3)).astype(np.float32), *more) for n in lengths]
    return made if more else [x for (x,) in made]


def judged(batched, fn, instances, gradient=True):
    """Values and gradients are those of the loop."""
    runs = [lambda w: batched(w, instances), lambda w: loop(fn, w, instances)]
    if gradient:
        runs = [jax.value_and_grad(lambda w, run=run: number(run(w))) for run in runs]
    found, expected = (run(jnp.asarray(W)) for run in runs)
    assert_close(found, expected, rtol=2e-5)


def pooled(w, x):
    return jnp.tanh(x @ w).sum(0)


def normalized(w, x):
    """After the rows: operations on a vector and on numbers."""
    state = pooled(w, x)
    return (state / (1.5 + x.shape[0])).dot(state) ** 2


def num_nodes(batched, instances):
    return len(batched.plan(W, instances).graph.node_type)


def test_nothing_is_left_of_equal_graphs():
    batched = jedbatch.batch(normalized, target="gpu")
    judged(batched, normalized, arrays([2, 5, 3]))
    assert num_nodes(batched, arrays([2, 5, 3])) == 0
    compiled = batched.compilations
    judged(batched, normalized, arrays([4, 1, 6]))
    assert batched.compilations == compiled


def test_nodes_are_left_on_a_cpu_and_where_there_are_many_operations():
    instances = arrays([2, 5, 3])
    assert num_nodes(jedbatch.batch(normalized, target="cpu"), instances) > 0
    little = dataclasses.replace(jedbatch.Target.named("gpu"), rest_work=2)
    batched = jedbatch.batch(normalized, target=little)
    assert num_nodes(batched, instances) > 0
    judged(batched, normalized, instances)


def by_name(w, instance):
    x, name = instance
    state = pooled(w, x)
    return state.sum() if name == "sum" else jnp.cos(state).max()


@pytest.mark.parametrize("together", [True, False], ids=["at once", "later"])
def test_graphs_that_differ_share_their_ragged_part(together):
    batched = jedbatch.batch(by_name, target="gpu")
    sums, extremes = arrays([2, 5], "sum"), arrays([3, 4, 1], "max")
    minibatches = [[*sums, *extremes]] if together else [sums, extremes, [*sums, *extremes]]
    for instances in minibatches:
        judged(batched, by_name, instances)
    plan = batched.plan(W, [*sums, *extremes])
    assert len(plan.graph.node_type) > 0
    assert len(plan.ragged[0]) == 1


def of_sentences(w, tree):
    if isinstance(tree, (np.ndarray, jax.Array)):
        return pooled(w, tree)
    return jnp.tanh(sum(of_sentences(w, child) for child in tree))


def test_trees_of_arrays_stay_graphs():
    a, b, c, d = arrays([2, 3, 1, 4])
    batched = jedbatch.batch(of_sentences, target="gpu")
    instances = [[a, b], [[a, c], d], [c]]
    judged(batched, of_sentences, instances)
    plan = batched.plan(W, instances)
    assert len(plan.graph.node_type) > 0
    assert len(plan.ragged[0]) == 1


def halved(w, x):
    """A loop that ends by a value, after the rows."""
    return jax.lax.while_loop(lambda s: s > 0.1, lambda s: s / 2, jnp.square(pooled(w, x)).sum())


def doubled(w, x):
    """A function with a rule of its own for the reverse."""

    @jax.custom_vjp
    def twice(s):
        return 2 * s

    twice.defvjp(lambda s: (2 * s, None), lambda _, c: (3 * c,))
    return twice(pooled(w, x).sum())


@pytest.mark.parametrize("fn", [halved, doubled])
def test_loops_and_rules_stay_nodes(fn):
    batched = jedbatch.batch(fn, target="gpu")
    instances = arrays([2, 5, 3])
    judged(batched, fn, instances, fn is doubled)
    assert num_nodes(batched, instances) > 0


def scaled(w, instance):
    x, number, table = instance
    return pooled(w, x) * number + table[0], x.shape[0] * number


def test_numbers_that_differ_and_several_results():
    batched = jedbatch.batch(scaled, target="gpu")
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    for first, second in ((0.5, 0.5), (0.5, 2.5)):
        instances = [*arrays([2, 5], first, table), *arrays([3], second, table + 1)]
        judged(batched, scaled, instances)
    assert num_nodes(batched, instances) == 0


def test_second_derivatives():
    batched = jedbatch.batch(normalized, target="gpu")
    instances = arrays([2, 4])
    direction = jnp.ones_like(W) / 3

    def of_loop(w):
        return sum(normalized(w, x) for x in instances)

    def along(total):
        return jax.jvp(jax.grad(total), (jnp.asarray(W),), (direction,))[1]

    found = along(lambda w: batched(w, instances).sum())
    np.testing.assert_allclose(found, along(of_loop), rtol=2e-4, atol=1e-5)
    assert num_nodes(batched, instances) == 0
