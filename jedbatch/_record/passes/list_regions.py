"""Nodes of a recording, and how some of them become one."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows, held_values
from jedbatch._graph.paths import pointers
from jedbatch._graph.rewrite import Rewrite, rewrite, with_inputs
from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.storage import is_key
from jedbatch._record.operations.indexing import PICK
from jedbatch._record.passes.list_axes import Axes
from jedbatch._record.types.list_cells import LONG
from jedbatch._record.types.registry import CallSpec, Registry


class ListRegion(NamedTuple):
    """Nodes that become one.

    Attributes:
      group: equal for regions that read elements of each other.
      nodes: in the order of recording.
      call_spec: how the one is recorded.
      read: the values it reads, and (value, row) of values of earlier regions or of inputs.
      unstacked: the values it makes whose rows are results; these come first.
      left: the others it makes that are read elsewhere or returned.
      stacks: those that it reads the elements of.
    """

    group: int
    nodes: list[int]
    call_spec: CallSpec
    read: list[int | tuple[int, int]]
    unstacked: list[int]
    left: list[int]
    stacks: list[int]


class RecordedNodes:
    """Nodes of a recording, some of which stack lists.

    Attributes:
      graph: of them; `ptr`, `operand`, `start`, `maker` and `node_type` are its arrays, as lists.
      inputs: the values of its inputs.
      stacks: the nodes that stack a list, in order.
      returned: the values that instances return.
      readers: the nodes that read a value, by value.
      input_kind: the type of each input that is found to have a row for each element of a list.
      axes_of: by value or such an input, its axes that are as long as lists.
      each_of: the rows of each element along them, by value.
    """

    def __init__(self, registry: Registry, graph: Graph, stacks: Sequence[int]):
        self.graph = graph
        self.inputs = held_values(graph.inputs)
        self.registry = registry
        self.stacks = dict.fromkeys(stacks)
        self.ptr, self.operand = graph.operand_ptr.tolist(), graph.operand.tolist()
        self.start, self.maker = graph.value_ptr.tolist(), graph.value_node.tolist()
        self.node_type = graph.node_type.tolist()
        self.returned = {v for v in graph.outputs.tolist() if v >= 0}
        self.input_kind: dict[int, ValueType] = {}
        self.axes_of: dict[int, Axes] = {}
        self.each_of: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for n, r in zip(graph.operand_reader.tolist(), self.operand, strict=True):
            if r >= 0:
                self.readers.setdefault(r, []).append(n)

    def reads(self, node: int) -> list[int]:
        """Returns the values and inputs that a node reads."""
        return self.operand[self.ptr[node] : self.ptr[node + 1]]

    def name(self, node: int) -> str:
        """The name of the operation of a node."""
        return self.registry.node_types[self.node_type[node]].name

    def makers(self, node: int) -> list[int]:
        """Returns the nodes that made the values that a node reads."""
        return [self.maker[r] for r in self.reads(node) if r >= 0]

    def values(self, node: int) -> range:
        """The values that a node makes."""
        return range(self.start[node], self.start[node + 1])

    def type_of(self, value: int) -> ValueType:
        maker = self.maker[value]
        results = self.registry.node_types[self.node_type[maker]].results
        return results[value - self.start[maker]]

    def kinds(self, node: int) -> Sequence[int]:
        operands = self.registry.node_types[self.node_type[node]].operands
        return self.registry.kinds_of(operands)

    def is_given(self, reference: int) -> bool:
        """Returns whether an input is an array that is at hand, whose rows can be inputs."""
        which = self.inputs.which[~reference]
        return bool(which >= 0) and not is_key(self.inputs.types[which].dtype)

    def leaves(self, value: int, inside: set[int]) -> bool:
        """Returns whether a value of some nodes is read elsewhere or returned."""
        return value in self.returned or any(r not in inside for r in self.readers.get(value, ()))

    def picks(self, node: int) -> bool:
        """Returns whether a node is `value[i]` with a number, of a value with few rows."""
        picked = self.registry.node_types[self.node_type[node]]
        if picked.name != PICK or len(picked.operands) != 2:
            return False
        index = self.reads(node)[1]
        if index >= 0 or self.inputs.which[~index] < 0:
            return False
        rows = picked.operands[0].shape
        operation, *_ = operation_of(picked).key
        return operation == (PICK, (None, *rows[1:])) and rows[0] <= LONG

    def ordered(self, begin: int, end: int, regions: list[ListRegion]) -> list[int | ListRegion]:
        """Returns nodes and regions of an instance, each after what it reads.

        Of regions that wait for each other, the last one is left as it was.
        """
        if not regions:
            return list(range(begin, end))
        of = {n: region for region in regions for n in region.nodes}
        place = {n: of[n].nodes[-1] if n in of else n for n in range(begin, end)}
        waits: dict[int, set[int]] = {unit: set() for unit in place.values()}
        for n, unit in place.items():
            makers = (self.maker[r] for r in self.reads(n) if r >= 0)
            waits[unit].update(place[m] for m in makers if place[m] != unit)
        readers: dict[int, list[int]] = {}
        for unit, makers_of in waits.items():
            for m in makers_of:
                readers.setdefault(m, []).append(unit)
        ready = [unit for unit, makers_of in waits.items() if not makers_of]
        heapq.heapify(ready)
        order: list[int | ListRegion] = []
        while ready:
            unit = heapq.heappop(ready)
            order.append(of.get(unit, unit))
            for reader in readers.get(unit, ()):
                waits[reader].discard(unit)
                if not waits[reader]:
                    heapq.heappush(ready, reader)
        if len(order) == len(waits):
            return order
        stuck = [r.group for r in regions if waits[r.nodes[-1]]]
        return self.ordered(begin, end, [r for r in regions if r.group != stuck[-1]])

    def merged(self, order: Sequence[int | ListRegion], places: Sequence[int]) -> Graph:
        """Returns nodes and regions in some order, each in its instance, as nodes.

        `places` ascend, and are those of nodes of the instance.
        """
        graph = self.graph
        kept = np.ones(len(graph.node_type), bool)
        rank = np.arange(len(kept))
        value = list(range(graph.num_values))
        first_row: dict[int, int] = {}  # the first row of values whose rows are results
        unread = self.unread_stacks([unit for unit in order if isinstance(unit, ListRegion)])
        num_values = graph.num_values
        new_rows = _NewRows(self)
        anchor: list[int] = []
        node_type: list[int] = []
        arity: list[int] = []
        operand: list[int] = []
        for place, unit in zip(places, order, strict=True):
            if not isinstance(unit, ListRegion):
                rank[unit] = place
                row = self._picked(unit, value, first_row, unread)
                kept[unit] = row is None and unit not in unread
                if row is not None:
                    value[self.start[unit]] = row
                continue
            kept[unit.nodes] = False
            rank[unit.nodes[-1]] = place
            anchor.append(unit.nodes[-1])
            node_type.append(unit.call_spec.node_type)
            arity.append(len(unit.read))
            for r in unit.read:
                if not isinstance(r, tuple):
                    operand.append(value[r] if r >= 0 else r)
                elif r[0] >= 0:
                    operand.append(first_row[r[0]] + r[1])
                else:
                    operand.append(new_rows.row(*r))
            for v in unit.unstacked:
                first_row[v] = num_values
                num_values += self.type_of(v).shape[0]
            for v in unit.left:
                value[v] = num_values
                num_values += 1
        change = Rewrite(
            kept,
            np.array(anchor, np.int64),
            np.array(node_type, np.int32),
            pointers(np.array(arity, np.int64)),
            np.array(operand, np.int64),
            np.array(value, np.int64),
            rank,
        )
        return with_inputs(rewrite(graph, change, self.registry.types), new_rows.added)

    def unread_stacks(self, regions: Sequence[ListRegion]) -> set[int]:
        """Returns the stacks that nobody reads as a whole, but for regions that read elements."""
        readers: dict[int, set[int]] = {n: set() for n in self.stacks}
        for region in regions:
            for stack in region.stacks:
                readers[stack].update(region.nodes)
        return {
            n
            for n, own in readers.items()
            if (value := self.start[n]) not in self.returned
            and all(r in own or self._picks_element(r) for r in self.readers.get(value, ()))
        }

    def _picks_element(self, node: int) -> bool:
        """Returns whether a node gives an element of a stack as it was before."""
        if not self.picks(node):
            return False
        types = self.registry.node_types
        stack = types[self.node_type[self.maker[self.reads(node)[0]]]]
        return types[self.node_type[node]].results == stack.operands[:1]

    def _picked(
        self,
        node: int,
        value: Sequence[int],
        first_row: dict[int, int],
        unread: set[int],
    ) -> int | None:
        """Returns what stands for the row that `value[i]` gives, if it is a value by itself."""
        if not self.picks(node):
            return None
        of, row = self.reads(node)
        number = int(self.inputs.value(~row))
        if of in first_row:
            return first_row[of] + number
        if of >= 0 and self.maker[of] in unread:
            element = self.reads(self.maker[of])[number]
            return value[element] if element >= 0 else element
        return None


class _NewRows:
    """Rows of inputs that become inputs.

    Attributes:
      added: as `with_inputs` takes them.
    """

    def __init__(self, recorded: RecordedNodes):
        self._recorded = recorded
        self._first: dict[int, int] = {}
        self._next = -1 - recorded.graph.num_inputs
        self.added: list[tuple[int, InputRows]] = []

    def row(self, reference: int, row: int) -> int:
        """Returns how to refer to a row of an input."""
        if reference not in self._first:
            recorded = self._recorded
            rows = recorded.inputs.value(~reference)
            kind = recorded.input_kind[reference]
            owner = int(np.searchsorted(recorded.graph.input_ptr, ~reference, side="right")) - 1
            of_row = ValueType(kind.shape[1:], kind.dtype, kind.weak)
            self.added.append((owner, InputRows(of_row, rows)))
            self._first[reference] = self._next
            self._next -= len(rows)
        return self._first[reference] - row
