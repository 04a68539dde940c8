"""`Grouping`: merges nodes, as a recorder sees it.

`_record.passes` has one, of blocks that always run together.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from jedbatch._graph.graph import Graph


class Grouping(Protocol):
    """Merges nodes (see `_record.passes`), as a recorder sees it."""

    @property
    def picks(self) -> bool:
        """Returns whether `value[i]` is one operation that reads i."""
        ...

    @property
    def here(self) -> Callable[[], tuple[int, bool]] | None:
        """Returns what gives call sites (see `Sites.here`), if it takes them."""
        ...

    def group(self, graph: Graph, sites: Sequence[tuple[int, bool]]) -> Graph | None:
        """Returns a graph with nodes merged; None if instances must be recorded once more.

        `sites` are those of the nodes, or none if they were not taken.
        """
        ...
