"""Nodes with lists as nodes of types that have room for more elements.

Such a node reads its elements, the first of them again in the places that are left, and how many
there are. Where the nodes that make the elements compute functions of them as well (see
`element_functions`), it reads what these return. Results are numbered anew, since nodes may have
more of them than were recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.types import NodeType
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
        which is the length.
      length: of their lists.
      results: which results of the other type theirs are.
      given: how they are nodes of a type that is given functions of the elements, if they can be.
    """

    node_type: int
    order: np.ndarray
    length: int
    results: np.ndarray
    given: GivenFunctions | None = None


class PaddedNodes(NamedTuple):
    """Nodes of which some have other types than were recorded.

    Attributes:
      node_type: int32[N], their types.
      arity: int64[N], the number of their operands.
      operand: int64[E], what they read.
      result: int64[...], what is returned.
      with_lists: int64[n], the numbers of nodes that read the lengths of their lists, which are new
        inputs.
      length: int64[n], these lengths.
    """

    node_type: np.ndarray
    arity: np.ndarray
    operand: np.ndarray
    result: np.ndarray
    with_lists: np.ndarray
    length: np.ndarray


class _Values:
    """The results of recorded nodes, int64[V] each.

    Attributes:
      maker: the nodes that they are of.
      within: their positions among the results of the type with room for more elements.
      kind: type and position as one number, the results of all types one after the other.
      kinds: int64[types + 1], where those of each type begin.
    """

    def __init__(self, nodes: "_Nodes"):
        count = nodes.num_results[nodes.recorded]
        first = pointers(count)
        self.maker = np.repeat(np.arange(len(count)), count)
        self.within = np.arange(int(first[-1])) - first[self.maker]
        for t, of_type in nodes.with_lists.items():
            results = nodes.padded[t].results
            if len(results) and results[-1] >= len(results):
                self.within[first[of_type][:, None] + np.arange(len(results))] = results
        self.kinds = pointers(nodes.num_results)
        self.kind = self.kinds[nodes.room[self.maker]] + self.within

    def of(self, kind: int) -> tuple[int, int]:
        """(id of the type, position of the result) of a kind."""
        node_type = int(np.searchsorted(self.kinds, kind, side="right")) - 1
        return node_type, int(kind - self.kinds[node_type])


class _Nodes:
    """Recorded nodes, and what becomes of them.

    Attributes:
      padded: how nodes of some types have room for more elements.
      num_results: int64[types], of each type.
      recorded: int32[N], the types that were recorded.
      room: int32[N], the types with room for more elements.
      with_lists: the nodes of each of the types in `padded`.
      start: int64[N + 1], where the operands of each node begin.
      operand: int64[E], what they read.
      num_inputs: inputs that some of them read, at least.
    """

    def __init__(
        self,
        padded: Mapping[int, PaddedCalls],
        node_types: Sequence[NodeType],
        node_type: np.ndarray,
        arity: np.ndarray,
        operand: np.ndarray,
    ):
        self.padded = padded
        self.num_results = np.array([len(t.results) for t in node_types], np.int64)
        self.recorded, self.room = node_type, node_type.copy()
        present = np.flatnonzero(np.bincount(node_type)).tolist()
        self.with_lists = {t: np.flatnonzero(node_type == t) for t in present if t in padded}
        for t, nodes in self.with_lists.items():
            self.room[nodes] = padded[t].node_type
        self.start, self.operand = pointers(arity), operand
        self.num_inputs = -int(min(0, operand.min(initial=0)))

    def read(self, nodes: np.ndarray, places: np.ndarray) -> np.ndarray:
        """int64[n, ...]: the operands of some nodes at some places."""
        return self.operand[self.start[nodes][:, None] + places]

    def with_functions(self, makers: Makers, values: _Values) -> np.ndarray:
        """Returns bool[N], the nodes that are given functions of their elements."""
        given = np.zeros(len(self.recorded), bool)
        groups: dict[tuple[ElementFunction, ...], list[tuple[np.ndarray, Any]]] = {}
        for t, nodes in self.with_lists.items():
            calls = self.padded[t]
            if calls.given is not None:
                reads = [self.read(nodes, x[: calls.length]) for x in calls.given.places]
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
                is_allowed = np.append(allowed[values.kind], np.zeros(self.num_inputs, bool))
                for nodes, reads in several:  # inputs are negative
                    given[nodes] &= is_allowed[reads[k]].all(axis=1)
        return given


