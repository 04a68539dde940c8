"""How much does planning cost, compiled and in Python, and who waits for it?

The workloads of `edbatch.py`: minibatches never seen before, planned in turns by the compiled core
and by the Python that it stands for (`JEDBATCH_NATIVE=0`), each by a batched function of its own.

record      microseconds a node to run the function on symbols and to write its graph.
schedule    microseconds a batch.
plan        milliseconds of planning for inference, and how many times as long Python takes.
run         milliseconds of the device for the inference of one minibatch; `share` is plan / run.
elsewhere   milliseconds of CPUs in this process where another one plans; `share` is of run.

Then TreeLSTMs: minibatches of a growing number of trees; one tree, never seen before and known; and
steps that wait for the result of the device before the next: each plan made when it is needed, and
by `Batched.plans` in a thread, two ahead.
"""

import itertools
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common, edbatch
from jedbatch._batch.processes import Pool
from jedbatch.data import num_nodes
from jedbatch.models import tree

SWITCH = "JEDBATCH_NATIVE"
KEYS = ("1", "0")  # compiled, in Python
HIDDEN = {"mvrnn": 64}
SIZES = [20, 200, 2_000, 10_000]  # trees


def use(key: str) -> None:
    """Plans by the compiled core from now on, or in Python."""
    os.environ[SWITCH] = key


def loss(fn: jedbatch.Batched) -> Any:
    """The jit-compiled loss of a plan."""
    return jax.jit(lambda params, plan: fn.apply(params, plan).sum())


def planned(fn: jedbatch.Batched, params: Any, instances: list[Any]) -> tuple[float, Any]:
    """(seconds, plan)."""
    start = time.perf_counter()
    plan = fn.plan(params, instances, gradient=False)
    return time.perf_counter() - start, plan


def minibatches(bank: Any, size: int) -> list[list[Any]]:
    """Minibatches of instances that are all different."""
    return common.chunks(list(dict.fromkeys(bank.instances)), size)


