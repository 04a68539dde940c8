"""The inside algorithm: the probability of a sentence under a grammar, all its parses summed.

A chart has for each span of words the logarithms of the probabilities of each nonterminal. What is
returned is that of the first nonterminal for the whole sentence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import logsumexp

import jedbatch
from benchmarks.programs import Program

WORDS = 200


@jedbatch.cell
def emit(params, word):
    return params["emit"][:, word]


@jedbatch.cell
def combine(params, lefts, rights):
    left, right = jnp.stack(lefts), jnp.stack(rights)  # [splits, nonterminals]
    pairs = logsumexp(left[:, :, None] + right[:, None, :], axis=0)
    return logsumexp(params["rules"] + pairs, axis=(1, 2))


def model(params, words):
    params = normalized(params)
    chart = {(i, i + 1): emit(params, word) for i, word in enumerate(words)}
    for width in range(2, len(words) + 1):
        for i in range(len(words) - width + 1):
            j = i + width
            lefts = [chart[i, k] for k in range(i + 1, j)]
            rights = [chart[k, j] for k in range(i + 1, j)]
            chart[i, j] = combine(params, lefts, rights)
    return chart[0, len(words)][0]


def normalized(params):
    rules = params["rules"]
    return {
        "emit": jax.nn.log_softmax(params["emit"], axis=1),
        "rules": jax.nn.log_softmax(rules.reshape(len(rules), -1)).reshape(rules.shape),
    }


def instances(rng, count, tiny, longest=40):
    lengths = rng.integers(*((2, 6) if tiny else (longest // 4, longest + 1)), size=count)
    return [tuple(rng.integers(WORDS, size=n).tolist()) for n in lengths]


def parameters(key, tiny):
    nonterminals = 3 if tiny else 12
    emit, rules = jax.random.split(key)
    return {
        "emit": jax.random.normal(emit, (nonterminals, WORDS)),
        "rules": jax.random.normal(rules, (nonterminals,) * 3),
    }


def prepare(minibatches):
    """(words [sentences, longest], lengths [sentences])."""
    longest = max(len(words) for sentences in minibatches for words in sentences)
    return [
        (
            np.array([[*words, *[0] * (longest - len(words))] for words in sentences], np.int32),
            np.array([len(words) for words in sentences], np.int32),
        )
        for sentences in minibatches
    ]


def by_hand(params, sentences):
    """All spans of one width at a time, in a chart [width, sentence, first word, nonterminal]."""
    words, lengths = sentences
    params = normalized(params)
    count, longest = words.shape
    first = params["emit"].T[words]
    chart = jnp.zeros((longest + 1, *first.shape)).at[1].set(first)
    for width in range(2, longest + 1):
        starts, splits = np.arange(longest - width + 1), np.arange(1, width)[:, None]
        left = chart[splits, :, starts]  # [splits, starts, sentences, nonterminals]
        right = chart[width - splits, :, starts + splits]
        pairs = logsumexp(left[..., :, None] + right[..., None, :], axis=0)
        spans = logsumexp(params["rules"] + pairs[..., None, :, :], axis=(-2, -1))
        chart = chart.at[width, :, : len(starts)].set(jnp.moveaxis(spans, 0, 1))
    return chart[lengths, np.arange(count), 0, 0]


PROGRAMS = {
    "cky": Program(instances, parameters, model, prepare, by_hand, 8),
    "cky20": Program(
        functools.partial(instances, longest=20), parameters, model, prepare, by_hand, 16
    ),
}
