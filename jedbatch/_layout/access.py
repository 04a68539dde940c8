"""Reading operands: as slices where their rows are consecutive, one by one where not.

The rows of an operand over the lanes of a chunk can be

    consecutive             5 6 7 8     read as one *slice*
    every other row         5 7 9 11    a *strided* slice (of twice the rows)
    the same row            5 5 5 5     one row, *broadcast*
    anything else           5 9 6 6     a *gather*

A function that reads rows on a CPU copies those that follow one another at once (see
`_program.rows`). XLA compiles a slice and a gather into different programs, and which one a chunk
needs is data. A program for a GPU therefore has at most one more body per kernel beside the one
that gathers everything: the reading of its operands that occurs most, if it occurs often enough to
be worth compiling (`choose_reading`). A chunk runs by it if all of its slices are slices, and
gathers otherwise.

Padding repeats a live lane, so a chunk with padding is no slice. In inference the rows behind the
last live one will often do instead of repeats, whatever they hold: for operands that are no
indices, in cells without loops that might run for ever and calls of Python (`Kernel.loose`).
"""

from typing import Any

import numpy as np

GATHER, SLICE, STRIDED, BROADCAST = range(4)
NAMES = ("gather", "slice", "strided slice", "broadcast")
STRIDE = 2
STEPS = ((0, BROADCAST), (STRIDE, STRIDED), (1, SLICE))  # from row to row; a slice if in doubt
# Share of a kernel's operands that a reading must improve: compiling takes time.
MIN_IMPROVED_SHARE = 0.5
MIN_IMPROVED_CHUNKS = 8  # chunks that it must improve
MAX_CANDIDATES = 32  # readings that are looked at, those that occur most

Reading = tuple[int, ...]  # one of the above for each operand of a kernel


def find_modes(rows: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """int8[M, C]: how each operand can be read in each chunk.

    Args:
      rows: int[M, L], the row of each operand in each lane.
      first: int[C], the first lane of each chunk.
      count: int[M, C], the lanes that matter, at least one.
    """
    modes = np.full(count.shape, GATHER, np.int8)
    if not rows.size:
        return modes
    operand = np.arange(len(rows))[:, None]
    step = np.diff(rows, axis=1)
    for delta, mode in STEPS:
        breaks = np.zeros(rows.shape, np.int64)
        np.cumsum(step != delta, axis=1, out=breaks[:, 1:])
        modes[breaks[operand, first + count - 1] == breaks[operand, first]] = mode
    return modes


def extent(mode: Any, width: Any) -> Any:
    """Rows from the first one on that a chunk of some width reads; 0 for a gather."""
    return np.where(mode == BROADCAST, 1, width * np.array([0, 1, STRIDE, 0])[mode])


def usable(reading: Reading, modes: np.ndarray) -> np.ndarray:
    """bool[C], the chunks whose operands can be read in a certain way."""
    steps = np.array(reading, np.int8)[:, None]
    return ((steps == GATHER) | (steps == modes)).all(axis=0)


def choose_reading(
    modes: np.ndarray, matters: np.ndarray, worth: float = MIN_IMPROVED_SHARE
) -> tuple[Reading, ...]:
    """The reading beside gathering everything that is worth compiling, if there is one.

    What a slice saves over a gather is starting it, which costs the same at every width; so what
    counts is how many operands of how many chunks become slices. Ties go to the smallest reading.

    Args:
      modes: int8[M, C], how each operand can be read in each chunk.
      matters: bool[C], the chunks of more than one live lane.
      worth: the share of all operands of all chunks that must become slices.
    """
    readings, number = np.unique(modes[:, matters].T, axis=0, return_counts=True)
    best, most = (), 0
    often = number.argsort(kind="stable")[::-1][:MAX_CANDIDATES]
    for reading in map(tuple, readings[often].tolist()):
        chunks = int((usable(reading, modes) & matters).sum())
        saved = chunks * sum(mode != GATHER for mode in reading)
        if chunks >= MIN_IMPROVED_CHUNKS and saved > most:
            best, most = reading, saved
    return (best,) if most >= worth * modes.size and most else ()
