"""Values computed a few at a time: arenas that stay on the device and grow.

Where Python decides on values, what a minibatch computes becomes known little by little. What has
been recorded is kept here as one graph that grows, and each time values are wanted, exactly the
nodes they depend on and that have not run yet are scheduled, laid out and run, by one call of one
program.

The trick is that lanes are only ever appended. The lanes of a type are numbered in the order in
which its batches run, and every lane has rows of its own, so what ran in earlier rounds is a
prefix of what a plan of the whole graph would run, row for row. Each round writes a table of its
own lanes alone and hands the arenas on; nothing is computed twice, nothing moves. And when all is
done, the rounds *are* a plan of the whole: the reverse sweep runs over all of them at once.

A round recorded like one before, as those of a loop are, is not planned again: its table is shifted
(`_program.round_template`), and what was recorded is taken up when something new needs it.
"""

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jedbatch._control_flow.ahead import Ahead, RanAhead, foresee, room_ahead, steps_that_fit
from jedbatch._control_flow.growth import FIRST_GROWTH, NO_CAPACITY, grown_program
from jedbatch._control_flow.recorded import Beginning, Recorded
from jedbatch._control_flow.recorded_graph import RecordedGraph, References, as_one, template_of
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import distinct
from jedbatch._jaxpr.configuration import finds_faults
from jedbatch._jaxpr.identity import Same
from jedbatch._jaxpr.storage import Kind, row_bytes, stored
from jedbatch._layout.bucketing import in_blocks, num_widths
from jedbatch._layout.layout import Layout
from jedbatch._program.capacity import Capacity, round_up
from jedbatch._program.executors import Executor
from jedbatch._program.host_arrays import rows_of_inputs
from jedbatch._program.lower import Rows, lower
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.placement import Placement
from jedbatch._program.round_template import RoundTemplate
from jedbatch._program.signature import Signature
from jedbatch._program.stopped import check, has_bounds
from jedbatch._program.verify import is_wanted
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.run.trace import cut_inputs, host_rows
from jedbatch._schedule.policy import Policy, schedule, version_of
from jedbatch._schedule.schedule import Schedule
from jedbatch._session.plans.indices import check_look_ups
from jedbatch._session.plans.verify import RoundsTrial
from jedbatch._session.programs.program_cache import ProgramCache
from jedbatch._support.types import Array, PyTree

MAX_UNUSED = 4  # times the types in use that a program may have before the next call starts anew
ValuesRead = np.ndarray | list[np.ndarray]  # rows of one array, where all are of one kind
SMALL_INPUT_BYTES = 1 << 16  # bytes of inputs that are handed over again although none is new


