"""Programs in two tiers: narrow chunks first, all widths once these are compiled."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch
from jedbatch._session.tiered import Tiered
from jedbatch.testing import compilations

pytestmark = pytest.mark.unoptimized

SIZE = 5


def trees(seed, count, most=30):
    rng = np.random.default_rng(seed)

    def grow(leaves):
        if leaves == 1:
            return int(rng.integers(7))
        left = int(rng.integers(1, leaves))
        return grow(left), grow(leaves - left)

    return [grow(int(n)) for n in rng.integers(1, most, count)]


@jedbatch.cell
def join(p, left, right):
    return jnp.tanh(p["w"] @ left + p["u"] @ right)


def encode(p, tree):
    if isinstance(tree, int):
        return p["words"][tree]
    return join(p, *(encode(p, part) for part in tree))


def model(p, tree):
    return encode(p, tree).sum()


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"w": (SIZE, SIZE), "u": (SIZE, SIZE), "words": (7, SIZE)}
    return {k: jnp.asarray(rng.normal(size=s).astype(np.float32)) for k, s in shapes.items()}


def tiered_programs(batched):
    (session,) = batched._sessions.values()
    return [x for x in session.programs._executors.values() if isinstance(x, Tiered)]


@pytest.fixture
def held(monkeypatch):
    """An event that the threads which compile the last tier wait for."""
    event, run = threading.Event(), Tiered.__init__

    def patched(self, *args):
        run(self, *args)
        for name in ("infer", "save", "reverse"):
            method = getattr(self.last, name)

            def waiting(*args, method=method):
                event.wait()
                return method(*args)

            monkeypatch.setattr(self.last, name, waiting)

    monkeypatch.setattr(Tiered, "__init__", patched)
    yield event
    event.set()


def test_both_tiers_give_what_the_loop_gives(held):
    batched, params, instances = (
        jedbatch.batch(model, executor="tiered"),
        parameters(),
        trees(1, 40),
    )
    slope = jax.value_and_grad(lambda p: jnp.square(batched(p, instances)).sum())
    expected = jax.value_and_grad(lambda p: sum(model(p, x) ** 2 for x in instances))(params)
    values = np.array([model(params, x) for x in instances])
    for _ in range(3):  # the last tier is not there yet
        assert_close(slope(params), expected, 1e-4)
        np.testing.assert_allclose(batched(params, instances), values, rtol=1e-5)
    (program,) = tiered_programs(batched)
    assert len(program._threads) == 3  # of values, of both halves of a gradient
    held.set()
    program.wait()
    with compilations() as late:
        assert_close(slope(params), expected, 1e-4)
        np.testing.assert_allclose(batched(params, instances), values, rtol=1e-5)
        assert_close(slope(params), expected, 1e-4)
    assert not late


def test_the_first_tier_has_one_width_of_each_kernel():
    batched = jedbatch.batch(model, executor="tiered")
    batched(parameters(), trees(1, 40))
    (program,) = tiered_programs(batched)
    signature = program.signature
    table = jax.ShapeDtypeStruct((signature.form.size,), np.int32)
    inputs = [
        jax.ShapeDtypeStruct((n, *shape), dtype)
        for n, (shape, dtype) in zip(signature.inputs, signature.arenas, strict=True)
    ]
    shared = {"shared": jax.tree.leaves(parameters())}

    def chunks(executor):
        return str(jax.make_jaxpr(executor._once)(shared, inputs, table)).count("put_rows[")

    assert chunks(program.last) == sum(signature.widest) > len(signature.kernels)
    assert chunks(program.first) == len(signature.kernels)


def test_arguments_that_are_gone_leave_the_last_tier_to_the_next_call(held):
    batched, instances = jedbatch.batch(model, executor="tiered"), trees(2, 9)
    params = parameters()
    for _ in range(2):
        batched(params, instances).block_until_ready()
    (program,) = tiered_programs(batched)
    for x in jax.tree.leaves(params):
        x.delete()
    held.set()
    program.wait()
    expected = [model(parameters(), x) for x in instances]
    np.testing.assert_allclose(batched(parameters(), instances), expected, rtol=1e-5)


def test_a_jit_has_one_tier():
    batched, params, instances = (
        jedbatch.batch(model, executor="tiered"),
        parameters(),
        trees(3, 9),
    )
    plan = batched.plan(params, instances)
    values = jax.jit(batched.apply)(params, plan)
    np.testing.assert_allclose(values, [model(params, x) for x in instances], rtol=1e-5)
    assert not any(program._threads for program in tiered_programs(batched))
    assert batched.compilations == 1


def test_loops_of_python_have_one_tier():
    """And rows of arrays run as under `jax.vmap`."""

    def halve(x):
        while jnp.abs(x).max() > 1:
            x = x / 2
        return x

    rows = np.linspace(-9, 9, 12, dtype=np.float32).reshape(6, 2)
    batched = jedbatch.batch(halve, 0, executor="tiered")
    np.testing.assert_allclose(batched(list(rows)), [halve(x) for x in rows])
    assert not any(program._threads for program in tiered_programs(batched))
    mapped = jedbatch.batch(jnp.tanh, 0, executor="tiered")
    many = np.tile(rows, (20, 1))
    np.testing.assert_allclose(mapped(jnp.asarray(many)), np.tanh(many), rtol=1e-6)
    assert not tiered_programs(mapped)
