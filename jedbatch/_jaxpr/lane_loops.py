"""A `while_loop` that is mapped over lanes, as functions of constants and carries of some lanes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


def flag_variable() -> Any:
    """Returns a variable for whether a lane has the operands of the last one."""
    return jax.make_jaxpr(jnp.logical_not)(jax.ShapeDtypeStruct((), bool)).jaxpr.invars[0]


class Repeats:
    """Lanes with the operands of the last one, such as those that fill up a chunk.

    One of them runs, for all.

    Args:
      like_last: bool[N], which lanes have them; not given if none but the last.
    """

    def __init__(self, like_last: Array | None = None):
        self._like_last = like_last
        if like_last is not None:
            size = len(like_last)
            self._first = jnp.where(like_last, jnp.arange(size), size - 1).min()

    def run(self, size: int) -> Array:
        """Returns bool[N], which of so many lanes run."""
        if self._like_last is None:
            return jnp.ones(size, bool)
        return (jnp.arange(size) == self._first) | ~self._like_last

    def begin(self, loop: LoopOfLanes, start: Sequence[Array]) -> Array:
        """Returns bool[N], which lanes of a loop run, given carries at first, [N, ...] each."""
        goes_on = loop.more(loop.own, start)
        return goes_on if self._like_last is None else goes_on & self.run(len(goes_on))

    def filled(self, outs: Sequence[Array]) -> list[Array]:
        """Returns results [N, ...] of all lanes, given those of lanes that ran."""
        if self._like_last is None:
            return list(outs)
        ran = [jnp.broadcast_to(x[self._first], x.shape) for x in outs]
        return where_lanes(self._like_last, ran, outs)


def where_lanes(flags: Array, xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
    """Returns the rows of the first arrays where flags are set, those of the others elsewhere."""
    pairs = zip(xs, ys, strict=True)
    return [jnp.where(flags.reshape(-1, *[1] * (x.ndim - 1)), x, y) for x, y in pairs]


def carries_of_lanes(
    carries: Sequence[Array], in_batched: Sequence[bool], size: int
) -> list[Array]:
    """Returns what lanes carry at first, [N, ...] each.

    Args:
      carries: [N, ...] of lanes, or of all lanes.
      in_batched: which of them are of lanes.
      size: N.
    """
    return [
        x if batched else jnp.broadcast_to(x, (size, *jnp.shape(x)))
        for x, batched in zip(carries, in_batched, strict=True)
    ]


def as_function(closed: Any) -> Callable[..., list[Array]]:
    """Returns a closed program as a function."""
    return lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
