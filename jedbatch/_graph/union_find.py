"""Union-find: sets of things that are found to belong together, two at a time.

Source: Tarjan, Efficiency of a good but not linear set union algorithm, 1975; with path halving
and without ranks.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class UnionFind(Generic[Item]):
    """Disjoint sets of items, at first one for each."""

    def __init__(self) -> None:
        self._parent: dict[Item, Item] = {}

    def find(self, item: Item) -> Item:
        """Returns the representative of the set of an item."""
        parent = self._parent
        while item in parent:
            above = parent[item]
            if above in parent:
                parent[item] = parent[above]
            item = above
        return item

    def union(self, item: Item, other: Item) -> None:
        """Makes one set of those of two items."""
        root, other_root = self.find(item), self.find(other)
        if root != other_root:
            self._parent[root] = other_root
