"""Modules as libraries have them: pytrees of parameters, with activations and modes among them."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A layer whose activation and mode are leaves."""

    weight: jax.Array
    activation: Callable
    mode: str = "sum"

    def __call__(self, x):
        y = self.activation(self.weight @ x)
        return y if self.mode == "sum" else -y


@jedbatch.cell
def apply_layer(layer, a, b):
    return layer(a + b)


def encode_by_layer(layer, tree):
    if isinstance(tree, float):
        return jnp.full(3, tree)
    return apply_layer(layer, *(encode_by_layer(layer, t) for t in tree))


def test_functions_and_strings_among_shared_arguments_are_part_of_their_structure():
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
    trees = [((1.0, 2.0), 0.5), (0.25, 0.125)]
    batched = jedbatch.batch(encode_by_layer)
    layers = [Layer(weight, jnp.tanh), Layer(weight, jnp.sin), Layer(weight, jnp.tanh, "minus")]
    for layer in layers:
        loop = jnp.stack([encode_by_layer(layer, t) for t in trees])
        np.testing.assert_allclose(batched(layer, trees), loop, rtol=1e-5)
    compiled = batched.compilations
    for layer in layers:
        batched(Layer(2 * weight, layer.activation, layer.mode), trees)
    assert batched.compilations == compiled

    def loss(run):
        return lambda w: sum(x.sum() for x in run(Layer(w, jnp.tanh)))

    expected = jax.grad(loss(lambda layer: [encode_by_layer(layer, t) for t in trees]))(weight)
    by_batch = jax.grad(loss(lambda layer: batched(layer, trees)))(weight)
    np.testing.assert_allclose(by_batch, expected, rtol=1e-5)
    step = jax.jit(lambda w, plan: batched.apply(Layer(w, jnp.tanh), plan))
    planned = step(weight, batched.plan(layers[0], trees))
    np.testing.assert_allclose(planned, batched(layers[0], trees), rtol=1e-5)


def test_a_batched_function_under_jit_says_what_to_write():
    batched = jedbatch.batch(encode_by_layer)
    with pytest.raises(TypeError) as error:
        jax.jit(lambda w, trees: batched(Layer(w, jnp.tanh), trees))(jnp.eye(3), [(1.0, 2.0)])
    assert any("`step(params, batched.plan(" in note for note in error.value.__notes__)


ACTIVATIONS = {
    "lambda": lambda: lambda x: 2 * jnp.tanh(x),
    "closure": lambda: scaled(0.5),
    "partial": lambda: functools.partial(jax.nn.leaky_relu, negative_slope=0.25),
    "with a rule": lambda: jax.nn.relu,
}
TREES = [((1.0, 2.0), 0.5), (0.25, -0.125)]


def scaled(scale):
    return lambda x: scale * jnp.tanh(x)


def assert_as_the_loop(batched, layer):
    loop = jnp.stack([encode_by_layer(layer, t) for t in TREES])
    np.testing.assert_allclose(batched(layer, TREES), loop, rtol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_made_anew_compile_nothing(name):
    batched = jedbatch.batch(encode_by_layer)
    assert_as_the_loop(batched, Layer(jnp.eye(3), ACTIVATIONS[name]()))
    before = batched.compilations
    assert_as_the_loop(batched, Layer(jnp.eye(3), ACTIVATIONS[name]()))
    assert batched.compilations == before


settings = {"scale": 1.0}


def test_what_a_function_reads_may_change():
    batched = jedbatch.batch(encode_by_layer)
    mutable, rows = [1.0], np.ones(3, np.float32)
    functions = [
        lambda x: settings["scale"] * x,
        lambda x: mutable[0] * x,
        lambda x: jnp.asarray(rows) * x,
    ]
    for scale in (1.0, 3.0, 1.0):
        settings["scale"] = mutable[0] = rows[0] = scale
        for function in functions:
            assert_as_the_loop(batched, Layer(jnp.eye(3), function))


def test_equal_functions_that_change_apart():
    batched = jedbatch.batch(encode_by_layer)

    def of(values):
        return lambda x: values[0] * x

    first, second = [2.0], [2.0]
    for scale in (2.0, 5.0):
        first[0] = scale
        assert_as_the_loop(batched, Layer(jnp.eye(3), of(first)))
        assert_as_the_loop(batched, Layer(jnp.eye(3), of(second)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Example:
    """An instance that is a pytree of arrays, one of them a number."""

    words: jax.Array
    scale: jax.Array
    more: tuple = ()


@jedbatch.cell
def score(weight, words, scale):
    return scale * jnp.tanh(words @ weight)


def of_example(weight, example):
    state = score(weight, example.words, example.scale)
    return {"state": state, "words": 2 * example.words, "sum": sum(example.more, 0.0) + state[0]}


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_rows_of_stacked_arrays_are_instances_as_under_vmap(make):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    arrays = [rng.normal(size=size).astype(np.float32) for size in ((4, 3), (4,), (4,))]
    examples = jax.tree.map(make, Example(arrays[0], arrays[1], (arrays[2],)))
    batched = jedbatch.batch(of_example)
    mapped = jax.vmap(of_example, in_axes=(None, 0))

    def loss(run):
        return lambda *args: jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, run(*args)))

    for value, expected in (
        (batched(weight, examples), mapped(weight, examples)),
        (jax.jit(batched)(weight, examples), mapped(weight, examples)),
        tuple(jax.grad(loss(run), (0, 1))(weight, examples) for run in (batched, mapped)),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), value, expected)
        assert jax.tree.structure(value) == jax.tree.structure(expected)
    others = jax.tree.map(lambda x: 2 * x, examples)
    assert batched.plan(weight, others).host.num_known == 4  # the values are no part of the graphs


def test_stacked_arrays_beside_a_list_of_trees():
    trees, rows = [1.0, (2.0, 3.0)], {"x": np.ones((2, 3), np.float32)}

    def fn(weight, tree, row):
        return encode_by_layer(Layer(weight, jnp.tanh), tree) * row["x"]

    batched = jedbatch.batch(fn, in_axes=(None, 0, 0))
    loop = jnp.stack([fn(jnp.eye(3), t, {"x": rows["x"][i]}) for i, t in enumerate(trees)])
    np.testing.assert_allclose(batched(jnp.eye(3), trees, rows), loop, rtol=1e-6)
    with pytest.raises(ValueError, match=r"\[3, 2\] instances"):
        batched(jnp.eye(3), [*trees, 1.0], rows)
