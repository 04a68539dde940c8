"""Whether Python asks what something is that another object stands for: its type, or its identity.

Code that decides on the value of an operand is an error of JAX. Code that asks for its type, as in
`isinstance(t, float) and t == 0.5`, is none, but does something else than with a number. And code
that looks an object up does not find a copy of it. So what runs while an instance is recorded, or a
cell is traced, is looked at, wherever it comes from: functions, methods, properties.
"""

import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from jax.core import Tracer

from jedbatch._record.identity.function_leaves import code_of
from jedbatch._record.identity.functions import code_names, is_installed

ASKING = frozenset(
    {
        "__class__",
        "callable",
        "getattr",
        "hasattr",
        "iscomplexobj",
        "isinstance",
        "isrealobj",
        "isscalar",
        "issubclass",
        "suppress",  # errors, see below
        "type",
    }
)

# What tells by identity where something is in a container, or which object it is.
FINDING = frozenset(
    {
        "count",
        "frozenset",
        "fromkeys",
        "get",
        "hash",
        "id",
        "index",
        "is_",
        "is_not",
        "isdisjoint",
        "issubset",
        "issuperset",
        "pop",
        "set",
        "setdefault",
    }
)

CAUGHT, LEFT_BY_ERROR = dis.opmap["PUSH_EXC_INFO"], dis.opmap["WITH_EXCEPT_START"]

FINDS = frozenset({"BUILD_SET", "CONTAINS_OP", "IS_OP", "SET_ADD"})
CONSTANT = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})


@contextlib.contextmanager
def noting_calls(found: list[bool], asks: Callable[[types.FrameType], bool]) -> Iterator[None]:
    """Adds to a list at the end whether a call of Python code inside is one that `asks`.

    Where a profiler is at work, which takes the place that this needs, one may be.
    """
    around = sys.getprofile()
    if not (around is None or getattr(around, "__module__", None) == __name__):
        yield
        found.append(True)
        return
    has_asked = False

    def note(frame: types.FrameType, event: Any, arg: Any) -> None:
        nonlocal has_asked
        if event == "call":
            has_asked = has_asked or asks(frame)
        if around is not None:
            around(frame, event, arg)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(around)
        found.append(has_asked)


def asks_types(frame: types.FrameType) -> bool:
    """Returns whether a call that begins may ask what an operand is: its type, or how it is spelt.

    Code that catches errors may, too: those of deciding on a value. So may the end of a `with`
    statement, where it is the user's own.
    """
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    if code is Tracer.__repr__.__code__:
        return True
    if not is_installed(module):
        return _may_ask(code)
    if module == "functools" and "singledispatch" in code.co_qualname and frame.f_back is not None:
        return not is_installed(frame.f_back.f_globals.get("__name__", ""))
    return False


@functools.lru_cache(maxsize=4096)
def _may_ask(code: types.CodeType) -> bool:
    """Returns whether code, or code of functions that are made in it, asks or catches errors."""
    operations = code.co_code[::2]
    names_classes = dis.opmap["MATCH_CLASS"] in operations  # of a `case` statement
    # A `with` statement hands errors on, and in Python 3.12 list comprehensions do.
    pairs = itertools.pairwise(operations)
    catches = any(a == CAUGHT and b != LEFT_BY_ERROR for a, b in pairs)
    if names_classes or catches or code.co_name == "__exit__":
        return True
    if not ASKING.isdisjoint(code_names(code)):
        return True
    return any(_may_ask(c) for c in code.co_consts if isinstance(c, types.CodeType))


def finds_objects(fn: Callable) -> Callable[[types.FrameType], bool]:
    """Returns what says of a call that begins whether it may ask which object something is.

    An object that a function holds is none of its own arguments.
    """
    given: dict[types.CodeType | None, frozenset[str]] = {}
    with contextlib.suppress(TypeError, ValueError):  # it is no Python function
        parameters = inspect.signature(fn).parameters.values()
        given[code_of(fn)] = frozenset([x.name for x in parameters if x.default is x.empty])

    def asks(frame: types.FrameType) -> bool:
        names = given.pop(frame.f_code, frozenset())  # once, as it may call itself with others
        is_of_user = not is_installed(frame.f_globals.get("__name__", ""))
        return is_of_user and _may_find(frame.f_code, names)

    return asks


@functools.lru_cache(maxsize=4096)
def _may_find(code: types.CodeType, given: frozenset[str]) -> bool:
    """Returns whether code compares objects by identity or looks one up.

    Constants are none, nor are slices or variables that are `given` where something is indexed.
    """
    operations = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
    stored = (_variables(x) for x in operations if x.opname.startswith("STORE_FAST"))
    given = given.difference(*stored)
    for before, operation in itertools.pairwise(operations):
        # From Python 3.14 on to look something up is one of the binary operators.
        indexes = operation.opname == "BINARY_SUBSCR" or operation.argrepr == "[]"
        is_loaded = before.opname.startswith("LOAD_FAST") and _variables(before)[-1] in given
        is_index = before.opname == "BUILD_SLICE" or is_loaded
        if before.opname in CONSTANT or (indexes and is_index and not operation.is_jump_target):
            continue
        if indexes or _is_finding(operation):
            return True
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return not FINDING.isdisjoint(code_names(code)) or any(_may_find(c, frozenset()) for c in inner)


def _variables(operation: dis.Instruction) -> tuple[str, ...]:
    """Returns the local variables of an operation; some of Python 3.13 have two."""
    return operation.argval if isinstance(operation.argval, tuple) else (operation.argval,)


def _is_finding(operation: dis.Instruction) -> bool:
    """Returns whether an operation finds an object; objects are equal to themselves alone."""
    if operation.opname == "COMPARE_OP":
        return "==" in operation.argrepr or "!=" in operation.argrepr
    return operation.opname in FINDS
