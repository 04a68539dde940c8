"""Widths: into which chunks a batch is cut.

XLA compiles kernels of fixed width, batches have any number of nodes. Each batch is therefore
cut into chunks whose widths come from the few buckets of its type (see `_kernel.target`), as few
and as narrow as what a chunk costs to start suggests; what is left over is padding, lanes that
repeat a live one. How a batch is cut depends on its size alone, never on what was compiled before.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

NUM_WIDTHS = 5  # at most, of the buckets of one type


@dataclass(frozen=True)
class Buckets:
    """The widths of chunks of one node type.

    Attributes:
      widths: in lanes, ascending; each is a program of its own to compile.
      overhead: what starting a chunk costs, in lanes.
    """

    widths: tuple[int, ...]
    overhead: int = 8

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """The widths in the columns of a table that has `NUM_WIDTHS`, 0 where there is none."""
        return (*self.widths, *[0] * (NUM_WIDTHS - len(self.widths)))

    @functools.cached_property
    def _unit(self) -> int:
        """The lanes that all widths are multiples of."""
        return math.gcd(*self.widths)

    @functools.cached_property
    def _cheapest(self) -> np.ndarray:
        """int32[2 * widest / unit + 1, widths]: the cheapest chunks that cover n units of lanes."""
        units = [width // self._unit for width in self.widths]
        most = 2 * units[-1]
        cost = np.zeros(most + 1)
        trips = np.zeros((most + 1, len(units)), np.int32)
        for n in range(1, most + 1):
            uncovered = [max(0, n - unit) for unit in units]
            costs = [
                cost[k] + self.overhead + w for k, w in zip(uncovered, self.widths, strict=True)
            ]
            best = int(np.argmin(costs))
            cost[n] = costs[best]
            trips[n] = trips[uncovered[best]]
            trips[n, best] += 1
        return trips

    @functools.cached_property
    def _cheapest_lanes(self) -> list[int]:
        """The lanes of these chunks, padding included, for each number of units."""
        lanes: list[int] = self.lanes(self._cheapest).tolist()
        return lanes

    def cover(self, sizes: np.ndarray) -> np.ndarray:
        """int32[len(sizes), widths]: chunks of each width that a batch of each size takes."""
        widest = self.widths[-1]
        full = np.maximum(0, (sizes - widest) // widest)
        trips = self._cheapest[-(-(sizes - full * widest) // self._unit)]
        trips[:, -1] += full.astype(np.int32)
        return trips

    def narrowed(self, trips: np.ndarray, num_widths: int) -> np.ndarray:
        """int32[..., widths]: the same lanes in chunks of the first widths only.

        Raises:
          ValueError: a wider chunk is not a whole number of narrower ones.
        """
        trips = trips.copy()
        for column in range(num_widths, len(self.widths)):
            left = self.widths[column]
            for narrower in reversed(range(num_widths)):
                chunks, left = divmod(left, self.widths[narrower])
                trips[..., narrower] += chunks * trips[..., column]
            if left:
                raise ValueError(
                    f"{self.widths[column]} lanes are not a whole number of chunks of "
                    f"{self.widths[:num_widths]}; widths must be multiples of the narrowest."
                )
            trips[..., column] = 0
        return trips

    def lanes(self, trips: np.ndarray) -> np.ndarray:
        """Lanes in chunks of each width, padding included."""
        return trips[..., : len(self.widths)] @ np.array(self.widths)


@functools.lru_cache(4096)
def num_widths(buckets: Buckets, largest: int) -> int:
    """Returns the number of widths that batches of up to `largest` nodes use."""
    used = buckets.cover(np.arange(1, largest + 1)).any(axis=0)
    return int(np.flatnonzero(used)[-1]) + 1


@functools.lru_cache(4096)
def blocks_of(lanes: int, blocks: Buckets) -> tuple[int, ...]:
    """Returns how many blocks of each width cover so many lanes."""
    return tuple(blocks.cover(np.array([lanes]))[0].tolist())


def in_blocks(lanes: int, blocks: Buckets) -> int:
    """Returns the lanes of the blocks that cover so many lanes."""
    widest = blocks.widths[-1]
    full = max(0, (lanes - widest) // widest) * widest
    return full + blocks._cheapest_lanes[-(-(lanes - full) // blocks._unit)]


FINE_BUCKETS = Buckets((2, 8, 24, 64, 256))
COARSE_BUCKETS = Buckets((8, 32, 512), 16)
DIVERGING_BUCKETS = Buckets((8, 64, 256, 1024), 32)  # lanes wait for others of their chunk alone
