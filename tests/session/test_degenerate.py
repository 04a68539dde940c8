"""Minibatches that hardly batch: warned of by cause, before anything is compiled."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.programs import weights

import jedbatch
from jedbatch.errors import (
    GroupedByShapesWarning,
    GrowingTypesWarning,
    ManyTypesWarning,
    PerformanceWarning,
)

W = jnp.float32(1.5)
COUNTS = [int(n) for n in np.random.default_rng(0).permutation(np.arange(2, 66))]


def concatenates(w, n):
    return jnp.fft.fft(jnp.concatenate([w * jnp.ones(2) * i for i in range(n)])).real[-1]


def powers(w, n):
    return w**n


def inverses(w, x):
    return w * jnp.linalg.inv(x @ x.T).sum()


SQUARES = [np.ones((n, 3), np.float32) for n in COUNTS]


def attends(w, n):  # the list makes one type for each length, what is done with it more
    rows = jnp.concatenate([w * jnp.ones((2, 3)) * i for i in range(n)])
    hidden = jnp.diff(jnp.tanh(rows @ jnp.outer(jnp.arange(3.0), w * jnp.arange(3.0))), axis=0)
    return (jnp.fft.fft(hidden @ jnp.ones(3)).real @ hidden).sum()


CASES = {
    "arity": (
        concatenates,
        COUNTS,
        ManyTypesWarning,
        r"`concatenate\S*` .*how many operands \w+ \w+ \(\d+ to 66\)",
    ),
    "lists": (
        attends,
        COUNTS,
        ManyTypesWarning,
        r"`concatenate\S*` .*how many operands .*a cell that is given its elements",
    ),
    "constants": (powers, COUNTS, ManyTypesWarning, "what they close over"),
    "shapes": (inverses, SQUARES, GroupedByShapesWarning, "shapes of what they read .*`lu` of"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_with_the_line_that_met_it(name):
    fn, instances, cause, text = CASES[name]
    batched = jedbatch.batch(fn)
    with pytest.warns(cause, match=text) as warned:
        plan = batched.plan(W, instances)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    line = fn.__code__.co_firstlineno + 1  # of what depends on weights alone it is not known
    assert (f"{__file__}:{line}" in str(warned[0].message)) == (name != "constants")
    batched.plan(W, instances)  # once for each cause
    verdict, *_, rows = str(plan).split("\n\n")[0].splitlines()[0], str(plan)
    assert re.match(r"Plan of 64 instances: hardly batched, \d+ node types", verdict)
    assert len(rows.splitlines()) < 40
    assert re.search(r"× \d\d types, such as", rows)


def test_it_comes_before_compiling_and_may_be_an_error():
    batched = jedbatch.batch(powers)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        for _ in range(2):  # an error at every call
            with pytest.raises(ManyTypesWarning):
                batched(W, COUNTS)
    assert batched.compilations == 0
    few = COUNTS[:7]
    np.testing.assert_allclose(batched(W, few), [float(W) ** n for n in few], rtol=1e-5)


@pytest.mark.parametrize("new", [2, 7])
def test_types_that_grow_from_minibatch_to_minibatch(new):
    batched = jedbatch.batch(concatenates)
    for first in range(2, 2 + 5 * new, new):
        batched.plan(W, list(range(first, first + new)))
    with pytest.warns(GrowingTypesWarning, match="6 minibatches in a row") as warned:
        batched.plan(W, list(range(2 + 5 * new, 2 + 6 * new)))
    assert len(warned) == 1
    batched.plan(W, list(range(2 + 6 * new, 2 + 7 * new)))


def test_lengths_that_are_new_in_each_minibatch():
    batched = jedbatch.batch(inverses)
    minibatches = [[np.ones((n, 3), np.float32) for n in range(k, k + 3)] for k in (2, 5, 8, 11)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        for squares in (*minibatches[:2], minibatches[0], *minibatches[:2]):
            batched.plan(W, squares)
        batched.plan(W, minibatches[2])
    batched.plan(W, minibatches[3])
    fresh = jedbatch.batch(inverses)
    message = "3 minibatches in a row .*since .*`lu` of"
    with pytest.warns(GroupedByShapesWarning, match=message) as warned:  # noqa: PT031
        for squares in minibatches:
            fresh.plan(W, squares)
    assert len(warned) == 1


def test_many_lengths_are_warned_of_before_they_are_compiled():
    scale = jedbatch.cell(lambda w, x: w * x)

    def fn(w, x):
        return scale(w, jnp.abs(jnp.fft.fft(x, axis=0)).sum())

    arrays = [np.ones((n, 2), np.float32) for n in range(2, 10)]
    jedbatch.batch(fn).plan(W, arrays[1:])
    with pytest.warns(GroupedByShapesWarning, match=r"of 8 lengths.*`x\.shape\[0\]` in place"):
        jedbatch.batch(fn).plan(W, arrays)


def test_lists_of_two_lengths_are_not_said_to_close_over_things():
    @jedbatch.cell
    def norms(w, a, b):
        return w * (sum(a) / np.sqrt(len(a)) + sum(b) / np.sqrt(len(b)))

    def fn(w, lengths):
        return norms(w, *([w * k for k in range(n)] for n in lengths))

    pairs = [(n, m) for n in range(1, 9) for m in range(1, 9)]
    with pytest.warns(ManyTypesWarning, match=r"`norms`.* how many operands .*`jnp\.sqrt\(n\)`"):
        jedbatch.batch(fn).plan(W, pairs)


def test_very_many_types_of_some_nodes():
    def fn(w, n):
        return sum(jnp.broadcast_to(w * i, (n,)).max() for i in range(6))

    batched = jedbatch.batch(fn, granularity="cell")
    few, many = np.arange(2, 47), np.arange(2, 67)
    batched.plan(W, few.tolist())
    with pytest.warns(ManyTypesWarning, match=r"1\d\d node types, most .* at most 6 nodes"):
        batched.plan(W, many.tolist())


def test_many_types_of_many_nodes_are_fine():
    def fn(w, x):
        return sum(jnp.tanh(w * jnp.tile(x, n)).sum() for n in range(1, 46))

    plan = jedbatch.batch(fn).plan(W, [np.ones(2, np.float32) * x for x in range(12)])
    assert len(plan.static.signature.kernels) > 40


def test_lists_that_get_longer_where_python_decides():
    def sums(w, x):
        states = [w * x]
        while jnp.stack(states).sum() < 2:
            states.append(w * x)
        return jnp.float32(len(states))

    xs = [np.full(2, 0.1, np.float32)]
    with pytest.warns(GrowingTypesWarning, match="1 to 7 operands.*`jnp.zeros") as warned:
        results = jedbatch.batch(sums)(W, xs)
    assert len(warned) == 1
    np.testing.assert_array_equal(results, [sums(W, x) for x in xs])


def test_short_lists_of_many_types_where_python_decides():
    """The best of a list is taken out of it, again and again."""

    def emptied(params, vectors):
        vectors, h, chosen = list(vectors), params["h"], []
        while len(vectors) > 1:
            states = [jnp.tanh(x @ params["w"] + h @ params["q"]) for x in vectors]
            scores = jnp.stack([x @ params["h"] for x in states])
            best = int(jnp.argmax(scores))
            chosen.append(scores[best] - jax.nn.logsumexp(scores))
            h = jnp.tanh(h + vectors.pop(best))
        return h, sum(chosen, 0.0)

    params = weights(0, w=(2, 2), q=(2, 2), h=(2,))
    rng = np.random.default_rng(0)
    xs = [tuple(rng.normal(size=(n, 2)).astype(np.float32)) for n in (6, 4, 4, 2, 2, 1, 1, 1)]
    with pytest.warns(GrowingTypesWarning, match="`stack` .* has 2 to 6 operands") as warned:
        results = jedbatch.batch(emptied)(params, xs)
    assert len(warned) == 1
    expected = map(np.stack, zip(*[emptied(params, x) for x in xs], strict=True))
    for got, correct in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, correct, rtol=1e-5, atol=1e-6)


def test_lengths_that_are_new_in_each_call_that_decides():
    def scaled(w, x):
        x = jnp.concatenate([x, x])  # as long as no array of the instance
        return x.sum() * w if x[0] > 0 else x[0] + w

    def calls(batched, lengths):
        for k in lengths:
            xs = [np.full(n, n % 2 - 0.5, np.float32) for n in (k, k + 1)]
            np.testing.assert_allclose(batched(W, xs), [scaled(W, x) for x in xs], rtol=1e-5)

    calls(jedbatch.batch(scaled), (3, 5, 3, 7))
    with pytest.warns(GroupedByShapesWarning, match="3 calls in a row had arrays of") as warned:
        calls(jedbatch.batch(scaled), (3, 5, 7, 9))
    assert len(warned) == 1
    assert warned[0].filename == __file__
