"""What do cells gain when their products are put together (ED-Batch, tables 2 and 5)?

The cells of `cells.py`, one call on a batch: as written, packed by hand, and jedbatch's kernel of
the cell as written, in turns; with the products, the moves and the bytes moved in what XLA made of
each.
"""

import jax
import numpy as np
import pytest

from benchmarks import common
from benchmarks.suite import cells

SIZES = {"quick": [(8, 32)], "full": [(8, 64), (8, 256), (256, 64), (256, 256)]}


@pytest.mark.parametrize("name", cells.CELLS)
@pytest.mark.parametrize("size", range(4))
def test_cells(benchmark, name, size, options):
    sizes = SIZES["full" if options.full else "quick"]
    if size >= len(sizes):
        pytest.skip("part of --full")
    batch, hidden = sizes[size]
    if name == "MV":
        hidden //= 4  # it works on matrices
    cell = cells.CELLS[name]
    ways, operands, pack, planning = cells.three_ways(cell, hidden, batch)
    runs = [cells.looped(way) for way in ways]
    found = [[], []]
    for run, way in zip(runs, ways, strict=True):
        jax.block_until_ready(run(way.params, operands))

    def between():
        for times, run, way in zip(found, runs[:2], ways[:2], strict=True):
            times.append(common.seconds(lambda run=run, way=way: run(way.params, operands)))

    benchmark.pedantic(
        lambda: jax.block_until_ready(runs[2](ways[2].params, operands)), setup=between, rounds=15
    )
    micros = [1e6 * np.median(t) / cells.CALLS for t in (*found, benchmark.stats.stats.data)]
    programs = [cells.Program.of(way, operands) for way in ways]
    benchmark.extra_info |= {
        "cell": name,
        "batch": batch,
        "hidden": hidden,
        "micros": [float(m) for m in micros],
        "products": [p.products for p in programs],
        "moves": [p.moves for p in programs],
        "kilobytes": [p.kilobytes for p in programs],
        "packing_us": 1e6 * float(np.median([common.seconds(pack) for _ in range(15)])),
        "planning_ms": 1e3 * planning,
    }
