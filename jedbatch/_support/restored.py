"""Putting things back, whatever interrupts it.

While something is recorded, the thread has a recorder and the process does without the collector
of garbage. Both must end, and a `KeyboardInterrupt` may come between any two steps, those of a
`finally` too. So such a state begins inside of a `with` that has the same `Restored` twice: what
interrupts one leaves the other to do it. What they call may run twice, and half, to no harm.
"""

import gc
import threading
from collections.abc import Callable


class Restored:
    """Calls a function at the end of a `with` block."""

    __slots__ = ("_restore",)

    def __init__(self, restore: Callable[[], object]):
        self._restore = restore

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._restore()


class Collector:
    """The collector of garbage, which rests while anybody in the process wants it to.

    The lists and tracers of a large minibatch make it run again and again over objects that are
    all alive.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: set[int] = set()
        self._was_enabled = False

    def rest(self, user: object) -> None:
        """No collections from now on."""
        with self._lock:
            if not self._users:
                self._was_enabled = gc.isenabled()
            self._users.add(id(user))
            gc.disable()

    def go_on(self, user: object) -> None:
        """Collections as before, unless others want none."""
        with self._lock:
            self._users.discard(id(user))
            if not self._users and self._was_enabled:
                gc.enable()
                self._was_enabled = False


collector = Collector()
