"""Do planning and running stay linear from a thousand nodes to a million?

The TreeLSTM of `jedbatch.models.tree` on minibatches of more and more trees, with small states, so
that the cost of a node and not of its arithmetic is seen. Nodes are those of the graph: cells and
sums. The largest size takes some 40,000 trees, more than treebanks hold: with `--data` give
smaller sizes as well (`--nodes`).

plan unseen   nanoseconds per node to plan trees never seen before (types of cells are known).
plan known    the same for trees seen before.
run           inference under `jax.jit` with a plan made before.

Each is the median of several minibatches or runs, with its ratio to the smallest size. Linear is a
ratio of 1; 1.3 is what we aim for. Planning and running have costs per batch of nodes as well, so
ratios far below 1 are expected where small graphs are dominated by these.
"""

import gc
import time
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch.data import synthetic_treebank
from jedbatch.models import tree

SIZES = [1_000, 10_000, 100_000, 1_000_000]
NODES_PER_TREE = 100  # of the graph, about


def minibatches(path: str | None, count: int, size: int) -> tuple[list[list[Any]], int]:
    """Minibatches of different trees, and the number of words."""
    if path is None:
        made = [synthetic_treebank(size, seed=seed) for seed in range(1, count + 1)]
        return made, 500
    bank = common.load_trees(path, count * size)
    return common.chunks(bank.trees, size), bank.num_words


def planning(score: jedbatch.Batched, params: Any, trees: list[Any]) -> tuple[float, jedbatch.Plan]:
    """(seconds, plan)."""
    start = time.perf_counter()
    plan = score.plan(params, trees, gradient=False)
    return time.perf_counter() - start, plan


def measure(path: str | None, target: int, hidden: int) -> tuple[int, np.ndarray]:
    """(nodes, nanoseconds per node: planning unseen trees, known trees, running)."""
    repeats = int(np.clip(300_000 // target, 3, 15))
    work, num_words = minibatches(path, 1 + repeats, max(1, target // NODES_PER_TREE))
    cells, params = common.model(num_words, hidden)
    score = jedbatch.batch(tree.scorer(cells))
    run = common.compiled(common.batched_loss(score)).infer
    warm, *rest = work
    gc.collect()  # what the size before left behind is not this one's
    jax.block_until_ready(run(params, planning(score, params, warm)[1]))
    found = []
    for trees in rest:
        unseen, plan = planning(score, params, trees)
        known, plan = planning(score, params, trees)
        nodes = len(plan.graph.node_type)
        runs = [common.seconds(lambda plan=plan: run(params, plan)) for _ in range(6)]
        found.append([nodes, unseen / nodes, known / nodes, np.median(runs[1:]) / nodes])
    nodes, *per_node = np.median(found, axis=0)
    return int(nodes), 1e9 * np.array(per_node)


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--nodes", type=common.numbers, default=SIZES, help="such as 1000,10000")
    args = parser.parse_args()
    if args.quick:
        args.nodes = [500, 2_000]
    print(common.machine())
    print(f"{common.source(args.data)}, hidden {args.hidden}")
    header = ["plan unseen ns/node", "ratio", "plan known ns/node", "ratio", "run ns/node", "ratio"]
    table = common.Table("nodes", *header)
    base = None
    for target in args.nodes:
        nodes, times = measure(args.data, target, args.hidden)
        base = times if base is None else base
        pairs = zip(times, times / base, strict=True)
        table.row(f"{nodes:,}", *(x for t, r in pairs for x in (f"{t:.0f}", f"{r:.2f}")))
        jax.clear_caches()


if __name__ == "__main__":
    main()
