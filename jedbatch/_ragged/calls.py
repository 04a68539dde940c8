"""Calls of regions (see `_ragged.regions`), which run before a graph, all of one region together.

The host packs what the calls read and says in a table where each call begins; the device runs the
regions and writes their results into the rows of inputs from which the graph reads them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jedbatch._graph.record import Record
from jedbatch._jaxpr.storage import from_stored, stored
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes, shape_at
from jedbatch._program.host_arrays import pack_rows, rows_of_inputs
from jedbatch._program.output_spec import PaddedPlace, Slice
from jedbatch._program.placement import Placement
from jedbatch._program.plan import input_name
from jedbatch._program.signature import Signature
from jedbatch._ragged.microbatches import Microbatches, distributed, places_of_calls
from jedbatch._ragged.packing import RowCapacity
from jedbatch._ragged.padded_records import AnyLengthRecord, PaddedRecord
from jedbatch._ragged.regions import Call, RaggedRecord, Region, some_are_ragged
from jedbatch._support.types import Array

Targets = Mapping[tuple[int, int, int], int]


@dataclass(frozen=True)
class Stage:
    """A region and the capacity that it is compiled for."""

    region: Region
    capacity: RowCapacity


@dataclass(frozen=True, eq=False)
class RaggedCalls:
    """The calls of a minibatch.

    Attributes:
      stages: regions, in the order of their ids.
      tables: of each region, see `PackedProgram.table`.
      targets: for each region and each of its results that are not ragged, int32[K], or of all
        microbatches: the row of its arena's inputs for every call; beyond them, where there is no
        call.
      operands: arrays that the regions read, by name.
      counts: (rows that exist, rows computed) of row phases.
    """

    stages: tuple[Stage, ...]
    tables: tuple[np.ndarray, ...]
    targets: tuple[tuple[np.ndarray, ...], ...]
    operands: dict[str, Any]
    counts: tuple[int, int]

    @property
    def lines(self) -> list[str]:
        """Lines of a printed plan."""
        lines = []
        for stage, table in zip(self.stages, self.tables, strict=True):
            packed, capacity = stage.region.packed, stage.capacity
            form, tables = packed.form(capacity.of_one), packed.tables_of_each(capacity, table)
            calls = sum(int(form.view(own, "calls")[0]) for own in tables)
            extents = range(len(packed.extents))
            rows = sum(int(form.view(own, "total", e)[0]) for own in tables for e in extents)
            phases = packed.phased.phases
            over_rows = sum(phase.extent is not None for phase in phases)
            by_index = sum(bool(phase.indexed) for phase in phases)
            lines.append(
                f"  ragged    {calls} calls with {rows:,} rows"
                + (f" in {len(tables)} microbatches" if capacity.microbatches > 1 else "")
                + f": {over_rows} phases over rows, "
                f"{len(phases) - over_rows - by_index} over instances"
                + (f", {by_index} by index" if by_index else "")
            )
        exist, computed = self.counts
        more = f", {computed / exist - 1:.1%} more than there are" if exist else ""
        return [*lines, f"            {computed:,} rows computed{more}"]


@dataclass(frozen=True, eq=False)
class RegionCalls:
    """All calls of one region in a minibatch.

    Attributes:
      region: that is called.
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

    @functools.cached_property
    def rows(self) -> list[int]:
        """The rows of each extent."""
        return [int(n.sum()) for n in self.counts]

    @functools.cached_property
    def longest(self) -> np.ndarray:
        """int64[K], the greatest length of each call, see `PackedProgram.longest`."""
        return self.region.packed.longest(self.lengths)

    @functools.cached_property
    def table_of_counts(self) -> np.ndarray:
        """int64[E, K]: the rows of every extent and call."""
        return np.array(self.counts, np.int64).reshape(len(self.counts), len(self.calls))

    def microbatches(self, capacity: RowCapacity) -> Microbatches | None:
        """Returns the calls of each microbatch; None if there are more than there is room for."""
        if capacity.microbatches == 1:
            return (np.arange(len(self.calls)),)
        if capacity not in self._microbatches:
            self._microbatches[capacity] = distributed(
                self.table_of_counts,
                self.longest,
                capacity.rows,
                capacity.calls,
                capacity.groups,
                capacity.microbatches,
            )
        return self._microbatches[capacity]

    @functools.cached_property
    def _microbatches(self) -> dict[RowCapacity, Microbatches | None]:
        return {}

    @functools.cached_property
    def guarded(self) -> bool:
        """Returns whether some length is 0 that phases over instances know."""
        return any(not self.lengths[s].all() for s in self.region.packed.phased.padded)