def workload(name: str, directory: Path | None, size: int, count: int, hidden: int) -> list[Any]:
    """The row of a workload."""
    made = edbatch.WORKLOADS[name]
    bank = made.load(directory, size * (count + 3) * 5 // 4)
    params = made.parameters(bank.sizes, HIDDEN.get(name, hidden))
    functions = {key: jedbatch.batch(made.loss) for key in KEYS}
    rows: dict[str, list[Any]] = {key: [] for key in KEYS}
    plans = []
    for number, few in enumerate(minibatches(bank, size)[: count + 3]):
        for key in KEYS if number % 2 else KEYS[::-1]:
            use(key)
            took, plan = planned(functions[key], params, few)
            stages = plan.host.seconds
            nodes, batches = len(plan.graph.node_type), len(plan.schedule)
            record = 1e6 * stages["trace"] / nodes
            rows[key].append((1e3 * took, record, 1e6 * stages["schedule"] / batches))
            if key == KEYS[0]:
                plans.append(plan)
    tables = {key: np.array(rows[key][3:]) for key in KEYS}
    fast, slow = (np.median(tables[key], axis=0) for key in KEYS)
    run, use_plan = loss(functions[KEYS[0]]), plans[len(plans) // 2]
    times = common.interleaved([lambda: run(params, use_plan)], 2.0)
    milliseconds = 1e3 * times.median()
    here = elsewhere(functions[KEYS[0]], params, minibatches(bank, size)[: count + 3])
    ratios = tables["0"][:, 0] / tables["1"][:, 0]
    row = [made.title, nodes, batches, f"{fast[1]:.2f}", f"{slow[1]:.2f}"]
    row += [f"{fast[2]:.1f}", f"{slow[2]:.1f}", f"{fast[0]:.1f}", common.spread(ratios)]
    row += [f"{milliseconds:.1f}", f"{fast[0] / milliseconds:.2f}"]
    return [*row, f"{here:.2f}", f"{here / milliseconds:.3f}"]


def elsewhere(fn: jedbatch.Batched, params: Any, every: list[list[Any]]) -> float:
    """Milliseconds of CPUs in this process for a minibatch that another process plans."""
    use(KEYS[0])
    planner = fn.planner(params, every[0], gradient=False)
    pool = Pool(planner, 1)

    def attached(few: list[list[Any]]) -> list[Any]:
        futures = [pool.submit([(x,) for x in instances]) for instances in few]
        return [planner.attach(pickle.loads(future.result())) for future in futures]

    attached(every[:3])
    start = time.process_time()
    plans = attached(every[3:])
    took = time.process_time() - start
    pool.close()
    assert all(plan.graph is None for plan in plans), "some were planned here"
    return 1e3 * took / len(plans)


def grown(trees: list[Any], sizes: list[int], cells: Any, params: Any) -> Iterator[list[Any]]:
    """The rows of minibatches of more and more trees."""
    for size in sizes:
        few = [trees[i % len(trees)] for i in range(size)]
        times = {}
        for key in KEYS:
            use(key)
            fn = jedbatch.batch(tree.scorer(cells), cache_size=1)
            planned(fn, params, few[: min(size, 20)])
            took = [planned(fn, params, distinct(few, k)) for k in range(3)]
            nodes = len(took[0][1].graph.node_type)
            times[key] = 1e9 * np.median([t for t, _ in took]) / nodes
        yield [size, nodes, f"{times['1']:.0f}", f"{times['0']:.0f}"]


def distinct(trees: list[Any], number: int) -> list[Any]:
    """The trees with other words, so that no two are equal."""
    words = np.random.default_rng(number)

    def copied(root: Any) -> Any:
        label, *rest = root
        return (label, int(words.integers(500))) if len(rest) == 1 else (label, *map(copied, rest))

    return [copied(root) for root in trees]


def single(trees: list[Any], cells: Any, params: Any) -> list[Any]:
    """The row of one tree: microseconds of planning."""
    row: list[Any] = []
    for key in KEYS:
        use(key)
        fn = jedbatch.batch(tree.scorer(cells))
        planned(fn, params, trees)
        new, known = [], []
        for root in distinct(trees, 1):
            new.append(planned(fn, params, [root])[0])
            known.append(min(planned(fn, params, [root])[0] for _ in range(3)))
        row += [f"{1e6 * np.median(new):.0f}", f"{1e6 * np.median(known):.0f}"]
    return [f"{np.median(list(map(num_nodes, trees))):.0f}", *row]


def steps(trees: list[Any], size: int, cells: Any, params: Any, gradient: bool) -> list[Any]:
    """The row of steps that wait for the device."""
    use(KEYS[0])
    fn = jedbatch.batch(tree.scorer(cells))
    run = loss(fn)
    run = jax.jit(jax.value_and_grad(run)) if gradient else run
    seeds = itertools.count()

    def epoch(ahead: int) -> float:
        fresh = [distinct(few, next(seeds)) for few in common.chunks(trees, size)]
        start = time.perf_counter()
        for plan in fn.plans(params, fresh, gradient=gradient, ahead=ahead):
            jax.block_until_ready(run(params, plan))
        return (time.perf_counter() - start) / len(fresh)

    epoch(0)  # compiles
    times = np.array([(epoch(0), epoch(2)) for _ in range(7)])
    apart, ahead = 1e3 * np.median(times, axis=0)
    mode = "training" if gradient else "inference"
    return [mode, f"{apart:.1f}", f"{ahead:.1f}", common.spread(times[:, 0] / times[:, 1])]


def main() -> None:
    parser = common.options(__doc__, "a directory of files as named in `edbatch.py`")
    parser.add_argument("--workloads", default=",".join(edbatch.WORKLOADS))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--count", type=int, default=9, help="minibatches (default %(default)s)")
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.batch, options.count = 4, 4, 3
    directory = Path(options.data) if options.data else None
    names = options.workloads.split(",")
    print(common.machine())
    head = ["workload", "nodes", "batches", "record µs", "in Python", "schedule µs", "in Python"]
    head += ["plan ms", "Python ×", "run ms", "share", "elsewhere ms", "share"]
    table = common.Table(*head)
    for name in names:
        table.row(*workload(name, directory, options.batch, options.count, options.hidden))
    bank = common.load_trees(None, 40 if options.quick else 400)
    cells, params = common.model(bank.num_words, 4)
    table = common.Table("trees", "nodes", "ns a node", "in Python")
    for row in grown(bank.trees, SIZES[:2] if options.quick else SIZES, cells, params):
        table.row(*row)
    table = common.Table("nodes", "unseen µs", "known µs", "unseen, Python", "known, Python")
    table.row(*single([t for t in bank.trees if num_nodes(t) <= 45][:60], cells, params))
    cells, params = common.model(bank.num_words, options.hidden)
    table = common.Table("steps of", "one by one ms", "ahead ms", "times as fast")
    for gradient in (False, True):
        table.row(*steps(bank.trees, options.batch, cells, params, gradient))


if __name__ == "__main__":
    main()
