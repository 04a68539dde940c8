"""Arithmetic of Python on numbers of instances, before JAX sees a result.

    lambda p, t: p * (t // 0.1)              # t: a float of the instance

`//` is Python's here, in 64 bits, and JAX sees its result alone. So what becomes an operand is
`t // 0.1`, not `t`. While an instance is recorded, `t` is a `PythonNumber`: Python's and NumPy's
operators on it compute with its value and note what they did, and an operation of JAX that reads
one takes an operand in its place. For other instances Python computes the operands by these notes,
which are exact, as the same operators are applied to the same objects. Whatever asks for the value
itself is an error, as it is of a tracer, and floats are part of what tells instances apart (see
`floats`).
"""

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray, Tracer

from jedbatch._jaxpr.interpret import names_in
from jedbatch._jaxpr.numbers import MAX_ELEMENTS, Number
from jedbatch._record.instances.arrays import FLOAT_TYPES, array_type

OPERATORS = names_in("add sub mul truediv floordiv mod pow matmul lshift rshift and or xor")
COMPARISONS = names_in("lt le gt ge eq ne")
ATTRIBUTES = names_in("real imag T mT")
METHODS = names_in(
    "all any argmax argmin astype clip conj conjugate copy cumprod cumsum diagonal dot flatten max "
    "mean min prod ravel repeat reshape round std sum swapaxes squeeze take trace transpose var"
)


class _Step(NamedTuple):
    """An operation of Python; what it reads is constant, or the result of an earlier step."""

    operation: Callable
    operands: tuple[Any, ...]


class _Result(NamedTuple):
    step: int


class Arithmetic:
    """The operations of Python on the numbers of instances.

    Steps are known by their ids, and the number of an instance at place k by ~k.

    Attributes:
      read: the steps whose results operations of JAX read, in order; these are operands.
    """

    def __init__(self) -> None:
        self.read: tuple[int, ...] = ()
        self._steps: list[_Step] = []
        self._ids: dict[Hashable, int] = {}
        self._needed: list[int] = []

    def step(self, operation: Callable, operands: Sequence[Any]) -> int | None:
        """Returns the id of an operation; None if something it reads is not known by its value."""
        key = operation, *map(_key, operands)
        if None in key:
            return None
        step = self._ids.setdefault(key, len(self._steps))
        if step == len(self._steps):
            kept = [_Result(x.step) if isinstance(x, PythonNumber) else x for x in operands]
            self._steps.append(_Step(operation, tuple(kept)))
        return step

    def note_read(self, steps: Sequence[int]) -> None:
        """Makes the results of steps operands, besides those that are."""
        self.read = (*self.read, *steps)
        needed = set(self.read)
        for k in range(len(self._steps) - 1, -1, -1):
            if k in needed:
                needed |= {x.step for x in self._steps[k].operands if isinstance(x, _Result)}
        self._needed = sorted(k for k in needed if k >= 0)

    def results(self, numbers: Mapping[int, Any]) -> list[Number]:
        """Returns the operands, computed by Python.

        Args:
          numbers: of an instance, by their places.
        """
        found = {~place: x for place, x in numbers.items()}
        for k in self._needed:
            operation, operands = self._steps[k]
            found[k] = operation(
                *(found[x.step] if isinstance(x, _Result) else x for x in operands)
            )
        return [as_jax_sees(found[k]) for k in self.read]


def _key(x: Any) -> Hashable:
    """Equal for equal operands of an operation; None of what is not known by its value."""
    if isinstance(x, PythonNumber):
        return "step", x.step
    if isinstance(x, np.ndarray | np.generic):
        return (type(x), x.dtype, x.shape, x.tobytes()) if x.size <= MAX_ELEMENTS else None
    if isinstance(x, tuple):
        parts = tuple([None if isinstance(part, PythonNumber) else _key(part) for part in x])
        return None if None in parts else ("tuple", parts)
    if isinstance(x, slice):
        return "slice", _key((x.start, x.stop, x.step))
    known = isinstance(x, bool | int | float | complex | str | np.dtype | type)
    return (type(x), repr(x)) if known or x in (None, Ellipsis) else None


