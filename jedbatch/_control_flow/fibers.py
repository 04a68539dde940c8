"""Instances that take turns: each runs until it needs a value that is not computed yet.

Python decides on the value of an array in the middle of a function: in an `if`, a `while`, an
`int()`. The function must stop right there, let the other instances go on, and continue later as
if nothing had happened. Greenlets do that: each instance is one, with a Python stack of its own,
and switching takes less than a microsecond. To begin one takes ten times as long, since Python asks
the system for its stack. So greenlets whose instance is done are *parked*, for instances of later
calls. Python counts the frames of a greenlet from where it began, so one that began deep in a
recursion is not used where there is more room.

JAX keeps the trace that operations go to per thread, not per greenlet, so a switch takes
it along; each instance begins in the caller's context variables. Other state of the thread, such as
that of `with jax.default_matmul_precision(...)`, is the same for all: an instance must not wait
inside of such a block (see `_control_flow.rounds`, which says so where it can tell).
"""

import collections
import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import take_current_trace

from jedbatch._record.operations.failures import place_of
from jedbatch._support.frames import depth
from jedbatch._support.types import Array

try:
    import greenlet
except ModuleNotFoundError:  # where the package runs from its tree; see `Fibers`
    greenlet = None

MAX_STOPS = 8  # times an instance is told to stop, in case it catches everything
MAX_PARKED = 256  # greenlets


def _ignore(_: int) -> None:
    """Takes no note."""


_DONE = object()  # a greenlet says that it has done its work, and waits for more


def _work(given: list[Callable[[], None]]) -> None:
    """Does what a greenlet is given, again and again, in lists that it empties.

    What a greenlet begins with is kept as long as it lives, and what is parked is to hold nothing.
    """
    while True:
        given.pop()()
        given = greenlet.getcurrent().parent.switch(_DONE)


def _frames() -> int:
    """Returns how many frames of Python there are, those that greenlets began in included."""
    return depth() + getattr(greenlet.getcurrent(), "began_at", 0)


class Fibers:
    """Instances that take turns.

    An instance may fall into parts that take turns too; it goes on when all of them are done.

    Attributes:
      waiting: what each fibre said when it began to wait.
      current: the instance whose turn it is.
      fiber: the fibre whose turn it is.
      owners: the instance that each fibre belongs to.
      resumed: how often all who waited were told to go on.
    """

    def __init__(self, run: Callable[[int], None], count: int, parked: list[Any] | None = None):
        """Makes `count` instances, of which each will do `run(instance)`.

        Args:
          run: what an instance does.
          count: of instances.
          parked: greenlets of this thread that wait for work; those that are done go there.

        Raises:
          ModuleNotFoundError: greenlet is not installed.
        """
        if greenlet is None:
            raise ModuleNotFoundError(
                "functions that decide on values run in greenlets, and greenlet is not installed; "
                "write `pip install greenlet`, or decide by `jnp.where`."
            )
        self.waiting: dict[int, Any] = {}
        self.current = -1
        self._parked = [] if parked is None else parked
        self._work: dict[int, Callable[[], None]] = {}  # of fibres that have not begun
        self._hub = greenlet.getcurrent()
        self._frames = _frames()
        self._ready: collections.deque[int] = collections.deque()
        self._fibers: dict[int, Any] = {}
        self.owners: list[int] = []
        self.resumed = 0
        self._whole: dict[int, int] = {}  # the fibre that a part is part of
        self._parts: dict[int, int] = {}  # how many parts of a fibre are not done
        self.fiber = -1
        for i in range(count):
            self.add(functools.partial(run, i), i)

    def add(self, run: Callable[[], None], instance: int) -> int:
        """Adds a fibre of an instance, whose turn will come; returns its number."""
        fiber = len(self.owners)
        self.owners.append(instance)
        while self._parked and self._parked[-1].began_at > self._frames:
            self._parked.pop()
        if self._parked:
            taken = self._parked.pop()
        else:
            taken = greenlet.greenlet(_work)
            taken.began_at = self._frames
        taken.parent = self._hub
        taken.gr_context = contextvars.copy_context()
        self._fibers[fiber], self._work[fiber] = taken, run
        self._ready.append(fiber)
        return fiber

    def turns(self, note: Callable[[int], None] = _ignore) -> list[int]:
        """Lets every fibre that can go on do so, one after the other.

        Args:
          note: is told after every turn whose it was.

        Returns:
          The instances whose turns they were, in order.

        Raises:
          Exception: an instance raised it; a note names the instance.
        """
        ready, fibers, owners = self._ready, self._fibers, self.owners
        begun = self._work.pop
        instances = []
        with take_current_trace():  # each fibre sets its own, and takes it along when it waits
            while ready:
                self.fiber = fiber = ready.popleft()
                self.current = instance = owners[fiber]
                running = fibers[fiber]
                try:
                    work = begun(fiber, None)
                    said = running.switch() if work is None else running.switch([work])
                except Exception as error:
                    error.add_note(f"This happened{place_of(error)} in instance {instance}.")
                    raise
                if said is _DONE:
                    self._end(fiber)
                    self._park(running)
                note(instance)
                instances.append(instance)
        return instances

    def _end(self, fiber: int) -> None:
        """Notes that a fibre is done; one whose parts are all done may go on."""
        del self._fibers[fiber]
        whole = self._whole.pop(fiber, None)
        if whole is not None:
            self._parts[whole] -= 1
            if not self._parts[whole]:
                self._ready.append(whole)

    def _park(self, done: Any) -> None:
        """Keeps a greenlet for another fibre, with nothing of the one that is done."""
        done.gr_context = None
        if len(self._parked) < MAX_PARKED:
            self._parked.append(done)

    def wait(self, reason: Any) -> None:
        """Called by an instance: returns once `resume` was called and its turn has come."""
        self.waiting[self.fiber] = reason
        with take_current_trace():
            self._hub.switch()

    def _give_way(self) -> None:
        with take_current_trace():
            self._hub.switch()

    def together(self, parts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Called by an instance: what its parts return, which take turns as instances do.

        If parts raise errors, the error of the first of them is raised when all are done.
        """
        whole = self.fiber
        results: list[Array] = [None] * len(parts)
        errors: dict[int, Exception] = {}

        def run(i: int) -> None:
            try:
                results[i] = parts[i]()
            except Exception as error:
                errors[i] = error

        for i in range(len(parts)):
            self._whole[self.add(functools.partial(run, i), self.owners[whole])] = whole
        self._parts[whole] = len(parts)
        if parts:
            self._give_way()
        if errors:
            raise errors[min(errors)]
        return results

    def resume(self) -> None:
        """All who wait may go on."""
        self.resumed += 1
        self._ready.extend(self.waiting)
        self.waiting.clear()

    def close(self, instance: int | None = None) -> list[Exception]:
        """Ends all fibres that are not done, running what they have to clean up.

        Args:
          instance: whose fibres these are; None for those of all.

        Returns:
          What went wrong in that.
        """
        errors: list[Exception] = []
        owners = self.owners
        for number in [n for n in self._fibers if instance in (None, owners[n])]:
            self.fiber, self.current = number, owners[number]
            fiber = self._fibers[number]
            for _ in range(MAX_STOPS):
                if fiber.dead or not fiber:
                    break
                with take_current_trace():
                    try:
                        fiber.throw(greenlet.GreenletExit)
                    except Exception as error:
                        errors.append(error)
            del self._fibers[number]
            for kept in (self._work, self.waiting, self._whole, self._parts):
                kept.pop(number, None)
            if number in self._ready:
                self._ready.remove(number)
        return errors
