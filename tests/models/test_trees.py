"""The treebank reader, the synthetic treebank and the TreeLSTM."""

import gzip

import numpy as np
import pytest
from cases.helpers import assert_close
from cases.models import random_params

import jedbatch
from jedbatch.data import (
    Vocabulary,
    index_trees,
    num_nodes,
    parse_tree,
    read_trees,
    synthetic_treebank,
)
from jedbatch.models import parts, tree


def leaves(t):
    return [t] if len(t) == 2 else leaves(t[1]) + leaves(t[2])


def depth(t):
    return 0 if len(t) == 2 else 1 + max(depth(t[1]), depth(t[2]))


# --- data ---


def test_binary_trees_pass_through():
    text = "(3 (2 It) (3 (4 works) (2 .)))"
    assert parse_tree(text) == ("3", ("2", "It"), ("3", ("4", "works"), ("2", ".")))


def test_treebank_trees_become_binary():
    """Unary chains collapse, more than two children branch to the right."""
    text = "(S (NP (PRP I)) (VP (V saw) (NP stars) (ADV then) (ADV again)))"
    assert parse_tree(text) == (
        "S",
        ("NP+PRP", "I"),
        ("VP", ("V", "saw"), ("@VP", ("NP", "stars"), ("@VP", ("ADV", "then"), ("ADV", "again")))),
    )
    assert parse_tree("( (S (A a) (B b)))") == ("S", ("A", "a"), ("B", "b"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("(S (A a)", "1 brackets are not closed"),
        ("", "there is no tree"),
        ("S", "outside of any bracket, at column 0"),
        ("(A a) (B b)", "follows the end of the tree, at column 6"),
        ("(S () (B b))", "column 4 is empty"),
        ("(A)", r"column 2 holds 'A' alone; expected a label and a word"),
        ("(S (A a) (B))", "column 11 holds 'B' alone"),
        ("(S word (B b))", "words beside brackets"),
    ],
)
def test_what_is_no_tree(text, match):
    with pytest.raises(ValueError, match=match):
        parse_tree(text)


def test_reading_files(tmp_path):
    lines = "(S (A a) (B b))\n\n(S (A c) (B d))\n"
    plain, zipped = tmp_path / "trees.txt", tmp_path / "trees.txt.gz"
    plain.write_text(lines)
    with gzip.open(zipped, "wt") as file:
        file.write(lines)
    assert read_trees(plain) == read_trees(zipped)
    assert len(read_trees(plain)) == 2
    assert len(read_trees(plain, limit=1)) == 1
    plain.write_text(lines + "(S (A a)\n")
    with pytest.raises(ValueError, match=r"trees\.txt, line 4: .*expected one bracketed tree"):
        read_trees(plain)


def test_vocabulary():
    words, labels = Vocabulary(unknown="?"), Vocabulary()
    trees = [parse_tree("(S (A a) (B b))"), parse_tree("(S (A b) (B a))")]
    assert index_trees(trees, words, labels) == [(2, (0, 1), (1, 2)), (2, (0, 2), (1, 1))]
    words.freeze()
    labels.freeze()
    assert words["c"] == 0
    assert list(words) == ["?", "a", "b"]
    with pytest.raises(KeyError, match="unknown="):
        labels["C"]


def test_synthetic_treebank_is_shaped_like_a_real_one():
    trees = synthetic_treebank(1000, seed=1)
    lengths = [len(leaves(t)) for t in trees]
    assert 23 < np.mean(lengths) < 25
    assert [num_nodes(t) for t in trees] == [2 * n - 1 for n in lengths]
    assert 40 < np.percentile(lengths, 95) < 48
    assert 11 < np.mean([depth(t) for t in trees]) < 13
    assert trees == synthetic_treebank(1000, seed=1)
    assert trees[:5] != synthetic_treebank(5, seed=2)
    assert {t[0] for t in trees} == set(range(5))


# --- the model ---


def test_tree_lstm_against_its_equations():
    """One node of two leaves, written out with NumPy in double precision."""
    cells = tree.plain_cells(4, 3, 5)
    params = random_params(cells, 1)
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731

    def leaf(w):
        i, o, u = np.split(p["embedding"][w] @ p["leaf_w"] + p["leaf_b"], 3)
        c = sigmoid(i) * np.tanh(u)
        return sigmoid(o) * np.tanh(c), c

    (h1, c1), (h2, c2) = leaf(1), leaf(3)
    gates = np.concatenate([h1, h2]) @ p["node_w"] + p["node_b"]
    i, f1, f2, o, u = np.split(gates, 5)
    c = sigmoid(i) * np.tanh(u) + sigmoid(f1) * c1 + sigmoid(f2) * c2
    logits = sigmoid(o) * np.tanh(c) @ p["output_w"] + p["output_b"]
    got = jedbatch.batch(tree.classifier(cells))(params, [(0, (0, 1), (0, 3))])
    assert_close(got[0], logits.astype(np.float32), 1e-5)


def test_total_adds_up():
    for n in (1, 2, 7, 8, 9, 64, 100):
        assert float(parts.total([np.float32(i) for i in range(n)])) == n * (n - 1) / 2
