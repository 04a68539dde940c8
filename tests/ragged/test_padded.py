"""Arrays of any length between the nodes of recursive functions, against the loop."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, assert_no_recompile, check, mostly_slow, random_tree
from cases.trees_of_rows import (
    SITES,
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
from jedbatch._ragged.padded_graphs import AddedArrays, PaddedInputs, added_arrays
from jedbatch._ragged.padded_programs import capacities
from jedbatch.errors import GroupedByShapesWarning


def gradient(fn, instances):
    """Of the sum of all results, in the parameters."""
    total = lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(fn(p, instances)))  # noqa: E731
    return jax.grad(total)(weights())


def test_states_of_any_length_travel_through_trees():
    def score(params, tree):
        return jnp.log1p(jnp.square(prune(params, tree) @ params["v"])).sum()

    batched = check(score, weights(), trees(0), rtol=1e-4)
    padded_plan(batched, trees(0))
    for seed in range(1, 3):
        gradient(batched, trees(seed, 12))
        batched(weights(), trees(seed, 12))
    before = batched.compilations
    for seed in range(3, 6):
        new = trees(seed, 12, sites=[2, 3, 7, 9, 12, 28])  # trees and lengths that are new
        expected = [score(weights(), tree) for tree in new]
        assert_close(batched(weights(), new), jnp.stack(expected), 1e-4)
        loop = gradient(lambda p, xs: [score(p, x) for x in xs], new)
        assert_close(gradient(batched, new), loop, 2e-4)
    assert batched.compilations == before


def test_the_plan_says_what_is_padded():
    batched = jedbatch.batch(lambda params, tree: prune(params, tree).sum())
    instances = trees(0)
    plan = padded_plan(batched, instances)
    sites = np.array([len(jax.tree.leaves(tree)[0]) for tree in instances])
    # Every inner node, and the sum at the root.
    nodes = np.array([(len(jax.tree.leaves(tree)) - 1) // 2 + 1 for tree in instances])
    exist, computed = int(sites @ nodes), int(capacities(sites) @ nodes)
    assert plan.ragged_rows == (computed, exist)
    line = f"  padded    {nodes.sum()} nodes on padded arrays: {computed} rows"
    assert line in str(plan)


def test_rows_are_those_of_the_minibatch():
    """Instances of equal capacities have a record together, and rows of their own."""
    batched = jedbatch.batch(lambda params, tree: prune(params, tree).sum())
    given = trees(0, sites=[4, 12, 20])
    for cut in (0, 3, 1):
        some = jax.tree.map(lambda x, cut=cut: x[cut:] if np.ndim(x) else x, given)
        leaves = list(map(jax.tree.leaves, some))
        exist = sum(len(own[0]) * ((len(own) - 1) // 2 + 1) for own in leaves)
        computed, found = padded_plan(batched, some).ragged_rows
        assert (computed, found) == (padded_plan(batched, given).ragged_rows[0], exist)


def test_results_of_one_function_are_not_programs_of_many():
    """Six results of an array are a program each, for all instances; trees in a list are not."""

    def tasks(params, x):
        activations = [jnp.tanh, jnp.sin, jnp.cos, jnp.abs, jax.nn.relu, jnp.square]
        return [jax.nn.softmax(f(x @ params["w"]), 0).max(0) for f in activations]

    rng = np.random.default_rng(0)
    instances = [rng.normal(size=(n, 4)).astype(np.float32) for n in SITES]
    batched = check(tasks, weights(), instances, rtol=1e-4)
    plan = batched.plan(weights(), instances)
    assert len(plan.host.ragged_calls.stages) == 6
    assert plan.graph.node_type.size == 0
    testing.assert_merged(plan)

    lists = jedbatch.batch(lambda params, trees: sum(prune(params, t).sum() for t in trees))
    padded_plan(lists, list(zip(trees(0), trees(1), strict=True)))


def plain(params, tree):
    """The same as `prune`, without a cell."""
    if not isinstance(tree, tuple):
        return tree
    left, right, time = tree
    left, right = plain(params, left), plain(params, right)
    return jnp.tanh(left @ params["w"]) * jnp.where(right > 0, right, 0.1 * right) + time


def test_equal_steps_of_different_operations_are_not_told_apart_by_numbers():
    def fn(params, tree):
        states = plain(params, tree)
        return states.max(0), jax.nn.softmax(states, 0).sum()

    testing.assert_merged(padded_plan(jedbatch.batch(fn), trees(0)))


def across(params, x):
    """Rows of [n, 4] in their relation to others, by row."""
    weight = jax.nn.softmax(x @ params["v"])
    centred = (x - x.mean(0, keepdims=True)) / (1e-2 + x.std(0, keepdims=True))
    return centred * weight[:, None] + (x.max(0) - x.min(0))[None]


def codes(params, tree):
    """Rows are looked up in a table; lengths and places are asked for."""
    x = plain(params, tree)
    found = params["table"][(x[:, 0] > 0).astype(int)]
    places = jnp.arange(x.shape[0], dtype=jnp.float32) / x.shape[0]
    return (found * (places + jnp.ones(x.shape[0]))[:, None]).sum()


@jedbatch.cell
def related(params, left, right, time):
    return across(params, left * time) + right @ params["w"]


def recursive(node):
    def fn(params, tree):
        if not isinstance(tree, tuple):
            return tree
        left, right, time = tree
        return node(params, fn(params, left), fn(params, right), time)

    return fn


def products(params, tree):
    x = plain(params, tree)
    return x.T @ x, jnp.prod(1 + 0.1 * x, axis=0), jax.nn.logsumexp(x, axis=0).sum()


def sums_along_both(params, tree):
    x = plain(params, tree)
    return x.sum(), (x > 0).any(), (x > -9).all(0), x.argmax(0), x[:, 0].argmin(), x[:, 1].max()


CASES = {
    "plain": lambda p, tree: plain(p, tree).mean(0),
    "across": lambda p, tree: across(p, prune(p, tree)).sum(0),
    "related": lambda p, tree: recursive(related)(p, tree).sum(0),
    "codes": codes,
    "products": products,
    "sums_along_both": sums_along_both,
    "transposed": lambda p, tree: jnp.exp(p["w"] @ plain(p, tree).T).mean(1),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, "plain"))
def test_operations_of_rows_and_across_rows(name):
    fn = CASES[name]
    batched = check(fn, weights(), trees(3), rtol=3e-4)
    padded_plan(batched, trees(3))
    compiles_nothing_late(batched, trees)


@pytest.mark.slow
def test_ties_share_the_derivative_of_a_maximum():
    def fn(params, tree):
        return jax.nn.relu(prune(params, tree) - 1).max(0) @ params["v"]

    check(fn, weights(), trees(6), rtol=1e-4)


def test_states_are_returned():
    def fn(params, tree):
        x = prune(params, tree)
        return {"all": x, "first": x[:, 0], "sum": x.sum()}

    batched = jedbatch.batch(fn, out_axes=None)
    instances = trees(7)
    padded_plan(batched, instances)
    expected = [fn(weights(), tree) for tree in instances]
    assert_close(batched(weights(), instances), expected, 1e-4)
    squares = lambda run: lambda p, xs: [x["all"] ** 2 for x in run(p, xs)]  # noqa: E731
    loop = functools.partial(lambda p, xs: [fn(p, x) for x in xs])
    found, known = (gradient(squares(run), instances) for run in (batched, loop))
    assert_close(found, known, 2e-4)
    with assert_no_recompile():
        batched(weights(), trees(7)[::-1])


@pytest.mark.slow
def test_states_of_one_length_stack():
    batched = jedbatch.batch(prune)
    with pytest.raises(ValueError, match="do not stack"):
        batched(weights(), trees(8))  # from here on lengths differ
    instances = trees(9, sites=[11])
    padded_plan(batched, instances)
    expected = jnp.stack([prune(weights(), tree) for tree in instances])
    assert_close(batched(weights(), instances), expected, 1e-4)
    loop = gradient(lambda p, xs: [prune(p, x) for x in xs], instances)
    assert_close(gradient(batched, instances), loop, 2e-4)


def test_nan_stays_in_its_instance():
    def fn(params, tree):
        return jnp.log(jnp.abs(prune(params, tree))).sum()

    batched = jedbatch.batch(fn)
    instances = trees(10)
    good = batched(weights(), instances)
    jax.tree.leaves(instances[3])[0][-1] = np.nan
    bad = batched(weights(), instances)
    assert np.isnan(bad[3])
    others = np.arange(8) != 3
    assert_close(bad[others], good[others], 0)


@pytest.mark.slow
def test_rows_that_are_none_reach_nothing():
    """Zeros in their place would make NaN of the gradient."""

    def fn(params, tree):
        x = jnp.exp(prune(params, tree))
        return jnp.sqrt(x.sum(1)).sum() + (1 / x).max() + jnp.log(x).mean()

    check(fn, weights(), trees(11, sites=[1, 3, 9, 13]), rtol=2e-4)


def test_padding_repeats_the_last_row():
    """Of arrays in memory and on the device, also with no numbers in a row, and of no rows."""
    lengths, capacity = [5, 0, 8, 17], 24
    for shape in ((), (4,), (0,), (2, 0)):
        arrays = [np.random.default_rng(n).normal(size=(n, *shape)) for n in lengths]
        inputs = PaddedInputs(tuple((i, ()) for i in range(len(arrays))), (capacity, *shape))
        expected = [
            x[np.minimum(np.arange(capacity), n - 1)] if n else np.zeros((capacity, *shape))
            for x, n in zip(arrays, lengths, strict=True)
        ]
        for given in (arrays, list(map(jnp.asarray, arrays))):
            added = [(AddedArrays((2, 0), (inputs,)), given, lengths)]
            ((values, padded),) = added_arrays(added)
            assert values.tolist() == [8, 5]
            assert_close(padded, np.stack(expected), 1e-6)


def test_no_rows():
    def fn(params, tree):
        x = prune(params, tree)
        return x.sum(), x.max(0, initial=-1.0), jnp.prod(x), jnp.nan_to_num(x.std(0))

    instances = trees(12, sites=[0, 3, 8])
    assert 0 in {len(jax.tree.leaves(tree)[0]) for tree in instances}
    batched = check(fn, weights(), instances, rtol=1e-4)
    padded_plan(batched, instances)
    largest = jedbatch.batch(lambda p, tree: prune(p, tree).max())
    with pytest.raises(ValueError, match=r"instance \d .* length 0, f32\[0,\d\], .* maximum of"):
        largest(weights(), instances)


def known_to_each_other(params, x, y):
    return x * jnp.tanh(y).mean(0)[None], y @ params["w"] + x.sum(0)[None]


def looked_at(params, x, y):
    return x + jax.nn.softmax(x @ y.T) @ y, y @ params["w"] + jnp.cumsum(x, 0)[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("meet", [known_to_each_other, looked_at])
def test_arrays_of_different_lengths_meet(meet):
    meet = jedbatch.cell(meet)

    def fn(params, tree):
        x, y = met(meet, params, tree)
        return x.sum(0) @ params["w"] + jnp.tanh(y).sum(0) + y.max(0)

    batched = check(fn, weights(), pairs(0), rtol=3e-4)
    padded_plan(batched, pairs(0))
    compiles_nothing_late(batched, pairs)


def test_loops_and_lattices():
    """As many steps as the instance says, each of which reads two states before."""

    @jedbatch.cell
    def step(params, x, y):
        return jnp.tanh(x @ params["w"]) + 0.3 * y

    def fn(params, instance):
        x, steps = instance
        states = [x, 2 * x]
        for back in steps:
            states.append(step(params, states[-1], states[-back]))
        return states[-1].mean(0)

    def made(seed, count=12, most=7):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 20, count)
        return [
            (rng.normal(size=(n, 4)).astype(np.float32), rng.integers(1, 3, n % most).tolist())
            for n in sizes.tolist()
        ]

    batched = check(fn, weights(), made(0), rtol=2e-4)
    padded_plan(batched, made(0))
    compiles_nothing_late(batched, made)


@jedbatch.cell
def doubled(params, x):
    return jnp.concatenate([x, x @ params["w"]])


def ends(params, x):
    return doubled(params, x).sum()


def test_what_cannot_be_padded_runs_as_before_and_says_so():
    def fn(params, tree):
        return ends(params, prune(params, tree))

    instances = trees(13, 8, sites=[2, 3], least=2, most=6)
    batched = jedbatch.batch(fn)
    expected = jnp.stack([fn(weights(), tree) for tree in instances])
    assert_close(batched(weights(), instances), expected, 1e-4)
    plan = batched.plan(weights(), instances)
    assert plan.host.padded is None
    assert "an array of 2*n rows, which is no length of an array" in plan.host.unpadded
    assert "  padded    none for some arrays, since an array of 2*n" in str(plan)
    with pytest.raises(AssertionError, match="a program of their own"):
        testing.assert_merged(plan)


def test_programs_of_single_instances_are_warned_of():
    def fn(params, tree):
        return ends(params, prune(params, tree))

    def warned_of(*minibatches):
        batched = jedbatch.batch(fn)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for instances in minibatches:
                batched.plan(weights(), instances)
        assert all(issubclass(w.category, GroupedByShapesWarning) for w in warned)
        return [str(w.message) for w in warned]

    few = [trees(seed, 3, least=3, most=6) for seed in range(4)]
    (text,) = warned_of(*few)
    assert "3 minibatches in a row needed programs that none before had" in text
    assert "an array of 2*n rows" in text
    assert not warned_of(*few[:2], *few[:2], *few[:1])
    (text,) = warned_of(trees(0, 13, least=3, most=8))
    assert re.match(r"\d+ instances of a minibatch need a program each", text)


def test_sentences_of_all_trees_still_run_before_the_graph():
    """Programs of ragged values that instances share are regions, however many instances."""

    def leaf(params, x):
        return jnp.tanh(x @ params["w"]).sum(0)

    def fn(params, tree):
        if not isinstance(tree, tuple):
            return leaf(params, tree)
        return jnp.tanh(fn(params, tree[0]) - fn(params, tree[1]))

    rng = np.random.default_rng(0)
    sentence = lambda: rng.normal(size=(int(rng.integers(1, 9)), 4)).astype(np.float32)  # noqa: E731
    forest = [random_tree(rng, int(rng.integers(1, 7)), sentence) for _ in range(12)]
    plan = jedbatch.batch(fn).plan(weights(), forest)
    assert plan.host.padded is None
    assert len(plan.host.ragged_calls.stages) == 1


@pytest.mark.slow
def test_regions_and_padded_nodes_in_one_instance():
    @jedbatch.cell
    def sentence(params, x):
        return (jax.nn.softmax(x @ params["w"] @ x.T) @ x).sum(0)

    def fn(params, instance):
        tree, words = instance
        return prune(params, tree).sum(0) * sentence(params, words)

    def made(seed):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 9, 8)
        words = [rng.normal(size=(n, 4)).astype(np.float32) for n in sizes]
        return list(zip(trees(seed), words, strict=True))

    batched = check(fn, weights(), made(0), rtol=3e-4)
    plan = batched.plan(weights(), made(0))
    assert plan.host.padded is not None
    assert len(plan.host.ragged_calls.stages) == 1
    gradient(batched, made(1))
    before = batched.compilations
    gradient(batched, made(2))
    assert batched.compilations == before


def score(params, tree):
    return jnp.square(prune(params, tree)).sum()


@pytest.mark.slow
def test_derivatives_of_second_order():
    instances = trees(14, 5, least=2, most=4)
    batched = jedbatch.batch(score)
    mine = lambda p: batched(p, instances).sum()  # noqa: E731
    loop = lambda p: sum(score(p, tree) for tree in instances)  # noqa: E731

    def twice(f):
        return jax.grad(lambda p: sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(f)(p))))

    assert_close(twice(mine)(weights()), twice(loop)(weights()), 1e-3)


@pytest.mark.slow
def test_under_jit_and_in_the_inputs():
    instances = trees(15)
    batched = jedbatch.batch(score)
    padded_plan(batched, instances)
    plan = batched.plan(weights(), instances)
    expected = jnp.stack([score(weights(), tree) for tree in instances])
    assert_close(jax.jit(batched.apply)(weights(), plan), expected, 1e-4)

    def filled(arrays):
        arrays = iter(arrays)
        return [
            jax.tree.map(lambda x: next(arrays) if isinstance(x, np.ndarray) else x, tree)
            for tree in instances
        ]

    arrays = [x for x in jax.tree.leaves(instances) if isinstance(x, np.ndarray)]
    found = jax.grad(lambda xs: batched(weights(), filled(xs)).sum())(arrays)
    known = jax.grad(lambda xs: sum(score(weights(), tree) for tree in filled(xs)))(arrays)
    assert_close(found, known, 2e-4)


def test_few_rows_first_and_many_later():
    batched = jedbatch.batch(prune, out_axes=None)
    padded_plan(batched, trees(9, 12, sites=[3, 5, 6]))  # trees that are programs of many
    for sites in (5_000, 6, 5_000):
        plan = padded_plan(batched, trees(0, 3, sites=[sites], most=3))
        assert plan.ragged_rows == (3 * int(capacities(np.array(sites))), 3 * sites)
