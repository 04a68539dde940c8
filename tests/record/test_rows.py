"""Python knows how long arrays are, in functions without cells."""

import typing
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, compilations, mostly_slow
from flax import nnx

import jedbatch

D = 4
WORDS = 20
LENGTHS = (3, 7, 2, 9, 12, 5), (4, 6, 8, 10, 11, 5)  # of two minibatches
_keys = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "E": jax.random.normal(_keys[0], (WORDS, D)),
    "W": jax.random.normal(_keys[1], (D, D)),
    "positions": jax.random.normal(_keys[2], (32, D)),
    "out": jax.random.normal(_keys[3], (D, 3)),
}


class Document(typing.NamedTuple):
    words: tuple
    label: int
    title: str


def attend(p, rows, length):
    """Attention to what came before."""
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), rows @ rows.T, -1e9)
    return jax.nn.softmax(scores) @ jnp.tanh(rows @ p["W"])


def of_words(p, words):
    rows = p["E"][jnp.array(words)] + p["positions"][: len(words)]
    return attend(p, rows, len(words)).mean(axis=0)


def counted(p, words):
    weights = 1 / (1 + jnp.arange(len(words)))
    return weights @ (p["E"][jnp.asarray(words)] * p["positions"][np.arange(len(words))])


def of_array(p, x):
    return jnp.tanh(attend(p, x + p["positions"][-len(x) :], len(x)) @ p["out"]).max(axis=0)


def of_dict(p, instance):
    x, times = instance["x"], instance["times"]
    return times @ jnp.cumsum(x * p["positions"][: len(x)], axis=0) * instance["scale"]


def of_document(p, document):
    logits = of_words(p, document.words) @ p["out"]
    return jax.nn.logsumexp(logits) - logits[document.label]


def words(rng, n):
    return tuple(rng.integers(0, WORDS, n).tolist())


def array(rng, n):
    return rng.normal(size=(n, D)).astype(np.float32)


def a_dict(rng, n):
    times = rng.normal(size=n).astype(np.float32)
    return {"x": array(rng, n), "times": times, "scale": float(rng.normal())}


def document(rng, n):
    return Document(words(rng, n), int(rng.integers(3)), "a title")


INSTANCES = {
    of_words: words,
    counted: words,
    of_array: array,
    of_dict: a_dict,
    of_document: document,
}


def minibatches(make, *lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[make(rng, n) for n in own] for own in lengths]


@pytest.mark.parametrize("fn", mostly_slow(INSTANCES, "of_words", "of_dict"))
def test_lengths_that_python_asks_for_share_types(fn):
    first, second = minibatches(INSTANCES[fn], *LENGTHS)
    batched = check(fn, PARAMS, first)
    batched.plan(PARAMS, second)
    batched(PARAMS, second)  # room for as many elements is there
    (unseen,) = minibatches(INSTANCES[fn], (3, 8, 10, 12, 11, 6), seed=1)
    with compilations() as made:
        found = batched(PARAMS, unseen)
    assert not made
    assert_close(found, jnp.stack([fn(PARAMS, x) for x in unseen]), rtol=1e-4)
    plan = batched.plan(PARAMS, unseen)
    assert len(plan.graph.node_type) in (0, len(unseen))  # all else runs packed
    assert "grouped by equal shapes" not in str(plan)


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.positions = nnx.Param(PARAMS["positions"])

    def __call__(self, x):
        return jnp.tanh(self.linear(x) + self.positions[: len(x)]).max(axis=0)


class Reader(eqx.Module):
    params: dict

    def __call__(self, x):
        return of_array(self.params, x)


@pytest.mark.parametrize("library", ["flax", pytest.param("equinox", marks=pytest.mark.slow)])
def test_modules(library):
    if library == "flax":
        graph, state = nnx.split(Encoder(nnx.Rngs(0)))
        fn = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    else:
        state, fn = Reader(PARAMS), lambda module, x: module(x)
    first, second = minibatches(array, *LENGTHS)
    batched = jedbatch.batch(fn)
    batched(state, first)
    found = batched(state, second)
    assert_close(found, jnp.stack([fn(state, x) for x in second]), rtol=1e-4)
    assert len(batched.plan(state, second).graph.node_type) in (0, len(second))


