"""How fast are the exact workloads of ED-Batch's released code, and the alternatives?

Inference and training over sizes of minibatches and of states (ED-Batch, figure 6), with the time
of each stage (figure 8), of instances never seen before, of others that equal them, and of known
ones. See `harness.py` for those that take part.
"""

import os
import pickle

import numpy as np

import jedbatch
from benchmarks import common, edbatch
from benchmarks.suite import harness

NINE = list(edbatch.WORKLOADS)
EIGHT = [name for name in NINE if name != "mvrnn"]
SIZES = [1, 8, 32, 64, 128, 256]
GRID = harness.Grid(
    quick=[
        (NINE, [8], [32], ["inference"]),
        (["treelstm", "bilstm", "lattice_lstm"], [8], [32], ["training"]),
    ],
    full=[
        (EIGHT, SIZES, [32, 64, 128, 256, 512], harness.MODES),
        (["mvrnn"], SIZES, [32, 64, 128], harness.MODES),  # its states are matrices
    ],
)
WARM_UP = 2  # minibatches that make types and programs known


def test_throughput(benchmark, case, options):
    bench = harness.Bench.of(case, options)
    names = options.rivals.split(",") if options.rivals else harness.RIVALS
    first, *others = bench.minibatches
    for instances in [first, *others[: WARM_UP - 1]]:
        bench.run(bench.plan(instances))
    compilations = bench.batched.compilations
    new = others[WARM_UP - 1 :]
    unseen = harness.stages(bench, new)
    compilations = bench.batched.compilations - compilations
    equal = harness.stages(bench, [pickle.loads(pickle.dumps(instances)) for instances in new])
    functions = bench.functions(names)
    bench.check(functions)
    multiply, multiply_flop = harness.product()
    functions["product"] = multiply
    multiply()
    budget = options.seconds or (3 if options.full else 0.5)
    times = harness.turns(benchmark, functions, budget)
    few = bench.flop(first[: harness.SLOW_INSTANCES])
    work = bench.flop(first)
    seconds = {name: t * (work / few if name in harness.SLOW else 1) for name, t in times.items()}
    plan = bench.plan(first)
    benchmark.extra_info |= {
        **case._asdict(),
        "title": bench.workload.title,
        "threads": len(os.sched_getaffinity(0)),
        "nodes": len(plan.graph.node_type),
        "batches": len(plan.schedule),
        "bound": jedbatch.lower_bound(plan.graph),
        "flop": work,
        "product_rate": multiply_flop / float(np.median(times["product"])),
        "compilations_unseen": compilations,
        "seconds": {name: float(np.median(t)) for name, t in seconds.items()},
        "ratios": {
            name: np.percentile(paired(t, seconds["planned"]), [25, 50, 75]).tolist()
            for name, t in seconds.items()
        },
        "unseen": unseen,
        "equal": equal,
        "known": harness.stages(bench, [first] * 3),
        "source": common.source(str(options.data) if options.data else None),
    }


def paired(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Ratios of neighbouring runs."""
    n = min(len(theirs), len(ours))
    return theirs[:n] / ours[:n]
