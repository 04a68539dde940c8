"""How does jedbatch compare with ED-Batch and DyNet?

The workload is the TreeLSTM of ED-Batch's released code on sentiment trees, h = size of embeddings
and of states:

    leaf   i, o = σ(W e + b), u = tanh(W e + b)       c = i u                    h = o tanh c
    node   i, o = σ(U [h1; h2] + b), u = tanh(...), f_k = σ(F_k h_k + b_f)
                                                      c = i u + f_1 c1 + f_2 c2  h = o tanh c
    score  five-way cross-entropy of W h, at every node

Work counted: products only, two operations per weight: 6 h² per leaf, 16 h² per inner node (12 h²
for i, o, u and 2 h² for each f) and 10 h per score; about 405 h² per sentence. Training counts
three times that: the products of the gradients by states and by weights are two more.

jedbatch is timed on minibatches of consecutive instances:

planned    with a plan made before: what the device needs.
known      with planning of trees seen before (every epoch but the first, usually).
unseen     with planning of trees never seen before. This is what the peers' figures contain: they
           build and schedule their graph for every minibatch.

The peers' figures are not measured here. They were measured on another machine of the same kind
(two cores, Zen 5, AVX-512), on one thread unless stated. They are carried over by the speed of
XLA's matrix product, 256×512×2048, which reached 266 GFLOP/s there on one thread and 470 on two and
is timed in turns with every row here: `here` is the published figure × product here / product
there. The fraction of the product of the same run, `of product`, compares without that step; for
the peers it is taken from their own product (OpenBLAS, 248 and 378 GFLOP/s).

All are medians of runs that take turns in one process; `unseen` is the median over minibatches.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch.data import Vocabulary, index_trees, num_nodes, read_trees, synthetic_treebank
from jedbatch.models.parts import total

KNOWN = 6  # minibatches that make types and programs known

# Instances per second: (vanilla DyNet, DyNet with predefined cells, ED-Batch) by (batch, hidden).
Figures = dict[tuple[int, int], tuple[float | None, float | None, float | None]]
PEERS = ("DyNet", "DyNet cells", "ED-Batch")
ONE_THREAD: Figures = {
    (1, 64): (None, None, 12500),
    (1, 256): (None, None, 2427),
    (1, 512): (None, None, 378),
    (8, 64): (None, None, 16064),
    (8, 256): (None, None, 3346),
    (8, 512): (None, None, 698),
    (64, 128): (7109, 8549, 8303),
    (64, 256): (3858, 3788, 4128),
    (64, 512): (1343, 1060, 1250),
    (256, 128): (5868, 9484, 8417),
    (256, 256): (3693, 4283, 4360),
    (256, 512): (1368, 1399, 1449),
}
TWO_THREADS: Figures = {
    (64, 256): (None, 4656, 4914),
    (64, 512): (None, 1240, 1507),
    (256, 256): (None, 5343, 5681),
    (256, 512): (None, 1947, 2049),
}
TRAINING: Figures = {  # one thread; ED-Batch has no backward pass
    (64, 128): (3581, None, None),
    (64, 256): (1508, None, None),
    (64, 512): (486, None, None),
    (256, 128): (2955, None, None),
    (256, 256): (1491, None, None),
    (256, 512): (530, None, None),
}
XLA_PRODUCT_THERE = {1: 266e9, 2: 470e9}
PEERS_PRODUCT_THERE = {1: 248e9, 2: 378e9}
FLOP_PER_INSTANCE = 405  # × h², on the peers' sentences


@jedbatch.cell
def leaf(params: Any, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state (h, c) of a word."""
    i, o, u = jnp.split(params["embedding"][word] @ params["leaf_w"] + params["leaf_b"], 3)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jedbatch.cell
