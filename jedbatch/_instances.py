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

import collections
import copy
import dataclasses
import enum
import marshal
import struct
import types
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._graph import Graph

_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None)})
_BY_IDENTITY = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, np.dtype)
_NO_NUMBERS = frozenset(
    {np.object_, np.str_, np.bytes_, np.void, np.datetime64, np.timedelta64, str}
)
_CONSTANT = (*_BY_IDENTITY, types.ModuleType, jax.stages.Wrapped, jnp.ufunc)


def is_array(x: Any) -> bool:
    """True of NumPy arrays, JAX arrays and tracers, but not of NumPy scalars.

    Nor of arrays of NumPy that JAX cannot compute with: of strings, dates, objects and records.
    """
    if isinstance(x, np.ndarray):
        return x.dtype.type not in _NO_NUMBERS
    return isinstance(x, jax.Array)


def array_type(x: Any) -> tuple[tuple[int, ...], Any, bool]:
    """(shape, dtype, weak) of an array or number as JAX sees it.

    Raises `TypeError` for a 64-bit float while JAX is in 32-bit mode.
    """
    dtype = getattr(x, "dtype", None)
    if dtype in (np.float64, np.complex128) and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
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
    dtype = getattr(value, "dtype", None)
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if isinstance(value, float):
        return kind, dtype, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, dtype, struct.pack("dd", value.real, value.imag)
    if isinstance(value, int) and dtype is not None:
        return kind, dtype, int(value)
    if isinstance(value, tuple) and not isinstance(value, enum.Enum):
        return kind, *map(typed, value)
    if isinstance(value, frozenset):
        return kind, frozenset(map(typed, value))
    if isinstance(value, slice):
        return kind, *map(typed, (value.start, value.stop, value.step))
    if dataclasses.is_dataclass(value) and kind.__dataclass_params__.frozen:
        hash(value)
        return kind, value, *(typed_or_same(getattr(value, f.name)) for f in fields_compared(value))
    hash(value)
    return kind, value


