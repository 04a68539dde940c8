"""`VariantsMet`: how many variants of operations were met, and whether they are few enough.

A variant is what makes another type of an operation: a constant that it reads, a number that JAX
keeps as its parameter, the closure of a cell. Few are compiled; where there are many, what differs
becomes data, or there is a warning.
"""

import warnings
from collections.abc import Hashable

from jedbatch.errors import RecompilationWarning

MANY_VARIANTS = 32  # of one cell, or closed-over arrays, before we warn


class VariantsMet:
    """The variants of each operation that were met.

    Args:
      warned: the categories of warnings that were given; another one is added.

    Attributes:
      num_varying: operations of which more variants were met than are compiled.
    """

    def __init__(self, warned: set[type]):
        self.num_varying = 0
        self._warned = warned
        self._met: dict[Hashable, set[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._met)

    def are_many(self, operation: Hashable, variant: Hashable, most: int) -> bool:
        """Notes a variant; returns whether more have been met than are compiled."""
        met = self._met.setdefault(operation, set())
        if len(met) <= most:
            met.add(variant)
            self.num_varying += len(met) > most
        return len(met) > most

    def warn_if_many(self, of: Hashable, variant: Hashable, what: str) -> None:
        """Warns once something has been met in many variants."""
        met = self._met.setdefault(of, set())
        if len(met) == MANY_VARIANTS or variant in met:
            return
        met.add(variant)
        if len(met) == MANY_VARIANTS:
            warnings.warn(
                f"{what} has been met with {len(met)} different closures, each of which makes "
                "node types of its own that are compiled and batched by themselves. Pass what "
                "changes as a positional argument, and arrays as part of the instance; "
                "`help(jedbatch.errors.RecompilationWarning)` says more.",
                RecompilationWarning,
                stacklevel=2,
            )
            self._warned.add(RecompilationWarning)
