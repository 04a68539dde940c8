"""Lowering the reverse: who reads what, as tables.

In reverse every operand of every lane has a row for the cotangent it sends to the value it reads
(see `_program.cotangent_rows`), and so has every output. A value's cotangent is the sum of the rows
of its readers, which a table lists, at most `MAX_READERS`; more readers are first summed, four rows
at a time, by steps of their own. One row of each arena is zero, for readers that do not exist.

A reader counts only if something comes back from it: if a result of its node is alive (read by
somebody who counts, or returned) from which the operand gets a cotangent at all. So a value without
readers is one that nobody differentiates, and the program can tell (see `_jaxpr.zeros`). If not all
that is returned is differentiated, the program must also know which results a value leads to: the
table has them as bits, so that one table will do whichever they are.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jedbatch._graph.paths import distinct, ranges
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import Kind, row_bytes, stored
from jedbatch._kernel.vjp import differentiable
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._program.alive import (
    Alive,
    Refused,
    computes_what_is_read,
    find_leads,
    find_refused,
    merged_refused,
    origin_of_inputs,
)
from jedbatch._program.capacity import Capacity, round_up
from jedbatch._program.cotangent_rows import Sent, arenas_of_parameters, shares_rows
from jedbatch._program.instructions import Branch, InstructionSet
from jedbatch._program.placement import NO_VALUE, Placement
from jedbatch._program.runs import find_runs
from jedbatch._program.signature import Signature
from jedbatch._program.tables import TableLayout

MAX_READERS = 4
FEW_NODES = 32  # of a type: other minibatches may read their results more often
FIRST_SUM_ROW = 1 << 30  # rows from here on are those of sums, until a program is chosen


@dataclass(frozen=True)
class ReverseSignature:
    """The static part of a program that runs minibatches backwards.

    Attributes:
      forward: the program it reverses.
      readers: readers listed per value, for each result of each type.
      input_readers: readers listed per input, for each arena.
      sums: capacity of the rows that sum up readers, for each arena.
      sent: capacity of the rows that cotangents of operands share, for each arena; None if every
        lane has rows of its own.
      num_instructions: capacity of instructions.
      tells: whether the table says to which results values lead (see `Alive.leads_to`).
      refused: results of kernels that cannot be differentiated and would have to be.
      branches: of several opcodes, or in a loop (see `_program.instructions`).
      marks: whether the sweep marks the cotangents that exist, one by one (see `Backward`).
      constants: arenas in which there are inputs alone, with respect to which nothing is
        differentiated; cotangents in them are not computed.
    """

    forward: Signature
    readers: tuple[tuple[int, ...], ...]
    input_readers: tuple[int, ...]
    sums: tuple[int, ...]
    sent: tuple[int, ...] | None
    num_instructions: int
    tells: bool
    refused: tuple[Refused, ...]
    branches: tuple[Branch, ...] = ()
    marks: bool = False
    constants: frozenset[int] = frozenset()

    def with_constants(self, origins: int) -> "ReverseSignature":
        """Returns the program that differentiates only with respect to some `Refused.origins`."""
        forward = self.forward
        made = {forward.arena(t) for kernel in forward.kernels for t in kernel.results}
        arenas = range(len(forward.arenas))
        moving = {a for a in arenas if origins & origin_of_inputs(a)}
        return replace(self, constants=frozenset(arenas) - made - moving)

    def has_cotangents(self, a: int) -> bool:
        """Returns whether cotangents in an arena are computed."""
        return has_gradient(self.forward.arenas[a][1]) and a not in self.constants

    @functools.cached_property
    def capacity(self) -> Capacity:
        """The sizes of the program: of results by (kernel, result), the others by arena."""
        return Capacity(
            {
                "readers": {
                    (k, s): n for k, counts in enumerate(self.readers) for s, n in enumerate(counts)
                },
                "input_readers": dict(enumerate(self.input_readers)),
                "sums": dict(enumerate(self.sums)),
                "sent": dict(enumerate(self.sent or ())),
                "num_instructions": {None: self.num_instructions},
            }
        )

    @functools.cached_property
    def bases(self) -> tuple[tuple[int, ...], ...]:
        """The first cotangent row of each parameter of each type if lanes have rows of their own.

        -1 for parameters that have none.
        """
        return self.forward.cotangent_rows[0]

    @functools.cached_property
    def sum_bases(self) -> tuple[int, ...]:
        """The first row of sums of each arena."""
        if self.sent is None:
            return self.forward.cotangent_rows[1]
        return tuple(map(sum, zip(self.forward.outputs, self.sent, strict=True)))

    @property
    def zero(self) -> tuple[int, ...]:
        """The row of zeros, the last of each arena."""
        return tuple(a + b for a, b in zip(self.sum_bases, self.sums, strict=True))

    @functools.cached_property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """The widths compiled for each kernel, then for the sums of each arena."""
        sums, forward = self.forward.target.sums.widths, self.forward
        pairs = zip(forward.kernels, forward.widths, strict=True)
        kernels = (() if kernel.reverse.is_leaf else widths for kernel, widths in pairs)
        return *kernels, *(tuple(w for w in sums if w <= rows) for rows in self.sums)

    @functools.cached_property
    def instructions(self) -> InstructionSet:
        """The map from chunks to instructions."""
        single = [
            Branch((kind * NUM_WIDTHS + i,))
            for kind, widths in enumerate(self.widths)
            for i in range(len(widths))
        ]
        *kernels, sums = self.forward.kernel_widths
        widths = np.array([*kernels, *[sums] * len(self.sums)], np.int64).ravel()
        return InstructionSet(
            self.forward.target.control,
            (*single, *self.branches),
            np.arange(len(widths)) // NUM_WIDTHS,
            widths,
            reverse=True,
        )

    @functools.cached_property
    def form(self) -> TableLayout:
        forward, form = self.forward, TableLayout()
        form.add(("num_instructions",), 1)
        form.add(("instructions",), self.num_instructions, self.instructions.columns)
        for k, lanes in enumerate(forward.lanes):
            form.add(("blocks", k), len(forward.kernels[k].blocks.widths))
            if self.sent is not None:
                form.add(("sent", k), len(forward.kernels[k].parameters), lanes)
            for s, readers in enumerate(self.readers[k]):
                form.add(("readers", k, s), readers, lanes)
                if self.tells:
                    form.add(("leads_to", k, s), lanes)
        for a, rows in enumerate(forward.inputs):
            form.add(("input_readers", a), self.input_readers[a], rows)
            form.add(("sums", a), MAX_READERS, self.sums[a])
        return form


@dataclass(frozen=True, eq=False)
class Readers:
    """The reverse of a minibatch, before a program is chosen for it.

    Attributes:
      columns: cotangent rows that make up the cotangent of every value and input, -1 for none:
        a list of int32[V + I], in which input i is at -1 - i. Sum i is at `SUMS + i`.
      sums: for each arena, int32[MAX_READERS, lanes]: the rows each sum adds up.
      sent: where the operands of each batch have their rows, if these are shared.
      runs: int64[..., 3] in order; kinds count the kernels of the program, then the arenas
        whose cotangents are summed up.
      leads_to: int32[V], the results that each value leads to, as bits; None if they are not
        told apart.
      refused: see `ReverseSignature`.
    """

    columns: list[np.ndarray]
    sums: list[np.ndarray]
    sent: Sent | None
    runs: np.ndarray
    leads_to: np.ndarray | None
    refused: tuple[Refused, ...]

    @functools.cached_property
    def _encoded(self) -> dict[InstructionSet, np.ndarray]:
        return {}

    def encoded(self, instructions: InstructionSet) -> np.ndarray:
        """The runs as instructions; kept, since programs are chosen by how many these are."""
        if instructions not in self._encoded:
            self._encoded[instructions] = instructions.encode(self.runs)
        return self._encoded[instructions]


def find_readers(
    placed: Placement,
    signature: Signature,
    leaves: Sequence[np.ndarray] | None = None,
    wanted: Sequence[np.ndarray] | None = None,
    shares: bool | None = None,
) -> Readers:
    """Lists the readers of every value.

    Args:
      placed: the minibatch.
      signature: its program.
      leaves: for each arena, int[outputs]: the number of the result that each row returned belongs
        to, if results are to be told apart.
      wanted: for each arena, bool[outputs]: what is differentiated; None if all is.
      shares: whether cotangents share rows; None for where that saves much.
    """
    graph, schedule, layout = placed.graph, placed.schedule, placed.layout
    is_guess = wanted is None and all(kernel.reverse.is_plain for kernel in placed.kernels)
    alive = Alive.everything(placed) if is_guess else Alive.find(placed, wanted)
    while True:
        sent = _find_sent(placed, signature, alive, shares)
        target, row, arena_counts = _find_edges(placed, signature, alive, sent, wanted)
        columns, unlisted = _list_edges(placed, target, row)
        if not is_guess or computes_what_is_read(placed, columns):
            break
        is_guess, alive = False, Alive.find(placed, wanted)

    position = np.full(len(graph.types), -1)
    position[list(placed.type_ids)] = [signature.places[k] for k in placed.kernels]
    batches = [position[schedule.batch_type], layout.start, layout.trips]
    steps = np.column_stack(batches)[::-1]
    works = np.array([not kernel.reverse.is_leaf for kernel in signature.kernels], bool)
    works = works[steps[:, 0]]
    sums = [np.zeros((MAX_READERS, 0), np.int32) for _ in signature.arenas]
    if len(unlisted):
        busy = np.isin(target, distinct(target[unlisted]))
        arena = np.repeat(*np.array(arena_counts).T)
        sums, before = _sum_up(
            target[busy],
            row[busy],
            arena[busy],
            placed,
            columns,
            len(sums),
        )
        batch = np.arange(len(schedule))[::-1]
        steps = np.concatenate([steps, before[:, 2:]])
        works = np.append(works, np.ones(len(before), bool))
        order = np.lexsort(
            (
                np.concatenate([np.full(len(batch), np.iinfo(int).max), before[:, 1]]),
                -np.concatenate([batch, before[:, 0]]),
            )
        )
        steps, works = steps[order], works[order]
    steps = steps[works]
    kernels = signature.kernels
    sources = np.where(steps[:, 0] < 0, len(kernels) - 1 - steps[:, 0], steps[:, 0])
    widths = signature.kernel_widths
    runs = find_runs(sources, steps[:, 1], steps[:, 2:], widths, reverse=True)
    leads_to = None if leaves is None else find_leads(placed, leaves)
    refused = find_refused(placed, alive, leads_to, signature)
    return Readers(columns, sums, sent, runs, leads_to, refused)


def with_all_refused(several: Sequence[Readers]) -> list[Readers]:
    """Returns the readers of minibatches for one program, each with what any of them refuses."""
    refused = merged_refused(x for readers in several for x in readers.refused)
    return [replace(readers, refused=refused) for readers in several]


def _find_sent(
    placed: Placement, signature: Signature, alive: Alive, shares: bool | None
) -> Sent | None:
    """Returns the rows that cotangents share, if they do; see `find_readers`."""
    if shares or (shares is None and shares_rows(signature)):
        sent = Sent.find(placed, signature, alive)
        return sent if shares or sent.saves_much(signature) else None
    return None


def _find_edges(
    placed: Placement,
    signature: Signature,
    alive: Alive,
    sent: Sent | None,
    wanted: Sequence[np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Returns who sends a cotangent to whom.

    That is int64[edges] the value or input read, int64[edges] the row of the cotangent, and
    (arena, number of edges) for each run of edges in one arena.
    """
    graph, layout = placed.graph, placed.layout
    bases = signature.cotangent_rows[0]
    targets, rows, arenas = [], [], []
    for a, (kind, outputs) in enumerate(zip(placed.arenas, placed.outputs, strict=True)):
        if has_gradient(kind[1]):
            positions = np.flatnonzero(outputs != NO_VALUE if wanted is None else wanted[a])
            targets.append(outputs[positions])
            rows.append(positions)
            arenas.append((signature.arena_ids[kind], len(positions)))
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        nodes = placed.nodes[t]
        k = signature.places[kernel]
        for p, parameter in enumerate(kernel.parameters):
            if not differentiable(parameter.type):
                continue
            a, num_rows = signature.arena(parameter.type), parameter.num_rows
            if sent is None:
                first = bases[k][p] + layout.lane[nodes] * num_rows
            else:
                first = signature.outputs[a] + sent.rows_of(placed, nodes, p, num_rows)
            exist = placed.exist.get(t)
            for i, j in enumerate(parameter.operands):
                edges, row_of_edge = graph.operand_ptr[nodes] + j, first + i % num_rows
                if exist is not None:
                    edges, row_of_edge = edges[exist[j]], row_of_edge[exist[j]]
                if alive.reads is not None:
                    reads = alive.reads[edges]
                    edges, row_of_edge = edges[reads], row_of_edge[reads]
                targets.append(graph.operand[edges])
                rows.append(row_of_edge)
                arenas.append((a, len(edges)))
    target, row = (np.concatenate(x) if x else np.zeros(0, np.int64) for x in (targets, rows))
    size = graph.num_values + graph.num_inputs
    return np.where(target >= 0, target, size + target), row, arenas


