"""Putting things back, whatever interrupts it.

While something is recorded, the thread has a recorder. That must end, and a `KeyboardInterrupt` may
come between any two steps, those of a `finally` too. So such a state begins inside of a `with` that
has the same `Restored` twice: what interrupts one leaves the other to do it. What they call may run
twice, and half, to no harm.
"""

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
