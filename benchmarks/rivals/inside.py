"""The inside algorithm of a probabilistic grammar, for sentences of any length and for padded ones.

A grammar in Chomsky's normal form has rules A → B C and A → word, each with a probability. The
chart [n, n, k] holds for every span of a sentence, from word i to word j, and every nonterminal A,
the probability that A derives its words:

    chart[i, j, A] = Σ_BC P(A → B C) Σ_m chart[i, m, B] chart[m + 1, j, C]

Spans are done by width, all starts and all splits of a width at once. Probabilities of words are
scaled up by the number of words there are, lest they vanish; a constant is added to logarithms in
the end.

Source: Baker, *Trainable grammars for speech recognition* (1979).
"""

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, jax.Array]


def parameters(vocabulary: int, nonterminals: int, seed: int = 0) -> Params:
    """Returns logits of words, of pairs of nonterminals and of the root."""
    words, rules, root = jax.random.split(jax.random.key(seed), 3)
    k = nonterminals
    return {
        "words": jax.random.normal(words, (k, vocabulary)),
        "rules": jax.random.normal(rules, (k, k, k)),
        "root": jax.random.normal(root, (k,)),
    }


def chart_of(params: Params, words: jax.Array) -> jax.Array:
    """Returns the chart, float[n, n, k], of words int32[n]."""
    n, vocabulary = words.shape[0], params["words"].shape[1]
    k = params["root"].shape[0]
    rules = jax.nn.softmax(params["rules"].reshape(k, k * k)).reshape(k, k, k)
    emissions = vocabulary * jax.nn.softmax(params["words"])
    start = jnp.arange(n)
    chart = jnp.zeros((n, n, k)).at[start, start].set(emissions.T[words])

    def width(more: jax.Array, chart: jax.Array) -> jax.Array:
        end = start + more
        split = start[None]
        inside = (start[:, None] <= split) & (split < end[:, None]) & (end[:, None] < n)
        left = jnp.where(inside[..., None], chart, 0)  # [start, split, k]
        right = chart[jnp.minimum(split + 1, n - 1), jnp.minimum(end, n - 1)[:, None]]
        pairs = jnp.einsum("imb,imc->ibc", left, right)
        return chart.at[start, end].add(jnp.einsum("abc,ibc->ia", rules, pairs), mode="drop")

    return lax.fori_loop(1, n, width, chart)


def log_likelihood(params: Params, words: jax.Array) -> jax.Array:
    """Returns the logarithm of the probability of a sentence, int32[n], scaled up."""
    chart = chart_of(params, words)
    return jnp.log(chart[0, words.shape[0] - 1] @ jax.nn.softmax(params["root"]))


def padded_log_likelihood(params: Params, words: jax.Array, length: jax.Array) -> jax.Array:
    """Returns the same of the first words of int32[width]; what follows is padding."""
    chart = chart_of(params, words)
    return jnp.log(chart[0, length - 1] @ jax.nn.softmax(params["root"]))
