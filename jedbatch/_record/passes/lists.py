"""Lists outside of cells: what is done with a stack of values becomes one node.

Operations on `jnp.stack(values)`, for a Python list of values of the instance, have a type for each
length of the list: ten operations of attention over up to twelve sentences are 120 types. Once
there is more than one length, the operations from the stack on, as long as their results have
an axis as long as the list, become one node that reads the elements. Such nodes share types as
calls of cells that take lists do (see `_record.types.list_cells`).

If another extent, such as that of the elements, happens to equal the length, programs are rolled up
to see which axis is that of the list; programs that cannot be rolled up are told by extents.

Where rows of a list's results are read one by one (`softmax(jnp.stack(scores))[k]`), the node
has a result for each element, and `value[k]` is one of them.

Vectors that are put end to end, as in `jnp.concatenate(values).max()`, are such a stack as well,
whose axis is as long as all of them, if the operations can be rolled up.

All uses of a list are one node as long as all instances use it equally often; else each use of the
list is a node (see `_record.passes.list_uses`).

A stack is not merged if a value with an axis as long as the list leaves its operations in another
way, if two lists wait for each other's results, or if it meets arrays whose length differs from
instance to instance, which run packed (see `_ragged`).
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._graph.graph import Graph
from jedbatch._graph.prune import without_unread
from jedbatch._graph.types import NodeType
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.passes.list_axes import ListAxes, has_extent
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
        self._num_uses: dict[Hashable, dict[int, set[int]]] = {}  # and lengths, by the number
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
                if has_extent(types[t].operands[0], length):
                    roles: list[tuple] = [("element", 0, k) for k in range(length)]
                    rolled = self.axes.of_results(t, roles, length)
                    axis = rolled[0] or 0 if rolled else axis
                family = types[t].name, types[t].operands[0], axis
                self.registry.assumptions.holds("types", family, length, 1)
                self._family[t], self._length[t], self._axis[t] = family, length, axis
                self._each[t] = types[t].results[0].shape[axis] // length
        self._num_seen = len(types)

    def note_uses(self, stacks: Sequence[int], num_uses: int) -> None:
        """Notes how many uses stacks of some types have."""
        were_apart = self.are_used_apart(stacks)
        for t in stacks:
            lengths = self._num_uses.setdefault(self._family[t], {})
            lengths.setdefault(num_uses, set()).add(self._length[t])
        are_apart = self.are_used_apart(stacks)
        self.registry.assumptions.fail("types", are_apart and not were_apart)

    def are_used_apart(self, stacks: Sequence[int]) -> bool:
        """Returns whether each use of stacks of some types is a node.

        One length says little: another extent may happen to equal it.
        """
        numbers = (self._num_uses.get(self._family[t], {}).values() for t in stacks)
        return any(len(x) > 2 or sum(len(lengths) > 1 for lengths in x) > 1 for x in numbers)

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
        lists: int,
        length: int,
        must_roll: bool,
    ) -> CallSpec | None:
        """Returns how to record operations on lists; None if they must be rolled up and cannot be.

        Args:
          pattern: what they compute.
          kinds: value types of what they read, the elements of the lists first.
          leaving: the values made inside that are read outside, as bits.
          unstacked: those of them whose rows are results, which come first, as bits.
          lists: how many lists there are.
          length: of each.
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
        call_spec = registry.call_spec(name, key, call, shared, kinds, user_code=False)
        registry.lines[call_spec.node_type] = registry.lines.get(pattern.types[0], "")
        others = [0] * (len(kinds) - lists * length)
        if must_roll:
            roles: list[tuple] = [("input", k) for k in range(len(shared))]
            roles += [("element", leaf, k) for leaf in range(lists) for k in range(length)]
            roles += [("input", len(shared) + k) for k in range(len(others))]
            if self.axes.of_results(call_spec.node_type, roles, length) is None:
                self._call_specs[key] = None
                return None
        self._call_specs[key] = call_spec
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
        if node_type.name == "concatenate":
            extent, after = len(operands) * element[axis], element[axis + 1 :]
        else:
            extent, after = len(operands), element[axis:]
        if extent and shape == (*element[:axis], extent, *after):
            return axis
    return None


class _Group(NamedTuple):
    """Nodes that values with an axis as long as a list connect.

    Attributes:
      nodes: with what lies between two of them, in the order of recording.
      length: of the list; None if they cannot be one node.
      stacks: the types of the stacks among them.
      uses: what is done with the list, see `list_uses`.
    """

    nodes: list[int]
    length: int | None
    stacks: list[int]
    uses: list[Use]


