"""How many batches does each policy need, on instances it was not made for?

Policies are learned on 32 instances and counted on sets of other instances, of four sizes. The
numbers are totals over the sets; `bound` is certified, no schedule can need fewer.

learned                     what `jedbatch.learn` returns: the best of all on the 32 instances.
distilled                   FSM that imitates heuristics and beam search, without Q-learning.
Q base, max, sort, phase    FSMs by Q-learning alone over each encoding.
beam 64                     a search with 64 states, which has seconds for each set.

`learned / beam` and `learned / heuristic` compare with the search, and with the best of `depth`,
`agenda`, `height` and `sufficient`; `µs/batch` is what the learned policy takes to schedule graphs
it meets for the first time. Seconds of learning include compilation where it happens: in the first
Q-learning on graphs of a size, which is part of `learned`. At the end of each workload are the
batches on the training instances after so many episodes of Q-learning over `phase`.
"""

import time
from pathlib import Path

import numpy as np

import jedbatch
from benchmarks import common
from benchmarks.questions import topologies
from jedbatch import Graph, policies
from jedbatch.policies import FSM

PUBLISHED = {
    "depth": policies.depth,
    "agenda": policies.agenda,
    "height": policies.height,
    "sufficient": policies.sufficient,
}


def learned(graphs: list[Graph]) -> dict[str, tuple[FSM, float]]:
    """(policy, seconds it took to learn) by name."""
    makers: dict[str, dict] = {"learned": {}, "distilled": {"episodes": 0}}
    for e in ("base", "max", "sort", "phase"):
        makers[f"Q {e}"] = {"encoding": e, "teachers": False}
    found = {}
    for name, options in makers.items():
        start = time.perf_counter()
        fsm = jedbatch.learn(graphs, **options)
        found[name] = fsm, time.perf_counter() - start
    return found


def count(sets: list[Graph], policy) -> int:
    """Batches in all."""
    return sum(len(jedbatch.schedule(graph, policy)) for graph in sets)


def micros(sets: list[list[Graph]], policy) -> float:
    """Median microseconds per batch to schedule graphs that nothing is known of."""
    found = []
    for parts in sets:
        graph = Graph.concatenate(parts)
        start = time.perf_counter()
        batches = len(jedbatch.schedule(graph, policy))
        found.append(1e6 * (time.perf_counter() - start) / batches)
    return float(np.median(found))


def curve(fsm: FSM) -> str:
    """Episodes and batches, a dozen points of them."""
    (points,) = fsm.report.curves.values()
    some = points[:: max(1, len(points) // 12)]
    return ", ".join(f"{episodes}: {batches:.0f}" for episodes, batches in some)


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--batches", type=common.numbers, default=[8, 32, 64, 256])
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--workloads", help="parts of their names, separated by commas")
    args = parser.parse_args()
    directory = Path(args.data) if args.data else None
    sizes, num_sets = ([4, 8], 2) if args.quick else (args.batches, args.sets)
    print(common.machine())
    for workload in topologies.WORKLOADS:
        if args.workloads and not any(w in workload for w in args.workloads.split(",")):
            continue
        graphs = topologies.instances(workload, directory)
        fsms = learned(graphs[:32])
        others = graphs[32:]
        print(f"\n**{workload}**")
        heads = ["bound", *PUBLISHED, "critical", *fsms, "beam 64"]
        table = common.Table("batch", *heads, "learned / beam", "learned / heuristic", "µs/batch")
        table.row("seconds", *[""] * 6, *(f"{s:.1f}" for _, s in fsms.values()), *[""] * 4)
        for size in sizes:
            rng = np.random.default_rng(size)
            chosen = [rng.choice(len(others), size, replace=False) for _ in range(num_sets)]
            parts = [[others[i] for i in some] for some in chosen]
            sets = [Graph.concatenate(some) for some in parts]
            totals = {"bound": sum(map(jedbatch.lower_bound, sets))}
            totals |= {name: count(sets, p) for name, p in PUBLISHED.items()}
            totals["critical"] = count(sets, policies.critical)
            totals |= {name: count(sets, fsm) for name, (fsm, _) in fsms.items()}
            if totals["learned"] == totals["bound"]:
                totals["beam 64"] = totals["bound"]
            else:
                totals["beam 64"] = count(sets, policies.beam(width=64))
            best = min(totals[name] for name in PUBLISHED)
            ratios = [f"{totals['learned'] / n:.3f}" for n in (totals["beam 64"], best)]
            speed = f"{micros(parts, fsms['learned'][0]):.0f}"
            table.row(size, *(totals[name] for name in heads), *ratios, speed)
        if fsms["Q phase"][0].report.curves:
            print(f"\nbatches by episodes: {curve(fsms['Q phase'][0])}")
        print(f"\n```\n{fsms['learned'][0].report}\n```")


if __name__ == "__main__":
    main()
