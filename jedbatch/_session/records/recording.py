"""The records of a minibatch: those that are known, and new ones.

An instance is recorded once; another one with the same key has the same graph. Arrays that differ
in length do not make another key, as long as the function can be recorded without knowing lengths
(see `_ragged.lengths`).
"""

import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._graph.record import Record
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.symbolic_dims import (
    Questions,
    note_questions_in,
    noting_questions,
    user_line_in,
)
from jedbatch._ragged.calls import lacks_rows
from jedbatch._ragged.cutting import cut_graphs
from jedbatch._ragged.lengths import RaggedTypes, of_lengths, without_lengths
from jedbatch._ragged.padded_records import with_padded_nodes
from jedbatch._ragged.regions import RaggedRecord, some_are_ragged
from jedbatch._record.identity.concretization import asks_types, noting_calls
from jedbatch._record.identity.environment import Reached
from jedbatch._record.instances.arrays import array_type
from jedbatch._record.instances.key import (
    ClassesMet,
    instance_key,
    keys_with_arrays,
    plain_keys,
    written_key,
)
from jedbatch._record.operations.floats import Floating, without_floats
from jedbatch._record.operations.symbols import Value
from jedbatch._record.run.constants import OTHER_LENGTHS, ArraysMade
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.run.trace import Instances, trace
from jedbatch._record.run.units import Unit, Units
from jedbatch._session.records.degenerate import (
    warn_if_costly,
    warn_if_slowly_recorded,
    warn_if_some_are_apart,
)
from jedbatch._session.records.record_cache import RecordCache
from jedbatch._support.guards import GuardFailed, until_guards_hold
from jedbatch._support.types import Array
from jedbatch.errors import PerformanceWarning, SymbolicValueError

MANY_INSTANCES, FEW_INSTANCES = 64, 16  # of a minibatch, and of those that go ahead
# Of arrays that are found at a glance: those that JAX computes with whatever its configuration.
_DTYPES = {np.dtype(x): n for n, x in enumerate(("float32", "int32", "bool"))}


def keyed(
    i: int, instance: tuple, classes: ClassesMet | None = None
) -> tuple[Hashable | None, list[Any]]:
    """(the key of instance number i, its arrays); `classes` as of `instance_key`."""
    try:
        return instance_key(instance[0] if len(instance) == 1 else instance, classes)
    except TypeError as error:
        error.add_note(f"This happened while instance {i} was read.")
        raise


def arrays_of(instances: Sequence[tuple], classes: ClassesMet) -> list[list[Any]]:
    """Returns the arrays of instances.

    Args:
      instances: the mapped arguments of each.
      classes: as of `instance_key`.
    """
    written = keys_with_arrays(_subjects(instances), _DTYPES)
    if written is not None:
        return written[1]
    return [keyed(i, instance, classes)[1] for i, instance in enumerate(instances)]


def _subjects(instances: Sequence[tuple]) -> list[Any]:
    """Returns instances as their keys say them: the only mapped argument, or all of them."""
    return [x[0] if len(x) == 1 else x for x in instances]


class Look(NamedTuple):
    """Instances of a minibatch while their records are looked for, each in its place.

    Attributes:
      instances: as they are recorded: the mapped arguments, or what stands for them.
      keys: of the records; None where there is none.
      arrays: that inputs are read from.
      changed: the instances of which some of these are others than those of what was given.
    """

    instances: list[Any]
    keys: list[Hashable]
    arrays: list[Any]
    changed: set[int]

    def change(self, i: int, key: Hashable, arrays: Sequence[Any], instance: Any = None) -> None:
        """Has an instance another key and other arrays, and something stand for it if given."""
        self.keys[i], self.arrays[i] = key, arrays
        self.instances[i] = self.instances[i] if instance is None else instance
        self.changed.add(i)

    def written_key(self, i: int, classes: ClassesMet) -> tuple[Hashable, ...] | None:
        """Returns the key of an instance as a tuple of tokens."""
        key = self.keys[i]
        if key is None or isinstance(key, tuple):
            return key
        (subject,) = _subjects([self.instances[i]])
        return written_key(subject, classes)[0]


