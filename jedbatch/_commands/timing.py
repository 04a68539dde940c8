"""Times functions."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def seconds_of(run: Callable[[], Any]) -> float:
    """Returns how long a run takes, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def rate(run: Callable[[], Any], count: int, times: int = 5, warm: int = 2) -> float:
    """Instances per second: the median of some runs after others to warm up."""
    seconds = [seconds_of(run) for _ in range(warm + times)]
    return count / float(np.median(seconds[warm:]))
