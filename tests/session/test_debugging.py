"""Debugging by the options of JAX: who made a NaN, and Python line by line."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch

cell = jedbatch.cell
W = jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.3, (3, 3)), jnp.float32)
GOOD, BAD = [(1.0, 2.0), ((3.0, 1.0), 2.0)], [(1.0, 2.0), ((3.0, -1.0), 2.0)]


@cell
def together(w, a, b):
    return jnp.tanh(w @ (a + b))


@cell
def risky(w, a):
    return jnp.log(w @ a)


@cell
def root(w, a):
    return jnp.sqrt((w @ a).sum()) * a


@cell
def of_weights(w, a):
    return jnp.log(w - 1) @ a


@cell
def ratio(w, a):
    return 1 / (w @ a)


def encode(w, tree):
    if isinstance(tree, tuple):
        return together(w, encode(w, tree[0]), encode(w, tree[1]))
    return risky(w, jnp.full(3, tree))


def decide(w, tree):
    h = encode(w, tree)
    return together(w, h, h) if h.sum() > 0 else -h


def rows(w, x):
    return risky(w, x)


def of_any_length(w, x):
    return risky(w, x.sum(axis=0)) + x.max()


def of(make):
    return lambda w, x: together(w, make(w, x), x)


ROWS = np.ones((9, 3), np.float32)
LENGTHS = [np.ones((n, 3), np.float32) for n in (1, 3, 2, 4)]


def negative(arrays, place):
    found = [x.copy() for x in arrays]
    found[place] *= -1
    return found


FORWARD = {
    "trees": (encode, GOOD, BAD),
    "decisions": (decide, GOOD, BAD),
    "rows": (rows, ROWS, np.stack(negative(ROWS, 5))),
    "lengths": (of_any_length, LENGTHS, negative(LENGTHS, 1)),
}


def total(batched, minibatch):
    return lambda w: sum(x.sum() for x in jax.tree.leaves(batched(w, minibatch)))


def notes_of(error):
    return "".join(getattr(error.value, "__notes__", []))


@pytest.mark.parametrize("way", ["call", "gradient"])
@pytest.mark.parametrize("name", FORWARD)
def test_a_nan_names_its_cell(name, way):
    fn, good, bad = FORWARD[name]
    batched = jedbatch.batch(fn)
    run = {"call": lambda x: batched(W, x), "gradient": lambda x: jax.grad(total(batched, x))(W)}
    with jax.debug_nans(True):
        jax.block_until_ready(run[way](good))
        with pytest.raises(FloatingPointError, match=r"nan.*in log") as error:
            jax.block_until_ready(run[way](bad))
    assert "in `risky(" in notes_of(error)
    assert "together" not in notes_of(error)


@pytest.mark.parametrize("compiles", [False, True])
def test_in_plans(compiles):
    batched = jedbatch.batch(encode)
    apply = jax.jit(batched.apply) if compiles else batched.apply
    plan = batched.plan(W, BAD)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.*in log") as error:
        jax.block_until_ready(apply(W, plan))
    assert "in `risky(" in notes_of(error)


def test_made_of_weights_alone():
    """What all instances share is computed once, before all of them."""
    batched = jedbatch.batch(of(of_weights))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.*in log") as error:
        batched(W, [np.ones(3, np.float32)])
    assert "in `of_weights(" in notes_of(error)


def test_made_by_a_derivative():
    """Values are fine where `sqrt` meets 0, and its derivative is not."""
    batched, zero = jedbatch.batch(of(root)), [np.zeros(3, np.float32)]
    with jax.debug_nans(True):
        batched(W, zero)
        with pytest.raises(FloatingPointError, match="nan") as error:
            jax.grad(total(batched, zero))(W)
    assert "in the derivative of `root(" in notes_of(error)


def test_infinite_values_name_their_cell():
    batched = jedbatch.batch(lambda w, x: ratio(w, together(w, x, x)))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf") as error:
        batched(W, [np.ones(3, np.float32), np.zeros(3, np.float32)])
    assert "in `ratio(" in notes_of(error)


# --- without `jax.jit` ---


def values_of(seen):
    """A cell that keeps the values it gets, and a function of it that decides on others."""

    @cell
    def step(w, x):
        x = jnp.tanh(w @ x)
        seen.append(np.asarray(x).tolist() if not isinstance(x, jax.core.Tracer) else None)
        return x

    def fn(w, instance):
        x, steps = instance["x"], 0
        while steps < instance["most"] and x.sum() > 0.2:
            x, steps = step(w, x), steps + 1
        return {"x": x, "steps": steps, "last": x[-1]}

    return fn


MINIBATCH = [{"x": np.full(3, n, np.float32), "most": n} for n in (1, 3, 2)]


@pytest.mark.parametrize("out_axes", [0, None])
def test_python_runs_on_values(out_axes):
    seen = []
    fn = values_of(seen)
    batched = jedbatch.batch(fn, out_axes=out_axes)
    expected = batched(W, MINIBATCH)
    seen.clear()
    with jax.disable_jit():
        found = batched(W, MINIBATCH)
    assert len(seen) == 6
    assert None not in seen
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(found, expected, 1e-6)


def test_gradients_are_those_of_the_loop():
    batched = jedbatch.batch(encode)
    expected = jax.grad(total(batched, GOOD))(W)
    with jax.disable_jit():
        assert_close(jax.grad(total(batched, GOOD))(W), expected, 1e-5)


@pytest.mark.parametrize("given", [ROWS, LENGTHS, MINIBATCH], ids=["rows", "lengths", "objects"])
def test_arrays_are_those_of_jax(given):
    """Also where instances are arrays of NumPy, which have no `at` and promote otherwise."""

    def fn(w, instance):
        x = instance["x"] if isinstance(instance, dict) else instance
        return (x.at[0].set(2) @ w / np.float32(3)).sum(axis=None) + jnp.arange(3)

    batched = jedbatch.batch(fn)
    expected = batched(W, given)
    with jax.disable_jit():
        found = batched(W, given)
    assert found.dtype == expected.dtype
    assert_close(found, expected, 1e-6)


def test_batched_functions_inside_run_line_by_line_too():
    seen = []
    inner = jedbatch.batch(values_of(seen))
    outer = jedbatch.batch(lambda w, xs: inner(w, xs)["x"].sum())
    expected = outer(W, [MINIBATCH, MINIBATCH[:2]])
    seen.clear()
    with jax.disable_jit():
        assert_close(outer(W, [MINIBATCH, MINIBATCH[:2]]), expected, 1e-6)
    assert seen
    assert None not in seen


def test_errors_name_the_instance():
    with jax.disable_jit(), jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        jedbatch.batch(encode)(W, BAD)
    assert "instance 1" in notes_of(error)


def test_results_must_stack_there_too():
    ragged = jedbatch.batch(lambda w, x: x)
    for context in (contextlib.nullcontext(), jax.disable_jit()):
        with context, pytest.raises(ValueError, match="out_axes=None"):
            ragged(W, LENGTHS)
