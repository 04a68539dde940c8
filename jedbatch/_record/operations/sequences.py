"""Sequences of numbers in instances that become arrays in the function: arrays of any length.

    params["E"][jnp.array(words)]                        # words: a tuple or list of ints
    jnp.stack([params["E"][w] for w in words])

Sentences come as tuples of tokens, and what is done with the array of a tuple has a type for each
length. An array `[n]` of the instance has one for all (see `_ragged.lengths`). So where sequences
differ in length at one place of instances, an array takes the place of each, and the function gets
a tuple as before:

    jnp.array(words)                    the array, by the protocol `__jax_array__`
    for w in words, len(words), ...     Python is told how long the array is; to JAX an element is a
                                        row of it (see `_record.operations.stacking`)

So is a list of tuples of so many numbers, such as the edges of a graph, an array `[n, k]`, if the
function does nothing with it but make it an array.

If Python computes with an element or looks something up by one, or if a cell gets one, sequences at
this place stay what they are. If the function asks for types or fails, all do.
"""

import itertools
import typing
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._jaxpr.symbolic_dims import is_ragged, length_known
from jedbatch._record.cell import recording
from jedbatch._record.identity.arithmetic import PythonNumber
from jedbatch._record.identity.assumptions import Assumptions
from jedbatch._record.instances.arrays import PLAIN_TYPES, array_type, children_of, rebuild
from jedbatch._record.operations.stacking import Row
from jedbatch._record.operations.symbols import RecorderLike, Value
from jedbatch._support.guards import GuardFailed
from jedbatch._support.types import Array, Leaf, PyTree

MOST_TRIED = 32  # instances without sequences as arrays, before nobody looks for them any more
FEWEST_MINIBATCHES = 4  # in which they are looked for
MOST_PLACES = 64  # of sequences that are told apart
MOST_FAILED = 4  # places whose sequences cannot be arrays, before none are
NUMBERS = (bool, int, float, np.number, np.bool_)
Place = tuple[Hashable, ...]  # of a sequence in instances; "*" for any index


class SequencesAtPlace:
    """The sequences at one place of instances.

    Attributes:
      lengths: two of them, if they differ.
      are_apart: whether no array takes their place.
      rows: of the smallest table of which elements name rows by themselves, if there is one.
        Numbers that name none are an error where the function is recorded.
    """

    def __init__(self, assumptions: Assumptions):
        self._assumptions = assumptions
        self.lengths: set[int] = set()
        self.are_apart = False
        self.rows: int | None = None

    def note(self, length: int) -> None:
        """Takes note of a length."""
        if len(self.lengths) < 2:
            self.lengths.add(length)

    @property
    def are_arrays(self) -> bool:
        """Returns whether arrays take their place."""
        return len(self.lengths) > 1 and not self.are_apart

    def array(self, numbers: Sequence[Any]) -> Array | None:
        """Returns the array that takes the place of a sequence; None if none does."""
        if not self.are_arrays:
            return None
        try:
            array = np.array(numbers, array_type(_first_number(numbers))[1])
        except OverflowError:
            return None
        if self.rows is not None and not -self.rows <= array.min() <= array.max() < self.rows:
            return None
        return array

    def changed(self) -> NoReturn:
        """Raises `GuardFailed`: instances have to be recorded again."""
        self._assumptions.fail("sequences")
        raise GuardFailed


class NumbersAsArray(NamedTuple):
    """A sequence of numbers, and the array that takes its place.

    Attributes:
      numbers: a tuple or list of numbers of one class, or a list of tuples of k of them.
      array: of these, [n] or [n, k].
      of_place: what is known of sequences at its place.
    """

    numbers: Sequence[Any]
    array: Array
    of_place: SequencesAtPlace


