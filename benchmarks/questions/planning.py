"""What does planning cost beside the run that it plans?

`Batched.plan` of minibatches of trees for the TreeLSTM of `jedbatch.models.tree`, against the run
of the same plan under `jax.jit`.

unseen      trees never seen before; types of cells and programs are known from other minibatches.
equal       trees seen before, as other Python objects with the same contents.
known       trees seen before, as the same Python objects: every epoch but the first, usually.

With `gradient=False` the run is inference, with `gradient=True` training (loss and gradient). The
stages are timed by `plan` itself (`plan.host.seconds`), `other` is the rest of the call. All
numbers are medians over many minibatches, each planned once per row, run once to warm up and once
for the time; quartiles of the share, planning / run, in brackets. Nodes are those of the graph:
cells and sums. Collecting garbage is part of planning and not turned off.
"""

import pickle
import time
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch.models import tree

KNOWN = 6  # minibatches that make types and programs known
STAGES = ("trace", "merge", "schedule", "layout", "lower")


class Planner:
    """Plans minibatches and remembers how long that took, per stage."""

    def __init__(self, score: jedbatch.Batched, params: Any, gradient: bool):
        self._score, self._params, self._gradient = score, params, gradient
        self.rows: dict[str, list[list[float]]] = {"unseen": [], "equal": [], "known": []}

    def plan(self, trees: list[Any], row: str | None = None) -> jedbatch.Plan:
        """A plan; how long it took is added to a row."""
        start = time.perf_counter()
        plan = self._score.plan(self._params, trees, gradient=self._gradient)
        total = time.perf_counter() - start
        if row is not None:
            assert plan.host.num_known == (0 if row == "unseen" else len(trees)), row
            stages = [plan.host.seconds[stage] for stage in STAGES]
            self.rows[row].append([*stages, total - sum(stages), total])
        return plan


def measure(
    table: common.Table, bank: common.Treebank, hidden: int, size: int, gradient: bool
) -> None:
    """Prints the rows of inference or of training."""
    cells, params = common.model(bank.num_words, hidden)
    score = jedbatch.batch(tree.scorer(cells))
    planner = Planner(score, params, gradient)
    functions = common.compiled(common.batched_loss(score))
    run = functions.train if gradient else functions.infer
    minibatches = common.chunks(bank.trees, size)
    for trees in minibatches[:KNOWN]:
        jax.block_until_ready(run(params, planner.plan(trees)))
    nodes, runs = [], []
    for trees in minibatches[KNOWN:]:
        planner.plan(trees, "unseen")
        planner.plan(pickle.loads(pickle.dumps(trees)), "equal")
        plan = planner.plan(trees, "known")
        nodes.append(len(plan.graph.node_type))
        jax.block_until_ready(run(params, plan))
        runs.append(common.seconds(lambda plan=plan: run(params, plan)))
    for row, times in planner.rows.items():
        stages = np.array(times)
        per_node = np.median(1e6 * stages / np.array(nodes)[:, None], axis=0)
        table.row(
            "training" if gradient else "inference",
            hidden,
            size,
            row,
            f"{1e3 * np.median(stages[:, -1]):.2f}",
            f"{1e3 * np.median(runs):.2f}",
            common.spread(stages[:, -1] / np.array(runs), 100, 0),
            *(f"{x:.3f}" for x in per_node),
        )


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[256], help="such as 64,256")
    parser.add_argument("--batch", type=common.numbers, default=[64], help="such as 8,64")
    parser.add_argument("--minibatches", type=int, default=29, help="to plan (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.minibatches = [16], [4], 5
    print(common.machine())
    bank = common.load_trees(args.data, max(args.batch) * (KNOWN + args.minibatches))
    print(f"{common.source(args.data)}, {bank.num_words} words, {common.NUM_LABELS} labels")
    columns = [f"{stage} µs/node" for stage in (*STAGES, "other", "total")]
    table = common.Table(
        "run", "hidden", "batch", "trees", "plan ms", "run ms", "share %", *columns
    )
    for hidden, size in common.by(args.hidden, args.batch):
        few = bank._replace(trees=bank.trees[: size * (KNOWN + args.minibatches)])
        for gradient in (False, True):
            measure(table, few, hidden, size, gradient)


if __name__ == "__main__":
    main()
