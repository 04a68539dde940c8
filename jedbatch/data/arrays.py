"""Records as arrays, for models of whole sentences and sets."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def as_arrays(records: Iterable[tuple[Any, ...]]) -> list[tuple[np.ndarray, ...]]:
    """The records with an array for each of their parts.

    Models that go through a sentence word by word read tuples of numbers; models of whole sentences
    read arrays, whose length is that of the sentence.

    Args:
      records: tuples, such as `(words, tags)`, `(source, target)` or `(points, label)`; each part a
        number, a tuple of numbers, or a tuple of tuples of numbers that are equally long.

    Returns:
      Records of as many arrays of NumPy, int32 or float32. A part without numbers is int32.

    Raises:
      ValueError: names the record whose part is no array.

    Example:
      >>> from jedbatch.data import as_arrays
      >>> as_arrays([((3, 1), (0, 0)), ((5,), (2,))])[1]
      (array([5], dtype=int32), array([2], dtype=int32))
    """
    return [
        tuple(_as_array(part, f"record {number}") for part in record)
        for number, record in enumerate(records)
    ]


def _as_array(part: Any, where: str) -> np.ndarray:
    """A part of a record as an array."""
    try:
        array = np.asarray(part)
    except ValueError:
        array = np.array(None)  # tuples of several lengths
    if not array.size or array.dtype.kind in "bui":
        return array.astype(np.int32)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    raise ValueError(
        f"`as_arrays` got {part!r} in {where}; expected numbers, or tuples of numbers that are "
        "equally long. Words need numbers, see `Vocabulary`, and cannot be spelled."
    )
