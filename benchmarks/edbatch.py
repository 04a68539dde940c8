"""The workloads of ED-Batch's released code, exactly: what its figures are compared with.

Embeddings and states have size h. Every model is written for one instance and returns its loss,
the sum of cross-entropies over nodes, words or characters. With σ the logistic function:

    treelstm      leaf  i, o = σ(W e + b), u = tanh(W e + b), c = i u, h = o tanh c
                  node  i, o = σ(U [h1; h2] + b), u = tanh(...), f_k = σ(F_k h_k + b_f),
                        c = i u + f_1 c1 + f_2 c2, h = o tanh c
    treelstm2     the same with two kinds of inner node, each with its own weights
    treegru       leaf  r, z = σ(U e + b), u = tanh(U (r e) + b), h = z e + (1 - z) u
                  node  the mean over both children of the same, with weights for each
    mvrnn         v = tanh(W [ml vr; mr vl] + b), m = M [ml; mr] + B; a word has its v and m
    bilstm        two LSTM layers in each direction, each layer above its own direction only;
                  tag   O tanh(H [f; b])
    bilstm_chars  the same; words seen fewer than five times are read by a BiLSTM over characters,
                  whose two last states, h / 2 each, are the embedding
    lattice_lstm  node 0 is zero; every character is an arc from its node to the next and every
                  word from its start to its end; an arc is an LSTM cell that reads the state it
                  leaves and an embedding; a node's h and c are sums over arcs that enter it
    lattice_gru   the same with GRU cells: r, z = σ(W x + U h + b), u = tanh(W x + U (r h) + b)
    nmt           x = tanh(W e + b), an LSTM encoder, a decoder fed with the right words, 256 scores

Scores are five (256 in `nmt`), without a bias: W h in trees and lattices.

The math of trees is written once, for vectors or for rows of a matrix: as cells for jedbatch here,
as plain functions in `by_hand`. Layers of sequences and lattices are cells of [x; h] here: one
product reads less than a projection of all x beforehand and its sum with another, and is 10 to 15 %
faster. Characters of a lattice add the state of a word that ends with them, or zeros, so that all
of them are of one type.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch import data
from jedbatch.models.parts import total

LABELS = 5
TARGETS = 256  # words that a translation may have
MATRICES = 1000  # words with a matrix of their own: those of a whole vocabulary take gigabytes

Params = dict[str, jax.Array]
State = tuple[jax.Array, ...]  # (h, c) of an LSTM, (h,) of a GRU, (v, m) of an MV-RNN


class Bank(NamedTuple):
    """Instances of integers, and how many words, characters, ... there are."""

    instances: list[Any]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Workload:
    """A workload.

    Attributes:
      name: as a key.
      title: as a headline.
      file: what a data directory has to hold, a name or several.
      load: maps (data directory or None, how many) to instances, synthetic ones for None.
      parameters: maps (sizes of the bank, h) to the parameters.
      loss: maps (params, instance) to the loss of one instance.
      flop: maps (instances, h) to the operations of their products, forwards, two per weight.
    """

    name: str
    title: str
    file: str | tuple[str, ...]
    load: Callable[[Path | None, int], Bank]
    parameters: Callable[[dict[str, int], int], Params]
    loss: Callable[[Params, Any], jax.Array]
    flop: Callable[[Sequence[Any], int], int]


def initial(shapes: dict[str, tuple[int, ...]]) -> Params:
    """Random weights and zero biases; names of embeddings end in `words` or `characters`."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        if name.endswith("_b"):
            params[name] = jnp.zeros(shape)
            continue
        scale = 1.0 if name.endswith(("words", "characters")) else shape[0] ** -0.5
        params[name] = scale * jax.random.normal(key, shape)
    return params


def cell(fn: Callable, name: str | None = None) -> Callable:
    """A cell; in the loop over instances a call of it runs what `jax.jit` makes of it."""
    static = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return jedbatch.cell(jax.jit(fn, static_argnames=static), name=name or fn.__name__)


