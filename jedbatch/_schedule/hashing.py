"""Hashes of encodings: what is said about each type, as one number.

A table of all encodings there might be would have a row for each combination. Tables are hashed
instead: encodings need no enumeration, so any number of types will do.
"""

import numpy as np

from jedbatch._support.types import Array

MULTIPLIER = 2654435769  # 2^32 over the golden ratio: products spread over the upper bits


def salts(num_types: int) -> np.ndarray:
    """uint32[T], fixed odd numbers to hash with."""
    return np.random.default_rng(0).integers(1, 1 << 31, num_types).astype(np.uint32) * 2 + 1


def mixed(code: Array, salt: Array) -> Array:
    """uint32[..., 1], one number for what is said about each type, int32[..., T]."""
    return ((code + 1).astype(np.uint32) * salt).sum(-1, dtype=np.uint32, keepdims=True)


def slot_of(number: Array, num_slots: int) -> Array:
    """Returns the row, uint32, of a table with a power of two of them, for mixed numbers."""
    return (number * np.uint32(MULTIPLIER)) >> np.uint32(33 - num_slots.bit_length())
