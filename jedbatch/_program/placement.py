"""`Placement`: a scheduled graph whose values have arenas and rows, and the sizes that it needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import types_in_order, whole_numbers
from jedbatch._graph.paths import ranges
from jedbatch._jaxpr.storage import Kind, kinds_of, row_bytes, stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.target import Target
from jedbatch._layout.access import (
    MIN_IMPROVED_SHARE,
)
from jedbatch._layout.bucketing import NUM_WIDTHS, in_blocks
from jedbatch._layout.layout import Layout, share_rows
from jedbatch._program.capacity import (
    CAPACITY_HEADROOM,
    LARGE_CAPACITY,
    Capacity,
    result_bytes,
    round_up,
)
from jedbatch._program.runs import cut_batches, find_runs, widths_of
from jedbatch._program.widths import LATER_DEVIATIONS, choose_widths, cost
from jedbatch._schedule.schedule import Schedule
from jedbatch._support.types import Dtype

if TYPE_CHECKING:
    from jaxtyping import Int64


HEADROOM_DEVIATIONS = 5.0  # between a minibatch and the largest of many
GROWN_HEADROOM = 1.3  # of lanes that take few bytes, once programs had to grow
SMALL_LANES = 1 << 21  # so few
RARE_SHARE = 1 / 16  # of the bytes of all lanes, or less: a kernel that few nodes have
# How far instances are taken to differ in size, as a part of their mean, before some are seen; and
# how many of those seen count as much.
USUAL_DEVIATION, FEW_INSTANCES = 0.6, 4
NO_VALUE = int(np.iinfo(np.int64).min)  # among outputs: a row that is returned for nobody
NOTHING = np.zeros(0, np.int64)
CHEAP_LANE_BYTES = 1 << 16  # bytes of lanes that every type may have at least
CHEAP_INPUTS, CHEAP_INPUT_BYTES = 64, 1 << 12  # rows of inputs of a kind, and no more than that


@dataclass(frozen=True, eq=False)
class Chunks:
    """The C chunks of a minibatch: each its kernel, width id, first lane, lanes and live lanes."""

    kernel: Int64[np.ndarray, " C"]
    column: Int64[np.ndarray, " C"]
    lane: Int64[np.ndarray, " C"]
    width: Int64[np.ndarray, " C"]
    live: Int64[np.ndarray, " C"]


@dataclass(frozen=True, eq=False)
class Placement:
    """A scheduled graph with everything in its place, ready to be written as tables.

    Attributes:
      kernels: K of them, of the types present, by ascending type id.
      type_ids: their ids.
      arenas: (shape, dtype) of every kind of value.
      input_arena, input_row: int64[I], where each input is.
      outputs: for each arena, what it returns, as in `graph.outputs`, or `NO_VALUE`.
      stacked: whether results are stacked; a program made for them returns just these rows.
      exact: whether no program may return more rows.
      keeps: whether everything is kept that the reverse would read.
      reuse: whether results share rows.
      target: what to make a program for.
      num_inputs: inputs of each arena, if they are more than the graph has, whose nodes count as
        several (see `_session.plans.copies`).
      worth_sharing: bytes of results; for fewer, sharing rows saves less than it takes.
      worth_slicing: the share of a kernel's operands that another reading must improve.
    """

    worth_sharing: ClassVar[int] = 1 << 25
    worth_slicing: ClassVar[float] = MIN_IMPROVED_SHARE

    layout: Layout
    kernels: tuple[Kernel, ...]
    type_ids: tuple[int, ...]
    arenas: tuple[tuple[tuple[int, ...], Dtype], ...]
    input_arena: Int64[np.ndarray, " I"]
    input_row: Int64[np.ndarray, " I"]
    outputs: tuple[Int64[np.ndarray, " _"], ...]
    stacked: bool
    keeps: bool
    reuse: bool
    target: Target
    num_inputs: tuple[int, ...] | None = None
    exact: bool = False

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
        exact: bool = False,
    ) -> Placement:
        """Finds the arena and row of every input; `returned` is what each arena returns.

        Unless it `keeps` everything, results share rows with `reuse`, or, if it is None, where
        that saves much.
        """
        graph = layout.graph
        arenas: dict[Kind, int] = {}
        for kernel in kernels:
            for kind in kernel.kinds:
                arenas.setdefault(kind, len(arenas))
        types, counts = types_in_order(graph.inputs)
        kinds = kinds_of(types)
        for kind in (*kinds, *returned):
            arenas.setdefault(kind, len(arenas))
        input_arena, input_row = _places_of_inputs(
            [arenas[kind] for kind in kinds], counts, len(arenas)
        )
        outputs = tuple(
            [np.array(returned[kind], np.int64) if kind in returned else NOTHING for kind in arenas]
        )
        if keeps:
            reuse = False
        elif reuse is None:
            size = result_bytes(kernels, layout.lanes[list(type_ids)].tolist())
            reuse = size > Placement.worth_sharing
        if reuse:
            arena = np.full(layout.space.shape, -1)
            for type_id, kernel in zip(type_ids, kernels, strict=True):
                arena[type_id, : len(kernel.results)] = [arenas[stored(x)] for x in kernel.results]
            layout = share_rows(layout, arena, len(arenas))
        return Placement(
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
            exact=exact,
        )

    @property
    def graph(self) -> Graph:
        return self.layout.graph

    @property
    def schedule(self) -> Schedule:
        return self.layout.schedule

    @functools.cached_property
    def returned(self) -> dict[Kind, int]:
        """Rows returned from each arena that returns some."""
        pairs = zip(self.arenas, self.outputs, strict=True)
        return {kind: len(values) for kind, values in pairs if len(values)}

    @functools.cached_property
    def lanes(self) -> tuple[int, ...]:
        """Lanes needed for each kernel; weight gradients run over them in whole blocks."""
        lanes = self.layout.lanes[list(self.type_ids)].tolist()
        return tuple([in_blocks(n, k.blocks) for n, k in zip(lanes, self.kernels, strict=True)])

    @property
    def shared_rows(self) -> tuple[int, ...]:
        """Rows that results share, for each arena; nothing if every lane has rows of its own."""
        return tuple(self.layout.rows.tolist()) if self.reuse else ()

    @functools.cached_property
    def nodes(self) -> dict[int, np.ndarray]:
        """The nodes of each type, in order."""
        return {t: np.flatnonzero(self.graph.node_type == t) for t in self.type_ids}

    @functools.cached_property
    def exist(self) -> dict[int, np.ndarray]:
        """bool[operands, nodes] for each type with lists: which operands of its nodes exist."""
        found = {}
        for t, kernel in zip(self.type_ids, self.kernels, strict=True):
            if kernel.lists is not None:
                edges = self.graph.operand_ptr[self.nodes[t]] + kernel.lists.length
                lengths = self._numbers[-1 - self.graph.operand[edges]]
                found[t] = kernel.lists.exist(lengths)
        return found

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        """int64[I], the inputs that are whole numbers of their own; the others are 0."""
        return whole_numbers(self.graph.inputs, self.graph.num_inputs)

    @functools.cached_property
    def widths(self) -> Int64[np.ndarray, "K+1 W"]:
        """int64[K + 1, W], the widths of each kernel (see `widths_of`)."""
        all_buckets = [*(kernel.buckets for kernel in self.kernels), self.target.sums]
        return widths_of(tuple(all_buckets))

    @functools.cached_property
    def runs(self) -> Int64[np.ndarray, "_ 3"]:
        """int64[..., 3], the runs in order; kinds count the kernels of this minibatch."""
        return find_runs(self._kind, self.layout.start, self.layout.trips, self.widths)

    @functools.cached_property
    def _kind(self) -> np.ndarray:
        """The kernel of every batch, by its position."""
        position = [-1] * len(self.graph.types)
        for k, t in enumerate(self.type_ids):
            position[t] = k
        return np.array(position, np.int64)[self.schedule.batch_type]

    @functools.cached_property
    def chunks(self) -> Chunks:
        """All chunks, in the order in which they run."""
        layout, schedule = self.layout, self.schedule
        step, column, lane, _, trips = cut_batches(
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
        widest = self.layout.widest.tolist()
        return tuple([widest[t] for t in self.type_ids])

    @functools.cached_property
    def trips(self) -> np.ndarray:
        """int64[K, W]: the chunks of each width of each kernel."""
        is_own = np.arange(len(self.kernels))[:, None] == self._kind
        return is_own @ self.layout.trips.astype(np.int64)

    @functools.cached_property
    def cost(self) -> float:
        """The cost of its chunks, in floating-point operations (see `_program.widths`)."""
        return cost(self.target, self.kernels, self.trips)

    def _larger_trips(self) -> np.ndarray:
        """int64[K, W]: the chunks of each width of each kernel, were all batches larger."""
        sizes = np.ceil(np.diff(self.schedule.node_ptr) * self.headroom(LATER_DEVIATIONS))
        trips = np.zeros((len(self.kernels), NUM_WIDTHS), np.int64)
        for k, kernel in enumerate(self.kernels):
            covers = kernel.buckets.cover(sizes[self._kind == k].astype(np.int64))
            trips[k, : len(kernel.buckets.widths)] = covers.sum(axis=0)
        return trips

    def narrowed(self, widest: tuple[int, ...]) -> Placement:
        """Returns the same, chunks cut where they are wider than the first widths of each kernel.

        Args:
          widest: how many widths of each kernel there are.
        """
        if all(own <= n for own, n in zip(self.widest, widest, strict=True)):
            return self
        if widest not in self._narrowed:
            trips = self.layout.trips.copy()
            for k, (kernel, n) in enumerate(zip(self.kernels, widest, strict=True)):
                if self.widest[k] > n:
                    batches = self._kind == k
                    own = trips[batches, : len(kernel.buckets.widths)]
                    trips[batches, : own.shape[1]] = kernel.buckets.narrowed(own, n)
            layout = replace(self.layout, trips=trips)
            self._narrowed[widest] = replace(self, layout=layout)
        return self._narrowed[widest]

    @functools.cached_property
    def _narrowed(self) -> dict[tuple[int, ...], Placement]:
        return {}

    @functools.cached_property
    def deviation(self) -> float:
        """How far instances differ in size, as a part of their mean."""
        sizes = np.diff(self.graph.node_ptr) / max(1.0, len(self.graph.node_type))
        squares = np.square(sizes * len(sizes) - 1).sum()
        weight = FEW_INSTANCES + len(sizes)
        return math.sqrt((FEW_INSTANCES * USUAL_DEVIATION**2 + float(squares)) / weight)

    def with_headroom(self, need: int, row_bytes: int = 0) -> int:
        """Returns the size that minibatches like this one will need, of rows of so many bytes.

        What a minibatch needs is a sum over its instances, and varies the less the more they are.
        """
        headroom = self.headroom(HEADROOM_DEVIATIONS, need)
        return round_up(need * max(CAPACITY_HEADROOM, headroom), row_bytes)

    def headroom(self, deviations: float, need: int = 0) -> float:
        """Returns how many times as much others need as this one, by some deviations."""
        instances = max(self.graph.num_instances, need / LARGE_CAPACITY)
        return 1 + deviations * self.deviation / math.sqrt(instances)

    @functools.cached_property
    def need(self) -> Capacity:
        """The sizes that a program must have to run this minibatch.

        With a switch, how many instructions there are depends on the program.
        """
        returned = zip(self.arenas, self.outputs, strict=True)
        num_instructions = len(self.runs) if self.target.control == "loops" else 0
        return Capacity(
            {
                "lanes": dict(zip(self.kernels, self.lanes, strict=True)),
                "widest": dict(zip(self.kernels, self.widest, strict=True)),
                "inputs": dict(zip(self.arenas, self.input_counts, strict=True)),
                "outputs": {kind: len(values) for kind, values in returned},
                "shared_rows": dict(zip(self.arenas, self.shared_rows, strict=False)),
                "num_instructions": {None: num_instructions},
            }
        )

    @functools.cached_property
    def ample(self) -> Capacity:
        """The sizes that are needed, with headroom."""
        return self._ample(grown=False)

    @functools.cached_property
    def more_ample(self) -> Capacity:
        """The same where programs had to grow: more of the types of which there are few."""
        return self._ample(grown=True)

    def _ample(self, *, grown: bool) -> Capacity:
        """Returns sizes with headroom."""
        lanes, widest = {}, {}
        larger_trips = self._larger_trips()
        all_widest = choose_widths(self.target, self.kernels, self.trips, larger_trips, grown)
        all_bytes = [k.result_bytes + k.cotangent_bytes for k in self.kernels]  # training may come
        total = sum(n * b for n, b in zip(self.lanes, all_bytes, strict=True))
        each = zip(self.kernels, self.lanes, all_bytes, all_widest, self.trips, strict=True)
        for kernel, need, lane_bytes, num_widths, trips in each:
            widest[kernel] = num_widths
            widths = kernel.buckets.widths
            cheap = min(CHEAP_LANE_BYTES // max(1, lane_bytes), 2 * widths[-1])
            is_small = need * lane_bytes <= SMALL_LANES
            least = round_up(GROWN_HEADROOM * need) if grown and is_small else 0
            # Of kernels that few nodes have, it is chunks that there are more or fewer of.
            is_rare = need * lane_bytes <= RARE_SHARE * total
            drawn = need / max(1, int(trips.sum())) if is_rare else 1  # lanes at a time
            by_chance = math.ceil(need + HEADROOM_DEVIATIONS * math.sqrt(need * drawn))
            ample = self.with_headroom(need, row_bytes=lane_bytes)
            ample = max(ample, round_up(by_chance, lane_bytes))
            lanes[kernel] = max(ample, widths[num_widths - 1], cheap, least)
        needed = self.need.sizes
        larger = {
            name: {
                kind: self.with_headroom(n, row_bytes=row_bytes(kind))
                for kind, n in needed[name].items()
            }
            for name in ("inputs", "outputs", "shared_rows")
        }
        for kind, n in needed["inputs"].items():
            cheap = min(CHEAP_INPUTS, CHEAP_INPUT_BYTES // max(1, row_bytes(kind)))
            larger["inputs"][kind] = max(larger["inputs"][kind], cheap if n else 0)
        if self.stacked:
            larger["outputs"] = dict(needed["outputs"])
        instructions = {"num_instructions": {None: 0}}  # known once there are bodies
        return Capacity({"lanes": lanes, "widest": widest, **larger, **instructions})

    @functools.cached_property
    def input_counts(self) -> tuple[int, ...]:
        if self.num_inputs is not None:
            return self.num_inputs
        return tuple(np.bincount(self.input_arena, minlength=len(self.arenas)).tolist())


def _places_of_inputs(
    arena: Sequence[int], counts: Sequence[int], num_arenas: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64[I], int64[I]): the arena and the row of every input.

    Args:
      arena: of each chunk of inputs.
      counts: inputs in each.
      num_arenas: how many there are.
    """
    if len(arena) == 1:
        return np.full(counts[0], arena[0]), np.arange(counts[0])
    first, ends = [], [0] * num_arenas
    for a, count in zip(arena, counts, strict=True):
        first.append(ends[a])
        ends[a] += count
    num_inputs = np.array(counts, np.int64)
    row = ranges(np.array(first, np.int64), num_inputs)
    return np.repeat(np.array(arena, np.int64), num_inputs), row