def node(params: Any, left: Any, right: Any) -> tuple[jax.Array, jax.Array]:
    """The state (h, c) of a phrase."""
    (h1, c1), (h2, c2) = left, right
    i, o, u = jnp.split(jnp.concatenate([h1, h2]) @ params["node_w"] + params["node_b"], 3)
    f1 = jax.nn.sigmoid(h1 @ params["f1_w"] + params["f_b"])
    f2 = jax.nn.sigmoid(h2 @ params["f2_w"] + params["f_b"])
    c = jax.nn.sigmoid(i) * jnp.tanh(u) + f1 * c1 + f2 * c2
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jedbatch.cell
def score(params: Any, h: jax.Array, label: jax.Array) -> jax.Array:
    """The cross-entropy of a label."""
    return -jax.nn.log_softmax(h @ params["output_w"])[label]


def sentence(params: Any, root: Any) -> jax.Array:
    """The loss of all nodes of a tree."""
    losses = []

    def visit(root: Any) -> Any:
        below = [visit(child) for child in root[1:]] if len(root) == 3 else None
        state = node(params, *below) if below else leaf(params, root[1])
        losses.append(score(params, state[0], root[0]))
        return state

    visit(root)
    return total(losses)


def parameters(num_words: int, h: int) -> dict[str, jax.Array]:
    """Parameters for embeddings and states of size h."""
    shapes = {
        "embedding": (num_words, h),
        "leaf_w": (h, 3 * h),
        "node_w": (2 * h, 3 * h),
        "f1_w": (h, h),
        "f2_w": (h, h),
        "output_w": (h, common.NUM_LABELS),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0] if name != "embedding" else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"leaf_b": jnp.zeros(3 * h), "node_b": jnp.zeros(3 * h), "f_b": jnp.zeros(h)}


def flop(trees: list[Any], h: int) -> int:
    """Operations of the products of a minibatch, forwards."""
    nodes = sum(map(num_nodes, trees))
    leaves = (nodes + len(trees)) // 2  # of binary trees
    return 6 * h * h * leaves + 16 * h * h * (nodes - leaves) + 10 * h * nodes


def load(path: str | None, count: int) -> common.Treebank:
    """Sentiment trees, with the labels 0 to 4 in their brackets."""
    if path is None:
        return common.Treebank(synthetic_treebank(count, mean_length=19.1), 500)
    words, labels = Vocabulary(), Vocabulary("01234")
    trees = index_trees(read_trees(path, limit=count), words, labels)
    if len(labels) != common.NUM_LABELS or len(trees) < count:
        raise SystemExit(
            f"{path} holds {len(trees)} trees with {len(labels)} labels; expected at least "
            f"{count} binary trees with the labels 0 to 4, such as (3 (2 It) (4 works))"
        )
    return common.Treebank(trees, len(words))


def product(rows: int, inner: int, columns: int) -> tuple[Callable[[], Any], int]:
    """(a matrix product to time, its operations)."""
    a, b = jnp.ones((rows, inner)), jnp.ones((inner, columns))
    dot = jax.jit(jnp.dot)
    return lambda: dot(a, b), 2 * rows * inner * columns


class Result(NamedTuple):
    """Instances per second, and operations per second of the run and of the matrix product."""

    planned: float
    known: float
    unseen: float
    flops: float
    product: float


def measure(bank: common.Treebank, hidden: int, size: int, training: bool, budget: float) -> Result:
    """Times one row."""
    params = parameters(bank.num_words, hidden)
    batched = jedbatch.batch(sentence)
    functions = common.compiled(lambda params, plan: batched.apply(params, plan).sum())
    run = functions.train if training else functions.infer

    def planned(trees: list[Any]) -> Any:
        return run(params, batched.plan(params, trees, gradient=training))

    minibatches = common.chunks(bank.trees, size)
    for trees in minibatches[:KNOWN]:
        jax.block_until_ready(planned(trees))
    unseen = [common.seconds(lambda trees=trees: planned(trees)) for trees in minibatches[KNOWN:]]
    trees = common.typical(minibatches)
    plan = batched.plan(params, trees, gradient=training)
    multiply, multiply_flop = product(256, 512, 2048)
    runs = [lambda: run(params, plan), lambda: planned(trees), multiply]
    times = common.interleaved(runs, budget)
    # Small minibatches differ in size: unseen ones count by their nodes.
    share = [sum(map(num_nodes, t)) for t in minibatches[KNOWN:]]
    mean = sum(map(num_nodes, bank.trees)) / len(bank.trees)
    nodes = sum(map(num_nodes, trees))
    return Result(
        planned=nodes / mean / times.median(0),
        known=nodes / mean / times.median(1),
        unseen=float(np.median(np.array(share) / unseen)) / mean,
        flops=(3 if training else 1) * flop(trees, hidden) / times.median(0),
        product=multiply_flop / times.median(2),
    )


