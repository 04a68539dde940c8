"""Nodes of a recording, and how they are written with some of them as one."""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.storage import is_key
from jedbatch._record.operations.operators import PICK
from jedbatch._record.passes.fuse import Merged
from jedbatch._record.passes.node_arrays import NodeArrays
from jedbatch._record.types.list_cells import LONG
from jedbatch._record.types.registry import CallSpec, Registry
from jedbatch._support.types import Leaf


class ListRegion(NamedTuple):
    """Nodes that become one.

    Attributes:
      group: equal for regions that read elements of each other.
      nodes: in the order of recording.
      call_spec: how the one is recorded.
      read: the values it reads, and (value, row) of values of earlier regions or of inputs.
      length: of its lists.
      unstacked: the values it makes whose rows are results; these come first.
      left: the others it makes that are read elsewhere or returned.
      stacks: those that it reads the elements of.
    """

    group: int
    nodes: list[int]
    call_spec: CallSpec
    read: list[int | tuple[int, int]]
    length: int
    unstacked: list[int]
    left: list[int]
    stacks: list[int]


class RecordedNodes:
    """Nodes of a recording, some of which stack lists.

    Attributes:
      nodes: as arrays; `ptr`, `operand`, `start`, `maker` and `node_type` are those, as lists.
      stacks: the nodes that stack a list, in order.
      returned: the values that instances return.
      readers: the nodes that read a value, by value.
      input_kind: the type of each input that is found to have a row for each element of a list.
    """

    def __init__(self, registry: Registry, nodes: NodeArrays, stacks: Sequence[int]):
        self.nodes = nodes
        self.registry = registry
        self.stacks = dict.fromkeys(stacks)
        self.ptr, self.operand = nodes.ptr.tolist(), nodes.operand.tolist()
        self.start, self.maker = nodes.start.tolist(), nodes.maker.tolist()
        self.node_type = nodes.node_type.tolist()
        self.returned = {v for v in nodes.outputs if v >= 0}
        self.input_kind: dict[int, ValueType] = {}
        self.readers: dict[int, list[int]] = {}
        for n, r in zip(nodes.reader.tolist(), self.operand, strict=True):
            if r >= 0:
                self.readers.setdefault(r, []).append(n)

    def reads(self, node: int) -> list[int]:
        """Returns the values and inputs that a node reads."""
        return self.operand[self.ptr[node] : self.ptr[node + 1]]

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
        how, kind, *_ = self.registry.groups[self.nodes.input_group[~reference]]
        return how == "value" and not is_key(self.registry.value_types[kind].dtype)

    def leaves(self, value: int, inside: set[int]) -> bool:
        """Returns whether a value of some nodes is read elsewhere or returned."""
        return value in self.returned or any(r not in inside for r in self.readers.get(value, ()))

    def picks(self, node: int) -> bool:
        """Returns whether a node is `value[i]` with a number, of a value with few rows."""
        picked = self.registry.node_types[self.node_type[node]]
        if picked.name != PICK or len(picked.operands) != 2 or self.reads(node)[1] >= 0:
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

    def written(self, order: Sequence[int | ListRegion], instance_ends: Sequence[int]) -> Merged:
        """Returns nodes and regions in some order; `instance_ends` counts those of instances."""
        place: dict[int, int] = {}  # of values, by the number that they had
        first_row: dict[int, int] = {}  # the place of the first row of those whose rows are results
        num_values = 0
        unread = self._unread_stacks([unit for unit in order if isinstance(unit, ListRegion)])
        call_specs: list[int] = []
        references: list[int] = []
        inputs = _Inputs(self.registry, self.nodes)
        outputs: list[int] = []
        recorded = self.nodes.call_spec.tolist()
        counts: list[tuple[int, ...]] = [(0, 0, 0, 0)]
        for n, (begin, end) in enumerate(itertools.pairwise(instance_ends)):
            inputs.begin(n)
            for unit in order[begin:end]:
                if isinstance(unit, ListRegion):
                    read, left = unit.read, unit.left
                    call_specs.append(unit.call_spec.node_type)
                    for v in unit.unstacked:
                        first_row[v] = num_values
                        num_values += unit.length
                elif unit in unread:
                    read, left = [], []
                elif (row := self._picked(unit, place, first_row, unread, inputs)) is not None:
                    place[self.start[unit]] = row
                    read, left = [], []
                else:
                    read, left = list(self.reads(unit)), list(self.values(unit))
                    call_specs.append(recorded[unit])
                for r in read:
                    if not isinstance(r, tuple):
                        references.append(place[r] if r >= 0 else inputs.moved(r))
                    elif r[0] >= 0:
                        references.append(first_row[r[0]] + r[1])
                    else:
                        references.append(inputs.row(*r, self.input_kind[r[0]]))
                place.update(zip(left, itertools.count(num_values), strict=False))
                num_values += len(left)
            (*_, first), (*_, last) = self.nodes.ends[n : n + 2]
            returned = self.nodes.outputs[first:last]
            outputs += [place[r] if r >= 0 else inputs.moved(r) for r in returned]
            counts.append((len(call_specs), len(references), len(inputs.group), len(outputs)))
        columns = call_specs, references, inputs.group, inputs.value
        return Merged(columns, outputs, counts)

    def _unread_stacks(self, regions: Sequence[ListRegion]) -> set[int]:
        """Returns the stacks that nobody reads as a whole: regions read their elements."""
        readers: dict[int, set[int]] = {}
        for region in regions:
            for stack in region.stacks:
                readers.setdefault(stack, set()).update(region.nodes)
        return {
            n
            for n, own in readers.items()
            if (value := self.start[n]) not in self.returned
            and all(r in own or self._picks_element(r) for r in self.readers[value])
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
        place: dict[int, int],
        first_row: dict[int, int],
        unread: set[int],
        inputs: "_Inputs",
    ) -> int | None:
        """Returns where the row is that `value[i]` gives, if it is a value by itself."""
        if not self.picks(node):
            return None
        value, row = self.reads(node)
        number = self.nodes.input_value[~row]
        if value in first_row:
            return first_row[value] + number
        if value >= 0 and self.maker[value] in unread:
            element = self.reads(self.maker[value])[number]
            return place[element] if element >= 0 else inputs.moved(element)
        return None


class _Inputs:
    """The inputs of instances, some of which are given by their rows.

    Attributes:
      group, value: as a recorder has them.
    """

    def __init__(self, registry: Registry, nodes: NodeArrays):
        self.group: list[int] = []
        self.value: list[Leaf] = []
        self._registry = registry
        self._nodes = nodes
        self._down = 0  # how much later than before inputs of this instance are
        self._first_row: dict[int, int] = {}

    def begin(self, instance: int) -> None:
        """Adds the inputs of the next instance."""
        first, last = (i for _, i, _ in self._nodes.ends[instance : instance + 2])
        self._down = len(self.group) - first
        self.group += self._nodes.input_group[first:last]
        self.value += self._nodes.input_value[first:last]

    def moved(self, reference: int) -> int:
        """Returns how an input of this instance is referred to now."""
        return reference - self._down

    def row(self, reference: int, row: int, kind: ValueType) -> int:
        """Returns how to refer to a row of an input of this instance, of some type."""
        if reference not in self._first_row:
            self._first_row[reference] = len(self.group)
            rows = np.asarray(self._nodes.input_value[~reference])
            of_row = self._registry.value_type(kind.shape[1:], kind.dtype, kind.weak)
            self.group += [self._registry.group("value", of_row)] * len(rows)
            self.value += rows.tolist() if rows.ndim == 1 else list(rows)
        return -1 - self._first_row[reference] - row
