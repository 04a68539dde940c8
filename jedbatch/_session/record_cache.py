"""`RecordCache`: the graphs of instances that are kept between minibatches."""

from collections.abc import Hashable, Sequence
from typing import Any

from jedbatch._graph.record import Record
from jedbatch._ragged.lengths import Lengths, RaggedTypes
from jedbatch._ragged.regions import RaggedRecord, Regions
from jedbatch._ragged.tiled_records import Expansion
from jedbatch._record.environment import NOWHERE, Reached
from jedbatch._record.granularity.fuse import GRANULARITIES
from jedbatch._record.granularity.lists import StackedLists
from jedbatch._record.granularity.readout import Readouts
from jedbatch._record.registry import MAX_READ_STATES, Registry
from jedbatch._session.merging import Merging, Unmarked
from jedbatch._session.options import Options
from jedbatch._support.caches import Memory
from jedbatch._support.guards import GuardFailed
from jedbatch._support.types import Array

BYTES_PER_NODE = 100  # of an instance, estimated


class RecordCache:
    """Graphs of instances for one structure of shared arguments.

    Attributes:
      registry: types met so far.
      grouping: merges nodes or takes them apart; None if nodes are what was recorded.
      lists: merges what is done with lists outside of cells; None if operations are kept apart.
      readouts: merges what is done after the last cells; None if operations are kept apart.
      merging: says whether to merge nodes; None if that is decided.
      unmarked: watches what is recorded of a function whose nodes are merged unasked.
      by_key: records, by the key of the instance.
      by_id: (instance, record) by the id of an instance that cannot change.
      lengths, regions: of arrays whose length differs, and what is done to them.
      expansion: of graphs for all lengths to graphs for those of a minibatch.
    """

    def __init__(self, registry: Registry, options: Options):
        self.registry = registry
        self.grouping = GRANULARITIES[options.granularity or "cell"](registry)
        self.merging = Merging(registry) if options.granularity is None else None
        self.unmarked: Unmarked | None = None
        self.lists = StackedLists(registry) if options.granularity is None else None
        self.readouts = Readouts(registry) if options.granularity is None else None
        self._limit, self._limit_bytes = options.cache_size, options.cache_bytes
        self._known: dict[int, tuple[Memory, Memory]] = Memory(MAX_READ_STATES)
        self._number = NOWHERE.number
        self.by_key, self.by_id = self._memories(NOWHERE.number)
        registry.read(NOWHERE)
        apart = None if self.grouping is None else f"granularity is {options.granularity!r}"
        families: Memory = Memory(self._limit, self._limit_bytes // 4, _bytes_of_family)
        self.lengths = Lengths(apart, families)
        self.regions = Regions(registry)
        self.expansion = Expansion(self.regions)

    def read(self, reached: Reached) -> None:
        """Sets what recordings read besides their arguments, until `nothing_to_read` is called."""
        self.registry.read(reached)
        if reached.number == self._number:
            return
        self._number = reached.number
        self.by_key, self.by_id = self._memories(reached.number)
        while sum(m.bytes for pair in self._known.values() for m in pair) > self._limit_bytes:
            other_numbers = [number for number in self._known if number != reached.number]
            if not other_numbers:
                break
            del self._known[other_numbers[0]]

    def _memories(self, number: int) -> tuple[Memory, Memory]:
        """Returns `by_key` and `by_id` for what is read."""
        if number not in self._known:
            half = self._limit_bytes // 2
            self._known[number] = (
                Memory(self._limit, half, _bytes_of_record),
                Memory(self._limit, half, _bytes_of_seen),
            )
        return self._known[number]

    def nothing_to_read(self) -> None:
        """Makes recordings from now on read their arguments alone; releases the arrays."""
        self.registry.read(NOWHERE._replace(number=self._number))

    def look(
        self, keys: Sequence[Hashable], arrays: Sequence[Sequence[Array]]
    ) -> list[RaggedTypes | None]:
        """Returns how instances are recorded (see `Lengths.look`).

        Raises `GuardFailed` where there is another bound from now on.
        """
        types = self.lengths.look(keys, arrays)
        bound = self.lengths.bound
        if bound is None or self.lengths.longest <= bound:
            return types
        if self.bind():
            raise GuardFailed
        return [  # what is longer than any table is the function's to refuse
            None
            if g and any(len(instance_arrays[i]) > bound for s in g.symbols.values() for i in s)
            else g
            for g, instance_arrays in zip(types, arrays, strict=True)
        ]

    def forget_regions(self) -> None:
        """Forgets records that may take a number to be a constant that has been found to differ."""
        old = [key for key, record in self.by_key.items() if isinstance(record, RaggedRecord)]
        for key in old:
            del self.by_key[key]

    @property
    def revision(self) -> int:
        """How often types that had been met became others."""
        merged = sum(x.revision for x in (self.lists, self.readouts) if x)
        return merged + self.registry.arities.revision + self.registry.shared_operands.revision

    def assumed(self) -> Hashable:
        """Returns assumptions about lengths, numbers and lists that differ, and granularity."""
        return self.lengths.revision, self.regions.revision, self.revision, self.grouping

    def note_known(self) -> None:
        """Notes a minibatch whose instances are all known."""
        if self.unmarked is not None:
            self.unmarked.note(())

    def forget_records(self) -> None:
        """Forgets all records: types they are of have become others."""
        for by_key, by_id in self._known.values():
            by_key.clear()
            by_id.clear()

    def decide(self) -> None:
        """Does what the first minibatches have said about merging nodes, if they have."""
        if self.merging is not None and self.merging.is_decided:
            if self.merging.pays:
                self.grouping = self.merging.blocks
                self.unmarked = Unmarked(self.registry, self.merging.blocks)
                self.forget_records()
            self.merging = None

    def bind(self) -> bool:
        """Bounds lengths by what shared tables have room for; whether that changes anything."""
        return self.lengths.next_bound(value.aval.shape for value in self.registry.shared)


def _bytes_of_record(key: Any, record: Record) -> int:
    """Of what is kept for an instance; a graph is kept as a whole, but mostly with others."""
    return len(key) * (1 if type(key) is bytes else 64) + record.whole.nbytes_each


def _bytes_of_seen(_: int, known: tuple[Any, Record]) -> int:
    return BYTES_PER_NODE * known[1].whole.nodes_each


def _bytes_of_family(key: Hashable, _: object) -> int:
    return 64 * len(key) if isinstance(key, tuple) else 64
