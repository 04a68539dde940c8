"""The workloads batched by hand: what an expert writes in JAX for each kind of model.

The host prepares arrays of integers for a minibatch, `prepare`; a function of the parameters and
these arrays, to be compiled by `jax.jit`, returns the sum of the losses, `loss`. Arrays are padded
to sizes of which there are few, so that minibatches share programs.

trees      level by level, from the leaves: one buffer of states of all nodes, in which a level is
           a slice; a level gathers the states of its children. Levels are padded to powers of two,
           8 at least, and their number to a multiple of four. They are unrolled: a `lax.scan` over
           levels of one width takes as long forwards and up to a third longer backwards. With two
           kinds of inner node, a level has a part for each.
sequences  `lax.scan` over time, padded to a multiple of 16; where a sequence has ended, states
           stay. Inputs are projected before the scan and outputs scored after it, each in one
           product. Rare words are read before all others, by a scan over their characters.
lattices   a `lax.scan` over characters that carries the last few states; words are lists for each
           step: which sentence, how far back, which word. They gather the states they leave and
           add to the states they enter. Lists are padded to the longest (a power of two), which is
           far less than so many words for every sentence.

The math of a node of a tree is that of `edbatch`, which works on rows as well as on vectors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.edbatch import (
    WAYS,
    Params,
    State,
    gru_leaf,
    gru_node,
    lstm,
    lstm_leaf,
    lstm_node,
    mv_leaf,
    mv_node,
    tag_logits,
    translation_input,
)

NOTHING = -1  # the label of what is padding


def up_to_power(count: int, bucket: bool) -> int:
    """The next power of two, 8 at least; the number itself if sizes are to be exact."""
    return max(8, 1 << (count - 1).bit_length()) if bucket else count


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The sum over all that is not padding; logits [..., labels]."""
    scores = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(labels == NOTHING, 0, found).sum()


# --- trees ---


class Trees(NamedTuple):
    """A minibatch of trees.

    Attributes:
      words: int[leaves]; leaves have the first rows of the buffer.
      levels: for each kind of inner node the rows of left and of right children, int[width]. The
        rows of a level follow each other, kind by kind.
      labels: int[rows].
    """

    words: np.ndarray
    levels: list[list[tuple[np.ndarray, ...]]]
    labels: np.ndarray


def prepare_trees(trees: Sequence[Any], bucket: bool, kinds: int = 1) -> Trees:
    nodes: list[tuple[int, int, int, int]] = []  # (left, right, word, label)
    levels: list[list[list[int]]] = [[[]]]  # nodes by height and kind

    def visit(root: Any) -> tuple[int, int]:
        """(number, height) of a node."""
        label, *below = root
        if len(below) == 1:
            height, kind, node = 0, 0, (0, 0, below[0], label)
        else:
            (left, a), (right, b) = visit(below[0]), visit(below[1])
            height, kind = 1 + max(a, b), below[2] if len(below) == 3 else 0
            node = left, right, 0, label
        while len(levels) <= height:
            levels.append([[] for _ in range(kinds)])
        levels[height][kind].append(len(nodes))
        nodes.append(node)
        return len(nodes) - 1, height

    for root in trees:
        visit(root)
    levels += [[[]] * kinds] * (-len(levels) % 4 if bucket else 0)
    left, right, word, label = np.array(nodes).T
    row, rows = np.zeros(len(nodes), int), 0
    tables: list[list[tuple[np.ndarray, ...]]] = []
    for level in levels:
        tables.append([])
        for part in level:
            width = up_to_power(len(part), bucket)
            filled = ((0, width - len(part)),)
            found = row[left[part]], row[right[part]], word[part]
            tables[-1].append(tuple(np.pad(x, filled).astype(np.int32) for x in found))
            row[part] = rows + np.arange(len(part))
            rows += width
    labels = np.full(rows, NOTHING, np.int32)
    labels[row] = label
    ((_, _, words),), *above = tables
    return Trees(words, [[part[:2] for part in level] for level in above], labels)


def tree_loss(leaf: Callable, node: Callable) -> Callable[[Params, Trees], jax.Array]:
    def loss(params: Params, trees: Trees) -> jax.Array:
        states = leaf(params, trees.words)
        row, room = len(trees.words), len(trees.labels) - len(trees.words)
        buffer = tuple(jnp.pad(x, ((0, room), *[(0, 0)] * (x.ndim - 1))) for x in states)
        for level in trees.levels:
            for kind, sides in enumerate(level):
                if not sides[0].size:
                    continue
                left, right = (tuple(x[side] for x in buffer) for side in sides)
                above = node(params, left, right, kind=kind)
                place = jax.lax.dynamic_update_slice_in_dim
                buffer = tuple(place(x, a, row, 0) for x, a in zip(buffer, above, strict=True))
                row += len(above[0])
        return cross_entropy(buffer[0] @ params["score_w"], trees.labels)

    return loss


# --- sequences ---


