"""Does running only the rows that exist beat padding?

The Transformer of `encoder.py`, 4 layers with heads of 32, on sentences of 3 to 125 words, 25 on
average. Inference computes the scores of all sentences, training their mean loss and its gradient.

longest     a mask, and minibatches padded to their longest sentence: compiled for every length
            that is the longest of a minibatch.
buckets     the same, with the sentences of an epoch sorted by length before they are cut into
            minibatches, each padded to the next power of two (8 at least).
eights      sorted as well, padded to the next multiple of 8: fewer rows, more to compile.
loop        sentence by sentence, jit-compiled for every length; gradients are added in place.
jedbatch    `jedbatch.batch` of the function of one sentence, which has no mask; minibatches as
            they come. Inference is `plan` and `apply`, training `plan` and a jit-compiled step.

All compute the same from the same parameters, which is compared with the loop before anything is
timed. Times are of whole minibatches, from a list of NumPy arrays until results are there: padding,
planning and transfer count. They are minibatches of an epoch, evenly spaced in order of size, run
before so that nothing is compiled any more; the loop is timed on a few sentences, chosen alike. All
run in turns. `jedbatch µs` is the median time per sentence, `NAME ×` how many times
as long NAME takes: above 1, jedbatch is faster (ratios of medians, and in brackets the quartiles of
the ratios of neighbouring runs).

`rows` are rows computed over rows that exist, in an epoch. `compiled` is what an epoch compiles:
distinct shapes, and XLA programs of jedbatch, in brackets those after the first 8 minibatches.
"""

import argparse
import functools
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common
from benchmarks.questions.compile import Counted
from benchmarks.rivals import encoder
from benchmarks.rivals.encoder import Params, Sentence
from jedbatch.data import read_tagged

MODES = ["inference", "training"]
FILE = "wikiner.jsonl.gz"
WARM_UP = 8  # minibatches that may compile
MIN_MINIBATCHES = 4  # minibatches to time, whatever their size

Minibatch = list[Sentence]
Run = Callable[[Params, Minibatch], Any]  # to scores, or to mean loss and its gradient


# --- data ---


def load(path: str | None, count: int, seed: int) -> list[Sentence]:
    """Sentences of a file in random order; or random words, and lengths like those of texts."""
    rng = np.random.default_rng(seed)
    if path is None:
        lengths = np.rint(rng.lognormal(np.log(23), 0.41, count)).clip(3, 125).astype(int)
        words = [rng.integers(0, encoder.VOCABULARY, n, np.int32) for n in lengths]
        return [(w, rng.integers(0, encoder.CLASSES, dtype=np.int32)) for w in words]
    found = [words for words, _ in read_tagged(path) if len(words) <= encoder.POSITIONS]
    if len(found) < count:
        raise SystemExit(f"{path} holds {len(found)} sentences; these options need {count}")
    return [hashed(found[i]) for i in rng.permutation(len(found))[:count]]


def hashed(words: Sequence[str]) -> Sentence:
    """Numbers for the words and for a label, which follow from their letters alone."""
    numbers = [zlib.crc32(word.encode()) for word in words]
    label = np.int32(sum(numbers) % encoder.CLASSES)
    return np.array([n % encoder.VOCABULARY for n in numbers], np.int32), label


def rows(minibatch: Minibatch) -> int:
    """Returns the number of words."""
    return sum(len(words) for words, _ in minibatch)


# --- the other sides ---


def longest(minibatch: Minibatch) -> int:
    return max(len(words) for words, _ in minibatch)


def power(minibatch: Minibatch) -> int:
    """The next power of two."""
    return max(8, 1 << (longest(minibatch) - 1).bit_length())


