"""Verifying plans as a whole: packed rows, what is returned, rounds (see `_program.verify`)."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from jedbatch._jaxpr.storage import Kind, stored_kind
from jedbatch._jaxpr.symbolic_dims import extent_at, is_ragged
from jedbatch._program.lower import lower
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.output_spec import OutputSpec, PaddedPlace, Slice
from jedbatch._program.placement import NO_VALUE, Placement
from jedbatch._program.plan import Plan
from jedbatch._program.signature import Signature
from jedbatch._program.verify import Goal, Symbols, Trial, require
from jedbatch._program.verify_vjp import ReverseTrial, check_cover
from jedbatch._ragged.calls import Stage


def check_stages(
    stages: Sequence[Stage],
    tables: Sequence[np.ndarray],
    targets: Sequence[Sequence[np.ndarray]],
    signature: Signature,
    known: collections.Counter[Any] | None,
) -> None:
    """Every row of packed arrays belongs to one call, and every call is computed once."""
    rows_written: set[tuple[int, int]] = set()
    for stage, table, columns in zip(stages, tables, targets, strict=True):
        packed, capacity = stage.region.packed, stage.capacity
        tables = packed.tables_of_each(capacity, np.asarray(table))
        require(0 < len(tables) <= capacity.microbatches, f"{len(tables)} microbatches")
        there = np.zeros((capacity.microbatches, capacity.calls), bool)
        for m, own_table in enumerate(tables):
            there[m, : _check_microbatch(stage, own_table)] = True
        _check_packed(stage, np.asarray(table), tables)
        plain = [t for t in stage.region.results if not is_ragged(t.shape)]
        for kind, column in zip(plain, columns, strict=True):
            a = signature.arena(kind)
            room = signature.inputs[a]
            rows = np.asarray(column)
            require((rows[~there.ravel()] == room).all(), "what no call makes is written")
            for row in rows[there.ravel()].tolist():
                if row != room:
                    most = room if known is None else known[signature.arenas[a]]
                    require(0 <= row < most, f"result of a call in row {row} of {most} inputs")
                    require((a, row) not in rows_written, f"two calls write input row {row}")
                    rows_written.add((a, row))


def _check_microbatch(stage: Stage, table: np.ndarray) -> int:
    """Raises unless every call of a microbatch is computed once; returns how many there are."""
    packed, room = stage.region.packed, stage.capacity.of_one
    form = packed.form(room)
    require(table.shape == (form.size,), "the table of a region has another size")
    calls = int(form.view(table, "calls")[0])
    require(0 < calls <= room.calls, f"{calls} calls in room for {room.calls}")
    lengths = form.view(table, "lengths")
    here = dict(zip(packed.phased.symbols, lengths[:, :calls], strict=True))
    longest = packed.longest(here)
    for e, extent in enumerate(packed.extents):
        counts = np.broadcast_to(np.maximum(0, extent_at(extent, here)), (calls,))
        total = int(form.view(table, "total", e)[0])
        require(total == counts.sum() <= room.rows[e], f"{total} rows for {counts.sum()}")
        starts, call = form.view(table, "starts", e), form.view(table, "call", e)
        owner = np.full(total, -1)
        for c, (start, count) in enumerate(
            zip(starts[:calls].tolist(), counts.tolist(), strict=True)
        ):
            free = (owner[start : start + count] == -1).all() and start + count <= total
            require(free, f"rows {start} to {start + count} of call {c} are those of another")
            owner[start : start + count] = c
        require((call[:total] == owner).all(), "a packed row is said to be that of another call")
        require(((call >= 0) & (call < room.calls)).all(), "a packed row belongs to no call")
        blocks = room.blocks(e)
        if blocks is not None:
            trips = form.view(table, "blocks", e)
            check_cover(trips, blocks, total, room.rows[e], f"rows of {extent}")
    order, first, calls_seen = form.view(table, "order"), 0, []
    groups = [1] * len(room.slots) or form.view(table, "trips").tolist()
    for most, group, n in zip(room.lengths, room.together, groups, strict=True):
        slot_calls = [c for c in order[first : first + n * group].tolist() if c != room.calls]
        require(all(0 <= c < calls for c in slot_calls), "a call that does not exist is computed")
        require(all(longest[c] <= most for c in slot_calls), f"a call is longer than {most} rows")
        calls_seen += slot_calls
        first += n * group
    require(first <= len(order), "more groups of calls than there is room for")
    require(
        sorted(calls_seen) == list(range(calls)), f"{len(calls_seen)} of {calls} calls are computed"
    )
    return calls


def _check_packed(stage: Stage, table: np.ndarray, tables: Sequence[np.ndarray]) -> None:
    """The rows returned are those of all microbatches, each once, and of calls one by one."""
    packed, capacity = stage.region.packed, stage.capacity
    if capacity.microbatches == 1:
        return
    form = packed.form(capacity)
    for e in packed.returned_extents:
        totals = [
            int(packed.form(capacity.of_one).view(own_table, "total", e)[0]) for own_table in tables
        ]
        exist = [m * capacity.rows[e] + row for m, n in enumerate(totals) for row in range(n)]
        rows = form.view(table, "packed", e)[: sum(totals)].tolist()
        require(sorted(rows) == exist, "a row returned is not that of one call")


# --- plans ---


def verify(plan: Plan) -> None:
    """Raises `AssertionError` unless the tables of a plan compute what it is for."""
    static, signature = plan.static, plan.static.signature
    symbols = Symbols()
    goal = None if plan.graph is None else Goal.of(plan.graph, symbols)
    trial = Trial(signature, symbols, goal)
    rows_known = None if goal is None else goal.rows
    ragged, targets = plan.ragged or ((), ())
    check_stages(static.stages, ragged, targets, signature, rows_known)
    table = np.asarray(plan.table)
    trial.run(table, static.keeps)
    if plan.host is not None:
        placed = plan.host.placed
        outputs = check_returned(trial, placed, table)
        assert goal is not None
        _check_results(static.results, placed, goal)
    else:
        outputs = _positions(static.results, signature)
        for a, positions in enumerate(outputs):
            for i in positions:
                trial.check_output(table, a, i, None)
    if static.reverse is not None:
        ReverseTrial(trial, static.reverse).run((table, np.asarray(plan.reverse_table)), outputs)


def check_returned(trial: Trial, placed: Placement, table: np.ndarray) -> list[Sequence[int]]:
    """Raises unless a program returns the outputs asked for; returns their positions, by arena."""
    signature = trial.signature
    outputs: list[Sequence[int]] = [()] * len(signature.arenas)
    assert trial.goal is not None
    for kind, references in zip(placed.arenas, placed.outputs, strict=True):
        if len(references):
            a = signature.arenas.index(kind)
            outputs[a] = np.flatnonzero(references != NO_VALUE).tolist()
            for i in outputs[a]:
                trial.check_output(table, a, i, trial.goal[int(references[i])])
    return outputs


def _positions(form: OutputSpec, signature: Signature) -> list[Sequence[int]]:
    """The positions among what each arena returns that results are made of."""
    positions: list[list[int]] = [[] for _ in signature.arenas]
    for places in form.places:
        for kind, first in _rows(places, form.batch or 1):
            a = signature.arenas.index(stored_kind(kind))
            positions[a] += range(first, first + (form.batch or 1))
    return [sorted(set(x)) for x in positions]


def _rows(places: Sequence[tuple[Kind, Any]], batch: int) -> list[tuple[Kind, int]]:
    """(kind, first row) of what arenas return of some results: a row of each."""
    rows: list[tuple[Kind, int]] = []
    for kind, place in places:
        if isinstance(place, PaddedPlace):
            rows.append((place.kind, place.first))
        elif not isinstance(place, Slice | tuple):
            rows.append((kind, place))
    return rows


def _check_results(form: OutputSpec, placed: Placement, goal: Goal) -> None:
    """The leaves of results are what instances return, in order."""
    graph = placed.graph
    if not form.places or len(graph.output_ptr) - 1 != (form.batch or len(form.places)):
        return  # rows are all that is asked for
    returned = dict(zip(placed.arenas, placed.outputs, strict=True))
    for i, (start, end) in enumerate(zip(graph.output_ptr[:-1], graph.output_ptr[1:], strict=True)):
        places = form.places[0 if form.batch is not None else i]
        plain = _rows(places, form.batch or 1)
        expected = graph.outputs[start:end].tolist()
        require(len(plain) == len(expected), f"instance {i} returns {len(expected)} values")
        for (kind, at), reference in zip(plain, expected, strict=True):
            place = at + i if form.batch is not None else at
            position = int(returned[stored_kind(kind)][place])
            require(goal[position] == goal[reference], f"a result of instance {i} is another value")


# --- rounds ---


class RoundsTrial:
    """The rounds of a call, one after the other, on symbols (see `_control_flow.workspace`)."""

    def __init__(self) -> None:
        self.trial: Trial | None = None

    def run(self, signature: Signature, table: np.ndarray, known: collections.Counter[Any]) -> None:
        """Runs the table of a round."""
        known = collections.Counter(known)
        if self.trial is None:
            self.trial = Trial(signature, Symbols(), None, known)
        else:
            self.trial = self.trial.resumed(signature, known)
        self.trial.run(table, keeps=True)

    def finish(
        self,
        placed: Placement,
        signature: Signature,
        reverse: tuple[ReverseSignature, np.ndarray] | None = None,
        wanted: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Raises unless the rounds ran a plan of the whole, lane for lane, with a valid reverse."""
        assert self.trial is not None
        lowered = lower(placed, signature)
        assert lowered is not None
        whole_trial = Trial(
            signature, self.trial.symbols, Goal.of(placed.graph, self.trial.symbols)
        )
        whole_trial.run(lowered.table, keeps=True)
        outputs = check_returned(whole_trial, placed, lowered.table)
        for k, kernel in enumerate(signature.kernels):
            before = self.trial.signature.kernels.index(kernel)
            symbols = {i: lane.symbol for i, lane in whole_trial.lanes[k].items()}
            its = {i: lane.symbol for i, lane in self.trial.lanes[before].items()}
            require(symbols == its, f"rounds compute other lanes of {kernel.node_type}")
        for kind, references in zip(placed.arenas, wanted or (), strict=False):
            a = signature.arenas.index(kind)
            outputs[a] = [i for i in outputs[a] if references[i]]
        if reverse is not None:
            ReverseTrial(whole_trial, reverse[0]).run((lowered.table, reverse[1]), outputs)
