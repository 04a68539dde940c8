"""Results of ragged programs that a loss does not read, whose derivative is infinite.

What the loop over instances does not compute adds nothing here: not to values, nor to derivatives
of any order. And a cotangent that is 0 by chance has a derivative nevertheless.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, mostly_slow

import jedbatch

CPU = jedbatch.Target.named("cpu")
WEIGHT = np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)
DIRECTION = np.array([[1.0, 0.5], [-0.5, 2.0]], np.float32)
SIZES = [(3, 5), (1, 1), (6, 2), (2, 9)]  # (nodes, edges) of each graph


def graphs():
    """Graphs (x [n, 2], source [e], target [e])."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(n, 2)).astype(np.float32),
            *(rng.integers(0, n, e).astype(np.int32) for _ in range(2)),
        )
        for n, e in SIZES
    ]


def norms_of_rows(weight, graph):
    """Rows, with norms of them: one phase over rows, with two results."""
    y = graph[0] @ weight
    return jnp.tanh(y), jnp.sqrt(0 * y)


def norm_of_edges(weight, graph):
    """Sums over edges: one phase over instances, with two results."""
    y = (graph[0] @ weight)[graph[1]]
    return jnp.tanh(y).sum(), jnp.sqrt(0 * y).sum()


def norm_of_sums(weight, graph):
    """Sums of what edges bring to nodes, and their norms, of which one is divided by."""
    y = graph[0] @ weight
    received = jax.ops.segment_sum(jnp.tanh(y)[graph[1]], graph[2], y.shape[0])
    norm = jnp.sqrt(jnp.square(0 * received).sum())
    return received[0], norm, (received / norm).sum(0), graph[2] + 1


def attention(weight, graph):
    """Scores of pairs of rows, of which one result takes logarithms of zeros."""
    y = graph[0] @ weight
    scores = jax.nn.softmax(y @ y.T)
    return scores @ y, jnp.log(0 * scores).max(1), scores.shape[0] * y.max()


def extremes(weight, graph):
    """Products and maxima of edges, and a norm of an array that is read whole."""
    y = graph[0] @ weight
    largest = jax.ops.segment_max(y[graph[1]], graph[2], y.shape[0])
    there = jnp.isfinite(largest)
    return y.sum(0), jnp.sqrt(jnp.where(there, 0 * largest, 0)), jnp.linalg.norm(0 * y)


def loop_with_two_results(weight, graph):
    """A loop over rows with two results, of which one is a norm."""
    y = graph[0] @ weight

    def step(total, row):
        total = jnp.tanh(total + row)
        return total, jnp.sqrt(0 * total)

    total, norms = jax.lax.scan(step, jnp.zeros(2), y)
    return total, norms, y[0]


def roots_of_weights(weight, graph):
    """Sums of rows, and of their products with what is made of the weight alone."""
    scale, roots = jnp.exp(weight[0, 0]), jnp.sqrt(0 * weight)
    return (graph[0] @ weight * scale).sum(0), (graph[0] @ roots).sum()


def branches_of_sums(weight, graph):
    """A branch with two results, of which one is a norm, of sums over rows."""
    y = (graph[0] @ weight).sum(0)
    branches = lambda y: (jnp.tanh(y), jnp.sqrt(0 * y)), lambda y: (y * y, jnp.log(0 * y))
    return jax.lax.cond(y[0] > 0, *branches, y)


def branches_of_edges(weight, graph):
    """Branches that sums over edges are in."""
    y = (graph[0] @ weight)[graph[1]]
    branches = [
        lambda y: (jnp.tanh(y).sum(0), jnp.sqrt(0 * y).sum(0)),
        lambda y: (y.sum(0), y.sum(0)),
        lambda y: (y.sum(0) ** 2, jnp.linalg.norm(0 * y, axis=0)),
    ]
    return jax.lax.switch(graph[1][0] % 3, branches, y)


def loop_that_carries_two(weight, graph):
    """A loop over rows that carries two values, of which one is a norm, and weights inside."""

    def step(carry, row):
        own = jnp.tanh(carry[0] @ weight + row)
        return (own, jnp.sqrt(0 * own @ weight.T)), jnp.log(0 * own)

    (total, norm), _ = jax.lax.scan(step, (jnp.zeros(2), jnp.zeros(2)), graph[0])
    return total, norm


