"""Bidirectional LSTM that tags words (Huang, Xu and Yu, 2015; Lample et al., 2016).

Layers of two LSTMs (see `chains`), one from the left and one from the right. With e_t the embedding
of word t, x_t^1 = e_t, and [·; ·] stacking vectors:

    forward  h_t = LSTM_f(x_t, h_{t-1})      backward  b_t = LSTM_b(x_t, b_{t+1})
                                             x_t^{l+1} = [h_t^l; b_t^l]
    output   logits_t = W tanh(H [h_t^L; b_t^L] + b_H) + b_W, scored by cross-entropy with the tag

The sources end in a CRF over the tags of a sentence, here every tag has a softmax of its own; the
hidden layer H is that of DyNet's tagger, which the benchmarks of ED-Batch run.

A rare word is spelled, a tuple of characters instead of a number (as in Lample et al., section 4.1,
where every word is both): with h and b the states of an LSTM over its characters at their ends,

    join     e_t = J [h; b] + b_J

Shapes: e, h, b [hidden]; H [2 hidden, hidden], W [hidden, tags], J [2 hidden, hidden]. Node types:
`embed`; `forward1`, `backward1`, `forward2` and so on, one for each layer and direction, which
differ in their weights; `score`; `plus`, which adds scores up; and where words are spelled
`character`, `spell_forward`, `spell_backward` and `join`.

The model is written for one sentence, with Flax modules (`flax_cells`).

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_tagged
  >>> from jedbatch.models import tagger
  >>> cells = tagger.flax_cells(num_words=500, num_tags=9, hidden=8, num_characters=40)
  >>> params = cells.init(jax.random.key(0))
  >>> sentences = synthetic_tagged(3, spelled=True)
  >>> score = jedbatch.batch(tagger.scorer(cells))
  >>> score(params, sentences).shape  # loss and right tags of three sentences
  (3, 2)
  >>> tag = jedbatch.batch(tagger.tagger(cells), out_axes=None)
  >>> logits = tag(params, [words for words, _ in sentences])
  >>> [len(words) for words, _ in sentences] == [len(mine) for mine in logits]
  True
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jedbatch import checks
from jedbatch.models import chains
from jedbatch.models.chains import Params, State, Step
from jedbatch.models.parts import Instance, module_cells, pure, score_cell, total

Both = tuple[Any, Any]  # h of both directions at a position, each [hidden]


class Spelling(NamedTuple):
    """The parts that make embeddings of words from their characters, each a cell.

    Attributes:
      character: maps (params, character) to its embedding [hidden].
      forward: maps (params, h, c, embedding) to the state after a character.
      backward: the same from the right.
      join: maps (params, last h of forward, last h of backward) to an embedding [hidden].
    """

    character: Callable[..., jax.Array]
    forward: Step
    backward: Step
    join: Callable[..., jax.Array]


class Cells(NamedTuple):
    """The parts of a tagger, each a cell but the first two and the last.

    Attributes:
      init: maps a random key to the parameters.
      start: the state (h, c) before the first word.
      embed: maps (params, word) to its embedding [hidden].
      forward: for each layer, maps (params, h, c, *inputs) to the state after a word.
      backward: the same from the right.
      output: maps (params, h forward, h backward) to logits [tags].
      score: maps (params, h forward, h backward, tag) to [cross-entropy, 1 if the tag is right].
      spelling: for words that are spelled; None if all words are in the table.
    """

    init: Callable[[jax.Array], Params]
    start: State
    embed: Callable[..., jax.Array]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    output: Callable[..., jax.Array]
    score: Callable[..., jax.Array]
    spelling: Spelling | None


class Output(nnx.Module):
    """The hidden layer and the logits of a tagger."""

    def __init__(self, hidden: int, num_tags: int, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(2 * hidden, hidden, rngs=rngs)
        self.tags = nnx.Linear(hidden, num_tags, rngs=rngs)

    def __call__(self, forward: jax.Array, backward: jax.Array) -> jax.Array:
        """The logits [tags] of a word."""
        return self.tags(jnp.tanh(self.hidden(jnp.concatenate([forward, backward]))))


class Join(nnx.Module):
    """The embedding of a word from the ends of its spelling."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2 * hidden, hidden, rngs=rngs)

    def __call__(self, forward: jax.Array, backward: jax.Array) -> jax.Array:
        """The embedding [hidden]."""
        return self.linear(jnp.concatenate([forward, backward]))


