"""Files with one record a line, as the readers of this package read them."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Record = TypeVar("Record")


def read_lines(
    path: str | os.PathLike, limit: int | None, parse: Callable[[str], Record], expected: str
) -> list[Record]:
    """Reads a file line by line, gzipped if its name ends in `.gz`; empty lines are skipped.

    Args:
      path: the file.
      limit: the number of records to read at most.
      parse: makes a record of a line; raises `ValueError` with what is wrong with it.
      expected: says what a line should be.

    Returns:
      The records.

    Raises:
      ValueError: names the file and the line that is no record.
    """
    opener = gzip.open if Path(path).suffix == ".gz" else open
    records: list[Record] = []
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if len(records) == limit:
                break
            if not line.strip():
                continue
            try:
                records.append(parse(line))
            except ValueError as error:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: {error}; expected {expected}"
                ) from None
    return records
