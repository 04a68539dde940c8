"""What runs before a graph: the calls of its regions (see `_ragged.regions`), all of one region
together.

The host packs what the calls read and says in a table where each call begins; the device runs the
regions and writes their results into the rows of inputs from which the graph reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._graph.record import Record
from jedbatch._jaxpr.storage import from_stored, stored
from jedbatch._jaxpr.symbolic_dims import extent_at, is_ragged, ragged_axes, shape_at
from jedbatch._kernel.target import Target
from jedbatch._program.host_arrays import rows_of_inputs
from jedbatch._program.lower import Placed, Signature, capacity
from jedbatch._program.plan import Slice, input_name
from jedbatch._ragged.groups import PAIRS, find_groups, longest_slot, pairs_in, slots_of
from jedbatch._ragged.packing import RowCapacity
from jedbatch._ragged.regions import Call, RaggedRecord, Region

HEADROOM = 1.1  # least room for rows over those there are
LONGER = 2  # a new program has room for arrays so many times as long as there are
SLACK = 4  # room is used for minibatches down to a quarter of it


@dataclass(frozen=True)
class Stage:
    """A region and what it is compiled for."""

    region: Region
    room: RowCapacity

    def operand_name(self, k: int) -> str:
        """The name of an operand among a plan's inputs."""
        kind = self.region.operands[k]
        return f"region {self.region.id}, operand {k}: {kind}"


@dataclass(frozen=True, eq=False)
class RaggedCalls:
    """The calls of a minibatch.

    Attributes:
      stages: regions, in the order of their ids.
      tables: of each region, see `PackedProgram.table`.
      targets: for each region and each of its results that are not ragged, int32[K]: the row of
        its arena's inputs for every call; beyond them, where there is no call.
      operands: what is read, by name.
      counts: (rows that exist, rows computed) of row phases.
    """

    stages: tuple[Stage, ...]
    tables: tuple[np.ndarray, ...]
    targets: tuple[tuple[np.ndarray, ...], ...]
    operands: dict[str, Any]
    counts: tuple[int, int]

    @property
    def lines(self) -> list[str]:
        """What it is, for people."""
        found = []
        for stage, table in zip(self.stages, self.tables, strict=True):
            packed = stage.region.packed
            form = packed.form(stage.room)
            calls = int(form.view(table, "calls")[0])
            rows = sum(int(form.view(table, "total", e)[0]) for e in range(len(packed.extents)))
            phases = packed.phased.phases
            over_rows = sum(phase.extent is not None for phase in phases)
            found.append(
                f"  ragged    {calls} calls with {rows:,} rows: {over_rows} phases over rows, "
                f"{len(phases) - over_rows} over instances"
            )
        exist, computed = self.counts
        more = f", {computed / exist - 1:.1%} more than there are" if exist else ""
        return [*found, f"            {computed:,} rows computed{more}"]


@dataclass(frozen=True, eq=False)
class RegionCalls:
    """All calls of one region in a minibatch.

    Attributes:
      region: what is called.
      places: (instance, number among its calls) of each.
      calls: the calls.
      lengths: int64[K] for every symbol.
      counts: int64[K] for every extent of the region: rows of each call.
    """

    region: Region
    places: list[tuple[int, int]]
    calls: list[Call]
    lengths: dict[str, np.ndarray]
    counts: list[np.ndarray]


def find_calls(records: Sequence[Record], arrays: Sequence[Sequence[Any]]) -> list[RegionCalls]:
    """The calls of a minibatch by region.

    Raises `ValueError` if an instance has no rows of which something is taken that needs some.
    """
    grouped: dict[Region, list[tuple[int, int]]] = {}
    for i, record in enumerate(records):
        if isinstance(record, RaggedRecord):
            for c, call in enumerate(record.calls):
                grouped.setdefault(call.region, []).append((i, c))
    found = []
    for region, places in sorted(grouped.items(), key=lambda item: item[0].id):
        calls = [records[i].calls[c] for i, c in places]  # type: ignore[attr-defined]
        mine = [c.lengths(arrays[i]) for c, (i, _) in zip(calls, places, strict=True)]
        lengths = dict(zip(region.symbols, np.array(mine, np.int64).T, strict=True))
        _refuse_empty(region, lengths, places)
        found.append(RegionCalls(region, places, calls, lengths, region.packed.row_counts(lengths)))
    return found