def as_jax_sees(x: Any) -> Number:
    """Returns a number or array of Python or NumPy with the type that it has in JAX.

    Raises `OverflowError` for whole numbers that JAX has no type for.
    """
    kind: Any = type(x)
    if kind in FLOAT_TYPES:
        dtype, weak = _type_of_float(kind, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return Number(np.asarray(x, dtype), weak)
    if kind is np.ndarray:  # in 64 bits it may be: JAX rounds what is closed over
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    shape, dtype, weak = array_type(x)
    return Number(np.asarray(x, dtype).reshape(shape), weak)


@functools.lru_cache(256)
def _type_of_float(kind: type, _: bool) -> tuple[Any, bool]:
    """(dtype, weak) of floats of a type in JAX, in 64-bit mode or not."""
    return array_type(kind(0))[1:]


def _is_plain(x: Any) -> bool:
    return isinstance(x, int | float | complex | np.generic | np.ndarray)


def _operator(name: str, operation: Callable, *, swapped: bool = False) -> Callable:
    """An operator that Python applies to numbers of its own, and JAX to all others."""
    of_tracer = getattr(Tracer, name, None)

    def method(self: "PythonNumber", *others: Any) -> Any:
        if all(isinstance(x, PythonNumber) or _is_plain(x) for x in others):
            return self.computed(operation, (*others, self) if swapped else (self, *others))
        return NotImplemented if of_tracer is None else of_tracer(self, *others)

    return method


def _call_method(x: Any, name: str, named: tuple[tuple[str, Any], ...], *args: Any) -> Any:
    return getattr(x, name)(*args, **dict(named))


def _method(name: str) -> Callable:
    """A method of NumPy's arrays, or of JAX's if the number is one of Python."""
    of_tracer = getattr(Tracer, name)

    def method(self: "PythonNumber", *args: Any, **named: Any) -> Any:
        if not isinstance(self.value, np.generic | np.ndarray):
            return of_tracer(self, *args, **named)
        return self.computed(_call_method, (self, name, tuple(named.items()), *args))

    return method


def _attribute(name: str) -> property:
    return property(lambda self: self.computed(getattr, (self, name)))


class PythonNumber(Tracer):
    """A number of Python or NumPy, while an instance is recorded that has it.

    Args:
      trace: the recorder.
      operands: gives what operations of JAX read, and has the `arithmetic`.
      step: the id of the operation that computed it.
      value: what it is in this instance.
    """

    __slots__ = ("operands", "step", "value")

    def __init__(self, trace: Any, operands: Any, step: int, value: Any):
        self._trace = trace
        self.operands = operands
        self.step = step
        self.value = value

    def computed(self, operation: Callable, operands: Sequence[Any]) -> "PythonNumber":
        """Returns the result of an operation of Python on this number and others.

        Raises `TypeError` if it is none, or reads more than is known by its value.
        """
        step = self.operands.arithmetic.step(operation, operands)
        result = operation(*(x.value if isinstance(x, PythonNumber) else x for x in operands))
        if step is None or not _is_plain(result) or np.size(result) > MAX_ELEMENTS:
            raise TypeError(
                f"`{getattr(operation, '__name__', operation)}` of a number of an "
                f"instance gives {type(result).__name__}; expected numbers and small arrays, of "
                "which Python computes operands."
            )
        return PythonNumber(self._trace, self.operands, step, result)

    @property
    def aval(self):  # type: ignore[override]
        try:
            number = as_jax_sees(self.value)
        except OverflowError:  # if it is read, Python says so
            return ShapedArray((), np.dtype(jax.dtypes.canonicalize_dtype(np.int64)), True)
        return ShapedArray(number.value.shape, number.value.dtype, weak_type=number.weak)

    def full_lower(self):
        return self

    def to_concrete_value(self) -> Any:
        """Returns itself, so that JAX makes an array of it, as it does of a number.

        `jnp.asarray(t)` would return other tracers as they are, and Python would go on with `t`.
        """
        return self

    def __bool__(self):
        raise jax.errors.TracerBoolConversionError(self)

    def __index__(self):
        raise jax.errors.TracerIntegerConversionError(self)

    def __int__(self):
        raise jax.errors.ConcretizationTypeError(self, "`int()` of a number that is an operand")

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __getitem__(self, item: Any) -> Any:
        return self.computed(operator.getitem, (self, item))

    def __iter__(self) -> Any:
        if not self.shape:
            raise TypeError("a number cannot be iterated over")
        return (self[k] for k in range(self.shape[0]))

    def __hash__(self):  # type: ignore[override]
        return self.operands.hash_of(self)

    __neg__ = _operator("__neg__", operator.neg)
    __pos__ = _operator("__pos__", operator.pos)
    __abs__ = _operator("__abs__", operator.abs)
    __invert__ = _operator("__invert__", operator.invert)
    __round__ = _operator("__round__", round)


def _with_operators() -> None:
    """Gives numbers the operators of Python, and the attributes and methods of NumPy's arrays."""
    for name in OPERATORS:
        operation = getattr(operator, f"__{name}__")
        setattr(PythonNumber, f"__{name}__", _operator(f"__{name}__", operation))
        reflected = f"__r{name}__"
        setattr(PythonNumber, reflected, _operator(reflected, operation, swapped=True))
    for name in COMPARISONS:
        setattr(PythonNumber, f"__{name}__", _operator(f"__{name}__", getattr(operator, name)))
    for name in ATTRIBUTES:
        setattr(PythonNumber, name, _attribute(name))
    for name in METHODS:
        setattr(PythonNumber, name, _method(name))


_with_operators()


def read_by_jax(x: Any) -> Any:
    """Returns what JAX reads in place of a number of Python; anything else as it is."""
    return x.operands.read(x) if isinstance(x, PythonNumber) else x