@checks.sizes
def flax_cells(
    num_words: int,
    num_tags: int,
    hidden: int,
    *,
    num_layers: int = 2,
    num_characters: int | None = None,
) -> Cells:
    """The cells of a tagger as Flax modules.

    Args:
      num_words: how many words the table of embeddings has.
      num_tags: how many tags there are.
      hidden: size of embeddings, of states in each direction and of the hidden layer.
      num_layers: how many layers of two LSTMs.
      num_characters: how many characters there are, where words may be spelled.
    """
    modules = {"embed": chains.embedding(num_words, hidden)}
    for layer in range(1, num_layers + 1):
        inputs = hidden if layer == 1 else 2 * hidden
        modules[f"forward{layer}"] = chains.lstm(inputs, hidden)
        modules[f"backward{layer}"] = chains.lstm(inputs, hidden)
    modules["output"] = pure(lambda rngs: Output(hidden, num_tags, rngs))
    if num_characters is not None:
        modules |= {
            "character": chains.embedding(num_characters, hidden),
            "spell_forward": chains.lstm(hidden, hidden),
            "spell_backward": chains.lstm(hidden, hidden),
            "join": pure(lambda rngs: Join(hidden, rngs)),
        }
    cells = module_cells(modules)
    spelling = ("character", "spell_forward", "spell_backward", "join")
    return Cells(
        cells["init"],
        chains.start(hidden),
        cells["embed"],
        tuple(cells[f"forward{layer}"] for layer in range(1, num_layers + 1)),
        tuple(cells[f"backward{layer}"] for layer in range(1, num_layers + 1)),
        cells["output"],
        score_cell("output", modules["output"]),
        None if num_characters is None else Spelling(*(cells[name] for name in spelling)),
    )


def _both_ways(
    forward: Step, backward: Step, params: Params, start: State, inputs: list[tuple]
) -> list[Both]:
    """The h of both directions at every position."""
    there = chains.states(forward, params, start, inputs)
    back = chains.states(backward, params, start, inputs[::-1])[::-1]
    return [(f[0], b[0]) for f, b in zip(there, back, strict=True)]


def _embedding(cells: Cells, params: Params, word: Any) -> jax.Array:
    """The embedding of a word, by its number or by its characters."""
    if not isinstance(word, tuple):
        return cells.embed(params, word)
    if cells.spelling is None:
        raise ValueError(
            f"a tagger without characters got the spelled word {word}; expected the number of a "
            "word. To spell words, give `flax_cells` the option `num_characters`."
        )
    spelling = cells.spelling
    characters = [(spelling.character(params, c),) for c in word]
    directions = _both_ways(spelling.forward, spelling.backward, params, cells.start, characters)
    return spelling.join(params, directions[-1][0], directions[0][1])


def _encode(cells: Cells, params: Params, words: Sequence[Any]) -> list[Both]:
    """The h of both directions of the last layer, for every word."""
    inputs: list[tuple] = [(_embedding(cells, params, word),) for word in words]
    for forward, backward in zip(cells.forward, cells.backward, strict=True):
        inputs = _both_ways(forward, backward, params, cells.start, inputs)
    return inputs


@checks.fields(Cells)
def scorer(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, sentence): [loss, number of right tags] of one `(words, tags)`.

    Tags and words are integers, or a word is a tuple of integers, its characters; loss and count
    are sums over the words.
    """

    def score(params: Params, sentence: Instance) -> jax.Array:
        words, tags = sentence
        encoded = _encode(cells, params, words)
        pairs = zip(encoded, tags, strict=True)
        return total([cells.score(params, *directions, tag) for directions, tag in pairs])

    return score


@checks.fields(Cells)
def tagger(cells: Cells) -> Callable[[Params, Instance], list[jax.Array]]:
    """A function of (params, words): the logits [tags] of each word of one sentence, a list.

    Sentences differ in length, so batch it with `out_axes=None`. It is a list rather than an array
    [words, tags] because arrays of every length would be a type each, to be compiled.
    """
    return lambda params, words: [
        cells.output(params, *directions) for directions in _encode(cells, params, words)
    ]
