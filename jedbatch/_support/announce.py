"""A line in the log while something takes long, such as compiling a program."""

import logging
import threading
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("jedbatch")
PATIENCE = 2.0  # seconds before there is a line


class _Waiting(threading.local):
    """The timers of what runs in this thread."""

    def __init__(self) -> None:
        self.timers: list[threading.Timer] = []


_waiting = _Waiting()


def announce(what: str) -> None:
    """Says what is being done if the function around it (see `announced`) is not done soon.

    Args:
      what: as in "compiling a program".
    """
    timer = threading.Timer(PATIENCE, LOGGER.warning, ("jedbatch is %s", what))
    timer.daemon = True
    _waiting.timers.append(timer)
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
                timers.pop().cancel()

    return call
