"""How long does one small request take?

Inference of the TreeLSTM of `jedbatch.models.tree` on one tree and on eight, the loss of all nodes.

unrolled        a program unrolled by hand for exactly these trees (see `unrolled.py`); nobody can
                compile one for each request.
jedbatch        `score.apply(params, plan)` under `jax.jit`, with a plan made before.
known trees     the same, with planning: the trees were seen before (the same objects).
unseen trees    planning and a run for trees never seen before, of the same treebank; each is
                planned once, the median is over many.

The first three run in turns in one process, after both results were compared; medians, ratios of
medians, quartiles in brackets. The trees are those with the median number of nodes among many.
"""

import common
import unrolled

from jedbatch.data import num_nodes

KNOWN = 32  # minibatches that warm planning up


def measure(bank: common.Treebank, hidden: int, size: int, budget: float) -> list[object]:
    """A row of the table."""
    sides = unrolled.prepare(bank, hidden, size, gradient=False)
    unrolled.check(sides, "infer")
    infer = sides.batched.infer

    def planned(trees: list) -> object:
        return infer(sides.params, sides.score.plan(sides.params, trees, gradient=False))

    runs = [*sides.runs("infer"), lambda: planned(sides.minibatch)]
    times = common.interleaved(runs, budget)
    others = common.chunks(bank.trees, size)
    for trees in others[:KNOWN]:
        common.seconds(lambda trees=trees: planned(trees))
    unseen = [common.seconds(lambda trees=trees: planned(trees)) for trees in others[KNOWN:]]
    return [
        hidden,
        size,
        sum(map(num_nodes, sides.minibatch)),
        f"{1e3 * times.median(0):.2f}",
        f"{1e3 * times.median(1):.2f}",
        times.ratio(1),
        f"{1e3 * times.median(2):.2f}",
        common.spread(unseen, 1e3),
    ]


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[64, 256], help="such as 64,256")
    parser.add_argument("--batch", type=common.numbers, default=[1, 8], help="such as 1,8")
    parser.add_argument("--seconds", type=float, default=6, help="per measurement (%(default)s)")
    args = parser.parse_args()
    repeats = 100
    if args.quick:
        args.hidden, args.seconds, repeats = [16], 0.2, 8
    print(common.machine())
    bank = common.load_trees(args.data, max(args.batch) * (KNOWN + repeats))
    print(f"{common.source(args.data)}, {bank.num_words} words, {common.NUM_LABELS} labels")
    table = common.Table(
        "hidden",
        "batch",
        "tree nodes",
        "unrolled ms",
        "jedbatch ms",
        "ratio",
        "known trees ms",
        "unseen trees ms",
    )
    for hidden, size in common.by(args.hidden, args.batch):
        few = bank._replace(trees=bank.trees[: size * (KNOWN + repeats)])
        table.row(*measure(few, hidden, size, args.seconds))


if __name__ == "__main__":
    main()
