"""How long until the first result of an exported model in a fresh process, and of the model there?

The TreeLSTM of `jedbatch.models.tree`. Two kinds of processes start in turns and end after the
first loss of one minibatch (inference), or the first loss and gradient (training):

    model      imports the model, makes it, records and plans trees, traces, compiles, runs
    exported   loads the exported model and the graphs of the same trees, plans, compiles, runs

All read parameters and instances from files, and the results are compared. Times are CPU seconds
of whole processes, from their start to their end, since others may share the machine. `cached` is
with JAX's persistent compilation cache, which earlier processes of the same kind have filled.
`run` is the median CPU time of the same minibatch afterwards, in the exported model, over that of
the batched function.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch

RUNS = 15  # of the same minibatch, once it is compiled
WAYS = ("model", "exported")


def numbers_of(params: Any) -> dict[str, Any]:
    """Parameters by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(key.key) for key in path): x for path, x in leaves}


def params_from(file: Path) -> Any:
    """A dict of dicts from what `numbers_of` gave."""
    params: dict[str, Any] = {}
    with np.load(file) as stored:
        for path, x in stored.items():
            *parents, name = path.split("/")
            place = params
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = jnp.asarray(x)
    return params


def as_tuples(tree: Any) -> Any:
    return tuple(map(as_tuples, tree)) if isinstance(tree, list) else tree


def run_model(folder: Path, kind: str) -> Any:
    """Of a process with the model: what runs the minibatch."""
    from benchmarks import common
    from jedbatch.models import tree

    sizes = json.loads((folder / "sizes.json").read_text())
    cells = tree.plain_cells(sizes["num_words"], common.NUM_LABELS, sizes["hidden"])
    params = params_from(folder / "params.npz")
    trees = as_tuples(json.loads((folder / "trees.json").read_text()))
    score = jedbatch.batch(tree.scorer(cells))
    if kind == "inference":
        return lambda: score(params, trees)[:, 0].sum()
    step = jax.jit(jax.value_and_grad(common.batched_loss(score)))
    return lambda: step(params, score.plan(params, trees))


def run_exported(folder: Path, kind: str) -> Any:
    """Of a process without it."""
    exported = jedbatch.Exported.load(folder / kind)
    graph = jedbatch.Graph.load(folder / "graphs.npz")
    params = params_from(folder / "params.npz")
    if kind == "inference":
        return lambda: exported(params, graph)[:, 0].sum()
    step = jax.jit(jax.value_and_grad(lambda p, plan: exported.apply(p, plan)[:, 0].sum()))
    return lambda: step(params, exported.plan(graph, gradient=True))


def child(folder: Path, kind: str, how: str) -> None:
    """Prints the loss of the minibatch, or with `how` "run" the ratio of times of a run."""
    if how != "run":
        result = run_model(folder, kind) if how == "model" else run_exported(folder, kind)
        print(float(jax.tree.leaves(result())[0]))
        return
    runs = run_model(folder, kind), run_exported(folder, kind)
    times: list[list[float]] = [[] for _ in runs]
    for i in range(RUNS + 2):
        for run, found in zip(runs, times, strict=True):
            begin = time.process_time()
            jax.block_until_ready(run())
            found.extend([time.process_time() - begin] if i > 1 else [])
    batched, exported = map(statistics.median, times)
    print(exported / batched)


def seconds_of(
    folder: Path, kind: str, how: str, cache: str | None = None
) -> tuple[float, list[float]]:
    """(CPU seconds of a process, the numbers it printed)."""
    env = {name: x for name, x in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    if cache is not None:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    command = [sys.executable, "-m", "benchmarks.questions.export"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "--child", str(folder), kind, how],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, list(map(float, done.stdout.split()))


def write_files(folder: Path, bank: Any, hidden: int, size: int) -> None:
    """Writes the model, parameters, and a minibatch as trees and as graphs."""
    from benchmarks import common
    from jedbatch.models import tree

    cells, params = common.model(bank.num_words, hidden)
    score = jedbatch.batch(tree.scorer(cells))
    minibatches = common.chunks(bank.trees, size)
    trees = common.typical(minibatches)
    np.savez(folder / "params.npz", **numbers_of(params))
    (folder / "trees.json").write_text(json.dumps(trees))
    sizes = {"num_words": bank.num_words, "hidden": hidden}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    for kind in ("inference", "training"):
        exported = score.export(params, bank.trees, batch_size=size, gradient=kind == "training")
        exported.save(folder / kind)
    score.graph(params, trees).save(folder / "graphs.npz")


def main() -> None:
    from benchmarks import common

    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[64, 256], help="such as 64,256")
    parser.add_argument("--batch", type=common.numbers, default=[64], help="such as 8,64")
    parser.add_argument("--repeat", type=int, default=5, help="processes of each kind")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.repeat = [16], [4], 1
    print(common.machine())
    bank = common.load_trees(args.data, max(args.batch) * 5)
    print(f"{common.source(args.data)}, {bank.num_words} words, {common.NUM_LABELS} labels")
    table = common.Table(
        "",
        "hidden",
        "batch",
        "model s",
        "exported s",
        "ratio",
        "model cached s",
        "exported cached s",
        "ratio cached",
        "run",
        "file kB",
    )
    for hidden, size in common.by(args.hidden, args.batch):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_files(folder, bank, hidden, size)
            for kind in ("inference", "training"):
                cells = []
                for cache in (None, f"{name}/cache"):
                    for how in WAYS if cache is not None else ():
                        seconds_of(folder, kind, how, cache)
                    times = np.zeros((len(WAYS), args.repeat))
                    for i in range(args.repeat):
                        found = [seconds_of(folder, kind, x, cache) for x in WAYS]
                        times[:, i] = [s for s, _ in found]
                        (_, (of_model,)), (_, (of_exported,)) = found
                        np.testing.assert_allclose(of_model, of_exported, rtol=1e-4)
                    each = common.Times(times)
                    cells += [*(f"{each.median(k):.1f}" for k in range(2)), each.ratio(1)]
                _, (ratio,) = seconds_of(folder, kind, "run")
                cells += [f"{ratio:.2f}", f"{os.path.getsize(folder / kind) / 1e3:.0f}"]
                table.row(kind, hidden, size, *cells)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
