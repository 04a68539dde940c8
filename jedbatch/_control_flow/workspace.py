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
"""

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jedbatch._control_flow.growing_array import GrowingArray
from jedbatch._control_flow.growth import FIRST_GROWTH, NO_CAPACITY, grown_program
from jedbatch._control_flow.recorded import Beginning, Recorded
from jedbatch._graph.graph import Graph, InputRows
from jedbatch._graph.paths import distinct, int64_of, pointers, ranges
from jedbatch._jaxpr.identity import Same
from jedbatch._jaxpr.storage import Kind, row_bytes, stored
from jedbatch._layout.bucketing import in_blocks, num_widths
from jedbatch._layout.layout import Layout
from jedbatch._program.capacity import Capacity, round_up
from jedbatch._program.executors import Dispatch, Fused
from jedbatch._program.host_arrays import rows_of_inputs
from jedbatch._program.lower import Rows, lower
from jedbatch._program.placement import Placement
from jedbatch._program.round_template import NOT_RUN, RoundTemplate, find_sources
from jedbatch._program.signature import Signature
from jedbatch._program.verify import is_wanted
from jedbatch._record.recorder import Recorder
from jedbatch._record.trace import cut_inputs, find_operands
from jedbatch._schedule.policy import Policy, schedule, version_of
from jedbatch._schedule.schedule import Schedule
from jedbatch._session.indices import check_look_ups
from jedbatch._session.program_cache import ProgramCache
from jedbatch._session.verify import RoundsTrial
from jedbatch._support.types import Array, PyTree

MAX_UNUSED = 4  # times the types in use that a program may have before the next call starts anew
MET_ONCE, NO_TEMPLATE = "met once", "no template"  # in place of templates of rounds
SMALL_INPUT_BYTES = 1 << 16  # bytes of inputs that are handed over again although none is new


class Workspace:
    """The recordings of a minibatch, and as much of them as has been computed.

    Letters: `N` nodes, `V` their results, `I` inputs.

    Attributes:
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
        self._turns: list[int] = []  # of each its instance, nodes and inputs in all at its end
        self._num_references = 0
        self._first = Beginning(0, 0, 0, 0, 0)
        self._replayed: list[tuple[int, RoundTemplate, np.ndarray]] = []
        self._node_type = GrowingArray(np.int32)  # [N]
        self._node_owner = GrowingArray(np.int32)  # [N]
        self._lane = GrowingArray(np.int64)  # [N], -1 before it runs
        self._operand_ptr = GrowingArray(np.int64)  # [N + 1]
        self._operand = GrowingArray(np.int64)
        self._value_ptr = GrowingArray(np.int64)  # [N + 1]
        self._value_node = GrowingArray(np.int64)  # [V]
        self._value_row = GrowingArray(np.int64)  # [V], below 0 before it is computed
        self._input_owner = GrowingArray(np.int32)  # [I]
        self._input_group = GrowingArray(np.int64)  # [I]
        self._input_row = GrowingArray(np.int64)  # [I], -1 before it is used
        self._operand_ptr.extend([0])
        self._value_ptr.extend([0])
        self._lanes: collections.Counter[int] = collections.Counter()  # in use, by type
        self._waiting: collections.Counter[int] = collections.Counter()  # nodes, by type
        self._moved = False  # whether rows are those of another program by now
        self._inputs: dict[Kind, list[np.ndarray]] = collections.defaultdict(list)
        self._num_inputs: collections.Counter[Kind] = collections.Counter()
        self._chunks: list[tuple[InputRows, int, np.ndarray]] = []
        self._buffers: dict[Kind, np.ndarray] = {}
        self._filled: dict[Kind, int] = {}  # how many of `_inputs` are in the buffers
        self._rounds: list[tuple[np.ndarray, Layout]] = []
        self.trial = RoundsTrial() if is_wanted() else None

    # --- what was recorded ---

    def note_turn(self, instance: int) -> None:
        """An instance has recorded what is new since the last note."""
        recorder = self.recorder
        self._turns += (instance, len(recorder.call_specs), len(recorder.input_group))

    def _take_in(self) -> None:
        """Takes up what was recorded since the last time."""
        recorder, registry = self.recorder, self.recorder.registry
        calls = int64_of(recorder.call_specs, len(self._node_type))
        references = int64_of(recorder.references, self._num_references)
        self._num_references += len(references)
        node_type, arity, operand = find_operands(registry, calls, references)
        counts = np.array([t.num_results for t in registry.types], np.int64)[node_type]
        first = len(self._node_type)
        self._node_type.extend(node_type)
        self._lane.extend(np.full(len(node_type), -1))
        self._operand.extend(operand)
        self._operand_ptr.extend(self._operand_ptr.array[-1] + arity.cumsum())
        self._value_ptr.extend(self._value_ptr.array[-1] + counts.cumsum())
        self._value_node.extend(np.repeat(first + np.arange(len(node_type)), counts))
        self._input_group.extend(int64_of(recorder.input_group, len(self._input_group)))
        owner, *ends = int64_of(self._turns).reshape(-1, 3).T
        self._turns.clear()
        for column, end in zip((self._node_owner, self._input_owner), ends, strict=True):
            column.extend(np.repeat(owner, np.diff(end, prepend=len(column))))
        self._value_row.extend(np.full(len(self._value_node) - len(self._value_row), NOT_RUN))
        self._input_row.extend(np.full(len(self._input_owner) - len(self._input_row), -1))
        for begin, template, first_lane in self._replayed:
            layout = template.placed.layout
            offset = np.zeros(len(layout.lanes), np.int64)
            offset[list(template.placed.type_ids)] = first_lane
            self._lane.array[begin + template.nodes] = layout.lane + offset[layout.graph.node_type]
        self._replayed.clear()

    def _needed(self, values: np.ndarray) -> np.ndarray:
        """The nodes that values depend on and that have not run, instance after instance."""
        lane, maker = self._lane.array, self._value_node.array
        ptr, operand = self._operand_ptr.array, self._operand.array
        is_needed = np.zeros(len(lane), bool)
        nodes = maker[values[values >= 0]]
        while True:
            nodes = nodes[(lane[nodes] < 0) & ~is_needed[nodes]]
            if not len(nodes):
                break
            nodes = distinct(nodes)
            is_needed[nodes] = True
            read = operand[ranges(ptr[nodes], ptr[nodes + 1] - ptr[nodes])]
            nodes = maker[read[read >= 0]]
        nodes = np.flatnonzero(is_needed)
        return nodes[np.argsort(self._node_owner.array[nodes], kind="stable")]

    def _graph(self, nodes: np.ndarray) -> Graph:
        """The graph of some nodes; inputs and what others have computed is all the same to it.

        Its instances are those that have nodes in it: who they are makes no difference.
        """
        counts = np.diff(self._operand_ptr.array)[nodes]
        operand = self._operand.array[ranges(self._operand_ptr.array[nodes], counts)]
        local = np.full(len(self._value_node.array), -1)
        values = self._values_of(nodes)
        local[values] = np.arange(len(values))
        inner = operand >= 0
        operand[inner] = local[operand[inner]]
        changes = np.flatnonzero(np.diff(self._node_owner.array[nodes])) + 1
        owner = np.concatenate([[0], changes, [len(nodes)]]).astype(np.int64)
        nothing = np.zeros_like(owner)
        return Graph(
            self.recorder.registry.types,
            self._node_type.array[nodes],
            pointers(counts),
            np.maximum(operand, -1).astype(np.int32),
            (),
            np.zeros(0, np.int32),
            owner,
            nothing,
            nothing,
        )

    # --- computing ---

    def compute(self, values: np.ndarray, read: bool) -> tuple[Layout, list[np.ndarray]]:
        """Computes what values depend on: (what ran, the values if they are to be `read`)."""
        new = Recorded.since(self._first, self.recorder, self._turns)
        key = new.key(self.policy, values) if read else None
        known = None if key is None else self.programs.templates.get(key)
        computed = self._replay(known, new, values) if isinstance(known, RoundTemplate) else None
        if computed is None:
            computed = self._compute(values, read)
            if key is not None and known is None:
                self.programs.templates[key] = MET_ONCE
            elif key is not None and known == MET_ONCE:
                self.programs.templates[key] = self._template(new, values)
        self._first = Beginning.of(self.recorder, len(self._turns))
        return computed

    def _compute(self, values: np.ndarray, read: bool) -> tuple[Layout, list[np.ndarray]]:
        """Does the same for what may be unlike anything before."""
        self._take_in()
        nodes = self._needed(values)
        placed = self._plan(self._graph(nodes))
        layout = placed.layout
        offset = np.zeros(len(layout.lanes), np.int64)
        for t in np.flatnonzero(layout.lanes).tolist():
            offset[t] = self._lanes[t]
            self._lanes[t] += int(layout.lanes[t])
        counts = np.diff(layout.graph.operand_ptr)
        operand = self._operand.array[ranges(self._operand_ptr.array[nodes], counts)]
        fresh = self._enter_inputs(np.concatenate([operand, values]))
        wanted = self._by_kind(values) if read else {}
        self._make_capacity(layout, wanted)
        self._lane.array[nodes] = layout.lane + offset[layout.graph.node_type]
        self._find_rows(nodes)
        self._rounds.append((nodes, layout))
        rows = Rows(
            self.rows(operand),
            None,
            {kind: self.rows(values) for kind, values in wanted.items()},
            first_lane=offset[list(placed.type_ids)],
        )
        assert self.signature is not None
        lowered = lower(placed, self.signature, rows)
        assert lowered is not None
        self._check_rows(nodes, placed.type_ids)
        outputs = self._run(lowered.table, fresh)
        return layout, self._read(values, wanted, outputs) if read else []

    # --- rounds that were met before ---

    def _template(self, new: Recorded, values: np.ndarray) -> RoundTemplate | str:
        """Returns the template of the round that ran last; what says that there is none."""
        first, registry = new.first, self.recorder.registry
        nodes, layout = self._rounds[-1]
        ptr = self._operand_ptr.array
        places = ranges(ptr[nodes], ptr[nodes + 1] - ptr[nodes])
        operand = self._operand.array[places]
        inputs = distinct(-1 - first.inputs - operand[operand < -first.inputs])
        group = new.groups[inputs]
        numbers = distinct(group).tolist()
        if (nodes < first.nodes).any() or any(registry.groups[g][0] != "value" for g in numbers):
            return NO_TEMPLATE
        value_node = self._value_node.array[first.values :]
        num_values = len(value_node)
        source, old = find_sources(operand, first.values, first.inputs, num_values, inputs)
        widths = np.array([w for c in new.calls.tolist() for w in registry.call_specs[c].widths])
        part_of = np.repeat(np.arange(len(widths)), widths)
        part = ranges(np.zeros(len(widths), np.int64), widths)
        old_places = places[old] - ptr[first.nodes]
        node_type = self._node_type.array
        placed = self.programs.rounds[self._round_key(layout.graph)]
        kernel = np.zeros(len(registry.types), np.int64)
        kernel[list(placed.type_ids)] = np.arange(len(placed.type_ids))
        position = np.full(len(node_type) - first.nodes, -1)
        position[nodes - first.nodes] = np.arange(len(nodes))
        runs = position[value_node - first.nodes]
        lane = np.append(layout.lane, NOT_RUN)[runs]
        slot = first.values + np.arange(num_values) - self._value_ptr.array[value_node]
        pending = node_type[first.nodes + np.flatnonzero(position < 0)].tolist()
        return RoundTemplate(
            placed,
            nodes - first.nodes,
            np.where(runs < 0, 0, kernel[node_type[value_node]]),
            lane,
            np.where(runs < 0, 0, slot),
            source,
            part_of[old_places],
            part[old_places],
            inputs,
            tuple([(g, self._kind_of_group(g), np.flatnonzero(group == g)) for g in numbers]),
            {kind: own - first.values for kind, own in self._by_kind(values).items()},
            collections.Counter(pending),
        )

    def _replay(
        self, template: RoundTemplate, new: Recorded, values: np.ndarray
    ) -> tuple[Layout, list[np.ndarray]] | None:
        """Computes a round like one that was met before; None if its program has no room for it."""
        signature, first = self.signature, new.first
        bound = None if signature is None else template.bound_to(signature)
        if bound is None or signature is None:
            return None
        placed = template.placed
        first_lane = [self._lanes[t] for t in placed.type_ids]
        old = new.references[template.old_reference] + template.old_offset
        old_rows = self.rows(old)
        if not bound.has_lanes(first_lane) or not self._has_room(template.pending):
            return None
        if (old_rows < 0).any():  # something of an earlier round has to be computed first
            return None
        inputs, input_row = [], np.empty(len(template.inputs), np.int64)
        ends = collections.Counter(self._num_inputs)
        for group, kind, places in template.groups:
            input_row[places] = ends[kind] + np.arange(len(places))
            ends[kind] += len(places)
            inputs.append((kind, first.inputs + template.inputs[places], group))
        if any(ends[kind] > signature.input_rooms[kind] for kind, _, _ in inputs):
            return None
        for kind, numbers, group in inputs:
            group_of_each, owner = np.full(len(numbers), group), np.zeros(len(numbers), np.int64)
            recorder = self.recorder
            (chunk,) = cut_inputs(
                recorder.registry, recorder.input_value, numbers, owner, group_of_each
            )
            self._enter(kind, chunk, 0, numbers)
        lanes = np.array(first_lane, np.int64)
        value_row = bound.value_rows(lanes)
        table = bound.table(lanes, np.concatenate([value_row, input_row, old_rows]))
        self._value_row.extend(value_row)
        rows_of_all = np.full(len(new.groups), -1)
        rows_of_all[template.inputs] = input_row
        self._input_row.extend(rows_of_all)
        for t, used in zip(placed.type_ids, template.lanes, strict=True):
            self._lanes[t] += used
        for t, count in template.pending.items():
            self._lanes.setdefault(t, 0)
            self._waiting[t] += count
        self._replayed.append((first.nodes, template, lanes))
        nodes = first.nodes + template.nodes
        self._rounds.append((nodes, placed.layout))
        self._check_rows(nodes, placed.type_ids)
        outputs = self._run(table, {kind for kind, _, _ in inputs})
        wanted = {kind: own + first.values for kind, own in template.wanted.items()}
        return placed.layout, self._read(values, wanted, outputs)

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
        signature = self.signature
        assert signature is not None

        def nodes_of(t: int) -> np.ndarray:
            self._take_in()  # which has not been done if the round was met before
            return nodes[self._node_type.array[nodes] == t]

        check_look_ups(
            self.recorder.registry,
            type_ids,
            nodes_of,
            lambda mine, k: self._operand.array[self._operand_ptr.array[mine] + k],
            lambda kind: self._buffer(kind, signature.input_rooms[kind]),
            self._input_row.array,
            lambda node: int(self._node_owner.array[node]),
        )

    def _plan(self, graph: Graph) -> Placement:
        """Schedule and lanes of a graph; rounds of one structure are planned once."""
        key = self._round_key(graph)
        placed = self.programs.rounds.get(key)
        if placed is None:
            placed = self._place(graph, schedule(graph, self.policy), {}, stacked=False)
            self.programs.rounds[key] = placed
        return placed

    def _round_key(self, graph: Graph) -> Hashable:
        """Returns what the schedule and lanes of a graph depend on."""
        policy = self.policy
        parts = graph.node_type, graph.operand_ptr, graph.operand, graph.node_ptr
        version = None if policy is None else version_of(policy)
        return Same(policy), version, *(x.tobytes() for x in parts)

    def _place(
        self, graph: Graph, batches: Schedule, outputs: dict[Kind, list[int]], stacked: bool
    ) -> Placement:
        """Lays a graph out as rounds do it, lane after lane."""
        return self.programs.place(
            graph, batches, outputs, "append", stacked=stacked, keeps=True, reuse=False
        )

    def _enter_inputs(self, references: np.ndarray) -> set[Kind]:
        """Gives rows to the inputs among some references; returns the kinds that are new."""
        row, owner, registry = (
            self._input_row.array,
            self._input_owner.array,
            self.recorder.registry,
        )
        inputs = distinct(-1 - references[references < 0])
        inputs = inputs[row[inputs] < 0]
        if not len(inputs):
            return set()
        group, instance = self._input_group.array[inputs], owner[inputs]
        brought = [g for g in distinct(group).tolist() if registry.groups[g][0] == "value"]
        instance[np.isin(group, brought)] = -1  # all at once, whoever brings them
        order = np.lexsort((inputs, group, instance))
        inputs, group, instance = inputs[order], group[order], instance[order]
        begin = 0
        fresh = set()
        for chunk in cut_inputs(registry, self.recorder.input_value, inputs, instance, group):
            input_numbers = inputs[begin : begin + len(chunk)]
            begin += len(chunk)
            kind = stored(chunk.type)
            row[input_numbers] = np.arange(len(input_numbers)) + self._num_inputs[kind]
            self._enter(kind, chunk, int(owner[input_numbers[0]]), input_numbers)
            fresh.add(kind)
        return fresh

    def _enter(self, kind: Kind, chunk: InputRows, instance: int, numbers: np.ndarray) -> None:
        """Puts inputs of an instance, or values of any, behind the others of their arena."""
        rows = np.asarray(rows_of_inputs(chunk, self.arrays[instance], instance))
        self._num_inputs[kind] += len(numbers)
        self._inputs[kind].append(rows)
        self._chunks.append((chunk, instance, numbers))

    def _kind_of_group(self, group: int) -> Kind:
        registry = self.recorder.registry
        return stored(registry.value_types[registry.groups[group][1]])

    def _by_kind(self, values: np.ndarray) -> dict[Kind, np.ndarray]:
        """Values and inputs by the arena they are in."""
        by_kind: dict[Kind, list[int]] = collections.defaultdict(list)
        for value in values.tolist():
            by_kind[self.kind(value)].append(value)
        return {kind: np.array(numbers) for kind, numbers in by_kind.items()}

    def kind(self, value: int) -> Kind:
        """The kind of a value or an input."""
        if value < 0:
            return self._kind_of_group(self.recorder.input_group[-1 - value])
        node = int(self._value_node.array[value])
        results = self.recorder.registry.types[self._node_type.array[node]].results
        return stored(results[value - int(self._value_ptr.array[node])])

    def _make_capacity(self, layout: Layout, wanted: dict[Kind, np.ndarray]) -> None:
        """Goes on with a larger program if this one has no room for what comes.

        There must be room for what is known to come later, too: types that were recorded and have
        not run. Otherwise each would need a new program when its time has come.
        """
        target = self.programs.target
        chunks = layout.trips if target.control == "switch" else layout.trips > 0
        schedule = layout.schedule
        sizes = np.zeros(len(self.recorder.registry.types), np.int64)  # maybe more than it knew
        np.maximum.at(sizes, schedule.batch_type, np.diff(schedule.node_ptr))
        waiting = self._node_type.array[self._lane.array < 0]
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
        need = Capacity(
            {
                "lanes": lanes,
                "widest": widest,
                "inputs": dict(self._num_inputs),
                "outputs": {kind: len(values) for kind, values in wanted.items()},
                "num_instructions": {None: int(chunks.sum()) + 1},
            }
        )
        capacity = NO_CAPACITY if self.signature is None else self.signature.capacity
        if self.signature is None or not capacity.holds(need):
            before, self.signature = self.signature, grown_program(capacity, need, target)
            if not any(kernel.transient for kernel in self.signature.kernels):
                self.programs.workspaces[self.size] = self.signature
            if self.state is not None:
                executor = self._executor()
                self.state = executor.move(self.saving, before, self.state)
            self._buffers.clear()
            self._moved = True

    def _executor(self) -> Fused | Dispatch:
        assert self.signature is not None
        return self.programs.executor(self.signature, ())

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

    def _find_rows(self, nodes: np.ndarray) -> None:
        """Finds the rows of the results of nodes that run, and of all if arenas have moved."""
        if self._moved:
            nodes, self._moved = np.flatnonzero(self._lane.array >= 0), False
        values, bases = self._values_of(nodes), self._find_bases()
        node = self._value_node.array[values]
        slot = values - self._value_ptr.array[node]
        rows = bases[self._node_type.array[node], slot] + self._lane.array[node]
        self._value_row.array[values] = rows

    def rows(self, values: np.ndarray) -> np.ndarray:
        """int64[...], the rows of values and of inputs; below 0 if they have none yet."""
        of_inputs = self._input_row.take(-1 - values)
        return np.where(values < 0, of_inputs, self._value_row.take(values))

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
            self._take_in()
            self.trial.run(signature, table, self._num_inputs)
            self.trial.finish(*self.whole({}, stacked=True))
        outputs, self.state = executor.advance(
            self.saving, shared, tuple(inputs), table, self.state
        )
        return outputs

    def _buffer(self, kind: Kind, room: int) -> np.ndarray:
        """All inputs of a kind so far, up to capacity."""
        shape, dtype = kind
        rows = self._buffers.get(kind)
        if rows is None:
            rows = self._buffers[kind] = np.zeros((room, *shape), dtype)
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
        assert self.signature is not None
        found: dict[int, np.ndarray] = {}
        for kind, numbers in wanted.items():
            rows = np.asarray(outputs[self.signature.arena_ids[kind]])
            found |= {value: rows[i, ...] for i, value in enumerate(numbers.tolist())}
        return [found[value] for value in values.tolist()]

    # --- when all is computed ---

    def results(self, returned: dict[Kind, list[int]], stacked: bool) -> Any:
        """The rows of values that are returned, from each arena: exactly these if `stacked`."""
        signature = self.signature
        assert signature is not None
        places = []
        for kind in signature.arenas:
            references = np.array(returned.get(kind, ()), np.int64)
            rows = np.zeros(len(references) if stacked else round_up(len(references)), np.int32)
            rows[: len(references)] = self.rows(references)
            places.append(rows)
        picked = self._executor().pick(self.state, tuple(places))
        self.close()
        return picked

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

    def whole(self, returned: dict[Kind, list[int]], stacked: bool) -> tuple[Placement, Signature]:
        """All rounds as one plan, and the program whose reverse undoes them at once."""
        assert self.signature is not None
        self._take_in()
        nodes = np.concatenate([round_nodes for round_nodes, _ in self._rounds])
        nodes = nodes[np.lexsort((nodes, self._node_owner.array[nodes]))]
        order = [numbers for _, _, numbers in self._chunks]
        place = np.full(len(self._input_row.array), -1)
        inputs = np.concatenate(order) if order else np.zeros(0, np.int64)
        place[inputs] = np.arange(len(inputs))
        local_node = np.full(len(self._node_type.array), -1)
        local_node[nodes] = np.arange(len(nodes))
        part = self._graph(nodes)
        value = np.full(len(self._value_node.array), -1)
        value[self._values_of(nodes)] = np.arange(part.num_values)

        def moved(references: np.ndarray) -> np.ndarray:
            inner = references >= 0
            new_references = np.empty(len(references), np.int32)
            new_references[inner] = value[references[inner]]
            new_references[~inner] = -1 - place[-1 - references[~inner]]
            return new_references

        counts = np.diff(part.operand_ptr)
        read = self._operand.array[ranges(self._operand_ptr.array[nodes], counts)]
        graph = replace(
            part, operand=moved(read), inputs=tuple(chunk for chunk, _, _ in self._chunks)
        )
        schedules = [layout.schedule for _, layout in self._rounds]
        sizes = np.concatenate([np.diff(s.node_ptr) for s in schedules])
        every = Schedule(
            np.concatenate([s.batch_type for s in schedules]),
            pointers(sizes),
            np.concatenate(
                [
                    local_node[round_nodes[layout.schedule.node]]
                    for round_nodes, layout in self._rounds
                ]
            ).astype(np.int32),
        )
        outputs = {kind: moved(np.array(values)).tolist() for kind, values in returned.items()}
        placed = self._place(graph, every, outputs, stacked)
        layout = placed.layout
        if not np.array_equal(layout.lane, self._lane.array[nodes]):
            raise RuntimeError(
                "the rounds of a batched function and their reverse lay values out differently; "
                "this is a mistake in jedbatch, please report it"
            )
        rows = [len(returned.get(kind, ())) for kind in self.signature.arenas]
        switch = self.programs.target.control == "switch"  # which has an instruction for each chunk
        num_instructions = int(layout.trips.sum()) if switch else len(placed.runs)
        signature = replace(
            self.signature,
            outputs=tuple(n if stacked else round_up(n) for n in rows),
            num_instructions=max(self.signature.num_instructions, round_up(num_instructions)),
        )
        return placed, signature

    def _values_of(self, nodes: np.ndarray) -> np.ndarray:
        """The results of some nodes, in order."""
        ptr = self._value_ptr.array
        return ranges(ptr[nodes], ptr[nodes + 1] - ptr[nodes])

    def pull_back(self, arrays: PyTree, cotangents: Sequence[Any]) -> Any:
        """Cotangents of the instances' arrays from those of all input rows of each arena."""
        assert self.signature is not None
        parts, cotangents_given = [], []
        for chunk, instance, numbers in self._chunks:
            of_arena = cotangents[self.signature.arena(chunk.type)]
            if chunk.leaf is not None and of_arena is not None:
                first = int(self._input_row.array[numbers[0]])
                parts.append((chunk, instance))
                cotangents_given.append(of_arena[first : first + len(numbers)])

        def rows(arrays: PyTree) -> list[Any]:
            return [rows_of_inputs(chunk, arrays[i], i) for chunk, i in parts]

        return jax.vjp(rows, arrays)[1](cotangents_given)[0]
