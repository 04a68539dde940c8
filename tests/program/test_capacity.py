"""Capacities: what holds what, how they grow, and which program is taken."""

import jax.numpy as jnp
import pytest

import jedbatch
from jedbatch._program.capacity import Capacity, find_or_grow, round_up

SMALL = Capacity({"lanes": {"a": 4}, "inputs": {"x": 2}})


@pytest.mark.parametrize(
    ("lanes", "fits"), [({}, True), ({"a": 4}, True), ({"a": 5}, False), ({"b": 0}, False)]
)
def test_holds(lanes, fits):
    """A program has no room for sizes it does not know, not even for a size of 0."""
    assert SMALL.holds(Capacity({"lanes": lanes})) == fits


def test_joined():
    joined = SMALL.joined(Capacity({"lanes": {"b": 1, "a": 9}, "inputs": {"x": 1}}))
    assert list(joined["lanes"].items()) == [("a", 9), ("b", 1)]
    assert joined["inputs"] == {"x": 2}


def test_grown():
    policy = {"lanes": lambda n: 10 * n, "inputs": lambda n: n}
    grown = SMALL.grown(Capacity({"lanes": {"a": 4, "b": 1}}), policy)
    assert grown.sizes == {"lanes": {"a": 4, "b": 10}, "inputs": {"x": 2}}


def test_round_up():
    assert [round_up(n) for n in (0, 0.1, 3, 4, 1000, 1025, 5000)] == [0, 1, 4, 4, 1024, 1152, 5120]


@pytest.mark.parametrize(("need", "expected"), [(2, 4), (5, 8), (9, 13)])
def test_find_or_grow(need, expected):
    """The smallest that will do, or a new one, grown from the last."""
    programs = [8, 4]

    def find():
        return find_or_grow(
            programs,
            fitting=(p for p in sorted(programs) if p >= need),
            similar=reversed(programs),
            make=lambda model: need + (model or 0),
            use=lambda program: program,
        )

    assert find() == find() == expected
    assert programs == ([8, 4] if need <= 8 else [8, 4, 13])


@pytest.mark.parametrize(("gradient", "is_one"), [(False, True), (True, False)])
def test_rows_that_nobody_writes_cost_no_time_in_inference(gradient, is_one):
    """So a program serves much smaller minibatches, where nothing is computed over all lanes."""
    step = jedbatch.cell(lambda w, h: jnp.tanh(w * h))

    def chain(w, length):
        h = w
        for _ in range(length):
            h = step(w, h + 0.5)
        return h

    batched, w = jedbatch.batch(chain), jnp.ones(256)
    plans = [batched.plan(w, [n] * 8, gradient=gradient) for n in (200, 3, 200)]
    large, small, again = [plan.static.signature for plan in plans]
    assert large is again
    assert (large is small) == is_one
    assert large.result_bytes > 1 << 20


@pytest.mark.parametrize("gradient", [False, True])
def test_numbers_that_few_instances_bring_have_room_for_more(gradient):
    step = jedbatch.cell(lambda w, h, number: jnp.tanh(w * h + number))

    def chain(w, numbers):
        h = step(w, w, 0)
        for number in numbers:
            h = step(w, h, number)
        return h

    batched, w = jedbatch.batch(chain), jnp.ones(4)
    minibatches = [[[0.5] * 4] * k + [[]] * (32 - k) for k in (2, 14)]
    few, many = [batched.plan(w, x, gradient=gradient).static.signature for x in minibatches]
    assert few is many