class Sequenced(tuple):
    """The mapped arguments of an instance with arrays in place of sequences.

    Attributes:
      sequences: by the id of each array.
    """

    sequences: dict[int, NumbersAsArray]

    def __new__(cls, instance: tuple, *_: Any) -> "Sequenced":
        """Returns a tuple of the arguments."""
        return super().__new__(cls, instance)

    def __init__(self, _: tuple, sequences: dict[int, NumbersAsArray]):
        self.sequences = sequences

    def key(self, arrays: Sequence[Array]) -> tuple[Hashable, ...]:
        """Returns what instances are told apart by besides their arrays."""
        places = tuple([k for k, x in enumerate(arrays) if id(x) in self.sequences])
        every = [x.numbers for x in self.sequences.values()]
        return (Sequenced, places, *[(type(x), type(x[0])) for x in every])


def places_of_sequences(key: Hashable) -> frozenset[int]:
    """Returns which arrays of an instance take the place of sequences, given its key."""
    parts = key if isinstance(key, tuple) else ()
    found = [x[1] for x in parts if type(x) is tuple and x and x[0] is Sequenced]
    return frozenset(*found)


class Elements:
    """The elements of a sequence while an instance is recorded.

    Attributes:
      array: that takes the place of the sequence.
      of_place: what is known of sequences at its place.
      length: how many there are.
      given: the sequence that the function gets.
    """

    def __init__(
        self,
        recorder: RecorderLike,
        array: Value,
        leaf: int,
        sequence: NumbersAsArray,
    ):
        self.arithmetic = self  # Python computes nothing with elements
        self.array, self.of_place = array, sequence.of_place
        self.length = len(sequence.numbers)
        self._recorder, self._leaf = recorder, leaf
        self._are_tuples = _are_tuples(sequence.numbers)
        number = _first_number(sequence.numbers)
        self._kind = recorder.registry.value_type(*array_type(number))
        self._row_of: dict[int, Value] = {}
        self._numbers: list[Any] = [
            tuple([PythonNumber(recorder, self, k, n) for n in x])
            if self._are_tuples
            else PythonNumber(recorder, self, k, x)
            for k, x in enumerate(sequence.numbers)
        ]
        kind: Any = ElementTuple if type(sequence.numbers) is tuple else ElementList
        self.given = kind(self._numbers)
        self.given.elements = self

    def step(self, *_: Any) -> NoReturn:
        """Raises `GuardFailed`: Python would compute with an element."""
        self.refuse()

    def hash_of(self, number: PythonNumber) -> NoReturn:
        """Raises `GuardFailed`: what is looked up by a number depends on its value."""
        self.refuse()

    def read(self, number: PythonNumber) -> Array:
        """Returns what an operation of JAX reads, a row of the array."""
        if recording.recorder is not self._recorder or self._are_tuples:  # but a cell
            self.refuse()
        k = number.step
        if k not in self._row_of:
            self._row_of[k] = value = self._recorder.leaf_value(self._kind, self._leaf, (k,))
            self._recorder.elements[value.index] = self, number.value
            if is_ragged(self.array.shape):
                self._recorder.note_row(value, Row(self.array, k, self.length))
        return self._row_of[k]

    def check_row(self, number: int, extent: int) -> None:
        """Raises `GuardFailed` if an element names no row of so many, an error of the function."""
        known = self.of_place
        known.rows = extent if known.rows is None else min(known.rows, extent)
        if not -extent <= number < extent:
            known.changed()

    def note_seen(self) -> None:
        """Notes that Python sees how long the sequence is, or looks at tuples in it."""
        if not self._recorder.active:
            return
        extent = self.array.shape[0]
        if self._are_tuples or (is_ragged((extent,)) and length_known(extent) is None):
            self.refuse()

    def as_array(self, given: Sequence[Any]) -> Array:
        """Returns the array of what the function got, by the protocol of JAX."""
        if type(given) is ElementList and not self._is_whole(given):
            return jnp.stack([*given])
        return self.array

    def _is_whole(self, given: list[Any]) -> bool:
        """Returns whether a list is as it was."""
        own = list.copy(given)
        return len(own) == self.length and all(map(lambda a, b: a is b, own, self._numbers))

    def refuse(self) -> NoReturn:
        """Leaves sequences at this place what they are, for good; raises `GuardFailed`.

        Raises `EscapedValueError` where nothing is recorded any more.
        """
        self._recorder.is_valid()
        self.of_place.are_apart = True
        self.of_place.changed()


