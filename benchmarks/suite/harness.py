"""Cases of the suite, and how one is measured: all rivals in turns, on the same instances.

A case is a workload, a size of minibatches, a hidden size, and inference (the loss of a minibatch)
or training (its value and gradient). What is compared:

planned         jedbatch with a plan made before: the work of the device.
known           jedbatch with planning, of instances seen before.
by hand         the usual hand-written JAX (`by_hand.py`), its arrays prepared before.
by hand, whole  the same with their preparation, as `known` has planning.
loop            the same function instance by instance, its cells compiled by `jax.jit`.
torch by hand   the usual hand-written PyTorch (`in_torch.py`), prepared before.
torch eager     PyTorch instance by instance.
agenda, depth   jedbatch's executor on the schedules of these policies, planned before, as DyNet
                and TensorFlow Fold schedule. Inference only.

Losses of all are compared before anything is timed. Then they run in turns, in the time between
two rounds of `planned`, which pytest-benchmark times; so whatever else the machine does hits all
alike. After each there is a rest, since PyTorch's threads go on spinning for a while. Matrix
products of 256×512×2048 run in turns with them. Loops run on a few instances and are scaled up by
the operations of the whole minibatch.
"""

import functools
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jedbatch
from benchmarks import common, edbatch
from benchmarks.rivals import by_hand

try:
    from benchmarks.rivals import in_torch
except ImportError:
    in_torch = None

RIVALS = (
    "known",
    "by hand",
    "by hand, whole",
    "loop",
    "torch by hand",
    "torch eager",
    "agenda",
    "depth",
)
SLOW = ("loop", "torch eager")  # run on a few instances, a few times
REST_SECONDS = 0.002  # between two that are timed
SLOW_INSTANCES = 8  # that slow ones run on
MAX_ROUNDS = 200
NUM_INSTANCES = 1024  # there are 1054 different lattices
MODES = ("inference", "training")


class Case(NamedTuple):
    """One measurement: a workload, the sizes, and the mode."""

    workload: str
    batch: int
    hidden: int
    mode: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


class Grid(NamedTuple):
    """Cases by default and with `--full`: (workloads, batch sizes, hidden sizes, modes)."""

    quick: Sequence[tuple[Any, Any, Any, Any]]
    full: Sequence[tuple[Any, Any, Any, Any]]


def cases(options: Any, grid: Grid) -> list[Case]:
    """The cases that the command line asks for."""
    chosen = {}
    for names, sizes, hidden, modes in grid.full if options.full else grid.quick:
        names = options.workloads.split(",") if options.workloads else names
        modes = options.modes.split(",") if options.modes else modes
        product = itertools.product(names, options.batch or sizes, options.hidden or hidden, modes)
        chosen |= dict.fromkeys(Case(*values) for values in product)
    unknown = {c.workload for c in chosen} - set(edbatch.WORKLOADS)
    unknown |= {c.mode for c in chosen} - set(MODES)
    if unknown:
        raise ValueError(
            f"unknown {', '.join(sorted(unknown))}; workloads are "
            f"{', '.join(edbatch.WORKLOADS)}, modes are {', '.join(MODES)}"
        )
    return list(chosen)


def forget() -> None:
    """Lets go of compiled programs and of what only cycles hold."""
    jax.clear_caches()
    gc.collect()


@functools.lru_cache(1)
def bank(name: str, directory: Path | None, count: int) -> Any:
    """The instances of a workload; loaded once for cases that follow each other."""
    return edbatch.WORKLOADS[name].load(directory, count)


# --- one case ---


