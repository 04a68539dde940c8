"""Cutting a sample of instances into minibatches."""

from collections.abc import Sequence
from typing import TypeVar

Instance = TypeVar("Instance")


def cut_evenly(instances: Sequence[Instance], size: int) -> list[list[Instance]]:
    """Returns minibatches of exactly `size` instances, which together hold all of them.

    The last one has some that another has if they are not a multiple; all of them repeat if there
    are fewer.
    """
    count = len(instances)
    if count < size:
        return [[instances[i % count] for i in range(size)]]
    starts = [*range(0, count - size, size), count - size]
    return [list(instances[i : i + size]) for i in starts]
