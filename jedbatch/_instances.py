"""Reading an instance: which of it is arrays, and when two instances are the same.

An instance is any Python object. Its arrays become symbolic; numbers, strings, lists and
objects reach the function as they are. Because the function is pure, instances that agree
in everything but the contents of their arrays have the same graph, so the graph is cached
under a key that says exactly that.

Such a key is harder to make than it looks. `(1, 2) == (1.0, 2) == (True, 2)` although their
graphs differ, `0.0 == -0.0`, NaN differs from itself, and `hash` and `==` overflow the C
stack on a tree 50,000 levels deep. So keys carry types, floats are compared by their bits,
and nothing here recurses in C. Plain containers of numbers and strings take a short cut:
`marshal` writes them, with their types, at 10 ns a number, and refuses deep ones.
"""

import dataclasses
import enum
import marshal
import struct
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np

from jedbatch._graph import Graph

_PLAIN = frozenset({int, float, bool, complex, str, bytes})
_BY_IDENTITY = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, np.dtype)


def is_array(x: Any) -> bool:
    """True of NumPy arrays, JAX arrays and tracers, but not of NumPy scalars."""
    return isinstance(x, np.ndarray | jax.Array)


def array_type(x: Any) -> tuple[tuple[int, ...], Any, bool]:
    """(shape, dtype, weak) of an array or number as JAX sees it.

    Raises `TypeError` for a 64-bit float while JAX is in 32-bit mode.
    """
    dtype = getattr(x, "dtype", None)
    if dtype in (np.float64, np.complex128) and not jax.config.read("jax_enable_x64"):
        raise TypeError(
            f"got {dtype} values (shape {np.shape(x)}) while JAX computes in 32 bits; expected "
            "float32. Write `jax.config.update('jax_enable_x64', True)` at the start of the "
            "program to compute in 64 bits, or `x.astype(numpy.float32)`."
        )
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type


def typed(value: Any) -> Hashable:
    """The value with its type, so that 1, 1.0 and True differ, and 0.0 and -0.0.

    Raises `TypeError` if the value cannot be hashed.
    """
    kind = type(value)
    if kind is float:
        return float, struct.pack("d", value)
    if kind is complex:
        return complex, struct.pack("dd", value.real, value.imag)
    if kind is tuple:
        return tuple, *map(typed, value)
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    hash(value)
    return kind, value


class Same:
    """Equal to another exactly if both hold the same object; keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def typed_or_same(value: Any) -> Hashable:
    """The value with its type if it can be hashed, and otherwise the object itself."""
    try:
        return typed(value)
    except TypeError:
        return Same(value)


def instance_key(instance: Any) -> tuple[Hashable | None, list[Any]]:
    """What decides the graph of an instance, and its arrays in order.

    The key is None if the instance holds something that may change behind our back: a mutable
    object. Containers are keyed by what they contain.
    """
    try:
        written = marshal.dumps(instance, 2)
    except ValueError:
        pass  # not plain, or too deep
    else:  # what has a buffer, such as an array, is written too: look at the leaves
        if _PLAIN.issuperset(map(type, jax.tree.leaves(instance))):
            return written, []

    tokens: list[Hashable] = []
    arrays = []
    cacheable = True
    stack = [instance]
    while stack:
        x = stack.pop()
        kind = type(x)
        if x is None or kind in _PLAIN:
            tokens.append(typed(x))
        elif is_array(x):
            tokens.append(("array", *array_type(x)))
            arrays.append(x)
        elif isinstance(x, Graph):  # immutable, and too large to compare
            tokens.append(Same(x))
        elif (node := _children(x)) is not None:
            token, children, mutable = node
            cacheable = cacheable and not mutable
            tokens.append((kind, len(children), token))
            stack.extend(reversed(children))
        elif isinstance(x, (*_BY_IDENTITY, np.generic)) or _hashes_by_value(kind):
            tokens.append(typed(x))
        else:
            cacheable = False
    if not cacheable:
        return None, arrays
    try:
        hash(key := tuple(tokens))
    except TypeError:
        return None, arrays
    return key, arrays


def immutable(instance: Any) -> bool:
    """True of plain instances without lists or dicts in them: they will not change."""
    try:
        hash(instance)
    except TypeError:
        return False
    return True


def replace_arrays(instance: Any, arrays: Iterator[Any]) -> Any:
    """The instance with its arrays replaced, in order."""
    if is_array(instance):
        return next(arrays)
    if type(instance) in _PLAIN or (node := _children(instance)) is None:
        return instance
    return _rebuild(instance, [replace_arrays(child, arrays) for child in node[1]])


def owned_arrays(instance: Any, limit: int = 100_000) -> set[int]:
    """Ids of the JAX arrays an object holds on to, through attributes and containers."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [instance]
    while stack and len(seen) < limit:
        x = stack.pop()
        if type(x) in _PLAIN or id(x) in seen:
            continue
        seen.add(id(x))
        if is_array(x):
            found.add(id(x))
        elif (node := _children(x)) is not None:
            stack.extend(node[1])
        elif not isinstance(x, _BY_IDENTITY | types.ModuleType):
            stack.extend(getattr(x, "__dict__", {}).values())
    return found


def _hashes_by_value(kind: type) -> bool:
    return kind.__hash__ not in (None, object.__hash__) and kind.__eq__ is not object.__eq__


def _children(x: Any) -> tuple[Hashable, list[Any], bool] | None:
    """(what else decides it, parts, is mutable) of a container; None of anything else."""
    kind = type(x)
    if kind is tuple or kind is list or (isinstance(x, tuple) and hasattr(kind, "_fields")):
        return None, list(x), False
    if kind is dict:
        try:
            return tuple(map(typed, x)), list(x.values()), False
        except TypeError:
            return None, list(x.values()), True
    if isinstance(x, Graph):
        return None
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts = [getattr(x, f.name) for f in dataclasses.fields(x)]
        return None, parts, not kind.__dataclass_params__.frozen
    if jax.tree_util.all_leaves([x]):
        return None
    parts, structure = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    return structure, parts, False


def _rebuild(x: Any, parts: list[Any]) -> Any:
    kind = type(x)
    if kind is tuple or kind is list:
        return kind(parts)
    if isinstance(x, tuple):
        return kind(*parts)
    if kind is dict:
        return dict(zip(x, parts, strict=True))
    if dataclasses.is_dataclass(x):
        copy = object.__new__(kind)
        copy.__dict__.update(getattr(x, "__dict__", {}))
        for f, part in zip(dataclasses.fields(x), parts, strict=True):
            object.__setattr__(copy, f.name, part)
        return copy
    return jax.tree.unflatten(jax.tree.structure(x, is_leaf=lambda y: y is not x), parts)


Key = Callable[[Any], Hashable]