def _list_edges(
    placed: Placement, target: np.ndarray, row: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """(`Readers.columns`, the edges that do not fit into them)."""
    size = placed.graph.num_values + placed.graph.num_inputs
    columns: list[np.ndarray] = []
    unlisted = np.arange(len(target))
    while len(unlisted) and len(columns) < MAX_READERS:
        holder = np.full(size, -1)
        holder[target[unlisted]] = unlisted  # the last of several stays
        won = holder[target[unlisted]] == unlisted
        column = np.full(size, -1, np.int32)
        column[target[unlisted[won]]] = row[unlisted[won]]
        columns.append(column)
        unlisted = unlisted[~won]
    return columns, unlisted


def _sum_up(target, row, arena, placed, columns, num_arenas):
    """Sums of four for values with many readers; changes `columns` for those values.

    Returns the rows each sum adds up, by arena, and int64[..., 4 + NUM_WIDTHS]: (batch whose values
    need them or -1 for inputs, level, kind, first lane, trips) of the steps that compute them.
    """
    graph, when = placed.graph, placed.schedule.batch
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
        trips = placed.target.sums.cover(np.array([len(group)]))[0]
        lane_of[group] = lanes[a] + np.arange(len(group))
        final[group] = FIRST_SUM_ROW + lane_of[group]
        row_of_step = [batch[group[0]], levels[group[0]], -1 - a, lanes[a], *trips]
        steps.append(row_of_step + [0] * (NUM_WIDTHS - len(trips)))
        lanes[a] += int(placed.target.sums.lanes(trips))

    def resolve(rows):
        return np.where(rows <= -2, final[np.maximum(0, -2 - rows)], rows)

    sums = []
    for a in range(num_arenas):
        edges_here = np.flatnonzero(where == a)
        table = np.full((MAX_READERS, lanes[a]), -1, np.int32)
        table[:, lane_of[edges_here]] = resolve(members[edges_here]).T
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


def reverse_need(placed: Placement, readers: Readers, forward: Signature) -> Capacity:
    """Returns the sizes that the reverse of a minibatch needs."""
    graph = placed.graph
    counts = [len(kernel.results) for kernel in forward.kernels]
    listed = {(k, s): 1 for k, count in enumerate(counts) for s in range(count)}
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        k = forward.kernels.index(kernel)
        first = graph.value_ptr[placed.nodes[t]]
        for s in range(len(kernel.results)):
            listed[k, s] = max(1, _count(readers.columns, first + s))
    inputs = dict.fromkeys(range(len(forward.arenas)), 0)
    for a, kind in enumerate(placed.arenas):
        inputs_here = np.flatnonzero(placed.input_arena == a)
        inputs[forward.arena_ids[kind]] = _count(readers.columns, -1 - inputs_here)
    loops = forward.target.control == "loops"  # other instructions depend on the program
    return Capacity(
        {
            "readers": listed,
            "input_readers": inputs,
            "sums": {a: x.shape[1] for a, x in enumerate(readers.sums)},
            "sent": dict(enumerate(readers.sent.rows.tolist() if readers.sent else ())),
            "num_instructions": {None: len(readers.runs) if loops else 0},
        }
    )


def reverse_ample(placed: Placement, readers: Readers, forward: Signature) -> Capacity:
    """Returns the sizes that are needed, with headroom."""
    need = reverse_need(placed, readers, forward)
    num_instructions = 0
    if forward.target.control == "loops":
        more = max(0, len(readers.runs) - len(placed.runs))  # as many again cost a few kB
        num_instructions = round_up(max(2 * more, forward.num_instructions))
        num_instructions += forward.num_instructions
    larger = {
        "input_readers": {
            a: MAX_READERS if n and 16 * forward.inputs[a] <= sum(forward.lanes) else n
            for a, n in need["input_readers"].items()
        },
        "sums": {  # of the few values that many read, which vary more than nodes do
            a: placed.with_headroom(2 * n, row_bytes=row_bytes(forward.arenas[a]))
            for a, n in need["sums"].items()
        },
        "sent": dict(enumerate(readers.sent.room(forward) if readers.sent else ())),
        "num_instructions": {None: num_instructions},
    }
    return Capacity({**need.sizes, **larger})


def _more_readers(
    placed: Placement, forward: Signature, listed: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Readers of each result: for types with few nodes, as many as those of its kind with more."""
    nodes = {k: len(placed.nodes[t]) for k, t in zip(placed.kernels, placed.type_ids, strict=True)}
    few = {k for k, kernel in enumerate(forward.kernels) if nodes.get(kernel, 0) < FEW_NODES}
    kinds = {(k, s): stored(forward.kernels[k].results[s]) for k, s in listed}
    most: dict[Kind, int] = {}
    for (k, s), count in listed.items():
        if k not in few:
            most[kinds[k, s]] = max(count, most.get(kinds[k, s], 0))
    return {
        (k, s): max(n, most.get(kinds[k, s], 0)) if k in few else n for (k, s), n in listed.items()
    }


def make_reverse_signature(
    placed: Placement, readers: Readers, forward: Signature, model: ReverseSignature | None
) -> ReverseSignature:
    """A reverse signature with room for a minibatch, and for what `model` had room for."""
    capacity = reverse_ample(placed, readers, forward)
    more = _more_readers(placed, forward, capacity["readers"])
    capacity = Capacity({**capacity.sizes, "readers": more})
    if model is not None:
        capacity = capacity.joined(model.capacity)
    signature = ReverseSignature(
        forward,
        tuple(
            tuple(capacity["readers"][k, s] for s in range(len(kernel.results)))
            for k, kernel in enumerate(forward.kernels)
        ),
        tuple(capacity["input_readers"].values()),
        tuple(capacity["sums"].values()),
        tuple(capacity["sent"].values()) if readers.sent else None,
        capacity["num_instructions"][None],
        readers.leads_to is not None,
        readers.refused,
    )
    return _learn_instructions(signature, readers)


def _learn_instructions(signature: ReverseSignature, readers: Readers) -> ReverseSignature:
    """The signature with branches of its own, and room for instructions, if its target has them."""
    target = signature.forward.target
    if target.control == "loops":
        return signature
    branches = signature.instructions.learn(readers.runs, target.superinstruction)
    learned = replace(signature, branches=branches)
    num_instructions = round_up(2 * len(learned.instructions.encode(readers.runs)))
    return replace(learned, num_instructions=max(num_instructions, signature.num_instructions))


def _count(columns: Sequence[np.ndarray], values: np.ndarray) -> int:
    """Columns needed for some values: 0, 1, 2 or 4."""
    used = [i for i, column in enumerate(columns) if (column[values] >= 0).any()]
    return 1 << (used[-1]).bit_length() if used else 0


def reverse_fits(need: Capacity, readers: Readers, signature: ReverseSignature) -> bool:
    """Returns whether a program has room for the readers and instructions of a minibatch."""
    return (
        (readers.sent is None) == (signature.sent is None)
        and signature.capacity.holds(need)
        and (readers.leads_to is not None, readers.refused) == (signature.tells, signature.refused)
        and len(readers.encoded(signature.instructions)) <= signature.num_instructions
    )


def reverse_table(placed: Placement, readers: Readers, signature: ReverseSignature) -> np.ndarray:
    """The int32 table of a minibatch for a reverse program that it fits."""
    graph, layout, forward = placed.graph, placed.layout, signature.forward
    form = signature.form
    table = np.zeros(form.size, np.int32)
    instructions = readers.encoded(signature.instructions)
    form.view(table, "num_instructions")[0] = len(instructions)
    form.view(table, "instructions")[: len(instructions)] = instructions

    def resolved(rows, a):
        if readers.sums[a].shape[1]:
            rows = np.where(
                rows >= FIRST_SUM_ROW, rows - FIRST_SUM_ROW + signature.sum_bases[a], rows
            )
        return np.where(rows >= 0, rows, signature.zero[a])

    def fill(view, values, places, a):
        view[:] = signature.zero[a]
        for rows, column in zip(view, readers.columns, strict=False):
            rows[places] = resolved(column[values], a)

    there = set()
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        k = forward.kernels.index(kernel)
        there.add(k)
        used = int(layout.lanes[t])
        form.view(table, "blocks", k)[:] = kernel.blocks.cover(np.array([used]))[0]
        nodes = placed.nodes[t]
        if readers.sent is not None:
            first = readers.sent.rows_of_lanes(placed, t, kernel)
            for p, a in enumerate(arenas_of_parameters(forward, kernel)):
                if a >= 0:
                    form.view(table, "sent", k)[p, :used] = forward.outputs[a] + first[p]
        for s, value_type in enumerate(kernel.results):
            view = form.view(table, "readers", k, s)
            values = graph.value_ptr[nodes] + s
            fill(view, values, layout.lane[nodes], forward.arena(value_type))
            if readers.leads_to is not None:
                form.view(table, "leads_to", k, s)[layout.lane[nodes]] = readers.leads_to[values]
    for k in set(range(len(forward.kernels))) - there:  # where all lanes count, not blocks of them
        for s, value_type in enumerate(forward.kernels[k].results):
            form.view(table, "readers", k, s)[:] = signature.zero[forward.arena(value_type)]
    for a, none in enumerate(signature.zero):  # of arenas that the minibatch lacks, too
        form.view(table, "input_readers", a)[:] = none
    for a, kind in enumerate(placed.arenas):
        b = forward.arena_ids[kind]
        inputs_here = np.flatnonzero(placed.input_arena == a)
        view = form.view(table, "input_readers", b)
        fill(view, -1 - inputs_here, placed.input_row[inputs_here], b)
    for a, sums in enumerate(readers.sums):
        view = form.view(table, "sums", a)
        view[:] = signature.zero[a]
        view[:, : sums.shape[1]] = resolved(sums, a)
    return table
