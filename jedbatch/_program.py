"""Lowering: a scheduled graph as integer tables and a signature.

Two things cross from the host to the device. A `Signature` says what must be compiled: node types,
capacities, widths. Everything about this minibatch is in one int32 table, so minibatches that share
a signature share a compiled program. Capacities have room to spare, and a signature that exists is
used again for every minibatch that fits it, so that a stream of new topologies soon compiles
nothing.

**Stretches.** Chunks of one kernel and one width that follow one another in its lanes are one
*stretch*, whatever batches they belong to: the long tail of a minibatch of trees, a node or two a
batch, is a single entry of the table and a single loop.

**Rows.** The values of one shape and dtype are rows of one arena: first the inputs, then, for
every result of every node type, one row per lane.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jedbatch._cells import Kernel, Kind, stored
from jedbatch._graph import Graph
from jedbatch._layout import BLOCKS, COARSE, NUM_WIDTHS, Layout
from jedbatch._schedule import Schedule

HEADROOM = 1.1  # least capacity over need, before rounding up
DEVIATIONS = 1.5  # how far sums over instances vary, relative to one over their square root
LARGE = 1024  # capacity above which it is rounded up to an eighth of a power of two
SLACK = 4  # a program is used for minibatches down to a quarter of its size
CHEAP = 1 << 15  # bytes of results that every type may have at least
SMALL = 1 << 20  # bytes of results; a program of this size will do for any minibatch


class TableForm:
    """Where things are in a flat int32 table: one large argument dispatches fastest."""

    def __init__(self) -> None:
        self.places: dict[Any, tuple[int, tuple[int, ...]]] = {}
        self.size = 0

    def add(self, name: Any, *shape: int) -> None:
        self.places[name] = (self.size, shape)
        self.size += math.prod(shape)

    def view(self, table: np.ndarray, *name: Any) -> np.ndarray:
        """One part of a NumPy table, for writing."""
        offset, shape = self.places[name]
        return table[offset : offset + math.prod(shape)].reshape(shape)


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
    """

    kernels: tuple[Kernel, ...]
    lanes: tuple[int, ...]
    widest: tuple[int, ...]
    arenas: tuple[tuple[tuple[int, ...], Any], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stretches: int

    @functools.cached_property
    def _hash(self) -> int:
        parts = (self.lanes, self.widest, self.inputs, self.outputs, self.stretches)
        return hash((self.kernels, self.arenas, parts))

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
        """The first row of each result of each type."""
        return self._rows[0]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each arena."""
        return self._rows[1]

    @functools.cached_property
    def form(self) -> TableForm:
        form = TableForm()
        form.add(("num_stretches",), 1)
        form.add(("stretches",), self.stretches, 3)
        for k, kernel in enumerate(self.kernels):
            form.add(("operands", k), len(kernel.operands), self.lanes[k])
        for a, rows in enumerate(self.outputs):
            form.add(("outputs", a), rows)
        return form


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
    """

    graph: Graph
    schedule: Schedule
    layout: Layout
    kernels: tuple[Kernel, ...]
    type_ids: tuple[int, ...]
    arenas: tuple[tuple[tuple[int, ...], Any], ...]
    input_arena: np.ndarray
    input_row: np.ndarray
    outputs: tuple[np.ndarray, ...]
    stacked: bool

    @staticmethod
    def find(
        graph: Graph,
        schedule: Schedule,
        layout: Layout,
        kernels: tuple[Kernel, ...],
        type_ids: tuple[int, ...],
        returned: dict[Kind, list[int]],
        stacked: bool,
    ) -> "Placed":
        """Finds the arena and row of every input; `returned` is what each arena returns."""
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
        return Placed(
            graph,
            schedule,
            layout,
            kernels,
            type_ids,
            tuple(arenas),
            input_arena,
            input_row,
            outputs,
            stacked,
        )

    @functools.cached_property
    def lanes(self) -> tuple[int, ...]:
        """Lanes needed for each kernel; weight gradients run over them in whole blocks."""
        lanes = self.layout.lanes[list(self.type_ids)]
        blocks = BLOCKS.lanes(BLOCKS.cover(lanes))
        return tuple(np.maximum(lanes, blocks).tolist())

    @functools.cached_property
    def stretches(self) -> np.ndarray:
        """int64[..., 3], the stretches in order; kinds count the kernels of this minibatch."""
        position = np.full(len(self.graph.types), -1)
        position[list(self.type_ids)] = np.arange(len(self.type_ids))
        kind = position[self.schedule.batch_type]
        return find_stretches(kind, self.layout.start, self.layout.trips, self.kernels)

    @functools.cached_property
    def widest(self) -> tuple[int, ...]:
        """Number of widths needed for each kernel."""
        trips, batch_type = self.layout.trips, self.schedule.batch_type
        return tuple(
            int(np.flatnonzero(trips[batch_type == t].any(axis=0))[-1]) + 1 for t in self.type_ids
        )

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
        all(n <= signature.lanes[k] for k, n in zip(mine, placed.lanes, strict=True))
        and all(n <= signature.widest[k] for k, n in zip(mine, placed.widest, strict=True))
        and all(
            n <= signature.inputs[a] for a, n in zip(arena_ids, placed.input_counts, strict=True)
        )
        and len(placed.stretches) <= signature.stretches
        and all(
            len(x) <= signature.outputs[a] for a, x in zip(arena_ids, placed.outputs, strict=True)
        )
        and resembles(placed, signature)
    )


