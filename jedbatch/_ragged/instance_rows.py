"""Rows of instances that run together: read from packed rows, padded to one length, and written back.

    packed      a0 a1 a2 b0 c0 c1       first rows 0, 3, 4, counts 3, 1, 2
    read        [a0 a1 a2 a2] [b0 b0 b0 b0] [c0 c1 c1 c1]        or zeros behind the last

The rows of an instance lie together, so a CPU copies them at once: reading and writing are calls of
a function that copies memory (see `_jaxpr.native_calls`), where XLA computes a place for every
number, and has a program to compile for every array and every length. Elsewhere they are gathers
and scatters.

Letters: `G` instances that run together, `L` rows that each is padded to, `R` packed rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jedbatch._jaxpr.native_calls import register_lowering
from jedbatch._jaxpr.storage import is_key
from jedbatch._program.arenas import broadcast_flags, take
from jedbatch._program.rows import SUMMED_BY_CALLS
from jedbatch._support.types import Array


class InstanceRows(NamedTuple):
    """Where the rows of instances are among packed rows.

    Attributes:
      starts: int32[G], the first row of each.
      counts: int32[G], how many rows each has; not negative.
      alive: bool[G], whether there is such an instance. If not, it is read as if there were.
      offset: int32[], the first of its rows that is meant.
    """

    starts: Array
    counts: Array
    alive: Array
    offset: Array


def read_instances(rows: InstanceRows, x: Array, length: int, zeros: bool = False) -> Array:
    """Returns [G, L, ...] of packed rows [R, ...]; rows beyond the last of an instance repeat it.

    Args:
      rows: where they are.
      x: packed rows.
      length: L.
      zeros: whether rows beyond the last, and those of no instance, are zeros instead.
    """
    read = _read if is_key(x.dtype) else read_p.bind
    return read(x, *rows, length=length, zeros=zeros)


def write_instances(rows: InstanceRows, x: Array, new: Array, add: bool = False) -> Array:
    """Returns packed rows [R, ...] with those of instances [G, L, ...] set, or added to."""
    new = new.astype(x.dtype)
    as_operations = is_key(x.dtype) or (add and x.dtype not in SUMMED_BY_CALLS)
    write = _written if as_operations else write_p.bind
    return write(x, new, *rows, add=add)


# --- as operations of XLA ---


def _places(
    starts: Array, counts: Array, alive: Array, offset: Array, length: int
) -> tuple[Array, Array]:
    """Returns (int32[G, L], bool[G, L]): packed rows, which exist."""
    index = offset + lax.iota(jnp.int32, length)[None]
    counts = counts[:, None]
    rows = starts[:, None] + jnp.minimum(index, counts - 1)
    return jnp.maximum(rows, 0), (index < counts) & alive[:, None]


def _read(x: Array, *rows: Array, length: int, zeros: bool) -> Array:
    places, exist = _places(*rows, length)
    found = take(x, places)
    return jnp.where(broadcast_flags(exist, found), found, 0) if zeros else found


def _written(x: Array, new: Array, *rows: Array, add: bool) -> Array:
    places, exist = _places(*rows, new.shape[1])
    at = x.at[jnp.where(exist, places, len(x))]
    return (at.add if add else at.set)(new, mode="drop")


# --- as calls ---

read_p = Primitive("read_instances")
write_p = Primitive("write_instances")


@read_p.def_abstract_eval
def _type_read(x, starts, *rows, length, zeros):
    return ShapedArray((*starts.shape, length, *x.shape[1:]), x.dtype)


@write_p.def_abstract_eval
def _type_written(x, *given, add):
    return ShapedArray(x.shape, x.dtype)


def _numbers(**flags: Any) -> dict[str, Any]:
    return {"flags": np.array([flags.get("zeros", 0) or flags.get("add", 0)], np.int64)}


def _push(primitive: Primitive, linear: int) -> Any:
    """Returns the rule of forward mode; a primitive is linear in so many of its operands."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        if all(type(t) is ad.Zero for t in tangents[:linear]):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        moved = map(ad.instantiate_zeros, tangents[:linear])
        return out, primitive.bind(*moved, *primals[linear:], **params)

    return rule


def _over_lanes(operations: Any) -> Any:
    """Returns the rule of `vmap`: that of operations of XLA."""

    def rule(args: Any, axes: Any, **params: Any) -> Any:
        return jax.vmap(functools.partial(operations, **params), axes)(*args), 0

    return rule


def _aliases(**flags: Any) -> dict[str, Any]:
    return {**_numbers(**flags), "aliases": {0: 0}}


for _primitive, _operations, _attributes, _linear in (
    (read_p, _read, _numbers, 1),
    (write_p, _written, _aliases, 2),
):
    _primitive.def_impl(_operations)
    register_lowering(_primitive, _primitive.name, _operations, _attributes)
    ad.primitive_jvps[_primitive] = _push(_primitive, _linear)
    batching.primitive_batchers[_primitive] = _over_lanes(_operations)
