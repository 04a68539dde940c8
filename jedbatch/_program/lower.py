"""Lowering: a scheduled graph as integer tables and a signature.

Two things cross from the host to the device. A `Signature` says what must be compiled: node types,
capacities, widths. Everything about this minibatch is in one int32 table, so minibatches that share
a signature share a compiled program. Capacities have room to spare, and a signature that exists is
used again for every minibatch that fits it, so that a stream of new topologies soon compiles
nothing.

**Rows.** The values of one shape and dtype are rows of one arena: first the inputs, then the
results. A program that can be differentiated has, for every result of every node type, one row per
lane. One for inference alone has as many rows as are needed at a time, and reads from the table
where each chunk puts its results.

**Bodies.** A kernel has one body per width that gathers its operands; and others that read some of
them as slices, if its chunks often can (see `_layout.access`).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import ranges
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import Kind, row_bytes, stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.target import Target
from jedbatch._layout.access import (
    GATHER,
    WORTH,
    Reading,
    choose_reading,
    extent,
    find_modes,
    usable,
)
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._layout.layout import Layout, share_rows
from jedbatch._program.instructions import Branch, InstructionSet
from jedbatch._program.runs import find_runs, find_stretches, merged, widths_of
from jedbatch._program.tables import TableForm
from jedbatch._schedule.schedule import Schedule

HEADROOM = 1.1  # least capacity over need, before rounding up
DEVIATIONS = 1.5  # how far sums over instances vary, relative to one over their square root
LARGE = 1024  # capacity above which it is rounded up to an eighth of a power of two
SLACK = 4  # a program is used for minibatches down to a quarter of its size
CHEAP = 1 << 15  # bytes of results that every type may have at least
SMALL = 1 << 20  # bytes of results; a program of this size will do for any minibatch


@dataclass(frozen=True)
class Signature:
    """What is compiled to run minibatches forwards.

    Attributes:
      kernels: the node types that may occur.
      lanes: capacity of each.
      widest: number of widths compiled for each, narrowest first.
      arenas: (shape, dtype) of every kind of value.
      inputs: capacity of input rows, for each arena.
      outputs: rows returned, for each arena.
      stretches: capacity of stretches.
      shared_rows: capacity of the rows that results share, for each arena; None if every lane has
        rows of its own.
      readings: how operands are read other than by gathering them all, for each kernel.
      target: the kind of device it is made for.
      branches: of several opcodes, or in a loop (see `_program.instructions`).
    """

    kernels: tuple[Kernel, ...]
    lanes: tuple[int, ...]
    widest: tuple[int, ...]
    arenas: tuple[tuple[tuple[int, ...], Any], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stretches: int
    shared_rows: tuple[int, ...] | None
    readings: tuple[tuple[Reading, ...], ...]
    target: Target
    branches: tuple[Branch, ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        parts = (self.lanes, self.widest, self.inputs, self.outputs, self.stretches)
        control = self.target, self.branches
        return hash((self.kernels, self.arenas, parts, self.shared_rows, self.readings, control))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _arena_ids(self) -> dict[Any, int]:
        return {kind: a for a, kind in enumerate(self.arenas)}

    def arena(self, value_type: Any) -> int:
        """The arena in which values of a type are rows."""
        return self._arena_ids[stored(value_type)]

    @functools.cached_property
    def _rows(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        if self.shared_rows is not None:
            return (), tuple(map(sum, zip(self.inputs, self.shared_rows, strict=True)))
        ends = list(self.inputs)
        bases = []
        for kernel, lanes in zip(self.kernels, self.lanes, strict=True):
            mine = []
            for t in kernel.results:
                mine.append(ends[self.arena(t)])
                ends[self.arena(t)] += lanes
            bases.append(tuple(mine))
        return tuple(bases), tuple(ends)

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """The widths compiled for each kernel."""
        found = zip(self.kernels, self.widest, strict=True)
        return tuple(kernel.ladder.widths[:n] for kernel, n in found)

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
        """Where cotangents are kept in reverse: in its arena, those of each operand of each kernel
        from some row on, -1 for operands without; and what comes behind them, for each arena.
        """
        ends = list(self.outputs)
        bases = []
        for kernel, lanes in zip(self.kernels, self.lanes, strict=True):
            mine = []
            for t in kernel.operands:
                mine.append(ends[self.arena(t)] if has_gradient(t.dtype) else -1)
                ends[self.arena(t)] += lanes if has_gradient(t.dtype) else 0
            bases.append(tuple(mine))
        return tuple(bases), tuple(ends)

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
    def kernel_widths(self) -> np.ndarray:
        """The widths of each kernel, and of sums (see `widths_of`)."""
        return widths_of(self.kernels, self.target)

    @functools.cached_property
    def instructions(self) -> InstructionSet:
        """How chunks become instructions."""
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
    def form(self) -> TableForm:
        form = TableForm()
        form.add(("num_stretches",), 1)
        form.add(("stretches",), self.stretches, self.instructions.columns)
        for k, kernel in enumerate(self.kernels):
            form.add(("operands", k), len(kernel.operands), self.lanes[k])
            if self.shared_rows is not None:
                form.add(("results", k), len(kernel.results), self.lanes[k])
        for a, rows in enumerate(self.outputs):
            form.add(("outputs", a), rows)
        return form


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a minibatch: each its kernel, width id, first lane, lanes and live lanes."""

    kernel: np.ndarray
    column: np.ndarray
    lane: np.ndarray
    width: np.ndarray
    live: np.ndarray