def limit_threads(threads: int) -> None:
    """Keeps to some cores. Before JAX first computes something, or its threads are there."""
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("`--threads` needs an operating system that can pin a process to cores")
    if threads == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        raise SystemExit(f"--threads {threads}: this process may use {len(cores)} cores")
    os.sched_setaffinity(0, cores[-threads:])


def carried_over(
    result: Result, figures: Figures, size: int, hidden: int, threads: int, training: bool
) -> list[str]:
    """What is printed of the peers: figures, figures carried over, fraction of their product."""
    scale = result.product / XLA_PRODUCT_THERE[threads]
    work = (3 if training else 1) * FLOP_PER_INSTANCE * hidden**2
    printed = []
    for figure in figures.get((size, hidden), (None, None, None)):
        if figure is None:
            printed.append("–")
            continue
        fraction = figure * work / PEERS_PRODUCT_THERE[threads]
        printed.append(f"{figure} → {figure * scale:.0f} ({fraction:.0%})")
    return printed


def report(bank: common.Treebank, args: argparse.Namespace, training: bool) -> None:
    """Prints the table of inference or of training."""
    figures = ONE_THREAD if args.threads == 1 else TWO_THREADS
    if training:
        figures = TRAINING if args.threads == 1 else {}
    print(f"\n{'Training' if training else 'Inference'}, instances per second")
    table = common.Table(
        "batch",
        "hidden",
        "planned",
        "known",
        "unseen",
        "GFLOP/s planned",
        "product GFLOP/s",
        "of product",
        *(f"{name}: there → here (of product)" for name in PEERS[: 1 if training else 3]),
    )
    for size, hidden in common.by(args.batch, args.hidden):
        few = bank._replace(trees=bank.trees[: size * (KNOWN + args.minibatches)])
        result = measure(few, hidden, size, training, args.seconds)
        peers = carried_over(result, figures, size, hidden, args.threads, training)
        table.row(
            size,
            hidden,
            *(f"{x:.0f}" for x in result[:3]),
            *(f"{x / 1e9:.0f}" for x in result[3:]),
            f"{result.flops / result.product:.0%}",
            *peers[: 1 if training else 3],
        )
        jax.clear_caches()


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[64, 128, 256, 512])
    parser.add_argument("--batch", type=common.numbers, default=[1, 8, 64, 256])
    parser.add_argument("--threads", type=int, choices=[1, 2], default=1, help="default 1")
    parser.add_argument("--minibatches", type=int, default=20, help="unseen ones (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4, help="per measurement (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.minibatches, args.seconds = [64], [8], 3, 0.2
    limit_threads(args.threads)
    print(common.machine())
    bank = load(args.data, max(args.batch) * (KNOWN + args.minibatches))
    print(f"{common.source(args.data)}, {bank.num_words} words, {args.threads} thread(s)")
    for shape in ((256, 512, 2048), (2048, 512, 1280)):
        multiply, work = product(*shape)
        rate = work / common.interleaved([multiply], 0.2 if args.quick else 2).median()
        print(f"matrix product {'×'.join(map(str, shape))}: {rate / 1e9:.0f} GFLOP/s")
    for training in (False, True):
        report(bank, args, training)


if __name__ == "__main__":
    main()