def recurrence(p, x):
    h = jnp.zeros(D)
    for k in range(len(x)):
        h = jnp.tanh(h @ p["W"] + x[k])
    return h


def with_a_cell(p, x):
    layer = jedbatch.cell(lambda w, h: jnp.tanh(w @ h))
    return layer(p["W"], (x + p["positions"][: len(x)]).sum(axis=0))


def deciding(p, x):
    return (x.mean(axis=0) if len(x) > 6 else x.max(axis=0)) @ p["W"]


@pytest.mark.parametrize("fn", [recurrence, with_a_cell, deciding])
def test_what_is_recorded_by_operations(fn):
    """Steps of a recurrence, cells, and what is another program for some lengths."""
    first, second = minibatches(array, *LENGTHS)
    batched = jedbatch.batch(fn)
    batched(PARAMS, first)
    found = batched(PARAMS, second)
    assert_close(found, jnp.stack([fn(PARAMS, x) for x in second]), rtol=1e-5)
    plan = batched.plan(PARAMS, second)
    assert (len(plan.graph.node_type) > len(second)) == (fn is recurrence)


def test_no_rows_and_many():
    fn = lambda p, x: (x @ p["W"] * len(x)).sum(axis=0) + len(x)  # noqa: E731
    for lengths in (0, 3, 5, 4, 2, 6), (600, 3, 5, 4, 2, 6):
        (instances,) = minibatches(array, lengths)
        found = jedbatch.batch(fn)(PARAMS, instances)
        assert_close(found, jnp.stack([fn(PARAMS, x) for x in instances]), rtol=1e-4)


def test_other_structures_are_packed():
    """Instances that need no lengths run for all of them, beside others."""

    def fn(p, x):
        return jnp.tanh(x["packed"] @ p["W"]).sum(0) if "packed" in x else of_array(p, x["rows"])[0]

    fn = lambda p, x, fn=fn: jnp.sum(fn(p, x))  # noqa: E731
    batched = jedbatch.batch(fn)
    first, second = minibatches(array, *LENGTHS)
    for arrays in first, second:
        for name in "packed", "rows":
            instances = [{name: x} for x in arrays]
            found = batched(PARAMS, instances)
            assert_close(found, jnp.stack([fn(PARAMS, x) for x in instances]), rtol=1e-4)
    (unseen,) = minibatches(array, (13, 14, 15, 16))
    assert batched.plan(PARAMS, [{"packed": x} for x in unseen]).ragged_rows is not None
    plan = batched.plan(PARAMS, [{"rows": x} for x in unseen])
    assert plan.ragged_rows is not None


def test_new_lengths_are_not_warned_of():
    batched = jedbatch.batch(of_words)
    lengths = np.random.default_rng(0).permutation(np.arange(2, 32)).reshape(10, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for instances in minibatches(words, *lengths.tolist()):
            batched.plan(PARAMS, instances, gradient=False)


def test_errors_of_one_instance_are_those_of_the_function():
    def fn(p, words):
        if len(words) == 13:
            raise ValueError("unlucky")
        return of_words(p, words)

    batched = jedbatch.batch(fn)
    first, bad, second = minibatches(words, LENGTHS[0], (4, 13), LENGTHS[1])
    batched(PARAMS, first)
    with pytest.raises(ValueError, match="unlucky"):
        batched(PARAMS, bad)
    found = batched(PARAMS, second)
    assert_close(found, jnp.stack([fn(PARAMS, x) for x in second]), rtol=1e-4)
    assert not len(batched.plan(PARAMS, second).graph.node_type)


class Children(typing.NamedTuple):
    states: list
    scale: float


def test_lists_in_named_tuples_are_lists_of_any_length():
    @jedbatch.cell
    def node(p, children):
        rows = jnp.stack(children.states)
        return (jax.nn.softmax(rows @ rows.T) @ rows).sum(axis=0) * children.scale

    def fn(p, x):
        return node(p, Children([jnp.tanh(row) for row in x], 0.5))

    instances = [list(array(np.random.default_rng(n), n)) for n in (2, 3, 5, 6, 7, 4)]
    batched = check(fn, PARAMS, instances)
    calls = [t for t in batched.plan(PARAMS, instances).graph.present_types if t]
    assert len(calls) <= 5  # rows, sums, and nodes of up to four and eight
