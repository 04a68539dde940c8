"""The workloads in PyTorch: as its users write them, and batched by hand.

`eager` computes an instance after the other, node by node. `by_hand` computes minibatches: trees
level by level, which gather the states of children from a buffer of all nodes; sequences packed, in
`torch.nn.LSTM`; lattices in steps over characters, where words gather the states they leave. A
dynamic framework needs no buckets: arrays have the sizes they need.

Weights have the names and values that they have in `edbatch`. There is no hand-batched form of
`bilstm_chars`: packing rare words beside sentences is rarely done and says nothing new.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from benchmarks.edbatch import WAYS
from benchmarks.rivals import by_hand as prepared_by_hand

Params = dict[str, Tensor]
State = tuple[Tensor, ...]


def parameters(params: dict[str, jax.Array]) -> Params:
    """The same parameters as tensors that collect gradients."""
    return {name: torch.tensor(np.asarray(x)).requires_grad_() for name, x in params.items()}


def tensor(x: Any) -> Tensor:
    return torch.as_tensor(np.asarray(x), dtype=torch.int64)


# --- the math, of vectors or of rows ---


def linear(params: Params, name: str, *x: Tensor) -> Tensor:
    x = torch.cat(x, -1) if len(x) > 1 else x[0]
    return x @ params[f"{name}w"] + params[f"{name}b"]


def lstm_above(gates: Tensor, below: Tensor | float = 0.0) -> State:
    i, o, u = gates.chunk(3, -1)
    c = torch.sigmoid(i) * torch.tanh(u) + below
    return torch.sigmoid(o) * torch.tanh(c), c


def lstm_leaf(params: Params, word: Tensor) -> State:
    return lstm_above(linear(params, "leaf_", params["words"][word]))


def lstm_node(params: Params, left: State, right: State, kind: int = 0) -> State:
    (h1, c1), (h2, c2), name = left, right, f"node{kind}_"
    f1 = torch.sigmoid(h1 @ params[f"{name}f1_w"] + params[f"{name}f_b"])
    f2 = torch.sigmoid(h2 @ params[f"{name}f2_w"] + params[f"{name}f_b"])
    return lstm_above(linear(params, name, h1, h2), f1 * c1 + f2 * c2)


def gated(params: Params, name: str, e: Tensor) -> Tensor:
    r, z = torch.sigmoid(linear(params, name, e)).chunk(2, -1)
    return z * e + (1 - z) * torch.tanh(linear(params, f"{name}u_", r * e))


def gru_leaf(params: Params, word: Tensor) -> State:
    return (gated(params, "leaf_", params["words"][word]),)


def gru_node(params: Params, left: State, right: State, kind: int = 0) -> State:
    return ((gated(params, "left_", left[0]) + gated(params, "right_", right[0])) / 2,)


def mv_leaf(params: Params, word: Tensor) -> State:
    return params["words"][word], params["matrix_words"][word]


def mv_node(params: Params, left: State, right: State, kind: int = 0) -> State:
    (v1, m1), (v2, m2) = left, right
    crossed = [(v.unsqueeze(-2) @ m).squeeze(-2) for v, m in ((v2, m1), (v1, m2))]
    return torch.tanh(linear(params, "vector_", *crossed)), linear(params, "matrix_", m1, m2)


def lstm_step(params: Params, x: Tensor, state: State, name: str) -> State:
    i, f, u, o = linear(params, f"{name}_", x, state[0]).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(u)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_step(params: Params, x: Tensor, state: State, name: str) -> State:
    (h,) = state
    r, z = torch.sigmoid(linear(params, f"{name}_", x, h)).chunk(2, -1)
    return (z * h + (1 - z) * torch.tanh(linear(params, f"{name}_u_", x, r * h)),)


def scored(params: Params, h: Tensor, labels: Any) -> Tensor:
    """The sum of cross-entropies; labels of padding are negative."""
    labels = torch.as_tensor(labels, dtype=torch.int64)
    ignored = prepared_by_hand.NOTHING
    return cross_entropy(h @ params["score_w"], labels, reduction="sum", ignore_index=ignored)


def tagged(params: Params, forward: Tensor, backward: Tensor, tags: Any) -> Tensor:
    both = torch.cat([forward, backward], -1)
    return scored(params, torch.tanh(both @ params["hidden_w"]), tags)


def translation_input(params: Params, words: Any, side: str) -> Tensor:
    words = torch.as_tensor(words, dtype=torch.int64)
    return torch.tanh(linear(params, f"{side}_e_", params[f"{side}_words"][words]))


def node_zero(params: Params, parts: int, *rows: int) -> State:
    """The first state of lattices, of one or two parts."""
    return (torch.zeros(*rows, params["characters"].shape[1]),) * parts


# --- instance by instance ---


def eager_tree(leaf: Callable, node: Callable, params: Params, root: Any) -> Tensor:
    losses = []

    def visit(root: Any) -> State:
        label, *below = root
        if len(below) == 1:
            state = leaf(params, below[0])
        else:
            state = node(params, visit(below[0]), visit(below[1]), *below[2:])
        losses.append(scored(params, state[0], label))
        return state

    visit(root)
    return torch.stack(losses).sum()


def chain(params: Params, inputs: Sequence[Tensor], name: str, state: Any = None) -> list[State]:
    """The states after each input of a layer."""
    state = state or (torch.zeros(len(params[f"{name}_b"]) // 4),) * 2
    states = []
    for x in inputs:
        state = lstm_step(params, x, state, name)
        states.append(state)
    return states


def read_word(params: Params, entry: Any) -> Tensor:
    if not isinstance(entry, tuple):
        return params["words"][entry]
    letters = [params["characters"][number] for number in entry]
    last = [chain(params, letters[::order], f"{way}_spell")[-1][0] for way, order in WAYS]
    return torch.cat(last)


def eager_sentence(params: Params, sentence: Any) -> Tensor:
    words, tags = sentence
    x = [read_word(params, entry) for entry in words]
    results = []
    for way, order in WAYS:
        below = chain(params, x[::order], f"{way}1")
        above = chain(params, [h for h, _ in below], f"{way}2")
        results.append(torch.stack([h for h, _ in above][::order]))
    return tagged(params, *results, tags)


def eager_translation(params: Params, pair: Any) -> Tensor:
    source, target = pair
    state = chain(params, list(translation_input(params, source, "source")), "source")[-1]
    fed = translation_input(params, (0, *target[:-1]), "target")
    states = chain(params, list(fed), "target", state)
    return scored(params, torch.stack([h for h, _ in states]), target)


def eager_lattice(arc: Callable, parts: int, params: Params, lattice: Any) -> Tensor:
    characters, words, tags = lattice
    nodes: list[State] = [node_zero(params, parts)]
    entering: dict[int, list[tuple[int, int]]] = {}
    for start, end, word in words:
        entering.setdefault(end, []).append((start, word))
    for i, number in enumerate(characters):
        arcs = [arc(params, params["characters"][number], nodes[i], "character")]
        for start, word in entering.get(i + 1, ()):
            arcs.append(arc(params, params["words"][word], nodes[start], "word"))
        nodes.append(tuple(sum(x) for x in zip(*arcs, strict=True)))
    return scored(params, torch.stack([node[0] for node in nodes[1:]]), tags)


# --- batched by hand ---


def trees_by_levels(leaf: Callable, node: Callable, params: Params, trees: Any) -> Tensor:
    words, levels, labels = trees
    states = leaf(params, words)
    buffer = tuple(x.new_zeros(len(labels), *x.shape[1:]) for x in states)
    row = 0

    def put(states: State) -> None:
        nonlocal row
        for x, new in zip(buffer, states, strict=True):
            x[row : row + len(new)] = new
        row += len(states[0])

    put(states)
    for level in levels:
        below = [[tuple(x[side] for x in buffer) for side in sides] for sides in level]
        for kind, (left, right) in enumerate(below):
            if len(left[0]):
                put(node(params, left, right, kind))
    return scored(params, buffer[0], labels)


def packed_lstm(
    params: Params, name: str, layers: Sequence[str], x: PackedSequence, state: State | None = None
) -> tuple[PackedSequence, State]:
    """`torch.nn.LSTM` with the weights of layers, given by what follows the name."""
    size = len(params[f"{name}{layers[0]}_b"]) // 4
    module = lstm_module(params[f"{name}{layers[0]}_w"].shape[0] - size, size, len(layers))
    weights = {}
    for number, layer in enumerate(layers):
        w = params[f"{name}{layer}_w"].T
        weights[f"weight_ih_l{number}"] = w[:, :-size]
        weights[f"weight_hh_l{number}"] = w[:, -size:]
        weights[f"bias_ih_l{number}"] = params[f"{name}{layer}_b"]
        weights[f"bias_hh_l{number}"] = torch.zeros(4 * size)
    return torch.func.functional_call(module, weights, (x, state))


@functools.cache
def lstm_module(inputs: int, size: int, layers: int) -> torch.nn.LSTM:
    return torch.nn.LSTM(inputs, size, layers)


def packed(x: Tensor, lengths: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, lengths, enforce_sorted=False)


def sentences_packed(params: Params, sentences: Any) -> Tensor:
    words, tags, lengths, turned = sentences
    x = params["words"][words]
    column = torch.arange(len(lengths))
    results = []
    for way, order in WAYS:
        turn = (lambda x: x) if order > 0 else (lambda x: x[turned, column])
        h, _ = packed_lstm(params, way, "12", packed(turn(x), lengths))
        results.append(turn(pad_packed_sequence(h)[0]))
    return tagged(params, *(x.flatten(0, 1) for x in results), tags.flatten())


def translations_packed(params: Params, pairs: Any) -> Tensor:
    source, fed, target, source_lengths, lengths = pairs
    read = packed(translation_input(params, source, "source"), source_lengths)
    _, state = packed_lstm(params, "source", [""], read)
    written = packed(translation_input(params, fed, "target"), lengths)
    h, _ = packed_lstm(params, "target", [""], written, state)
    return scored(params, pad_packed_sequence(h)[0].flatten(0, 1), target.flatten())


def lattices_by_steps(arc: Callable, parts: int, params: Params, lattices: Any) -> Tensor:
    characters, tags, steps = lattices
    read, spelled = params["characters"][characters], params["words"]
    nodes: list[State] = [node_zero(params, parts, characters.shape[1])]
    for x, (words, row, back) in zip(read, steps, strict=True):
        state = arc(params, x, nodes[-1], "character")
        if len(words):
            window = nodes[-int(back.max()) :]
            left = tuple(torch.stack(x)[len(window) - back, row] for x in zip(*window, strict=True))
            arcs = arc(params, spelled[words], left, "word")
            both = zip(state, arcs, strict=True)
            state = tuple(x.index_add(0, row, new) for x, new in both)
        nodes.append(state)
    h = torch.stack([node[0] for node in nodes[1:]])
    return scored(params, h.flatten(0, 1), tags.flatten())


# --- what is prepared for it ---


def prepare_trees(found: prepared_by_hand.Trees) -> Any:
    levels = [[(tensor(a), tensor(b)) for a, b in level] for level in found.levels]
    return tensor(found.words), levels, tensor(found.labels)


def prepare_sentences(found: prepared_by_hand.Sentences) -> Any:
    lengths = (found.tags != prepared_by_hand.NOTHING).sum(0)
    time = np.arange(len(found.tags))[:, None]
    turned = np.where(time < lengths, lengths - 1 - time, time)
    return tensor(found.words), tensor(found.tags), tensor(lengths), tensor(turned)


def prepare_translations(found: prepared_by_hand.Translations) -> Any:
    sides = found.source, found.target
    lengths = [tensor((x != prepared_by_hand.NOTHING).sum(0)) for x in sides]
    return tensor(found.source), tensor(found.fed), tensor(found.target), *lengths


def prepare_lattices(found: prepared_by_hand.Lattices) -> Any:
    steps = []
    for words, row, back in zip(found.words, found.lattice, found.back, strict=True):
        there = row < found.tags.shape[1]
        steps.append([tensor(x[there]) for x in (words, row, back)])
    return tensor(found.characters), tensor(found.tags), steps


# (an instance, what is prepared, a minibatch)
def tree_forms(leaf: Callable, node: Callable) -> tuple[Callable, Callable, Callable]:
    parts = leaf, node
    eager, batched = (functools.partial(f, *parts) for f in (eager_tree, trees_by_levels))
    return eager, prepare_trees, batched


def lattice_forms(arc: Callable, parts: int) -> tuple[Callable, Callable, Callable]:
    eager, batched = (functools.partial(f, arc, parts) for f in (eager_lattice, lattices_by_steps))
    return eager, prepare_lattices, batched


FORMS = {
    "treelstm": tree_forms(lstm_leaf, lstm_node),
    "treelstm2": tree_forms(lstm_leaf, lstm_node),
    "treegru": tree_forms(gru_leaf, gru_node),
    "mvrnn": tree_forms(mv_leaf, mv_node),
    "bilstm": (eager_sentence, prepare_sentences, sentences_packed),
    "bilstm_chars": (eager_sentence, None, None),
    "lattice_lstm": lattice_forms(lstm_step, 2),
    "lattice_gru": lattice_forms(gru_step, 1),
    "nmt": (eager_translation, prepare_translations, translations_packed),
}


def eager(name: str) -> Callable[[Params, Sequence[Any]], Tensor]:
    """Maps (params, instances) to the loss of the minibatch, one instance after the other."""
    one = FORMS[name][0]
    return lambda params, instances: torch.stack([one(params, x) for x in instances]).sum()


def has_form_by_hand(name: str) -> bool:
    """Whether `prepare` and `by_hand` know a workload."""
    return FORMS[name][1] is not None


def prepare(name: str, instances: Sequence[Any]) -> Any:
    """The tensors of a minibatch."""
    return form_by_hand(name)[0](prepared_by_hand.prepare(name, instances, bucket=False))


def by_hand(name: str) -> Callable[[Params, Any], Tensor]:
    """Maps (params, what `prepare` returns) to the loss of the minibatch."""
    return form_by_hand(name)[1]


def form_by_hand(name: str) -> tuple[Callable, Callable]:
    _, prepare, batched = FORMS[name]
    if prepare is None:
        named = ", ".join(n for n, (_, found, _) in FORMS.items() if found)
        raise ValueError(
            f"{name!r} has no form batched by hand in PyTorch; these have one: {named}. "
            f"`eager({name!r})` computes it instance by instance."
        )
    return prepare, batched