@cell
def score(params: Params, h: jax.Array, label: Any) -> jax.Array:
    """The cross-entropy of a label."""
    return -jax.nn.log_softmax(h @ params["score_w"])[label]


# --- trees: (label, word) or (label, left, right) or (label, left, right, kind) ---


def lstm_above(gates: jax.Array, below: jax.Array | float = 0.0) -> State:
    """The state (h, c) for gates i, o and u; `below` is what c keeps of other states."""
    i, o, u = jnp.split(gates, 3, axis=-1)
    c = jax.nn.sigmoid(i) * jnp.tanh(u) + below
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def lstm_leaf(params: Params, word: Any) -> State:
    return lstm_above(params["words"][word] @ params["leaf_w"] + params["leaf_b"])


def lstm_node(params: Params, left: State, right: State, *, kind: int = 0) -> State:
    (h1, c1), (h2, c2) = left, right
    both = jnp.concatenate([h1, h2], axis=-1)
    f1 = jax.nn.sigmoid(h1 @ params[f"node{kind}_f1_w"] + params[f"node{kind}_f_b"])
    f2 = jax.nn.sigmoid(h2 @ params[f"node{kind}_f2_w"] + params[f"node{kind}_f_b"])
    gates = both @ params[f"node{kind}_w"] + params[f"node{kind}_b"]
    return lstm_above(gates, f1 * c1 + f2 * c2)


def gated(params: Params, name: str, e: jax.Array) -> jax.Array:
    """A GRU without input: z e + (1 - z) u, with the weights of a name."""
    r, z = jnp.split(jax.nn.sigmoid(e @ params[f"{name}_w"] + params[f"{name}_b"]), 2, axis=-1)
    u = jnp.tanh((r * e) @ params[f"{name}_u_w"] + params[f"{name}_u_b"])
    return z * e + (1 - z) * u


def gru_leaf(params: Params, word: Any) -> State:
    return (gated(params, "leaf", params["words"][word]),)


def gru_node(params: Params, left: State, right: State, *, kind: int = 0) -> State:
    return ((gated(params, "left", left[0]) + gated(params, "right", right[0])) / 2,)


def mv_leaf(params: Params, word: Any) -> State:
    return params["words"][word], params["matrix_words"][word]


def mv_node(params: Params, left: State, right: State, *, kind: int = 0) -> State:
    (v1, m1), (v2, m2) = left, right
    # Matrices are kept transposed: then their rows meet the weights, in one product for all nodes.
    crossed = [jnp.einsum("...j,...ji->...i", v, m) for v, m in ((v2, m1), (v1, m2))]
    v = jnp.tanh(jnp.concatenate(crossed, axis=-1) @ params["vector_w"] + params["vector_b"])
    return v, jnp.concatenate([m1, m2], axis=-1) @ params["matrix_w"] + params["matrix_b"]


def tree_loss(leaf: Callable, node: Callable) -> Callable[[Params, Any], jax.Array]:
    """The loss of all nodes of a tree."""
    leaf, node = cell(leaf, name="leaf"), cell(node, name="node")

    def loss(params: Params, root: Any) -> jax.Array:
        losses = []

        def visit(root: Any) -> State:
            label, *below = root
            if len(below) == 1:
                state = leaf(params, *below)
            else:
                kind = {"kind": below[2]} if len(below) == 3 else {}
                state = node(params, visit(below[0]), visit(below[1]), **kind)
            losses.append(score(params, state[0], label))
            return state

        visit(root)
        return total(losses)

    return loss


def lstm_tree(sizes: dict[str, int], h: int, kinds: int = 1) -> Params:
    shapes = {"words": (sizes["words"], h), "leaf_w": (h, 3 * h), "leaf_b": (3 * h,)}
    for kind in range(kinds):
        weights = {"w": (2 * h, 3 * h), "b": (3 * h,), "f1_w": (h, h), "f2_w": (h, h), "f_b": (h,)}
        shapes |= {f"node{kind}_{name}": shape for name, shape in weights.items()}
    return initial(shapes | {"score_w": (h, LABELS)})


