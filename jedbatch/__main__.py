"""Command line: `python -m jedbatch demo` trains a TreeLSTM on trees of every shape.

`show`, `learn` and `bench` take the name of a model, and a file of instances if there is one.
`fuzz` compares random programs with the loop over single instances.
"""

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch import policies, viz
from jedbatch.data import (
    Vocabulary,
    index_trees,
    minibatches,
    num_nodes,
    read_trees,
    synthetic_treebank,
)
from jedbatch.policies import FSM

try:
    import optax
    from tqdm import tqdm

    from jedbatch.models import WORKLOADS, Workload, tree
    from jedbatch.models.parts import jitted
except ModuleNotFoundError as error:
    sys.exit(
        f"error: the command line needs {error.name}, which is not installed; write "
        "`pip install 'jedbatch[models]'`."
    )

MAX_SIZE = 10**9  # of sizes on the command line


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = command_line()
    args = parser.parse_args(argv)
    for name in args.sizes:
        if not 1 <= getattr(args, name) <= MAX_SIZE:
            option = name.replace("_", "-")
            parser.error(
                f"--{option} is {getattr(args, name)}; expected a positive number, at most "
                f"{MAX_SIZE:,}"
            )
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed is {args.seed}; expected a number from 0 to 2**32 - 1")
    if args.device:
        jax.config.update("jax_platforms", args.device)
    try:
        return args.run(args) or 0
    except (OSError, ValueError, RuntimeError, MemoryError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m jedbatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = functools.partial(add_command, commands)
    hidden = {"hidden": (64, "size of the states")}
    sizes = hidden | {"batch_size": (64, "instances per minibatch")}
    command(
        demo,
        "train a TreeLSTM written for one tree on minibatches of trees",
        sizes | {"epochs": (4, "passes over the trees"), "trees": (1600, "trees to use")},
    )
    showing = command(show, "print the plan of a minibatch and the reasons for its layout", sizes)
    showing.add_argument("--pictures", metavar="DIRECTORY", help="where to draw it as SVG files")
    learning = command(
        learn,
        "learn a policy and print what was tried",
        hidden | {"instances": (32, "instances to learn from")},
    )
    learning.add_argument("--save", metavar="FILE", help="where to write the policy, as JSON")
    benching = command(
        bench,
        "measure instances per second, against the loop over single instances",
        sizes | {"minibatches": (8, "minibatches never seen before, to plan")},
    )
    policy = "a saved policy; the model's own by default"
    benching.add_argument("--policy", metavar="FILE", help=policy)
    fuzzing = command(
        fuzz,
        "compare random programs with the loop over instances; needs `pip install hypothesis`",
        {
            "programs": (100, "how many"),
            "shrink": (60, "seconds in which each new failure is made small"),
            "jobs": (1, "processes that run them"),
        },
    )
    fuzzing.add_argument(
        "--first", type=int, default=0, help="the number of the first program (default %(default)s)"
    )
    fuzzing.add_argument("--plans", action="store_true", help="only plan, and check the plans")
    return parser


def add_command(
    commands: Any, run: Callable[..., Any], help: str, sizes: dict[str, tuple[int, str]]
) -> argparse.ArgumentParser:
    """Adds a command with the options that all have, and sizes: (default, meaning) by name."""
    parser = commands.add_parser(run.__name__, help=help)
    parser.set_defaults(run=run, sizes=tuple(sizes))
    if run is demo:
        parser.add_argument("--data", metavar="FILE", help="a treebank, one tree a line")
    elif run is not fuzz:
        parser.add_argument(
            "model",
            help=f"one of {', '.join(WORKLOADS)}; or your own `jedbatch.models.Workload`, "
            "as module:attribute",
        )
        parser.add_argument(
            "--data",
            nargs="+",
            default=[],
            metavar="FILE",
            help="instances, one a line (may be .gz); tags of lattices in a file of their own",
        )
    parser.add_argument("--device", help="cpu, gpu or tpu; JAX's choice by default")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    for name, (default, explanation) in sizes.items():
        help = f"{explanation} (default {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=help)
    return parser


# --- models by name ---


class Model(NamedTuple):
    """A model with its instances, ready to batch."""

    workload: Workload
    instances: list[Any]
    cells: Any
    params: Any

    @classmethod
    def of(cls, args: argparse.Namespace, count: int) -> "Model":
        """The model that the command line names, on the data that it names."""
        workload = find(args.model)
        instances, sizes = workload.load(*args.data, limit=count, seed=args.seed)
        sizes |= {"hidden": args.hidden}
        cells = workload.cells(**sizes)
        print(
            f"{workload.title}: {len(instances)} instances from "
            f"{' and '.join(args.data) or 'synthetic data'}; "
            f"{', '.join(f'{name} {size}' for name, size in sizes.items())}; "
            f"on {jax.devices()[0]}\n"
        )
        return cls(workload, instances, cells, cells.init(jax.random.key(args.seed)))

    def batched(self, policy: Any) -> jedbatch.Batched:
        """The loss of many instances."""
        return jedbatch.batch(self.workload.scorer(self.cells), policy=policy)


def find(name: str) -> Workload:
    """A model of this package by its name, or one of the user's as `module:attribute`."""
    if ":" not in name:
        if name not in WORKLOADS:
            raise ValueError(
                f"there is no model {name!r}; expected one of {', '.join(WORKLOADS)}, or your own "
                "as module:attribute"
            )
        return WORKLOADS[name]
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")  # modules of the folder that the user is in
    try:
        workload = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be imported: {error}; expected module:attribute, with a module as in "
            "an import statement"
        ) from None
    finally:
        sys.path.remove("")
    if not isinstance(workload, Workload):
        raise ValueError(
            f"{name} is of type {type(workload).__name__}; expected a `jedbatch.models.Workload`"
        )
    return workload


