"""Planning in processes of its own: `Batched.plans(..., workers=N)`.

Processes are spawned, and begin by importing the function, which takes seconds; until then,
minibatches are planned here. Plans come in the order of the minibatches.
"""

import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from jedbatch._batch.planner import Planner, PlannerCopy, Prepared
from jedbatch._program.plan import Plan

ENDED = (
    "a process that plans has ended. If it could not start, it has said above why; in a script, "
    "write what starts it under `if __name__ == '__main__':`."
)
_copies: list[PlannerCopy] = []  # of this process, if it plans for another one


class Pool:
    """Processes that plan.

    Args:
      planner: that is sent to them.
      workers: how many there are.
    """

    def __init__(self, planner: Planner, workers: int):
        self._planner = planner
        self._version = planner.programs().version
        self._executor = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _begin, (planner.pickled(),)
        )
        with _on_cpus():
            self._started = [self._executor.submit(_start) for _ in range(workers)]

    @property
    def is_ready(self) -> bool:
        """Returns whether a process has begun to plan."""
        try:
            return any(future.done() and future.result() is None for future in self._started)
        except BrokenProcessPool as error:
            raise RuntimeError(ENDED) from error

    def wait(self) -> None:
        """Returns once all have begun to plan."""
        for future in self._started:
            future.result()

    def submit(self, instances: list[tuple]) -> "concurrent.futures.Future[Prepared]":
        """Returns a minibatch that will be prepared."""
        sent = instances if len(instances[0]) > 1 else [x for (x,) in instances]
        programs = self._planner.programs()
        is_news = programs.version != self._version
        return self._executor.submit(_prepare, sent, pickle.dumps(programs) if is_news else None)

    def close(self) -> None:
        """Ends the processes once they have done what they are at."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def in_processes(
    planner: Planner, pool: Pool, minibatches: Iterator[list[tuple]], ahead: int
) -> Iterator[Plan]:
    """Yields plans of minibatches after the first, in order.

    Args:
      planner: that plans them.
      pool: of processes.
      minibatches: the mapped arguments of each instance of each.
      ahead: minibatches that are read before they are needed.
    """
    waiting: collections.deque[tuple[list[tuple], Any]] = collections.deque()
    number, has_ended = 0, False
    while True:
        while not has_ended and len(waiting) <= ahead:
            instances = next(minibatches, None)
            if instances is None:
                has_ended = True
                break
            usable = pool.is_ready and planner.is_current
            waiting.append((instances, pool.submit(instances) if usable else None))
        if not waiting:
            return
        instances, future = waiting.popleft()
        number += 1
        try:
            if future is None or not planner.is_current:
                plan = planner.plan(instances)
            else:
                plan = planner.attach(future.result())
        except BrokenProcessPool as error:
            raise RuntimeError(ENDED) from error
        except Exception as error:
            error.add_note(f"This happened while minibatch {number} was planned.")
            raise
        yield plan


@contextlib.contextmanager
def _on_cpus() -> Iterator[None]:
    """Has JAX use CPUs alone in processes that are begun."""
    name = "JAX_PLATFORMS"
    before = os.environ.get(name)
    os.environ[name] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _begin(pickled: bytes) -> None:
    """Begins a process; an interrupt from the keyboard is for the one that began it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _copies.append(PlannerCopy(pickled))


def _end_with_parent() -> None:
    """Ends this process when the one that began it has, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _start() -> None:
    """Has this process import the function, and plan the sample."""
    _copies[0].start()


def _prepare(instances: list[Any], programs: bytes | None) -> Prepared:
    """Plans a minibatch in this process."""
    return _copies[0].prepare(instances, None if programs is None else pickle.loads(programs))
