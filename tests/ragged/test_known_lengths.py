"""Python asks how long arrays are, and is told, in functions with cells and without."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, compilations, mostly_slow

import jedbatch

D = 4
_keys = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "E": jax.random.normal(_keys[0], (20, D)),
    "W": jax.random.normal(_keys[1], (D, D)),
    "U": jax.random.normal(_keys[2], (D, D)),
}
LENGTHS = (3, 7, 2, 9, 12, 5), (4, 6, 8, 10, 11, 5)  # of two minibatches


class Sentence(typing.NamedTuple):
    words: np.ndarray
    title: str


@jedbatch.cell
def step(p, h, x):
    return jnp.tanh(h @ p["W"] + x @ p["U"])


def over_rows(p, x):
    """The array as a whole, and each of its rows."""
    mean = x.mean(axis=0)
    h = mean
    for row in x:
        h = step(p, h, row)
    return (h * mean).sum()


def of_words(p, sentence):
    rows = jnp.tanh(p["E"][sentence.words] @ p["W"])
    h = jnp.zeros(D)
    for k in range(len(sentence.words) - 1, -1, -1):
        h = step(p, h, rows[k])
    return h, jax.nn.softmax(rows.sum(axis=1)) @ rows


def with_another_branch(p, x):
    y = jnp.tanh(x @ p["W"])
    return (y.mean(axis=0) if len(x) > 6 else jnp.sin(y).sum(axis=0)) / len(x)


def of_trees(p, tree):
    if isinstance(tree, tuple):
        left, right = (of_trees(p, child) for child in tree)
        return step(p, left, right)
    h = tree.max(axis=0)
    for row in tree:
        h = step(p, h, row)
    return h


def array(rng, n):
    return rng.normal(size=(n, D)).astype(np.float32)


def sentence(rng, n):
    return Sentence(rng.integers(0, 20, n), "a title")


def tree(rng, n):
    if rng.random() < 0.5:
        return array(rng, n)
    return tree(rng, n), array(rng, int(rng.integers(1, n + 1)))


INSTANCES = {over_rows: array, of_words: sentence, with_another_branch: array, of_trees: tree}


def minibatches(make, *lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[make(rng, n) for n in own] for own in lengths]


@pytest.mark.parametrize("fn", mostly_slow(INSTANCES, "of_words", "with_another_branch"))
def test_lengths_that_python_asks_for_share_types(fn):
    first, second = minibatches(INSTANCES[fn], *LENGTHS)
    batched = check(fn, PARAMS, first)
    batched(PARAMS, second)  # room for as many rows is there
    (unseen,) = minibatches(INSTANCES[fn], (3, 8, 10, 12, 11, 6), seed=1)
    types = len(batched.plan(PARAMS, second).graph.types)
    with compilations() as made:
        found = batched(PARAMS, unseen)
    assert_close(
        found, jax.tree.map(lambda *x: jnp.stack(x), *[fn(PARAMS, x) for x in unseen]), 1e-5
    )
    assert fn is of_trees or not made
    plan = batched.plan(PARAMS, unseen)
    assert plan.host.apart is None
    assert "Python is told how long arrays are" in str(plan)
    assert len(plan.graph.types) == types


def test_instances_that_do_not_ask_are_recorded_once():
    runs = []

    def fn(p, instance):
        runs.append(instance)
        x, asks = instance
        return jnp.tanh(x @ p["W"]).sum() * (len(x) if asks else 2)

    arrays = minibatches(array, *LENGTHS, (13, 14, 15, 16))
    batched = jedbatch.batch(fn)
    for own in arrays[:2]:
        instances = [(x, k % 2 == 0) for k, x in enumerate(own)]
        found = batched(PARAMS, instances)
        assert_close(found, jnp.stack([fn(PARAMS, x) for x in instances]), 1e-5)
    runs.clear()
    batched.plan(PARAMS, [(x, k < 2) for k, x in enumerate(arrays[2])])
    assert [asks for _, asks in runs] == [True, True]
