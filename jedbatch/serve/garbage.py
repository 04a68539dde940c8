"""Garbage collection of a server: objects by their age, counted in minibatches.

Python collects the youngest objects once some hundred more have been made than freed. Where a cache
is full, as many are freed as are made, so that it comes seldom, and then looks at all that were
made since, while every request waits. So a server has them collected after each minibatch, while
the device computes.

Each collection sets Python's count back, so that Python would hardly ever come to older objects by
itself, and garbage that outlived the minibatch it came with would stay. So the server has older
generations collected, too, by Python's thresholds.
"""

import gc
import sys


class Garbage:
    """Has Python collect garbage, unless collections are turned off."""

    def __init__(self) -> None:
        self._full = -1  # collections of the oldest generation so far, whoever asked for them
        self._blocks = 0  # of memory that Python had after the last of these
        self._has_grown()

    def collect(self) -> None:
        """Collects the youngest objects, or one of the older generations if it is due.

        Generation 1 is due once the youngest were collected more often than its threshold says; the
        oldest as well by its own threshold, and if Python has a quarter more memory blocks than
        when it was last collected. Python's own rule is the same, with objects for blocks.
        """
        youngest, middle, oldest = gc.get_threshold()
        if not gc.isenabled() or not youngest:
            return
        _, since_middle, since_oldest = gc.get_count()
        if since_middle <= middle:
            gc.collect(0)
        else:
            gc.collect(2 if self._has_grown() and since_oldest > oldest else 1)

    def _has_grown(self) -> bool:
        """Returns whether Python has a quarter more memory than after the last full collection."""
        full, blocks = gc.get_stats()[2]["collections"], sys.getallocatedblocks()
        if full != self._full:
            self._full, self._blocks = full, blocks
        return 4 * blocks >= 5 * self._blocks
