"""The arrays of an instance: how they are found in any Python object, and replaced.

An instance is any Python object. Its arrays become symbolic; numbers, strings, lists and objects
reach the function as they are. Containers are tuples, lists, dicts, deques, dataclasses, object
arrays of NumPy and pytrees.
"""

import collections
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.tree_util import PyTreeDef

from jedbatch import checks
from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.identity import attribute_names, node_key, slot_names, snapshot, typed
from jedbatch._support.native import function_types
from jedbatch._support.types import Leaf, PyTree

PLAIN_TYPES = frozenset({int, float, bool, complex, str, bytes, type(None)})
LEAF_TYPES = (enum.Enum, type, *function_types(), types.BuiltinFunctionType, np.dtype)
ArrayType = tuple[tuple[int, ...], Any, bool]  # (shape, dtype, weak)
_NO_NUMBERS = frozenset(
    {np.object_, np.str_, np.bytes_, np.void, np.datetime64, np.timedelta64, str}
)
# The types of floats and complex numbers of Python and of NumPy.
FLOAT_TYPES = frozenset(
    {float, complex, *(np.dtype(code).type for code in "efdgFDG")}
    | {
        jnp.dtype(x).type
        for x in vars(jnp).values()
        if isinstance(x, type(jnp.float32)) and jnp.issubdtype(x, np.inexact)
    }
)
_WIDE_DTYPES = frozenset({np.dtype(np.float64), np.dtype(np.complex128)})
# What JAX makes of arrays of these, in 32-bit mode and in 64-bit mode.
SAME_DTYPES = {x: jnp.dtype(x) for x in map(np.dtype, ("float32", "int32", "bool", "uint8"))}
CONSTANT_TYPES = (*LEAF_TYPES, types.ModuleType, jax.stages.Wrapped, jnp.ufunc)


def is_array(x: object) -> bool:
    """True of NumPy arrays, JAX arrays and tracers, but not of NumPy scalars.

    Nor of arrays of NumPy that JAX cannot compute with: of strings, dates, objects and records.
    """
    if isinstance(x, np.ndarray):
        return x.dtype.type not in _NO_NUMBERS
    return isinstance(x, jax.Array)


def array_type(x: Leaf) -> ArrayType:
    """(shape, dtype, weak) of an array or number as JAX sees it.

    Raises `TypeError` for an array of 64-bit floats while JAX is in 32-bit mode. Single ones are
    numbers, which Python has in 64 bits too.
    """
    if type(x) is np.ndarray and (dtype := SAME_DTYPES.get(x.dtype)) is not None:
        return x.shape, dtype, False
    dtype = getattr(x, "dtype", None)
    is_wide = dtype in _WIDE_DTYPES and not isinstance(x, np.generic)
    if is_wide and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise TypeError(
            f"got {dtype} values (shape {np.shape(x)}) while JAX computes in 32 bits; expected "
            "float32. Write `jax.config.update('jax_enable_x64', True)` at the start of the "
            "program to compute in 64 bits, or `x.astype(numpy.float32)`."
        )
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise TypeError(
            f"got {dtype} values (shape {np.shape(x)}), whose bytes are in another order than "
            "JAX computes with; expected those of this machine. Write "
            "`x.astype(x.dtype.newbyteorder('='))`."
        )
    if type(x) is np.ndarray:
        return x.shape, _dtype_in_jax(x.dtype, jax.config.jax_enable_x64), False  # type: ignore[attr-defined]
    aval = getattr(x, "aval", None)
    if isinstance(aval, ShapedArray):  # `jax.typeof` adds how the array is sharded
        return aval.shape, aval.dtype, aval.weak_type
    try:
        aval = jax.typeof(x)
    except OverflowError:
        raise OverflowError(
            f"got {checks.brief(x)}, which does not fit the whole numbers that JAX computes with; "
            "expected a smaller one, or write `jax.config.update('jax_enable_x64', True)`."
        ) from None
    return aval.shape, aval.dtype, aval.weak_type


