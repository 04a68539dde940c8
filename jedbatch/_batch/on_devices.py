"""Minibatches over several devices: what `plan`, `apply` and `warm` do with a mesh."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jedbatch import checks
from jedbatch._batch.agreement import ENDED, FAILED, READY, Agreement, agree_to_begin
from jedbatch._program.host_arrays import results_from
from jedbatch._program.plan import Plan
from jedbatch._program.sharded import DeviceAxis
from jedbatch._session.core import Core
from jedbatch._session.plans.pipeline import checked_inputs
from jedbatch._session.plans.shards import (
    PlacedShards,
    arrange_shards,
    check_inputs,
    filled,
    place_shards,
    plan_shards,
    reserve_shards,
    run_on_devices,
)
from jedbatch._session.session import Minibatch
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
    devices = DeviceAxis(mesh, names)
    if devices.num_processes not in (1, jax.process_count()):
        raise ValueError(
            f"`{name}` got a mesh with devices of {devices.num_processes} of "
            f"{jax.process_count()} processes; expected devices of all, or of this one alone."
        )
    if devices.num_processes > 1:
        assert jax.process_index() in devices.owners  # or it raises an error
    return devices


def plan_on_devices(
    core: Core, shared: tuple, instances: list[tuple], gradient: bool, devices: DeviceAxis
) -> Plan:
    """Returns the plan of a minibatch that is cut over devices; see `Batched.plan`.

    Raises:
      ValueError: there are fewer instances than devices, or the function reads values of an outer
        transformation.
    """
    if devices.num_processes > 1:
        found = agreed_plan(core, Proposal.of(core, shared, instances, gradient, devices))
        assert found is not None
        return found
    check_number("plan", core.name, len(instances), devices)
    with core.planning:
        minibatch = _recorded(core, shared, instances, devices)
        plan = plan_shards(minibatch, devices, gradient=gradient)
        programs = minibatch.session.programs
        core.refuse_tracers(programs.reads_tracers(plan.static.signature))
        return plan


@dataclass(frozen=True, eq=False)
class Proposal:
    """A minibatch of this process that is laid out, before all processes agree on a program.

    Attributes:
      devices: of all processes.
      gradient: whether to plan the reverse too.
      minibatch: recorded; None if there is none.
      cut: the shards of this process.
      error: why there is none; None if that is since there are no more.
    """

    devices: DeviceAxis
    gradient: bool
    minibatch: Minibatch | None = None
    cut: PlacedShards | None = None
    error: Exception | None = None

    @staticmethod
    def of(
        core: Core,
        shared: tuple,
        instances: list[tuple],
        gradient: bool,
        devices: DeviceAxis,
    ) -> "Proposal":
        """Returns a minibatch laid out, or what went wrong."""
        try:
            check_number("plan", core.name, len(instances), devices)
            check_stacked(core)
            how = {"keeps": gradient, "reuse": bool(core.options.reuse)}
            with core.planning:
                minibatch = _recorded(core, shared, instances, devices)
                minibatch.session.note_types()
                cut = place_shards(minibatch, devices.num_own, **how)
                check_inputs(minibatch, cut)
        except Exception as error:  # for all processes to know
            return Proposal(devices, gradient, error=error)
        return Proposal(devices, gradient, minibatch, cut)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts on which all processes must agree, by the name that messages give them."""
        if self.minibatch is None:
            return {}
        registry, records = self.minibatch.session.registry, self.minibatch.records
        types = [value.aval.str_short() for value in registry.shared[: registry.num_leaves]]
        return {
            "the number of instances": len(records),
            "the shared arguments": f"{', '.join(types)} in {registry.structure}",
            "the results": f"{list(map(str, records[0].types))} in {records[0].structure}",
            "whether there are gradients": self.gradient,
            "the mesh": f"{self.devices} of {self.devices.size} places",
        }


