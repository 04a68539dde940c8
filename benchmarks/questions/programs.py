"""How fast are other people's programs, written without regard to jedbatch?

The programs of `benchmarks.programs`, as a new user would write them, against what an expert would
write by hand for the whole minibatch, compiled by `jax.jit` and padded to the same shapes for all
minibatches. What the expert's side takes to prepare its arrays is counted end to end alone.

types           node types of a minibatch, the most of all.
first value     seconds from a new batched function to the value of a minibatch, and by hand from a
                new `jax.jit`; in brackets of CPU, of all threads, which other work on the machine
                hardly changes. JAX is warm, nothing is compiled.
first gradient  the same for value and gradient.
late            programs that XLA compiled for 20 unseen minibatches after three: in direct calls,
                and in a `jax.jit` of value and gradient of `apply`.
plan            milliseconds to plan an unseen minibatch, with gradient where there is one.
value, gradient milliseconds on the device, with a plan made before; `× by hand` how many times as
                long the expert's side takes, with quartiles. Both run in turns.
end to end ×    values of unseen minibatches from instances to results: how many times as long the
                expert's side takes to prepare its arrays and run, as a call that plans and runs.

Before anything is timed, values and gradients by hand are compared with the loop over single
instances, and those of both sides with each other. `warned` are the warnings of jedbatch. Programs
whose framework is not installed are left out, which is said.
"""

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common, programs
from jedbatch.testing import compilations

WARM, UNSEEN = 3, 20  # minibatches
COMPARED = 4  # instances, with the loop, at tiny sizes


class First(NamedTuple):
    """A result, and the seconds it took on the wall and of CPU in all threads."""

    result: Any
    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} ({self.cpu:.2f})"


