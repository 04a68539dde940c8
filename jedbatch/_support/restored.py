"""Putting things back, whatever interrupts it.

While something is recorded, the thread has a recorder and the process does without the collector
of garbage. Both must end, and a `KeyboardInterrupt` may come between any two steps, those of a
`finally` too. So such a state begins inside of a `with` that has the same `Restored` twice: what
interrupts one leaves the other to do it. What they call may run twice, and half, to no harm.
"""

import gc
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
    all alive. There is no lock: what interrupts one who holds it would leave all other threads
    waiting. Where threads begin and end at the same time, there may be a collection too many.
    """

    def __init__(self) -> None:
        self._was_enabled: dict[int, bool] = {}  # by user

    def rest(self, user: object) -> None:
        """No collections from now on."""
        self._was_enabled[id(user)] = gc.isenabled() or True in self._was_enabled.values()
        gc.disable()

    def go_on(self, user: object) -> None:
        """Collections as before, unless others want none."""
        if not self._was_enabled.get(id(user)):
            self._was_enabled.pop(id(user), None)
            return
        gc.enable()
        del self._was_enabled[id(user)]
        if True in self._was_enabled.values():
            gc.disable()
        if True not in self._was_enabled.values():  # the others have ended meanwhile
            gc.enable()


collector = Collector()
