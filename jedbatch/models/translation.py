"""An LSTM that reads and an LSTM that writes (Sutskever, Vinyals and Le, 2014).

The decoder starts where the encoder ended, with all of the source in one state. For a source
s_1 … s_m and a target t_1 … t_n, where E and D are tables of embeddings and t_0 is BEGIN:

    encode   (h_i, c_i) = LSTM_e(E[s_i], (h_{i-1}, c_{i-1}))             from zeros
    decode   (g_j, d_j) = LSTM_d(D[t_{j-1}], (g_{j-1}, d_{j-1}))         from (h_m, c_m)
    output   logits_j = W g_j + b, scored by cross-entropy with t_j

The LSTMs are those of `chains`. The paper has four layers of them and reads sentences backwards;
here there is one, and sentences are read as they come. While it is scored, the decoder reads the
words of the target (`scorer`). When it translates, it reads those it wrote itself, each the best by
its logits, until it writes END (`translator`).

Shapes: embeddings and states [hidden], W [hidden, target words]. Node types: `source` and `target`
(embeddings), `encode`, `decode`, `score`, `best` (the word with the best logits), and `plus`, which
adds scores up.

The model is written for one sentence, with Flax modules (`flax_cells`).

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_translations
  >>> from jedbatch.models import translation
  >>> cells = translation.flax_cells(num_source=500, num_target=512, hidden=8)
  >>> params = cells.init(jax.random.key(0))
  >>> pairs = synthetic_translations(3)
  >>> score = jedbatch.batch(translation.scorer(cells))
  >>> score(params, pairs).shape  # loss and right words of three translations
  (3, 2)
  >>> translate = jedbatch.batch(translation.translator(cells, most=9), out_axes=None)
  >>> [len(words) <= 9 for words in translate(params, [source for source, _ in pairs])]
  [True, True, True]
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jedbatch
from jedbatch import checks
from jedbatch.data import BEGIN, END
from jedbatch.models import chains
from jedbatch.models.chains import Params, State, Step
from jedbatch.models.parts import Instance, initializer, module_cell, pure, score_cell, total


class Cells(NamedTuple):
    """The parts of an encoder and a decoder, each a cell but the first two.

    Attributes:
      init: maps a random key to the parameters.
      start: the state (h, c) before the first word of the source.
      source: maps (params, word of the source) to its embedding [hidden].
      encode: maps (params, h, c, embedding) to the state after a word of the source.
      target: maps (params, word of the target) to its embedding [hidden].
      decode: maps (params, h, c, embedding) to the state after a word of the target.
      score: maps (params, h, word) to [cross-entropy, 1 if the word is right].
      best: maps (params, h) to the word with the best logits.
    """

    init: Callable[[jax.Array], Params]
    start: State
    source: Callable[..., jax.Array]
    encode: Step
    target: Callable[..., jax.Array]
    decode: Step
    score: Callable[..., jax.Array]
    best: Callable[..., jax.Array]


@checks.sizes
def flax_cells(num_source: int, num_target: int, hidden: int) -> Cells:
    """The cells of an encoder and a decoder as Flax modules.

    Args:
      num_source: how many words the source language has.
      num_target: how many words the target language has, BEGIN and END among them.
      hidden: size of embeddings and states.
    """
    output = pure(lambda rngs: nnx.Linear(hidden, num_target, rngs=rngs))
    modules = {
        "source": chains.embedding(num_source, hidden),
        "encode": chains.lstm(hidden, hidden),
        "target": chains.embedding(num_target, hidden),
        "decode": chains.lstm(hidden, hidden),
    }
    return Cells(
        init=initializer(modules | {"output": output}),
        start=chains.start(hidden),
        score=score_cell("output", output),
        best=jedbatch.cell(
            lambda params, h: jnp.argmax(output.apply(params["output"], h)), name="best"
        ),
        **{name: module_cell(name, module) for name, module in modules.items()},
    )


def _encode(cells: Cells, params: Params, source: Sequence[int]) -> State:
    """The state after a whole sentence."""
    embeddings = [(cells.source(params, word),) for word in source]
    return chains.states(cells.encode, params, cells.start, embeddings)[-1]


@checks.fields(Cells)
def scorer(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, pair): [loss, number of right words] of one `(source, target)`.

    Both are tuples of integers, and the target ends with END; loss and count are sums over the
    words of the target, each told all words before it.
    """

    def score(params: Params, pair: Instance) -> jax.Array:
        source, target = pair
        before = [(cells.target(params, word),) for word in (BEGIN, *target[:-1])]
        states = chains.states(cells.decode, params, _encode(cells, params, source), before)
        pairs = zip(states, target, strict=True)
        return total([cells.score(params, h, word) for (h, _), word in pairs])

    return score


@checks.fields(Cells)
def translator(cells: Cells, most: int = 100) -> Callable[[Params, Sequence[int]], list[int]]:
    """A function of (params, source): the words of a translation, the last of them END.

    It writes `most` words at most; if there is no END among them, it was not done. Translations
    differ in length, so batch it with `out_axes=None`. It decides on values, so it is called, not
    planned.
    """

    def translate(params: Params, source: Sequence[int]) -> list[int]:
        state = _encode(cells, params, source)
        words: list[int] = []
        word = BEGIN
        while word != END and len(words) < most:
            state = cells.decode(params, *state, cells.target(params, word))
            word = int(cells.best(params, state[0]))
            words.append(word)
        return words

    return translate
