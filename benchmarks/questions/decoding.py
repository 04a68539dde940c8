"""Greedy decoding: how fast, if every sentence ends by itself?

An LSTM encoder reads a sentence; an LSTM decoder writes words, each the best by its score, until it
writes END. Sizes of embeddings and states are `hidden`. With x a word's embedding:

    encoder   g = E_x x + E_h h + b                      for every word of the source
    decoder   g = D_x x + D_h h + b, scores = h V        for every word written
    both      [i; f; o; u] = g, c = σ(f) c + σ(i) tanh u, h = σ(o) tanh c

E_x x is computed apart, since it waits for nothing. The result of a sentence is the sum of the
log-probabilities of its words, and their number.

Weights are random, and random weights do not know where a translation ends. So END is forbidden
before the length of the reference translation and wins there: the decoder adds ∓10⁹ to its score,
by a number that comes with the sentence. What is computed for each word stays what it is; only the
lengths are those of real translations.

padded      `jax.vmap` of a program for one sentence, jit-compiled: a `lax.scan` over the source,
            padded to the next multiple of 16 words above the longest (each multiple is compiled
            once), with a mask that keeps states; E_x x as one product before it; a
            `lax.while_loop` for the decoder, which `vmap` runs until all sentences have ended.
loop        Python, sentence by sentence: jit-compiled cells, one for a word read and one for a
            word written, and `int()` of every word to see whether it is END.
jedbatch    `jedbatch.batch` of the same function of one sentence.
with lax    The same with a decoder that is one cell with a `lax.while_loop` in it, which does not
            run in lock step.

Results of all are compared with the loop's before anything is timed. All run in turns in one
process, each warmed up; the table has milliseconds per minibatch, medians, and in brackets the
quartiles of the ratios of neighbouring runs. The loop is timed on a few sentences, and scaled up
by numbers of words.

Rows are runs of the decoder on one word of one sentence: those needed, and those that run when all
sentences go on until the longest has ended. Minibatches are `mixed`, as the sentences come, or of
`similar` length: sorted by the length of the source, as is usual in training. `compiled` counts
what XLA compiles for minibatches never seen before, after the first ten.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch.data import read_translations

END, UNKNOWN, START = 0, 1, 2
FIRST_WORD = 3
SOURCE_MULTIPLE = 16  # sources are padded to a multiple of this
MAX_WORDS = 150  # of a translation; more than any reference has
FORBIDDEN = 1e9
WARM_UP = 10  # minibatches of which compilations do not count

Sentence = tuple[tuple[int, ...], int]  # words of the source, length of the translation


# --- data ---


def load(path: str | None, count: int, num_words: int) -> list[Sentence]:
    """Sentences: the most frequent words have numbers, all others are unknown."""
    if path is None:
        return synthetic(count, num_words)
    pairs = read_translations(path)
    if len(pairs) < count:
        raise SystemExit(f"{path} holds {len(pairs)} sentences; these options need {count}")
    frequent = Counter(word for source, _ in pairs for word in source)
    numbers = {w: FIRST_WORD + i for i, (w, _) in enumerate(frequent.most_common(num_words))}
    pairs = pairs[:count]
    return [
        (tuple(numbers.get(word, UNKNOWN) for word in source), len(target) + 1)
        for source, target in pairs
    ]


def synthetic(count: int, num_words: int) -> list[Sentence]:
    """Lengths like those of talks: 19 words on average, 5 % above 43; translations 1.24 times."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(2.2, 8.8, count), 2, 100).astype(int)
    stretched = np.clip(lengths * rng.normal(1.24, 0.2, count), 2, MAX_WORDS - 2).astype(int) + 1
    words = [rng.integers(FIRST_WORD, FIRST_WORD + num_words, n).tolist() for n in lengths]
    return [(tuple(w), int(n)) for w, n in zip(words, stretched, strict=True)]


def by_length(sentences: Iterable[Sentence]) -> list[Sentence]:
    """Sorted by the length of the source."""
    return sorted(sentences, key=lambda s: len(s[0]))


# --- the model ---


def parameters(num_words: int, hidden: int) -> dict[str, jax.Array]:
    shapes = {
        "source": (FIRST_WORD + num_words, hidden),
        "target": (FIRST_WORD + num_words, hidden),
        "encode_x": (hidden, 4 * hidden),
        "encode_h": (hidden, 4 * hidden),
        "decode": (2 * hidden, 4 * hidden),
        "scores": (hidden, FIRST_WORD + num_words),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape) / np.sqrt(hidden if name[0] in "ed" else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"encode_b": jnp.zeros(4 * hidden), "decode_b": jnp.zeros(4 * hidden)}


State = tuple[jax.Array, jax.Array]  # (h, c)


