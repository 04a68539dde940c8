"""`GrowingArray`: what is recorded, as arrays that grow at their end."""

import numpy as np

from jedbatch._support.types import Array, Dtype


class GrowingArray:
    """An array that grows at its end."""

    def __init__(self, dtype: Dtype):
        self._data = np.empty(256, dtype)
        self._size = 0

    def extend(self, values: Array) -> None:
        """Appends an array."""
        size = self._size + len(values)
        if size > len(self._data):
            self._data = np.resize(self._data, 2 * size)
        self._data[self._size : size] = values
        self._size = size

    def __len__(self) -> int:
        return self._size

    @property
    def array(self) -> np.ndarray:
        """All so far; a view."""
        return self._data[: self._size]

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Returns the items at some places; anything for those out of bounds."""
        return self._data.take(indices, mode="clip")
