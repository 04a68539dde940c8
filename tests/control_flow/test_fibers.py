"""Instances that take turns, without anything to compute."""

import contextvars
import functools
import weakref

import greenlet
import pytest

from jedbatch._control_flow.fibers import MAX_PARKED, MAX_STOPS, Fibers


def run_all(fibers):
    """Lets all go on until everybody waits, again and again; returns whose turns they were."""
    rounds = []
    while True:
        turns = list(fibers.turns())
        if turns:
            rounds.append(turns)
        if not fibers.waiting:
            return rounds
        fibers.resume()


@pytest.mark.parametrize("steps", [[], [0], [2, 0, 1], [3, 3, 3]])
def test_everybody_has_as_many_turns_as_he_waits_and_one_more(steps):
    done = []

    def run(i):
        for k in range(steps[i]):
            fibers.wait((i, k))
        done.append(i)

    fibers = Fibers(run, len(steps))
    expected = [
        [i for i, n in enumerate(steps) if n >= k] for k in range(max(steps, default=-1) + 1)
    ]
    assert run_all(fibers) == expected
    assert sorted(done) == list(range(len(steps)))


def test_reasons_are_those_of_who_waits():
    fibers = Fibers(lambda i: fibers.wait(f"reason {i}") if i else None, 3)
    list(fibers.turns())
    assert set(fibers.waiting.values()) == {"reason 1", "reason 2"}
    fibers.resume()
    assert not fibers.waiting
    list(fibers.turns())
    assert not fibers.waiting


def test_parts_take_turns_and_return_in_their_order():
    order = []

    def part(name, times):
        def run():
            for _ in range(times):
                order.append(name)
                fibers.wait(name)
            return name

        return run

    found = []

    def run(i):
        found.append(fibers.together([part("a", 2), part("b", 1)]) if i == 0 else i)

    fibers = Fibers(run, 2)
    run_all(fibers)
    assert order == ["a", "b", "a"]
    assert found == [1, ["a", "b"]]


def test_no_parts():
    found = []
    fibers = Fibers(lambda i: found.append(fibers.together([])), 1)
    run_all(fibers)
    assert found == [[]]


def test_the_error_of_the_first_part_is_raised_when_all_are_done():
    ended = []

    def failing():
        fibers.wait(None)
        raise KeyError("first")

    def other():
        fibers.wait(None)
        fibers.wait(None)
        ended.append("other")
        raise KeyError("second")

    fibers = Fibers(lambda i: fibers.together([failing, other]), 1)
    with pytest.raises(KeyError, match="first") as caught:
        run_all(fibers)
    assert ended == ["other"]
    (note,) = caught.value.__notes__
    assert note.startswith(f"This happened at {__file__}:")
    assert note.endswith(" in instance 0.")


def test_an_error_names_its_instance():
    def run(i):
        fibers.wait(i)
        if i == 1:
            raise ValueError("odd")

    fibers = Fibers(run, 3)
    list(fibers.turns())
    fibers.resume()
    with pytest.raises(ValueError, match="odd") as caught:
        list(fibers.turns())
    (note,) = caught.value.__notes__
    assert note.startswith(f"This happened at {__file__}:")
    assert note.endswith(" in instance 1.")
    assert fibers.current == 1
    assert not fibers.close()


def test_context_variables_are_those_of_the_caller():
    variable = contextvars.ContextVar("variable", default=0)
    seen = {}

    def run(i):
        before = variable.get()
        variable.set(i + 10)
        fibers.wait(None)
        seen[i] = before, variable.get()

    variable.set(5)
    fibers = Fibers(run, 2)
    run_all(fibers)
    assert seen == {0: (5, 10), 1: (5, 11)}
    assert variable.get() == 5


def test_who_is_stopped_cleans_up():
    cleaned = []

    def run(i):
        try:
            fibers.wait(None)
        finally:
            cleaned.append(i)
            if i == 1:
                raise OSError("while cleaning up")

    fibers = Fibers(run, 3)
    list(fibers.turns())
    (error,) = fibers.close()
    assert cleaned == [0, 1, 2]
    assert str(error) == "while cleaning up"
    assert not fibers.waiting
    assert not list(fibers.turns())


