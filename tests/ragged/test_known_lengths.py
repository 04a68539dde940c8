"""Python asks how long arrays are, and is told, in functions with cells and without."""

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
LENGTHS = (3, 7, 2, 9, 12, 5), (13, 6, 8, 10, 11, 5)  # of two minibatches
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


@jedbatch.cell
def step(p, h, x):
    return jnp.tanh(h @ p["W"] + x)


def over_rows(p, x):
    """The array as a whole, and each of its rows."""
    h = mean = x.mean(axis=0)
    for row in x:
        h = step(p, h, row)
    return h * mean


def over_words(p, document):
    rows = jnp.tanh(p["E"][document["words"]] @ p["W"])
    h = jnp.zeros(D)
    for k in range(len(document["words"]) - 1, -1, -1):
        h = step(p, h, rows[k])
    return h, jax.nn.softmax(rows.sum(axis=1)) @ rows


def with_another_branch(p, x):
    y = jnp.tanh(x @ p["W"])
    return (y.mean(axis=0) if len(x) > 6 else jnp.sin(y).sum(axis=0)) / len(x)


def inside_of_gradients(p, x):
    def energy(x):
        return jnp.sum(jnp.sin(x @ p["W"])) / len(x)

    moved = jax.vmap(lambda row: jnp.tanh(row @ x.T).sum() / len(x))(x)
    return jax.grad(energy)(x).sum(axis=0) * moved.sum()


def windows(p, x):
    y = jnp.tanh(x @ p["W"])
    return sum(y[k : k + 2].mean(axis=0) * (k + 1) for k in range(len(x) - 1))


