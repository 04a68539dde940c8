"""Lanes that go on where they were: a machine of program counters, run in segments.

Instances come one minibatch after the other, and the last lanes of a minibatch would run alone. In
a segment those that were left by the segment before run together with those that come; as soon as
few are left, so few that steps would no longer be full, they are left where they are, and the
segment ends. Their registers, and the block that each is at, are what the next one begins with. So
nobody waits for a lane that takes long as long as others come, and no step runs places without a
lane.

A segment has N = K + B lanes: first the K places of lanes that were left, then the B places of
those that come. K is how many lanes fill a step of each block, and B at most: fewer would be left
only where steps are not full, and more need not be kept.

A lane that is left many times could keep others from being used that come after it. So there are
lanes that have to end: those that came in an early segment.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._jaxpr.program_counters import (
    LaneRule,
    Leave,
    Registers,
    cut_for,
    kind_of,
    lane_blocks,
    results_in,
    run_alone,
    touches,
    until_last,
)
from jedbatch._jaxpr.registers import BlockProgram, Slot
from jedbatch._jaxpr.storage import Kind, stored, to_stored
from jedbatch._support.types import Array

NOBODY = -1  # the segment in which the lane at a place came that has none


class LeftLanes(NamedTuple):
    """Lanes that were left, at `K` places.

    Attributes:
      registers: [K, ...] each, of those that are read after the first block.
      at: int32[K], the block that each is at.
      since: int32[K], the number of the segment in which it came, `NOBODY` where there is none.
    """

    registers: list[Array]
    at: Array
    since: Array


class Segment(NamedTuple):
    """The result of a segment.

    Attributes:
      results: [K + B, ...] each, of lanes that are at the end.
      at_end: bool[K + B], which of them are.
      left: int32[K], the place of each lane that is left, ascending; K + B where there is none.
      lanes: what is left.
    """

    results: list[Array]
    at_end: Array
    left: Array
    lanes: LeftLanes


class Coming(NamedTuple):
    """Instructions for a segment.

    Attributes:
      count: int32[], how many lanes come.
      number: int32[], of the segment.
      few: int32[], how many lanes may be left, K at most.
      oldest: int32[], the first segment whose lanes need not come to the end.
    """

    count: Array
    number: Array
    few: Array
    oldest: Array


class SegmentShape(NamedTuple):
    """The shape of the segments of a program.

    Attributes:
      coming: B, the lanes that come at most.
      left: K, those that are left at most.
      registers: shape and dtype of what is kept of each lane that is left.
      blocks: at which lanes may wait.
    """

    coming: int
    left: int
    registers: tuple[Kind, ...]
    blocks: int

    def nobody(self) -> LeftLanes:
        """Returns what the first segment begins with."""
        rows = [np.zeros((self.left, *shape), dtype) for shape, dtype in self.registers]
        none = np.full(self.left, NOBODY, np.int32)
        return LeftLanes(rows, np.zeros(self.left, np.int32), none)


def segment_shape(
    program: Any, args: Sequence[Any], in_batched: Sequence[bool], coming: int, step_work: float
) -> SegmentShape | None:
    """Returns the shape of segments; None if there is no loop, so that no lane is ever left.

    Args:
      program: a closed program of one lane.
      args: shapes and dtypes [N, ...] of lanes, for any N, or of all lanes.
      in_batched: which of these they are.
      coming: how many lanes come at most.
      step_work: what a step costs (see `LaneRule`).
    """
    found: list[SegmentShape | None] = []

    def find(*args: Array) -> None:
        blocks = cut_for(program, args, in_batched)
        runs_again = any(block.number >= min(block.targets) for block in blocks.blocks[1:-1])
        found.append(_shape_of(blocks, coming, step_work) if runs_again else None)

    jax.eval_shape(find, *args)
    return found[0]


def _shape_of(blocks: BlockProgram, coming: int, step_work: float) -> SegmentShape:
    filling = lane_blocks(blocks, 2 * coming, step_work).filling
    kept = tuple(stored(kind_of(x)) for x in _kept(blocks))
    return SegmentShape(coming, min(coming, int(filling.sum())), kept, len(filling))


def run_segment(
    program: Any,
    args: Sequence[Array],
    in_batched: Sequence[bool],
    before: LeftLanes,
    told: Coming,
    rule: LaneRule,
) -> Segment:
    """Runs lanes that come, and lanes that were left, until few are left.

    Args:
      program: a closed program of one lane.
      args: arrays [B, ...] of the lanes that come, or of all lanes; rows from `told.count` on are
        those of other lanes.
      in_batched: which of these they are.
      before: lanes that were left.
      told: what the segment is told.
      rule: how they run.
    """
    blocks = cut_for(program, args, in_batched)
    coming = next(len(x) for x, batched in zip(args, in_batched, strict=True) if batched)
    registers = _first(blocks, args, in_batched, coming)
    registers, after = run_alone(blocks.blocks[0], registers, coming)
    kept = _kept(blocks)
    joined = {
        x: jnp.concatenate([rows, registers[x]])
        for x, rows in zip(kept, before.registers, strict=True)
    }
    comes = jnp.where(jnp.arange(coming) < told.count, told.number, NOBODY)
    since = jnp.concatenate([before.since, comes.astype(jnp.int32)])
    exists = since != NOBODY
    leave = Leave(told.few, exists & (since < told.oldest))
    at = jnp.concatenate([before.at, after])
    joined, at = until_last(blocks, joined, at, exists, rule, leave)
    return _ended(blocks, joined, at, since, len(before.at))


def _first(
    blocks: BlockProgram, args: Sequence[Array], in_batched: Sequence[bool], size: int
) -> Registers:
    """Returns the registers of lanes at the beginning."""
    of_lanes = [x for x, batched in zip(args, in_batched, strict=True) if batched]
    pairs = zip(blocks.operands, of_lanes, strict=True)
    registers = {slot: to_stored(x, kind_of(slot)) for slot, x in pairs}
    for slot in blocks.registers:
        if slot not in registers:
            shape, dtype = stored(kind_of(slot))
            registers[slot] = jnp.zeros((size, *shape), dtype)
    return registers


def _ended(
    blocks: BlockProgram, registers: Registers, at: Array, since: Array, room: int
) -> Segment:
    """Returns the results of lanes that are at the end, and the others."""
    size, end = len(at), len(blocks.blocks) - 1
    exists = since != NOBODY
    (left,) = jnp.nonzero(exists & (at != end), size=room, fill_value=size)
    left = left.astype(jnp.int32)

    def of_left(x: Array, otherwise: int) -> Array:
        return x.at[left].get(mode="fill", fill_value=otherwise)

    rows = [x.at[left].get(mode="clip") for x in (registers[slot] for slot in _kept(blocks))]
    lanes = LeftLanes(rows, of_left(at, 0), of_left(since, NOBODY))
    # Lanes elsewhere repeat one that is at the end: what others have must not be computed with.
    at_end = exists & (at == end)
    place = jnp.where(at_end, jnp.arange(size), jnp.argmax(at_end))
    of_ended = {x: y[place] for x, y in registers.items()}
    of_ended, _ = run_alone(blocks.blocks[-1], of_ended, size)
    return Segment(results_in(blocks, of_ended, size), at_end, left, lanes)


def _kept(blocks: BlockProgram) -> list[Slot]:
    """Returns the registers that are read or written after the first block, and the results."""
    read: Callable[[Slot], bool] = lambda x: any(touches(b, x) for b in blocks.blocks[1:])  # noqa: E731
    results = [x for x in blocks.results if isinstance(x, Slot)]
    return [x for x in blocks.registers if x in results or read(x)]
