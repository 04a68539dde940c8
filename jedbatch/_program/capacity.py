"""`Capacity`: the sizes that a program is compiled for, and how programs are found and grow.

A program is used again for everything that it has room for, so that a stream of new topologies soon
compiles nothing. Sizes are therefore rounded up, in steps that grow with them. Where no program
fits, a new one is made that has room for what the last similar one had room for, too: growing
instead of starting anew makes sizes settle after a few minibatches.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jedbatch._kernel.kernel import Kernel

Program = TypeVar("Program")
Used = TypeVar("Used")

CAPACITY_HEADROOM = 1.1  # least capacity over need, before rounding up
GROWTH = 1.5  # of a size that was too small
GROWING_SIZES = {"lanes", "inputs", "shared_rows", "num_instructions", "sums", "sent"}
MAX_OVERSIZE = 4  # a program is used down to a quarter of its size
# Capacity above which it is rounded up to an eighth of a power of two, in rows and in bytes.
LARGE_CAPACITY, LARGE_BYTES = 1024, 1 << 20


@dataclass(frozen=True)
class Capacity:
    """The sizes of a program, or those that something needs of one.

    Attributes:
      sizes: for each name, such as "lanes", the size for each thing that has one, such as a kernel;
        for None if it is a single number.
    """

    sizes: Mapping[str, Mapping[Any, int]]

    def __getitem__(self, name: str) -> Mapping[Any, int]:
        return self.sizes[name]

    def holds(self, need: "Capacity") -> bool:
        """Returns whether every size that is needed is there, and is large enough."""
        for name, needed in need.sizes.items():
            own = self.sizes[name]
            for key, size in needed.items():
                if own.get(key, -1) < size:
                    return False
        return True

    def joined(self, other: "Capacity") -> "Capacity":
        """Returns the larger of each size; what only the other has comes last.

        Rows, lanes and instructions of which there are more than the other has are made more by a
        factor, so that a program seldom has to grow again.
        """

        def larger(name: str, own: int, others: int) -> int:
            grows = name in GROWING_SIZES and own > others > 0
            return max(own, round_up(GROWTH * others, LARGE_BYTES) if grows else others)

        return Capacity(
            {
                name: {**own, **{k: larger(name, own.get(k, 0), n) for k, n in other[name].items()}}
                for name, own in self.sizes.items()
            }
        )

    def grown(self, need: "Capacity", policy: Mapping[str, Callable[[int], int]]) -> "Capacity":
        """Returns the capacity with sizes that are too small made what the policy makes of a need.

        Args:
          need: what there must be room for.
          policy: for each name, from a size that is needed to one to have.
        """
        sizes = {}
        for name, own in self.sizes.items():
            needed = need.sizes.get(name, {}).items()
            sizes[name] = {**own, **{k: policy[name](n) for k, n in needed if own.get(k, -1) < n}}
        return Capacity(sizes)


def round_up(need: float, row_bytes: int = 0) -> int:
    """Returns a need, rounded up in steps that grow with it; 0 for nothing.

    Few sizes when sizes are small and vary much, powers of two; eight to the octave when they
    are large and memory counts. It does for rows that take many bytes, of `row_bytes` each.
    """
    if not need:
        return 0
    size = math.ceil(need)
    step = 1 << max(0, size.bit_length() - 1)
    if size > LARGE_CAPACITY or size * row_bytes > LARGE_BYTES:
        step = max(1, step >> 3)
    return -(-size // step) * step


def find_or_grow(
    programs: list[Program],
    *,
    fitting: Iterable[Program],
    similar: Iterable[Program],
    make: Callable[[Program | None], Program],
    use: Callable[[Program], Used | None],
) -> Used:
    """Returns what is made of the first program that will do, or of a new one.

    Args:
      programs: those in use, to which a new one is added.
      fitting: those to be tried, in order.
      similar: of which the first is what a new one grows from.
      make: makes a program, grown from another if there is one.
      use: from a program to what is wanted of it; None if it will not do after all.
    """
    for program in fitting:
        if (used := use(program)) is not None:
            return used
    program = make(next(iter(similar), None))
    programs.append(program)
    used = use(program)
    assert used is not None
    return used


def result_bytes(kernels: Sequence[Kernel], lanes: Sequence[int]) -> int:
    """Returns the bytes of all results of so many lanes of each kernel."""
    return sum(kernel.result_bytes * n for kernel, n in zip(kernels, lanes, strict=True))