class Workspace:
    """The recordings of a minibatch, and as much of them as has been computed.

    Attributes:
      graph: what was recorded.
      state: arenas and what is saved for the reverse, on the device.
      signature: the program that they belong to.
      trial: runs the same on symbols, if plans are to be verified.
    """

    def __init__(
        self,
        programs: ProgramCache,
        recorder: Recorder,
        arrays: Sequence[Sequence[Array]],
        policy: Policy | None,
        shared_of: Callable[[Sequence[int]], Sequence[Any]],
        saving: bool,
        size: int | None = None,
    ):
        self.programs = programs
        self.recorder = recorder
        self.arrays = arrays
        self.policy = policy
        self.shared_of = shared_of
        self.saving = saving
        self.state: PyTree = None
        self.size = len(arrays).bit_length() if size is None else size
        self.signature: Signature | None = programs.workspaces.get(self.size)
        if self.signature is not None and not programs.can_read(self.signature):
            self.signature = None
        self.graph = RecordedGraph(recorder)
        self._latest: tuple[tuple[Signature, bool], Executor] | None = None
        self._tails: np.ndarray | None = None  # of what was recorded last, if some is computed
        self._first = Beginning(0, 0, 0, 0, 0)
        self._lanes: collections.Counter[int] = collections.Counter()  # in use, by type
        self._waiting: collections.Counter[int] = collections.Counter()  # nodes, by type
        self._inputs: dict[Kind, list[np.ndarray]] = collections.defaultdict(list)
        self._num_inputs: collections.Counter[Kind] = collections.Counter()
        self._chunks: list[tuple[InputRows, int, np.ndarray]] = []
        self._buffers: dict[Kind, np.ndarray] = {}
        self._filled: dict[Kind, int] = {}  # how many of `_inputs` are in the buffers
        self._rounds: list[tuple[np.ndarray, Placement]] = []
        self._given: dict[Kind, np.ndarray] = {}  # results that are inputs, by arena
        self.trial = RoundsTrial() if is_wanted() else None

    # --- computing ---

    def compute(
        self, values: np.ndarray, ahead: Ahead | None = None, returned: References | None = None
    ) -> tuple[Layout, ValuesRead, RanAhead | None]:
        """Computes what values depend on: (what ran, the values, what ran ahead, or None).

        Steps run `ahead` if that is given and they can be foreseen. Values that are what arenas
        have `returned`, at the end, are not read.
        """
        templates = self.programs.templates
        new = Recorded(self._first, self.recorder, self.graph.turns, self._tails)
        recorded = new.key(values) if returned is None else None
        key = None if recorded is None else (*self._policy_key, recorded)
        template = None if key is None else templates.get(key)
        if template is None and key is not None and ahead is not None and ahead.same:
            template = self._template(new, values)
            if template is not None:
                templates[key] = template
        computed = None if template is None else self._repeat(template, new, values, ahead)
        if computed is None and returned is not None:
            computed = self._hand_over(values, returned)
        if computed is None:
            computed = *self._compute(values, returned is None), None
            if key is not None and key not in templates:
                nodes, placed = self._rounds[-1]
                templates[key] = template_of(self.graph, new, nodes, placed, values)
        self._first, self._tails = Beginning.of(self.recorder, len(self.graph.turns)), None
        return computed

    def _template(self, new: Recorded, values: np.ndarray) -> RoundTemplate | None:
        """Returns the template of a round that is the first of its kind; None if it has none."""
        graph = self.graph
        if not all(graph.is_brought(distinct(new.groups).tolist())):  # rows of instances' arrays
            return None
        graph.take_up()
        nodes = graph.needed(values)
        return template_of(graph, new, nodes, self._plan(graph.part(nodes)), values)

    def note_ahead(
        self, ran: RanAhead, begins: np.ndarray, done: np.ndarray, tails: np.ndarray
    ) -> None:
        """Notes how far instances went as foreseen.

        Args:
          ran: what ran ahead.
          begins: int64[F, 4], of each fibre the sizes of the recording when it went on.
          done: int64[F], how many steps it took as foreseen.
          tails: of the turns since the last round (see `Recorded`).
        """
        ran.note(self.graph, begins, done)
        template = ran.template
        if not done.any() and not ran.foreseen.same:  # from now on it has to repeat itself first
            self.programs.ways[template.placed.type_ids] = None
        self._tails = tails
        unused = ran.ahead - int(done.max(initial=0))
        for t, used in zip(template.placed.type_ids, template.lanes, strict=True):
            self._lanes[t] -= unused * used  # nobody reads their rows

    def _hand_over(self, values: np.ndarray, returned: References) -> tuple | None:
        """Gives rows to the inputs among values of which all others are computed.

        None if something has yet to run, and does nothing then. Inputs that are all that an arena
        returns, as numbers may be, are results as they are: no program is called for them.
        """
        signature, graph, self._given = self.signature, self.graph, {}
        groups = None if signature is None else graph.inputs_left(values)
        if signature is None or groups is None or self.state is None:
            return None
        kinds = () if self.saving or self.trial is not None else signature.arenas
        whole = graph.results_given(groups, {kind: returned.get(kind, ()) for kind in kinds})
        groups = {g: x for g, x in groups.items() if graph.kind_of_group(g) not in whole}
        ends = dict(self._num_inputs)
        for g, numbers in groups.items():
            kind = graph.kind_of_group(g)
            ends[kind] = ends.get(kind, 0) + len(numbers)
            if ends[kind] > signature.input_rooms.get(kind, 0):
                return None
        self._given = whole
        nothing = np.zeros(0, np.int64)
        placed = self._plan(graph.part(nothing))
        given, registry = self.recorder.input_value, self.recorder.registry
        for g, numbers in groups.items():
            kind, value_type = graph.kind_of_group(g), registry.value_types[registry.groups[g][1]]
            graph.input_row.array[numbers] = self._num_inputs[kind] + np.arange(len(numbers))
            rows = host_rows([given[i] for i in numbers.tolist()], value_type)
            self._enter(kind, InputRows(value_type, rows), 0, numbers)
        if groups:
            lowered = lower(placed, signature, Rows(nothing, None, {}, first_lane=nothing))
            assert lowered is not None
            self._run(lowered.table, set(map(graph.kind_of_group, groups)))
        return placed.layout, [], None

    def _compute(self, values: np.ndarray, read: bool) -> tuple[Layout, list[np.ndarray]]:
        """Does the same for what may be unlike anything before."""
        graph = self.graph
        graph.take_up()
        nodes = graph.needed(values)
        placed = self._plan(graph.part(nodes))
        layout = placed.layout
        offset = np.zeros(len(layout.lanes), np.int64)
        for t in np.flatnonzero(layout.lanes).tolist():
            offset[t] = self._lanes[t]
            self._lanes[t] += int(layout.lanes[t])
        operand = graph.operands_of(nodes)
        fresh = self._enter_inputs(np.concatenate([operand, values]))
        wanted = graph.by_kind(values) if read else {}
        has_moved = self._make_capacity(layout, wanted)
        graph.lane.array[nodes] = layout.lane + offset[layout.graph.node_type]
        ran = np.flatnonzero(graph.lane.array >= 0) if has_moved else nodes
        graph.find_rows(ran, self._find_bases())
        self._rounds.append((nodes, placed))
        returned = {kind: graph.rows(values) for kind, values in wanted.items()}
        rows = Rows(graph.rows(operand), None, returned, None, offset[list(placed.type_ids)])
        assert self.signature is not None
        lowered = lower(placed, self.signature, rows)
        assert lowered is not None
        self._check_rows(nodes, placed.type_ids)
        outputs = self._run(lowered.table, fresh)
        self._check_loops()
        return layout, self._read(values, wanted, outputs) if read else []

    def _repeat(
        self, template: RoundTemplate, new: Recorded, values: np.ndarray, ahead: Ahead | None
    ) -> tuple[Layout, ValuesRead, RanAhead | None] | None:
        """Computes a round like one before; None if the program has no room for it.

        None, too, if values of earlier rounds have to be computed first.
        """
        signature, placed, graph = self.signature, template.placed, self.graph
        bound = None if signature is None else template.bound_to(signature)
        if bound is None:
            return None
        first_lane = [self._lanes[t] for t in placed.type_ids]
        old_row = graph.rows(new.references[template.old_reference])
        if not bound.has_lanes(first_lane) or not self._has_room(template.pending):
            return None
        if len(old_row) and old_row.min() < 0:
            return None
        input_row = np.empty(len(template.inputs), np.int64)
        ends = dict(self._num_inputs)
        for group in template.groups:
            begin = ends.get(group.kind, 0)
            ends[group.kind] = end = begin + len(group.places)
            input_row[group.places] = np.arange(begin, end)
            if end > bound.signature.input_rooms[group.kind]:
                return None
        given = self.recorder.input_value
        for group in template.groups:
            numbers = new.inputs_at(template.inputs[group.places])
            if group.is_brought:
                rows = host_rows([given[i] for i in numbers.tolist()], group.type)
                self._enter(group.kind, InputRows(group.type, rows), 0, numbers)
            else:
                groups = new.groups[template.inputs[group.places]]
                self._enter_chunks(numbers, new.owners_of_inputs(numbers), groups)
        foreseen = None
        is_brought = all(group.is_brought for group in template.groups)
        if ahead is not None and is_brought and not has_bounds(bound.signature):
            foreseen = foresee(template, new, ahead, given, graph, self.programs.ways)
        count = 0
        if ahead is not None and foreseen is not None:
            count = steps_that_fit(bound, first_lane, len(values), ahead.most(template))
            free = {kind: n - ends.get(kind, 0) for kind, n in bound.signature.input_rooms.items()}
            count = foreseen.steps_with_room(template, free, count)
        lanes = np.array(first_lane) + np.arange(1 + count)[:, None] * np.array(template.lanes)
        value_rows = bound.value_rows(lanes)
        input_rows, old_rows = input_row[None], old_row[None]
        if foreseen is not None and count:
            input_rows, old_rows = foreseen.rows(value_rows, input_row, old_row)
            for group, places, rows in foreseen.counted(template, count):
                input_rows[1:, places] = self._put(group.kind, rows).reshape(count, -1)
        table = bound.table(lanes, np.concatenate([value_rows, input_rows, old_rows], axis=1))
        if input_rows.shape[1] < template.num_inputs:
            of_each = np.full((1 + count, template.num_inputs), -1)
            of_each[:, template.inputs] = input_rows
            input_rows = of_each
        nodes = graph.note_run(new, template, lanes[0], (value_rows[0], input_rows[0]))
        for t, used in zip(placed.type_ids, template.lanes, strict=True):
            self._lanes[t] += used * (1 + count)
        for t, pending in template.pending.items():
            self._lanes.setdefault(t, 0)
            self._waiting[t] += pending * (1 + count)
        self._rounds.append((nodes, placed))
        self._check_rows(nodes, placed.type_ids)
        outputs = self._run(table, {group.kind for group in template.groups})
        self._check_loops()
        if len(template.wanted) > 1:
            by_kind = {kind: new.values_at(own) for kind, own in template.wanted.items()}
            return placed.layout, self._read(values, by_kind, outputs), None
        ((kind, own),) = template.wanted.items()
        returned = self._returned(outputs, kind)
        ran = None
        if foreseen is not None and count:
            ran = RanAhead(foreseen, template, lanes, value_rows, input_rows, returned)
        return placed.layout, returned[: len(own)], ran

    def _check_loops(self) -> None:
        """Raises `UnfinishedLoopError` if a loop was stopped."""
        signature, graph = self.signature, self.graph
        assert signature is not None
        if self.saving or not has_bounds(signature):
            return
        graph.take_up()  # which has not been done if the round was like one before
        node_type, lane = graph.node_type.array, graph.lane.array
        types = {self.programs.kernel(t): t for t in np.unique(node_type).tolist()}

        def instances_of(kernel: Any, lanes: np.ndarray) -> np.ndarray:
            nodes = np.flatnonzero((node_type == types.get(kernel, -1)) & (lane >= 0))
            return graph.node_owner.array[nodes[lanes[lane[nodes]]]]

        check(signature, self.state[1], instances_of)

    def _has_room(self, pending: Mapping[int, int]) -> bool:
        """Returns whether the program has room for more nodes that do not run yet."""
        signature = self.signature
        assert signature is not None
        for t, count in pending.items():
            kernel = self.programs.kernel(t)
            place = signature.places.get(kernel)
            if place is None:
                return False
            most = min(self._waiting[t] + count, FIRST_GROWTH * len(self.arrays))
            needs = num_widths(kernel.buckets, round_up(most))
            if not self._lanes[t] and needs > signature.widest[place]:
                return False
        return True

    def _check_rows(self, nodes: np.ndarray, type_ids: Sequence[int]) -> None:
        """Raises an `IndexError` if a number of an instance names a row that is not there."""
        signature, graph = self.signature, self.graph
        assert signature is not None

        def reads(t: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            graph.take_up()  # which has not been done if the round was like one before
            mine = nodes[graph.node_type.array[nodes] == t]
            read = graph.operand.array[graph.operand_ptr.array[mine] + k]
            return mine, read, graph.input_row.array

        check_look_ups(
            self.recorder.registry,
            type_ids,
            lambda kind: self._buffer(kind, signature.input_rooms[kind]),
            reads,
            lambda node: int(graph.node_owner.array[node]),
        )

    def _plan(self, graph: Graph) -> Placement:
        """Schedule and lanes of a graph; rounds of one structure are planned once."""
        parts = graph.node_type, graph.operand_ptr, graph.operand, graph.node_ptr
        key = *self._policy_key, *(x.tobytes() for x in parts)
        placed = self.programs.rounds.get(key)
        if placed is None:
            placed = self._place(graph, schedule(graph, self.policy), {})
            self.programs.rounds[key] = placed
        return placed

    @property
    def _policy_key(self) -> tuple[Hashable, ...]:
        """All that schedules depend on besides graphs."""
        return Same(self.policy), None if self.policy is None else version_of(self.policy)

    def _place(self, graph: Graph, batches: Schedule, outputs: dict[Kind, list[int]]) -> Placement:
        """Lays a graph out as rounds do it, lane after lane."""
        returned = outputs, OutputSpec((), (), None)
        how = {"order": "append", "keeps": True, "reuse": False}
        return self.programs.place(graph, batches, returned, **how)

    def _enter_inputs(self, references: np.ndarray) -> set[Kind]:
        """Gives rows to the inputs among some references; returns the kinds that are new."""
        graph = self.graph
        row, owner = graph.input_row.array, graph.input_owner.array
        inputs = distinct(-1 - references[references < 0])
        inputs = inputs[row[inputs] < 0]
        if not len(inputs):
            return set()
        group, instance = graph.input_group.array[inputs], owner[inputs]
        groups = distinct(group)
        is_brought = np.array(graph.is_brought(groups.tolist()))
        instance[is_brought[np.searchsorted(groups, group)]] = -1  # all at once, from anyone
        order = np.lexsort((inputs, group, instance))
        inputs, group, instance = inputs[order], group[order], instance[order]
        row[inputs] = self._enter_chunks(inputs, instance, group)
        return set(map(graph.kind_of_group, groups.tolist()))

    def _enter_chunks(
        self, inputs: np.ndarray, instance: np.ndarray, group: np.ndarray
    ) -> np.ndarray:
        """Gives rows to inputs, cut where the instance or the group changes; returns the rows."""
        owners, recorder = np.maximum(instance, 0).tolist(), self.recorder
        rows: list[int] = []
        for chunk in cut_inputs(recorder.registry, recorder.input_value, inputs, instance, group):
            begin, kind = len(rows), stored(chunk.type)
            rows += range(self._num_inputs[kind], self._num_inputs[kind] + len(chunk))
            self._enter(kind, chunk, owners[begin], inputs[begin : len(rows)])
        return np.array(rows, np.int64)

    def _enter(self, kind: Kind, chunk: InputRows, instance: int, numbers: np.ndarray) -> None:
        """Puts inputs of an instance, or values of any, behind the others of their arena."""
        self._put(kind, np.asarray(rows_of_inputs(chunk, self.arrays[instance], instance)))
        self._chunks.append((chunk, instance, numbers))

    def _put(self, kind: Kind, rows: np.ndarray) -> np.ndarray:
        """Puts rows behind the others of their arena; returns where they are."""
        first = self._num_inputs[kind]
        self._num_inputs[kind] += len(rows)
        self._inputs[kind].append(rows)
        return first + np.arange(len(rows))

    def _make_capacity(self, layout: Layout, wanted: dict[Kind, np.ndarray]) -> bool:
        """Goes on with a larger program if this one has no room for what comes; returns if so.

        There must be room for what is known to come later, too: types that were recorded and have
        not run. Otherwise each would need a new program when its time has come.
        """
        target = self.programs.target
        chunks = layout.trips if target.control == "switch" else layout.trips > 0
        schedule = layout.schedule
        sizes = np.zeros(len(self.recorder.registry.types), np.int64)  # maybe more than it knew
        np.maximum.at(sizes, schedule.batch_type, np.diff(schedule.node_ptr))
        waiting = self.graph.node_type.array[self.graph.lane.array < 0]
        waiting = np.bincount(waiting, minlength=len(sizes))
        self._waiting = collections.Counter(dict(enumerate(waiting.tolist())))
        for t in np.flatnonzero(waiting).tolist():
            self._lanes.setdefault(t, 0)
        lanes, widest = {}, {}
        for t, used in self._lanes.items():
            kernel = self.programs.kernel(t)
            lanes[kernel] = in_blocks(max(1, used), kernel.blocks)
            most = sizes[t] if used else min(waiting[t], FIRST_GROWTH * len(self.arrays))
            widest[kernel] = num_widths(kernel.buckets, round_up(max(1, int(most))))
        outputs = {kind: len(values) for kind, values in wanted.items()}
        outputs, num_instructions = room_ahead(outputs, int(chunks.sum()) + 1)
        need = Capacity(
            {
                "lanes": lanes,
                "widest": widest,
                "inputs": dict(self._num_inputs),
                "outputs": outputs,
                "num_instructions": {None: num_instructions},
            }
        )
        capacity = NO_CAPACITY if self.signature is None else self.signature.capacity
        if self.signature is not None and capacity.holds(need):
            return False
        before, self.signature = self.signature, grown_program(capacity, need, target)
        if not any(kernel.transient for kernel in self.signature.kernels):
            self.programs.workspaces[self.size] = self.signature
        if self.state is not None:
            executor = self._executor()
            self.state = executor.move(self.saving, before, self.state)
        self._buffers.clear()
        return True

    def _executor(self) -> Executor:
        assert self.signature is not None
        of = self.signature, finds_faults()
        if self._latest is None or self._latest[0] != of:
            self._latest = of, self.programs.executor(self.signature)
        return self._latest[1]

    def _find_bases(self) -> np.ndarray:
        """int64[T, R]: the row of the first lane, for each result of each type in use."""
        assert self.signature is not None
        place = {kernel: k for k, kernel in enumerate(self.signature.kernels)}
        most = max((len(k.results) for k in place), default=0)
        bases = np.zeros((len(self.recorder.registry.types), most), np.int64)
        for t in self._lanes:
            bases_of_type = self.signature.bases[place[self.programs.kernel(t)]]
            bases[t, : len(bases_of_type)] = bases_of_type
        return bases

    def _run(self, table: np.ndarray, fresh: set[Kind]) -> Any:
        """Runs a table; returns the rows it returns from each arena."""
        signature = self.signature
        assert signature is not None
        executor = self._executor()
        shared = self.shared_of(self.programs.program(signature)[1])
        if self.state is None:
            self.state = executor.blank(self.saving, shared)
            fresh = set(self._num_inputs)
        inputs = []
        for kind, room in zip(signature.arenas, signature.inputs, strict=True):
            rows = self._buffer(kind, room)
            skip = kind not in fresh and room * row_bytes(kind) > SMALL_INPUT_BYTES
            inputs.append(rows[:0] if skip else rows)
        if self.trial is not None:
            self.graph.take_up()
            self.trial.run(signature, table, self._num_inputs)
            self.trial.finish(*self.whole({}))
        given = shared, tuple(inputs), table, self.state
        outputs, self.state = executor.advance(self.saving, *given)
        return outputs

    def _buffer(self, kind: Kind, room: int) -> np.ndarray:
        """All inputs of a kind so far, up to capacity."""
        rows = self._buffers.get(kind)
        if rows is None:
            rows = self._buffers[kind] = np.zeros((room, *kind[0]), kind[1])
            self._filled[kind] = 0
        new_rows = self._inputs[kind][self._filled[kind] :]
        if new_rows:
            end = self._num_inputs[kind]
            begin = end - sum(map(len, new_rows))
            np.concatenate(new_rows, out=rows[begin:end], casting="unsafe")
            self._filled[kind] += len(new_rows)
        return rows

    def _read(
        self, values: np.ndarray, wanted: dict[Kind, np.ndarray], outputs: PyTree
    ) -> list[Any]:
        """Values that were returned, as arrays of NumPy; waits until they are computed."""
        found: dict[int, np.ndarray] = {}
        for kind, numbers in wanted.items():
            rows = self._returned(outputs, kind)
            found.update((number, rows[i, ...]) for i, number in enumerate(numbers.tolist()))
        return [found[value] for value in values.tolist()]

    def _returned(self, outputs: PyTree, kind: Kind) -> np.ndarray:
        """The rows that were returned from an arena; waits until they are computed."""
        assert self.signature is not None
        return np.asarray(outputs[self.signature.arena_ids[kind]])

    # --- when all is computed ---

    def results(self, returned: References) -> Any:
        """The rows of values that are returned, from each arena, and perhaps more."""
        assert self.signature is not None
        rows = self.graph.rows_returned(self.signature.arenas, returned, self._given)
        return self._executor().pick(self.state, *rows)

    def close(self) -> None:
        """Forgets a program of which little is used, and passes arenas on that nobody reads."""
        signature = self.signature
        if signature is None:
            return
        if len(signature.kernels) > MAX_UNUSED * len(self._lanes):
            self.programs.workspaces.pop(self.size, None)
        if not self.saving and self.state is not None:
            shared = self.shared_of(self.programs.program(signature)[1])
            self._executor().give_back(shared, self.state)
            self.state = None

    def whole(self, returned: dict[Kind, list[int]]) -> tuple[Placement, Signature]:
        """All rounds as one plan, and the program whose reverse undoes them at once."""
        assert self.signature is not None
        nodes, graph, every, outputs = as_one(self.graph, self._rounds, self._chunks, returned)
        placed = self._place(graph, every, outputs)
        layout = placed.layout
        if not np.array_equal(layout.lane, self.graph.lane.array[nodes]):
            raise RuntimeError(
                "the rounds of a batched function and their reverse lay values out differently; "
                "this is a mistake in jedbatch, please report it"
            )
        rows = [len(returned.get(kind, ())) for kind in self.signature.arenas]
        switch = self.programs.target.control == "switch"  # which has an instruction for each chunk
        num_instructions = int(layout.trips.sum()) if switch else len(placed.runs)
        signature = replace(
            self.signature,
            outputs=tuple(map(round_up, rows)),
            num_instructions=max(self.signature.num_instructions, round_up(num_instructions)),
        )
        return placed, signature

    def reverse(
        self, placed: Placement, signature: Signature, wanted: Sequence[np.ndarray] | None
    ) -> tuple[ReverseSignature, Any]:
        """Returns the reverse of the `whole`, and its table, for what is wanted of the results."""
        found = self.programs.reverse(placed, signature, wanted=wanted)
        if self.trial is not None:
            self.trial.finish(placed, signature, found, wanted)
        return found

    def pull_back(self, arrays: PyTree, cotangents: Sequence[Any]) -> Any:
        """Cotangents of the instances' arrays from those of all input rows of each arena."""
        assert self.signature is not None
        parts, cotangents_given = [], []
        for chunk, instance, numbers in self._chunks:
            of_arena = cotangents[self.signature.arena(chunk.type)]
            if chunk.leaf is not None and of_arena is not None:
                first = int(self.graph.input_row.array[numbers[0]])
                parts.append((chunk, instance))
                cotangents_given.append(of_arena[first : first + len(numbers)])

        def rows(arrays: PyTree) -> list[Any]:
            return [rows_of_inputs(chunk, arrays[i], i) for chunk, i in parts]

        return jax.vjp(rows, arrays)[1](cotangents_given)[0]