def padded(sequences: Sequence[Sequence[int]], bucket: bool, fill: int = 0) -> np.ndarray:
    """Sequences in columns, int[time, sequences]."""
    time = max(map(len, sequences), default=0)
    time = -(-time // 16) * 16 if bucket else time
    result = np.full((time, len(sequences)), fill, np.int32)
    for column, sequence in enumerate(sequences):
        result[: len(sequence), column] = sequence
    return result


class Sentences(NamedTuple):
    """A minibatch of tagged sentences.

    Attributes:
      words: int[time, sentences].
      tags: int[time, sentences].
      rare: int[time, sentences], the place of a rare word, or `NOTHING`.
      spelled: int[characters, rare words], or `NOTHING` where a word has ended.
    """

    words: np.ndarray
    tags: np.ndarray
    rare: np.ndarray
    spelled: np.ndarray


def prepare_sentences(sentences: Sequence[Any], bucket: bool) -> Sentences:
    spelled: list[tuple[int, ...]] = []
    words, rare = [], []
    for entries, _ in sentences:
        is_rare = [isinstance(entry, tuple) for entry in entries]
        places = len(spelled) + np.cumsum(is_rare) - 1
        spelled += [entry for entry in entries if isinstance(entry, tuple)]
        words.append([0 if r else entry for r, entry in zip(is_rare, entries, strict=True)])
        rare.append(np.where(is_rare, places, NOTHING))
    room = up_to_power(len(spelled), bucket) - len(spelled) if spelled else 0
    return Sentences(
        padded(words, bucket),
        padded([tags for _, tags in sentences], bucket, NOTHING),
        padded(rare, bucket, NOTHING),
        padded([*spelled, *[(0,)] * room], bucket, NOTHING),
    )


def lstm_layer(params: Params, name: str) -> tuple[Callable, Callable]:
    """(x → gates, (gates, state) → state): what can be done before the scan, and the rest."""
    weights, bias = params[f"{name}_w"], params[f"{name}_b"]
    size = len(bias) // 4
    of_x, of_h = weights[:-size], weights[-size:]
    return lambda x: x @ of_x + bias, lambda gates, state: lstm(gates + state[0] @ of_h, state[1])


def read(
    params: Params,
    x: jax.Array,
    keep: jax.Array,
    name: str,
    state: State | None = None,
    reverse: bool = False,
) -> tuple[State, jax.Array]:
    """(the last state, h after each input) of a layer over inputs [time, sequences, size].

    Where a sequence has ended the state stays. Backward it stays zero until the sequence begins.
    """
    project, step = lstm_layer(params, name)

    def masked_step(state: State, inputs: Any) -> tuple[State, jax.Array]:
        gates, keep = inputs
        new = step(gates, state)
        state = tuple(jnp.where(keep[:, None], a, b) for a, b in zip(new, state, strict=True))
        return state, state[0]

    if state is None:
        state = (jnp.zeros((x.shape[1], len(params[f"{name}_b"]) // 4)),) * 2
    return jax.lax.scan(masked_step, state, (project(x), keep), reverse=reverse)


def sentences_loss(params: Params, sentences: Sentences) -> jax.Array:
    x = params["words"][sentences.words]
    if sentences.spelled.size:
        letters, keep = params["characters"][sentences.spelled], sentences.spelled != NOTHING
        last = [
            read(params, letters, keep, f"{way}_spell", reverse=order < 0)[0][0]
            for way, order in WAYS
        ]
        spelled = jnp.concatenate(last, axis=-1)[sentences.rare]
        x = jnp.where(sentences.rare[..., None] == NOTHING, x, spelled)
    keep, results = sentences.tags != NOTHING, []
    for way, order in WAYS:
        _, below = read(params, x, keep, f"{way}1", reverse=order < 0)
        _, above = read(params, below, keep, f"{way}2", reverse=order < 0)
        results.append(above)
    return cross_entropy(tag_logits(params, *results), sentences.tags)


class Translations(NamedTuple):
    """Words of both sides and, to be predicted, of the target; int[time, pairs].

    The source is `NOTHING` where it has ended, and so is what is predicted.
    """

    source: np.ndarray
    fed: np.ndarray
    target: np.ndarray


def prepare_translations(pairs: Sequence[Any], bucket: bool) -> Translations:
    return Translations(
        padded([source for source, _ in pairs], bucket, NOTHING),
        padded([(0, *target[:-1]) for _, target in pairs], bucket),
        padded([target for _, target in pairs], bucket, NOTHING),
    )


def translations_loss(params: Params, pairs: Translations) -> jax.Array:
    source = translation_input(params, pairs.source, side="source")
    state, _ = read(params, source, pairs.source != NOTHING, "source")
    fed = translation_input(params, pairs.fed, side="target")
    _, h = read(params, fed, pairs.target != NOTHING, "target", state)
    return cross_entropy(h @ params["score_w"], pairs.target)


# --- lattices ---


class Lattices(NamedTuple):
    """A minibatch of lattices.

    Attributes:
      characters: int[time, lattices].
      tags: int[time, lattices].
      words: int[time, most], words that end with the character.
      lattice: int[time, most], in which lattice; their number where there is no word.
      back: int[time, most], how many characters a word has.
      window: int[longest word], as long as states are carried.
    """

    characters: np.ndarray
    tags: np.ndarray
    words: np.ndarray
    lattice: np.ndarray
    back: np.ndarray
    window: np.ndarray


def prepare_lattices(lattices: Sequence[Any], bucket: bool) -> Lattices:
    characters = padded([x[0] for x in lattices], bucket)
    entering: list[list[tuple[int, int, int]]] = [[] for _ in characters]
    for column, (_, words, _) in enumerate(lattices):
        for start, end, word in words:
            entering[end - 1].append((word, column, end - start))
    most = up_to_power(max(map(len, entering)), bucket)
    listed = np.zeros((3, len(characters), most), np.int32)
    listed[1], listed[2] = len(lattices), 1
    for i, found in enumerate(entering):
        listed[:, i, : len(found)] = np.array(found, np.int32).reshape(-1, 3).T
    window = int(listed[2].max())
    window += -window % 4 if bucket else 0
    tags = padded([x[2] for x in lattices], bucket, NOTHING)
    return Lattices(characters, tags, *listed, np.arange(window))


def gru_layer(params: Params, name: str) -> tuple[Callable, Callable]:
    """The same as `lstm_layer` for a GRU."""
    weights, bias = params[f"{name}_w"], params[f"{name}_b"]
    u_weights, u_bias = params[f"{name}_u_w"], params[f"{name}_u_b"]
    size = len(u_bias)
    before = jnp.concatenate([weights[:-size], u_weights[:-size]], axis=1)
    biases, of_h, u_of_h = jnp.concatenate([bias, u_bias]), weights[-size:], u_weights[-size:]

    def step(gates: jax.Array, state: State) -> State:
        (h,) = state
        opened = jax.nn.sigmoid(gates[..., : 2 * size] + h @ of_h)
        r, z = jnp.split(opened, 2, axis=-1)
        u = jnp.tanh(gates[..., 2 * size :] + (r * h) @ u_of_h)
        return (z * h + (1 - z) * u,)

    return lambda x: x @ before + biases, step


def lattices_loss(layer: Callable, parts: int) -> Callable[[Params, Lattices], jax.Array]:
    def loss(params: Params, lattices: Lattices) -> jax.Array:
        longest, count = len(lattices.window), lattices.characters.shape[1]
        project_character, character_step = layer(params, "character")
        project_word, word_step = layer(params, "word")

        def step(window: State, inputs: Any) -> tuple[State, jax.Array]:
            gates, word_gates, lattice, back = inputs
            state = character_step(gates, tuple(x[-1] for x in window))
            if word_gates.size:
                place = longest - back, jnp.minimum(lattice, count - 1)
                words = word_step(word_gates, tuple(x[place] for x in window))
                both = zip(state, words, strict=True)
                state = tuple(x.at[lattice].add(word, mode="drop") for x, word in both)
            both = zip(window, state, strict=True)
            return tuple(jnp.concatenate([x[1:], new[None]]) for x, new in both), state[0]

        characters, words = (params[name] for name in ("characters", "words"))
        _, h = jax.lax.scan(
            step,
            (jnp.zeros((longest, count, characters.shape[1])),) * parts,
            (
                project_character(characters[lattices.characters]),
                project_word(words[lattices.words]),
                lattices.lattice,
                lattices.back,
            ),
        )
        return cross_entropy(h @ params["score_w"], lattices.tags)

    return loss


prepare_two_kinds = functools.partial(prepare_trees, kinds=2)

FORMS: dict[str, tuple[Callable[..., Any], Callable[[Params, Any], jax.Array]]] = {
    "treelstm": (prepare_trees, tree_loss(lstm_leaf, lstm_node)),
    "treelstm2": (prepare_two_kinds, tree_loss(lstm_leaf, lstm_node)),
    "treegru": (prepare_trees, tree_loss(gru_leaf, gru_node)),
    "mvrnn": (prepare_trees, tree_loss(mv_leaf, mv_node)),
    "bilstm": (prepare_sentences, sentences_loss),
    "bilstm_chars": (prepare_sentences, sentences_loss),
    "lattice_lstm": (prepare_lattices, lattices_loss(lstm_layer, 2)),
    "lattice_gru": (prepare_lattices, lattices_loss(gru_layer, 1)),
    "nmt": (prepare_translations, translations_loss),
}


def prepare(name: str, instances: Sequence[Any], bucket: bool = True) -> Any:
    """The arrays of a minibatch: padded to few sizes, or to exactly what it takes."""
    return FORMS[name][0](instances, bucket)


def loss(name: str) -> Callable[[Params, Any], jax.Array]:
    """Maps (params, what `prepare` returns) to the loss of the minibatch; to be compiled."""
    return FORMS[name][1]