def pad(
    padded: Mapping[int, PaddedCalls],
    makers: Makers,
    node_types: Sequence[NodeType],
    node_type: np.ndarray,
    arity: np.ndarray,
    operand: np.ndarray,
    result: np.ndarray,
    first_input: int,
) -> PaddedNodes:
    """Makes nodes that have lists nodes of the types that serve several lengths.

    Args:
      padded: by the id of a type, how its nodes are nodes of another type.
      makers: the types whose nodes compute functions of elements.
      node_types: the types by their ids.
      node_type: int32[N], the types of nodes.
      arity: int64[N], the number of their operands.
      operand: int64[E], what they read: results, or inputs as negative numbers.
      result: int64[...], what is returned, numbered likewise.
      first_input: the number of inputs so far; what is new counts on from it.

    Returns:
      The nodes as they are then.
    """
    nothing = np.zeros(0, np.int64)
    if not padded or not len(node_type):
        return PaddedNodes(node_type, arity, operand, result, nothing, nothing)
    nodes = _Nodes(padded, node_types, node_type, arity, operand)
    if not nodes.with_lists and not makers.made:
        return PaddedNodes(node_type, arity, operand, result, nothing, nothing)
    values = _Values(nodes)
    given = nodes.with_functions(makers, values)
    new_type = nodes.room.copy()
    new_arity = arity.copy()
    for t, of_type in nodes.with_lists.items():
        calls = padded[t]
        new_arity[of_type] = len(calls.order) + 1
        if calls.given is not None:
            those = of_type[given[of_type]]
            new_type[those] = calls.given.node_type
            new_arity[those] = len(calls.given.order) + calls.given.places.size + 1
    extended = np.arange(len(node_types))
    rooms = np.flatnonzero(np.bincount(nodes.room)).tolist()
    for like in filter(makers.of, rooms):
        own = nodes.room == like
        for t in np.flatnonzero(np.bincount(new_type[own])).tolist():
            extended[t] = makers.extended(t, like)
    new_type = extended[new_type].astype(node_type.dtype)
    first = pointers(np.array([len(t.results) for t in node_types], np.int64)[new_type])
    place = first[values.maker] + values.within
    references = operand.copy(), result.copy()
    for read in references:
        is_made = read >= 0
        read[is_made] = place[read[is_made]]
    numbers = _Numbers(makers, values, first)
    starts = pointers(new_arity)
    new_operand = np.empty(int(starts[-1]), np.int64)
    has_list = nodes.room != node_type
    same, changed = np.flatnonzero(~has_list), np.flatnonzero(has_list)
    new_operand[ranges(starts[same], arity[same])] = references[0][
        ranges(nodes.start[same], arity[same])
    ]
    length = np.zeros(len(node_type), np.int64)
    for t, of_type in nodes.with_lists.items():
        calls = padded[t]
        length[of_type] = calls.length
        for is_given in (False, True):
            own = of_type[given[of_type] == is_given]
            if not len(own):
                continue
            order = calls.given.order if is_given and calls.given else calls.order
            to = starts[own][:, None]
            new_operand[to + np.arange(len(order))] = references[0][
                nodes.start[own][:, None] + order
            ]
            if is_given and calls.given is not None:
                end = to + len(order)
                for f, places in zip(calls.given.functions, calls.given.places, strict=True):
                    read = nodes.read(own, places)
                    new_operand[end + np.arange(len(places))] = numbers.of(f)[read]
                    end = end + len(places)
    new_operand[starts[1:][changed] - 1] = -1 - first_input - np.arange(len(changed))
    return PaddedNodes(new_type, new_arity, new_operand, references[1], changed, length[changed])


class _Numbers:
    """The numbers of functions of results, if results of nodes begin at `first`."""

    def __init__(self, makers: Makers, values: _Values, first: np.ndarray):
        self._makers, self._values, self._first = makers, values, first
        self._known: dict[ElementFunction, np.ndarray] = {}

    def of(self, function: ElementFunction) -> np.ndarray:
        """int64[V]: of the values for which there is no number it is anything."""
        if function not in self._known:
            values = self._values
            position = np.zeros(int(values.kinds[-1]), np.int64)
            for t, result, place in self._makers.places(function):
                position[values.kinds[t] + result] = place
            self._known[function] = self._first[values.maker] + position[values.kind]
        return self._known[function]
