"""Stacks of rows of arrays that Python has picked, one by one, or of what is computed from each."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, by_themselves
from numpy.testing import assert_allclose

import jedbatch

D = 4
PARAMS = {
    "E": jax.random.normal(jax.random.key(0), (20, D)),
    "W": jax.random.normal(jax.random.key(1), (D, D)) / 2,
    "positions": jax.random.normal(jax.random.key(2), (40, D)),
}
LENGTHS = (3, 1, 17, 8, 2, 20), (5, 19, 6, 1, 11, 4)  # of two minibatches


def minibatch(seed, lengths):
    random = np.random.default_rng(seed)
    rows = [random.normal(size=(n, D)).astype(np.float32) for n in lengths]
    return [{"x": x, "words": random.integers(0, 20, len(x))} for x in rows]


def mixed(rows):
    return (jax.nn.softmax(rows @ rows.T) @ rows).mean(axis=0)


@jedbatch.cell
def encode(params, row):
    return jnp.tanh(row @ params["W"])


def of_cells(params, instance):
    return mixed(jnp.stack([encode(params, row) for row in instance["x"]]))


def of_computed(params, instance):
    rows = params["E"][instance["words"]] * 2
    return mixed(jnp.stack([jnp.tanh(row @ params["W"]) for row in rows]))


def of_two_arrays(params, instance):
    pairs = zip(instance["x"], instance["words"], strict=True)
    return jnp.array([x * params["E"][word] for x, word in pairs]).max(axis=0)


def of_positions(params, instance):
    rows = [x + params["positions"][k] * (k + 1) for k, x in enumerate(instance["x"])]
    return jnp.concatenate([row[None] for row in rows]).max(axis=0)


def of_neighbours(params, instance):
    x = instance["x"]
    pairs = [encode(params, x[k]) * x[k + 1] for k in range(len(x) - 1)]
    return mixed(jnp.stack([*pairs])) if pairs else x[0]


def of_reversed(params, instance):
    x = instance["x"]
    return jnp.cumsum(jnp.stack([x[-1 - k] * x[0] for k in range(len(x))]), axis=0).max(axis=0)


def of_parts(_, instance):
    rows = [jnp.stack([x[0] - x[3], *x[1:3], x.max()]) for x in instance["x"]]
    return jnp.stack(rows, axis=1).max(axis=1)


def of_trees(params, instance):
    states = [{"h": encode(params, x), "c": (x[0], x)} for x in instance["x"]]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *states)
    return mixed(stacked["h"] + stacked["c"][1]) * stacked["c"][0].sum()


def of_stacked(params, instance):
    rows = jnp.stack([encode(params, x) for x in instance["x"]])
    return mixed(jnp.stack([encode(params, row) + row for row in rows]))


def of_numbers(params, instance):
    return mixed(jnp.stack([params["positions"][k] for k in range(len(instance["x"]))]))


SPELLINGS = {
    fn.__name__: fn
    for fn in (
        of_cells,
        of_computed,
        of_two_arrays,
        of_positions,
        of_neighbours,
        of_reversed,
        of_parts,
        of_trees,
        of_stacked,
        of_numbers,
    )
}


@pytest.mark.parametrize("fn", by_themselves(SPELLINGS, "of_cells", "of_computed"))
def test_stacks_are_computed_from_the_array(fn):
    """In programs that serve all lengths, though types of stacks do not."""
    batched = jedbatch.batch(fn)

    def compare(instances):
        found = batched(PARAMS, instances)
        for i, instance in enumerate(instances):
            expected = fn(PARAMS, instance)
            jax.tree.map(lambda a, b, i=i: assert_allclose(a[i], b, 1e-4, 1e-4), found, expected)

    def loss(fn, params, every):
        return sum(x.sum() for x in jax.tree.leaves(fn(params, every)))

    first, second = itertools.starmap(minibatch, enumerate(LENGTHS))
    compare(first)
    before = batched.compilations
    compare(second)
    assert batched.compilations <= before + 1  # rows may be read in another number of pieces
    plan = batched.plan(PARAMS, second)
    assert max(np.diff(plan.graph.node_ptr)) <= 5  # what is not ragged; all else runs packed
    ours = jax.grad(lambda p: loss(batched, p, second))(PARAMS)
    its = jax.grad(lambda p: sum(loss(fn, p, instance) for instance in second))(PARAMS)
    assert_close(ours, its, rtol=1e-3)


def of_states(params, instance):
    state, states = jnp.zeros(D), []
    for row in instance["x"]:
        state = encode(params, state + row)
        states.append(state)
    return mixed(jnp.stack(states))


def of_some(_, instance):
    x = instance["x"]
    return mixed(jnp.stack([x[k] for k in range(0, len(x), 2)]))


def of_equal(params, instance):
    return mixed(jnp.stack([encode(params, instance["x"][0]) for _ in instance["x"]]))


def of_products(_, instance):
    return jnp.stack([x * 0.5**k for k, x in enumerate(instance["x"])]).sum(axis=0)


def of_another_order(_, instance):
    x = instance["x"]
    return mixed(jnp.stack([x[k // 2] * x[-1] for k in range(len(x))]))


def of_first_and_each(params, instance):
    """A value that the first part reads twice, as the first and as its own."""
    own = [encode(params, x) for x in instance["x"]]
    return mixed(jnp.stack([own[0] * x for x in own]))


@pytest.mark.parametrize(
    "fn",
    [of_states, of_some, of_equal, of_products, of_another_order, of_first_and_each],
)
def test_parts_that_differ_otherwise(fn):
    batched = jedbatch.batch(fn)
    for instances in itertools.starmap(minibatch, enumerate([(3, 1, 5, 4), (2, 5, 1, 6)])):
        expected = jnp.stack([fn(PARAMS, instance) for instance in instances])
        assert_close(batched(PARAMS, instances), expected, rtol=1e-4)


def test_rows_of_an_array_that_are_as_many_as_its_features():
    """A stack may be of a length by chance, and read where its extent is a number."""

    def fn(params, instance):
        x = instance["x"]
        rows = jnp.stack([encode(params, x[k]) for k in range(len(x))])
        return (rows @ params["W"]).max(axis=0) + jnp.stack([x[0], x[-1]]).reshape(2, -1)[0]

    batched = jedbatch.batch(fn)
    for instances in itertools.starmap(minibatch, enumerate([(3, 4, 2), (4, 2, 1), (5, 4, 3)])):
        expected = jnp.stack([fn(PARAMS, instance) for instance in instances])
        assert_close(batched(PARAMS, instances), expected, rtol=1e-4)
