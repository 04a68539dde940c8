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
