"""The compiled core against the Python that it stands for: recording, and letting recorders go."""

import _thread
import gc
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from cases.compiled_core import assert_equal, both, columns, compiled

import jedbatch
import jedbatch._record.cell as cell_module
from jedbatch._record.run.recorder import Recorder
from jedbatch._support import native

W = jnp.ones((3, 3))


@jedbatch.cell
def combine(params, a, b, *, scale=1):
    return params["w"] @ a * scale, b + 1.0


@jedbatch.cell
def total(params, states):
    return sum((h + c for h, c in states), jnp.zeros(3))


def every_argument(params, number, vector):
    """Cells get symbols, numbers, arrays, states, lists of states, parts of them and options."""
    state = combine(params, vector, number)
    for step in range(3):
        state = combine(params, *state, scale=2 + step % 2)
        state = combine(params, state[0], 0.5 * step)
        state = combine(params, np.full(3, step, np.float32), state[1])
    later = combine(params, params["b"], True)
    return total(params, [state, later, (state[0], later[1])]), total(params, (later,))


@compiled
def test_calls_are_recorded_equally(monkeypatch):
    params = {"w": W, "b": jnp.ones(3)}
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=5).tolist()
    vectors = list(rng.normal(size=(5, 3)).astype(np.float32))

    def plan():
        batched = jedbatch.batch(every_argument, in_axes=(None, 0, 0), out_axes=None)
        first = columns(batched.plan(params, numbers[:2], vectors[:2]))
        return [*first, *columns(batched.plan(params, numbers[2:], vectors[2:]))]

    assert_equal(*both(monkeypatch, plan))


@jedbatch.cell
def pick(params, *states, which=0):
    return states[which][0] * 2.0


