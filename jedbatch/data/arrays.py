"""Records as arrays, for models of whole sentences and sets."""

from collections.abc import Iterable

import numpy as np

from jedbatch import checks


def as_arrays(records: Iterable[tuple[object, ...]]) -> list[tuple[np.ndarray, ...]]:
    """The records with an array for each of their parts.

    Models that go through a sentence word by word read tuples of numbers; models of whole sentences
    read arrays, whose length is that of the sentence.

    Args:
      records: tuples, such as `(words, tags)`, `(source, target)` or `(points, label)`; each part a
        number, a tuple of numbers, or a tuple of tuples of numbers that are equally long.

    Returns:
      Records of as many arrays of NumPy, int32 or float32. A part without numbers is int32.

    Raises:
      TypeError: a record is no tuple.
      ValueError: names the record with a part that is no array, or with a number that does not fit.

    Examples:
      >>> from jedbatch.data import as_arrays
      >>> as_arrays([((3, 1), (0, 0)), ((5,), (2,))])[1]
      (array([5], dtype=int32), array([2], dtype=int32))
    """
    converted = []
    for number, record in enumerate(checks.items("as_arrays", "records", records, "records")):
        if not isinstance(record, (tuple, list)):
            raise TypeError(
                f"`as_arrays` got record {number}, {checks.shown(record)}; expected a tuple of "
                "parts, such as `(words, tags)`. A single part is `(words,)`."
            )
        converted.append(tuple(_as_array(part, f"record {number}") for part in record))
    return converted


def _as_array(part: object, where: str) -> np.ndarray:
    """A part of a record as an array."""
    try:
        array = np.asarray(part)
    except ValueError:
        array = np.array(None)  # tuples of several lengths
    kind = array.dtype.kind
    is_whole = kind in "bui" or (kind == "O" and all(type(x) is int for x in array.flat))
    if is_whole or not array.size:
        bounds = np.iinfo(np.int32)
        if array.size and not (bounds.min <= array.min() and array.max() <= bounds.max):
            big = max((int(array.min()), int(array.max())), key=abs)
            raise ValueError(_misfit(big, where, "int32: numbers from -2**31 to 2**31 - 1"))
        return array.astype(np.int32)
    if kind == "f":
        with np.errstate(over="ignore"):
            single = array.astype(np.float32)
        if (np.isinf(single) & np.isfinite(array)).any():
            large = float(array[np.isinf(single) & np.isfinite(array)][0])
            raise ValueError(_misfit(large, where, "float32: numbers up to 3.4e38"))
        return single
    raise ValueError(
        f"`as_arrays` got {checks.brief(part)} in {where}; expected numbers, or tuples of numbers "
        "that are equally long. Words need numbers, see `Vocabulary`, and cannot be spelled."
    )


def _misfit(number: float, where: str, fits: str) -> str:
    return f"`as_arrays` got {checks.brief(number)} in {where}; expected what fits {fits}."
