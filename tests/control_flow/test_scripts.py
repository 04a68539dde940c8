"""Steps that are told apart, compiled and in Python, and scripts of steps that were foreseen."""

from types import SimpleNamespace

import numpy as np
import pytest

from jedbatch._control_flow.scripts import (
    COUNTS_ON,
    STAYS,
    WAS_READ,
    ForeseenNumber,
    Script,
    same_number,
)
from jedbatch._control_flow.steps import Steps
from jedbatch._support import native

NUMBERS = [
    (1, 1, True),
    (1, 1.0, False),
    (1, True, False),
    (0.0, -0.0, False),
    (2.5, 2.5, True),
    (1, 2, False),
    (np.ones(2), np.ones(2), False),
    (float("nan"), float("nan"), False),
]


@pytest.mark.parametrize(("a", "b", "same"), NUMBERS)
def test_same_number(a, b, same):
    assert same_number(a, b) == same
    assert same_number(a, a)


def nothing_recorded(compiled):
    """Stands for the recorder of an instance, in lists of the compiled core if there is one."""
    ints = list if compiled is None else compiled.Ints
    return SimpleNamespace(
        call_specs=ints(), references=ints(), input_group=ints(), counter=ints([0]), input_value=[]
    )


def read_in_turn(numbers, brought, bound=None):
    """Returns what a script says at the ends of steps that bring numbers, up to the first other."""
    recorder = nothing_recorded(native.core())
    steps = Steps(recorder, 2)
    rows = np.array([3, 70, 5, 71, 7, 72, 9, 73, 11, 74], np.int32)
    script = Script(rows[:8:2], numbers, bound, recorder.input_value)
    steps.begin(1)
    found = []
    for k, number in enumerate(brought):
        if k == 2:
            script.begin(steps.table[1])
        recorder.call_specs += [4]
        recorder.references += [-1 - k]
        recorder.input_group += [6]
        recorder.input_value.append(number)
        recorder.counter[0] = 2 * k + 2
        same = steps.follow(1, 2 * k + 1)
        if k >= 2:
            assert same
            found.append(script.next_value())
            if found[-1] is None:
                break
    return found, script.done, steps.table.tolist()


LIKE = {
    "stays": ([(0, STAYS, 1.5, 0)], [1.5, 1.5, 1.5, 1.5, 1.5, 1.5], None, 3),
    "another": ([(0, STAYS, 1.5, 0)], [1.5, 1.5, 1.5, 2.5, 1.5], None, 1),
    "of another type": ([(0, STAYS, 1, 0)], [1, 1, 1, 1.0], None, 1),
    "another zero": ([(0, STAYS, 0.0, 0)], [0.0, 0.0, 0.0, -0.0], None, 1),
    "counts": ([(0, COUNTS_ON, 8, -3)], [14, 11, 8 - 3, 8 - 6, 8 - 9], None, 3),
    "counts otherwise": ([(0, COUNTS_ON, 8, -3)], [14, 11, 5, 3], None, 1),
    "counts below": ([(0, COUNTS_ON, 4, -3)], [10, 7, 1, -2], 9, 1),
    "counts above": ([(0, COUNTS_ON, 4, 2)], [0, 2, 6, 8, 10], 9, 2),
    "was read": ([(0, WAS_READ, 3, 0)], [0, 3, 3, 5, 7], None, 3),
    "was read as a float": ([(0, WAS_READ, 3.0, 0)], [0.0, 3.0, 3.0, 5.0, 6.0], None, 2),
    "was read, and is no row": ([(0, WAS_READ, 3, 0)], [0, 3, 3, 5, 7], 6, 2),
    "was read, and is an array": ([(0, WAS_READ, 3, 0)], [0, 3, 3, np.ones(2)], None, 1),
    "a large number": ([(0, STAYS, 1 << 70, 0)], [1 << 70] * 4, None, 2),
    "too large": ([(0, WAS_READ, 3, 0)], [0, 3, 3, 1 << 70], 1 << 40, 1),
    "none": ([], [1, 2, 3, 4, 5, 6, 7], None, 3),
}


@pytest.mark.parametrize("name", LIKE)
def test_scripts_end_with_the_first_other_number(name, monkeypatch):
    numbers, brought, bound, done = LIKE[name]
    numbers = [ForeseenNumber(*x) for x in numbers]
    found = read_in_turn(numbers, brought, bound)
    values = [3, 5, 7, 9, 11][1 : 1 + done]
    assert [None if x is None else int(x) for x in found[0]] == [*values, None][: len(found[0])]
    assert found[1] == done
    monkeypatch.setenv(native.SWITCH, "0")
    assert read_in_turn(numbers, brought, bound) == found


STEP = {"calls": [3, 4, 3, 4, 3, 4], "references": [9, 0, 1, 0, 10, 2, 11, 2, 12, 4, 13, 4]}
CHANGES = {
    "nothing": {},
    "a call": {"calls": [3, 4, 3, 4, 3, 3]},
    "a value of the step before": {"references": [9, 0, 1, 0, 10, 2, 11, 2, 12, 5, 13, 4]},
    "a value that moves on no more": {"references": [9, 0, 1, 0, 10, 2, 11, 0, 12, 4, 13, 0]},
    "an older value": {"references": [9, 0, 1, 0, 10, 2, 11, 2, 12, 4, 13, 2]},
    "a group": {"groups": [0, 0, 1]},
    "what is asked": {"value": 4},
    "more calls": {"calls": [3, 4, 3, 4, 3, 4, 3]},
    "more references": {"references": [9, 0, 1, 0, 10, 2, 11, 2, 12, 4, 13, 4, 4]},
    "more inputs": {"groups": [0, 0, 0, 0]},
}


def followed(calls, references, groups=(0, 0, 0), value=5):
    """Returns the answers about three steps of two calls, the last of which is as given."""
    recorder = nothing_recorded(native.core())
    steps, found = Steps(recorder, 1), []
    steps.begin(0)
    for k in range(3):
        begin, end = (2 * k, 2 * k + 2) if k < 2 else (4, None)
        recorder.call_specs += calls[begin:end]
        recorder.references += references[2 * begin : end and 2 * end]
        recorder.input_group += groups[k : k + 1 if k < 2 else None]
        recorder.counter[0] = 2 * k + 2
        found.append(steps.follow(0, value if k == 2 else 2 * k + 1))
    return found, steps.table.tolist()


@pytest.mark.parametrize("name", CHANGES)
def test_steps_that_differ_are_told_apart(name, monkeypatch):
    given = STEP | CHANGES[name]
    found, table = followed(**given)
    assert found[0] is False
    assert found[2] == (name == "nothing")
    monkeypatch.setenv(native.SWITCH, "0")
    assert followed(**given) == (found, table)