class ElementsGiven:
    """What the function gets in place of a sequence.

    Attributes:
      elements: of the sequence.
    """

    elements: Elements

    def __jax_array__(self) -> Array:
        """Returns an array of the elements."""
        return self.elements.as_array(typing.cast(Any, self))


class ElementTuple(ElementsGiven, tuple):
    """A tuple of the elements of a sequence."""


class ElementList(ElementsGiven, list):
    """A list of the elements of a sequence."""


def _noting(of_base: Callable) -> Callable:
    """Returns a method of a tuple or list that notes that Python looks into it."""

    def method(self: Any, *args: Any, **named: Any) -> Any:
        self.elements.note_seen()
        return of_base(self, *args, **named)

    return method


UNSEEN = {"__new__", "__init__", "__getattribute__", "__class_getitem__"}  # methods of containers


def _stand_for(kind: Any, plain: Any) -> None:
    """Has a class note what Python does with its objects, and be a pytree like another one."""
    for name, method in vars(plain).items():
        if callable(method) and name not in UNSEEN:
            setattr(kind, name, _noting(method))
    jax.tree_util.register_pytree_node(
        kind, lambda x: (list(x), None), lambda _, parts: plain(parts)
    )


_stand_for(ElementTuple, tuple)
_stand_for(ElementList, list)


def check_elements(arguments: PyTree) -> None:
    """Raises `GuardFailed` if arguments of a cell are elements of a sequence.

    Calls of cells with numbers are recorded in less time than an instance is for its lengths.
    """
    for x in jax.tree.leaves(arguments):
        if type(x) is PythonNumber and type(x.operands) is Elements:
            x.operands.refuse()


