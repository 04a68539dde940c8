"""Planning ahead: minibatches are planned in a thread while the device computes.

Planning is work of the host and running is work of the device, which JAX dispatches and does not
wait for. A thread plans the minibatches to come, in order, and stays a few of them ahead.
"""

import atexit
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from jedbatch import checks
from jedbatch._batch.calling import plan
from jedbatch._batch.on_devices import AxisNames, agreed_plans, checked_devices, proposals
from jedbatch._batch.planner import Planner
from jedbatch._batch.processes import Pool, in_processes
from jedbatch._batch.resuming import Plans
from jedbatch._program.plan import Plan
from jedbatch._record.run.thread_settings import ThreadSettings
from jedbatch._session.core import Core

MAX_AHEAD, MAX_WORKERS = 1024, 256
END = object()
SECONDS_AT_EXIT = 5.0  # for the minibatch that is being planned; one that waits for data is left


def plans(
    core: Core,
    args: tuple,
    gradient: bool,
    ahead: int,
    workers: int,
    mesh: Mesh | None,
    axis: AxisNames,
) -> Plans:
    """Returns plans for minibatches; see `Batched.plans`."""
    checks.flag("plans", "gradient", gradient)
    checks.whole("plans", "ahead", ahead, least=0, most=MAX_AHEAD)
    checks.whole("plans", "workers", workers, least=0, most=MAX_WORKERS)
    devices = checked_devices("plans", mesh, axis)
    if devices is not None and workers:
        raise ValueError(
            f"`plans` got workers={workers} and a mesh; expected one of them: minibatches that are "
            "cut over devices are planned in a thread. Leave out `workers`."
        )
    settings = ThreadSettings()

    def start(rows: Iterator[list[Any]], first: int) -> Iterator[Plan]:
        if workers:
            return planned_in_processes(core, rows, gradient, ahead, workers, first)
        if devices is not None and devices.num_processes > 1:
            proposed = proposals(core, rows, gradient, devices)
            propose = functools.partial(settings.run, lambda: next(proposed, END))
            return agreed_plans(core, in_thread(propose, ahead) if ahead else in_turn(propose))
        numbers = itertools.count(first)

        def make() -> Any:
            number = next(numbers)
            try:
                found: Any = next(rows, END)
                return END if found is END else plan(core, found, gradient, devices)
            except Exception as error:
                error.add_note(f"This happened while minibatch {number} was planned.")
                raise

        if not ahead:
            return in_turn(functools.partial(settings.run, make))
        return in_thread(functools.partial(settings.run, make), ahead)

    return Plans(core.arguments.minibatches(args), start)


def planned_in_processes(
    core: Core,
    rows: Iterator[list[Any]],
    gradient: bool,
    ahead: int,
    workers: int,
    number: int = 0,
) -> Iterator[Plan]:
    """Yields plans of minibatches, of all but the first in processes; see `plans`.

    `number` is that of the first, for messages.
    """
    first: Any = next(rows, END)
    if first is END:
        return
    shared, sample = core.arguments.split(first)
    try:
        planner = Planner(core, shared, sample, gradient)
        plan = planner._plan(sample)
    except Exception as error:
        error.add_note(f"This happened while minibatch {number} was planned.")
        raise
    pool = Pool(planner, workers)
    try:
        yield plan
        instances = (core.arguments.split(row)[1] for row in rows)
        yield from in_processes(planner, pool, instances, max(ahead, workers), number)
    finally:
        pool.close()


def in_turn(make: Callable[[], Any]) -> Iterator[Any]:
    """Yields what a function makes until that is `END`."""
    while (made := make()) is not END:
        yield made


def in_thread(make: Callable[[], Any], ahead: int) -> Iterator[Any]:
    """Yields the same, made in a thread, a few before they are asked for.

    Nobody waits for the thread where the iterator is closed: it may wait for data, or for what the
    thread holds that closes it. Garbage collection may close it anywhere, and so there are no locks
    but those of simple queues, which can be put to while they are held.
    """
    outcomes: queue.SimpleQueue = queue.SimpleQueue()  # (what was made, an error or None)
    turns: queue.SimpleQueue = queue.SimpleQueue()  # an item for each that may be made
    closed: list[bool] = []

    def close() -> None:
        closed.append(True)
        turns.put(None)

    def work() -> None:
        atexit.register(at_exit)
        made, error = None, None
        while made is not END and error is None:
            turns.get()
            if closed:
                break
            try:
                made = make()
            except BaseException as raised:
                error = raised
            outcomes.put((made, error))
        atexit.unregister(at_exit)

    def at_exit() -> None:
        """Python must not end while the thread is inside of JAX."""
        close()
        thread.join(SECONDS_AT_EXIT)

    for _ in range(ahead):
        turns.put(None)
    thread = threading.Thread(target=work, name="jedbatch-plans", daemon=True)
    thread.start()
    try:
        while True:
            turns.put(None)
            made, error = outcomes.get()
            if error is not None:
                raise error
            if made is END:
                return
            yield made
    finally:
        close()