@functools.cache
def _dtype_in_jax(dtype: np.dtype[Any], _: bool) -> Any:
    """The dtype of arrays of NumPy as JAX sees it, in 64-bit mode or not."""
    return jax.typeof(np.empty(0, dtype)).dtype


def flatten(tree: PyTree, whose: str) -> tuple[list[Leaf], PyTreeDef]:
    """Leaves and structure of a pytree; `whose` is said in errors.

    Raises:
      ValueError: a container holds itself.
      RecursionError: containers are nested too deep for JAX.
    """
    try:
        return jax.tree.flatten(tree)
    except (RecursionError, SystemError) as error:  # JAX makes one of the other
        if (circle := _find_circle(tree)) is not None:
            raise ValueError(
                f"{whose} holds a {type(circle).__name__} that holds itself; expected a tree or a "
                "graph without circles. Keep links to parents out of it."
            ) from None
        if isinstance(error.__cause__, RecursionError):
            raise RecursionError(
                f"{whose} holds containers that are nested deeper than JAX can look into; "
                "expected a pytree of arrays. Put arrays that are many into one."
            ) from None
        raise


def _find_circle(tree: PyTree, limit: int = 1_000_000) -> Any:
    """A container of a pytree that holds itself; None if none is found."""
    containers = {id(tree): tree}  # alive, as long as they are known by their ids
    path = {id(tree): iter(parts_of(tree))}
    while path and len(containers) < limit:
        for part in path[next(reversed(path))]:
            if id(part) in path:
                return part
            if id(part) not in containers and not jax.tree_util.all_leaves([part]):
                containers[id(part)] = part
                path[id(part)] = iter(parts_of(part))
                break
        else:
            path.popitem()
    return None


def parts_of(x: object) -> list[Leaf]:
    """The parts that a container of a pytree holds directly."""
    is_part = itertools.chain([False], itertools.repeat(True))  # JAX asks of the whole first
    return jax.tree.leaves(x, is_leaf=lambda _: next(is_part))


_UNFINISHED = object()  # in place of a container whose parts are being replaced


def replace_arrays(instance: PyTree, arrays: Iterator[object]) -> PyTree:
    """The instance with its arrays replaced, in order; what was shared is shared again.

    Raises `ValueError` if an object holds itself.
    """
    return _replaced(instance, arrays, None, {})


def with_arrays_for_floats(instance: PyTree) -> tuple[PyTree, list[Leaf]]:
    """Returns an instance with an array in place of each of its floats, and its arrays and floats.

    Floats are those of Python and of NumPy, complex numbers, too.

    Raises `ValueError` if an object holds itself.
    """
    found: list[Leaf] = []
    return _replaced(instance, None, found, {}), found


def _replaced(
    x: Leaf,
    arrays: Iterator[object] | None,
    found: list[Leaf] | None,
    done: dict[int, tuple[Leaf, Leaf]],
) -> PyTree:
    """Does so for a part of an instance.

    No closure, which would refer to itself, and be left to the collector for each instance.

    Args:
      x: the part.
      arrays: those that are left, if arrays are replaced.
      found: the arrays and floats so far, if floats are replaced.
      done: what stands for parts met before, by id, and these, so that no other has their id.
    """
    kind: Any = type(x)
    if found is not None and kind in FLOAT_TYPES:
        found.append(x)
        return np.zeros((), np.float32)
    if kind in PLAIN_TYPES:
        return x
    is_plain = kind is tuple or kind is list
    fields = None if is_plain else plain_fields(kind)
    parts: Iterable[Leaf]
    if is_plain:
        parts = x
    elif fields is not None and tuple(x.__dict__) == fields:
        parts = x.__dict__.values()
    elif is_array(x):
        if found is not None:
            found.append(x)
        replacement = x if arrays is None else next(arrays)  # one for each time that it is met
        return done.setdefault(id(x), (replacement, x))[0]
    elif (node := children_of(x)) is not None:
        fields, parts = None, node[1]
    else:
        return x
    known = done.get(id(x))
    if known is None:
        done[id(x)] = _UNFINISHED, x
        new = [
            part
            if type(part) in PLAIN_TYPES and found is None
            else _replaced(part, arrays, found, done)
            for part in parts
        ]
        if fields is None:
            copied = kind(new) if is_plain else rebuild(x, new)
        else:
            copied = object.__new__(kind)
            copied.__dict__.update(zip(fields, new, strict=True))
        known = done[id(x)] = copied, x
    if known[0] is _UNFINISHED:
        raise ValueError(
            f"an instance holds arrays and a {kind.__name__} that holds itself; expected "
            "a tree or a graph without circles. Keep links to parents out of the instance."
        )
    return known[0]


