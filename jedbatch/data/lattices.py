"""Lattices: texts written without spaces, with all the words of a lexicon found in them.

A lattice is `(characters, words, tags)`: characters in a chain, a tag for each, and words as tuples
`(start, end, word)` that say that `characters[start:end]` spells a word of the lexicon, of at least
two characters. Words overlap and nest, since it is for a model to find out which are meant; they
are sorted by start and end.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch.data import draws
from jedbatch.data.each import each, vocabularies
from jedbatch.data.lines import entry, json_object, read_lines, reader, strings
from jedbatch.data.tagged import Tagged, read_tagged
from jedbatch.data.vocabulary import Vocabulary

Word = tuple[int, int, Any]  # (start, end, word)
Lattice = tuple[tuple[Any, ...], tuple[Word, ...], tuple[Any, ...]]  # (characters, words, tags)


class Lexicon(frozenset[Any]):
    """A set of words that knows how long its longest word is, so that texts are searched fast."""

    longest: int

    def __new__(cls, words: Iterable[Any] = ()) -> "Lexicon":
        """The set, with its longest word measured."""
        if isinstance(words, (str, bytes)) or not hasattr(words, "__iter__"):
            came = f"words={checks.brief(words)}"
            raise TypeError(checks.wrong("Lexicon", came, "a list of words"))
        self = super().__new__(cls, words)
        if bad := [word for word in self if not hasattr(word, "__len__")]:
            came = f"the word {checks.brief(bad[0])}"
            raise TypeError(checks.wrong("Lexicon", came, "strings"))
        self.longest = max(map(len, self), default=0)
        return self


def build_lattice(characters: Sequence[str], lexicon: Iterable[str]) -> list[Word]:
    """All words of a lexicon in a text.

    Looks at no longer pieces of the text than the longest word. To search many texts, hand over a
    `Lexicon`, as `read_lexicon` returns it: of any other collection one is made in every call.

    Args:
      characters: of the text, one string each, or the text.
      lexicon: words; those of a single character are left alone.

    Returns:
      Words `(start, end, word)` sorted by start and end; the end is exclusive.

    Raises:
      TypeError: if characters or words are no strings.
      ValueError: if `characters` holds more than one character in a place.

    Examples:
      >>> from jedbatch.data import build_lattice
      >>> build_lattice("abcab", {"ab", "abc", "cab", "a"})
      [(0, 2, 'ab'), (0, 3, 'abc'), (2, 5, 'cab'), (3, 5, 'ab')]
    """
    if not isinstance(characters, str):
        characters = checks.names("build_lattice", "characters", characters)
    text = "".join(characters)
    if len(text) != len(characters):
        place = next(k for k, character in enumerate(characters) if len(character) != 1)
        raise ValueError(
            f"`build_lattice` got characters[{place}] = {checks.brief(characters[place])}; "
            "expected a single character in each place, as in list(text)"
        )
    return _words_in(text, lexicon if isinstance(lexicon, Lexicon) else Lexicon(lexicon))


def _words_in(text: Any, lexicon: Lexicon) -> list[Word]:
    """The words found, which are pieces of the text: strings of a string, tuples of a tuple."""
    matches = []
    for start in range(len(text)):
        for end in range(start + 2, min(start + lexicon.longest, len(text)) + 1):
            if text[start:end] in lexicon:
                matches.append((start, end, text[start:end]))
    return matches


def read_lexicon(path: str | os.PathLike[str]) -> Lexicon:
    """Reads a lexicon, one word a line, gzipped if the name ends in `.gz`.

    What follows a word after a space, such as its frequency, is left alone.
    """
    path = os.fsdecode(checks.path("read_lexicon", path))
    return Lexicon(read_lines(path, None, lambda line: line.split()[0], "a word a line"))


@reader
def read_lattices(
    path: str | os.PathLike[str],
    tags: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Iterator[Lattice]:
    """Reads lattices, one JSON object a line, gzipped if the name ends in `.gz`.

    A line holds `{"chars": [...], "words": [[start, end, word], ...], "tags": [...]}`; what else it
    holds is left alone.

    Args:
      path: the file.
      tags: a second file for the tags, with `{"chars": [...], "tags": [...]}` for the same texts in
        the same order.
      limit: the number of lattices to read at most.

    Returns:
      Lattices `(characters, words, tags)` of strings. `read_lattices.stream` reads them one by one.

    Raises:
      ValueError: names the file and the line that is not a lattice; both files, if they differ.
    """
    expected = (
        'one lattice a line, such as {"chars": ["a", "b"], "words": [[0, 2, "ab"]], '
        '"tags": ["B", "I"]}'
    )
    tagged = None if tags is None else read_tagged.stream(tags)

    def parse(line: str) -> Lattice:
        record = json_object(line)
        characters = strings(record, "chars")
        words = _checked_words(record, characters)
        if tagged is None and "tags" not in record:
            raise ValueError('there is no "tags"; `read_lattices` reads them from a file `tags=`')
        word_tags = (
            strings(record, "tags") if tagged is None else _tags_of(characters, tagged, tags)
        )
        if len(word_tags) != len(characters):
            raise ValueError(f"there are {len(characters)} characters and {len(word_tags)} tags")
        return characters, words, word_tags

    yield from read_lines(path, limit, parse, expected)
    if tagged is not None and limit is None and next(tagged, None) is not None:
        raise ValueError(f"{os.fspath(path)} ends before {os.fspath(tags or '')}; expected as many")


def _checked_words(record: dict[str, Any], characters: tuple[str, ...]) -> tuple[Word, ...]:
    """The words of a lattice, sorted."""
    words = []
    for word in entry(record, "words", list, "a list"):
        if not isinstance(word, list) or list(map(type, word)) != [int, int, str]:
            raise ValueError(f'{word!r} is no word, such as [0, 2, "ab"]')
        start, end, spelling = word
        if not 0 <= start <= end - 2 <= len(characters) - 2:
            raise ValueError(
                f"the word {word!r} is not made of two or more of the {len(characters)} characters"
            )
        between = "".join(characters[start:end])
        if between != spelling:
            raise ValueError(f"the characters of the word {word!r} are {between!r}")
        words.append((start, end, spelling))
    return tuple(sorted(words))


def _tags_of(characters: tuple[str, ...], tagged: Iterator[Tagged], name: Any) -> tuple[str, ...]:
    """The tags of a text, from the next line of another file."""
    tagged_characters, tags = next(tagged, ((), ()))
    if tagged_characters != characters:
        difference = "has other characters there" if tagged_characters else "ends before it"
        raise ValueError(f"{os.fspath(name)} {difference}")
    return tags


def index_lattices(
    lattices: Sequence[Lattice], characters: Vocabulary, words: Vocabulary, tags: Vocabulary
) -> list[Lattice]:
    """The lattices with numbers for characters, words and tags."""
    vocabularies("index_lattices", characters=characters, words=words, tags=tags)

    def index(lattice: Lattice) -> Lattice:
        text, matches, word_tags = lattice
        return (
            tuple(characters[character] for character in text),
            tuple((start, end, words[word]) for start, end, word in matches),
            tuple(tags[tag] for tag in word_tags),
        )

    return each("index_lattices", lattices, index, "(characters, words, tags)")


@checks.sizes
def synthetic_lattices(
    num_lattices: int,
    *,
    seed: int = 0,
    num_characters: int = 300,
    num_words: int = 500,
    num_tags: int = 9,
    mean_length: float = 54.6,
    density: float = 0.31,
) -> list[Lattice]:
    """Random texts with the words of a random lexicon, shaped like short messages.

    Lengths follow a shifted gamma distribution (10 characters at least, 54.6 on average, 5 % above
    134). Of the words, 89 % have two characters, 8 % three and 3 % four; they overlap and nest, so
    that two words end at 2 % of the characters. Some words of the lexicon are entities: tag
    `2t + 1` begins one of type t, tag `2t + 2` goes on with it, and tag 0 is for characters outside
    of entities. Where entities overlap the first one counts, and of those that begin together the
    longest.

    Args:
      num_lattices: how many.
      seed: of the random generator; the same seed gives the same lattices.
      num_characters: characters are numbers below it.
      num_words: size of the lexicon; its words are numbers below it.
      num_tags: tags are numbers below it; at least 3.
      mean_length: characters per lattice on average.
      density: words per character on average, below 0.8. A common benchmark of Chinese news has
        44.1 characters and 23.3 words a lattice, a density of 0.53.

    Returns:
      Lattices `(characters, words, tags)` of integers.

    Examples:
      >>> from jedbatch.data import synthetic_lattices
      >>> characters, words, tags = synthetic_lattices(1)[0]
      >>> all(0 <= start < end <= len(characters) for start, end, _ in words)
      True
    """
    if num_tags < 3:
        raise ValueError(f"num_tags is {num_tags}; expected at least 3")
    if num_words > num_characters**2:
        raise ValueError(
            f"num_words is {num_words}; expected no more than {num_characters**2}, words of two of "
            f"{num_characters} characters"
        )
    if not 0 <= density < 0.8:
        raise ValueError(f"density is {density}; expected 0 to 0.8 words per character")
    rng = np.random.default_rng(seed)
    number, types = _invented(num_characters, num_words, (num_tags - 1) // 2)
    lexicon = Lexicon(number)
    beginning: dict[int, list[tuple[int, ...]]] = {}
    for word in number:  # in order, which sets have not
        beginning.setdefault(word[0], []).append(word)
    frequency = draws.frequencies(num_characters)
    # A word takes up 1.17 characters after its first, and one in twenty has a word at its end.
    chance = density / (1.05 - 0.17 * density)

    def text(size: int) -> tuple[int, ...]:
        characters = draws.words(rng, frequency, 1)
        while len(characters) < size:
            words = beginning.get(characters[-1])
            if words and rng.random() < chance:
                characters += words[rng.integers(len(words))][1:]
            else:
                characters += draws.words(rng, frequency, 1)
        return tuple(characters[:size])

    lattices = []
    for size in draws.lengths(rng, num_lattices, mean_length, shape=1.3, least=0.18, most=3.2):
        characters = text(size)
        words = tuple((a, b, number[word]) for a, b, word in _words_in(characters, lexicon))
        lattices.append((characters, words, _entities(size, words, types)))
    return lattices


def _invented(
    num_characters: int, num_words: int, num_types: int
) -> tuple[dict[tuple[int, ...], int], list[int]]:
    """A lexicon: numbers of words by how they are spelled, and their types of entity, or -1."""
    meaning = np.random.default_rng(20_26)  # the lexicon does not depend on the seed
    lexicon: dict[tuple[int, ...], int] = {}
    short: list[tuple[int, ...]] = []
    while len(lexicon) < num_words:
        size = int(meaning.choice([2, 3, 4], p=[0.88, 0.08, 0.04]))
        # Words in turn begin with each of the characters, so that all texts have room for words.
        word = (
            len(lexicon) % num_characters,
            *meaning.integers(0, num_characters, size - 1).tolist(),
        )
        if size == 2:
            short.append(word)
        elif short and meaning.random() < 0.6:  # words nest, as compounds do
            word = (*word[:-2], *short[meaning.integers(len(short))])
        lexicon.setdefault(word, len(lexicon))
    is_entity = meaning.random(num_words) < 0.12
    types = np.where(is_entity, meaning.integers(0, num_types, num_words), -1)
    return lexicon, types.tolist()


def _entities(size: int, words: Sequence[Word], types: Sequence[int]) -> tuple[int, ...]:
    """The tag of every character."""
    tags, free = [0] * size, 0
    for start, end, word in sorted(words, key=lambda word: (word[0], -word[1])):
        if types[word] >= 0 and start >= free:
            tags[start:end] = [2 * types[word] + 2] * (end - start)
            tags[start] -= 1
            free = end
    return tuple(tags)
