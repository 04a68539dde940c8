"""How long do small minibatches take that were never seen before (ED-Batch, table 3)?

Minibatches of 10 and 20 instances, planning included, as they come to a service. The first ones
make types and programs known; then every round takes the next minibatch. The rivals take the same
minibatches: hand-written JAX with its preparation, the loop over jit-compiled cells, and PyTorch
instance by instance.
"""

import itertools

import numpy as np

from benchmarks import common, edbatch
from benchmarks.rivals import by_hand
from benchmarks.suite import harness

GRID = harness.Grid(
    quick=[(["treelstm", "lattice_lstm"], [10], [32], ["inference"])],
    full=[(list(edbatch.WORKLOADS), [10, 20], [64, 256], ["inference"])],
)
WARM_UP, ROUNDS = 6, 24


def test_latency(benchmark, case, options):
    bench = harness.Bench.of(case, options, minibatches=WARM_UP + (ROUNDS if options.full else 4))
    first, later = bench.minibatches[:WARM_UP], bench.minibatches[WARM_UP:]
    written = bench.jitted(by_hand.loss(case.workload))
    rivals = {
        "by hand, whole": lambda x: written(bench.params, by_hand.prepare(case.workload, x)),
        "loop": lambda x: [bench.workload.loss(bench.params, instance) for instance in x],
    }
    if harness.in_torch is not None:
        weights = harness.in_torch.parameters(bench.params)
        eager = harness.in_torch.eager(case.workload)
        rivals["torch eager"] = lambda x: bench.in_torch(eager, weights, x)
    for x in first:
        common.seconds(lambda x=x: bench.run(bench.plan(x)))
        for run in rivals.values():
            common.seconds(lambda x=x, run=run: run(x))
    compilations = bench.batched.compilations
    found = {name: [] for name in rivals}
    coming = itertools.cycle(later)
    now = []

    def between():
        now[:] = [next(coming)]
        for name, run in rivals.items():
            found[name].append(harness.timed(lambda run=run: run(now[0])))

    benchmark.pedantic(
        lambda: bench.run(bench.plan(now[0])).block_until_ready(), setup=between, rounds=len(later)
    )
    seconds = {"unseen": np.array(benchmark.stats.stats.data)}
    seconds |= {name: np.array(times) for name, times in found.items()}
    benchmark.extra_info |= {
        **case._asdict(),
        "title": bench.workload.title,
        "compilations_unseen": bench.batched.compilations - compilations,
        "seconds": {name: float(np.median(t)) for name, t in seconds.items()},
        "p95": {name: float(np.percentile(t, 95)) for name, t in seconds.items()},
        "source": common.source(str(options.data) if options.data else None),
    }
