"""Calls to which something comes back: those that have a cotangent other than 0.

Cotangents of packed rows are zeros where a loss does not read what an instance returns. Zeros that
it does send back for all rows of a call cannot be told from these.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jedbatch._support.types import Array


def moving_calls(
    call: Array, total: Array, cotangents: Sequence[Array | None], num_calls: int
) -> list[Array]:
    """Returns bool[K] for each cotangent: the calls some row of which has another one than 0.

    Args:
      call: int32[R], the call of every row.
      total: int32[], how many rows exist.
      cotangents: [R, ...] each; None where there is none.
      num_calls: K.
    """
    there = [x for x in cotangents if x is not None]
    nothing = jnp.zeros(num_calls, bool)
    if not there:
        return [nothing] * len(cotangents)
    exists = jnp.arange(len(call)) < total
    moves = [exists & (x != 0).reshape(len(call), -1).any(axis=1) for x in there]
    # Set, not added up: many threads of a GPU would wait for each other to add to the same number.
    flags = jnp.stack(moves)
    place = jnp.where(flags, call, num_calls)
    found = jnp.zeros((len(moves), num_calls), jnp.int32)  # there is no atomic operation for bits
    found = found.at[jnp.arange(len(moves))[:, None], place].set(1, mode="drop")
    own = iter(found != 0)
    return [nothing if x is None else next(own) for x in cotangents]
