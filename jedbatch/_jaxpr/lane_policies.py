"""Policies for lanes: which block runs next, where each lane is at its own place of a program.

The nodes of a cell with loops in loops are lanes of a machine (see `_jaxpr.program_counters`): each
waits at a basic block, and a *step* runs one block for some of the lanes that wait there. A policy
says which step is next. It decides how many steps there are and how full they are, and nothing
else: each lane goes through its blocks in its own order.

A policy maps a `LaneFrontier`, how many lanes wait at each block, to the number of a step. It is
compiled into the machine: so it is written in `jax.numpy`.

A step of W lanes costs S + W c, where c is the work of the block and S what a step costs by itself.
Costs are whole numbers in a unit of their own, for devices round sums and products of real numbers
differently, and all must choose alike.

What was measured (`benchmarks/results/lane_policies.csv`): on HMC, NUTS and an adaptive solver
`least_loss` does 1.04 to 1.08 times the work of the certified least, and takes 0.95 to 1.00 times
the time of `most_lanes`. State machines were learned from recorded runs, by Q-learning, too: it
takes 0.99 to 1.02 times the time of those, which is noise, and in two of three cases they chose as
it does. So nothing is learned here.

Source: A. Radul, B. Patton, D. Maclaurin, M. Hoffman, R. Saurous. Automatically Batching
Control-Intensive Programs for Modern Accelerators. MLSys 2020, for `most_lanes`.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jedbatch import checks
from jedbatch._support.types import Array

LARGEST_COST = 1 << 30  # of a step, in the unit of costs


@dataclass(frozen=True)
class LaneBlocks:
    """The blocks of a program at which lanes wait, `B` of them, and the steps, `K` of them.

    Attributes:
      work: [B], floating-point operations of a lane in each block.
      block: [K], the block that each step runs, ascending.
      width: [K], the lanes that it takes at most, ascending for each block.
      start: floating-point operations that take as long as to start a step.
    """

    work: tuple[float, ...]
    block: tuple[int, ...]
    width: tuple[int, ...]
    start: float

    @functools.cached_property
    def operations(self) -> np.ndarray:
        """float64[K], what a step costs in floating-point operations."""
        return self.start + np.array(self.width) * np.array(self.work, float)[list(self.block)]

    @functools.cached_property
    def costs(self) -> np.ndarray:
        """int32[K], what a step costs in the unit of costs."""
        scaled = self.operations * (LARGEST_COST / self.operations.max())
        return np.maximum(1, np.floor(scaled)).astype(np.int32)

    @functools.cached_property
    def same_block(self) -> np.ndarray:
        """bool[K, K], whether two steps run the same block."""
        block = np.array(self.block)
        return block[:, None] == block[None, :]

    @functools.cached_property
    def filling(self) -> np.ndarray:
        """int32[B], how many lanes fill a step of each block, that of all lanes aside."""
        first = np.searchsorted(self.block, np.arange(len(self.work) + 1)).tolist()
        widths = [self.width[start:end] for start, end in itertools.pairwise(first)]
        return np.array([w[-2] if len(w) > 1 else w[-1] for w in widths], np.int32)


class LaneFrontier(NamedTuple):
    """The state that a policy for lanes sees; somebody waits.

    Attributes:
      blocks: the program, and the steps to choose from.
      waiting: int32[B], how many lanes wait at each block.
    """

    blocks: LaneBlocks
    waiting: Array

    @property
    def xp(self) -> Any:
        """`jax.numpy`, whose operations policies are written in."""
        return jnp

    @property
    def taken(self) -> Array:
        """int32[K], how many lanes each step would take."""
        width = np.array(self.blocks.width, np.int32)
        return jnp.minimum(self.waiting[np.array(self.blocks.block)], width)

    @property
    def lost(self) -> Array:
        """int32[K], what each step costs above the shares of its lanes, in the unit of costs.

        The share of a lane is that of the cheapest step of its block, were it as full as the lanes
        that are left could fill it. A step that nobody waits for loses more than any other.
        """
        taken = self.taken
        left = self.waiting.sum(dtype=np.int32)
        width = np.array(self.blocks.width, np.int32)
        share = self.blocks.costs // jnp.maximum(jnp.minimum(width, left), 1)
        least = jnp.where(self.blocks.same_block, share[None, :], LARGEST_COST).min(1)
        return jnp.where(taken > 0, self.blocks.costs - taken * least, np.int32(2**31 - 1))

    def step_of(self, block: Array) -> Array:
        """Returns the step of a block that costs least for each lane it takes.

        Args:
          block: a number from 0 to B - 1.

        Returns:
          A number from 0 to K - 1.
        """
        price = self.blocks.costs // jnp.maximum(self.taken, 1)
        is_here = np.array(self.blocks.block, np.int32) == block
        return jnp.where(is_here, price, np.int32(2**31 - 1)).argmin()


LanePolicy = Callable[[LaneFrontier], Array]


def least_loss(frontier: LaneFrontier) -> Array:
    """The step that loses least, the first of equals.

    A lane's share of a step that is as full as can be is r, the least (S + W c) / min(W, lanes
    left) over the widths of its block. With n lanes a step loses S + W c - n r: so full steps come
    first, and a block with little work waits until many have met.

    Args:
      frontier: how many lanes wait.

    Returns:
      The number of a step.
    """
    return frontier.lost.argmin()


def most_lanes(frontier: LaneFrontier) -> Array:
    """The block at which most lanes wait, the first of equals (Radul et al. 2020).

    Args:
      frontier: how many lanes wait.

    Returns:
      The number of a step: of this block the one that costs least for each lane it takes.
    """
    return frontier.step_of(frontier.waiting.argmax())


def next_step(policy: LanePolicy, frontier: LaneFrontier) -> Array:
    """Returns the step that a policy chooses, or that of `least_loss`.

    The latter where the policy names none, by a negative number, or one that nobody waits for.
    """
    if policy is least_loss:
        return least_loss(frontier)
    step = _whole_number(policy, frontier)
    known = jnp.clip(step, 0, len(frontier.blocks.block) - 1)
    return jnp.where((step == known) & (frontier.taken[known] > 0), known, least_loss(frontier))


def _whole_number(policy: LanePolicy, frontier: LaneFrontier) -> Array:
    """Returns what a policy chooses, or raises `TypeError` if that is no number of a step."""
    step = policy(frontier)
    if np.ndim(step) or not np.issubdtype(getattr(step, "dtype", type(step)), np.integer):
        raise TypeError(
            f"the lane policy {checks.brief(policy)} returned {checks.shown(step)}; expected the "
            "number of a step, such as `frontier.step_of(place)`, or -1 for none."
        )
    return jnp.asarray(step, np.int32)


def checked_lane_policy(policy: object) -> LanePolicy:
    """The policy, or a `TypeError` if it is none."""
    if callable(policy) and not isinstance(policy, type):
        return policy
    raise TypeError(
        f"got lane_policy={checks.brief(policy)}; expected a callable from a `LaneFrontier` to the "
        "number of a step, such as `jedbatch.policies.most_lanes`."
    )
