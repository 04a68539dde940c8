"""Futures: what operations return inside of a lazy scope, and what they are afterwards.

A future starts as a symbolic value: it has a shape and a dtype, and operations on it are recorded.
When its scope computes, it becomes the value it stands for, in place, since Python cannot exchange
an object that others hold. That takes some care, because what it stands for may be a concrete
array, or a tracer of `jax.grad`, `jax.jit` or `jax.vmap` around the scope:

    concrete    JAX asks tracers for a concrete value (`full_lower`) before it computes, and gets
                the array. For transformations the future is a constant, which is right.
    tracer      Transformations know their tracers by class and trace and take anything else for a
                constant: a gradient would be lost without a word. So the future shows the class,
                the trace and all attributes of the tracer it stands for. Tracers are plain
                Python objects, and JAX has no way to tell.

Rows are taken out of the results of a batch of futures when they are read.
"""

import weakref
from typing import Any, Protocol

import numpy as np
from jax.core import ShapedArray, Trace, Tracer
from jax.extend.core import set_current_trace

from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.configuration import EAGER
from jedbatch._jaxpr.storage import from_stored
from jedbatch._jaxpr.transfers import fetched, handed_over
from jedbatch._program.returned import ROWS_PER_BLOCK, some_rows
from jedbatch._record.cell import recording
from jedbatch._record.operations.symbols import RecorderLike, Shared, Symbol, Value, by_value
from jedbatch._support.types import Array, Dtype
from jedbatch.errors import EscapedValueError