@dataclass(frozen=True)
class Recording:
    """Finds or makes the records of instances of a function.

    Attributes:
      fn: the function.
      join: makes its arguments from the shared and the mapped ones.
      key: what decides the graph of an instance, if the user says so.
      classes: of objects in instances; what they have is read like what the function closes over.
    """

    fn: Callable
    join: Callable
    key: Callable[..., Hashable] | None
    classes: ClassesMet = field(default_factory=dict)

    def recall(
        self, cache: RecordCache, instances: Sequence[tuple], reached: Reached
    ) -> tuple[Sequence[Record], Sequence[Sequence[Any]]] | None:
        """Returns (records of the instances, their arrays) at a glance; None unless all are known.

        Args:
          cache: records that are kept.
          instances: the mapped arguments of each.
          reached: what the function reads besides its arguments.
        """
        kept = cache.with_arrays
        if self.key is not None or not kept.bytes or reached.number != cache.number:
            return None
        found = kept.find(_subjects(instances), cache.learned)
        if found is None:
            return None
        cache.lengths.none_apart()
        records, arrays = found
        return cache.padding.pad(records, _with_constants(records, list(arrays)))

    def find(self, cache: RecordCache, instances: Sequence[tuple], read: Callable | None = None):
        """(records of the instances, their arrays, closed-over tracers, how many were known).

        Where no type is known yet, assumptions fail one after the other, and all is recorded again.
        So the first few of many instances go ahead.
        """
        is_new = not cache.registry.call_specs

        def attempt() -> Any:
            num_ahead = len(cache.by_key) if is_new else 0
            *found, num_known = self._find(cache, instances, read)
            return *found, num_known - num_ahead

        apart, sequences = cache.floats.apart, cache.sequences
        left, are_looked_at = sequences.left, sequences.are_looked_at
        try:
            if is_new and len(instances) >= MANY_INSTANCES:
                few = instances[:FEW_INSTANCES]
                until_guards_hold(lambda: self._find(cache, few, read), cache.assumed)
            records, arrays, tracers, num_known = until_guards_hold(attempt, cache.assumed)
        except Exception:
            # Neither floats nor sequences were the reason.
            cache.floats.apart = apart
            sequences.left, sequences.are_looked_at = left, are_looked_at
            raise
        warn_if_some_are_apart(cache.registry, cache.lengths)
        if num_known < len(instances):
            warn_if_slowly_recorded(cache.registry, cache.num_recorded)
            cache.num_recorded += 1
            cache.num_types = len(cache.registry.node_types)
        return *cache.padding.pad(records, arrays), tracers, num_known

    def _find(self, cache: RecordCache, instances: Sequence[tuple], read: Callable | None) -> Any:
        """Does the same under what is assumed now; may raise `GuardFailed`."""
        subjects = _subjects(instances)
        known = cache.known(subjects)
        records: list[Any] = [same and same[1] for same in known]
        nothing: Sequence[Any] = ()
        keys: list[Hashable] = [None] * len(instances)
        if None not in known:
            cache.lengths.none_apart()
            arrays = [same[2] for same in known]  # type: ignore[index]
            return records, _with_constants(records, arrays), [], len(instances)
        arrays = [nothing] * len(instances)
        look = Look(list(instances), keys, arrays, set())
        others = [i for i, same in enumerate(known) if same is None]
        plain, constant = plain_keys([subjects[i] for i in others])
        are_plain = self.key is None and len(others) == len(keys) and None not in plain
        if are_plain:
            keys[:] = plain
        else:
            self._take_keys(look, others, plain)
        if self.key is None:
            self._take_sequences(cache, look, others)
            self._take_floats(cache, look, others)
        are_plain = are_plain and not look.changed
        given = cache.look(keys, arrays)
        for i in set(range(len(keys))).difference(others):
            arrays[i] = known[i][2]  # type: ignore[index]
        if are_plain:  # without arrays
            records = list(map(cache.by_key.get, keys))
        else:
            for i in others:
                if (g := given[i]) is not None:
                    keys[i] = g.key
                if keys[i] is not None:
                    records[i] = cache.by_key.get(keys[i])
                if g is not None and g.key in cache.told:
                    keys[i] = g.key_if_told
                    records[i] = cache.by_key.get(keys[i])
        first: dict[Hashable, int] = {}
        new = [
            i
            for i, (k, record) in enumerate(zip(keys, records, strict=True))
            if record is None and (k is None or first.setdefault(k, i) == i)
        ]
        have_ids = self.key is None and len(instances[0]) == 1  # or tuples of arguments are new
        stay = set(itertools.compress(others, constant)) if have_ids else set[int]()
        if not new:
            cache.keep_by_id(subjects, look.changed & stay, records, arrays)
            arrays = _with_constants(records, arrays)
            _set_short_apart(cache, records, arrays, given)
            if self.key is None and not (are_plain or look.changed):
                cache.keep(subjects, records, arrays)
            return records, arrays, [], len(instances)
        revision = cache.revision
        mine, types = [look.instances[i] for i in new], [given[i] for i in new]
        to_record = Instances(mine, [arrays[i] for i in new], new)
        alike = {keys[i] for i in set(range(len(keys))).difference(new) if records[i] is None}
        with self._with_numbers(cache, mine):
            recorded, own_keys, keep, tracers = self._record(
                cache, to_record, types, [keys[i] for i in new], alike, read
            )
        cache.check(revision)
        if self.key is None and cache.registry.most_lengths >= OTHER_LENGTHS:
            cache.begin_constants()
        found = zip(types, own_keys, strict=True)
        told = {g.key for g, k in found if g is not None and k != g.key}
        cache.told.add([(k, None) for k in told])
        fresh = dict(zip(new, recorded, strict=True))
        for i, k in enumerate(keys):
            if records[i] is None:
                records[i] = fresh[i if k is None else first[k]]
        own = zip(new, keep, own_keys, strict=True)
        kept = {i: k for i, is_kept, k in own if is_kept and k is not None}
        same = look.changed.difference(new) | kept.keys()
        cache.keep_by_id(subjects, same & stay, records, arrays)
        arrays = _with_constants(records, arrays)
        _set_short_apart(cache, records, arrays, given)
        cache.by_key.add([(k, records[i]) for i, k in kept.items()])
        if self.key is None and any(given) and len(kept) == len(new) and not look.changed:
            cache.keep(subjects, records, arrays)
        return records, arrays, tracers, len(instances) - len(new)

    def _take_keys(self, look: Look, which: Sequence[int], plain: Sequence[bytes | None]) -> None:
        """Writes the keys and the arrays of some instances, given the keys of plain trees."""
        keys, arrays = look.keys, look.arrays
        for i, key in zip(which, plain, strict=True):
            keys[i] = key
            if key is None:
                keys[i], arrays[i] = keyed(i, look.instances[i], self.classes)
            if self.key is not None:
                ids = list(map(id, arrays[i]))
                form = [("array", *array_type(x), ids.index(id(x))) for x in arrays[i]]
                keys[i] = ("given", self.key(*look.instances[i]), *form)

    def _take_sequences(self, cache: RecordCache, look: Look, which: Sequence[int]) -> None:
        """Has sequences of instances be arrays."""
        if cache.lengths.off or not cache.sequences.are_looked_at:
            return
        for k, made in cache.sequences.with_arrays([look.instances[i] for i in which]).items():
            key, own = keyed(which[k], tuple(made), self.classes)
            if isinstance(key, tuple):
                look.change(which[k], (*key, made.key(own)), own, made)

    def _take_floats(self, cache: RecordCache, look: Look, which: Sequence[int]) -> None:
        """Has floats of instances be operands."""
        floats = cache.floats
        if not floats.are_looked_at:
            return
        met = []
        for i in which:
            key = look.written_key(i, self.classes)
            if key is None:
                continue
            without, own = without_floats(key)
            if not own:
                floats.note_none()
                continue
            form = floats.form(without, without_lengths if look.arrays[i] else None)
            form.note(own)
            met.append((i, without, form, own))
        for i, without, form, own in met:
            made = floats.floating(look.instances[i], form, own)
            if made is not None:
                arrays = form.arrays(look.arrays[i], made[1])
                look.change(i, (*without, ("floats", form.arithmetic.read)), arrays, made[0])

    @contextlib.contextmanager
    def _with_numbers(self, cache: RecordCache, instances: Sequence[Any]) -> Iterator[None]:
        """Raises `GuardFailed` if what is recorded inside is to be recorded again.

        So it is if Python needs floats or elements themselves, or asks for their types, or has
        computed with floats what is no operand yet. Elements of sequences are the first suspects.
        """
        floats = cache.floats
        sequences = any(getattr(x, "sequences", None) for x in instances)
        if not sequences and not any(type(x) is Floating for x in instances):
            yield
            return
        asked: list[bool] = []
        try:
            with noting_calls(asked, asks_types):
                yield
        except PerformanceWarning:
            raise
        except Exception as error:
            if sequences:
                cache.sequences.leave()
                raise GuardFailed from None
            needs = isinstance(error, SymbolicValueError | jax.errors.JAXTypeError)
            why = "Python needs the value of one" if needs else "what is done with one is unknown"
            line = user_line_in(error)
            floats.apart = f"{why} at {line}" if line else why
            raise GuardFailed from None
        if asked[0] and sequences:
            cache.sequences.leave()
        elif asked[0]:
            floats.apart = "the function asks for types, or catches errors"
        if asked[0] or floats.note_missing(instances):
            raise GuardFailed

    def _record(
        self,
        cache: RecordCache,
        instances: Instances,
        given: Sequence[RaggedTypes | None],
        keys: Sequence[Hashable],
        alike: Collection[Hashable],
        read: Callable | None,
    ) -> Any:
        """Records instances: (records, their keys, whether to keep each, closed-over tracers).

        Arrays that differ in length are recorded for every length. What cannot be, is recorded as
        it is, and from then on arrays are told apart by their shapes.

        Raises `GuardFailed` if they must be looked at again.
        """
        record = functools.partial(trace, self.fn, cache.registry, arrange=self.join)
        if not any(given):
            by_shapes = functools.partial(record, read=read)
            if cache.lengths.apart is not None:
                cache.coalescing.begin()
            records, keep, tracers = record_and_warn(cache, by_shapes, instances)
            return records, keys, keep, tracers
        attempt = RaggedRecording(cache, instances, given, keys, alike)
        try:
            return attempt.record(record)
        except PerformanceWarning:  # where it is an error
            raise
        except Exception as error:
            if len(attempt.failed) < sum(types is not None for types in given):
                cache.lengths.note_recorded()
            for number, reason in (attempt.failed or {attempt.number: error}).items():
                attempt.number = number
                alone = functools.partial(record, instances.single(number), read=read)
                own, questions = attempt.given[number], attempt.asked.get(number)
                asked = of_lengths(reason, questions)
                if not asked:  # then an error in words may be one of the user's
                    alone()
                if cache.learn(own, questions, reason):
                    break  # which the others may have failed by, too
                if asked:
                    alone()  # complains if lengths are not the reason
                if own is not None and cache.lengths.join_equal(own, reason):
                    break
                if own and questions and cache.lengths.keep_numbers(own, questions):
                    continue
                if attempt.made.get(number):
                    cache.constants.note_refused()
                cache.lengths.give_up(reason, own, questions)
            raise GuardFailed from None