@dataclass(eq=False)
class Bench:
    """A workload, its parameters and its minibatches.

    Attributes:
      minibatches: consecutive instances; the first is what all are compared on.
    """

    case: Case
    workload: edbatch.Workload
    params: Any
    minibatches: list[list[Any]]
    batched: jedbatch.Batched = field(init=False)

    def __post_init__(self) -> None:
        self.batched = jedbatch.batch(self.workload.loss)

        def loss(params: Any, plan: jedbatch.Plan) -> jax.Array:
            return self.batched.apply(params, plan).sum()

        self._run = self.jitted(loss) if self.training else loss  # inference is compiled by us

    @classmethod
    def of(cls, case: Case, options: Any, minibatches: int = 6) -> "Bench":
        """The case on the data that the command line names."""
        workload = edbatch.WORKLOADS[case.workload]
        found = bank(case.workload, options.data, NUM_INSTANCES)
        size = case.batch
        chunks = common.chunks(found.instances, size)[:minibatches]
        if not chunks:
            raise ValueError(
                f"{workload.title} has {len(found.instances)} instances; a minibatch needs {size}"
            )
        order = sorted(range(len(chunks)), key=lambda i: workload.flop(chunks[i], case.hidden))
        middle = order[len(order) // 2]  # typical: neither the lightest nor the heaviest
        chunks.insert(0, chunks.pop(middle))
        return cls(case, workload, workload.parameters(found.sizes, case.hidden), chunks)

    @property
    def training(self) -> bool:
        """Whether gradients are wanted."""
        return self.case.mode == "training"

    @property
    def minibatch(self) -> list[Any]:
        """The one that all are compared on."""
        return self.minibatches[0]

    def jitted(self, loss: Callable) -> Callable:
        """A loss, or its value and gradient in training, compiled by `jax.jit`."""
        return jax.jit(jax.value_and_grad(loss) if self.training else loss)

    def plan(self, instances: Sequence[Any]) -> jedbatch.Plan:
        """The plan of a minibatch."""
        return self.batched.plan(self.params, instances, gradient=self.training)

    def run(self, plan: jedbatch.Plan) -> Any:
        """The loss of a planned minibatch, or its value and gradient."""
        return self._run(self.params, plan)

    def flop(self, instances: Sequence[Any]) -> int:
        """Operations of the products of a minibatch; a gradient counts as two losses more."""
        return (3 if self.training else 1) * self.workload.flop(instances, self.case.hidden)

    def functions(self, names: Sequence[str]) -> dict[str, Callable[[], Any]]:
        """Returns the functions to time, by name; those in `SLOW` run on a few instances."""
        params, name, instances = self.params, self.case.workload, self.minibatch
        few = instances[:SLOW_INSTANCES]
        plan = self.plan(instances)
        made: dict[str, Callable[[], Any]] = {"planned": lambda: self.run(plan)}
        if "known" in names:
            made["known"] = lambda: self.run(self.plan(instances))
        if {"by hand", "by hand, whole"} & set(names):
            written = self.jitted(by_hand.loss(name))
            arrays = jax.device_put(by_hand.prepare(name, instances))
            made["by hand"] = lambda: written(params, arrays)
            made["by hand, whole"] = lambda: written(params, by_hand.prepare(name, instances))
        if "loop" in names:
            one = self.workload.loss
            slope = jax.value_and_grad(one) if self.training else one
            made["loop"] = lambda: [slope(params, instance) for instance in few]
        if in_torch is not None:
            weights = in_torch.parameters(params)
            if "torch by hand" in names and in_torch.has_form_by_hand(name):
                arrays_there = in_torch.prepare(name, instances)
                batched = in_torch.by_hand(name)
                made["torch by hand"] = lambda: self.in_torch(batched, weights, arrays_there)
            if "torch eager" in names:
                eager = in_torch.eager(name)
                made["torch eager"] = lambda: self.in_torch(eager, weights, few)
        for policy in ("agenda", "depth"):
            if policy in names and not self.training:
                made[policy] = self._scheduled_by(policy)
        return {n: made[n] for n in ("planned", *names) if n in made}

    def in_torch(self, loss: Callable, weights: Any, data: Any) -> float:
        """A loss in PyTorch, with its gradient in training."""
        if self.training:
            for weight in weights.values():
                weight.grad = None
            found = loss(weights, data)
            found.backward()
        else:
            with in_torch.torch.inference_mode():
                found = loss(weights, data)
        return found.item()

    def _scheduled_by(self, policy: str) -> Callable[[], Any]:
        batched = jedbatch.batch(self.workload.loss, policy=getattr(jedbatch.policies, policy))
        plan = batched.plan(self.params, self.minibatch, gradient=False)
        return lambda: batched.apply(self.params, plan).sum()

    def check(self, functions: dict[str, Callable[[], Any]]) -> None:
        """Raises an error unless all compute the same loss."""
        losses = {}
        for name, run in functions.items():
            found = run()
            found = found if isinstance(found, list) else [found]
            losses[name] = sum(float(x[0] if isinstance(x, tuple) else x) for x in found)
        few = self.plan(self.minibatch[:SLOW_INSTANCES])
        expected = {False: losses["planned"], True: None}
        if any(name in SLOW for name in losses):
            found = self.run(few)
            expected[True] = float(found[0] if isinstance(found, tuple) else found)
        for name, loss in losses.items():
            np.testing.assert_allclose(loss, expected[name in SLOW], rtol=2e-3, err_msg=name)


def product() -> tuple[Callable[[], Any], int]:
    """(matrix products of 256×512×2048, their operations).

    Eight in a row: the first finds in the caches what others left there, and is slower.
    """
    a, b = jax.numpy.ones((256, 512)), jax.numpy.ones((512, 2048))
    dot = jax.jit(jax.numpy.dot)
    return lambda: [dot(a, b) for _ in range(8)], 8 * 2 * 256 * 512 * 2048


def timed(run: Callable[[], Any]) -> float:
    """Seconds until a result is there; a rest follows."""
    seconds = common.seconds(run)
    time.sleep(REST_SECONDS)
    return seconds


def turns(
    benchmark: Any, functions: dict[str, Callable[[], Any]], budget: float
) -> dict[str, np.ndarray]:
    """Seconds of all functions, run in turns; pytest-benchmark times the first of them.

    Args:
      benchmark: the fixture.
      functions: by name, warmed up.
      budget: seconds to spend.
    """
    first, *others = functions
    once = {name: common.seconds(run) for name, run in functions.items()}
    whole = sum(seconds for name, seconds in once.items() if name not in SLOW)
    rounds = int(np.clip(budget / whole, 5, MAX_ROUNDS))
    slow_rounds = max(2, min(rounds, int(budget / (sum(once[n] for n in once if n in SLOW) or 1))))
    found: dict[str, list[float]] = {name: [] for name in others}
    made = itertools.count()

    def between() -> None:
        turn = next(made)
        for name in others[turn % max(1, len(others)) :] + others[: turn % max(1, len(others))]:
            if name not in SLOW or turn < slow_rounds:
                found[name].append(timed(functions[name]))

    def run() -> None:
        jax.block_until_ready(functions[first]())

    benchmark.pedantic(run, setup=between, rounds=rounds)
    return {first: np.array(benchmark.stats.stats.data)} | {
        name: np.array(times) for name, times in found.items()
    }


def stages(bench: Bench, minibatches: Sequence[Sequence[Any]]) -> dict[str, float] | None:
    """Median milliseconds of each stage, over minibatches; None without any.

    `whole` is from instances to results, the first time, with whatever XLA compiles meanwhile.
    """
    rows = []
    for instances in minibatches:
        start = time.perf_counter()
        plan = bench.plan(instances)
        planned = time.perf_counter() - start
        jax.block_until_ready(bench.run(plan))
        row = dict(plan.host.seconds) | {"whole": time.perf_counter() - start}
        row["other"] = planned - sum(plan.host.seconds.values())
        row["transfer"] = common.seconds(lambda plan=plan: jax.device_put(plan))
        there = jax.device_put(plan)
        row["execute"] = common.seconds(lambda there=there: bench.run(there))
        rows.append(row)
    if not rows:
        return None
    return {stage: 1e3 * float(np.median([row[stage] for row in rows])) for stage in rows[0]}
