"""Calls of a batched function: of rows of arrays, inside of another, in rounds, or planned.

What a call decides before a program runs, and who does what follows:

    Batched.__call__
      `call`
        runs without `jax.jit`?        plain_loop        the loop, line by line on values
        rows of arrays?                _run_mapped       one structure, as `jax.vmap` runs it
        inside of another function?    put_together      recorded with the instances of that one
        decides on values?             run_stepwise      rounds: compute, decide, go on
        else                           Core.plan         and `Core.run` of the plan
      Core.plan
        all instances known?           Recording.recall  their graphs
        else                           Recording.find    Python records those that are new
        planned together before?       plan_again        the tables of then, with these inputs
        do structures recur?           plan_copies       each is planned once
        else                           make_plan         schedule, place, lower
      Core.run                         run_plan          one XLA program

`plan` and `apply` are the two halves of a call that is planned.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from jedbatch import checks
from jedbatch._batch.nested import plain_loop, put_together
from jedbatch._batch.on_devices import apply_on_devices, plan_on_devices
from jedbatch._control_flow.rounds import Stepwise
from jedbatch._jaxpr.configuration import differences, runs_without_jit
from jedbatch._jaxpr.derivatives import reverse_mode_only
from jedbatch._jaxpr.meshes import varies
from jedbatch._program.plan import Plan
from jedbatch._program.sharded import DeviceAxis
from jedbatch._record.cell import recording
from jedbatch._record.operations.failures import named
from jedbatch._session.core import Core
from jedbatch._session.plans.pipeline import checked_inputs, programs_of
from jedbatch._session.plans.round import Round, Rounds
from jedbatch._session.programs.mapped import MIN_ROWS, MappedProgram
from jedbatch._session.programs.program_cache import ProgramCache
from jedbatch._session.records.arguments import StackedInstances
from jedbatch._session.records.recording import arrays_of
from jedbatch._session.session import Session
from jedbatch._support.types import Leaf

DECIDES = (
    "it decides on values, which Python reads while they are computed: that has reverse mode only"
)
MOST_LEAVES = 4  # of shared arguments that an error names


def call(core: Core, args: tuple) -> Any:
    """Runs the function on all instances, and counts steps if it is to.

    Where JAX traces the call, nothing has run yet, and nothing is said.
    """
    counter, before = core.options.counter, core.last_rounds
    if counter is None:
        return _call(core, args)
    counter.begin()
    results = _call(core, args)
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(results))
    if core.last_rounds is not before and not is_traced:
        core.last_rounds.lane_steps = counter.result()
    return results


def _call(core: Core, args: tuple) -> Any:
    if recording.recorder is None and runs_without_jit():
        core.last_rounds = Rounds()
        return plain_loop(core, args)
    if (results := _run_mapped(core, args)) is not None:
        return results
    shared, instances = core.arguments.split(args)
    if recording.recorder is not None:  # what instances of both functions do is batched
        join = functools.partial(core.arguments.join, shared)
        calls = [functools.partial(core.fn, *join(x)) for x in instances]
        return put_together(core, recording.recorder.together(calls))
    session, leaves = core.session(shared)
    plan = session.unless_decides(
        lambda read: core.plan(session, instances, gradient=False, leaves=leaves, read=read)
    )
    if plan is None:
        return run_stepwise(core, session, leaves, instances)
    assert plan.host is not None
    took = sum(plan.host.seconds.values())
    rounds = [Round.of(plan.host.counted.layout, 0, took)]
    core.last_rounds = Rounds.of(rounds, session.forms)
    return core.run(plan, leaves, plan.inputs)


def _run_mapped(core: Core, args: tuple) -> Any:
    """Runs the function on rows of arrays; None if instances are to be planned one by one."""
    planned = recording.recorder is not None or core.options.plans
    if planned or (instances := core.arguments.stacked(args, MIN_ROWS)) is None:
        return None
    if varies((instances.shared, instances.arrays)):
        return None
    session, leaves = core.session(instances.shared)
    start = time.perf_counter()
    with core.planning:
        program = _mapped_program(core, session, instances)
    if program is None:
        return None
    results = program(leaves, instances.arrays, stack=core.stacks)
    rounds = [program.round(instances.num_rows, time.perf_counter() - start)]
    core.last_rounds = Rounds.of(rounds, session.forms)
    return results


def _mapped_program(
    core: Core, session: Session, instances: StackedInstances
) -> MappedProgram | None:
    """Returns the program for rows of arrays; None if they are to be planned one by one."""
    key = session.mapped_key(core.environment.look().number, instances)
    program = None if key is None else session.mapped_again.get(key)
    if program is not None:
        return program if program.takes(instances.arrays) else None
    rows, arguments = instances.first()
    recorded = session.unless_decides(lambda read: core.record(session, [arguments], read))
    if recorded is None or recorded.tracers:  # it closes over values of an outer transformation
        return None
    (record,), (arrays,) = recorded.records, recorded.arrays
    program = session.mapped_program(record, arrays, rows, instances)
    if program is not None and recorded.num_known:
        key = session.mapped_key(recorded.reached.number, instances)
        if key is not None:
            session.mapped_again[key] = program
    return program


def run_stepwise(
    core: Core,
    session: Session,
    leaves: list[Leaf],
    instances: list[tuple],
    *,
    on_host: bool = False,
    check: Callable[[], object] | None = None,
) -> Any:
    """Runs the function where it decides on values.

    Args:
      core: of the function.
      session: for its shared arguments.
      leaves: of these.
      instances: the mapped arguments of each.
      on_host: whether results are a list of arrays of NumPy.
      check: is called before each round, and may raise an error to end the call.
    """
    with core.planning:
        arrays = arrays_of(instances, core.recording.classes)
        core.environment.meet(core.recording.classes)
        stepwise = Stepwise(core, session, instances, on_host, check)
        compiled = session.programs.compilations
        before = compiled["round"]
        try:
            with core.reading(session) as reached:
                with reverse_mode_only(f"the batched `{core.name}`", DECIDES):
                    results = stepwise.run(leaves, arrays, reached)
                pairs = zip(stepwise.padded, arrays, strict=True)
                by_shapes = [x for own, x in pairs if own is None or not own.lengths]
                session.note_rounds(by_shapes, compiled["round"] - before)
                return results
        finally:
            core.last_rounds = Rounds.of(stepwise.rounds, session.forms)


def plan(core: Core, args: tuple, gradient: bool, devices: DeviceAxis | None = None) -> Plan:
    """Returns a plan that can be kept; see `Batched.plan`."""
    shared, instances = core.arguments.split(args)
    if devices is not None:
        return plan_on_devices(core, shared, instances, gradient, devices)
    session, _ = core.session(shared)
    return core.lasting_plan(session, instances, gradient)


def apply(core: Core, args: tuple, inputs: dict[str, Any] | None = None) -> Any:
    """Runs a plan, the last argument; see `Batched.apply`."""
    if not args:
        raise TypeError(
            "`apply` got no arguments; expected the shared ones and then a plan, as in "
            "`batched.apply(params, batched.plan(params, instances))`."
        )
    *shared, plan = args
    if not isinstance(plan, Plan):
        raise TypeError(
            f"`apply` got {checks.shown(plan)} as its last argument; expected a plan, as in "
            "`batched.apply(params, batched.plan(params, instances))`."
        )
    of_plan = programs_of(plan)  # which may have been forgotten
    session, leaves = core.session(tuple(shared), plan.static.devices, of_plan.options.packs)
    if of_plan.environment is not core.environment:
        raise ValueError(
            f"`apply` of the batched `{core.name}` got a plan that another batched function "
            "made; make one with its own `plan(*shared, instances)`."
        )
    if of_plan.configuration != session.programs.configuration:
        raise ValueError(
            f"`apply` of the batched `{core.name}` got a plan that was made while JAX was "
            "configured in another way: "
            f"{differences(of_plan.configuration, session.programs.configuration)}. Make a "
            "new one with `plan(*shared, instances)`, or set the option as it was."
        )
    if of_plan.key != session.programs.key:
        raise ValueError(
            f"`apply` of the batched `{core.name}` got other shared arguments than the plan was "
            f"made for: {_differences(core, of_plan, session.programs)}; make a new one "
            "with `plan(*shared, instances)`."
        )
    inputs = plan.inputs if inputs is None else inputs
    if plan.static.devices is not None:
        return apply_on_devices(core, plan, leaves, inputs)
    return core.run(plan, leaves, checked_inputs(plan, inputs))


def _differences(core: Core, of_plan: ProgramCache, given: ProgramCache) -> str:
    """Says in which leaves shared arguments differ from those of a plan."""
    old, new = of_plan.registry.leaf_types, given.registry.leaf_types
    axes = core.arguments.axes
    pairs = zip(named(core.fn, axes), axes, strict=True) if isinstance(axes, tuple) else ()
    names = [name for (name, _), axis in pairs if axis is None]
    found = []
    for path in [*old, *(path for path in new if path not in old)]:
        leaf = f"{names[path[0].idx]}{jax.tree_util.keystr(path[1:])}"
        if path not in new:
            found.append(f"{leaf} is missing, the plan has {old[path]}")
        elif new[path] != old.get(path):
            found.append(f"{leaf}: {new[path]}, the plan has {old.get(path, 'none')}")
    if not found and of_plan.target != given.target:
        return (
            f"they are for the target {given.target.name!r}, the plan for {of_plan.target.name!r}"
        )
    more = [f"and {len(found) - MOST_LEAVES} more"] * (len(found) > MOST_LEAVES)
    return "; ".join(found[:MOST_LEAVES] + more) or "containers or functions in them are others"
