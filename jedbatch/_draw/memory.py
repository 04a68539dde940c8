"""Drawing memory: the results in each row, from when until when, and how they are read.

Rows go down, batches from left to right. The results of a batch are a rectangle: its rows, from
the batch that writes them to the last that reads them. Where types have rows of their own the
rectangles of one type form a staircase; where rows are used again the rectangles are packed. What
a program reads as a slice and what it gathers is taken from what it runs (`Lowered.runs`),
lane by lane, so that the numbers are those that `print(plan)` adds up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jedbatch._draw.styles import TypeStyles
from jedbatch._jaxpr.storage import row_bytes, stored
from jedbatch._layout.access import GATHER
from jedbatch._layout.live_ranges import find_live_ranges
from jedbatch._program.lower import Rows, operand_rows, value_rows
from jedbatch._program.memory_use import size
from jedbatch._program.placement import Placement
from jedbatch._program.plan import Plan, input_name
from jedbatch._support.canvas import (
    GREY,
    HEIGHT,
    MARGIN,
    SLIM_WIDTH,
    TINT,
    WIDTH,
    Canvas,
    Picture,
    counted,
    short,
    ticks,
)

LEFT_EDGE = MARGIN + 58.0  # where rows begin, right of their numbers
MAX_RECTANGLES = 700  # drawn, the largest
MAX_MARKS = 2000  # of reads drawn, coarser if there are more
SLICED, GATHERED, INPUTS = "#111111", "#d62728", "#c3c9d1"


class ResultBlocks(NamedTuple):
    """Live ranges of rows next to each other: the results of a batch.

    Attributes:
      type: int64[K], the node type.
      slot: int64[K], which of its results.
      batch: int64[K], the batch that writes them.
      begin: int64[K], the first row.
      rows, live: int64[K], how many, with and without padding.
      last: int64[K], the last batch that reads one; the number of batches if one is returned.
    """

    type: np.ndarray
    slot: np.ndarray
    batch: np.ndarray
    begin: np.ndarray
    rows: np.ndarray
    live: np.ndarray
    last: np.ndarray

    def take(self, index: np.ndarray) -> "ResultBlocks":
        """Returns some of them."""
        return ResultBlocks(*(x[index] for x in self))


@dataclass(frozen=True, eq=False)
class Arena:
    """The rows of one shape and dtype: what they hold and who reads them.

    Inputs have the first rows, then come the spaces of results.

    Attributes:
      name: dtype and shape.
      row_bytes: of one row.
      inputs: rows that hold inputs.
      rows: all rows.
      capacity: rows that the program has, more than it needs now.
      last_input: the last batch that reads an input; -1 if there is none.
      blocks: the results.
      step, row, gathered: int64[R], int64[R], bool[R], when which row is read and how, once for
        each lane and operand.
    """

    name: str
    row_bytes: int
    inputs: int
    rows: int
    capacity: int
    last_input: int
    blocks: ResultBlocks
    step: np.ndarray
    row: np.ndarray
    gathered: np.ndarray


def arenas_of(plan: Plan) -> dict[str, Arena]:
    """Returns the arenas of a plan, by name."""
    assert plan.host is not None
    placed = plan.host.placed
    layout, schedule, graph = placed.layout, placed.schedule, placed.graph
    space_arena = _arena_of_space(placed)
    begin = _begin_of_space(placed, space_arena)
    by_batch = find_live_ranges(graph, schedule, layout.padded)
    node_type = schedule.batch_type[by_batch.batch]
    space = layout.space[node_type, by_batch.slot]
    first = begin[space] + layout.block[by_batch.batch, by_batch.slot]
    live = np.diff(schedule.node_ptr)[by_batch.batch]
    blocks = ResultBlocks(
        node_type,
        by_batch.slot,
        by_batch.batch,
        first,
        by_batch.size,
        live,
        by_batch.last,
    )
    read_arena, step, row, gathered = _reads(plan, begin)
    is_input = graph.operand < 0
    reader = graph.operand_reader[is_input]
    read_by, of = schedule.batch[reader], placed.input_arena[-1 - graph.operand[is_input]]
    capacity = dict(zip(plan.static.signature.arenas, plan.static.signature.rows, strict=True))
    arenas = {}
    for a, kind in enumerate(placed.arenas):
        read_here = read_arena == a
        name, inputs = input_name(kind), placed.input_counts[a]
        arenas[name] = Arena(
            name=name,
            row_bytes=row_bytes(kind),
            inputs=inputs,
            rows=int(inputs + layout.rows[space_arena == a].sum()),
            capacity=capacity[kind],
            last_input=int(read_by[of == a].max(initial=-1)),
            blocks=blocks.take(np.flatnonzero(space_arena[space] == a)),
            step=step[read_here],
            row=row[read_here],
            gathered=gathered[read_here],
        )
    return arenas


def _arena_of_space(placed: Placement) -> np.ndarray:
    """Returns int64[spaces], the arena in which each space of the layout lies."""
    arenas = {kind: a for a, kind in enumerate(placed.arenas)}
    arena = np.full(len(placed.layout.rows), -1)
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        arena[placed.layout.space[t, : len(kernel.results)]] = [
            arenas[stored(result)] for result in kernel.results
        ]
    return arena


def _begin_of_space(placed: Placement, space_arena: np.ndarray) -> np.ndarray:
    """Returns int64[spaces], the first row of each space in its arena, without spare rows."""
    begin = np.zeros(len(space_arena), np.int64)
    for a, inputs in enumerate(placed.input_counts):
        spaces = np.flatnonzero(space_arena == a)
        rows = placed.layout.rows[spaces]
        begin[spaces] = inputs + rows.cumsum() - rows
    return begin


def _reads(plan: Plan, begin: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns (arena, step, row, is it gathered) of every lane and operand, padding too."""
    assert plan.host is not None
    lowered = plan.host.lowered
    placed = lowered.placed
    layout, chunks = placed.layout, placed.chunks
    row = value_rows(placed, begin)
    modes = []
    for k, of_chunks in enumerate(lowered.modes):  # chunks of a kernel in the order of its lanes
        here = np.flatnonzero(chunks.kernel == k)
        in_order = here[np.argsort(chunks.lane[here])]
        place = np.searchsorted(here, in_order)
        modes.append(np.repeat(of_chunks[:, place], chunks.width[in_order], axis=1))
    parts = [np.zeros((4, 0), np.int64)]
    rows = operand_rows(placed, Rows(row, placed.graph.operand, {}))
    of_types = zip(placed.type_ids, placed.kernels, rows, modes, strict=True)
    for t, kernel, operand_row, mode in of_types:
        nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
        for j, operand in enumerate(kernel.operands):
            arena = np.full(len(nodes), placed.arenas.index(stored(operand)))
            step = placed.schedule.batch[nodes]
            parts.append(np.stack([arena, step, operand_row[j], mode[j] == GATHER]))
    arena, step, row, gathered = np.concatenate(parts, axis=1)
    return arena, step, row, gathered.astype(bool)


