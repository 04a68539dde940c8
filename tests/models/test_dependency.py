"""The reader of pairs of sentences, their synthetic twin and the child-sum TreeLSTM."""

import gzip
import json

import jax
import numpy as np
import pytest
from cases.helpers import assert_close, check
from cases.models import PAIRS_OF_TREES, random_params

import jedbatch
from jedbatch.data import (
    Vocabulary,
    dependency_tree,
    index_pairs,
    num_words,
    read_pairs,
    synthetic_pairs,
)
from jedbatch.models import childsum


def nodes(root):
    return [root, *(n for child in root[1:] for n in nodes(child))]


def depth(root):
    return max((1 + depth(child) for child in root[1:]), default=0)


def sentence(rng, length):
    """(words, heads) of a random tree: every word but the first depends on an earlier one."""
    order = rng.permutation(length)
    heads = np.zeros(length, int)
    for i in range(1, length):
        heads[order[i]] = 1 + order[rng.integers(i)]
    return [f"w{w}" for w in rng.integers(0, 20, length)], heads.tolist()


# --- data ---


def test_trees_of_heads():
    words = ["A", "woman", "is", "freeing", "a", "fish"]
    assert dependency_tree(words, [2, 4, 4, 0, 6, 4]) == (
        "freeing",
        ("woman", ("A",)),
        ("is",),
        ("fish", ("a",)),
    )
    assert dependency_tree(["No"], [0]) == ("No",)


@pytest.mark.parametrize("seed", range(5))
def test_reading_what_was_written(seed, tmp_path):
    """Of every word: itself, and in order the words that depend on it."""
    rng = np.random.default_rng(seed)
    written = [
        (sentence(rng, 1 + int(rng.integers(12))), sentence(rng, 1 + int(rng.integers(12))))
        for _ in range(6)
    ]
    plain, zipped = tmp_path / "pairs.jsonl", tmp_path / "pairs.jsonl.gz"
    sides = [[{"tokens": w, "heads": h, "rels": ["x"] * len(w)} for w, h in p] for p in written]
    lines = [json.dumps({"score": 1 + i / 2, "a": a, "b": b}) for i, (a, b) in enumerate(sides)]
    plain.write_text("\n\n".join(lines) + "\n")
    with gzip.open(zipped, "wt") as file:
        file.write("\n".join(lines))
    got = read_pairs(plain)
    assert got == read_pairs(zipped)
    assert read_pairs(plain, limit=2) == got[:2]
    assert [score for *_, score in got] == [1 + i / 2 for i in range(6)]
    for pair, sentences in zip(got, written, strict=True):
        for root, (words, heads) in zip(pair, sentences, strict=False):
            expected = sorted(
                (word, *(words[k] for k, head in enumerate(heads) if head == i))
                for i, word in enumerate(words, 1)
            )
            assert sorted((n[0], *(child[0] for child in n[1:])) for n in nodes(root)) == expected
            assert num_words(root) == len(words)


GOOD = {"tokens": ["It", "works"], "heads": [2, 0]}


def pair(**changes):
    return json.dumps({"score": 3, "a": GOOD, "b": GOOD | changes})


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "Expecting property name"),
        ("[1]", "no object"),
        (json.dumps({"score": 3, "a": GOOD}), 'no "b"'),
        (json.dumps({"score": 3, "a": GOOD, "b": [GOOD]}), '"b" is .*, not an object'),
        (json.dumps({"score": "3", "a": GOOD, "b": GOOD}), "\"score\" is '3', not a number"),
        (json.dumps({"score": True, "a": GOOD, "b": GOOD}), '"score" is True, not a number'),
        (json.dumps({"score": 5.5, "a": GOOD, "b": GOOD}), "from 1 to 5"),
        (pair(tokens="It works"), '"tokens" is .*, not a list'),
        (pair(tokens=["It", 3]), 'sentence "b": "tokens" holds 3; expected strings'),
        (pair(heads=[2]), 'sentence "b": there are 2 words and 1 heads'),
        (pair(heads=[3, 0]), "head of word 1 is 3; expected a number from 0 to 2"),
        (pair(heads=[True, 0]), "head of word 1 is True"),
        (pair(heads=[0, 0]), "2 words have the head 0"),
        (pair(heads=[2, 1]), "0 words have the head 0"),
        (pair(tokens=["a", "b", "c"], heads=[0, 3, 2]), "word 2 lead in a circle"),
        (pair(tokens=[], heads=[]), '"tokens" is empty'),
    ],
)
def test_malformed_files(tmp_path, line, match):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{pair()}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"pairs\.jsonl, line 3: .*{match}.*; expected one pair"):
        read_pairs(path)
    assert len(read_pairs(path, limit=1)) == 1