def find_calls(records: Sequence[Record], arrays: Sequence[Sequence[Array]]) -> list[RegionCalls]:
    """Returns the calls of a minibatch by region.

    Raises `ValueError` if an instance has no rows of which something is taken that needs some.
    """
    if not some_are_ragged(records):
        return []
    grouped: dict[Region, list[tuple[int, int]]] = {}
    for i, record in enumerate(records):
        if isinstance(record, RaggedRecord):
            for c, call in enumerate(record.calls):
                grouped.setdefault(call.region, []).append((i, c))
    all_calls = []
    for region, places in sorted(grouped.items(), key=lambda item: item[0].id):
        calls = [records[i].calls[c] for i, c in places]  # type: ignore[attr-defined]
        symbol_values = [c.lengths(arrays[i]) for c, (i, _) in zip(calls, places, strict=True)]
        lengths = dict(zip(region.symbols, np.array(symbol_values, np.int64).T, strict=True))
        instances = [i for i, _ in places]
        region.packed.phased.needed.refuse_lacking(lengths, instances, arrays)
        all_calls.append(
            RegionCalls(region, places, calls, lengths, region.packed.row_counts(lengths))
        )
    return all_calls


def lacks_rows(record: Record, arrays: Sequence[Array]) -> bool:
    """Returns whether an instance has fewer rows than what it computes needs."""
    if not isinstance(record, RaggedRecord):
        return False
    if isinstance(record, AnyLengthRecord) and record.lacks_rows(record.lengths(arrays)):
        return True
    for call in record.calls:
        phased = call.region.packed.phased
        if phased.needed.lacking(dict(zip(phased.symbols, call.lengths(arrays), strict=True))):
            return True
    return False


def find_slices(
    calls: Sequence[RegionCalls], records: Sequence[Record]
) -> list[dict[int, Slice | PaddedPlace]]:
    """Returns for each instance where its ragged results are, by position among results."""
    if not some_are_ragged(records):
        return [{}] * len(records)
    slices: list[dict[int, Slice | PaddedPlace]] = [
        dict(record.padded) if isinstance(record, PaddedRecord) else {} for record in records
    ]
    for stage, region_calls in enumerate(calls):
        starts = [np.cumsum(c) - c for c in region_calls.counts]
        for k, (i, c) in enumerate(region_calls.places):
            for position, call, result in records[i].ragged:  # type: ignore[attr-defined]
                if call != c:
                    continue
                region = region_calls.region
                (extent,) = (d for d in region.results[result].shape if is_ragged((d,)))
                e = region.packed.extents.index(extent)
                shape = region.shapes[result]
                symbol_values = {s: int(x[k]) for s, x in region_calls.lengths.items()}
                concrete = tuple(max(0, n) for n in shape_at(shape, symbol_values))
                start = int(starts[e][k])
                slices[i][position] = Slice(stage, result, start, concrete, ragged_axes(shape))
    return slices


def make_ragged_calls(
    stages: Sequence[Stage],
    calls: Sequence[RegionCalls],
    arrays: Sequence[Sequence[Array]],
    targets: Targets,
    signature: Signature,
) -> RaggedCalls:
    """Returns the calls of a minibatch, ready to run.

    Args:
      stages: regions, and the capacities for their calls.
      calls: of each region.
      arrays: of each instance.
      targets: where the graph reads the results.
      signature: of its program.
    """
    operands: dict[str, Any] = {}
    tables, columns = [], []
    exist = computed = 0
    for stage, region_calls in zip(stages, calls, strict=True):
        region, microbatches = region_calls.region, region_calls.microbatches(stage.capacity)
        assert microbatches is not None  # the stage has been chosen for the calls
        for e in region.packed.row_wise:
            exist += region_calls.rows[e]
            computed += stage.capacity.computed(e, region_calls.rows[e], len(microbatches))
        for k, name in enumerate(region.operand_names):
            values = [
                rows_of_inputs(call.operands[k], arrays[i], i)[0]
                for call, (i, _) in zip(region_calls.calls, region_calls.places, strict=True)
            ]
            operands[name] = _packed(region, k, values, stage.capacity, microbatches)
        tables.append(
            region.packed.table(
                stage.capacity, region_calls.lengths, region_calls.counts, microbatches
            )
        )
        columns.append(_columns(stage, region_calls, microbatches, targets, signature))
    return RaggedCalls(
        tuple(stages),
        tuple(tables),
        tuple(columns),
        operands,
        (exist, computed),
    )


