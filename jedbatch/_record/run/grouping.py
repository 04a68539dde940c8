"""`Grouping`: merges nodes, as a recorder sees it.

`_record.passes` has a grouping, of blocks that always run together, and what merges the
operations on lists where there is no grouping.
"""

from collections.abc import Callable
from typing import Any, Protocol


class Columns(Protocol):
    """Nodes of a minibatch, as lists."""

    def written(self) -> tuple[tuple[list, ...], list[int], list[tuple[int, ...]]]:
        """Returns (what `Recorder.written` has, outputs, ends)."""
        ...


class Merges(Protocol):
    """Merges some of the recorded nodes (see `_record.passes.lists`)."""

    def merge(
        self, recorder: Any, outputs: list[int], ends: list[tuple[int, ...]]
    ) -> Columns | None:
        """Returns the recorded nodes as other nodes; None if there is nothing to merge."""
        ...


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

    def group(
        self, recorder: Any, outputs: list[int], ends: list[tuple[int, ...]]
    ) -> Columns | None:
        """Returns the recorded nodes as other nodes; None if they must be recorded once more."""
        ...
