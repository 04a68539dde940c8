"""Lowering: a scheduled graph as an integer table.

Two things cross from the host to the device. A `Signature` says what must be compiled: node types,
capacities, widths. Everything about this minibatch is in one int32 table, so minibatches that share
a signature share a compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jedbatch._graph.paths import int32_arrays, int64_arrays
from jedbatch._jaxpr.storage import Kind, row_bytes, stored
from jedbatch._layout.access import (
    GATHER,
    SLICE,
    extent,
    find_modes,
    usable,
)
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._program.placement import Placement
from jedbatch._program.runs import merge_runs
from jedbatch._program.signature import Signature
from jedbatch._support.native import core

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a program that a minibatch, or a round of one, reads and writes.

    Attributes:
      row: of every value and input, as from `value_rows`; in a round, of every operand.
      operand: the place in `row` of each operand of each node; None if they are in order.
      outputs: what each arena returns.
      results: for each kernel, the row of each result of each lane; None if every lane has rows of
        its own.
      first_lane: of each kernel, if the lanes before are those of earlier rounds; None if there are
        none.
    """

    row: Int64[np.ndarray, " _"]
    operand: Int32[np.ndarray, " operands"] | None
    outputs: Mapping[Kind, Int64[np.ndarray, " _"]]
    results: Sequence[Int64[np.ndarray, "results lanes"]] | None = None
    first_lane: Int64[np.ndarray, " kernels"] | None = None

    @staticmethod
    def of(placed: Placement, signature: Signature) -> Rows:
        """Returns the rows of a whole minibatch."""
        begin = space_begins(placed, signature)
        row = value_rows(placed, begin)
        outputs = zip(placed.arenas, placed.outputs, strict=True)
        return Rows(
            row,
            placed.graph.operand,
            {kind: row[np.maximum(values, -len(row))] for kind, values in outputs},
            None if signature.shared_rows is None else result_rows(placed, begin),
        )


def narrowed(placed: Placement, signature: Signature) -> Placement:
    """Returns a minibatch in chunks of the widths that a program has."""
    return placed.narrowed(tuple([signature.widest[signature.places[k]] for k in placed.kernels]))


def space_begins(placed: Placement, signature: Signature) -> np.ndarray:
    """Returns int64[spaces], the row of a program at which each space of a layout begins."""
    layout = placed.layout
    begin = np.zeros(len(layout.rows), np.int64)
    if signature.shared_rows is not None:
        begin[:] = [signature.inputs[signature.arena_ids[kind]] for kind in placed.arenas]
    else:
        for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
            bases = signature.bases[signature.places[kernel]]
            begin[layout.space[t, : len(bases)]] = bases
    return begin


def value_rows(placed: Placement, begin: np.ndarray) -> np.ndarray:
    """Returns int64[V + I], the row of every value and input, if spaces begin at some rows.

    Input i is at -1 - i.
    """
    space, within = placed.layout.values
    return np.append(begin[space] + within, placed.input_row[::-1])


def operand_rows(placed: Placement, rows: Rows) -> list[np.ndarray]:
    """Returns int64[operands, lanes] for each kernel: the row of each operand in each lane."""
    graph, layout = placed.graph, placed.layout
    operand = rows.row if rows.operand is None else rows.row[rows.operand]
    rows_by_kernel = []
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
        position = np.arange(len(kernel.operands))[:, None]
        rows_by_kernel.append(operand[graph.operand_ptr[nodes] + position])
    return rows_by_kernel


def result_rows(placed: Placement, begin: np.ndarray) -> list[np.ndarray]:
    """Returns int64[results, lanes] for each kernel: the row of each result of each lane.

    Spaces `begin` at some rows of a program.
    """
    layout = placed.layout
    rows_by_kernel = []
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        batch, num_results = np.flatnonzero(placed.schedule.batch_type == t), len(kernel.results)
        first = begin[layout.space[t, :num_results]] + layout.block[batch, :num_results]
        rows = (first - layout.start[batch][:, None]).T.repeat(layout.padded[batch], axis=1)
        rows += np.arange(rows.shape[1])
        rows_by_kernel.append(rows)
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
        for parameter in kernel.parameters:
            if parameter.length is not None:
                modes[parameter.operands] = GATHER
        all_modes.append(modes)
    return all_modes


