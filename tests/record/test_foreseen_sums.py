"""Cells that sum few states: types and room for those that are not met yet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check

import jedbatch
from jedbatch.testing import check_plan

pytestmark = pytest.mark.unoptimized

W = jnp.array([[0.3, -0.7], [0.5, 0.2]])


@jedbatch.cell
def leaf(w, x):
    return jnp.tanh(x), x @ w


def types_of(plan):
    return len({t for t, _ in plan.schedule.batches})


def summed_parts(*states):
    return tuple(functools.reduce(jnp.add, parts) for parts in zip(*states, strict=True))


def paths(plus):
    """A function of steps, each of which goes on from so many states, summed by `plus`."""
    move = jedbatch.cell(lambda w, x, state: (jnp.tanh(state[0] @ w + x), state[1] * x))

    def encode(w, steps):
        state = leaf(w, jnp.zeros(2))
        for count, x in steps:
            states = [move(w, x * k, state) for k in range(1, count + 1)]
            state = plus(*states) if count > 1 else states[0]
        return state[0]

    return encode


def steps(seed, *counts):
    rng = np.random.default_rng(seed)
    return [[(n, rng.normal(size=2).astype(np.float32)) for n in row] for row in counts]


@pytest.mark.parametrize("gradient", [False, True])
def test_sums_of_few_are_foreseen(gradient):
    encode = paths(jedbatch.cell(summed_parts))
    batched = jedbatch.batch(encode)
    first = steps(0, [1, 2, 1], [2, 1, 1, 1], [1, 1])
    later = [steps(k, [1, 3, 1], [2, n, 1, 1], [1, 1]) for k, n in enumerate([1, 4, 2, 3], 1)]

    def loss(w, plan):
        return batched.apply(w, plan).sum()

    def loop(w, instances):
        return sum(encode(w, x).sum() for x in instances)

    programs = set()
    for instances in [first, *later]:
        plan = batched.plan(W, instances, gradient=gradient)
        programs.add(plan.static.signature)
        for transform in [lambda f: f, *[jax.grad] * gradient]:
            assert_close(transform(loss)(W, plan), transform(loop)(W, instances), 1e-5)
        check_plan(plan)
    assert len(programs) == 1
    kernels = plan.static.signature.kernels
    widths = [len(k.operands) for k in kernels if k.node_type.name == "summed_parts"]
    assert sorted(widths) == [4, 6, 8]  # of two, three and four states


def test_room_for_sums_that_are_foreseen_makes_no_program_too_large():
    """As one is that has four times the room that a minibatch needs."""
    plus = jedbatch.cell(lambda *xs: functools.reduce(jnp.add, xs))

    def fn(w, count):
        for _ in range(count):
            w = plus(w, w)
        return w

    batched, programs = jedbatch.batch(fn), set()
    for count in (300, 200, 250):
        plan = batched.plan(jnp.ones(512), [count] * 4, gradient=True)
        programs.add(plan.static.signature)
    (signature,) = programs
    assert len(signature.kernels) == types_of(plan) + 2


def test_sums_of_what_the_author_chose_are_not_foreseen():
    batched = jedbatch.batch(paths(jedbatch.cell(summed_parts)))
    plan = batched.plan(W, steps(0, [1, 2, 6, 2]))
    assert len(plan.static.signature.kernels) == types_of(plan) == 5


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [
        ((2, 1, 5, 6), False),
        ((5, 6, 1, 2), False),
        ((2, 1, 5, 6, 3), True),
        ((5, 6, 1, 2, 3), True),
        ((3, 2, 4, 1), False),
        ((3, 2, 4, 1, 5), True),
    ],
)
def test_lengths_that_are_foreseen_are_not_met(lengths, padded):
    """More than four lengths share a type, whatever their order; and the same types are known.

    Processes that share programs may have met other lengths first.
    """
    plus = jedbatch.cell(lambda *xs: functools.reduce(jnp.add, xs), name="plus")
    batched = jedbatch.batch(lambda w, count: plus(*[w[0] * float(k) for k in range(count)]))
    for count in lengths:
        batched.plan(W, [count])
    plan = batched.plan(W, list(lengths))
    assert types_of(plan) == 2 + (1 if padded else len(lengths))  # a row of `w`, and a product
    assert {2, 3, 4} <= {len(t.operands) for t in plan.graph.types if t.name == "plus"}


@pytest.mark.parametrize(
    "plus",
    [
        lambda a, b: summed_parts(a, b),
        lambda *states: summed_parts(*states) if len(states) == 2 else [][len(states)],
        lambda *states: jax.tree.map(lambda x: 2 * x, summed_parts(*states)),
        lambda *states: jax.tree.map(
            lambda x: x if len(states) == 2 else jnp.tanh(x), summed_parts(*states)
        ),
    ],
    ids=["of two", "refuses others", "is no sum", "is a sum of two only"],
)
def test_what_is_not_foreseen(plus):
    encode = paths(jedbatch.cell(plus))
    instances = steps(0, [1, 2, 1], [2, 1, 1, 1])
    plan = check(encode, W, instances, gradients=False).plan(W, instances)
    assert len(plan.static.signature.kernels) == types_of(plan) == 4


def test_sums_are_foreseen_for_each_type_of_elements():
    encode = paths(jedbatch.cell(summed_parts))

    def both(w, instance):
        narrow = encode(w, instance)
        return narrow, sum_of_wide(*[jnp.full(3, float(n)) for n, _ in instance])

    sum_of_wide = jedbatch.cell(lambda *xs: functools.reduce(jnp.maximum, xs))
    batched = jedbatch.batch(both, out_axes=None)
    first, second = steps(0, [1, 2, 1], [2, 1]), steps(1, [1, 3, 1], [4, 1, 1, 1])
    one, two = batched.plan(W, first, gradient=False), batched.plan(W, second, gradient=False)
    assert one.static.signature is two.static.signature
    assert_close(batched.apply(W, two), [both(W, x) for x in second], 1e-5)