def gru_tree(sizes: dict[str, int], h: int) -> Params:
    shapes: dict[str, tuple[int, ...]] = {"words": (sizes["words"], h), "score_w": (h, LABELS)}
    for name in ("leaf", "left", "right"):
        weights = {"w": (h, 2 * h), "b": (2 * h,), "u_w": (h, h), "u_b": (h,)}
        shapes |= {f"{name}_{part}": shape for part, shape in weights.items()}
    return initial(shapes)


def mv_tree(sizes: dict[str, int], h: int) -> Params:
    shapes = {
        "words": (sizes["words"], h),
        "matrix_words": (sizes["words"], h, h),
        "vector_w": (2 * h, h),
        "vector_b": (h,),
        "matrix_w": (2 * h, h),
        "matrix_b": (h, h),
        "score_w": (h, LABELS),
    }
    params = initial(shapes)
    return params | {"matrix_words": params["matrix_words"] * h**-0.5}


def tree_flop(leaf: int, node: int, cubed: int = 0) -> Callable[[Sequence[Any], int], int]:
    """Counts operations: `leaf` h² for a leaf, `node` h² + `cubed` h³ for an inner node."""

    def flop(trees: Sequence[Any], h: int) -> int:
        leaves, nodes = 0, 0
        stack = list(trees)
        while stack:
            _, *below = stack.pop()
            leaves += len(below) == 1
            nodes += 1
            stack += below[:2] if len(below) > 1 else ()
        inner = (node + cubed * h) * h * h
        return leaf * h * h * leaves + inner * (nodes - leaves) + 2 * h * LABELS * nodes

    return flop


# --- sequences: (words, tags), or (source, target) ---


def lstm(gates: jax.Array, c: jax.Array) -> State:
    """The state (h, c) after gates i, f, u and o, in PyTorch's order."""
    i, f, u, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def lstm_step(params: Params, x: jax.Array, state: State, *, name: str) -> State:
    """The state of an LSTM layer after an input."""
    h, c = state
    return lstm(jnp.concatenate([x, h]) @ params[f"{name}_w"] + params[f"{name}_b"], c)


def tag_logits(params: Params, forward: jax.Array, backward: jax.Array) -> jax.Array:
    both = jnp.concatenate([forward, backward], axis=-1)
    return jnp.tanh(both @ params["hidden_w"]) @ params["score_w"]


def translation_input(params: Params, word: Any, *, side: str) -> jax.Array:
    """Returns the input of the layer of a side for a word."""
    return jnp.tanh(params[f"{side}_words"][word] @ params[f"{side}_e_w"] + params[f"{side}_e_b"])


step = cell(lstm_step, name="step")
translated = cell(translation_input, name="translated")


@cell
def embed(params: Params, number: Any, *, name: str) -> jax.Array:
    return params[name][number]


@cell
def join(forward: jax.Array, backward: jax.Array) -> jax.Array:
    return jnp.concatenate([forward, backward])


@cell
def tag(params: Params, forward: jax.Array, backward: jax.Array, label: Any) -> jax.Array:
    return -jax.nn.log_softmax(tag_logits(params, forward, backward))[label]


