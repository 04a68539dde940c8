"""Files with one record a line, as the readers of this package read them."""

import functools
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

Record = TypeVar("Record")
Options = ParamSpec("Options")


class Reader(Protocol[Options, Record]):
    """A function that reads the records of a file: called, all of them; or one by one."""

    def __call__(self, *args: Options.args, **kwargs: Options.kwargs) -> list[Record]:
        """All records."""

    def stream(self, *args: Options.args, **kwargs: Options.kwargs) -> Iterator[Record]:
        """The records one by one, so that the file need not fit into memory."""


def reader(records: Callable[Options, Iterator[Record]]) -> Reader[Options, Record]:
    """Makes a reader of a function that returns an iterator over the records of a file."""

    @functools.wraps(records)
    def read(*args: Options.args, **kwargs: Options.kwargs) -> list[Record]:
        return list(records(*args, **kwargs))

    read.stream = records  # type: ignore[attr-defined]
    return cast("Reader[Options, Record]", read)


def read_lines(
    path: str | os.PathLike, limit: int | None, parse: Callable[[str], Record], expected: str
) -> Iterator[Record]:
    """Reads a file line by line, gzipped if its name ends in `.gz`; blank lines are skipped.

    Args:
      path: the file, in UTF-8; a byte order mark at its start is left out.
      limit: the number of records to read at most.
      parse: makes a record of a line; raises `ValueError` with what is wrong with it.
      expected: says what a line should be.

    Yields:
      The records.

    Raises:
      ValueError: names the file and the line that is no record.
    """
    opener = gzip.open if Path(path).suffix == ".gz" else open
    count = 0
    with opener(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if count == limit:
                break
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                record = parse(text)
            except (ValueError, OverflowError, RecursionError) as error:  # of numbers, of nesting
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: {error}; expected {expected}"
                ) from None
            yield record
            count += 1


def json_object(line: str) -> dict[str, Any]:
    """The JSON object in a line, checked."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"{line.strip()[:40]!r} is no object")
    return record


def entry(record: dict[str, Any], name: str, kind: Any, what: str) -> Any:
    """An entry of an object, checked."""
    if name not in record:
        raise ValueError(f'there is no "{name}"')
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'"{name}" is {value!r}, not {what}')
    return value


def strings(record: dict[str, Any], *names: str) -> tuple[str, ...]:
    """The strings listed under the first of the names that the object has, at least one."""
    name = next((name for name in names if name in record), names[0])
    values = entry(record, name, list, "a list")
    if not values:
        raise ValueError(f'"{name}" is empty')
    for value in values:
        if not isinstance(value, str) or not value:
            raise ValueError(f'"{name}" holds {value!r}; expected strings, none of them empty')
    return tuple(values)
