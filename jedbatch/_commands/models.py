"""The models of `jedbatch.models`: their plans, policies and rates."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jedbatch
from jedbatch import policies
from jedbatch._commands.lookup import CommandError, attribute_of
from jedbatch._commands.pictures import save_pictures
from jedbatch._commands.printing import digits, print_learned
from jedbatch._commands.timing import rate
from jedbatch.data import minibatches
from jedbatch.models import WORKLOADS, Workload
from jedbatch.models.parts import jitted
from jedbatch.policies import FSM


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
            raise CommandError(
                f"there is no model {name!r}; expected one of {', '.join(WORKLOADS)}, or a "
                "function of yours as module:function"
            )
        return WORKLOADS[name]
    _, found = attribute_of(name)
    if not isinstance(found, Workload):
        raise CommandError(
            f"{name} is of type {type(found).__name__}; expected a `jedbatch.models.Workload`, "
            "or a function of one instance"
        )
    return found


def show(args: argparse.Namespace) -> None:
    """Prints the plan of a minibatch, and draws it."""
    model = Model.of(args, args.batch_size)
    batched = model.batched(model.workload.policy())
    if args.gradient:
        plan = batched.plan(model.params, model.instances)
    else:
        plan = batched.profile(model.params, model.instances)
    assert plan.layout is not None
    print(plan)
    if args.explain:
        print(f"\n{plan.layout.explain()}")
    if args.pictures:
        save_pictures(plan, batched.policy, Path(args.pictures))


def learn(args: argparse.Namespace) -> None:
    """Learns a policy and prints what was tried."""
    model = Model.of(args, args.batch_size)
    print_learned(model.batched(None).learn(model.params, model.instances), args)


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
    for kind in ("inference", "training") if args.gradient else ("inference",):
        batched = model.batched(policy)  # to which all minibatches are new
        rates = speeds(model, batched, chunks, training=kind == "training")
        print(f"{kind:24}{''.join(f'{digits(r):>12}' for r in rates)}")
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
    run = jax.jit(run, compiler_options=jedbatch.compiler_options())

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
