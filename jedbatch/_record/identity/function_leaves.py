"""The things that functions hold, and functions like them that hold other things.

A function that is a cell takes symbolic values that it holds as operands. So they are named when
functions are compared, and replaced when one is traced. A function holds what it closes over, its
defaults, the arguments of a `functools.partial`, the object whose method it is, and what functions,
containers and objects among these hold.

A copy that holds other things stands for a function while a cell is traced. So containers and
objects are looked into if a copy of one is as good: tuples, lists and dicts, dataclasses, and
objects of classes of the user whose attributes are in their dicts. Where there are many things, as
in a tree that a cell closes over, or in weights, only functions are looked into.
"""

import functools
import itertools
import types
from collections.abc import Collection, Container, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
from jax.core import Tracer

from jedbatch._jaxpr.identity import Same
from jedbatch._jaxpr.versions import static_arguments
from jedbatch._record.identity.functions import (
    FUNCTIONS_OF_RULES,
    JITTED,
    cell_of,
    free_values,
    function_of,
    functions_with_rules,
    is_installed,
)
from jedbatch._record.instances.arrays import has_attributes_only, plain_fields, reads_its_dict

MAX_PARTS = 256  # of containers and objects that one function holds, to be looked into

# Functions, containers and objects, and what they are made of, by their ids.
Parts = dict[int, tuple[Any, list[Any]]]


