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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import set_current_trace

from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import extents_told
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import Array, AxisSize, Dtype

OTHER_LENGTHS = 3  # that are met besides the first before constants are looked for
DIFFERENT_INSTANCES = 3  # of different lengths that make constants arrays of any length
MOST_TRIED = 64  # instances without such arrays, before nobody looks for them any more
LEAST_ROOM = 8  # along an axis, padded to a power of two
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
        if not self.are_looked_for:
            return False
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

    def has_any_length(self, kind: Kind, length: int) -> bool:
        """Returns whether arrays of a kind differ in length, and some instances make none of it."""
        are_many = len(self._met.get(kind, ())) >= DIFFERENT_INSTANCES
        return bool(self.are_looked_for) and are_many and length not in self._always[kind]

    def always_makes(self, kind: Kind, length: int) -> bool:
        """Returns whether all instances make an array of a kind that is as long."""
        are_known = self._num_met[kind] >= DIFFERENT_INSTANCES
        return are_known and length in self._always[kind]


class ArraysMade:
    """The arrays that an instance makes, with symbols in the place of those of any length.

    Those as long as Python knows arguments to be have any length, too, and so along other axes.

    Args:
      recorder: of the instance.
      constants: knows which others have any length.
      symbol: called with an array with rows, returns one for it of any length; None if there is
        none.

    Attributes:
      every: (kind, length) of each.
      fixed: of those that did not have any length when they were made.
    """

    def __init__(self, recorder: Recorder, constants: Constants, symbol: Callable[[Array], Any]):
        self._recorder, self._constants, self._symbol = recorder, constants, symbol
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
            value = self._value(x)
            self._placed[key] = x if value is None else value
        return self._placed[key]

    def extents(self, shape: Sequence[int], dtype: Dtype) -> Mapping[int, AxisSize]:
        """Returns the extents that take the place of numbers in the shape of an array it makes.

        There are none for an array that all instances make.
        """
        told = extents_told(self._recorder)
        kind = tuple([None if n in told else n for n in shape[1:]]), dtype
        self.every.append((kind, shape[0]))
        return {} if self._constants.always_makes(kind, shape[0]) else told

    def _value(self, x: Array) -> Any:
        """Returns a symbol for an array; None if there is none."""
        told = self.extents(x.shape, x.dtype)
        axes = [k for k in range(1, x.ndim) if x.shape[k] in told and not is_key(x.dtype)]
        is_told = len(x) > 1 and len(x) in told  # one row is likely an index
        if is_told or self._constants.has_any_length(*self.every[-1]):
            return self._table(self._symbol, x, axes)
        self.fixed.append(self.every[-1])
        return self._table(self._recorder.input, x, axes) if axes else None

    def _table(self, symbol: Callable[[Array], Any], x: Array, axes: Sequence[int]) -> Any:
        """Returns a symbol for an array of which some axes behind the first have any length.

        The array is padded along these, and cut to the extents.
        """
        if not axes:
            return symbol(x)
        told = extents_told(self._recorder)
        pads = np.zeros((x.ndim, 2), int)
        pads[axes, 1] = [
            max(LEAST_ROOM, 1 << (x.shape[k] - 1).bit_length()) - x.shape[k] for k in axes
        ]
        value = symbol(np.pad(np.asarray(x), pads))
        if value is None:
            return None
        with set_current_trace(self._recorder):  # there is none while an operation is processed
            for axis in axes:
                value = jnp.take(value, jnp.arange(told[x.shape[axis]]), axis=axis, mode="clip")
        return value
