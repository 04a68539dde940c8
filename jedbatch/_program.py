"""Lowering: a scheduled graph as integer tables and a signature.

A `Program` is what crosses from the host to the device. Its `Signature` says what must be
compiled: node types, capacities, widths. Everything about this minibatch is in int32 tables, so
minibatches that share a signature share a compiled program. Capacities are powers of two with
room to spare, and a signature that exists is used again for every minibatch that fits it, so
that a stream of new topologies soon compiles nothing.

**Stretches.** Chunks of one kernel and one width that follow one another in its lanes are one
*stretch*, whatever batches they belong to: the long tail of a minibatch of trees, a node or two a
batch, is a single entry of the table and a single loop.

**Rows.** The values of one shape and dtype are rows of one arena: first the inputs, then, for
every result of every node type, one row per lane.

**Cotangents.** In reverse every operand of every lane has a row for the cotangent it sends to
the value it reads, and so has every output. A value's cotangent is the sum of the rows of its
readers, which a table lists, at most `MAX_READERS`; more readers are first summed, four rows at
a time, by steps of their own. One row of each arena is zero, for readers that do not exist.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jedbatch._cells import Kernel, Kind, differentiable, stored
from jedbatch._graph import Graph, distinct, ranges
from jedbatch._jaxpr import has_gradient
from jedbatch._layout import BLOCKS, COARSE, NUM_WIDTHS, Layout
from jedbatch._schedule import Schedule

MAX_READERS = 4
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


@dataclass(frozen=True)
class ReverseSignature:
    """What is compiled to run minibatches backwards.

    Attributes:
      forward: the program it reverses.
      readers: readers listed per value, for each result of each type.
      input_readers: readers listed per input, for each arena.
      sums: capacity of the rows that sum up readers, for each arena.
      stretches: capacity of stretches.
    """

    forward: Signature
    readers: tuple[tuple[int, ...], ...]
    input_readers: tuple[int, ...]
    sums: tuple[int, ...]
    stretches: int

    @functools.cached_property
    def bases(self) -> tuple[tuple[int, ...], ...]:
        """The first cotangent row of each operand of each type; -1 if it has none."""
        return _cotangent_rows(self.forward)[0]

    @functools.cached_property
    def sum_bases(self) -> tuple[int, ...]:
        """The first row of sums of each arena."""
        return _cotangent_rows(self.forward)[1]

    @property
    def zero(self) -> tuple[int, ...]:
        """The row of zeros, the last of each arena."""
        return tuple(a + b for a, b in zip(self.sum_bases, self.sums, strict=True))

    @functools.cached_property
    def form(self) -> TableForm:
        forward, form = self.forward, TableForm()
        form.add(("num_stretches",), 1)
        form.add(("stretches",), self.stretches, 3)
        for k, lanes in enumerate(forward.lanes):
            form.add(("used", k), 1)
            form.add(("blocks", k), len(BLOCKS.widths))
            for s, readers in enumerate(self.readers[k]):
                form.add(("readers", k, s), readers, lanes)
        for a, rows in enumerate(forward.inputs):
            form.add(("input_readers", a), self.input_readers[a], rows)
            form.add(("sums", a), MAX_READERS, self.sums[a])
        return form


def _cotangent_rows(forward: Signature) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    ends = list(forward.outputs)
    bases = []
    for kernel, lanes in zip(forward.kernels, forward.lanes, strict=True):
        mine = []
        for t in kernel.operands:
            mine.append(ends[forward.arena(t)] if differentiable(t) else -1)
            ends[forward.arena(t)] += lanes if differentiable(t) else 0
        bases.append(tuple(mine))
    return tuple(bases), tuple(ends)


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


@dataclass(frozen=True, eq=False)
class Readers:
    """The reverse of a minibatch, before a program is chosen for it.

    Attributes:
      columns: cotangent rows that make up the cotangent of every value and input, -1 for none:
        a list of int32[V + I], in which input i is at -1 - i.
      sums: for each arena, int32[MAX_READERS, lanes]: the rows each sum adds up.
      stretches: int64[..., 3] in order; kinds count the kernels of the program, then the arenas
        whose cotangents are summed up.
    """

    columns: list[np.ndarray]
    sums: list[np.ndarray]
    stretches: np.ndarray


def find_readers(placed: Placed, signature: Signature) -> Readers:
    """Lists the readers of every value."""
    graph, schedule, layout = placed.graph, placed.schedule, placed.layout
    place = [signature.kernels.index(kernel) for kernel in placed.kernels]
    bases, sum_bases = _cotangent_rows(signature)
    size = graph.num_values + graph.num_inputs
    targets, rows, arenas = [], [], []
    for kind, outputs in zip(placed.arenas, placed.outputs, strict=True):
        if has_gradient(kind[1]):
            targets.append(outputs)
            rows.append(np.arange(len(outputs)))
            arenas.append(np.full(len(outputs), signature._arena_ids[kind]))
    for t, k in zip(placed.type_ids, place, strict=True):
        nodes = np.flatnonzero(graph.node_type == t)
        for j, value_type in enumerate(signature.kernels[k].operands):
            if differentiable(value_type):
                targets.append(graph.operand[graph.operand_ptr[nodes] + j])
                rows.append(bases[k][j] + layout.lane[nodes])
                arenas.append(np.full(len(nodes), signature.arena(value_type)))
    target, row, arena = (
        np.concatenate(x) if x else np.zeros(0, np.int64) for x in (targets, rows, arenas)
    )
    target = np.where(target >= 0, target, size + target)

    columns: list[np.ndarray] = []
    left = np.arange(len(target))
    while len(left) and len(columns) < MAX_READERS:
        holder = np.full(size, -1)
        holder[target[left]] = left  # the last of several stays
        won = holder[target[left]] == left
        column = np.full(size, -1, np.int32)
        column[target[left[won]]] = row[left[won]]
        columns.append(column)
        left = left[~won]

    position = np.full(len(graph.types), -1)
    position[list(placed.type_ids)] = place
    batches = [position[schedule.batch_type], layout.start, layout.trips]
    steps = np.column_stack(batches)[::-1]
    sums = [np.zeros((MAX_READERS, 0), np.int32) for _ in signature.arenas]
    if len(left):
        busy = np.isin(target, distinct(target[left]))
        sums, before = _sum_up(
            target[busy], row[busy], arena[busy], placed, sum_bases, columns, len(sums)
        )
        batch = np.arange(len(schedule))[::-1]
        steps = np.concatenate([steps, before[:, 2:]])
        order = np.lexsort(
            (
                np.concatenate([np.full(len(batch), np.iinfo(int).max), before[:, 1]]),
                -np.concatenate([batch, before[:, 0]]),
            )
        )
        steps = steps[order]
    kernels = signature.kernels
    kind = np.where(steps[:, 0] < 0, len(kernels) - 1 - steps[:, 0], steps[:, 0])
    stretches = find_stretches(kind, steps[:, 1], steps[:, 2:], kernels, reverse=True)
    return Readers(columns, sums, stretches)


def _sum_up(target, row, arena, placed, sum_bases, columns, num_arenas):
    """Sums of four for values with many readers; changes `columns` for those values.

    Returns the rows each sum adds up, by arena, and int64[..., 4 + NUM_WIDTHS]: (batch whose values
    need them or -1 for inputs, level, kind, first lane, trips) of the steps that compute them.
    """
    graph, schedule = placed.graph, placed.schedule
    when = np.empty(len(graph.node_type), np.int64)
    when[schedule.node] = np.repeat(np.arange(len(schedule)), np.diff(schedule.node_ptr))
    order = np.argsort(target, kind="stable")
    target, row, arena = target[order], row[order], arena[order]
    made = []  # (target, arena, level, members) of every sum
    level = 0
    num_made = 0
    while True:
        first = np.flatnonzero(np.r_[True, target[1:] != target[:-1]])
        counts = np.diff(np.r_[first, len(target)])
        if counts.max() <= MAX_READERS:
            break
        groups = -(-counts // MAX_READERS)
        sizes = np.minimum(
            MAX_READERS,
            np.repeat(counts, groups) - MAX_READERS * ranges(np.zeros_like(groups), groups),
        )
        starts = np.cumsum(sizes) - sizes
        members = np.full((len(sizes), MAX_READERS), -1)
        filled = np.arange(MAX_READERS) < sizes[:, None]
        members[filled] = row
        made.append((target[starts], arena[starts], np.full(len(sizes), level), members))
        row = -2 - num_made - np.arange(len(sizes))  # sum s, until its lane is known
        num_made += len(sizes)
        target, arena = target[starts], arena[starts]
        level += 1

    of, where, levels, members = (np.concatenate(x) for x in zip(*made, strict=True))
    is_value = of < graph.num_values
    batch = np.full(len(of), -1)
    batch[is_value] = when[graph.value_node[of[is_value]]]
    final = np.empty(num_made, np.int64)  # the row of each sum
    steps, lanes = [], [0] * num_arenas
    order = np.lexsort((of, levels, -batch, where))
    key = np.stack([where, batch, levels])[:, order]
    change = np.flatnonzero(np.r_[True, (key[:, 1:] != key[:, :-1]).any(axis=0)])
    lane_of = np.empty(num_made, np.int64)
    for group in np.split(order, change[1:]):
        a = int(where[group[0]])
        trips = COARSE.cover(np.array([len(group)]))[0]
        lane_of[group] = lanes[a] + np.arange(len(group))
        final[group] = sum_bases[a] + lane_of[group]
        row_of_step = [batch[group[0]], levels[group[0]], -1 - a, lanes[a], *trips]
        steps.append(row_of_step + [0] * (NUM_WIDTHS - len(trips)))
        lanes[a] += int(COARSE.lanes(trips))

    def resolve(rows):
        return np.where(rows <= -2, final[np.maximum(0, -2 - rows)], rows)

    sums = []
    for a in range(num_arenas):
        mine = np.flatnonzero(where == a)
        table = np.full((MAX_READERS, lanes[a]), -1, np.int32)
        table[:, lane_of[mine]] = resolve(members[mine]).T
        sums.append(table)
    for column in columns:
        column[target] = -1
    first = np.flatnonzero(np.r_[True, target[1:] != target[:-1]])
    counts = np.diff(np.r_[first, len(target)])
    which = np.arange(len(target)) - np.repeat(first, counts)
    rows = resolve(row)
    for i, column in enumerate(columns):
        column[target[which == i]] = rows[which == i]
    return sums, np.array(steps, np.int64)


def make_reverse_signature(
    placed: Placed, readers: Readers, forward: Signature, model: ReverseSignature | None
) -> ReverseSignature:
    """A reverse signature with room for a minibatch, and for what `model` had room for."""
    graph = placed.graph
    listed = [[1] * len(kernel.results) for kernel in forward.kernels]
    inputs = [0] * len(forward.arenas)
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        k = forward.kernels.index(kernel)
        first = graph.value_ptr[:-1][graph.node_type == t]
        for s in range(len(kernel.results)):
            listed[k][s] = max(1, _count(readers.columns, first + s))
    for a, kind in enumerate(placed.arenas):
        found = np.flatnonzero(placed.input_arena == a)
        inputs[forward._arena_ids[kind]] = _count(readers.columns, -1 - found)
    sums = [placed.capacity(x.shape[1]) for x in readers.sums]
    more = len(readers.stretches) - len(placed.stretches)
    stretches = forward.stretches + capacity(2 * more)
    if model is not None:
        listed = [
            [max(a, b) for a, b in zip(x, y, strict=True)]
            for x, y in zip(listed, model.readers, strict=True)
        ]
        inputs = [max(a, b) for a, b in zip(inputs, model.input_readers, strict=True)]
        sums = [max(a, b) for a, b in zip(sums, model.sums, strict=True)]
        stretches = max(stretches, model.stretches)
    return ReverseSignature(
        forward, tuple(map(tuple, listed)), tuple(inputs), tuple(sums), stretches
    )


def _count(columns: Sequence[np.ndarray], values: np.ndarray) -> int:
    """Columns needed for some values: 0, 1, 2 or 4."""
    used = [i for i, column in enumerate(columns) if (column[values] >= 0).any()]
    return 1 << (used[-1]).bit_length() if used else 0


def reverse_fits(needed: ReverseSignature, signature: ReverseSignature) -> bool:
    """Whether a program lists enough readers for a minibatch."""
    return (
        needed.forward == signature.forward
        and all(
            a <= b
            for x, y in zip(needed.readers, signature.readers, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        and all(a <= b for a, b in zip(needed.input_readers, signature.input_readers, strict=True))
        and all(a <= b for a, b in zip(needed.sums, signature.sums, strict=True))
        and needed.stretches <= signature.stretches
    )


def reverse_table(placed: Placed, readers: Readers, signature: ReverseSignature) -> np.ndarray:
    """The int32 table of a minibatch for a reverse program that it fits."""
    graph, layout, forward = placed.graph, placed.layout, signature.forward
    form = signature.form
    table = np.zeros(form.size, np.int32)
    form.view(table, "num_stretches")[0] = len(readers.stretches)
    form.view(table, "stretches")[: len(readers.stretches)] = readers.stretches

    def fill(view, values, places, zero):
        view[:] = zero
        for rows, column in zip(view, readers.columns, strict=False):
            found = column[values]
            rows[places] = np.where(found >= 0, found, zero)

    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        k = forward.kernels.index(kernel)
        used = int(layout.lanes[t])
        form.view(table, "used", k)[0] = used
        form.view(table, "blocks", k)[:] = BLOCKS.cover(np.array([used]))[0]
        nodes = np.flatnonzero(graph.node_type == t)
        for s, value_type in enumerate(kernel.results):
            zero = signature.zero[forward.arena(value_type)]
            view = form.view(table, "readers", k, s)
            fill(view, graph.value_ptr[nodes] + s, layout.lane[nodes], zero)
    for a, kind in enumerate(placed.arenas):
        b = forward._arena_ids[kind]
        found = np.flatnonzero(placed.input_arena == a)
        view = form.view(table, "input_readers", b)
        fill(view, -1 - found, placed.input_row[found], signature.zero[b])
    for a, sums in enumerate(readers.sums):
        view = form.view(table, "sums", a)
        view[:] = signature.zero[a]
        view[:, : sums.shape[1]] = np.where(sums >= 0, sums, signature.zero[a])
    return table
