"""Arrays of any length where Python decides on values, against the plain loop; what is compiled."""

import itertools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, loop, mostly_slow

import jedbatch
from jedbatch._batch.batched import core_of
from jedbatch._control_flow.continuous import Continuous, Joining
from jedbatch.errors import GroupedByShapesWarning

WIDTH = 4


def weights():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.4, jnp.float32)  # noqa: E731
    return {"w": draw(WIDTH, WIDTH), "v": draw(WIDTH), "table": draw(30, WIDTH)}


def rows(rng, least=5, most=30):
    size = int(rng.integers(least, most)), WIDTH
    return rng.normal(size=size).astype(np.float32)


def minibatch(draw, seed, count=8):
    rng = np.random.default_rng(seed)
    return [draw(rng) for _ in range(count)]


# --- functions, and how their instances are drawn ---


@jedbatch.cell
def step(params, h):
    return jnp.tanh(h @ params["w"] - 0.1)


def cells(params, x):
    h, steps = step(params, x), 0
    while h.mean() > -0.06 and steps < 4:
        h, steps = step(params, h), steps + 1
    return jax.nn.softmax(h @ params["v"]) @ h, steps


class Sentence(NamedTuple):
    words: Any
    most: int


def attention(params, sentence):
    h = params["table"][sentence.words]
    for _ in range(sentence.most):
        h = h + jax.nn.softmax(h @ params["w"] @ h.T) @ h
        if jnp.abs(h).max() > 4:
            break
    return h[-1] + h[1:].sum(0) / h.shape[0]


def sentences(rng):
    size = int(rng.integers(5, 30))
    return Sentence(rng.integers(0, 30, size=size), int(rng.integers(1, 4)))


def tree(params, node):
    if not isinstance(node, tuple):
        return jnp.tanh(node @ params["w"])
    left, right = tree(params, node[0]), tree(params, node[1])
    scores = left @ right.T
    return jnp.tanh(jax.nn.softmax(scores) @ right) if scores.mean() > 0 else left * 0.9


def tree_sum(params, node):
    return tree(params, node).sum(0)


def trees(rng, depth=2):
    if depth == 0:
        return rows(rng)
    return trees(rng, depth - 1), trees(rng, int(rng.integers(0, depth)))


def early_exit(params, x):
    """Python knows lengths: it loops to them, indexes rows and compares."""
    h, every = jnp.zeros(WIDTH), jnp.tanh(x @ params["w"])
    for i in range(len(x)):
        h = jnp.tanh(h @ params["w"] + x[i] + every[i])
        if h[0] > 0.6:
            break
    for row in every:
        h = h + row / len(x)
    return h * 2 if x.shape[0] > 10 else h


def tokens(params, words):
    h, steps = params["table"][jnp.array(words)], 0
    while h.mean() > -0.05 and steps < 3:
        h, steps = jnp.tanh(h @ params["w"]) - 0.1, steps + 1
    return h.max(0), steps


def tuples(rng):
    return tuple(rng.integers(0, 30, size=int(rng.integers(5, 30))).tolist())


def two(params, pair):
    x, y = pair["x"], pair["y"]
    if (x @ y.T).mean() > 0:
        x = x @ params["w"]
    return {"all": jax.nn.logsumexp(x @ y.T), "best": y[int(jnp.argmax(y @ params["v"]))]}


def pairs(rng):
    return {"x": rows(rng), "y": rows(rng)}


def equally_long(params, pair):
    x, y = pair
    s = x * y
    for _ in range(3):
        if s.mean() > 0.5:
            break
        s = s + jnp.abs(x @ params["w"])
    return s.sum(0)


def equal_pairs(rng):
    size = int(rng.integers(5, 30))
    return rows(rng, size, size + 1), rows(rng, size, size + 1)


def solver(params, x):
    """A gradient inside, and a scan over rows."""
    theta = params["v"]
    for _ in range(6):
        gradient = jax.grad(lambda t: jnp.mean((x @ t - jnp.sin(x[:, 0])) ** 2))(theta)
        if jnp.abs(gradient).max() < 0.3:
            break
        theta = theta - 0.2 * gradient
    total, _ = jax.lax.scan(lambda c, row: (jnp.tanh(c + row), None), theta, x)
    return theta, total


FUNCTIONS = {
    "cells": (cells, rows),
    "attention": (attention, sentences),
    "tree_sum": (tree_sum, trees),
    "early_exit": (early_exit, rows),
    "tokens": (tokens, tuples),
    "two": (two, pairs),
    "equally_long": (equally_long, equal_pairs),
    "solver": (solver, rows),
}


