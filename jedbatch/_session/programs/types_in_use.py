"""`TypesInUse`: which node types a new program should have besides those it is made for.

A program serves minibatches with fewer types too, so one that is made because a type is new takes
over the types of the program before: a few programs, and no more are needed. But a function may
make new types for every minibatch, and then each would take longer to compile than the last. What
tells the two apart is whether a type for which a program was made ever needs another one. Types
that did stay as long as they are used from time to time. Of those that did not, programs take
over some, the ones used last; when one of these comes back after all, a program may have to be made
for it again, once. Programs made before are kept, and used where they fit.
"""

import collections
from collections.abc import Collection, Sequence

from jedbatch._kernel.kernel import Kernel

FEW_TYPES = 8  # or as many as the minibatch has, of types that needed one program, are taken over
LONG_AGO = 256  # minibatches, after which any type may leave


class TypesInUse:
    """When node types were used last, and how often programs were made for them."""

    def __init__(self) -> None:
        self._minibatches = 0
        self._last: dict[Kernel, int] = {}
        self._made: collections.Counter[Kernel] = collections.Counter()

    def note_used(self, kernels: Sequence[Kernel]) -> None:
        """Notes the types of a minibatch."""
        self._minibatches += 1
        self._last.update(dict.fromkeys(kernels, self._minibatches))

    def note_made(self, kernels: Sequence[Kernel], times: int = 1) -> None:
        """Notes the types that programs were made for, and how many."""
        for kernel in kernels:
            self._made[kernel] += times

    def to_forget(self, before: Sequence[Kernel], present: Collection[Kernel]) -> set[Kernel]:
        """Returns the types of a program that one made for others need not have.

        Args:
          before: the types of the program that it grows from.
          present: the types that it is made for.
        """
        oldest = self._minibatches - LONG_AGO
        others = [kernel for kernel in before if kernel not in present]
        others.sort(key=lambda kernel: -self._last.get(kernel, 0))
        others = [kernel for kernel in others if self._last.get(kernel, 0) > oldest]
        often = [kernel for kernel in others if self._made[kernel] > 1]
        once = [kernel for kernel in others if self._made[kernel] <= 1]
        kept = {*present, *often, *once[: max(FEW_TYPES, len(present))]}
        return {kernel for kernel in before if kernel not in kept}