def find_slices(calls: Sequence[RegionCalls], records: Sequence[Record]) -> list[dict[int, Slice]]:
    """For each instance where its ragged results are, by position among its results."""
    found: list[dict[int, Slice]] = [{} for _ in records]
    for stage, mine in enumerate(calls):
        starts = [np.cumsum(c) - c for c in mine.counts]
        for k, (i, c) in enumerate(mine.places):
            for position, call, result in records[i].ragged:  # type: ignore[attr-defined]
                if call != c:
                    continue
                shape = mine.region.results[result].shape
                (axis,) = ragged_axes(shape)
                e = mine.region.packed.extents.index(shape[axis])
                here = {s: int(x[k]) for s, x in mine.lengths.items()}
                concrete = tuple(max(0, n) for n in shape_at(shape, here))
                found[i][position] = Slice(stage, result, int(starts[e][k]), concrete, axis)
    return found


def find_capacity(
    calls: RegionCalls, rooms: Sequence[RowCapacity], target: Target
) -> tuple[RowCapacity, bool]:
    """(what to compile a region for, whether it is new); `rooms` are those compiled already."""
    widest = target.blocks.widths[-1]
    count = len(calls.calls)
    rows = [int(n.sum()) for n in calls.counts]
    longest = np.max(list(calls.lengths.values()), axis=0)
    most = int(longest.max())
    guarded = any(bool((x == 0).any()) for x in calls.lengths.values())
    for room in rooms:
        enough = count <= room.calls and most <= room.longest and guarded <= room.guarded
        fits = all(a <= b for a, b in zip(rows, room.rows, strict=True))
        small = _near(rows, room, widest) and room.calls <= max(64, SLACK * count)
        slots = not room.slots or slots_of(longest, room.groups) is not None
        if enough and fits and small and slots:
            return room, False
    straight = _straight_capacity(count, rows, longest, guarded, rooms, target)
    if straight is not None:
        return straight, True
    needed = [-(-capacity(n * HEADROOM) // widest) * widest for n in rows]
    reach = target.shortest
    if rooms and not rooms[-1].slots:
        reach = rooms[-1].longest
        if _near(needed, rooms[-1], widest):
            needed = list(map(max, needed, rooms[-1].rows))
    grown = rooms and not rooms[-1].slots
    while reach < LONGER * most and not (grown and most <= reach):
        reach *= 2
    steps = (reach // target.shortest).bit_length()
    lengths = tuple(target.shortest << i for i in range(steps))
    return RowCapacity(capacity(count), tuple(needed), lengths, guarded, target), True


def _straight_capacity(
    count: int,
    rows: Sequence[int],
    longest: np.ndarray,
    guarded: bool,
    rooms: Sequence[RowCapacity],
    target: Target,
) -> RowCapacity | None:
    """Room for calls that run without loops; None if that would be too much at once."""
    unit = target.blocks.widths[0]
    needed = [-(-capacity(n * HEADROOM) // unit) * unit for n in rows]
    reach = longest_slot(int(longest.max()))
    if rooms and rooms[-1].slots:
        last = rooms[-1]
        if longest.max() <= last.longest <= LONGER * longest.max():
            reach = last.longest
        if _near(needed, last, unit):
            needed = list(map(max, needed, last.rows))
    groups = find_groups(longest, reach)
    if max((*needed, pairs_in(groups) // PAIRS)) > target.straight_rows:
        return None
    lengths, slots = groups
    return RowCapacity(capacity(count), tuple(needed), lengths, guarded, target, slots)


def _near(rows: Sequence[int], room: RowCapacity, widest: int) -> bool:
    """Whether a room is not much too large for so many rows, in blocks of up to `widest`."""
    return all(b <= SLACK * max(widest, a) for a, b in zip(rows, room.rows, strict=True))


def make_ragged_calls(
    stages: Sequence[Stage],
    calls: Sequence[RegionCalls],
    records: Sequence[Record],
    arrays: Sequence[Sequence[Any]],
    placed: Placed,
    signature: Signature,
) -> RaggedCalls:
    """The calls of a minibatch, ready to run.

    Args:
      stages: what the calls of each region are compiled for.
      calls: of each region.
      records: of each instance.
      arrays: of each instance.
      placed: the graph that reads the results.
      signature: of its program.
    """
    rows = _targets(records, placed)
    operands: dict[str, Any] = {}
    exist = computed = 0
    for stage, mine in zip(stages, calls, strict=True):
        packed = mine.region.packed
        for e, extent in enumerate(packed.extents):
            if any(phase.extent == extent for phase in packed.phased.phases):
                total = int(mine.counts[e].sum())
                exist += total
                blocks = stage.room.target.blocks
                covered = int(blocks.lanes(blocks.cover(np.array([total]))[0]))
                computed += stage.room.rows[e] if stage.room.slots else covered
        for k, kind in enumerate(mine.region.operands):
            values = [
                rows_of_inputs(call.operands[k], arrays[i], i)[0]
                for call, (i, _) in zip(mine.calls, mine.places, strict=True)
            ]
            operands[stage.operand_name(k)] = _packed(kind, values, packed, stage.room)
    return RaggedCalls(
        tuple(stages),
        tuple(c.region.packed.table(s.room, c.lengths) for s, c in zip(stages, calls, strict=True)),
        tuple(_columns(s, c, rows, signature) for s, c in zip(stages, calls, strict=True)),
        operands,
        (exist, computed),
    )


def _refuse_empty(
    region: Region, lengths: Mapping[str, np.ndarray], places: Sequence[tuple[int, int]]
) -> None:
    phased = region.packed.phased
    none = np.zeros(len(places), bool)
    for x in lengths.values():
        none |= x == 0
    needed = [(e, what, extent_at(e, lengths) == 0) for e, what in phased.nonempty]
    needed += [(e, "a part", extent_at(e, lengths) < 0) for e in phased.all_extents]
    for extent, what, fails in needed:
        empty = np.flatnonzero(none & fails)
        if len(empty):
            raise ValueError(
                f"instance {places[empty[0]][0]} has an array of length 0, and the function takes "
                f"{what} of {extent} rows; expected at least one. Leave such instances out, or "
                "write what there is instead: `x.sum(0) / jnp.maximum(x.shape[0], 1)`, "
                "`x.max(0, initial=0.0)`."
            )


def _targets(records: Sequence[Record], placed: Placed) -> dict[tuple[int, int, int], int]:
    """The row of inputs for each (instance, call, result) that the graph reads."""
    found = {}
    position = 0
    for i, record in enumerate(records):
        own = record.whole.chunks[record.index]
        if not isinstance(record, RaggedRecord):
            position += sum(map(len, own))
            continue
        for chunk in own:
            k = -1 if chunk.leaf is None else chunk.leaf - record.num_arrays
            if k >= 0:
                found[(i, *record.places[k])] = int(placed.input_row[position])
            position += len(chunk)
    return found


def _columns(
    stage: Stage, calls: RegionCalls, targets: Mapping[tuple, int], signature: Signature
) -> tuple[np.ndarray, ...]:
    """For each result that is not ragged, the row of every call."""
    columns = []
    for k, kind in enumerate(calls.region.results):
        if not is_ragged(kind.shape):
            beyond = signature.inputs[signature.arena(kind)]
            rows = np.full(stage.room.calls, beyond, np.int32)
            rows[: len(calls.places)] = [targets.get((*p, k), beyond) for p in calls.places]
            columns.append(rows)
    return tuple(columns)


def _packed(kind: Any, values: Sequence[Any], packed: Any, room: RowCapacity) -> Any:
    """What calls read as one array: [R, ...] if ragged, or [K, ...].

    Behind it, rows repeat the last one, if there is any, where they are not cut into blocks.
    """
    mode = "constant"
    xp = jnp if any(isinstance(x, Tracer) for x in values) else np
    if is_ragged(kind.shape):
        rows = xp.concatenate([xp.asarray(x, kind.dtype) for x in values])
        missing = room.rows[packed.extents.index(kind.shape[0])] - len(rows)
        if room.blocks is None and len(rows):
            mode = "edge"
    else:
        rows = xp.stack([xp.asarray(x, stored(kind)[1]) for x in values])
        missing = room.calls - len(rows)
    return xp.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)], mode=mode)


def run_regions(
    stages: Sequence[Stage],
    shared: Sequence[Sequence[Any]],
    tables: Sequence[Any],
    targets: Sequence[Sequence[Any]],
    inputs: Mapping[str, Any],
) -> tuple[dict[str, Any], list[list[Any]]]:
    """(inputs of the graph, for every region its results: packed rows; None for those of calls).

    Args:
      stages: what to run.
      shared: of each region, the values it shares.
      tables: see `RaggedCalls`.
      targets: see `RaggedCalls`.
      inputs: of the plan, operands of regions among them.
    """
    found = dict(inputs)
    results: list[list[Any]] = []
    for stage, values, table, columns in zip(stages, shared, tables, targets, strict=True):
        region = stage.region
        names = [stage.operand_name(k) for k in range(len(region.operands))]
        operands = [
            from_stored(jnp.asarray(found.pop(name)), kind)
            for name, kind in zip(names, region.operands, strict=True)
        ]
        made = region.packed.run(stage.room, values, operands, table)
        results.append([])
        targets_left = iter(columns)
        for kind, x in zip(region.results, made, strict=True):
            results[-1].append(x if is_ragged(kind.shape) else None)
            if is_ragged(kind.shape):
                continue
            rows, name = next(targets_left), input_name(stored(kind))
            if len(found[name]):
                arena = jnp.asarray(found[name])
                found[name] = arena.at[rows].set(x.astype(arena.dtype), mode="drop")
    return found, results
