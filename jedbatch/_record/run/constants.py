"""Constants of instances: the arrays that a function makes itself, of any length.

    def score(params, text):
        words = jnp.array([VOCABULARY[word] for word in text.split()])
        return readout(params, params["E"][words])

To JAX `words` is a constant, int32[7] in one instance and int32[12] in the next, and what is done
with it would have a type for each length. Where constants differ in length from instance to
instance, symbols take their place as they are made, and they may have any length like the arrays in
arguments (see `_ragged.lengths`): an instance has them behind these.

The function still sees how long they are where it looks at what it made them of, as `text` here.
"""

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jedbatch._jaxpr.symbolic_dims import lengths_told
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import Array

OTHER_LENGTHS = 3  # that are met besides the first before constants are looked for
DIFFERENT_INSTANCES = 3  # of different lengths that make constants arrays of any length
MOST_TRIED = 64  # instances without such arrays, before nobody looks for them any more
MOST_IN_VAIN = 4  # instances that cannot be recorded with theirs, before nobody has any

# Shape without length, and dtype; None for an extent that Python has been told as a length.
Kind = tuple[tuple[int | None, ...], Any]


class Constants:
    """Which constants of instances have any length.

    Args:
      registry: of the types of all instances.

    Attributes:
      are_looked_for: whether instances may have some; None if nobody has looked yet.
    """

    def __init__(self, registry: Registry):
        self._registry = registry
        self._in_vain = 0  # instances that could not be recorded since one that could
        self._met: dict[Kind, set[frozenset[int]]] = {}
        self._num_met: collections.Counter[Kind] = collections.Counter()
        self._always: dict[Kind, set[int]] = {}  # lengths that all instances have
        self._left = MOST_TRIED
        self.are_looked_for: bool | None = None

    def begin(self) -> None:
        """Looks for constants from now on; what was recorded is to be recorded again."""
        self.are_looked_for = True
        self._registry.assumptions.fail("constants")

    def note_refused(self) -> None:
        """Notes an instance that cannot be recorded with constants of any length."""
        self._in_vain += 1
        if self._in_vain > MOST_IN_VAIN:
            self.leave()
        self._registry.assumptions.fail("constants")

    def leave(self) -> None:
        """Takes constants for what they are, for good."""
        self.are_looked_for, self._left = False, 0
        self._registry.assumptions.fail("constants")

    def note(self, every: "Sequence[ArraysMade]") -> bool:
        """Notes what instances make; returns whether to record them again, since lengths differ."""
        self._in_vain = 0
        for made in every:
            lengths: dict[Kind, set[int]] = {}
            for kind, length in made.every:
                lengths.setdefault(kind, set()).add(length)
            for kind, found in lengths.items():
                self._always[kind] = self._always.get(kind, found) & found
                self._num_met[kind] += 1
                met = self._met.setdefault(kind, set())
                if len(met) < DIFFERENT_INSTANCES:
                    met.add(frozenset(found))
        are_some = any(self.has_any_length(*x) for made in every for x in made.every)
        self._left = MOST_TRIED if are_some else max(self._left - len(every), 0)
        if not self._left:
            self.leave()
        is_new = any(self.has_any_length(*x) for made in every for x in made.fixed)
        self._registry.assumptions.fail("constants", int(is_new))
        return is_new

    def is_reached(self, x: Array) -> bool:
        """Returns whether the function reaches an array, which is not made by an instance then."""
        return id(x) in self._registry.things_reached

    def has_any_length(self, kind: Kind, length: int, *, is_told: bool = False) -> bool:
        """Returns whether arrays of a kind differ in length, and not all instances have this one.

        If Python has been told the length, one instance says so.
        """
        if is_told and self._num_met[kind] < DIFFERENT_INSTANCES:
            return True
        are_many = is_told or len(self._met.get(kind, ())) >= DIFFERENT_INSTANCES
        return are_many and length not in self._always[kind]


class ArraysMade:
    """The arrays that an instance makes, with symbols in the place of those of any length.

    Args:
      constants: knows which have any length.
      symbol: called with such an array, returns the symbol for it; None if there is none.

    Attributes:
      every: (kind, length) of each.
      fixed: of those that did not have any length when they were made.
    """

    def __init__(self, constants: Constants, symbol: Callable[[Array], Any]):
        self._constants, self._symbol = constants, symbol
        self._placed: dict[Hashable, Any] = {}
        self.every: list[tuple[Kind, int]] = []
        self.fixed: list[tuple[Kind, int]] = []

    def get(self, key: Hashable, x: Array) -> Any:
        """Returns what takes the place of an array or a number: a symbol, or itself.

        Args:
          key: its identity.
          x: the array.
        """
        if not np.ndim(x) or self._constants.is_reached(x):
            return x
        if key not in self._placed:
            told, value = lengths_told(), None
            length, *others = x.shape
            kind = tuple([None if n in told else n for n in others]), x.dtype
            self.every.append((kind, length))
            if self._constants.has_any_length(kind, length, is_told=length in told):
                value = self._symbol(x)
            else:
                self.fixed.append((kind, length))
            self._placed[key] = x if value is None else value
        return self._placed[key]
