"""Instances of one structure: those whose graphs differ in the values of their inputs alone.

Trees of one shape have the same nodes and edges, and everything that planning finds out about one
of them holds for all. So instances are told apart by *structure*: each is written out of its graph
as bytes, equal for those of one structure, and from then on a record knows its structure. Lengths
of lists are written out, too, though they are values of inputs: which elements exist depends on
them.

It takes time in proportion to nodes. Where most instances have a structure of their own, as large
trees do, nothing is gained by it, and each is taken to have one by itself.

The twin in C is `_support/c/structures.c`.
"""

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import types_and_counts, whole_numbers
from jedbatch._graph.operations import ListOperands
from jedbatch._graph.paths import pointers
from jedbatch._graph.record import Record
from jedbatch._graph.types import ValueType
from jedbatch._support.caches import Budget, Memory

KNOWN = operator.attrgetter("known_structure")
MIN_COPIES = 4  # instances to a structure, in the mean, or so few: to find structures takes time


class Structure:
    """The structure of instances whose graphs differ in the values of their inputs alone.

    Attributes:
      record: of one of them; None if no others were looked for.
      written: the graph (see `written_out`), which puts structures in an order that depends on
        nothing else.
    """

    __slots__ = ("record", "written")

    def __init__(self, record: Any, written: bytes):
        self.record = record
        self.written = written


