"""Instances of one structure: those whose graphs differ in the values of their inputs alone.

Trees of one shape have the same nodes and edges, and everything that planning finds out about one
of them holds for all. So instances are told apart by *structure*: a digest of every instance of a
graph is found in one pass over it, instances whose digests agree are compared once, and from then
on a record knows its structure.

The twin in C is `_support/c/structures.c`.
"""

import functools
import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputColumns, types_and_counts
from jedbatch._graph.paths import int32_arrays, int64_arrays, pointers
from jedbatch._graph.record import Record
from jedbatch._graph.types import ValueType
from jedbatch._support.caches import Budget, Memory
from jedbatch._support.native import core

KNOWN = "_structure"  # where a record keeps its structure
COLUMNS = "_columns"  # where a graph keeps its arrays as the core wants them
DIGESTS = "_digests"  # where a graph keeps what `digests_of` says
SHORT_FORM = "_short_form"  # where a record keeps it
MAX_SHORT_NODES = 16  # of an instance whose form is looked at among any number of others


class Structure:
    """The structure of instances whose graphs differ in the values of their inputs alone.

    Attributes:
      record: of one of them.
    """

    __slots__ = ("__dict__", "record")

    def __init__(self, record: Record):
        self.record = record

    @functools.cached_property
    def order(self) -> tuple[bytes, ...]:
        """The graph written out: puts structures in an order that depends on nothing else."""
        form: tuple = self.record.form  # type: ignore[assignment]
        return form[:4]


class Structures:
    """The structures that were met.

    Args:
      limit: how many are kept.
      budget: of bytes, as of `Memory`.
    """

    def __init__(self, limit: int, budget: Budget):
        self._known: Memory = Memory(limit, budget, _bytes_of)
        self._short_forms: Memory = Memory(limit, budget, _bytes_of_form)
        self._types: dict[ValueType, int] = {}

    def of(self, records: Sequence[Record], most: int) -> list[Structure] | None:
        """Returns the structure of each record; None if there are more than `most` of them.

        None, too, if a record is for all lengths, which has no structure.
        """
        try:
            return [record.__dict__[KNOWN] for record in records]
        except KeyError:
            pass
        if any(type(record) is not Record for record in records):
            return None
        if _are_of_many_sizes(records, most):
            return None
        found: list[Hashable] = [r.__dict__.get(KNOWN) or self._digest(r)[0] for r in records]
        if len(set(found)) > most:
            return None
        met: dict[tuple[int, int], Record] = {}  # of each graph, by the first instance like it
        for record, digest in zip(records, found, strict=True):
            if KNOWN in record.__dict__:
                continue
            one = met.setdefault((id(record.whole), self._digest(record)[1]), record)
            if one is record or (one.structure, one.types) != (record.structure, record.types):
                self._note(record, digest)
            else:
                record.__dict__[KNOWN] = one.__dict__[KNOWN]
        return [record.__dict__[KNOWN] for record in records]

    def short_form(self, record: Record) -> Hashable:
        """Returns what is equal for records of few nodes of one form; of others the record."""
        known = record.__dict__.get(SHORT_FORM)
        if known is None:
            first, last = np.frombuffer(record.whole.bounds[record.index], np.int64)[:2].tolist()
            if last - first > MAX_SHORT_NODES:
                return record
            form = record.form
            known = self._short_forms.get(form)
            if known is None:
                known = self._short_forms[form] = object()
            record.__dict__[SHORT_FORM] = known
        return known

    def _digest(self, record: Record) -> tuple[bytes, int]:
        """Returns what `digests_of` says of an instance, found for all recorded with it."""
        known = record.whole.__dict__
        if DIGESTS not in known:
            known[DIGESTS] = self._digests(record.whole)
        return known[DIGESTS][record.index]

    def _note(self, record: Record, digest: Hashable) -> None:
        """Finds the structure of a record, by its digest."""
        key: Hashable = digest, record.structure, record.types
        structure = self._known.get(key)
        if structure is None or not compute_the_same(structure.record, record):
            structure = self._known[key] = Structure(record)
        record.__dict__[KNOWN] = structure

    def _digests(self, graph: Graph) -> list[tuple[bytes, int]]:
        """Returns what `digests_of` says of every instance of a graph."""
        types, counts = types_and_counts(graph.inputs)
        number = {id(t): 0 for t in types}
        for t in types:
            if not number[id(t)]:
                number[id(t)] = self._types.setdefault(t, 1 + len(self._types))
        words = np.array([[number[id(t)] for t in types], counts], np.int64)
        ptr = np.searchsorted(pointers(words[1]), graph.input_ptr)
        return digests_of(graph, words.T.ravel(), 2 * ptr)


