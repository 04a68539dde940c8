"""Trains a TreeLSTM."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch._commands.user_commands import seconds_of
from jedbatch.data import (
    Vocabulary,
    index_trees,
    minibatches,
    num_nodes,
    read_trees,
    synthetic_treebank,
)
from jedbatch.models import tree
from jedbatch.models.parts import jitted

try:
    import optax
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`demo` needs {error.name}, which is not installed; write "
        "`pip install 'jedbatch[models]'`."
    ) from error


def demo(args: argparse.Namespace) -> None:
    """Trains the TreeLSTM of `jedbatch.models.tree` and prints what happens."""
    if args.trees < 2:
        raise ValueError(f"--trees is {args.trees}; expected at least 2, since some are held back")
    words, labels = Vocabulary(unknown="<unknown>"), Vocabulary()
    if args.data:
        raw = read_trees(args.data, limit=args.trees)
    else:
        raw = synthetic_treebank(args.trees, seed=args.seed)
    held_back = max(1, min(len(raw) // 5, 4 * args.batch_size))
    if len(raw) < 2:
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
        chunks = list(minibatches(train, batch_size, seed=order))
        with tqdm(chunks, desc=f"epoch {epoch}", unit="batch", leave=False, disable=None) as bar:
            for batch in bar:
                plan = score.plan(params, batch)  # while the device is at the last step
                nodes = sum(map(num_nodes, batch))
                params, state, value, right = step(params, state, plan, float(nodes))
                losses.append(value)
                counts.append(right / nodes)
                if len(losses) % 8 == 0:
                    bar.set_postfix(loss=f"{float(value):.3f}")
        tested, total = np.zeros(2), 0
        for batch in minibatches(test, batch_size, drop_last=False):
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
    one = tree.scorer(jitted(cells))
    few = trees[: min(16, batch_size)]
    looped = rate(lambda: jnp.stack([one(params, t) for t in few]), len(few))
    minibatch = trees[:batch_size]
    planned_rate = rate(lambda: score(params, minibatch), batch_size)
    plan = score.plan(params, minibatch, gradient=False)
    device = rate(lambda: score.apply(params, plan), batch_size)
    print("inference, trees per second")
    print(f"  one by one, jit-compiled cells   {looped:9.0f}")
    print(
        f"  batched, planning included       {planned_rate:9.0f}   {planned_rate / looped:5.1f} x"
    )
    print(f"  batched, planned beforehand      {device:9.0f}   {device / looped:5.1f} x")


def rate(run: Callable[[], Any], count: int, times: int = 5, warm: int = 2) -> float:
    """Instances per second: the median of some runs after others to warm up."""
    seconds = [seconds_of(run) for _ in range(warm + times)]
    return count / float(np.median(seconds[warm:]))