def loop_that_multiplies_infinities(weight, graph):
    """A loop over rows that multiplies infinite values by the weight, and by a row of it."""

    def step(carry, row):
        own = jnp.tanh(carry[0] + row)
        column = jnp.argmax(row)
        infinite = jnp.log(0 * own) @ weight
        return (own, weight[column] * infinite + jnp.sin((weight[0] + row) * infinite)), None

    return jax.lax.scan(step, (graph[0][0] @ weight, jnp.zeros(2)), graph[0])[0]


def loop_of_a_few_steps(weight, graph):
    """A loop of as many steps for all, with a branch inside."""

    def step(y, _):
        branches = lambda y: (jnp.tanh(y), jnp.sqrt(0 * y)), lambda y: (1.5 * y, jnp.log(0 * y))
        return jax.lax.cond(y[0] > 0, *branches, y)

    return jax.lax.scan(step, (graph[0] @ weight).sum(0), None, 3)


def maxima_of_no_numbers(weight, graph):
    """Maxima of what is no number, which no element equals: in a loop, and of the weight alone."""

    def step(total, row):
        total = jnp.tanh(total + row)
        return total, jnp.max(jnp.nan * row) * total

    total, maxima = jax.lax.scan(step, jnp.zeros(2), graph[0] @ weight)
    return total, maxima, (graph[0] @ (weight * jnp.min(jnp.nan * weight))).sum()


@jax.custom_vjp
def straight(x):
    return jnp.round(x)


straight.defvjp(lambda x: (straight(x), None), lambda _, cotangent: (cotangent,))


def roots_of_rounded_weights(weight, graph):
    """A value of the weight alone, with a rule of the user's in it, and its root."""
    rounded = straight(jnp.tanh(weight))
    scale, roots = jnp.exp(rounded[0, 0]), jnp.sqrt(0 * rounded)
    return (graph[0] @ rounded * scale).sum(0), (graph[0] @ roots).sum()


FUNCTIONS = [
    branches_of_sums,
    branches_of_edges,
    loop_that_carries_two,
    loop_that_multiplies_infinities,
    loop_of_a_few_steps,
    maxima_of_no_numbers,
    roots_of_rounded_weights,
    norms_of_rows,
    norm_of_edges,
    norm_of_sums,
    attention,
    extremes,
    loop_with_two_results,
    roots_of_weights,
]
# Phases over rows, edges and instances, branches and a loop.
EACH_KIND = [norms_of_rows, norm_of_edges, norm_of_sums, branches_of_edges, loop_that_carries_two]
TWICE = [fn for fn in FUNCTIONS if fn is not roots_of_rounded_weights]  # JAX has no rule twice
LOSSES = {
    "first results": lambda found: sum(jnp.sum(jnp.sin(own[0])) for own in found),
    "several": lambda found: jnp.sum(found[0][0]) * jnp.sum(found[2][0]) + jnp.sum(found[3][0]),
}
TARGETS = {
    "cpu": CPU,
    "gpu": jedbatch.Target.named("gpu"),
    "microbatches": dataclasses.replace(CPU, name="microbatches of 8", microbatch_rows=8),
}


@functools.lru_cache(maxsize=4)  # cases of a function come one after the other
def planned(fn, target="cpu"):
    """(batched function, plan) of the graphs."""
    batched = jedbatch.batch(fn, out_axes=None, target=TARGETS[target])
    return batched, batched.plan(WEIGHT, graphs())


@functools.lru_cache(maxsize=8)
def expected_of(fn, read, transform):
    """A transformation of a loss of the weight, by the loop; it is finite."""
    loss = lambda w: read([fn(w, own) for own in graphs()])  # noqa: E731
    expected = jax.jit(transform(loss))(WEIGHT)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    return expected


def check_as_loop(fn, read, transform, target="cpu"):
    """A plan gives the same under a transformation of a loss of the weight."""
    batched, plan = planned(fn, target)
    loss = lambda w: read(batched.apply(w, plan))  # noqa: E731
    assert_close(jax.jit(transform(loss))(WEIGHT), expected_of(fn, read, transform), 2e-4)


def pushed(loss):
    """The derivative of the gradient along a direction, forward over reverse."""
    return lambda w: jax.jvp(jax.grad(loss), (w,), (DIRECTION,))[1]


def pulled(loss):
    """The same, reverse over reverse."""
    return jax.grad(lambda w: jnp.vdot(jax.grad(loss)(w), DIRECTION))


@pytest.mark.parametrize("fn", mostly_slow(FUNCTIONS, "norm_of_edges", "loop_that_carries_two"))
def test_unread_results_add_nothing_to_gradients(fn):
    for read in LOSSES.values():
        check_as_loop(fn, read, jax.value_and_grad)


