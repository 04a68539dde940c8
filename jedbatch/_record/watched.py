"""Containers that may change, and whether they hold what they held before.

A module of weights that is made anew for each instance, or that is given to each call in a lazy
scope, takes long to flatten. It is flattened once; later on it is enough to see that the same
objects are where they were, in dicts, lists and attributes, down to what cannot change. The
compiled core looks at once (`_support/c/watched.c`).
"""

import types
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._jaxpr.identity import (
    BY_IDENTITY,
    TRUSTED,
    is_all_python,
    slot_names,
)
from jedbatch._record.instance_arrays import PLAIN_TYPES
from jedbatch._support.native import core

MOST_PARTS = 1024  # of a container that are looked at each time


class Holder(NamedTuple):
    """A dict, a list, or an object with slots, and what it held.

    Attributes:
      holder: the dict, list or object.
      slots: descriptors of the slots of an object, else None.
      items: keys and values in turns, elements, or the contents of the slots.
    """

    holder: Any
    slots: tuple[Any, ...] | None
    items: tuple[Any, ...]

    def items_now(self) -> tuple[Any, ...]:
        """Returns what it holds by now."""
        return _items(self.holder, self.slots)


class Watched(NamedTuple):
    """A container, its token, and what it and its parts hold."""

    container: Any
    token: str
    holders: tuple[Holder, ...]

    def is_same(self) -> bool:
        """Returns whether everything is where it was."""
        compiled = core()
        if compiled is not None:
            return compiled.hold_the_same(self.holders)
        return all(map(_is_same, self.holders))


def watch(container: Any, token: str) -> Watched | None:
    """Returns a container to be looked at; None if it may change in ways that are not seen."""
    holders: list[Holder] = []
    seen: dict[int, Any] = {}
    stack = [container]
    while stack:
        x = stack.pop()
        if id(x) in seen or _stays(x):
            continue
        seen[id(x)] = x
        if len(seen) > MOST_PARTS:
            return None
        if type(x) in (tuple, frozenset):
            stack += x
            continue
        parts = _holders(x)
        if parts is None:
            return None
        holders += parts
        stack += [item for part in parts for item in part.items]
    return Watched(container, token, tuple(holders))


def _holders(x: Any) -> list[Holder] | None:
    """What holds the parts of a dict, a list or an object; None of anything else."""
    kind: Any = type(x)
    if kind in (dict, list):
        return [Holder(x, None, _items(x, None))]
    if not is_all_python(kind):
        return None
    holders = []
    if (names := slot_names(kind)) and all(hasattr(x, name) for name in names):
        slots = tuple([getattr(kind, name) for name in names])
        if not all(type(slot) is types.MemberDescriptorType for slot in slots):
            return None
        holders.append(Holder(x, slots, _items(x, slots)))
    elif names:
        return None  # one may be assigned
    if hasattr(x, "__dict__"):
        holders.append(Holder(vars(x), None, _items(vars(x), None)))
    return holders


def _items(holder: Any, slots: tuple[Any, ...] | None) -> tuple[Any, ...]:
    if slots is not None:
        return tuple([slot.__get__(holder) for slot in slots])
    return tuple(holder) if type(holder) is list else tuple([y for x in holder.items() for y in x])


def _is_same(holder: Holder) -> bool:
    try:
        now = holder.items_now()
    except AttributeError:  # a slot has been emptied
        return False
    return len(now) == len(holder.items) and all(
        a is b for a, b in zip(now, holder.items, strict=True)
    )


def _stays(x: Any) -> bool:
    """Returns whether something cannot change: numbers, strings, arrays of JAX, functions."""
    kind = type(x)
    if kind in PLAIN_TYPES or isinstance(x, (*BY_IDENTITY, jax.Array)):
        return True
    return not isinstance(x, np.ndarray) and kind.__module__.partition(".")[0] in TRUSTED