# --- drawn ---


@dataclass(frozen=True, eq=False)
class Field:
    """The places of rows and steps on a picture.

    Attributes:
      top: its upper edge.
      across, down: pixels of a step and of a row.
      before: 1 if there is a step before the first, for inputs; number -1.
      steps, rows: how many there are.
    """

    top: float
    across: float
    down: float
    before: int
    steps: int
    rows: int

    @staticmethod
    def pitch(steps: int) -> float:
        """Pixels of a step."""
        return min(90.0, (WIDTH - MARGIN - LEFT_EDGE) / max(1, steps))

    @staticmethod
    def on(canvas: Canvas, steps: int, arena: Arena) -> "Field":
        """A field that fits below what is written on a canvas; draws its axes."""
        before, rows = int(arena.inputs > 0), arena.rows
        across = Field.pitch(steps + before)
        down = min(16.0, (HEIGHT - 66 - canvas.top) / max(1, rows))
        field = Field(canvas.top, across, down, before, steps, rows)
        wide, tall = across * (steps + before), down * rows
        canvas.rect(LEFT_EDGE, canvas.top, wide, tall, fill=TINT)
        for row in ticks(rows, max(2, int(tall / 34))):
            y = field.y(row) + min(down / 2, 5) + 4
            canvas.text(LEFT_EDGE - 6, y, f"{row:,}", fill=GREY, anchor="end")
        for step in ticks(steps, max(2, int(wide / 60))):
            x = field.x(step) + across / 2
            canvas.text(x, field.bottom + 15, f"{step:,}", fill=GREY, anchor="middle")
        canvas.text(LEFT_EDGE - 6, canvas.top - 8, "row", fill=GREY, anchor="end")
        canvas.text(LEFT_EDGE, field.bottom + 32, "batch", fill=GREY)
        return field

    @property
    def bottom(self) -> float:
        return self.top + self.down * self.rows

    def x(self, step: float) -> float:
        """The left edge of a step."""
        return LEFT_EDGE + (step + self.before) * self.across

    def y(self, row: float) -> float:
        """The upper edge of a row."""
        return self.top + row * self.down


