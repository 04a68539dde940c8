"""Records of instances whose arrays [n, ...] travel through their graphs.

Sentences at the leaves of trees run before the graph, all together (see `_ragged.regions`). Where
such arrays are the states of a recursion, as the rows [sites, 4] of every node of a phylogenetic
tree are, what is done to them is another program for every tree. Then nodes on arrays become nodes
on padded arrays (see `_ragged.padded_graphs`), which are scheduled like all others: types of nodes
depend neither on the tree nor, but for a few capacities, on how long the arrays are.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.symbolic_dims import is_ragged, shape_at
from jedbatch._program.output_spec import PaddedPlace
from jedbatch._program.plan import PaddedRows
from jedbatch._ragged.padded_graphs import (
    AddedArrays,
    RaggedInstance,
    added_arrays,
    padded_graph,
)
from jedbatch._ragged.padded_programs import PaddedProgram, capacities, capacities_up_to
from jedbatch._ragged.regions import RaggedRecord, Regions, some_are_ragged
from jedbatch._support.caches import Budget, Memory
from jedbatch._support.types import Array

MAX_PADDED = 4096  # records for some capacities that are kept


class RaggedNodes(NamedTuple):
    """The nodes of a type on arrays of any length.

    Attributes:
      program: of the type.
      symbols: names that its symbols have in the instance.
    """

    program: PaddedProgram
    symbols: tuple[str, ...]

    def own(self, values: Mapping[str, int]) -> dict[str, int]:
        """Returns the values of the symbols of the program, given those of the instance."""
        names = zip(self.program.symbols, self.symbols, strict=True)
        return {own: values[name] for own, name in names}


@dataclass(frozen=True, eq=False)
class AnyLengthRecord(RaggedRecord):
    """The record of an instance with nodes on arrays of any length, to be padded.

    Attributes:
      leaves: for each symbol that nodes read, an array of the instance whose length it is.
      nodes: by the id of each type of ragged nodes, what they compute.
      together: for each symbol the number of the first one that it meets in a node, or that meets
        one which does, and so on: they have one capacity.
    """

    leaves: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[int, RaggedNodes] = field(default_factory=dict)
    together: tuple[int, ...] = ()

    def lengths(self, arrays: Sequence[Array]) -> list[int]:
        """Returns the values of the symbols, for the arrays of an instance."""
        return [len(arrays[leaf]) for leaf in self.leaves.values()]

    def sizes(self, capacities_of: Sequence[int]) -> list[int]:
        """Returns the capacity of each symbol, given what their values need."""
        most: dict[int, int] = {}
        for group, size in zip(self.together, capacities_of, strict=True):
            most[group] = max(size, most.get(group, 0))
        return [most[group] for group in self.together]

    @functools.cached_property
    def lacks_nothing(self) -> bool:
        """Whether the instance has all rows it needs as long as none of its lengths is 0."""
        return all(nodes.program.needed.lacks_nothing for nodes in self.nodes.values())

    def lacks_rows(self, lengths: Sequence[int]) -> bool:
        """Returns whether the instance has fewer rows than what it computes needs."""
        value = dict(zip(self.leaves, lengths, strict=True))
        return any(x.program.needed.lacking(x.own(value)) for x in self.nodes.values())

    def refuse_lacking(
        self, lengths: Sequence[int], instance: int, arrays: Sequence[Sequence[Array]]
    ) -> None:
        """Raises `ValueError` if something is taken of rows of which the instance has too few."""
        if self.lacks_nothing and all(lengths):
            return
        value = dict(zip(self.leaves, lengths, strict=True))
        for nodes in self.nodes.values():
            own = {s: np.array([n]) for s, n in nodes.own(value).items()}
            nodes.program.needed.refuse_lacking(own, [instance], arrays)

    def count_rows(self, lengths: Sequence[int]) -> list[int]:
        """Returns (nodes on padded arrays, rows that exist in them, rows that are computed)."""
        a, b = self.whole.node_ptr[self.index : self.index + 2]
        types, counts = np.unique(self.whole.node_type[a:b], return_counts=True)
        value, total = dict(zip(self.leaves, lengths, strict=True)), np.zeros(3, np.int64)
        sizes = dict(
            zip(self.leaves, self.sizes(capacities(np.array(lengths)).tolist()), strict=True)
        )
        for type_id, count in zip(types.tolist(), counts.tolist(), strict=True):
            if type_id in self.nodes:
                most = max(self.nodes[type_id].own(value).values())
                size = max(self.nodes[type_id].own(sizes).values())
                total += count * np.array([1, most, size])
        return total.tolist()


@dataclass(frozen=True, eq=False)
class PaddedRecord(RaggedRecord):
    """The record of an instance with nodes on padded arrays.

    Attributes:
      of: the record for all lengths.
      size: its largest capacity.
      added: the arrays behind those of the instance.
      padded: the ragged results that arrays of the graph are, by position.
    """

    of: AnyLengthRecord = None  # type: ignore[assignment]
    size: int = 0
    added: AddedArrays = None  # type: ignore[assignment]
    padded: dict[int, PaddedPlace] = field(default_factory=dict)


class Padding:
    """Graphs of nodes on padded arrays, for the lengths of minibatches."""

    def __init__(self, regions: Regions, budget: Budget):
        self.regions = regions
        self._known: dict[Any, PaddedRecord] = Memory(
            MAX_PADDED, budget, lambda _, record: record.whole.nbytes_each
        )

    def pad(
        self, records: Sequence[Record], arrays: Sequence[Sequence[Array]]
    ) -> tuple[Sequence[Record], Sequence[Sequence[Array]]]:
        """Returns the records of instances for their lengths, and their arrays with padded ones."""
        if not some_are_ragged(records):
            return records, arrays
        mine = [i for i, record in enumerate(records) if isinstance(record, AnyLengthRecord)]
        if not mine:
            return records, arrays
        records, arrays = list(records), list(arrays)
        lengths = {i: records[i].lengths(arrays[i]) for i in mine}  # type: ignore[attr-defined]
        flat = np.array([n for i in mine for n in lengths[i]], np.int64)
        sizes = iter(capacities(flat).tolist())
        keys: dict[int, Any] = {}
        known: dict[Any, PaddedRecord | None] = {}
        new: dict[Any, tuple[AnyLengthRecord, list[int], list[int]]] = {}
        for i in mine:
            record: Any = records[i]
            own = lengths[i]
            record.refuse_lacking(own, i, arrays)
            own_sizes = record.sizes([next(sizes) for _ in own])
            returned = any(is_ragged(shape) for shape, _ in record.types)
            keys[i] = key = record, *own_sizes, *(own if returned else ()), 0 in own
            if key not in known:
                known[key] = self._known.get(key)
                if known[key] is None:
                    new[key] = record, own, own_sizes
        for key, made in zip(new, self._padded(list(new.values())), strict=True):
            self._known[key] = known[key] = made
        found = [known[keys[i]] for i in mine]
        given = [(x.added, arrays[i], lengths[i]) for i, x in zip(mine, found, strict=True)]  # type: ignore[union-attr]
        for i, padded, added in zip(mine, found, added_arrays(given), strict=True):
            assert padded is not None
            records[i], arrays[i] = padded, [*arrays[i], *added]
        return records, arrays

    def shorter(self, records: Sequence[Record]) -> list[list[PaddedRecord]]:
        """Returns padded records once more for each capacity below their largest one."""
        own = [record for record in records if isinstance(record, PaddedRecord)]
        most = max((record.size for record in own), default=0)
        sizes = [size for size in capacities_up_to(most) if size < most]
        pairs = [(record.of, len(record.of.leaves)) for record in own]
        return [
            self._padded([(of, [k] * count, [k] * count) for of, count in pairs]) for k in sizes
        ]

    def _padded(
        self, new: Sequence[tuple[AnyLengthRecord, list[int], list[int]]]
    ) -> list[PaddedRecord]:
        """Returns records for lengths and capacities."""
        if not new:
            return []
        graph = Graph.select([(record.whole, record.index) for record, *_ in new])
        instances = [
            RaggedInstance(list(record.leaves), sizes, 0 in lengths, record.num_arrays)
            for record, lengths, sizes in new
        ]
        whole, added = padded_graph(self.regions, graph, instances)
        records = []
        for k, (record, lengths, sizes) in enumerate(new):
            length = dict(zip(record.leaves, lengths, strict=True))
            size = dict(zip(record.leaves, sizes, strict=True))
            elsewhere = {position for position, _, _ in record.ragged}
            places, kinds = padded_results(record.types, length, size, elsewhere)
            records.append(
                PaddedRecord(
                    whole,
                    k,
                    record.structure,
                    kinds,
                    record.calls,
                    record.num_arrays + added[k].number,
                    record.ragged,
                    record.places,
                    record.constants,
                    record,
                    max(sizes),
                    added[k],
                    places,
                )
            )
        return records


def padded_results(
    types: Sequence[Kind],
    lengths: Mapping[str, int],
    sizes: Mapping[str, int],
    elsewhere: Collection[int] = (),
) -> tuple[dict[int, PaddedPlace], tuple[Kind, ...]]:
    """Returns (the ragged results that arrays of the graph are, types of all results).

    Args:
      types: of the results, with symbols for lengths.
      lengths: the value of each symbol.
      sizes: the capacity for each.
      elsewhere: the positions of ragged results that no arrays of the graph are.
    """
    places: dict[int, PaddedPlace] = {}
    kinds: list[Kind] = []
    for position, (shape, dtype) in enumerate(types):
        if position not in elsewhere and is_ragged(shape):
            padded = shape_at(shape, sizes)
            shape = shape_at(shape, lengths)
            places[position] = PaddedPlace(0, (padded, dtype), shape)
        kinds.append((shape, dtype))
    return places, tuple(kinds)


def counter_of_padded(
    records: Sequence[Record], arrays: Sequence[Sequence[Array]]
) -> Callable[[], PaddedRows] | None:
    """Returns what counts the rows of padded nodes; None if there are none.

    It is called for a plan that somebody looks at. Instances of equal capacities share a record,
    and differ in rows.
    """
    if not some_are_ragged(records):
        return None
    found = [
        (record.of, record.of.lengths(own))
        for record, own in zip(records, arrays, strict=True)
        if isinstance(record, PaddedRecord)
    ]
    return functools.partial(_count_rows, found) if found else None


def _count_rows(found: Sequence[tuple[AnyLengthRecord, list[int]]]) -> PaddedRows:
    """Returns the rows of padded nodes of some instances, given their lengths."""
    return PaddedRows(*map(sum, zip(*(r.count_rows(own) for r, own in found), strict=True)))


def with_padded_nodes(
    records: Sequence[RaggedRecord],
    regions: Regions,
    leaf_of: Sequence[Mapping[str, Sequence[int]]],
) -> list[RaggedRecord]:
    """Returns the records of instances whose ragged nodes are to be padded, if there are any.

    Args:
      records: of all instances of one graph, in order.
      regions: the regions met so far.
      leaf_of: for each, the arrays whose length each symbol is.
    """
    graph = records[0].whole
    nodes: dict[int, RaggedNodes] = {}
    for type_id in filter(regions.is_ragged, graph.present_types):
        ragged = regions.ragged_type(type_id)
        program = regions.padded.program(ragged)
        assert isinstance(program, PaddedProgram)  # as of all ragged nodes that are left
        nodes[type_id] = RaggedNodes(program, ragged.symbols)
    if not nodes:
        return list(records)
    found: list[RaggedRecord] = []
    for record, leaves in zip(records, leaf_of, strict=True):
        a, b = graph.node_ptr[record.index : record.index + 2]
        own = {t: nodes[t] for t in np.unique(graph.node_type[a:b]).tolist() if t in nodes}
        symbols = list(dict.fromkeys(s for x in own.values() for s in x.symbols))
        groups: UnionFind[str] = UnionFind()
        for x in own.values():
            for symbol in x.symbols:
                groups.union(x.symbols[0], symbol)
        found.append(
            AnyLengthRecord(
                record.whole,
                record.index,
                record.structure,
                record.types,
                record.calls,
                record.num_arrays,
                record.ragged,
                record.places,
                record.constants,
                {s: leaves[s][0] for s in symbols},
                own,
                tuple([symbols.index(groups.find(s)) for s in symbols]),
            )
        )
    return found
