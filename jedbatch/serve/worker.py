"""The worker: the one thread of a server that plans minibatches and has the device compute them.

While a minibatch runs, full ones that wait are planned and handed to the device, a few at most,
which computes one after the other. If there is none, the worker waits for the device, and takes
what has come by then.

A minibatch is computed with the shared arguments that are current when it is begun. If one of its
requests fails, where it is planned or where it is computed, it is computed by halves.

A function that decides on values runs in rounds, and requests that come join the next round (see
`_control_flow.continuous`); a request whose instance is done has its result while others go on.
Before each round, instances end that nobody waits for any more.
"""

import atexit
import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._batch.one_by_one import OneByOne, settled
from jedbatch._control_flow.continuous import Continuous, Joining, Settled
from jedbatch._record.run.thread_settings import ThreadSettings
from jedbatch._support.types import PyTree
from jedbatch.serve import tracing
from jedbatch.serve.errors import ServerClosed
from jedbatch.serve.requests import Request, RequestQueue

AHEAD = 2  # full minibatches that are handed to the device while another one runs
SECONDS_AT_EXIT = 5.0  # for what runs when Python ends

Outcomes = list[tuple[Request, Settled]]


class Running(NamedTuple):
    """A minibatch that the device computes.

    Attributes:
      requests: that it consists of.
      shared: the shared arguments that it is computed with.
      fetch: waits for the results.
    """

    requests: list[Request]
    shared: tuple
    fetch: Callable[[], list[PyTree]]


class Worker:
    """Plans and runs minibatches of requests in a thread.

    Attributes:
      running: how many requests are planned or computed.
      error: why the thread ended, if it was not told to.
    """

    def __init__(
        self,
        one_by_one: OneByOne,
        shared: tuple[Any, ...],
        room: int,
        queue: RequestQueue,
        deliver: Callable[[Outcomes], None],
        taken: Callable[[int], None],
        ended: Callable[[], None],
    ):
        """Prepares a thread.

        Args:
          one_by_one: the function.
          shared: its shared arguments.
          room: instances that run at once, if the function decides on values.
          queue: of requests.
          deliver: is given what came of requests.
          taken: is told how many requests have left the queue for a minibatch.
          ended: is called at the end of the thread.
        """
        self.running = 0
        self.error: BaseException | None = None
        self._one_by_one = one_by_one
        self._shared = shared
        self._placed = (), ()  # (shared arguments, the same on the device)
        self._is_stopping = False
        self._room = room
        self._queue = queue
        self._deliver, self._taken, self._ended = deliver, taken, ended
        settings = ThreadSettings()
        self._thread = threading.Thread(
            target=lambda: settings.run(self._work), name="jedbatch-serve", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()

    def stop(self) -> None:
        """Has instances that run in rounds end before the next one."""
        self._is_stopping = True

    def adopt(self, shared: tuple[Any, ...]) -> None:
        """Replaces the shared arguments, for minibatches that are begun from now on."""
        self._shared = shared

    def _work(self) -> None:
        atexit.register(self._at_exit)
        try:
            self._serve()
        except BaseException as error:  # of ours: those of instances are results
            self.error = error
        finally:
            atexit.unregister(self._at_exit)
            self._ended()

    def _serve(self) -> None:
        running: collections.deque[tuple[Running, Callable[[], object]]] = collections.deque()
        while True:
            taken = self._queue.take(idle=not running)
            if taken.requests:
                end = tracing.minibatch(request.span for request in taken.requests)
                begun = self._begin(taken.requests)
                if begun is None:
                    end()
                else:
                    running.append((begun, end))
            while running and (len(running) > AHEAD or taken.jobs):
                self._finish(*running.popleft())
            if running and not taken.requests:
                self._finish(*running.popleft())
            for job in taken.jobs:
                job()
            if taken.is_last and not running:
                return

    def _begin(self, requests: list[Request]) -> Running | None:
        """Plans a minibatch and has the device begin; delivers what fails already."""
        self.running += len(requests)
        self._taken(len(requests))
        shared = self._current()
        try:
            return self._started(shared, requests)
        except Exception:  # found again, by itself
            self._end(self._by_halves(shared, requests))
            return None

    def _finish(self, running: Running, end: Callable[[], object]) -> None:
        """Delivers the results of a minibatch once they are computed."""
        outcomes = self._by_halves(running.shared, running.requests, running.fetch)
        end()
        self._end(outcomes)

    def _end(self, outcomes: Outcomes) -> None:
        self.running -= len(outcomes)
        if outcomes:
            self._deliver(outcomes)

    def _started(self, shared: tuple, requests: list[Request]) -> Running | None:
        """A minibatch that runs; None if the function decides on values, and all is delivered."""
        instances = [request.instance for request in requests]
        plan = self._one_by_one.plan(shared, instances)
        if plan is None:
            self._serve_rounds(shared, requests)
            return None
        return Running(requests, shared, self._one_by_one.start(shared, instances, plan))

    def _serve_rounds(self, shared: tuple, requests: list[Request]) -> None:
        """Runs rounds that further requests join, unless there are other shared arguments."""
        deep: list[Request] = []  # that need a larger stack

        def take(most: int) -> list[Joining]:
            joining = self._queue.join(most) if self._current() is shared else []
            if joining:
                self.running += len(joining)
                self._taken(len(joining))
            return [Joining(request, request.instance) for request in joining]

        def give(left: Outcomes) -> None:
            deep.extend(r for r, x in left if isinstance(x.error, RecursionError))
            self._end([(r, x) for r, x in left if not isinstance(x.error, RecursionError)])

        first = [Joining(request, request.instance) for request in requests]
        call = Continuous(self._one_by_one.core, shared, self._room)
        failed = call.serve(first, take, give, self._ended_by)
        rest = [x.token for x in failed] + deep
        if rest:
            self._end(self._by_halves(shared, rest))

    def _by_halves(
        self,
        shared: tuple,
        requests: list[Request],
        fetch: Callable[[], list[PyTree]] | None = None,
    ) -> Outcomes:
        """Returns what came of requests, which are run by halves if some fail; see `settled`."""

        def run(some: Sequence[Request]) -> list[PyTree]:
            def check() -> None:
                for error in filter(None, map(self._ended_by, some)):
                    raise error

            check()
            return self._one_by_one.run(shared, [request.instance for request in some], check)

        return list(zip(requests, settled(run, requests, fetch), strict=True))

    def _ended_by(self, request: Request) -> Exception | None:
        """Returns why the instance of a request is to end; None if somebody waits for it."""
        if request.future.done():  # it was cancelled, or its deadline has passed
            return TimeoutError("nobody waits for the request any more")
        return (
            ServerClosed("the server was closed before it was done.") if self._is_stopping else None
        )

    def _current(self) -> tuple:
        """The shared arguments, put on the device the first time; called in the thread."""
        shared, placed = self._shared, self._placed
        if placed[0] is not shared:
            on_device = jax.tree.map(
                lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, shared
            )
            self._placed = placed = shared, on_device
        return placed[1]

    def warm(self, instances: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> None:
        """Compiles what minibatches of some sizes need; called in the thread.

        Args:
          instances: the mapped arguments of a sample.
          sizes: of minibatches.
        """
        shared = self._current()
        self._one_by_one.warm(shared, instances, sizes)

    def _at_exit(self) -> None:
        """Python must not end while the thread is inside of JAX."""
        self.stop()
        self._queue.clear()
        self._queue.close()
        self._thread.join(SECONDS_AT_EXIT)