@dataclass(frozen=True, eq=False)
class Placed:
    """A scheduled graph with everything in its place, ready to be written as tables.

    Attributes:
      kernels: of the types present, by ascending type id.
      type_ids: their ids.
      arenas: (shape, dtype) of every kind of value.
      input_arena, input_row: int[I], where each input is.
      outputs: for each arena, what it returns, as in `graph.outputs`.
      stacked: whether exactly these rows must be returned; otherwise more may be.
      keeps: whether everything is kept that the reverse would read.
      reuse: whether results share rows.
      target: what to make a program for.
      worth_sharing: bytes of results; for fewer, sharing rows saves less than it takes.
      worth_slicing: the share of a kernel's operands that another reading must improve.
    """

    worth_sharing: ClassVar[int] = 1 << 25
    worth_slicing: ClassVar[float] = WORTH

    layout: Layout
    kernels: tuple[Kernel, ...]
    type_ids: tuple[int, ...]
    arenas: tuple[tuple[tuple[int, ...], Any], ...]
    input_arena: np.ndarray
    input_row: np.ndarray
    outputs: tuple[np.ndarray, ...]
    stacked: bool
    keeps: bool
    reuse: bool
    target: Target

    @staticmethod
    def find(
        layout: Layout,
        kernels: tuple[Kernel, ...],
        type_ids: tuple[int, ...],
        returned: dict[Kind, list[int]],
        *,
        stacked: bool,
        keeps: bool,
        reuse: bool | None,
        target: Target,
    ) -> "Placed":
        """Finds the arena and row of every input; `returned` is what each arena returns.

        Unless it `keeps` everything, results share rows with `reuse`, or, if it is None, where
        that saves much.
        """
        graph = layout.graph
        arenas: dict[Kind, int] = {}
        for kernel in kernels:
            for t in (*kernel.operands, *kernel.results):
                arenas.setdefault(stored(t), len(arenas))
        kinds = [stored(chunk.type) for chunk in graph.inputs]
        for kind in (*kinds, *returned):
            arenas.setdefault(kind, len(arenas))
        input_arena = np.repeat(
            np.array([arenas[kind] for kind in kinds], np.int64),
            np.fromiter(map(len, graph.inputs), np.int64, len(kinds)),
        )
        input_row = np.empty(len(input_arena), np.int64)
        for a in arenas.values():
            mine = np.flatnonzero(input_arena == a)
            input_row[mine] = np.arange(len(mine))
        outputs = tuple(np.array(returned.get(kind, ()), np.int64) for kind in arenas)
        if keeps:
            reuse = False
        elif reuse is None:
            size = result_bytes(kernels, layout.lanes[list(type_ids)].tolist())
            reuse = size > Placed.worth_sharing
        if reuse:
            arena = np.full(layout.space.shape, -1)
            for type_id, kernel in zip(type_ids, kernels, strict=True):
                arena[type_id, : len(kernel.results)] = [arenas[stored(x)] for x in kernel.results]
            layout = share_rows(layout, arena, len(arenas))
        return Placed(
            layout,
            kernels,
            type_ids,
            tuple(arenas),
            input_arena,
            input_row,
            outputs,
            stacked,
            keeps,
            reuse,
            target,
        )

    @property
    def graph(self) -> Graph:
        return self.layout.graph

    @property
    def schedule(self) -> Schedule:
        return self.layout.schedule

    @functools.cached_property
    def lanes(self) -> tuple[int, ...]:
        """Lanes needed for each kernel; weight gradients run over them in whole blocks."""
        lanes = self.layout.lanes[list(self.type_ids)]
        blocks = self.target.blocks.lanes(self.target.blocks.cover(lanes))
        return tuple(np.maximum(lanes, blocks).tolist())

    @property
    def shared_rows(self) -> tuple[int, ...]:
        """Rows that results share, for each arena; nothing if every lane has rows of its own."""
        return tuple(self.layout.rows.tolist()) if self.reuse else ()

    @functools.cached_property
    def nodes(self) -> dict[int, np.ndarray]:
        """The nodes of each type, in order."""
        return {t: np.flatnonzero(self.graph.node_type == t) for t in self.type_ids}

    @functools.cached_property
    def widths(self) -> np.ndarray:
        """The widths of each kernel (see `widths_of`)."""
        return widths_of(self.kernels, self.target)

    @functools.cached_property
    def stretches(self) -> np.ndarray:
        """int64[..., 3], the stretches in order; kinds count the kernels of this minibatch."""
        return find_stretches(self._kind, self.layout.start, self.layout.trips, self.widths)

    @functools.cached_property
    def _kind(self) -> np.ndarray:
        """The kernel of every batch, by its position."""
        position = np.full(len(self.graph.types), -1)
        position[list(self.type_ids)] = np.arange(len(self.type_ids))
        return position[self.schedule.batch_type]

    @functools.cached_property
    def chunks(self) -> "Chunks":
        """All chunks, in the order in which they run."""
        layout, schedule = self.layout, self.schedule
        step, column, lane, _, trips = find_runs(
            self._kind, layout.start, layout.trips, self.widths
        )
        which = np.repeat(np.arange(len(step)), trips)
        kernel, column = self._kind[step][which], column[which]
        width = self.widths[kernel, column]
        lane = lane[which] + width * ranges(np.zeros_like(trips), trips)
        ends = layout.start + np.diff(schedule.node_ptr)
        return Chunks(kernel, column, lane, width, np.minimum(width, ends[step][which] - lane))

    @functools.cached_property
    def widest(self) -> tuple[int, ...]:
        """Number of widths needed for each kernel."""
        of_batch = ((self.layout.trips > 0) * np.arange(1, NUM_WIDTHS + 1)).max(axis=1)
        widest = np.zeros(len(self.graph.types), np.int64)
        np.maximum.at(widest, self.schedule.batch_type, of_batch)
        return tuple(widest[list(self.type_ids)].tolist())

    def capacity(self, need: int) -> int:
        """Room for what minibatches like this one will need.

        What a minibatch needs is a sum over its instances, and varies the less the more they are.
        """
        instances = max(self.graph.num_instances, need / LARGE)
        return capacity(need * max(HEADROOM, 1 + DEVIATIONS / math.sqrt(instances)))

    @functools.cached_property
    def room(self) -> list[tuple[int, int]]:
        """(lanes, number of widths) for each kernel, with room for somewhat larger batches."""
        sizes, batch_type = np.diff(self.schedule.node_ptr), self.schedule.batch_type
        found = []
        for kernel, t, lanes in zip(self.kernels, self.type_ids, self.lanes, strict=True):
            largest = self.capacity(int(sizes[batch_type == t].max()))
            used = kernel.ladder.cover(np.arange(1, largest + 1)).any(axis=0)
            widest = int(np.flatnonzero(used)[-1]) + 1
            widths = kernel.ladder.widths
            cheap = min(CHEAP // max(1, kernel.result_bytes), widths[-1])
            found.append((max(self.capacity(lanes), widths[widest - 1], cheap), widest))
        return found

    @functools.cached_property
    def input_counts(self) -> tuple[int, ...]:
        return tuple(np.bincount(self.input_arena, minlength=len(self.arenas)).tolist())


def capacity(need: float) -> int:
    """What is needed, rounded up in steps that grow with it; 0 for nothing.

    Few sizes when sizes are small and vary much, powers of two; eight to the octave when they
    are large and memory counts.
    """
    if not need:
        return 0
    room = math.ceil(need)
    step = 1 << max(0, room.bit_length() - 1)
    if room > LARGE:
        step >>= 3
    return -(-room // step) * step


def fits(placed: Placed, signature: Signature) -> bool:
    """Whether a program can run a minibatch without too much room going to waste."""
    place = {kernel: k for k, kernel in enumerate(signature.kernels)}
    arenas = signature._arena_ids
    if not (set(placed.kernels) <= place.keys() and set(placed.arenas) <= arenas.keys()):
        return False
    mine = [place[kernel] for kernel in placed.kernels]
    arena_ids = [arenas[kind] for kind in placed.arenas]
    return (
        placed.target == signature.target
        and resembles(placed, signature)
        and all(n <= signature.lanes[k] for k, n in zip(mine, placed.lanes, strict=True))
        and all(n <= signature.widest[k] for k, n in zip(mine, placed.widest, strict=True))
        and all(
            n <= signature.inputs[a] for a, n in zip(arena_ids, placed.input_counts, strict=True)
        )
        and len(placed.stretches) <= signature.stretches
        and all(
            n <= (signature.shared_rows or ())[a]
            for a, n in zip(arena_ids, placed.shared_rows, strict=False)
        )
        and all(
            len(x) <= signature.outputs[a] for a, x in zip(arena_ids, placed.outputs, strict=True)
        )
    )


def resembles(placed: Placed, signature: Signature) -> bool:
    """Whether a program returns what a minibatch returns, and is not much too large for it.

    Nor may it need tracers that the minibatch does not bring.
    """
    if any(kernel.transient and kernel not in placed.kernels for kernel in signature.kernels):
        return False
    if (signature.shared_rows is not None) != placed.reuse:
        return False
    mine = {kind: len(x) for kind, x in zip(placed.arenas, placed.outputs, strict=True) if len(x)}
    its = {kind: n for kind, n in zip(signature.arenas, signature.outputs, strict=True) if n}
    same = mine == its if placed.stacked else mine.keys() <= its.keys()
    size = result_bytes(signature.kernels, signature.lanes)
    return same and size <= max(SMALL, SLACK * result_bytes(placed.kernels, placed.lanes))


def result_bytes(kernels: Sequence[Kernel], lanes: Sequence[int]) -> int:
    """Bytes of all results."""
    return sum(kernel.result_bytes * n for kernel, n in zip(kernels, lanes, strict=True))


def make_signature(placed: Placed, model: Signature | None) -> Signature:
    """A signature with room for a minibatch, and for what `model` had room for.

    Growing from the last program instead of starting anew makes capacities settle after a few
    minibatches.
    """
    lanes = {kernel: n for kernel, (n, _) in zip(placed.kernels, placed.room, strict=True)}
    widest = {kernel: n for kernel, (_, n) in zip(placed.kernels, placed.room, strict=True)}
    needed = map(placed.capacity, placed.input_counts)
    inputs = dict(zip(placed.arenas, needed, strict=True))
    shared = dict(zip(placed.arenas, map(placed.capacity, placed.shared_rows), strict=False))
    returned = [len(x) if placed.stacked else placed.capacity(len(x)) for x in placed.outputs]
    outputs = dict(zip(placed.arenas, returned, strict=True))
    readings: dict[Kernel, tuple[Reading, ...]] = {}
    stretches = 0
    if model is not None:
        for kernel, n, w in zip(model.kernels, model.lanes, model.widest, strict=True):
            lanes[kernel] = max(n, lanes.get(kernel, 0))
            widest[kernel] = max(w, widest.get(kernel, 0))
        for kind, n, m in zip(model.arenas, model.inputs, model.outputs, strict=True):
            inputs[kind] = max(n, inputs.get(kind, 0))
            outputs[kind] = max(m, outputs.get(kind, 0))
        for kind, n in zip(model.arenas, model.shared_rows or (), strict=False):
            shared[kind] = max(n, shared.get(kind, 0))
        readings |= {k: r for k, r in zip(model.kernels, model.readings, strict=True) if r}
        stretches = model.stretches
    if placed.reuse:  # room for every chunk that is compiled, whether it ever runs or not
        for kernel in lanes:
            for kind in map(stored, kernel.results):
                widths = kernel.ladder.widths[: widest[kernel]]
                shared[kind] = max(shared.get(kind, 0), *widths)
    made = Signature(
        tuple(lanes),
        tuple(lanes.values()),
        tuple(widest[kernel] for kernel in lanes),
        tuple(inputs),
        tuple(inputs.values()),
        tuple(outputs.get(kind, 0) for kind in inputs),
        stretches,
        tuple(shared.get(kind, 0) for kind in inputs) if placed.reuse else None,
        tuple(readings.get(kernel, ()) for kernel in lanes),
        placed.target,
    )
    rows = operand_rows(placed, value_rows(placed, made)[0])
    modes = find_all_modes(placed, made, rows)
    for kernel, found in zip(placed.kernels, modes, strict=True):
        live = placed.chunks.live[placed.chunks.kernel == placed.kernels.index(kernel)]
        readings.setdefault(kernel, choose_reading(found, live > 1, placed.worth_slicing))
    made = replace(made, readings=tuple(readings.get(kernel, ()) for kernel in lanes))
    found_stretches = body_stretches(placed, made, modes)
    longest = placed.target.superinstruction
    made = replace(made, branches=made.instructions.learn(found_stretches, longest))
    needed_stretches = len(made.instructions.encode(found_stretches))
    # Depths vary more than sums over instances.
    return replace(made, stretches=max(stretches, capacity(2 * needed_stretches)))


def value_rows(placed: Placed, signature: Signature) -> tuple[np.ndarray, np.ndarray]:
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


def operand_rows(placed: Placed, row: np.ndarray) -> list[np.ndarray]:
    """int64[operands, lanes] for each kernel: the row that each operand of each lane is in."""
    graph, layout = placed.graph, placed.layout
    found = []
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
        position = np.arange(len(kernel.operands))[:, None]
        found.append(row[graph.operand[graph.operand_ptr[nodes] + position]])
    return found


def find_all_modes(
    placed: Placed, signature: Signature, rows: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """int8[operands, chunks] for each kernel: how each of its chunks can read each operand."""
    chunks = placed.chunks
    found = []
    for k, (kernel, mine) in enumerate(zip(placed.kernels, rows, strict=True)):
        of = np.flatnonzero(chunks.kernel == k)
        loose = np.array(kernel.loose, bool)[:, None] & (not placed.keeps)
        count = np.where(loose, chunks.live[of], chunks.width[of])
        modes = find_modes(mine, chunks.lane[of], count)
        room = [signature.rows[signature.arena(t)] for t in kernel.operands]
        last = mine[:, chunks.lane[of]] + extent(modes, chunks.width[of])
        modes[last > np.array(room, np.int64)[:, None]] = GATHER
        found.append(modes)
    return found


def body_stretches(placed: Placed, signature: Signature, modes: Sequence[np.ndarray]) -> np.ndarray:
    """int64[..., 3]: the stretches, by the number of the body that runs them."""
    chunks = placed.chunks
    body = np.array([signature.first_body[signature.kernels.index(k)] for k in placed.kernels])
    body = body[chunks.kernel]
    for k, (kernel, mine) in enumerate(zip(placed.kernels, modes, strict=True)):
        of = np.flatnonzero(chunks.kernel == k)
        for i, reading in enumerate(signature.readings[signature.kernels.index(kernel)]):
            body[of[usable(reading, mine)]] += 1 + i
    what = body * NUM_WIDTHS + chunks.column
    return merged(what, chunks.lane, chunks.width, np.ones_like(what))


@dataclass(frozen=True, eq=False)
class Lowered:
    """A minibatch as a program runs it.

    Attributes:
      signature: the program.
      table: int32[...], what it reads.
      stretches: int64[..., 3], what it runs.
    """

    signature: Signature
    table: np.ndarray
    stretches: np.ndarray

    @functools.cached_property
    def body_lanes(self) -> np.ndarray:
        """int64[bodies], lanes that each body runs."""
        signature = self.signature
        number = self.stretches[:, 0] // NUM_WIDTHS
        lanes = signature.instructions.width_of[self.stretches[:, 0]] * self.stretches[:, 2]
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


def lower(placed: Placed, signature: Signature) -> Lowered | None:
    """A minibatch for a program that it fits; None if it has too many stretches after all."""
    layout, form = placed.layout, signature.form
    place = [signature.kernels.index(kernel) for kernel in placed.kernels]
    row, begin = value_rows(placed, signature)
    rows = operand_rows(placed, row)
    if any(signature.readings):
        modes = find_all_modes(placed, signature, rows)
        stretches = body_stretches(placed, signature, modes)
    else:
        stretches = placed.stretches.copy()
        kernel, width = np.divmod(stretches[:, 0], NUM_WIDTHS)
        stretches[:, 0] = np.array(place, np.int64)[kernel] * NUM_WIDTHS + width

    instructions = signature.instructions.encode(stretches)
    if len(instructions) > signature.stretches:
        return None
    table = np.zeros(form.size, np.int32)
    form.view(table, "num_stretches")[0] = len(instructions)
    form.view(table, "stretches")[: len(instructions)] = instructions
    for t, k, mine in zip(placed.type_ids, place, rows, strict=True):
        places = form.view(table, "operands", k)
        places[:, : mine.shape[1]] = mine
        places[:, mine.shape[1] :] = mine[:, :1]
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
    return Lowered(signature, table, stretches)
