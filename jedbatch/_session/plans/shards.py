"""Minibatches cut over devices: every shard is planned, and all run one program.

Instances go to shards by what they cost, longest processing time first (Graham, 1969): the most
expensive one that is left goes to the shard that costs least with it. Every shard is scheduled and
laid out by itself. They have one signature, so that one program is compiled for all devices, which
has room for each of them.

Source: Graham, Bounds on multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 17,
1969.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.configuration import is_staging
from jedbatch._jaxpr.derivatives import reverse_mode_only
from jedbatch._jaxpr.storage import Kind
from jedbatch._program.differentiable import Differentiable
from jedbatch._program.host_arrays import assemble
from jedbatch._program.output_spec import OutputSpec, with_batch
from jedbatch._program.placement import Placement
from jedbatch._program.plan import Plan, input_name
from jedbatch._program.pullback import Pullback, refuse_derivative
from jedbatch._program.returned import told_apart
from jedbatch._program.sharded import (
    DeviceAxis,
    Route,
    gathered,
    most_instances,
    on_all_processes,
    put_cut,
    put_everywhere,
    stacked_shards,
)
from jedbatch._program.signature import Signature
from jedbatch._program.stopped import check_shards, has_bounds
from jedbatch._schedule.policy import schedule
from jedbatch._session.plans.indices import check_rows
from jedbatch._session.plans.outputs import with_room
from jedbatch._session.plans.pipeline import (
    STAGES,
    Arranged,
    permit_derivative,
    programs_of,
    reserve,
    with_inputs,
)
from jedbatch._session.programs.program_cache import ProgramCache, Together
from jedbatch._session.records.degenerate import warn_if_degenerate
from jedbatch._session.session import NO_SECONDS, Flags, Minibatch, graph_of
from jedbatch._support.types import Array, Leaf

Lower = Callable[[Sequence[Placement], Sequence[Any] | None], Together]


class ArrangedShards(NamedTuple):
    """A minibatch cut into shards in order: all of its plan but the values of its inputs.

    Attributes:
      members: the instances of each shard, in order.
      shards: each in order.
      form: how pieces become results.
      routes: from rows that shards return to pieces.
    """

    members: list[np.ndarray]
    shards: list[Arranged]
    form: OutputSpec
    routes: tuple[Route, ...]

    @property
    def programs(self) -> list[tuple[Signature, Placement]]:
        """The program of all shards, and for what each runs it."""
        return [x for shard in self.shards for x in shard.programs]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, about."""
        arrays: list[np.ndarray] = [*self.members, *itertools.chain(*self.routes)]
        return sum(x.nbytes for x in self.shards) + sum(x.nbytes for x in arrays)


class PlacedShards(NamedTuple):
    """Shards that are placed, before there is a program for them.

    Attributes:
      members: the instances of each.
      forms: how the rows that each returns become its results.
      placed: each scheduled and laid out.
      positions: for each the outputs that it returns, by arena: those of its instances, one after
        the other, are counted.
      took: seconds to cut each out, to schedule it, and to lay it out.
    """

    members: list[np.ndarray]
    forms: list[OutputSpec]
    placed: list[Placement]
    positions: list[dict[Kind, np.ndarray]]
    took: list[list[float]]

    def leaves(self) -> list[list[np.ndarray] | None]:
        """The results that rows belong to, if they are to be told apart (see `find_readers`)."""
        if self.forms[0].batch is None:  # pieces have rows of several
            return [None] * len(self.placed)
        pairs = zip(self.placed, self.forms, strict=True)
        return [told_apart(placed, form) or None for placed, form in pairs]


class Costs(NamedTuple):
    """The costs of instances, in floating-point operations; of B instances and T node types.

    Attributes:
      work: float[B], the work of the nodes of each, and their part of starting the widest chunks.
      chains: int[B, T], nodes of each type on a longest chain, which no schedule batches together.
      start: float[T], what starting a chunk of each type costs.
    """

    work: np.ndarray
    chains: np.ndarray
    start: np.ndarray

    @staticmethod
    def of(programs: ProgramCache, graph: Graph) -> "Costs":
        """Returns what the instances of a graph cost."""
        present = np.array(graph.present_types, np.int64)
        kernels = [programs.kernel(t) for t in present.tolist()]
        start = np.array([programs.target.start_work(k.lane_work) for k in kernels])
        widest = np.array([k.buckets.widths[-1] for k in kernels])
        place = np.zeros(len(graph.types), np.int64)
        place[present] = np.arange(len(present))
        kind, count = place[graph.node_type], graph.num_instances
        instance = np.repeat(np.arange(count), np.diff(graph.node_ptr))
        work = np.array([k.lane_work for k in kernels]) + start / widest
        chains = np.zeros((count, len(present)), np.int64)
        np.maximum.at(chains, (instance, kind), graph.rank + 1)
        return Costs(np.bincount(instance, work[kind], minlength=count), chains, start)


