"""Containers and functions that may change, and whether they hold what they held before.

A module of weights that is made anew for each instance takes long to flatten, and a function with
closures long to compare. That is done once; later on it is enough to see that the same objects are
where they were, in dicts, lists, attributes and closures, down to what cannot change. The compiled
core looks at once (`_support/c/watched.c`).
"""

import functools
import itertools
import types
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.identity import (
    BY_IDENTITY,
    TRUSTED,
    is_all_python,
    slot_names,
)
from jedbatch._record.identity.functions import FUNCTIONS_OF_RULES, function_of
from jedbatch._record.instances.arrays import PLAIN_TYPES

MOST_PARTS = 256  # of a container or function that are looked at each time
# Descriptors that read what may be assigned.
_OF_CELLS = (vars(types.CellType)["cell_contents"],)
_OF_FUNCTIONS = tuple([vars(types.FunctionType)[f"__{n}__"] for n in ("defaults", "kwdefaults")])


class Holder(NamedTuple):
    """A dict, a list, or an object with slots, and what it held.

    Attributes:
      holder: the dict, list or object.
      slots: descriptors that read an object, else None.
      items: keys and values in turns, elements, or what the descriptors read.
    """

    holder: Any
    slots: tuple[Any, ...] | None
    items: tuple[Any, ...]


Holders = tuple[Holder, ...]


class Watched(NamedTuple):
    """A container, its token, and what it and its parts hold."""

    container: Any
    token: str
    holders: Holders


def hold_the_same(holders: Holders) -> bool:
    """Returns whether everything is where it was."""
    return all(map(_is_same, holders))


def holders_in(root: Any, stays: Container[int] = ()) -> Holders | None:
    """Returns all that holds something which may change; None if there is what cannot be seen.

    Args:
      root: a container, an object or a function; one without defaults or attributes is not looked
        at for these, which costs as much as all else for most cells.
      stays: ids of what is not looked into.
    """
    holders: list[Holder] = []
    seen: dict[int, Any] = {}
    stack = [root]
    while stack:
        x = function_of(stack.pop())
        if id(x) in seen or id(x) in stays:
            continue
        seen[id(x)] = x
        if len(seen) > MOST_PARTS:
            return None
        parts = _immutable_parts(x)
        if parts is None and _stays(x):
            continue
        if parts is None:
            found = _holders(x)
            if found is None:
                return None
            is_root = x is root and type(x) is types.FunctionType
            holders += [h for h in found if not is_root or any(i is not None for i in h.items)]
            parts = [item for holder in found for item in holder.items]
        stack += parts
    return tuple(holders)


def own_holders(things: Sequence[Any]) -> Holders | None:
    """Returns what functions and objects hold themselves; None if a name is not assigned yet."""
    found = list(map(_holders, things))
    return None if None in found else tuple(itertools.chain(*filter(None, found)))


def _immutable_parts(x: Any) -> list[Any] | None:
    """The parts of what holds the same things for good; None of anything else."""
    if type(x) in (tuple, frozenset):
        return list(x)
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords, vars(x)]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    return None


def _holders(x: Any) -> list[Holder] | None:
    """Returns the holders of the parts of a dict, list, function or object; None of others."""
    kind: Any = type(x)
    if kind is dict or kind is list:
        return [Holder(x, None, _items(x))]
    if kind is types.FunctionType:
        closure = [_read(cell, _OF_CELLS) for cell in x.__closure__ or ()]
        if None in closure:  # a name that is not assigned yet
            return None
        defaults = Holder(x, _OF_FUNCTIONS, (x.__defaults__, x.__kwdefaults__))
        return [*filter(None, closure), defaults, _of_dict(vars(x))]
    if kind in FUNCTIONS_OF_RULES:
        return [_of_dict(vars(x))]
    if not is_all_python(kind):
        return None
    holders = []
    if names := slot_names(kind):
        holder = _read(x, tuple([getattr(kind, name) for name in names]))
        if holder is None:
            return None
        holders.append(holder)
    if (dictionary := _dictionary_of(kind)) is not None:
        attributes = vars(x)
        holders += (
            Holder(x, (dictionary,), (attributes,)),
            Holder(attributes, None, _items(attributes)),
        )
    return holders


def _of_dict(x: dict) -> Holder:
    return Holder(x, None, _items(x))


@functools.lru_cache(maxsize=512)
def _dictionary_of(kind: type) -> Any:
    """The descriptor that reads the dict of objects of a class; None if they have none."""
    found = (vars(k)["__dict__"] for k in kind.__mro__ if "__dict__" in vars(k))
    return next(found, None)


def _read(holder: Any, slots: tuple[Any, ...]) -> Holder | None:
    """Returns what descriptors read of an object; None if something is not assigned."""
    try:
        return Holder(holder, slots, tuple([slot.__get__(holder) for slot in slots]))
    except (AttributeError, ValueError):
        return None


def _items(holder: Any) -> tuple[Any, ...]:
    return tuple(holder) if type(holder) is list else tuple([y for x in holder.items() for y in x])


def _is_same(holder: Holder) -> bool:
    of, slots, items = holder
    now = _items(of) if slots is None else (_read(of, slots) or (None, None, ()))[2]
    return len(now) == len(items) and all(a is b for a, b in zip(now, items, strict=True))


def _stays(x: Any) -> bool:
    """Returns whether something cannot change: numbers, strings, arrays of JAX, classes."""
    kind = type(x)
    if kind in PLAIN_TYPES or issubclass(kind, Tracer) or isinstance(x, jax.Array):
        return True
    if kind is types.FunctionType or kind in FUNCTIONS_OF_RULES:
        return False
    if isinstance(x, BY_IDENTITY):
        return True
    return not isinstance(x, np.ndarray) and kind.__module__.partition(".")[0] in TRUSTED
