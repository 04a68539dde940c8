"""`show`, `learn` and `bench` for a function of the user's, or a model; `fuzz` and `info`."""

import argparse
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch import viz
from jedbatch._commands.lookup import CommandError, attribute_of
from jedbatch._commands.user_function import UserFunction
from jedbatch.errors import SymbolicValueError
from jedbatch.policies import FSM
from jedbatch.testing import compilations

WARM = 2  # minibatches before those that are measured as unseen
LEAST_ROUNDS = 3
LOOP_SECONDS = 1.0  # that a round of the loop may take, about, or else it has fewer instances
COLUMNS = ("loop", "unseen", "known", "planned")
LEGEND = """
loop: {loop}, on one instance after the other; unseen: a new minibatch,
planned and run; known: planned again and run; planned: run only; first: the first, with compiling.
Medians of {rounds} rounds, and of the ratios within each round; the loop ran on {few} of {size}."""


def function_of(args: argparse.Namespace, limit: int) -> UserFunction:
    """Returns the function or the model that the command line names; see `UserFunction.of`."""
    found = attribute_of(args.model)[1] if ":" in args.model else None
    if callable(found):
        return UserFunction.of(args, limit)
    from jedbatch._commands import models  # which need more than functions do

    return models.function_of(args, found, limit)


def show(args: argparse.Namespace) -> None:
    """Prints the plan of a minibatch, and draws it; compiles nothing."""
    user = function_of(args, args.batch_size)
    mapped = user.minibatch(0, args.batch_size)
    user.announce(len(mapped[0]))
    arguments = list(user.arguments(user.shared, mapped))
    try:
        plan = user.batched.plan(*arguments, gradient=args.gradient)
    except SymbolicValueError:
        if args.explain or args.pictures or args.gradient:
            raise CommandError(
                f"--explain, --pictures and --gradient need a plan, and {args.model} decides on "
                "values, so that there is none; `show` without them runs it"
            ) from None
        user.batched(*arguments)
        print(f"No plan, since the function decides on values; {user.batched.last_rounds}")
        return
    print(plan)
    if args.explain:
        assert plan.layout is not None
        print(f"\n{plan.layout.explain()}")
    if args.pictures:
        save_pictures(plan, user.batched.policy, Path(args.pictures))


def save_pictures(plan: jedbatch.Plan, policy: Any, folder: Path) -> None:
    """Saves pictures of a plan, and of the policy if it is a state machine; prints their names."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "instance": viz.graph(plan, instance=0),
        "graph": viz.graph(plan),
        "batches": viz.batches(plan),
        "timeline": viz.timeline(plan),
        "memory": viz.memory(plan),
        "time": viz.time_split(plan),
    }
    if isinstance(policy, FSM) and len(policy):
        pictures["policy"] = viz.state_machine(policy)
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.svg")
    print(f"\ndrawn: {', '.join(str(folder / f'{name}.svg') for name in pictures)}")


def learn(args: argparse.Namespace) -> None:
    """Learns a policy and prints what was tried."""
    user = function_of(args, args.batch_size)
    user.announce(len(user.mapped[0]))
    try:
        policy = user.batched.learn(*user.arguments(user.shared, user.mapped))
    except SymbolicValueError:
        raise CommandError(
            f"`learn` needs plans, and {args.model} decides on values, so that there are none"
        ) from None
    print_learned(policy, args)


def print_learned(policy: FSM, args: argparse.Namespace) -> None:
    """Prints what was tried and the policy that was chosen, all its states if asked; saves it."""
    print(policy.report)
    lines = str(policy).splitlines()
    print("", *(lines if args.verbose else [f"{lines[0]}; --verbose lists them"]), sep="\n")
    if args.save:
        policy.save(args.save)
        print(f"\nsaved as {args.save}; use it with `jedbatch.batch(fn, policy=FSM.load(path))`")


def bench(args: argparse.Namespace) -> None:
    """Prints times of minibatches, and of the loop over their instances."""
    user = function_of(args, args.batch_size * (WARM + args.minibatches))
    size = min(args.batch_size, len(user.mapped[0]))
    starts = range(0, len(user.mapped[0]) - size + 1, size)
    minibatches = [user.minibatch(i, size) for i in starts]
    user.announce(size)
    print(f"{'ms per minibatch':20}{''.join(f'{x:>12}' for x in (*COLUMNS, 'first'))}")
    measured = [measure(user, minibatches, gradient=False)]
    measured[0].print_as("value")
    if args.gradient and differentiable(user.shared):
        measured.append(measure(user, minibatches, gradient=True))
        measured[1].print_as("value and gradient")
    elif args.gradient:
        print("no gradient: what all instances share has no floating-point numbers")
    print(f"\n{measured[-1].summary}")
    compiled, late = (sum(x) for x in zip(*(m.compiled for m in measured), strict=True))
    print(f"  compiled  {compiled} XLA programs, and {late} after the first {WARM} minibatches")
    if len(minibatches) < 2:
        print(f"  unseen    not measured: there are {user.total} instances, {2 * size} are needed")
    rounds = len(measured[0].seconds["loop"])
    print(LEGEND.format(loop=user.loop, rounds=rounds, few=measured[0].few, size=size))


def seconds_of(run: Callable[[], Any]) -> float:
    """Returns how long a run takes, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


