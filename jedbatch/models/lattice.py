"""Recurrent networks over lattices: characters, and the words that they may spell.

A lattice is `(characters, words, tags)`, where a word `(start, end, word)` spells
`characters[start:end]`. States run along the characters, and every word is a way around those that
spell it. With x_j the embedding of character j, y_w that of word w, [·; ·] stacking vectors, σ the
logistic function and ⊙ the elementwise product:

LSTM (Zhang and Yang, 2018, section 3.2), `lstm_cells`. A word whose first character is b and whose
last is e reads the state after b, and its own cell enters that of e. It has no output gate:

    word       [i; f; u] = W_w [y; h_b] + b_w         c^w = σ(f) ⊙ c_b + σ(i) ⊙ tanh(u)
    character  [i; o; u] = W_c [x_j; h_{j-1}] + b_c   h_j = σ(o) ⊙ tanh(c_j)
               c_j = (1 - σ(i)) ⊙ c_{j-1} + σ(i) ⊙ tanh(u)             if no word ends at j
               c_j = α_0 ⊙ tanh(u) + Σ_w α_w ⊙ c^w                     if words w do
               α_0 ∝ exp(σ(i)), α_w ∝ exp(σ(W_l [x_j; c^w] + b_l)), α_0 + Σ_w α_w = 1

The forget gate 1 - σ(i) is that of the authors' program; in the text it is a gate of its own.

GRU (Su et al., 2017, the deep variant with gates), `gru_cells`. Characters are words of length one.
A word from `start` to `end` reads the state before its first character, and the candidates of all
words with one end are combined by normalised gates:

    arc        h^w = GRU(y_w, h_start)                 of a character: h^0 = GRU(x_j, h_{j-1})
    join       h_j = Σ_w g_w ⊙ h^w / Σ_w g_w          g_w = σ(W_g h^w + b_g)

One candidate alone is the state. The GRU is `flax.nnx.GRUCell`, which resets U h where the paper
resets h.

Both run from left to right only, and tag every character by a softmax of its own where the first
source has both directions and a CRF:

    output     logits_j = W h_j + b, scored by cross-entropy with the tag

Shapes: x, y, h, c [hidden]; W_w, W_c [2 hidden, 3 hidden], W_l [2 hidden, hidden], W_g [hidden,
hidden], W [hidden, tags]. Node types of both: `embed_character`, `embed_word`, `score` and `plus`,
which adds scores up. LSTM: `word`, and `character` once for each number of words that end there.
GRU: `arc`, and `join` once for each number of candidates.

The models are written for one lattice, with Flax modules, and walk it in the same way.

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_lattices
  >>> from jedbatch.models import lattice
  >>> cells = lattice.lstm_cells(num_characters=300, num_words=500, num_tags=9, hidden=8)
  >>> params = cells.init(jax.random.key(0))
  >>> score = jedbatch.batch(lattice.scorer(cells))
  >>> score(params, synthetic_lattices(3)).shape  # loss and right tags of three lattices
  (3, 2)
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jedbatch import checks
from jedbatch.models import chains
from jedbatch.models.parts import Instance, Params, Pure, module_cells, pure, score_cell, total

State = tuple[Any, ...]  # (h, c) of the LSTM, (h,) of the GRU, each [hidden]


class Cells(NamedTuple):
    """The parts of a network over lattices.

    Attributes:
      init: maps a random key to the parameters.
      start: the state before the first character.
      embed_character: maps (params, character) to its embedding [hidden], a cell.
      embed_word: maps (params, word) to its embedding [hidden], a cell.
      entered_after: how many of its characters are behind the state that a word reads.
      word: maps (params, *state, embedding) to what a word brings to its end, a cell.
      character: maps (params, *state, embedding, *what words bring) to the state after a character.
      output: maps (params, h) to logits [tags], a cell.
      score: maps (params, h, tag) to [cross-entropy, 1 if the tag is right], a cell.
    """

    init: Callable[[jax.Array], Params]
    start: State
    embed_character: Callable[..., jax.Array]
    embed_word: Callable[..., jax.Array]
    entered_after: int
    word: Callable[..., Any]
    character: Callable[..., State]
    output: Callable[..., jax.Array]
    score: Callable[..., jax.Array]


class Word(nnx.Module):
    """The cell of a word in a lattice LSTM."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.gates = nnx.Linear(2 * hidden, 3 * hidden, rngs=rngs)

    def __call__(self, h: jax.Array, c: jax.Array, embedding: jax.Array) -> jax.Array:
        """The c [hidden] of a word, given the state after its first character."""
        i, f, u = jnp.split(self.gates(jnp.concatenate([embedding, h])), 3)
        return jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)