def cut_by_cost(costs: Costs, num_shards: int) -> list[np.ndarray]:
    """Returns the instances of each shard in ascending order, cut so that costs are balanced.

    What a shard costs is the work of its instances, and starting as many chunks of each type as its
    longest chain has nodes. Ties are broken by the fewest instances, then by the smallest number,
    so that no shard is empty if there are as many instances. None has more than `most_instances`.
    """
    most = most_instances(len(costs.work), num_shards)
    loads, counts = np.zeros(num_shards), np.zeros(num_shards, np.int64)
    longest = np.zeros((num_shards, len(costs.start)), np.int64)
    shard = np.zeros(len(costs.work), np.int64)
    alone = costs.work + costs.chains @ costs.start
    for i in np.argsort(-alone, kind="stable").tolist():
        longer = np.maximum(longest, costs.chains[i])
        total = loads + costs.work[i] + longer @ costs.start
        s = int(np.lexsort((counts, total, counts == most))[0])
        loads[s] += costs.work[i]
        counts[s] += 1
        longest[s], shard[i] = longer[s], s
    return [np.flatnonzero(shard == s) for s in range(num_shards)]


def place_shards(
    minibatch: Minibatch, num_shards: int, *, keeps: bool, reuse: bool | None
) -> PlacedShards:
    """Cuts a minibatch into shards, and schedules and lays out each of them.

    Args:
      minibatch: the instances.
      num_shards: how many.
      keeps: whether everything is kept that the reverse would read.
      reuse: whether inference uses rows again, as of `Options`.
    """
    session, records = minibatch.session, minibatch.records
    members = cut_by_cost(Costs.of(session.programs, graph_of(records)), num_shards)
    room = most_instances(len(records), num_shards)
    pieces, positions, took = [], [], []
    for own in members:
        own_records = [records[i] for i in own.tolist()]
        times = [time.perf_counter()]
        graph = graph_of(own_records)
        times.append(time.perf_counter())
        returned = minibatch.results(own_records, np.arange(len(graph.outputs)))
        positions.append({kind: np.array(x, np.int64) for kind, x in returned[0].items()})
        returned = with_room(graph, returned, room)
        batches = schedule(graph, minibatch.policy)
        times.append(time.perf_counter())
        pieces.append((graph, batches, returned))
        took.append(np.diff(times).tolist())

    def place(reuse: bool | None) -> list[Placement]:
        placed = []
        for (graph, batches, returned), times in zip(pieces, took, strict=True):
            start = time.perf_counter()
            how = {"exact": returned[1].batch is not None, "keeps": keeps, "reuse": reuse}
            placed.append(session.programs.place(graph, batches, returned, **how))
            times[2:] = [time.perf_counter() - start]
        return placed

    placed = place(reuse)
    if len({x.reuse for x in placed}) > 1:  # as large as makes no difference
        placed = place(True)
    return PlacedShards(members, [form for _, _, (_, form) in pieces], placed, positions, took)


def check_inputs(minibatch: Minibatch, cut: PlacedShards) -> None:
    """Raises the errors that values of inputs lead to, before there is a program for shards."""
    for s, (own, placed) in enumerate(zip(cut.members, cut.placed, strict=True)):
        rooms = dict(zip(placed.arenas, placed.input_counts, strict=True))
        numbers = own.tolist()
        part = minibatch.part(numbers)
        inputs = assemble(rooms, part.records, part.arrays, numbers)
        placed_of = functools.partial(cut.placed.__getitem__, s)
        check_rows(minibatch.session.registry, placed.type_ids, inputs, placed_of, numbers)


def find_routes(
    signature: Signature,
    cut: PlacedShards,
    minibatch: Minibatch,
    devices: DeviceAxis,
) -> tuple[OutputSpec, tuple[Route, ...]]:
    """Returns the form of the results of all shards, and from where their rows come.

    Those of other processes have as many instances.
    """
    records = minibatch.records
    counts = [np.diff(r.whole.output_ptr[r.index : r.index + 2])[0] for r in records]
    ptr = np.append(0, np.cumsum(counts))
    rows, form = minibatch.results(records, np.arange(ptr[-1]))
    if form.batch is not None:
        room = cut.forms[0].batch
        assert room is not None
        if devices.num_processes > 1:
            return _among_all(form, cut.members, room, devices)
        return form, (Route.of(form.batch, cut.members, room),)
    every = {kind: np.array(x, np.int64) for kind, x in rows.items()}
    owned = [
        np.concatenate([np.arange(ptr[i], ptr[i + 1]) for i in own.tolist()]) for own in cut.members
    ]
    routes = []
    for kind, room in zip(signature.arenas, signature.outputs, strict=True):
        found = every.get(kind, np.zeros(0, np.int64))
        row_of = np.zeros(ptr[-1], np.int64)
        row_of[found] = np.arange(len(found))
        parts = [
            row_of[ids[at[kind]]] if kind in at else np.zeros(0, np.int64)
            for ids, at in zip(owned, cut.positions, strict=True)
        ]
        routes.append(Route.of(len(found), parts, room))
    return form, tuple(routes)


