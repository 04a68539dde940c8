"""`Record`: what recording an instance gave."""

from dataclasses import dataclass
from typing import Any

from jedbatch._graph.graph import Graph


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
