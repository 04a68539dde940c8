"""Covering a table by few rectangles: which products of a cell become one.

A row of the table is a value that is multiplied, a column is a sum of products, an entry is a
weight. A set of rows × a set of columns all of whose entries exist, a *rectangle*, is one matrix
product: rows concatenated, weights packed as a block matrix, results split. We look for the
fewest rectangles that hold every entry once. An entry that does not exist is never filled with
zeros: 0·inf is not 0.

Dependencies limit the choice. A GRU multiplies r·h, where r is a column itself:

               r    z    n
        x      W    W    W            [x, h] × {r, z}, then [x, r·h] × {n}: two products;
        h      W    W    ·            x × {r, z, n} to begin with would make three
        r·h    ·    ·    W

A rectangle comes after all those with a column that one of its rows depends on, and this order
must have no circle. Rectangles with the same weights (the forget gates F h_k of a child-sum
TreeLSTM) are *stacked*: one product of a matrix, whose rows are theirs.

**Why this is not a schedule.** Algorithm 1 (`_schedule.policy`) batches operations of one type
that are ready, as this does. But it runs everything that is ready, and x W of column n has to wait
for r·h. Which products share a row or a column decides what can be packed, and the order follows
from it, not the other way round. Covering by rectangles is hard in general; the tables of cells are
small. Rows, and columns, that cannot be told apart count as one (what is best for one is best for
the other), which leaves one entry for an LSTM and five for the GRU above. All partitions are tried,
large rectangles first, until a budget is spent. The number of products counts first, the numbers
they move second.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from jedbatch._graph.paths import bits

SEARCH_BUDGET = 20_000  # rectangles tried, times the square of their number so far
# Entries, equal rows and columns counted once, from which on a table is not searched.
MAX_SEARCHED_ENTRIES = 100


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
    """Groups, a product each, that hold every entry once: the fewest found."""
    rows, columns = _row_classes(table), _column_classes(table)
    kinds = [table.kinds[c[0]] for c in columns]
    everything = frozenset(
        (a, b)
        for a, b in itertools.product(range(len(rows)), range(len(columns)))
        if (rows[a][0], columns[b][0]) in table.entries
    )

    def rectangle(some_rows: Sequence[int], some_columns: Sequence[int]) -> Rectangle:
        return Rectangle(
            tuple(sorted(r for a in some_rows for r in rows[a])),
            tuple(sorted(c for b in some_columns for c in columns[b])),
        )

    # The product of each row with all its columns of a kind, or of each column with all its rows.
    by_row: dict[tuple[int, Hashable], list[int]] = {}
    by_column: dict[int, list[int]] = {}
    for a, b in sorted(everything):
        by_row.setdefault((a, kinds[b]), []).append(b)
        by_column.setdefault(b, []).append(a)
    best: list[Group] = []
    least: tuple[float, int] = (float("inf"), 0)
    budget = SEARCH_BUDGET

    def consider(rectangles: Sequence[Rectangle]) -> None:
        nonlocal best, least
        groups = table.stacked(rectangles)
        cost = len(groups), sum(map(table.moved, rectangles))
        if cost < least:
            best, least = groups, cost

    def search(left: frozenset[tuple[int, int]], chosen: list[Rectangle]) -> None:
        nonlocal budget
        moved = sum(map(table.moved, chosen))
        if (len(set(map(table.content, chosen))), moved) >= least:
            return
        if not left:
            consider(chosen)
            return
        for some in _rectangles(left, lambda b, c: kinds[b] == kinds[c]):
            budget -= (1 + len(chosen)) ** 2
            if budget < 0:
                return
            more = [*chosen, rectangle(*some)]
            if table.before(more) is not None:
                search(left.difference(itertools.product(*some)), more)

    consider([rectangle([a], mine) for (a, _), mine in by_row.items()])
    consider([rectangle(mine, [b]) for b, mine in by_column.items()])
    if len(everything) < MAX_SEARCHED_ENTRIES:
        search(everything, [])
    return best


def _row_classes(table: ProductTable) -> list[list[int]]:
    """Rows with entries in the same columns that depend on the same columns."""
    filled: list[list[int]] = [[] for _ in table.needs]
    for r, c in sorted(table.entries):
        filled[r].append(c)
    return _classes([(tuple(f), n) for f, n in zip(filled, table.needs, strict=True)])


def _column_classes(table: ProductTable) -> list[list[int]]:
    """Columns of a kind with entries in the same rows that the same rows depend on."""
    keys: list[tuple[Hashable, list[int], list[int]]] = [(kind, [], []) for kind in table.kinds]
    for r, c in sorted(table.entries):
        keys[c][1].append(r)
    for r, needs in enumerate(table.needs):
        for c, key in enumerate(keys):
            if needs >> c & 1:
                key[2].append(r)
    return _classes([(kind, tuple(filled), tuple(readers)) for kind, filled, readers in keys])


def _classes(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions of equal keys."""
    classes: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        classes.setdefault(key, []).append(i)
    return list(classes.values())


def _rectangles(
    left: frozenset[tuple[int, int]], alike: Callable[[int, int], bool]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(rows, columns) of the rectangles with the first entry that is left, large ones first."""
    row, column = min(left)
    width = 1 + max(b for _, b in left)
    for more in _subsets([a for a, b in left if b == column and a != row]):
        rows = (row, *more)
        full = [
            b
            for b in range(width)
            if b != column and alike(b, column) and all((a, b) in left for a in rows)
        ]
        for others in _subsets(full):
            yield rows, (column, *others)


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All subsets, large ones first; of many items the largest and the least only."""
    items = sorted(items)
    sizes = range(len(items), -1, -1) if len(items) < 7 else (len(items), 0)
    return itertools.chain.from_iterable(itertools.combinations(items, n) for n in sizes)
