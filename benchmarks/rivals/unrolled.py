"""Is the batched function as fast as a program unrolled by hand for one minibatch?

Both sides compute the TreeLSTM of `jedbatch.models.tree` with a cross-entropy at every node, and
the loss of one minibatch.

unrolled    straight-line `jax.numpy` for exactly this minibatch, jit-compiled: a gather of
            embeddings and one product for all leaves; for each level a gather of the children's
            rows, one product and the gates; one product for the scores of all nodes. Indices are
            constants of the program. It has to be compiled again for the next minibatch: the time
            of that is not counted, but printed in the columns `compile s` (tracing, compiling and
            the first run; inference + training).
jedbatch    `score.apply(params, plan)` under `jax.jit`, with a plan made before. The program is
            one that holds other minibatches of the treebank too; it is not compiled again for them.

Inference is the loss, training the loss and its gradient. The minibatch is the one with the median
number of nodes among several. Losses and gradients of both sides are compared before anything is
timed. Both sides run in turns in one process; the table has medians, the ratio of medians, and in
brackets the quartiles of the ratios of neighbouring runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch.data import num_nodes
from jedbatch.models import tree

HIDDEN = [64, 128, 256, 512]
BATCH = [1, 8, 64, 256]
KNOWN = 6  # minibatches planned before the measured one


class Levels(NamedTuple):
    """A minibatch of trees by height: the leaves, then nodes with only leaves below them, ...

    Attributes:
      words: word of every leaf.
      children: for each further level, the positions of left and of right children.
      labels: label of every node, by position.
    """

    words: np.ndarray
    children: list[tuple[np.ndarray, np.ndarray]]
    labels: np.ndarray

    @classmethod
    def of(cls, trees: list[Any]) -> "Levels":
        """The levels of a minibatch; positions count through the levels, leaves first."""
        height, word, left, right, label = [], [], [], [], []

        def visit(root: Any) -> int:
            leaf = len(root) == 2
            a, b = (-1, -1) if leaf else (visit(root[1]), visit(root[2]))
            height.append(0 if leaf else 1 + max(height[a], height[b]))
            word.append(root[1] if leaf else -1)
            left.append(a)
            right.append(b)
            label.append(root[0])
            return len(label) - 1

        for root in trees:
            visit(root)
        order = np.argsort(height, kind="stable")
        position = np.argsort(order)
        left, right = position[left], position[right]
        nodes = np.split(order, np.cumsum(np.bincount(height))[:-1])
        return cls(
            np.array(word)[nodes[0]],
            [(left[level], right[level]) for level in nodes[1:]],
            np.array(label)[order],
        )


def unrolled_loss(trees: list[Any]) -> Callable[[Any, Any], jax.Array]:
    """The loss of exactly these trees, as a function of (params, nothing)."""
    levels = Levels.of(trees)

    def loss(params: Any, _: Any) -> jax.Array:
        h, c = leaves(params, levels.words)
        row = len(levels.words)
        room = ((0, len(levels.labels) - row), (0, 0))
        h, c = jnp.pad(h, room), jnp.pad(c, room)
        for left, right in levels.children:
            new_h, new_c = nodes(params, h[left], h[right], c[left], c[right])
            h = jax.lax.dynamic_update_slice(h, new_h, (row, 0))
            c = jax.lax.dynamic_update_slice(c, new_c, (row, 0))
            row += len(left)
        scores = jax.nn.log_softmax(h @ params["output_w"] + params["output_b"])
        return -jnp.take_along_axis(scores, levels.labels[:, None], axis=1).sum()

    return loss


def leaves(params: Any, words: np.ndarray) -> tuple[jax.Array, jax.Array]:
    gates = params["embedding"][words] @ params["leaf_w"] + params["leaf_b"]
    i, o, u = jnp.split(gates, 3, axis=1)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def nodes(params: Any, left_h: Any, right_h: Any, left_c: Any, right_c: Any) -> Any:
    children = jnp.concatenate([left_h, right_h], axis=1)
    gates = children @ params["node_w"] + params["node_b"]
    i, f_left, f_right, o, u = jnp.split(gates, 5, axis=1)
    c = (
        jax.nn.sigmoid(i) * jnp.tanh(u)
        + jax.nn.sigmoid(f_left) * left_c
        + jax.nn.sigmoid(f_right) * right_c
    )
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


class Sides(NamedTuple):
    """One minibatch, ready to run on both sides."""

    minibatch: list[Any]
    params: Any
    score: jedbatch.Batched
    plan: jedbatch.Plan
    unrolled: common.Compiled
    batched: common.Compiled

    def runs(self, kind: str) -> list[Callable[[], Any]]:
        """Returns the functions to time, [unrolled, jedbatch]; `kind` is "infer" or "train"."""
        by_hand, ours = getattr(self.unrolled, kind), getattr(self.batched, kind)
        return [lambda: by_hand(self.params, None), lambda: ours(self.params, self.plan)]


def prepare(bank: common.Treebank, hidden: int, size: int, *, gradient: bool = True) -> Sides:
    """Both sides for a typical minibatch of the treebank."""
    cells, params = common.model(bank.num_words, hidden)
    score = jedbatch.batch(tree.scorer(cells))
    minibatches = common.chunks(bank.trees, size)
    for other in minibatches[:KNOWN]:
        score.plan(params, other, gradient=gradient)
    minibatch = common.typical(minibatches)
    plan = score.plan(params, minibatch, gradient=gradient)
    return Sides(
        minibatch,
        params,
        score,
        plan,
        common.compiled(unrolled_loss(minibatch)),
        common.compiled(common.batched_loss(score)),
    )


def check(sides: Sides, kind: str) -> None:
    """Raises unless both sides give the same."""
    expected, got = (run() for run in sides.runs(kind))

    def same(path: Any, a: jax.Array, b: jax.Array) -> None:
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(
            b,
            a,
            rtol=1e-3,
            atol=1e-4 * max(1.0, float(np.abs(a).max())),
            err_msg=f"jedbatch and the unrolled program differ: {jax.tree_util.keystr(path)}",
        )

    jax.tree.map_with_path(same, expected, got)


def measure(bank: common.Treebank, hidden: int, size: int, budget: float) -> list[Any]:
    """A row of the table."""
    sides = prepare(bank, hidden, size)
    compile_seconds = np.zeros(2)
    cells = []
    for kind in ("infer", "train"):
        runs = sides.runs(kind)
        compile_seconds += [common.seconds(run) for run in runs]
        check(sides, kind)
        times = common.interleaved(runs, budget)
        cells += [f"{1e3 * times.median(i):.2f}" for i in range(2)] + [times.ratio(1)]
    count = sum(map(num_nodes, sides.minibatch))
    return [hidden, size, count, *cells, *(f"{s:.1f}" for s in compile_seconds)]


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=HIDDEN, help="such as 64,256")
    parser.add_argument("--batch", type=common.numbers, default=BATCH, help="such as 1,64")
    parser.add_argument("--seconds", type=float, default=6, help="per measurement (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.seconds = [16], [1, 4], 0.2
    print(common.machine())
    largest = max(args.batch)
    bank = common.load_trees(args.data, max(64, 3 * largest))
    print(f"{common.source(args.data)}, {bank.num_words} words, {common.NUM_LABELS} labels")
    table = common.Table(
        "hidden",
        "batch",
        "tree nodes",
        "inference: unrolled ms",
        "jedbatch ms",
        "ratio",
        "training: unrolled ms",
        "jedbatch ms",
        "ratio",
        "compile s: unrolled",
        "jedbatch",
    )
    for hidden, size in common.by(args.hidden, args.batch):
        table.row(*measure(bank, hidden, size, args.seconds))
        jax.clear_caches()  # programs of the row before take memory


if __name__ == "__main__":
    main()
