"""Shared arrays that cells and operations get in place of values.

A cell may get an array of the shared arguments where other calls of it get a value of the instance:

    multiply(params["x"], params["y"])      multiply(params["x"], h)        multiply(h, params["z"])

Which shared arrays a node reads is part of its type, as weights have to be, so that each of these
would be a type of its own: with three arrays, 16. Where a cell is called in more than a few of such
ways, leaves of its arguments that are shared in some calls and values in others are values in all:
the array is written to a row, by a node without operands. What is shared in every call, as weights
are, stays as it is.

Operations outside of cells mean the same: what is done to `params["x"]` and `params["y"]` is
computed once, a shared value again, which makes types of what reads it. Of a function whose
instances say what is done to which of them, there are ever more. An operation that meets small
shared arrays in new ways in one instance after the other has them as values; and once instances
keep finding new ways for any operation at all, so has every operation that has a second way. Small
are numbers, short vectors, and what several operations led to, such as the state of a circuit after
some gates; other matrices are weights, and so are these transposed.

Of a list of any length that is stacked, such as all states so far of which the first is learned,
elements that are shared are values as well once there were two lengths: only then are operations on
lists of all lengths one type (see `_record.passes.lists`).
"""

import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence

from jax.core import ShapedArray

from jedbatch._record.identity.assumptions import MAX_CONSTANT_NUMBERS, Assumptions
from jedbatch._record.types.shared_values import SharedValue

MAX_WAYS = 3  # of mixing shared arrays and values in calls of a cell that are types of their own
MAX_SIZE = 1 << 12  # elements of an array that is worth a row of its own in each instance
# Instances in which an operation, or any, meets shared arrays in new ways, before they are values.
MAX_INSTANCES = 4
MAX_INSTANCES_IN_ALL = 8
MAX_CONSTANT_ARRAYS = 16  # sets of arrays that an operation on shared values reads besides
MIN_OPERATIONS = 2  # that lead to an array which is no weight, whatever its shape
STACKS = ("stack", "concatenate")  # along a new axis, and along one of extent 1
VALUE = -1  # in place of the number of a shared array

Argument = tuple[int, tuple[int, ...], Hashable]  # (shared array or `VALUE`, shape, dtype)


