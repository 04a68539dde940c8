"""How much faster does a minibatch run that is cut over the cores of a CPU?

Programs of other people (`benchmarks.programs`), and models of this package with `--hidden` units:
a minibatch on one device, and cut over the devices of `jedbatch.cores(N)`. The programs also as an
expert would write them by hand, on one device.

ms       milliseconds on one device, in a `jax.jit` of `apply`, with a plan made before.
cores    how many times as fast the minibatch runs that is cut over cores.
by hand  how many times as long as that what is written by hand takes.
cpu      CPU seconds of all threads for the minibatch that is cut, over those on one device.
late     programs compiled for the last of four minibatches that are cut.

With quartiles. All sides run in turns; what they compute is compared before.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jedbatch
from benchmarks import common, programs
from benchmarks.questions.programs import assert_close
from jedbatch.models import WORKLOADS
from jedbatch.testing import compilations

COUNT = 4  # minibatches, of which the last is timed
PROGRAMS = ["childsum_nnx", "messages", "circuits"]
MODELS = ["treelstm", "tagger"]
RUNS = 10  # whose CPU time is taken


class Case(NamedTuple):
    """A model of one instance, its parameters, minibatches, and perhaps the last one by hand."""

    model: Callable[..., Any]
    params: Any
    minibatches: list[Any]
    by_hand: Callable[..., Any] | None = None
    arrays: Any = None


def program(name: str, options: Any) -> Case:
    """A program of other people."""
    found, rng = programs.load(name), np.random.default_rng(options.seed)
    params = found.parameters(jax.random.key(0), options.quick)
    size = options.batch or (4 if options.quick else found.batch)
    few = [found.instances(rng, size, options.quick) for _ in range(COUNT)]
    return Case(found.model, params, few, found.by_hand, found.prepare(few)[-1])


def model(name: str, options: Any) -> Case:
    """A model of this package."""
    workload, size = WORKLOADS[name], options.batch or (4 if options.quick else 64)
    instances, sizes = workload.load(limit=size * COUNT, seed=options.seed + 1)
    cells = workload.cells(hidden=8 if options.quick else options.hidden, **sizes)
    params = cells.init(jax.random.key(0))
    return Case(workload.scorer(cells), params, common.chunks(instances, size))


def cpu_of(run: Callable[[], Any]) -> float:
    """CPU seconds of a run, of all threads."""
    start = time.process_time()
    for _ in range(RUNS):
        jax.block_until_ready(run())
    return (time.process_time() - start) / RUNS


def measure(case: Case, mesh: Mesh, gradient: bool, budget: float) -> list[Any]:
    """The columns of a program that is differentiated or not."""
    mode = common.with_gradient if gradient else lambda fn: fn
    everywhere = jax.device_put(case.params, NamedSharding(mesh, PartitionSpec()))
    one, cut = jedbatch.batch(case.model), jedbatch.batch(case.model)
    alone, together = jax.jit(mode(one.apply)), jax.jit(mode(cut.apply))
    for few in case.minibatches:
        plan = one.plan(case.params, few, gradient=gradient)
        with compilations() as late:
            shards = cut.plan(everywhere, few, mesh=mesh, gradient=gradient)
            jax.block_until_ready(together(everywhere, shards))
    plan = jax.device_put(plan)
    turns = [lambda: together(everywhere, shards), lambda: alone(case.params, plan)]
    if case.by_hand is not None:
        by_hand, arrays = jax.jit(mode(case.by_hand)), jax.device_put(case.arrays)
        turns.append(lambda: by_hand(case.params, arrays))
    for run in turns[1:]:
        assert_close(turns[0](), run(), "jedbatch")
    times = common.interleaved(turns, budget)
    cpu = cpu_of(turns[0]) / cpu_of(turns[1])
    theirs = times.ratio(2) if case.by_hand is not None else "–"
    return [f"{1e3 * times.median(1):.2f}", times.ratio(1), theirs, f"{cpu:.2f}", len(late)]


def main() -> None:
    parser = common.options(__doc__)
    known = [*programs.MODULES, *WORKLOADS]
    parser.add_argument("--only", action="append", choices=known, metavar="NAME")
    parser.add_argument("--cores", type=int, help="devices (as many as there are cores)")
    parser.add_argument("--batch", type=int, help="instances of a minibatch (64, or as others)")
    parser.add_argument("--hidden", type=int, default=128, help="units of models (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mesh = jedbatch.cores(options.cores)  # before any is used
    names = options.only or [*PROGRAMS, *MODELS]
    if options.quick:
        options.seconds, names = 0.1, options.only or ["circuits", "treelstm"]
    print(common.machine())
    print(f"{mesh.size} devices")
    columns = ["cores", "by hand", "cpu", "late"]
    table = common.Table("program", "", "ms", *columns)
    for name in names:
        try:
            case = (program if name in programs.MODULES else model)(name, options)
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        for gradient in (False, True):
            row = measure(case, mesh, gradient, options.seconds)
            table.row(name, "gradient" if gradient else "value", *row)


if __name__ == "__main__":
    main()
