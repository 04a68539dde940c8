"""What is kept from call to call: arenas, and packed weights."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.chains import HIDDEN, encode, make_params, sentences
from cases.helpers import assert_close, assert_no_recompile, loop

import jedbatch
from jedbatch._program.executors import Executor


@pytest.fixture
def params():
    return make_params()


@pytest.fixture
def all_handed_on(monkeypatch):
    """Small arenas too."""
    monkeypatch.setattr(Executor, "worth_keeping", 0)


def pools(batched):
    """The arenas that wait for the next call."""
    (session,) = batched._core.sessions.values()
    return [
        arenas
        for e in session.programs._executors.values()
        for free in e.arenas.values()
        for arenas in free
    ]


def test_a_stream_allocates_nothing(params, all_handed_on):
    """The arenas of one call are those of the next: they were given away and came back."""
    batched = jedbatch.batch(encode, reuse=True)
    plan = batched.plan(params, sentences(12, 16), gradient=False)
    jax.block_until_ready(batched.apply(params, plan))
    (first,) = pools(batched)
    where = {x.unsafe_buffer_pointer() for x in first}
    with assert_no_recompile():
        for _ in range(5):
            jax.block_until_ready(batched.apply(params, plan))
    assert all(x.is_deleted() for x in first)
    (last,) = pools(batched)
    assert {x.unsafe_buffer_pointer() for x in last} == where


def test_results_outlive_the_arenas_they_come_from(params, all_handed_on):
    batched = jedbatch.batch(encode, reuse=True)
    minibatches = [sentences(seed, 16) for seed in range(20, 30)]
    results = [batched(params, minibatch) for minibatch in minibatches]
    for result, minibatch in zip(results, minibatches, strict=True):
        assert_close(result, loop(encode, params, minibatch), 1e-5)


def test_calls_at_the_same_time_do_not_share_arenas(params, all_handed_on):
    batched = jedbatch.batch(encode, reuse=True)
    minibatches = [sentences(seed, 24, longest=30) for seed in range(4)]
    expected = [loop(encode, params, minibatch) for minibatch in minibatches]
    plans = [batched.plan(params, minibatch, gradient=False) for minibatch in minibatches]
    wrong, barrier = [], threading.Barrier(len(plans))

    def work(i):
        barrier.wait()
        for _ in range(20):
            got = np.asarray(batched.apply(params, plans[i]))
            if not np.allclose(got, expected[i], rtol=1e-4, atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(pools(batched)) <= len(plans) * len({id(p.static) for p in plans})


def test_what_an_earlier_call_left_behind_has_no_effect(params, all_handed_on):
    """Rows used again hold anything, not-a-number too."""
    batched = jedbatch.batch(encode, reuse=True)
    instances = sentences(13, 11)
    good = batched(params, instances)
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    assert jnp.isnan(batched(broken, instances)).all()
    assert (batched(params, instances) == good).all()


def test_packed_weights_are_kept_as_long_as_the_arrays_are_the_same():
    @jedbatch.cell
    def gates(params, x):
        return jnp.tanh(x @ params["a"]) * jnp.tanh(x @ params["b"])

    def fn(params, n):
        x = jnp.full(HIDDEN, n / 10)
        for _ in range(n):
            x = gates(params, x)
        return x

    keys = jax.random.split(jax.random.key(1), 2)
    params = {
        name: jax.random.normal(key, (HIDDEN, HIDDEN)) for name, key in zip("ab", keys, strict=True)
    }
    batched = jedbatch.batch(fn)
    numbers = [1, 3, 2]

    def packed():
        (session,) = batched._core.sessions.values()
        (executor,) = session.programs._executors.values()
        return executor._packed

    assert_close(batched(params, numbers), loop(fn, params, numbers), 1e-5)
    first = packed()
    assert first is not None
    assert_close(batched(dict(params), numbers), loop(fn, params, numbers), 1e-5)
    assert packed() is first
    others = jax.tree.map(lambda x: 2 * x, params)
    assert_close(batched(others, numbers), loop(fn, others, numbers), 1e-5)
    assert packed() is not first
    mutable = jax.tree.map(np.array, params)
    assert_close(batched(mutable, numbers), loop(fn, params, numbers), 1e-5)
    mutable["a"][:] = 0
    assert_close(batched(mutable, numbers), loop(fn, mutable, numbers), 1e-5)
    del others
    assert packed() is None
    batched(params, numbers)
    params["a"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        batched(params, numbers)


def test_arenas_are_where_the_arguments_are(params, all_handed_on):
    devices = jax.devices()
    batched = jedbatch.batch(encode)
    instances = sentences(14, 6)
    expected = loop(encode, params, instances)
    for device in [*devices[:2], *devices[:2]]:
        result = batched(jax.device_put(params, device), instances)
        assert result.devices() == {device}
        assert_close(np.asarray(result), np.asarray(expected), 1e-5)


def test_calls_that_are_traced_leave_nothing_behind(params, all_handed_on):
    """Inside of a function that is traced, on values that are not."""
    batched = jedbatch.batch(encode, reuse=True)
    instances = sentences(16, 9)
    expected = loop(encode, params, instances)
    plan = batched.plan(params, instances, gradient=False)
    for _ in range(2):
        got = jax.jit(lambda x: batched(params, instances) * x)(1.0)
        assert_close(got, expected, 1e-5)
        got = jax.jit(lambda x: batched.apply(params, plan) * x)(1.0)
        assert_close(got, expected, 1e-5)
        assert_close(batched(params, instances), expected, 1e-5)
        _, got = jax.lax.scan(lambda c, _: (c, batched(params, instances)), 0, None, length=2)
        assert_close(got[1], expected, 1e-5)


def test_bound_arguments_compile_once(params, all_handed_on):
    bound = jax.device_put(params, jax.devices()[0])
    batched = jedbatch.batch(encode)
    plan = batched.plan(bound, sentences(17, 9), gradient=False)
    batched.apply(bound, plan)
    with assert_no_recompile():
        for _ in range(3):
            batched.apply(bound, plan)


def test_a_new_program_releases_the_arenas_of_the_old(params, all_handed_on):
    batched = jedbatch.batch(encode, reuse=True)
    for count in (2, 40, 800):
        batched(params, sentences(18, count, longest=30))
    assert batched.compilations > 1
    assert len(pools(batched)) == 1


def test_faults_are_looked_for_in_results_only(all_handed_on):
    """Rows that nobody reads may be not-a-number."""

    @jedbatch.cell
    def unit(x):
        return x / jnp.abs(x).sum()

    batched = jedbatch.batch(unit, 0)
    with jax.debug_nans(True):
        assert_close(batched([np.ones(4, np.float32)] * 67), jnp.full((67, 4), 0.25), 1e-6)


def test_callbacks_see_values_of_instances_only():
    seen = []

    def look(x):
        seen.append(np.array(x))
        return np.asarray(x)

    @jedbatch.cell
    def called(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(look, shape, x, vmap_method="expand_dims")

    batched = jedbatch.batch(lambda x: called(called(x)), 0)
    batched([np.full(3, i + 1, np.float32) for i in range(67)]).block_until_ready()
    assert seen
    assert min(x.min() for x in seen) >= 1
