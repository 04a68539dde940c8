"""Lowering: a scheduled graph as an integer table.

Two things cross from the host to the device. A `Signature` says what must be compiled: node types,
capacities, widths. Everything about this minibatch is in one int32 table, so minibatches that share
a signature share a compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jedbatch._jaxpr.storage import row_bytes, stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._layout.access import (
    GATHER,
    extent,
    find_modes,
    usable,
)
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._program.placement import Placement
from jedbatch._program.runs import merge_runs
from jedbatch._program.signature import Signature

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64


def value_rows(placed: Placement, signature: Signature) -> tuple[np.ndarray, np.ndarray]:
    """(int64[V + I], int64[spaces]): the row of every value and input, and where spaces begin.

    Input i is at -1 - i.
    """
    graph, layout = placed.graph, placed.layout
    begin = np.zeros(len(layout.rows), np.int64)
    if signature.shared_rows is not None:
        begin[:] = [signature.inputs[signature._arena_ids[kind]] for kind in placed.arenas]
    else:
        for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
            bases = signature.bases[signature.kernels.index(kernel)]
            begin[layout.space[t, : len(bases)]] = bases
    row = np.empty(graph.num_values + graph.num_inputs, np.int64)
    row[graph.num_values :] = placed.input_row[::-1]
    space, within = layout.values
    row[: graph.num_values] = begin[space] + within
    return row, begin


def operand_rows(placed: Placement, row: np.ndarray) -> list[np.ndarray]:
    """int64[operands, lanes] for each kernel: the row that each operand of each lane is in."""
    graph, layout = placed.graph, placed.layout
    rows_by_kernel = []
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
        position = np.arange(len(kernel.operands))[:, None]
        rows_by_kernel.append(row[graph.operand[graph.operand_ptr[nodes] + position]])
    return rows_by_kernel


def find_all_modes(
    placed: Placement, signature: Signature, rows: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """int8[operands, chunks] for each kernel: how each of its chunks can read each operand."""
    chunks = placed.chunks
    all_modes = []
    for k, (kernel, kernel_rows) in enumerate(zip(placed.kernels, rows, strict=True)):
        of = np.flatnonzero(chunks.kernel == k)
        is_loose = np.array(kernel.loose, bool)[:, None] & (not placed.keeps)
        count = np.where(is_loose, chunks.live[of], chunks.width[of])
        modes = find_modes(kernel_rows, chunks.lane[of], count)
        room = [signature.rows[signature.arena(t)] for t in kernel.operands]
        last = kernel_rows[:, chunks.lane[of]] + extent(modes, chunks.width[of])
        modes[last > np.array(room, np.int64)[:, None]] = GATHER
        all_modes.append(modes)
    return all_modes


def body_runs(placed: Placement, signature: Signature, modes: Sequence[np.ndarray]) -> np.ndarray:
    """int64[..., 3]: the runs, by the number of the body that runs them."""
    chunks = placed.chunks
    body = np.array([signature.first_body[signature.kernels.index(k)] for k in placed.kernels])
    body = body[chunks.kernel]
    for k, (kernel, kernel_modes) in enumerate(zip(placed.kernels, modes, strict=True)):
        of = np.flatnonzero(chunks.kernel == k)
        for i, reading in enumerate(signature.readings[signature.kernels.index(kernel)]):
            body[of[usable(reading, kernel_modes)]] += 1 + i
    opcodes = body * NUM_WIDTHS + chunks.column
    return merge_runs(opcodes, chunks.lane, chunks.width, np.ones_like(opcodes))


@dataclass(frozen=True, eq=False)
class Lowered:
    """A minibatch as a program runs it.

    Attributes:
      signature: the program.
      table: int32[Z], what it reads.
      runs: int64[_, 3], its runs of chunks in order.
    """

    signature: Signature
    table: Int32[np.ndarray, " Z"]
    runs: Int64[np.ndarray, "_ 3"]

    @functools.cached_property
    def body_lanes(self) -> np.ndarray:
        """int64[bodies], lanes that each body runs."""
        signature = self.signature
        number = self.runs[:, 0] // NUM_WIDTHS
        lanes = signature.instructions.width_of[self.runs[:, 0]] * self.runs[:, 2]
        return np.bincount(number, lanes, len(signature.bodies)).astype(np.int64)

    @property
    def read_bytes(self) -> np.ndarray:
        """int64[4], bytes of operands by how they are read (see `_layout.access`)."""
        total = np.zeros(4, np.int64)
        kernels = self.signature.kernels
        for (k, reading), n in zip(self.signature.bodies, self.body_lanes.tolist(), strict=True):
            for mode, operand in zip(reading, kernels[k].operands, strict=True):
                total[mode] += n * row_bytes(stored(operand))
        return total

    def sliced(self, kernel: Kernel) -> float:
        """The share of the operands of a kernel that are not gathered."""
        read = np.zeros(2)
        for (k, reading), n in zip(self.signature.bodies, self.body_lanes.tolist(), strict=True):
            if self.signature.kernels[k] == kernel:
                read += n * np.array([sum(mode != GATHER for mode in reading), len(reading)])
        return float(read[0] / max(1, read[1]))


def lower(placed: Placement, signature: Signature) -> Lowered | None:
    """A minibatch for a program that it fits; None if it has too many runs after all."""
    layout, form = placed.layout, signature.form
    place = [signature.kernels.index(kernel) for kernel in placed.kernels]
    row, begin = value_rows(placed, signature)
    rows = operand_rows(placed, row)
    if any(signature.readings):
        modes = find_all_modes(placed, signature, rows)
        runs = body_runs(placed, signature, modes)
    else:
        runs = placed.runs.copy()
        kernel, width = np.divmod(runs[:, 0], NUM_WIDTHS)
        runs[:, 0] = np.array(place, np.int64)[kernel] * NUM_WIDTHS + width

    instructions = signature.instructions.encode(runs)
    if len(instructions) > signature.num_instructions:
        return None
    table = np.zeros(form.size, np.int32)
    form.view(table, "num_instructions")[0] = len(instructions)
    form.view(table, "instructions")[: len(instructions)] = instructions
    for t, k, kernel_rows in zip(placed.type_ids, place, rows, strict=True):
        places = form.view(table, "operands", k)
        places[:, : kernel_rows.shape[1]] = kernel_rows
        places[:, kernel_rows.shape[1] :] = kernel_rows[:, :1]
        if signature.shared_rows is not None:
            nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
            batch = placed.schedule.batch[nodes]
            within = np.arange(len(nodes)) - layout.start[batch]
            view = form.view(table, "results", k)
            for s in range(len(view)):
                first = begin[layout.space[t, s]] + layout.block[batch, s]
                view[s, : len(nodes)] = first + within
    for kind, outputs in zip(placed.arenas, placed.outputs, strict=True):
        form.view(table, "outputs", signature._arena_ids[kind])[: len(outputs)] = row[outputs]
    return Lowered(signature, table, runs)
