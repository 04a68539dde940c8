"""Covering a table by few rectangles, each entry by one, in an order that there is."""

import itertools

import numpy as np
import pytest

from jedbatch._kernel.covering import ProductTable, cover


def is_ordered(rectangles, needs):
    """Whether each can come after those with a column that one of its rows depends on."""
    left = list(rectangles)
    while left:
        missing = {c for _, columns in left for c in columns}
        waiting = [
            (rows, columns) for rows, columns in left if any(needs[r] & missing for r in rows)
        ]
        if len(waiting) == len(left):
            return False
        left = waiting
    return True


@pytest.mark.parametrize("seed", range(20))
def test_covers_hold_every_entry_once(seed):
    rng = np.random.default_rng(seed)
    num_rows, num_columns = (int(n) for n in rng.integers(1, 5, 2))
    full = list(itertools.product(range(num_rows), range(num_columns)))
    entries = {place: place for place in full if rng.integers(4)} or {(0, 0): 0}
    num_rows = 1 + max(r for r, _ in entries)
    needs = [{c for c in range(num_columns) if not rng.integers(4)} for _ in range(num_rows)]
    for r in range(num_rows):  # a row depends on columns of earlier rows only
        needs[r] -= {c for s, c in entries if s >= r}
        needs[r] |= {d for c in needs[r] for s, e in entries if e == c for d in needs[s]}
    table = ProductTable(
        entries,
        ["kind"] * num_columns,
        [sum(1 << c for c in columns) for columns in needs],
        [1] * num_rows,
        [1] * num_columns,
    )
    groups = cover(table)
    held = [place for (rectangle,) in groups for place in itertools.product(*rectangle)]
    assert sorted(held) == sorted(entries)
    assert is_ordered([rectangle for (rectangle,) in groups], needs)
    assert len(groups) <= min(len({r for r, _ in entries}), len({c for _, c in entries}))


def test_columns_with_the_same_rows_are_one_product():
    """A GRU, whose second gate does not wait for the first one, and whose state waits for that."""
    entries = {(r, c): (r, c) for r, c in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 2)]}
    table = ProductTable(entries, ["kind"] * 3, [0, 0, 1], [1] * 3, [1] * 3)
    assert cover(table) == [(((0, 1), (0, 1)),), (((0, 2), (2,)),)]
