"""Command line: `python -m jedbatch demo` trains a TreeLSTM on trees of every shape."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jedbatch
from jedbatch.data import Vocabulary, index_trees, num_nodes, read_trees, synthetic_treebank
from jedbatch.models import tree


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jedbatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser(
        "demo", help="train a TreeLSTM written for one tree on minibatches of trees"
    )
    add = demo_parser.add_argument
    add("--data", metavar="FILE", help="a treebank, one bracketed tree a line (may be .gz)")
    add("--device", help="cpu, gpu or tpu; JAX's choice by default")
    add("--hidden", type=int, default=64, help="size of the states (default %(default)s)")
    add("--batch-size", type=int, default=64, help="trees per minibatch (default %(default)s)")
    add("--epochs", type=int, default=4, help="passes over the trees (default %(default)s)")
    add("--trees", type=int, default=1600, help="trees to use (default %(default)s)")
    add("--seed", type=int, default=0, help="of parameters and order (default %(default)s)")
    args = parser.parse_args(argv)
    for name in ("hidden", "batch_size", "epochs", "trees"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(args, name)}; expected a positive number")
    try:
        demo(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def demo(args: argparse.Namespace) -> None:
    """Trains the TreeLSTM of `jedbatch.models.tree` and prints what happens."""
    if args.device:
        jax.config.update("jax_platforms", args.device)
    words, labels = Vocabulary(unknown="<unknown>"), Vocabulary()
    if args.data:
        raw = read_trees(args.data, limit=args.trees)
    else:
        raw = synthetic_treebank(args.trees, seed=args.seed)
    held_back = max(1, min(len(raw) // 5, 4 * args.batch_size))
    if len(raw) < held_back + 1:
        raise ValueError(f"{args.data} holds {len(raw)} trees; expected at least 2")
    train = index_trees(raw[:-held_back], words, labels)
    words.freeze()
    test = index_trees(raw[-held_back:], words, labels)
    batch_size = min(args.batch_size, len(train), len(test))

    cells = tree.flax_cells(len(words), len(labels), args.hidden)
    params = cells.init(jax.random.key(args.seed))
    score = jedbatch.batch(tree.scorer(cells))
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, plan: jedbatch.Plan, num_nodes: Any) -> Any:
        def loss(params):
            total = score.apply(params, plan).sum(axis=0)
            return total[0] / num_nodes, total[1]

        (value, right), slope = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(slope, state, params)
        return optax.apply_updates(params, updates), state, value, right

    source = args.data or "synthetic sentiment treebank"
    print(
        f"{len(train)} trees for training, {len(test)} held back, from {source}; "
        f"{len(words)} words, {len(labels)} labels; hidden {args.hidden}, on {jax.devices()[0]}\n"
    )
    print(score.plan(params, train[:batch_size]))
    print()
    order = np.random.default_rng(args.seed)
    start = time.perf_counter()
    compiled = 0
    for epoch in range(1, args.epochs + 1):
        if epoch == 2:
            compiled = score.compilations
        losses, counts = [], []
        chunks = list(minibatches(order.permutation(len(train)), batch_size))
        with tqdm(chunks, desc=f"epoch {epoch}", unit="batch", leave=False) as bar:
            for chunk in bar:
                batch = [train[i] for i in chunk]
                plan = score.plan(params, batch)  # while the device is at the last step
                nodes = sum(map(num_nodes, batch))
                params, state, value, right = step(params, state, plan, float(nodes))
                losses.append(value)
                counts.append(right / nodes)
                if len(losses) % 8 == 0:
                    bar.set_postfix(loss=f"{float(value):.3f}")
        tested, total = np.zeros(2), 0
        for chunk in minibatches(np.arange(len(test)), batch_size):
            batch = [test[i] for i in chunk]
            tested += np.asarray(score(params, batch)).sum(axis=0)
            total += sum(map(num_nodes, batch))
        print(
            f"epoch {epoch}   training loss {np.mean(jax.device_get(losses)):.3f}  "
            f"accuracy {np.mean(jax.device_get(counts)):.1%}   "
            f"held back loss {tested[0] / total:.3f}  accuracy {tested[1] / total:.1%}"
        )
    seconds = time.perf_counter() - start
    later = score.compilations - compiled if args.epochs > 1 else 0
    print(
        f"\ntrained in {seconds:.1f} s; {score.compilations} XLA programs compiled, {later} of "
        "them after the first epoch\n"
    )
    compare(score, cells, params, train, batch_size)


def compare(score: Any, cells: tree.Cells, params: Any, trees: list, batch_size: int) -> None:
    """Prints instances per second of the per-instance loop and of the batched function."""
    jitted = cells._replace(
        leaf=jax.jit(cells.leaf), node=jax.jit(cells.node), score=jax.jit(cells.score)
    )
    one = tree.scorer(jitted)
    few = trees[: min(16, batch_size)]
    looped = rate(lambda: jnp.stack([one(params, t) for t in few]), len(few))
    minibatch = trees[:batch_size]
    known = rate(lambda: score(params, minibatch), batch_size)
    plan = score.plan(params, minibatch, gradient=False)
    device = rate(lambda: score.apply(params, plan), batch_size)
    print("inference, trees per second")
    print(f"  one by one, jit-compiled cells   {looped:9.0f}")
    print(f"  batched, planning included       {known:9.0f}   {known / looped:5.1f} x")
    print(f"  batched, planned beforehand      {device:9.0f}   {device / looped:5.1f} x")


def rate(run: Any, count: int) -> float:
    """Instances per second: the median of five runs after two to warm up."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return count / float(np.median(times[2:]))


def minibatches(order: np.ndarray, size: int) -> Iterator[list[int]]:
    """The order in minibatches of equal size; what is left over is left out."""
    for first in range(0, len(order) - size + 1, size):
        yield order[first : first + size].tolist()


if __name__ == "__main__":
    sys.exit(main())
