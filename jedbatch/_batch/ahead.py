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
from jedbatch._batch.on_devices import AxisNames, agreed_plans, checked_devices, proposals
from jedbatch._batch.planner import Planner
from jedbatch._batch.processes import Pool, in_processes
from jedbatch._batch.resuming import Plans
from jedbatch._program.plan import Plan
from jedbatch._record.thread_settings import ThreadSettings

MAX_AHEAD, MAX_WORKERS = 1024, 256
END = object()
SECONDS_AT_EXIT = 5.0  # for the minibatch that is being planned; one that waits for data is left


def plans(
    batched: Any,
    *args: Any,
    gradient: bool = True,
    ahead: int = 2,
    workers: int = 0,
    mesh: Mesh | None = None,
    axis: AxisNames = None,
) -> Plans:
    """Returns plans for minibatches, made in a thread or in processes while others are used.

    The device computes with one plan while the next ones are made. That saves time where steps wait
    for results and the host has a core to spare. The thread ends once the iterator is closed, as
    where a `for` loop is left, and sees JAX configured as it is where `plans` is called.

    Args:
      batched: the batched function.
      *args: as for `plan`, with an iterable of minibatches in place of each sequence of instances:
        a list, a generator, a `torch.utils.data.DataLoader` with `collate_fn=list`, a Grain dataset
        batched with `batch_fn=list`. They are read in the thread, `ahead` before they are needed
        at most. With `workers` they are read where plans are asked for.
      gradient: whether `apply` will be differentiated; planning is faster if not.
      ahead: plans made before they are asked for. With 0 they are made when they are, in the
        thread of the caller. With `workers`, at least as many.
      workers: processes that plan; 0 for a thread.
      mesh: devices over which minibatches are cut, as for `plan`; without `workers`.
      axis: of the mesh, as for `plan`.

    Returns:
      An iterator of plans for `apply`, in the order of the minibatches. Its `get_state` says how
      far it has come, for a checkpoint, and `set_state` continues from there.

    Raises:
      TypeError: something is no iterable of minibatches, or what `plan` raises for one of them,
        with a note that says which; the function cannot be sent to other processes.
      ValueError: there are more minibatches of one argument than of another, there are `workers`
        and a mesh or arrays that differ in length, or what `plan` raises.
      RuntimeError: a process that plans ended.

    Examples:
      >>> import jax.numpy as jnp, jedbatch
      >>> total = jedbatch.batch(lambda w, xs: sum(w * x for x in xs))
      >>> minibatches = [[(1.0, 2.0), (3.0,)], [(4.0,), (5.0, 6.0)]]
      >>> [total.apply(2.0, plan).tolist() for plan in total.plans(2.0, minibatches)]
      [[6.0, 6.0], [8.0, 22.0]]
    """
    checks.flag("plans", "gradient", gradient)
    checks.whole("plans", "ahead", ahead, least=0, most=MAX_AHEAD)
    checks.whole("plans", "workers", workers, least=0, most=MAX_WORKERS)
    devices = checked_devices("plans", mesh, axis)
    if devices is not None and workers:
        raise ValueError(
            f"`plans` got workers={workers} and a mesh; expected one of them: minibatches that are "
            "cut over devices are planned in a thread. Leave out `workers`."
        )
    make_plan = functools.partial(batched.plan, gradient=gradient, mesh=mesh, axis=axis)
    settings = ThreadSettings()

    def start(rows: Iterator[list[Any]], first: int) -> Iterator[Plan]:
        if workers:
            return planned_in_processes(batched, rows, gradient, ahead, workers, first)
        if devices is not None and devices.num_processes > 1:
            proposed = proposals(batched, rows, gradient, devices)
            propose = functools.partial(settings.run, lambda: next(proposed, END))
            return agreed_plans(batched, in_thread(propose, ahead) if ahead else in_turn(propose))
        numbers = itertools.count(first)

        def make() -> Any:
            number = next(numbers)
            try:
                found: Any = next(rows, END)
                return END if found is END else make_plan(*found)
            except Exception as error:
                error.add_note(f"This happened while minibatch {number} was planned.")
                raise

        if not ahead:
            return in_turn(functools.partial(settings.run, make))
        return in_thread(functools.partial(settings.run, make), ahead)

    return Plans(batched._arguments.minibatches(args), start)


def planned_in_processes(
    batched: Any,
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
    shared, sample = batched._arguments.split(first)
    try:
        planner = Planner(batched, shared, sample, gradient)
        plan = planner._plan(sample)
    except Exception as error:
        error.add_note(f"This happened while minibatch {number} was planned.")
        raise
    pool = Pool(planner, workers)
    try:
        yield plan
        instances = (batched._arguments.split(row)[1] for row in rows)
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
