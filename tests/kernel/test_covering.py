"""Covering a table by the fewest rectangles, judged by trying all partitions."""

import itertools

import numpy as np
import pytest

from jedbatch._kernel.covering import ProductTable, cover


def fewest_rectangles(entries, needs):
    """By trying all partitions of a table without equal weights."""
    best = len(entries)

    def ordered(parts):
        made, left = set(), list(parts)
        while left:
            missing = {c for _, columns in left for c in columns}
            ready = [p for p in left if not any(needs[r] & missing for r in p[0])]
            if not ready:
                return False
            made.update(map(id, ready))
            left = [p for p in left if id(p) not in made]
        return True

    def search(left, parts):
        nonlocal best
        if len(parts) >= best and left:
            return
        if not left:
            best = min(best, len(parts)) if ordered(parts) else best
            return
        r, c = min(left)
        rows, columns = sorted({a for a, _ in left} - {r}), sorted({b for _, b in left} - {c})
        for n, m in itertools.product(range(1 << len(rows)), range(1 << len(columns))):
            chosen = [r, *(a for i, a in enumerate(rows) if n >> i & 1)]
            across = [c, *(b for i, b in enumerate(columns) if m >> i & 1)]
            covered = set(itertools.product(chosen, across))
            if covered <= left:
                search(left - covered, [*parts, (chosen, across)])

    search(frozenset(entries), [])
    return best


@pytest.mark.parametrize("seed", range(20))
def test_cover_is_the_least(seed):
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
    assert len(groups) == fewest_rectangles(entries, needs)
