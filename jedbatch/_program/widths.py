"""Which widths of chunks a program is compiled in: those that save more than a little.

Each width of each kernel takes time to compile. A program without some of the widest runs their
chunks as several narrower ones (`Placement.narrowed`), each of which has to be started.
"""

from collections.abc import Sequence

import numpy as np

from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import NUM_WIDTHS

# Costs of a minibatch in chunks of the widths that are compiled, over those in the best ones:
SPARED_COST = 1.02  # of the minibatch that a program is made for
SPARED_COST_LATER = 1.2  # of one like it whose batches are larger
MAX_CUT_COST = 1.25  # of one for which no program is made, as one of another minibatch will do
MAX_CUT_STARTS = 16  # starts of chunks of light lanes that it may cost more, in any case
LATER_DEVIATIONS = 2.5  # between a batch and larger ones


def cost(target: Target, kernels: Sequence[Kernel], trips: np.ndarray) -> float:
    """Returns what chunks cost, in floating-point operations, with those of starting them.

    Args:
      target: what they run on.
      kernels: of the chunks.
      trips: int[K, W], the chunks of each width of each kernel.
    """
    each = []
    for kernel in kernels:
        start, work = target.start_work(kernel.lane_work), kernel.lane_work
        if _has_one_chunk(kernel):
            start = max(start, kernel.buckets.overhead * work)
        each.append([start + width * work for width in kernel.buckets.columns])
    return float((np.asarray(trips) * np.reshape(each, (-1, NUM_WIDTHS))).sum())


def choose_widths(
    target: Target,
    kernels: Sequence[Kernel],
    trips: np.ndarray,
    larger_trips: np.ndarray,
    grown: bool,
) -> tuple[int, ...]:
    """Returns how many widths of each kernel to compile.

    Args:
      target: what they are compiled for.
      kernels: of the chunks.
      trips: int[K, W], the chunks of each width of each kernel in a minibatch.
      larger_trips: the same, were its batches larger by `LATER_DEVIATIONS`.
      grown: whether there were programs before, which others like it did not fit.
    """
    now = _spare(target, kernels, trips, 1 if grown else SPARED_COST)
    later = _spare(target, kernels, larger_trips, SPARED_COST_LATER)
    return tuple(
        n if _has_one_chunk(kernel) else max(n, more)
        for kernel, n, more in zip(kernels, now, later, strict=True)
    )


def _has_one_chunk(kernel: Kernel) -> bool:
    """Returns whether all lanes are in one chunk, if there is one for as many.

    Chunks of loops run one after the other, each as long as its longest; and loops take long to
    compile, so that a wider chunk waits for a batch that needs it.
    """
    return kernel.diverges and kernel.buckets.overhead >= kernel.buckets.widths[-1]


def _spare(target: Target, kernels: Sequence[Kernel], trips: np.ndarray, most: float) -> list[int]:
    """Returns how many widths of each kernel are left if the widest ones are left out one by one.

    The width whose chunks cost least extra when cut goes first, until all cost `most` times as
    much.
    """
    trips = trips.copy()
    widest = ((trips > 0) * np.arange(1, NUM_WIDTHS + 1)).max(axis=1).tolist()
    left = (most - 1) * cost(target, kernels, trips)
    candidates: dict[int, tuple[float, np.ndarray]] = {}

    def consider(k: int) -> None:
        candidates.pop(k, None)
        if widest[k] > 1:
            buckets, cut = kernels[k].buckets, trips[k].copy()
            own = cut[: len(buckets.widths)]
            own[:] = buckets.narrowed(own, widest[k] - 1)
            costs = [cost(target, [kernels[k]], x[None]) for x in (trips[k], cut)]
            candidates[k] = costs[1] - costs[0], cut

    for k in range(len(kernels)):
        consider(k)
    while candidates:
        k = min(candidates, key=lambda k: (candidates[k][0], k))
        more, cut = candidates[k]
        left -= more
        if left < 0:
            break
        trips[k] = cut
        widest[k] -= 1
        consider(k)
    return [max(1, n) for n in widest]


def is_cut_cheaply(target: Target, best: float, cut: float) -> bool:
    """Returns whether a minibatch costs so little more in narrower chunks that it may run in them.

    Args:
      target: what it runs on.
      best: what it costs in the best chunks, see `cost`.
      cut: what it costs in those that a program has.
    """
    return cut <= MAX_CUT_COST * best or cut - best <= MAX_CUT_STARTS * target.chunk_work
