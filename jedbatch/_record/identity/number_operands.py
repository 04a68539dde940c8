"""Numbers of instances in the programs of operations, as operands.

    lax.fori_loop(0, 3, lambda k, y: y * rate, x)        cell(lambda y: jnp.tanh(y * rate))(x)

An operation that holds another number for every instance would be another type for every instance.
Whatever Python has computed with the number, and decided on it, its program holds the result as a
literal or as a small constant. So operations are traced with their numbers, and programs that
differ in numbers only are compared. As long as few sets of numbers have been met they are
constants, which XLA computes with best; then those that differ become operands.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from jedbatch._jaxpr.numbers import Number, is_number, with_numbers
from jedbatch._record.identity.assumptions import MAX_CONSTANT_NUMBERS, Assumptions
from jedbatch._record.identity.function_leaves import held_values


class CellSpec(NamedTuple):
    """How calls of a cell are recorded.

    Attributes:
      call_spec: how.
      family: equal for calls that differ in numbers which the function holds alone; None if it
        holds none.
      program: what is computed, without the numbers in it.
      numbers: these numbers, if the function holds any.
      positions: those of them that are operands.
    """

    call_spec: Any
    family: Hashable = None
    program: Any = None
    numbers: tuple[Number, ...] = ()
    positions: tuple[int, ...] = ()

    @property
    def operands(self) -> list[Number]:
        """The numbers that are operands."""
        return [self.numbers[k] for k in self.positions]


class NumberOperands:
    """Which numbers in programs are operands.

    Args:
      assumptions: which operations hold few sets of numbers, which are constants.
    """

    def __init__(self, assumptions: Assumptions):
        self._assumptions = assumptions
        # By program: the numbers of the first that was met, and positions of those that differ.
        self._known: dict[Hashable, tuple[tuple[bytes, ...], tuple[int, ...]]] = {}

    def positions(
        self, skeleton: Hashable, numbers: Sequence[Number], of: Hashable = None
    ) -> tuple[int, ...]:
        """Returns which of the numbers of a program are operands, by position.

        Args:
          skeleton: the program without its numbers.
          numbers: all of them.
          of: what has few sets of numbers as constants; by default the program.
        """
        if not numbers:
            return ()
        keys = tuple([x.key for x in numbers])
        about = skeleton if of is None else of
        if self._assumptions.holds("numbers", about, keys, MAX_CONSTANT_NUMBERS):
            return ()
        if skeleton in self._known:
            self._assumptions.fail("numbers", self._compare(skeleton, keys))
        else:
            self._known[skeleton] = keys, ()
            for others in self._assumptions.met("numbers", skeleton):
                self._compare(skeleton, others)
        return self._known[skeleton][1]

    def _compare(self, skeleton: Hashable, keys: Sequence[bytes]) -> bool:
        """Compares the numbers of a program with those of the first; whether more differ."""
        first, varying = self._known[skeleton]
        differ = {k for k, (a, b) in enumerate(zip(keys, first, strict=True)) if a != b}
        if differ.issubset(varying):
            return False
        self._known[skeleton] = first, tuple(sorted(differ.union(varying)))
        return True


def numbers_held(fn: object, computed: Collection[int]) -> list[int]:
    """Returns the numbers and small arrays that a function holds, by position in `held_values`.

    Args:
      fn: the function.
      computed: ids of arrays of JAX that were computed from numbers while recording.
    """

    def may_differ(x: object) -> bool:
        if type(x) in (int, float, complex):
            return True
        return is_number(x) and (not isinstance(x, jax.Array) or id(x) in computed)

    return [k for k, x in enumerate(held_values(fn)) if may_differ(x)]


def with_operands(call: Callable, lifted: Sequence[int]) -> Callable:
    """The operation that takes some numbers in its bodies as leading operands, by position."""

    def with_numbers_first(*values: Any) -> list[Any]:
        numbers, args = values[: len(lifted)], values[len(lifted) :]
        program = jax.make_jaxpr(call)(*map(jax.typeof, args))
        return with_numbers(program, dict(zip(lifted, numbers, strict=True)), args)

    return with_numbers_first
