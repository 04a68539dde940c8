"""A `while_loop` that is mapped over lanes, as functions of constants and carries of some lanes."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jedbatch._jaxpr.storage import is_key
from jedbatch._support.types import Array


class LoopOfLanes(NamedTuple):
    """The condition and the body of a loop, for any number of lanes at a time.

    Attributes:
      more: from constants and carries of lanes to bool[lanes], whether each goes on.
      step: from the same to the carries after a step.
      own: constants of all lanes, [N, ...] each.
    """

    more: Callable[[Sequence[Array], Sequence[Array]], Array]
    step: Callable[[Sequence[Array], Sequence[Array]], list[Array]]
    own: Sequence[Array]

    @classmethod
    def of(
        cls,
        cond: Callable,
        body: Callable,
        num_cond: int,
        consts: Sequence[Array],
        in_batched: Sequence[bool],
    ) -> "LoopOfLanes":
        """Returns a loop of lanes.

        Args:
          cond: the condition of a lane, from constants and carries to a list of one truth value.
          body: a step of a lane.
          num_cond: how many constants the condition has.
          consts: these, and those of the body: [N, ...] of lanes, or of all lanes.
          in_batched: which of them are of lanes.
        """
        own = [x for x, batched in zip(consts, in_batched, strict=True) if batched]

        def split(of_lane: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            mine = iter(of_lane)
            every = [
                next(mine) if batched else x for x, batched in zip(consts, in_batched, strict=True)
            ]
            return every[:num_cond], every[num_cond:]

        def more(of_lane: Sequence[Array], carry: Sequence[Array]) -> Array:
            return cond(*split(of_lane)[0], *carry)[0]

        def step(of_lane: Sequence[Array], carry: Sequence[Array]) -> list[Array]:
            return body(*split(of_lane)[1], *carry)

        return cls(jax.vmap(more), jax.vmap(step), own)


def like_last(arrays: Sequence[Array]) -> Array:
    """Returns bool[N], which lanes have the operands [N, ...] of the last one.

    Those have that fill up a chunk. One of them runs, for all.
    """
    numbers = itertools.chain.from_iterable(map(_bits, arrays))
    flags = [(x == x[-1:]).reshape(len(x), -1).all(1) for x in numbers]
    return functools.reduce(jnp.logical_and, flags)


def _bits(x: Array) -> list[Array]:
    """Returns arrays of whole numbers that are equal where arrays are the same: 0 is not -0."""
    if is_key(x.dtype):
        return [jax.random.key_data(x)]
    if jnp.iscomplexobj(x):
        return [*_bits(x.real), *_bits(x.imag)]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return [x]
    return [jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")]


def one_of(repeats: Array) -> Array:
    """Returns bool[N], which lanes run where those are alike that are marked."""
    return ~repeats | (jnp.arange(len(repeats)) == repeats.argmax())


def with_copies(repeats: Array, outs: Sequence[Array]) -> list[Array]:
    """Returns results [N, ...] of all lanes, given those of lanes that ran (see `one_of`)."""
    first = repeats.argmax()
    return where_lanes(repeats, [jnp.broadcast_to(x[first], x.shape) for x in outs], outs)


def where_lanes(flags: Array, xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
    """Returns the rows of the first arrays where flags are set, those of the others elsewhere."""
    pairs = zip(xs, ys, strict=True)
    return [jnp.where(flags.reshape(-1, *[1] * (x.ndim - 1)), x, y) for x, y in pairs]


def as_function(closed: Any) -> Callable[..., list[Array]]:
    """Returns a closed program as a function."""
    return lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
