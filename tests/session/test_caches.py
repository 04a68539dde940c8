"""Every cache has a bound, and forgetting costs time alone."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch
from jedbatch._session import core
from jedbatch._session import session as _session
from jedbatch._session.programs import program_cache
from jedbatch._support.caches import Memory

P = jnp.ones((5, 3))
ROW = jedbatch.cell(lambda p, i: p[i], name="row")
ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(x + y), name="add")


def encode(p, t):
    return ROW(p, t) if isinstance(t, int) else ADD(p, encode(p, t[0]), encode(p, t[1]))


def chain(n):
    t = 0
    for k in range(n):
        t = (t, k % 5)
    return t


def session_of(batched):
    (session,) = batched._core.sessions.values()
    return session


def right(batched, instances, fn=encode):
    assert_close(batched(P, instances), jnp.stack([fn(P, t) for t in instances]), 1e-6)


# --- the dictionary ---


def test_memory_forgets_what_came_first():
    by_count = Memory(2)
    for k in range(4):
        by_count[k] = k
    assert list(by_count) == [2, 3]
    assert by_count.use(2) == 2
    by_count[4] = 4
    assert (list(by_count), by_count.use(3)) == ([2, 4], None)


def test_memory_counts_bytes():
    memory = Memory(100, most=10, weigh=lambda key, value: value)
    for k in range(5):
        memory[k] = 4
    assert (list(memory), memory.bytes) == ([3, 4], 8)
    memory[4] = 1
    assert memory.bytes == 5
    memory["large"] = 50
    assert (list(memory), memory.bytes) == (["large"], 50)
    del memory["large"]
    assert memory.bytes == 0
    memory[0] = 1
    memory.clear()
    assert (len(memory), memory.bytes) == (0, 0)


def test_memory_takes_many_at_once_as_one_by_one():
    rng = np.random.default_rng(0)
    at_once, one_by_one = (Memory(9, most=30, weigh=lambda key, value: value) for _ in range(2))
    for first in range(0, 60, 6):
        keys, values = range(first, first + 6), rng.integers(1, 8, 6).tolist()
        at_once.add(zip(keys, values, strict=True))
        for key, value in zip(keys, values, strict=True):
            one_by_one[key] = value
        del at_once[first + 5], one_by_one[first + 5]
        assert list(at_once.items()) == list(one_by_one.items())
        assert at_once.bytes == one_by_one.bytes == sum(at_once.values())


# --- what a batched function keeps ---


def test_instances_by_bytes():
    batched = jedbatch.batch(encode, cache_bytes=40_000)
    for n in range(1, 40):
        batched.plan(P, [chain(n)], gradient=False)
    session = session_of(batched)
    assert 0 < len(session.records.by_key) < 39
    kept = session.records.by_key.bytes + session.records.by_id.bytes + session.arranged.bytes
    assert 0 < kept <= session.registry.budget.bytes <= 40_000
    assert batched.plan(P, [chain(39)]).host.num_known == 1
    assert batched.plan(P, [chain(1)]).host.num_known == 0


def scan(p, t):
    step = lambda c, x: (jnp.tanh(c) + x, None)  # noqa: E731
    return jax.lax.scan(step, ROW(p, t[0] % 5), jnp.zeros((2, 3)))[0]


def cells(p, t):
    return jedbatch.cell(lambda p, i: p[i])(p, t[0] % 5)


def jitted(p, t):
    return jax.jit(lambda x: jnp.sin(x))(ROW(p, t[0] % 5))


def constants(p, t):
    return ROW(p, t[0] % 5) + jnp.asarray(np.full(3, t[0], np.float32))


@pytest.mark.parametrize("fn", [scan, cells, jitted, constants])
def test_what_is_made_anew_is_forgotten(fn):
    """Programs, cells and constants that every instance makes."""
    batched = jedbatch.batch(fn, cache_size=4, cache_bytes=100_000)

    def kept(begin):
        batched.plan(P, [(n, 0) for n in range(begin, begin + 50)], gradient=False)
        registry = session_of(batched).registry
        assert registry.budget.bytes <= 100_000
        return registry.size, len(registry.call_specs), len(registry.node_types)

    first = kept(0)
    assert [kept(50), kept(100)] == [first, first]


@pytest.mark.filterwarnings("ignore:6 minibatches in a row")
def test_types_without_end_begin_again(monkeypatch):
    """Operations of ever other shapes: when too much was met, all of it is forgotten."""
    monkeypatch.setattr(_session, "MANY_ENTRIES", 60)
    batched = jedbatch.batch(lambda p, n: jnp.reshape(ROW(p, 0) * n, (1,) * n + (3,)).ravel())
    sessions = []
    for n in range(1, 12):
        batched.plan(P, [n], gradient=False)
        sessions.append(session_of(batched))
        assert sessions[-1].registry.size < 100
    assert len({id(s) for s in sessions}) > 1


def test_programs(monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_PROGRAMS", 2)
    batched = jedbatch.batch(lambda p, n: ROW(p, 0) * float(n))
    double = jax.jit(lambda p, plan: batched.apply(p, plan))
    plans = {}
    for size in (1, 40, 400, 1600):
        plans[size] = batched.plan(P, list(range(size)))
    kept = session_of(batched).programs
    assert len(kept._signatures) == len(kept._used) == 2
    assert {r.forward for r in kept._reverses} <= set(kept._signatures)
    for size in (1600, 1, 1600):
        expected = jnp.tile(jnp.arange(float(size))[:, None], 3)
        assert_close(batched.apply(P, plans[size]), expected, 1e-6)
    assert_close(double(P, plans[1]), jnp.zeros((1, 3)), 1e-6)


def test_structures_of_shared_arguments(monkeypatch):
    monkeypatch.setattr(core, "MAX_SESSIONS", 2)
    batched = jedbatch.batch(lambda p, x: p["w"] * x)
    params = [{"w": jnp.ones(3), **{f"unused {i}": 0.0 for i in range(k)}} for k in range(4)]
    plans = [batched.plan(p, [2.0]) for p in params]
    batched.plan(params[2], [1.0])
    batched.plan(params[0], [1.0])
    assert len(batched._core.sessions) == 2
    for p, plan in zip(params, plans, strict=True):
        assert_close(batched.apply(p, plan), 2 * jnp.ones((1, 3)), 1e-6)
    with pytest.raises(ValueError, match="make a new one"):
        batched.apply(params[0], plans[1])
    with pytest.raises(ValueError, match="make one with its own"):
        jedbatch.batch(lambda p, x: p["w"] + x).apply(params[0], plans[0])


def test_clear():
    weight = jnp.full(3, 2.0)
    closed = jedbatch.cell(lambda x: x * weight)
    batched = jedbatch.batch(lambda p, t: closed(encode(p, t)))
    fn = lambda p, t: weight * encode(p, t)  # noqa: E731
    trees = [(1, 2), ((0, 1), 3)]
    right(batched, trees, fn)
    plan, policy, before = batched.plan(P, trees), batched.policy, batched.compilations
    session = weakref.ref(session_of(batched))
    batched.clear()
    assert len(batched._core.sessions) == 0
    assert batched.compilations == before
    assert batched.policy is policy
    assert_close(batched.apply(P, plan), jnp.stack([fn(P, t) for t in trees]), 1e-6)
    del plan
    gc.collect()
    assert session() is None
    assert batched.plan(P, trees).host.num_known == 0
    right(batched, trees, fn)
    assert batched.compilations > before


@pytest.mark.parametrize("decides", [False, True], ids=["planned", "decides"])
def test_what_calls_say_holds_no_programs(decides):
    batched = jedbatch.batch(lambda p, x: x * p[0] if not decides or x > 0 else x)
    batched(P, [1.0, 2.0])
    session, ran = weakref.ref(session_of(batched)), batched.last_rounds
    assert str(ran)
    batched.clear()
    gc.collect()
    assert session() is None
    assert not ran.forms


# --- minibatches that come again ---


def planned_anew(batched, instances, **options):
    """(the plan, whether it was scheduled and laid out)."""
    plan = batched.plan(P, instances, **options)
    stages = plan.host.seconds
    return plan, stages["schedule"] + stages["layout"] > 0


def test_minibatches_that_come_again_are_not_planned_again():
    batched = jedbatch.batch(encode)
    instances = [chain(3), chain(5), chain(2)]
    first, anew = planned_anew(batched, instances)
    assert anew
    again, anew = planned_anew(batched, list(instances))
    assert not anew
    assert again.table is first.table
    assert again.host.num_known == 3
    assert planned_anew(batched, instances[::-1])[1]
    assert planned_anew(batched, instances, gradient=False)[1]
    batched.policy = jedbatch.policies.agenda
    assert planned_anew(batched, instances)[1]
    assert not planned_anew(batched, instances)[1]


@pytest.mark.filterwarnings("ignore::jedbatch.errors.GroupedByShapesWarning")
def test_inputs_of_minibatches_that_come_again():
    """Values of arrays are no part of what is kept."""
    fn = lambda p, x: jnp.tanh(x @ p).sum() if len(x) == 2 else x.sum()  # noqa: E731
    w, rng = jnp.eye(2), np.random.default_rng(0)
    batched = jedbatch.batch(fn)
    for _ in range(3):
        xs = [rng.normal(size=n).astype(np.float32) for n in (2, 3, 2)]
        np.testing.assert_allclose(batched(w, xs), [fn(w, x) for x in xs], rtol=1e-5)
        slope = jax.grad(lambda w: batched(w, xs).sum())(w)  # noqa: B023
        expected = jax.grad(lambda w: sum(fn(w, x) for x in xs))(w)  # noqa: B023
        np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_minibatches_by_bytes():
    batched = jedbatch.batch(encode, cache_bytes=400_000)
    for n in range(1, 60):
        batched.plan(P, [chain(n)], gradient=False)
    session = session_of(batched)
    assert 0 < session.arranged.bytes < session.registry.budget.bytes <= 400_000
    nothing = jedbatch.batch(encode, cache_size=0)
    assert planned_anew(nothing, [chain(3)])[1]
    assert planned_anew(nothing, [chain(3)])[1]


@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_a_few_of_many_instances_are_recorded_ahead():
    """The assumptions that they break are not held by the others, which are recorded once."""
    numbers = []

    def polynomial(x, coefficients):
        numbers.append(coefficients)
        total = jnp.zeros(())
        for c in coefficients[1:]:
            total = total * x + c
        return jnp.sin(total)

    rng = np.random.default_rng(0)
    sizes = rng.integers(30, 40, 70).tolist()
    instances = [("descending", *rng.integers(1, 9, n).tolist()) for n in sizes]  # no sequences
    batched = jedbatch.batch(polynomial)
    plan = batched.plan(0.5, [*instances, *instances[:3], instances[60]])
    assert plan.host.num_known == 4

    def count(instance):
        return sum(x is instance for x in numbers)

    again = [k for k, x in enumerate(instances[16:]) if count(x) > 1]
    assert [len(instances[16 + k]) for k in again] == [1 + max(sizes)]  # to see what to warn of
    assert count(instances[0]) > 1
    expected = [polynomial(0.5, x) for x in [*instances, *instances[:3], instances[60]]]
    np.testing.assert_allclose(batched.apply(0.5, plan), expected, rtol=1e-5)

    forgets = jedbatch.batch(polynomial, cache_size=0)
    for _ in range(2):  # until nothing is learned any more
        forgets.plan(0.5, instances)
    numbers.clear()
    forgets.plan(0.5, instances)
    assert [numbers.count(x) for x in instances] == [1] * 70