def owned_arrays(instance: PyTree, limit: int = 100_000) -> set[int]:
    """Ids of the JAX arrays an object holds on to, through attributes and containers."""
    array_ids: set[int] = set()
    seen_ids: set[int] = set()
    stack = [instance]
    while stack and len(seen_ids) < limit:
        x = stack.pop()
        if type(x) in PLAIN_TYPES or id(x) in seen_ids:
            continue
        seen_ids.add(id(x))
        if is_array(x):
            array_ids.add(id(x))
        elif (node := children_of(x)) is not None:
            stack.extend(node[1])
        elif not isinstance(x, (*LEAF_TYPES, types.ModuleType)):
            slots = [s for k in type(x).__mro__ for s in getattr(k, "__slots__", ())]
            stack.extend(getattr(x, s) for s in slots if hasattr(x, s))
            stack.extend(getattr(x, "__dict__", {}).values())
    return array_ids


def children_of(x: Leaf) -> tuple[Hashable, list[Leaf], bool] | None:
    """(what else decides it, parts, is mutable) of a container; None of anything else."""
    kind: Any = type(x)
    if kind is tuple or kind is list:
        return None, list(x), False
    fields = plain_fields(kind)
    if fields is not None and tuple(x.__dict__) == fields:
        return fields, list(x.__dict__.values()), False
    if isinstance(x, tuple | list | dict | collections.deque):
        names = attribute_names(x)
        extra = [getattr(x, name) for name in names]
        if isinstance(x, dict):
            is_known = kind in (dict, collections.OrderedDict)
            try:
                is_known = is_known or has_attributes_only(x)
                return (tuple(map(typed, x)), *names), [*x.values(), *extra], not is_known
            except TypeError:
                return None, [*x.values(), *extra], True
        is_known = kind is collections.deque or hasattr(kind, "_fields") or has_attributes_only(x)
        return (getattr(x, "maxlen", None), *names), [*x, *extra], not is_known
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x.shape, list(x.flat), kind is not np.ndarray
    if isinstance(x, Graph | np.ndarray):
        return None
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = _dataclass_attributes(x)
        return tuple(names), [getattr(x, name) for name in names], False
    if jax.tree_util.all_leaves([x]):
        return None
    parts, structure = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    try:
        return (node_key(structure), *_beside(x, parts, structure)), parts, False
    except TypeError:
        return None, parts, True


_ONLY_ATTRIBUTES: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_OWN_RULES = (
    *("__getattribute__", "__reduce__", "__reduce_ex__", "__getstate__"),
    *("__iter__", "values"),  # by which the items are listed here
)
_POINTER = np.dtype(np.intp).itemsize