def show(args: argparse.Namespace) -> None:
    """Prints the plan of a minibatch, and draws it."""
    model = Model.of(args, args.batch_size)
    batched = model.batched(model.workload.policy())
    plan = batched.profile(model.params, model.instances)
    assert plan.layout is not None
    print(f"{plan}\n\n{plan.layout.explain()}")
    if not args.pictures:
        return
    folder = Path(args.pictures)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "instance": viz.graph(plan, instance=0),
        "graph": viz.graph(plan),
        "batches": viz.batches(plan),
        "timeline": viz.timeline(plan),
        "memory": viz.memory(plan),
        "time": viz.time_split(plan),
    }
    if isinstance(batched.policy, FSM) and len(batched.policy):
        pictures["policy"] = viz.state_machine(batched.policy)
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.svg")
    print(f"\ndrawn: {', '.join(str(folder / f'{name}.svg') for name in pictures)}")


def learn(args: argparse.Namespace) -> None:
    """Learns a policy and prints what was tried."""
    model = Model.of(args, args.instances)
    policy = model.batched(None).learn(model.params, model.instances)
    print(policy.report)
    print(f"\n{policy}")
    if args.save:
        policy.save(args.save)
        print(f"\nsaved as {args.save}; use it with `jedbatch.batch(fn, policy=FSM.load(path))`")


def bench(args: argparse.Namespace) -> None:
    """Prints instances per second, in inference and in training, and numbers of batches."""
    size = args.batch_size
    model = Model.of(args, size * (2 + args.minibatches))
    policy = FSM.load(args.policy) if args.policy else model.workload.policy()
    chunks = list(minibatches(model.instances, size))
    if not chunks:
        raise ValueError(
            f"there are {len(model.instances)} instances; --batch-size {size} needs as many"
        )
    heads = ("one by one", "unseen", "known", "planned")
    print(f"{'instances per second':24}{''.join(f'{head:>12}' for head in heads)}")
    compiled = 0
    for kind in ("inference", "training"):
        batched = model.batched(policy)  # to which all minibatches are new
        rates = speeds(model, batched, chunks, training=kind == "training")
        print(f"{kind:24}{''.join(f'{r:12,.0f}' for r in rates)}")
        compiled += batched.compilations
    graph = batched.plan(model.params, chunks[0]).graph
    assert graph is not None
    names = {"chosen": batched.policy, "agenda": policies.agenda, "depth": policies.depth}
    counts = [f"{n} {len(jedbatch.schedule(graph, p))}" for n, p in names.items() if p is not None]
    print(
        f"\n{compiled} XLA programs compiled; batches of the first minibatch: "
        f"{', '.join(counts)}; certified lower bound {jedbatch.lower_bound(graph)}"
    )


def speeds(
    model: Model, batched: jedbatch.Batched, chunks: list[list[Any]], training: bool
) -> list[float]:
    """Instances per second: the loop over a few, then minibatches unseen, known and planned."""
    params, one = model.params, model.workload.scorer(jitted(model.cells))

    def loss(params: Any, plan: Any) -> jax.Array:
        return batched.apply(params, plan)[:, 0].sum()

    def loss_of_one(params: Any, instance: Any) -> jax.Array:
        return one(params, instance)[0]

    losses: list[Callable[..., Any]] = [loss, loss_of_one]
    run, run_one = map(jax.value_and_grad, losses) if training else losses
    run = jax.jit(run)

    def whole(instances: list[Any]) -> Any:
        return run(params, batched.plan(params, instances, gradient=training))

    size, first, few = len(chunks[0]), chunks[0], chunks[0][:8]
    for instances in chunks[:2]:
        jax.block_until_ready(whole(instances))
    unseen = [rate(functools.partial(whole, x), size, times=1, warm=0) for x in chunks[2:]]
    plan = batched.plan(params, first, gradient=training)
    return [
        rate(lambda: [run_one(params, x) for x in few], len(few), times=3),
        float(np.median(unseen)) if unseen else float("nan"),
        rate(lambda: whole(first), size),
        rate(lambda: run(params, plan), size),
    ]


def fuzz(args: argparse.Namespace) -> int:
    """Prints what random programs came to; the status is 1 if some failed."""
    from jedbatch.testing.fuzz import run

    report = run(
        args.programs,
        args.seed,
        shrink=args.shrink,
        plans=args.plans,
        first=args.first,
        jobs=args.jobs,
    )
    print(report)
    return int(bool(report.failures))


# --- the demo ---


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
        with tqdm(chunks, desc=f"epoch {epoch}", unit="batch", leave=False) as bar:
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
    seconds = []
    for _ in range(warm + times):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return count / float(np.median(seconds[warm:]))


if __name__ == "__main__":
    sys.exit(main())
