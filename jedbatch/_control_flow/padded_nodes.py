"""Arrays of any length where Python decides on values.

An instance is recorded with symbols for lengths there, too (see `_ragged.lengths`). But its nodes
run before its graph is whole, so they are padded as they are recorded and not afterwards (see
`_ragged.padded_records`): all arrays of an instance to the capacity of the longest one, and
whenever it waits or is done, nodes on them become nodes of that capacity, which read lengths behind
their operands:

    recorded    tanh  x                add  y, z                mean  y
    padded      tanh [n at most 16]    add [n at most 16]       mean [n at most 16]  y, n

What is read of them, and what is returned, is cut to the rows that exist.
"""

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from jedbatch._graph.types import LENGTH, ValueType
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.symbolic_dims import Questions, is_ragged, note_questions_in, shape_at
from jedbatch._jaxpr.transfers import fetched
from jedbatch._ragged.lengths import RaggedTypes
from jedbatch._ragged.padded_graphs import padded_rows
from jedbatch._ragged.padded_programs import PaddedProgram, capacities
from jedbatch._ragged.padded_types import PaddedNodeType, padded_kind
from jedbatch._record.cell import pause
from jedbatch._record.instances.key import ClassesMet
from jedbatch._record.operations.symbols import Value
from jedbatch._record.run.constants import OTHER_LENGTHS, ArraysMade
from jedbatch._record.run.recorder import Recorder
from jedbatch._session.records.record_cache import RecordCache
from jedbatch._session.records.recording import keyed
from jedbatch._support.types import Array

MOST_PADDED = 4  # times its own capacity that an instance is padded to, to run with longer ones