def has_attributes_only(x: object) -> bool:
    """True of objects of classes of Python, whose state is what their attributes are.

    Of classes derived from tuples, lists, dicts and deques it is that and the items.
    """
    kind: Any = type(x)
    found = _ONLY_ATTRIBUTES.get(kind)
    if found is None:
        containers = (tuple, list, dict, collections.deque)
        base = next((c for c in containers if issubclass(kind, c)), object)
        rules = [name for name in _OWN_RULES if base is not object or hasattr(base, name)]
        found = not hasattr(kind, "__getattr__") and all(
            getattr(kind, name, None) is getattr(base, name, None) for name in rules
        )
        if base is object:
            try:  # fails if there is state that is in no attribute
                found = found and object.__reduce_ex__(x, 2) is not None
            except TypeError:
                found = False
        else:  # `__dict__`, `__weakref__` and slots are all that is there beside the items
            most = base.__basicsize__ + (2 + len(slot_names(kind))) * _POINTER
            found = found and kind is not base and kind.__basicsize__ <= most
        _ONLY_ATTRIBUTES[kind] = found
    return found


@functools.lru_cache(maxsize=512)
def plain_fields(kind: Any) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass, if reading one gives what an object's dict has."""
    containers = (tuple, list, dict, collections.deque, np.ndarray, Graph)
    if issubclass(kind, containers) or not dataclasses.is_dataclass(kind):
        return None
    names = tuple([f.name for f in dataclasses.fields(kind)])
    return names if reads_its_dict(kind, names) else None


def reads_its_dict(kind: Any, names: Iterable[str]) -> bool:
    """Returns whether attributes of objects of a class are what their dicts have, and no others."""
    at_class = [inspect.getattr_static(kind, name, None) for name in names]
    return (
        bool(kind.__dictoffset__)
        and not slot_names(kind)
        and kind.__getattribute__ is object.__getattribute__
        and not any(map(inspect.isdatadescriptor, at_class))
    )


def _dataclass_attributes(x: Leaf) -> list[str]:
    """The names of what an object has, in its order, and of fields that descriptors have for it."""
    names = attribute_names(x)
    others = [f.name for f in dataclasses.fields(x) if f.name not in names]
    at_class = [inspect.getattr_static(type(x), name, None) for name in others]
    pairs = zip(others, map(inspect.isdatadescriptor, at_class), strict=True)
    return [*names, *(name for name, is_there in pairs if is_there and hasattr(x, name))]


def _beside(x: object, parts: list[Leaf], structure: PyTreeDef) -> list[Hashable]:
    """Attributes of a container of a pytree that are neither its parts nor what it carries.

    Raises `TypeError` if one of them may change.
    """
    _, carried = structure.node_data()
    known_ids = {id(x) for x in (*parts, carried)}
    if isinstance(carried, tuple | list):
        known_ids.update(map(id, carried))
    attributes = ((name, getattr(x, name)) for name in attribute_names(x))
    return [(name, snapshot(value)) for name, value in attributes if id(value) not in known_ids]


def rebuild(x: object, parts: list[Leaf]) -> PyTree:
    """Returns a container like another one with other parts, in the order of `children_of`."""
    kind: Any = type(x)
    if isinstance(x, np.ndarray):
        array = np.empty(x.shape, object)
        for place, part in zip(np.ndindex(x.shape), parts, strict=True):
            array[place] = part
        return array
    if isinstance(x, tuple | list | dict | collections.deque):
        items, extra = parts[: len(x)], parts[len(x) :]
        copied = _filled(x, items)
        for name, part in zip(attribute_names(x), extra, strict=True):
            object.__setattr__(copied, name, part)
        return copied
    if dataclasses.is_dataclass(x):
        copied = object.__new__(kind)
        for name, part in zip(_dataclass_attributes(x), parts, strict=True):
            object.__setattr__(copied, name, part)
        return copied
    return jax.tree.unflatten(jax.tree.structure(x, is_leaf=lambda y: y is not x), parts)


def _filled(x: Leaf, parts: list[Leaf]) -> PyTree:
    """A container like another one that holds other parts."""
    kind: Any = type(x)
    if hasattr(kind, "_fields"):
        return tuple.__new__(kind, parts)
    if isinstance(x, collections.deque):
        return collections.deque(parts, x.maxlen)
    if isinstance(x, tuple | list):
        return kind(parts)
    copied = copy.copy(x)
    copied.update(zip(x, parts, strict=True))
    return copied
