"""A Transformer encoder that classifies sentences: of one sentence, and of many that are padded.

With words w [n], rows x [n, hidden], and U, W, W₁, W₂, b₁, b₂ of each layer's own:

    x = E[w] + P[:n]
    x ← x + A(N(x))        A(x) = [softmax(Q Kᵀ / √32) V of every head] W,  [Q, K, V] = x U
    x ← x + F(N(x))        F(x) = gelu(x W₁ + b₁) W₂ + b₂
    scores = mean of the rows of N(x), times C

N makes the mean of a row 0 and its variance 1, then scales and shifts it. `scores` and `loss` are
the model as it is written for one sentence: no mask, no padding. `padded_scores` and `padded_loss`
are of sentences padded to a common width: attention and the mean need to know which rows are
words, all else is done to every row by itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 5000
POSITIONS = 512  # the longest sentence
CLASSES = 10
HEAD = 32

Params = dict[str, Any]
Sentence = tuple[np.ndarray, np.ndarray]  # (words int32[n], label int32[])


def parameters(hidden: int, layers: int) -> Params:
    """Random ones; `hidden` is a multiple of 32."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape, scale=hidden**-0.5), jnp.float32)

    def norm() -> Params:
        return {"scale": jnp.ones(hidden), "shift": jnp.zeros(hidden)}

    def layer() -> Params:
        return {
            "norm_attention": norm(),
            "heads": matrix(hidden, 3 * hidden),
            "out": matrix(hidden, hidden),
            "norm_feed": norm(),
            "w1": matrix(hidden, 4 * hidden),
            "b1": jnp.zeros(4 * hidden),
            "w2": matrix(4 * hidden, hidden) / 2,
            "b2": jnp.zeros(hidden),
        }

    return {
        "words": matrix(VOCABULARY, hidden),
        "positions": matrix(POSITIONS, hidden),
        "layers": [layer() for _ in range(layers)],
        "norm": norm(),
        "classes": matrix(hidden, CLASSES),
    }


# --- what is done to every row by itself ---


def normalize(norm: Params, x: jax.Array) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    deviation = jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    return x / deviation * norm["scale"] + norm["shift"]


def heads(layer: Params, x: jax.Array) -> list[jax.Array]:
    """Queries, keys and values [..., heads, 32]."""
    parts = jnp.split(x @ layer["heads"], 3, axis=-1)
    return [part.reshape(*x.shape[:-1], x.shape[-1] // HEAD, HEAD) for part in parts]


def feed(layer: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ layer["w1"] + layer["b1"]) @ layer["w2"] + layer["b2"]


# --- one sentence ---


def attention(layer: Params, x: jax.Array) -> jax.Array:
    """Returns the attention of each word to all words [n, hidden]."""
    q, k, v = heads(layer, x)
    weights = jax.nn.softmax(jnp.einsum("nhd,mhd->hnm", q, k) / np.sqrt(HEAD))
    return jnp.einsum("hnm,mhd->nhd", weights, v).reshape(x.shape) @ layer["out"]


def encode(params: Params, words: jax.Array) -> jax.Array:
    """Words [n] to a state [hidden]."""
    x = params["words"][words]
    x = x + params["positions"][: x.shape[0]]
    for layer in params["layers"]:
        x = x + attention(layer, normalize(layer["norm_attention"], x))
        x = x + feed(layer, normalize(layer["norm_feed"], x))
    return normalize(params["norm"], x).mean(axis=0)


def scores(params: Params, words: jax.Array) -> jax.Array:
    """Of the classes."""
    return encode(params, words) @ params["classes"]


def loss(params: Params, sentence: Sentence) -> jax.Array:
    """The cross-entropy of the scores with a label."""
    words, label = sentence
    return cross_entropy(encode(params, words), params["classes"], label)


@jax.jit  # one node for every sentence, whatever its label
def cross_entropy(state: jax.Array, classes: jax.Array, label: jax.Array) -> jax.Array:
    """Of the scores of a state with a label."""
    return -jax.nn.log_softmax(state @ classes)[label]


# --- many sentences, padded ---


class Padded(NamedTuple):
    """Sentences of a common width: words [B, width], lengths [B], labels [B]."""

    words: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, minibatch: list[Sentence], width: int) -> "Padded":
        """Words beyond the last of a sentence are 0."""
        words = np.zeros((len(minibatch), width), np.int32)
        for row, (real, _) in zip(words, minibatch, strict=True):
            row[: len(real)] = real
        lengths = np.array([len(real) for real, _ in minibatch], np.int32)
        return cls(words, lengths, np.array([label for _, label in minibatch]))


def padded_attention(layer: Params, x: jax.Array, real: jax.Array) -> jax.Array:
    """Returns the attention of each row to the `real` rows of its sentence [B, width, hidden]."""
    q, k, v = heads(layer, x)
    weights = jnp.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(HEAD)
    weights = jax.nn.softmax(jnp.where(real[:, None, None], weights, -1e9))
    return jnp.einsum("bhnm,bmhd->bnhd", weights, v).reshape(x.shape) @ layer["out"]


def padded_scores(params: Params, batch: Padded) -> jax.Array:
    """Of the classes [B, classes]."""
    width = batch.words.shape[1]
    real = jnp.arange(width) < batch.lengths[:, None]
    x = params["words"][batch.words] + params["positions"][:width]
    for layer in params["layers"]:
        x = x + padded_attention(layer, normalize(layer["norm_attention"], x), real)
        x = x + feed(layer, normalize(layer["norm_feed"], x))
    x = jnp.where(real[:, :, None], normalize(params["norm"], x), 0.0)
    return x.sum(axis=1) / batch.lengths[:, None] @ params["classes"]


def padded_loss(params: Params, batch: Padded) -> jax.Array:
    """The mean over sentences."""
    log = jax.nn.log_softmax(padded_scores(params, batch))
    return -jnp.take_along_axis(log, batch.labels[:, None], axis=1).mean()
