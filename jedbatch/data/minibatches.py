"""Records in minibatches, shuffled or not, from memory or as they come."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from jedbatch import checks

Record = TypeVar("Record")
Held = TypeVar("Held", covariant=True)


@runtime_checkable
class Indexed(Protocol[Held]):
    """Records that can be had in any order."""

    def __len__(self) -> int:
        """Returns the number of minibatches."""

    def __getitem__(self, index: int, /) -> Held:
        """The record with a number from 0."""


def minibatches(
    records: Iterable[Record] | Indexed[Record],
    size: int,
    *,
    seed: int | np.random.Generator | None = None,
    drop_last: bool = True,
    buffer: int = 1024,
) -> Iterator[list[Record]]:
    """Puts records together in minibatches.

    Records of a sequence are shuffled all together. A sequence is whatever has `len` and records by
    number, arrays and data sets too, but no mapping. Of any other iterable, such as
    `read_trees.stream(path)`, no more than `buffer` records are held at a time, and minibatches are
    drawn from these: of a file that is sorted, the minibatches are still more or less sorted.

    Args:
      records: a sequence or another iterable.
      size: of the minibatches.
      seed: of the order; the same seed gives the same order. A generator goes on from where it is,
        for another order in every epoch. None keeps records as they come.
      drop_last: whether records that make no whole minibatch at the end are left out. If not, the
        last minibatch is smaller.
      buffer: how many records to draw from if `records` is no sequence; at least `size`.

    Returns:
      An iterator of lists of records.

    Raises:
      TypeError: if an argument is of a wrong type.
      ValueError: if a number is too small.

    Examples:
      >>> from jedbatch.data import minibatches
      >>> list(minibatches("abcde", 2, drop_last=False))
      [['a', 'b'], ['c', 'd'], ['e']]
      >>> sorted(sum(minibatches(range(6), 3, seed=0), []))
      [0, 1, 2, 3, 4, 5]
    """
    size = checks.whole("minibatches", "size", size, 1, 2**31)
    buffer = checks.whole("minibatches", "buffer", buffer, 1, 2**31)
    checks.flag("minibatches", "drop_last", drop_last)
    if not isinstance(seed, np.random.Generator | None):
        seed = checks.whole("minibatches", "seed", seed)
    if not isinstance(records, Iterable | Indexed):
        came = f"records={checks.brief(records)}"
        raise TypeError(checks.wrong("minibatches", came, "a list of records, or an iterator"))
    rng = None if seed is None else np.random.default_rng(seed)
    if isinstance(records, Indexed) and not isinstance(records, Mapping):
        order = range(len(records)) if rng is None else rng.permutation(len(records)).tolist()
        return _drawn((records[k] for k in order), size, None, drop_last, size)
    if rng is not None and buffer < size:
        raise ValueError(
            f"`minibatches` got buffer={buffer}; expected at least size={size} records to draw from"
        )
    return _drawn(iter(records), size, rng, drop_last, size if rng is None else buffer)


def _drawn(
    records: Iterator[Record],
    size: int,
    rng: np.random.Generator | None,
    drop_last: bool,
    buffer: int,
) -> Iterator[list[Record]]:
    """Minibatches from a buffer that is filled up before each."""
    held: list[Record] = []
    while True:
        held += islice(records, buffer - len(held))
        if not held or (drop_last and len(held) < size):
            return
        if rng is not None:  # those to yield go to the front
            for k in range(min(size, len(held))):
                swapped = int(rng.integers(k, len(held)))
                held[k], held[swapped] = held[swapped], held[k]
        batch, held = held[:size], held[size:]
        yield batch
        del batch  # whoever got it may let go of it
