"""Shared arrays that cells get in place of values.

A cell may get an array of the shared arguments where other calls of it get a value of the instance:

    multiply(params["x"], params["y"])      multiply(params["x"], h)        multiply(h, params["z"])

Which shared arrays a node reads is part of its type, as weights have to be, so that each of these
would be a type of its own: with three arrays, 16. Where a cell is called in more than a few of such
ways, arguments that are shared in some calls and values in others are values in all: the array is
written to a row, by a node without operands. What is shared in every call, or part of a container
as weights are, stays as it is.
"""

import math
from collections.abc import Hashable, Sequence

MAX_WAYS = 3  # of mixing shared arrays and values in calls of a cell that are types of their own
MAX_SIZE = 1 << 12  # elements of an array that is worth a row of its own in each instance
VALUE = -1  # in place of the number of a shared array

Argument = tuple[int, tuple[int, ...], Hashable]  # (shared array or `VALUE`, shape, dtype)


class SharedOperands:
    """Which arguments of cells are values, though they are shared arrays in some calls.

    Attributes:
      revision: how often an argument became a value.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._ways: dict[Hashable, set[tuple[int, ...]]] = {}
        self._values: dict[Hashable, set[int]] = {}

    def note(self, cell: Hashable, arguments: Sequence[Argument]) -> list[int]:
        """Notes a call of a cell.

        Args:
          cell: what its calls have in common.
          arguments: that are arrays or numbers.

        Returns:
          Those that are shared and have to be values.
        """
        key = cell, tuple((shape, dtype) for _, shape, dtype in arguments)
        way = tuple(index for index, _, _ in arguments)
        ways = self._ways.setdefault(key, set())
        if way not in ways:
            ways.add(way)
            if len(ways) > MAX_WAYS:
                self._find(key, ways, [math.prod(shape) for _, shape, _ in arguments])
        return [k for k in self._values.get(key, ()) if way[k] != VALUE]

    def _find(self, key: Hashable, ways: set[tuple[int, ...]], sizes: Sequence[int]) -> None:
        """Finds the arguments that are shared in some calls and values in others."""
        values = self._values.setdefault(key, set())
        for k, indices in enumerate(zip(*ways, strict=True)):
            mixed = VALUE in indices and len(set(indices)) > 1
            if mixed and k not in values and sizes[k] <= MAX_SIZE:
                values.add(k)
                self.revision += 1
