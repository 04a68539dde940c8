"""Dictionaries that forget: every cache has a bound, in entries or in bytes."""

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


class Memory(collections.OrderedDict):
    """A dict that forgets what was put in first once it holds too much.

    Attributes:
      limit: most entries.
      most: most bytes, as `weigh(key, value)` counts them; one entry is kept whatever it weighs.
      bytes: of all entries.
    """

    def __init__(
        self,
        limit: int,
        most: int | None = None,
        weigh: Callable[[Any, Any], int] | None = None,
    ):
        super().__init__()
        self.limit = limit
        self.most = most
        self.bytes = 0
        self._weigh = weigh
        self._weights: dict[Hashable, int] = {}

    def __setitem__(self, key: Hashable, value: Any) -> None:
        self.add([(key, value)])

    def add(self, items: Iterable[tuple[Hashable, Any]]) -> None:
        """Puts in several keys and values, one after the other."""
        put, weigh, weights = super().__setitem__, self._weigh, self._weights
        for key, value in items:
            if weigh is not None:
                weight = weigh(key, value)
                self.bytes += weight - weights.get(key, 0)
                weights[key] = weight
            put(key, value)
        self._forget()

    def add_new(
        self, keys: Sequence[Hashable], values: Sequence[Any], weights: Sequence[int]
    ) -> None:
        """Puts in keys that differ and are not there yet, whose weights are known.

        It takes half the time of `add`.
        """
        put = super().__setitem__
        self.bytes += sum(weights)
        self._weights.update(zip(keys, weights, strict=True))
        for key, value in zip(keys, values, strict=True):
            put(key, value)
        self._forget()

    def _forget(self) -> None:
        """Forgets what was put in first, as long as there is too much."""
        drop, weight_of = super().__delitem__, self._weights.pop
        while len(self) > self.limit or (
            self.most is not None and self.bytes > self.most and len(self) > 1
        ):
            key = next(iter(self))
            drop(key)
            self.bytes -= weight_of(key, 0)

    def __delitem__(self, key: Hashable) -> None:
        super().__delitem__(key)
        self.bytes -= self._weights.pop(key, 0)

    def clear(self) -> None:
        """Forgets everything."""
        super().clear()
        self._weights.clear()
        self.bytes = 0

    def use(self, key: Hashable) -> Any:
        """Returns the value of a key and makes it the most recently used; None if there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value
