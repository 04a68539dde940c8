"""Does filling the chart of every sentence at its own size beat padding?

The inside algorithm of a grammar with `--nonterminals` symbols (`rivals/inside.py`), on minibatches
of `--batch` sentences of `--shortest` to `--longest` random words. Work grows with the cube of a
length. Inference computes the logarithms of the probabilities, training their sum and its gradient.

jedbatch    `jedbatch.batch` of the function of one sentence, minibatches as they come; planning
            counts.
longest     `jax.vmap` of the same code, every minibatch padded to the longest sentence there can
            be, so that it is compiled once.
buckets     the same, with the sentences of all minibatches sorted by length before they are cut
            into minibatches, each padded to the next multiple of 8: compiled for each of these.

All are compared on the first minibatch before anything is timed, and run before on minibatches
like those timed. They run in turns. `ms` is the median time of a minibatch of jedbatch, `NAME ×`
how many times as long NAME takes: above 1, jedbatch is faster (ratios of medians, and in brackets
the quartiles of the ratios of neighbouring runs). `compiled` are XLA programs of jedbatch, in
brackets those after the first minibatch, over `--unseen` more.
"""

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common
from benchmarks.questions.compile import Counted
from benchmarks.rivals import inside

MODES = ["inference", "training"]
VOCABULARY = 500

Minibatch = list[np.ndarray]


def minibatches(count: int, size: int, shortest: int, longest: int) -> list[Minibatch]:
    """Random sentences of random lengths."""
    rng = np.random.default_rng(0)
    return [
        [
            rng.integers(0, VOCABULARY, n).astype(np.int32)
            for n in rng.integers(shortest, longest + 1, size)
        ]
        for _ in range(count)
    ]


def padded(minibatch: Minibatch, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int32[sentences, width], their lengths)."""
    words = np.zeros((len(minibatch), width), np.int32)
    for row, sentence in zip(words, minibatch, strict=True):
        row[: len(sentence)] = sentence
    return words, np.array([len(sentence) for sentence in minibatch], np.int32)


def by_padding(training: bool, width: Callable[[Minibatch], int]) -> Callable[..., Any]:
    """Returns a function of parameters and a minibatch, which it pads to a width."""
    scores = jax.vmap(inside.padded_log_likelihood, (None, 0, 0))
    run: Callable[..., Any] = scores
    if training:
        run = jax.value_and_grad(lambda p, words, lengths: scores(p, words, lengths).sum())
    compiled = jax.jit(run)
    return lambda params, minibatch: compiled(params, *padded(minibatch, width(minibatch)))


class Ours:
    """jedbatch, counting what it compiles."""

    def __init__(self, training: bool):
        self.batched = jedbatch.batch(inside.log_likelihood)
        self.training = training
        run: Callable[..., Any] = self.batched.apply
        if training:
            run = jax.value_and_grad(lambda p, plan: self.batched.apply(p, plan).sum())
        self.step = Counted(run)

    def __call__(self, params: inside.Params, minibatch: Minibatch) -> Any:
        """Plans and runs a minibatch."""
        plan = self.batched.plan(params, minibatch, gradient=self.training)
        return self.step.run(params, plan)

    @property
    def compiled(self) -> int:
        """Programs, and traces of the step around them."""
        return self.batched.compilations + self.step.traces


def next_multiple(minibatch: Minibatch) -> int:
    """The next multiple of 8."""
    return -(-max(map(len, minibatch)) // 8) * 8


def close(found: Any, expected: Any) -> None:
    """Raises unless two results agree."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(np.abs(b).max()))


def measure(mode: str, k: int, args: Any) -> list[Any]:
    """Returns the cells of a row: ms, ratios and programs."""
    params = inside.parameters(VOCABULARY, k)
    drawn = minibatches(args.timed + args.unseen + 1, args.batch, args.shortest, args.longest)
    timed, unseen = drawn[: args.timed + 1], drawn[args.timed + 1 :]
    training = mode == "training"
    ours = Ours(training)
    longest = by_padding(training, lambda _: args.longest)
    buckets = by_padding(training, next_multiple)
    close(ours(params, timed[0]), longest(params, timed[0]))
    first = ours.compiled
    by_length = sorted((s for m in timed[1:] for s in m), key=len)
    sorted_batches = common.chunks(by_length, args.batch)

    def run(side: Callable[..., Any], batches: list[Minibatch]) -> None:
        for minibatch in batches:
            jax.block_until_ready(side(params, minibatch))

    sides = [(ours, timed[1:]), (longest, timed[1:]), (buckets, sorted_batches)]
    times = common.interleaved([functools.partial(run, *side) for side in sides], 0, args.repeat)
    for minibatch in unseen:
        jax.block_until_ready(ours(params, minibatch))
    late = f"{ours.compiled} ({ours.compiled - first})"
    return [f"{1e3 * times.median() / args.timed:.0f}", times.ratio(1), times.ratio(2), late]


def main() -> None:
    parser = common.options(__doc__, data="not used: sentences are random words")
    parser.add_argument("--nonterminals", type=common.numbers, default=[16], help="such as 8,16")
    parser.add_argument("--batch", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--shortest", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--longest", type=int, default=60, help="(default %(default)s)")
    parser.add_argument("--timed", type=int, default=2, help="minibatches (default %(default)s)")
    parser.add_argument("--unseen", type=int, default=8, help="minibatches (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds to time (%(default)s)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--csv", metavar="PATH", type=Path, help="for the table")
    args = parser.parse_args()
    if args.quick:
        args.nonterminals, args.batch, args.longest = [2], 4, 7
        args.timed, args.unseen, args.repeat = 1, 1, 2
    print(common.machine())
    header = ["", "nonterminals", "ms", "longest ×", "buckets ×", "compiled"]
    table, rows = common.Table(*header), []
    for mode in args.modes:
        for k in args.nonterminals:
            rows.append([mode, k, *measure(mode, k, args)])
            table.row(*rows[-1])
            if args.csv:
                with args.csv.open("w", newline="") as file:
                    csv.writer(file).writerows([["mode", *header[1:]], *rows])


if __name__ == "__main__":
    main()
