"""Instances that run together: which they are, and their rows, read from packed ones and written.

Their numbers are in the table of a minibatch, one group after the other (see `_ragged.packing`). So
are first rows and lengths, by number. Rows are padded to one length:

    packed      a0 a1 a2 b0 c0 c1       first rows 0, 3, 4, counts 3, 1, 2
    read        [a0 a1 a2 a2] [b0 b0 b0 b0] [c0 c1 c1 c1]        or zeros behind the last

The rows of an instance lie together, so a CPU copies them at once. All this are calls of functions
of the core (see `_jaxpr.native_calls`), where XLA computes a place for every number, and has
programs to compile for every array and every length. Elsewhere they are gathers and scatters.

Letters: `G` instances that run together, `L` rows that each is padded to, `R` packed rows, `K`
calls that there is room for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jedbatch._jaxpr.native_calls import over_lanes_of, register_lowering
from jedbatch._jaxpr.storage import is_key
from jedbatch._program.arenas import broadcast_flags, slice_rows, take
from jedbatch._program.rows import SUMMED_BY_CALLS
from jedbatch._support.types import Array


class Members(NamedTuple):
    """Which instances run together, of which there is a table.

    Attributes:
      order: where the numbers of calls begin in it, of which K stands for none.
      calls: K.
      size: G.
      columns: where further numbers of all calls begin in it.
      limits: numbers in the first columns are so large at most; one for each of them.
      first: whether the first of them takes the place of one that does not exist; if not, it is
        the first call, or the first to which something comes back.
    """

    order: int
    calls: int
    size: int
    columns: tuple[int, ...]
    limits: tuple[int, ...]
    first: bool


def find_members(
    of: Members, table: Array, place: Array, moves: Array | None
) -> tuple[Array, Array, list[Array]]:
    """Returns the instances from a place of the order on.

    Args:
      of: which these are.
      table: int32[Z].
      place: int32[], in the order.
      moves: bool[K], to which something comes back, if only these are to be run.

    Returns:
      int32[G], their numbers; bool[G], whether there is such an instance; and int32[G] for each
      column, numbers of theirs. Of one that does not exist they are those of another one.
    """
    given = [] if moves is None else [moves]
    calls, alive, *columns = members_p.bind(table, jnp.asarray(place, jnp.int32), *given, of=of)
    return calls, alive, columns


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


def _members(table: Array, place: Array, *moves: Array, of: Members) -> list[Array]:
    calls = slice_rows(table, of.order + place, of.size)
    alive = calls < of.calls
    if moves:
        alive &= moves[0][jnp.where(alive, calls, 0)]
        stand_in = jnp.argmax(moves[0]).astype(jnp.int32)
    else:
        stand_in = calls[0] if of.first else jnp.int32(0)
    calls = jnp.where(alive, calls, stand_in)
    columns = [take(table[start : start + of.calls], calls) for start in of.columns]
    for i, limit in enumerate(of.limits):
        columns[i] = jnp.minimum(columns[i], limit)
    return [calls, alive, *columns]


def _places(rows: Sequence[Array], length: int) -> tuple[Array, Array]:
    """Returns (int32[G, L], bool[G, L]): packed rows, which exist."""
    starts, counts, alive, offset = rows
    index = offset + lax.iota(jnp.int32, length)[None]
    counts = counts[:, None]
    places = starts[:, None] + jnp.minimum(index, counts - 1)
    return jnp.maximum(places, 0), (index < counts) & alive[:, None]


def _read(x: Array, *rows: Array, length: int, zeros: bool) -> Array:
    places, exist = _places(rows, length)
    found = take(x, places)
    nothing = jnp.zeros((), x.dtype)
    return jnp.where(broadcast_flags(exist, found), found, nothing) if zeros else found


def _written(x: Array, new: Array, *rows: Array, add: bool) -> Array:
    places, exist = _places(rows, new.shape[1])
    at = x.at[jnp.where(exist, places, len(x))]
    return (at.add if add else at.set)(new, mode="drop")


# --- as calls ---

members_p = Primitive("instances")
members_p.multiple_results = True
read_p = Primitive("read_instances")
write_p = Primitive("write_instances")


@members_p.def_abstract_eval
def _types_of_members(table, place, *moves, of):
    number = ShapedArray((of.size,), np.int32)
    return [number, ShapedArray((of.size,), np.bool_), *[number] * len(of.columns)]


@read_p.def_abstract_eval
def _type_read(x, starts, *rows, length, zeros):
    return ShapedArray((*starts.shape, length, *x.shape[1:]), x.dtype)


@write_p.def_abstract_eval
def _type_written(x, *given, add):
    return ShapedArray(x.shape, x.dtype)


def _numbers_of_members(*, of: Members) -> dict[str, Any]:
    numbers = (of.order, of.calls, of.first, len(of.limits), *of.limits, *of.columns)
    return {"numbers": np.array(numbers, np.int64)}


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


def _aliases(**flags: Any) -> dict[str, Any]:
    return {**_numbers(**flags), "aliases": {0: 0}}


for _primitive, _operations, _attributes in (
    (members_p, _members, _numbers_of_members),
    (read_p, _read, _numbers),
    (write_p, _written, _aliases),
):
    _primitive.def_impl(_operations)
    register_lowering(_primitive, _primitive.name, _operations, _attributes)
    batching.primitive_batchers[_primitive] = over_lanes_of(_operations)
ad.primitive_jvps[read_p] = _push(read_p, 1)
ad.primitive_jvps[write_p] = _push(write_p, 2)
