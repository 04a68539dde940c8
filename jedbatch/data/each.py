"""Helpers of functions of many records: errors that name the record, checks of vocabularies."""

from collections.abc import Callable
from typing import TypeVar

from jedbatch import checks
from jedbatch.data.vocabulary import Vocabulary

Made = TypeVar("Made")


def each(who: str, records: object, make: Callable[..., Made], expected: str) -> list[Made]:
    """Returns `make(record)` for every record; raises a `TypeError` that names an invalid one.

    Args:
      who: the public function, for messages.
      records: a list, or anything else to iterate over.
      make: is given a record.
      expected: says what a record should be.
    """
    results = []
    for number, record in enumerate(checks.items(who, "records", records, "a list of records")):
        try:
            results.append(make(record))
        except (TypeError, ValueError, IndexError) as error:
            raise TypeError(
                f"`{who}` got record {number}, {checks.brief(record)}, and says "
                f"{checks.cut(error)!r}; expected {expected}."
            ) from error
    return results


def vocabularies(who: str, **given: object) -> None:
    """Raises a `TypeError` unless all of these are vocabularies."""
    for name, vocabulary in given.items():
        if not isinstance(vocabulary, Vocabulary):
            raise TypeError(
                f"`{who}` got {name}={checks.brief(vocabulary)}; expected a "
                "`jedbatch.data.Vocabulary`, which numbers the words that it meets."
            )
