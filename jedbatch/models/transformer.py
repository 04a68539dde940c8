"""Transformers for one sentence: an encoder, and an encoder with a decoder (Vaswani et al., 2017).

A sentence is an array of n words, and what is computed of it has n rows, by the layers of `layers`:

    encoder      h = stack(words)                       each of the n rows sees all others
    sentences    logits = W mean_i(h_i) + b             scored by cross-entropy with the label
    tags         logits_i = W h_i + b                   and with the tag of word i
    translation  s = stack(before; memory = h)          row t sees those up to t, and all of h
                 logits_t = W s_t + b                   and with word t of the target

A decoder reads BEGIN and all words of the target but the last, which are `before`. Shapes: h [n,
hidden]; s [m, hidden] for m words of a target; W [hidden, labels], or a column for every word.

The models are functions of whole arrays, without a loop over words and without cells; and without
padding and masks for other sentences, since for them there are no others, as in InsNet. To run
sentences of many lengths together is left to `jedbatch.batch`.

References:
  Vaswani et al., Attention is all you need, NeurIPS 2017.
  InsNet, padding-free dynamic batching, https://github.com/chncwang/InsNet.

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import as_arrays, synthetic_tagged
  >>> from jedbatch.models import transformer
  >>> model = transformer.flax_encoder(500, 9, hidden=8, heads=2, layers=1)
  >>> params = model.init(jax.random.key(0))
  >>> sentences = as_arrays(synthetic_tagged(2, mean_length=3))  # words [n] and tags [n] of each
  >>> loss = jedbatch.batch(transformer.tagger(model))
  >>> loss(params, sentences).shape
  (2,)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jedbatch import checks, ragged
from jedbatch.data import BEGIN
from jedbatch.models.layers import Attend, Stack
from jedbatch.models.parts import Instance, Params, by_name, initializer, pure, scored


class Encoder(NamedTuple):
    """The parts of a model that reads sentences.

    Attributes:
      init: maps a random key to the parameters.
      encode: maps (params, words [n]) to states [n, hidden].
      output: maps (params, states [..., hidden]) to logits [..., labels].
    """

    init: Callable[[jax.Array], Params]
    encode: Callable[..., jax.Array]
    output: Callable[..., jax.Array]


class EncoderDecoder(NamedTuple):
    """The parts of a model that reads sentences and writes others.

    Attributes:
      init: maps a random key to the parameters.
      encode: maps (params, source words [n]) to the memory [n, hidden].
      decode: maps (params, target words [m], memory) to states [m, hidden] of words and what is
        before them.
      output: maps (params, states [..., hidden]) to logits [..., target words].
    """

    init: Callable[[jax.Array], Params]
    encode: Callable[..., jax.Array]
    decode: Callable[..., jax.Array]
    output: Callable[..., jax.Array]


@checks.sizes
def flax_encoder(
    num_words: int,
    num_labels: int,
    hidden: int,
    *,
    heads: int = 4,
    layers: int = 2,
    max_length: int = 512,
    attend: Attend = ragged.attention,
) -> Encoder:
    """The parts of an encoder as Flax modules; parameters are nested dicts.

    Args:
      num_words: how many words there are.
      num_labels: how many labels there are, of words or of sentences.
      hidden: size of embeddings and states, a multiple of `heads`.
      heads: into how many parts of equal size queries, keys and values are cut.
      layers: how many.
      max_length: how many words the longest sentence has.
      attend: maps (q, k, v, causal=) to what the rows of q get; see `layers`.
    """
    sizes = (hidden, heads, layers, max_length, attend)
    modules = {
        "encode": pure(lambda rngs: Stack(num_words, *sizes, False, rngs)),
        "output": pure(lambda rngs: nnx.Linear(hidden, num_labels, rngs=rngs)),
    }
    return Encoder(initializer(modules), **{k: by_name(k, m) for k, m in modules.items()})


@checks.sizes
def flax_encoder_decoder(
    num_source: int,
    num_target: int,
    hidden: int,
    *,
    heads: int = 4,
    layers: int = 2,
    max_length: int = 512,
    attend: Attend = ragged.attention,
) -> EncoderDecoder:
    """The parts of an encoder and a decoder as Flax modules.

    Of the target words, which are `num_target`, two are BEGIN and END. The rest is as for
    `flax_encoder`.
    """
    sizes = (hidden, heads, layers, max_length, attend)
    modules = {
        "encode": pure(lambda rngs: Stack(num_source, *sizes, False, rngs)),
        "decode": pure(lambda rngs: Stack(num_target, *sizes, True, rngs)),
        "output": pure(lambda rngs: nnx.Linear(hidden, num_target, rngs=rngs)),
    }
    return EncoderDecoder(initializer(modules), **{k: by_name(k, m) for k, m in modules.items()})


@checks.fields(Encoder)
def encoder(model: Encoder) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, words [n]): the states [n, hidden] of one sentence."""
    return model.encode


@checks.fields(Encoder)
def classifier(model: Encoder) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, words [n]): the logits [labels] of the mean state of a sentence."""
    return lambda params, words: model.output(params, model.encode(params, words).mean(axis=0))


@checks.fields(Encoder)
def scorer(model: Encoder) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, (words [n], label)): [cross-entropy, 1 if the label is right]."""
    classify = classifier(model)
    return lambda params, sentence: scored(classify(params, sentence[0]), sentence[1])


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The sum over rows of logits [n, labels] and labels [n]."""
    log_probability = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probability, labels[:, None], axis=1).sum()


@checks.fields(Encoder)
def tagger(model: Encoder) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, (words [n], tags [n])): the cross-entropy, summed over the words."""

    def loss(params: Params, sentence: Instance) -> jax.Array:
        words, tags = sentence
        return _cross_entropy(model.output(params, model.encode(params, words)), tags)

    return loss


@checks.fields(EncoderDecoder)
def decoder(model: EncoderDecoder) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, (source [n], target [m])): the logits [m, words] of every word.

    Row t is what the decoder says after the source and the words of the target before word t.
    """

    def logits(params: Params, pair: Instance) -> jax.Array:
        source, target = pair
        before = jnp.concatenate([jnp.full(1, BEGIN, target.dtype), target[:-1]])
        states = model.decode(params, before, model.encode(params, source))
        return model.output(params, states)

    return logits


@checks.fields(EncoderDecoder)
def translator(model: EncoderDecoder) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, (source [n], target [m])): the cross-entropy, summed over m words.

    The target ends with END; each of its words is predicted from the source and those before it.
    """
    logits = decoder(model)
    return lambda params, pair: _cross_entropy(logits(params, pair), pair[1])
