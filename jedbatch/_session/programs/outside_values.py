"""`OutsideValues`: what programs read besides instances: shared arguments, arrays from outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray, Tracer

from jedbatch._record.identity.environment import AccessPath, Environment
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import Leaf


@dataclass(eq=False)
class OutsideValues:
    """Values that the kernels of a structure of shared arguments read besides operands.

    Attributes:
      registry: the values, by id.
      environment: what the function reads besides its arguments; None if that does not change.
    """

    registry: Registry
    environment: Environment | None

    def read(self, closed_over: Sequence[int], leaves: Sequence[Leaf], tracers: Any) -> list[Any]:
        """Returns leaves of shared arguments, and closed-over values (see `SharedValue`)."""
        values = list(leaves)
        for index in closed_over:
            value = self.registry.shared[index]
            if value.tracer is None:
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
