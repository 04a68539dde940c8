"""An interrupt may come between any two lines; what comes after it is as if it had not been."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases.interrupts import PROGRAMS, changed, points_of, wrong_after

import jedbatch
from jedbatch._support.restored import Restored

PACKAGE = Path(jedbatch.__file__).parent
# What is changed and has to be put back, and what gives out numbers.
FILES = {"_record/types/registry.py", "_support/restored.py", "_record/run/trace.py"}

SAMPLE = 8  # points of a program
P = {"w": jnp.ones(2)}
CONSTANT = jnp.full(2, 3.0)
step = jedbatch.cell(lambda w, h, x: (h * w + x, h), name="step")


def fn(p, t):
    """A cell, an operation, a constant and something that is computed once per minibatch."""
    if not isinstance(t, tuple):
        return p["w"] * t
    state = step(p["w"], fn(p, t[0]), fn(p, t[1]))
    return state[0] * CONSTANT + (p["w"] + 1)


TREES = [(1.0, np.ones(2, np.float32)), 2.0]


def recorded(batched):
    """Returns the types, operands and outputs of the graph of the trees."""
    graph = batched.graph(P, TREES)
    names = [str(graph.types[t]) for t in graph.node_type.tolist()]
    return names, graph.operand.tolist(), graph.outputs.tolist()


def run_until(call, place):
    """Calls a function and interrupts it where it comes to a line; returns lines it came to."""
    lines = {}
    names = {str(PACKAGE / name) for name in FILES}

    def in_function(frame, event, _):
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            lines[line] = None
            if line == place:
                raise KeyboardInterrupt
        return in_function

    def trace(frame, *_):
        return in_function if frame.f_code.co_filename in names else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert place in lines
    else:
        assert place not in lines, f"the interrupt at {place} was lost"
    finally:
        sys.settrace(before)
    return list(lines)


def test_interrupts_anywhere_in_recording():
    """At every line that changes what has to be put back, or that gives out numbers."""
    expected = recorded(jedbatch.batch(fn))
    lines = run_until(lambda: recorded(jedbatch.batch(fn)), None)
    assert len(lines) > 100
    for line in lines:
        batched = jedbatch.batch(fn)
        run_until(lambda batched=batched: recorded(batched), line)
        assert not changed(), line
        assert recorded(batched) == expected, line


@pytest.mark.parametrize("name", PROGRAMS)
def test_interrupts_at_some_lines_of_all_modules(name):
    """A fixed sample; `tests/cases/interrupts.py` tries all of them."""
    call = PROGRAMS[name]()
    expected = call()
    points = points_of(name)
    for point in points[:: len(points) // SAMPLE]:
        assert not wrong_after(call, expected, point), point


def test_interrupts_anywhere_in_a_lazy_scope():
    def scope():
        with jedbatch.lazy():
            fn(P, TREES[0])  # nobody holds it, so nothing is computed

    scope()
    for line in run_until(scope, None):
        run_until(scope, line)
        assert not changed(), line
    with jedbatch.lazy():
        h = step(P["w"], P["w"], P["w"])[0]
    np.testing.assert_array_equal(h, np.full(2, 2.0))


def test_an_interrupt_that_a_decision_meets():
    """It is not taken for what stops a function that decides on values."""

    def decides(p, x):
        try:
            return x if x.sum() > 0 else -x
        except BaseException:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        jedbatch.batch(decides)(P["w"], [np.ones(2, np.float32)])
    assert not changed()


def test_restoring_once_more():
    """One that is interrupted leaves it to the other."""
    calls = []

    def restore():
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Restored(restore), Restored(restore):
        pass
    assert calls == [0, 1]
