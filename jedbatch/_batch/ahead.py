"""Planning ahead: minibatches are planned in a thread while the device computes.

Planning is work of the host and running is work of the device, which JAX dispatches and does not
wait for. A thread plans the minibatches to come, in order, and stays a few of them ahead.

Minibatches are so read and planned before their plans are asked for. A checkpoint needs the
position of what was handed out, not of what was read: the position after each minibatch is kept
until its plan is handed out.
"""

import atexit
import collections
import copy
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from jedbatch import checks
from jedbatch._batch.calling import plan
from jedbatch._batch.on_devices import AxisNames, agreed_plans, checked_devices, proposals
from jedbatch._batch.processes import planned_in_processes
from jedbatch._program.plan import Plan
from jedbatch._record.run.thread_settings import ThreadSettings
from jedbatch._session.core import Core
from jedbatch._session.records.arguments import Minibatches

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
) -> "Plans":
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

    def start(rows: Iterator[list[Any]]) -> Iterator[Plan]:
        if workers:
            return planned_in_processes(core, rows, gradient, max(ahead, workers), workers)
        if devices is not None and devices.num_processes > 1:
            proposed = proposals(core, rows, gradient, devices)
            return agreed_plans(core, made_ahead(proposed, ahead, settings))
        made = (plan(core, tuple(row), gradient, devices) for row in rows)
        return made_ahead(made, ahead, settings)

    return Plans(core.arguments.minibatches(args), start)


def made_ahead(made: Iterator[Any], ahead: int, settings: ThreadSettings) -> Iterator[Any]:
    """Yields what an iterator makes in a thread, as many before they are asked for.

    With 0 they are made when they are, in the thread of the caller. Nobody waits for the thread
    where this is closed: it may wait for data, or for what the thread holds that closes it. Garbage
    collection may close it anywhere, and so there are no locks but those of simple queues, which
    can be put to while they are held.
    """
    make = functools.partial(settings.run, functools.partial(next, made, END))
    if not ahead:
        yield from iter(make, END)
        return
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


class Plans(Iterator[Plan]):
    """An iterator of plans, whose position can be stored and continued, as those of Grain can.

    It ends what plans ahead once it is closed, or left and forgotten.
    """

    def __init__(
        self,
        minibatches: Minibatches,
        start: Callable[[Iterator[list[Any]]], Iterator[Plan]],
    ):
        """Begins to plan.

        Args:
          minibatches: the arguments of each.
          start: from the arguments of minibatches to their plans.
        """
        self._minibatches, self._start = minibatches, start
        self._state = minibatches.get_state()
        self._read: collections.deque[dict[str, Any]] = collections.deque()  # not handed out
        self._made: Any = start(_noting(minibatches, self._read))

    def __repr__(self) -> str:
        return f"Plans: {self._state['position']} handed out, {len(self._read)} more read ahead"

    def __next__(self) -> Plan:
        try:
            plan: Plan = next(self._made)
        except StopIteration:
            raise
        except Exception as error:
            number = self._state["position"]
            error.add_note(f"This happened while minibatch {number} was planned.")
            raise
        self._state = self._read.popleft()
        return plan

    def close(self) -> None:
        """Ends planning ahead; there are no plans after that, unless a state is set."""
        self._made.close()

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last plan that was handed out.

        Returns:
          A dict for a checkpoint, of numbers and of what the loader of data calls its state: JSON,
          if that is. Minibatches that were planned ahead are not counted.

        Examples:
          >>> import jax.numpy as jnp, jedbatch
          >>> double, minibatches = jedbatch.batch(lambda w, x: w * x), [[1.0], [2.0], [3.0]]
          >>> plans = double.plans(jnp.ones(()), minibatches)
          >>> _ = next(plans)
          >>> state = plans.get_state()                 # for a checkpoint
          >>> again = double.plans(jnp.ones(()), minibatches)
          >>> again.set_state(state)
          >>> [double.apply(jnp.ones(()), plan).tolist() for plan in again]
          [[2.0], [3.0]]
        """
        return copy.deepcopy(self._state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned, here or in another process.

        Minibatches must be the same as there, in the same order. Loaders of data whose iterators
        have `get_state` and `set_state`, such as Grain's, go there at once; of others, minibatches
        before it are read once more and left out.

        Args:
          state: what `get_state` returned.

        Raises:
          TypeError: it is no such state.
          ValueError: there are fewer minibatches, or they come from an iterator that cannot begin
            again.
        """
        if not isinstance(state, Mapping) or set(state) != {"position", "sources"}:
            raise TypeError(
                f"`Plans.set_state` got {checks.shown(state)}; expected what `get_state` returned, "
                'a dict with "position" and "sources".'
            )
        checks.whole("Plans.set_state", "position", state["position"])
        self.close()
        there = Plans(self._minibatches.at(state), self._start)
        self._minibatches, self._state = there._minibatches, there._state
        self._read, self._made = there._read, there._made


def _noting(
    minibatches: Minibatches, read: collections.deque[dict[str, Any]]
) -> Iterator[list[Any]]:
    """Yields the arguments of minibatches; notes the position after each."""
    for arguments in minibatches:
        read.append(minibatches.get_state())
        yield arguments
