"""How long until the first result, and how much is compiled for topologies never seen before?

The TreeLSTM of `jedbatch.models.tree`. `first result` is the time from a new `jedbatch.batch` to
the loss (inference), or to loss and gradient (training), of a first minibatch: recording, planning,
compiling, running; JAX itself is warm. `second` is the same for the second minibatch, of other
trees. Then come two epochs of trees that all differ: what the second compiles it compiles because
programs did not fit, since no tree is a repetition.

Programs are counted by `Batched.compilations` (inference: the batched function is called as it is)
and by the number of times JAX traced the train step, which takes a plan (training). Kernels are
node types; each is compiled in several widths inside of one program.
"""

import time
from collections.abc import Callable
from typing import Any

import jax

import jedbatch
from benchmarks import common
from jedbatch.models import tree


class Counted:
    """A function of (params, plan), jit-compiled; counts how often it is traced."""

    def __init__(self, fn: Callable[[Any, Any], Any]):
        self.traces = 0

        def traced(params: Any, plan: Any) -> Any:
            self.traces += 1
            return fn(params, plan)

        self.run = jax.jit(traced)


def measure(table: common.Table, bank: common.Treebank, hidden: int, size: int, kind: str) -> None:
    """Prints the row of inference or of training."""
    cells, params = common.model(bank.num_words, hidden)
    start = time.perf_counter()
    score = jedbatch.batch(tree.scorer(cells))
    step = Counted(jax.value_and_grad(common.batched_loss(score)))

    def run(trees: list[Any]) -> Any:
        if kind == "inference":
            return score(params, trees)
        return step.run(params, score.plan(params, trees))

    def programs() -> int:
        return score.compilations if kind == "inference" else step.traces

    minibatches = common.chunks(bank.trees, size)
    half = len(minibatches) // 2
    jax.block_until_ready(run(minibatches[0]))
    first = time.perf_counter() - start
    second = common.seconds(lambda: run(minibatches[1]))
    for trees in minibatches[2:half]:
        run(trees)
    one_epoch = programs()
    for trees in minibatches[half:]:
        run(trees)
    signature = score.plan(params, minibatches[-1]).static.signature
    table.row(
        kind,
        hidden,
        size,
        f"{first:.1f}",
        f"{second:.3f}",
        half,
        one_epoch,
        programs() - one_epoch,
        len(signature.kernels),
        sum(signature.widest),
    )


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[64, 256], help="such as 64,256")
    parser.add_argument("--batch", type=common.numbers, default=[8, 64], help="such as 8,64")
    parser.add_argument("--minibatches", type=int, default=17, help="per epoch (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.minibatches = [16], [4], 3
    print(common.machine())
    bank = common.load_trees(args.data, max(args.batch) * 2 * args.minibatches)
    print(f"{common.source(args.data)}, {bank.num_words} words, {common.NUM_LABELS} labels")
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    table = common.Table(
        "",
        "hidden",
        "batch",
        "first result s",
        "second s",
        "minibatches per epoch",
        "programs, epoch 1",
        "programs, epoch 2",
        "kernels",
        "widths",
    )
    for hidden, size in common.by(args.hidden, args.batch):
        few = bank._replace(trees=bank.trees[: size * 2 * args.minibatches])
        for kind in ("inference", "training"):
            measure(table, few, hidden, size, kind)
            jax.clear_caches()


if __name__ == "__main__":
    main()
