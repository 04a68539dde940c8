"""Rows of instances that run together, read from packed ones and written.

Rows are padded to one length:

    packed      a0 a1 a2 b0 c0 c1       first rows 0, 3, 4, counts 3, 1, 2
    read        [a0 a1 a2 a2] [b0 b0 b0 b0] [c0 c1 c1 c1]        or zeros behind the last

Letters: `G` instances that run together, `L` rows that each is padded to, `R` packed rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jedbatch._program.arenas import broadcast_flags, take
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

    def places(self, length: int) -> tuple[Array, Array]:
        """Returns (int32[G, L], bool[G, L]): packed rows, which exist."""
        index = self.offset + lax.iota(jnp.int32, length)[None]
        counts = self.counts[:, None]
        places = self.starts[:, None] + jnp.minimum(index, counts - 1)
        return jnp.maximum(places, 0), (index < counts) & self.alive[:, None]


def read_instances(rows: InstanceRows, x: Array, length: int, zeros: bool = False) -> Array:
    """Returns [G, L, ...] of packed rows [R, ...]; rows beyond the last of an instance repeat it.

    Args:
      rows: where they are.
      x: packed rows.
      length: L.
      zeros: whether rows beyond the last, and those of no instance, are zeros instead.
    """
    places, exist = rows.places(length)
    found = take(x, places)
    nothing = jnp.zeros((), x.dtype)
    return jnp.where(broadcast_flags(exist, found), found, nothing) if zeros else found


def write_instances(rows: InstanceRows, x: Array, new: Array, add: bool = False) -> Array:
    """Returns packed rows [R, ...] with those of instances [G, L, ...] set, or added to."""
    places, exist = rows.places(new.shape[1])
    at = x.at[jnp.where(exist, places, len(x))]
    return (at.add if add else at.set)(new.astype(x.dtype), mode="drop")
