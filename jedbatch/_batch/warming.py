"""`Batched.warm`: what minibatches to come need is compiled ahead of time."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jedbatch import checks
from jedbatch._batch.calling import apply, call
from jedbatch._batch.on_devices import AxisNames, checked_devices, reserve_on_devices
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._program.plan import Plan
from jedbatch._ragged.calls import find_calls
from jedbatch._record.instances.arrays import array_type
from jedbatch._session.core import Core
from jedbatch._session.plans.pipeline import reserve_programs
from jedbatch._session.session import Session, graph_of
from jedbatch._support.samples import cut_evenly
from jedbatch._support.types import Leaf, PyTree


def warm(
    core: Core,
    args: tuple,
    batch_size: int | None,
    gradient: bool,
    calls: bool,
    mesh: Mesh | None,
    axis: AxisNames,
) -> Plan | None:
    """Compiles what minibatches to come need; see `Batched.warm`."""
    devices = checked_devices("warm", mesh, axis)
    checks.flag("warm", "gradient", gradient)
    checks.flag("warm", "calls", calls)
    if batch_size is not None:
        checks.whole("warm", "batch_size", batch_size, least=1)
    shared, instances = core.arguments.split(args)
    session, leaves = core.session(shared, devices)
    check_values(core.name, leaves)
    minibatches = cut_evenly(instances, batch_size or len(instances))
    plans: dict[bool, list[Plan]] | None
    if devices is not None:
        plans = reserve_on_devices(core, shared, minibatches, gradient, devices)
    else:
        plans = session.unless_decides(
            lambda read: reserve(core, session, minibatches, gradient, read)
        )
    planned = plans[gradient] if plans else None
    check_possible(core.name, leaves, planned, gradient, calls)
    if calls and plans:
        _apply_plans(core, shared, plans, gradient)
    if calls and devices is None:
        _call_with(core, shared, minibatches, plans, gradient, list)
        if core.arguments.stacked(args, 1):  # calls with rows of arrays are run otherwise
            _call_with(core, shared, minibatches, plans, gradient, stack_rows)
    return max(planned, key=num_lanes) if planned else None


def reserve(
    core: Core,
    session: Session,
    minibatches: list[list[tuple]],
    gradient: bool,
    read: Callable,
    stacked: bool | None = None,
) -> dict[bool, list[Plan]]:
    """Plans of all minibatches after programs were made that do for each, by `gradient`.

    Args:
      core: of the batched function.
      session: that keeps the programs.
      minibatches: the mapped arguments of each instance of each, as many in each.
      gradient: whether there will be gradients, too.
      read: what to call when the function decides on a value.
      stacked: whether results are stacked, and no list; None as the function has it.
    """
    with core.planning:
        every = list(itertools.chain(*minibatches))  # at once: types depend on what was met
        parts = []
        for minibatch in core.record(session, every, read).cut(len(minibatches[0])):
            records = minibatch.records
            graph, calls = graph_of(records), find_calls(records, minibatch.arrays)
            parts.append((graph, core.results(records, graph.outputs, calls, stacked), calls))
        reserve_programs(session, parts, core.policy, gradient=gradient)
        return {
            wanted: [core.lasting_plan(session, m, wanted, stacked) for m in minibatches]
            for wanted in sorted({False, gradient})
        }


def _apply_plans(core: Core, shared: tuple, plans: dict[bool, list[Plan]], gradient: bool) -> None:
    """Applies a plan of every program that minibatches need, and with `gradient` the reverse."""
    leaves, structure = core.arguments.leaves(shared)
    for plan in one_of_each(plans[False], plans[False]):
        apply(core, (*shared, plan))
    for plan in one_of_each(plans[True], plans[True]) if gradient else ():

        def apply_with(leaves: list[Leaf], inputs: Any, plan: Plan = plan) -> Any:
            return apply(core, (*jax.tree.unflatten(structure, leaves), plan), inputs)

        if moves(leaves):
            pull_back(functools.partial(apply_with, inputs=plan.inputs), leaves)
        else:
            pull_back(functools.partial(apply_with, leaves), plan.inputs)


def _call_with(
    core: Core,
    shared: tuple,
    minibatches: list[list[tuple]],
    plans: dict[bool, list[Plan]] | None,
    gradient: bool,
    form: Callable[[tuple], Any],
) -> None:
    """Calls the function for every program that minibatches need, and with `gradient` in reverse.

    Arguments have some `form`, made of their instances.
    """
    leaves, structure = core.arguments.leaves(shared)

    def run(leaves: list[Leaf], minibatch: list[tuple]) -> Any:
        columns = list(map(form, zip(*minibatch, strict=True)))
        return call(
            core, tuple(core.arguments.join(jax.tree.unflatten(structure, leaves), columns))
        )

    for minibatch in one_of_each(minibatches, plans[False]) if plans else minibatches:
        run(leaves, minibatch)
    if gradient and moves(leaves):
        for minibatch in one_of_each(minibatches, plans[True]) if plans else minibatches:
            pull_back(functools.partial(run, minibatch=minibatch), leaves)


def check_values(name: str, leaves: Sequence[Leaf]) -> None:
    """Raises an error if shared arguments are shapes or traced: programs are run on them.

    Args:
      name: of the function, for messages.
      leaves: of the shared arguments.
    """
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
            raise TypeError(
                f"`warm` got {checks.shown(leaf)} among the shared arguments of `{name}`; expected "
                "arrays, since programs are compiled for where these are. Call it outside of "
                "transformations of JAX, with parameters as they will be."
            )


def check_possible(
    name: str, leaves: Sequence[Leaf], plans: Sequence[Plan] | None, gradient: bool, calls: bool
) -> None:
    """Raises an error if there is nothing to plan, or nothing to take gradients with respect to.

    Args:
      name: of the function, for messages.
      leaves: of the shared arguments.
      plans: of minibatches; None if the function decides on values.
      gradient: as `Batched.warm` got it.
      calls: as it got that.
    """
    if plans is None and not calls:
        raise ValueError(
            f"`warm` got calls=False, and `{name}` decides on values, which are read while they "
            "are computed: there is no plan to apply. Leave `calls` out."
        )
    if gradient and not moves([leaves, [plan.inputs for plan in plans or ()]]):
        raise ValueError(
            f"`warm` got gradient=True, and neither the shared arguments of `{name}` nor its "
            "instances have floats; expected something to take gradients with respect to."
        )


def one_of_each(minibatches: Sequence[Any], plans: Sequence[Plan]) -> list[Any]:
    """Returns one minibatch for every program that their plans run."""
    chosen: dict[Any, Any] = {}
    for minibatch, plan in zip(minibatches, plans, strict=True):
        static = plan.static
        chosen.setdefault((static.signature, static.reverse, static.stages), minibatch)
    return list(chosen.values())


def num_lanes(plan: Plan) -> int:
    """Returns how many lanes a plan runs."""
    parts = plan.shards or (plan,)
    return sum(sum(part.host.counted.lanes) for part in parts if part.host is not None)


def pull_back(run: Callable[[Any], PyTree], values: PyTree) -> None:
    """Runs a function of arrays, and its reverse on zeros.

    Args:
      run: the function.
      values: a pytree of arrays, of which it is differentiated with respect to floats.
    """
    leaves, structure = jax.tree.flatten(values)
    moving = [i for i, x in enumerate(leaves) if has_gradient(array_type(x)[1])]

    def of_moving(moving_leaves: Sequence[Any]) -> PyTree:
        full = list(leaves)
        for i, x in zip(moving, moving_leaves, strict=True):
            full[i] = x
        return run(jax.tree.unflatten(structure, full))

    results, reverse = jax.vjp(of_moving, [jnp.asarray(leaves[i]) for i in moving])
    reverse(jax.tree.map(_zero_cotangent, results))


def _zero_cotangent(x: Any) -> Any:
    if has_gradient(x.dtype):
        return jnp.zeros_like(x)  # where the result is
    return np.zeros(x.shape, jax.dtypes.float0)


def moves(values: PyTree) -> bool:
    """Returns whether there is something to take gradients with respect to."""
    return any(has_gradient(array_type(x)[1]) for x in jax.tree.leaves(values))


def stack_rows(instances: Sequence[PyTree]) -> PyTree:
    """Returns the arrays whose rows some instances are."""

    def stacked(*rows: Any) -> Any:
        return np.stack(rows) if isinstance(rows[0], np.ndarray) else jnp.stack(rows)

    return jax.tree.map(stacked, *instances)
