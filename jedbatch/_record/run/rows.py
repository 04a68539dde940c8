"""Functions that have to know how long arrays are, as calls of a cell that gets their rows.

    positions = params["positions"][: len(words)]        # Python asks how long a sentence is

Instances are recorded with the lengths that they have then, and each operation has a type for each
length. But a list is an array of any length where a cell gets it (see `_record.types.list_cells`).
So a function that calls no cells is one call of a cell, which gets a list of the rows of each array
whose length differs, and puts them together again.
"""

import functools
from collections.abc import Callable, Sequence
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


class Rows(NamedTuple):
    """The rows of an array, in place of it."""

    rows: list[Value]


def of_rows(fn: Callable) -> Callable:
    """Returns a cell that does what a function does, given some arrays as `Rows`."""

    @functools.wraps(fn)
    def call(*args: PyTree) -> PyTree:
        return fn(*jax.tree.map(_as_array, args, is_leaf=lambda x: type(x) is Rows))

    return cell(call)


def _as_array(x: Any) -> Any:
    return jnp.stack(x.rows) if type(x) is Rows else x


class CallsOfRows:
    """Whether instances of a function are calls of a cell that gets rows.

    Attributes:
      are_made: whether they are; None if nobody knows whether the function calls cells.
      why: lengths have to be known.
    """

    def __init__(self) -> None:
        self.are_made: bool | None = None
        self.why: str | None = None
        self._apart: set[int] = set()

    @staticmethod
    def leaves(varied: Sequence[int], arrays: Sequence[Array]) -> list[int]:
        """Returns the arrays of an instance that are given as rows; none if that cannot be.

        Args:
          varied: those whose lengths differ from instance to instance.
          arrays: of the instance.
        """
        lengths = {arrays[i].shape[0] for i in varied}
        return [*varied] if all(0 < n <= MOST_ROWS for n in lengths) else []

    def share_types(self, graph: Graph) -> bool:
        """Returns whether all but a few lengths share types, given the graph of new calls."""
        alone = (t for t in graph.present_types if operation_of(graph.types[t]).lists is None)
        self._apart.update(alone)
        return len(self._apart) <= MAX_ARITIES
