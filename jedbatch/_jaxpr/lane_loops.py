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
    own: list[Array]

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
