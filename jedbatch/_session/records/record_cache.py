"""`RecordCache`: the graphs of instances that are kept between minibatches."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import Questions
from jedbatch._kernel.target import Target
from jedbatch._ragged.length_families import ArrayType
from jedbatch._ragged.lengths import Lengths, RaggedTypes
from jedbatch._ragged.padded_records import Padding
from jedbatch._ragged.regions import RaggedRecord, Regions
from jedbatch._record.identity.environment import NOWHERE, Reached
from jedbatch._record.instances.arrays import array_type
from jedbatch._record.instances.key import keys_with_arrays
from jedbatch._record.operations.floats import Floats
from jedbatch._record.operations.sequences import Sequences
from jedbatch._record.passes.coalesce import Coalescing
from jedbatch._record.passes.lists import StackedLists
from jedbatch._record.run.constants import Constants
from jedbatch._record.types.registry import MAX_READ_STATES, Registry
from jedbatch._session.options import Options
from jedbatch._support.caches import Budget, Memory
from jedbatch._support.guards import GuardFailed
from jedbatch._support.types import Array

MOST_TOLD = 1 << 14  # keys of instances that are known to ask for lengths
BYTES_PER_NODE = 100  # of an instance, estimated
RECORD_BYTES = 1 << 11  # of one, besides its graph, measured


class RecordsOfArrays:
    """Records of instances with arrays, by keys that take little time to make.

    Instances have the same record whatever other lengths there are as long as nothing is learned.
    So all is forgotten once something is.

    Args:
      limit, budget: instances that are kept, and bytes, as of `Memory`.
    """

    def __init__(self, limit: int, budget: Budget):
        self._dtypes: dict[np.dtype[Any], int] = {}
        self._records = Memory(limit, budget, _bytes_of_record)
        self._learned: Hashable = None

    @property
    def bytes(self) -> int:
        """Bytes of what is kept."""
        return self._records.bytes

    def find(
        self, instances: list[Any], learned: Hashable
    ) -> tuple[list[Record], list[list[Array]]] | None:
        """Returns the records of instances, and their arrays; None unless all are known.

        Args:
          instances: to find.
          learned: what is known of lengths and types by now.
        """
        if learned != self._learned:
            return None
        written = keys_with_arrays(instances, self._dtypes)
        if written is None:
            return None
        records: list[Any] = list(map(self._records.get, written[0]))
        return None if None in records else (records, written[1])

    def keep(
        self,
        instances: list[Any],
        records: Sequence[Record],
        arrays: Sequence[Sequence[Array]],
        learned: Hashable,
    ) -> None:
        """Keeps the records of instances; `learned` as of `find`."""
        if learned != self._learned:
            self.clear()
            self._learned = learned
        for x in itertools.chain(*arrays):
            if type(x) is np.ndarray:
                self._dtypes.setdefault(x.dtype, len(self._dtypes))
        written = keys_with_arrays(instances, self._dtypes)
        if written is not None:
            pairs = zip(written[0], records, strict=True)
            self._records.add([(k, r) for k, r in pairs if self._records.get(k) is not r])

    def clear(self) -> None:
        """Forgets all of them."""
        self._records.clear()


class Memories(NamedTuple):
    """Records of instances, for one state of the values read besides their arguments.

    Attributes:
      by_key, by_id, with_arrays: see `RecordCache`.
    """

    by_key: Memory
    by_id: Memory
    with_arrays: RecordsOfArrays


class RecordCache:
    """Graphs of instances for one structure of shared arguments.

    Attributes:
      registry: types met so far.
      coalescing: merges what always runs together.
      passes: over graphs of instances, which merge operations and what is done with lists outside
        of cells, unless operations are kept apart.
      warns_of_operations: whether recording many operations one by one is warned of.
      by_key: records, by the key of the instance.
      by_id: (instance, record, arrays) by the id of an instance that cannot change. Arrays take the
        place of parts of it; they do so as long as nothing is learned.
      with_arrays: records of instances with arrays, as long as lengths do not matter.
      told: keys without lengths of instances of which Python was told some.
      lengths, regions: of arrays whose length differs, and what is done to them.
      padding: of graphs for all lengths to the capacities of a minibatch.
      floats: of instances, which may be operands.
      sequences: of whole numbers in instances, which may be arrays.
      constants: of instances, which may be arrays of any length.
      number: of what recordings read besides their arguments.
      num_recorded: minibatches of which some instances had to be recorded.
      num_types: node types that were known after the last one of these.
    """

    def __init__(self, registry: Registry, options: Options, target: Target):
        self.registry = registry
        self.num_recorded = self.num_types = 0
        self.floats = Floats(registry.assumptions, registry.budget)
        self.sequences = Sequences(registry.assumptions)
        self.constants = Constants(registry)
        self.coalescing = Coalescing(registry, asked=options.granularity == "auto")
        self.passes: list[Callable[[Graph], Graph]] = [registry.pad]
        if options.granularity != "cell":
            self.passes = [StackedLists(registry).merge, self.coalescing.merge, registry.pad]
        self.warns_of_operations = options.granularity is None
        self._limit = options.cache_size
        self._known: dict[int, Memories] = Memory(MAX_READ_STATES)
        self.number = NOWHERE.number
        self.by_key, self.by_id, self.with_arrays = self._memories(NOWHERE.number)
        self._known_by_id: Hashable = None  # what had been learned by then
        self.told = Memory(MOST_TOLD)
        registry.read(NOWHERE)
        self._families: Memory = Memory(self._limit, registry.budget, _bytes_of_family)
        self.lengths = Lengths(self._families, registry.assumptions)
        self.regions = Regions(registry, target.rest_work, options.packs)
        self.padding = Padding(self.regions, registry.budget)

    def read(self, reached: Reached) -> None:
        """Sets what recordings read besides their arguments, until `nothing_to_read` is called."""
        self.registry.read(reached)
        if reached.number == self.number:
            return
        self.number = reached.number
        self.by_key, self.by_id, self.with_arrays = self._memories(reached.number)

    def _memories(self, number: int) -> Memories:
        """Returns the memories for what is read."""
        if number not in self._known:
            limit, budget = self._limit, self.registry.budget
            self._known[number] = Memories(
                Memory(limit, budget, _bytes_of_record),
                Memory(limit, budget, _bytes_of_seen),
                RecordsOfArrays(limit, budget),
            )
        return self._known[number]

    def known(self, instances: Sequence[Any]) -> list[tuple[Any, Record, Sequence[Array]] | None]:
        """Returns what is known of instances by their ids."""
        if self._known_by_id != self.learned:
            self._known_by_id = self.learned
            for memories in list(self._known.values()):
                memories.by_id.clear()
        return list(map(self.by_id.get, map(id, instances)))

    def keep_by_id(
        self,
        instances: Sequence[Any],
        which: Iterable[int],
        records: Sequence[Record],
        arrays: Sequence[Sequence[Array]],
    ) -> None:
        """Keeps the records and arrays of those instances of a minibatch that cannot change."""
        found = [(instances[i], records[i], arrays[i]) for i in which]
        self.by_id.add([(id(same[0]), same) for same in found])

    def nothing_to_read(self) -> None:
        """Makes recordings from now on read their arguments alone; releases the arrays."""
        self.registry.read(Reached(self.number, (), ()))

    def look(
        self, keys: Sequence[Hashable], arrays: Sequence[Sequence[Array]]
    ) -> list[RaggedTypes | None]:
        """Returns how instances are recorded (see `Lengths.look`).

        Those that make arrays of any length are recorded for their lengths alone, even if they have
        none among their arguments.

        Raises `GuardFailed` where there is another bound from now on.
        """
        types = self._look(keys, arrays)
        if not self.constants.are_looked_for or self.lengths.off:
            return types
        every = zip(types, keys, arrays, strict=True)
        return [t or self.lengths.without_ragged(key, own) for t, key, own in every]

    def _look(
        self, keys: Sequence[Hashable], arrays: Sequence[Sequence[Array]]
    ) -> list[RaggedTypes | None]:
        types = self.lengths.look(keys, arrays)
        bound, least = self.lengths.bound, self.lengths.least
        is_long = bound is not None and self.lengths.longest > bound
        if not is_long and least == 1:
            return types
        if is_long and self.bind():
            raise GuardFailed

        def fits(known: RaggedTypes) -> bool:
            lengths = [known.lengths[i] for s in known.symbols.values() for i in s]
            # What is longer than any table is the function's to refuse.
            return min(lengths) >= least and (bound is None or max(lengths) <= bound)

        return [known if known and fits(known) else None for known in types]

    @property
    def num_known(self) -> int:
        """Instances whose graphs are kept; those that differ in values alone count once."""
        return sum(len(memories.by_key) for memories in list(self._known.values()))

    def keep(
        self,
        instances: list[Any],
        records: Sequence[Record],
        arrays: Sequence[Sequence[Array]],
    ) -> None:
        """Keeps records, to be found by arrays, unless instances are told apart for a reason.

        Args:
          instances: all of a minibatch.
          records: theirs.
          arrays: theirs.
        """
        if self.lengths.apart is None:
            self.with_arrays.keep(instances, records, arrays, self.learned)

    @property
    def learned(self) -> Hashable:
        """Changes whenever an instance with arrays may have another record than before."""
        return self.lengths.changes, *self.assumed()

    def forget_regions(self) -> None:
        """Forgets records that may take a number to be a constant that has been found to differ."""
        old = [key for key, record in self.by_key.items() if isinstance(record, RaggedRecord)]
        for key in old:
            del self.by_key[key]

    @property
    def revision(self) -> int:
        """How often types that had been met became others."""
        return self.registry.assumptions.version("types", "shared")

    def assumed(self) -> tuple[Hashable, ...]:
        """Returns assumptions about lengths, numbers, floats and lists, and granularity."""
        version = self.registry.assumptions.version
        versions = version("types", "shared", "lengths", "regions", "floats", "sequences")
        return versions + version("constants"), self.floats.apart

    @property
    def shown(self) -> tuple[str, ...]:
        """Assumptions about instances, for printed plans."""
        shown, why = [], self.floats.apart
        if why is not None:
            shown.append(f"instances are told apart by their floats, since {why}")
        if (where := self.lengths.asked_at) is not None:
            shown.append(f"Python is told how long arrays are, for which it asks at {where}")
        return tuple(shown)

    def begin_constants(self) -> None:
        """Looks for constants of any length from now on; raises `GuardFailed` the first time."""
        if self.constants.are_looked_for is None:
            self.constants.begin()
            self.forget_records()
            raise GuardFailed

    def type_of_constant(self, x: Array, lengths: dict[str, int]) -> tuple[str, ArrayType] | None:
        """(its symbol, its type) of an array of any length that an instance makes.

        None if there is none for it.

        Args:
          x: the array.
          lengths: the values of the symbols of the instance, to which that of a new one is added.
        """
        shape, dtype, weak = array_type(x)
        if not shape[0] or is_key(dtype):
            return None
        names = list(lengths)  # in the order of their numbers
        number = next((k for k, s in enumerate(names) if lengths[s] == shape[0]), len(names))
        kind = self.lengths.type_of(number, shape[0], (shape[1:], dtype, weak))
        if kind is None:
            return None
        symbol = str(kind[0][0])
        lengths[symbol] = shape[0]
        return symbol, kind

    def forget_records(self) -> None:
        """Forgets all records: types they are of have become others."""
        self.regions.forget_rest()
        for memories in self._known.values():
            for memory in memories:
                memory.clear()

    def check(self, revision: int) -> None:
        """Raises `GuardFailed` if types that had been met have become others since a revision."""
        if self.revision != revision:
            self.forget_records()
            raise GuardFailed

    def learn(
        self, recorded: RaggedTypes | None, asked: Questions | None, error: Exception
    ) -> bool:
        """Returns whether to record again, since lengths are known better now.

        JAX had to know which are equal, that there are rows left, or how many there are at most.

        Args:
          recorded: the types of the instance that could not be recorded; None if it has no symbols.
          asked: what was asked about lengths meanwhile.
          error: why it could not be recorded.
        """
        lengths = self.lengths
        if asked is None:
            return self.bind()
        if recorded is not None and lengths.relate(recorded, asked, error):
            return True
        lengths.note_limits(asked)
        return lengths.next_least(asked) or self.bind()

    def bind(self) -> bool:
        """Bounds lengths by what shared tables have room for; whether that changes anything."""
        return self.lengths.next_bound(value.aval.shape for value in self.registry.shared)


def _bytes_of_record(key: Any, record: Record) -> int:
    """Of what is kept for an instance; a graph is kept as a whole, but mostly with others."""
    size = len(key) * (1 if type(key) is bytes else 64) + record.whole.nbytes_each
    return RECORD_BYTES + size


def _bytes_of_seen(_: int, known: tuple[Any, Record, Sequence[Array]]) -> int:
    return BYTES_PER_NODE * known[1].whole.nodes_each + sum(x.nbytes for x in known[2])


def _bytes_of_family(key: Hashable, _: object) -> int:
    return 64 * len(key) if isinstance(key, tuple) else 64
