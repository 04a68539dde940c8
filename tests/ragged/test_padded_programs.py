"""Operations that take all rows of a state together, in trees of arrays of any length."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, mostly_slow, random_tree
from cases.trees_of_rows import (
    compiles_nothing_late,
    met,
    padded_plan,
    pairs,
    prune,
    trees,
    weights,
)

import jedbatch
from jedbatch import testing
from jedbatch._ragged.padded_programs import capacities
from jedbatch.errors import GroupedByShapesWarning


def attention(params, x):
    scores = (x @ params["w"]) @ x.T / 2
    return jax.nn.softmax(scores, axis=-1) @ x


def recurrent(params, x, reverse=False):
    """(states of a recurrent network along the rows, the last one)."""

    def step(h, row):
        h = jnp.tanh(row @ params["w"] + h)
        return h, h

    last, states = jax.lax.scan(step, params["v"], x, reverse=reverse)
    return states, last


def both(rows, last):
    return rows + last[None]


def distances(_, x):
    return jnp.sqrt(1e-3 + jnp.square(x[:, None] - x[None]).sum(-1)) @ x / x.shape[0]


def smoothed(params, x):
    """Rows mixed with those before, by a loop to the length; windows; neighbours around."""

    def step(i, x):
        return x.at[i].set(0.5 * x[i] + 0.5 * x[i - 1])

    x = jax.lax.fori_loop(1, x.shape[0], step, x)
    return x + jnp.roll(x, 1, axis=0) * params["v"][None]


ROWS = {
    "cumsum": lambda _, x: jnp.cumsum(x, axis=0),
    "sort": lambda _, x: jnp.sort(x, axis=0),
    "flip": lambda p, x: x[::-1] * p["v"][None],
    "attention": attention,
    "scan": lambda p, x: recurrent(p, x)[0],
    "reverse scan": lambda p, x: both(*recurrent(p, x, reverse=True)),
    "loop": smoothed,
    "distances": distances,
    "parts": lambda p, x: x + (x[1:] - x[:-1]).sum(0)[None] * p["v"][None] + x[-1:],
    "transposed": lambda p, x: jnp.cumsum(p["w"] @ x.T, axis=1).T,
}


def recursive(mix):
    """A function of a tree whose nodes mix the rows of what they make of their children."""

    @jedbatch.cell
    def node(params, left, right, time):
        return mix(params, jnp.tanh(left * time + right @ params["w"]))

    def states(params, tree):
        if not isinstance(tree, tuple):
            return tree
        left, right, time = tree
        return node(params, states(params, left), states(params, right), time)

    return states


@pytest.mark.parametrize("name", mostly_slow(ROWS, "attention", "reverse scan"))
def test_cells_take_all_rows_together(name):
    states = recursive(ROWS[name])
    fn = lambda params, tree: jnp.sin(states(params, tree)).sum(0)  # noqa: E731
    batched = check(fn, weights(), trees(0), rtol=3e-4)
    testing.assert_merged(padded_plan(batched, trees(0)))
    compiles_nothing_late(batched, trees)


PLAIN = {
    "cumsum": lambda p, tree: jnp.cumsum(prune(p, tree), axis=0)[:, 0].sum(),
    "attention": lambda p, tree: attention(p, prune(p, tree)).sum(0),
    "scan": lambda p, tree: recurrent(p, prune(p, tree))[1],
}


@pytest.mark.parametrize("name", mostly_slow(PLAIN, "cumsum"))
def test_functions_take_all_rows_of_cells_together(name):
    batched = check(PLAIN[name], weights(), trees(1), rtol=3e-4)
    testing.assert_merged(padded_plan(batched, trees(1)))
    compiles_nothing_late(batched, trees)


def test_results_with_rows_and_without_are_returned():
    """Lengths above all capacities before are types of their own; all others are known."""
    states = recursive(attention)

    @jedbatch.cell
    def ends(params, x):
        rows, last = recurrent(params, x)
        return last, rows, rows.T, x.max(0)

    def fn(params, tree):
        return ends(params, states(params, tree))

    batched = jedbatch.batch(fn, out_axes=None)
    for seed, sites in ((0, [3, 9, 17]), (1, [40]), (2, [1, 33])):
        instances = trees(seed, sites=sites)
        expected = [fn(weights(), tree) for tree in instances]
        assert_close(batched(weights(), instances), expected, 1e-4)
    graph = padded_plan(batched, trees(2, sites=[33, 8])).graph
    names = {graph.types[t].name for t in graph.node_type.tolist()}
    assert {"ends, 8 rows", "ends, 64 rows"} < names


def test_no_rows():
    """Of no rows a sum is 0, and the state of a recurrence the first one."""

    def node(params, left, right, time):
        rows, last = recurrent(params, jnp.tanh(left + right @ params["w"]))
        return rows * last[None] * time + rows / (1 + jnp.cumsum(jnp.abs(rows), axis=0))

    states = functools.partial(_visited, jedbatch.cell(node))

    @jedbatch.cell
    def ends(params, x):
        rows, last = recurrent(params, x)
        return last + rows.sum(0)

    instances = trees(2, sites=[0, 3, 9])
    assert 0 in {len(jax.tree.leaves(tree)[0]) for tree in instances}
    batched = check(lambda p, tree: ends(p, states(p, tree)), weights(), instances, rtol=3e-4)
    padded_plan(batched, instances)
    largest = jedbatch.cell(lambda params, x: recurrent(params, x)[0].max(0))
    with pytest.raises(ValueError, match=r"instance \d .* length 0, f32\[0,\d\], .* maximum of"):
        jedbatch.batch(lambda p, tree: largest(p, states(p, tree)))(weights(), instances)


@pytest.mark.slow
def test_instances_with_fewer_rows_than_a_part_takes():
    """They are told apart by shapes: of no rows there is none of which `x[-1:]` is the last."""
    states = recursive(ROWS["parts"])
    fn = lambda params, tree: jnp.sin(states(params, tree)).sum(0)  # noqa: E731
    check(fn, weights(), trees(2, sites=[0, 2, 9]), rtol=3e-4)


def _visited(node, params, tree):
    if not isinstance(tree, tuple):
        return tree
    left, right, time = tree
    return node(params, _visited(node, params, left), _visited(node, params, right), time)


@pytest.mark.slow
def test_padding_reaches_no_derivative():
    """Where zeros were in the place of rows that are none, the gradient would be no number."""

    def node(params, x):
        x = jnp.cumsum(jnp.exp(x), axis=0)
        return jnp.log(x) + 1 / x + jnp.sqrt(recurrent(params, x)[0] + 1)

    states = recursive(node)
    fn = lambda params, tree: jnp.log(1.5 + jnp.tanh(states(params, tree))).sum()  # noqa: E731
    check(fn, weights(), trees(3, sites=[1, 3, 9, 13]), rtol=3e-4)


def test_rows_that_are_none_repeat_the_last_one():
    """There a distance is 0, or what is left of an array, and its slope is no number."""

    @jedbatch.cell
    def shares(x):
        left = x.shape[0] - jnp.arange(x.shape[0])
        return x / left.astype(x.dtype)[:, None]

    def node(params, x):
        n = x.shape[0]
        squares = jnp.square(x[:, None] - x[None]).sum(-1) + jnp.eye(n, dtype=x.dtype)
        return jnp.tanh(jnp.sqrt(squares) @ x / n)

    states = recursive(node)
    fn = lambda params, tree: shares(states(params, tree)).sum(0)  # noqa: E731
    instances = trees(0, sites=[9, 12, 33, 36])
    batched = check(fn, weights(), instances, rtol=3e-4)
    names = {t.name for t in padded_plan(batched, instances).graph.types}
    assert "node, 64 rows" in names


@pytest.mark.slow
def test_nan_stays_in_its_instance():
    states = recursive(attention)
    batched = jedbatch.batch(lambda params, tree: states(params, tree).sum())
    instances = trees(4)
    good = batched(weights(), instances)
    jax.tree.leaves(instances[3])[0][-1] = np.nan
    bad = batched(weights(), instances)
    assert np.isnan(bad[3])
    others = np.arange(8) != 3
    assert_close(bad[others], good[others], 0)


def test_no_rows_of_one_of_two_arrays():
    @jedbatch.cell
    def sums(params, x, y):
        return jnp.cumsum(x, axis=0) * y.sum(0)[None], jnp.cumsum(y, axis=0) + x.sum(0)[None]

    def fn(params, tree):
        x, y = met(sums, params, tree)
        return x.sum() + y.sum(0)

    instances = pairs(1, sites=(0, 3, 9))
    batched = check(fn, weights(), instances, rtol=3e-4)
    padded_plan(batched, instances)


def leaves_of_any_length(seed, count=8, most=7):
    """Trees whose leaves are arrays, each of a length of its own."""
    rng = np.random.default_rng(seed)
    leaf = lambda: rng.normal(size=(int(rng.integers(1, 20)), 4)).astype(np.float32)  # noqa: E731
    return [random_tree(rng, int(rng.integers(2, most)), leaf) for _ in range(count)]


@jedbatch.cell
def project(params, x):
    return jnp.tanh(x @ params["w"])


def attends_to(params, x, y):
    """Rows of x, each with the rows of y that it looks at; the scores are arrays [n, m]."""
    scores = project(params, x) @ y.T
    weight = jax.nn.softmax(scores * params["v"][0], axis=-1)
    return x + weight @ project(params, y) + scores.max() * params["v"][None]


def visited(mix, params, tree):
    if not isinstance(tree, tuple):
        return tree
    left, right = visited(mix, params, tree[0]), visited(mix, params, tree[1])
    return mix(params, left, right)


def test_attention_without_a_cell():
    """Scores are arrays [n, m], some of which go from node to node."""

    def fn(params, tree):
        return jnp.sin(visited(attends_to, params, tree)).sum(0)

    instances = leaves_of_any_length(0)
    batched = check(fn, weights(), instances, rtol=3e-4, alone=jax.jit(fn))
    padded_plan(batched, instances)


@pytest.mark.slow
def test_scores_that_meet_on_the_way():

    def mix(params, x, y):
        first, second = x @ y.T, jnp.tanh(x) @ y.T
        shift = project(params, first @ y)  # between two reads of `first`
        return x + (first * jax.nn.softmax(second + (shift @ y.T), axis=0)) @ y

    def fn(params, tree):
        return visited(mix, params, tree).sum(0)

    batched = check(fn, weights(), leaves_of_any_length(2), rtol=3e-4, alone=jax.jit(fn))
    padded_plan(batched, leaves_of_any_length(2))


def test_results_as_long_as_nothing_that_is_read():
    """A node may read lengths alone."""

    def mix(params, x, y):
        table = jnp.ones((x.shape[0], y.shape[0]))
        rows = y * table.sum(0)[:, None]
        return jnp.tanh(x * table.sum(1)[:, None] @ params["w"] + rows.sum(0)[None] / 50)

    fn = lambda params, tree: visited(mix, params, tree).sum(0)  # noqa: E731
    instances = leaves_of_any_length(0)
    batched = check(fn, weights(), instances, rtol=3e-4, alone=jax.jit(fn))
    padded_plan(batched, instances)


def test_rows_that_are_joined_end_to_end_are_not_padded():
    """There would be types for every tree."""

    def fn(params, tree):
        join = lambda p, x, y: jnp.concatenate([project(p, x), y])  # noqa: E731
        return visited(join, params, tree).sum(0)

    batched = jedbatch.batch(fn)
    instances = leaves_of_any_length(0, count=2)
    expected = jnp.stack([fn(weights(), tree) for tree in instances])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for seed in range(5):
            batched.plan(weights(), leaves_of_any_length(seed, count=6, most=6))
    (warning,) = warned
    assert warning.category is GroupedByShapesWarning
    assert re.search(r"[nm] \+ \w+ rows, which is no length of an array", str(warning.message))
    plan = batched.plan(weights(), instances)
    assert plan.host.padded is None
    assert_close(batched(weights(), instances), expected, 1e-4)


def test_capacities_are_few():
    lengths = np.arange(1500)
    found = capacities(lengths)
    assert found[:66].tolist() == [8] * 9 + [16] * 8 + [32] * 16 + [64] * 32 + [128]
    assert (found >= lengths).all()
    assert (found[5:] < 2 * lengths[5:]).all()
    assert len(np.unique(found)) == 9
