"""Identity of values: the keys of everything that is remembered.

What was recorded for one value may be used for another one only if the function cannot tell them
apart. `==` is no such rule: `1 == 1.0 == True` and `0.0 == -0.0`, two ranges are equal if they
count the same numbers, two sets whatever their order, and a class may compare what it likes. So a
value is written out, part by part, each with its type, down to what has no parts:

    numbers, strings        by type and bits
    containers, ranges      by what is in them, in order, each thing with its type
    dataclasses, and classes with an `==` of their own that are written in Python alone
                            by all attributes, those beside the fields as well
    pytree structures       by the types of nodes and what these carry
    objects of JAX, NumPy   by `==`, which they define for this use
    everything else         by identity: the same object, or another value

The rule is exact where a value can be written out, and conservative elsewhere: what cannot be shown
to be equal is another value, and is recorded again.
"""

import collections
import dataclasses
import enum
import functools
import struct
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jedbatch._support.native import function_types
from jedbatch._support.types import Array

BY_IDENTITY = (
    enum.Enum,
    type,
    *function_types(),
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
_PLAIN = frozenset({int, str, bool, type(None)})  # written out as they are
_CONTENTS = (int, float, complex, str, bytes)  # of which classes may be derived
TRUSTED = frozenset({"jax", "jaxlib", "numpy", "ml_dtypes"})  # packages whose `==` is good enough
_POINTER = struct.calcsize("P")
_MADE_BY_CLASS = 1 << 9  # a flag of classes


class Same:
    """Equal to another exactly if both hold the same object; keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def typed(value: object, above: tuple[int, ...] = ()) -> Hashable:
    """The value written out: equal for values that cannot be told apart.

    `above` has the ids of the objects that it is an attribute of. Raises `TypeError` if the value
    cannot be hashed.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, None, _content(value)
    if isinstance(value, BY_IDENTITY):
        hash(value)
        return Same(value)
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if isinstance(value, _CONTENTS):
        return kind, getattr(value, "dtype", None), _content(value), *attributes(value, above)
    if isinstance(value, tuple | frozenset):  # a set is gone through in an order of its own
        return kind, *(typed(part, above) for part in value), *attributes(value, above)
    if isinstance(value, slice | range):
        return kind, *map(typed, (value.start, value.stop, value.step))
    if isinstance(value, jax.tree_util.PyTreeDef):
        return tree_key(value)
    hash(value)
    if kind.__module__.partition(".")[0] in TRUSTED:
        return kind, value
    if _is_written_out(value):
        return kind, *attributes(value, above)
    return Same(value)


def _is_written_out(value: object) -> bool:
    """Returns whether an object is what its attributes are: frozen, or compared in Python alone."""
    kind: Any = type(value)
    if is_frozen(value):
        return True
    return kind.__eq__ is not object.__eq__ and kind.__hash__ is not None and is_all_python(kind)


def typed_or_same(value: object, above: tuple[int, ...] = ()) -> Hashable:
    """The value written out if it can be hashed, and otherwise the object itself."""
    try:
        return typed(value, above)
    except TypeError:
        return Same(value)


def snapshot(value: Array) -> Hashable:
    """The value written out, with what is in lists, dicts and arrays by now.

    Raises `TypeError` if it holds what may change and cannot be looked into.
    """
    kind = type(value)
    if kind in _PLAIN:  # most of what modules carry, at each call
        return kind, value
    if kind in (list, tuple, collections.deque):
        return kind, *map(snapshot, value)
    if kind in (dict, collections.OrderedDict):
        return kind, *[(snapshot(k), snapshot(x)) for k, x in value.items()]
    if kind in (set, frozenset):
        return kind, *map(snapshot, value)
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, jax.tree_util.PyTreeDef):
        return tree_key(value)
    if not isinstance(value, BY_IDENTITY) and _is_written_out(value):
        hash(value)
        names = attribute_names(value)
        return kind, *[(name, snapshot(getattr(value, name))) for name in names]
    key = typed(value)
    if isinstance(key, Same) and not isinstance(value, BY_IDENTITY):
        raise TypeError(f"{value!r} of type {kind.__name__} may change")
    return key


