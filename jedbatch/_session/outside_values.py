"""`OutsideValues`: what programs read besides instances: shared arguments, and arrays from outside.

The table of a policy for lanes is one of them. It is an array like others that a function closes
over, and another one may take its place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer

from jedbatch._jaxpr.program_counters import LaneRule
from jedbatch._kernel.target import Target, lane_rule
from jedbatch._record.environment import AccessPath, Environment
from jedbatch._record.registry import Registry
from jedbatch._schedule.lane_fsm import LaneFSM, by_table
from jedbatch._schedule.lane_policies import LanePolicy
from jedbatch._support.types import Array, Leaf


class OutsideValues:
    """Values that the kernels of a structure of shared arguments read besides operands.

    Attributes:
      registry: the values, by id.
      environment: what the function reads besides its arguments; None if that does not change.
      lane_policy: which block runs next where nodes are at different places of a program.
      lane_table: int32[...], the table of that policy; None if it has none.
      lane_table_id: its id among the values; None if there is none.
    """

    def __init__(
        self, registry: Registry, environment: Environment | None, lane_policy: LanePolicy
    ):
        self.registry, self.environment = registry, environment
        self.lane_policy = lane_policy
        self.lane_table: Array | None = None
        self.lane_table_id: int | None = None
        if isinstance(lane_policy, LaneFSM):
            self.lane_table = jnp.asarray(lane_policy.table)
            self.lane_table_id = registry.closed_over(self.lane_table)

    def lane_rule(self, target: Target) -> LaneRule:
        """Returns how lanes run, whatever is in the table."""
        policy = self.lane_policy if self.lane_table is None else by_table
        return dataclasses.replace(lane_rule(target), policy=policy)

    def use_lane_policy(self, policy: LaneFSM) -> None:
        """Has programs that read a table read that of another machine; nothing is compiled."""
        index = self.lane_table_id
        if index is None:
            return
        self.lane_policy, self.lane_table = policy, jnp.asarray(policy.table)
        shared = self.registry.shared
        shared[index] = dataclasses.replace(shared[index], array=self.lane_table)

    def read(
        self,
        closed_over: Sequence[int],
        leaves: Sequence[Leaf],
        tracers: Any,
        lane_table: Array | None = None,
    ) -> list[Any]:
        """Returns leaves of shared arguments, and closed-over values (see `SharedValue`).

        `lane_table` is that of a plan, in place of the one in use now.
        """
        values = list(leaves)
        for index in closed_over:
            value = self.registry.shared[index]
            if lane_table is not None and index == self.lane_table_id:
                values.append(lane_table)
            elif value.tracer is None:
                values.append(value.array)
            elif isinstance(value.tracer, AccessPath) and not isinstance(tracers, dict):
                values.append(self.reach(index))
            else:
                values.append(tracers[value.tracer])
        return values

    def reach(self, index: int) -> Any:
        """The array that the function closes over and that is a shared value.

        Raises `ValueError` if it is not where it was, or another one.
        """
        array, aval = self._found(index), self.registry.shared[index].aval
        if not _fits(array, aval):
            raise ValueError(
                f"a plan reads an array {aval.str_short()} that the function closes over, "
                f"and found {array!r} in its place; make a new plan when such arrays change in "
                "shape or are moved, or pass them as shared arguments."
            )
        return array

    def has(self, shared_ids: Sequence[int]) -> bool:
        """Returns whether all is there that some shared values are made of, and no tracer."""
        shared = self.registry.shared
        reads = self.registry.prologue([shared_ids])[1]
        arrays = [(i, self._found(i)) for i in reads if isinstance(shared[i].tracer, AccessPath)]
        return all(_fits(x, shared[i].aval) and not isinstance(x, Tracer) for i, x in arrays)

    def _found(self, index: int) -> Any:
        """Returns the object now at the end of a shared value's way; None if there is none."""
        way = self.registry.shared[index].tracer
        return (
            self.environment.follow(way)
            if self.environment and isinstance(way, AccessPath)
            else None
        )


def _fits(x: Any, aval: ShapedArray) -> bool:
    return isinstance(x, jax.Array) and (x.shape, x.dtype) == (aval.shape, aval.dtype)
