"""Minibatches in which structures recur: planned once for all instances of a structure.

Instances of one structure (see `_graph.structures`) go through a schedule side by side: a policy
runs all ready nodes of a type, so copies of a node are in one batch. Where there are many to a
structure, only the distinct ones are scheduled, as a graph whose nodes count as often as there are
copies of them, and laid out, copies next to each other:

    instances     a b a a b            distinct   a × 3, b × 2
    batches       of the nodes of a and b that are ready, each of them 3 or 2 lanes
    lanes         a0 a2 a3 | b1 b4     of one batch

What copies read is then a slice, and rows follow from those of the first copy. In inference, where
a program is there that the minibatch fits, its table is written from that; the graph of all
instances, its schedule and its layout are made when somebody looks at them. Otherwise they are made
at once, with batches and lanes that are known.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import int32_arrays, int64_arrays, pointers, ranges
from jedbatch._graph.record import Record
from jedbatch._graph.structures import MIN_COPIES, Structure, counted, weight_of
from jedbatch._jaxpr.storage import Kind
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._layout.node_order import ORDERS
from jedbatch._program.lower import (
    Lowered,
    lower,
    narrowed,
    result_rows,
    space_begins,
    table_of_instructions,
    value_rows,
)
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.placement import Placement
from jedbatch._program.plan import Plan
from jedbatch._program.signature import Signature
from jedbatch._ragged.regions import some_are_ragged
from jedbatch._schedule.components import BY_RANK
from jedbatch._schedule.policy import schedule_copies
from jedbatch._schedule.schedule import Schedule, schedule_of
from jedbatch._session.plans.outputs import Returned
from jedbatch._session.plans.pipeline import Arranged, with_inputs
from jedbatch._session.session import Flags, Minibatch, Session, graph_of
from jedbatch._support.native import core

ANY_COUNTS = b""  # of copies, in a `PlanKey`


@dataclass(frozen=True, eq=False)
class Copies:
    """The instances of a minibatch by structure. Letters: `B` instances, `D` structures.

    Attributes:
      distinct: the structures, in their order.
      which: int64[B], the structure of each instance.
      counts: int64[D], instances of each.
    """

    distinct: tuple[Structure, ...]
    which: np.ndarray
    counts: np.ndarray

    @staticmethod
    def of(minibatch: Minibatch) -> Copies | None:
        """Returns the instances by structure; None if few of them have the same."""
        structures, found = minibatch.structures, dict.fromkeys(minibatch.structures)
        are_few = 0 < len(found) * MIN_COPIES <= len(structures)
        if not are_few or some_are_ragged(minibatch.records):
            return None
        distinct = tuple(sorted(found, key=lambda s: s.written))
        number = {structure: d for d, structure in enumerate(distinct)}
        which = np.array([number[s] for s in structures], np.int64)
        return Copies(distinct, which, np.bincount(which, minlength=len(distinct)))

    @functools.cached_property
    def first(self) -> np.ndarray:
        """int64[D], where the instances of each structure begin in `instances`."""
        return pointers(self.counts)[:-1]

    @functools.cached_property
    def instances(self) -> np.ndarray:
        """int64[B], the instances by structure, ascending."""
        return np.argsort(self.which, kind="stable")

    @functools.cached_property
    def number(self) -> np.ndarray:
        """int64[B], the place of each instance among those of its structure."""
        number = np.empty(len(self.which), np.int64)
        number[self.instances] = ranges(np.zeros_like(self.counts), self.counts)
        return number


@dataclass(frozen=True, eq=False)
class Batches:
    """The schedule of a minibatch as that of its distinct structures.

    Attributes:
      graph: of the distinct structures; its nodes count as often as there are copies.
      schedule: of this graph.
      node: int32[N], its nodes in the order of their lanes.
      counts: int64[D], copies of each structure.
    """

    graph: Graph
    schedule: Schedule
    node: np.ndarray
    counts: np.ndarray

    @staticmethod
    def find(minibatch: Minibatch, copies: Copies) -> Batches | None:
        """Returns the batches of a minibatch; None if the policy needs to see all instances."""
        session = minibatch.session
        key = minibatch.key(Flags(), copies.distinct, ANY_COUNTS)
        known: Batches | None = session.planned(key)
        if known is None:
            graph = counted(graph_of([s.record for s in copies.distinct]), copies.counts)
        elif np.array_equal(known.counts, copies.counts):
            return known
        else:
            graph = counted(known.graph, copies.counts)
        same = known.schedule if known is not None and known.is_by_rank else None
        batches = same or schedule_copies(graph, minibatch.policy, len(copies.which))
        if batches is None:
            return None
        node = ORDERS[session.options.layout](graph, batches)
        found = session.arranged[key] = Batches(graph, batches, node, copies.counts)
        return found

    @property
    def programs(self) -> tuple[()]:
        """The programs that are there for it: none yet."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, about."""
        return 4 * self.graph.nbytes

    @property
    def is_by_rank(self) -> bool:
        """Whether there are the same batches however many copies there are of each structure."""
        alone = all(len(types) == 1 for types in self.graph.components)
        return alone and self.schedule.policy == BY_RANK

    @functools.cached_property
    def copies(self) -> np.ndarray:
        """int64[N], how many there are of each node."""
        copies = weight_of(self.graph)
        assert copies is not None
        return copies

    @functools.cached_property
    def node_ptr(self) -> np.ndarray:
        """int64[S + 1], where the nodes of each batch begin among those of all copies."""
        return pointers(self.copies[self.node])[self.schedule.node_ptr]

    def expanded(self, copies: Copies, graph: Graph) -> tuple[Schedule, np.ndarray]:
        """Returns (the schedule of all instances, int32[...] their nodes in the order of lanes).

        Args:
          copies: the instances by structure.
          graph: of all of them.
        """
        own = self.graph
        structure, count = own.node_instance[self.node], self.copies[self.node]
        of_copy = copies.instances[ranges(copies.first[structure], count)]
        within = (self.node - own.node_ptr[structure]).repeat(count)
        node = (graph.node_ptr[of_copy] + within).astype(np.int32)
        when = np.empty(len(node), np.int32)
        when[node] = np.arange(len(self.schedule), dtype=np.int32).repeat(np.diff(self.node_ptr))
        batches = self.schedule
        found = {"bound": batches.bound, "unseen": batches.unseen}
        return schedule_of(batches.batch_type, when, batches.policy, **found), node