def attributes(value: object, above: tuple[int, ...] = ()) -> tuple[Hashable, ...]:
    """The attributes of an object by name, written out; one that leads back by how far."""
    if id(value) in above:
        return ("around", len(above) - above.index(id(value)))
    above = (*above, id(value))
    names = attribute_names(value)
    return tuple([(name, typed_or_same(getattr(value, name), above)) for name in names])


def attribute_names(value: object) -> list[str]:
    """Names of what an object has in slots and in its dict."""
    kind: Any = type(value)
    slots = [name for name in slot_names(kind) if hasattr(value, name)]
    return [*slots, *getattr(value, "__dict__", ())]


def is_frozen(value: object) -> bool:
    """True of objects of frozen dataclasses, but not of such classes."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
    )


def tree_key(structure: PyTreeDef) -> Hashable:
    """Equal for structures of pytrees that cannot be told apart.

    Tuples, lists and dicts with strings for keys are compared by JAX, and nothing else: what other
    containers carry, JAX compares by `==`.
    """
    try:
        plain = _is_plain(structure)
    except (TypeError, ValueError):  # what it carries cannot be hashed, or compared as arrays
        plain = False
    return structure if plain else ("tree", *_parts_of(structure, carried_key))


def node_key(structure: PyTreeDef) -> Hashable:
    """Returns a key for a pytree container's auxiliary data; `structure` is of it alone.

    Raises `TypeError` if it carries what may change and cannot be looked into.
    """
    return tuple(_parts_of(structure, snapshot))


@functools.lru_cache(maxsize=512)
def _is_plain(structure: PyTreeDef) -> bool:
    stack: list[Any] = [structure]
    while stack:
        node = stack.pop()
        kind, carried = node.node_data() or (None, ())
        if kind is dict and not all(type(key) is str for key in carried):
            return False
        if kind not in (None, type(None), tuple, list, dict):
            return False
        stack += node.children()
    return True


def is_immutable(structure: PyTreeDef) -> bool:
    """Returns whether containers of a structure hold the same leaves for good.

    Tuples do, and objects of dataclasses that refuse assignments, as frozen ones and modules of
    Equinox.
    """
    leaf = object()
    try:
        stack: list[Any] = [jax.tree.unflatten(structure, [leaf] * structure.num_leaves)]
    except Exception:  # there are no such containers of anything
        return False
    while stack:
        x = stack.pop()
        if x is leaf or x is None:
            continue
        if not (isinstance(x, tuple) or _refuses_assignment(x)):
            return False
        parts, _ = jax.tree_util.default_registry.flatten_one_level(x)
        stack += parts
    return True


def _refuses_assignment(x: object) -> bool:
    if not dataclasses.is_dataclass(x):
        return False
    try:
        setattr(x, "assigned", None)  # noqa: B010
    except dataclasses.FrozenInstanceError:
        return True
    except Exception:
        return False
    return False


def _parts_of(structure: PyTreeDef, carried_key: Callable) -> list[Hashable]:
    """The nodes of a structure, what they carry written by `carried_key`."""
    parts: list[Hashable] = []
    stack = [structure]
    while stack:
        node = stack.pop()
        kind, carried = node.node_data() or (None, None)
        children = node.children()
        parts += kind, carried_key(carried), len(children)
        stack += children[::-1]
    return parts


def carried_key(value: Array) -> Hashable:
    """Returns a key for what a container of a pytree carries besides its parts."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return kind, *map(carried_key, value)
    try:
        return snapshot(value)
    except TypeError:
        return typed_or_same(value)


def _content(value: Array) -> Hashable:
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    if isinstance(value, int):
        return int.__index__(value)
    return str.__str__(value) if isinstance(value, str) else bytes(value)


@functools.lru_cache(maxsize=512)
def slot_names(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class, if it was made by `class`, and of those it is derived from."""
    slot = types.MemberDescriptorType
    names = [name for k in kind.__mro__ for name, x in vars(k).items() if type(x) is slot]
    return tuple(names) if kind.__flags__ & _MADE_BY_CLASS else ()


@functools.lru_cache(maxsize=512)
def is_all_python(kind: type) -> bool:
    """Returns whether objects of a class have attributes alone, nothing that C code might keep."""
    extra = (kind.__weakrefoffset__ > 0) + (kind.__dictoffset__ > 0)
    size = object.__basicsize__ + _POINTER * (len(slot_names(kind)) + extra)
    return kind.__basicsize__ == size and not kind.__itemsize__
