"""How long until the first result of an exported model in a fresh process, and of the model there?

The TreeLSTM of `jedbatch.models.tree`. Two kinds of processes start in turns and end after the
first loss of one minibatch (inference), or the first loss and gradient (training):

    model      imports the model, makes it, records and plans trees, traces, compiles, runs
    exported   loads the exported model and the graphs of the same trees, plans, compiles, runs

Both read parameters and instances from files, and the results are compared. Times are CPU seconds
of whole processes, from their start to their end, since others may share the machine. `cached` is
with JAX's persistent compilation cache, which earlier processes of the same kind have filled;
`cached / model` compares an exported model that comes with such a cache to the model without one.
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
    exported = jedbatch.Exported.load(folder / f"{kind}.model")
    graph = jedbatch.Graph.load(folder / "graphs.npz")
    params = params_from(folder / "params.npz")
    if kind == "inference":
        return lambda: exported(params, graph)[:, 0].sum()
    step = jax.jit(jax.value_and_grad(lambda p, plan: exported.apply(p, plan)[:, 0].sum()))
    return lambda: step(params, exported.plan(graph, gradient=True))


def child(folder: Path, kind: str, how: str) -> None:
    """Prints the loss of the minibatch, and with `how` "run" the time of a run in both ways."""
    if how != "run":
        result = (run_model if how == "model" else run_exported)(folder, kind)()
        print(float(jax.tree.leaves(result)[0]))
        return
    runs = run_model(folder, kind), run_exported(folder, kind)
    times: list[list[float]] = [[], []]
    for i in range(RUNS + 2):
        for run, found in zip(runs, times, strict=True):
            begin = time.process_time()
            jax.block_until_ready(run())
            found.extend([time.process_time() - begin] if i > 1 else [])
    print(statistics.median(times[1]) / statistics.median(times[0]))


def seconds_of(folder: Path, kind: str, how: str, cache: str | None = None) -> tuple[float, float]:
    """(CPU seconds of a process, what it printed)."""
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
    return seconds, float(done.stdout)


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
        exported.save(folder / f"{kind}.model")
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
        "cached / model",
        "run",
        "file kB",
    )
    for hidden, size in common.by(args.hidden, args.batch):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_files(folder, bank, hidden, size)
            for kind in ("inference", "training"):
                cells, medians = [], []
                for cache in (None, f"{name}/cache"):
                    if cache is not None:
                        for how in ("model", "exported"):
                            seconds_of(folder, kind, how, cache)
                    times = np.zeros((2, args.repeat))
                    for i in range(args.repeat):
                        found = [seconds_of(folder, kind, x, cache) for x in ("model", "exported")]
                        times[:, i] = [s for s, _ in found]
                        np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4)
                    both = common.Times(times)
                    cells += [f"{both.median(0):.1f}", f"{both.median(1):.1f}", both.ratio(1)]
                    medians += [both.median(0), both.median(1)]
                cells.append(f"{medians[3] / medians[0]:.2f}")
                _, ratio = seconds_of(folder, kind, "run")
                file = os.path.getsize(folder / f"{kind}.model") / 1e3
                table.row(kind, hidden, size, *cells, f"{ratio:.2f}", f"{file:.0f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