def _parts_of_function(x: Any) -> list[Any] | None:
    """The parts of a function, if there can be one with others; None of anything else."""
    if type(x) in (functools.partial, jax.tree_util.Partial):
        return [x.func, *x.args, *(value for _, value in sorted(x.keywords.items()))]
    if type(x) is types.MethodType:
        return [x.__func__, x.__self__]
    if type(x) is types.FunctionType and cell_of(x) is None:
        return [*free_values(x), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    if type(x) is JITTED and hasattr(x, "__wrapped__"):
        return [x.__wrapped__]
    return functions_with_rules(x)


def _parts_of_container(x: Any) -> list[Any] | None:
    """The parts of a container or object of which there can be a copy; None of anything else."""
    kind = type(x)
    if kind in (tuple, list) or (isinstance(x, tuple) and hasattr(kind, "_fields")):
        return list(x)
    if kind is dict:
        return list(x.values())
    return list(vars(x).values()) if is_copied(x) else None


def is_copied(x: Any) -> bool:
    """Returns whether an object is what its attributes are, so that a copy is as good."""
    if isinstance(x, _WHOLE):
        return False
    names, kind = getattr(x, "__dict__", None), cast(Hashable, type(x))
    if type(names) is not dict or not names:
        return False
    return _has_copies(kind, tuple(names)) and has_attributes_only(x)


_WHOLE = (type, types.ModuleType, types.FunctionType, tuple, list, dict, set, frozenset, Tracer)


@functools.lru_cache(maxsize=512)
def _has_copies(kind: Any, names: tuple[str, ...]) -> bool:
    if hasattr(kind, "__del__"):
        return False
    if plain_fields(kind) == names:
        return _is_frozen(kind) or kind.__setattr__ is object.__setattr__
    own = [k for k in kind.__mro__ if k is not object]
    return not any(is_installed(k.__module__) for k in own) and reads_its_dict(kind, names)


def _is_frozen(kind: Any) -> bool:
    params = getattr(kind, "__dataclass_params__", None)
    return params is not None and params.frozen


def _may_change(x: Any) -> bool:
    """Returns whether attributes of an object, of which there can be a copy, may be assigned."""
    return is_copied(x) and not _is_frozen(type(x))


def holds_traced_objects(fn: object) -> bool:
    """Returns whether a function holds an object, known by which one it is, with a traced value.

    Not one that it holds by way of another.
    """
    return any(
        is_copied(x)
        and type(x).__hash__ is object.__hash__
        and any(isinstance(part, Tracer) for part in parts)
        for x, parts in _holders(fn).values()
    )


def objects_held(
    fn: object, stays: Container[int], operands: Collection[int]
) -> list[tuple[Any, bool]]:
    """Returns the objects that a function holds which may change, and whether they hold operands.

    And functions of `jax.jit` that do.

    Args:
      fn: the function.
      stays: ids of objects that do not change, unless they hold operands.
      operands: ids of values.
    """
    found = _holders(fn)
    parts_of = {key: parts for key, (_, parts) in found.items()}
    holding = _leading_to(set(operands), parts_of) if operands else set()
    return [
        (x, key in holding)
        for key, (x, _) in found.items()
        if (_may_change(x) and (key not in stays or key in holding))
        or (type(x) is JITTED and key in holding)
    ]


def code_of(fn: Any) -> types.CodeType | None:
    """Returns the code of a function, that which a partial or a method runs; None of objects."""
    fn = function_of(fn)
    while type(fn) is not types.FunctionType and (parts := _parts_of_function(fn)):
        fn = function_of(parts[0])
    return getattr(fn, "__code__", None)


def _holders(fn: object, opens: bool = True) -> Parts:
    """A function and the functions, containers and objects that it holds, each once."""
    found: Parts = {}
    stack = [fn]
    room = MAX_PARTS
    while stack:
        x = stack.pop()
        if id(x) in found:
            continue
        parts = _parts_of_function(x)
        if parts is None and opens and x is not fn:
            parts = _parts_of_container(x)
            room -= len(parts or ())
            if room < 0:
                return _holders(fn, opens=False)
        if parts is not None:
            found[id(x)] = x, parts
            stack += reversed(parts)
    return found


def _is_held(x: Any, holder: Any) -> bool:
    """Returns whether a part counts: not what all instances share, in containers."""
    return not hasattr(type(x), "shared_index") or _parts_of_function(holder) is not None


def held_values(fn: object) -> tuple[Any, ...]:
    """Returns all that a function holds, and what it holds: but for functions and containers."""
    found = _holders(fn)
    return tuple(
        [x for of, parts in found.values() for x in parts if id(x) not in found and _is_held(x, of)]
    )


_MADE_OF_PARTS = (types.FunctionType, types.MethodType, functools.partial)


class Made(NamedTuple):
    """What a function is made of.

    Attributes:
      key: equal for functions of the same code that hold the very same objects, and keeps these
        alive. As long as they hold what they do, such functions compute the same.
      objects: these objects.
      holders: what holds them: functions, the function itself among them, and other objects.
    """

    key: Hashable
    objects: tuple[Any, ...]
    holders: list[Any]


def made_of(fn: object, stays: Container[int] | None) -> Made | None:
    """Returns what a function is made of; None if it, or one that it holds, has attributes.

    Objects that may be copied are made of their attributes, but for those that stay, given their
    ids; None if all do. There is no answer if these are many.
    """
    key: list[Any] = []
    objects: list[Any] = []
    holders: list[Any] = []
    places: dict[int, int] = {}
    stack = [fn]
    while stack:
        x: Any = function_of(stack.pop())
        if id(x) in places:  # a function that calls itself
            key.append(places[id(x)])
            continue
        places[id(x)] = len(places)
        parts = _parts_of_function(x) if type(x) in _MADE_OF_PARTS else None
        if parts is None and stays is not None and is_copied(x) and id(x) not in stays:
            key.append(tuple(vars(x)))
            holders.append(x)
            parts = list(vars(x).values())
        elif parts is None:
            key.append(Same(x))
            objects.append(x)
            continue
        key += [type(x), len(parts)]
        if type(x) is types.FunctionType:
            key += [x.__code__, id(x.__globals__), x.__defaults__ is None]
            key.append(tuple(x.__kwdefaults__ or ()))
            holders.append(x)
        elif isinstance(x, functools.partial):
            key.append(tuple(sorted(x.keywords)))
        has_attributes = type(x) in (types.FunctionType, functools.partial) and vars(x)
        if has_attributes or len(places) > MAX_PARTS:
            return None
        stack += reversed(parts)
    return Made(tuple(key), tuple(objects), holders)


def held_functions(fn: object) -> Hashable:
    """Which function holds which: two of equal identity may hold one twice, or another as well."""
    found = _holders(fn)
    numbers = {key: k for k, key in enumerate(found)}
    return tuple([tuple([numbers.get(id(x)) for x in parts]) for _, parts in found.values()])


def with_held_values(fn: Any, values: Mapping[int, Any]) -> Any:
    """The function with some of the `held_values` replaced, by position."""
    if not values:
        return fn
    found, position = _holders(fn), itertools.count()
    parts_of, changed = {}, set()
    for key, (of, parts) in found.items():
        places = [next(position) if id(x) not in found and _is_held(x, of) else None for x in parts]
        parts_of[key] = [
            x if k is None else values.get(k, x) for k, x in zip(places, parts, strict=True)
        ]
        if not values.keys().isdisjoint(places):
            changed.add(key)
    changed = _leading_to(changed, parts_of)
    copies: dict[int, Any] = {}
    cells: dict[int, types.CellType] = {}  # several functions may assign to one

    def cell_like(old: types.CellType, parts: Iterator[Any]) -> types.CellType:
        if not _is_assigned(old):
            return old
        part = next(parts)
        is_changed = part is not old.cell_contents or id(part) in changed
        return cells.setdefault(id(old), types.CellType()) if is_changed else old

    def copied_parts(x: Any) -> list[Any]:
        return [copy(part) for part in parts_of[id(x)]]

    def copy(x: Any) -> Any:
        if id(x) not in changed:
            return x
        if id(x) in copies:
            return copies[id(x)]
        kind: Any = type(x)
        made: Any
        if kind is types.FunctionType:
            parts = iter(parts_of[id(x)])
            closure = tuple([cell_like(c, parts) for c in x.__closure__ or ()])
            made = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, closure)
            made.__dict__.update(x.__dict__)
            copies[id(x)] = made  # it may call itself
            _fill(x, made, copied_parts(x))
        elif kind in FUNCTIONS_OF_RULES:
            made = copies[id(x)] = object.__new__(kind)  # its rules may call it
            made.__dict__.update(x.__dict__)
            made.__dict__.update(zip(FUNCTIONS_OF_RULES[kind], copied_parts(x), strict=True))
        elif kind in (list, dict):
            made = copies[id(x)] = kind()
            if kind is list:
                made += copied_parts(x)
            else:
                made.update(zip(x, copied_parts(x), strict=True))
        elif _parts_of_function(x) is None and not isinstance(x, tuple):
            made = copies[id(x)] = object.__new__(kind)
            made.__dict__.update(zip(vars(x), copied_parts(x), strict=True))
        else:
            made = copies[id(x)] = _like(x, copied_parts(x))
        return made

    return copy(fn)


def _leading_to(keys: set[int], parts_of: Mapping[int, list[Any]]) -> set[int]:
    """The keys of what some parts are in, and those of what these are in."""
    found, before = set(keys), -1
    while before != len(found):
        before = len(found)
        found |= {key for key, parts in parts_of.items() if not found.isdisjoint(map(id, parts))}
    return found


def _like(x: Any, parts: list[Any]) -> Any:
    """A tuple, method, partial or function of `jax.jit` like another one, of other parts."""
    if isinstance(x, tuple):
        return tuple.__new__(type(x), parts)
    fn, *args = parts
    if type(x) is types.MethodType:
        return types.MethodType(fn, *args)
    if type(x) is JITTED:
        numbers, static_names = static_arguments(x)
        return jax.jit(fn, static_argnums=numbers, static_argnames=static_names)
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
