"""Does planning cost what structures cost, or what instances cost? And what do unseen ones cost?

known       minibatches of trees that were all met before, in another order, and so planned together
            for the first time: 4 trees of 4 shapes, and 256 of the same 4 shapes with other words,
            64 of each, or each time in other numbers.
unseen      64 instances never seen before of three workloads of `jedbatch.models`, each with the
            policy of this package.
one tree    never seen before, and known but not as a minibatch.

Milliseconds of planning for inference, and of its stages: `record` in microseconds a node,
`schedule` in microseconds a batch. `share` is planning over running, of the TreeLSTM. Planning is
timed on the clock of its thread, so that it matters little what else the machine does; running,
which takes all cores, on the wall.

With `--against DIRECTORY`, another checkout of this project with its core built, both are measured
in turns, each time in a process of its own.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch.data import num_nodes
from jedbatch.models.workloads import WORKLOADS

UNSEEN = ("treelstm", "lattice_lstm", "tagger")
SIZE = 64
SHAPES, COPIES = 4, 64

Row = dict[str, float]


def planned(fn: jedbatch.Batched, params: Any, instances: list[Any]) -> tuple[float, Any]:
    """(seconds, plan)."""
    start = time.perf_counter()
    plan = fn.plan(params, instances, gradient=False)
    return time.perf_counter() - start, plan


def median(found: list[tuple[float, Any]]) -> Row:
    """The medians of a few plans."""
    stages = [plan.host.seconds for _, plan in found]
    nodes = [len(plan.graph.node_type) for _, plan in found]
    batches = [len(plan.schedule) for _, plan in found]
    per_node = [s["trace"] / n for s, n in zip(stages, nodes, strict=True)]
    per_batch = [s["schedule"] / n for s, n in zip(stages, batches, strict=True)]
    row = {name: 1e3 * float(np.median([s[name] for s in stages])) for name in stages[0]}
    total = 1e3 * float(np.median([t for t, _ in found]))
    sizes = {"nodes": float(np.median(nodes)), "batches": float(np.median(batches))}
    each = {
        "a node": 1e6 * float(np.median(per_node)),
        "a batch": 1e6 * float(np.median(per_batch)),
    }
    return {**sizes, "plan": total, **row, **each}


def with_words(root: Any, words: np.random.Generator) -> Any:
    """A tree of the same shape with other words."""
    label, *rest = root
    if len(rest) == 1:
        return label, int(words.integers(500))
    return (label, *(with_words(x, words) for x in rest))


def shape_of(root: Any) -> Any:
    """A tree without labels and words."""
    return tuple(map(shape_of, root[1:])) if len(root) > 2 else ()


def model(name: str, hidden: int, number: int) -> tuple[list[Any], Any, Callable, Any]:
    """(instances, parameters, function, policy) of a workload."""
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=number)
    cells = workload.cells(hidden=hidden, **sizes)
    return instances, cells.init(jax.random.key(0)), workload.scorer(cells), workload.policy()


def known(hidden: int, repeats: int) -> dict[str, Row]:
    """Minibatches of instances that were met before."""
    trees, params, score, _ = model("treelstm", hidden, 400)
    shapes: dict[Any, Any] = {}
    for root in trees:
        if 20 <= num_nodes(root) <= 40:
            shapes.setdefault(shape_of(root), root)
    draws = np.random.default_rng(0)
    four = list(shapes.values())[:SHAPES]
    pool = [[with_words(root, draws) for _ in range(COPIES)] for root in four]
    fn = jedbatch.batch(score)
    planned(fn, params, list(itertools.chain(*pool)))
    few, many, mixed = [], [], []
    for _ in range(repeats):
        few.append(planned(fn, params, [x[int(draws.integers(COPIES))] for x in pool]))
        order = draws.permutation(SHAPES * COPIES)
        many.append(planned(fn, params, [pool[i // COPIES][i % COPIES] for i in order]))
        drawn = draws.integers(SHAPES * COPIES, size=SHAPES * COPIES)
        mixed.append(planned(fn, params, [pool[i // COPIES][i % COPIES] for i in drawn]))
    rows = {"4 known trees": few, "256 known trees": many, "256 in other numbers": mixed}
    return {name: median(found[2:]) for name, found in rows.items()}


def unseen(name: str, hidden: int, repeats: int) -> tuple[Row, Callable]:
    """(minibatches of instances that were never met, what runs the last of them)."""
    instances, params, score, policy = model(name, hidden, SIZE * (repeats + 3))
    minibatches = common.chunks(list(dict.fromkeys(instances)), SIZE)
    fn = jedbatch.batch(score, policy=policy)
    found = [planned(fn, params, few) for few in minibatches]
    run, plan = jax.jit(lambda p, x: fn.apply(p, x).sum()), found[-1][1]
    return median(found[3:]), lambda: run(params, plan)


def one_tree(hidden: int, number: int) -> dict[str, Row]:
    """Trees alone."""
    trees, params, score, _ = model("treelstm", hidden, 4 * number)
    few = [root for root in trees if num_nodes(root) <= 45][:number]
    draws = np.random.default_rng(1)
    fn = jedbatch.batch(score)
    planned(fn, params, few)
    new = [planned(fn, params, [with_words(root, draws)]) for root in few]
    met = [planned(fn, params, [root]) for root in few]
    return {"one unseen tree": median(new[5:]), "one known tree": median(met[5:])}


def measured(options: Any) -> dict[str, Row]:
    """All rows."""
    repeats = 3 if options.quick else options.repeats
    hidden = 4 if options.quick else options.hidden
    of_the_wall, time.perf_counter = time.perf_counter, time.thread_time  # for stages too
    rows = known(hidden, 4 * repeats)
    unseen_rows = {name: unseen(name, hidden, repeats) for name in UNSEEN}
    rows |= {f"64 unseen, {name}": row for name, (row, _) in unseen_rows.items()}
    rows |= one_tree(hidden, 10 * repeats)
    time.perf_counter = of_the_wall
    rows[f"64 unseen, {UNSEEN[0]}"]["run"] = (
        1e3 * common.interleaved([unseen_rows[UNSEEN[0]][1]], 1.0).median()
    )
    return rows


def elsewhere(arguments: list[str], directory: str) -> dict[str, Row]:
    """All rows as another process measures them, by the checkout in a directory."""
    environment = {**os.environ, "PYTHONPATH": directory}
    command = [sys.executable, __file__, *arguments, "--json"]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9, help="minibatches (default %(default)s)")
    parser.add_argument("--against", metavar="DIRECTORY", help="another checkout")
    parser.add_argument("--rounds", type=int, default=5, help="of both (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measured(options)))
        return
    print(common.machine())
    arguments = ["--hidden", str(options.hidden), "--repeats", str(options.repeats)]
    arguments += ["--quick"] if options.quick else []
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    rounds: list[list[dict[str, Row]]] = []
    for _ in range(options.rounds):
        directories = [here, *([os.path.abspath(options.against)] if options.against else [])]
        rounds.append([elsewhere(arguments, directory) for directory in directories])
    head = ["minibatch", "nodes", "batches", "plan ms", "record µs a node", "schedule µs a batch"]
    head += ["merge ms", "layout ms", "lower ms", "share of run"]
    if options.against:
        head += ["before: plan ms", "record µs", "schedule µs", "times as fast"]
    table = common.Table(*head)
    for name in rounds[0][0]:
        table.row(name, *row_of([[x[name] for x in both] for both in rounds]))
    fan_out = [
        [x["256 known trees"]["plan"] / x["4 known trees"]["plan"] for x in both] for both in rounds
    ]
    print("256 known trees over 4:", ", ".join(common.spread(x) for x in np.array(fan_out).T))


def row_of(rounds: list[list[Row]]) -> list[Any]:
    """The columns of a row, of what was measured here and perhaps elsewhere in every round."""

    def median_of(name: str, which: int = 0) -> float:
        return float(np.median([both[which].get(name, 0) for both in rounds]))

    numbers = ("plan", "a node", "a batch", "merge", "layout", "lower")
    row = [f"{median_of('nodes'):.0f}", f"{median_of('batches'):.0f}"]
    row += [f"{median_of(name):.2f}" for name in numbers]
    run = median_of("run")
    row.append(f"{median_of('plan') / run:.2f}" if run else "")
    if len(rounds[0]) > 1:
        row += [f"{median_of(name, 1):.2f}" for name in numbers[:3]]
        row.append(common.spread(np.array([b["plan"] / a["plan"] for a, b in rounds])))
    return row


if __name__ == "__main__":
    main()