class SharedOperands:
    """Which arguments of cells and operations are values, though some are shared arrays.

    Args:
      known: how operations were recorded before; forgotten when one has others as values.
      assumptions: which arguments of theirs are no values.

    Attributes:
      num_instances: how many have been recorded.
      is_one_by_one: whether instances say where they begin. In a lazy scope none does; there one is
        taken to begin where an operation meets a new way after another met one that was known.
    """

    def __init__(self, known: dict, assumptions: Assumptions) -> None:
        self._known = known
        self._assumptions = assumptions
        self._ways: dict[Hashable, set[tuple[int, ...]]] = {}
        self._values: dict[Hashable, set[int]] = {}
        self.num_instances = 0
        self.is_one_by_one = True
        self._is_repeated = False  # something since the last new way
        self._ways_of_operations: dict[Hashable, set[tuple[int, ...]]] = {}
        self._with_values: set[Hashable] = set()  # operations

    def __len__(self) -> int:
        """Returns how many ways are kept."""
        ways = itertools.chain(self._ways.values(), self._ways_of_operations.values())
        return sum(map(len, ways))

    def values_of(
        self,
        name: str,
        operation: Hashable,
        num_args: int,
        indices: Mapping[int, int],
        shared: Sequence[SharedValue],
    ) -> list[int]:
        """Notes what an operation meets, and returns the arguments that it has as values.

        Args:
          name: of the operation.
          operation: what is done.
          num_args: how many arguments it has.
          indices: of those that depend on something, by their positions: the numbers of those that
            are shared, `VALUE` of others.
          shared: all shared values.
        """
        if len(indices) == num_args and self._is_of_lists(name, indices, shared):
            return [i for i, n in indices.items() if n != VALUE]
        small = [i for i, n in indices.items() if n != VALUE and _is_small(shared[n])]
        if not small:
            return []
        if operation in self._with_values:
            return small
        way = tuple(n if i in small else VALUE for i, n in indices.items())
        ways = self._ways_of_operations.setdefault(operation, set())
        if way in ways:
            self._is_repeated = True
            return []
        ways.add(way)
        self.num_instances += self._is_repeated and not self.is_one_by_one
        self._is_repeated = False
        holds, instance = self._assumptions.holds, self.num_instances
        is_rare = holds("new ways", operation, instance, MAX_INSTANCES)
        are_all_rare = holds("new ways", None, instance, MAX_INSTANCES_IN_ALL)
        if is_rare and (are_all_rare or len(ways) == 1):
            return []
        self._with_values.add(operation)
        del self._ways_of_operations[operation]
        self._assumptions.fail("shared")
        self._begin_anew()
        return small

    def _is_of_lists(
        self, name: str, indices: Mapping[int, int], shared: Sequence[SharedValue]
    ) -> bool:
        """Notes an operation; returns whether it stacks lists of more than one length.

        A list of weights only is none of these: it is a weight, and is stacked once.
        """
        avals = [shared[n].aval for n in indices.values() if n != VALUE]
        if name not in STACKS or not 0 < len(avals) < len(indices):
            return False
        if not all(_is_element(name, aval) for aval in avals):
            return False
        element = name, avals[0].shape, avals[0].dtype
        are_many = self._assumptions.has_failed("shared", element)
        if are_many or self._assumptions.holds("shared", element, len(indices), 1):
            return are_many
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        """Forgets how operations were recorded, as some have others as values now."""
        self._known.clear()

    def varies(
        self,
        operation: Hashable,
        args: tuple[int, ...],
        shared: Sequence[SharedValue],
        numbers: tuple,
        arrays: tuple = (),
    ) -> bool:
        """Returns whether an operation on shared values depends on the instance after all.

        Its numbers or arrays may differ from one instance to the next, or how often it is repeated;
        then there are as many shared values as instances, and each is compiled. Arrays differ if
        there are many, or if one instance after the other comes with others.

        Args:
          operation: what is done.
          args: the shared values that it reads.
          shared: all shared values.
          numbers: the scalars among its other arguments.
          arrays: the arrays among them.
        """
        if any(shared[a].applied.get(operation, 0) >= MAX_CONSTANT_NUMBERS for a in args):
            return True
        of, holds = (operation, args), self._assumptions.holds
        if not holds("variants", ("numbers", *of), numbers, MAX_CONSTANT_NUMBERS):
            return True
        if not arrays:
            return False
        about, finders = ("arrays", *of), ("instances that find arrays", args)
        if self._assumptions.has_failed("variants", finders):
            return True
        is_new = arrays not in self._assumptions.met("variants", about)
        number = self.num_instances
        if is_new and not holds("variants", finders, number, MAX_INSTANCES_IN_ALL):
            return True
        return not holds("variants", about, arrays, MAX_CONSTANT_ARRAYS)

    def note(self, cell: Hashable, arguments: Sequence[Argument]) -> list[int]:
        """Notes a call of a cell.

        Args:
          cell: what its calls have in common.
          arguments: leaves of its arguments that are symbols.

        Returns:
          Those that are shared and have to be values.
        """
        key = cell, tuple((shape, dtype) for _, shape, dtype in arguments)
        values = self._values.setdefault(key, set())
        way = _with_values([index for index, _, _ in arguments], values)
        ways = self._ways.setdefault(key, set())
        if way not in ways:
            ways.add(way)
            if len(ways) > MAX_WAYS:
                self._find(ways, values, [math.prod(shape) for _, shape, _ in arguments])
        return [k for k in values if arguments[k][0] != VALUE]

    def _find(self, ways: set[tuple[int, ...]], values: set[int], sizes: Sequence[int]) -> None:
        """Finds the arguments that are shared in some calls and values in others."""
        for k, indices in enumerate(zip(*ways, strict=True)):
            mixed = VALUE in indices and len(set(indices)) > 1
            if mixed and k not in values and sizes[k] <= MAX_SIZE:
                values.add(k)
                self._assumptions.fail("shared")
        fewer = {_with_values(way, values) for way in ways}
        ways.clear()
        ways.update(fewer)


def _with_values(way: Sequence[int], values: Collection[int]) -> tuple[int, ...]:
    """Returns a way of calling a cell some of whose arguments are values in all calls."""
    return tuple([VALUE if k in values else index for k, index in enumerate(way)])


def _is_element(name: str, aval: ShapedArray) -> bool:
    """Returns whether an array may be an element of a list that an operation stacks."""
    return aval.size <= MAX_SIZE and (name == "stack" or 1 in aval.shape)


def _is_small(value: SharedValue) -> bool:
    """Returns whether this is a number, a short vector, or a small array that is no weight."""
    is_weight = value.aval.ndim > 1 and sum(value.applied.values()) < MIN_OPERATIONS
    return value.aval.size <= MAX_SIZE and not is_weight