@compiled
def test_many_descriptions_and_states_are_recorded_equally(monkeypatch):
    """So many that the tables of the compiled core grow."""
    params = {"w": W, "b": jnp.ones(3)}
    x = np.ones(3, np.float32)

    def fn(params, number):
        states = [combine(params, x, number)]
        for k in range(200):
            states.append(combine(params, *states[-1], scale=k % 40))  # descriptions
        several = [pick(params, *states[:n], which=n // 2) for n in (30, 31, 30)]
        listed = [pick(params, states[k], list(states[k]), tuple(states[-k])) for k in range(99)]
        return several + listed

    def plan():
        batched = jedbatch.batch(fn, out_axes=None)
        return [y for few in ([1.0, 2.0], [3.0]) for y in columns(batched.plan(params, few))]

    assert_equal(*both(monkeypatch, plan))


@compiled
def test_calls_that_fail_are_recorded_equally(monkeypatch):
    """The function catches what is raised in between, and goes on."""
    params = {"w": W, "b": jnp.ones(3)}

    def fn(params, number):
        h, c = combine(params, np.ones(3, np.float32), number)
        failed = 0
        for wrong in (object(), np.ones((2, 2), np.float32), "text", [h, object()], (h, (c, 3j))):
            for arguments in ((h, wrong), (wrong, c), (h, [c, wrong])):
                try:
                    combine(params, *arguments)
                except (TypeError, ValueError):
                    failed += 1
                h, c = combine(params, h, c)
        assert failed == 14  # a second argument may have any shape
        return h

    def plan():
        batched = jedbatch.batch(fn)
        return [x for few in ([1.0, 2.0], [3.0]) for x in columns(batched.plan(params, few))]

    assert_equal(*both(monkeypatch, plan))


@compiled
def test_threads_record_at_the_same_time():
    params = {"w": W, "b": jnp.ones(3)}
    numbers, vectors = [0.5, 2.0, 3.0], list(np.eye(3, dtype=np.float32))

    def plan(_):
        batched = jedbatch.batch(every_argument, in_axes=(None, 0, 0), out_axes=None)
        return [columns(batched.plan(params, numbers[:k], vectors[:k])) for k in (1, 2, 3)]

    expected = plan(0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(plan, range(8)))
    finally:
        sys.setswitchinterval(before)
    for plans in found:
        for a, b in zip(plans, expected, strict=True):
            assert_equal(a, b)


@compiled
def test_who_records_is_known_in_each_thread():
    recording, me, other = cell_module.recording, object(), object()
    assert type(recording) is native.core().Recording
    assert pickle.loads(pickle.dumps(recording)) is recording
    before = sys.getrefcount(me)

    def in_thread():
        found = [recording.recorder]
        recording.recorder = other
        found.append(recording.recorder)
        recording.recorder = None
        return [*found, recording.recorder]

    recording.recorder = me
    try:
        assert recording.recorder is me
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(in_thread).result() == [None, other, None]
        assert recording.recorder is me
        with pytest.raises(AttributeError, match="set it to None"):
            del recording.recorder
    finally:
        recording.recorder = None
    assert recording.recorder is None
    assert sys.getrefcount(me) == before


@compiled
def test_who_records_is_known_in_each_greenlet_to_gevent(monkeypatch):
    """It replaces both names of the class of what is kept per thread."""
    local = type("local", (), {"__module__": "gevent._gevent_clocal"})
    monkeypatch.setattr(threading, "local", local)
    monkeypatch.setattr(_thread, "_local", local)
    assert type(cell_module._recording()) is cell_module._Recording


@compiled
def test_cells_are_recorded_by_whatever_the_recorder_has():
    class Records:
        def __init__(self, name):
            self.call_cell = lambda cell, args, options: (name, cell.name, args, options)

    class Slot(Records):
        __slots__ = ("call_cell",)

    for recorder in (Records("a"), Slot("b"), Records("c")):
        cell_module.recording.recorder = recorder
        try:
            name = recorder.call_cell(combine.cell, (), {})[0]
            assert combine(1, 2, scale=3) == (name, "combine", (1, 2), {"scale": 3})
        finally:
            cell_module.recording.recorder = None


@compiled
def test_results_that_somebody_has_are_not_used_again(monkeypatch):
    """Tuples of an instance serve the next one, but not if they, or a part of them, are kept."""

    def plan():
        held, numbers, weak = [], [], []

        def fn(params, n):
            assert [[x.index for x in part] for part in held] == numbers  # as when they were made
            assert all(x() is None for x in weak)
            states = [combine(params, jnp.ones(3), 0.5)]
            for step in range(n):
                states.append(combine(params, *states[-1], scale=2 + step % 2))
            held.append([states[1], states[1][:1], states[1][1:], [*states[1], *states[2]]][n % 4])
            numbers.append([x.index for x in held[-1]])
            weak[:] = map(weakref.ref, states[-1])
            return total(params, states[-2:])

        batched = jedbatch.batch(fn)
        instances = [5, 3, 8, 4, 9, 4, 6, 7, 5]
        return columns(batched.plan({"w": W, "b": jnp.ones(3)}, instances, gradient=False))

    assert_equal(*both(monkeypatch, plan))


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_recorder_is_let_go_without_the_collector(monkeypatch, switch):
    monkeypatch.setenv(native.SWITCH, switch)
    recorders, begin = [], Recorder.begin

    def noted(recorder, *args):
        recorders.append(weakref.ref(recorder))
        return begin(recorder, *args)

    monkeypatch.setattr(Recorder, "begin", noted)
    params = {"w": W, "b": jnp.ones(3)}
    batched = jedbatch.batch(lambda p, n: combine(p, p["b"], n)[0])
    batched.plan(params, [1.0, 2.0])
    recorders.clear()
    gc.collect()
    gc.disable()
    try:
        batched.plan(params, [3.0, 4.0])
        assert len(recorders) == 2
        assert [ref() for ref in recorders] == [None, None]
    finally:
        gc.enable()


@compiled
def test_errors_of_cells_and_interrupts_pass_through():
    class Interrupt(BaseException):
        pass

    def fn(params, number):
        h = combine(params, number * jnp.ones(3), number)[0]
        if number > 2:
            raise Interrupt
        return combine(params, h, [number])[0] if number > 1 else h

    params = {"w": W}
    batched = jedbatch.batch(fn)
    assert batched(params, [0.5, 1.0]).shape == (2, 3)
    with pytest.raises(TypeError, match="list"):
        batched(params, [0.5, 1.5])
    with pytest.raises(Interrupt):
        batched(params, [0.5, 2.5])
    assert batched(params, [0.25, 1.0]).shape == (2, 3)


@compiled
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_call_that_fails_leaves_nothing_behind(monkeypatch, error):
    """The function may catch the error and go on."""

    def fn(params, x):
        h = combine(params, x, x)[0]
        h = combine(params, h, jnp.full(3, 2.0))[0]  # an input from now on
        failing.append(True)
        for computed in (jnp.full(3, 3.0), jnp.full(3, 4.0)):
            try:
                h = combine(params, h, computed)[0]
            except RuntimeError:
                h = combine(params, h, x)[0]
        return h

    def symbol(self, x):
        if failing and x is not None and type(x).__name__ == "ArrayImpl":
            failing.pop()
            raise error("no more inputs")
        return of_recorder(self, x)

    of_recorder, failing = Recorder.symbol, []
    monkeypatch.setattr(Recorder, "symbol", symbol)
    x = np.ones(3, np.float32)

    def plan():
        failing.clear()
        return columns(jedbatch.batch(fn).plan({"w": W}, [x, 2 * x]))

    assert_equal(*both(monkeypatch, plan))


@pytest.mark.usefixtures("older_frozen")
@compiled
def test_recorders_are_released(monkeypatch):
    recorders = []
    init = Recorder.__init__

    def noting(self, *args, **kwargs):
        init(self, *args, **kwargs)
        recorders.append(weakref.ref(self))

    monkeypatch.setattr(Recorder, "__init__", noting)
    params = {"w": W, "b": jnp.ones(3)}
    vector = np.ones(3, np.float32)
    batched = jedbatch.batch(every_argument, in_axes=(None, 0, 0), out_axes=None)
    for i in range(3):
        batched.plan(params, [float(i)], [vector])
    gc.collect()
    assert len(recorders) >= 3
    assert not [r for r in recorders if r() is not None]
    kinds = {f"{type(x).__module__}.{type(x).__name__}" for x in gc.get_objects()}
    assert "jedbatch._support.native_core.FastPath" not in kinds
