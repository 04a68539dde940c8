"""Numbers of instances in the bodies and closures of operations, as operands.

An operation that holds another number for every instance would be another type for every instance:
a loop whose body reads a Python float, or a cell that closes over one. As long as few sets of such
numbers have been met they are constants, which XLA computes with best; then those that differ
become operands.
"""

import math
import types
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.numbers import Number, is_number, with_numbers
from jedbatch._record.identity.arithmetic import Arithmetic, as_jax_sees
from jedbatch._record.identity.assumptions import MAX_CONSTANT_NUMBERS, Assumptions
from jedbatch._record.identity.concretization import Asked
from jedbatch._record.identity.environment import Weakly
from jedbatch._record.identity.function_leaves import (
    OPERAND,
    held_functions,
    held_values,
    with_held_values,
)
from jedbatch._record.identity.functions import function_identity
from jedbatch._support.caches import Budget, Memory, each

NUMBERS_BYTES = 1 << 10  # of the numbers of an operation, about
MAGNITUDE = 8  # binary digits
MAX_APART = 8  # sets of numbers of one operation on which Python decided, before all are constants
UNKNOWN = Asked(True, True)  # of calls that have not been looked at


class Lifted(NamedTuple):
    """Numbers that a function holds with which Python computes operands.

    Attributes:
      held: the numbers, by position among `held_values`.
      exact: what they are known by.
      arithmetic: what Python computes with them.
      operands: the results.
    """

    held: dict[int, Any]
    exact: tuple[bytes, ...]
    arithmetic: Arithmetic
    operands: list[Number]


@dataclass
class VaryingNumbers:
    """The numbers of an operation of which more than a few sets were met.

    Attributes:
      first: those of the first call since.
      varying: positions of those that differed.
      fixed: positions of those that are part of the type however many there are.
    """

    first: tuple[Number, ...]
    varying: tuple[int, ...] = ()
    fixed: frozenset[int] = frozenset()

    def compare(self, keys: Sequence[bytes]) -> bool:
        """Compares the numbers of another call with the first; returns whether more differ."""
        differ = {k for k, (a, b) in enumerate(zip(keys, self.first, strict=True)) if a != b.key}
        if differ.issubset({*self.varying, *self.fixed}):
            return False
        self.varying = tuple(sorted(differ.union(self.varying) - self.fixed))
        return True