def lstm(gates: jax.Array, c: jax.Array) -> State:
    i, f, o, u = jnp.split(gates, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def embed(params: Any, word: jax.Array) -> jax.Array:
    """Returns the part of the gates that depends on a word of the source."""
    return params["source"][word] @ params["encode_x"] + params["encode_b"]


def encode(params: Any, state: State, gates: jax.Array) -> State:
    """The state after a word."""
    h, c = state
    return lstm(gates + h @ params["encode_h"], c)


def decode(params: Any, state: State, word: Any, total: Any, left: Any) -> tuple:
    """(state, next word, log-probabilities so far); no END while more than one word is left."""
    h, c = state
    both = jnp.concatenate([params["target"][word], h])
    state = lstm(both @ params["decode"] + params["decode_b"], c)
    scores = state[0] @ params["scores"]
    allowed = jnp.where(left > 1, -FORBIDDEN, FORBIDDEN)
    best = jnp.argmax(scores.at[END].add(allowed))
    return state, best, total + jax.nn.log_softmax(scores)[best]


class Cells(NamedTuple):
    """The parts; `read` is `embed` and `encode` in one."""

    embed: Callable
    encode: Callable
    decode: Callable


def translator(cells: Cells, hidden: int) -> Callable[[Any, Sentence], tuple]:
    """A function of (params, sentence): (log-probability, number of words)."""

    def translate(params: Any, sentence: Sentence) -> tuple:
        source, length = sentence
        state = jnp.zeros(hidden), jnp.zeros(hidden)
        for word in source:
            state = cells.encode(params, state, cells.embed(params, word))
        word, total, written = START, 0.0, 0
        while word != END and written < MAX_WORDS:
            state, best, total = cells.decode(params, state, word, total, length - written)
            word = int(best)
            written += 1
        return total, written

    return translate


def write_all(params: Any, state: State, length: Any) -> tuple:
    """(log-probability, number of words) of a translation, by a loop of `lax`."""

    def goes_on(carry: tuple) -> jax.Array:
        _, word, _, written = carry
        return (word != END) & (written < MAX_WORDS)

    def write(carry: tuple) -> tuple:
        state, word, total, written = carry
        state, word, total = decode(params, state, word, total, length - written)
        return state, word, total, written + 1

    start = (state, jnp.int32(START), jnp.float32(0), jnp.int32(0))
    _, _, total, written = jax.lax.while_loop(goes_on, write, start)
    return total, written


def with_lax(hidden: int) -> Callable[[Any, Sentence], tuple]:
    """The translator whose decoder is a cell with a loop in it."""
    cells = [jedbatch.cell(f, name=f.__name__) for f in (embed, encode, write_all)]

    def translate(params: Any, sentence: Sentence) -> tuple:
        source, length = sentence
        state = jnp.zeros(hidden), jnp.zeros(hidden)
        for word in source:
            state = cells[1](params, state, cells[0](params, word))
        return cells[2](params, state, length)

    return translate


def looped(hidden: int) -> Callable[[Any, list[Sentence]], list]:
    """Sentence by sentence, one call of a compiled function for every word."""
    read = jax.jit(lambda params, state, word: encode(params, state, embed(params, word)))
    cells = Cells(lambda _, word: word, read, jax.jit(decode))
    translate = translator(cells, hidden)
    return lambda params, sentences: [translate(params, s) for s in sentences]


# --- padded ---


def padded(hidden: int) -> tuple[Callable[[Any, list[Sentence]], tuple], Callable]:
    """(the run of a minibatch, the jit-compiled function)."""

    def one(params: Any, source: jax.Array, source_length: Any, length: Any) -> tuple:
        gates = jax.vmap(embed, (None, 0))(params, source)

        def read(state: State, x: tuple) -> tuple:
            position, g = x
            new = encode(params, state, g)
            keep = position < source_length
            return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state), None

        zeros = jnp.zeros(hidden), jnp.zeros(hidden)
        state, _ = jax.lax.scan(read, zeros, (jnp.arange(len(source)), gates))

        return write_all(params, state, length)

    compiled = jax.jit(jax.vmap(one, (None, 0, 0, 0)))

    def run(params: Any, sentences: list[Sentence]) -> tuple:
        longest = max(len(source) for source, _ in sentences)
        width = -(-longest // SOURCE_MULTIPLE) * SOURCE_MULTIPLE
        words = np.zeros((len(sentences), width), np.int32)
        for row, (source, _) in zip(words, sentences, strict=True):
            row[: len(source)] = source
        lengths = np.array([(len(source), length) for source, length in sentences], np.int32)
        return compiled(params, words, lengths[:, 0], lengths[:, 1])

    return run, compiled


# --- the comparison ---


def check(expected: list, results: tuple, name: str) -> None:
    """Raises unless the results are the loop's."""
    totals, written = (np.array([r[k] for r in expected]) for k in range(2))
    np.testing.assert_array_equal(np.asarray(results[1]), written, err_msg=name)
    np.testing.assert_allclose(np.asarray(results[0]), totals, rtol=2e-4, err_msg=name)


def typical(minibatches: list[list[Sentence]]) -> list[Sentence]:
    """The minibatch whose translations have the median number of words."""
    by_size = sorted(minibatches, key=lambda batch: sum(length for _, length in batch))
    return by_size[len(by_size) // 2]


def measure(
    table: common.Table, sentences: list[Sentence], kind: str, args: Any, hidden: int, size: int
) -> None:
    """Prints a row."""
    params = parameters(args.words, hidden)
    minibatches = common.chunks(sentences, size)
    if kind == "similar":
        minibatches = common.chunks(by_length(sentences), size)
        np.random.default_rng(0).shuffle(minibatches)
    minibatches = minibatches[: WARM_UP + args.minibatches]
    loop = looped(hidden)
    run_padded, compiled = padded(hidden)
    sides = [lambda batch: run_padded(params, batch)]
    if not args.baselines:
        cells = Cells(*(jedbatch.cell(f, name=f.__name__) for f in (embed, encode, decode)))
        batched = jedbatch.batch(translator(cells, hidden))
        sides.append(lambda batch: batched(params, batch))
        lax_batched = jedbatch.batch(with_lax(hidden))
        sides.append(lambda batch: lax_batched(params, batch))

    minibatch = typical(minibatches)
    few = minibatch[: args.few]
    expected = loop(params, few)
    for name, side in zip(["padded", "jedbatch", "with lax"], sides, strict=False):
        check(expected, jax.tree.map(lambda x: x[: len(few)], side(minibatch)), name)

    counts = [0, 0]
    for batch in minibatches[:WARM_UP]:
        jax.block_until_ready([side(batch) for side in sides])
    before = [compiled._cache_size()]
    if not args.baselines:
        before.append(batched.compilations + lax_batched.compilations)
    for batch in minibatches[WARM_UP:]:
        jax.block_until_ready([side(batch) for side in sides])
    counts = [compiled._cache_size() - before[0]]
    if not args.baselines:
        counts.append(batched.compilations + lax_batched.compilations - before[1])

    runs = [lambda: loop(params, few), *(lambda side=side: side(minibatch) for side in sides)]
    times = common.interleaved(runs, args.seconds, least=5)
    words = [sum(len(source) + length for source, length in part) for part in (few, minibatch)]
    times.seconds[0] *= words[1] / words[0]
    lengths = [length for _, length in minibatch]
    needed, when_padded = sum(lengths), size * max(lengths)
    row = [kind, hidden, size, needed, f"{when_padded} ({when_padded / needed:.2f})"]
    row += [f"{1e3 * times.median(i):.1f}" for i in range(len(runs))]
    row += [times.ratio(2, 1), times.ratio(2, 0)] if not args.baselines else []
    if not args.baselines:
        rounds = batched.last_rounds
        lanes, nodes = sum(r.lanes for r in rounds), sum(r.nodes for r in rounds)
        row += [len(rounds), f"{lanes / nodes:.2f}", times.ratio(1, 3)]
    table.row(*row, *counts)
    jax.clear_caches()


def options() -> argparse.ArgumentParser:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[128, 256], help="such as 64,256")
    parser.add_argument("--batch", type=common.numbers, default=[8, 64], help="such as 1,64")
    parser.add_argument("--words", type=int, default=2000, help="of each language (%(default)s)")
    parser.add_argument("--few", type=int, default=8, help="sentences the loop runs (%(default)s)")
    parser.add_argument("--minibatches", type=int, default=10, help="unseen ones (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="per row (%(default)s)")
    parser.add_argument("--baselines", action="store_true", help="time the other sides only")
    return parser


def main() -> None:
    args = options().parse_args()
    if args.quick:
        args.hidden, args.batch, args.words, args.seconds = [16], [4], 50, 0.2
        args.few, args.minibatches = 2, 2
    print(common.machine())
    count = max(args.batch) * (WARM_UP + args.minibatches)
    sentences = load(args.data, count, args.words)
    print(f"{Path(args.data).name if args.data else 'synthetic pairs'}, {args.words} words")
    header = ["minibatches", "hidden", "batch", "rows", "rows padded", "loop ms", "padded ms"]
    more = ["compiled: padded"]
    if not args.baselines:
        header += ["jedbatch ms", "with lax ms", "jedbatch / padded", "jedbatch / loop", "rounds"]
        header += ["lanes / nodes", "padded / with lax"]
        more.append("jedbatch")
    table = common.Table(*header, *more)
    for kind in ("mixed", "similar"):
        for hidden, size in common.by(args.hidden, args.batch):
            measure(table, sentences, kind, args, hidden, size)


if __name__ == "__main__":
    main()
