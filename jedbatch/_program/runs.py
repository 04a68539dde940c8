"""Batches as what a program loops over.

A batch is cut into chunks. Chunks of one kernel and one width that follow one another in its lanes
are one *run*, whatever batches they belong to: the long tail of a minibatch of trees, a node
or two a batch, is a single entry of the table and a single loop.
"""

import functools

import numpy as np

from jedbatch._layout.bucketing import NUM_WIDTHS, Buckets


@functools.lru_cache(256)
def widths_of(all_buckets: tuple[Buckets, ...]) -> np.ndarray:
    """int64[K + 1, NUM_WIDTHS]: the widths of each kernel, and those of sums of cotangents."""
    widths = np.array([buckets.columns for buckets in all_buckets], np.int64)
    widths.flags.writeable = False  # of many minibatches
    return widths


def cut_batches(
    kind: np.ndarray,
    start: np.ndarray,
    trips: np.ndarray,
    widths: np.ndarray,
    *,
    reverse: bool = False,
) -> tuple[np.ndarray, ...]:
    """Chunks of one batch and one width: (batch, width id, first lane, lanes, chunks), in order.

    A batch has its widest chunks first, in reverse last, and begins in lane `start` of its kind,
    the position of a kernel or, beyond them, sums of cotangents. `widths` is as from `widths_of`.
    """
    sizes = (trips * widths[np.minimum(kind, len(widths) - 1)])[:, ::-1]
    first = start[:, None] + sizes.cumsum(axis=1) - sizes
    columns = np.arange(NUM_WIDTHS)[::-1]
    trips = trips[:, ::-1]
    if reverse:
        sizes, first, columns, trips = sizes[:, ::-1], first[:, ::-1], columns[::-1], trips[:, ::-1]
    step, column = trips.nonzero()
    return step, columns[column], first[step, column], sizes[step, column], trips[step, column]


def find_runs(
    kind: np.ndarray,
    start: np.ndarray,
    trips: np.ndarray,
    widths: np.ndarray,
    *,
    reverse: bool = False,
) -> np.ndarray:
    """int64[..., 3]: (kind * NUM_WIDTHS + width id, first lane, chunks) of every run."""
    step, column, lane, size, count = cut_batches(kind, start, trips, widths, reverse=reverse)
    return merge_runs(kind[step] * NUM_WIDTHS + column, lane, size, count, reverse=reverse)


def merge_runs(
    what: np.ndarray, lane: np.ndarray, size: np.ndarray, count: np.ndarray, *, reverse=False
) -> np.ndarray:
    """int64[..., 3]: runs of neighbours that are of one kind and follow one another."""
    ahead, behind = (slice(1, None), slice(None, -1))[:: -1 if reverse else 1]
    new = np.ones(len(what), bool)
    new[1:] = (what[1:] != what[:-1]) | (lane[ahead] != lane[behind] + size[behind])
    (begins,) = new.nonzero()
    if not len(begins):
        return np.zeros((0, 3), np.int64)
    runs = np.empty((len(begins), 3), np.int64)
    runs[:, 0] = what[begins]
    np.minimum.reduceat(lane, begins, out=runs[:, 1])
    np.add.reduceat(count, begins, out=runs[:, 2])
    return runs