def returns_ragged(record: Record) -> bool:
    """Returns whether results of an instance have ragged axes: how long they are is in its plan."""
    return isinstance(record, RaggedRecord) and bool(record.ragged)


def find_targets(records: Sequence[Record], placed: Placement) -> Targets:
    """Returns the row of inputs for each (instance, call, result) that the graph reads."""
    targets: dict[tuple[int, int, int], int] = {}
    if not some_are_ragged(records):
        return targets
    position = 0
    for i, record in enumerate(records):
        own_inputs = record.whole.chunks[record.index]
        if not isinstance(record, RaggedRecord):
            position += sum(map(len, own_inputs))
            continue
        for chunk in own_inputs:
            k = -1 if chunk.leaf is None else chunk.leaf - record.num_arrays
            if k >= 0:
                targets[(i, *record.places[k])] = int(placed.input_row[position])
            position += len(chunk)
    return targets


def _columns(
    stage: Stage,
    calls: RegionCalls,
    microbatches: Microbatches,
    targets: Targets,
    signature: Signature,
) -> tuple[np.ndarray, ...]:
    """Returns for each result that is not ragged the row of every call."""
    columns, capacity = [], stage.capacity
    places = places_of_calls(microbatches, capacity.calls)
    for k, kind in enumerate(calls.region.results):
        if not is_ragged(kind.shape):
            beyond = signature.inputs[signature.arena(kind)]
            rows = np.full(capacity.microbatches * capacity.calls, beyond, np.int32)
            rows[places] = [targets.get((*p, k), beyond) for p in calls.places]
            columns.append(rows)
    return tuple(columns)


def _packed(
    region: Region,
    k: int,
    values: Sequence[Array],
    capacity: RowCapacity,
    microbatches: Microbatches,
) -> Any:
    """Returns operand `k` of all calls as one array: [R, ...] if ragged, or [K, ...].

    Of several microbatches, the rows of each follow those of the one before.
    """
    if capacity.microbatches > 1:
        one = capacity.of_one
        parts = [
            _packed(region, k, [values[c] for c in calls], one, (calls,)) for calls in microbatches
        ]
        length = len(parts[0]) * capacity.microbatches
        kind = parts[0].shape[1:], parts[0].dtype
        return pack_rows(kind, parts, length)
    value_type, e = region.operands[k], region.operand_extents[k]
    if e is None:
        return pack_rows(stored(value_type), [x[None] for x in values], capacity.calls)
    kind = value_type.shape[1:], value_type.dtype
    return pack_rows(kind, values, capacity.rows[e])


def run_regions(
    stages: Sequence[Stage],
    shared: Sequence[Sequence[Any]],
    tables: Sequence[Any],
    targets: Sequence[Sequence[Any]],
    inputs: Mapping[str, Any],
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Returns (inputs of the graph, results of every region: packed rows; None if not ragged).

    Args:
      stages: to run.
      shared: of each region, the values it shares.
      tables: see `RaggedCalls`.
      targets: see `RaggedCalls`.
      inputs: of the plan, operands of regions among them.
    """
    graph_inputs = dict(inputs)
    results: list[list[Any]] = []
    for stage, values, table, columns in zip(stages, shared, tables, targets, strict=True):
        region = stage.region
        operands = [
            from_stored(jnp.asarray(graph_inputs.pop(name)), kind)
            for name, kind in zip(region.operand_names, region.operands, strict=True)
        ]
        values_returned = region.packed.run(stage.capacity, values, operands, table)
        results.append([])
        columns_left = iter(columns)
        for kind, x in zip(region.results, values_returned, strict=True):
            results[-1].append(x if is_ragged(kind.shape) else None)
            if is_ragged(kind.shape):
                continue
            rows, name = next(columns_left), input_name(stored(kind))
            if len(graph_inputs[name]):
                arena = jnp.asarray(graph_inputs[name])
                graph_inputs[name] = arena.at[rows].set(x.astype(arena.dtype), mode="drop")
    return graph_inputs, results