def made_of_lengths(p, x):
    """Arrays that are made and cut with a length, or with one more or less."""
    n = len(x)
    table = jnp.eye(n) + jnp.full((n, n), 1.0 / n)
    rows = x + jnp.broadcast_to(p["E"][0], (n, D)) + jnp.zeros((n, D)) + np.ones((n, 1), np.float32)
    ends = p["positions"][: n + 1].sum(axis=0) + rows[: n - 1].sum(axis=0)
    pairs = rows.reshape(n, 2, D // 2).sum(axis=1)
    weights = np.tril(np.ones((n, n), np.float32)) / n
    looped = jax.lax.fori_loop(0, n, lambda k, h: jnp.tanh(h + rows[k]), jnp.ones(D))
    return (table + weights) @ rows @ p["W"] @ looped @ jnp.arange(n) + ends + pairs.sum()


def words(rng, n):
    return tuple(rng.integers(0, WORDS, n).tolist())


def array(rng, n):
    return rng.normal(size=(n, D)).astype(np.float32)


def a_dict(rng, n):
    times = rng.normal(size=n).astype(np.float32)
    return {"x": array(rng, n), "times": times, "scale": float(rng.normal())}


def document(rng, n):
    return Document(words(rng, n), int(rng.integers(3)), "a title")


def word_array(rng, n):
    return {"words": rng.integers(0, WORDS, n), "title": "a title"}


INSTANCES = {
    over_rows: array,
    over_words: word_array,
    with_another_branch: array,
    inside_of_gradients: array,
    windows: array,
    made_of_lengths: array,
    of_words: words,
    counted: words,
    of_array: array,
    of_dict: a_dict,
    of_document: document,
}


def minibatches(make, *lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[make(rng, n) for n in own] for own in lengths]


@pytest.mark.parametrize(
    "fn", mostly_slow(INSTANCES, "of_words", "over_words", "made_of_lengths", "with_another_branch")
)
def test_lengths_that_python_asks_for_share_types(fn):
    more = 3 if fn is made_of_lengths else 0  # of three rows one less are a number of their own
    first, second = minibatches(INSTANCES[fn], *[[n + more for n in own] for own in LENGTHS])
    batched = check(fn, PARAMS, first)
    batched.plan(PARAMS, second)
    batched(PARAMS, second)  # room for as many elements is there
    (unseen,) = minibatches(INSTANCES[fn], [n + more for n in (3, 8, 10, 12, 11, 6)], seed=1)
    with compilations() as made:
        found = batched(PARAMS, unseen)
    assert not made
    expected = jax.tree.map(lambda *x: jnp.stack(x), *[fn(PARAMS, x) for x in unseen])
    assert_close(found, expected, rtol=1e-4)
    assert "grouped by equal shapes" not in str(batched.plan(PARAMS, unseen))


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


def test_arrays_as_long_as_weights_are_wide():
    """A number that is a length by chance goes with the weight, not with the array."""

    def fn(p, x):
        state = jnp.zeros(D) + jnp.ones((len(x), D)).sum(axis=0)
        return jnp.tanh(state @ p["W"][:D] + x.sum(axis=0)) * len(x)

    batched = jedbatch.batch(fn)
    for instances in minibatches(array, (D, 3, 5), (7, D, D), (D, 6, 2)):
        found = batched(PARAMS, instances)
        assert_close(found, jnp.stack([fn(PARAMS, x) for x in instances]), 1e-5)


def of_trees(p, tree):
    if isinstance(tree, tuple):
        left, right = (of_trees(p, child) for child in tree)
        return step(p, left, right)
    h = tree.max(axis=0)
    for row in tree:
        h = step(p, h, row)
    return h


@pytest.mark.slow
def test_arrays_in_trees():
    """Types are few, whatever the trees; families of trees are told one by one at first."""

    def tree(rng, n):
        if rng.random() < 0.5:
            return array(rng, n)
        return tree(rng, n), array(rng, int(rng.integers(1, n + 1)))

    first, second, unseen = minibatches(tree, *LENGTHS, (3, 8, 10, 12, 11, 6))
    batched = check(of_trees, PARAMS, first)
    types = len(batched.plan(PARAMS, second).graph.types)
    found = batched(PARAMS, unseen)
    assert_close(found, jnp.stack([of_trees(PARAMS, x) for x in unseen]), 1e-5)
    assert len(batched.plan(PARAMS, unseen).graph.types) == types


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
        if len(words) == 15:
            raise ValueError("unlucky")
        return of_words(p, words)

    batched = jedbatch.batch(fn)
    first, bad, second = minibatches(words, LENGTHS[0], (4, 15), LENGTHS[1])
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


def test_results_that_are_ragged_by_chance():
    """Two rows are as many as features that are cut off: the result has extent n + 2 in one."""

    def fn(p, x):
        scale = len(x) * p["W"][0, 0]
        return {"rows": jnp.concatenate([x[0][:2], x[0][2:]]) * scale, "sums": x.sum(axis=0)}

    batched = jedbatch.batch(fn)
    for instances in minibatches(array, (2, 3, 5), (4, 2, 6), (2,)):
        found = batched(PARAMS, instances)
        expected = [fn(PARAMS, x) for x in instances]
        assert_close(found, jax.tree.map(lambda *x: jnp.stack(x), *expected), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::jedbatch.errors.GroupedByShapesWarning")
def test_rows_in_lists_beside_an_array_as_long_as_they_are():
    """Rows are of its kind and may be as long by chance, which is supposed once and not again."""
    step = jedbatch.cell(lambda w, x, rows: sum(jnp.tanh(w @ row) for row in rows) * x)

    def fn(w, instance):
        rows, scales = instance
        return step(w, scales.sum(), [*rows, *(scale * w[0] for scale in scales)])

    rng = np.random.default_rng(0)
    weight = np.float32(rng.normal(size=(4, 4)) / 4)
    sizes = [(k % 3, k % 7 if k % 3 else 1 + k % 7) for k in range(14)]
    instances = [
        (list(np.float32(rng.normal(size=(k, 4)))), np.float32(rng.normal(size=n)))
        for k, n in sizes
    ]
    check(fn, weight, instances)
