"""Lists outside of cells: what is done with stacks of values becomes nodes that read the elements.

Operations on `jnp.stack(values)`, for a Python list of values of the instance, have a type for each
length of the list: ten operations of attention over up to twelve sentences are 120 types. Once
there is more than one length, the operations from stacks on, as long as their results have an axis
as long as a list, become nodes that read the elements: one for each use of the lists (see
`_record.passes.list_uses`). Such nodes share types as calls of cells that take lists do (see
`_record.types.list_cells`).

If another extent, such as that of the elements, happens to equal the length, symbolic shapes say
which axis is that of the list (see `_record.passes.list_axes`).

Where rows of a list's results are read one by one (`softmax(jnp.stack(scores))[k]`), the node
has a result for each element, and `value[k]` is one of them.

Vectors that are put end to end, as in `jnp.concatenate(values).max()`, are such a stack as well,
whose axis is as long as all of them, if the operations can be rolled up.

A use is left as it was if a value with an axis as long as a list leaves it in another way, if it
waits for a use that waits for it, or if it meets arrays whose length differs from instance to
instance, which run packed (see `_ragged`); with it those that read rows of its results, or make
rows that it reads.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._graph.graph import Graph
from jedbatch._graph.prune import without_unread
from jedbatch._graph.types import NodeType, ValueType, operation_of
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.interpret import inlined
from jedbatch._jaxpr.list_expressions import Expressions
from jedbatch._jaxpr.padding.flat_programs import called
from jedbatch._jaxpr.rolling import CannotRollError, Roller
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.operations.stacking import stack_axis
from jedbatch._record.passes.list_axes import Axes, ListAxes
from jedbatch._record.passes.list_regions import ListRegion, RecordedNodes
from jedbatch._record.passes.list_uses import Use, find_uses
from jedbatch._record.passes.patterns import Pattern, pattern_call
from jedbatch._record.types.list_cells import LONG
from jedbatch._record.types.registry import CallSpec, Registry
from jedbatch._record.types.shared_operands import STACKS
from jedbatch._support.types import Leaf


class StackedLists:
    """Merges operations on stacks of many lengths. Belongs to one registry.

    Attributes:
      axes: finds the axes of lists.
    """

    def __init__(self, registry: Registry):
        self.registry = registry
        self._num_seen = 0
        self._length: dict[int, int] = {}  # by the type of a stack
        self._axis: dict[int, int] = {}
        self._each: dict[int, int] = {}  # rows of an element along it
        self._family: dict[int, Hashable] = {}  # what stacks that differ in length have in common
        self._call_specs: dict[Hashable, CallSpec | None] = {}
        self.axes = ListAxes(registry)

    def merge(self, graph: Graph) -> Graph:
        """Returns a graph of recorded nodes with those of lists as one node each."""
        self._look()
        many = [t for t, family in self._family.items() if self._is_many(family)]
        if not many:
            return graph
        read = without_unread(graph)
        stacks = np.flatnonzero(np.isin(read.node_type, many))
        if not len(stacks):
            return graph
        return _Merging(self, read, stacks).regions_merged() or graph

    def _is_many(self, family: Hashable) -> bool:
        """Returns whether stacks have been met that differ in length."""
        return self.registry.assumptions.has_failed("types", family)

    def _look(self) -> None:
        """Finds the stacks among new types."""
        types = self.registry.node_types
        for t in range(self._num_seen, len(types)):
            if (axis := _stacked_axis(types[t])) is not None:
                length = len(types[t].operands)
                family = types[t].name, types[t].operands[0], axis
                self.registry.assumptions.holds("types", family, length, 1)
                self._family[t], self._length[t], self._axis[t] = family, length, axis
                self._each[t] = types[t].results[0].shape[axis] // length
        self._num_seen = len(types)

    def axis(self, node_type: int) -> int:
        """The axis of the elements of a stack."""
        return self._axis[node_type]

    def length(self, node_type: int) -> int:
        """The number of elements of a stack."""
        return self._length[node_type]

    def each(self, node_type: int) -> int:
        """The number of rows that each element of a stack has along its axis."""
        return self._each[node_type]

    def call_spec(
        self,
        pattern: Pattern,
        kinds: tuple[int, ...],
        leaving: int,
        unstacked: int,
        lengths: Sequence[int],
        must_roll: bool,
    ) -> CallSpec | None:
        """Returns how to record operations on lists; None if they must be rolled up and cannot be.

        Args:
          pattern: what they compute.
          kinds: value types of what they read, the elements of the lists first.
          leaving: the values made inside that are read outside, as bits.
          unstacked: those of them whose rows are results, which come first, as bits.
          lengths: of the lists.
          must_roll: whether operations are recorded if they can be rolled up alone.
        """
        key = ("lists", *pattern, leaving, unstacked)
        if key in self._call_specs:
            return self._call_specs[key]
        registry = self.registry
        types = [registry.node_types[t] for t in pattern.types]
        shared = tuple(dict.fromkeys(s for t in types for s in t.shared))
        call = _with_rows(pattern_call(registry, pattern, shared, leaving), leaving, unstacked)
        name = f"{types[0].name}..{types[-1].name}"
        call_spec = registry.call_spec(name, key, call, shared, kinds)
        registry.lines[call_spec.node_type] = registry.lines.get(pattern.types[0], "")
        others = [0] * (len(kinds) - sum(lengths))
        if must_roll and not self._rolls(call_spec.node_type, len(shared), lengths, unstacked):
            self._call_specs[key] = None
            return None
        self._call_specs[key] = call_spec
        args = (*([0] * n for n in lengths), *others)
        names = tuple(t.name for t in types)
        cell = ("lists", names, leaving, unstacked, len(lengths), len(others))
        slots = [True] * len(kinds)
        listed = unstacked.bit_count()
        registry.arities.note(cell, _of_lists, (args, {}), slots, call_spec.node_type, listed)
        return call_spec

    def _rolls(self, node_type: int, shared: int, lengths: Sequence[int], unstacked: int) -> bool:
        """Returns whether the program of a type is known to be the same for any lengths."""
        program = inlined(operation_of(self.registry.node_types[node_type]).jaxpr, called)
        number = {n: k for k, n in enumerate(dict.fromkeys(lengths))}
        roles: list[tuple] = [("input", k) for k in range(shared)]
        for leaf, n in enumerate(lengths):
            roles += [("element", leaf, k, number[n]) for k in range(n)]
        others = len(program.jaxpr.invars) - len(roles)
        roles += [("input", shared + k) for k in range(others)]
        try:
            expressions = Expressions(self.registry.keys.params_key)
            Roller(expressions, program, roles, tuple(number)).results(unstacked.bit_count())
        except CannotRollError:
            return False
        return True


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
    if node_type.name not in STACKS or len(set(node_type.operands)) != 1:
        return None
    way = None if is_ragged(node_type.operands[0].shape) else stack_axis(node_type)
    return None if way is None else way.axis


class _Merging(RecordedNodes):
    """Merges the nodes of one recording.

    Attributes:
      lists: what is known of stacks.
    """

    def __init__(self, lists: StackedLists, graph: Graph, stacks: np.ndarray):
        super().__init__(lists.registry, graph, stacks.tolist())
        self.lists = lists

    def regions_merged(self) -> Graph | None:
        """Returns the nodes, with those of a region as one; None if they stay as they are."""
        order: list[int | ListRegion] = []
        places: list[int] = []
        for a, b in itertools.pairwise(self.graph.node_ptr.tolist()):
            first = next((n for n in range(a, b) if n in self.stacks), b)
            uses = find_uses(self, range(first, b), self._on_lists(first, b))
            order += self.ordered(a, b, self._regions(uses))
            places += range(a, a + len(order) - len(places))
        if not any(isinstance(unit, ListRegion) for unit in order) and not self.unread_stacks(()):
            return None
        return self.merged(order, places)

    def _on_lists(self, begin: int, end: int) -> set[int]:
        """Returns the nodes that read values with an axis as long as a list.

        Finds the axes of all such values, and the rows of each element along them.
        """
        found: set[int] = set()
        for n in range(begin, end):
            if n in self.stacks:
                (value,), t = self.values(n), self.node_type[n]
                self.each_of[value] = each = self.lists.each(t)
                self.axes_of[value] = {self.lists.length(t) * each: self.lists.axis(t)}
                continue
            listed = [r for r in self.reads(n) if r >= 0 and r in self.axes_of]
            if not listed or self.picks(n):
                continue
            found.add(n)
            each = max(self.each_of[r] for r in listed)
            for v, axes in zip(self.values(n), self._axes_of_results(n, each), strict=True):
                if axes:
                    self.axes_of[v], self.each_of[v] = axes, each
        return found

    def _axes_of_results(self, node: int, each: int) -> Sequence[Axes]:
        """Returns the axes of results that are as long as lists, and notes those of inputs.

        Inputs may have a row for each element, but not `each` more than one.
        """
        reads = self.reads(node)
        types = self.registry.node_types[self.node_type[node]].operands
        known = [self.axes_of.get(r, {}) for r in reads]
        extents = {n for axes in known for n in axes}
        inputs = [
            k
            for k, (r, kind) in enumerate(zip(reads, types, strict=True))
            if each == 1 and r < 0 and not extents.isdisjoint(kind.shape[:1]) and self.is_given(r)
        ]
        operands, results = self.lists.axes.find(self.node_type[node], known, inputs)
        for k in inputs:
            if operands[k]:
                self.axes_of[reads[k]], self.input_kind[reads[k]] = operands[k], types[k]
        return results

    def _regions(self, uses: Sequence[Use]) -> list[ListRegion]:
        """Returns uses as regions, but those that read rows of one that cannot be, or make some."""
        maker = {n: k for k, use in enumerate(uses) for n in use.nodes}
        connected: UnionFind[int] = UnionFind()
        for k, use in enumerate(uses):
            for v in use.earlier:
                connected.union(k, maker[self.maker[v]])
        of = [connected.find(k) for k in range(len(uses))]
        regions = [self._region(use, k) for use, k in zip(uses, of, strict=True)]
        refused = {k for region, k in zip(regions, of, strict=True) if region is None}
        return [r for r, k in zip(regions, of, strict=True) if r is not None and k not in refused]

    def _region(self, use: Use, group: int) -> ListRegion | None:
        """Returns a use as a region; None if it cannot be one node."""
        stacks = use.stacks
        members = [*stacks, *use.nodes]
        reads = dict.fromkeys(r for n in members for r in self.reads(n))
        given = [*use.earlier, *(r for r in reads if r in self.input_kind)]
        values = [*given, *(v for n in members for v in self.values(n))]
        slots = {v: k for k, v in enumerate(values)}
        inside = set(use.nodes)
        made = [v for n in use.nodes for v in self.values(n) if self.leaves(v, inside)]
        listed = [v for v in made if v in self.axes_of]
        left = [v for v in made if v not in self.axes_of]
        if not made or not all(map(self._has_rows, [*listed, *use.earlier])):
            return None
        rows = [self._row_kind(v) for v in given]
        of_given = [self._num_rows(v) for v in given]
        own_types = [self._stack_type(kind, n) for kind, n in zip(rows, of_given, strict=True)]
        own_types += [self.node_type[n] for n in members]
        types = [self.registry.node_types[t] for t in own_types]
        is_packed = any(is_ragged(x.shape) for t in types for x in (*t.operands, *t.results))
        elements = [r for n in stacks for r in self.reads(n)]
        if is_packed or any(r in slots for r in elements):
            return None
        of_stacks = [self.lists.length(self.node_type[n]) for n in stacks]
        read: list[int | tuple[int, int]] = []
        read += [(v, k) for v, n in zip(given, of_given, strict=True) for k in range(n)]
        read += elements
        kinds = [kind for kind, n in zip(rows, of_given, strict=True) for _ in range(n)]
        kinds += [k for n in stacks for k in self.kinds(n)]
        written = [-1 - k for k in range(len(read))]
        once: dict[int, int] = {}
        for n in use.nodes:
            for r, kind in zip(self.reads(n), self.kinds(n), strict=True):
                if r in slots:
                    written.append(slots[r])
                    continue
                if r not in once:
                    once[r] = len(read)
                    read.append(r)
                    kinds.append(kind)
                written.append(-1 - once[r])
        call_spec = self.lists.call_spec(
            Pattern(tuple(own_types), tuple(written)),
            tuple(kinds),
            sum(1 << slots[v] for v in made),
            sum(1 << slots[v] for v in listed),
            [*of_given, *of_stacks],
            any(self.lists.each(self.node_type[n]) > 1 for n in stacks),
        )
        if call_spec is None:
            return None
        return ListRegion(group, use.nodes, call_spec, read, listed, left, stacks)

    def _has_rows(self, value: int) -> bool:
        """Returns whether a value can be given as rows, one for each of few elements.

        It cannot where it is returned or stacked as a whole.
        """
        is_stacked = not self.stacks.keys().isdisjoint(self.readers.get(value, ()))
        is_given = value not in self.returned and not is_stacked and self.each_of[value] == 1
        first = is_given and [*self.axes_of[value].values()] == [0]
        return first and self._num_rows(value) <= LONG

    def _type(self, value: int) -> ValueType:
        """The type of a value, or of an input with a row for each element."""
        return self.type_of(value) if value >= 0 else self.input_kind[value]

    def _num_rows(self, value: int) -> int:
        rows: int = self._type(value).shape[0]
        return rows

    def _row_kind(self, value: int) -> int:
        """Returns the value type of a row of a value."""
        kind = self._type(value)
        return self.registry.value_type(kind.shape[1:], kind.dtype, kind.weak)

    def _stack_type(self, kind: int, length: int) -> int:
        """Returns the type of a node that stacks values."""
        stack = lambda _, rows: jnp.stack(rows)  # noqa: E731
        kinds = (kind,) * length
        return self.registry.call_spec("stack", "rows", stack, (), kinds).node_type