@dataclass(frozen=True)
class Times:
    """The times that a function took, in one way.

    Attributes:
      seconds: for each of `COLUMNS`, a minibatch in each round.
      first: seconds of the first minibatch, with compiling.
      compiled: programs that the first `WARM` minibatches needed, and those that later ones did.
      few: instances that the loop ran on.
      summary: what ran.
    """

    seconds: dict[str, list[float]]
    first: float
    compiled: tuple[int, int]
    few: int
    summary: str

    def print_as(self, kind: str) -> None:
        """Prints a line of times, and one of how often each is contained in the loop's."""
        loop = self.seconds["loop"]
        times = [*(self.seconds[column] for column in COLUMNS), [self.first]]
        cells = [digits(1e3 * float(np.median(x))) if x else "–" for x in times]
        print(f"{kind:20}{''.join(f'{x:>12}' for x in cells)}")
        ratios = [np.divide(loop[: len(x)], x) for x in times[1:-1]]
        cells = [digits(float(np.median(x)), " x") if len(x) else "–" for x in ratios]
        print(f"{'  as fast as the loop':32}{''.join(f'{x:>12}' for x in cells)}")


def digits(x: float, unit: str = "") -> str:
    """Returns a number with three significant digits, `30,700` or `0.0123`; a dash for none."""
    if not math.isfinite(x):
        return "–"
    rounded = float(f"{x:.3g}")
    places = 2 - math.floor(math.log10(abs(rounded))) if rounded else 2
    return f"{rounded:,.{max(0, places)}f}{unit}"


class Ways(NamedTuple):
    """Ways to run a function.

    Attributes:
      whole: runs mapped arguments that may be new.
      plan: makes a plan of them; None if the function decides on values.
      planned: runs a plan.
      one: runs an instance, without batching.
    """

    whole: Callable[[list[list[Any]]], Any]
    plan: Callable[[list[list[Any]]], jedbatch.Plan] | None
    planned: Callable[[Any], Any]
    one: Callable[[tuple[Any, ...]], Any]


