"""`Server`: a batched function that answers requests one by one, for `asyncio`.

    requests → queue with a bound → worker thread: plan, run → results, one by one

The event loop puts requests into a queue and gets results back; everything that takes time is done
by one thread (see `serve.worker`).
"""

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal

import jedbatch
from jedbatch import checks
from jedbatch._batch.batched import core_of
from jedbatch._batch.one_by_one import OneByOne
from jedbatch.serve import tracing
from jedbatch.serve.errors import DeadlineExceeded, Overloaded, ServerClosed, WrongNumberError
from jedbatch.serve.metrics import Meter, Metrics
from jedbatch.serve.parameters import check_same
from jedbatch.serve.requests import Request, RequestQueue
from jedbatch.serve.worker import Outcomes, Worker

MAX_BATCH, MAX_QUEUE, MAX_MS = 1 << 16, 1 << 30, 1e9


class Server:
    """Answers requests by a batched function, many at a time.

    Requests that come while the device works join the next minibatch, so that minibatches are as
    large as the load makes them. A request that fails, is cancelled or comes too late does nothing
    to the others of its minibatch. Use it in one event loop, as an asynchronous context:

        async with Server(encode_all, params, max_batch=64) as server:
            await server.warm(sample)           # compiles before the first request
            state = await server(tree)          # and many at a time, in other tasks

    On leaving, requests that wait are answered first; not so if it is left by an error.
    """

    def __init__(
        self,
        batched: "jedbatch.Batched[*tuple[Any, ...], Any]",
        *params: Any,
        max_batch: int = 64,
        max_wait_ms: float = 0.0,
        max_queue: int = 1024,
        when_full: Literal["raise", "wait"] = "raise",
        deadline_ms: float | None = None,
    ):
        """Makes a server, which does nothing before its context is entered.

        Args:
          batched: what `jedbatch.batch` returned. Its `out_axes` makes no difference.
          *params: the arguments that all instances share, as a call has them.
          max_batch: requests in a minibatch at most.
          max_wait_ms: milliseconds for which the oldest request waits for others while the device
            has nothing to do. By default nobody waits for others.
          max_queue: requests that may wait, besides those that are computed.
          when_full: whether one more is an `Overloaded` error, or waits, too.
          deadline_ms: milliseconds in which a request is to be done, unless it has its own. If its
            instance decides on values, it ends before the next round; what the device computes goes
            on, so write `jedbatch.batch(..., max_steps=)` if loops in it might not end.

        Raises:
          TypeError: `batched` is no batched function, or shared arguments are traced.
          ValueError: a number is out of bounds, or there are not as many shared arguments as
            `in_axes` has None.
        """
        checks.of_type("Server", batched, jedbatch.Batched, "what `jedbatch.batch` returned")
        most = checks.whole("Server", "max_batch", max_batch, least=1, most=MAX_BATCH)
        patience = checks.number("Server", "max_wait_ms", max_wait_ms, least=0, most=MAX_MS)
        limit = checks.whole("Server", "max_queue", max_queue, least=1, most=MAX_QUEUE)
        if checks.one_of("Server", "when_full", when_full, ("raise", "wait")) == "wait":
            limit = sys.maxsize  # who waits for room, waits in the queue
        self._deadline = _seconds("Server", deadline_ms)
        axes = batched.in_axes if isinstance(batched.in_axes, tuple) else None
        expected = 0 if axes is None else axes.count(None)
        if len(params) != expected:
            raise ValueError(
                f"`Server` got {len(params)} shared arguments, and in_axes={batched.in_axes} has "
                f"{expected}; expected as many. Write `Server(batched, params, ...)`."
            )
        self._num_mapped = None if axes is None else axes.count(0)
        self._batched = batched
        self._params = params
        self._one_by_one = OneByOne("Server", core_of(batched), params)
        self._sizes = [most]
        while self._sizes[-1] > 1:
            self._sizes.append((self._sizes[-1] + 1) // 2)
        self._meter = Meter()
        self._queue = RequestQueue(limit, most, patience / 1e3)
        self._open: set[asyncio.Future] = set()  # of requests that have not ended
        self._is_closed = False
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self._worker else "not entered"
        of = f"{core_of(self._batched).name}, max_batch={self._sizes[0]}"
        return f"Server({of}): {state}, {len(self._open)} requests not answered"

    # --- the context ---

    async def __aenter__(self) -> "Server":
        if self._loop is not None:
            raise RuntimeError("`Server` is entered a second time; make another one.")
        self._loop = asyncio.get_running_loop()
        self._worker = Worker(
            self._one_by_one,
            self._params,
            self._sizes[0],
            self._queue,
            deliver=functools.partial(self._post, self._deliver),
            taken=functools.partial(self._post, self._meter.minibatch),
            ended=functools.partial(self._post, self._end),
        )
        self._worker.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(drain=kind is None)

    async def close(self, *, drain: bool = True) -> None:
        """Refuses further requests and ends the thread.

        Args:
          drain: whether all requests are answered. If not, those that wait raise `ServerClosed`,
            and so do those whose instance decides on values and is not done by the next round.
            Others that are computed are answered.
        """
        checks.flag("close", "drain", drain)
        self._is_closed = True
        try:
            if drain and self._open and not self._ended.is_set():
                await asyncio.wait(set(self._open))
        finally:
            self._drop_waiting("it was closed without waiting for them")
            self._queue.close()
        if self._worker is not None:
            if not drain:
                self._worker.stop()
            await self._ended.wait()
            self._worker.join()

    # --- requests ---

    async def __call__(self, *instance: Any, deadline_ms: float | None = None) -> Any:
        """Returns the result of an instance: a pytree of arrays of NumPy, which are read-only.

        Args:
          *instance: the mapped arguments, as the function of one instance takes them.
          deadline_ms: milliseconds in which it is to be done, in place of those of the server.

        Raises:
          Overloaded: too many requests wait, and the server was told to raise an error then.
          DeadlineExceeded: it was not done in time.
          ServerClosed: the server was closed before it was done.
          Exception: what the function raises for this instance. If it came in a minibatch with
            others, it was run by itself, so that it is number 0 in messages.
        """
        with tracing.request() as span:
            return await self._answer(instance, deadline_ms, span)

    async def _answer(self, instance: tuple, deadline_ms: float | None, span: Any) -> Any:
        if self._num_mapped is not None and len(instance) != self._num_mapped:
            raise WrongNumberError(
                f"a server got {len(instance)} mapped arguments; expected {self._num_mapped}, as "
                f"in_axes={self._batched.in_axes} has it."
            )
        loop = self._running_loop("a request")
        seconds = self._deadline if deadline_ms is None else _seconds("server", deadline_ms)
        if self._is_closed:
            self._meter.count("refused")
            raise ServerClosed("a request came to a server that is closed.")
        request = Request(instance, loop.create_future(), span)
        if not self._queue.put(request):
            self._meter.count("refused")
            raise Overloaded(
                f"a request was refused, since {len(self._queue)} others wait; try again later, or "
                'write `Server(..., max_queue=)` or `when_full="wait"`.'
            )
        future = request.future
        self._open.add(future)
        timer = loop.call_later(seconds, self._expire, request, seconds) if seconds else None
        try:
            return await future
        except asyncio.CancelledError:
            self._meter.count("cancelled")
            self._queue.remove(request)
            raise
        finally:
            self._open.discard(future)
            if timer is not None:
                timer.cancel()

    def _expire(self, request: Request, seconds: float) -> None:
        """Refuses a request whose deadline has passed."""
        if request.future.done():
            return
        self._meter.count("expired")
        self._queue.remove(request)
        request.future.set_exception(
            DeadlineExceeded(
                f"a request was not done in {1e3 * seconds:g} ms; {len(self._queue)} others wait."
            )
        )

    # --- the function ---

    @property
    def params(self) -> Any:
        """The shared argument; a tuple if there are several, or none.

        It may be assigned: minibatches that begin from then on are computed with the new one. No
        request is computed with parts of both.
        """
        return self._params[0] if len(self._params) == 1 else self._params

    @params.setter
    def params(self, params: Any) -> None:
        self._adopt((params,) if len(self._params) == 1 else tuple(params))

    async def swap(self, *params: Any) -> None:
        """Replaces the shared arguments; returns once no result of the old ones will come.

        Requests go on; none is dropped, and none is computed with parts of both.

        Args:
          *params: the shared arguments, of the same structure, shapes and dtypes.

        Raises:
          ValueError: they are of others.
        """
        self._adopt(params)
        await self._do("swap", lambda worker: None)

    def _adopt(self, params: tuple) -> None:
        if len(params) != len(self._params):
            raise ValueError(
                f"a server got {len(params)} shared arguments; expected {len(self._params)}."
            )
        OneByOne("Server.params", core_of(self._batched), params)
        check_same(self._params, params)
        self._params = params
        self._meter.count("swaps")
        if self._worker is not None:
            self._worker.adopt(params)

    async def warm(self, sample: Iterable[Any]) -> None:
        """Compiles what minibatches of any size need, so that requests wait for no compilation.

        Afterwards a process that does nothing but serve may call `gc.collect()` and `gc.freeze()`:
        a full collection of garbage, which goes through all that JAX keeps of programs, takes
        longer than most requests. A server leaves that to the program that it is a part of.

        Args:
          sample: instances like those to come, or tuples where the function takes several mapped
            arguments; those of ten minibatches are plenty. A function that decides on values is
            run on them.

        Raises:
          ValueError: there is no instance, or what the function raises for one.
        """
        instances = [tuple(x) if self.takes_several else (x,) for x in sample]
        if not instances:
            raise ValueError("`warm` got no instance; expected a sample of those to come.")
        await self._do("warm", lambda worker: worker.warm(instances, self._sizes))

    @property
    def metrics(self) -> Metrics:
        """Counts and latencies so far; print them, or see `Metrics.prometheus`."""
        running = 0 if self._worker is None else self._worker.running
        return self._meter.metrics(len(self._queue), running, self._batched.compilations)

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return self._loop is not None and not self._is_closed

    @property
    def takes_several(self) -> bool:
        """Whether a request has several arguments, as `in_axes` says."""
        return self._num_mapped is not None and self._num_mapped > 1

    # --- between the event loop and the worker ---

    def _running_loop(self, what: str) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError(f"{what} needs `async with server:` around it, which starts it.")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(f"{what} comes from another event loop than the server runs in.")
        return self._loop

    def _post(self, call: Callable, *args: Any) -> None:
        """Has the event loop call something; called by the worker."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it may be gone
            self._loop.call_soon_threadsafe(call, *args)

    async def _do(self, what: str, job: Callable[[Worker], object]) -> None:
        """Has the worker do something, and waits for it."""
        loop = self._running_loop(f"`{what}`")
        if self._is_closed:
            raise ServerClosed(f"`{what}` was called on a server that is closed.")
        worker, done = self._worker, loop.create_future()
        assert worker is not None
        self._open.add(done)

        def work() -> None:
            try:
                job(worker)
            except Exception as error:
                self._post(_settle, done, None, error)
            else:
                self._post(_settle, done, None, None)

        self._queue.do(work)
        try:
            await done
        finally:
            self._open.discard(done)

    def _deliver(self, outcomes: Outcomes) -> None:
        """Hands results and errors to those who wait for them."""
        now, seconds = time.perf_counter(), []
        for request, (result, error) in outcomes:
            if request.future.done():
                continue
            if error is None:
                seconds.append(now - request.arrived)
            else:
                self._meter.count("failed")
            _settle(request.future, result, error)
        self._meter.done(seconds)

    def _drop_waiting(self, why: str) -> None:
        """Refuses requests that wait."""
        for request in self._queue.clear():
            if not request.future.done():
                self._meter.count("refused")
                request.future.set_exception(ServerClosed(f"the server has ended: {why}."))

    def _end(self) -> None:
        """Closes the server when its thread has ended, by itself if something is wrong."""
        self._is_closed = True
        assert self._worker is not None
        error = self._worker.error
        why = "it was closed" if error is None else f"its thread failed with {error!r}"
        self._drop_waiting(why)
        for future in self._open:
            if not future.done():
                future.set_exception(ServerClosed(f"the server has ended: {why}."))
        self._ended.set()


def _settle(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    """Gives a future what it is for, if somebody still waits."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # which futures refuse
        future.set_exception(RuntimeError(f"an instance raised {error!r}"))
    else:
        future.set_exception(error)


def _seconds(who: str, deadline_ms: float | None) -> float | None:
    if deadline_ms is None:
        return None
    return checks.number(who, "deadline_ms", deadline_ms, above=0, most=MAX_MS) / 1e3
