"""Instances that take turns: each runs until it needs a value that nobody has computed yet.

Python decides on the value of an array in the middle of a function: in an `if`, a `while`, an
`int()`. The function must stop right there, let the other instances go on, and continue later as
if nothing had happened. Greenlets do that: each instance is one, with a Python stack of its own,
and switching takes less than a microsecond.

JAX keeps the trace that operations go to per thread, not per greenlet, so whoever switches takes
it along.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
from jax.extend.core import take_current_trace

PATIENCE = 8  # times an instance is told to stop, in case it catches everything


class Fibers:
    """Instances that take turns.

    Attributes:
      waiting: what each instance said when it began to wait, by instance.
      current: the instance whose turn it is.
    """

    def __init__(self, run: Callable[[int], None], count: int):
        """Makes `count` instances, of which each will do `run(instance)`."""
        self.waiting: dict[int, Any] = {}
        self._hub = greenlet.getcurrent()
        self._fibers = {i: greenlet.greenlet(run) for i in range(count)}
        self._ready = collections.deque(range(count))
        self.current = -1

    def turns(self) -> Iterator[int]:
        """Lets every instance that can go on do so, one after the other, and yields which it was.

        An error in an instance is raised here, with a note that names the instance.
        """
        while self._ready:
            self.current = i = self._ready.popleft()
            with take_current_trace():
                try:
                    self._fibers[i].switch(i)
                except Exception as error:
                    error.add_note(f"This happened in instance {i}.")
                    raise
            if self._fibers[i].dead:
                del self._fibers[i]
            yield i

    def wait(self, reason: Any) -> None:
        """Called by an instance: returns once `resume` was called and its turn has come."""
        self.waiting[self.current] = reason
        with take_current_trace():
            self._hub.switch()

    def resume(self) -> None:
        """All who wait may go on."""
        self._ready.extend(self.waiting)
        self.waiting.clear()

    def close(self) -> None:
        """Ends all instances that are not done, running what they have to clean up."""
        for fiber in self._fibers.values():
            for _ in range(PATIENCE):
                if fiber.dead or not fiber:
                    break
                with take_current_trace():
                    fiber.throw(greenlet.GreenletExit)
        self._fibers.clear()
        self.waiting.clear()
        self._ready.clear()
