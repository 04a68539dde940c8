"""Constants of instances: the arrays that a function makes itself, of any length.

    def score(params, text):
        words = jnp.array([VOCABULARY[word] for word in text.split()])
        return readout(params, params["E"][words])

To JAX `words` is a constant, int32[7] in one instance and int32[12] in the next, and what is done
with it would have a type for each length. Where constants differ in length from instance to
instance, they are arrays of the instance, behind those in its arguments, and may then have any
length like these (see `_ragged.lengths`). Which there are is found by recording an instance by its
shapes first, with types of no account; that takes as long again, once for each instance.

The function still sees how long they are where it looks at what it made them of, as `text` here.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jedbatch._record.identity.primitives import identity_of_array
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.run.trace import Instances, in_one_way, record_instances
from jedbatch._record.types.registry import Registry
from jedbatch._support.caches import Memory
from jedbatch._support.types import Array

OTHER_LENGTHS = 3  # that are met besides the first before constants are looked for
DIFFERENT_INSTANCES = 3  # of different lengths that make constants arrays of any length
MOST_TRIED = 64  # instances without such arrays, before nobody looks for them any more
MOST_IN_VAIN = 4  # instances that cannot be recorded with theirs, before nobody has any
MOST_TYPES = 4096  # of no account, before they are forgotten

Kind = tuple[tuple[int, ...], Any]  # shape without length, and dtype


class Constants:
    """Which constants of instances have any length, and those of instances that were met.

    Args:
      registry: of the types of all instances.
      limit: instances whose constants are kept.

    Attributes:
      known: the constants of an instance, by what decides them.
      are_looked_for: whether instances may have some; None if nobody has looked yet.
    """

    def __init__(self, registry: Registry, limit: int):
        self._registry = registry
        self._scratch: Registry | None = None
        self._in_vain = 0  # instances that could not be recorded since one that could
        self._met: dict[Kind, set[frozenset[int]]] = {}
        self._always: dict[Kind, set[int]] = {}  # lengths that all instances have
        self._left = MOST_TRIED
        self.known: dict[Hashable, list[Array]] = Memory(limit, registry.budget, _bytes_of)
        self.are_looked_for: bool | None = None

    def begin(self) -> None:
        """Looks for constants from now on; what was recorded is to be recorded again."""
        self.are_looked_for = True
        self._registry.assumptions.fail("constants")

    def refuse(self, constants: list[Array]) -> None:
        """Takes those of an instance for what they are: it cannot be recorded for all lengths."""
        constants.clear()
        self._in_vain += 1
        if self._in_vain > MOST_IN_VAIN:
            self.leave()
        self._registry.assumptions.fail("constants")

    def note_recorded(self) -> None:
        """Notes that instances could be recorded with constants of any length."""
        self._in_vain = 0

    def leave(self) -> None:
        """Takes constants for what they are, for good."""
        self.are_looked_for, self._left, self._scratch = False, 0, None
        self._registry.assumptions.fail("constants")

    @property
    def scratch(self) -> Registry:
        """The registry of types of no account."""
        if self._scratch is None or self._scratch.size > MOST_TYPES:
            self._scratch = self._registry.scratch()
        self._scratch.read(self._registry.reads)
        return self._scratch

    def of_any_length(self, made: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Returns those of the constants of each instance whose lengths differ.

        Args:
          made: the arrays that each instance makes.
        """
        for arrays in made:
            lengths: dict[Kind, set[int]] = {}
            for x in arrays:
                lengths.setdefault(_kind(x), set()).add(x.shape[0])
            for kind, found in lengths.items():
                self._always[kind] = self._always.get(kind, found) & found
                met = self._met.setdefault(kind, set())
                if len(met) < DIFFERENT_INSTANCES:
                    met.add(frozenset(found))
        every = [[x for x in own if self.has_any_length(x)] for own in made]
        self._left = MOST_TRIED if any(every) else max(self._left - len(made), 0)
        if not self._left:
            self.leave()
        return every

    def has_any_length(self, x: Array) -> bool:
        """Returns whether arrays like this differ in length, and not all instances have its own."""
        kind = _kind(x)
        many = len(self._met.get(kind, ())) >= DIFFERENT_INSTANCES
        return many and x.shape[0] not in self._always[kind]


class Noting(Recorder):
    """Notes the arrays that instances make of what are no arrays, or by NumPy.

    Attributes:
      noted: those of each instance, by their identity.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.noted: list[dict[Hashable, Any]] = []
        self._derived: set[Hashable] = set()

    def begin(self, *args: Any) -> Any:
        """Begins with the next instance."""
        self.noted.append({})
        return super().begin(*args)

    def made(self, out: list[Any], args: Sequence[Any]) -> list[Any]:
        """Notes what is computed, but not of what is noted."""
        arrays: dict[Hashable, Any] = {id(x): x for x in super().made(out, args) if np.ndim(x)}
        if self._derived.isdisjoint(map(id, args)):
            self.noted[-1].update(arrays)
        self._derived.update(arrays)
        return out


def constants_made(
    fn: Callable,
    registry: Registry,
    instances: Instances,
    arrange: Callable,
    read: Callable | None = None,
) -> list[list[Any]]:
    """Returns the arrays that each instance makes; for arguments see `trace`."""
    record = functools.partial(
        record_instances, fn, registry, instances, arrange, read, None, Noting
    )
    recorder, *_, ends = in_one_way(record, registry)
    _, _, _, values = recorder.written
    for own, (begin, end) in zip(recorder.noted, itertools.pairwise(ends), strict=True):
        for x in values[begin[2] : end[2]]:
            if isinstance(x, np.ndarray) and x.ndim and id(x) not in registry.things_reached:
                own[identity_of_array(x)] = x
    return [list(own.values()) for own in recorder.noted]


def _kind(x: Array) -> Kind:
    return x.shape[1:], x.dtype


def _bytes_of(_: Hashable, arrays: list[Array]) -> int:
    return sum(x.nbytes for x in arrays)
