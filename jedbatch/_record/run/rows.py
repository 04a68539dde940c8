"""Functions that have to know how long arrays are, as calls of a cell that gets their rows.

    positions = params["positions"][: len(words)]        # Python asks how long a sentence is

Instances are recorded with the lengths that they have then, and each operation has a type for each
length. But a list is an array of any length where a cell gets it (see `_record.types.list_cells`).
So a function that calls no cells is one call of a cell, which gets a list of the rows of each array
whose length differs, and puts them together again.
"""

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jedbatch._graph.graph import Graph
from jedbatch._graph.types import operation_of
from jedbatch._record.cell import cell
from jedbatch._record.operations.symbols import Value
from jedbatch._record.types.list_cells import MAX_ARITIES
from jedbatch._support.types import Array, PyTree

MOST_ROWS = 512  # of an array, which its call reads one by one


class ArrayRows(NamedTuple):
    """The rows of an array, in place of it."""

    rows: list[Value]


def of_rows(fn: Callable) -> Callable:
    """Returns a cell that does what a function does, given some arrays as `ArrayRows`."""

    @functools.wraps(fn, updated=())
    def call(*args: PyTree) -> PyTree:
        return fn(*jax.tree.map(_as_array, args, is_leaf=lambda x: type(x) is ArrayRows))

    return cell(call, name=getattr(fn, "__name__", type(fn).__name__))


def _as_array(x: Any) -> Any:
    return jnp.stack(x.rows) if type(x) is ArrayRows else x


class CallsOfRows:
    """Whether instances of a function are calls of a cell that gets rows.

    Attributes:
      may_be_made: whether they may: the function calls no cells, as far as is known, and calls of
        most lengths share types.
      why: lengths have to be known, if they are; None if they are not made yet.
      families: of the instances that they are made of.
    """

    def __init__(self, may_be_made: bool) -> None:
        self.may_be_made = may_be_made
        self.why: str | None = None
        self.families: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lengths: set[tuple[int, ...]] = set()
        self._alone: set[int] = set()

    def leaves(self, varied: Sequence[int], arrays: Sequence[Array]) -> list[int]:
        """Returns the arrays of an instance that are given as rows, if all have some, and few.

        Args:
          varied: those whose lengths differ from instance to instance.
          arrays: of the instance.
        """
        lengths = tuple([arrays[i].shape[0] for i in varied])
        if not lengths or not 0 < min(lengths) <= max(lengths) <= MOST_ROWS:
            return []
        if len(self._lengths) < MOST_ROWS:  # enough to tell whether most share types
            self._lengths.add(lengths)
        return [*varied]

    @property
    def are_few(self) -> bool:
        """Whether few lengths have been met, which are types of their own."""
        return len(self._lengths) <= MAX_ARITIES

    def share_types(self, graph: Graph, padded: Collection[int]) -> bool:
        """Returns whether calls of most lengths share types.

        Args:
          graph: of new calls.
          padded: ids of the types that are nodes of types with room for more elements.
        """
        types = graph.present_types
        self._alone.update(t for t in types if operation_of(graph.types[t]).lists is None)
        num_alone = len(self._alone.difference(padded))
        return num_alone <= max(MAX_ARITIES, len(self._lengths) // 4)
