"""A recorded minibatch as a plan, and what running a plan gives.

    Graph ─schedule→ Schedule ─layout→ lanes ─lower→ tables ─run→ rows

This is what `batch` and `lazy` have in common, from the graph they recorded to the rows that their
results are made of.
"""

import functools
import operator
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._jaxpr.configuration import any_traced
from jedbatch._jaxpr.derivatives import reverse_mode_only
from jedbatch._jaxpr.transfers import handed_over
from jedbatch._program.differentiable import Differentiable
from jedbatch._program.host_arrays import Assembly, assemble
from jedbatch._program.lower import Lowered
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.placement import Placement
from jedbatch._program.plan import Host, Plan, Static, input_name
from jedbatch._program.pullback import Pullback, refuse_derivative
from jedbatch._program.returned import told_apart
from jedbatch._program.signature import Signature
from jedbatch._program.stopped import check_plan, has_bounds
from jedbatch._program.verify import is_wanted
from jedbatch._ragged.calls import (
    RegionCalls,
    Targets,
    find_calls,
    find_targets,
    make_ragged_calls,
    returns_ragged,
)
from jedbatch._ragged.padded_records import counter_of_padded
from jedbatch._ragged.regions import Region, some_are_ragged
from jedbatch._record.instances.arrays import is_array
from jedbatch._schedule.policy import Policy, schedule
from jedbatch._schedule.schedule import Schedule
from jedbatch._session.plans.indices import check_rows
from jedbatch._session.plans.outputs import Returned
from jedbatch._session.plans.verify import verify
from jedbatch._session.programs.program_cache import ProgramCache
from jedbatch._session.records.degenerate import (
    warn_if_degenerate,
    warn_if_many_lengths,
    warn_if_programs_grow,
)
from jedbatch._session.session import Flags, Minibatch, Session, graph_of
from jedbatch._support.types import Leaf

STAGES = ("merge", "schedule", "layout", "lower")


