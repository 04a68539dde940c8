"""Call sites: paths of frames, on plain functions of Python."""

import dis
import types

import pytest

from jedbatch._record.identity.assumptions import Assumptions
from jedbatch._record.passes import call_sites
from jedbatch._support.frames import RECORDS_CALLS

OUTER = {"__name__": "jedbatch._outermost", RECORDS_CALLS: True}
exec("def outermost(fn, *args):\n    return fn(*args)", OUTER)


def sites_of(fn, *args, again=1):
    """Returns what `fn` lists in its first argument, called under a function that records calls."""
    sites, found = call_sites.Sites(Assumptions()), []

    def note():
        found.append(sites.here()[0])

    for _ in range(again):
        found.clear()
        OUTER["outermost"](fn, note, *args)
    return sites, found


def in_a_loop(note, n):
    for _ in range(n):
        note()
        note()


def test_every_call_of_the_program_is_a_site():
    _, found = sites_of(in_a_loop, 3)
    assert found == [0, 1] * 3


def helper(note):
    note()


def by_two_calls(note):
    helper(note)
    helper(note)
    sorted([0], key=lambda _: helper(note))


def test_sites_tell_the_callers_apart():
    _, found = sites_of(by_two_calls)
    assert len(set(found)) == 3


def recursive(note, depth):
    if depth:
        recursive(note, depth - 1)
        recursive(note, depth - 1)
    note()


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_levels_of_a_recursion_share_sites(depth):
    """Once it is known which function recurs, one path leads from it to the operation."""
    sites, found = sites_of(recursive, depth)
    assert len(found) == 2 ** (depth + 1) - 1
    assert len(set(found)) > 1
    assert sites._assumptions.version("recursion") == 1
    found.clear()
    OUTER["outermost"](recursive, lambda: found.append(sites.here()[0]), depth)
    assert len(set(found)) == 1
    assert sites._assumptions.version("recursion") == 1


def test_paths_end_somewhere(monkeypatch):
    monkeypatch.setattr(call_sites, "MAX_FRAMES", 4)

    def nested(note, depth):
        note() if not depth else (lambda: nested(note, depth - 1))()

    sites, found = sites_of(nested, 3)
    assert len(found) == 1
    assert len(sites._paths[found[0]]) <= 2 * 4


def test_the_outermost_call_is_recognized():
    """Whether a function is still in the same call, not only at the same place."""
    sites, same = call_sites.Sites(Assumptions()), []
    note = lambda: same.append(sites.here()[1])  # noqa: E731
    OUTER["outermost"](in_a_loop, note, 2)
    OUTER["outermost"](in_a_loop, note, 1)
    assert same == [False, True, True, True, False, True]


def test_going_on_and_going_back():
    sites, (first, second, *_) = sites_of(in_a_loop, 1)
    assert sites.onward(first, second)
    assert not sites.onward(second, first)
    assert not sites.onward(first, first)


def by_two_functions(note):
    helper(note)
    in_a_loop(note, 1)


def test_blocks_are_named_after_the_innermost_function_of_all_sites():
    sites, (first, *others) = sites_of(by_two_functions)
    assert sites.function([first]).co_name == sites.function(others).co_name == "note"
    assert sites.function([first, *others]) is by_two_functions.__code__
    assert sites.function([]) is None


def test_functions_of_libraries_do_not_recur_for_the_user():
    """The user's function is met once, whatever a library calls on its behalf."""
    library = types.ModuleType("jax.somewhere")
    exec("def call(fn, n):\n    return call(fn, n - 1) if n else fn()", vars(library))
    _, found = sites_of(lambda note, n: library.call(note, n), 3)
    sites, more = sites_of(lambda note, n: library.call(note, n), 5)
    assert len(found) == len(more) == 1
    assert sites._assumptions.version("recursion") == 0


def test_instructions_are_known_by_their_beginning():
    """Where Python says it is may be the end of an instruction that it has specialised."""
    sites, _ = sites_of(in_a_loop, 1)
    code = next(c for c in sites._codes.values() if c is in_a_loop.__code__)
    starts = {sites._instruction(id(code), last) for last in range(len(code.co_code))}
    assert starts == {i.offset for i in dis.get_instructions(code)}


def test_many_calls_make_no_new_sites():
    """Also when the interpreter has specialised the function."""
    sites, _ = sites_of(in_a_loop, 3, again=40)
    assert len(sites._paths) == 2


def by_children(note, depth):
    """Calls a function at each node of a tree."""
    helper(note)
    for _ in range(2 if depth else 0):
        by_children(note, depth - 1)


def inline(note, depth):
    if depth:
        inline(note, depth - 1)
        for _ in range(2):
            in_a_loop(note, 1)


def in_rounds(note):
    for _ in range(2):
        by_two_calls(note)


def units(fn, *args):
    """Returns the units of all sites; what lists them is a function of the user, too."""
    sites, found = sites_of(fn, *args, again=2)
    return {(unit.name, unit.is_whole) for unit in map(sites.unit, found)}


def test_units_are_called_by_what_recurs_or_loops():
    assert units(by_children, 2) == {("helper", False)}
    assert units(inline, 2) == {("in_a_loop", False)}
    assert units(in_rounds) == {("by_two_calls", False)}
    assert units(in_a_loop, 2) == {("note", False)}
    assert units(lambda note: in_rounds(note)) == {("by_two_calls", False)}


def test_units_are_whole_where_there_is_no_function_for_a_step():
    sites = call_sites.Sites(Assumptions())
    found = []
    exec("def loop(sites, found):\n  for _ in range(2): found.append(sites.here()[0])", names := {})
    OUTER["outermost"](names["loop"], sites, found)
    assert [sites.unit(site) for site in found] == [("loop", "<string>:1", True)] * 2