def _among_all(
    form: OutputSpec, members: Sequence[np.ndarray], room: int, devices: DeviceAxis
) -> tuple[OutputSpec, tuple[Route, ...]]:
    """Returns the form and the route of the results of all processes, from those of this one."""
    count = form.batch
    assert count is not None
    first = sorted(set(devices.owners)).index(jax.process_index()) * count
    total = count * devices.num_processes
    rows = np.full((len(members), room), total, np.int32)
    for s, own in enumerate(members):
        rows[s, : len(own)] = first + own
    (places,) = form.places
    moved = tuple((kind, with_batch(place, count, total)) for kind, place in places)
    route = Route(np.zeros(total, np.int32), rows)
    return OutputSpec(form.structures, (moved,), total), (route,)


def arrange_shards(
    minibatch: Minibatch,
    cut: PlacedShards,
    devices: DeviceAxis,
    lower: Lower | None = None,
    *,
    gradient: bool,
) -> tuple[ArrangedShards, list[list[float]]]:
    """Returns a minibatch in order, and for each shard the seconds of its stages.

    Args:
      minibatch: the instances.
      cut: the shards.
      devices: over which the minibatch is cut.
      lower: finds a program for shards, and their tables; None for one that is kept, or a new one.
      gradient: whether to plan the reverse too.
    """
    session = minibatch.session
    num_shards = len(cut.members)
    start = time.perf_counter()
    largest = max(cut.placed, key=lambda placed: sum(placed.lanes))
    shown = session.records.lengths.shown
    warn_if_degenerate(largest.graph, session.registry, session.new_in_a_row, shown)
    leaves = cut.leaves() if gradient else None
    lowered, reverse, tables = (lower or session.programs.lower)(cut.placed, leaves)
    form, routes = find_routes(lowered[0].signature, cut, minibatch, devices)
    seconds = (time.perf_counter() - start) / num_shards
    shards = []
    for s, (own, members) in enumerate(zip(lowered, cut.members, strict=True)):
        records = minibatch.part(members.tolist()).records
        shards.append(Arranged.of(records, cut.forms[s], own, reverse, *tables[s : s + 1]))
    return ArrangedShards(cut.members, shards, form, routes), [[*x, seconds] for x in cut.took]


def reserve_shards(minibatches: Sequence[Minibatch], num_shards: int, *, gradient: bool) -> None:
    """Makes programs that have room for shards of minibatches like these; nothing is compiled.

    Args:
      minibatches: of one session, which keeps the programs.
      num_shards: into which each is cut.
      gradient: whether there will be gradients, too.
    """
    session = minibatches[0].session
    reuse = session.options.reuse
    for minibatch in minibatches:  # a policy may learn from each
        schedule(graph_of(minibatch.records), minibatch.policy)

    def placed(keeps: bool) -> Iterator[tuple[Placement, list[np.ndarray] | None]]:
        for minibatch in minibatches:
            cut = place_shards(minibatch, num_shards, keeps=keeps, reuse=reuse)
            yield from zip(cut.placed, cut.leaves(), strict=True)

    reserve(session.programs, placed, gradient=gradient)


def plan_shards(minibatch: Minibatch, devices: DeviceAxis, *, gradient: bool) -> Plan:
    """Plans a minibatch that is cut over devices.

    Args:
      minibatch: the instances.
      devices: over which the minibatch is cut.
      gradient: whether to plan the reverse too.
    """
    session, flags = minibatch.session, Flags(gradient, gradient, shards=devices.size)
    session.note_types()
    minibatch = minibatch.to_be_found()
    found: ArrangedShards | None = session.planned(minibatch.key(flags))
    took = [[0.0] * len(STAGES)] * devices.size
    if found is None:
        reuse = session.options.reuse
        cut = place_shards(minibatch, devices.size, keeps=gradient, reuse=reuse)
        found, took = arrange_shards(minibatch, cut, devices, gradient=gradient)
        session.arranged[minibatch.key(flags)] = found  # the policy may have learned
    return filled(minibatch, found, took, devices, gradient=gradient)