def body_runs(placed: Placement, signature: Signature, modes: Sequence[np.ndarray]) -> np.ndarray:
    """int64[..., 3]: the runs, by the number of the body that runs them; no `modes`, no slices."""
    chunks = placed.chunks
    body = np.array([signature.first_body[signature.places[k]] for k in placed.kernels])
    body = body[chunks.kernel]
    for k, (kernel, kernel_modes) in enumerate(zip(placed.kernels, modes, strict=False)):
        of = np.flatnonzero(chunks.kernel == k)
        for i, reading in enumerate(signature.readings[signature.places[kernel]]):
            body[of[usable(reading, kernel_modes)]] += 1 + i
    opcodes = body * NUM_WIDTHS + chunks.column
    return merge_runs(opcodes, chunks.lane, chunks.width, np.ones_like(opcodes))


@dataclass(frozen=True, eq=False)
class Lowered:
    """A minibatch as a program runs it.

    Attributes:
      signature: the program.
      placed: the minibatch, in chunks of the widths that the program has.
      table: int32[Z], what it reads.
      runs: int64[_, 3], its runs of chunks in order.
    """

    signature: Signature
    placed: Placement
    table: Int32[np.ndarray, " Z"]
    runs: Int64[np.ndarray, "_ 3"]

    @functools.cached_property
    def modes(self) -> list[np.ndarray]:
        """int8[operands, chunks] for each kernel of the minibatch: how its chunks read operands."""
        placed, signature = self.placed, self.signature
        rows = operand_rows(placed, Rows.of(placed, signature))
        found = find_all_modes(placed, signature, rows)
        for kernel, modes in zip(placed.kernels, found, strict=True):
            if signature.target.has_slice_bodies:
                readings = signature.readings[signature.places[kernel]]
                used = np.zeros(modes.shape[1], bool)
                for reading in readings:
                    used |= usable(reading, modes)
                    modes[:, usable(reading, modes)] = np.array(reading, np.int8)[:, None]
                modes[:, ~used] = GATHER
            else:
                modes[modes != SLICE] = GATHER
        return found

    @property
    def read_bytes(self) -> np.ndarray:
        """int64[4], bytes of operands by how they are read (see `_layout.access`)."""
        total = np.zeros(4, np.int64)
        chunks = self.placed.chunks
        for k, (kernel, modes) in enumerate(zip(self.placed.kernels, self.modes, strict=True)):
            widths = chunks.width[chunks.kernel == k]
            for operand, mode in zip(kernel.operands, modes, strict=True):
                lanes = np.bincount(mode, widths, len(total)).astype(np.int64)
                total += lanes * row_bytes(stored(operand))
        return total

    def sliced(self, k: int) -> float:
        """The share of the operands of kernel k of the minibatch that are not gathered."""
        chunks, modes = self.placed.chunks, self.modes[k]
        widths = chunks.width[chunks.kernel == k]
        read = widths.sum() * len(modes)
        return float((widths * (modes != GATHER)).sum() / max(1, read))


def table_of_instructions(signature: Signature, runs: np.ndarray) -> np.ndarray | None:
    """Returns int32[Z], a table with the instructions of runs alone; None if they have no room."""
    instructions, form = signature.instructions.encode(runs), signature.form
    if len(instructions) > signature.num_instructions:
        return None
    table = np.zeros(form.size, np.int32)
    form.view(table, "num_instructions")[0] = len(instructions)
    form.view(table, "instructions")[: len(instructions)] = instructions
    return table