def resembles(placed: Placed, signature: Signature) -> bool:
    """Whether a program returns what a minibatch returns, and is not much too large for it.

    Nor may it need tracers that the minibatch does not bring.
    """
    if any(kernel.transient and kernel not in placed.kernels for kernel in signature.kernels):
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
    returned = [len(x) if placed.stacked else placed.capacity(len(x)) for x in placed.outputs]
    outputs = dict(zip(placed.arenas, returned, strict=True))
    stretches = capacity(2 * len(placed.stretches))  # depths vary more than sums over instances
    if model is not None:
        for kernel, n, w in zip(model.kernels, model.lanes, model.widest, strict=True):
            lanes[kernel] = max(n, lanes.get(kernel, 0))
            widest[kernel] = max(w, widest.get(kernel, 0))
        for kind, n, m in zip(model.arenas, model.inputs, model.outputs, strict=True):
            inputs[kind] = max(n, inputs.get(kind, 0))
            outputs[kind] = max(m, outputs.get(kind, 0))
        stretches = max(stretches, model.stretches)
    return Signature(
        tuple(lanes),
        tuple(lanes.values()),
        tuple(widest[kernel] for kernel in lanes),
        tuple(inputs),
        tuple(inputs.values()),
        tuple(outputs.get(kind, 0) for kind in inputs),
        stretches,
    )


def find_stretches(
    kind: np.ndarray,
    start: np.ndarray,
    trips: np.ndarray,
    kernels: Sequence[Kernel],
    *,
    reverse: bool = False,
) -> np.ndarray:
    """int64[..., 3]: (kind * NUM_WIDTHS + width id, first lane, chunks) of every stretch.

    A batch has its widest chunks first, in reverse last, and begins in lane `start` of its kind,
    the position of a kernel or, beyond them, sums of cotangents.
    """
    ladders = [*(kernel.ladder for kernel in kernels), COARSE]
    widths = np.zeros((len(ladders), NUM_WIDTHS), np.int64)
    for row, ladder in zip(widths, ladders, strict=True):
        row[: len(ladder.widths)] = ladder.widths
    sizes = (trips * widths[np.minimum(kind, len(kernels))])[:, ::-1]
    first = start[:, None] + sizes.cumsum(axis=1) - sizes
    columns = np.arange(NUM_WIDTHS)[::-1]
    trips = trips[:, ::-1]
    if reverse:
        sizes, first, columns, trips = sizes[:, ::-1], first[:, ::-1], columns[::-1], trips[:, ::-1]
    step, column = np.nonzero(trips)
    what = kind[step] * NUM_WIDTHS + columns[column]
    lane, size = first[step, column], sizes[step, column]
    ahead, behind = (slice(1, None), slice(None, -1))[:: -1 if reverse else 1]
    new = np.ones(len(what), bool)
    new[1:] = (what[1:] != what[:-1]) | (lane[ahead] != lane[behind] + size[behind])
    begins = np.flatnonzero(new)
    if not len(begins):
        return np.zeros((0, 3), np.int64)
    count = np.add.reduceat(trips[step, column], begins)
    return np.column_stack([what[begins], np.minimum.reduceat(lane, begins), count])


def forward_table(placed: Placed, signature: Signature) -> np.ndarray:
    """The int32 table of a minibatch for a program that it fits."""
    graph, layout = placed.graph, placed.layout
    form = signature.form
    table = np.zeros(form.size, np.int32)
    place = [signature.kernels.index(kernel) for kernel in placed.kernels]

    stretches = placed.stretches.copy()
    kernel, width = np.divmod(stretches[:, 0], NUM_WIDTHS)
    stretches[:, 0] = np.array(place, np.int64)[kernel] * NUM_WIDTHS + width
    form.view(table, "num_stretches")[0] = len(stretches)
    form.view(table, "stretches")[: len(stretches)] = stretches

    row = np.empty(graph.num_values + graph.num_inputs, np.int32)
    row[graph.num_values :] = placed.input_row[::-1]  # so that input i is at -1 - i
    most = max((len(b) for b in signature.bases), default=0)
    base = np.zeros((len(graph.types), most), np.int64)
    for t, k in zip(placed.type_ids, place, strict=True):
        base[t, : len(signature.bases[k])] = signature.bases[k]
    maker = graph.value_node
    slot = np.arange(graph.num_values) - graph.value_ptr[:-1][maker]
    row[: graph.num_values] = base[graph.node_type[maker], slot] + layout.lane[maker]

    for t, k in zip(placed.type_ids, place, strict=True):
        places = form.view(table, "operands", k)
        nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
        first = graph.operand_ptr[nodes]
        for j in range(len(places)):
            places[j, : len(nodes)] = row[graph.operand[first + j]]
            places[j, len(nodes) :] = places[j, 0]
    for kind, outputs in zip(placed.arenas, placed.outputs, strict=True):
        form.view(table, "outputs", signature._arena_ids[kind])[: len(outputs)] = row[outputs]
    return table