def chain(params: Params, inputs: Iterable[jax.Array], name: str, state: Any = None) -> list[State]:
    """The states after each input of a layer; the first is zero by default."""
    if state is None:
        state = (np.zeros(params[f"{name}_b"].shape[0] // 4, np.float32),) * 2
    states = []
    for x in inputs:
        state = step(params, x, state, name=name)
        states.append(state)
    return states


WAYS = (("forward", 1), ("backward", -1))


def read_word(params: Params, entry: Any) -> jax.Array:
    """The embedding of a word: by number, or by characters if it is rare."""
    if not isinstance(entry, tuple):
        return embed(params, entry, name="words")
    characters = [embed(params, number, name="characters") for number in entry]
    return join(*(chain(params, characters[::o], f"{way}_spell")[-1][0] for way, o in WAYS))


def tagger_loss(params: Params, sentence: Any) -> jax.Array:
    words, tags = sentence
    embedded = [read_word(params, entry) for entry in words]
    results = []
    for way, order in WAYS:
        below = chain(params, embedded[::order], f"{way}1")
        above = chain(params, [h for h, _ in below], f"{way}2")
        results.append([h for h, _ in above][::order])
    return total([tag(params, *read) for read in zip(*results, tags, strict=True)])


def translation_loss(params: Params, pair: Any) -> jax.Array:
    source, target = pair
    read = [translated(params, number, side="source") for number in source]
    fed = [translated(params, number, side="target") for number in (data.BEGIN, *target[:-1])]
    *_, state = chain(params, read, "source")
    states = chain(params, fed, "target", state)
    return total([score(params, h, word) for (h, _), word in zip(states, target, strict=True)])


def layer(name: str, size: int, h: int) -> dict[str, tuple[int, ...]]:
    """Shapes of an LSTM layer that reads vectors of a size."""
    return {f"{name}_w": (size + h, 4 * h), f"{name}_b": (4 * h,)}


def tagger(sizes: dict[str, int], h: int) -> Params:
    shapes = {"words": (sizes["words"], h), "hidden_w": (2 * h, h), "score_w": (h, LABELS)}
    for way, _ in WAYS:
        shapes |= layer(f"{way}1", h, h) | layer(f"{way}2", h, h)
        if "characters" in sizes:
            shapes |= layer(f"{way}_spell", h, h // 2)
    if "characters" in sizes:
        shapes["characters"] = (sizes["characters"], h)
    return initial(shapes)


def translator(sizes: dict[str, int], h: int) -> Params:
    shapes: dict[str, tuple[int, ...]] = {"score_w": (h, TARGETS)}
    for side in ("source", "target"):
        shapes |= {f"{side}_words": (sizes[side], h), f"{side}_e_w": (h, h), f"{side}_e_b": (h,)}
        shapes |= layer(side, h, h)
    return initial(shapes)


def tagger_flop(sentences: Sequence[Any], h: int) -> int:
    words = [entry for words, _ in sentences for entry in words]
    letters = sum(len(entry) for entry in words if isinstance(entry, tuple))
    spelling = 2 * 2 * (h + h // 2) * 2 * h  # of a character, both ways
    return (4 * 16 * h * h + 4 * h * h + 2 * h * LABELS) * len(words) + spelling * letters


def translation_flop(pairs: Sequence[Any], h: int) -> int:
    read = sum(len(source) for source, _ in pairs)
    written = sum(len(target) for _, target in pairs)
    return 18 * h * h * (read + written) + 2 * h * TARGETS * written


# --- lattices: (characters, words, tags) ---


def gru_step(params: Params, x: jax.Array, state: State, *, name: str) -> State:
    """The state of a GRU after an input."""
    (h,) = state
    opened = jnp.concatenate([x, h]) @ params[f"{name}_w"] + params[f"{name}_b"]
    r, z = jnp.split(jax.nn.sigmoid(opened), 2)
    u = jnp.tanh(jnp.concatenate([x, r * h]) @ params[f"{name}_u_w"] + params[f"{name}_u_b"])
    return (z * h + (1 - z) * u,)


def add(*states: State) -> State:
    """The sum of states."""
    return tuple(functools.reduce(jnp.add, parts) for parts in zip(*states, strict=True))


plus = cell(add, name="plus")


def lattice_loss(arc: Callable, parts: int) -> Callable[[Params, Any], jax.Array]:
    """The loss of all nodes but the first of a lattice; a state has one or two parts."""

    @cell
    def word(params: Params, number: Any, state: State) -> State:
        return arc(params, params["words"][number], state, name="word")

    @cell
    def character(params: Params, number: Any, state: State, words: State) -> State:
        return add(arc(params, params["characters"][number], state, name="character"), words)

    def loss(params: Params, lattice: Any) -> jax.Array:
        characters, words, tags = lattice
        state = zero = (jnp.zeros(params["characters"].shape[1]),) * parts
        leaving: dict[int, list[tuple[int, int]]] = {}
        for start, end, number in words:
            leaving.setdefault(start, []).append((end, number))
        entering: dict[int, list[State]] = {}
        losses = []
        for i, (number, label) in enumerate(zip(characters, tags, strict=True)):
            for end, spelled in leaving.get(i, ()):
                entering.setdefault(end, []).append(word(params, spelled, state))
            words_here = entering.pop(i + 1, [zero])
            extra = plus(*words_here) if len(words_here) > 1 else words_here[0]
            state = character(params, number, state, extra)
            losses.append(score(params, state[0], label))
        return total(losses)

    return loss


def lattice(sizes: dict[str, int], h: int, gru: bool = False) -> Params:
    shapes: dict[str, tuple[int, ...]] = {"score_w": (h, LABELS)}
    for name in ("character", "word"):
        shapes |= {f"{name}s": (sizes[f"{name}s"], h)} | layer(name, h, h)
        if gru:
            parts = {"w": (2 * h, 2 * h), "b": (2 * h,), "u_w": (2 * h, h), "u_b": (h,)}
            shapes |= {f"{name}_{part}": shape for part, shape in parts.items()}
    return initial(shapes)


def lattice_flop(per_arc: int) -> Callable[[Sequence[Any], int], int]:
    """Counts operations; `per_arc` times h² for an arc."""

    def flop(lattices: Sequence[Any], h: int) -> int:
        characters = sum(len(x[0]) for x in lattices)
        words = sum(len(x[1]) for x in lattices)
        return per_arc * h * h * (characters + words) + 2 * h * LABELS * characters

    return flop


# --- where instances come from ---


def few(labels: Iterable[int], most: int = LABELS) -> tuple[int, ...]:
    """Labels below a number: which they are makes no difference to the time."""
    return tuple(label % most for label in labels)


def few_words(root: Any, most: int) -> Any:
    """A tree with words below a number."""
    label, *below = root
    if len(below) == 1:
        return label, below[0] % most
    return label, *(few_words(child, most) for child in below)


def trees(path: Path | None, count: int, kinds: int = 1, most: int | None = None) -> Bank:
    """Sentiment trees; with `most`, their words are numbers below it."""
    if path is None:
        found, num_words = data.synthetic_treebank(count, mean_length=19.1), 500
    else:
        words = data.Vocabulary()
        read = data.read_trees(path, limit=count)
        found = data.index_trees(read, words, data.Vocabulary(list("01234")))
        num_words = len(words)
    if most:
        found, num_words = [few_words(x, most) for x in found], most
    if kinds == 2:
        found = data.with_kinds(found)
    return Bank(found, {"words": num_words})


def sentences(path: Path | None, count: int, spelled: bool = False) -> Bank:
    """Tagged sentences."""
    words, characters = data.Vocabulary(), data.Vocabulary()
    if path is None:
        found, sizes = data.synthetic_tagged(count, mean_length=23, spelled=spelled), (500, 40)
    else:
        read = data.read_tagged(path, limit=None if spelled else count)  # what is rare is for all
        found = data.index_tagged(read, words, data.Vocabulary(), characters if spelled else None)
        sizes = len(words), len(characters)
    names = ("words", "characters") if spelled else ("words",)
    return Bank(
        [(entries, few(tags)) for entries, tags in found], dict(zip(names, sizes, strict=False))
    )


def lattices(path: Path | None, count: int, tags: Path | None = None) -> Bank:
    """Lattices, those made up with as many characters and words as the peers'."""
    if path is None:
        found = data.synthetic_lattices(count, mean_length=44.1, density=23.3 / 44.1)
        sizes = 300, 500
    else:
        characters, words = data.Vocabulary(), data.Vocabulary()
        read = data.read_lattices(path, tags, limit=count)
        found = data.index_lattices(read, characters, words, data.Vocabulary())
        sizes = len(characters), len(words)
    return Bank(
        [(text, words, few(tags)) for text, words, tags in found],
        dict(zip(("characters", "words"), sizes, strict=True)),
    )


def translations(path: Path | None, count: int) -> Bank:
    """Pairs of sentences."""
    if path is None:
        found, num_words = data.synthetic_translations(count, mean_length=20), 500
    else:
        words = data.Vocabulary()
        read = data.read_translations(path, limit=count)
        found = data.index_translations(read, words, data.Vocabulary(("<s>", "</s>")))
        num_words = len(words)
    return Bank(
        [(source, few(target, TARGETS)) for source, target in found],
        {"source": num_words, "target": TARGETS},
    )


def workload(
    name: str, title: str, file: str | tuple[str, ...], read: Callable[..., Bank], *parts: Any
) -> Workload:
    """A workload whose instances are the first of a directory, or made up; none occurs twice."""
    files = (file,) if isinstance(file, str) else file

    def load(directory: Path | None, count: int) -> Bank:
        paths = [None if directory is None else Path(directory) / name for name in files]
        more = count + count // 10 + 10  # some occur twice
        instances, sizes = read(paths[0], more, *paths[1:])
        found = list(dict.fromkeys(instances))[:count]
        if len(found) < count:
            where = " and ".join(map(str, paths)) if directory else "made up data"
            raise ValueError(f"{where}: {len(found)} different instances; expected {count}")
        return Bank(found, sizes)

    return Workload(name, title, file, load, *parts)


TREES, SENTENCES, PAIRS = "sst.trees.txt.gz", "wikiner.jsonl.gz", "iwslt15_envi.tsv.gz"
LATTICES = ("weibo_lattice.jsonl.gz", "weibo_ner.jsonl.gz")

TREE_OF_LSTMS = tree_loss(lstm_leaf, lstm_node), tree_flop(leaf=6, node=16)
TWO_KINDS = [functools.partial(f, kinds=2) for f in (trees, lstm_tree)]
TREE_OF_GRUS = tree_loss(gru_leaf, gru_node), tree_flop(leaf=6, node=12)
MATRIX_TREE = tree_loss(mv_leaf, mv_node), tree_flop(leaf=0, node=8, cubed=4)
TAGGER = tagger, tagger_loss, tagger_flop
LATTICE_OF_LSTMS = lattice_loss(lstm_step, 2), lattice_flop(16)
LATTICE_OF_GRUS = lattice_loss(gru_step, 1), lattice_flop(12)
few_words_trees = functools.partial(trees, most=MATRICES)
spelled_sentences = functools.partial(sentences, spelled=True)
gru_lattice = functools.partial(lattice, gru=True)

WORKLOADS = {
    made.name: made
    for made in (
        workload("treelstm", "TreeLSTM", TREES, trees, lstm_tree, *TREE_OF_LSTMS),
        workload("treelstm2", "TreeLSTM-2Type", TREES, *TWO_KINDS, *TREE_OF_LSTMS),
        workload("treegru", "TreeGRU", TREES, trees, gru_tree, *TREE_OF_GRUS),
        workload("mvrnn", "MV-RNN", TREES, few_words_trees, mv_tree, *MATRIX_TREE),
        workload("bilstm", "BiLSTM tagger", SENTENCES, sentences, *TAGGER),
        workload("bilstm_chars", "BiLSTM with characters", SENTENCES, spelled_sentences, *TAGGER),
        workload("lattice_lstm", "LatticeLSTM", LATTICES, lattices, lattice, *LATTICE_OF_LSTMS),
        workload("lattice_gru", "LatticeGRU", LATTICES, lattices, gru_lattice, *LATTICE_OF_GRUS),
        workload("nmt", "NMT", PAIRS, translations, translator, translation_loss, translation_flop),
    )
}
