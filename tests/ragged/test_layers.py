"""Phases that do the same, as those of layers that are alike: one function for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check_types_by_traces

import jedbatch
from jedbatch._ragged.row_phase import RowFunction

HIDDEN = 8
SIZES = [5, 1, 3, 7]
OTHER_SIZES = [2, 40, 3, 7, 1, 5]  # few that the loop compiles anew


def layer(rng):
    shapes = {"heads": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "b": (HIDDEN,)}
    return {k: jnp.asarray(rng.normal(size=s, scale=0.4), np.float32) for k, s in shapes.items()}


def parameters(layers):
    rng = np.random.default_rng(0)
    return [layer(rng) for _ in range(layers)]


def encoder(params, x, epsilons=None):
    """x [n, 8] to the mean [8] of rows after some layers of attention and of arithmetic on rows."""
    for i, p in enumerate(params):
        x = x / jnp.sqrt((x * x).mean(axis=1, keepdims=True) + (epsilons[i] if epsilons else 1e-3))
        q, k, v = jnp.split(x @ p["heads"], 3, axis=1)
        x = x + jax.nn.softmax(q @ k.T) @ v @ p["out"]
        x = x + jnp.tanh(x + p["b"][None])
    return x.mean(axis=0)


def arrays(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, HIDDEN)).astype(np.float32) for n in sizes]


def compared(fn, params, sizes=SIZES, batched=None):
    """Values and gradients are those of the loop; returns the batched function."""
    batched = batched or jedbatch.batch(fn)
    given = arrays(sizes)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(len(sizes), HIDDEN)), np.float32)

    def together(params):
        return (weights * batched(params, given)).sum()

    def one_by_one(params):
        return sum((w * fn(params, x)).sum() for w, x in zip(weights, given, strict=True))

    expected = jnp.stack([fn(params, x) for x in given])
    assert_close(batched(params, given), expected, 1e-5)
    assert_close(jax.grad(together)(params), jax.grad(one_by_one)(params), 1e-4)
    return batched


def packed_program(batched, params):
    (stage,) = batched.plan(params, arrays(SIZES)).host.ragged_calls.stages
    return stage.region.packed


def loops(batched, params):
    """The loops in the text of a step, each function counted once."""
    plan = batched.plan(params, arrays(SIZES))
    step = jax.jit(jax.value_and_grad(lambda params: batched.apply(params, plan).sum()))
    return step.lower(params).as_text().count("stablehlo.while")


def test_layers_that_are_alike_are_one_function():
    phases, distinct, found = {}, {}, {}
    for count in (1, 3, 5):
        params = parameters(count)
        batched = compared(encoder, params) if count == 3 else jedbatch.batch(encoder)
        packed = packed_program(batched, params)
        phases[count] = len(packed.phased.phases)
        distinct[count] = packed.distinct_phases
        found[count] = loops(batched, params)
    # Rows before and after, attention, and the mean; between two layers, rows once more.
    assert phases == {1: 4, 3: 8, 5: 12}
    assert distinct == {1: 4, 3: 5, 5: 5}
    assert found[3] == found[5] < 2 * found[1]


def test_a_weight_more_is_no_loop_more():
    """Gradients of all weights are added up in the loops that pull back rows."""

    def scaled(params, x):
        scale, layers = params
        return encoder(layers, jnp.tanh(x * scale["by"][None] + scale["to"][None]))

    layers = parameters(1)
    scale = {"by": jnp.full(HIDDEN, 0.5, np.float32), "to": jnp.full(HIDDEN, 0.1, np.float32)}
    batched = compared(scaled, (scale, layers))
    fewer = jedbatch.batch(lambda params, x: encoder(params, jnp.tanh(x * 0.5 + 0.1)))
    assert loops(batched, (scale, layers)) == loops(fewer, layers)


def test_minibatches_of_other_sizes():
    params = parameters(2)
    batched = compared(encoder, params)
    compared(encoder, params, OTHER_SIZES, batched)
    compared(encoder, params, SIZES, batched)


def test_layers_with_other_numbers_are_other_functions():
    params = parameters(4)
    epsilons = (1e-3, 1e-3, 1e-2, 1e-2)
    batched = compared(lambda params, x: encoder(params, x, epsilons), params)
    packed = packed_program(batched, params)
    # Rows: first, between 0 and 1, before 2, between 2 and 3, last; attention, mean.
    assert (len(packed.phased.phases), packed.distinct_phases) == (10, 7 - 1)


def test_layers_that_share_their_weights():
    params = parameters(1)
    batched = compared(lambda params, x: encoder(params * 4, x), params)
    assert packed_program(batched, params).distinct_phases == 5


def test_results_of_all_layers():
    def states(params, x):
        return sum(encoder(params[: k + 1], x) for k in range(len(params)))

    compared(states, parameters(3))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_second_order():
    params = jax.tree.map(lambda x: x.astype(np.float64), parameters(2))
    given = [x.astype(np.float64) for x in arrays(SIZES)]
    batched = jedbatch.batch(encoder)
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)

    def pushed(loss):
        return jax.jvp(jax.grad(loss), (params,), (direction,))

    def pulled(loss):
        slope = lambda p: sum(  # noqa: E731
            (g * d).sum()
            for g, d in zip(*map(jax.tree.leaves, (jax.grad(loss)(p), direction)), strict=True)
        )
        return jax.grad(slope)(params)

    together = lambda p: (batched(p, given) ** 2).sum()  # noqa: E731
    one_by_one = lambda p: sum((encoder(p, x) ** 2).sum() for x in given)  # noqa: E731
    for both in (pushed, pulled):
        assert_close(both(together), both(one_by_one), 1e-9)


def test_types_of_results_are_those_of_a_trace(monkeypatch):
    checked = check_types_by_traces(monkeypatch)
    compared(encoder, parameters(2))
    assert len(checked) > len({*checked}) >= 2


def test_a_step_traces_no_phase_without_what_its_reverse_reads(monkeypatch):
    kept, forward = [], RowFunction._forward

    def noted(self, arguments, keep_residuals):
        kept.append(keep_residuals)
        return forward(self, arguments, keep_residuals)

    monkeypatch.setattr(RowFunction, "_forward", noted)
    batched, params = jedbatch.batch(encoder), parameters(3)
    plan = batched.plan(params, arrays(SIZES))
    kept.clear()
    total = lambda params: batched.apply(params, plan).sum()  # noqa: E731
    jax.jit(jax.value_and_grad(total)).lower(params)
    assert set(kept) == {True}
    kept.clear()
    jax.jit(total).lower(params)
    assert set(kept) == {False}
