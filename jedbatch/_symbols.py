"""Symbolic values: tracers that have a type and no value, and how they are indexed.

What they are part of, and what becomes of an operation on them, their recorder knows.
"""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from jax.core import Tracer

from jedbatch.errors import SymbolicValueError


def _needs_value(what: str) -> Callable:
    def method(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        raise SymbolicValueError(
            f"{what} needs the value of a symbolic array of type {self.aval.str_short()}, which "
            "has not been computed: while a batched function is recorded, values are unknown. "
            "Decide on Python numbers or the structure of the instance, use `jnp.where`, or "
            "`jax.lax.cond` inside a cell; `help(jedbatch.errors.SymbolicValueError)` says more."
        )

    return method


class Symbol(Tracer):
    """A tracer of ours: it has a type and no value."""

    __slots__ = ("index",)

    __bool__ = _needs_value("`if`, `while`, `and`, `or`, `not` or `bool()`")
    __int__ = _needs_value("`int()`")
    __float__ = _needs_value("`float()`")
    __complex__ = _needs_value("`complex()`")
    __index__ = _needs_value("`range()` or indexing a Python list")
    __array__ = _needs_value("`numpy.asarray`")
    item = _needs_value("`.item()`")
    tolist = _needs_value("`.tolist()`")

    def full_lower(self):
        return self

    @property
    def aval(self):  # type: ignore[override]
        self._trace.is_valid()
        return self._type()

    def __repr__(self):
        return f"symbolic {self._type().str_short()}"


class Value(Symbol):
    """A symbolic value of one instance: result `index`, or input `-1 - index`."""

    __slots__ = ("type",)

    def __init__(self, recorder: Any, index: int, value_type: int):
        self._trace = recorder
        self.index = index
        self.type = value_type

    def _type(self):
        return self._trace.registry.avals[self.type]

    def __getitem__(self, item):
        return self._trace.index_value(self, item)

    def __iter__(self):
        if not self.shape:
            raise TypeError("a symbolic array with no dimensions cannot be iterated over")
        return (self[i] for i in range(self.shape[0]))


class Shared(Symbol):
    """A symbolic value that all instances share: `registry.shared[index]`."""

    __slots__ = ()

    def __init__(self, recorder: Any, index: int):
        self._trace = recorder
        self.index = index

    def _type(self):
        return self._trace.registry.shared[self.index].aval

    @property
    def shared_index(self):
        return self.index

    def __getitem__(self, item):
        return self._trace.index_shared(self, item)


# --- static indices ---


def is_static(item: Any) -> bool:
    """True of an index without arrays: ints, slices, None, Ellipsis and tuples of them.

    Not of bools, which are masks.
    """
    if isinstance(item, bool):
        return False
    if isinstance(item, tuple):
        return all(map(is_static, item))
    if isinstance(item, slice):
        return all(map(is_static, (item.start, item.stop, item.step)))
    return item is None or item is Ellipsis or isinstance(item, int | np.integer)


def frozen(item: Any) -> Hashable:
    """A static index as something hashable."""
    if isinstance(item, tuple):
        return tuple(map(frozen, item))
    if isinstance(item, slice):
        return "slice", item.start, item.stop, item.step
    return item


def row_index(i: Any, length: int) -> int:
    """The index from the front; raises `IndexError` if it is out of bounds."""
    if not -length <= i < length:
        raise IndexError(f"index {i} is out of bounds for an axis of length {length}")
    return int(i) % length
