"""Networks over lattices."""

from collections import Counter

import jax
import numpy as np
import pytest
from cases import lstms
from cases.helpers import assert_close
from cases.models import LATTICES, random_params
from cases.training import train

import jedbatch
from jedbatch.data import synthetic_lattices
from jedbatch.models import lattice

MAKERS = [lattice.lstm_cells, lattice.gru_cells]


def lattice_lstm(p, characters, words):
    """The h of every character, as in section 3.2 of the paper; positions from 0."""
    h, c = [], []
    w_i, w_f, w_u = np.split(p["word"]["gates"]["kernel"], 3, axis=1)
    wb_i, wb_f, wb_u = np.split(p["word"]["gates"]["bias"], 3)
    c_i, c_o, c_u = np.split(p["character"]["gates"]["kernel"], 3, axis=1)
    cb_i, cb_o, cb_u = np.split(p["character"]["gates"]["bias"], 3)
    for j, character in enumerate(characters):
        x = p["embed_character"]["embedding"][character]
        before = (h[j - 1], c[j - 1]) if j else (np.zeros(4), np.zeros(4))
        read = np.concatenate([x, before[0]])
        i, o = lstms.sigmoid(read @ c_i + cb_i), lstms.sigmoid(read @ c_o + cb_o)
        u = np.tanh(read @ c_u + cb_u)
        gates, cells = [np.exp(i)], [u]
        for start, end, word in words:
            if end - 1 == j:
                y = p["embed_word"]["embedding"][word]
                read = np.concatenate([y, h[start]])
                of_word = lstms.sigmoid(read @ w_f + wb_f) * c[start] + lstms.sigmoid(
                    read @ w_i + wb_i
                ) * np.tanh(read @ w_u + wb_u)
                gate = lstms.linear(p["character"]["word_gate"], np.concatenate([x, of_word]))
                gates.append(np.exp(lstms.sigmoid(gate)))
                cells.append(of_word)
        if len(cells) > 1:
            c.append(sum(g / sum(gates) * cell for g, cell in zip(gates, cells, strict=True)))
        else:
            c.append((1 - i) * before[1] + i * u)
        h.append(o * np.tanh(c[j]))
    return np.stack(h)


def lattice_gru(p, characters, words):
    """The h of every character: one candidate for each arc, averaged with gates."""
    table = p["embed_word"]["embedding"]
    h = [np.zeros(4)]
    for j, character in enumerate(characters, 1):
        arcs = [(h[j - 1], p["embed_character"]["embedding"][character])]
        arcs += [(h[start], table[word]) for start, end, word in words if end == j]
        candidates = [lstms.gru(p["arc"]["gru"], *arc) for arc in arcs]
        gates = [lstms.sigmoid(lstms.linear(p["join"]["gate"], x)) for x in candidates]
        weighted = [g * x for g, x in zip(gates, candidates, strict=True)]
        h.append(sum(weighted) / sum(gates))
    return np.stack(h[1:])


@pytest.mark.parametrize(
    ("make", "equations"),
    [(lattice.lstm_cells, lattice_lstm), (lattice.gru_cells, lattice_gru)],
)
def test_lattices_against_their_equations(make, equations):
    """A lattice written out with NumPy in double precision."""
    cells = make(6, 6, 3, 4)
    p = lstms.double(random_params(cells, 1))
    characters, words, tags = LATTICES[0]
    logits = lstms.linear(p["output"], equations(p, characters, words))
    params = lstms.single(p)
    assert_close(lattice.scorer(cells)(params, LATTICES[0]), lstms.score(logits, list(tags)), 1e-5)
    (got,) = jedbatch.batch(lattice.tagger(cells), out_axes=None)(params, LATTICES[:1])
    assert_close(got, list(logits.astype(np.float32)), 1e-5)


def test_types_of_lattices():
    """A character cell for each number of words; one GRU for characters and words."""
    types = []
    for make in MAKERS:
        cells = make(6, 6, 3, 4)
        params = jax.eval_shape(cells.init, jax.random.key(0))
        graph = jedbatch.batch(lattice.scorer(cells)).plan(params, LATTICES).graph
        nodes = np.bincount(graph.node_type, minlength=len(graph.types)).tolist()
        counts = Counter()
        for t, count in zip(graph.types, nodes, strict=True):
            counts[t.name] += count
        types.append((Counter(t.name for t in graph.types), counts))
    (lstm_types, lstm_nodes), (gru_types, gru_nodes) = types
    assert (lstm_types["word"], lstm_types["character"]) == (1, 3)
    assert (lstm_nodes["word"], lstm_nodes["character"]) == (5, 8)
    assert (gru_types["arc"], gru_types["join"]) == (1, 2)
    assert (gru_nodes["arc"], gru_nodes["join"]) == (13, 4)


@pytest.mark.slow
def test_lattices_learn():
    """More than the most frequent tag."""
    lattices = synthetic_lattices(
        48, seed=1, num_characters=12, num_words=30, num_tags=3, mean_length=10, density=0.4
    )
    cells = lattice.gru_cells(12, 30, 3, 8)
    score = jedbatch.batch(lattice.scorer(cells))
    params = random_params(cells)
    trained = train(score, params, lattices, lambda x: len(x[2]), size=8, epochs=20, rate=0.02)
    tags = [tag for *_, tags in lattices for tag in tags]
    assert trained.losses[-1] < 0.5 * trained.losses[0]
    assert trained.right[-1] > tags.count(0) / len(tags) + 0.02
    assert trained.compiled == 0
