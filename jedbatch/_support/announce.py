"""A line in the log while something takes long, such as compiling a program."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("jedbatch")
PATIENCE = 2.0  # seconds before there is a line
LONG = 10.0  # seconds from which on a process is told once what helps
ADVICE = (
    "jedbatch took %.0f s for %s, most of them in XLA. `batched.warm(params, sample)` compiles "
    "before the first call, and where `JAX_COMPILATION_CACHE_DIR` is set, JAX keeps programs for "
    "the next process. The guide to performance (docs/guides/performance.md) has options of XLA "
    "that shorten it. This is said once."
)


class _Waiting(threading.local):
    """The timers of what runs in this thread."""

    def __init__(self) -> None:
        self.timers: list[tuple[threading.Timer, float, str]] = []  # with begin and what is done


_waiting = _Waiting()
_advised = itertools.count()  # times that a process was told what helps


def announce(what: str) -> None:
    """Says what is being done if the function around it (see `announced`) is not done soon.

    Args:
      what: as in "compiling a program".
    """
    timer = threading.Timer(PATIENCE, LOGGER.warning, ("jedbatch is %s", what))
    timer.daemon = True
    _waiting.timers.append((timer, time.perf_counter(), what))
    timer.start()


def announced(function: Callable) -> Callable:
    """Returns the same function; what it announces is over when it returns.

    Args:
      function: takes positional arguments.
    """

    def call(*args: Any) -> Any:
        timers = _waiting.timers
        before = len(timers)
        try:
            return function(*args)
        finally:
            while len(timers) > before:
                timer, begun, what = timers.pop()
                timer.cancel()
                took = time.perf_counter() - begun
                if took > LONG and not next(_advised):
                    LOGGER.warning(ADVICE, took, what)

    return call
