"""Cells that find what they read by themselves: in objects they close over, or in a context.

Libraries keep the parameters of a module in a context: a stack of dicts, in which a layer looks up
its weights by name while the function that has put them there is running. No argument of a cell and
nothing that it closes over shows which ones these are. So a cell that reads shared values which
nothing shows is traced at every call, whereas its nodes are of one type as long as it computes the
same. And modules are made anew for each instance; what cells that close over them compute is seen
from their programs.
"""

import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jedbatch._graph.operations import CallSpec
from jedbatch._jaxpr.identity import Same, attribute_names
from jedbatch._jaxpr.symbolic_dims import line_of_user
from jedbatch._jaxpr.versions import ClosedProgram
from jedbatch._support.native import function_types
from jedbatch._support.types import Leaf
from jedbatch.errors import RetracedCellWarning

MANY_TRACES = 256  # of one cell, before we warn
MAX_ELEMENTS = 4096  # of arrays of whole numbers that tracing makes
MAX_VALUES = 10_000  # things looked at in what a cell closes over
_WHOLE = (
    type,
    types.ModuleType,
    *function_types(),
    types.BuiltinFunctionType,
    dict,
    jax.Array,
)


def by_class(key: Hashable) -> Hashable:
    """Returns the identity of a cell with classes in the place of objects known by identity.

    Together with what the cell computes, it tells cells apart as exactly.
    """
    if type(key) is tuple:
        return tuple(map(by_class, key))
    if isinstance(key, Same) and not isinstance(key.value, _WHOLE):
        return "an object", type(key.value)
    return key


def shows_arrays(key: Hashable, program: ClosedProgram, again: Callable[[], ClosedProgram]) -> bool:
    """Returns whether an identity shows all arrays among the constants of a program.

    Whole numbers that tracing itself makes, such as tables of messages, need not be shown: traced
    `again`, the program has other arrays with the same numbers in their place.
    """
    shown = {id(x.value) for x in _parts(key) if isinstance(x, Same)}
    consts = list(program.consts)
    places = [k for k, c in enumerate(consts) if isinstance(c, jax.Array) and id(c) not in shown]
    if not all(_may_be_made(consts[k]) for k in places):
        return False
    others = list(again().consts) if places else consts
    return len(others) == len(consts) and all(_is_equal(consts[k], others[k]) for k in places)


def _may_be_made(array: jax.Array) -> bool:
    """Returns whether an array has few whole numbers or booleans, as no weights have."""
    return array.dtype.kind in "biu" and array.size <= MAX_ELEMENTS


def _is_equal(array: jax.Array, other: object) -> bool:
    """Returns whether another array has the same numbers."""
    if array is other or not isinstance(other, jax.Array) or array.dtype != other.dtype:
        return False
    return np.array_equal(np.asarray(array), np.asarray(other))


def shows_shared(key: Hashable, indices: Iterable[int]) -> bool:
    """Returns whether an identity shows all of some shared values, or objects that hold them."""
    hidden = set(indices)
    if not hidden:
        return True
    objects = []
    for part in _parts(key):
        if isinstance(part, Same) and not isinstance(part.value, _WHOLE):
            objects.append(part.value)
        elif type(part) is tuple and part[:1] == ("shared",):
            hidden -= set(part[1:])
    return hidden <= set(_shared_in(objects))


def _parts(key: Hashable) -> Iterator[Hashable]:
    """Yields all parts of a key, those of its parts included."""
    stack = [key]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, tuple | frozenset):
            stack += part


def _shared_in(objects: list[Any]) -> Iterator[int]:
    """Yields the shared values among the attributes of objects, and what these hold."""
    seen: dict[int, Leaf] = {}
    stack = objects
    while stack and len(seen) < MAX_VALUES:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, jax.core.Tracer):
            index = getattr(x, "shared_index", None)
            if index is not None:
                yield index
        elif isinstance(x, dict):
            stack += x.values()
        elif isinstance(x, list | tuple | set | frozenset):
            stack += x
        elif not isinstance(x, _WHOLE):
            stack += [getattr(x, name, None) for name in attribute_names(x)]


class Hidden:
    """Calls of cells that read what nothing shows, by their types.

    Attributes:
      arrays: those that read arrays, whose records are not kept for later calls.
      shared: those that read shared values.
    """

    def __init__(self) -> None:
        self.arrays: set[int] = set()
        self.shared: set[int] = set()
        self._traces: dict[Hashable, int] = {}  # of cells

    def note(
        self,
        call: CallSpec,
        name: str,
        key: Hashable,
        program: ClosedProgram,
        reads: Iterable[int],
        again: Callable[[], ClosedProgram],
    ) -> bool:
        """Returns whether a call must be traced the next time, too; warns once if it often was.

        Args:
          call: how it is recorded.
          name: of the cell.
          key: the identity of the cell.
          program: what it computes.
          reads: the shared values that it found.
          again: traces the cell once more.
        """
        if not shows_arrays(key, program, again):
            self.arrays.add(call.node_type)
        if not shows_shared(key, reads):
            self.shared.add(call.node_type)
            cell = by_class(key)
            self._traces[cell] = self._traces.get(cell, 0) + 1
            if self._traces[cell] == MANY_TRACES:
                _warn(name, line_of_user())
        return not self.is_same_again(call)

    def is_same_again(self, call: CallSpec) -> bool:
        """Returns whether equal calls of a cell are the same without tracing them."""
        return call.node_type not in self.arrays and call.node_type not in self.shared

    def was_traced(self, key: Hashable) -> bool:
        """Returns whether a cell was traced before and read shared values that nothing shows."""
        return by_class(key) in self._traces


def _warn(name: str, line: str) -> None:
    at = f", called at {line}," if line else ""
    warnings.warn(
        f"cell `{name}`{at} has been traced {MANY_TRACES} times, once for each call, because it "
        "finds parameters in a context or a global instead of its arguments. Pass them, as in "
        "`jedbatch.cell(transformed.apply)(params, x)`, or write no cells and "
        '`jedbatch.batch(..., granularity="auto")`; `help(jedbatch.errors.RetracedCellWarning)` '
        "says more.",
        RetracedCellWarning,
        stacklevel=2,
    )
