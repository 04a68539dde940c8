"""`Record`: what recording an instance gave."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.types import ValueType


@dataclass(frozen=True, eq=False)
class Record:
    """The result of recording an instance.

    Attributes:
      whole, index: the instance is number `index` of this graph.
      structure: of the pytree the function returned.
      types: (shape, dtype) of its leaves.
      known_structure: of the graph, once it is known (see `_graph.structures`).
    """

    whole: Graph
    index: int
    structure: Any
    types: tuple[tuple, ...]
    known_structure: ClassVar[Any] = None

    @staticmethod
    def of_all(whole: Graph, forms: Sequence[tuple[Any, tuple]]) -> list["Record"]:
        """Returns the records of the instances of a graph, given (structure, types) of each.

        They are made without `__init__`, which takes twice as long for a frozen class.
        """
        records = []
        for index, (structure, types) in enumerate(forms):
            record = object.__new__(Record)
            record.__dict__.update(whole=whole, index=index, structure=structure, types=types)
            records.append(record)
        return records

    @functools.cached_property
    def held(self) -> tuple[tuple[ValueType, ...], tuple[np.ndarray, ...]] | None:
        """(types, rows) of the chunks of its inputs; None if one is read from its arrays."""
        chunks = self.whole.chunks[self.index]
        rows = tuple([chunk.rows for chunk in chunks if chunk.leaf is None])
        if len(rows) < len(chunks):
            return None
        return tuple([chunk.type for chunk in chunks]), rows  # type: ignore[return-value]

    @property
    def told_apart_by(self) -> tuple[Hashable, ...]:
        """Returns what tells instances apart, besides their graphs, that are planned in one way."""
        return self.structure, self.types
