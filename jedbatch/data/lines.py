"""Files with one record a line, as the readers of this package read them."""

import functools
import gzip
import inspect
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from jedbatch import checks

Record = TypeVar("Record")
Options = ParamSpec("Options")


class Reader(Protocol[Options, Record]):
    """A function that reads the records of a file: called, all of them; or one by one."""

    def __call__(self, *args: Options.args, **kwargs: Options.kwargs) -> list[Record]:
        """All records."""

    def stream(self, *args: Options.args, **kwargs: Options.kwargs) -> Iterator[Record]:
        """The records one by one, so that the file need not fit into memory."""


def reader(records: Callable[Options, Iterator[Record]]) -> Reader[Options, Record]:
    """Makes a reader of a function that returns an iterator over the records of a file.

    Paths and the limit are checked before anything is read.
    """
    who, signature = records.__name__, inspect.signature(records)

    @functools.wraps(records)
    def stream(*args: Options.args, **kwargs: Options.kwargs) -> Iterator[Record]:
        arguments = signature.bind(*args, **kwargs).arguments
        checks.path(who, arguments["path"])
        if arguments.get("tags") is not None:
            checks.path(who, arguments["tags"])
        if arguments.get("limit") is not None:
            checks.whole(who, "limit", arguments["limit"], instead="None reads all records.")
        return records(*args, **kwargs)

    @functools.wraps(records)
    def read(*args: Options.args, **kwargs: Options.kwargs) -> list[Record]:
        return list(stream(*args, **kwargs))

    read.stream = stream  # type: ignore[attr-defined]
    return cast("Reader[Options, Record]", read)


MAX_LINE_BYTES = 1 << 22  # bytes of a line; no record takes a hundredth of that


def read_lines(
    path: str | os.PathLike[str], limit: int | None, parse: Callable[[str], Record], expected: str
) -> Iterator[Record]:
    """Reads a file line by line, gzipped if its name ends in `.gz`; blank lines are skipped.

    Args:
      path: the file, in UTF-8; a byte order mark at its start is left out.
      limit: the number of records to read at most; None for all.
      parse: makes a record of a line; raises `ValueError` with what is wrong with it.
      expected: says what a line should be.

    Yields:
      The records.

    Raises:
      ValueError: names the file and the line that is no record, or where the file is damaged.
    """
    name = os.fsdecode(path)
    opener: Any = gzip.open if Path(name).suffix == ".gz" else open
    count = 0
    with opener(name, "rb") as file:
        for number in itertools.count(1):
            if count == limit:
                return
            try:
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                record = parse(text)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(
                    f"{name}, line {number}: {error}; expected a whole file of gzip, as its name "
                    "ends in .gz"
                ) from None
            except (ValueError, OverflowError, RecursionError) as error:  # of numbers, of nesting
                raise ValueError(
                    f"{name}, line {number}: {checks.cut(error)}; expected {expected}"
                ) from None
            yield record
            count += 1


def json_object(line: str) -> dict[str, Any]:
    """The JSON object in a line, checked."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"{line[:40].strip()!r} is no object")
    return record


def entry(record: dict[str, Any], name: str, kind: Any, what: str) -> Any:
    """An entry of an object, checked."""
    if name not in record:
        raise ValueError(f'there is no "{name}"')
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'"{name}" is {checks.brief(value)}, not {what}')
    return value


def strings(record: dict[str, Any], *names: str) -> tuple[str, ...]:
    """The strings listed under the first of the names that the object has, at least one."""
    name = next((name for name in names if name in record), names[0])
    values = entry(record, name, list, "a list")
    if not values:
        raise ValueError(f'"{name}" is empty')
    for value in values:
        if not isinstance(value, str) or not value:
            raise ValueError(
                f'"{name}" holds {checks.brief(value)}; expected strings, none of them empty'
            )
    return tuple(values)
