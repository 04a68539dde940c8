"""Does a PQ-tree stay near-linear from a thousand leaves to a hundred thousand?

Sets are intervals of a hidden random order, as many as there are leaves; their sizes are geometric,
2 to 50. All of them can be kept together, so that the tree is refined to the end.

reduce        milliseconds to reduce by all sets, median of several families.
per element   microseconds for each leaf of each set, with its ratio to the smallest size.

Linear is a ratio of 1; caches of the processor make it larger.
"""

import gc
import time

import numpy as np

from benchmarks import common
from jedbatch._layout.pq_tree import PQTree

SIZES = [1_000, 10_000, 100_000]


def intervals(num_leaves: int, mean: float, rng: np.random.Generator) -> list[list[int]]:
    """Intervals of a random order, one for each leaf."""
    hidden = rng.permutation(num_leaves).tolist()
    sizes = np.clip(1 + rng.geometric(1 / mean, num_leaves), 2, 50)
    firsts = rng.integers(0, num_leaves - sizes + 1)
    ends = firsts + sizes
    return [hidden[i:j] for i, j in zip(firsts.tolist(), ends.tolist(), strict=True)]


def measure(num_leaves: int, mean: float, seed: int) -> tuple[int, float]:
    """(elements of all sets, seconds)."""
    sets = intervals(num_leaves, mean, np.random.default_rng(seed))
    tree = PQTree(num_leaves)
    gc.collect()
    start = time.perf_counter()
    taken = [tree.reduce(leaves) for leaves in sets]
    elapsed = time.perf_counter() - start
    assert all(taken)
    return sum(map(len, sets)), elapsed


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--leaves", type=common.numbers, default=SIZES, help="such as 1000,10000")
    parser.add_argument("--mean", type=float, default=8.0, help="size of sets (default 8)")
    args = parser.parse_args()
    if args.quick:
        args.leaves = [200, 1_000]
    print(common.machine())
    table = common.Table("leaves", "sets", "elements", "reduce ms", "per element µs", "ratio")
    base = None
    for num_leaves in args.leaves:
        repeats = int(np.clip(100_000 // num_leaves, 3, 15))
        runs = [measure(num_leaves, args.mean, seed) for seed in range(repeats)]
        elements, elapsed = np.median(runs, axis=0)
        cost = float(np.median([s / n for n, s in runs]))
        base = base or cost
        numbers = f"{num_leaves:,}", f"{num_leaves:,}", f"{int(elements):,}"
        table.row(*numbers, f"{1e3 * elapsed:.0f}", f"{1e6 * cost:.2f}", f"{cost / base:.2f}")


if __name__ == "__main__":
    main()