class _Merging(RecordedNodes):
    """Merges the nodes of one recording.

    Attributes:
      lists: what is known of stacks.
      sorted_stacks: the nodes that stack a list.
      axis_of: the axis that is as long as a list, by value or input.
      each_of: the rows of each element along it, by value.
    """

    def __init__(self, lists: StackedLists, graph: Graph, stacks: np.ndarray):
        super().__init__(lists.registry, graph, stacks.tolist())
        self.lists = lists
        self.sorted_stacks = stacks.tolist()
        self.axis_of: dict[int, int] = {}
        self.each_of: dict[int, int] = {}

    def regions_merged(self) -> Graph | None:
        """Returns the nodes, with those of a region as one; None if there is no region."""
        instances = list(itertools.pairwise(self.graph.node_ptr.tolist()))
        by_extents = [self._groups(a, b) for a, b in instances]
        for group in itertools.chain.from_iterable(by_extents):
            self.lists.note_uses(group.stacks, len(group.uses))
        order: list[int | ListRegion] = []
        places: list[int] = []
        for (a, b), groups in zip(instances, by_extents, strict=True):
            regions = self._accepted(groups)
            order += self.ordered(a, b, regions)
            places += range(a, a + len(order) - len(places))
        if not any(isinstance(unit, ListRegion) for unit in order):
            return None
        return self.merged(order, places)

    def _accepted(self, groups: Sequence[_Group]) -> list[ListRegion]:
        """Returns the regions of an instance: those of uses, or else one for each group."""
        regions: list[ListRegion] = []
        taken: set[int] = set()
        for group in groups:
            found = self._of_uses(group) if self.lists.are_used_apart(group.stacks) else []
            if not found and group.length is not None and taken.isdisjoint(group.nodes):
                whole = self._region(group.nodes)
                found = [] if whole is None else [whole]
            regions += found
            taken.update(n for region in found for n in (*region.nodes, *region.stacks))
        return regions

    def _of_uses(self, group: _Group) -> list[ListRegion]:
        """Returns the uses of a list as regions; none if one of them cannot be a node."""
        regions = []
        for use in group.uses:
            members = [*use.stacks, *use.nodes]
            is_one = len(use.lengths) == 1
            region = self._region(members, use, group.nodes[0]) if is_one else None
            if region is None:
                return []
            regions.append(region)
        return regions

    def _leaving(self, members: Sequence[int]) -> int:
        """Returns the values of some nodes that are read elsewhere, as bits."""
        inside, leaving = set(members), 0
        for k, v in enumerate(v for n in members for v in self.values(n)):
            leaving |= self.leaves(v, inside) << k
        return leaving

    def _groups(self, begin: int, end: int) -> list[_Group]:
        """Returns the nodes of an instance that are connected by lists.

        They are told by extents that are as long as the list.
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
                each = self.lists.each(self.node_type[n])
                length_of[n] = self.lists.length(self.node_type[n]) * each
            elif makers and not self.picks(n):
                length_of[n] = length_of[next(iter(makers))]
                each = max(self.each_of[r] for r in self.reads(n) if r in listed)
            else:
                continue
            for m in makers:
                connected.union(n, m)
            if n in self.stacks:
                axes: Sequence[int | None] = (self.lists.axis(self.node_type[n]),)
            else:
                axes = self._axes_of_results(n, length_of[n], each)
            for v, axis in zip(self.values(n), axes, strict=True):
                if axis is not None:
                    listed[v], self.axis_of[v], self.each_of[v] = n, axis, each
        together: dict[int, list[int]] = {}
        for n in length_of:
            together.setdefault(connected.find(n), []).append(n)
        uses: dict[int, list[Use]] = {}
        for use in find_uses(self, range(first, end), length_of, listed):
            uses.setdefault(connected.find(use.nodes[0]), []).append(use)
        groups = []
        for root, members in together.items():
            convex = self._between(members)
            lengths = {length_of[n] for n in convex if n in length_of}
            is_one = len(lengths) == 1 and not self._lets_go(convex)
            stacks = [self.node_type[n] for n in members if n in self.stacks]
            groups.append(
                _Group(convex, max(lengths) if is_one else None, stacks, uses.get(root, []))
            )
        return groups

    def _axes_of_results(self, node: int, length: int, each: int) -> Sequence[int | None]:
        """Returns the axes of results that are as long as a list, and notes those of inputs.

        Inputs may have a row for each element, but not `each` more than one.
        """
        reads = self.reads(node)
        types = self.registry.node_types[self.node_type[node]].operands
        inputs = [
            k
            for k, (r, kind) in enumerate(zip(reads, types, strict=True))
            if each == 1 and r < 0 and kind.shape[:1] == (length,) and self.is_given(r)
        ]
        known = [self.axis_of.get(r) for r in reads]
        operands, results = self.lists.axes.find(self.node_type[node], known, length, inputs)
        for k in inputs:
            if operands[k] is not None:
                self.axis_of[reads[k]], self.input_kind[reads[k]] = 0, types[k]
        return results

    def _lets_go(self, members: Sequence[int]) -> bool:
        """Returns whether a value with an axis as long as a list is read elsewhere as a whole."""
        leaving = self._leaving(members)
        others = leaving & ~self._unstacked(members, leaving)
        values = (v for n in members for v in self.values(n))
        return any(others >> k & 1 and v in self.axis_of for k, v in enumerate(values))

    def _unstacked(self, members: Sequence[int], leaving: int) -> int:
        """Returns the leaving values of which only single rows are read, as bits."""
        inside, unstacked = set(members), 0
        for k, v in enumerate(v for n in members for v in self.values(n)):
            if leaving >> k & 1 and self._has_rows(v):
                outside = [n for n in self.readers.get(v, ()) if n not in inside]
                unstacked |= all(self.picks(n) for n in outside) << k
        return unstacked

    def _between(self, members: Sequence[int]) -> list[int]:
        """Returns some nodes and those that lie between two of them."""
        first, last = min(members), max(members)
        if last - first + 1 == len(members):
            return sorted(members)
        inside, after = set(members), set(members)
        left = list(members)
        while left:
            for v in self.values(left.pop()):
                new = {n for n in self.readers.get(v, ()) if n < last} - after
                after |= new
                left += new
        left = list(members)
        while left:
            new = {self.maker[r] for r in self.reads(left.pop()) if r >= 0} & after - inside
            inside |= new
            left += new
        return sorted(inside)

    def _region(
        self, members: list[int], use: Use | None = None, group: int | None = None
    ) -> ListRegion | None:
        """Returns nodes as a region, or those of one use; None if they cannot be one node."""
        earlier = use.earlier if use else []
        reads = dict.fromkeys(r for n in members for r in self.reads(n))
        given = [*earlier, *(r for r in reads if r in self.input_kind)]
        values = [*given, *(v for n in members for v in self.values(n))]
        slots = {v: k for k, v in enumerate(values)}
        stacks = [n for n in members if n in self.stacks]
        lengths = {self.lists.length(self.node_type[n]) for n in stacks}
        length = max(lengths or (use.lengths if use else ()))
        must_roll = any(self.lists.each(self.node_type[n]) > 1 for n in stacks)
        if use:
            inside = set(use.nodes)
            of_use = (v for n in use.nodes for v in self.values(n))
            left = [v for v in of_use if self.leaves(v, inside)]
            listed = [v for v in left if v in self.axis_of]
            left = [v for v in left if v not in self.axis_of]
            if not all(map(self._has_rows, [*listed, *earlier])):
                return None
        else:
            leaving = self._leaving(members)
            unstacked = self._unstacked(members, leaving)
            made = values[len(given) :]
            listed = [v for k, v in enumerate(made) if unstacked >> k & 1]
            left = [v for k, v in enumerate(made) if (leaving & ~unstacked) >> k & 1]
        elements = [r for n in stacks for r in self.reads(n)]
        rows = [self._row_kind(v) for v in given]
        own_types = [self._stack_type(kind, length) for kind in rows]
        own_types += [self.node_type[n] for n in members]
        types = [self.registry.node_types[t] for t in own_types]
        is_packed = any(is_ragged(x.shape) for t in types for x in (*t.operands, *t.results))
        is_one = len(lengths) < 2 and not is_packed
        if not (listed or left) or not is_one or any(r in slots for r in elements):
            return None
        position = {n: (k + len(given)) * length for k, n in enumerate(stacks)}
        once: dict[int, int] = {}
        read: list[int | tuple[int, int]] = [(v, k) for v in given for k in range(length)]
        read += elements
        kinds = [kind for kind in rows for _ in range(length)]
        kinds += [k for n in stacks for k in self.kinds(n)]
        written = [-1 - k for k in range(len(given) * length)]
        for n in members:
            if n in position:
                written += [-1 - position[n] - k for k in range(length)]
                continue
            for r, kind in zip(self.reads(n), self.kinds(n), strict=True):
                if r in slots:
                    written.append(slots[r])
                    continue
                if r not in once:
                    once[r] = len(read)
                    read.append(r)
                    kinds.append(kind)
                written.append(-1 - once[r])
        pattern = Pattern(tuple(own_types), tuple(written))
        call_spec = self.lists.call_spec(
            pattern,
            tuple(kinds),
            sum(1 << slots[v] for v in (*listed, *left)),
            sum(1 << slots[v] for v in listed),
            len(given) + len(stacks),
            length,
            must_roll,
        )
        if call_spec is None:
            return None
        nodes, read_apart = (use.nodes, use.stacks) if use else (members, [])
        of = nodes[0] if group is None else group
        return ListRegion(of, nodes, call_spec, read, length, listed, left, read_apart)

    def _has_rows(self, value: int) -> bool:
        """Returns whether a value can be given as rows, one for each of few elements."""
        is_given = value not in self.returned and self.each_of.get(value, 1) == 1
        first = is_given and self.axis_of.get(value) == 0
        return first and self.type_of(value).shape[0] <= LONG

    def _row_kind(self, value: int) -> int:
        """Returns the value type of a row of a value."""
        kind = self.type_of(value) if value >= 0 else self.input_kind[value]
        return self.registry.value_type(kind.shape[1:], kind.dtype, kind.weak)

    def _stack_type(self, kind: int, length: int) -> int:
        """Returns the type of a node that stacks values."""
        stack = lambda _, rows: jnp.stack(rows)  # noqa: E731
        kinds = (kind,) * length
        return self.registry.call_spec("stack", "rows", stack, (), kinds, user_code=False).node_type
