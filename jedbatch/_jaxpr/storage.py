"""Storage of values: each is a row of an array that holds values of one shape and dtype."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jedbatch._graph.types import ValueType
from jedbatch._support.types import Array, Dtype

Kind = tuple[tuple[int, ...], Dtype]  # (shape, dtype) of a row


def is_key(dtype: Dtype) -> bool:
    """True of the dtypes of random keys."""
    if isinstance(dtype, np.dtype):
        return False
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


@functools.cache
def _key_impl(dtype: Dtype) -> Any:
    """The generator that keys of a dtype are for."""
    impls = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return impls[0]


@functools.cache
def stored(value_type: ValueType) -> Kind:
    """(shape, dtype) in which a value is kept: random keys as the integers they are made of."""
    if is_key(value_type.dtype):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), value_type.dtype))
        return (*value_type.shape, *key.shape), key.dtype
    return value_type.shape, np.dtype(value_type.dtype)


def distinct_kinds(types: Iterable[ValueType]) -> tuple[Kind, ...]:
    """Returns the kinds of the values of some types, each once."""
    return tuple(dict.fromkeys(map(stored, types)))


def kinds_of(types: Iterable[ValueType]) -> list[Kind]:
    """Returns the kinds of the values of many types, of which few are different objects."""
    known: dict[int, Kind] = {}
    kinds = []
    for value_type in types:
        kind = known.get(id(value_type))
        if kind is None:
            kind = known[id(value_type)] = stored(value_type)
        kinds.append(kind)
    return kinds


@functools.cache
def stored_kind(kind: Kind) -> Kind:
    """(shape, dtype) in which values of a shape and dtype are kept."""
    return stored(ValueType(*kind))


def row_bytes(kind: Kind) -> int:
    """Bytes of one row of an arena."""
    shape, dtype = kind
    return math.prod(shape) * np.dtype(dtype).itemsize


def from_stored(x: Array, value_type: ValueType) -> Array:
    """A value as the lane's program wants it."""
    if is_key(value_type.dtype):
        return jax.random.wrap_key_data(x, impl=_key_impl(value_type.dtype))
    return x


def to_stored(x: Array, value_type: ValueType) -> Array:
    """A value as it is kept."""
    return jax.random.key_data(x) if is_key(value_type.dtype) else x


def all_from_stored(values: Iterable[Array], types: Iterable[ValueType]) -> list[Array]:
    """Values as the lane's program wants them."""
    return list(map(from_stored, values, types))


def all_to_stored(values: Iterable[Array], types: Iterable[ValueType]) -> list[Array]:
    """Values as they are kept."""
    return list(map(to_stored, values, types))