def _with_constants(records: Sequence[Record], arrays: list[Sequence[Any]]) -> list[Sequence[Any]]:
    """Returns the arrays of instances with those that the function makes behind them."""
    if not some_are_ragged(records):
        return arrays
    return [
        [*own, *record.constants] if isinstance(record, RaggedRecord) and record.constants else own
        for record, own in zip(records, arrays, strict=True)
    ]


def _set_short_apart(
    cache: RecordCache, records: Sequence[Any], arrays: Sequence[Any], given: Sequence[Any]
) -> None:
    """Raises `GuardFailed` if instances without rows are to be recorded by their shapes."""
    empty = [i for i, types in enumerate(given) if types is not None and 0 in types.lengths]
    short = [i for i in empty if lacks_rows(records[i], arrays[i])]
    for i in short:
        cache.lengths.note_short(given[i])
    if short:
        raise GuardFailed


def record_and_warn(
    cache: RecordCache, record: Callable, instances: Instances, *, padded: bool = False
) -> Any:
    """Records instances, and warns if that takes long.

    Arrays of any length are `padded`, so that operations on them may be merged like others.
    """
    registry, start = cache.registry, time.perf_counter()
    recorded = record(instances)
    seconds = time.perf_counter() - start
    if padded:
        cache.coalescing.take_ragged()
    records = recorded.records(cache.passes)
    if cache.warns_of_operations:

        def units() -> Counter[Unit]:
            """Records the largest instance once more, to see where."""
            largest, found = int(np.diff(recorded.graph.node_ptr).argmax()), Units()
            counts = registry.num_recorded, registry.num_repeated, registry.slow_calls.copy()
            record(instances.single(largest), noting=found.note)
            registry.num_recorded, registry.num_repeated, registry.slow_calls = counts
            return found.counts

        graphs = recorded.graph, records[0].whole
        are_new = len(registry.node_types) > cache.num_types
        warn_if_costly(*graphs, seconds, registry, has_new_types=are_new, units=units)
    return records, recorded.caching, recorded.tracers