class PaddedInstance:
    """An instance of which some arrays are padded.

    Attributes:
      types: of its arrays, with symbols for lengths.
      symbols: the arrays whose length each symbol is.
      lengths: the value of each symbol.
      size: the capacity of its arrays; 0 if none of them is padded.
      sizes: the capacity for each symbol.
      asked: what is asked about lengths while it is recorded.
      inputs: the symbols whose values nodes read, each with the input that it is.
      made: arrays that the function makes; None as long as nobody looks for them.
    """

    def __init__(self, types: RaggedTypes):
        self.types = types
        self.symbols, self.lengths = types.symbols, types.length_of
        self.size = 0
        self.sizes: dict[str, int] = {}
        self.resize(max(map(capacity, self.lengths.values()), default=0))
        self.asked = Questions(self.lengths)  # which Python may know: it runs for this one alone
        self.asked.keeps_numbers = types.keeps_numbers
        self.inputs: dict[str, int] = {}
        self.made: ArraysMade | None = None

    def resize(self, size: int) -> None:
        """Sets the capacity of arrays."""
        self.size, self.sizes = size, dict.fromkeys(self.lengths, size)

    def pad(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns the arrays of the instance, padded."""
        padded = list(arrays)
        for leaf in itertools.chain.from_iterable(self.symbols.values()):
            x = padded[leaf] if isinstance(padded[leaf], Tracer) else fetched(padded[leaf])
            padded[leaf] = padded_rows(x, (self.size, *x.shape[1:]))
        return padded

    def cut(self, value: np.ndarray, shape: Sequence[Any]) -> np.ndarray:
        """Returns the rows that exist of a value, given its shape with symbols."""
        if not is_ragged(shape):
            return value
        return value[tuple(map(slice, shape_at(shape, self.lengths)))]


def capacity(length: int) -> int:
    """Returns the capacity of an array of some length."""
    return int(capacities(np.array(length)))


def padded_instances(
    cache: RecordCache,
    instances: Sequence[tuple],
    arrays: Sequence[Sequence[Array]],
    classes: ClassesMet,
) -> list[PaddedInstance | None]:
    """Returns the instances of which some arrays are to be padded; None for each other one.

    Empty arrays are not: with symbols for lengths JAX supposes that there are rows.

    Args:
      cache: what is known of lengths.
      instances: the mapped arguments of each.
      arrays: of each.
      classes: as of `keyed`.

    Raises:
      GuardFailed: there is another bound of lengths from now on.
    """
    types: Sequence[RaggedTypes | None] = [None] * len(instances)
    if cache.constants.are_looked_for is None and _has_many_lengths(cache):
        cache.constants.begin()
    if cache.constants.are_looked_for or any(x.ndim for own in arrays for x in own):
        keys = [keyed(i, instance, classes)[0] for i, instance in enumerate(instances)]
        types = cache.look(keys, arrays)
    found = [None if own is None or _is_empty(own) else PaddedInstance(own) for own in types]
    size = 0  # of longer ones
    for own in sorted([x for x in found if x and x.size], key=lambda x: -x.size):
        if own.size < size <= MOST_PADDED * own.size:
            own.resize(size)
        size = own.size
    return found


def _is_empty(types: RaggedTypes) -> bool:
    """Returns whether an instance has an empty array among those of any length."""
    return any(types.lengths[leaves[0]] == 0 for leaves in types.symbols.values())


def _has_many_lengths(cache: RecordCache) -> bool:
    """Returns whether constants of instances have so many lengths that they are looked for."""
    return cache.registry.most_lengths >= OTHER_LENGTHS


class PaddedNodes:
    """Pads what instances record.

    Attributes:
      instances: each as it is padded; None for one without arrays of any length.
      own: the one whose turn it is.
    """

    def __init__(
        self, recorder: Recorder, cache: RecordCache, instances: Sequence[PaddedInstance | None]
    ):
        self.instances = instances
        self.own: PaddedInstance | None = None
        self._recorder, self._cache, self._regions = recorder, cache, cache.regions
        self._ends = self._sizes()  # of what need not be looked at
        self._groups: dict[tuple[Hashable, ...], int] = {}

    def look(self) -> bool:
        """Returns whether to record again, with constants that have been found to have any length.

        It is called before anything is computed.
        """
        constants = self._cache.constants
        if constants.are_looked_for is None and _has_many_lengths(self._cache):
            constants.begin()
            return True
        every = [own.made for own in self.instances if own and own.made]
        return bool(constants.are_looked_for) and constants.note(every)

    def _constant(self, own: PaddedInstance, x: Array) -> Value | None:
        """Returns the symbol for a constant of any length; None if there is none."""
        found = self._cache.type_of_constant(x, own.lengths)
        if found is None:
            return None
        (symbol, kind), recorder = found, self._recorder
        registry = recorder.registry
        own.sizes.setdefault(symbol, max(own.size, capacity(len(x))))
        padded = padded_kind(ValueType(*kind), own.sizes)
        rows = np.array(padded_rows(fetched(x), padded.shape))  # which nobody changes
        index = recorder.new_input(registry.group("value", *registry.kinds_of([padded])), rows)
        return Value(recorder, index, registry.value_type(*kind))

    def _note_arrays(self, own: PaddedInstance) -> None:
        """Has symbols take the place of arrays that an instance makes from now on."""
        if own.made is None:
            symbol = functools.partial(self._constant, own)
            own.made = ArraysMade(self._recorder, self._cache.constants, symbol)
        self._recorder.have_constants(own.made)

    def turn_to(self, number: int) -> None:
        """Notes whose turn it is."""
        own = self.instances[number]
        if own is not self.own:
            self.own, self._ends = own, self._sizes()
        self._recorder.have_constants(own and own.made)
        if own is not None:
            if self._cache.constants.are_looked_for:
                self._note_arrays(own)
            own.asked.begin = functools.partial(self._note_arrays, own)
            own.asked.trace = self._recorder
            note_questions_in(own.asked)

    def pad(self) -> None:
        """Pads what the instance whose turn it is has recorded since this was called last.

        Raises:
          CannotMergeError: a node of it cannot run padded.
        """
        if self.own is None or not self.own.lengths:
            return
        self._pad_nodes(self.own, *self._ends[:2])
        self._pad_inputs(self.own, self._ends[2])
        self._ends = self._sizes()

    def _sizes(self) -> tuple[int, int, int]:
        recorder = self._recorder
        return len(recorder.call_specs), len(recorder.references), len(recorder.input_group)

    def _pad_nodes(self, own: PaddedInstance, first: int, first_reference: int) -> None:
        """Has nodes from a first one on be padded, and read lengths."""
        recorder, regions = self._recorder, self._regions
        types = recorder.call_specs[first:]
        if not any(map(regions.is_ragged, types)):
            return
        arity = recorder.registry.arity[types].tolist()
        recorded = iter(recorder.references[first_reference:])
        written: list[int] = []
        for place, (type_id, count) in enumerate(zip(types, arity, strict=True), first):
            read = list(itertools.islice(recorded, count))
            written += read
            if regions.is_ragged(type_id):
                limit = regions.limit(type_id)
                if limit is not None and read[limit] >= 0:
                    raise CannotMergeError("a loop counts to a length or another computed number")
                padded, symbols = self._padded_type(own, type_id)
                recorder.call_specs[place] = padded.id
                written += [self._length(own, symbols[k]) for k in padded.lengths]
        del recorder.references[first_reference:]
        recorder.references += written

    def _padded_type(
        self, own: PaddedInstance, type_id: int
    ) -> tuple[PaddedNodeType, tuple[str, ...]]:
        """Returns (the type in the place of a ragged one, its symbols)."""
        regions = self._regions
        ragged = regions.ragged_type(type_id)
        with pause():
            program = regions.padded.program(ragged)
            if not isinstance(program, PaddedProgram):
                raise CannotMergeError(program)
            if not program.needed.lacks_nothing:
                names = zip(program.symbols, ragged.symbols, strict=True)
                lengths = {s: np.array([own.lengths[name]]) for s, name in names}
                program.needed.refuse_lacking(lengths, [0], [()])
            sizes = tuple([own.sizes[s] for s in ragged.symbols])
            return regions.padded.padded(ragged, sizes, guarded=False), ragged.symbols

    def _length(self, own: PaddedInstance, symbol: str) -> int:
        """Returns the input that is the value of a symbol."""
        if symbol not in own.inputs:
            registry = self._recorder.registry
            (kind,) = registry.kinds_of([LENGTH])
            group = registry.group("value", kind)
            own.inputs[symbol] = self._recorder.new_input(group, own.lengths[symbol])
        return own.inputs[symbol]

    def _pad_inputs(self, own: PaddedInstance, first: int) -> None:
        """Has arrays among the inputs from a first one on be padded."""
        groups = self._recorder.input_group
        for place, group in enumerate(groups[first:], first):
            key = group, *own.sizes.values()
            padded = self._groups.get(key)
            if padded is None:
                padded = self._groups[key] = self._padded_group(own, group)
            if padded != group:
                groups[place] = padded

    def _padded_group(self, own: PaddedInstance, group: int) -> int:
        registry = self._recorder.registry
        how, kind, *where = registry.groups[group]
        value_type = registry.value_types[kind]
        if not is_ragged(value_type.shape):
            return group
        padded = padded_kind(value_type, own.sizes)
        return registry.group(how, *registry.kinds_of([padded]), *where)
