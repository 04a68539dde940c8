"""Options, trees, timing and tables of the benchmarks."""

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jedbatch
from jedbatch.data import Vocabulary, index_trees, num_nodes, read_trees, synthetic_treebank
from jedbatch.models import tree

NUM_LABELS = 5


TREES = "a treebank, one bracketed tree a line (may be .gz); synthetic trees by default"


def options(doc: str | None, data: str = TREES) -> argparse.ArgumentParser:
    """The options every benchmark has; `doc` is the docstring of its module."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="FILE", help=data)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    return parser


def numbers(text: str) -> list[int]:
    """Reads an option such as `64,256`."""
    return [int(part) for part in text.split(",")]


# --- trees and the model ---


class Treebank(NamedTuple):
    """Trees `(label, word)` or `(label, left, right)` of integers, and how many words there are."""

    trees: list[Any]
    num_words: int


def load_trees(path: str | None, count: int) -> Treebank:
    """The first `count` trees of a treebank, or synthetic ones, without repetitions.

    Trees that repeat are left out, so that unseen means unseen. The labels of a treebank are taken
    modulo five: which they are makes no difference to the time, how many there are does.
    """
    if path is None:
        trees = list(dict.fromkeys(synthetic_treebank(count + count // 20 + 10)))
        return Treebank(trees[:count], 500)
    raw = list(dict.fromkeys(read_trees(path)))
    if len(raw) < count:
        raise SystemExit(f"{path} holds {len(raw)} different trees; these options need {count}")
    words = Vocabulary()
    indexed = index_trees(raw[:count], words, Vocabulary())
    return Treebank([_few_labels(t) for t in indexed], len(words))


def _few_labels(root: Any) -> Any:
    label, *rest = root
    if len(rest) == 1:
        return label % NUM_LABELS, rest[0]
    return label % NUM_LABELS, _few_labels(rest[0]), _few_labels(rest[1])


def chunks(trees: Sequence[Any], size: int) -> list[list[Any]]:
    """Consecutive minibatches of equal size; what is left over is left out."""
    return [list(trees[i : i + size]) for i in range(0, len(trees) - size + 1, size)]


def typical(minibatches: Sequence[list[Any]]) -> list[Any]:
    """The minibatch with the median number of nodes."""
    by_size = sorted(minibatches, key=lambda trees: sum(map(num_nodes, trees)))
    return by_size[len(by_size) // 2]


def model(num_words: int, hidden: int) -> tuple[tree.Cells, Any]:
    """The cells of a TreeLSTM and its parameters."""
    cells = tree.plain_cells(num_words, NUM_LABELS, hidden)
    return cells, cells.init(jax.random.key(0))


class Compiled(NamedTuple):
    """Jit-compiled functions of (params, x)."""

    infer: Callable[[Any, Any], Any]
    train: Callable[[Any, Any], Any]


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled with the options that jedbatch compiles with, as all sides are."""
    return jax.jit(fn, compiler_options=jedbatch.compiler_options())


def compiled(loss: Callable[[Any, Any], Any]) -> Compiled:
    """A loss and its value and gradient, jit-compiled."""
    return Compiled(jit(loss), jit(jax.value_and_grad(loss)))


def batched_loss(score: jedbatch.Batched) -> Callable[[Any, jedbatch.Plan], Any]:
    """The loss of a planned minibatch."""
    return lambda params, plan: score.apply(params, plan)[:, 0].sum()


# --- timing ---


class Times(NamedTuple):
    """Seconds of repeated runs of several functions [functions, repeats]."""

    seconds: np.ndarray

    def median(self, index: int = 0) -> float:
        """The median seconds of a function."""
        return float(np.median(self.seconds[index]))

    def ratio(self, index: int, base: int = 0) -> str:
        """Ratio of medians, with the quartiles of the ratios of neighbouring runs."""
        low, high = np.percentile(self.seconds[index] / self.seconds[base], [25, 75])
        return f"{self.median(index) / self.median(base):.2f} ({low:.2f}–{high:.2f})"


def with_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradient of the sum of a function of parameters and something else."""
    return jax.value_and_grad(lambda params, x: fn(params, x).sum())


def interleaved(
    functions: Sequence[Callable[[], Any]],
    budget: float,
    least: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Times functions in turns, so that whatever else the machine does hits all alike.

    Args:
      functions: each is run twice to warm up.
      budget: seconds to spend.
      least: rounds to make even if the budget is spent.
      clock: `time.process_time` for seconds of CPU, which other work on the machine hardly changes.
    """
    for run in [*functions, *functions]:
        jax.block_until_ready(run())
    rounds: list[list[float]] = []
    end = time.perf_counter() + budget
    while len(rounds) < least or (time.perf_counter() < end and len(rounds) < 3000):
        found = [0.0] * len(functions)
        for i in range(len(functions)):
            i = (i + len(rounds)) % len(functions)  # none always follows the same neighbour
            found[i] = seconds(functions[i], clock)
        rounds.append(found)
    return Times(np.array(rounds).T)


def seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run, until its results are there."""
    start = clock()
    jax.block_until_ready(run())
    return clock() - start


def spread(values: Sequence[float] | np.ndarray, scale: float = 1.0, digits: int = 2) -> str:
    """Median and quartiles, as in `1.20 (1.10–1.31)`."""
    low, middle, high = np.percentile(np.asarray(values) * scale, [25, 50, 75])
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def limit_threads(threads: int) -> None:
    """Keeps to some cores. Before JAX first computes something, or its threads are there."""
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("`--threads` needs an operating system that can pin a process to cores")
    if threads == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        raise SystemExit(f"--threads {threads}: this process may use {len(cores)} cores")
    os.sched_setaffinity(0, cores[-threads:])


# --- printing ---


def machine() -> str:
    """The machine and the versions, in one line."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    pages = "; huge pages" if "malloc.hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "") else ""
    return (
        f"{name}, {cores} cores used of {os.cpu_count()}, device {device.device_kind}; "
        f"Python {platform.python_version()}, JAX {jax.__version__}, NumPy {np.__version__}, "
        f"jedbatch {jedbatch.__version__}{pages}"
    )


def source(path: str | None) -> str:
    """The trees, in words."""
    return f"trees of {Path(path).name}" if path else "synthetic trees"


class Table:
    """A Markdown table that prints each row as soon as it is known."""

    def __init__(self, *header: str):
        print()
        self.row(*header)
        self.row(*["---"] + ["---:"] * (len(header) - 1))

    def row(self, *cells: Any) -> None:
        """Prints a row."""
        print("|", " | ".join(map(str, cells)), "|", flush=True)


def by(options: Iterable[int], more: Iterable[int]) -> list[tuple[int, int]]:
    """Returns all pairs, the first changing slowest."""
    more = list(more)
    return [(a, b) for a in options for b in more]
