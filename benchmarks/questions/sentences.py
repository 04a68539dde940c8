"""Do sentences cost the same, however they come?

A function of the tokens of one sentence: rows of a table, self-attention, a mean. The tokens are
arrays of NumPy, tuples or lists of ints that become arrays in the function, or words that it looks
up; or the function stacks rows that Python reads one by one. Every minibatch is new (16 sentences
of 3 to 40 words), called as a user calls the function.

first s         seconds of the first call, most of them for compiling.
all s           seconds of eight minibatches; `ratio` to those of arrays.
compiled        programs that minibatches after the second one compile.
plan ms         planning of an unseen minibatch of 64 sentences, the median of five.
run ms          running it.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common

WORDS = [f"word{k}" for k in range(500)]
VOCABULARY = {word: k for k, word in enumerate(WORDS)}
MINIBATCHES, WARM, UNSEEN = 8, 2, 5
SEEDS = itertools.count()


def score(params: Any, rows: Any) -> jax.Array:
    """The function of the rows of a sentence."""
    rows = jnp.tanh(rows @ params["W"])
    weights = jax.nn.softmax(rows @ rows.T / rows.shape[1] ** 0.5)
    return (weights @ rows).mean(0)


def look_up(words: Any) -> list[int]:
    """The numbers of words."""
    return [VOCABULARY[word] for word in words]


# How a sentence comes, given its tokens; and the rows of a table that the function makes of it.
Spelling = tuple[Callable[[np.ndarray], Any], Callable[[Any, Any], Any]]
SPELLINGS: dict[str, Spelling] = {
    "arrays of NumPy": (lambda x: x, lambda table, x: table[x]),
    "arrays, row by row": (lambda x: x, lambda table, x: jnp.stack([table[k] for k in x])),
    "rows of what is computed": (
        lambda x: x,
        lambda table, x: jnp.stack([2 * row for row in table[x] / 2]),
    ),
    "tuples, by jnp.array": (lambda x: tuple(x.tolist()), lambda table, x: table[jnp.array(x)]),
    "tuples, row by row": (
        lambda x: tuple(x.tolist()),
        lambda table, x: jnp.stack([table[k] for k in x]),
    ),
    "tuples, by np.array": (lambda x: tuple(x.tolist()), lambda table, x: table[np.array(x)]),
    "lists, by jnp.asarray": (lambda x: x.tolist(), lambda table, x: table[jnp.asarray(x)]),
    "tuples of words": (
        lambda x: tuple([WORDS[k] for k in x]),
        lambda table, words: table[jnp.array(look_up(words))],
    ),
    "strings": (
        lambda x: " ".join([WORDS[k] for k in x]),
        lambda table, text: table[jnp.array(look_up(text.split()))],
    ),
}


def sentences(make: Callable[[np.ndarray], Any], count: int) -> list[Any]:
    """Sentences that were never met before."""
    random = np.random.default_rng(next(SEEDS))
    return [make(random.integers(0, len(WORDS), n)) for n in random.integers(3, 41, count)]


def measure(name: str, params: Any, sizes: tuple[int, int]) -> tuple[list[Any], float]:
    """Returns (the row of a spelling without its ratio, seconds of all minibatches)."""
    make, rows = SPELLINGS[name]
    batched = jedbatch.batch(lambda params, x: score(params, rows(params["E"], x)))
    seconds, compiled = [], []
    for _ in range(MINIBATCHES):
        given = sentences(make, sizes[0])
        start = time.perf_counter()
        found = jax.block_until_ready(batched(params, given))
        seconds.append(time.perf_counter() - start)
        compiled.append(batched.compilations)
        expected = score(params, rows(params["E"], given[0]))
        np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-5)
    plans, runs = [], []
    for _ in range(UNSEEN):
        given = sentences(make, sizes[1])
        start = time.perf_counter()
        plan = batched.plan(params, given, gradient=False)
        plans.append(time.perf_counter() - start)
        run = common.interleaved([lambda plan=plan: batched.apply(params, plan)], 0.2)
        runs.append(run.median())
    row = [name, f"{seconds[0]:.1f}", f"{sum(seconds):.1f}", compiled[-1] - compiled[WARM - 1]]
    row += [f"{1e3 * np.median(plans):.1f}", f"{1e3 * np.median(runs):.1f}"]
    return row, sum(seconds)


def main() -> None:
    options = common.options(__doc__).parse_args()
    sizes, hidden = ((4, 4), 8) if options.quick else ((16, 64), 64)
    random = np.random.default_rng(0)
    params = {
        "E": jnp.asarray(random.normal(size=(len(WORDS), hidden)), jnp.float32),
        "W": jnp.asarray(random.normal(size=(hidden, hidden)) / hidden**0.5, jnp.float32),
    }
    print(common.machine())
    table = common.Table("sentences", "first s", "all s", "compiled", "plan ms", "run ms", "ratio")
    first = 0.0
    for name in SPELLINGS:
        row, seconds = measure(name, params, sizes)
        first = first or seconds
        table.row(*row, f"{seconds / first:.2f}")


if __name__ == "__main__":
    main()