def draw_memory(plan: Plan, arena: Arena, styles: TypeStyles) -> Picture:
    """Draws the rows of an arena over the batches."""
    assert plan.schedule is not None
    steps = len(plan.schedule)
    blocks = merged(arena.blocks)
    canvas = Canvas(
        f"Rows of {arena.name}: {arena.rows:,} of {size(arena.row_bytes)}",
        _caption(plan, arena, len(blocks.type)),
        [*_legend(arena, styles)],
        max(SLIM_WIDTH, LEFT_EDGE + Field.pitch(steps + 1) * (steps + 1) + MARGIN),
    )
    canvas.top += 10
    field = Field.on(canvas, steps, arena)
    if arena.inputs:
        last = arena.last_input
        read = "that no batch reads" if last < 0 else f"read until batch {last}"
        place = LEFT_EDGE, field.top, field.x(last + 1) - LEFT_EDGE, arena.inputs * field.down
        marks = {"data_kind": "inputs", "data_count": str(arena.inputs)}
        hint = f"{counted(arena.inputs, 'input')}, {read}"
        canvas.rect(*place, fill=INPUTS, title=hint, **marks)
    _draw_blocks(canvas, field, blocks, styles, plan.static.keeps)
    for gathered, colour, shift in ((False, SLICED, 0.3), (True, GATHERED, 0.65)):
        _draw_reads(canvas, field, arena, gathered, colour, shift)
    return canvas.picture(field.bottom + 34)


def _draw_blocks(
    canvas: Canvas, field: Field, blocks: ResultBlocks, styles: TypeStyles, kept: bool
) -> None:
    """Draws a rectangle for every block, its padding paler, and palest what is `kept` for later."""
    end = field.x(field.steps)
    padding: list[str] = []
    later: dict[str, list[str]] = {}
    for t, _, batch, begin, rows, live, last in np.stack(blocks, 1).tolist():
        k = styles.of_type[t]
        colour = styles.colours[k]
        x, y, tall = field.x(batch), field.y(begin), rows * field.down
        wide = min(field.x(last + 1), end) - x
        until = "it is returned" if last >= field.steps else f"batch {last}"
        hint = (
            f"{styles.names[k]}, written by batch {batch}: rows {begin:,}–{begin + rows - 1:,}, "
            f"{rows - live:,} of them padding; needed until {until}"
        )
        line: dict[str, Any] = {"stroke": "white", "stroke_width": 0.5} if tall >= 4 else {}
        marks: dict[str, Any] = {"data_kind": "rows", "data_count": str(rows), "title": hint}
        canvas.rect(x, y, wide, tall, fill=colour, **marks, **line)
        if rows > live:
            padding.append(_box(x, y + live * field.down, wide, (rows - live) * field.down))
        if kept and x + wide < end - 0.1:
            later.setdefault(colour, []).append(_box(x + wide, y, end - x - wide, tall))
    canvas.area(padding, fill="white", opacity=0.6)
    for colour, boxes in later.items():
        canvas.area(boxes, fill=colour, opacity=0.18)


def _box(x: float, y: float, wide: float, tall: float) -> str:
    """Returns a rectangle as a step of a path."""
    return f"M{short(x)},{short(y)}h{short(wide)}v{short(tall)}h{short(-wide)}z"


