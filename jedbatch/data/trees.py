"""Binary trees over words: a reader for bracketed treebanks and a synthetic treebank.

A tree is a plain tuple, either `(label, word)` or `(label, left, right)`. Plain tuples of plain
things are what `jedbatch` remembers fastest.

Treebanks have nodes with any number of children. A TreeLSTM of two children reads a binary form
of them: unary chains collapse into one node, labels joined by `+`, and a node with more than two
children branches to the right through nodes labelled `@` and the label. `parse_tree` does this
as it reads; a tree that is binary already passes through unchanged.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch.data import draws
from jedbatch.data.each import each, vocabularies
from jedbatch.data.lines import read_lines, reader
from jedbatch.data.vocabulary import Vocabulary

A_TREE = "trees such as (label, word) or (label, left, right)"

Tree = tuple[Any, ...]  # (label, word) or (label, left, right)

_TOKEN = re.compile(r"[()]|[^() \t\r\n]+")  # words may hold other spaces


def parse_tree(text: str) -> Tree:
    """Reads one bracketed tree, `(S (NP I) (VP (V saw) (NP stars)))`, as a binary tree.

    Raises `ValueError` that says what is wrong with the text.
    """
    checks.of_type("parse_tree", text, str, "a text such as (S (NP I) (VP left))")
    stack: list[list[Any]] = []
    done: Tree | None = None
    for match in _TOKEN.finditer(text):
        token = match.group()
        if done is not None:
            raise ValueError(
                f"{checks.brief(token)} follows the end of the tree, at column {match.start()}"
            )
        if token == "(":
            stack.append([])
        elif not stack:
            raise ValueError(
                f"{checks.brief(token)} stands outside of any bracket, at column {match.start()}"
            )
        elif token == ")":
            node = _binary(stack.pop(), match.start())
            if stack:
                stack[-1].append(node)
            else:
                done = node
        else:
            stack[-1].append(token)
    if done is None:
        raise ValueError(f"{len(stack)} brackets are not closed" if stack else "there is no tree")
    return done


def _binary(parts: list[Any], column: int) -> Tree:
    """A node of a treebank as a binary node; `parts` are its label and its children."""
    if not parts:
        raise ValueError(f"the bracket that ends at column {column} is empty")
    label = ""
    if isinstance(parts[0], str):
        label, *parts = parts
    if not parts:
        raise ValueError(
            f"the bracket that ends at column {column} holds {checks.brief(label)} alone; expected "
            "a label and a word, as in (NN word)"
        )
    if len(parts) == 1:
        (child,) = parts
        if isinstance(child, str):
            return (label, child)
        return (f"{label}+{child[0]}" if label and child[0] else label or child[0], *child[1:])
    if any(isinstance(child, str) for child in parts):
        raise ValueError(
            f"the bracket that ends at column {column} has words beside brackets; expected one "
            "word, as in (NN word), or brackets only"
        )
    last = label.rsplit("+", 1)[-1].removeprefix("@")
    node = parts[-1]
    for child in reversed(parts[1:-1]):
        node = (f"@{last}", child, node)
    return (label, parts[0], node)


@reader
def read_trees(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Tree]:
    """Reads a treebank with one bracketed tree a line, gzipped if its name ends in `.gz`.

    Args:
      path: the file.
      limit: the number of trees to read at most.

    Returns:
      Binary trees of strings, `(label, word)` or `(label, left, right)`. `read_trees.stream` reads
      them one by one.

    Raises:
      ValueError: names the file and the line that is not a tree.
    """
    expected = "one bracketed tree a line, such as (S (NP I) (VP (V saw) (NP stars)))"
    return read_lines(path, limit, parse_tree, expected)


def index_trees(trees: Sequence[Tree], words: Vocabulary, labels: Vocabulary) -> list[Tree]:
    """The trees with numbers for words and labels.

    Raises:
      TypeError: a tree is none, or the vocabularies are none.
    """
    vocabularies("index_trees", words=words, labels=labels)

    def leaf(node: Tree) -> Tree:
        return (labels[node[0]], words[node[1]])

    def inner(node: Tree, left: Tree, right: Tree) -> Tree:
        return (labels[node[0]], left, right, *node[3:])

    return each("index_trees", trees, lambda tree: _rebuilt(tree, leaf, inner), A_TREE)


def _rebuilt(
    tree: Tree, leaf: Callable[[Tree], Tree], inner: Callable[[Tree, Tree, Tree], Tree]
) -> Tree:
    """A tree with new nodes, made from the bottom up without recursion: trees may be deep."""
    done: list[Tree] = []
    stack: list[tuple[Tree, bool]] = [(tree, False)]
    while stack:
        node, ready = stack.pop()
        if not isinstance(node, (tuple, list)):
            raise TypeError(f"{checks.brief(node)} is no tree")
        if len(node) == 2:
            done.append(leaf(node))
        elif ready:
            right, left = done.pop(), done.pop()
            done.append(inner(node, left, right))
        else:
            stack += [(node, True), (node[2], False), (node[1], False)]
    return done.pop()


def num_nodes(root: Any) -> int:
    """Nodes of a binary tree, leaves included."""
    checks.of_type("num_nodes", root, (tuple, list), A_TREE)
    count, stack = 0, [root]
    while stack:
        node = stack.pop()
        count += 1
        stack += node[1:3] if len(node) > 2 else ()
    return count


@checks.sizes
def synthetic_treebank(
    num_trees: int, *, seed: int = 0, num_words: int = 500, mean_length: float = 24.0
) -> list[Tree]:
    """Random sentiment trees shaped like those of a newspaper treebank.

    Sentence lengths follow a gamma distribution (mean 24 words, 5 % above 44), trees branch
    mostly to the right (depth 12 on average). Every word has a valence; some words turn the
    valence of the phrase that follows around, some strengthen it. The label of a node is the
    valence of its phrase, from 0 (very negative) to 4 (very positive), so labels follow from
    composition, not from counting words.

    Args:
      num_trees: how many.
      seed: of the random generator; the same seed gives the same trees.
      num_words: size of the vocabulary; words are numbers below it.
      mean_length: words per sentence on average.

    Returns:
      Trees `(label, word)` or `(label, left, right)` of integers.

    Examples:
      >>> from jedbatch.data import synthetic_treebank
      >>> synthetic_treebank(1, seed=1, mean_length=2)
      [(2, (2, 10), (2, 21))]
    """
    rng = np.random.default_rng(seed)
    meaning = np.random.default_rng(20_23)  # what words mean does not depend on the seed
    valence = meaning.choice([-2.0, -1.0, 0.0, 1.0, 2.0], num_words, p=[0.1, 0.15, 0.5, 0.15, 0.1])
    turns = meaning.random(num_words) < 0.06
    strengthens = meaning.random(num_words) < 0.06
    frequency = draws.frequencies(num_words)

    def word() -> int:
        return draws.words(rng, frequency, 1)[0]

    def label(score: float) -> int:
        return int(np.clip(np.round(score), -2, 2)) + 2

    def grow(n: int) -> tuple[Tree, float, int | None]:
        """(tree, valence, its word if it is one) of n words."""
        if n == 1:
            leaf = word()
            plain = 0.0 if turns[leaf] or strengthens[leaf] else float(valence[leaf])
            return (label(plain), leaf), plain, leaf
        left_size = min(n - 1, int(rng.geometric(0.52)))
        if rng.random() < 0.12:
            left_size = int(rng.integers(1, n))
        left, a, w = grow(left_size)
        right, b, _ = grow(n - left_size)
        if w is not None and turns[w]:
            score = -b
        elif w is not None and strengthens[w]:
            score = 2 * b
        else:
            score = float(np.clip(a + b, -2, 2))
        return (label(score), left, right), score, None

    shape = 4.5
    lengths = np.maximum(2, np.round(rng.gamma(shape, mean_length / shape, num_trees)))
    return [grow(int(n))[0] for n in lengths]


@checks.sizes
def with_kinds(trees: Sequence[Tree], *, seed: int = 0) -> list[Tree]:
    """Binary trees with inner nodes of two kinds, so that a model has a cell for each.

    Which kind a node has is a fair coin and says nothing about the tree.

    Args:
      trees: `(label, word)` or `(label, left, right)`.
      seed: of the random generator; the same seed gives the same kinds.

    Returns:
      Trees `(label, word)` or `(label, left, right, kind)`, with kinds 0 and 1.

    Examples:
      >>> from jedbatch.data import with_kinds
      >>> with_kinds([(3, (2, 7), (3, 5))])
      [(3, (2, 7), (3, 5), 0)]
    """
    rng = np.random.default_rng(seed)

    def inner(node: Tree, left: Tree, right: Tree) -> Tree:
        return (node[0], left, right, int(rng.random() < 0.5))

    return each("with_kinds", trees, lambda tree: _rebuilt(tree, lambda x: x, inner), A_TREE)