@dataclass(eq=False)
class RaggedRecording:
    """Recording instances for all lengths at once.

    Attributes:
      cache: records that are kept.
      instances, given: to be recorded, and how each is.
      keys: of the instances.
      alike: the keys that others have, which may differ in lengths.
      number: the instance at hand.
      failed: why instances cannot be recorded, as far as they have been tried.
      asked: what was asked about lengths while each instance was recorded.
      made: the constants of any length of each, with symbols that are their lengths.
    """

    cache: RecordCache
    instances: Instances
    given: Sequence[RaggedTypes | None]
    keys: Sequence[Hashable]
    alike: Collection[Hashable] = ()
    number: int = 0
    failed: dict[int, Exception] = field(default_factory=dict)
    asked: dict[int, Questions] = field(default_factory=dict)
    made: dict[int, list[tuple[str, Array]]] = field(default_factory=dict)

    def record(
        self, record: Callable
    ) -> tuple[list[Record], list[Hashable], list[bool], list[Any]]:
        """Returns what `Recording._record` does, with ragged parts cut out of the graphs.

        Raises `GuardFailed` if instances must be looked at again, and other errors if the
        instance at hand cannot be recorded for all lengths.
        """
        cache = self.cache
        revision = cache.revision
        with noting_questions():

            def types(i: int) -> Any:
                self.number, given = i, self.given[i]
                self.asked[i] = asked = Questions()
                if given is not None:
                    asked.lengths, asked.keeps_numbers = given.length_of, given.keeps_numbers
                note_questions_in(asked)
                return given and given.types

            every: dict[int, ArraysMade] = {}

            def begun(recorder: Recorder, i: int) -> None:
                asked = self.asked[i]
                asked.trace, self.made[i] = recorder, []

                def note_arrays() -> None:
                    symbol = functools.partial(self._constant, recorder, i)
                    every[i] = ArraysMade(recorder, cache.constants, symbol)
                    recorder.have_constants(every[i])

                if cache.constants.are_looked_for or asked.told:
                    note_arrays()
                else:
                    asked.begin = note_arrays

            instances = self.instances._replace(types=types, begun=begun)
            try:
                graphs, keep, tracers = self._recorded(record, instances)
            except Exception as error:
                self.failed[self.number] = error
                others = range(self.number + 1, len(self.given))
                for i in others if self.given[self.number] else ():  # or each would end an attempt
                    try:
                        record(instances.single(i))
                    except Exception as another:
                        self.failed[i] = another
                raise
        cache.check(revision)
        for i in range(len(graphs)):
            self._turn_to(i)
            self.asked[i].check()
            cache.lengths.asked_at = cache.lengths.asked_at or self.asked[i].asked_at or None
            is_new = self.asked[i].answered and self.keys[i] not in (None, self._key(i))
            if is_new and self.keys[i] in self.alike:  # others, whose lengths may be others
                cache.told.add([(self.keys[i], None)])
                cache.registry.assumptions.fail("lengths")
                raise GuardFailed
        if every and cache.constants.note(list(every.values())):
            raise GuardFailed
        leaf_of = [given and given.symbols for given in self.given]
        num_arrays = list(map(len, self.instances.arrays))
        for i, own in self.made.items():
            symbols = dict(leaf_of[i] or {})
            for symbol, _ in own:
                symbols[symbol] = [*symbols.get(symbol, ()), num_arrays[i]]
                num_arrays[i] += 1
            leaf_of[i] = symbols if own else leaf_of[i]
        cuts = cut_graphs(cache.regions, graphs, num_arrays, leaf_of, self._turn_to)
        before = cache.registry.assumptions.version("regions")
        for cut in cuts:
            if cut is not None:
                cut.note()
        if cache.registry.assumptions.version("regions") != before:
            cache.forget_regions()
            raise GuardFailed
        made: dict[int, RaggedRecord] = {}
        for i, cut in enumerate(cuts):
            self.number = i
            if cut is not None:
                try:
                    made[i] = cut.result()
                except CannotMergeError as error:
                    if not cache.regions.joins_rest:
                        self.failed[i] = error
                        continue
                    cache.regions.leave_rest()  # that may be why
                    cache.forget_regions()
                    raise GuardFailed from None
                except Exception as error:
                    self.failed[i] = error
        if self.failed:
            raise next(iter(self.failed.values()))
        for i, own in self.made.items():
            if own:
                found = made.get(i) or RaggedRecord.of(graphs[i], num_arrays[i])
                made[i] = graphs[i] = replace(found, constants=tuple([x for _, x in own]))
        for _, members in itertools.groupby(sorted(made), lambda i: id(made[i].whole)):
            mine = list(members)
            self.number = mine[0]
            records, leaves = [made[i] for i in mine], [leaf_of[i] or {} for i in mine]
            padded = with_padded_nodes(records, cache.regions, leaves)
            for i, record_of_any in zip(mine, padded, strict=True):
                graphs[i] = record_of_any
        compared = [i for i in range(len(cuts)) if self._compared(i)]
        if compared:
            raise GuardFailed
        return graphs, list(map(self._key, range(len(keep)))), keep, tracers

    def _constant(self, recorder: Recorder, i: int, x: Array) -> Value | None:
        """Returns the symbol for an array of any length that an instance makes, if there is one."""
        asked = self.asked[i]
        assert asked.lengths is not None  # as of all that are asked for constants
        found = self.cache.type_of_constant(x, asked.lengths)
        if found is None:
            return None
        symbol, kind = found
        asked.told.setdefault(len(x), kind[0][0])
        asked.answered = True
        leaf = len(self.instances.arrays[i]) + len(self.made[i])
        self.made[i].append((symbol, np.array(x) if isinstance(x, np.ndarray) else x))
        return recorder.leaf_value(recorder.registry.value_type(*kind), leaf, ())

    def _key(self, i: int) -> Hashable:
        """Returns the key of an instance, with its lengths if Python was told some."""
        given = self.given[i]
        if given is None:
            return self.keys[i]
        return given.key_if_told if self.asked[i].answered else given.key

    def _turn_to(self, number: int) -> None:
        """Has an instance be the one at hand."""
        self.number = number

    def _recorded(
        self, record: Callable, instances: Instances
    ) -> tuple[list[Record], list[bool], list[Any]]:
        """Returns the result of `record`, with nodes merged if they are padded and that pays.

        Regions are programs of single operations, whatever they were recorded as.
        """
        cache = self.cache
        if not cache.regions.padded.is_used:
            recorded = record(instances)
            return recorded.records(cache.passes), *recorded[2:]
        return record_and_warn(cache, record, instances, padded=True)

    def _compared(self, i: int) -> bool:
        """Returns whether lengths of an instance were compared that it is not yet told apart by."""
        given = self.given[i]
        return given is not None and self.cache.lengths.relate(given, self.asked[i], None)