def multiple(minibatch: Minibatch) -> int:
    """The next multiple of 8."""
    return -(-longest(minibatch) // 8) * 8


WIDTHS = {"longest": longest, "buckets": power, "eights": multiple}


@functools.cache
def by_padding(mode: str, width: Callable[[Minibatch], int]) -> Run:
    """Pads minibatches to a width that follows from their sentences."""
    padded = {
        "inference": encoder.padded_scores,
        "training": jax.value_and_grad(encoder.padded_loss),
    }
    run = jax.jit(padded[mode])
    return lambda params, batch: run(params, encoder.Padded.of(batch, width(batch)))


@functools.cache
def by_loop(mode: str) -> Run:
    """Sentence by sentence."""
    if mode == "inference":
        one = jax.jit(encoder.scores)
        return lambda params, minibatch: [one(params, words) for words, _ in minibatch]

    @functools.partial(jax.jit, donate_argnums=1)
    def add(params: Params, total: Any, sentence: Sentence) -> Any:
        found = jax.value_and_grad(encoder.loss)(params, sentence)
        return jax.tree.map(jnp.add, total, found)

    zeros = jax.jit(lambda params: (0.0, jax.tree.map(jnp.zeros_like, params)))
    divide = jax.jit(lambda total, count: jax.tree.map(lambda x: x / count, total))

    def run(params: Params, minibatch: Minibatch) -> Any:
        total = zeros(params)
        for sentence in minibatch:
            total = add(params, total, sentence)
        return divide(total, float(len(minibatch)))

    return run


# --- our side ---


class Ours:
    """jedbatch, counting what it compiles."""

    def __init__(self, mode: str):
        self.training = mode == "training"
        self.batched = jedbatch.batch(encoder.loss if self.training else encoder.scores)
        self.step = Counted(jax.value_and_grad(lambda p, plan: self.batched.apply(p, plan).mean()))

    def plan(self, params: Params, minibatch: Minibatch) -> jedbatch.Plan:
        """The host's half."""
        if self.training:
            return self.batched.plan(params, minibatch)
        return self.batched.plan(params, [words for words, _ in minibatch], gradient=False)

    def apply(self, params: Params, plan: jedbatch.Plan) -> Any:
        """The device's half."""
        return self.step.run(params, plan) if self.training else self.batched.apply(params, plan)

    def __call__(self, params: Params, minibatch: Minibatch) -> Any:
        """Both."""
        return self.apply(params, self.plan(params, minibatch))

    def epoch(self, params: Params, minibatches: list[Minibatch]) -> dict[str, Any]:
        """Runs all once: what is compiled for them, and rows computed over rows that exist."""
        programs, computed = [], []
        for minibatch in minibatches:
            plan = self.plan(params, minibatch)
            jax.block_until_ready(self.apply(params, plan))
            programs.append(self.batched.compilations + self.step.traces)
            computed.append(rows_computed(plan))
        late = programs[-1] - programs[min(WARM_UP, len(programs)) - 1]
        ratio = None if None in computed else sum(computed) / sum(map(rows, minibatches))
        return {"rows": ratio, "compiled": programs[-1], "compiled late": late}


def rows_computed(plan: jedbatch.Plan) -> int | None:
    """Rows that a plan computes, including those of no instance; None if it does not say."""
    found = getattr(plan, "ragged_rows", None)  # (computed, existing)
    return None if found is None else int(found[0])


# --- the comparison ---


def check(mode: str, params: Params, minibatch: Minibatch) -> None:
    """Raises unless all compute what the loop computes."""
    sides: dict[str, Run] = {name: by_padding(mode, width) for name, width in WIDTHS.items()}
    sides["jedbatch"] = Ours(mode)

    def close(got: Any, expected: Any, name: str) -> None:
        largest = float(np.abs(expected).max())
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * largest, err_msg=name)

    with jax.default_matmul_precision("highest"):  # else accelerators round
        expected = by_loop(mode)(params, minibatch)
        expected = np.stack(expected) if mode == "inference" else expected
        for name, run in sides.items():
            jax.tree.map(functools.partial(close, name=name), run(params, minibatch), expected)


class Side(NamedTuple):
    """A way to compute, its minibatches, and the number of rows that it computes for each."""

    run: Run
    minibatches: list[Minibatch]
    rows: Callable[[Minibatch], int] = rows

    def counts(self) -> dict[str, Any]:
        """Rows computed over rows that exist, and distinct shapes."""
        computed = list(map(self.rows, self.minibatches))
        ratio = sum(computed) / sum(map(rows, self.minibatches))
        return {"rows": ratio, "compiled": len(set(computed))}

    def sample(self, count: int) -> list[Minibatch]:
        """So many of the minibatches, evenly spaced in order of size."""
        count = min(count, len(self.minibatches))
        ordered = sorted(self.minibatches, key=self.rows)
        return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def sides_of(mode: str, sentences: list[Sentence], size: int) -> dict[str, Side]:
    """Returns all sides, ours first."""
    mixed = common.chunks(sentences, size)
    similar = common.chunks(sorted(sentences, key=lambda s: len(s[0])), size)
    sides = {"jedbatch": Side(Ours(mode), mixed)}
    for name, width in WIDTHS.items():
        minibatches = mixed if name == "longest" else similar
        padded = lambda minibatch, width=width: size * width(minibatch)  # noqa: E731
        sides[name] = Side(by_padding(mode, width), minibatches, padded)
    sides["loop"] = Side(by_loop(mode), common.chunks(sentences, 1))
    return sides


