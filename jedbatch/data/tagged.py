"""Tagged sentences: a reader, and a synthetic twin of a corpus of named entities.

A tagged sentence is `(words, tags)`, two tuples of equal length. In its spelled form frequent words
are numbers and rare ones, for which no embedding could be learned, tuples of the numbers of their
characters; taggers read these by a second network.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch.data import draws
from jedbatch.data.each import each, vocabularies
from jedbatch.data.lines import json_object, read_lines, reader, strings
from jedbatch.data.vocabulary import Vocabulary

Tagged = tuple[tuple[Any, ...], tuple[Any, ...]]  # (words, tags)

_CHARACTERS = 40  # in the synthetic alphabet


@reader
def read_tagged(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Tagged]:
    """Reads tagged sentences, one JSON object a line, gzipped if the name ends in `.gz`.

    A line holds `{"tokens": [...], "tags": [...]}`, or `"chars"` or `"words"` for `"tokens"`; what
    else it holds is left alone.

    Args:
      path: the file.
      limit: the number of sentences to read at most.

    Returns:
      Sentences `(words, tags)` of strings. `read_tagged.stream` reads them one by one.

    Raises:
      ValueError: names the file and the line that is not a sentence with its tags.
    """
    expected = 'one sentence a line, such as {"tokens": ["In", "Rome"], "tags": ["O", "LOC"]}'
    return read_lines(path, limit, _tagged, expected)


def _tagged(line: str) -> Tagged:
    """The sentence in a line."""
    record = json_object(line)
    words, tags = strings(record, "tokens", "chars", "words"), strings(record, "tags")
    if len(words) != len(tags):
        raise ValueError(f"there are {len(words)} words and {len(tags)} tags")
    return words, tags


def index_tagged(
    sentences: Sequence[Tagged],
    words: Vocabulary,
    tags: Vocabulary,
    characters: Vocabulary | None = None,
    rare: int = 5,
) -> list[Tagged]:
    """The sentences with numbers for words and tags.

    Args:
      sentences: of strings.
      words: numbers of words.
      tags: numbers of tags.
      characters: if given, rare words are spelled, as tuples of numbers of their characters. Words
        that `words` holds already are not rare. Others are, if they are seen fewer than `rare`
        times in `sentences`, or if `words` is frozen: so with vocabularies made of the sentences to
        learn from, words of the sentences to test with are spelled where no embedding was learned.
      rare: how often a word has to be seen to get a number of its own.

    Returns:
      Sentences `(words, tags)` of integers, and of tuples of integers for rare words.

    Examples:
      >>> from jedbatch.data import Vocabulary, index_tagged
      >>> words, tags, characters = Vocabulary(), Vocabulary(), Vocabulary()
      >>> sentences = [(("Anna", "and", "Hanna", "and"), ("PER", "O", "PER", "O"))]
      >>> index_tagged(sentences, words, tags, characters, rare=2)
      [(((0, 1, 1, 2), 0, (3, 2, 1, 1, 2), 0), (0, 1, 0, 1))]
    """
    who, expected = "index_tagged", "(words, tags), two lists"
    vocabularies(who, words=words, tags=tags)
    if characters is not None:
        vocabularies(who, characters=characters)
    rare = checks.whole(who, "rare", rare)
    sentences = each(who, sentences, lambda sentence: (tuple(sentence[0]), sentence[1]), expected)
    counts = Counter(word for sentence, _ in sentences for word in sentence)

    def number(word: str) -> int | tuple[int, ...]:
        is_known = word in words or (counts[word] >= rare and not words.frozen)
        if characters is None or is_known:
            return words[word]
        return tuple(characters[character] for character in word)

    return each(
        who,
        sentences,
        lambda x: (tuple(map(number, x[0])), tuple(tags[tag] for tag in x[1])),
        expected,
    )


@checks.sizes
def synthetic_tagged(
    num_sentences: int,
    *,
    seed: int = 0,
    num_words: int = 500,
    num_tags: int = 9,
    mean_length: float = 24.8,
    spelled: bool = False,
) -> list[Tagged]:
    """Random sentences with tags like those of named entities.

    Sentence lengths follow a shifted gamma distribution (3 words at least, 24.8 on average, 5 %
    above 46), words follow Zipf's law. Tag 0, of most words, stands for no entity. Some words are
    names: the word to the left decides whether a name is used as one, and the word to the right in
    which of two senses, each with its tag. So tags follow from a word and both its neighbours, not
    from the word alone.

    Args:
      num_sentences: how many.
      seed: of the random generator; the same seed gives the same sentences.
      num_words: size of the vocabulary; words are numbers below it.
      num_tags: tags are numbers below it; 2 to 40.
      mean_length: words per sentence on average.
      spelled: whether rare words, one in six on average, are tuples of characters instead, numbers
        below 40. They are spelled anew each time, but the last three characters say what a word
        does to tags: the last two are its tags in both senses, the third to last is what it does to
        its neighbours.

    Returns:
      Sentences `(words, tags)`.

    Examples:
      >>> from jedbatch.data import synthetic_tagged
      >>> words, tags = synthetic_tagged(1, seed=8, mean_length=4)[0]
      >>> len(words) == len(tags)
      True
    """
    if not 2 <= num_tags <= _CHARACTERS:
        raise ValueError(f"num_tags is {num_tags}; expected 2 to {_CHARACTERS} tags")
    rng = np.random.default_rng(seed)
    meaning = np.random.default_rng(20_24)  # what words mean does not depend on the seed
    senses = meaning.integers(1, num_tags, (num_words, 2))
    senses[meaning.random(num_words) > 0.3] = 0  # no names
    opens = meaning.random(num_words) < 0.5  # before a name: it is used as one
    turns = meaning.random(num_words) < 0.5  # after a name: in its second sense
    frequency = draws.frequencies(num_words)
    first_rare = int(np.searchsorted(frequency, 5 / 6))

    def spelling(word: int) -> tuple[int, ...]:
        stem = rng.integers(0, _CHARACTERS, 1 + rng.poisson(3.5)).tolist()
        second, first = int(senses[word, 1]), int(senses[word, 0])
        return (*stem, int(opens[word]) + 2 * int(turns[word]), second, first)

    sentences = []
    sizes = draws.lengths(rng, num_sentences, mean_length, shape=3.4, least=0.12, most=5)
    for size in sizes:
        words = draws.words(rng, frequency, size)
        used = np.array([True, *opens[words[:-1]]])
        sense = np.array([*turns[words[1:]], False], int)
        tags = tuple(np.where(used, senses[words, sense], 0).tolist())
        shown = [spelling(w) if spelled and w >= first_rare else w for w in words]
        sentences.append((tuple(shown), tags))
    return sentences