class Lifting:
    """The numbers held by operations that are operands.

    Args:
      assumptions: which operations hold few sets of numbers, which are constants.
      budget: of bytes.

    Attributes:
      by_object: code of functions in which Python asks which objects they hold.
    """

    def __init__(self, assumptions: Assumptions, budget: Budget | None = None):
        self._assumptions = assumptions
        of_numbers = each(NUMBERS_BYTES)
        self._varying: dict[Hashable, VaryingNumbers] = {}
        self._compared: dict[Hashable, None] = Memory(None, budget, of_numbers)
        self._apart: dict[int, set[tuple]] = Memory(None, budget, of_numbers)
        self._asks: dict[int, Asked] = Memory(None, budget, of_numbers)
        self._arithmetic: dict[Hashable, Arithmetic] = Memory(None, budget, of_numbers)
        self.by_object: set[types.CodeType | None] = set()

    def lifted(self, skeleton: Hashable, numbers: tuple[Number, ...]) -> tuple[int, ...]:
        """Returns the numbers of an operation that are operands, by position.

        Args:
          skeleton: the operation without its numbers.
          numbers: all of them.
        """
        if not numbers:
            return ()
        keys = tuple([x.key for x in numbers])
        if self._assumptions.holds("numbers", skeleton, keys, MAX_CONSTANT_NUMBERS):
            return ()
        known = self._varying.get(skeleton)
        if known is None:
            known = self._varying[skeleton] = VaryingNumbers(numbers)
            for others in self._assumptions.met("numbers", skeleton):
                known.compare(others)
        else:
            self._assumptions.fail("numbers", known.compare(keys))
        return known.varying

    def note_asking(self, call_spec: int, asked: Asked) -> None:
        """Notes whether Python asks what numbers are in calls of this id (see `asking`)."""
        self._asks[call_spec] = asked

    def asks(self, call_spec: int) -> bool:
        """Returns whether Python asks what numbers are in calls of this id, or may."""
        return self._asks.get(call_spec, UNKNOWN).anything

    def finds(self, call_spec: int) -> bool:
        """Returns whether Python asks which objects calls of this id hold, or may."""
        return self._asks.get(call_spec, UNKNOWN).identity

    def is_new(self, call_spec: int, lifted: Lifted, objects: Sequence[Any]) -> bool:
        """Returns whether calls of this id have not been compared with those that hold numbers.

        Numbers count as known if each operand had that sign before, and about that magnitude; where
        Python asks what they are, if all had these values; and where it asks which objects hold
        them, if the same did.

        Args:
          call_spec: the id.
          lifted: the numbers.
          objects: that the function holds, if they are compared by identity.
        """
        known_by = self._known_by(call_spec, lifted, objects)
        is_compared = all(key in self._compared for key in known_by)
        return not is_compared and not self.is_apart(call_spec, lifted)

    def note_compared(self, call_spec: int, lifted: Lifted, objects: Sequence[Any]) -> None:
        """Notes that calls of this id compute the same with numbers as operands."""
        self._compared.update(dict.fromkeys(self._known_by(call_spec, lifted, objects)))

    def is_apart(self, call_spec: int, lifted: Lifted) -> bool:
        """Returns whether calls of this id have these numbers as constants (see `sets_apart`)."""
        return lifted.exact in self._apart.get(call_spec, ())

    def sets_apart(self, call_spec: int, lifted: Lifted) -> bool:
        """Makes numbers constants where others of the same calls are operands, if these are few.

        For those that Python compares others with, such as 0.5 in `if t == 0.5`.
        """
        apart = self._apart.setdefault(call_spec, set())
        if len(apart) < MAX_APART:
            apart.add(lifted.exact)
        return lifted.exact in apart

    def _known_by(self, call_spec: int, lifted: Lifted, objects: Sequence[Any]) -> list[Hashable]:
        if not self.asks(call_spec):
            return [(call_spec,), *_ranges(call_spec, lifted.operands)]
        found = map(Weakly, objects) if self.finds(call_spec) else ()
        return [(call_spec, lifted.exact, *found)]

    def fix(self, skeleton: Hashable) -> None:
        """Makes the operands of an operation part of its type: integers first, then all of them.

        For numbers that Python must know, such as lengths.
        """
        known = self._varying[skeleton]
        integers = [k for k in known.varying if known.first[k].value.dtype.kind in "iu"]
        known.fixed = known.fixed.union(integers or known.varying)
        known.varying = tuple([k for k in known.varying if k not in known.fixed])

    def of_closure(
        self,
        fn: Callable,
        reached: Mapping[int, Hashable],
        known: Container[int],
        computed: Collection[int],
    ) -> tuple[Hashable, Lifted | None]:
        """Returns a function without the numbers it holds, and those that are operands.

        Args:
          fn: the function.
          reached: names of arrays by which they are known, by their ids.
          known: ids of objects that do not change.
          computed: ids of arrays that were computed from numbers while recording.

        Returns:
          What `fix` knows the function by, and the numbers; None if there are none.
        """
        held = dict(enumerate(held_values(fn)))
        numbers = {
            k: number for k, x in held.items() if (number := _number_of(x, computed)) is not None
        }
        if not numbers:
            return None, None
        places = [*numbers, *(k for k, x in held.items() if isinstance(x, Tracer))]
        without = with_held_values(fn, dict.fromkeys(places, OPERAND), known)
        types = tuple((x.value.shape, x.value.dtype, x.weak) for x in numbers.values())
        skeleton = "closure", function_identity(without, reached), held_functions(fn), types
        positions = list(numbers)
        varying = self.lifted(skeleton, tuple(numbers.values()))
        if not varying:
            return skeleton, None
        lifted = {positions[k]: held[positions[k]] for k in varying}
        arithmetic = self._arithmetic.setdefault((skeleton, varying), Arithmetic())
        exact = tuple([numbers[k].key for k in lifted])
        try:
            operands = arithmetic.results(lifted)
        except Exception:  # Python raises it again where it runs the function, if it gets there
            return skeleton, None
        return skeleton, Lifted(lifted, exact, arithmetic, operands)


def _ranges(call_spec: int, numbers: Sequence[Number]) -> list[Hashable]:
    """The signs and orders of magnitude of numbers that calls of some id take, by position."""

    def of(number: np.ndarray) -> tuple[int, ...]:
        if number.ndim:
            values = number.astype(np.complex128)
            least, most = values.real.min(initial=0), values.real.max(initial=0)
            size = float(np.abs(values).max(initial=0))
        else:
            single = complex(number)
            least = most = single.real
            size = max(abs(most), abs(single.imag))
        return most > 0, least < 0, math.isfinite(size), math.frexp(size)[1] // MAGNITUDE

    return [(call_spec, k, *of(x.value)) for k, x in enumerate(numbers)]


def _number_of(x: object, computed: Collection[int]) -> Number | None:
    """Returns a number or small array that a function holds, to the last bit; else None."""
    if type(x) not in (int, float, complex) and not is_number(x):
        return None
    if isinstance(x, jax.Array) and id(x) not in computed:
        return None
    try:
        weak = as_jax_sees(x).weak
    except OverflowError:  # Python alone computes with it, as with a hash
        return None
    return Number(np.asarray(x), weak)


def with_operands(call: Callable, lifted: Sequence[int]) -> Callable:
    """The operation that takes some numbers in its bodies as leading operands, by position."""

    def with_numbers_first(*values: Any) -> list[Any]:
        numbers, args = values[: len(lifted)], values[len(lifted) :]
        program = jax.make_jaxpr(call)(*map(jax.typeof, args))
        return with_numbers(program, dict(zip(lifted, numbers, strict=True)), args)

    return with_numbers_first
