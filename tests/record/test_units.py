"""Units: the functions that would be cells, on plain functions of Python."""

import types

import pytest

from jedbatch._record.run import units
from jedbatch._support.frames import RECORDS_CALLS

OUTER = {"__name__": "jedbatch._outermost", RECORDS_CALLS: True}
exec("def outermost(fn, *args):\n    return fn(*args)", OUTER)


def counted(fn, *args):
    """(name, whether it is whole) of units that `fn` performs operations in, and how many."""
    found = units.Units()
    OUTER["outermost"](fn, found.note, *args)
    return {(unit.name, unit.is_whole): n for unit, n in found.counts.items()}


def step(note):
    note()
    helper(note)


def helper(note):
    note()


def loop(note, rounds):
    for _ in range(rounds):
        step(note)


def straight(note):
    step(note)
    helper(note)


def inline(note, rounds):
    for _ in range(rounds):
        note()


def recursive(note, depth):
    if depth:
        recursive(note, depth - 1)
        recursive(note, depth - 1)
        step(note)


def recursive_inline(note, depth):
    if depth:
        recursive_inline(note, depth - 1)
        recursive_inline(note, depth - 1)
    note()


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (loop, (3,), {("step", False): 6}),
        (straight, (), {("step", False): 2, ("helper", False): 1}),
        (inline, (2,), {("inline", True): 2}),
        (recursive, (3,), {("step", False): 14}),
        (recursive_inline, (2,), {("recursive_inline", True): 7}),
    ],
)
def test_units_are_what_loops_and_recursions_call(fn, args, expected):
    """Where they call nothing, it is the whole function."""
    assert counted(fn, *args) == expected


def test_functions_of_libraries_do_not_recur_for_the_user():
    library = types.ModuleType("jax.somewhere")
    exec("def call(fn, n):\n    return call(fn, n - 1) if n else fn()", vars(library))

    def user(note):
        library.call(note, 3)

    assert counted(user) == {("user", True): 1}


def test_few_frames_are_looked_at(monkeypatch):
    monkeypatch.setattr(units, "MAX_FRAMES", 4)

    def nested(note, depth):
        note() if not depth else nested(note, depth - 1)

    assert counted(nested, 50) == {("nested", True): 1}