class Character(nnx.Module):
    """The cell of a character in a lattice LSTM, for any number of words that end there."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.gates = nnx.Linear(2 * hidden, 3 * hidden, rngs=rngs)
        self.word_gate = nnx.Linear(2 * hidden, hidden, rngs=rngs)

    def __call__(
        self, h: jax.Array, c: jax.Array, embedding: jax.Array, *words: jax.Array
    ) -> State:
        """The state after a character, given the state before it and c of the words."""
        i, o, u = jnp.split(self.gates(jnp.concatenate([embedding, h])), 3)
        i, o, u = jax.nn.sigmoid(i), jax.nn.sigmoid(o), jnp.tanh(u)
        if words:
            gates = [jax.nn.sigmoid(self.word_gate(jnp.concatenate([embedding, w]))) for w in words]
            shares = jax.nn.softmax(jnp.stack([i, *gates]), axis=0)
            c = (shares * jnp.stack([u, *words])).sum(axis=0)
        else:
            c = (1 - i) * c + i * u
        return o * jnp.tanh(c), c


class Arc(nnx.Module):
    """A candidate of a lattice GRU: the state after one word or character."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.gru = nnx.GRUCell(hidden, hidden, rngs=rngs)

    def __call__(self, h: jax.Array, embedding: jax.Array) -> State:
        """The candidate, given the state where the word starts."""
        return (self.gru(h, embedding)[0],)


class Join(nnx.Module):
    """The state of a lattice GRU where several words end."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.gate = nnx.Linear(hidden, hidden, rngs=rngs)

    def __call__(self, *candidates: State) -> State:
        """The average of the candidates, weighted by their gates."""
        hs = [h for (h,) in candidates]
        gates = [jax.nn.sigmoid(self.gate(h)) for h in hs]
        weighted = sum(g * h for g, h in zip(gates, hs, strict=True))
        return (weighted / sum(gates),)


def _embeddings(num_characters: int, num_words: int, hidden: int) -> dict[str, Pure]:
    return {
        "embed_character": chains.embedding(num_characters, hidden),
        "embed_word": chains.embedding(num_words, hidden),
    }


@checks.sizes
def lstm_cells(num_characters: int, num_words: int, num_tags: int, hidden: int) -> Cells:
    """The cells of a lattice LSTM as Flax modules.

    Args:
      num_characters: how many characters there are.
      num_words: how many words there are.
      num_tags: how many tags there are.
      hidden: size of embeddings and states.
    """
    modules = _embeddings(num_characters, num_words, hidden) | {
        "word": pure(lambda rngs: Word(hidden, rngs)),
        "character": pure(lambda rngs: Character(hidden, rngs)),
        "output": pure(lambda rngs: nnx.Linear(hidden, num_tags, rngs=rngs)),
    }
    return Cells(
        start=chains.start(hidden),
        entered_after=1,
        score=score_cell("output", modules["output"]),
        **module_cells(modules),
    )


@checks.sizes
def gru_cells(num_characters: int, num_words: int, num_tags: int, hidden: int) -> Cells:
    """The cells of a lattice GRU as Flax modules; arguments as for `lstm_cells`."""
    modules = _embeddings(num_characters, num_words, hidden) | {
        "arc": pure(lambda rngs: Arc(hidden, rngs)),
        "join": pure(lambda rngs: Join(hidden, rngs)),
        "output": pure(lambda rngs: nnx.Linear(hidden, num_tags, rngs=rngs)),
    }
    cells = module_cells(modules)
    arc, join = cells.pop("arc"), cells.pop("join")

    def character(params: Params, h: jax.Array, embedding: jax.Array, *words: State) -> State:
        candidate = arc(params, h, embedding)
        return join(params, candidate, *words) if words else candidate

    return Cells(
        start=chains.start(hidden)[:1],
        entered_after=0,
        word=arc,
        character=character,
        score=score_cell("output", modules["output"]),
        **cells,
    )


def _encode(
    cells: Cells, params: Params, characters: Sequence[int], words: Sequence[tuple]
) -> list[jax.Array]:
    """The h after every character."""
    ending = defaultdict(list)
    for start, end, word in words:
        ending[end].append((start, word))
    states = [cells.start]  # after 0, 1, ... characters
    for end, character in enumerate(characters, 1):
        brought = [
            cells.word(params, *states[start + cells.entered_after], cells.embed_word(params, word))
            for start, word in ending[end]
        ]
        embedding = cells.embed_character(params, character)
        states.append(cells.character(params, *states[-1], embedding, *brought))
    return [h for h, *_ in states[1:]]


@checks.fields(Cells)
def scorer(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, lattice): [loss, number of right tags] of one lattice.

    A lattice is `(characters, words, tags)` with integers for characters and tags, and words
    `(start, end, word)` with `end - start` at least 2; loss and count are sums over the characters.
    """

    def score(params: Params, lattice: Instance) -> jax.Array:
        characters, words, tags = lattice
        encoded = zip(_encode(cells, params, characters, words), tags, strict=True)
        return total([cells.score(params, h, tag) for h, tag in encoded])

    return score


@checks.fields(Cells)
def tagger(cells: Cells) -> Callable[[Params, Instance], list[jax.Array]]:
    """A function of (params, lattice): the logits [tags] of every character of one lattice, a list.

    A lattice is `(characters, words, ...)`. Lattices differ in length, so batch it with
    `out_axes=None`.
    """
    return lambda params, lattice: [
        cells.output(params, h) for h in _encode(cells, params, lattice[0], lattice[1])
    ]