def agreed_plan(core: Core, proposal: Proposal) -> Plan | None:
    """Returns the plan of a minibatch that all processes have their part of; None at the end.

    Raises:
      RuntimeError: another process could not plan its minibatch, or has ended.
      ValueError: processes disagree, or have different numbers of minibatches.
    """
    minibatch, cut, error = proposal.minibatch, proposal.cut, proposal.error
    state = READY if cut is not None else FAILED if error is not None else ENDED
    text = f"{type(error).__name__}: {checks.cut(error)}" if error is not None else ""
    has_more = agree_to_begin(core.name, state, proposal.facts, text)
    if error is not None:
        raise error
    if not has_more:
        return None
    assert minibatch is not None
    assert cut is not None
    with core.planning:
        programs = minibatch.session.programs
        agreement, devices = Agreement(programs, core.name), proposal.devices
        found, took = arrange_shards(
            minibatch, cut, devices, agreement.lower, gradient=proposal.gradient
        )
        plan = filled(minibatch, found, took, devices, gradient=proposal.gradient)
        core.refuse_tracers(programs.reads_tracers(plan.static.signature))
        return plan


def proposals(
    core: Core, rows: Iterator[list[Any]], gradient: bool, devices: DeviceAxis
) -> Iterator[Proposal]:
    """Yields the minibatches of this process, and at last that there are no more, or an error."""
    try:
        for row in rows:
            shared, instances = core.arguments.split(row)
            yield Proposal.of(core, shared, instances, gradient, devices)
    except Exception as error:
        yield Proposal(devices, gradient, error=error)
    else:
        yield Proposal(devices, gradient)


def agreed_plans(core: Core, made: Any) -> Iterator[Plan]:
    """Yields plans that all processes have agreed on, in the thread that runs them.

    Args:
      core: of the batched function.
      made: proposals, which another thread may have made.
    """
    with contextlib.closing(made):
        yield from iter(lambda: agreed_plan(core, next(made)), None)


def check_stacked(core: Core) -> None:
    """Raises an error if results are lists, of which other processes do not know the parts."""
    if core.out_axes is None:
        raise ValueError(
            f"the batched `{core.name}` returns a list of results, and the mesh has devices of "
            "several processes; expected results that stack, `out_axes=0`."
        )


def reserve_on_devices(
    core: Core,
    shared: tuple,
    minibatches: list[list[tuple]],
    gradient: bool,
    devices: DeviceAxis,
) -> dict[bool, list[Plan]]:
    """Plans of all minibatches after programs were made that do for each, by `gradient`."""
    size = len(minibatches[0])
    check_number("warm", core.name, size, devices)
    with core.planning:
        every = list(itertools.chain(*minibatches))  # at once: types depend on what was met
        parts = _recorded(core, shared, every, devices).cut(size)
        reserve_shards(parts, devices.num_own, gradient=gradient)
        return {
            wanted: [plan_on_devices(core, shared, m, wanted, devices) for m in minibatches]
            for wanted in sorted({False, gradient})
        }


def check_number(function: str, name: str, count: int, devices: DeviceAxis) -> None:
    """Raises an error if there are fewer instances than devices."""
    if count < devices.num_own:
        own = f", {devices.num_own} of them of this process" if devices.num_processes > 1 else ""
        raise ValueError(
            f"`{function}` got minibatches of {count} instances of the batched `{name}` for the "
            f"{devices.size} devices along {devices}{own}; expected at least one for each. Take "
            "larger minibatches, or a mesh of fewer devices."
        )


def _recorded(core: Core, shared: tuple, instances: list[tuple], devices: DeviceAxis) -> Minibatch:
    """Returns what was recorded, or an error if it cannot be cut."""
    minibatch = core.record_graphs(shared, instances, devices)
    core.refuse_tracers(minibatch.tracers)
    return minibatch


def apply_on_devices(core: Core, plan: Plan, leaves: Sequence[Leaf], inputs: Any) -> Any:
    """Returns the results of a plan of a minibatch that is cut over devices."""
    static, name = plan.static, f"the batched `{core.name}`"
    devices = static.devices
    assert devices is not None
    check_devices(name, devices, leaves)
    rows = checked_inputs(plan, inputs)
    pieces = run_on_devices(plan, leaves, rows, name)
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