def test_numbers_for_words():
    words = Vocabulary()
    pairs = [(("b", ("a",), ("c", ("a",), ("b",))), ("a", ("d", ("e", ("a",)))), 2.0)]
    ((left, right, score),) = index_pairs(pairs, words)
    names = list(words)
    spell = lambda root: (names[root[0]], *map(spell, root[1:]))  # noqa: E731
    assert (spell(left), spell(right), score) == pairs[0]
    assert sorted(names) == ["a", "b", "c", "d", "e"]


def test_deep_trees():
    n = 5000
    root = dependency_tree(list(range(n)), [*range(2, n + 1), 0])
    ((left, right, _),) = index_pairs([(root, root, 1.0)], Vocabulary())
    assert num_words(left) == num_words(right) == n


def test_synthetic_pairs_are_shaped_like_real_ones():
    pairs = synthetic_pairs(3000, seed=1)
    roots = [root for left, right, _ in pairs for root in (left, right)]
    lengths = [num_words(root) for root in roots]
    assert 9 < np.mean(lengths) < 10
    assert min(lengths) == 4
    assert max(lengths) <= 30
    assert 15 <= np.percentile(lengths, 95) <= 20
    counts = np.bincount([len(n) - 1 for root in roots for n in nodes(root)], minlength=7)
    percentages = np.array([50.9, 27.7, 9.3, 7.0, 3.8, 1.1, 0.2])
    assert np.abs(100 * counts / counts.sum() - percentages).max() < 0.8
    assert 3 < np.mean([depth(root) for root in roots]) < 5
    scores = [score for *_, score in pairs]
    assert 1 <= min(scores) < max(scores) <= 5
    assert pairs == synthetic_pairs(3000, seed=1)
    assert pairs[:5] != synthetic_pairs(5, seed=2)


# --- the model ---


@pytest.mark.slow
def test_any_number_of_children():
    cells = childsum.plain_cells(12, 5)
    params = random_params(cells, 1)
    stars = [(0, *((1 + i,) for i in range(children))) for children in range(10)]
    encode = childsum.encoder(cells)
    check(encode, params, [*stars, (11, stars[9], stars[1])], rtol=3e-5, gradients=False)
    check(encode, params, [stars[5], (11, stars[5])], rtol=3e-5)


def test_child_sum_against_its_equations():
    """A pair written out with NumPy in double precision, gate by gate as in the paper."""
    cells = childsum.plain_cells(7, 5, 4)
    params = random_params(cells, 2)
    for k, name in enumerate(("word_b", "compare_b", "score_b")):
        params[name] = jax.random.normal(jax.random.key(k), params[name].shape)
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    w_i, w_o, w_u, w_f = np.split(p["word_w"], 4, axis=1)
    b_i, b_o, b_u, b_f = np.split(p["word_b"], 4)
    u_i, u_o, u_u = np.split(p["node_u"], 3, axis=1)
    u_f = p["forget_u"]

    def state(tree):
        x, below = p["embedding"][tree[0]], [state(child) for child in tree[1:]]
        h = sum((h for h, _ in below), start=np.zeros(5))
        i = sigmoid(x @ w_i + h @ u_i + b_i)
        o = sigmoid(x @ w_o + h @ u_o + b_o)
        u = np.tanh(x @ w_u + h @ u_u + b_u)
        c = i * u + sum(sigmoid(x @ w_f + h_k @ u_f + b_f) * c_k for h_k, c_k in below)
        return o * np.tanh(c), c

    left, right, y = (1, (2,), (3, (4,), (5,))), (0, (6, (1,))), 3.6
    a, b = state(left)[0], state(right)[0]
    s = sigmoid(np.concatenate([a * b, np.abs(a - b)]) @ p["compare_w"] + p["compare_b"])
    e = np.exp(s @ p["score_w"] + p["score_b"])
    probability = e / e.sum()
    target = np.array([0, 0, 0.4, 0.6, 0])
    loss = sum(t * np.log(t / q) for t, q in zip(target, probability, strict=True) if t)
    error = (probability @ [1, 2, 3, 4, 5] - y) ** 2
    got = jedbatch.batch(childsum.scorer(cells))(params, [(left, right, y)])
    assert_close(got[0], np.float32([loss, error]), 1e-5)


@pytest.mark.slow
def test_every_weight_matters():
    """DGL's example of this model left out the product of word and forget gate (#7848)."""
    cells = childsum.plain_cells(9, 6)
    params = random_params(cells, 3)
    score = jedbatch.batch(childsum.scorer(cells))
    slope = jax.grad(lambda p: score(p, PAIRS_OF_TREES)[:, 0].sum())(params)
    for name, g in slope.items():
        parts = np.split(np.asarray(g), 4 if name.startswith("word") else 1, axis=-1)
        assert all(np.abs(part).max() > 1e-6 for part in parts), name


@pytest.mark.slow
def test_whole_scores_have_finite_gradients():
    """Where the target is a single score, x log x is taken at zero."""
    cells = childsum.plain_cells(9, 4)
    params = random_params(cells, 4)
    check(childsum.scorer(cells), params, [((1,), (2,), 3.0), ((1,), (2,), 5.0)], rtol=3e-5)
