"""Instances that do something else than what was foreseen, against the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch._support import native

cell = jedbatch.cell
W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 3, jnp.float32)


@pytest.fixture(params=["1", "0"], ids=["compiled", "in Python"], autouse=True)
def core(request, monkeypatch):
    monkeypatch.setenv(native.SWITCH, request.param)


@cell
def advance(w, h, taken, depth):
    return jnp.tanh(w @ h) + 0.1, taken + 1, taken + 1 < depth - 0.5


@cell
def combine(w, h, q):
    return jnp.tanh(w @ h + q) + 0.1


@cell
def goes_on(h, by):
    return 0 * h.sum() + by > 0


@cell
def write(w, h, word):
    h = jnp.tanh(w @ h) + 0.01 * word
    return h, jnp.asarray((3 * word + 5) % 40, int), jnp.asarray((5 * word + 3) % 37, jnp.float32)


def start(n):
    return jnp.full(3, 0.1) * n


def used(batched):
    return sum(r.used for r in batched.last_rounds)


def run_and_compare(fn, *minibatches):
    """Returns the function after calls on minibatches; some steps were of use in some call."""
    batched, of_use = jedbatch.batch(fn), 0
    for instances in minibatches:
        assert_close(batched(W, instances), loop(fn, W, instances), 1e-5)
        of_use += used(batched)
    assert of_use > 0
    return batched


def test_decisions_are_read_again_after_steps_of_another_size():
    def fn(w, depth):
        h, taken, more, read = start(depth), 0.0, True, []
        while more:
            h, taken, more = advance(w, h, taken, depth)
            read.append(more)
        for k in range(4):
            more = goes_on(h, k - 2.0)
            read.append(more)
            if more:
                h = h * 0.5
        return h, sum(k * bool(more) for k, more in enumerate(read))

    run_and_compare(fn, *[[3, 17, 9]] * 3, [5], [5])


def test_loops_of_the_same_cells_that_read_other_values():
    """The number of a step is the int that was read, or made of the float that was read."""

    def fn(w, instance):
        depth, place = instance
        h, word, total = start(1), 2, 0
        for _ in range(depth):
            h, *read = write(w, h, word)
            word = int(read[place])
            total += word
        return h, total

    run_and_compare(fn, *[[(9, 0)] * 2] * 3, *[[(9, 1)] * 2] * 3, *[[(9, 0), (7, 1)]] * 2)


def test_parts_that_ran_before_a_step_do_not_come_again():
    """Both loops are alike, and a part of the instance runs with the first step of the second."""
    inner = jedbatch.batch(lambda w, h: combine(w, h, h), out_axes=None)

    def fn(w, depth):
        q = combine(w, start(1), start(1))
        h = combine(w, q, q)
        for k in range(depth):
            h = combine(w, h, q)
            if not goes_on(h, 1.0 if k < depth - 1 else -1.0):
                break
        (q,) = inner(w, [h])
        for k in range(depth):
            h = combine(w, h, q)
            if not goes_on(h, 1.0 if k < depth - 1 else -1.0):
                break
        return h

    run_and_compare(fn, *[[5]] * 4, *[[9]] * 3, *[[4, 7]] * 3)


@pytest.mark.parametrize("then", ["ends", "goes on", "has parts"])
def test_errors_where_a_value_cannot_be_awaited_may_be_caught(then):
    """What was recorded since the last step that was foreseen is computed."""
    inner = jedbatch.batch(lambda w, h: combine(w, h, h), out_axes=None)

    def fn(w, depth):
        h, taken, more = start(depth), 0.0, True
        for k in range(depth):
            h, taken, more = advance(w, h, taken, depth)
            if not more or k == 5:
                break
        h = 2 * h
        try:
            with jax.default_matmul_precision("highest"):
                assert h.sum() > -100
        except ValueError:
            pass
        if then == "has parts":
            (h,) = inner(w, [h])
        h = h + combine(w, h, h)
        while then == "goes on" and h.sum() > 0.1:
            h = 0.5 * h
        return h

    run_and_compare(fn, *[[3, 17, 9, 1, 30, 17]] * 2, *[[7]] * 3, *[[9, 9]] * 2)


def test_numbers_of_the_host_are_not_guessed_again_and_again():
    """A loop that goes on, and never as foreseen, runs few steps for nothing in each round."""
    words = np.random.default_rng(0).integers(0, 1000, 40).tolist()

    def fn(w, depth):
        h = start(1)
        for k in range(depth):
            h, word, _ = write(w, h, words[k])
            if int(word) < 0:
                break
        return h

    batched, depth = jedbatch.batch(fn), 30
    for _ in range(4):
        assert_close(batched(W, [depth, depth]), loop(fn, W, [depth, depth]), 1e-5)
    assert used(batched) <= 2
    assert max(r.ahead for r in batched.last_rounds[8:]) == 1
