"""Planning in processes of its own: `Batched.plans(..., workers=N)`.

Processes are spawned, and begin by importing the function, which takes seconds, while the first
minibatch is used, which is planned here. Plans come in the order of the minibatches.
"""

import collections
import concurrent.futures
import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any
from unittest import mock

from jedbatch._batch.pickling import dumps
from jedbatch._batch.planner import CHANGED, Planner, PlannerCopy, Prepared, named
from jedbatch._program.plan import Plan
from jedbatch._session.core import Core

ENDED = (
    "a process that plans has ended. If it could not start, it has said above why; in a script, "
    "write what starts it under `if __name__ == '__main__':`."
)
_copies: list[PlannerCopy] = []  # of this process, if it plans for another one


def planned_in_processes(
    core: Core, rows: Iterator[list[Any]], gradient: bool, ahead: int, workers: int
) -> Iterator[Plan]:
    """Yields plans of minibatches, of all but the first in processes; see `Batched.plans`.

    Args:
      core: of the batched function.
      rows: the arguments of each minibatch.
      gradient: whether plans will be differentiated.
      ahead: minibatches that are read before they are needed.
      workers: how many processes there are.
    """
    row = next(rows, None)
    if row is None:
        return
    shared, sample = core.arguments.split(row)
    planner = Planner(core, shared, sample, gradient)
    plan = planner._plan(sample)
    pool = Pool(planner, workers)
    try:
        yield plan
        yield from in_processes(pool, (core.arguments.split(row)[1] for row in rows), ahead)
    finally:
        pool.close()


class Pool:
    """Processes that plan, which begin by importing the function.

    Args:
      planner: that is sent to them.
      workers: how many there are.
    """

    def __init__(self, planner: Planner, workers: int):
        self.planner = planner
        self._version = planner._programs().version
        self._executor = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _begin, (planner._pickled(),)
        )
        with mock.patch.dict(os.environ, {"JAX_PLATFORMS": "cpu"}):  # which processes begin with
            for _ in range(workers):  # each begins a process
                self._executor.submit(int)

    def submit(self, instances: list[tuple]) -> "concurrent.futures.Future[bytes]":
        """Returns a minibatch that will be prepared, pickled and without its instances."""
        sent = instances if len(instances[0]) > 1 else [x for (x,) in instances]
        programs = self.planner._programs()
        news = pickle.dumps(programs) if programs.version != self._version else None
        return self._executor.submit(_prepare, dumps(sent), news)

    def close(self, cancel: bool = True) -> None:
        """Ends the processes once they have done what they are at, or all that was submitted."""
        self._executor.shutdown(wait=False, cancel_futures=cancel)


def in_processes(pool: Pool, minibatches: Iterator[list[tuple]], ahead: int) -> Iterator[Plan]:
    """Yields plans of minibatches in order, so many of which are read before they are needed."""
    waiting: collections.deque[Callable[[], Plan]] = collections.deque()
    try:
        for begun in iter(lambda: _begun(pool, minibatches), None):
            waiting.append(begun)
            if len(waiting) > ahead:
                yield waiting.popleft()()
        pool.close(cancel=False)  # who asks for as many as there are never asks for another
        while waiting:
            yield waiting.popleft()()
    except BrokenProcessPool as error:
        raise RuntimeError(ENDED) from error


def _begun(pool: Pool, minibatches: Iterator[list[tuple]]) -> Callable[[], Plan] | None:
    """Returns a function that gives the plan of the next minibatch, or raises its error."""
    planner = pool.planner
    try:
        instances = next(minibatches, None)
    except Exception as error:  # in its turn
        return functools.partial(_raised, error)
    if instances is None:
        return None
    try:
        future = pool.submit(instances)
    except BrokenProcessPool:
        raise
    except Exception as error:
        reason = f"it could not be sent: {named(error)}"
        return lambda: planner._planned_here(instances, reason)

    def attached() -> Plan:
        prepared: Prepared = pickle.loads(future.result())
        if prepared.reason is None and planner._is_current:
            return planner._attached(prepared)
        return planner._planned_here(instances, prepared.reason or CHANGED)

    return attached


def _raised(error: Exception) -> Plan:
    """Raises an error."""
    raise error


def _begin(pickled: bytes) -> None:
    """Begins a process; an interrupt from the keyboard is for the one that began it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _copies.append(PlannerCopy(pickled))
    _copies[0].start()


def _end_with_parent() -> None:
    """Ends this process when the one that began it has, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _prepare(instances: bytes, programs: bytes | None) -> bytes:
    """Plans a minibatch in this process; instances are not sent back."""
    copy = _copies[0]
    try:
        given = pickle.loads(instances)
        prepared = copy(given, None if programs is None else pickle.loads(programs))
        return dumps(replace(prepared, instances=None))
    except Exception as error:
        return dumps(Prepared("", None, f"it could not be sent: {named(error)}"))
