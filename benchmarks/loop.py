"""How much faster is a minibatch than its instances one by one?

The TreeLSTM of `jedbatch.models.tree`, the loss of all nodes.

loop        Python calls the jit-compiled cells for every node of every tree; in training
            `jax.grad` of the loss of one tree, tree by tree. This is the program `jedbatch.batch`
            is given, run as it stands.
known       the batched function with planning, for trees seen before; training is
            `value_and_grad` under `jax.jit`, which takes the plan.
planned     the same with a plan made before.

All three run in turns in one process, each warmed up. The loop is timed on a few trees of the
minibatch, and its time scaled up by numbers of nodes. Trees per second, from medians; then medians
of the ratios of neighbouring runs, quartiles in brackets.
"""

from collections.abc import Callable
from typing import Any

import common
import jax

import jedbatch
from jedbatch.data import num_nodes
from jedbatch.models import tree
from jedbatch.models.parts import jitted


def looped(cells: tree.Cells, params: Any, trees: list[Any]) -> dict[str, Callable[[], Any]]:
    """The loop over trees: inference and training."""
    score = tree.scorer(jitted(cells))
    slope = jax.value_and_grad(lambda params, t: score(params, t)[0])
    return {
        "inference": lambda: [score(params, t) for t in trees],
        "training": lambda: [slope(params, t) for t in trees],
    }


def measure(
    table: common.Table, bank: common.Treebank, hidden: int, size: int, few: int, budget: float
) -> None:
    """Prints two rows."""
    cells, params = common.model(bank.num_words, hidden)
    score = jedbatch.batch(tree.scorer(cells))
    minibatch = common.typical(common.chunks(bank.trees, size))
    loop = looped(cells, params, minibatch[:few])
    run = common.compiled(common.batched_loss(score))

    def rows(kind: str, batched: Callable[[Any, Any], Any], gradient: bool) -> None:
        def plan() -> jedbatch.Plan:
            return score.plan(params, minibatch, gradient=gradient)

        cached = plan()
        runs = [loop[kind], lambda: batched(params, plan()), lambda: batched(params, cached)]
        times = common.interleaved(runs, budget, least=5)
        # Trees differ in size: the loop's few trees count by their share of the nodes.
        ours, whole = (sum(map(num_nodes, x)) for x in (minibatch[:few], minibatch))
        times.seconds[0] *= whole / ours
        rates = [f"{size / times.median(i):.0f}" for i in range(3)]
        gains = [common.spread(times.seconds[0] / times.seconds[i], digits=1) for i in (1, 2)]
        table.row(kind, hidden, size, *rates, *gains)

    rows("inference", run.infer, gradient=False)
    rows("training", run.train, gradient=True)


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[64, 256], help="such as 64,256")
    parser.add_argument("--batch", type=int, default=64, help="trees per minibatch (%(default)s)")
    parser.add_argument("--few", type=int, default=16, help="trees the loop runs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="per measurement (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.few, args.seconds = [16], 4, 2, 0.2
    print(common.machine())
    bank = common.load_trees(args.data, 3 * args.batch)
    few = min(args.few, args.batch)
    print(f"{common.source(args.data)}, {bank.num_words} words, {common.NUM_LABELS} labels")
    table = common.Table(
        "", "hidden", "batch", "loop /s", "known /s", "planned /s", "known × loop", "planned × loop"
    )
    for hidden in args.hidden:
        measure(table, bank, hidden, args.batch, few, args.seconds)


if __name__ == "__main__":
    main()
