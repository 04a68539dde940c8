"""How many batches does each policy need, and how long does learning one take?

The schedules of one minibatch of each exact workload (ED-Batch, figures 7 and 9; table 4). Policies
are learned on 32 other instances; `bound` is certified, no schedule can need fewer. What is timed
is scheduling with the learned policy, and learning it.
"""

import dataclasses

import jedbatch
from benchmarks import common, edbatch
from benchmarks.suite import harness
from jedbatch import policies

GRID = harness.Grid(
    quick=[(["treelstm", "treelstm2", "bilstm"], [16], [8], ["inference"])],
    full=[(list(edbatch.WORKLOADS), [64, 256], [8], ["inference"])],
)
TRAINING = 32
HEURISTICS = ("agenda", "depth", "height", "critical", "sufficient")


def test_batches(benchmark, case, options):
    bench = harness.Bench.of(case, options)
    others = [x for chunk in bench.minibatches[1:] for x in chunk][:TRAINING]
    graph = bench.plan(bench.minibatch).graph
    lesson = [bench.plan(others or bench.minibatch[:TRAINING]).graph]
    learned = jedbatch.learn(lesson)
    counts = {name: len(jedbatch.schedule(graph, getattr(policies, name))) for name in HEURISTICS}
    for encoding in ("base", "max", "sort", "phase"):
        fsm = jedbatch.learn(lesson, encoding=encoding, teachers=False)
        counts[f"Q {encoding}"] = len(jedbatch.schedule(graph, fsm))
    counts["learned"] = len(jedbatch.schedule(graph, learned))
    new = lambda: ((dataclasses.replace(graph), learned), {})  # noqa: E731 nothing known of it
    benchmark.pedantic(jedbatch.schedule, setup=new, rounds=20)
    benchmark.extra_info |= {
        **case._asdict(),
        "title": bench.workload.title,
        "nodes": len(graph.node_type),
        "bound": jedbatch.lower_bound(graph),
        "counts": counts,
        "source": common.source(str(options.data) if options.data else None),
    }


def test_learning(benchmark, case, options):
    bench = harness.Bench.of(case, options)
    graph = bench.plan(bench.minibatch[:TRAINING]).graph
    jedbatch.learn([graph])  # its first Q-learning compiles
    benchmark.pedantic(
        jedbatch.learn, setup=lambda: (([dataclasses.replace(graph)],), {}), rounds=3
    )
    benchmark.extra_info |= {
        **case._asdict(),
        "title": bench.workload.title,
        "nodes": len(graph.node_type),
        "source": common.source(str(options.data) if options.data else None),
    }
