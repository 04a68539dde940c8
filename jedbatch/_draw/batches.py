"""Drawing schedules: which nodes run together, and when."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jedbatch._draw.graph import MAX_NODES, PLOT_HEIGHT, Bundles, described_nodes, draw_edges
from jedbatch._draw.styles import StyleField, TypeStyles, binned
from jedbatch._graph.graph import Graph
from jedbatch._schedule.schedule import Schedule, lower_bound
from jedbatch._support.canvas import (
    GREY,
    INK,
    MARGIN,
    SLIM_WIDTH,
    TINT,
    WIDTH,
    Canvas,
    Picture,
    counted,
    fitted,
    text_width,
)

MAX_STEPS = 600  # batches told apart
NODE_PITCHES = (26, 22, 18, 15, 12, 10, 8, 7, 6)  # pixels from node to node
NAMED_BOX_WIDTH, BARE_BOX_WIDTH = 72, 24  # least width of a box with a name and of one without
HEAD_HEIGHT = 34  # pixels above the nodes of a box
BOX_GAP = 12  # least pixels between boxes, where lines are seen


def schedule_in_words(graph: Graph, schedule: Schedule) -> str:
    """Returns a schedule in a sentence, with its certified lower bound."""
    sizes = np.diff(schedule.node_ptr)
    bound = lower_bound(graph)
    optimal = ", so none has fewer" if len(schedule) == bound else ""
    return (
        f"Policy: {schedule.policy or 'unknown'}. Certified lower bound: "
        f"{counted(int(bound), 'batch', 'batches')}{optimal}. "
        f"Widest batch: {counted(int(sizes.max(initial=0)), 'node')}."
    )


# --- what runs together ---


class Boxes(NamedTuple):
    """The places of the batches, each a box of columns of nodes.

    Attributes:
      sizes: int64[S], nodes of each.
      pitch: pixels from node to node.
      rows: nodes in a column, at most.
      left, wide, tall: float64[S], of each box.
    """

    sizes: np.ndarray
    pitch: float
    rows: int
    left: np.ndarray
    wide: np.ndarray
    tall: np.ndarray

    @staticmethod
    def fit(sizes: np.ndarray) -> "Boxes | None":
        """Boxes with nodes as large as fit, and names if they fit; None if nothing does."""
        width = WIDTH - 2 * MARGIN
        for pitch in NODE_PITCHES:
            rows = int((PLOT_HEIGHT - HEAD_HEIGHT) // pitch)
            for least in (NAMED_BOX_WIDTH, BARE_BOX_WIDTH):
                wide = np.maximum(-(-sizes // rows) * pitch + 10.0, least)
                gap = min(60.0, (width - wide.sum()) / max(1, len(wide) - 1))
                if gap >= BOX_GAP:
                    left = MARGIN + (wide + gap).cumsum() - wide - gap
                    tall = np.minimum(sizes, rows) * pitch + HEAD_HEIGHT + 6
                    return Boxes(sizes, pitch, rows, left, wide, tall)
        return None

    def place(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """(float64[n], float64[n]): where the nodes of a batch are, from the top of the boxes."""
        column, row = np.divmod(np.arange(self.sizes[batch]), self.rows)
        inset = (self.wide[batch] - (column.max() + 1) * self.pitch) / 2
        x = self.left[batch] + inset + (column + 0.5) * self.pitch
        return x, HEAD_HEIGHT + (row + 0.5) * self.pitch


def draw_batches(
    graph: Graph, schedule: Schedule, node: np.ndarray, styles: TypeStyles, title: str
) -> Picture:
    """Draws a box for every batch, its nodes in the order `node`, or how many there are."""
    if len(node) <= MAX_NODES and (boxes := Boxes.fit(np.diff(schedule.node_ptr))):
        return _draw_boxes(graph, schedule, node, styles, title, boxes)
    return _draw_steps(graph, schedule, styles, title, edges=True)


def _draw_boxes(
    graph: Graph, schedule: Schedule, node: np.ndarray, styles: TypeStyles, title: str, boxes: Boxes
) -> Picture:
    """Draws every node in the box of its batch."""
    ends = boxes.left + boxes.wide
    canvas = Canvas(
        title,
        f"{schedule_in_words(graph, schedule)} Left to right: as they run, nodes with the number "
        "of their instance where there is room. Lines: from what is read to its reader.",
        styles.legend(),
        max(SLIM_WIDTH, ends.max(initial=0) + MARGIN),
    )
    x, y = np.empty(len(node)), np.empty(len(node))
    for i in range(len(schedule)):
        nodes = node[schedule.node_ptr[i] : schedule.node_ptr[i + 1]]
        x[nodes], down = boxes.place(i)
        y[nodes] = canvas.top + down
    draw_edges(canvas, graph, ends[schedule.batch], boxes.left[schedule.batch], y)
    for i in range(len(schedule)):
        _draw_box(canvas, boxes, i, int(schedule.batch_type[i]), styles)
    radius = 0.4 * boxes.pitch
    instance = graph.node_instance.tolist()
    hints = described_nodes(graph, styles)
    for n, k in enumerate(styles.of_type[graph.node_type].tolist()):
        marks: dict[str, Any] = {"title": hints[n], "data_kind": "node"}
        canvas.circle(x[n], y[n], radius, fill=styles.colours[k], **marks)
        number = f"{instance[n]}"
        if graph.num_instances > 1 and text_width(number, 10) <= 1.8 * radius:
            middle = x[n], y[n] + 3.5
            canvas.text(*middle, number, size=10, anchor="middle", fill="white", title=hints[n])
    return canvas.picture(canvas.top + boxes.tall.max(initial=0))


def _draw_box(canvas: Canvas, boxes: Boxes, batch: int, node_type: int, styles: TypeStyles) -> None:
    """Draws a box, with the name of its type where there is room, and how many nodes it has."""
    k, size = styles.of_type[node_type], int(boxes.sizes[batch])
    left, wide = boxes.left[batch], boxes.wide[batch]
    hint = f"batch {batch}: {counted(size, 'node')} of {styles.explained[node_type]}"
    marks: dict[str, Any] = {"data_kind": "batch", "data_count": str(size), "title": hint}
    place = left, canvas.top, wide, boxes.tall[batch]
    canvas.rect(*place, fill=TINT, stroke=styles.colours[k], rx=6, **marks)
    words: dict[str, Any] = {"anchor": "middle", "title": hint}
    name = fitted(styles.names[k], wide - 8) if wide >= NAMED_BOX_WIDTH else ""
    canvas.text(left + wide / 2, canvas.top + 14, name, bold=True, **words)
    below = canvas.top + (28 if name else 21)
    canvas.text(left + wide / 2, below, f"× {size}" if name else f"{size}", fill=GREY, **words)


# --- when it runs ---


def draw_timeline(graph: Graph, schedule: Schedule, styles: TypeStyles, title: str) -> Picture:
    """Draws a lane for every type, a mark for every batch."""
    return _draw_steps(graph, schedule, styles, title, edges=False)


def _draw_steps(
    graph: Graph, schedule: Schedule, styles: TypeStyles, title: str, *, edges: bool
) -> Picture:
    """Draws batches by when they run and by their type, the root of their sizes as height."""
    kind, step = styles.of_type[schedule.batch_type], np.arange(len(schedule))
    first, place = binned(step, len(schedule), kind, len(styles), MAX_STEPS)
    columns = len(first) - 1
    bundles = Bundles.of(*(place[schedule.batch[end]] for end in graph.edges))
    canvas = Canvas(
        title,
        f"{schedule_in_words(graph, schedule)} Height: the root of how many nodes. "
        + (bundles.caption if edges else ""),
        width=StyleField.fit(styles, columns)[2],
    )
    lanes = StyleField.draw(canvas, styles, first, "batch")
    sizes = np.diff(schedule.node_ptr)
    count = np.bincount(place, sizes, columns * len(styles)).astype(int)
    batches = np.bincount(place, minlength=columns * len(styles))
    wide = max(0.8, lanes.pitch * (0.78 if edges else 0.86))

    named = functools.partial(lanes.named, where="in", step="batch", steps="batches")
    if edges:
        bundles.draw(canvas, styles, lanes.at, named)
    most = max(1, count.max(initial=1))
    for where in np.flatnonzero(batches).tolist():
        number, (x, y) = int(count[where]), lanes.at(where)
        tall = max(2.0, 0.86 * lanes.tall * (number / most) ** 0.5)
        marks: dict[str, Any] = {
            "title": f"{counted(number, 'node')}: {named(where)}",
            "data_kind": "batch",
            "data_count": str(number),
        }
        box = x - wide / 2, y - tall / 2, wide, tall
        canvas.rect(*box, fill=styles.colours[where % len(styles)], rx=min(3, wide / 4), **marks)
        label_width = text_width(f"{number}", 10) + 4
        beside = range(
            where, where + len(styles) * (1 + math.ceil(label_width / lanes.pitch)), len(styles)
        )
        inside = tall >= 13
        if label_width <= wide + 3 and (inside or lanes.tall >= 30):
            middle = y + 3.5 if inside else y - tall / 2 - 3
            ink = "white" if inside else INK
            canvas.text(x, middle, f"{number}", size=10, anchor="middle", fill=ink)
        elif lanes.pitch >= 8 and beside[-1] < len(batches) and not batches[beside[1:]].any():
            canvas.text(x + wide / 2 + 3, y + 3.5, f"{number}", size=10)
    return canvas.picture(lanes.bottom)
