"""Instances that differ in floats are recorded once; values and gradients are the loop's."""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch.testing import check_against_loop

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
RNG = np.random.default_rng(1)
COUNT = 9


class Named(NamedTuple):
    x: Any
    rate: Any


@dataclasses.dataclass
class Data:
    x: Any
    rate: Any


def vector():
    return RNG.normal(size=3).astype(np.float32)


def minibatch(make):
    return [make(vector(), RNG.normal()) for _ in range(COUNT)]


by_keyword = jedbatch.cell(lambda w, x, *, rate: w @ x * (rate // 0.1), name="by_keyword")
scaled = jedbatch.cell(lambda w, x, rate: w @ x * rate, name="scaled")


def differences(w, instance):
    """In 32 bits nothing would be left of them."""
    return w @ instance["x"] * (instance["late"] - instance["early"])


def solved(w, instance):
    def step(state):
        t, y = state
        return t + 0.25, y + 0.1 * jnp.tanh(w @ y) * instance["rate"]

    start = jnp.float32(0), jnp.asarray(instance["x"])
    return jax.lax.while_loop(lambda state: state[0] < instance["end"], step, start)[1]


SPELLINGS = {
    "Python": (lambda w, i: w @ i["x"] * i["rate"], lambda x, r: {"x": x, "rate": float(r)}),
    "NumPy": (
        lambda w, i: w @ i["x"] / (i["rate"] + 3),
        lambda x, r: {"x": x, "rate": np.float32(r)},
    ),
    "64 bits": (lambda w, i: w @ i.x * i.rate, lambda x, r: Named(x, np.float64(r))),
    "in a dataclass": (lambda w, i: w @ i.x * -i.rate, lambda x, r: Data(x, r)),
    "16 bits": (lambda w, i: w @ i[0] * i[1], lambda x, r: (x, np.float16(r))),
    "complex": (lambda w, i: jnp.real(w @ i[0] * i[1]), lambda x, r: (x, complex(r, 1))),
    "without arrays": (lambda w, i: w[0] * i[0] + i[1][0], lambda x, r: (r, (r * 2, "of"))),
    "by itself": (lambda w, r: w[0] * r, lambda x, r: r),
    "in lists": (lambda w, i: sum(w @ i[0] * r for r in i[1]), lambda x, r: (x, [r, 2 * r])),
    "arithmetic": (
        lambda w, i: w @ i[0] * (2 * i[1] ** 2 // 0.1 + abs(i[1]) % 0.3),
        lambda x, r: (x, r),
    ),
    "cancellation": (differences, lambda x, r: {"x": x, "early": 1e9, "late": 1e9 + abs(r)}),
    "a cell": (lambda w, i: scaled(w, i[0], i[1] - 1), lambda x, r: (x, r)),
    "in an array": (lambda w, i: w @ jnp.array([i[1], 1.0, i[1]]), lambda x, r: (x, r)),
    "compared by JAX": (lambda w, i: jnp.where(i[1] > 0, w @ i[0], 0.0), lambda x, r: (x, r)),
    "rules of JAX": (
        lambda w, i: jax.checkpoint(lambda y: jax.nn.relu(y) * i[1])(jax.nn.softplus(w @ i[0])),
        lambda x, r: (x, r),
    ),
    "a loop": (solved, lambda x, r: {"x": x, "rate": r, "end": np.float32(1 + abs(r))}),
    "beside rows": (
        lambda w, i: jnp.mean(i["x"] @ w, 0) * i["y"],
        lambda x, r: {"x": np.stack([x] * (1 + int(9 * abs(r)) % 7)), "y": np.float32(r)},
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_instances_are_recorded_once_whatever_their_floats(spelling):
    fn, make = SPELLINGS[spelling]
    batched = jedbatch.batch(fn)
    for _ in range(2):
        batched.plan(W, minibatch(make))
    for _ in range(2):
        instances = minibatch(make)
        plan = batched.plan(W, instances)
        assert plan.host.num_known == COUNT
        assert plan.host.assumed == ()
    results = batched.apply(W, plan)
    for result, instance in zip(results, instances, strict=True):
        np.testing.assert_allclose(result, fn(W, instance), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_loop():
    def fn(w, instance):
        return scaled(w, instance["x"], 1 - instance["rate"]) * instance["rate"]

    instances = [{"x": vector(), "rate": float(RNG.normal())} for _ in range(7)]
    check_against_loop(fn, W, instances)


def test_operands_have_the_types_of_numbers():
    """The dtype of a float of Python gives way to others; that of one of NumPy does not."""

    def fn(w, instance):
        half = w[0].astype(jnp.bfloat16)
        return half * instance[0], half * instance[1]

    def make(x, r):
        return r, np.float32(r)

    batched = jedbatch.batch(fn)
    for _ in range(2):
        weak, strong = batched(W, minibatch(make))
    assert (weak.dtype, strong.dtype) == (jnp.bfloat16, jnp.float32)


def test_in_64_bits():
    with jax.enable_x64(True):
        batched = jedbatch.batch(lambda w, i: w * i[0] + i[1])
        for _ in range(2):
            instances = [(r, np.float64(r / 3)) for r in RNG.normal(size=COUNT).tolist()]
            results = batched(jnp.float64(2), instances)
        assert batched.plan(jnp.float64(2), instances).host.num_known == COUNT
        np.testing.assert_allclose(results, [2 * a + b for a, b in instances], rtol=1e-15)


def needs_value(w, instance):
    return w @ instance[0] * (instance[1] if instance[1] > 0 else 2.0)


def needs_number(w, instance):
    return w @ instance[0] * math.sin(instance[1])


def needs_array(w, instance):
    return w @ instance[0] * np.sin(instance[1])


TABLE = {0.5: 2.0}


def looks_up(w, instance):
    return w @ instance[0] * TABLE.get(instance[1], 3.0)


def makes_a_rule(w, instance):
    @jax.custom_jvp
    def scaled_by(x):
        return x * instance[1]

    scaled_by.defjvp(lambda xs, ts: (scaled_by(*xs), ts[0] * instance[1]))
    return jax.checkpoint(scaled_by)(w @ instance[0])


def closes_over(w, instance):
    rate = instance[1]
    return jedbatch.cell(lambda w, x: w @ x * (rate // 0.1), name="closing")(w, instance[0])


def passes_by_keyword(w, instance):
    return by_keyword(w, instance[0], rate=instance[1])


def asks_type(w, instance):
    return w @ instance[0] * (instance[1] if isinstance(instance[1], float) else 0.0)


def catches(w, instance):
    try:
        return w @ instance[0] * math.sqrt(instance[1])
    except ValueError:
        return w @ instance[0]
    except TypeError:
        return w[0]


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (needs_value, "the value of one at .*test_floats.py"),
        (needs_number, "the value of one at .*test_floats.py"),
        (needs_array, "the value of one at .*test_floats.py"),
        (looks_up, "the value of one at .*test_floats.py"),
        (makes_a_rule, "the value of one at .*test_floats.py"),
        (closes_over, "the value of one at .*test_floats.py"),
        (passes_by_keyword, "the value of one at .*test_floats.py"),
        (asks_type, "asks for types"),
        (catches, "catches errors"),
    ],
)
def test_floats_that_python_needs_tell_instances_apart(fn, reason):
    batched = jedbatch.batch(fn)
    for _ in range(2):
        instances = minibatch(lambda x, r: (x, float(r)))
        results = batched(W, instances)
    for result, instance in zip(results, instances, strict=True):
        np.testing.assert_allclose(result, fn(W, instance), rtol=1e-5, atol=1e-5)
    (assumed,) = batched.plan(W, instances).host.assumed
    assert "told apart by their floats" in assumed
    assert re.search(reason, assumed)
    assert assumed in str(batched.plan(W, instances))


def test_an_error_of_the_function_is_not_taken_for_a_question():
    shapes = [4]

    def fn(w, instance):
        return w @ jnp.ones(shapes[0]) * instance

    batched = jedbatch.batch(fn)
    floats = RNG.normal(size=COUNT).tolist()
    with pytest.raises(TypeError, match="dot_general"):
        batched.plan(W, floats)
    shapes[0] = 3
    for _ in range(2):
        plan = batched.plan(W, RNG.normal(size=COUNT).tolist())
    assert plan.host.assumed == ()
    assert plan.host.num_known == COUNT


def test_few_sets_of_floats_are_constants():
    batched = jedbatch.batch(lambda w, i: w[0] * i)
    assert batched.plan(W, [0.5, 0.25, 0.5, 0.25]).host.num_known == 2
    assert batched.plan(W, [0.25, 0.5]).host.num_known == 2


def test_floats_in_attributes_of_objects_tell_instances_apart():
    class Options:
        def __init__(self, rate):
            self.rate = rate

    def fn(w, options):
        return w[0] * options.rate

    batched = jedbatch.batch(fn)
    for _ in range(2):
        instances = [Options(float(r)) for r in RNG.normal(size=COUNT)]
        results = batched(W, instances)
    np.testing.assert_allclose(results, [W[0] * i.rate for i in instances], rtol=1e-6)


def test_a_float_beside_an_array_of_its_type():
    """`0.5` and an array of no axes are told apart: their dtypes give way, or do not."""

    def fn(w, x):
        return w[0].astype(jnp.bfloat16) * x

    batched = jedbatch.batch(fn, out_axes=None)
    for _ in range(2):
        floats = RNG.normal(size=COUNT)
        results = batched(W, [*floats.tolist(), *(np.array(x, np.float32) for x in floats)])
    assert {x.dtype for x in results[:COUNT]} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in results[COUNT:]} == {jnp.dtype(jnp.float32)}


def test_a_function_that_decides_on_arrays():
    def fn(w, instance):
        h = w @ instance[0] * instance[1]
        return h if h[0] > 0 else -h

    instances = minibatch(lambda x, r: (x, float(r)))
    check_against_loop(fn, W, instances, plans=False, gradients=False)
