"""Covering a table by few rectangles: which products of a cell become one.

A row of the table is a value that is multiplied, a column is a sum of products, an entry is a
weight. A set of rows × a set of columns all of whose entries exist, a *rectangle*, is one matrix
product: rows concatenated, weights packed as a block matrix, results split. We look for few
rectangles that hold every entry once. An entry that does not exist is never filled with
zeros: 0·inf is not 0.

Dependencies limit the choice. A GRU multiplies r·h, where r is a column itself:

               r    z    n
        x      W    W    W            [x, h] × {r, z}, then [x, r·h] × {n}: two products;
        h      W    W    ·            x × {r, z, n} to begin with would make three
        r·h    ·    ·    W

A rectangle comes after all those with a column that one of its rows depends on, and this order
must have no circle. Rectangles with the same weights (the forget gates F h_k of a child-sum
TreeLSTM) are *stacked*: one product of a matrix, whose rows are theirs.

Covering by the fewest rectangles is hard in general. Two covers are made, and the one with fewer
products is taken; the numbers that they move count second. One has a rectangle for each set of rows
that cannot be told apart, with all their columns. The other one goes through the columns as they
become ready: those that have the same rows become one, as `r` and `z` above, and then what depends
on them.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jedbatch._graph.paths import bits


class Rectangle(NamedTuple):
    """Rows and columns of a table, ascending."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


Group = tuple[Rectangle, ...]  # rectangles with the same weights, stacked


class ProductTable(NamedTuple):
    """The products that have to be computed.

    Attributes:
      entries: by row and column, what is multiplied there; equal if it is the same.
      kinds: of each column; rectangles are of one kind.
      needs: of each row, the columns it depends on, as the bits of an int.
      heights, widths: sizes of each row and column.
    """

    entries: dict[tuple[int, int], Hashable]
    kinds: Sequence[Hashable]
    needs: Sequence[int]
    heights: Sequence[int]
    widths: Sequence[int]

    def content(self, rectangle: Rectangle) -> Hashable:
        """The properties that rectangles which can be stacked agree in."""
        rows, columns = rectangle
        cells = tuple(self.entries[r, c] for r in rows for c in columns)
        return self.kinds[columns[0]], len(rows), cells

    def moved(self, rectangle: Rectangle) -> int:
        """Numbers of one instance that are split, and concatenated, around a product."""
        rows, columns = rectangle
        height = sum(self.heights[r] for r in rows) if len(rows) > 1 else 0
        return height + sum(self.widths[c] for c in columns)

    def before(self, rectangles: Sequence[Rectangle]) -> list[int] | None:
        """For each rectangle, as bits, those that come before it; None if that goes in circles."""
        makers = [0] * len(self.kinds)
        for i, rectangle in enumerate(rectangles):
            for c in rectangle.columns:
                makers[c] |= 1 << i
        levels = [0] * len(rectangles)
        for i, rectangle in enumerate(rectangles):
            needs = 0
            for r in rectangle.rows:
                needs |= self.needs[r]
            for c in bits(needs):
                levels[i] |= makers[c]
        done, remaining = 0, list(range(len(rectangles)))
        while remaining:
            ready = [i for i in remaining if not levels[i] & ~done]
            if not ready:
                return None
            for i in ready:
                for j in bits(levels[i]):
                    levels[i] |= levels[j]
            done |= sum(1 << i for i in ready)
            remaining = [i for i in remaining if not done >> i & 1]
        return levels

    def stacked(self, rectangles: Sequence[Rectangle]) -> list[Group]:
        """Rectangles with the same weights in groups, as far as their order allows."""
        before = self.before(rectangles)
        assert before is not None
        groups: list[_Stack] = []
        for i, rectangle in enumerate(rectangles):
            content = self.content(rectangle)
            groups.append(_Stack(content, (rectangle,), 1 << i, before[i]))
        i = 0
        while i < len(groups):
            j = next((j for j in range(i) if groups[j].fits(groups[i])), None)
            if j is None:
                i += 1
                continue
            stacked_groups = groups[j].with_(groups.pop(i))
            groups[j] = stacked_groups
            groups = [g.after(stacked_groups) for g in groups]
        return [group.rectangles for group in groups]


class _Stack(NamedTuple):
    """Rectangles to be stacked; `members` and those `before` them are bits."""

    content: Hashable
    rectangles: Group
    members: int
    before: int

    def fits(self, other: "_Stack") -> bool:
        """True of stacks with the same weights that do not wait for each other."""
        waits = self.before & other.members or other.before & self.members
        return self.content == other.content and not waits

    def with_(self, other: "_Stack") -> "_Stack":
        return _Stack(
            self.content,
            self.rectangles + other.rectangles,
            self.members | other.members,
            self.before | other.before,
        )

    def after(self, other: "_Stack") -> "_Stack":
        """The same, if it waits for a part of another, waiting for all of that."""
        if not self.before & other.members:
            return self
        return self._replace(before=self.before | other.before | other.members)


def cover(table: ProductTable) -> list[Group]:
    """Groups, a product each, that hold every entry once: few of them."""

    def cost(rectangles: Sequence[Rectangle]) -> tuple[int, int]:
        return len(table.stacked(rectangles)), sum(map(table.moved, rectangles))

    return table.stacked(min(_by_rows(table), _by_columns(table), key=cost))


def _by_rows(table: ProductTable) -> list[Rectangle]:
    """Each row with all its columns of a kind; rows with the same columns that need the same."""
    columns: dict[tuple[int, Hashable], list[int]] = {}
    for r, c in sorted(table.entries):
        columns.setdefault((r, table.kinds[c]), []).append(c)
    rows: dict[tuple[Hashable, tuple[int, ...], int], list[int]] = {}
    for (r, kind), mine in columns.items():
        rows.setdefault((kind, tuple(mine), table.needs[r]), []).append(r)
    pairs = rows.items()
    return [Rectangle(tuple(mine), across) for (_, across, _), mine in pairs]


def _by_columns(table: ProductTable) -> list[Rectangle]:
    """Columns of a kind with the same rows, of those whose rows need no column that is left."""
    rows: dict[int, list[int]] = {}
    for r, c in sorted(table.entries):
        rows.setdefault(c, []).append(r)
    found, left = [], set(rows)
    while left:
        missing = sum(1 << c for c in left)
        ready = [c for c in sorted(left) if not any(table.needs[r] & missing for r in rows[c])]
        alike: dict[Hashable, list[int]] = {}
        for c in ready:
            alike.setdefault((table.kinds[c], tuple(rows[c])), []).append(c)
        found += [Rectangle(tuple(rows[mine[0]]), tuple(mine)) for mine in alike.values()]
        left.difference_update(ready)
    return found