def filled(
    minibatch: Minibatch,
    found: ArrangedShards,
    took: Sequence[Sequence[float]],
    devices: DeviceAxis,
    *,
    gradient: bool,
) -> Plan:
    """Returns the plan of a minibatch in order, with the values of its inputs; see `plan_shards`.

    `took` has the seconds of the stages of each shard.
    """
    shards: list[Plan] = []
    for own, arranged, times in zip(found.members, found.shards, took, strict=True):
        now = time.perf_counter()
        clock = [now - sum(times[k:]) for k in range(len(STAGES))]
        numbers = own.tolist()
        num_known = round(minibatch.num_known * len(own) / len(minibatch.records))
        seconds = NO_SECONDS if shards else minibatch.seconds
        part = minibatch.part(numbers)._replace(num_known=num_known, seconds=seconds)
        again = arranged.again(part.records)
        shards.append(with_inputs(part, again, clock, keeps=gradient, numbers=numbers))
    return together(shards, found, devices)


def together(shards: Sequence[Plan], found: ArrangedShards, devices: DeviceAxis) -> Plan:
    """Returns the plan of all shards, whose arrays are on their devices."""
    first = shards[0]
    static = programs_of(first).static(
        first.static.signature, first.static.reverse, found.form, first.static.keeps, (), devices
    )
    reverse_table = None
    if first.static.reverse is not None:
        reverse_table = stacked_shards([x.reverse_table for x in shards])
    inputs = {name: stacked_shards([x.inputs[name] for x in shards]) for name in first.inputs}
    table = stacked_shards([x.table for x in shards])
    table, reverse_table, inputs = put_cut(devices, (table, reverse_table, inputs))
    routes = tuple(
        Route(put_everywhere(devices, route.order), put_cut(devices, route.rows))
        for route in found.routes
    )
    return Plan(static, table, reverse_table, inputs, (), routes, shards=tuple(shards))


def run_on_devices(
    plan: Plan, leaves: Sequence[Leaf], inputs: Mapping[str, Any], name: str
) -> tuple[list[Array], ...]:
    """The pieces returned from each arena; differentiable in the leaves and the inputs.

    Results that are not stacked are pieces of one row.

    Args:
      plan: of a minibatch that is cut over devices.
      leaves: of the shared arguments, which all devices have.
      inputs: rows for the arenas, as `plan.inputs` has them.
      name: what is run, for messages.
    """
    static, programs = plan.static, programs_of(plan)
    signature, devices = static.signature, static.devices
    assert devices is not None
    shared = programs.outside.read(programs.program(signature)[1], leaves, ())
    shared = gathered(devices, on_all_processes(devices, shared))
    rows = tuple(inputs[input_name(kind)] for kind in signature.arenas)
    own_rows, order = _parts(plan)
    table = plan.table
    if is_staging() and not devices.is_typed:  # says on how many devices the whole runs
        table = jax.lax.with_sharding_constraint(table, devices.cut)
    arguments = shared, rows, (table, own_rows, order)
    executor = programs.executor_on(signature, devices)
    pullback = Pullback(
        signature,
        static.results,
        functools.partial(refuse_derivative, name),
        static.reverse,
        counts=[len(order[a if len(order) > 1 else 0]) for a in range(len(signature.arenas))],
    )
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
        if not has_bounds(signature):
            return pullback.split(executor.infer(*arguments))
        outputs, flags = executor.watch(*arguments)
        check_shards(signature, flags, _known_shards(plan, devices))
        return pullback.split(outputs)
    permit = functools.partial(permit_derivative, static)
    run = Differentiable(lambda: executor, pullback, permit, on_mesh=True)
    with reverse_mode_only(name):
        return run(*arguments, plan.reverse_table)


def _known_shards(plan: Plan, devices: DeviceAxis) -> list[tuple[Placement, np.ndarray] | None]:
    """Returns for each shard its nodes and the numbers of its instances; None if not known."""
    known: list[tuple[Placement, np.ndarray] | None] = [None] * devices.size
    own = [s for s, owner in enumerate(devices.owners) if owner == jax.process_index()]
    for s, shard in zip(own, plan.shards, strict=False):  # none once the plan was flattened
        assert shard.host is not None
        known[s] = shard.host.placed, np.array(shard.host.numbers, np.int64)
    return known


def _parts(plan: Plan) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns the rows and the orders of the routes of a plan."""
    return tuple(r.rows for r in plan.routes), tuple(r.order for r in plan.routes)
