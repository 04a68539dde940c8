"""Lists outside of cells: what is done with a stack of values becomes one node.

Operations on `jnp.stack(values)`, for a Python list of values of the instance, have a type for each
length of the list: ten operations of attention over up to twelve sentences are 120 types. Once
there is more than one length, the operations from the stack on, as long as their results have
an axis as long as the list, become one node that reads the elements. Such nodes share types as
calls of cells that take lists do (see `_record.arity`).

If another extent, such as that of the elements, happens to equal the length, operations that have
nothing to do with the list would be merged as well. So what has been found with lists of two
lengths is a *template*, and lists of all other lengths are taken to be used like this where the
operations are the same.

Where rows of what comes of a list are read one by one (`softmax(jnp.stack(scores))[k]`), the node
has a result for each element, and `value[k]` is one of them.

A stack is not merged if a value with an axis as long as the list leaves its operations in another
way, if two lists wait for what comes of each other, or if it meets arrays whose length differs from
instance to instance, which run packed (see `_ragged`).
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jedbatch._graph.types import NodeType, ValueType, operation_of
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.arity import LONG
from jedbatch._record.granularity.fuse import Merged, Pattern, pattern_call
from jedbatch._record.granularity.node_arrays import NodeArrays
from jedbatch._record.operators import PICK
from jedbatch._record.recorder import Recorder
from jedbatch._record.registry import CallSpec, Registry
from jedbatch._support.types import Leaf

STACKS = ("stack", "concatenate")  # along a new axis, and along one of extent 1


class Template(NamedTuple):
    """Operations on lists, whatever their length.

    Attributes:
      steps: for each operation its name, and what it reads: a value made by those before, or -1. Of
        stacks what they read is left out.
      leaving: the values made that are read elsewhere or returned, as bits.
      unstacked: those of them of which single rows are read, as bits.
    """

    steps: tuple[tuple[str, tuple[int, ...]], ...]
    leaving: int
    unstacked: int


class StackedLists:
    """Merges what is done with stacks of many lengths. Belongs to one registry.

    Attributes:
      revision: how often stacks that had been met have turned out to be of many lengths.
    """

    def __init__(self, registry: Registry):
        self.revision = 0
        self.registry = registry
        self._num_seen = 0
        self._length: dict[int, int] = {}  # by the type of a stack
        self._family: dict[int, Hashable] = {}  # what stacks that differ in length have in common
        self._lengths: dict[Hashable, set[int]] = {}
        self._call_specs: dict[Hashable, CallSpec] = {}
        self._templates: dict[Template, set[int]] = {}  # with the lengths they were found with

    def merge(
        self, recorder: Recorder, outputs: list[int], ends: Sequence[tuple[int, ...]]
    ) -> Merged | None:
        """Returns recorded nodes with those of lists as one node each; None if nothing changes."""
        self._look()
        many = [t for t, family in self._family.items() if self._is_many(family)]
        if not many:
            return None
        nodes = NodeArrays.of_recorder(self.registry, recorder, outputs, ends)
        stacks = np.flatnonzero(np.isin(nodes.node_type, many))
        return _Merging(self, nodes, stacks).merged() if len(stacks) else None

    def _is_many(self, family: Hashable) -> bool:
        return len(self._lengths[family]) > 1

    def _look(self) -> None:
        """Finds the stacks among new types."""
        types = self.registry.node_types
        for t in range(self._num_seen, len(types)):
            if (axis := _stacked_axis(types[t])) is not None:
                family = types[t].name, types[t].operands[0], axis
                was_many = family in self._lengths and self._is_many(family)
                self._lengths.setdefault(family, set()).add(len(types[t].operands))
                self.revision += self._is_many(family) and not was_many
                self._family[t], self._length[t] = family, len(types[t].operands)
        self._num_seen = len(types)

    def note(self, template: Template, length: int) -> None:
        """Notes that operations were found to be done with a list of some length."""
        self._templates.setdefault(template, set()).add(length)

    @property
    def templates(self) -> list[Template]:
        """The templates that are known, the longest first."""
        known = [t for t, lengths in self._templates.items() if len(lengths) > 1]
        return sorted(known, key=lambda t: -len(t.steps))

    def length(self, node_type: int) -> int:
        """The number of elements of a stack."""
        return self._length[node_type]

    def call_spec(
        self,
        pattern: Pattern,
        kinds: tuple[int, ...],
        leaving: int,
        unstacked: int,
        lists: int,
        length: int,
    ) -> CallSpec:
        """Returns how to record operations on lists.

        Args:
          pattern: what they compute.
          kinds: value types of what they read, the elements of the lists first.
          leaving: the values made inside that are read outside, as bits.
          unstacked: those of them whose rows are results, which come first, as bits.
          lists: how many lists there are.
          length: of each.
        """
        key = ("lists", *pattern, leaving, unstacked)
        if key in self._call_specs:
            return self._call_specs[key]
        registry = self.registry
        types = [registry.node_types[t] for t in pattern.types]
        shared = tuple(dict.fromkeys(s for t in types for s in t.shared))
        call = _with_rows(pattern_call(registry, pattern, shared, leaving), leaving, unstacked)
        name = f"{types[0].name}..{types[-1].name}"
        call_spec = registry.call_spec(name, key, call, shared, kinds, user_code=False)
        self._call_specs[key] = call_spec
        others = [0] * (len(kinds) - lists * length)
        args = (*([0] * length for _ in range(lists)), *others)
        names = tuple(t.name for t in types)
        cell = ("lists", names, leaving, unstacked, lists, len(others))
        slots = [True] * len(kinds)
        listed = unstacked.bit_count()
        registry.arities.note(cell, _of_lists, args, slots, call_spec.node_type, listed)
        return call_spec


def _of_lists(lists: Any, others: Any) -> None:
    """Has the signature of such nodes, for `Arities.note`: no variable arguments."""


def _with_rows(call: Callable, leaving: int, unstacked: int) -> Callable:
    """Returns a function with rows of some of its results first, and then the others.

    Args:
      call: returns arrays.
      leaving: which values they are, as bits.
      unstacked: of which of these the rows are wanted, as bits.
    """
    if not unstacked:
        return call
    is_listed = [unstacked >> k & 1 for k in range(leaving.bit_length()) if leaving >> k & 1]

    def rows(shared: Sequence[Leaf], operands: Sequence[Leaf]) -> list[Leaf]:
        values = list(zip(call(shared, operands), is_listed, strict=True))
        of_lists = (x for x, listed in values if listed)
        return [
            *(lax.index_in_dim(x, k, keepdims=False) for x in of_lists for k in range(len(x))),
            *(x for x, listed in values if not listed),
        ]

    return rows


def _stacked_axis(node_type: NodeType) -> int | None:
    """Returns the axis along which a type stacks its operands; None if it does something else."""
    operands, results = node_type.operands, node_type.results
    if node_type.name not in STACKS or len(results) != 1 or is_ragged(results[0].shape):
        return None
    if len(set(operands)) != 1:
        return None
    shape, element = tuple(results[0].shape), tuple(operands[0].shape)
    for axis in range(len(shape)):
        after = axis + (node_type.name == "concatenate")  # of elements of one row each
        row = element[axis:after]
        if set(row) <= {1} and shape == (*element[:axis], len(operands), *element[after:]):
            return axis
    return None


def _has(value_type: ValueType, extent: int) -> bool:
    """Returns whether a value has an axis of some extent."""
    return not is_ragged(value_type.shape) and extent in value_type.shape


class _Region(NamedTuple):
    """Nodes that become one.

    Attributes:
      nodes: in the order of recording.
      call_spec: how the one is recorded.
      read: the values it reads.
      length: of its lists.
      unstacked: the values it makes whose rows are results; these come first.
      left: the others it makes that are read elsewhere or returned.
    """

    nodes: list[int]
    call_spec: CallSpec
    read: list[int]
    length: int
    unstacked: list[int]
    left: list[int]


class _Merging:
    """Merges the nodes of one recording."""

    def __init__(self, lists: StackedLists, nodes: NodeArrays, stacks: np.ndarray):
        self.lists = lists
        self.nodes = nodes
        self.registry = lists.registry
        self.sorted_stacks = stacks.tolist()
        self.stacks = set(self.sorted_stacks)
        self.ptr, self.operand = nodes.ptr.tolist(), nodes.operand.tolist()
        self.start, self.maker = nodes.start.tolist(), nodes.maker.tolist()
        self.node_type = nodes.node_type.tolist()
        self.returned = {v for v in nodes.outputs if v >= 0}
        readers: dict[int, list[int]] = {}
        for n, r in zip(nodes.reader.tolist(), self.operand, strict=True):
            if r >= 0:
                readers.setdefault(r, []).append(n)
        self.readers = readers

    def reads(self, node: int) -> list[int]:
        """Returns the values and inputs that a node reads."""
        return self.operand[self.ptr[node] : self.ptr[node + 1]]

    def merged(self) -> Merged | None:
        """Returns the nodes, with those of a region as one; None if there is no region."""
        instances = list(itertools.pairwise([n for n, _, _ in self.nodes.ends]))
        by_extents = [self._regions(a, b) for a, b in instances]
        for members, length in itertools.chain.from_iterable(by_extents):
            leaving = self._leaving(members)
            unstacked = self._unstacked(members, leaving, length)
            self.lists.note(Template(self._steps(members), leaving, unstacked), length)
        templates = self.lists.templates
        order: list[int | _Region] = []
        ends = [0]
        for (a, b), candidates in zip(instances, by_extents, strict=True):
            regions = self._accepted(a, b, [members for members, _ in candidates], templates)
            order += self._ordered(a, b, regions)
            ends.append(len(order))
        if not any(isinstance(unit, _Region) for unit in order):
            return None
        return self._written(order, ends)

    def _accepted(
        self, begin: int, end: int, by_extents: list[list[int]], templates: Sequence[Template]
    ) -> list[_Region]:
        """Returns the regions of an instance: those of templates, or else those by extents."""
        found = {n: members for members in by_extents for n in members if n in self.stacks}
        taken: set[int] = set()
        regions = []
        for stack in [n for n in range(begin, end) if n in self.stacks]:
            if stack in taken:
                continue
            matched = (self._matched(template, stack, end) for template in templates)
            for members in filter(None, itertools.chain(matched, [found.get(stack)])):
                region = self._region(members) if taken.isdisjoint(members) else None
                if region is not None:
                    taken.update(members)
                    regions.append(region)
                    break
        return regions

    def _ordered(self, begin: int, end: int, regions: list[_Region]) -> list[int | _Region]:
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
        order: list[int | _Region] = []
        while ready:
            unit = heapq.heappop(ready)
            order.append(of.get(unit, unit))
            for reader in readers.get(unit, ()):
                waits[reader].discard(unit)
                if not waits[reader]:
                    heapq.heappush(ready, reader)
        if len(order) == len(waits):
            return order
        stuck = [r for r in regions if waits[r.nodes[-1]]]
        return self._ordered(begin, end, [r for r in regions if r is not stuck[-1]])

    def _name(self, node: int) -> str:
        return self.registry.node_types[self.node_type[node]].name

    def _values(self, node: int) -> range:
        """The values that a node makes."""
        return range(self.start[node], self.start[node + 1])

    def _leaving(self, members: Sequence[int]) -> int:
        """Returns the values of some nodes that are read elsewhere, as bits."""
        inside, leaving = set(members), 0
        for k, v in enumerate(v for n in members for v in self._values(n)):
            if v in self.returned or any(r not in inside for r in self.readers.get(v, ())):
                leaving |= 1 << k
        return leaving

    def _steps(self, members: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Returns what some nodes do, as in a `Template`."""
        slots = {v: k for k, v in enumerate(v for n in members for v in self._values(n))}
        return tuple(
            (
                self._name(n),
                () if n in self.stacks else tuple([slots.get(r, -1) for r in self.reads(n)]),
            )
            for n in members
        )

    def _matched(self, template: Template, stack: int, end: int) -> list[int] | None:
        """Returns the nodes from a stack on that do what a template says, or None.

        They are looked for up to the end of the instance.
        """
        slots: dict[int, int] = {}
        members: list[int] = []
        length = self.lists.length(self.node_type[stack])
        for step in template.steps:
            after = members[-1] if members else stack - 1
            made = next((v for v, k in slots.items() if k in step[1]), None)
            if not members:
                candidates: Iterable[int] = (stack,)
            elif made is None:
                candidates = self.sorted_stacks[bisect.bisect(self.sorted_stacks, after) :]
            else:
                candidates = self.readers.get(made, ())
            fitting = (n for n in candidates if n > after and self._does(n, step, slots, length))
            n = next(fitting, end)
            if n >= end:
                return None
            members.append(n)
            slots.update(zip(self._values(n), itertools.count(len(slots)), strict=False))
        if self._between(members) != members or self._leaving(members) != template.leaving:
            return None
        unstacked = self._unstacked(members, template.leaving, length)
        return members if unstacked == template.unstacked else None

    def _does(
        self, node: int, step: tuple[str, tuple[int, ...]], slots: dict[int, int], length: int
    ) -> bool:
        """Returns whether a node does what a step of a template says."""
        name, reads = step
        if self._name(node) != name:
            return False
        if node in self.stacks:
            return self.lists.length(self.node_type[node]) == length
        return tuple([slots.get(r, -1) for r in self.reads(node)]) == reads

    def _regions(self, begin: int, end: int) -> list[tuple[list[int], int]]:
        """Returns the nodes of each region of an instance, in order, and the length of its lists.

        They are told by extents that are as long as the list. Regions are convex: what lies between
        two of their nodes is in them.
        """
        first = next((n for n in range(begin, end) if n in self.stacks), end)
        connected: UnionFind[int] = UnionFind()
        length_of: dict[int, int] = {}  # by node with values as long as a list
        listed: dict[int, int] = {}  # the node that made each such value
        for n in range(first, end):
            makers = (
                set() if n in self.stacks else {listed[r] for r in self.reads(n) if r in listed}
            )
            if n in self.stacks:
                length_of[n] = self.lists.length(self.node_type[n])
            elif makers and not self._picks(n):
                length_of[n] = length_of[next(iter(makers))]
            else:
                continue
            for m in makers:
                connected.union(n, m)
            results = self.registry.node_types[self.node_type[n]].results
            for v, kind in zip(self._values(n), results, strict=True):
                if _has(kind, length_of[n]):
                    listed[v] = n
        groups: dict[int, list[int]] = {}
        for n in length_of:
            groups.setdefault(connected.find(n), []).append(n)
        regions = []
        for members in groups.values():
            convex = self._between(members)
            lengths = {length_of[n] for n in convex if n in length_of}
            if len(lengths) == 1 and not self._lets_go(convex, max(lengths)):
                regions.append((convex, lengths.pop()))
        return regions

    def _lets_go(self, members: Sequence[int], length: int) -> bool:
        """Returns whether a value with an axis as long as a list is read elsewhere as a whole."""
        leaving = self._leaving(members)
        others = leaving & ~self._unstacked(members, leaving, length)
        kinds = (t for n in members for t in self.registry.node_types[self.node_type[n]].results)
        return any(others >> k & 1 and _has(t, length) for k, t in enumerate(kinds))

    def _picks(self, node: int) -> bool:
        """Returns whether a node is `value[i]` with a number, of a value with few rows."""
        picked = self.registry.node_types[self.node_type[node]]
        if picked.name != PICK or len(picked.operands) != 2 or self.reads(node)[1] >= 0:
            return False
        rows = picked.operands[0].shape
        operation, *_ = operation_of(picked).key
        return operation == (PICK, (None, *rows[1:])) and rows[0] <= LONG

    def _unstacked(self, members: Sequence[int], leaving: int, length: int) -> int:
        """Returns the leaving values of which only single rows are read, as bits."""
        inside, unstacked = set(members), 0
        values = (
            (v, kind)
            for n in members
            for v, kind in zip(
                self._values(n), self.registry.node_types[self.node_type[n]].results, strict=True
            )
        )
        for k, (v, kind) in enumerate(values):
            if leaving >> k & 1 and v not in self.returned and kind.shape[:1] == (length,):
                outside = [n for n in self.readers.get(v, ()) if n not in inside]
                unstacked |= all(self._picks(n) for n in outside) << k
        return unstacked

    def _between(self, members: Sequence[int]) -> list[int]:
        """Returns some nodes and those that lie between two of them."""
        first, last = min(members), max(members)
        if last - first + 1 == len(members):
            return sorted(members)
        inside, after = set(members), set(members)
        left = list(members)
        while left:
            for v in self._values(left.pop()):
                new = {n for n in self.readers.get(v, ()) if n < last} - after
                after |= new
                left += new
        left = list(members)
        while left:
            new = {self.maker[r] for r in self.reads(left.pop()) if r >= 0} & after - inside
            inside |= new
            left += new
        return sorted(inside)

    def _region(self, members: list[int]) -> _Region | None:
        """Returns nodes as a region; None if they cannot be one node."""
        values = [v for n in members for v in self._values(n)]
        slots = {v: k for k, v in enumerate(values)}
        stacks = [n for n in members if n in self.stacks]
        length = self.lists.length(self.node_type[stacks[0]])
        leaving = self._leaving(members)
        unstacked = self._unstacked(members, leaving, length)
        listed = [v for k, v in enumerate(values) if unstacked >> k & 1]
        left = [v for k, v in enumerate(values) if (leaving & ~unstacked) >> k & 1]
        elements = [r for n in stacks for r in self.reads(n)]
        types = [self.registry.node_types[self.node_type[n]] for n in members]
        is_packed = any(is_ragged(x.shape) for t in types for x in (*t.operands, *t.results))
        if not (listed or left) or is_packed or any(r in slots for r in elements):
            return None
        position = {n: k * length for k, n in enumerate(stacks)}
        once: dict[int, int] = {}
        read = list(elements)
        kinds = [k for n in stacks for k in self._kinds(n)]
        written: list[int] = []
        for n in members:
            if n in position:
                written += [-1 - position[n] - k for k in range(length)]
                continue
            for r, kind in zip(self.reads(n), self._kinds(n), strict=True):
                if r in slots:
                    written.append(slots[r])
                    continue
                if r not in once:
                    once[r] = len(read)
                    read.append(r)
                    kinds.append(kind)
                written.append(-1 - once[r])
        pattern = Pattern(tuple(self.node_type[n] for n in members), tuple(written))
        call_spec = self.lists.call_spec(
            pattern, tuple(kinds), leaving, unstacked, len(stacks), length
        )
        return _Region(members, call_spec, read, length, listed, left)

    def _kinds(self, node: int) -> Sequence[int]:
        operands = self.registry.node_types[self.node_type[node]].operands
        return self.registry.kinds_of(operands)

    def _written(self, order: Sequence[int | _Region], instance_ends: Sequence[int]) -> Merged:
        """Returns nodes and regions in some order; `instance_ends` counts those of instances."""
        place: dict[int, int] = {}  # of values, by the number that they had
        first_row: dict[int, int] = {}  # the place of the first row of those whose rows are results
        num_values = 0
        call_specs: list[int] = []
        references: list[int] = []
        recorded = self.nodes.call_spec.tolist()
        counts = [(0, 0)]
        for unit in order:
            if isinstance(unit, _Region):
                _, call_spec, read, length, unstacked, left = unit
                call_specs.append(call_spec.id)
                for v in unstacked:
                    first_row[v] = num_values
                    num_values += length
            elif (read := self.reads(unit)) and read[0] in first_row:  # `value[i]`
                (picked,) = self._values(unit)
                place[picked] = first_row[read[0]] + self.nodes.input_value[~read[1]]
                read, left = [], []
            else:
                left = list(self._values(unit))
                call_specs.append(recorded[unit])
            references.extend(place[r] if r >= 0 else r for r in read)
            place.update(zip(left, itertools.count(num_values), strict=False))
            num_values += len(left)
            counts.append((len(call_specs), len(references)))
        ends = zip(instance_ends, self.nodes.ends, strict=True)
        all_ends: list[tuple[int, ...]] = [(*counts[n], i, o) for n, (_, i, o) in ends]
        columns = call_specs, references, self.nodes.input_group, self.nodes.input_value
        outputs = [place[r] if r >= 0 else r for r in self.nodes.outputs]
        return Merged(columns, outputs, all_ends)
