"""The capacity of the programs of rounds, and how it grows.

A program has room for some number of lanes. When they are used up, arenas move to a program with
room for more; the largest program is remembered, so the next minibatch starts with it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jedbatch._jaxpr.storage import Kind, stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import Buckets
from jedbatch._program.placement import capacity
from jedbatch._program.signature import Signature

GROWTH = 4  # times the capacity that is needed when more is needed
FIRST_BYTES = 1 << 22  # of results that a type may have from the start,
FIRST_GROWTH = 64  # or as many times what the first round needs


@dataclass(eq=False)
class RoundCapacity:
    """The sizes that a program of rounds must have.

    Attributes:
      lanes, widest: of every kernel: lanes in all, and widths compiled.
      inputs, wanted: of every kind of value: input rows, and rows returned at a time.
      num_instructions: at a time.
    """

    lanes: dict[Kernel, int] = field(default_factory=dict)
    widest: dict[Kernel, int] = field(default_factory=dict)
    inputs: dict[Kind, int] = field(default_factory=dict)
    wanted: dict[Kind, int] = field(default_factory=dict)
    num_instructions: int = 0

    @staticmethod
    def of(signature: Signature) -> "RoundCapacity":
        """Returns the sizes of a program."""
        kernels, arenas = signature.kernels, signature.arenas
        return RoundCapacity(
            dict(zip(kernels, signature.lanes, strict=True)),
            dict(zip(kernels, signature.widest, strict=True)),
            dict(zip(arenas, signature.inputs, strict=True)),
            dict(zip(arenas, signature.outputs, strict=True)),
            signature.num_instructions,
        )

    def holds(self, other: "RoundCapacity") -> bool:
        """Returns whether every size is at least that of another."""
        pairs = zip(self._tables(), other._tables(), strict=True)
        enough = all(mine.get(key, -1) >= n for mine, its in pairs for key, n in its.items())
        return enough and self.num_instructions >= other.num_instructions

    def _tables(self) -> tuple[dict[Any, int], ...]:
        return self.lanes, self.widest, self.inputs, self.wanted

    def extended(self, needed: "RoundCapacity", target: Target) -> Signature:
        """Returns a program of this capacity, and of more where more is needed."""

        def larger(mine: dict[Any, int], its: dict[Any, int], grown: Callable) -> dict[Any, int]:
            more = {k: grown(n) for k, n in its.items() if mine.get(k, -1) < n}
            return mine | more

        lanes = larger(self.lanes, needed.lanes, lambda n: capacity(GROWTH * n))
        widest = larger(self.widest, needed.widest, lambda n: n)
        for kernel, n in widest.items():
            widths = kernel.buckets.widths
            lanes[kernel] = max(lanes[kernel], widths[n - 1])
            if kernel not in self.lanes:
                of_bytes = FIRST_BYTES // max(1, kernel.result_bytes)
                start = min(of_bytes, FIRST_GROWTH * needed.lanes[kernel])
                lanes[kernel] = max(lanes[kernel], capacity(start))
        kinds = [stored(t) for kernel in lanes for t in (*kernel.operands, *kernel.results)]
        inputs = larger(dict.fromkeys(kinds, 0), self.inputs, lambda n: n)
        inputs = larger(inputs, needed.inputs, lambda n: capacity(GROWTH * n))
        written = {stored(t) for kernel in lanes for t in kernel.results}
        for kind in kinds:  # kernels that have not run yet read some row of every arena
            if kind not in written:
                inputs[kind] = max(1, inputs[kind])
        wanted = larger(self.wanted, needed.wanted, capacity)
        num_instructions = max(self.num_instructions, needed.num_instructions)
        if num_instructions > self.num_instructions:
            num_instructions = capacity(GROWTH * num_instructions)
        return Signature(
            tuple(lanes),
            tuple(lanes.values()),
            tuple(widest[kernel] for kernel in lanes),
            tuple(inputs),
            tuple(inputs.values()),
            tuple(wanted.get(kind, 0) for kind in inputs),
            num_instructions,
            None,
            ((),) * len(lanes),
            target,
        )


@functools.lru_cache(4096)
def in_blocks(lanes: int, blocks: Buckets) -> int:
    """Lanes in whole blocks, as weight gradients run over them."""
    return max(lanes, int(blocks.lanes(blocks.cover(np.array([lanes])))[0]))


@functools.lru_cache(4096)
def num_widths(buckets: Buckets, largest: int) -> int:
    """Returns the number of widths that batches of up to `largest` nodes use."""
    used = buckets.cover(np.arange(1, largest + 1)).any(axis=0)
    return int(np.flatnonzero(used)[-1]) + 1
