"""A batched function accepts everything that the plain loop accepts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, mostly_slow

import jedbatch


def host_sine(p, x):
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return p * jax.pure_callback(lambda v: np.sin(v).astype(v.dtype), kind, x)


@pytest.mark.parametrize(
    "fn",
    [
        host_sine,
        jedbatch.cell(host_sine),
        lambda p, x: jedbatch.cell(lambda p, x: jax.lax.cond(p > 0, jax.jit(host_sine), sub, p, x))(
            p, x
        ),
    ],
)
def test_calls_of_python_that_do_not_say_how_to_be_mapped(fn):
    instances = list(np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32))
    check(fn, jnp.float32(1), instances, gradients=False)


def sub(p, x):
    return p - x


def test_arrays_of_strings_and_objects_reach_the_function_as_they_are():
    def fn(p, instance):
        words, things = instance["words"], instance["things"]
        assert words.dtype.kind in "US"
        scale = len(words) + words.tolist().count("b") + float(things.size)
        return p * scale * things.flat[0] * things.flat[-1][0]

    def things(a, b):
        array = np.empty((1, 2), object)
        array[0, 0], array[0, 1] = a, b
        return array

    x = np.arange(2, dtype=np.float32) + 1
    instances = [
        {"words": np.array(["a", "b"]), "things": things(x, [x, None])},
        {"words": np.array(["b", "b"]), "things": things(2 * x, [x, None])},
        {"words": np.array(["a", "b"]), "things": things(3 * x, [x, None])},
        {"words": np.array(["a"]), "things": things(2, [x, None])},
    ]
    batched = check(fn, jnp.float32(2), instances)
    plan = batched.plan(jnp.float32(2), [*instances, {**instances[0], "things": things(x, [3])}])
    assert plan.host.num_known == 4


def test_transfers_of_tables_are_explicit():
    """A guard finds the caller's own transfers, not those of plans and of instances."""
    params, words = jax.device_put(np.eye(3, dtype=np.float32)), np.ones((2, 3), np.float32)
    batched = jedbatch.batch(lambda p, x: jnp.tanh(p @ x).sum())
    loss = jax.jit(jax.value_and_grad(lambda p, plan: batched.apply(p, plan).sum()))
    listed = jedbatch.batch(lambda p, x: p @ x, out_axes=None)
    with jax.transfer_guard("disallow"):
        called = batched(params, list(words))
        plan = batched.plan(params, list(words))
        applied = batched.apply(params, plan)
        value, _ = loss(params, jax.device_put(plan))
        rows = listed(params, list(words))
    assert called.tolist() == applied.tolist()
    assert float(value) == pytest.approx(float(called.sum()))
    assert [row.tolist() for row in rows] == words.tolist()


def halved(params, x):
    x = params @ x
    while x[0] > 0.25 and params[0, 0] > 0:
        x = params @ x / 3
    return x


GUARDED = {
    "plan": lambda p, x: jnp.tanh(p @ x),
    "ragged": lambda p, x: jnp.outer(x, p[0]).sum(0),
    "decisions": halved,
    "decisions on ragged arrays": lambda p, x: p[0] if x[0] > 0 else p[0] * x.sum(),
}


@pytest.mark.parametrize("name", mostly_slow(GUARDED, "plan", "decisions on ragged arrays"))
def test_transfers_of_ours_pass_a_guard(name):
    """Calls and gradients, whose cotangents the caller has on the device."""
    fn, ragged = GUARDED[name], "ragged" in name
    params = jax.device_put(np.full((3, 3), 0.5, np.float32))
    vectors = [np.linspace(-1, 1 + i, 2 + i if ragged else 3, dtype=np.float32) for i in range(3)]
    batched = jedbatch.batch(fn)
    want, pull = jax.vjp(lambda p: jnp.stack([fn(p, jnp.asarray(x)) for x in vectors]), params)
    with jax.transfer_guard("disallow"):
        called = batched(params, vectors)
        got, pull_back = jax.vjp(lambda p: batched(p, vectors), params)
        (slope,) = pull_back(want)
        on_device = batched(params, list(map(jax.device_put, vectors)))
    for found, expected in ((called, want), (got, want), (on_device, want), (slope, pull(want)[0])):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_ragged_results_pass_a_guard():
    arrays = [np.arange(n, dtype=np.float32) for n in (2, 3)]
    batched = jedbatch.batch(jnp.sin, in_axes=0, out_axes=None)
    with jax.transfer_guard("disallow"):
        found = batched(arrays)
    for rows, x in zip(found, arrays, strict=True):
        np.testing.assert_allclose(rows, np.sin(x), rtol=1e-6)


def test_a_guard_holds_in_lazy_scopes_and_in_the_callers_own_code():
    params = jax.device_put(np.full((3, 3), 0.5, np.float32))
    step = jedbatch.cell(lambda p, x: jnp.tanh(p @ x))
    with jax.transfer_guard("disallow"):
        with jedbatch.lazy():
            x = step(params, params[0])
            y = step(params, x + params[1])
            large = float(y.sum()) > 1
        assert large
        assert np.asarray(x).shape == (3,)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jedbatch.batch(lambda p, x: p[0] * 2 if x > 1 else jnp.sin(np.ones(3, np.float32)))(
                params, [2.0, 0.5]
            )
