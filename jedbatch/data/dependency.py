"""Dependency trees, alone and in pairs: a reader for SICK and a synthetic twin.

In a dependency tree every word is a node, whose children are the words that depend on it. A tree
is a plain tuple `(word, *children)`, children in the order of the sentence, and a pair of sentences
is `(left, right, score)` with a score of relatedness from 1 to 5. Plain tuples of plain things are
what `jedbatch` remembers fastest.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch.data import draws
from jedbatch.data.each import each, vocabularies
from jedbatch.data.lines import entry, json_object, read_lines, reader, strings
from jedbatch.data.rooted import A_TREE, Rooted, renumbered, rooted, unrooted
from jedbatch.data.vocabulary import Vocabulary

Dependency = Rooted  # (word, *children)
Pair = tuple[Dependency, Dependency, float]

# Percentages of words with 0, 1, ... children to draw. Of those drawn some make no tree of the
# length wanted; what is left has the percentages of SICK, which `synthetic_pairs` states.
_DRAWN = (52.9, 25.8, 8.6, 6.6, 4.3, 1.5, 0.3)


def dependency_tree(words: Sequence[object], heads: Sequence[int]) -> Dependency:
    """The tree of a sentence.

    Args:
      words: one for each node.
      heads: for each word the position of the word that it depends on, counted from 1; 0 for the
        root.

    Returns:
      The root, as `(word, *children)`.

    Raises:
      ValueError: if this is no tree.

    Examples:
      >>> from jedbatch.data import dependency_tree
      >>> dependency_tree(["A", "man", "sings"], [2, 3, 0])
      ('sings', ('man', ('A',)))
    """
    words = checks.items("dependency_tree", "words", words, "a list of words")
    heads = checks.items("dependency_tree", "heads", heads, "a list of whole numbers")
    if len(words) != len(heads):
        raise ValueError(f"there are {len(words)} words and {len(heads)} heads")
    below: list[list[int]] = [[] for _ in range(len(words) + 1)]
    for position, head in enumerate(heads, 1):
        if type(head) is not int or not 0 <= head <= len(words):
            raise ValueError(
                f"the head of word {position} is {checks.brief(head)}; expected a number from 0 to "
                f"{len(words)}"
            )
        below[head].append(position)
    if len(below[0]) != 1:
        raise ValueError(f"{len(below[0])} words have the head 0; expected one root")
    order = list(below[0])  # parents before children, without recursion: trees may be deep
    for position in order:
        order += below[position]
    if len(order) != len(words):
        lost = min(set(range(1, len(words) + 1)) - set(order))
        raise ValueError(f"the heads of word {lost} lead in a circle, not to the root")
    number = {position: n for n, position in enumerate([0, *order], -1)}
    return rooted([words[p - 1] for p in order], [number[heads[p - 1]] for p in order])


@reader
def read_dependencies(
    path: str | os.PathLike[str], limit: int | None = None
) -> Iterator[Dependency]:
    """Reads dependency trees, one JSON object a line, gzipped if the name ends in `.gz`.

    A line holds `{"tokens": [...], "heads": [...]}`, or `"words"` for `"tokens"`, with heads as in
    `dependency_tree`; what else it holds is left alone.

    Args:
      path: the file.
      limit: the number of trees to read at most.

    Returns:
      Trees `(word, *children)` of strings. `read_dependencies.stream` reads them one by one.

    Raises:
      ValueError: names the file and the line that is not a tree.
    """
    expected = 'one sentence a line, such as {"tokens": ["It", "works"], "heads": [2, 0]}'
    return read_lines(path, limit, lambda line: _sentence(json_object(line)), expected)


@reader
def read_pairs(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Pair]:
    """Reads pairs of sentences, one JSON object a line, gzipped if the name ends in `.gz`.

    A line holds `{"score": 2.5, "a": {"tokens": [...], "heads": [...]}, "b": {...}}`, with heads as
    in `dependency_tree`; what else it holds is left alone.

    Args:
      path: the file.
      limit: the number of pairs to read at most.

    Returns:
      Pairs `(left, right, score)` of trees of strings. `read_pairs.stream` reads them one by one.

    Raises:
      ValueError: names the file and the line that is not a pair.
    """
    expected = (
        'one pair a line, such as {"score": 2.5, "a": {"tokens": ["It", "works"], '
        '"heads": [2, 0]}, "b": ...}'
    )
    return read_lines(path, limit, _pair, expected)


def _pair(line: str) -> Pair:
    """The pair in a line."""
    record = json_object(line)
    score = entry(record, "score", (int, float), "a number")
    if not 1 <= score <= 5:
        raise ValueError(f'"score" is {score}; expected a number from 1 to 5')
    trees = []
    for side in ("a", "b"):
        sentence = entry(record, side, dict, "an object")
        try:
            trees.append(_sentence(sentence))
        except ValueError as error:
            raise ValueError(f'sentence "{side}": {error}') from None
    return trees[0], trees[1], float(score)


def _sentence(record: dict[str, Any]) -> Dependency:
    """The tree of a sentence."""
    words = strings(record, "tokens", "words")
    return dependency_tree(words, entry(record, "heads", list, "a list"))


def index_dependencies(trees: Sequence[Dependency], words: Vocabulary) -> list[Dependency]:
    """The trees with numbers for words."""
    vocabularies("index_dependencies", words=words)
    return each("index_dependencies", trees, lambda tree: renumbered(tree, words), A_TREE)


def index_pairs(pairs: Sequence[Pair], words: Vocabulary) -> list[Pair]:
    """The pairs with numbers for words."""
    vocabularies("index_pairs", words=words)

    def index(pair: Pair) -> Pair:
        a, b, score = pair
        return renumbered(a, words), renumbered(b, words), score

    return each("index_pairs", pairs, index, f"(left, right, score), with {A_TREE}")


def num_words(root: Dependency) -> int:
    """Words of a dependency tree, which are its nodes."""
    return len(unrooted(root)[0])


@checks.sizes
def synthetic_pairs(num_pairs: int, *, seed: int = 0, num_words: int = 500) -> list[Pair]:
    """Random pairs of sentences with trees shaped like those of SICK.

    Sentence lengths follow a shifted gamma distribution (4 words at least, 9.3 on average, 5 %
    above 16). Of the words, 50.9 % have no children, 27.7 % one, 9.3 % two, 7.0 % three, 3.8 %
    four, 1.1 % five and 0.2 % six; apart from that all trees of a length are equally likely. The
    second sentence of a pair has new words in place of some of the first, or a tree of its own;
    the score tells how many words they have in common.

    Args:
      num_pairs: how many.
      seed: of the random generator; the same seed gives the same pairs.
      num_words: size of the vocabulary; words are numbers below it.

    Returns:
      Pairs `(left, right, score)` of trees `(word, *children)` of integers.

    Examples:
      >>> from jedbatch.data import synthetic_pairs
      >>> left, right, score = synthetic_pairs(1)[0]
      >>> 1 <= score <= 5
      True
    """
    rng = np.random.default_rng(seed)
    frequency = draws.frequencies(num_words)
    chances = np.array(_DRAWN) / sum(_DRAWN)

    def sentence() -> tuple[list[int], list[int]]:
        """(words, children of each), parents before children, depth first."""
        length = min(30, 4 + int(rng.gamma(1.7, 3.4)))
        words = draws.words(rng, frequency, length)
        while True:
            children = rng.choice(len(chances), length, p=chances)
            if children.sum() == length - 1:
                break
        # Exactly one rotation of such numbers is a tree (Dvoretzky and Motzkin, 1947).
        open_ends = np.cumsum(children - 1)
        start = int(np.argmin(open_ends)) + 1
        return words, np.roll(children, -start).tolist()

    def grow(words: list[int], children: list[int]) -> Dependency:
        done: list[Dependency] = []
        for word, count in zip(reversed(words), reversed(children), strict=True):
            below = [done.pop() for _ in range(count)]
            done.append((word, *below))
        return done[0]

    pairs = []
    for _ in range(num_pairs):
        words, children = sentence()
        second, their_children = sentence()
        if rng.random() < 0.5:
            keep = rng.random(len(words)) < rng.random()
            new = draws.words(rng, frequency, len(words))
            second, their_children = np.where(keep, words, new).tolist(), children
        common = len(set(words) & set(second)) / len(set(words) | set(second))
        pairs.append(
            (grow(words, children), grow(second, their_children), round(1 + 4 * common, 1))
        )
    return pairs
