"""`DeviceAxis` and `Route`: minibatches that are cut over the devices of an axis of a mesh.

A shard is a minibatch for one device. All shards share a program, and the schedule of each is data:
their tables lie on top of each other along a new first axis, which is cut over the devices. Shards
may have instances of different numbers, so that their costs are about the same. Each returns as
many rows as any may, and a `Route` says which of these are results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jedbatch._kernel.target import Target, target_of_platform
from jedbatch._support.types import Array

if TYPE_CHECKING:
    from jaxtyping import Int32

MAX_SHARE = 2  # instances that a shard may have, in shares that would be equal


@dataclass(frozen=True)
class DeviceAxis:
    """Axes of a mesh over whose devices minibatches are cut.

    Attributes:
      mesh: the devices.
      names: of the axes, in the order in which shards follow one another.
    """

    mesh: Mesh
    names: tuple[str, ...]

    @functools.cached_property
    def size(self) -> int:
        """The number of shards."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @functools.cached_property
    def spec(self) -> PartitionSpec:
        """How arrays are cut that have a first axis of shards."""
        return PartitionSpec(self.names)

    @functools.cached_property
    def cut(self) -> NamedSharding:
        """Where arrays are that have a first axis of shards."""
        return NamedSharding(self.mesh, self.spec)

    @functools.cached_property
    def everywhere(self) -> NamedSharding:
        """Where arrays are that all devices have."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def owners(self) -> tuple[int, ...]:
        """The process of each shard, in order.

        Raises:
          ValueError: devices of a shard belong to several processes, or processes do not follow one
            another with as many shards each.
        """
        places = [self.mesh.axis_names.index(name) for name in self.names]
        devices = np.moveaxis(self.mesh.devices, places, range(len(places)))
        rows = devices.reshape(self.size, -1).tolist()
        owners = [{device.process_index for device in row} for row in rows]
        if any(len(x) > 1 for x in owners):
            raise ValueError(
                f"a mesh has devices of several processes in one place along {self}; expected each "
                "process to have whole places, since it plans for its own devices alone."
            )
        found = tuple(x for (x,) in owners)
        counts = {found.count(x) for x in found}
        if found != tuple(sorted(found)) or len(counts) > 1:
            raise ValueError(
                f"a mesh has places along {self} of the processes {found}; expected the processes "
                "one after the other, with equally many places each, as in `jax.make_mesh`."
            )
        return found

    @functools.cached_property
    def num_processes(self) -> int:
        """The number of processes whose devices these are."""
        return len({device.process_index for device in self.mesh.devices.flat})

    @functools.cached_property
    def num_own(self) -> int:
        """The number of shards of this process."""
        return self.size // self.num_processes

    @property
    def is_typed(self) -> bool:
        """Whether axes of the mesh are explicit, so that types of arrays say how they are cut."""
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def target(self) -> Target:
        """Returns the target of its devices."""
        return target_of_platform(self.mesh.devices.flat[0].platform)

    def __str__(self) -> str:
        return " × ".join(f"{name} ({self.mesh.shape[name]})" for name in self.names)


class Route(NamedTuple):
    """Which of the rows that shards return are rows of results.

    With N rows of results and S shards that return C rows each:

    Attributes:
      order: int32[N], for each row of the results its position among those of all shards; zeros if
        these are of several processes, which know of their own alone.
      rows: int32[S, C], for each row that a shard returns the row of the results it is; N if none.
    """

    order: Int32[np.ndarray, " N"]
    rows: Int32[np.ndarray, "S C"]

    @staticmethod
    def of(count: int, parts: Sequence[np.ndarray], room: int) -> Route:
        """Returns the route of so many rows of results, of which shards return some each.

        Args:
          count: rows of results.
          parts: for each shard the rows of the results that it returns, in its order.
          room: rows that every shard returns.
        """
        rows = np.full((len(parts), room), count, np.int32)
        order = np.zeros(count, np.int32)
        for s, part in enumerate(parts):
            rows[s, : len(part)] = part
            order[part] = s * room + np.arange(len(part))
        return Route(order, rows)


def most_instances(count: int, num_shards: int) -> int:
    """Returns how many of so many instances a shard may have, and returns results for."""
    return min(count, MAX_SHARE * -(-count // num_shards))


def stacked_shards(arrays: Sequence[Array]) -> Array:
    """Returns the arrays of shards, of one shape and traced or not, along a new first axis."""
    if any(isinstance(x, Tracer) for x in arrays):
        return jax.numpy.stack(arrays)
    return np.stack(arrays)


def put_cut(devices: DeviceAxis, arrays: Any) -> Any:
    """Returns a pytree of arrays that have a first axis of shards, each part on its device."""
    return jax.tree.map(lambda x: x if isinstance(x, Tracer) else _put(devices.cut, x), arrays)


def put_everywhere(devices: DeviceAxis, arrays: Any) -> Any:
    """Returns a pytree of arrays on all devices."""
    return jax.tree.map(lambda x: _put(devices.everywhere, x), arrays)


def gathered(devices: DeviceAxis, values: Sequence[Any]) -> list[Any]:
    """Returns values such that all devices have the whole of each, as far as types say it.

    Types do where axes of the mesh are explicit; elsewhere XLA sees to it.
    """
    if not devices.is_typed:
        return list(values)
    return [
        jax.sharding.reshard(x, devices.everywhere)
        if any(part is not None for part in jax.typeof(x).sharding.spec)
        else x
        for x in values
    ]


def on_all_processes(devices: DeviceAxis, values: Sequence[Any]) -> list[Any]:
    """Returns values of which those that only this process knows are constants, alike in all.

    Arrays that a function closes over are on a device of each process.
    """
    if devices.num_processes == 1:
        return list(values)
    return [
        np.asarray(x)
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable
        else x
        for x in values
    ]


def _put(sharding: NamedSharding, array: np.ndarray) -> jax.Array:
    with jax.ensure_compile_time_eval():
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        if sharding.is_fully_replicated:
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.make_array_from_process_local_data(sharding, array)