class Structures:
    """The structures that were met.

    Args:
      limit: how many are kept.
      budget: of bytes, as of `Memory`.
    """

    def __init__(self, limit: int, budget: Budget):
        self._known: Memory = Memory(limit, budget, _bytes_of)
        self._types: dict[ValueType, int] = {}
        self._lists: dict[int, ListOperands] = {}  # of node types that have some
        self._num_types = 0

    def of(self, records: Sequence[Record]) -> list[Structure]:
        """Returns the structure of each record.

        Only where there are as few as one to `MIN_COPIES` instances, or as few in all, are others
        looked for that have the same.
        """
        found = list(map(KNOWN, records))
        distinct, most = set(found), max(MIN_COPIES, len(records) // MIN_COPIES)
        are_few = len(distinct) <= most
        if None in distinct or (are_few and any(x.record is None for x in distinct)):
            wholes: dict[int, dict[Record, None]] = {}
            for record, known in zip(records, found, strict=True):
                if known is None or (are_few and known.record is None):
                    wholes.setdefault(id(record.whole), {})[record] = None
            for some in wholes.values():
                self._find(list(some), most)
            found = list(map(KNOWN, records))
        return found

    def _find(self, records: Sequence[Record], most: int) -> None:
        """Finds the structures of some instances of one graph, if there are at most so many."""
        graph, which = records[0].whole, np.array([record.index for record in records])
        written = None
        if len(records) <= most or len(set(np.diff(graph.node_ptr)[which].tolist())) <= most:
            written = written_out(graph, which, *self._words(graph), most)
        met: dict[bytes, Record] = {}
        for record, own in zip(records, written or [b""] * len(records), strict=True):
            if written is None:
                structure = Structure(None, own)
            elif (one := met.setdefault(own, record)).told_apart_by != record.told_apart_by:
                structure = self._noted(record, own)
            else:
                structure = self._noted(record, own) if one is record else one.known_structure
            record.__dict__["known_structure"] = structure

    def _noted(self, record: Record, written: bytes) -> Structure:
        """Returns the structure of a record."""
        key: Hashable = written, record.told_apart_by
        structure: Structure | None = self._known.get(key)
        if structure is None:
            structure = self._known[key] = Structure(record, written)
        return structure

    def _words(self, graph: Graph) -> tuple[np.ndarray, np.ndarray]:
        """(int64[B + 1], int32[...]): what instances of a graph are told apart by besides it.

        Types of inputs, each as often as it follows itself, and lengths of lists.
        """
        types, counts = types_and_counts(graph.inputs)
        one_of = {id(t): t for t in types}
        number = {k: self._types.setdefault(t, len(self._types)) for k, t in one_of.items()}
        words = np.array([[number[id(t)] for t in types], counts], np.int32)
        ptr = 2 * pointers(words[1]).searchsorted(graph.input_ptr)
        words = words.T.ravel()
        for t in range(self._num_types, len(graph.types)):
            operation = graph.types[t].operation
            if operation is not None and operation.lists is not None:
                self._lists[t] = operation.lists
        self._num_types = max(self._num_types, len(graph.types))
        if not self._lists:
            return ptr, words
        lengths, owner = lengths_of(graph, self._lists)
        if len(lengths):
            of_words = np.arange(graph.num_instances).repeat(np.diff(ptr))
            order = np.argsort(np.concatenate([of_words, owner]), kind="stable")
            words = np.concatenate([words, lengths])[order]
            ptr += pointers(np.bincount(owner, minlength=graph.num_instances))
        return ptr, words


def lengths_of(graph: Graph, lists: Mapping[int, ListOperands]) -> tuple[np.ndarray, np.ndarray]:
    """(int32[...], int64[...]): lengths of lists that nodes read, and the instance of each.

    `lists` are those of the types that have some.
    """
    nodes = {t: np.flatnonzero(graph.node_type == t) for t in lists}
    edges = [graph.operand_ptr[own] + lists[t].length for t, own in nodes.items()]
    if not any(map(len, edges)):
        return np.zeros(0, np.int32), np.zeros(0, np.int64)
    numbers = whole_numbers(graph.inputs, graph.num_inputs)
    lengths = numbers[-1 - graph.operand[np.concatenate(edges)]].astype(np.int32)
    return lengths, graph.node_instance[np.concatenate(list(nodes.values()))]


def written_out(
    graph: Graph, which: np.ndarray, word_ptr: np.ndarray, words: np.ndarray, most: int
) -> list[bytes] | None:
    """Returns some instances written out, equal for those that compute the same of their inputs.

    Args:
      graph: of the instances.
      which: int64[...], their numbers.
      word_ptr: int64[B + 1], where the words of each instance begin.
      words: int32[...], what is to agree besides the graph.
      most: different ones; if there are more, None is returned.
    """
    found: list[bytes] = []
    different: set[bytes] = set()
    for i in which.tolist():
        found.append(_written(graph, i, words[word_ptr[i] : word_ptr[i + 1]]))
        different.add(found[-1])
        if len(different) > most:
            return None
    return found


def _written(graph: Graph, i: int, words: np.ndarray) -> bytes:
    """Returns an instance written out: columns of its graph, counted from zero, and their sizes."""
    node, last = graph.node_ptr[i : i + 2].tolist()
    output, last_output = graph.output_ptr[i : i + 2].tolist()
    ends = graph.operand_ptr[node : last + 1]
    read, last_read = int(ends[0]), int(ends[-1])
    references = graph.operand[read:last_read], graph.outputs[output:last_output]
    if i:
        result, first_input = graph.value_ptr[node], graph.input_ptr[i]
        references = tuple([x - np.where(x >= 0, result, -first_input) for x in references])
    sizes = np.array([last - node, *map(len, references), len(words)])
    parts = graph.node_type[node:last], ends[:-1] - read, *references, words, sizes
    return b"".join([x.astype(np.int32).tobytes() for x in parts])


def _bytes_of(_: Hashable, structure: Structure) -> int:
    """Of what is kept for a structure; a graph is kept as a whole, but mostly with others."""
    return len(structure.written) + int(structure.record.whole.nbytes_each)


def counted(graph: Graph, counts: np.ndarray) -> Graph:
    """Returns the same graph, each instance of which counts as so many, int64[B]."""
    same = object.__new__(Graph)
    same.__dict__.update(graph.__dict__)
    weight = counts[graph.node_instance]
    of_types = np.bincount(graph.node_type, weight, len(graph.types)).astype(np.int64)
    same.__dict__.update(weight=weight, nodes_per_type=of_types)
    return same


def weight_of(graph: Graph) -> np.ndarray | None:
    """Returns int64[N], how many nodes each node counts as; None if each counts as one."""
    return graph.__dict__.get("weight")
