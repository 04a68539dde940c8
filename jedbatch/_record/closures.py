"""Identity of Python functions: equal keys for functions that compute the same.

Two functions compute the same if their code, globals, defaults and closed-over values are the
same. Closed-over values are compared by content where it can be written out and else by identity;
symbolic values that a function closes over directly are operands instead.
"""

import contextlib
import enum
import functools
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

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


def function_identity(
    fn: object,
    ways: Mapping[int, Hashable] = types.MappingProxyType({}),
    program_key: Callable[[Any], Hashable] = Same,
) -> Hashable:
    """Equal for functions that compute the same: code, globals, defaults and closed-over values.

    `ways` names arrays, by their ids, that are told apart by name; `program_key` tells programs of
    JAX apart, in which it hands on functions that it has traced.
    """
    direct = free_values(function_of(fn))
    operands = {id(x): "operand" for x in direct if isinstance(x, Tracer)}
    return _identity(fn, operands, ways, program_key, [])


_FUNCTIONS = (*function_types(), types.MethodType, functools.partial)


def _identity(
    value: object,
    operands: Mapping[int, str],
    ways: Mapping[int, Hashable],
    program_key: Callable[[Any], Hashable],
    path: list[int],
) -> Hashable:
    """Returns the key of a function or of something that it leads to.

    Tracers it closes over directly become operands. Elsewhere, values that all instances share
    are told apart, and others find no equal: they make an error when the cell is traced.
    """
    value = function_of(value)
    if id(value) in path:  # a function that calls itself
        return "around", len(path) - path.index(id(value))
    path = [*path, id(value)]

    def each(parts: Any) -> tuple[Hashable, ...]:
        return tuple(_identity(x, operands, ways, program_key, path) for x in parts)

    if isinstance(value, Tracer):
        if len(path) == 2 and id(value) in operands:
            return "operand"
        shared = getattr(value, "shared_index", None)
        if shared is not None:
            return "shared", shared
    if id(value) in ways:
        return ways[id(value)]
    if isinstance(value, Tracer):
        return Same(value)
    if is_program(value):
        return program_key(value)
    if isinstance(value, functools.partial):
        return "partial", *each((value.func, *value.args, *sorted(value.keywords.items())))
    if isinstance(value, types.MethodType):
        return "method", *each((value.__func__, value.__self__))
    if isinstance(value, types.FunctionType):
        keywords = (value.__kwdefaults__ or {}).items()
        parts = (*free_values(value), "defaults", *(value.__defaults__ or ()), *keywords)
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


def with_free_values(fn: Any, values: Mapping[int, Any]) -> Any:
    """The function with some of the values it closes over replaced, by position."""
    if not values:
        return fn
    assigned = iter(range(len(fn.__closure__)))
    cells = tuple(
        types.CellType(values[k]) if _is_assigned(c) and (k := next(assigned)) in values else c
        for c in fn.__closure__
    )
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _is_assigned(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name not assigned yet
        return False


NUMBER = object()  # stands for a number that a function takes as an operand


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