def measure(user: UserFunction, minibatches: Sequence[list[list[Any]]], gradient: bool) -> Times:
    """Times a function on minibatches that it has never seen, the first of them again and again."""
    user.batched.clear()
    known, warm = minibatches[0], max(1, min(WARM, len(minibatches) - 1))
    unseen = minibatches[warm:]
    with compilations() as compiled:
        try:
            ways = ways_to_run(user, gradient, decides=False)
            first = seconds_of(lambda: ways.whole(known))
        except SymbolicValueError:
            ways = ways_to_run(user, gradient, decides=True)
            first = seconds_of(lambda: ways.whole(known))
        for mapped in minibatches[1:warm]:
            seconds_of(functools.partial(ways.whole, mapped))

    runs: dict[str, Callable[[], Any]] = {"known": lambda: ways.whole(known)}
    if ways.plan is None:
        rounds = str(user.batched.last_rounds).partition("\n")[0]
        summary = f"No plan, since the function decides on values; {rounds}"
    else:
        plan = ways.plan(known)
        runs["planned"] = lambda: ways.planned(plan)
        summary = str(plan).split("\n\n")[0]
    instances = list(zip(*known, strict=True))
    ways.one(instances[0])
    few = max(1, int(LOOP_SECONDS / seconds_of(lambda: ways.one(instances[0]))))
    few = min(few, len(instances))
    runs["loop"] = lambda: [ways.one(x) for x in instances[:few]]
    for run in runs.values():
        seconds_of(run)
    seconds: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with compilations() as late:
        for i in range(max(LEAST_ROUNDS, len(unseen))):
            if i < len(unseen):
                seconds["unseen"].append(seconds_of(functools.partial(ways.whole, unseen[i])))
            for column, run in runs.items():
                seconds[column].append(seconds_of(run))
    seconds["loop"] = [s * len(instances) / few for s in seconds["loop"]]
    return Times(seconds, first, (len(compiled), len(late)), few, summary)


def ways_to_run(user: UserFunction, gradient: bool, decides: bool) -> Ways:
    """Returns how to run a function, or its value and gradient; plans it unless it `decides`."""
    leaves, structure = jax.tree.flatten(user.shared)
    places = differentiable(user.shared)

    def shared(values: Sequence[Any]) -> list[Any]:
        filled = dict(zip(places, values, strict=True))
        return jax.tree.unflatten(structure, [filled.get(i, x) for i, x in enumerate(leaves)])

    def planned(values: Sequence[Any], plan: jedbatch.Plan) -> Any:
        return user.batched.apply(*shared(values), plan)

    def call(values: Sequence[Any], mapped: Sequence[Any]) -> Any:
        return user.batched(*user.arguments(shared(values), mapped))

    def one(values: Sequence[Any], instance: Sequence[Any]) -> Any:
        return user.alone(*user.arguments(shared(values), instance))

    def plan(mapped: Sequence[Any]) -> jedbatch.Plan:
        return user.batched.plan(*user.arguments(user.shared, mapped), gradient=gradient)

    if gradient:
        planned, call, one = (jax.value_and_grad(total(run)) for run in (planned, call, one))
    values = [leaves[i] for i in places]
    one = functools.partial(one, values)
    if decides:
        call = functools.partial(call, values)
        return Ways(call, None, call, one)
    run = functools.partial(jax.jit(planned, compiler_options=jedbatch.compiler_options()), values)
    return Ways(lambda mapped: run(plan(mapped)), plan, run, one)


def differentiable(shared: Any) -> list[int]:
    """Returns which leaves are arrays or numbers of floating point."""
    return [i for i, x in enumerate(jax.tree.leaves(shared)) if is_floating(x)]


def is_floating(x: Any) -> bool:
    """Returns whether it is an array or a number of floating point."""
    return isinstance(x, float) or jnp.issubdtype(getattr(x, "dtype", None) or bool, jnp.floating)


def total(run: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns a function with the sum of all floating-point numbers of its result."""

    def summed(*args: Any) -> jax.Array:
        found = [jnp.sum(x) for x in jax.tree.leaves(run(*args)) if is_floating(x)]
        if not found:
            raise CommandError(
                "the function returns no floating-point numbers to differentiate; write "
                "--no-gradient"
            )
        return functools.reduce(jnp.add, found)

    return summed


def fuzz(args: argparse.Namespace) -> int:
    """Prints what random programs came to; the status is 1 if some failed."""
    from jedbatch.testing.fuzz import run  # which needs hypothesis

    options = {name: getattr(args, name) for name in ("shrink", "plans", "first", "jobs")}
    report = run(args.programs, args.seed, **options)
    print(report)
    return int(bool(report.failures))


def info(_: argparse.Namespace) -> None:
    """Prints what is installed here."""
    print(jedbatch.info())
