"""Recording again where an assumption of the recording turns out to be wrong.

A function is recorded under assumptions: that it does not recur, that lengths need not be equal,
that it decides on no value, that every tracer around it is known. Each is a *guard*, as tracing
compilers call it. Some fail only while the recording goes on. What has been learned is noted then,
and everything is recorded again under what is known by now. Knowledge only grows, so this ends.
"""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class GuardFailed(BaseException):
    """An assumption of a recording has turned out to be wrong; not an error to catch."""


def until_guards_hold(record: Callable[[], T], assumed: Callable[[], object]) -> T:
    """Returns the result of the first recording whose assumptions hold at its end.

    Args:
      record: records. It may raise `GuardFailed` where there is no point in going on.
      assumed: gives what recordings assume, to be compared before and after. Where that is the
        same, `GuardFailed` is raised for a loop around this one.
    """
    while True:
        before = assumed()
        try:
            recorded = record()
        except GuardFailed:
            if assumed() == before:
                raise
            continue
        if assumed() == before:
            return recorded
