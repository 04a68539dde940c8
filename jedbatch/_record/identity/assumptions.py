"""`Assumptions`: what is constant until more than a few variants of it were met, then data.

    lax.fori_loop(0, 3, step, x)     lax.fori_loop(0, 8, step, x)     lax.fori_loop(0, 5, step, x)

A *variant* is one value of something that is part of an operation's type: a number in its body, the
closure of a cell, the length of a list. XLA computes with constants best, so a few variants are
types of their own. More of them would be as many types as instances, so the same is an operand from
then on. What has failed once is not assumed again.

What was recorded under an assumption that fails is recorded once more. That takes long, and is not
the same everywhere, so each *group* of assumptions has a version of its own:

- `numbers`, `variants`: instances that are being recorded are recorded once more.
- `shared`: the same, and records of earlier instances are forgotten.
- `types`: these records are forgotten, as types that had been met have become others.
- `regions`: records of arrays that differ in length are forgotten.
- `lengths`, `floats`, `sequences`: instances have other keys, and so other records.

In other groups there is nothing to record again.
"""

import collections
from collections.abc import Collection, Hashable
from typing import Any

from jedbatch._support.caches import Budget, Memory, each

# Sets of numbers of an operation, or repetitions on shared values, that are constants.
MAX_CONSTANT_NUMBERS = 4
VARIANTS_BYTES = 1 << 8  # of the variants of one thing, about


class Assumptions:
    """What is assumed of all that was met, and how often that has turned out otherwise.

    Args:
      budget: of bytes for variants. They are counted anew once they are forgotten; what has failed
        is not forgotten.
    """

    def __init__(self, budget: Budget | None = None):
        self._met: dict[Hashable, set[Hashable]] = Memory(None, budget, each(VARIANTS_BYTES))
        self._failed: set[Hashable] = set()
        self._versions: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """Returns how many assumptions have failed."""
        return len(self._failed)

    def holds(self, group: str, about: Hashable, variant: Hashable, most: int) -> bool:
        """Notes a variant; returns whether no more than `most` of the same thing have been met."""
        key = group, about
        met = self._met.get(key)
        if met is None:
            if key in self._failed:
                return False
            met = self._met[key] = set()
        if len(met) <= most:
            met.add(variant)
            if len(met) > most:
                self._failed.add(key)
                self.fail(group)
        return len(met) <= most

    def met(self, group: str, about: Hashable) -> Collection[Any]:
        """Returns variants of something: no more than were constants and the next, or none."""
        return self._met.get((group, about), ())

    def has_failed(self, group: str, about: Hashable) -> bool:
        """Returns whether more variants of something were met than are constants."""
        return (group, about) in self._failed

    def fail(self, group: str, number: int = 1) -> None:
        """Notes that so many other assumptions of a group have failed."""
        self._versions[group] += number

    def version(self, *groups: str) -> int:
        """Returns how often assumptions of some groups have failed."""
        return sum([self._versions[group] for group in groups])

    def __repr__(self) -> str:
        failed = ", ".join(f"{n} of {group}" for group, n in sorted((+self._versions).items()))
        return f"<Assumptions: {failed or 'none'} failed>"
