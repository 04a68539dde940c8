"""Whether Python asks what a number is, which is an operand while a cell is traced.

Code that decides on the value of an operand is an error of JAX. Code that asks for its type, as in
`isinstance(t, float) and t == 0.5`, is none, but does something else than with a number. So what
runs while a cell is traced is looked at, wherever it comes from: functions, methods, properties.
"""

import contextlib
import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.core import Tracer

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

FINDS = frozenset({"BINARY_SUBSCR", "BUILD_SET", "CONTAINS_OP", "IS_OP", "SET_ADD"})
CONSTANT = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})


class Asked(NamedTuple):
    """Whether Python code asked what operands are, or may have.

    Attributes:
      anything: for their types, or in another way.
      identity: which objects hold them.
    """

    anything: bool
    identity: bool


@contextlib.contextmanager
def noting_whether_it_asks(found: list[Asked], has_identity: bool = False) -> Iterator[None]:
    """Adds to a list at the end whether Python code of the user inside asked, or may have.

    If what it holds `has_identity`, it may ask for that, too: a copy is another object.

    It may have where a profiler is at work, which takes the place that this needs.
    """
    around = sys.getprofile()
    if not (around is None or getattr(around, "__module__", None) == __name__):
        yield
        found.append(Asked(True, has_identity))
        return
    asked = finds = False

    def note(frame: types.FrameType, event: Any, arg: Any) -> None:
        nonlocal asked, finds
        if event == "call":
            asked = asked or _asks(frame)
            finds = finds or (has_identity and _finds(frame))
        if around is not None:
            around(frame, event, arg)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(around)
        found.append(Asked(asked or finds, finds))


def _asks(frame: types.FrameType) -> bool:
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


def _finds(frame: types.FrameType) -> bool:
    """Returns whether a call that begins may ask which object something is."""
    is_of_user = not is_installed(frame.f_globals.get("__name__", ""))
    return is_of_user and _may_find(frame.f_code)


@functools.lru_cache(maxsize=4096)
def _may_find(code: types.CodeType) -> bool:
    """Returns whether code compares objects by identity or looks one up, in all but constants."""
    operations = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
    for before, operation in itertools.pairwise(operations):
        if _is_finding(operation) and before.opname not in CONSTANT:
            return True
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return not FINDING.isdisjoint(code_names(code)) or any(map(_may_find, inner))


def _is_finding(operation: dis.Instruction) -> bool:
    """Returns whether an operation finds an object; objects are equal to themselves alone."""
    if operation.opname == "COMPARE_OP":
        return "==" in operation.argrepr or "!=" in operation.argrepr
    # From Python 3.14 on to look something up is one of the binary operators.
    return operation.opname in FINDS or operation.argrepr == "[]"
