"""Requests that wait, in a queue with a bound, and the minibatches that are taken from it.

A minibatch is closed as late as it can be: when the device has nothing to do, or when it is full.
Requests that come while the device computes join the next one, so that minibatches are as large as
the load makes them, and nobody waits for others while the device is idle, unless told to.

Source: Crankshaw et al., Clipper, 2017, and the batching of TensorFlow Serving (Olston et al.,
2017) close a minibatch when it is full or its oldest request has waited for a fixed time, whether
the device is idle or not; `max_wait_ms` does so on top.
"""

import asyncio
import collections
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(eq=False, slots=True)
class Request:
    """An instance that somebody waits for.

    Attributes:
      instance: the mapped arguments.
      future: gets the result, in the event loop.
      span: that its minibatch is linked to (see `tracing`).
      arrived: when it came, by `time.perf_counter`.
    """

    instance: tuple[Any, ...]
    future: "asyncio.Future[Any]"
    span: Any
    arrived: float = field(default_factory=time.perf_counter)


class Taken(NamedTuple):
    """Work that the worker takes from the queue.

    Attributes:
      requests: a minibatch, if there is one.
      jobs: functions to be called once nothing runs.
      is_last: whether there will be nothing more.
    """

    requests: list[Request]
    jobs: list[Callable[[], None]]
    is_last: bool


class RequestQueue:
    """Requests in the order in which they came, put by an event loop and taken by a thread."""

    def __init__(self, limit: int, most: int, patience: float):
        """Makes an empty queue.

        Args:
          limit: requests that may wait.
          most: requests in a minibatch.
          patience: seconds for which the oldest request waits for others while nothing runs.
        """
        self._limit = limit
        self._most = most
        self._patience = patience
        self._waiting: dict[Request, None] = {}
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: Request) -> bool:
        """Adds a request, unless there is no room; returns whether it did."""
        with self._changed:
            if len(self._waiting) >= self._limit:
                return False
            self._waiting[request] = None
            if len(self._waiting) in (1, self._most):  # the worker may wait for these
                self._changed.notify()
            return True

    def remove(self, request: Request) -> None:
        """Takes a request out that nobody waits for any more, if it is there."""
        with self._changed:
            self._waiting.pop(request, None)

    def clear(self) -> list[Request]:
        """Takes all requests out."""
        with self._changed:
            requests = list(self._waiting)
            self._waiting.clear()
            return requests

    def do(self, job: Callable[[], None]) -> None:
        """Has the worker call a function after all that runs now."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Lets the worker end once it has taken what is there."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, idle: bool) -> Taken:
        """Returns the next minibatch, and jobs, which come first.

        Args:
          idle: whether nothing runs: then this waits until there is something to do. Or else it
            returns at once, with a minibatch only if that is full.
        """
        with self._changed:
            if idle:
                self._changed.wait_for(self._has_work)
                if self._waiting and not self._jobs and self._patience:
                    oldest = next(iter(self._waiting))
                    left = oldest.arrived + self._patience - time.perf_counter()
                    self._changed.wait_for(self._is_urgent, max(0.0, left))
            jobs = list(self._jobs)
            self._jobs.clear()
            requests: list[Request] = []
            if not jobs and (idle or len(self._waiting) >= self._most):
                requests = list(itertools.islice(self._waiting, self._most))
                for request in requests:
                    del self._waiting[request]
            is_last = self._closed and not jobs and not requests and not self._waiting
            return Taken(requests, jobs, is_last)

    def join(self, most: int) -> list[Request]:
        """Returns requests that join what runs, some at most; none if there are jobs to do."""
        with self._changed:
            requests = [] if self._jobs else list(itertools.islice(self._waiting, max(0, most)))
            for request in requests:
                del self._waiting[request]
            return requests

    def _has_work(self) -> bool:
        return bool(self._waiting or self._jobs or self._closed)

    def _is_urgent(self) -> bool:
        return len(self._waiting) >= self._most or bool(self._jobs) or self._closed