@dataclass(frozen=True, eq=False)
class LoweredCopies:
    """The parts that the table of a minibatch is written from, for any order of its instances.

    Letters: `D` structures, `N` nodes and `I` inputs of the distinct ones, `A` arenas, `S` batches.

    Attributes:
      batches: of the minibatch.
      placed: the distinct structures, with the lanes of all copies.
      signature: the program.
      head: the table but for operands of nodes and what is returned.
      row: int64[V], the row of each result of the first copy of each node.
      place: int64[I], the place of each input among those of its instance in one arena.
      num_inputs: int64[D, A], inputs of an instance of each structure.
      returned: of each arena, which outputs of the instances it returns, one after the other.
      form: how these become results; None, and nothing is `returned`, if results are not stacked,
        so that their form depends on the order of instances.
    """

    batches: Batches
    placed: Placement
    signature: Signature
    head: np.ndarray
    row: np.ndarray
    place: np.ndarray
    num_inputs: np.ndarray
    returned: dict[Kind, np.ndarray]
    form: OutputSpec | None

    @property
    def programs(self) -> list[tuple[Signature, Placement]]:
        """The programs that run it, and for what each."""
        return [(self.signature, self.placed)]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, about."""
        returned = sum(x.nbytes for x in self.returned.values())
        return self.batches.nbytes + self.head.nbytes + self.row.nbytes + returned

    @staticmethod
    def find(
        session: Session, copies: Copies, batches: Batches, returned: Returned
    ) -> LoweredCopies | None:
        """Returns what tables are written from; None if no program will do (see `plan_copies`).

        Args:
          session: whose programs may be used.
          copies: the instances by structure.
          batches: of them.
          returned: the outputs that each arena returns, and how they become results.
        """
        programs, graph, (rows, form) = session.programs, batches.graph, returned
        how = {"node": batches.node, "weight": batches.copies, "keeps": False}
        placed = session.programs.place(graph, batches.schedule, returned, **how)
        if any(kernel.lists is not None for kernel in placed.kernels):
            return None
        num_arenas, num_instances = len(placed.arenas), graph.num_instances
        owner = np.arange(num_instances).repeat(np.diff(graph.input_ptr))
        which = owner * num_arenas + placed.input_arena
        num_inputs = np.bincount(which, minlength=num_instances * num_arenas)
        num_inputs = num_inputs.reshape(num_instances, num_arenas)
        placed = replace(placed, num_inputs=tuple((copies.counts @ num_inputs).tolist()))
        signature = programs.fitting(placed)
        if signature is None or not signature.is_simple:
            return None
        placed = narrowed(placed, signature)
        first = (num_inputs.cumsum(axis=0) - num_inputs).ravel()
        found = head_of(placed, signature)
        if found is None:
            return None
        stacked = form.batch is not None
        return LoweredCopies(
            batches,
            placed,
            signature,
            found,
            value_rows(placed, space_begins(placed, signature))[: graph.num_values],
            placed.input_row - first[which],
            num_inputs,
            {kind: np.array(x, np.int64) for kind, x in rows.items()} if stacked else {},
            form if stacked else None,
        )

    def table(self, copies: Copies, returned: Returned | None) -> np.ndarray:
        """Returns int32[Z], the table; `returned` is given if it depends on the order."""
        placed, signature, graph = self.placed, self.signature, self.batches.graph
        table, num_arenas = self.head.copy(), len(placed.arenas)
        counts = self.num_inputs[copies.which]
        first_input = counts.cumsum(axis=0) - counts  # [B, A]
        form_of = np.full(len(graph.types), -1, np.int32)
        form_of[list(placed.type_ids)] = np.arange(len(placed.type_ids))
        columns = signature.operand_places(placed.kernels, placed.type_ids)
        schedule, layout = self.batches.schedule, placed.layout
        first_copy = copies.first[graph.node_instance]
        given = (
            *int32_arrays(self.batches.node),
            *int64_arrays(schedule.node_ptr),
            *int32_arrays(schedule.batch_type),
            *int64_arrays(layout.start, layout.padded, layout.lane, self.batches.copies),
            *int64_arrays(first_copy, graph.operand_ptr),
            *int32_arrays(graph.operand),
            self.row,
            *int32_arrays(placed.input_arena),
            *int64_arrays(self.place, first_input[copies.instances], columns),
        )
        compiled = core()
        assert compiled is not None
        compiled.write_copies(num_arenas, (*given, form_of, table))
        rows = self._output_rows(copies, first_input)
        for kind, which in (self.returned if returned is None else returned[0]).items():
            view = signature.form.view(table, "outputs", signature.arena_ids[kind])
            view[: len(which)] = rows[which]
        return table

    def _output_rows(self, copies: Copies, first_input: np.ndarray) -> np.ndarray:
        """Returns the row of each output of all instances."""
        graph = self.batches.graph
        count = np.diff(graph.output_ptr)[copies.which]
        output = graph.outputs[ranges(graph.output_ptr[:-1][copies.which], count)]
        instance = np.arange(len(count)).repeat(count)
        rows = copies.number[instance]
        computed = np.flatnonzero(output >= 0)  # there may be nothing that is
        rows[computed] += self.row[output[computed]]
        inputs = np.flatnonzero(output < 0)
        if len(inputs):
            which = -1 - output[inputs]
            arena = self.placed.input_arena[which]
            rows[inputs] = first_input[instance[inputs], arena] + self.place[which]
        return rows


def head_of(placed: Placement, signature: Signature) -> np.ndarray | None:
    """Returns the instructions of a table, and the rows of shared results; None without room."""
    runs, form = placed.runs.copy(), signature.form
    place = np.array([signature.places[kernel] for kernel in placed.kernels], np.int64)
    kernel, width = np.divmod(runs[:, 0], NUM_WIDTHS)
    runs[:, 0] = place[kernel] * NUM_WIDTHS + width
    table = table_of_instructions(signature, runs)
    if table is None:
        return None
    if signature.shared_rows is not None:
        all_rows = result_rows(placed, space_begins(placed, signature))
        for k, rows in zip(place.tolist(), all_rows, strict=True):
            form.view(table, "results", k)[:, : rows.shape[1]] = rows
    return table


def plan_copies(
    minibatch: Minibatch,
    copies: Copies,
    batches: Batches,
    clock: Sequence[float],
    flags: Flags,
) -> Plan | None:
    """Plans a minibatch for inference from its distinct structures; None if that cannot be done.

    It cannot if no program is there that the minibatch fits, or one that takes more than rows of
    operands, and without the compiled core.

    Args:
      minibatch: the instances.
      copies: these by structure.
      batches: of them.
      clock: when it was begun to find copies, to schedule them, and when that was done.
      flags: what the plan is for.
    """
    session, records = minibatch.session, minibatch.records
    if core() is None:
        return None
    key = minibatch.key(flags, copies.distinct, copies.counts.tobytes())
    found: LoweredCopies | None = session.planned(key)
    returned = None
    if found is None or found.form is None:
        num_outputs = int(np.diff(batches.graph.output_ptr) @ copies.counts)
        returned = minibatch.results(records, np.arange(num_outputs), (), stacked=flags.stacked)
    if found is None:
        assert returned is not None
        found = LoweredCopies.find(session, copies, batches, returned)
        if found is None:
            return None
        session.arranged[key] = found
        session.programs.note_used(found.signature, found.placed.kernels)
    session.note_types()
    clock = [*clock, time.perf_counter()]
    form = found.form
    if form is None:
        assert returned is not None
        form = returned[1]
    table = found.table(copies, returned)
    made = functools.partial(_made, session, records, copies, found, returned)
    arranged = Arranged(records, form, found.signature, found.placed, table, made, {})
    return with_inputs(minibatch, arranged, clock, keeps=False)


def _made(
    session: Session,
    records: Sequence[Record],
    copies: Copies,
    found: LoweredCopies,
    returned: Returned | None,
) -> Lowered:
    """Returns a minibatch whose table is written as its program runs it, all of its instances."""
    graph = graph_of(records)
    schedule, node = found.batches.expanded(copies, graph)
    which: Mapping[Kind, Sequence[int] | np.ndarray] = found.returned
    form = found.form
    if form is None:
        assert returned is not None
        which, form = returned
    values = {kind: graph.outputs[np.array(x, np.int64)].tolist() for kind, x in which.items()}
    how = {"node": node, "keeps": False, "reuse": found.placed.reuse}
    placed = session.programs.place(graph, schedule, (values, form), **how)
    lowered = lower(placed, found.signature)
    assert lowered is not None
    return lowered