@pytest.mark.parametrize("times", [1, MAX_STOPS - 1])
def test_who_catches_everything_is_told_again(times):
    told = []

    def run(i):
        while len(told) < times:
            try:
                fibers.wait(None)
            except BaseException:
                told.append(i)

    fibers = Fibers(run, 1)
    list(fibers.turns())
    assert not fibers.close()
    assert len(told) == times


def test_one_instance_is_ended_and_the_others_go_on():
    done, cleaned = [], []

    def part(i, k):
        try:
            fibers.wait((i, k))
        finally:
            cleaned.append((i, k))

    def run(i):
        try:
            fibers.together([functools.partial(part, i, k) for k in range(2)])
            done.append(i)
        finally:
            cleaned.append(i)

    fibers = Fibers(run, 3)
    list(fibers.turns())
    fibers.add(functools.partial(run, 3), 3)  # has not begun
    assert not fibers.close(1)
    assert not fibers.close(3)
    assert set(cleaned) == {1, (1, 0), (1, 1)}
    assert sorted(fibers.waiting.values()) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    run_all(fibers)
    assert sorted(done) == [0, 2]
    assert not fibers.close()


# --- greenlets that are used again ---


def test_greenlets_of_those_who_are_done_serve_others():
    ran, parked = [], []

    def serve(count, failing=None):
        def run(i):
            ran.append(greenlet.getcurrent())
            fibers.wait(i)
            if i == failing:
                raise ValueError("odd")

        fibers = Fibers(run, count, parked)
        try:
            run_all(fibers)
        finally:
            fibers.close()

    serve(3)
    assert set(parked) == set(ran) == set(ran[:3])
    serve(2)
    assert set(parked) == set(ran) == set(ran[:3])
    with pytest.raises(ValueError, match="odd"):
        serve(4, failing=1)
    assert set(parked) <= set(ran[:3])  # others were stopped
    assert len(parked) == 1
    serve(MAX_PARKED + 2)
    assert len(parked) == MAX_PARKED


def test_parked_greenlets_hold_nothing_and_begin_in_the_context_of_their_caller():
    class Thing:
        pass

    variable, parked, seen = contextvars.ContextVar("variable", default=0), [], []

    def call():
        def run(i, thing):
            seen.append((i, variable.get()))
            variable.set(7)

        thing = Thing()
        run_all(Fibers(functools.partial(run, thing=thing), 1, parked))
        return weakref.ref(thing)

    assert call()() is None  # with a greenlet that begins
    variable.set(5)
    assert call()() is None  # with one that was parked
    assert seen == [(0, 0), (0, 5)]
    assert variable.get() == 5


def test_one_who_is_run_in_a_fibre_may_use_parked_greenlets():
    parked, order = [], []

    def outer(i):
        run_all(Fibers(lambda k: order.append((i, k)), 2, parked))

    run_all(Fibers(lambda i: None, 3, parked))
    run_all(Fibers(outer, 2, parked))
    run_all(Fibers(outer, 2, parked))
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2


def test_those_who_have_not_begun_are_let_go():
    parked = []
    run_all(Fibers(lambda i: None, 2, parked))

    def run(i):
        raise ValueError("at once")

    fibers = Fibers(run, 3, parked)
    with pytest.raises(ValueError, match="at once"):
        list(fibers.turns())
    assert not fibers.close()
    ended = []
    run_all(Fibers(ended.append, 2, parked))
    assert ended == [0, 1]


def test_greenlets_that_began_deep_in_a_recursion_are_not_used_where_there_is_more_room():
    parked, begun, deepest = [], [], []

    def recurse(depth, then):
        return then() if depth == 0 else recurse(depth - 1, then)

    def run(i):
        begun.append(greenlet.getcurrent())

    def recursing(i):
        recurse(600, lambda: deepest.append(i))

    recurse(500, lambda: run_all(Fibers(run, 2, parked)))
    recurse(600, lambda: run_all(Fibers(run, 2, parked)))
    assert set(begun[2:]) == set(begun[:2]) == set(parked)
    run_all(Fibers(recursing, 3, parked))
    assert deepest == [0, 1, 2]
    assert set(begun).isdisjoint(parked)

    def inner(i):
        run_all(Fibers(run, 4, parked))

    parked.clear()
    recurse(500, lambda: run_all(Fibers(inner, 1, parked)))  # the frames before it count as well
    run_all(Fibers(recursing, 5, parked))
    assert deepest == [0, 1, 2, 0, 1, 2, 3, 4]
