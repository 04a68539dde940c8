"""Numbers for words, as models need them."""

from collections.abc import Hashable, Iterable, Iterator

from jedbatch import checks


class Vocabulary:
    """Numbers for words: each gets the next number when it is first met.

    Args:
      words: words to begin with; the first is number 0.
      unknown: if given, the word that stands for all words met after `freeze`. Unless it is among
        `words`, it is put before them.

    Examples:
      >>> from jedbatch.data import Vocabulary
      >>> words = Vocabulary(unknown="<unk>")
      >>> [words[w] for w in "the cat saw the dog".split()]
      [1, 2, 3, 1, 4]
      >>> words.freeze()
      >>> words["bird"]
      0
      >>> words.words([1, 2, 0])
      ['the', 'cat', '<unk>']
    """

    def __init__(self, words: Iterable[Hashable] = (), *, unknown: Hashable | None = None):
        words = checks.items("Vocabulary", "words", words, "a list of words")
        if unknown is not None and unknown not in words:
            words.insert(0, unknown)
        self._numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        self._frozen = False
        self._unknown = unknown

    def __getitem__(self, word: Hashable) -> int:
        number = self._numbers.get(word)
        if number is not None:
            return number
        if not self._frozen:
            return self._numbers.setdefault(word, len(self._numbers))
        if self._unknown is None:
            raise KeyError(
                f"{checks.brief(word)} is not among the {len(self)} words of a frozen vocabulary; "
                "make it with `unknown=...` to give unknown words a number of their own."
            )
        return self._numbers[self._unknown]

    def __contains__(self, word: Hashable) -> bool:
        return word in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._numbers)

    @property
    def frozen(self) -> bool:
        """Returns whether new words are unknown."""
        return self._frozen

    def freeze(self) -> None:
        """From now on new words are unknown."""
        self._frozen = True

    def words(self, numbers: Iterable[int]) -> list[Hashable]:
        """The words that have these numbers.

        Raises:
          ValueError: if there is no such number.
        """
        in_order = list(self._numbers)
        words = []
        for number in checks.items("Vocabulary.words", "numbers", numbers, "a list of numbers"):
            number = checks.whole("Vocabulary.words", "number", number, -(2**63))
            if not 0 <= number < len(in_order):
                raise ValueError(f"there is no word {number}; the last is {len(in_order) - 1}")
            words.append(in_order[number])
        return words