def _caption(plan: Plan, arena: Arena, drawn: int) -> str:
    """Returns the caption: the marks of a picture, and why rows are kept."""
    assert plan.host is not None
    why = "Every result has a row of its own"
    if plan.host.placed.reuse:
        why = "Rows are used again once nobody reads them"
    elif plan.static.keeps:
        why += ", kept for the reverse (palest)"
    total, blocks = arena.rows * arena.row_bytes, len(arena.blocks.type)
    shown = f" {drawn:,} of them for {blocks:,} batches: neighbours as one, and the largest."
    return (
        f"{size(total)} in all, in a program with room for {arena.capacity:,} rows. {why}. "
        "Rectangles: the rows of a batch, padding paler, from when they are written to their last "
        "use."
        f"{shown if drawn < blocks else ''} Marks: rows read, for padding too, at the batch that "
        "reads them."
    )


def _legend(arena: Arena, styles: TypeStyles) -> Iterator[tuple[str, str, str]]:
    """(colour, text, explanation) of everything that rows hold and of how they are read."""
    kind = styles.of_type[arena.blocks.type]
    rows = np.bincount(kind, arena.blocks.rows, len(styles)).astype(int)
    for (colour, _, hint), name, n in zip(
        styles.legend(), styles.names, rows.tolist(), strict=True
    ):
        if n:
            yield colour, f"{name}: {counted(n, 'row')}", hint
    if arena.inputs:
        yield INPUTS, f"inputs: {counted(arena.inputs, 'row')}", "what enters"
    for gathered, colour, how, hint in (
        (False, SLICED, "as slices", "strided slices and broadcasts too"),
        (True, GATHERED, "one by one", "a gather"),
    ):
        n = int((arena.gathered == gathered).sum())
        yield colour, f"read {how}: {counted(n, 'row')}, {size(n * arena.row_bytes)}", hint


def merged(blocks: ResultBlocks) -> ResultBlocks:
    """Returns at most 700 blocks for any number of them.

    If there are more, those of one type that follow each other in time and in rows are put
    together, less than a pixel wide; then the largest remain.
    """
    group = -(-len(blocks.type) // MAX_RECTANGLES)
    if group > 1:
        blocks = blocks.take(np.lexsort((blocks.batch, blocks.slot, blocks.type)))
        new = np.ones(len(blocks.type), bool)
        follows = blocks.begin[1:] == blocks.begin[:-1] + blocks.rows[:-1]
        new[1:] = (blocks.type[1:] != blocks.type[:-1]) | ~follows
        index = np.arange(len(new))
        run = np.maximum.accumulate(np.where(new, index, 0))
        starts = np.flatnonzero((index - run) % group == 0)
        blocks = blocks.take(starts)._replace(
            rows=np.add.reduceat(blocks.rows, starts),
            live=np.add.reduceat(blocks.live, starts),
            last=np.maximum.reduceat(blocks.last, starts),
        )
    area = blocks.rows * (blocks.last + 1 - blocks.batch)
    return blocks.take(np.sort(np.argsort(-area, kind="stable")[:MAX_RECTANGLES]))


def _draw_reads(
    canvas: Canvas, field: Field, arena: Arena, gathered: bool, colour: str, shift: float
) -> None:
    """Draws a stroke for neighbouring rows that one batch reads, coarser where there are many."""
    chosen = arena.gathered == gathered
    fine, few = -(-arena.rows // 500), -(-field.steps // 800)
    while True:
        places = np.stack([arena.step[chosen] // few, arena.row[chosen] // fine], 1)
        step, row = np.unique(places, axis=0).T
        new = np.ones(len(step), bool)
        new[1:] = (step[1:] != step[:-1]) | (row[1:] != row[:-1] + 1)
        if new.sum() <= MAX_MARKS:
            break
        fine, few = 2 * fine, 2 * few
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(step)) - 1 if len(starts) else starts
    wide = max(0.7, min(4.0, 0.22 * field.across))
    steps = []
    for a, b in zip(starts.tolist(), ends.tolist(), strict=True):
        x = field.x(step[a] * few) + shift * field.across
        y = field.y(row[a] * fine)
        tall = field.y(min((row[b] + 1) * fine, arena.rows)) - y
        inset = 0.12 * min(field.down, 8)
        steps.append(f"M{short(x)},{short(y + inset)}v{short(max(0.5, tall - 2 * inset))}")
    kind = "gathers" if gathered else "slices"
    count = str(int(chosen.sum()))
    canvas.path(steps, stroke=colour, stroke_width=wide, data_kind=kind, data_count=count)
