"""`Signature`: what is compiled to run minibatches.

**Rows.** The values of one shape and dtype are rows of one arena: first the inputs, then the
results. A program that can be differentiated has, for every result of every node type, one row per
lane. One for inference alone has as many rows as are needed at a time, and reads from the table
where each chunk puts its results.

**Bodies.** A kernel has one body per width that gathers its operands; and others that read some of
them as slices, if its chunks often can (see `_layout.access`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import Kind, stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.target import Target
from jedbatch._layout.access import (
    GATHER,
    Reading,
)
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._program.capacity import Capacity, result_bytes
from jedbatch._program.instructions import Branch, InstructionSet
from jedbatch._program.runs import widths_of
from jedbatch._program.tables import TableLayout
from jedbatch._support.types import Dtype

if TYPE_CHECKING:
    from jaxtyping import Int64


@dataclass(frozen=True)
class Signature:
    """The static part of a program that runs minibatches forwards.

    Attributes:
      kernels: the node types that may occur.
      lanes: capacity of each.
      widest: number of widths compiled for each, narrowest first.
      arenas: (shape, dtype) of every kind of value.
      inputs: capacity of input rows, for each arena.
      outputs: rows returned, for each arena.
      num_instructions: capacity of instructions.
      shared_rows: capacity of the rows that results share, for each arena; None if every lane has
        rows of its own.
      readings: how operands are read other than by gathering them all, for each kernel.
      target: the kind of device it is made for.
      branches: of several opcodes, or in a loop (see `_program.instructions`).
    """

    kernels: tuple[Kernel, ...]
    lanes: tuple[int, ...]
    widest: tuple[int, ...]
    arenas: tuple[tuple[tuple[int, ...], Dtype], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_instructions: int
    shared_rows: tuple[int, ...] | None
    readings: tuple[tuple[Reading, ...], ...]
    target: Target
    branches: tuple[Branch, ...] = ()

    @staticmethod
    def of(
        capacity: Capacity,
        target: Target,
        readings: Mapping[Kernel, tuple[Reading, ...]],
        reuse: bool,
    ) -> Signature:
        """Returns a program of some capacity, whose results share rows if there is `reuse`."""
        lanes, inputs = capacity["lanes"], capacity["inputs"]
        shared_rows = tuple(capacity["shared_rows"].get(kind, 0) for kind in inputs)
        return Signature(
            tuple(lanes),
            tuple(lanes.values()),
            tuple(capacity["widest"][kernel] for kernel in lanes),
            tuple(inputs),
            tuple(inputs.values()),
            tuple(capacity["outputs"].get(kind, 0) for kind in inputs),
            capacity["num_instructions"][None],
            shared_rows if reuse else None,
            tuple(readings.get(kernel, ()) for kernel in lanes),
            target,
        )

    @functools.cached_property
    def _hash(self) -> int:
        parts = (self.lanes, self.widest, self.inputs, self.outputs, self.num_instructions)
        control = self.target, self.branches
        return hash((self.kernels, self.arenas, parts, self.shared_rows, self.readings, control))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def places(self) -> dict[Kernel, int]:
        """The place of each kernel."""
        return {kernel: k for k, kernel in enumerate(self.kernels)}

    @functools.cached_property
    def transient(self) -> frozenset[Kernel]:
        """The kernels that read a tracer, which will be gone at the next call."""
        return frozenset(kernel for kernel in self.kernels if kernel.transient)

    @functools.cached_property
    def returned(self) -> dict[Kind, int]:
        """Rows returned from each arena that returns some."""
        return {kind: n for kind, n in zip(self.arenas, self.outputs, strict=True) if n}

    @functools.cached_property
    def result_bytes(self) -> int:
        """Bytes of the results in all lanes."""
        return result_bytes(self.kernels, self.lanes)

    @functools.cached_property
    def arena_ids(self) -> dict[Kind, int]:
        """The place of each arena."""
        return {kind: a for a, kind in enumerate(self.arenas)}

    def arena(self, value_type: Any) -> int:
        """The arena in which values of a type are rows."""
        return self.arena_ids[stored(value_type)]

    @functools.cached_property
    def _rows(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        if self.shared_rows is not None:
            return (), tuple(map(sum, zip(self.inputs, self.shared_rows, strict=True)))
        ends = list(self.inputs)
        bases = []
        for kernel, lanes in zip(self.kernels, self.lanes, strict=True):
            first_rows = []
            for t in kernel.results:
                first_rows.append(ends[self.arena(t)])
                ends[self.arena(t)] += lanes
            bases.append(tuple(first_rows))
        return tuple(bases), tuple(ends)

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """The widths compiled for each kernel."""
        kernels = zip(self.kernels, self.widest, strict=True)
        return tuple(kernel.buckets.widths[:n] for kernel, n in kernels)

    @property
    def bases(self) -> tuple[tuple[int, ...], ...]:
        """The first row of each result of each type; nothing if they share rows."""
        return self._rows[0]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each arena."""
        return self._rows[1]

    @functools.cached_property
    def cotangent_rows(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Rows of cotangents in reverse: in its arena, those of each parameter of each kernel
        from some row on, -1 for parameters without; and what comes behind them, for each arena.

        The rows of the operands of a list lie next to each other, lane after lane.
        """
        ends = list(self.outputs)
        bases = []
        for kernel, lanes in zip(self.kernels, self.lanes, strict=True):
            first_rows = []
            for parameter in kernel.parameters:
                a, moves = self.arena(parameter.type), has_gradient(parameter.type.dtype)
                first_rows.append(ends[a] if moves else -1)
                ends[a] += lanes * parameter.num_rows if moves else 0
            bases.append(tuple(first_rows))
        return tuple(bases), tuple(ends)

    @functools.cached_property
    def input_rooms(self) -> dict[tuple[tuple[int, ...], Dtype], int]:
        """Capacity of input rows by arena."""
        return dict(zip(self.arenas, self.inputs, strict=True))

    @functools.cached_property
    def capacity(self) -> Capacity:
        """The sizes of the program."""
        return Capacity(
            {
                "lanes": dict(zip(self.kernels, self.lanes, strict=True)),
                "widest": dict(zip(self.kernels, self.widest, strict=True)),
                "inputs": dict(zip(self.arenas, self.inputs, strict=True)),
                "outputs": dict(zip(self.arenas, self.outputs, strict=True)),
                "shared_rows": dict(zip(self.arenas, self.shared_rows or (), strict=False)),
                "num_instructions": {None: self.num_instructions},
            }
        )

    @functools.cached_property
    def bodies(self) -> tuple[tuple[int, Reading], ...]:
        """(kernel, how it reads its operands) of every body, the one that gathers all first."""
        return tuple(
            (k, reading)
            for k, kernel in enumerate(self.kernels)
            for reading in ((GATHER,) * len(kernel.operands), *self.readings[k])
        )

    @functools.cached_property
    def first_body(self) -> tuple[int, ...]:
        """The number of the first body of each kernel."""
        kernels = [k for k, _ in self.bodies]
        return tuple(map(kernels.index, range(len(self.kernels))))

    @functools.cached_property
    def kernel_widths(self) -> Int64[np.ndarray, "kernels+1 W"]:
        """int64[kernels + 1, W], the widths of each kernel, and of sums (see `widths_of`)."""
        all_buckets = [*(kernel.buckets for kernel in self.kernels), self.target.sums]
        return widths_of(tuple(all_buckets))

    @functools.cached_property
    def instructions(self) -> InstructionSet:
        """The map from chunks to instructions."""
        widths = self.widths
        single = [
            Branch((number * NUM_WIDTHS + i,))
            for number, (k, _) in enumerate(self.bodies)
            for i in range(len(widths[k]))
        ]
        kernels = [k for k, _ in self.bodies]
        return InstructionSet(
            self.target.control,
            (*single, *self.branches),
            np.repeat(kernels, NUM_WIDTHS),
            self.kernel_widths[kernels].ravel(),
        )

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether instructions are loops, all operands are gathered and every lane has own rows."""
        return self.is_simple and self.shared_rows is None

    @property
    def is_simple(self) -> bool:
        """Whether instructions are loops and all operands are gathered."""
        return self.target.control == "loops" and not any(self.readings)

    def lowering(
        self, kernels: tuple[Kernel, ...], type_ids: tuple[int, ...], space: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns where the compiled core writes what some kernels read and finds what they return.

        Args:
          kernels: of this program.
          type_ids: their types in a graph.
          space: int32[T, R], of the results of its types (see `Layout`).

        Returns:
          (int64[T, R], the first row of each result of each type; int64[K, 5], of each kernel its
          type, its place, its operands, where their rows begin in the table, and lanes there).
        """
        base = np.zeros(space.shape, np.int64)
        for t, kernel in zip(type_ids, kernels, strict=True):
            bases = self.bases[self.places[kernel]]
            base[t, : len(bases)] = bases
        return base, self.operand_places(kernels, type_ids)

    def operand_places(self, kernels: tuple[Kernel, ...], type_ids: tuple[int, ...]) -> np.ndarray:
        """Returns int64[K, 5], as `lowering` does."""
        columns = []
        for t, kernel in zip(type_ids, kernels, strict=True):
            k = self.places[kernel]
            offset, (num_operands, lanes) = self.form.places["operands", k]
            columns.append((t, k, num_operands, offset, lanes))
        return np.array(columns, np.int64).reshape(-1, 5)

    @functools.cached_property
    def form(self) -> TableLayout:
        form = TableLayout()
        form.add(("num_instructions",), 1)
        form.add(("instructions",), self.num_instructions, self.instructions.columns)
        for k, kernel in enumerate(self.kernels):
            form.add(("operands", k), len(kernel.operands), self.lanes[k])
            if self.shared_rows is not None:
                form.add(("results", k), len(kernel.results), self.lanes[k])
        for a, rows in enumerate(self.outputs):
            form.add(("outputs", a), rows)
        return form
