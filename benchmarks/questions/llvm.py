"""How hard should LLVM optimize programs for a CPU?

XLA asks LLVM for its highest level, 3, and jedbatch for level 2 (see `jedbatch.compiler_options`).
Programs of jedbatch are many small kernels, each in several widths. Compiled at each level is a
step of value and gradient, or of values where there is no gradient: of the programs of
`benchmarks.programs`, and of the nine workloads of the suite.

compile     CPU seconds that XLA takes, of all threads; `jax.jit` of the step with the option
            `xla_backend_optimization_level`. Tracing is not in it.
run         CPU seconds, times as many as at level 3, medians of runs in turns; below 1 is faster.
by hand     the same for what an expert writes, where there is one.
"""

import time
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common, edbatch, programs
from benchmarks.suite import harness

LEVELS = (3, 2, 1)


def sides_of_program(name: str, tiny: bool) -> dict[str, tuple[Callable, tuple[Any, Any]]]:
    """The step and its arguments, of jedbatch and of what is written by hand."""
    program = programs.load(name)
    rng = np.random.default_rng(0)
    params = program.parameters(jax.random.key(0), tiny)
    instances = program.instances(rng, 4 if tiny else program.batch, tiny)
    batched = jedbatch.batch(program.model)
    mode = common.with_gradient if program.differentiable else lambda fn: fn
    (arrays,) = program.prepare([instances])
    plan = batched.plan(params, instances, gradient=program.differentiable)
    return {
        "jedbatch": (mode(batched.apply), (params, plan)),
        "by hand": (mode(program.by_hand), (params, arrays)),
    }


def sides_of_workload(name: str, tiny: bool) -> dict[str, tuple[Callable, tuple[Any, Any]]]:
    """A training step of a minibatch of a workload."""
    size, hidden = (4, 8) if tiny else (64, 64 if name == "mvrnn" else 256)
    case = harness.Case(name, size, hidden, "training")
    bench = harness.Bench.of(case, types.SimpleNamespace(data=None), minibatches=1)
    return {
        "jedbatch": (
            common.with_gradient(bench.batched.apply),
            (bench.params, bench.plan(bench.minibatches[0])),
        )
    }


def compared(step: Callable, arguments: tuple[Any, Any], budget: float) -> list[str]:
    """CPU seconds to compile at each level, then times as long as at the first."""
    lowered, compiled, seconds = jax.jit(step).lower(*arguments), [], []
    there = jax.device_put(arguments)
    for level in LEVELS:
        start = time.process_time()
        options = {"xla_backend_optimization_level": str(level)}
        compiled.append(lowered.compile(compiler_options=options))
        seconds.append(time.process_time() - start)
    turns = [lambda run=run: run(*there) for run in compiled]
    times = common.interleaved(turns, budget, clock=time.process_time)
    first, *others = (np.median(t) for t in times.seconds)
    return [f"{s:.1f}" for s in seconds] + [f"{t / first:.2f}" for t in others]


def main() -> None:
    parser = common.options(__doc__)
    names = [*programs.MODULES, *edbatch.WORKLOADS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing (%(default)s)")
    options = parser.parse_args()
    budget = 0.0 if options.quick else options.seconds
    print(common.machine())
    header = [f"compile s at {level}" for level in LEVELS]
    header += [f"run at {level}" for level in LEVELS[1:]]
    table = common.Table("program", "side", *header)
    for name in options.only or names:
        of = sides_of_program if name in programs.MODULES else sides_of_workload
        try:
            sides = of(name, options.quick)
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        for side, (step, arguments) in sides.items():
            table.row(name, side, *compared(step, arguments, budget))
        harness.forget()


if __name__ == "__main__":
    main()