class Arranged(NamedTuple):
    """A minibatch in order: all of its plan but the values of its inputs.

    Attributes:
      records: of the instances.
      form: how values that arenas return become results.
      signature: of the program.
      placed: what has the kernels, batches and lanes of the minibatch.
      table: what the program reads.
      made: the minibatch as the program runs it, or what makes it when somebody looks at it.
      targets: where the graph reads results of regions (see `find_targets`).
      reverse, reverse_table: of the program that pulls cotangents back; None if there is none.
      assembly: of inputs; None as long as these instances have come once.
    """

    records: Sequence[Record]
    form: OutputSpec
    signature: Signature
    placed: Placement
    table: np.ndarray
    made: Lowered | Callable[[], Lowered]
    targets: Targets
    reverse: ReverseSignature | None = None
    reverse_table: np.ndarray | None = None
    assembly: Assembly | None = None

    @staticmethod
    def of(
        records: Sequence[Record],
        form: OutputSpec,
        lowered: Lowered,
        reverse: ReverseSignature | None = None,
        reverse_table: np.ndarray | None = None,
    ) -> "Arranged":
        """Returns a minibatch that is lowered."""
        parts = lowered.signature, lowered.placed, lowered.table, lowered
        targets = find_targets(records, lowered.placed)
        return Arranged(records, form, *parts, targets, reverse, reverse_table)

    @property
    def programs(self) -> list[tuple[Signature, Placement]]:
        """The programs that run it, and for what each."""
        return [(self.signature, self.placed)]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, about."""
        parts = [self.table, self.reverse_table, self.assembly]
        return 4 * self.placed.graph.nbytes + sum(x.nbytes for x in parts if x is not None)

    def again(self, records: Sequence[Record]) -> "Arranged":
        """Returns the same for instances of the same structures."""
        if list(records) == list(self.records):
            return self
        made = functools.partial(_with_inputs_of, records, self.made)
        return self._replace(records=records, made=made, assembly=None)


def _with_inputs_of(records: Sequence[Record], lowered: Any) -> Lowered:
    """Returns what was made of instances of the same structures, with the inputs of these."""
    placed, layout = lowered.placed, lowered.placed.layout
    graph = replace(layout.graph, inputs=graph_of(records).inputs)
    return replace(lowered, placed=replace(placed, layout=replace(layout, graph=graph)))


def arrange(
    minibatch: Minibatch,
    graph: Graph,
    returned: Returned,
    flags: Flags,
    brought: Collection[Hashable] | None,
    given: tuple[Schedule, np.ndarray | None] | None = None,
) -> tuple[Arranged, list[float]]:
    """Returns a graph scheduled, laid out and lowered, and when each was done; see `make_plan`."""
    session, form = minibatch.session, returned[1]
    clock = [time.perf_counter()]
    batches, node = given or (schedule(graph, minibatch.policy), None)
    clock.append(time.perf_counter())
    placed = session.programs.place(graph, batches, returned, node=node, keeps=flags.keeps)
    clock.append(time.perf_counter())
    leaves = [told_apart(placed, form) or None] if flags.gradient else None
    (lowered,), reverse, tables = session.programs.lower([placed], leaves, brought)
    return Arranged.of(minibatch.records, form, lowered, reverse, *tables), clock


def make_plan(
    minibatch: Minibatch,
    graph: Graph,
    returned: Returned,
    flags: Flags,
    *,
    brought: Collection[Hashable] | None = None,
    calls: Sequence[RegionCalls] = (),
    batches: tuple[Schedule, np.ndarray | None] | None = None,
    begun: float | None = None,
) -> Plan:
    """Plans a minibatch.

    Args:
      minibatch: the instances.
      graph: of them, what to compute.
      returned: the values that each arena returns, and how they become results.
      flags: what the plan is for.
      brought: names of what is there to be read from outside (see `SharedValue`); None if a
        program may be used whatever it reads.
      calls: of regions, whose results are inputs of the graph.
      batches: the schedule, and the nodes in the order of their lanes, if that is known.
      begun: when it was begun to make the graph, if it was.
    """
    session, records = minibatch.session, minibatch.records
    session.note_types()
    shown = session.records.lengths.shown
    warn_if_degenerate(graph, session.registry, session.new_in_a_row, shown)
    warn_if_many_lengths(minibatch.arrays, graph, session.registry, shown)
    unpadded = session.records.regions.padded.apart if calls else None
    warn_if_programs_grow(calls, session.registry, session.regions_in_a_row, unpadded)
    arranged, clock = arrange(minibatch, graph, returned, flags, brought, batches)
    if minibatch.structures and not (
        some_are_ragged(records) and any(map(returns_ragged, records))
    ):
        session.arranged[minibatch.key(flags)] = arranged
    clock = [clock[0] if begun is None else begun, *clock]
    return with_inputs(minibatch, arranged, clock, keeps=flags.keeps, calls=calls)


def plan_again(minibatch: Minibatch, flags: Flags, begun: float) -> Plan | None:
    """Returns a plan of instances whose structures were planned together, in this order, or None.

    All but the values of their inputs, and the lengths of arrays, is as it was then.
    """
    session, records = minibatch.session, minibatch.records
    if not minibatch.structures:
        return None
    key = minibatch.key(flags)
    known: Arranged | None = session.planned(key)
    if known is None:
        return None
    arranged = known.again(records)
    if arranged is known and known.assembly is None and not some_are_ragged(records):
        assembly = Assembly(known.signature.input_rooms, records)
        session.arranged[key] = arranged = known._replace(assembly=assembly)
    session.note_types()
    calls = find_calls(records, minibatch.arrays)
    clock = [begun, *[time.perf_counter()] * (len(STAGES) - 1)]
    return with_inputs(minibatch, arranged, clock, keeps=flags.keeps, calls=calls)


def with_inputs(
    minibatch: Minibatch,
    arranged: Arranged,
    clock: list[float],
    *,
    keeps: bool,
    calls: Sequence[RegionCalls] = (),
    numbers: Sequence[int] | None = None,
) -> Plan:
    """Returns the plan of a minibatch in order.

    `clock` says when each stage began, and `numbers` those of the instances, for messages.
    """
    session, records, arrays = minibatch.session, minibatch.records, minibatch.arrays
    programs, signature = session.programs, arranged.signature
    if arranged.assembly is None:
        inputs = assemble(signature.input_rooms, records, arrays, numbers)
    else:
        inputs = arranged.assembly.rows(arrays, numbers)
    ragged_calls = None
    if calls:
        stages = [programs.stage(calls_of_region, keeps) for calls_of_region in calls]
        ragged_calls = make_ragged_calls(stages, calls, arrays, arranged.targets, signature)
        inputs |= ragged_calls.operands
    ends = [*clock[1:], time.perf_counter()]
    took = dict(zip(STAGES, map(operator.sub, ends, clock), strict=True))
    used = ragged_calls.stages if ragged_calls else ()
    lengths, regions = session.records.lengths, session.records.regions
    is_known = minibatch.num_known == len(records)
    plan = Plan(
        programs.static(signature, arranged.reverse, arranged.form, keeps, used),
        arranged.table,
        arranged.reverse_table,
        inputs,
        (ragged_calls.tables, ragged_calls.targets) if ragged_calls else (),
        host=Host(
            arranged.made,
            {**minibatch.seconds, **took},
            minibatch.num_known,
            minibatch.tracers,
            ragged_calls,
            lengths.shown,
            session.records.shown,
            counter_of_padded(records, arrays),
            regions.padded.apart if calls else None,
            outline=arranged.placed,
            numbers=numbers,
            slow_calls=0 if is_known else session.registry.slow_calls.total(),
        ),
    )
    host, type_ids = plan.host, arranged.placed.type_ids
    assert host is not None
    check_rows(session.registry, type_ids, inputs, lambda: host.placed, numbers)
    if is_wanted():
        verify(plan)
    return plan


def reserve_programs(
    session: Session,
    minibatches: Sequence[tuple[Graph, Returned, Sequence[RegionCalls]]],
    policy: Policy,
    *,
    gradient: bool,
) -> None:
    """Makes programs that have room for minibatches like these; nothing is compiled.

    Args:
      session: that keeps the programs.
      minibatches: of each its graph, what is returned, and the calls of regions.
      policy: cuts the graphs into batches.
      gradient: whether there will be gradients, too.
    """
    for graph, _, _ in minibatches:  # a policy may learn from each
        schedule(graph, policy)

    def placed(keeps: bool) -> Iterator[tuple[Placement, list[np.ndarray]]]:
        for graph, returned, _ in minibatches:
            own = session.programs.place(graph, schedule(graph, policy), returned, keeps=keeps)
            yield own, told_apart(own, returned[1])

    reserve(session.programs, placed, gradient=gradient)
    by_region: dict[Region, list[RegionCalls]] = {}
    for _, _, calls in minibatches:
        for calls_of_region in calls:
            by_region.setdefault(calls_of_region.region, []).append(calls_of_region)
    for all_calls in by_region.values():
        for keeps in {False, gradient}:
            session.programs.reserve_rows(all_calls, keeps)


def reserve(
    programs: ProgramCache,
    placed: Callable[[bool], Iterable[tuple[Placement, Sequence[np.ndarray] | None]]],
    *,
    gradient: bool,
) -> None:
    """Makes programs that have room for placed minibatches, and for the reverse with `gradient`.

    `placed` returns minibatches, placed with all that the reverse would read or not, and what is
    returned of each (see `find_readers`).
    """
    for keeps in sorted({False, gradient}):
        groups: dict[bool, list[tuple[Placement, Sequence[np.ndarray]]]] = {}
        for own, leaves in placed(keeps):
            groups.setdefault(own.reuse, []).append((own, leaves or ()))
        for group in groups.values():
            all_placed, all_leaves = zip(*group, strict=True)
            programs.reserve(all_placed, all_leaves if keeps else None)


def programs_of(plan: Plan) -> ProgramCache:
    """Returns the programs by which a plan runs."""
    programs = plan.static.programs
    assert isinstance(programs, ProgramCache)
    return programs


def run_plan(
    plan: Plan, leaves: list[Leaf], inputs: Mapping[str, Any], name: str
) -> tuple[Any, Any]:
    """(rows returned from each arena, or pieces of them if traced; results of regions).

    Differentiable in the leaves and the inputs.

    Args:
      plan: what to run.
      leaves: of the shared arguments.
      inputs: rows for the arenas, as `plan.inputs` has them.
      name: what is run, for messages.
    """
    static, programs = plan.static, programs_of(plan)
    signature = static.signature
    tracers = plan.host.tracers if plan.host else ()
    packed: Any = ()
    if static.stages:
        with reverse_mode_only(name):
            inputs, packed = programs.run_regions(
                static.stages, leaves, tracers, *handed_over((plan.ragged, dict(inputs)))
            )
    shared = programs.outside.read(programs.program(signature)[1], leaves, tracers)
    rows = tuple(inputs[input_name(kind)] for kind in signature.arenas)
    arguments = shared, *handed_over((rows, plan.table))
    if not any_traced(jax.tree.leaves(arguments)):
        executor = programs.executor(signature)
        if not has_bounds(signature):
            return executor.infer(*arguments), packed
        outputs, flags = executor.watch(*arguments)
        check_plan(signature, flags, plan.host.placed if plan.host else None)
        return outputs, packed

    pullback = Pullback(
        signature,
        static.results,
        functools.partial(refuse_derivative, name),
        static.reverse,
        plan.host.placed if plan.host else None,  # not the tracers: `run` may outlive them
        programs.reverse,
    )
    executor_of = functools.partial(programs.executor, signature)
    run = Differentiable(executor_of, pullback, functools.partial(permit_derivative, static))
    with reverse_mode_only(name):
        return run(*arguments, handed_over(plan.reverse_table)), packed


def checked_inputs(plan: Plan, inputs: Any) -> Mapping[str, Any]:
    """The rows given for the arenas of a plan, or an error if they are not such as it has."""
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"`apply` got inputs={checks.brief(inputs)}; expected a dict of arrays like "
            "`plan.inputs`, or None for those."
        )
    signature, devices = plan.static.signature, plan.static.devices
    shards = () if devices is None else (devices.size,)
    expected = {name: (x.shape, x.dtype) for name, x in plan.inputs.items()} | {
        input_name((shape, dtype)): ((*shards, rows, *shape), dtype)
        for (shape, dtype), rows in zip(signature.arenas, signature.inputs, strict=True)
    }
    if inputs.keys() != expected.keys():
        raise ValueError(
            f"`apply` got inputs named {sorted(map(str, inputs))}; expected {sorted(expected)}. "
            "Replace some and keep the others: `inputs={**plan.inputs, name: array}`."
        )
    for name, (shape, dtype) in expected.items():
        if not is_array(inputs[name]):
            raise TypeError(
                f"`apply` got {checks.shown(inputs[name])} for inputs[{name!r}]; expected an array "
                f"{shape} of {dtype}."
            )
        came = inputs[name].shape, inputs[name].dtype
        if came != (shape, dtype):
            raise ValueError(
                f"`apply` got an array {came[0]} of {came[1]} for inputs[{name!r}]; expected "
                f"{shape} of {dtype}, which the plan was made for. Other numbers of the same kind "
                "go into the same rows; for other instances make another plan."
            )
    return inputs


def permit_derivative(static: Static) -> None:
    """Raises `ValueError` if a plan keeps nothing that the reverse reads."""
    if not static.keeps:
        raise ValueError(
            "`apply` is differentiated with a plan made for inference, which does not keep what "
            "the reverse reads; make it with `plan(..., gradient=True)`, which is the default."
        )