class Sequences:
    """Which sequences of numbers are arrays: all at a place of instances, or none.

    Attributes:
      left: instances without sequences as arrays, before nobody looks for them any more.
      are_looked_at: whether some may be.
    """

    def __init__(self, assumptions: Assumptions):
        self._assumptions = assumptions
        self._places: dict[Place, SequencesAtPlace] = {}
        self.left = MOST_TRIED
        self.are_looked_at = True

    def with_arrays(self, instances: Sequence[tuple]) -> dict[int, Sequenced]:
        """Returns those of some instances in which arrays take the place of sequences, by number.

        Takes note of the lengths of their sequences first.
        """
        self.left -= min(len(instances), MOST_TRIED // FEWEST_MINIBATCHES)
        found = self._found_in(instances)
        self.are_looked_at = self.left > 0
        return found

    def _found_in(self, instances: Sequence[tuple]) -> dict[int, Sequenced]:
        """Does so."""
        try:
            known, found = self._num_arrays, self._replaced_in(instances)
            if self._num_arrays != known:  # other instances may come before those that tell
                found = self._replaced_in(instances)
        except RecursionError:  # an instance is deep, or holds itself
            self.left, found = 0, {}
        if sum(x.are_apart for x in self._places.values()) > MOST_FAILED:
            self.left, found = 0, {}
        if found:
            self.left = MOST_TRIED
        return found

    @property
    def _num_arrays(self) -> int:
        """Places whose sequences are arrays."""
        return sum(x.are_arrays for x in self._places.values())

    @property
    def known(self) -> tuple[Any, ...]:
        """Lengths and places of sequences, to be told to another process."""
        places = [(k, (x.lengths, x.are_apart, x.rows)) for k, x in self._places.items()]
        return self.left, self.are_looked_at, places

    def learn(self, known: tuple[Any, ...]) -> None:
        """Takes over what is `known` in another process."""
        self.left, self.are_looked_at, places = known
        for place, of_it in places:
            self._places[place] = found = SequencesAtPlace(self._assumptions)
            found.lengths, found.are_apart, found.rows = of_it

    def leave(self) -> None:
        """Leaves sequences what they are, for good."""
        were_arrays = self.left > 0 and self._num_arrays > 0
        self.left, self.are_looked_at = 0, False
        self._assumptions.fail("sequences", were_arrays)

    def _array(self, x: Sequence[Any], place: Place) -> NumbersAsArray | None:
        """Returns the array that takes the place of a sequence; None if none does.

        Takes note of its length.
        """
        known = self._places.get(place)
        if known is None:
            if len(self._places) == MOST_PLACES:
                return None
            known = self._places[place] = SequencesAtPlace(self._assumptions)
        known.note(len(x))
        array = known.array(x)
        return None if array is None else NumbersAsArray(x, array, known)

    def _replaced_in(self, instances: Sequence[tuple]) -> dict[int, Sequenced]:
        """Returns instances with arrays in place of sequences, by number."""
        found = {}
        for i, instance in enumerate(instances):
            sequences: dict[int, NumbersAsArray] = {}
            replaced = self._replaced(tuple(instance), (), sequences, {})
            if sequences:
                found[i] = Sequenced(replaced, sequences)
        return found

    def _replaced(
        self,
        x: Leaf,
        place: Place,
        sequences: dict[int, NumbersAsArray],
        done: dict[int, tuple[Leaf, Leaf]],
    ) -> PyTree:
        """Returns a part of an instance with arrays in place of sequences.

        Args:
          x: the part.
          place: of it.
          sequences: to which those found are added.
          done: parts met before and what takes their place, by id.
        """
        if type(x) in PLAIN_TYPES:
            return x
        if id(x) in done:
            return done[id(x)][1]
        done[id(x)] = x, x
        is_sequence = bool(place) and _is_sequence(x)
        made = self._array(x, place) if is_sequence else None
        if made is not None:
            sequences[id(made.array)] = made
            done[id(x)] = x, made.array
        elif is_sequence and not _are_tuples(x):
            pass  # numbers have no parts
        elif (found := _parts(x, place)) is not None:
            pairs = zip(*found, strict=True)
            new = [self._replaced(part, where, sequences, done) for part, where in pairs]
            if any(a is not b for a, b in zip(new, found[0], strict=True)):
                rebuilt = type(x)(new) if type(x) in (tuple, list) else rebuild(x, new)
                done[id(x)] = x, rebuilt
        return done[id(x)][1]


def _is_sequence(x: Leaf) -> bool:
    """Returns whether this is a tuple or list of numbers, or a list of tuples, of one class."""
    if (type(x) is not tuple and type(x) is not list) or not x:
        return False
    if not _are_tuples(x):
        return _are_numbers(x)
    if type(x) is not list or len(set(map(type, x))) > 1 or len(set(map(len, x))) > 1:
        return False
    return len(x[0]) > 0 and _are_numbers([*itertools.chain.from_iterable(x)])


def _are_numbers(x: Sequence[Any]) -> bool:
    """Returns whether all elements are numbers of one class."""
    return issubclass(type(x[0]), NUMBERS) and len(set(map(type, x))) == 1


def _are_tuples(x: Sequence[Any]) -> bool:
    """Returns whether the elements of a sequence are tuples of numbers, and not numbers."""
    return type(x[0]) is tuple


def _first_number(x: Sequence[Any]) -> Any:
    return x[0][0] if _are_tuples(x) else x[0]


def _parts(x: Leaf, place: Place) -> tuple[list[Leaf], list[Place]] | None:
    """Returns (parts of a container, places of these); None of what is none."""
    node = None if type(x) in PLAIN_TYPES else children_of(x)
    if node is None:
        return None
    parts = node[1]
    are_alike = type(x) is list or (bool(place) and all(map(_is_sequence, parts)))
    return parts, [(*place, "*" if are_alike else k) for k in range(len(parts))]
