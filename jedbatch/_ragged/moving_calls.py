"""Calls to which something comes back: those that have a cotangent other than 0.

Cotangents of packed rows are zeros where a loss does not read what an instance returns. Zeros that
it does send back for all rows of a call cannot be told from these.

On a CPU a function of the core looks for the first number of a call that is not 0 (see
`_jaxpr.native_calls`), where XLA compares all of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jedbatch._jaxpr.native_calls import over_lanes_of, register_lowering
from jedbatch._support.types import Array

# What the core knows zeros of.
KNOWN = frozenset(map(jnp.dtype, (*"efdFD", jnp.bfloat16)))


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
    find = moving_p.bind if all(x.dtype in KNOWN for x in there) else _moving
    found = iter(find(call, jnp.asarray(total, jnp.int32), *there, num_calls=num_calls))
    return [nothing if x is None else next(found) for x in cotangents]


def _moving(call: Array, total: Array, *cotangents: Array, num_calls: int) -> list[Array]:
    exists = jnp.arange(len(call)) < total
    moves = [exists & (x != 0).reshape(len(call), -1).any(axis=1) for x in cotangents]
    # Set, not added up: many threads of a GPU would wait for each other to add to the same number.
    flags = jnp.stack(moves)
    place = jnp.where(flags, call, num_calls)
    found = jnp.zeros((len(moves), num_calls), jnp.int32)  # there is no atomic operation for bits
    found = found.at[jnp.arange(len(moves))[:, None], place].set(1, mode="drop")
    return list(found != 0)


moving_p = Primitive("moving_calls")
moving_p.multiple_results = True


@moving_p.def_abstract_eval
def _types(call: Any, total: Any, *cotangents: Any, num_calls: int) -> list[ShapedArray]:
    return [ShapedArray((num_calls,), np.bool_)] * len(cotangents)


def _push(primals: Sequence[Array], _: Any, *, num_calls: int) -> Any:
    """The rule of forward mode: truth values have no tangents."""
    outs = moving_p.bind(*primals, num_calls=num_calls)
    return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


moving_p.def_impl(_moving)
register_lowering(moving_p, moving_p.name, _moving, lambda **_: {})
ad.primitive_jvps[moving_p] = _push
batching.primitive_batchers[moving_p] = over_lanes_of(_moving)
