"""`Record`: what recording an instance gave."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

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
    """

    whole: Graph
    index: int
    structure: Any
    types: tuple[tuple, ...]

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

    @functools.cached_property
    def form(self) -> Hashable:
        """Equal for instances whose graphs differ in the values of their inputs alone."""
        graph, index = self.whole, self.index
        of_results = self.structure, self.types
        if graph.num_instances == 1:
            arrays = graph.node_type, graph.operand_ptr, graph.operand, graph.outputs
            types = tuple([(chunk.type, len(chunk)) for chunk in graph.inputs])
            return (*(x.tobytes() for x in arrays), types, *of_results)
        ends = np.frombuffer(graph.bounds[index], np.int64).reshape(5, 2).tolist()
        (node, node_end), (read, read_end), (first_input, _), (output, output_end), (result, _) = (
            ends
        )

        def from_zero(references: np.ndarray) -> bytes:
            moved = references - np.where(references >= 0, result, -first_input)
            return moved.astype(references.dtype).tobytes()

        return (
            graph.node_type[node:node_end].tobytes(),
            (graph.operand_ptr[node : node_end + 1] - read).tobytes(),
            from_zero(graph.operand[read:read_end]),
            from_zero(graph.outputs[output:output_end]),
            tuple([(chunk.type, len(chunk)) for chunk in graph.chunks[index]]),
            *of_results,
        )
