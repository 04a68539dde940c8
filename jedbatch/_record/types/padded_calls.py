"""Nodes with lists as nodes of types that have room for more elements.

Such a node reads its elements, the first of them again in the places that are left, and how many
there are. Where the nodes that make the elements compute functions of them as well (see
`element_functions`), it reads what these return.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.rewrite import Rewrite, rewrite, with_inputs
from jedbatch._graph.types import LENGTH, NodeType
from jedbatch._record.types.element_functions import ElementFunction, ElementUse, Makers


@dataclass(frozen=True, eq=False)
class GivenFunctions:
    """How nodes are nodes of a type that is given functions of the elements of their lists.

    Attributes:
      node_type: the id of the type.
      order: which of their operands nodes read as each operand of it, but for the functions and
        the length, which follow.
      functions: these functions.
      places: int64[functions, capacity], of which of their operands they are.
    """

    node_type: int
    order: np.ndarray
    functions: tuple[ElementFunction, ...]
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class PaddedCalls:
    """How nodes of a type are nodes of another type that has room for more elements.

    Attributes:
      node_type: the id of the other type.
      order: which of their operands nodes read as each operand of the other type but the last,
        which is the length of the first list; anything at the places of other lengths.
      lengths: of their lists.
      others: the place of the length of the second list, which others follow.
      results: which results of the other type theirs are.
      given: how they are nodes of a type that is given functions of the elements, if they can be.
    """

    node_type: int
    order: np.ndarray
    lengths: tuple[int, ...]
    others: int
    results: np.ndarray
    given: GivenFunctions | None = None


class _Values:
    """The results of recorded nodes, int64[V] each.

    Attributes:
      within: their positions among the results of the type with room for more elements.
      kind: type and position as one number, the results of all types one after the other.
      kinds: int64[types + 1], where those of each type begin.
    """

    def __init__(self, nodes: "_Nodes"):
        graph = nodes.graph
        self.within = graph.value_slot.copy()
        for t, of_type in nodes.with_lists.items():
            results = nodes.padded[t].results
            if len(results) and results[-1] >= len(results):
                first = graph.value_ptr[of_type][:, None]
                self.within[first + np.arange(len(results))] = results
        self.kinds = pointers(nodes.num_results)
        self.kind = self.kinds[nodes.room[graph.value_node]] + self.within

    def of(self, kind: int) -> tuple[int, int]:
        """(id of the type, position of the result) of a kind."""
        node_type = int(np.searchsorted(self.kinds, kind, side="right")) - 1
        return node_type, int(kind - self.kinds[node_type])


class _Nodes:
    """Recorded nodes, and what becomes of them.

    Attributes:
      padded: how nodes of some types have room for more elements.
      graph: the graph of them.
      num_results: int64[types], of each type.
      room: int32[N], the types with room for more elements.
      with_lists: the nodes of each of the types in `padded`.
    """

    def __init__(
        self, padded: Mapping[int, PaddedCalls], node_types: Sequence[NodeType], graph: Graph
    ):
        self.padded, self.graph = padded, graph
        self.num_results = np.array([len(t.results) for t in node_types], np.int64)
        self.room = graph.node_type.copy()
        present = [t for t in graph.present_types if t in padded]
        self.with_lists = {t: np.flatnonzero(graph.node_type == t) for t in present}
        for t, nodes in self.with_lists.items():
            self.room[nodes] = padded[t].node_type

    def read(self, nodes: np.ndarray, places: np.ndarray) -> np.ndarray:
        """int64[n, ...]: the operands of some nodes at some places."""
        return self.graph.operand[self.graph.operand_ptr[nodes][:, None] + places]

    def with_functions(self, makers: Makers, values: _Values) -> np.ndarray:
        """Returns bool[N], the nodes that are given functions of their elements."""
        given = np.zeros(len(self.room), bool)
        groups: dict[tuple[ElementFunction, ...], list[tuple[np.ndarray, Any]]] = {}
        for t, nodes in self.with_lists.items():
            calls = self.padded[t]
            if calls.given is not None:
                reads = [self.read(nodes, x[: calls.lengths[0]]) for x in calls.given.places]
                groups.setdefault(calls.given.functions, []).append((nodes, reads))
        counts = np.bincount(self.room, minlength=len(self.num_results))
        for functions, several in groups.items():
            uses = []
            for k in range(len(functions)):
                read = np.concatenate([reads[k].ravel() for _, reads in several])
                times = np.bincount(values.kind[read[read >= 0]], minlength=int(values.kinds[-1]))
                made = [
                    (*values.of(kind), int(times[kind])) for kind in np.flatnonzero(times).tolist()
                ]
                uses.append([ElementUse(t, r, n, int(counts[t])) for t, r, n in made])
                if (read < 0).any():
                    uses[-1].append(ElementUse(None, 0, 0, 0))
            if not makers.adopts(functions, uses):
                continue
            for nodes, _ in several:
                given[nodes] = True
            for k, f in enumerate(functions):
                allowed = np.zeros(int(values.kinds[-1]), bool)
                for use in sorted(uses[k], key=lambda use: -use.times):  # the most decide for all
                    if use.node_type is not None and makers.decide(f, use):
                        allowed[values.kinds[use.node_type] + use.result] = True
                is_allowed = np.append(allowed[values.kind], np.zeros(self.graph.num_inputs, bool))
                for nodes, reads in several:  # inputs are negative
                    given[nodes] &= is_allowed[reads[k]].all(axis=1)
        return given


def pad(
    padded: Mapping[int, PaddedCalls],
    makers: Makers,
    node_types: Callable[[], tuple[NodeType, ...]],
    graph: Graph,
) -> Graph:
    """Makes nodes that have lists nodes of the types that serve several lengths.

    Args:
      padded: by the id of a type, how its nodes are nodes of another type.
      makers: the types whose nodes compute functions of elements.
      node_types: gives the types by their ids, to which `makers` may add some.
      graph: the nodes as they were recorded.

    Returns:
      The nodes as they are then, with the lengths of lists as new inputs.
    """
    if not len(graph.node_type):
        return graph
    nodes = _Nodes(padded, node_types(), graph)
    if not nodes.with_lists and not makers.made:
        return graph
    values = _Values(nodes)
    given = nodes.with_functions(makers, values)
    arity = np.diff(graph.operand_ptr)
    new_type = nodes.room.copy()
    for t, of_type in nodes.with_lists.items():
        calls = padded[t]
        arity[of_type] = len(calls.order) + 1
        if calls.given is not None:
            those = of_type[given[of_type]]
            new_type[those] = calls.given.node_type
            arity[those] = len(calls.given.order) + calls.given.places.size + 1
    extended = np.arange(len(nodes.num_results))
    rooms = np.flatnonzero(np.bincount(nodes.room)).tolist()
    for like in filter(makers.of, rooms):
        own = nodes.room == like
        for t in np.flatnonzero(np.bincount(new_type[own])).tolist():
            extended[t] = makers.extended(t, like)
    new_type = extended[new_type].astype(graph.node_type.dtype)

    types = node_types()
    num_results = np.array([len(t.results) for t in types], np.int64)
    is_new = new_type != graph.node_type
    of_new = is_new[graph.value_node]
    count = np.where(is_new, num_results[new_type], 0)
    first = graph.num_values + pointers(count)[:-1]  # results of new nodes begin here
    value = np.arange(graph.num_values)
    value[of_new] = (first[graph.value_node] + values.within)[of_new]

    anchor = np.flatnonzero(is_new)
    start = pointers(np.where(is_new, arity, 0))
    operand = np.empty(int(start[-1]), np.int64)
    has_list = nodes.room != graph.node_type
    same, changed = np.flatnonzero(is_new & ~has_list), np.flatnonzero(has_list)
    operand[ranges(start[same], arity[same])] = graph.operand[
        ranges(graph.operand_ptr[same], arity[same])
    ]
    functions = _Functions(makers, values, first[graph.value_node])
    of_lengths = []  # (node, place among the operands, length) of each list
    for t, of_type in nodes.with_lists.items():
        calls = padded[t]
        of_lengths.append((of_type, start[1:][of_type] - 1, calls.lengths[0]))
        for k, n in enumerate(calls.lengths[1:], start=calls.others):
            of_lengths.append((of_type, start[of_type] + k, n))
        for is_given in (False, True):
            own = of_type[given[of_type] == is_given]
            if not len(own):
                continue
            order = calls.given.order if is_given and calls.given else calls.order
            to = start[own][:, None]
            operand[to + np.arange(len(order))] = nodes.read(own, order)
            if is_given and calls.given is not None:
                end = to + len(order)
                for f, places in zip(calls.given.functions, calls.given.places, strict=True):
                    operand[end + np.arange(len(places))] = functions.of(f)[nodes.read(own, places)]
                    end = end + len(places)
    owner = np.concatenate([own for own, _, _ in of_lengths] or [changed])
    in_order = np.argsort(owner, kind="stable")
    places = np.concatenate([at for _, at, _ in of_lengths] or [changed])[in_order]
    operand[places] = -1 - graph.num_inputs - np.arange(len(owner))
    length = np.repeat(
        np.array([n for _, _, n in of_lengths], np.int32), [len(own) for own, _, _ in of_lengths]
    )[in_order]
    change = Rewrite(~is_new, anchor, new_type[anchor], pointers(arity[anchor]), operand, value)
    cuts = np.searchsorted(owner[in_order], graph.node_ptr).tolist()
    lengths = [
        (i, InputRows(LENGTH, length[a:b]))
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
        if a < b
    ]
    return with_inputs(rewrite(graph, change, types), lengths)


class _Functions:
    """The results that are functions of results, given where those of each maker begin."""

    def __init__(self, makers: Makers, values: _Values, first: np.ndarray):
        self._makers, self._values, self._first = makers, values, first
        self._known: dict[ElementFunction, np.ndarray] = {}

    def of(self, function: ElementFunction) -> np.ndarray:
        """int64[V]: of the values for which there is no such result it is anything."""
        if function not in self._known:
            values = self._values
            position = np.zeros(int(values.kinds[-1]), np.int64)
            for t, result, place in self._makers.places(function):
                position[values.kinds[t] + result] = place
            self._known[function] = self._first + position[values.kind]
        return self._known[function]
