"""Values that the program of a cell reads and that its identity does not show.

Two calls of a cell are the same if its identity is, so it must show all that the cell reads. It
does not show what a cell finds in a context: libraries keep the parameters of a module in a stack
of dicts, in which a layer looks up its weights by name while the function that has put them there
is running. For shared values this is an error that says what to write. A cell that reads an array
which is found nowhere else is traced at every call.
"""

import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jedbatch._jaxpr.identity import Same, attribute_names
from jedbatch._jaxpr.versions import ClosedProgram
from jedbatch._support.native import function_types
from jedbatch._support.types import Leaf
from jedbatch.errors import SymbolicValueError

MAX_ELEMENTS = 4096  # of arrays of whole numbers that tracing makes
MAX_VALUES = 10_000  # things looked at in what a cell closes over
_WHOLE = (
    type,
    types.ModuleType,
    *function_types(),
    types.BuiltinFunctionType,
    dict,
    jax.Array,
)


def shows_arrays(key: Hashable, program: ClosedProgram, again: Callable[[], ClosedProgram]) -> bool:
    """Returns whether an identity shows all arrays among the constants of a program.

    Whole numbers that tracing itself makes, such as tables of messages, need not be shown: traced
    `again`, the program has other arrays with the same numbers in their place.
    """
    shown = {id(x.value) for x in _parts(key) if isinstance(x, Same)}
    consts = list(program.consts)
    places = [k for k, c in enumerate(consts) if isinstance(c, jax.Array) and id(c) not in shown]
    if not all(_may_be_made(consts[k]) for k in places):
        return False
    others = list(again().consts) if places else consts
    return len(others) == len(consts) and all(_is_equal(consts[k], others[k]) for k in places)


def _may_be_made(array: jax.Array) -> bool:
    """Returns whether an array has few whole numbers or booleans, as no weights have."""
    return array.dtype.kind in "biu" and array.size <= MAX_ELEMENTS


def _is_equal(array: jax.Array, other: object) -> bool:
    """Returns whether another array has the same numbers."""
    if array is other or not isinstance(other, jax.Array) or array.dtype != other.dtype:
        return False
    return np.array_equal(np.asarray(array), np.asarray(other))


def check_shared(name: str, key: Hashable, read: Mapping[int, str]) -> None:
    """Raises an error unless an identity shows some shared values, or objects that hold them.

    Args:
      name: of the cell.
      key: its identity.
      read: the types of the shared values that it found by itself, by their ids.
    """
    if not read:
        return
    shown: set[int] = set()
    objects = []
    for part in _parts(key):
        if isinstance(part, Same) and not isinstance(part.value, _WHOLE):
            objects.append(part.value)
        elif type(part) is tuple and part[:1] == ("shared",):
            shown.update(part[1:])
    hidden = read.keys() - shown
    if hidden and (hidden := hidden - set(_shared_in(objects))):
        raise SymbolicValueError(
            f"cell `{name}` reads a shared value of type {read[min(hidden)]} that is neither among "
            "its arguments nor closed over, but found in a context or a global; expected one that "
            "each call shows. Pass the parameters to the cell as an argument; with Haiku, "
            "`jedbatch.cell(hk.without_apply_rng(hk.transform(f)).apply)` takes them first."
        )


def _parts(key: Hashable) -> Iterator[Hashable]:
    """Yields all parts of a key, those of its parts included."""
    stack = [key]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, tuple | frozenset):
            stack += part


def _shared_in(objects: list[Any]) -> Iterator[int]:
    """Yields the shared values among the attributes of objects, and what these hold."""
    seen: dict[int, Leaf] = {}
    stack = objects
    while stack and len(seen) < MAX_VALUES:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, jax.core.Tracer):
            index = getattr(x, "shared_index", None)
            if index is not None:
                yield index
        elif isinstance(x, dict):
            stack += x.values()
        elif isinstance(x, list | tuple | set | frozenset):
            stack += x
        elif not isinstance(x, _WHOLE):
            stack += [getattr(x, name, None) for name in attribute_names(x)]
