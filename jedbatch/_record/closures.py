"""Identity of Python functions: equal keys for functions that compute the same.

Two functions compute the same if their code, globals, defaults, attributes and closed-over values
are the same. These are compared by content where it can be written out and else by identity.

Before, some of what a function holds is taken out of it (`held_values`, `with_held_values`):
symbolic values, which are operands, and numbers that differ from call to call. It holds what it
closes over, its defaults, the arguments of a `functools.partial`, and what functions among these
hold.
"""

import abc
import contextlib
import enum
import functools
import itertools
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.identity import Same, attribute_names, is_frozen, typed_or_same
from jedbatch._jaxpr.versions import is_program, wrapped_by_jax
from jedbatch._support.native import function_types


def cell_of(x: object) -> Any:
    """Returns the `Cell` of a function that `cell` returned; None of anything else.

    `functools.wraps`, `jax.grad` and their like give what they return all attributes of a cell, and
    a method has those of its function; neither computes what the cell does.
    """
    if not isinstance(x, function_types()):
        return None
    made, wrapped = vars(x).get("cell"), vars(x).get("__wrapped__")
    return made if wrapped is not None and wrapped is getattr(made, "fn", None) else None


def function_of(x: Any) -> Any:
    """Returns the function that a cell is made of; anything else as it is."""
    made = cell_of(x)
    return x if made is None else made.fn


def reachable_cells(fn: object) -> tuple[types.CellType, ...]:
    """The cells of a function's closure and of the closures of functions it leads to."""
    cells: dict[int, types.CellType] = {}
    stack = [fn]
    while stack:
        x = function_of(stack.pop())
        if isinstance(x, functools.partial):
            stack += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            stack.append(x.__func__)
        stack += getattr(x, "__defaults__", None) or ()
        for c in getattr(x, "__closure__", None) or ():
            if id(c) not in cells:
                cells[id(c)] = c
                with contextlib.suppress(ValueError):  # a name not assigned yet
                    if isinstance(c.cell_contents, _FUNCTIONS):
                        stack.append(c.cell_contents)
    return tuple(cells.values())


def free_values(fn: object) -> tuple[Any, ...]:
    """Returns the values that a Python function closes over."""
    values = []
    for c in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a name not assigned yet
            values.append(c.cell_contents)
    return tuple(values)


class Part(abc.ABC):
    """A part of our own functions that says itself what tells it apart."""

    @abc.abstractmethod
    def identity(self, program_key: Callable[[Any], Hashable]) -> Hashable:
        """Returns what is equal for parts that are equal, given that of programs."""


def function_identity(
    fn: object,
    ways: Mapping[int, Hashable] = types.MappingProxyType({}),
    program_key: Callable[[Any], Hashable] = Same,
) -> Hashable:
    """Equal for functions of the same code, globals, defaults, attributes and closed-over values.

    `ways` names arrays, by their ids, that are told apart by name; `program_key` tells programs of
    JAX apart, in which it hands on functions that it has traced.
    """
    return _identity(fn, ways, program_key, [])


_FUNCTIONS = (*function_types(), types.MethodType, functools.partial)


def _identity(
    value: object,
    ways: Mapping[int, Hashable],
    program_key: Callable[[Any], Hashable],
    path: list[int],
) -> Hashable:
    """Returns the key of a function or of something that it leads to.

    Of symbolic values, those that all instances share are told apart, and others find no equal:
    they make an error when the cell is traced.
    """
    value = function_of(value)
    if id(value) in path:  # a function that calls itself
        return "around", len(path) - path.index(id(value))
    path = [*path, id(value)]

    def each(parts: Any) -> tuple[Hashable, ...]:
        return tuple(_identity(x, ways, program_key, path) for x in parts)

    if isinstance(value, Tracer):
        shared = getattr(value, "shared_index", None)
        if shared is not None:
            return "shared", shared
    if id(value) in ways:
        return ways[id(value)]
    if isinstance(value, Tracer):
        return Same(value)
    if is_program(value):
        return program_key(value)
    if isinstance(value, Part):
        return value.identity(program_key)
    if isinstance(value, functools.partial):
        named = (*sorted(value.keywords.items()), *_attributes(value))
        return "partial", *each((value.func, *value.args, *named))
    if isinstance(value, types.MethodType):
        return "method", *each((value.__func__, value.__self__))
    if isinstance(value, types.FunctionType):
        keywords = (value.__kwdefaults__ or {}).items()
        defaults = "defaults", *(value.__defaults__ or ()), *keywords
        parts = *free_values(value), *defaults, *_attributes(value)
        return value.__code__, Same(value.__globals__), *each(parts)
    if (wrapped := wrapped_by_jax(value)) is not None:
        return type(value), *each(wrapped)
    if isinstance(value, tuple | list) and not isinstance(value, enum.Enum):
        return type(value), *each(value)
    if isinstance(value, dict):
        return dict, *each(value.items())
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.tobytes()
    if is_frozen(value):
        kind: Any = type(value)
        names = attribute_names(value)
        return kind, *names, *each(getattr(value, name) for name in names)
    return typed_or_same(value)


