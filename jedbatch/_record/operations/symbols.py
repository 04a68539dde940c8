"""Symbolic values: tracers that have a type and no value, and how they are indexed.

Their recorder knows which instance they belong to and records operations on them.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._graph.operations import CallSpec
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.numbers import Number
from jedbatch._jaxpr.symbolic_dims import (
    asks_for_type,
    is_ragged,
    length_known,
    refuse_iteration,
    refuse_writing,
)
from jedbatch._jaxpr.versions import traced_number
from jedbatch._record.cell import pause
from jedbatch._record.operations.failures import note_operation
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import Leaf, PyTree
from jedbatch.errors import SymbolicValueError


class RecorderLike(Protocol):
    """The recorder of a symbol, as symbols and the functions that record their operations see it.

    See `Recorder` for the attributes.
    """

    registry: Registry
    active: bool
    keeps_types: bool
    caching: bool
    call_specs: list[int]
    references: list[int]
    counter: list[int]
    num_values: int
    input_group: list[int]
    input_value: list[Leaf]
    computed: dict[int, Any]
    leaves: dict[int, tuple[int, Leaf]]
    known: dict[int, tuple[Any, int | None]]
    kept: list[Any]
    containers: dict[int, tuple[Hashable, None]]
    cells: dict[Any, Any]
    constants: dict[Hashable, Any]
    leaving: Callable[["Symbol", str], None] | None
    stacking: Any
    has_numbers: bool
    elements: dict[int, Any]

    def note_row(self, value: "Value", row: Any) -> None: ...

    @property
    def result(self) -> type["Value"]: ...

    @property
    def watched(self) -> Any: ...

    def is_valid(self) -> bool: ...

    def symbol(self, x: Leaf) -> Leaf: ...

    def with_constants(self, tree: PyTree) -> PyTree: ...

    def is_weight_reached(self, x: Leaf) -> bool: ...

    def input(self, x: Leaf) -> "Value": ...

    def trust(self, x: Leaf) -> None: ...

    def perform(self, name: str, key: Any, call: Callable, args: Sequence[Leaf]) -> list[Leaf]: ...

    def number(self, number: Number) -> "Value": ...

    def new_input(self, group: int, value: Any) -> int: ...

    def leaf_value(self, kind: int, leaf: int, path: tuple) -> "Value": ...

    def node(
        self,
        name: str,
        key: Hashable,
        call: Callable,
        shared: tuple[int, ...],
        operands: Sequence["Value"],
    ) -> PyTree: ...

    def shared_value(self, symbol: "Shared") -> "Value": ...

    def cell_call_spec(self, cell: Any, args: tuple, static: dict) -> tuple[Any, list] | None: ...

    def description(self, cell: Any, args: tuple, static: dict) -> Any: ...

    def described_cell(self, cell: Any) -> tuple[tuple, str | None, tuple[int, ...]]: ...

    def note_container(self, x: Any, token: Hashable) -> None: ...

    def record(self, call_spec: CallSpec) -> PyTree: ...

    def results(self, call_spec: CallSpec, index: int) -> PyTree: ...

    def slow_path(self, cell: Any, args: tuple, static: dict) -> PyTree: ...

    def value_of(self, symbol: "Symbol") -> Any: ...


def by_value(what: str, convert: Callable) -> Callable:
    """A method that converts the value of a symbol, as far as there is one.

    Raises `SymbolicValueError`, which begins with `what`, where there is none.
    """

    def method(self: "Symbol", *args: Any, **kwargs: Any) -> Any:
        value = self._trace.value_of(self) if type(self) is Value else None
        if value is None:
            value = self.value_for(what)
        try:
            return convert(value, *args, **kwargs)
        except jax.errors.JAXTypeError as error:  # of a tracer, which a future may stand for
            raise SymbolicValueError(
                f"{what} needs the value of a future of type {self.aval.str_short()}, which was "
                f"computed under a transformation of JAX that knows no values here "
                f"({type(value).__name__}). `help(jedbatch.errors.SymbolicValueError)` says where "
                "Python may decide on values, and what to write elsewhere."
            ) from error

    return method


def by_constant(what: str, convert: Callable) -> Callable:
    """The same for what becomes a number of Python or an array of NumPy, which has no gradient."""
    of_value = by_value(what, convert)

    def method(self: "Symbol", *args: Any, **kwargs: Any) -> Any:
        if type(self) in (Value, Shared) and self._trace.leaving is not None:
            self._trace.leaving(self, what)
        return of_value(self, *args, **kwargs)

    return method


def _remembering(name: str) -> Callable:
    """An operator that does what that of a tracer does, the second time faster."""
    of_tracer = getattr(Tracer, name)

    def slow_path(*args: Any) -> Any:
        try:
            return of_tracer(*args)
        except Exception as error:
            note_operation(error, name, args)
            raise

    def method(self: "Symbol", *other: Any) -> Any:
        if type(self) is Value or type(self) is Shared:
            return self._trace.operate(slow_path, slow_path, self, *other)
        return slow_path(self, *other)  # a future may stand for something else by now

    return method


class Symbol(Tracer):
    """A tracer of ours: it has a type and no value."""

    __slots__ = ("index",)

    __bool__ = by_value("`if`, `while`, `and`, `or`, `not` or `bool()`", bool)
    __int__ = by_value("`int()`", int)
    __index__ = by_value("`range()` or indexing a Python list", operator.index)
    __float__ = by_constant("`float()`", float)
    __complex__ = by_constant("`complex()`", complex)
    __array__ = by_constant("`numpy.asarray`", np.asarray)
    item = by_constant("`.item()`", lambda value, *args: np.asarray(value).item(*args))
    tolist = by_constant("`.tolist()`", lambda value: value.tolist())

    __add__, __radd__ = _remembering("__add__"), _remembering("__radd__")
    __sub__, __rsub__ = _remembering("__sub__"), _remembering("__rsub__")
    __mul__, __rmul__ = _remembering("__mul__"), _remembering("__rmul__")
    __truediv__, __rtruediv__ = _remembering("__truediv__"), _remembering("__rtruediv__")
    __matmul__, __rmatmul__ = _remembering("__matmul__"), _remembering("__rmatmul__")
    __lt__, __le__ = _remembering("__lt__"), _remembering("__le__")
    __gt__, __ge__ = _remembering("__gt__"), _remembering("__ge__")
    __neg__, __abs__ = _remembering("__neg__"), _remembering("__abs__")

    def value_for(self, what: str) -> Any:
        """Returns the value, which is the recorder's to give, for something that needs it.

        Raises `SymbolicValueError` if there is none.
        """
        value = self._trace.value_of(self)
        if value is None:
            raise SymbolicValueError(
                f"{what} needs the value of a symbolic array of type {self.aval.str_short()}, "
                "which has not been computed: values are unknown while this is recorded. "
                "`help(jedbatch.errors.SymbolicValueError)` says where Python may decide on "
                "values, and what to write elsewhere."
            )
        return value

    def full_lower(self):
        return self

    def _contents(self):
        """For JAX, which looks into it to find out whether a value may be differentiated later."""
        return [("value", traced_number())] if has_gradient(self.aval.dtype) else []

    @property
    def aval(self):  # type: ignore[override]
        self._trace.is_valid()
        return self._type()

    def __repr__(self):
        try:
            kind = self._type()
        except ReferenceError:  # those who recorded are gone, with all types
            return "symbolic array of a function that was recorded before"
        if not kind.shape:
            refuse_writing()
        return f"symbolic {kind.str_short()}"


class Value(Symbol):
    """A symbolic value of one instance: result `index`, or input `-1 - index`."""

    __slots__ = ("type",)

    def __init__(self, recorder: RecorderLike, index: int, value_type: int):
        self._trace = recorder
        self.index = index
        self.type = value_type

    def _type(self):
        return self._trace.registry.avals[self.type]

    @property
    def aval(self):  # type: ignore[override]
        self._trace.is_valid()
        registry = self._trace.registry
        ragged = registry.ragged_types and registry.ragged_types.get(self.type)
        return ragged if ragged and asks_for_type() else registry.avals[self.type]

    def __getitem__(self, item):
        return self._trace.index_value(self, item)

    def __iter__(self):
        if not self.shape:
            raise TypeError("a symbolic array with no dimensions cannot be iterated over")
        count = self.shape[0]
        if is_ragged((count,)):
            known = length_known(count)
            count = refuse_iteration() if known is None else known
        return (self[i] for i in range(count))


class Shared(Symbol):
    """A symbolic value that all instances share: `registry.shared[index]`."""

    __slots__ = ()

    def __init__(self, recorder: RecorderLike, index: int):
        self._trace = recorder
        self.index = index

    def _type(self):
        return self._trace.registry.shared[self.index].aval

    @property
    def shared_index(self):
        return self.index

    def __getitem__(self, item):
        return self._trace.index_shared(self, item)


def value_reached(recorder: RecorderLike, symbol: Symbol) -> np.ndarray | None:
    """The value of a symbol that depends on arrays which the function reaches and no more."""
    registry = recorder.registry
    if not (recorder.active and isinstance(symbol, Shared) and registry.is_reached(symbol.index)):
        return None
    compute, closed_over = registry.prologue([[symbol.index]])
    values = [registry.arrays_reached[registry.shared[i].tracer] for i in closed_over]
    if any(isinstance(x, Tracer) for x in values):
        return None
    with pause(), jax.ensure_compile_time_eval():
        return np.asarray(compute([*[None] * registry.num_leaves, *values])[0][0])


# --- static indices ---


def is_static(item: Any) -> bool:
    """True of an index without arrays: ints, slices, None, Ellipsis and tuples of them.

    Not of bools, which are masks.
    """
    if isinstance(item, bool):
        return False
    if isinstance(item, tuple):
        return all(map(is_static, item))
    if isinstance(item, slice):
        return all(map(is_static, (item.start, item.stop, item.step)))
    return item is None or item is Ellipsis or isinstance(item, int | np.integer)


def frozen(item: Any) -> Hashable:
    """A static index as something hashable."""
    if isinstance(item, tuple):
        return tuple(map(frozen, item))
    if isinstance(item, slice):
        return "slice", item.start, item.stop, item.step
    return item


def row_index(i: Any, length: int) -> int:
    """The index from the front; raises `IndexError` if it is out of bounds."""
    if not -length <= i < length:
        raise IndexError(f"index {i} is out of bounds for an axis of length {length}")
    return int(i) % length
