"""Pairs of sentences in two languages: a reader, and a synthetic twin.

A pair is `(source, target)`, two tuples of words. Of numbered target words 0 and 1 are reserved:
a decoder reads `BEGIN` first, and `END` is the last word of every target, so that it learns to
stop. It reads `(BEGIN, *target[:-1])` and predicts `target`.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch.data import draws
from jedbatch.data.each import each, vocabularies
from jedbatch.data.lines import read_lines, reader
from jedbatch.data.vocabulary import Vocabulary

Translation = tuple[tuple[Any, ...], tuple[Any, ...]]  # (source, target)

BEGIN, END = 0, 1  # "<s>" and "</s>" in vocabularies of target words


@reader
def read_translations(
    path: str | os.PathLike[str], limit: int | None = None
) -> Iterator[Translation]:
    """Reads pairs of sentences, one a line, gzipped if the name ends in `.gz`.

    A line holds a sentence, a tab and its translation; words are separated by spaces.

    Args:
      path: the file.
      limit: the number of pairs to read at most.

    Returns:
      Pairs `(source, target)` of strings, as they stand in the file: `index_translations` adds the
      end. `read_translations.stream` reads them one by one.

    Raises:
      ValueError: names the file and the line that is not a pair.
    """
    expected = "a sentence, one tab and its translation in each line, words separated by spaces"
    return read_lines(path, limit, _translation, expected)


def _translation(line: str) -> Translation:
    """The pair in a line."""
    sides = line.rstrip("\r\n").split("\t")
    if len(sides) != 2:
        raise ValueError(f"there are {len(sides) - 1} tabs")
    source, target = (tuple(word for word in side.split(" ") if word) for side in sides)
    if not source or not target:
        raise ValueError(f"there are {len(source)} source words and {len(target)} target words")
    return source, target


def index_translations(
    pairs: Sequence[Translation], source: Vocabulary, target: Vocabulary
) -> list[Translation]:
    """The pairs with numbers for words, and `END` at the end of every target.

    Args:
      pairs: of strings.
      source: numbers of source words.
      target: numbers of target words; must begin with "<s>" and "</s>", or be empty, to get them.

    Returns:
      Pairs `(source, target)` of integers.

    Raises:
      ValueError: if the numbers `BEGIN` and `END` belong to other words.

    Examples:
      >>> from jedbatch.data import Vocabulary, index_translations
      >>> target = Vocabulary(["<s>", "</s>", "<unknown>"], unknown="<unknown>")
      >>> index_translations([(("it", "works"), ("nó", "chạy"))], Vocabulary(), target)
      [((0, 1), (3, 4, 1))]
    """
    vocabularies("index_translations", source=source, target=target)
    if not len(target):
        target["<s>"], target["</s>"]
    first = list(target)[:2]
    if first != ["<s>", "</s>"]:
        raise ValueError(
            f"the target vocabulary begins with {first}; expected '<s>' and '</s>', as in "
            'Vocabulary(["<s>", "</s>", "<unknown>"], unknown="<unknown>")'
        )

    def index(pair: Translation) -> Translation:
        a, b = pair
        return tuple(source[word] for word in a), (*(target[word] for word in b), END)

    return each("index_translations", pairs, index, "(source, target), two lists of words")


@checks.sizes
def synthetic_translations(
    num_pairs: int, *, seed: int = 0, num_words: int = 500, mean_length: float = 19.3
) -> list[Translation]:
    """Random sentences and their translations into a language made up.

    Lengths of sources follow a shifted gamma distribution (2 words at least, 19.3 on average, 5 %
    above 43), words follow Zipf's law. Every word has one translation; a quarter of the words also
    have a classifier, one of ten particles that goes before the translation, so that targets have
    1.25 times as many words. Adjectives, a fifth of the words, change places with the word that
    follows them, as between English and Vietnamese.

    Args:
      num_pairs: how many.
      seed: of the random generator; the same seed gives the same pairs.
      num_words: size of the source vocabulary; its words are numbers below it. Target words are
        numbers from 2 to `num_words + 11`.
      mean_length: words per source on average.

    Returns:
      Pairs `(source, target)`; every target ends with `END`.

    Examples:
      >>> from jedbatch.data import END, synthetic_translations
      >>> source, target = synthetic_translations(1, seed=1, mean_length=4)[0]
      >>> target[-1] == END
      True
    """
    rng = np.random.default_rng(seed)
    meaning = np.random.default_rng(20_25)  # what words mean does not depend on the seed
    word_for = meaning.permutation(num_words) + 12
    classifier = meaning.integers(2, 12, num_words)
    frequency = draws.frequencies(num_words)
    number = np.arange(num_words)
    has_classifier, adjective = number % 4 == 2, number % 5 == 3

    def translate(source: list[int]) -> tuple[int, ...]:
        order = list(source)
        k = 0
        while k + 1 < len(order):
            if adjective[order[k]]:
                order[k], order[k + 1] = order[k + 1], order[k]
                k += 1  # the word it changed places with stays
            k += 1
        target: list[int] = []
        for word in order:
            if has_classifier[word]:
                target.append(int(classifier[word]))
            target.append(int(word_for[word]))
        return (*target, END)

    pairs = []
    for size in draws.lengths(rng, num_pairs, mean_length, shape=1.75, least=0.1, most=5.3):
        source = draws.words(rng, frequency, size)
        pairs.append((tuple(source), translate(source)))
    return pairs
