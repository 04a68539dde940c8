"""The places of things in the int32 table of a minibatch."""

import math
from typing import Any

import numpy as np


class TableLayout:
    """Named parts of a flat int32 table: one large argument dispatches fastest."""

    def __init__(self) -> None:
        self.places: dict[Any, tuple[int, tuple[int, ...]]] = {}
        self.size = 0

    def add(self, name: Any, *shape: int) -> None:
        self.places[name] = (self.size, shape)
        self.size += math.prod(shape)

    def offset(self, name: tuple, *index: int) -> int:
        """Returns where a part begins, or a row of it."""
        offset, shape = self.places[name]
        stride = math.prod(shape)
        for i, length in zip(index, shape, strict=False):
            stride //= length
            offset += i * stride
        return offset

    def view(self, table: np.ndarray, *name: Any) -> np.ndarray:
        """One part of a NumPy table, for writing."""
        offset, shape = self.places[name]
        return table[offset : offset + math.prod(shape)].reshape(shape)
