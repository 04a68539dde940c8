"""Rows of arrays as instances run as `jax.vmap` runs them, with the answers of the loop."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, compilations, loop

import jedbatch
from jedbatch._session.records.arguments import StackedInstances
from jedbatch.testing import weighted_sum

RNG = np.random.default_rng(0)
ROWS = 20
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32),
    "table": jnp.asarray(RNG.normal(size=(7, 4)), jnp.float32),
}
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
WORDS = RNG.integers(0, 7, ROWS)


@jedbatch.cell
def layer(params, h, x):
    return jnp.tanh(h @ params["w"] + x), jnp.argmax(h)


class Pair(NamedTuple):
    x: jax.Array
    word: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Both:
    word: jax.Array
    x: jax.Array


def of_vector(params, x):
    return {"out": jnp.tanh(x @ params["w"]).sum(), "in": x, "constant": jnp.ones(2)}


def with_cells(params, x):
    h, which = layer(params, x, x)
    return layer(params, h, x[::-1])[0], which


def of_word(params, word):
    return layer(params, params["table"][word], jnp.float32(word))


def of_pair(params, pair):
    return layer(params, params["table"][pair.word], pair.x)


def of_dict(params, instance):
    return instance["x"] @ params["w"] * instance["scale"]


def of_matrix(params, rows):
    """Reads rows one by one, and a list of them at once."""
    return jnp.stack([rows[0], rows[2], rows[1], rows[0] + rows[1]]).sum(0) @ params["w"]


def scanned(params, rows):
    return jax.lax.scan(lambda h, x: layer(params, h, x), jnp.zeros(4), rows)


def drawn(params, key):
    return jax.random.normal(key, (4,)) @ params["w"], jax.random.split(key)


CASES = {
    "a vector": (of_vector, X),
    "cells": (with_cells, X),
    "words": (of_word, jnp.asarray(WORDS)),
    "a named tuple": (of_pair, Pair(X, WORDS)),
    "a dataclass": (of_pair, Both(jnp.asarray(WORDS), jnp.asarray(X))),
    "a dict": (of_dict, {"x": X, "scale": np.float32(WORDS)}),
    "a matrix": (of_matrix, RNG.normal(size=(ROWS, 3, 4)).astype(np.float32)),
    "a scan": (scanned, RNG.normal(size=(ROWS, 3, 4)).astype(np.float32)),
    "keys": (drawn, jax.random.split(jax.random.key(0), ROWS)),
}


def one_by_one(fn, params, stacked):
    results = [fn(params, jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(ROWS)]
    return jax.tree.map(lambda *rows: jnp.stack(list(map(jnp.asarray, rows))), *results)


def floats(results):
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]


def comparable(results):
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, results)


def is_mapped(batched):
    """Whether the last call ran by one program, each node for all rows at once."""
    (session,) = batched._core.sessions.values()
    rounds = batched.last_rounds
    once = len(rounds) == 1 and rounds[0].nodes == ROWS * rounds[0].batches
    return once and session.programs.compilations["mapped"] > 0


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_loops(name):
    fn, stacked = CASES[name]
    batched = jedbatch.batch(fn)
    got, expected = batched(PARAMS, stacked), one_by_one(fn, PARAMS, stacked)
    assert is_mapped(batched)
    assert_close(comparable(got), comparable(expected), 1e-5)
    slope = jax.grad(lambda p: weighted_sum(floats(batched(p, stacked))))(PARAMS)
    assert_close(
        slope, jax.grad(lambda p: weighted_sum(floats(one_by_one(fn, p, stacked))))(PARAMS), 1e-4
    )


def test_transformations():
    """Traced arrays are not cut into rows either."""
    batched = jedbatch.batch(with_cells)

    def total(params, x):
        return batched(params, x)[0].sum()

    def expected(params, x):
        return sum(with_cells(params, row)[0].sum() for row in x)

    slopes = jax.jit(jax.grad(total, (0, 1)))(PARAMS, X)
    assert_close(slopes, jax.grad(expected, (0, 1))(PARAMS, jnp.asarray(X)), 1e-4)
    program = jax.make_jaxpr(total)(PARAMS, X)
    assert len(program.eqns) < ROWS
    directions = jax.tree.map(jnp.ones_like, PARAMS), jnp.ones_like(X)
    pushed = jax.jvp(total, (PARAMS, jnp.asarray(X)), directions)[1]
    assert_close(pushed, jax.jvp(expected, (PARAMS, jnp.asarray(X)), directions)[1], 1e-4)
    many = jnp.stack([X, X + 1])
    found = jax.vmap(total, (None, 0))(PARAMS, many)
    assert_close(found, jnp.stack([expected(PARAMS, x) for x in many]), 1e-4)


def test_one_program_for_all_calls():
    batched = jedbatch.batch(with_cells)
    batched(PARAMS, X)
    with compilations() as compiled:
        batched(PARAMS, X + 1)
    assert not compiled
    assert batched.compilations == 1


class Named:
    """A container whose list of names is compared by identity, and may change."""

    def __init__(self, x, names):
        self.x, self.names = x, names


jax.tree_util.register_pytree_node(
    Named, lambda c: ((c.x,), c.names), lambda names, children: Named(children[0], names)
)


class Names(list):
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def test_arrays_of_types_met_before_are_not_cut(monkeypatch):
    cuts = []
    first = StackedInstances.first
    monkeypatch.setattr(
        StackedInstances, "first", lambda instances: cuts.append(1) or first(instances)
    )

    def scaled(params, instance):
        return params["scale"] * instance["x"]

    batched = jedbatch.batch(scaled)
    for call, scale in enumerate((1.0, 2.0, 3.0)):
        for x in (X + call, jnp.asarray(X) + call):
            found = batched({"scale": jnp.float32(scale)}, {"x": x})
            assert_close(found, scale * x, 1e-6)
    assert len(cuts) == 2  # to record it, and to find it again
    for x in (X > 0, X[:, :2], jnp.zeros((ROWS, 4), jnp.bfloat16)):
        expected = jnp.stack([jnp.float32(2) * jnp.asarray(row) for row in x])
        assert_close(batched({"scale": jnp.float32(2)}, {"x": x}), expected, 1e-6)
    assert len(cuts) == 5


def test_containers_that_change_are_looked_at_again():
    names = Names(["a"])
    batched = jedbatch.batch(lambda params, named: len(named.names) * named.x)
    for _ in range(3):
        assert_close(batched(PARAMS, Named(X, names)), len(names) * X, 1e-6)
        names.append("b")


def test_containers_may_carry_arrays():
    """JAX compares what containers carry, and raises `ValueError` where these are arrays."""
    factors = np.ones(4, np.float32)
    batched = jedbatch.batch(lambda params, named: named.names * named.x)
    for _ in range(4):
        for named in (Named(X, factors), Named(X, factors.copy())):
            assert_close(batched(PARAMS, named), factors * X, 1e-6)
        factors += 1


def test_a_list_of_results():
    batched = jedbatch.batch(with_cells, out_axes=None)
    assert_close(batched(PARAMS, X), [with_cells(PARAMS, x) for x in X], 1e-5)
    assert is_mapped(batched)


def test_several_mapped_arguments():
    batched = jedbatch.batch(layer, in_axes=(None, 0, 0))
    expected = [layer(PARAMS, *pair) for pair in zip(X, X[::-1], strict=True)]
    got = batched(PARAMS, X, X[::-1])
    assert_close(got, jax.tree.map(lambda *rows: jnp.stack(rows), *expected), 1e-5)
    assert is_mapped(batched)


def decides(params, x):
    return x @ params["w"] if x.sum() > 0 else -x


def halves(params, x):
    return jax.lax.while_loop(lambda y: jnp.abs(y).sum() > 1, lambda y: y / 2, x) @ params["w"]


def counts(params, word):
    return sum(params["table"][k] for k in range(word + 1))


PLANNED = {
    "decisions": (decides, X, "auto"),
    "loops in lock step": (halves, X, "lockstep"),
    "whole numbers": (counts, WORDS, "auto"),
}


@pytest.mark.parametrize("name", PLANNED)
def test_others_are_planned(name):
    fn, stacked, control_flow = PLANNED[name]
    batched = jedbatch.batch(fn, control_flow=control_flow)
    assert_close(batched(PARAMS, stacked), jnp.stack(loop(fn, PARAMS, list(stacked))), 1e-5)
    assert batched.compilations
    assert not is_mapped(batched)


def test_loops_are_mapped():
    batched = jedbatch.batch(halves)
    assert_close(batched(PARAMS, X), jnp.stack(loop(halves, PARAMS, list(X))), 1e-5)
    assert is_mapped(batched)


def test_long_graphs_are_planned():
    def long(params, x):
        for _ in range(200):
            x, _ = layer(params, x, x)
        return x

    batched = jedbatch.batch(long)
    assert batched(PARAMS, X).shape == X.shape
    assert not is_mapped(batched)


def test_what_it_closes_over_may_change():
    holder = {"scale": jnp.float32(2)}
    batched = jedbatch.batch(lambda params, x: holder["scale"] * x @ params["w"])
    assert_close(batched(PARAMS, X), 2 * X @ PARAMS["w"], 1e-5)
    holder["scale"] = jnp.float32(3)
    assert_close(batched(PARAMS, X), 3 * X @ PARAMS["w"], 1e-5)
    slope = jax.grad(lambda s: jedbatch.batch(lambda x: s * x, in_axes=0)(X).sum())(2.0)
    assert_close(slope, jnp.float32(X.sum()), 1e-5)


def test_numbers_that_do_not_fit():
    batched = jedbatch.batch(lambda x: x * 2, in_axes=0)
    numbers = np.arange(2 * ROWS).reshape(ROWS, 2)
    assert_close(batched(numbers), jnp.asarray(2 * numbers), 0)
    assert is_mapped(batched)
    numbers[13] = 1 << 40
    with pytest.raises(OverflowError, match="instance 13"):
        batched(numbers)


def test_rows_that_are_not_there():
    """Of a table that numbers of the instance look up."""
    look_up = jedbatch.cell(lambda params, word, x: params["table"][word] + x, name="look_up")

    def of_pair(params, pair):
        return look_up(params, pair.word, pair.x)

    batched = jedbatch.batch(of_pair)
    words = WORDS.copy()
    words[5] = -7
    expected = one_by_one(of_pair, PARAMS, Pair(X, words))
    assert_close(batched(PARAMS, Pair(X, words)), expected, 1e-5)
    assert is_mapped(batched)
    for place, word in ((13, 7), (2, -8)):
        wrong = words.copy()
        wrong[place] = word
        for array in (wrong, jnp.asarray(wrong)):
            with pytest.raises(IndexError, match=f"instance {place} looks up row {word}"):
                batched(PARAMS, Pair(X, array))


@pytest.mark.parametrize(
    "stacked",
    [
        pytest.param(X, id="an array"),
        pytest.param(Pair(jnp.asarray(X), WORDS), id="a tuple", marks=pytest.mark.slow),
    ],
)
def test_what_was_warmed_compiles_nothing(stacked):
    fn = with_cells if stacked is X else of_pair
    batched = jedbatch.batch(fn)
    half = jax.tree.map(lambda x: x[: ROWS // 2], stacked)
    batched.warm(PARAMS, stacked, batch_size=ROWS // 2, gradient=True)
    before = batched.compilations
    slope = jax.grad(lambda p: weighted_sum(floats(batched(p, half))))
    slope(PARAMS)
    assert batched.compilations == before


@jedbatch.cell
def scaled(weights, x):
    return weights["w"] * x + weights["b"]


@pytest.mark.slow
def test_rows_of_differentiated_arrays_are_not_compiled_one_by_one():
    """A gradient for each instance: of weights of its own, beside a structure."""
    count = 60
    weights = {name: jnp.linspace(0, 1, count * 2).reshape(count, 2) for name in ("w", "b")}
    depths = [i % 4 for i in range(count)]

    def repeated(weights, depth):
        x = weights["b"]
        for _ in range(depth):
            x = scaled(weights, x)
        return x.sum()

    run = jedbatch.batch(repeated, in_axes=0)
    with compilations() as compiled:
        gradient = jax.grad(lambda weights: run(weights, depths).sum())(weights)
    assert len(compiled) < count, compiled
    rows = [jax.tree.map(lambda x, i=i: x[i], weights) for i in range(count)]
    each = [jax.grad(repeated)(row, depth) for row, depth in zip(rows, depths, strict=True)]
    assert_close(gradient, jax.tree.map(lambda *x: jnp.stack(x), *each), 1e-5)


def test_rows_that_a_trace_closes_over():
    """JAX takes no array of 100 rows apart while it traces."""
    many = jnp.linspace(0, 1, 120)
    by_number = jedbatch.batch(lambda p, n, x: p * x * n, in_axes=(None, 0, 0))
    slope = jax.jit(jax.grad(lambda p: by_number(p, np.arange(120), many).sum()))
    np.testing.assert_allclose(slope(2.0), (np.arange(120) * np.asarray(many)).sum(), rtol=1e-5)


@pytest.mark.parametrize("differs", ["rows", "shared"])
def test_parts_of_one_device_are_planned(differs):
    """JAX takes no constants beside parts that differ among the devices of a `jax.shard_map`."""

    def fn(scale, x):
        start = (jnp.zeros(4), jnp.float32(0))
        far = jax.lax.while_loop(lambda c: c[1] < x[0], lambda c: (c[0] + x, c[1] + 1), start)[0]
        return jnp.tanh(scale * x) * 3 + jax.lax.stop_gradient(far)

    batched = jedbatch.batch(fn)
    scale, xs = jnp.arange(1, 5) / 4, jnp.arange(40.0).reshape(10, 4) / 20 - 0.5
    parts = jax.P(), jax.P("part")
    rows = differs == "rows"
    over_parts = functools.partial(
        jax.shard_map,
        mesh=jax.make_mesh((1,), ("part",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=parts if rows else parts[::-1],
        out_specs=jax.P("part"),
    )
    expected = jnp.stack([fn(scale, x) for x in xs])
    run = jax.jit(over_parts(batched))
    np.testing.assert_allclose(run(scale, xs), expected, rtol=1e-6)
    found = jax.grad(lambda scale: jnp.square(run(scale, xs)).sum())(scale)
    by_loop = jax.grad(lambda scale: sum(jnp.square(fn(scale, x)).sum() for x in xs))(scale)
    np.testing.assert_allclose(found, by_loop, rtol=1e-5)
