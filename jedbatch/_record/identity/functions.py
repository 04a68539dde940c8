"""Identity of Python functions: equal keys for functions that compute the same.

Two functions compute the same if their code, globals, defaults, attributes and closed-over values
are the same. These are compared by content where it can be written out and else by identity.

Some of what a function holds goes by another name in its key (see `held_values`).
"""

import contextlib
import enum
import functools
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.identity import Same, attribute_names, is_frozen, typed_or_same
from jedbatch._jaxpr.versions import is_program, static_arguments, wrapped_by_jax
from jedbatch._support.native import function_types

# Of a function with a derivative rule: the attributes that have it and the rule.
FUNCTIONS_OF_RULES: Mapping[type, tuple[str, ...]] = {
    jax.custom_jvp: ("fun", "jvp"),
    jax.custom_vjp: ("fun", "fwd", "bwd"),
}
JITTED = type(jax.jit(lambda: None))


def functions_with_rules(x: object) -> list[Any] | None:
    """Returns a function with a derivative rule and its rule; None of anything else."""
    names = FUNCTIONS_OF_RULES.get(type(x))
    return None if names is None else [getattr(x, name) for name in names]


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
    objects: Mapping[int, Hashable] = types.MappingProxyType({}),
) -> Hashable:
    """Equal for functions of the same code, globals, defaults, attributes and closed-over values.

    `ways` names arrays, by their ids, that are told apart by name; `program_key` tells programs of
    JAX apart, in which it hands on functions that it has traced; `objects` names objects, by their
    ids, that are told apart by their attributes as well.
    """
    return _identity(fn, ways, program_key, objects, [])


def _identity(
    value: Any,
    ways: Mapping[int, Hashable],
    program_key: Callable[[Any], Hashable],
    objects: Mapping[int, Hashable],
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
        return tuple(_identity(x, ways, program_key, objects, path) for x in parts)

    if isinstance(value, Tracer):
        shared = getattr(value, "shared_index", None)
        if shared is not None:
            return "shared", shared
    if id(value) in ways:
        return ways[id(value)]
    if isinstance(value, Tracer):
        return Same(value)
    kind: Any = type(value)
    if id(value) in objects:
        if kind is JITTED:
            return "jit", *static_arguments(value), *each([value.__wrapped__])
        return kind, objects[id(value)], *each(vars(value).items())
    if is_program(value):
        return program_key(value)
    if isinstance(value, functools.partial):
        named = (*sorted(value.keywords.items()), *_attributes(value))
        return "partial", *each((value.func, *value.args, *named))
    if isinstance(value, types.MethodType):
        return "method", *each((value.__func__, value.__self__))
    if _is_made_once(value):
        return Same(value)
    if isinstance(value, types.FunctionType):
        keywords = (value.__kwdefaults__ or {}).items()
        defaults = "defaults", *(value.__defaults__ or ()), *keywords
        parts = *free_values(value), *defaults, *_attributes(value)
        return value.__code__, Same(value.__globals__), *each(parts)
    if type(value) in FUNCTIONS_OF_RULES:
        own = (named for named in _attributes(value) if named[0] not in _OF_EVERY_FUNCTION)
        return type(value), *each(own)
    if (wrapped := wrapped_by_jax(value)) is not None:
        return type(value), *each(wrapped)
    if isinstance(value, tuple | list) and not isinstance(value, enum.Enum):
        return type(value), *each(value)
    if isinstance(value, dict):
        return dict, *each(value.items())
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.tobytes()
    if is_frozen(value):
        names = attribute_names(value)
        return kind, *names, *each(getattr(value, name) for name in names)
    return typed_or_same(value)


def _is_made_once(value: Any) -> bool:
    """Returns whether this is what a module of an installed package has under its name."""
    if not isinstance(value, (types.FunctionType, *FUNCTIONS_OF_RULES)):
        return False
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
    if not module or not is_installed(module):
        return False
    return getattr(sys.modules.get(module), name, None) is value


_OF_EVERY_FUNCTION = frozenset(functools.WRAPPER_ASSIGNMENTS)


def _attributes(fn: Any) -> list[tuple[str, Any]]:
    """The attributes that were assigned to a function, which it may read."""
    return [(name, x) for name, x in sorted(vars(fn).items()) if name != "__wrapped__"]


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
