"""Minibatches over several devices: what `plan`, `apply` and `warm` do with a mesh."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jedbatch import checks
from jedbatch._program.host_arrays import results_from
from jedbatch._program.plan import Plan
from jedbatch._program.returned import unstacked
from jedbatch._program.sharded import DeviceAxis
from jedbatch._ragged.calls import find_calls
from jedbatch._session.pipeline import checked_inputs
from jedbatch._session.session import Session
from jedbatch._session.shards import plan_shards, reserve_shards, run_on_devices
from jedbatch._support.types import Leaf

AxisNames = str | Sequence[str] | None


def checked_devices(name: str, mesh: Any, axis: AxisNames) -> DeviceAxis | None:
    """Returns the devices to cut minibatches over; None without a mesh.

    Args:
      name: of the public function that was given these, for messages.
      mesh: a `jax.sharding.Mesh`, or None.
      axis: a name of an axis of the mesh, or several; None for the only one.

    Raises:
      TypeError, ValueError: there is no such axis, or no mesh.
    """
    if mesh is None:
        if axis is not None:
            raise ValueError(
                f"`{name}` got axis={checks.brief(axis)} and no mesh; expected both, as in "
                f'`{name}(params, instances, mesh=jax.make_mesh((8,), ("data",)), axis="data")`.'
            )
        return None
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`{name}` got mesh={checks.shown(mesh)}; expected a `jax.sharding.Mesh` of devices, "
            'such as `jax.make_mesh((len(jax.devices()),), ("data",))`.'
        )
    if mesh.is_multi_process:
        raise ValueError(
            f"`{name}` got a mesh with devices of several processes; expected devices of this one, "
            "`jax.local_devices()`, since a process plans for its own devices alone."
        )
    known = f"{', '.join(f'{a!r} of {n} devices' for a, n in mesh.shape.items())}"
    if axis is None:
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"`{name}` got a mesh with the axes {known}, and no axis; expected the one over "
                f"which instances are cut, such as axis={mesh.axis_names[0]!r}."
            )
        axis = mesh.axis_names[0]
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    strangers = [x for x in names if x not in mesh.axis_names]
    if strangers or not names or len(set(names)) < len(names):
        raise ValueError(
            f"`{name}` got axis={checks.brief(axis)}; expected an axis of the mesh, or different "
            f"ones: it has {known}."
        )
    return DeviceAxis(mesh, names)


def plan_on_devices(
    batched: Any, session: Session, instances: list[tuple], gradient: bool, devices: DeviceAxis
) -> Plan:
    """Returns the plan of a minibatch that is cut over devices; see `Batched.plan`.

    Raises:
      ValueError: there are fewer instances than devices, arrays differ in length and do not run as
        tiles, or the function reads values of an outer transformation.
    """
    check_number("plan", batched._name, len(instances), devices)
    with batched._planning:
        start = time.perf_counter()
        records, arrays, num_known = _recorded(batched, session, instances)
        plan = plan_shards(
            session,
            records,
            arrays,
            batched._results,
            batched._policy,
            batched._options,
            devices,
            gradient=gradient,
            seconds={"trace": time.perf_counter() - start},
            num_known=num_known,
        )
        batched._refuse_tracers(session.programs.reads_tracers(plan.static.signature))
        return plan


def reserve_on_devices(
    batched: Any,
    session: Session,
    minibatches: list[list[tuple]],
    gradient: bool,
    devices: DeviceAxis,
) -> dict[bool, list[Plan]]:
    """Plans of all minibatches after programs were made that do for each, by `gradient`."""
    size = len(minibatches[0])
    check_number("warm", batched._name, size, devices)
    with batched._planning:
        every = list(itertools.chain(*minibatches))  # at once: types depend on what was met
        records, _, _ = _recorded(batched, session, every)
        reserve_shards(
            session,
            [records[i : i + size] for i in range(0, len(records), size)],
            batched._results,
            batched._policy,
            batched._options,
            devices.size,
            gradient=gradient,
        )
        return {
            wanted: [plan_on_devices(batched, session, m, wanted, devices) for m in minibatches]
            for wanted in sorted({False, gradient})
        }


def check_number(function: str, name: str, count: int, devices: DeviceAxis) -> None:
    """Raises an error if there are fewer instances than devices."""
    if count < devices.size:
        raise ValueError(
            f"`{function}` got minibatches of {count} instances of the batched `{name}` for the "
            f"{devices.size} devices along {devices}; expected at least one for each. Take larger "
            "minibatches, or a mesh of fewer devices."
        )


def _recorded(batched: Any, session: Session, instances: list[tuple]) -> tuple[Any, Any, int]:
    """Returns records, arrays, and how many were known, or an error if they cannot be cut."""
    records, arrays, tracers, num_known, _ = batched._record(session, instances)
    batched._refuse_tracers(tracers)
    if find_calls(records, arrays):
        raise ValueError(
            f"instances of the batched `{batched._name}` have arrays that differ in length, whose "
            "rows are packed one after the other, which is not done over several devices. Leave "
            "out the mesh, pad these arrays to one length, or make lists of arrays of one shape "
            "of them, `list(array)`, which may differ in length."
        )
    return records, arrays, num_known


def apply_on_devices(batched: Any, plan: Plan, leaves: Sequence[Leaf], inputs: Any) -> Any:
    """Returns the results of a plan of a minibatch that is cut over devices."""
    static, name = plan.static, f"the batched `{batched._name}`"
    devices = static.devices
    assert devices is not None
    check_devices(name, devices, leaves)
    rows = checked_inputs(plan, inputs)
    pieces = run_on_devices(plan, leaves, rows, name)
    if static.results.batch is None:  # each has all rows of an arena
        pieces = tuple([row for piece in x for row in unstacked(piece)] for x in pieces)
    return results_from(static.results, static.signature, pieces)


def check_devices(name: str, devices: DeviceAxis, leaves: Sequence[Leaf]) -> None:
    """Raises an error if shared arguments are bound to other devices than those of the mesh."""
    mesh = set(devices.mesh.devices.flat)
    for x in leaves:
        is_bound = isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed
        if is_bound and x.sharding.device_set != mesh:
            raise ValueError(
                f"`apply` got a shared argument {checks.brief(jax.typeof(x))} of {name} on "
                f"{_listed(x.sharding.device_set)}, and a plan for a mesh of "
                f"{_listed(mesh)}; expected it on the devices of the mesh. Write "
                "`jax.device_put(params, NamedSharding(mesh, PartitionSpec()))`, or with the "
                "axes over which it is cut."
            )


def _listed(devices: Any) -> str:
    names = sorted(map(str, devices))
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return ", ".join(names if not more else names[:3]) + more