@pytest.mark.parametrize("target", ["gpu", "microbatches"])
@pytest.mark.parametrize("fn", mostly_slow(EACH_KIND, "norm_of_edges", "loop_that_carries_two"))
def test_unread_results_add_nothing_in_other_programs(fn, target):
    check_as_loop(fn, LOSSES["several"], jax.value_and_grad, target)


@pytest.mark.parametrize("fn", mostly_slow(TWICE, "norm_of_edges"))
def test_unread_results_add_nothing_to_second_derivatives(fn):
    check_as_loop(fn, LOSSES["several"], pushed)


@pytest.mark.parametrize("fn", mostly_slow(EACH_KIND, "norm_of_edges"))
def test_unread_results_add_nothing_to_derivatives_of_gradients(fn):
    check_as_loop(fn, LOSSES["several"], pulled)


def test_unread_results_add_nothing_to_hessians():
    check_as_loop(norm_of_edges, LOSSES["several"], jax.hessian)


def loop_from_the_second_row(weight, graph):
    """A loop of no steps for a graph of one node; a step has an infinite slope where it begins."""
    y = graph[0] @ weight
    first = 0 * jnp.abs(y[0])

    def step(i, total):
        return jnp.sqrt(total) + jnp.abs(y[i])

    return (jax.lax.fori_loop(1, y.shape[0], step, first) + y[0],)


def scan_from_the_second_row(weight, graph):
    """The same, as a scan over the other rows."""
    y = graph[0] @ weight

    def step(total, row):
        return jnp.sqrt(jnp.abs(total @ weight)) + row, None

    return (jax.lax.scan(step, jnp.zeros(2), y[1:])[0] + y[0],)


def table_from_the_second_row(weight, graph):
    """A loop that fills a table, with a weight inside."""
    y = graph[0] @ weight

    def step(i, table):
        return table.at[i].set(jnp.sqrt(0 * table[i - 1] @ weight))

    return (jax.lax.fori_loop(1, y.shape[0], step, y)[0] + y[0],)


def graph_of_one_node(found):
    return jnp.sum(found[1][0] ** 2)


STEPS = [loop_from_the_second_row, scan_from_the_second_row, table_from_the_second_row]


@pytest.mark.parametrize("transform", mostly_slow([jax.grad, pushed, pulled], "grad"))
@pytest.mark.parametrize("fn", mostly_slow(STEPS, "scan_from_the_second_row"))
def test_steps_that_are_none_add_nothing(fn, transform):
    check_as_loop(fn, graph_of_one_node, transform)


def rows_cubed(weight, graph):
    return graph[0] @ weight


def sums_cubed(weight, graph):
    y = graph[0] @ weight
    return (y * jax.nn.softmax(y, 0)).sum(0)


def twice_pushed(loss):
    """The third derivative along a direction, of which two are pushed forward."""
    return lambda w: jax.jvp(pushed(loss), (w,), (DIRECTION,))[1]


@pytest.mark.parametrize("target", mostly_slow(TARGETS, "cpu"))
@pytest.mark.parametrize("fn", mostly_slow([rows_cubed, sums_cubed], "sums_cubed"))
def test_cotangents_that_are_zero_by_chance_have_derivatives(fn, target):
    instances, nothing = graphs(), np.zeros_like(WEIGHT)
    batched, plan = planned(fn, target)
    for power, transforms in ((2, (pushed, pulled)), (3, (twice_pushed,))):

        def read(found, power=power):
            return sum(jnp.sum(x**power) for x in found)

        for transform in transforms:
            of_plan = transform(lambda w, read=read: read(batched.apply(w, plan)))
            of_loop = transform(lambda w, read=read: read([fn(w, own) for own in instances]))
            expected = jax.jit(of_loop)(nothing)
            assert np.abs(expected).max() > 1
            assert_close(jax.jit(of_plan)(nothing), expected, 1e-4)


@pytest.mark.parametrize("fn", mostly_slow(EACH_KIND, "norm_of_edges"))
def test_gradients_of_many_losses_at_once(fn):
    """`jax.vmap` of gradients, of losses that read other results each."""
    instances = graphs()
    batched, plan = planned(fn)
    factors = np.eye(len(instances), dtype=np.float32)

    def slopes(run):
        def loss(weight, factor):
            return sum(f * jnp.sum(own[0]) for f, own in zip(factor, run(weight), strict=True))

        return jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(WEIGHT, factors)

    expected = slopes(lambda w: [fn(w, instance) for instance in instances])
    assert np.isfinite(expected).all()
    assert_close(slopes(lambda w: batched.apply(w, plan)), expected, 2e-4)