# --- tests ---


@pytest.mark.parametrize("name", mostly_slow(FUNCTIONS, "attention", "early_exit"))
def test_agrees_with_loop_and_compiles_nothing_late(name):
    fn, draw = FUNCTIONS[name]
    batched = check(fn, weights(), minibatch(draw, 0), rtol=3e-4, plans=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GroupedByShapesWarning)
        for seed in (1, 2, 3, 4):
            batched(weights(), minibatch(draw, seed))
        before = batched.compilations
        for seed in (5, 6):
            instances = minibatch(draw, seed)
            assert_close(batched(weights(), instances), loop(fn, weights(), instances), 3e-4)
    assert batched.compilations == before


def test_derivatives_by_arrays_of_instances():
    instances = minibatch(rows, 0, count=5)
    batched = jedbatch.batch(cells)

    def loss(results):
        return jnp.sum(results[0] @ jnp.arange(1.0, 1 + WIDTH))

    got = jax.grad(lambda xs: loss(batched(weights(), xs)))(instances)
    expected = jax.grad(lambda xs: sum(loss(cells(weights(), x)) for x in xs))(instances)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 3e-4)


def test_what_is_read_and_returned_has_the_rows_that_exist():
    shapes = []

    def fn(params, x):
        h = jnp.tanh(x @ params["w"])
        known = np.asarray(jax.lax.stop_gradient(h))
        shapes.append(known.shape)
        return {"rows": h * float(known.max()), "given": x, "length": x.shape[0]}

    instances = minibatch(rows, 0, count=4)
    got = jedbatch.batch(fn, out_axes=None)(weights(), instances)
    expected = [fn(weights(), x) for x in instances]
    assert shapes[-4:] == [x.shape for x in instances]
    assert set(shapes) == set(shapes[-4:])
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 3e-5)


def test_empty_arrays_and_single_rows():
    def fn(params, x):
        h = x @ params["w"]
        return h.sum() if h.sum() >= 0 else h[1:].sum() - 1

    instances = [*minibatch(rows, 0, count=3), *(np.ones((n, WIDTH), np.float32) for n in (0, 1))]
    batched = jedbatch.batch(fn)
    assert_close(batched(weights(), instances), loop(fn, weights(), instances), 3e-5)


def test_a_cell_that_decides_on_lengths_is_traced_for_each():
    """Its program is one for all instances, so that Python is told no length there."""

    @jedbatch.cell
    def longer(params, x):
        return x.sum(0) if x.shape[0] > 8 else x.mean(0)

    def fn(params, x):
        h = longer(params, x)
        return h if h.mean() > 0 else h * params["v"]

    instances = minibatch(rows, 0)
    batched = jedbatch.batch(fn)
    for _ in range(2):
        assert_close(batched(weights(), instances), loop(fn, weights(), instances), 3e-5)


def test_an_error_of_the_function_names_its_instance():
    def fn(params, x):
        h = x @ params["w"]
        if h.shape[0] == 7 and h.mean() < 100:
            raise ValueError("seven rows")
        return h.sum()

    sizes = (3, 7, 5)
    instances = [np.ones((n, WIDTH), np.float32) for n in sizes]
    batched = jedbatch.batch(fn)
    with pytest.raises(ValueError, match="seven rows") as caught:
        batched(weights(), instances)
    assert "in instance 1" in "".join(caught.value.__notes__)
    instances = [instances[0], instances[2]]
    assert_close(batched(weights(), instances), loop(fn, weights(), instances), 3e-5)


def test_instances_that_join_while_others_run():
    def fn(params, x):
        h = step(params, x)
        if jnp.abs(x).max() > 5:
            raise ValueError("too much")
        while h.mean() > -0.2:
            h = step(params, h)
        return h

    core = core_of(jedbatch.batch(fn))
    sizes, outcomes, left = (3, 9, 5, 12, 4), {}, []
    instances = [np.full((n, WIDTH), 9.0 if n == 5 else 0.5, np.float32) for n in sizes]
    coming = iter([Joining(i, (x,)) for i, x in enumerate(instances)] * 2)  # lengths are met first
    take = lambda most: list(itertools.islice(coming, most))  # noqa: E731
    while first := take(1):
        served = Continuous(core, (weights(),), 3)
        left += served.serve(first, take, outcomes.update, lambda token: None)
    assert not left
    assert isinstance(outcomes.pop(2).error, ValueError)
    for i, outcome in outcomes.items():
        assert_close(outcome.result, fn(weights(), instances[i]), 3e-5)