def lower(placed: Placement, signature: Signature, rows: Rows | None = None) -> Lowered | None:
    """Returns a minibatch for a program that it fits; None if it has too many runs after all.

    Args:
      placed: the minibatch, or the nodes of a round; chunks that are too wide are cut.
      signature: the program.
      rows: of a round; None for a whole minibatch.
    """
    placed = narrowed(placed, signature)
    if rows is None and core() is not None and signature.is_plain:
        return _lower_compiled(placed, signature, core())
    rows = Rows.of(placed, signature) if rows is None else rows
    form, first_lane = signature.form, rows.first_lane
    place = [signature.places[kernel] for kernel in placed.kernels]
    operands = operand_rows(placed, rows)
    if any(signature.readings):
        runs = body_runs(placed, signature, find_all_modes(placed, signature, operands))
    else:
        runs = placed.runs.copy()
        kernel, width = np.divmod(runs[:, 0], NUM_WIDTHS)
        runs[:, 0] = np.array(place, np.int64)[kernel] * NUM_WIDTHS + width
        if first_lane is not None:
            runs[:, 1] += first_lane[kernel]

    table = table_of_instructions(signature, runs)
    if table is None:
        return None
    begins = np.zeros(len(place), np.int64) if first_lane is None else first_lane
    for k, begin, read in zip(place, begins, operands, strict=True):
        view = form.view(table, "operands", k)
        view[:, begin : begin + read.shape[1]] = read
        if first_lane is None:  # lanes that do not exist read what the first one does
            view[:, read.shape[1] :] = read[:, :1]
    if rows.results is not None:
        for k, results in zip(place, rows.results, strict=True):
            form.view(table, "results", k)[:, : results.shape[1]] = results
    for kind, returned in rows.outputs.items():
        form.view(table, "outputs", signature.arena_ids[kind])[: len(returned)] = returned
    _mark_lacking(placed, signature, table)
    return Lowered(signature, placed, table, runs)


def _lower_compiled(placed: Placement, signature: Signature, compiled: Any) -> Lowered | None:
    """Returns the same for a whole minibatch and a plain program (see `Signature.is_plain`)."""
    graph, layout, runs = placed.graph, placed.layout, np.ascontiguousarray(placed.runs)
    form, num_results = signature.form, graph.results_per_type
    if len(runs) > signature.num_instructions:
        return None
    table = np.zeros(form.size, np.int32)
    table[form.offset(("num_instructions",))] = len(runs)
    row, own_runs = (
        np.empty(graph.num_values + len(placed.input_row), np.int64),
        np.empty_like(runs),
    )
    nodes = *int32_arrays(graph.node_type), num_results, graph.value_ptr
    read = *int64_arrays(graph.operand_ptr), *int32_arrays(graph.operand)
    lanes = layout.lane, layout.lane_ptr, layout.lane_node, *int64_arrays(placed.input_row)
    base, columns = signature.lowering(placed.kernels, placed.type_ids, layout.space)
    own = base, runs, columns, signature.instructions.width_of, row, own_runs, table
    compiled.write_table(form.offset(("instructions",)), (*nodes, *read, *lanes, *own))
    for kind, values in zip(placed.arenas, placed.outputs, strict=True):
        if len(values):
            returned = form.view(table, "outputs", signature.arena_ids[kind])
            returned[: len(values)] = row[np.maximum(values, -len(row))]
    _mark_lacking(placed, signature, table)
    return Lowered(signature, placed, table, own_runs)


def _mark_lacking(placed: Placement, signature: Signature, table: np.ndarray) -> None:
    """Writes -1 for the row of each operand that does not exist and would be a part of a sum."""
    layout = placed.layout
    for t, exist in placed.exist.items():
        kernel = placed.kernels[placed.type_ids.index(t)]
        nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
        lacks = ~exist[:, np.searchsorted(placed.nodes[t], nodes)]
        view = signature.form.view(table, "operands", signature.places[kernel])
        for parameter in kernel.parameters:
            if parameter.is_sum:
                own = parameter.operands
                view[own.start : own.stop, : len(nodes)][lacks[own]] = -1