def _are_of_many_sizes(records: Sequence[Record], most: int) -> bool:
    """Returns whether instances recorded together are of more than `most` sizes, at a glance."""
    graph = records[0].whole
    if len(records) != graph.num_instances or any(r.whole is not graph for r in records):
        return False
    return len(set(np.diff(graph.node_ptr).tolist())) > most


def digests_of(graph: Graph, words: np.ndarray, word_ptr: np.ndarray) -> list[tuple[bytes, int]]:
    """Returns for every instance 16 bytes, equal for those that compute the same.

    With the number of the first instance that does, compared as a whole.

    Args:
      graph: of the instances.
      words: int64[...], what is to agree besides nodes, operands and outputs.
      word_ptr: int64[B + 1], the share of each instance.
    """
    compiled, count = core(), graph.num_instances
    if compiled is None:
        ends = word_ptr.tolist()
        found: dict[tuple[bytes, ...], tuple[bytes, int]] = {}
        each = []
        for i in range(count):
            form: tuple = Record(graph, i, None, ()).form  # type: ignore[assignment]
            parts = words[ends[i] : ends[i + 1]].tobytes(), *form[:4]
            each.append(found.setdefault(parts, (_digest_of(parts), i)))
        return each
    digests, first = np.empty((count, 2), np.int64), np.empty(count, np.int64)
    bounds = np.frombuffer(b"".join(graph.bounds), np.int64)
    compiled.digest_instances((*_columns(graph), bounds, word_ptr, words, digests, first))
    raw = digests.tobytes()
    return list(zip([raw[i : i + 16] for i in range(0, len(raw), 16)], first.tolist(), strict=True))


def _digest_of(parts: Sequence[bytes]) -> bytes:
    """Returns 16 bytes that depend on the parts and their lengths."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.digest()


def compute_the_same(one: Record, other: Record) -> bool:
    """Returns whether the graphs of two instances differ in the values of their inputs alone."""
    compiled = core()
    if one is other:
        return True
    if compiled is None:
        return one.form == other.form
    same_inputs = _inputs_of(one) == _inputs_of(other)
    return same_inputs and compiled.same_instance(_share(one), _share(other))


def _inputs_of(record: Record) -> tuple[list[ValueType], list[int]]:
    """Returns what `types_and_counts` does, for an instance."""
    inputs, which = record.whole.inputs, slice(record.index, record.index + 2)
    if isinstance(inputs, InputColumns):
        return inputs.types_and_counts(*record.whole.input_ptr[which].tolist())
    return types_and_counts(record.whole.chunks[record.index])


def _share(record: Record) -> tuple[np.ndarray, ...]:
    graph = record.whole
    return *_columns(graph), np.frombuffer(graph.bounds[record.index], np.int64)


def _bytes_of(_: Hashable, structure: Structure) -> int:
    return structure.record.whole.nbytes_each  # kept as a whole, but mostly with others


def _bytes_of_form(form: Any, _: object) -> int:
    return 200 + sum(len(part) for part in form if type(part) is bytes)


def _columns(graph: Graph) -> tuple[np.ndarray, ...]:
    """Returns the arrays of a graph as the core wants them, found once for all of its instances."""
    columns: tuple[np.ndarray, ...] | None = graph.__dict__.get(COLUMNS)
    if columns is None:
        columns = graph.__dict__[COLUMNS] = (
            *int32_arrays(graph.node_type),
            *int64_arrays(graph.operand_ptr),
            *int32_arrays(graph.operand, graph.outputs),
        )
    return columns


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