class Returned:
    """Rows that futures stand for, some of one arena.

    Attributes:
      rows: an array, or a list of rows that may be traced one by one.
    """

    def __init__(self, rows: Any):
        self.rows = rows
        self._blocks: dict[int, list[Any]] = {}
        self._host: np.ndarray | None = None

    def take(self, row: int) -> Array:
        """One row, of an array by a program that takes out many at a time."""
        if isinstance(self.rows, list):
            return self.rows[row]
        block = min(ROWS_PER_BLOCK, len(self.rows))
        start = min(row // block * block, len(self.rows) - block)
        if start not in self._blocks:
            self._blocks[start] = some_rows(self.rows, handed_over(np.int32(start)), block)
        return self._blocks[start][row - start]

    def host(self, row: int) -> np.ndarray:
        """One row as an array of NumPy; those of an array are fetched together."""
        if isinstance(self.rows, list):
            return fetched(self.rows[row])
        if self._host is None:
            self._host = fetched(self.rows)
        return self._host[row]


class Outcome:
    """The value of a future: a row of what was returned.

    Attributes:
      aval: type of the value.
      returned, row: where it is.
      is_traced: whether it is a tracer of a transformation around the scope.
    """

    __slots__ = ("_value", "aval", "is_traced", "returned", "row")

    def __init__(self, aval: Any, returned: Returned, row: int):
        self.aval = ShapedArray(aval.shape, aval.dtype)  # no result is weakly typed
        self.returned = returned
        self.row = row
        self._value: Any = None
        self.is_traced = False
        if isinstance(returned.rows, list | Tracer):
            self._value = self._take()
            self.is_traced = isinstance(self._value, Tracer)

    @property
    def value(self) -> Array:
        """The array or tracer."""
        if self._value is None:
            with set_current_trace(EAGER):  # whatever is recorded or traced around here
                self._value = self._take()
        return self._value

    def _take(self) -> Array:
        value_type = ValueType(self.aval.shape, self.aval.dtype)
        return from_stored(self.returned.take(self.row), value_type)


class SettledTrace(Trace):
    """The trace of futures that are not waiting any more: they have a value, or never will."""

    def __init__(self, problem: str | None = None):
        super().__init__()
        self.problem = problem

    def is_valid(self) -> bool:
        if self.problem is None:
            return True
        raise EscapedValueError(self.problem)

    def value_of(self, symbol: Symbol) -> None:
        """Says why there is no value."""
        self.is_valid()


COMPUTED = SettledTrace()
LOST = SettledTrace(
    "a future is used whose lazy scope was left by an exception, or whose computation failed; "
    "nothing of it has been computed. Compute what you need before the exception can happen, for "
    "instance by `jax.block_until_ready(future)` inside of the scope, or repeat the scope."
)


def _as_array(value: Any, dtype: Dtype = None, copy: bool | None = None) -> np.ndarray:
    return np.asarray(value, dtype) if copy is None else np.array(value, dtype, copy=copy)


def _of_value(name: str) -> property:
    """An attribute that only computed values have."""

    def attribute(self: "Awaited") -> Any:
        if self.outcome is None:
            raise AttributeError(f"a future has no `{name}` before it is computed")
        return getattr(self.outcome.value, name)

    return property(attribute, doc=f"`{name}` of the value.")


class Awaited(Symbol):
    """A future of either kind: a `Future` or a `SharedFuture`.

    Attributes:
      outcome: what became of it; None as long as it waits.
    """

    __slots__ = ()
    outcome: Outcome | None

    def __init__(self, recorder: "KeepsFutures", index: int):
        self._trace = recorder
        self.index = index
        self.outcome = None
        recorder.futures.append(weakref.ref(self))

    __reduce__ = by_value("pickling or copying", lambda value: value.__reduce__())
    tobytes = by_value("`.tobytes()`", lambda value, *args: value.tobytes(*args))
    __format__ = by_value("formatting", format)
    _numpy = by_value("`numpy.asarray`", _as_array)

    sharding = _of_value("sharding")
    committed = _of_value("committed")
    device = _of_value("device")
    devices = _of_value("devices")
    addressable_shards = _of_value("addressable_shards")
    addressable_data = _of_value("addressable_data")
    global_shards = _of_value("global_shards")
    is_fully_addressable = _of_value("is_fully_addressable")
    is_fully_replicated = _of_value("is_fully_replicated")
    is_deleted = _of_value("is_deleted")
    delete = _of_value("delete")
    on_device_size_in_bytes = _of_value("on_device_size_in_bytes")
    unsafe_buffer_pointer = _of_value("unsafe_buffer_pointer")
    __dlpack__ = _of_value("__dlpack__")
    __dlpack_device__ = _of_value("__dlpack_device__")

    @property
    def value(self) -> Array:
        """Returns the value; computes everything recorded so far if it still waits."""
        return self._trace.value_of(self) if self.outcome is None else self.outcome.value

    def value_for(self, what: str) -> Array:
        """Returns the value, a tracer perhaps."""
        return self.value

    def settle(self, outcome: Outcome) -> None:
        """Becomes the value it stands for."""
        self.outcome = outcome
        self._trace = outcome.value._trace if outcome.is_traced else COMPUTED

    def lose(self) -> None:
        """Will never have a value."""
        self._trace = LOST

    def block_until_ready(self) -> Array:
        """As arrays of JAX have it; computes everything recorded so far if it still waits."""
        value = self.value
        if not isinstance(value, Tracer):
            value.block_until_ready()
        return self

    def full_lower(self) -> Array:
        """Returns the object that JAX should compute with."""
        if self.outcome is None:
            return self
        value = self.outcome.value
        return value.full_lower() if self.outcome.is_traced else value

    def to_concrete_value(self) -> Array:
        """The concrete value, if there is one by now."""
        if self.outcome is None:
            return None
        value = self.outcome.value
        return value.to_concrete_value() if self.outcome.is_traced else value

    def get_referent(self) -> Array:
        """Returns the object that identifies the value to JAX."""
        if self.outcome is None:
            return self
        value = self.outcome.value
        return value.get_referent() if self.outcome.is_traced else value

    @property
    def aval(self):  # type: ignore[override]
        outcome = self.outcome
        if outcome is None:
            self._trace.is_valid()
            return self._type()
        return outcome.value.aval if outcome.is_traced else outcome.aval

    @property  # type: ignore[misc]
    def __class__(self):
        outcome = self.outcome
        return type(outcome.value) if outcome is not None and outcome.is_traced else type(self)

    @property
    def __jax_array__(self):
        outcome = self.outcome
        if outcome is None or recording.recorder is not None:  # where arrays count as weights
            return None
        return lambda: outcome.value

    def __getattr__(self, name: str) -> Any:
        outcome = self.outcome
        if outcome is None:
            return Tracer.__getattr__(self, name)
        return getattr(outcome.value, name)

    def __getitem__(self, item: Any) -> Array:
        return Tracer.__getitem__(self, item)

    def __array__(
        self, dtype: Dtype = None, context: None = None, copy: bool | None = None
    ) -> Array:
        outcome = self.outcome
        if outcome is None or outcome.is_traced or not isinstance(outcome.aval.dtype, np.dtype):
            return self._numpy(dtype, copy)
        return np.array(outcome.returned.host(outcome.row), dtype)

    def __repr__(self) -> str:
        if self._trace is LOST:
            return "future of a lazy scope that failed"
        return repr(self.value)

    def __str__(self) -> str:
        return repr(self) if self._trace is LOST else str(self.value)


class KeepsFutures(RecorderLike, Protocol):
    """A recorder that knows the futures that wait."""

    futures: list[weakref.ref]


class Future(Awaited, Value):
    """The result of a node: `index` among the results recorded since the last round."""

    __slots__ = ("outcome",)

    def __init__(self, recorder: KeepsFutures, index: int, value_type: int):
        super().__init__(recorder, index)
        self.type = value_type


class SharedFuture(Awaited, Shared):
    """A value that depends on weights only: `registry.shared[index]`."""

    __slots__ = ("outcome",)

    @property
    def shared_index(self):
        return self.index if self.outcome is None else None