def first(run: Callable[..., Any], *args: Any) -> First:
    """How long something takes that has never run."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(run(*args))
    return First(result, time.perf_counter() - wall, time.process_time() - cpu)


def assert_close(got: Any, expected: Any, what: str) -> None:
    """Relative to the largest element, since sums are taken in another order."""

    def compare(a: Any, b: Any) -> None:
        scale = float(np.abs(b).max(initial=1e-3))
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * scale, err_msg=what)

    jax.tree.map(compare, got, expected)


def check_by_hand(program: programs.Program, rng: np.random.Generator) -> None:
    """Raises an error unless what is written by hand computes what the loop does, at tiny sizes."""
    params = program.parameters(jax.random.key(1), True)
    instances = program.instances(rng, COMPARED, True)
    (arrays,) = program.prepare([instances])
    loop = lambda p, xs: jnp.stack([program.model(p, x) for x in xs])  # noqa: E731
    assert_close(program.by_hand(params, arrays), loop(params, instances), "by hand")
    if program.differentiable:
        slope = common.with_gradient(loop)(params, instances)
        assert_close(
            common.with_gradient(program.by_hand)(params, arrays), slope, "gradient by hand"
        )


class Late(NamedTuple):
    """Counts and seconds of minibatches after a few others.

    Attributes:
      types: node types of a minibatch, the most of all.
      calls, steps: programs compiled in direct calls, and in a jit-compiled step.
      plan: milliseconds to plan one.
    """

    types: int
    calls: int
    steps: int
    plan: float


def late(
    batched: jedbatch.Batched, step: Callable, params: Any, minibatches: list[Any], gradient: bool
) -> Late:
    """Runs all minibatches, and counts what is compiled after the first few."""
    types, calls, steps, plans = [], 0, 0, []
    for i, instances in enumerate(minibatches):
        with compilations() as by_step:
            start = time.perf_counter()
            plan = batched.plan(params, instances, gradient=gradient)
            took = time.perf_counter() - start
            jax.block_until_ready(step(params, plan))
        with compilations() as by_call:
            jax.block_until_ready(batched(params, instances))
        types.append(len(plan.static.signature.kernels))
        if i >= WARM:
            calls, steps = calls + len(by_call), steps + len(by_step)
            plans.append(took)
    return Late(max(types), calls, steps, 1e3 * float(np.median(plans)))


def end_to_end(
    batched: jedbatch.Batched, by_hand: Callable, params: Any, minibatches: list[Any], arrays: Any
) -> tuple[float, float]:
    """Median seconds of a call of unseen instances, and of prepared arrays, in turns."""
    ours, theirs = [], []
    for instances, prepared in zip(minibatches, arrays, strict=True):
        ours.append(common.seconds(lambda: batched(params, instances)))  # noqa: B023
        theirs.append(common.seconds(lambda: by_hand(params, prepared)))  # noqa: B023
    return float(np.median(ours)), float(np.median(theirs))


def measure(name: str, program: programs.Program, options: Any) -> list[Any]:
    """Returns the row of a program."""
    rng, tiny, slopes = np.random.default_rng(options.seed), options.quick, program.differentiable
    check_by_hand(program, rng)
    size = options.batch or (4 if tiny else program.batch)
    params = program.parameters(jax.random.key(0), tiny)
    unseen = WARM + options.unseen
    every = [program.instances(rng, size, tiny) for _ in range(unseen + options.unseen)]
    start = time.perf_counter()
    all_arrays = program.prepare(every)
    preparing = (time.perf_counter() - start) / len(every)
    minibatches, arrays = every[:unseen], all_arrays[:unseen]
    modes = [lambda fn: fn, common.with_gradient] if slopes else [lambda fn: fn]
    new = [jedbatch.batch(program.model) for _ in modes]
    by_hand = [jax.jit(mode(program.by_hand)) for mode in modes]
    times, seconds = [], []
    jax.clear_caches()
    for mode, batched, theirs in zip(modes, new, by_hand, strict=True):
        sides = first(mode(batched), params, minibatches[0]), first(theirs, params, arrays[0])
        assert_close(*(side.result for side in sides), "jedbatch")
        seconds += sides

    batched = new[0]
    step = jax.jit(modes[-1](batched.apply))
    found = late(batched, step, params, minibatches, slopes)
    for mode, ours, theirs in zip(modes, (batched.apply, step), by_hand, strict=False):
        gradient = mode is common.with_gradient
        plan = jax.device_put(batched.plan(params, minibatches[-1], gradient=gradient))
        there = jax.device_put(arrays[-1])
        assert_close(ours(params, plan), theirs(params, there), "jedbatch")
        turns = [lambda: ours(params, plan), lambda: theirs(params, there)]  # noqa: B023
        times.append(common.interleaved(turns, options.seconds))
    call, run = end_to_end(batched, by_hand[0], params, every[unseen:], all_arrays[unseen:])
    missing = [] if slopes else ["–"]
    return [
        name,
        size,
        found.types,
        *seconds,
        *missing * 2,
        found.calls,
        found.steps,
        f"{found.plan:.1f}",
        *[f"{1e3 * t.median():.2f}" for t in times],
        *missing,
        *[t.ratio(1) for t in times],
        *missing,
        f"{(preparing + run) / call:.2f}",
    ]


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--only", action="append", choices=programs.MODULES, metavar="NAME")
    parser.add_argument("--batch", type=int, help="instances of a minibatch (differs by default)")
    parser.add_argument("--unseen", type=int, default=UNSEEN, help="minibatches (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.unseen, options.seconds = 2, 0.1
    print(common.machine())
    table = common.Table(
        "program",
        "batch",
        "types",
        "first value s",
        "by hand s",
        "first gradient s",
        "gradient by hand s",
        "late, calls",
        "late, jit",
        "plan ms",
        "value ms",
        "gradient ms",
        "value × by hand",
        "gradient × by hand",
        "end to end ×",
        "warned",
    )
    for name in options.only or programs.MODULES:
        try:
            program = programs.load(name)
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", jedbatch.errors.PerformanceWarning)
            row = measure(name, program, options)
        table.row(*row, ", ".join(sorted({w.category.__name__ for w in caught})) or "–")


if __name__ == "__main__":
    main()
