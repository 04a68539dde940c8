"""How environments read what they have seen once more: functions from a thing to what is in it.

They are called before each call of a batched function, and so do as little as they can.
"""

import functools
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np

from jedbatch._jaxpr.identity import attribute_names
from jedbatch._support.types import Leaf

_MISSING = object()
_same_number = functools.lru_cache(maxsize=4096)(int)
_of_function = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _count(things: Sized) -> int:
    """Returns how many things there are, as an object that is the same each time.

    Of numbers above 256, which the interpreter makes anew, one is kept.
    """
    number = len(things)
    return number if number <= 256 else _same_number(number)


def attribute(x: object, name: str) -> Any:
    attributes = getattr(x, "__dict__", {})
    return attributes[name] if name in attributes else getattr(x, name)


def of_functions(functions: list[types.FunctionType]) -> Iterator[Any]:
    parts = map(_of_function, functions)
    return itertools.chain(*parts, map(_count, map(vars, functions)))


def of_cells(cells: list[types.CellType]) -> list[Any]:
    try:
        return [cell.cell_contents for cell in cells]
    except ValueError:  # a name not assigned yet
        return [_contents(cell) for cell in cells]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def of_names(names: tuple[str, ...], namespace: dict[str, Any]) -> Iterator[Any]:
    return map(namespace.get, names, itertools.repeat(_MISSING))


def of_dict(x: dict) -> tuple[Any, ...]:
    return *x, *x.values()


def stays(x: Leaf) -> bool:
    """True of tuples, which hold the same things for good."""
    return isinstance(x, tuple) and type(x).__iter__ is tuple.__iter__


def of_class(kind: type) -> tuple[Any, ...]:
    return tuple(vars(kind).values())


def of_some_of_class(names: Iterable[str], kind: type) -> tuple[Any, ...]:
    attributes = vars(kind)
    return _count(attributes), *map(attributes.get, names)


def of_object(x: object) -> tuple[Any, ...]:
    attributes = x.__dict__
    return *attributes, *attributes.values()


def of_attributes(x: object) -> list[Any]:
    names = attribute_names(x)
    return [*names, *(attribute(x, name) for name in names)]


def of_rows(copy: np.ndarray, x: np.ndarray) -> tuple[bool]:
    same = x.dtype == copy.dtype and x.shape == copy.shape
    return (same and x.tobytes() == copy.tobytes(),)
