"""How much room programs have for the calls of a region.

A program serves what it has room for, so that a stream of minibatches soon compiles nothing, but
not what would leave most of its room unused. The first minibatch chooses; where a later one needs
more, a new program has room for what the last one had room for, too.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import Buckets
from jedbatch._program.capacity import CAPACITY_HEADROOM, MAX_OVERSIZE, round_up
from jedbatch._ragged.calls import RegionCalls
from jedbatch._ragged.groups import (
    GROUP_HEADROOM,
    MAX_PAIRS_PER_INDEXED_ROW,
    MAX_PAIRS_PER_ROW,
    LengthCosts,
    find_groups,
    fitted_lengths,
    longest_slot,
    pairs_in,
    slots_of,
)
from jedbatch._ragged.microbatches import Microbatches, evenly_distributed, fine_rows
from jedbatch._ragged.packing import RowCapacity, whole_blocks

LENGTH_HEADROOM = 2  # a new program takes arrays so many times as long as there are
ROWS = LengthCosts(headroom=LENGTH_HEADROOM, power=2, saving=0.3)
TABLES = LengthCosts(headroom=1.25, power=3, saving=0.1)  # where loops go over tables
MANY_CALLS = 64  # a capacity for so many will do for any fewer
MANY_ROWS = 768  # the same of rows, or of those in one block
MICROBATCH_START = 256  # rows computed while a microbatch is started
SHARED_PER_ROW = 256  # numbers with a gradient, which each microbatch adds up, for each of its rows
MICROBATCH_HEADROOM = 1.05  # rows of a microbatch over those of the largest: others go elsewhere


def calls_fit(calls: RegionCalls, capacity: RowCapacity) -> bool:
    """Returns whether a program can run calls without too much room going to waste."""
    if calls.guarded > capacity.guarded:
        return False
    if capacity.microbatches > 1:
        microbatches = calls.microbatches(capacity)
        return microbatches is not None and _are_many(calls, capacity, microbatches)
    return (
        len(calls.calls) <= capacity.calls
        and all(map(operator.le, calls.rows, capacity.rows))
        and int(calls.longest.max()) <= capacity.longest
        and capacity.calls <= max(MANY_CALLS, MAX_OVERSIZE * len(calls.calls))
        and _is_near(calls.rows, capacity.rows, max(MANY_ROWS, capacity.target.blocks.widths[-1]))
        and (not capacity.slots or slots_of(calls.longest, capacity.groups) is not None)
    )


def _are_many(calls: RegionCalls, capacity: RowCapacity, microbatches: Microbatches) -> bool:
    """Returns whether microbatches make use of what a program has room for."""
    computed = [len(microbatches) * n for n in capacity.rows]
    few = capacity.microbatches > MAX_OVERSIZE * max(2, len(microbatches))
    return not few and _is_near(calls.rows, computed, MANY_ROWS)


def make_row_capacity(calls: RegionCalls, target: Target, model: RowCapacity | None) -> RowCapacity:
    """Returns a capacity for calls, and for what `model` had room for if it is not much more."""
    straight = _straight_capacity(calls, target, model)
    if straight is not None:
        return straight
    model = None if model and model.slots else model
    most = int(calls.longest.max())
    tables = calls.region.packed.phased.has_table_loops
    if model and most <= model.longest:
        lengths = model.lengths
    else:
        lengths = fitted_lengths(calls.longest, target.shortest, TABLES if tables else ROWS)
    rows = _rows_for(calls, target.blocks, model)
    few: tuple[int, ...] = ()
    if tables and target.table_size:
        sizes = map(calls.region.packed.phased.table_size, lengths)
        few = tuple(max(1, target.table_size // size) for size in sizes)
    return RowCapacity(round_up(len(calls.calls)), rows, lengths, calls.guarded, target, few=few)


def _straight_capacity(
    calls: RegionCalls, target: Target, model: RowCapacity | None
) -> RowCapacity | None:
    """Returns a capacity for calls without loops; None if that is too much at once."""
    model = model if model and model.slots else None
    most = int(calls.longest.max())
    reach = longest_slot(most)
    if model and most <= model.longest <= LENGTH_HEADROOM * most:
        reach = model.longest
    is_indexed = any(phase.indexed for phase in calls.region.packed.phased.phases)
    number = _num_microbatches(calls, target) if is_indexed else 1
    if number > 1:
        capacity = _of_microbatches(calls, target, model, reach, number)
    else:
        rows = _rows_for(calls, Buckets(target.blocks.widths[:1]), model)
        lengths, slots = find_groups(calls.longest, reach)
        num_calls = round_up(len(calls.calls))
        capacity = RowCapacity(num_calls, rows, lengths, calls.guarded, target, slots)
    return capacity if _fits_straight(calls, capacity, is_indexed) else None


def _fits_straight(calls: RegionCalls, capacity: RowCapacity, is_indexed: bool) -> bool:
    """Returns whether a capacity is not too much at once."""
    target, pairs, most = capacity.target, pairs_in(capacity.groups), max(capacity.rows, default=0)
    if is_indexed and target.straight_bytes:
        few = pairs <= MAX_PAIRS_PER_ROW * target.straight_rows
        return few and calls.region.packed.kept_bytes(capacity) <= target.straight_bytes
    largest, pairs_per_row = target.straight_rows, MAX_PAIRS_PER_ROW
    if is_indexed and target.straight_indexed_rows > largest:
        largest, pairs_per_row = target.straight_indexed_rows, MAX_PAIRS_PER_INDEXED_ROW
    return max(most, pairs // pairs_per_row) <= largest


def _num_microbatches(calls: RegionCalls, target: Target) -> int:
    """Returns how many microbatches have about as many rows as the target asks for.

    They have more where a single call has, or where adding up gradients would take longer than the
    rows. They have fewer where few are needed: about half of the rows of one are computed for
    nothing, and its start costs some.
    """
    total = CAPACITY_HEADROOM * max(calls.rows, default=0)
    if not target.microbatch_rows or total <= target.microbatch_rows:
        return 1
    cheapest = min(math.sqrt(2 * MICROBATCH_START * total), target.microbatch_rows)
    largest = GROUP_HEADROOM * int(calls.table_of_counts.max())
    worthwhile = calls.region.packed.phased.shared_numbers / SHARED_PER_ROW
    return math.ceil(total / max(cheapest, largest, worthwhile))


def _of_microbatches(
    calls: RegionCalls, target: Target, model: RowCapacity | None, reach: int, number: int
) -> RowCapacity:
    """Returns a capacity for calls in about so many microbatches.

    `reach` is the length of the longest slots at least.
    """
    guarded = calls.guarded
    if model and model.microbatches > 1:  # more of the same, unless they are too small, or large
        guarded |= model.guarded
        more = replace(model, guarded=guarded, microbatches=max(2, len(calls.calls)))
        microbatches = calls.microbatches(more)
        if microbatches is not None:
            grown = replace(more, microbatches=_many(len(microbatches)))
            if _are_many(calls, grown, microbatches) and len(microbatches) <= 2 * number:
                return grown
    microbatches = evenly_distributed(calls.table_of_counts, number)
    used = [calls.table_of_counts[:, m].sum(1) for m in microbatches]
    rows, largest = np.max(used, axis=0), calls.table_of_counts.max(1)
    # Rows that are few cost little, and must not keep others from being many.
    headroom = np.where(2 * rows < rows.max(), GROUP_HEADROOM, MICROBATCH_HEADROOM)
    rows = np.maximum(1, np.maximum(headroom * rows, GROUP_HEADROOM * largest))
    # As long as the longest call of any microbatch, the second of any, and so on; and some more.
    longest = np.zeros(max(map(len, microbatches)), np.int64)
    for m in microbatches:
        own = np.sort(calls.longest[m])[::-1]
        longest[: len(own)] = np.maximum(longest[: len(own)], own)
    lengths, slots = find_groups(np.append(longest, longest[len(longest) // 2 :]), reach)
    return RowCapacity(
        sum(slots),
        tuple(map(fine_rows, rows.tolist())),
        lengths,
        guarded,
        target,
        slots,
        _many(len(microbatches)),
    )


def _many(number: int) -> int:
    """Returns how many microbatches to have room for where there are so many: two at least."""
    return max(2, 1 << (math.ceil(CAPACITY_HEADROOM * number) - 1).bit_length())


def _rows_for(calls: RegionCalls, blocks: Buckets, model: RowCapacity | None) -> tuple[int, ...]:
    """Returns a capacity of rows for each extent, in whole blocks, with headroom."""
    rows = [whole_blocks(round_up(max(1, n) * CAPACITY_HEADROOM), blocks) for n in calls.rows]
    if model and _is_near(rows, model.rows, max(MANY_ROWS, blocks.widths[-1])):
        rows = list(map(max, rows, model.rows))
    return tuple(rows)


def _is_near(rows: Sequence[int], compiled: Sequence[int], widest: int) -> bool:
    """Returns whether a capacity is not much too large, in blocks of up to `widest` rows."""
    return all(b <= MAX_OVERSIZE * max(widest, a) for a, b in zip(rows, compiled, strict=True))