def fields_compared(value: Any) -> list[dataclasses.Field]:
    """The fields that decide whether two objects of a dataclass are equal."""
    return [f for f in dataclasses.fields(value) if f.compare]


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
    object. Containers are keyed by what they contain; one met again, by where it was met first.
    """
    if _is_plain_tree(instance):
        try:
            return marshal.dumps(instance, 2), []
        except ValueError:
            pass  # too deep

    tokens: list[Hashable] = []
    arrays = []
    cacheable = True
    places: dict[int, int] = {}
    stack = [instance]
    while stack:
        x = stack.pop()
        kind = type(x)
        if id(x) in places:
            tokens.append(("again", places[id(x)]))
            continue
        if x is None or kind in _PLAIN:
            tokens.append(typed(x))
        elif is_array(x):
            tokens.append(("array", *array_type(x)))
            arrays.append(x)
        elif isinstance(x, Graph):  # immutable, and too large to compare
            tokens.append(Same(x))
        elif (node := _children(x)) is not None:
            token, children, mutable = node
            places[id(x)] = len(tokens)
            cacheable = cacheable and not mutable
            tokens.append((kind, len(children), token))
            stack.extend(reversed(children))
        elif kind is np.ndarray and not x.dtype.hasobject:  # of strings, for instance
            tokens.append((kind, x.dtype, x.shape, tuple(x.ravel().tolist())))
        elif isinstance(x, (*_BY_IDENTITY, np.generic)) or kind in (range, bytes):
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


def _is_plain_tree(instance: Any) -> bool:
    """True of tuples, lists and dicts of numbers and strings, none of them met twice.

    `marshal` writes a part once for every time it is met.
    """
    plain, containers = _PLAIN, (tuple, list, dict)
    seen: set[int] = set()
    stack = [instance]
    while stack:
        x = stack.pop()
        kind = type(x)
        if kind not in containers:
            return kind in plain
        if id(x) in seen:
            return False
        seen.add(id(x))
        if kind is dict:
            if not plain.issuperset(map(type, x)):
                return False
            x = x.values()
        for part in x:
            kind = type(part)
            if kind not in plain:
                if kind not in containers:
                    return False
                stack.append(part)
    return True


def is_constant(x: Any) -> bool:
    """True of what cannot change: strings, functions, modules, frozen dataclasses of such."""
    if type(x) in _PLAIN or x is None or isinstance(x, _CONSTANT):
        return True
    if isinstance(x, tuple):
        return all(map(is_constant, x))
    return dataclasses.is_dataclass(x) and type(x).__dataclass_params__.frozen  # type: ignore


def may_change(x: Any) -> bool:
    """True of containers that are compared by what is in them and may be changed."""
    if isinstance(x, tuple):
        return any(map(may_change, x))
    return isinstance(x, list | dict | set | bytearray | np.ndarray | collections.deque)


def immutable(instance: Any) -> bool:
    """True of plain instances without lists or dicts in them: they will not change."""
    try:
        hash(instance)
    except TypeError:
        return False
    return True


def replace_arrays(instance: Any, arrays: Iterator[Any]) -> Any:
    """The instance with its arrays replaced, in order; what was shared is shared again.

    Raises `ValueError` if an object holds itself.
    """
    done: dict[int, Any] = {}
    unfinished = object()

    def replace(x: Any) -> Any:
        if is_array(x):
            return next(arrays)
        if type(x) in _PLAIN or (node := _children(x)) is None:
            return x
        if id(x) not in done:
            done[id(x)] = unfinished
            done[id(x)] = _rebuild(x, [replace(child) for child in node[1]])
        if done[id(x)] is unfinished:
            raise ValueError(
                f"an instance holds arrays and a {type(x).__name__} that holds itself; expected "
                "a tree or a graph without circles. Keep links to parents out of the instance."
            )
        return done[id(x)]

    return replace(instance)


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
        elif not isinstance(x, (*_BY_IDENTITY, types.ModuleType)):
            slots = [s for k in type(x).__mro__ for s in getattr(k, "__slots__", ())]
            stack.extend(getattr(x, s) for s in slots if hasattr(x, s))
            stack.extend(getattr(x, "__dict__", {}).values())
    return found


def _children(x: Any) -> tuple[Hashable, list[Any], bool] | None:
    """(what else decides it, parts, is mutable) of a container; None of anything else."""
    kind = type(x)
    if isinstance(x, tuple | list | collections.deque):
        known = kind in (tuple, list, collections.deque) or hasattr(kind, "_fields")
        return None, list(x), not known
    if isinstance(x, dict):
        known = kind in (dict, collections.OrderedDict)
        try:
            return tuple(map(typed, x)), list(x.values()), not known
        except TypeError:
            return None, list(x.values()), True
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x.shape, list(x.flat), kind is not np.ndarray
    if isinstance(x, Graph | np.ndarray):
        return None
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts = [getattr(x, f.name) for f in dataclasses.fields(x)]
        whole = kind.__dataclass_params__.frozen and "__dataclass_fields__" in vars(kind)
        return None, parts, not whole
    if jax.tree_util.all_leaves([x]):
        return None
    parts, structure = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    return structure, parts, False


def _rebuild(x: Any, parts: list[Any]) -> Any:
    kind: Any = type(x)
    if hasattr(kind, "_fields"):
        return kind(*parts)
    if isinstance(x, collections.deque):
        return collections.deque(parts, x.maxlen)
    if isinstance(x, np.ndarray):
        array = np.empty(x.shape, object)
        for place, part in zip(np.ndindex(x.shape), parts, strict=True):
            array[place] = part
        return array
    if isinstance(x, tuple | list):
        return kind(parts)
    if isinstance(x, dict):
        other = copy.copy(x)
        other.update(zip(x, parts, strict=True))
        return other
    if dataclasses.is_dataclass(x):
        other = object.__new__(kind)
        if hasattr(x, "__dict__"):
            vars(other).update(vars(x))
        for f, part in zip(dataclasses.fields(x), parts, strict=True):
            object.__setattr__(other, f.name, part)
        return other
    return jax.tree.unflatten(jax.tree.structure(x, is_leaf=lambda y: y is not x), parts)
