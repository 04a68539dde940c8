"""Planning in processes of its own: `Batched.plans(..., workers=N)`.

Processes are spawned, and begin by importing the function, which takes seconds; until then,
minibatches are planned here. Plans come in the order of the minibatches.
"""

import collections
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from jedbatch._batch.pickling import dumps
from jedbatch._batch.planner import CHANGED, Planner, PlannerCopy, Prepared, named
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
        self._version = planner._programs().version
        self._executor = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _begin, (planner._pickled(),)
        )
        with _on_cpus():
            self._started = [self._executor.submit(_start) for _ in range(workers)]

    def is_ready(self) -> bool:
        """Returns whether a process has begun to plan; raises an error if one has ended."""
        return any(future.done() and future.result() is None for future in self._started)

    def wait(self) -> None:
        """Returns once all have begun to plan."""
        for future in self._started:
            future.result()

    def submit(self, instances: list[tuple]) -> "concurrent.futures.Future[bytes]":
        """Returns a minibatch that will be prepared, without its instances; for `received`."""
        sent = instances if len(instances[0]) > 1 else [x for (x,) in instances]
        programs = self._planner._programs()
        news = pickle.dumps(programs) if programs.version != self._version else None
        return self._executor.submit(_prepare, dumps(sent), news)

    def close(self) -> None:
        """Ends the processes once they have done what they are at."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def received(future: "concurrent.futures.Future[bytes]") -> Prepared:
    """Returns a minibatch that was prepared, as soon as it is."""
    prepared: Prepared = pickle.loads(future.result())
    return prepared


def in_processes(
    planner: Planner,
    pool: Pool,
    minibatches: Iterator[list[tuple]],
    ahead: int,
    number: int = 0,
) -> Iterator[Plan]:
    """Yields plans of minibatches after the first, in order.

    Args:
      planner: that plans them.
      pool: of processes.
      minibatches: the mapped arguments of each instance of each.
      ahead: minibatches that are read before they are needed.
      number: of the first minibatch, for messages.
    """
    waiting: collections.deque[Callable[[], Plan]] = collections.deque()
    has_ended = False
    while True:
        while not has_ended and len(waiting) <= ahead:
            try:
                instances = next(minibatches, None)
            except Exception as error:  # in its turn
                waiting.append(functools.partial(_raised, error))
                has_ended = True
                continue
            if instances is None:
                has_ended = True
            else:
                waiting.append(_begun(planner, pool, instances))
        if not waiting:
            return
        number += 1
        try:
            plan = waiting.popleft()()
        except BrokenProcessPool as error:
            raise RuntimeError(ENDED) from error
        except Exception as error:
            error.add_note(f"This happened while minibatch {number} was planned.")
            raise
        if has_ended and not waiting:
            pool.close()  # whoever asks for as many plans as there are never asks for another
        yield plan


def _begun(planner: Planner, pool: Pool, instances: list[tuple]) -> Callable[[], Plan]:
    """Returns a function that gives the plan of a minibatch, which may be made elsewhere by now."""

    def here(reason: str | None) -> Callable[[], Plan]:
        return lambda: planner._planned_here(instances, reason)

    try:
        if not pool.is_ready():
            return here(None)
        if not planner._is_current:
            return here(CHANGED)
        future = pool.submit(instances)
    except BrokenProcessPool as error:
        return functools.partial(_raised, error)
    except Exception as error:
        return here(f"it could not be sent: {named(error)}")

    def attached() -> Plan:
        prepared = received(future)
        if prepared.reason is None and planner._is_current:
            return planner._attached(prepared)
        return planner._planned_here(instances, prepared.reason or CHANGED)

    return attached


def _raised(error: Exception) -> Plan:
    """Raises an error."""
    raise error


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


def _prepare(instances: bytes, programs: bytes | None) -> bytes:
    """Plans a minibatch in this process; instances are not sent back."""
    copy = _copies[0]
    try:
        given = pickle.loads(instances)
        prepared = copy.prepare(given, None if programs is None else pickle.loads(programs))
        return dumps(replace(prepared, instances=None))
    except Exception as error:
        return dumps(Prepared("", None, f"it could not be sent: {named(error)}"))
