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

from jax.core import Tracer

from jedbatch._record.closures import code_names, is_installed

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
FINDING = frozenset({"count", "get", "hash", "id", "index", "pop", "setdefault"})

CAUGHT, LEFT_BY_ERROR = dis.opmap["PUSH_EXC_INFO"], dis.opmap["WITH_EXCEPT_START"]

EXTENDED = dis.opmap["EXTENDED_ARG"]
FINDS = frozenset(dis.opmap[x] for x in ("IS_OP", "CONTAINS_OP", "BINARY_SUBSCR"))


@contextlib.contextmanager
def noting_whether_it_asks(found: list[bool], has_identity: bool = False) -> Iterator[None]:
    """Adds to a list at the end whether Python code of the user inside asked, or may have.

    If what it holds `has_identity`, it may ask for that, too: a copy is another object.

    It may have where a profiler is at work, which takes the place that this needs.
    """
    if sys.getprofile() is not None:
        yield
        found.append(True)
        return
    asked = False

    def note(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal asked
        asked = asked or (event == "call" and _asks(frame, has_identity))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        found.append(asked)


def _asks(frame: types.FrameType, has_identity: bool) -> bool:
    """Returns whether a call that begins may ask what an operand is: its type, or how it is spelt.

    Code that catches errors may, too: those of deciding on a value. So may the end of a `with`
    statement, where it is the user's own.
    """
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    if code.co_name == "__repr__" and isinstance(frame.f_locals.get("self"), Tracer):
        return True
    if not is_installed(module):
        return _may_ask(code) or (has_identity and _may_find(code))
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


@functools.lru_cache(maxsize=4096)
def _may_find(code: types.CodeType) -> bool:
    """Returns whether code compares objects by identity or looks one up, in all but constants."""
    operations = [x for x in code.co_code[::2] if x not in (dis.opmap["CACHE"], EXTENDED)]
    for before, operation in itertools.pairwise(operations):
        if operation in FINDS and before != dis.opmap["LOAD_CONST"]:
            return True
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return not FINDING.isdisjoint(code_names(code)) or any(map(_may_find, inner))