def _attributes(fn: Any) -> list[tuple[str, Any]]:
    """The attributes that were assigned to a function, which it may read."""
    return [(name, x) for name, x in sorted(vars(fn).items()) if name != "__wrapped__"]


Parts = dict[int, tuple[Any, list[Any]]]  # functions and what they are made of, by their ids


def _parts(x: Any) -> list[Any] | None:
    """The parts of a function, if there can be one with others; None of anything else."""
    if type(x) in (functools.partial, jax.tree_util.Partial):
        return [x.func, *x.args, *(value for _, value in sorted(x.keywords.items()))]
    if type(x) is types.MethodType:
        return [x.__func__]
    if type(x) is types.FunctionType and cell_of(x) is None:
        return [*free_values(x), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    return None


def _functions_in(fn: object) -> Parts:
    """A function and the functions that it holds, each once."""
    found: Parts = {}
    stack = [fn]
    while stack:
        x = stack.pop()
        parts = None if id(x) in found else _parts(x)
        if parts is not None:
            found[id(x)] = x, parts
            stack += reversed(parts)
    return found


def held_values(fn: object) -> tuple[Any, ...]:
    """Returns all that a function holds, and the functions that it holds: but for functions."""
    found = _functions_in(fn)
    return tuple([x for _, parts in found.values() for x in parts if id(x) not in found])


def held_functions(fn: object) -> Hashable:
    """Which function holds which: two of equal identity may hold one twice, or another as well."""
    found = _functions_in(fn)
    numbers = {key: k for k, key in enumerate(found)}
    return tuple([tuple([numbers.get(id(x)) for x in parts]) for _, parts in found.values()])


def with_held_values(fn: Any, values: Mapping[int, Any]) -> Any:
    """The function with some of the `held_values` replaced, by position."""
    if not values:
        return fn
    found, position = _functions_in(fn), itertools.count()
    parts_of, changed = {}, set()
    for key, (_, parts) in found.items():
        places = [None if id(x) in found else next(position) for x in parts]
        parts_of[key] = [
            x if k is None else values.get(k, x) for k, x in zip(places, parts, strict=True)
        ]
        if not values.keys().isdisjoint(places):
            changed.add(key)
    num_changed = 0
    while num_changed != len(changed):
        num_changed = len(changed)
        changed |= {
            key for key, parts in parts_of.items() if not changed.isdisjoint(map(id, parts))
        }
    copies: dict[int, Any] = {}
    cells: dict[int, types.CellType] = {}  # several functions may assign to one

    def cell_like(old: types.CellType, parts: Iterator[Any]) -> types.CellType:
        if not _is_assigned(old):
            return old
        part = next(parts)
        is_changed = part is not old.cell_contents or id(part) in changed
        return cells.setdefault(id(old), types.CellType()) if is_changed else old

    def copy(x: Any) -> Any:
        if id(x) not in changed:
            return x
        if id(x) not in copies:
            if type(x) is types.FunctionType:
                parts = iter(parts_of[id(x)])
                closure = tuple([cell_like(c, parts) for c in x.__closure__ or ()])
                made = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, closure)
                made.__dict__.update(x.__dict__)
                copies[id(x)] = made  # it may call itself
                _fill(x, made, [copy(part) for part in parts_of[id(x)]])
            else:
                fn, *args = [copy(part) for part in parts_of[id(x)]]
                copies[id(x)] = _bound(x, fn, args)
        return copies[id(x)]

    return copy(fn)


def _bound(x: Any, fn: Any, args: list[Any]) -> Any:
    """A method or partial like another one, of another function and with other arguments."""
    if type(x) is types.MethodType:
        return types.MethodType(fn, x.__self__)
    names = sorted(x.keywords)
    first = len(args) - len(names)
    made = type(x)(fn, *args[:first], **dict(zip(names, args[first:], strict=True)))
    made.__dict__.update(x.__dict__)
    return made


def _fill(fn: types.FunctionType, made: types.FunctionType, parts: list[Any]) -> None:
    """Gives a copy of a function its parts."""
    rest = iter(parts)
    for old, new in zip(fn.__closure__ or (), made.__closure__ or (), strict=True):
        if _is_assigned(old):
            part = next(rest)
            if new is not old:
                new.cell_contents = part
    made.__defaults__ = tuple([next(rest) for _ in fn.__defaults__ or ()]) or None
    made.__kwdefaults__ = {name: next(rest) for name in fn.__kwdefaults__ or ()} or None


def _is_assigned(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name not assigned yet
        return False


OPERAND = object()  # stands for what a function takes as an operand


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes that code reads, functions in it included."""
    inner = (code_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def is_installed(module: str) -> bool:
    """Returns whether a module belongs to an installed package or to Python."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root == "jedbatch":
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
