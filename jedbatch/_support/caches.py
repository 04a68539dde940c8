"""Dictionaries that forget: every cache has a bound, in entries or in bytes.

All caches of a session share one `Budget`. It counts what they take, and where that is too much,
the largest forgets what came first.
"""

import collections
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any


class Budget:
    """Bytes for several caches together.

    Attributes:
      most: how many they may take; None for any number.
      bytes: that they take.
    """

    def __init__(self, most: int | None = None):
        self.most = most
        self.bytes = 0
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()

    def join(self, memory: "Memory") -> None:
        """Counts a cache among those that share the bytes."""
        self._memories.add(memory)

    def add(self, num_bytes: int, newest: "Memory") -> None:
        """Notes that a cache has taken so many more bytes; caches forget if there are too many.

        The last entry of each is forgotten last, and that of the newest never.
        """
        self.bytes += num_bytes
        if self.most is None or self.bytes <= self.most:
            return
        memories = sorted(self._memories, key=lambda memory: -memory.bytes)
        for memory, kept in [*((m, 1) for m in memories), *((m, 0) for m in memories)]:
            memory.forget(self.bytes - self.most, max(kept, memory is newest))
            if self.bytes <= self.most:
                return


class Memory(collections.OrderedDict):
    """A dict that forgets what was put in first once it holds too much.

    Attributes:
      limit: most entries; None for any number.
      budget: of bytes, as `weigh(key, value)` counts them; the latest is kept whatever it weighs.
      bytes: of all entries.
    """

    def __init__(
        self,
        limit: int | None,
        most: int | Budget | None = None,
        weigh: Callable[[Any, Any], int] | None = None,
    ):
        """Prepares an empty dict; `most` bytes are its own, or of a budget that it shares."""
        super().__init__()
        self.limit = limit
        self.budget = most if isinstance(most, Budget) else Budget(most)
        self.bytes = 0
        self._weigh = weigh or each(0)
        self.budget.join(self)

    __hash__ = object.__hash__  # type: ignore[assignment]  # of the dict, not of what is in it

    def __eq__(self, other: object) -> bool:
        return self is other

    def __del__(self) -> None:
        self.budget.bytes -= self.bytes

    def __setitem__(self, key: Hashable, value: Any) -> None:
        self.add([(key, value)])

    def add(self, items: Iterable[tuple[Hashable, Any]]) -> None:
        """Puts in several keys and values, one after the other."""
        put, weigh, more = super().__setitem__, self._weigh, 0
        for key, value in items:
            more += weigh(key, value)
            if key in self:
                more -= weigh(key, self[key])
            put(key, value)
        self.bytes += more
        while self.limit is not None and len(self) > self.limit:
            self._drop_first()
        self.budget.add(more, self)

    def forget(self, num_bytes: int, kept: int) -> None:
        """Forgets what was put in first: so many bytes, or all but the last entries."""
        most = self.bytes - num_bytes
        while self.bytes > most and len(self) > kept:
            self._drop_first()

    def _drop_first(self) -> None:
        del self[next(iter(self))]

    def __delitem__(self, key: Hashable) -> None:
        self._release(self._weigh(key, self[key]))
        super().__delitem__(key)

    def pop(self, key: Hashable, default: Any = None) -> Any:
        """Takes out a key and returns its value, or the default if there is none."""
        if key not in self:
            return default
        value = self[key]
        del self[key]
        return value

    def _release(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self.budget.bytes -= num_bytes

    def clear(self) -> None:
        """Forgets everything."""
        super().clear()
        self._release(self.bytes)

    def use(self, key: Hashable) -> Any:
        """Returns the value of a key and makes it the most recently used; None if there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value


def each(num_bytes: int) -> Callable[[Any, Any], int]:
    """Returns the weight of entries that take about as many bytes each."""
    return lambda *_: num_bytes
