"""`RecordedGraph`: all that was recorded, as one graph that grows, and the rows of its values.

What instances record is taken up when it is needed. Where rounds are like rounds before, it is not:
rows of values and inputs are all that the next round asks for, and they are known at once. So nodes
of several rounds may be taken up together, with the lanes that they have got by then.

When all is done, the rounds are one graph and one schedule, as the reverse undoes them at once
(`as_one`). A round that ran is the template of others that are recorded like it (`template_of`, see
`_program.round_template`).
"""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jedbatch._control_flow.recorded import Recorded
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import distinct, int64_of, pointers, ranges
from jedbatch._jaxpr.storage import Kind, stored
from jedbatch._program.capacity import round_up
from jedbatch._program.placement import Placement
from jedbatch._program.round_template import NOT_RUN, RoundTemplate, TemplateInputs, find_sources
from jedbatch._record.calls.fast_path import lists_of_ints
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.run.trace import host_rows
from jedbatch._schedule.schedule import Schedule
from jedbatch._support.types import Array, Dtype

References = Mapping[Kind, Sequence[int]]  # by arena: values, and inputs as `-1 - i`


class GrowingArray:
    """An array that grows at its end."""

    def __init__(self, dtype: Dtype):
        self._data = np.empty(256, dtype)
        self._size = 0

    def extend(self, values: Array) -> None:
        """Appends an array."""
        size = self._size + len(values)
        if size > len(self._data):
            self._data = np.resize(self._data, 2 * size)
        self._data[self._size : size] = values
        self._size = size

    def __len__(self) -> int:
        return self._size

    @property
    def array(self) -> np.ndarray:
        """All so far; a view."""
        return self._data[: self._size]

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Returns the items at some places; anything for those out of bounds."""
        return self._data.take(indices, mode="clip")


class RecordedGraph:
    """The recordings of the instances of a minibatch.

    Letters: `N` nodes, `V` their results, `I` inputs.

    Attributes:
      turns: of each turn that is not taken up its instance, and nodes and inputs in all at its end.
      node_type, node_owner, lane: [N]; the lane is -1 before the node runs.
      operand_ptr, operand: [N + 1] and what nodes read: values, and inputs as `-1 - i`.
      value_ptr, value_node: [N + 1] and [V].
      value_row: [V], below 0 before it is computed.
      input_owner, input_group, input_row: [I]; the row is -1 before it is used.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        (self.turns,) = lists_of_ints(recorder.result, 1)
        self._ran: list[tuple[np.ndarray, RoundTemplate, np.ndarray]] = []
        self._ran_ahead: list[tuple[np.ndarray, np.ndarray]] = []  # nodes and their lanes
        self.node_type = GrowingArray(np.int32)
        self.node_owner = GrowingArray(np.int32)
        self.lane = GrowingArray(np.int64)
        self.operand_ptr = GrowingArray(np.int64)
        self.operand = GrowingArray(np.int64)
        self.value_ptr = GrowingArray(np.int64)
        self.value_node = GrowingArray(np.int64)
        self.value_row = GrowingArray(np.int64)
        self.input_owner = GrowingArray(np.int32)
        self.input_group = GrowingArray(np.int64)
        self.input_row = GrowingArray(np.int64)
        self.operand_ptr.extend([0])
        self.value_ptr.extend([0])

    def note_turn(self, instance: int) -> None:
        """An instance has recorded what is new since the last note."""
        recorder = self.recorder
        self.turns += (instance, len(recorder.call_specs), len(recorder.input_group))

    def note_run(
        self,
        new: Recorded,
        template: RoundTemplate,
        first_lane: np.ndarray,
        rows: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """Notes that what was recorded last runs like a round before; returns the nodes that run.

        Args:
          new: what was recorded.
          template: of the round.
          first_lane: int64[K], of each of its kernels.
          rows: of its values and of its inputs.
        """
        nodes = new.nodes_at(template.nodes)
        self._ran.append((nodes, template, first_lane))
        if len(self.value_row) == new.first.values and len(self.input_row) == new.first.inputs:
            self.value_row.extend(rows[0])
            self.input_row.extend(rows[1])
        else:  # it has been taken up, or a part of it was foreseen
            self.value_row.array[new.values_at(np.arange(len(rows[0])))] = rows[0]
            self.input_row.array[new.inputs_at(np.arange(len(rows[1])))] = rows[1]
        return nodes

    def note_ahead(
        self,
        nodes: tuple[np.ndarray, np.ndarray],
        values: tuple[np.ndarray, np.ndarray],
        inputs: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Notes that some of what was recorded since the last round has been computed.

        Args:
          nodes: some nodes, and their lanes.
          values: their results, and the rows of these.
          inputs: what they read, and the rows of these.
        """
        self._ran_ahead.append(nodes)
        self._make_room_for_rows()
        for column, (numbers, rows) in ((self.value_row, values), (self.input_row, inputs)):
            column.array[numbers] = rows

    def _make_room_for_rows(self) -> None:
        """Has a place for the row of every value and input that is recorded, taken up or not."""
        recorder = self.recorder
        self.value_row.extend(np.full(recorder.num_values - len(self.value_row), NOT_RUN))
        self.input_row.extend(np.full(len(recorder.input_group) - len(self.input_row), -1))

    def inputs_left(self, values: np.ndarray) -> dict[int, np.ndarray] | None:
        """Returns the inputs among some values that have no rows yet, by group.

        None if a value has yet to be computed, or if one of these inputs is a part of an array.
        """
        computed = values[values >= 0]
        if len(computed) and int(computed.max()) >= len(self.value_row):
            return None
        if (self.value_row.take(computed) < 0).any():
            return None
        self._make_room_for_rows()
        inputs = distinct(-1 - values[values < 0])
        inputs = inputs[self.input_row.take(inputs) < 0]
        given = self.recorder.input_group
        groups = np.array([given[i] for i in inputs.tolist()], np.int64)
        present = distinct(groups).tolist()
        if not all(self.is_brought(present)):
            return None
        return {g: inputs[groups == g] for g in present}

    def results_given(
        self, groups: Mapping[int, np.ndarray], returned: References
    ) -> dict[Kind, np.ndarray]:
        """Returns the rows that arenas return, of those that return inputs of one group alone.

        Args:
          groups: inputs that functions bring, by group.
          returned: what each arena returns.
        """
        found, registry, given = {}, self.recorder.registry, self.recorder.input_value
        for g, numbers in groups.items():
            kind, value_type = self.kind_of_group(g), registry.value_types[registry.groups[g][1]]
            references = returned.get(kind, ())
            if set(references) == set((-1 - numbers).tolist()):
                rows = host_rows([given[-1 - r] for r in references], value_type)
                found[kind] = rows.astype(kind[1], copy=False)
        return found

    def rows_returned(
        self,
        arenas: Sequence[Kind],
        returned: References,
        given: Mapping[Kind, np.ndarray],
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray | None, ...]]:
        """Returns where in each arena its results are, and results that are in none.

        There are more rows than results, so that few numbers of rows occur.

        Args:
          arenas: all of them.
          returned: what each arena returns.
          given: the results of some arenas that are not in them.
        """
        places, results = [], []
        for kind in arenas:
            references = np.array(returned.get(kind, ()), np.int64)
            count = round_up(len(references))
            rows = given.get(kind)
            places.append(np.zeros(count if rows is None else 0, np.int32))
            if rows is None:
                places[-1][: len(references)] = self.rows(references)
            results.append(None if rows is None else np.resize(rows, (count, *rows.shape[1:])))
        return tuple(places), tuple(results)

    def take_up(self) -> None:
        """Takes up what was recorded since the last time."""
        recorder, registry = self.recorder, self.recorder.registry
        node_type = int64_of(recorder.call_specs, len(self.node_type))
        operand = int64_of(recorder.references, len(self.operand))
        arity = registry.arity[node_type]
        counts = np.array([t.num_results for t in registry.types], np.int64)[node_type]
        first = len(self.node_type)
        self.node_type.extend(node_type)
        self.lane.extend(np.full(len(node_type), -1))
        self.operand.extend(operand)
        self.operand_ptr.extend(self.operand_ptr.array[-1] + arity.cumsum())
        self.value_ptr.extend(self.value_ptr.array[-1] + counts.cumsum())
        self.value_node.extend(np.repeat(first + np.arange(len(node_type)), counts))
        self.input_group.extend(int64_of(recorder.input_group, len(self.input_group)))
        owner, *ends = int64_of(self.turns).reshape(-1, 3).T
        self.turns.clear()
        for column, end in zip((self.node_owner, self.input_owner), ends, strict=True):
            column.extend(np.repeat(owner, np.diff(end, prepend=len(column))))
        self.value_row.extend(np.full(len(self.value_node) - len(self.value_row), NOT_RUN))
        self.input_row.extend(np.full(len(self.input_owner) - len(self.input_row), -1))
        for nodes, template, first_lane in self._ran:
            layout = template.placed.layout
            offset = np.zeros(len(layout.lanes), np.int64)
            offset[list(template.placed.type_ids)] = first_lane
            self.lane.array[nodes] = layout.lane + offset[layout.graph.node_type]
        for nodes, lanes in self._ran_ahead:
            self.lane.array[nodes] = lanes
        self._ran.clear()
        self._ran_ahead.clear()

    def needed(self, values: np.ndarray) -> np.ndarray:
        """The nodes that values depend on and that have not run, instance after instance."""
        lane, maker = self.lane.array, self.value_node.array
        ptr, operand = self.operand_ptr.array, self.operand.array
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
        return nodes[np.argsort(self.node_owner.array[nodes], kind="stable")]

    def part(self, nodes: np.ndarray) -> Graph:
        """The graph of some nodes; inputs and what others have computed is all the same to it.

        Its instances are those that have nodes in it: who they are makes no difference.
        """
        counts = np.diff(self.operand_ptr.array)[nodes]
        operand = self.operands_of(nodes)
        local = np.full(len(self.value_node), -1)
        values = self.values_of(nodes)
        local[values] = np.arange(len(values))
        inner = operand >= 0
        operand[inner] = local[operand[inner]]
        changes = np.flatnonzero(np.diff(self.node_owner.array[nodes])) + 1
        node_ptr = np.concatenate([[0], changes, [len(nodes)]]).astype(np.int64)
        nothing = np.zeros_like(node_ptr)
        return Graph(
            self.recorder.registry.types,
            self.node_type.array[nodes],
            pointers(counts),
            np.maximum(operand, -1).astype(np.int32),
            (),
            np.zeros(0, np.int32),
            node_ptr,
            nothing,
            nothing,
        )

    def operand_places(self, nodes: np.ndarray) -> np.ndarray:
        """The places of what some nodes read among all operands, in order."""
        ptr = self.operand_ptr.array
        return ranges(ptr[nodes], ptr[nodes + 1] - ptr[nodes])

    def operands_of(self, nodes: np.ndarray) -> np.ndarray:
        """Returns the references that some nodes read, in order."""
        return self.operand.array[self.operand_places(nodes)]

    def values_of(self, nodes: np.ndarray) -> np.ndarray:
        """The results of some nodes, in order."""
        ptr = self.value_ptr.array
        return ranges(ptr[nodes], ptr[nodes + 1] - ptr[nodes])

    def by_kind(self, values: np.ndarray) -> dict[Kind, np.ndarray]:
        """Values and inputs by the arena they are in."""
        values = np.asarray(values, np.int64)
        code, is_value = np.empty(len(values), np.int64), values >= 0
        node = self.value_node.array[values[is_value]]
        slot = values[is_value] - self.value_ptr.array[node]
        code[is_value] = self.node_type.array[node] + slot * len(self.recorder.registry.types)
        code[~is_value] = -1 - self.input_group.array[-1 - values[~is_value]]
        _, first, like = np.unique(code, return_index=True, return_inverse=True)
        kinds = [self.kind(value) for value in values[first].tolist()]
        number = {kind: k for k, kind in enumerate(dict.fromkeys(kinds))}
        of_each = np.array([number[kind] for kind in kinds], np.int64)[like]
        found = [(kind, np.flatnonzero(of_each == k)) for kind, k in number.items()]
        return {kind: values[x] for kind, x in sorted(found, key=lambda pair: pair[1][0])}

    def kind(self, value: int) -> Kind:
        """The kind of a value or an input."""
        if value < 0:
            return self.kind_of_group(self.recorder.input_group[-1 - value])
        node = int(self.value_node.array[value])
        results = self.recorder.registry.types[self.node_type.array[node]].results
        return stored(results[value - int(self.value_ptr.array[node])])

    def kind_of_group(self, group: int) -> Kind:
        """The kind of the inputs of a group."""
        registry = self.recorder.registry
        return stored(registry.value_types[registry.groups[group][1]])

    def is_brought(self, groups: Sequence[int]) -> list[bool]:
        """Whether inputs of groups are numbers and arrays that functions bring, for each of them.

        Others are parts of the arrays of an instance.
        """
        return [self.recorder.registry.groups[g][0] == "value" for g in groups]

    def find_rows(self, nodes: np.ndarray, bases: np.ndarray) -> None:
        """Finds the rows of the results of nodes that have lanes.

        Args:
          nodes: the nodes.
          bases: int64[T, R], the row of the first lane, for each result of each type.
        """
        values = self.values_of(nodes)
        node = self.value_node.array[values]
        slot = values - self.value_ptr.array[node]
        rows = bases[self.node_type.array[node], slot] + self.lane.array[node]
        self.value_row.array[values] = rows

    def rows(self, values: np.ndarray) -> np.ndarray:
        """int64[...], the rows of values and of inputs; below 0 if they have none yet."""
        of_inputs = self.input_row.take(-1 - values)
        return np.where(values < 0, of_inputs, self.value_row.take(values))


def as_one(
    recorded: RecordedGraph,
    rounds: Sequence[tuple[np.ndarray, Placement]],
    chunks: Sequence[tuple[InputRows, int, np.ndarray]],
    returned: Mapping[Kind, Sequence[int]],
) -> tuple[np.ndarray, Graph, Schedule, dict[Kind, list[int]]]:
    """Returns (the nodes that ran, their graph, its batches, what each arena returns).

    Args:
      recorded: all that was recorded.
      rounds: the nodes of each, and the same in batches.
      chunks: inputs in the order of their rows, with the instance and the numbers of each chunk.
      returned: values by arena, as they were recorded; in the result, as they are in the graph.
    """
    recorded.take_up()
    nodes = np.concatenate([round_nodes for round_nodes, _ in rounds])
    nodes = nodes[np.lexsort((nodes, recorded.node_owner.array[nodes]))]
    order = [numbers for _, _, numbers in chunks]
    place = np.full(len(recorded.input_row), -1)
    inputs = np.concatenate(order) if order else np.zeros(0, np.int64)
    place[inputs] = np.arange(len(inputs))
    local_node = np.full(len(recorded.node_type), -1)
    local_node[nodes] = np.arange(len(nodes))
    part = recorded.part(nodes)
    value = np.full(len(recorded.value_node), -1)
    value[recorded.values_of(nodes)] = np.arange(part.num_values)

    def moved(references: np.ndarray) -> np.ndarray:
        inner = references >= 0
        new_references = np.empty(len(references), np.int32)
        new_references[inner] = value[references[inner]]
        new_references[~inner] = -1 - place[-1 - references[~inner]]
        return new_references

    read = recorded.operands_of(nodes)
    graph = replace(part, operand=moved(read), inputs=tuple(chunk for chunk, _, _ in chunks))
    schedules = [placed.schedule for _, placed in rounds]
    sizes = np.concatenate([np.diff(s.node_ptr) for s in schedules])
    batches = [local_node[own[placed.schedule.node]] for own, placed in rounds]
    every = Schedule(
        np.concatenate([s.batch_type for s in schedules]),
        pointers(sizes),
        np.concatenate(batches).astype(np.int32),
    )
    return nodes, graph, every, {k: moved(np.array(v)).tolist() for k, v in returned.items()}


def template_of(
    graph: RecordedGraph, new: Recorded, nodes: np.ndarray, placed: Placement, values: np.ndarray
) -> RoundTemplate | None:
    """Returns the template of the round that ran last; None if it cannot be repeated.

    A round that runs nodes of earlier rounds cannot.

    Args:
      graph: all that was recorded.
      new: what was recorded since the round before.
      nodes: those that ran.
      placed: the same in batches.
      values: what was wanted.
    """
    first, registry, layout = new.first, graph.recorder.registry, placed.layout
    place, operand = new.node_places(nodes), new.counted(graph.operands_of(nodes))
    inputs = distinct(-1 - first.inputs - operand[operand < -first.inputs])
    groups = distinct(new.groups[inputs]).tolist()
    if (place < 0).any():
        return None
    num_nodes, num_values = len(new.calls), new.num_values
    own_nodes, own_values = (
        new.nodes_at(np.arange(num_nodes)),
        new.values_at(np.arange(num_values)),
    )
    value_node = graph.value_node.array[own_values]
    source, old = find_sources(operand, first.values, first.inputs, num_values, inputs)
    arity = np.diff(graph.operand_ptr.array)[own_nodes]
    places = ranges(pointers(arity)[place], arity[place])[old]
    node_type = graph.node_type.array
    kernel = np.zeros(len(registry.types), np.int64)
    kernel[list(placed.type_ids)] = np.arange(len(placed.type_ids))
    position = np.full(num_nodes, -1)
    position[place] = np.arange(len(nodes))
    runs = position[new.node_places(value_node)]
    slot = own_values - graph.value_ptr.array[value_node]
    pending = node_type[own_nodes[position < 0]]
    return RoundTemplate(
        placed,
        place,
        np.where(runs < 0, 0, kernel[node_type[value_node]]),
        np.append(layout.lane, NOT_RUN)[runs],
        np.where(runs < 0, 0, slot),
        source,
        places,
        inputs,
        len(new.groups),
        tuple([_inputs_of(graph, new, inputs, g) for g in groups]),
        {kind: new.value_places(own) for kind, own in graph.by_kind(values).items()},
        collections.Counter(pending.tolist()),
    )


def _inputs_of(
    graph: RecordedGraph, new: Recorded, inputs: np.ndarray, group: int
) -> TemplateInputs:
    """Returns those among the inputs of a round that belong to a group."""
    registry = graph.recorder.registry
    value_type = registry.value_types[registry.groups[group][1]]
    places = np.flatnonzero(new.groups[inputs] == group)
    numbers, (is_brought,) = inputs[places].tolist(), graph.is_brought([group])
    return TemplateInputs(value_type, graph.kind_of_group(group), places, numbers, is_brought)