def measure(
    mode: str, params: Params, size: int, sentences: list[Sentence], args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the measurements of every side."""
    sides = sides_of(mode, sentences[: len(sentences) // size * size], size)
    ours, *others = sides
    found = {ours: sides[ours].run.epoch(params, sides[ours].minibatches)}
    found |= {name: sides[name].counts() for name in others}

    count = max(MIN_MINIBATCHES, args.sentences // size)
    timed = {name: side.sample(count) for name, side in sides.items()}
    timed["loop"] = [[s for [s] in sides["loop"].sample(args.few)]]  # one minibatch

    def run(name: str) -> None:
        for minibatch in timed[name]:
            jax.block_until_ready(sides[name].run(params, minibatch))

    times = common.interleaved([functools.partial(run, name) for name in sides], 0, args.repeat)
    times.seconds[:] /= [[sum(map(len, timed[name]))] for name in sides]
    for i, name in enumerate(sides):
        found[name] |= {"seconds": times.seconds[i].tolist(), "ratio": times.ratio(i)}
    return found


HEADER = ["", "hidden", "batch", "jedbatch µs", *(f"{name} ×" for name in [*WIDTHS, "loop"])]
HEADER += ["rows: longest", "buckets", "eights", "jedbatch"]
HEADER += ["compiled: longest", "buckets", "eights", "loop", "jedbatch"]


def cells(sides: dict[str, Any]) -> list[Any]:
    """Returns the cells of a row of the table."""
    ours, *others = sides.values()
    return [
        f"{1e6 * np.median(ours['seconds']):.0f}",
        *(side["ratio"] for side in others),
        *(f"{side['rows']:.2f}" for side in others[:-1]),
        "–" if ours["rows"] is None else f"{ours['rows']:.2f}",
        *(side["compiled"] for side in others),
        f"{ours['compiled']} ({ours['compiled late']})",
    ]


def options() -> argparse.ArgumentParser:
    tagged = f"sentences with tags, one JSON object a line, or a directory that holds {FILE}"
    parser = common.options(__doc__, data=f"{tagged}; synthetic ones by default")
    parser.add_argument("--hidden", type=common.numbers, default=[128, 256], help="such as 64,256")
    parser.add_argument("--batch", type=common.numbers, default=[8, 64, 256], help="such as 8,64")
    parser.add_argument("--layers", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--epoch", type=int, default=1024, help="sentences (%(default)s)")
    parser.add_argument("--sentences", type=int, default=256, help="to time, about (%(default)s)")
    parser.add_argument("--few", type=int, default=64, help="that the loop runs (%(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="rounds to time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sentences (%(default)s)")
    parser.add_argument("--json", metavar="PATH", type=Path, help="for all numbers, times too")
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.layers = [64], [8], 1
        args.epoch, args.sentences, args.few, args.repeat = 16, 16, 4, 3
    if args.epoch < max(args.batch):
        parser.error(f"--epoch {args.epoch}: expected as many sentences as a minibatch has")
    if args.data and Path(args.data).is_dir():
        args.data = f"{args.data}/{FILE}"
    sentences = load(args.data, args.epoch, args.seed)
    report = {"machine": common.machine(), "options": vars(args), "rows": []}
    source = Path(args.data).name if args.data else "synthetic"
    print(report["machine"], f"{source}, {len(sentences)} sentences", sep="\n")
    table = common.Table(*HEADER)
    for mode in args.modes:
        for hidden in args.hidden:
            params = encoder.parameters(hidden, args.layers)
            check(mode, params, sentences[:4])
            for size in args.batch:
                sides = measure(mode, params, size, sentences, args)
                table.row(mode, hidden, size, *cells(sides))
                report["rows"].append({"mode": mode, "hidden": hidden, "batch": size} | sides)
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1, default=str))
            jax.clear_caches()


if __name__ == "__main__":
    main()
