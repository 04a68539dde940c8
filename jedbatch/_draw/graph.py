"""Drawing instance graphs: every node where there is room, and how many where there is not.

Nodes go from left to right, each as far from the left as the longest path from the inputs is. Up
to 400 of them are drawn one by one, an instance in a band of its own. Rows are found as in layered
drawing of trees: every node wants to be in the middle of what it reads, and those of one level are
moved apart as little as possible (`spread_apart`, an isotonic regression). Larger graphs are
counted: for every level and node type one disk whose area is the number of nodes, and for every two
of them one bundle of edges.

Sources: Sugiyama, Tagawa and Toda, Methods for visual understanding of hierarchical system
structures, 1981 (levels, sweeps); Reingold and Tilford, Tidier drawings of trees, 1981.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jedbatch._draw.styles import StyleField, TypeStyles, binned
from jedbatch._graph.graph import Graph
from jedbatch._support.canvas import (
    GREY,
    HEIGHT,
    INK,
    MARGIN,
    RULE,
    SLIM_WIDTH,
    WIDTH,
    Canvas,
    Picture,
    counted,
    curve,
    fitted,
    paler,
    short,
    text_width,
)

MAX_NODES = 400  # drawn one by one
MAX_LABELLED = 60  # drawn with their names
PLOT_HEIGHT = HEIGHT - 130  # pixels left below title, caption and legend
MAX_COLUMNS = 60  # levels told apart when nodes are counted
MAX_BUNDLES = 400  # of edges drawn, the largest
DOT_DIAMETER = 14.0  # diameter of a node without a name, at most


def draw_graph(graph: Graph, styles: TypeStyles, title: str, instance: int = 0) -> Picture:
    """Draws nodes by level, or how many there are; the first instance has a number."""
    if len(graph.node_type) <= MAX_NODES and (plane := place_nodes(graph)).bands.pitch >= 4:
        return _draw_nodes(graph, styles, title, plane, instance)
    return _draw_levels(graph, styles, title)


def described_nodes(graph: Graph, styles: TypeStyles, instance: int = 0) -> list[str]:
    """Returns a description of each node, numbered within its instance."""
    of = graph.node_instance
    within = np.arange(len(of)) - graph.node_ptr[of]
    return [
        f"node {n} of instance {instance + i}: {styles.explained[t]}"
        for n, i, t in zip(within.tolist(), of.tolist(), graph.node_type.tolist(), strict=True)
    ]


# --- node by node ---


class Bands(NamedTuple):
    """The places of instances: each in a band of rows, in one of several columns.

    Attributes:
      columns: how many.
      column: int[B], the one of each instance.
      first: float64[B], the first row of each instance.
      rows: of the fullest column.
      pitch: pixels of a level or a row, whichever is less.
    """

    columns: int
    column: np.ndarray
    first: np.ndarray
    rows: float
    pitch: float

    @staticmethod
    def cut(heights: np.ndarray, levels: int, columns: int) -> "Bands":
        """Instances of some rows each, in order, in columns of about as many rows."""
        before = heights.cumsum() - heights + np.arange(len(heights))
        share = before / max(1, before.max(initial=0) + 1)
        column = (share * columns).astype(int)
        top = np.array([before[column == c].min(initial=np.inf) for c in range(columns)])
        first = before - top[column]
        rows = float((first + heights).max(initial=1))
        wide = (WIDTH - 2 * MARGIN) / (columns * (levels + 0.5))
        return Bands(columns, column, first, rows, min(wide, PLOT_HEIGHT / rows, 2 * DOT_DIAMETER))


class Plane(NamedTuple):
    """The places of nodes, before it is known how far levels and rows are apart.

    Attributes:
      level, row: float64[N], the place of each node; columns are `levels` and a half apart.
      levels: of the deepest instance.
      bands: of instances.
    """

    level: np.ndarray
    row: np.ndarray
    levels: int
    bands: Bands


def place_nodes(graph: Graph) -> Plane:
    """Places nodes, and instances in as many columns as make the nodes largest."""
    row = np.zeros(len(graph.node_type))
    heights = np.zeros(graph.num_instances)
    for i in range(graph.num_instances):
        part = slice(*graph.node_ptr[i : i + 2].tolist())
        row[part] = rows_of(graph, part)
        heights[i] = row[part].max(initial=-1) + 1
    levels = int(graph.depth.max(initial=0)) + 1
    bands = max((Bands.cut(heights, levels, c) for c in range(1, 13)), key=lambda b: b.pitch)
    instance = graph.node_instance
    level = graph.depth + bands.column[instance] * (levels + 0.5)
    return Plane(level, row + bands.first[instance], levels, bands)


def rows_of(graph: Graph, part: slice) -> np.ndarray:
    """float64[n], the rows of one instance's nodes, at least 1 apart within each level."""
    level = graph.depth[part]
    ptr, maker = graph.preds
    operands = [maker[a:b] - part.start for a, b in zip(ptr[part], ptr[1:][part], strict=True)]
    readers: list[list[int]] = [[] for _ in operands]
    for n, makers in enumerate(operands):
        for m in makers:
            readers[m].append(n)
    row = np.zeros(len(level))
    levels = [np.flatnonzero(level == k) for k in range(int(level.max(initial=-1)) + 1)]
    for nodes in levels[:1]:
        row[nodes] = np.arange(len(nodes))
    weight = (1.0 + graph.height[part]) ** 2  # what leads far goes straight
    forward, backward = (operands, levels[1:]), (readers, levels[::-1])
    for neighbours, sweep in (forward, backward, forward, backward, forward):
        for nodes in sweep:
            middles = np.array(
                [row[neighbours[n]].mean() if len(neighbours[n]) else row[n] for n in nodes]
            )
            order = np.argsort(middles, kind="stable")
            row[nodes[order]] = spread_apart(middles[order], weight[nodes[order]])
    return row - row.min() if len(row) else row


def spread_apart(wishes: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Ascending places at least 1 apart, as close to ascending wishes as weighted squares count."""
    groups: list[tuple[float, float, int]] = []  # sums of wishes less positions and of weights
    for i, (place, w) in enumerate(zip(wishes.tolist(), weight.tolist(), strict=True)):
        total, heavy, count = (place - i) * w, w, 1
        while groups and groups[-1][0] * heavy >= total * groups[-1][1]:
            before, heavier, many = groups.pop()
            total, heavy, count = total + before, heavy + heavier, count + many
        groups.append((total, heavy, count))
    means = [total / heavy for total, heavy, _ in groups]
    return np.repeat(means, [count for *_, count in groups]) + np.arange(len(wishes))


class Scale(NamedTuple):
    """The scale at which a plane is drawn.

    Attributes:
      left: where levels begin.
      across, down: pixels of a level and of a row.
      labels: whether nodes have their names on them.
      wide: pixels of a node.
    """

    left: float
    across: float
    down: float
    labels: bool
    wide: float

    @staticmethod
    def of(graph: Graph, styles: TypeStyles, plane: Plane) -> "Scale":
        """With names if they fit, otherwise with dots as large as fit."""
        columns, rows = plane.bands.columns, plane.bands.rows
        left = MARGIN + (68.0 if graph.num_instances > 1 and columns == 1 else 0)
        pitch = (WIDTH - MARGIN - left) / (columns * (plane.levels + 0.5) - 0.5)
        box = min(110.0, max(map(text_width, styles.names), default=0) + 14)
        few = len(graph.node_type) <= MAX_LABELLED and columns == 1
        if few and pitch >= box + 26 and PLOT_HEIGHT / rows >= 21:
            return Scale(left, min(pitch, box + 54), min(PLOT_HEIGHT / rows, 30), True, box)
        across, down = min(pitch, 4 * DOT_DIAMETER), min(PLOT_HEIGHT / rows, DOT_DIAMETER + 8)
        return Scale(left, across, down, False, min(DOT_DIAMETER, 0.8 * down, 0.6 * across))


def _draw_nodes(
    graph: Graph, styles: TypeStyles, title: str, plane: Plane, instance: int
) -> Picture:
    """Draws every node, by name or as a dot."""
    scale, bands = Scale.of(graph, styles, plane), plane.bands
    returned = np.zeros(len(graph.node_type), bool)
    returned[graph.value_node[graph.outputs[graph.outputs >= 0]]] = True
    ring = [("ring", "returned", "results of the function")] if returned.any() else []
    levels = bands.columns * (plane.levels + 0.5) - 0.5
    canvas = Canvas(
        title,
        "Left to right: levels, the longest path from the inputs. Lines: from what is read to "
        "its reader." + (" A band for each instance." if graph.num_instances > 1 else ""),
        [*styles.legend(), *ring],
        max(SLIM_WIDTH, scale.left + scale.across * levels + MARGIN),
    )
    _draw_bands(canvas, plane, scale)
    x = scale.left + (plane.level + 0.5) * scale.across
    y = canvas.top + (plane.row + 0.5) * scale.down
    draw_edges(canvas, graph, x + scale.wide / 2, x - scale.wide / 2, y)
    hints = described_nodes(graph, styles, instance)
    for n, k in enumerate(styles.of_type[graph.node_type].tolist()):
        line = {"stroke": INK, "stroke_width": 2} if returned[n] else {}
        marks: dict[str, Any] = {"title": hints[n], "data_kind": "node", **line}
        if not scale.labels:
            canvas.circle(x[n], y[n], scale.wide / 2, fill=styles.colours[k], **marks)
            continue
        marks = {"stroke": styles.colours[k], "stroke_width": 1.5, "rx": 5, **marks}
        box = x[n] - scale.wide / 2, y[n] - 9, scale.wide, 18
        canvas.rect(*box, fill=paler(styles.colours[k]), **marks)
        name = fitted(styles.names[k], scale.wide - 8)
        canvas.text(x[n], y[n] + 4, name, anchor="middle", title=hints[n])
    return canvas.picture(canvas.top + bands.rows * scale.down)


def draw_edges(
    canvas: Canvas, graph: Graph, right: np.ndarray, left: np.ndarray, y: np.ndarray
) -> None:
    """Draws every edge, from the right side of a node to the left side of its reader."""
    pairs = np.unique(np.stack(graph.edges, 1), axis=0).tolist()
    steps = (curve(right[m], y[m], left[r], y[r]) for m, r in pairs)
    line: dict[str, Any] = {"stroke": GREY, "stroke_opacity": "0.5", "stroke_width": 1}
    canvas.path(steps, data_kind="edges", **line)


def _draw_bands(canvas: Canvas, plane: Plane, scale: Scale) -> None:
    """Draws lines between instances, and their numbers."""
    bands = plane.bands
    if len(bands.first) == 1:
        return
    stride = scale.across * (plane.levels + 0.5)
    single = bands.columns == 1
    for i, (first, c) in enumerate(zip(bands.first.tolist(), bands.column.tolist(), strict=True)):
        begin = MARGIN + c * stride
        y = canvas.top + (first - 0.5) * scale.down
        if first:
            end = canvas.width - MARGIN if single else begin + stride - scale.across / 2
            steps = f"M{short(begin)},{short(y)}H{short(end)}"
            canvas.path([steps], stroke=RULE, stroke_width=1)
        if single and scale.down >= 10:
            canvas.text(begin, y + scale.down + 4, f"instance {i}", fill=GREY, size=10)


# --- counted ---


def _draw_levels(graph: Graph, styles: TypeStyles, title: str) -> Picture:
    """Draws the number of nodes of every style at each level, and the edges between them."""
    levels = int(graph.depth.max(initial=0)) + 1
    kind = styles.of_type[graph.node_type]
    first, place = binned(graph.depth, levels, kind, len(styles), MAX_COLUMNS)
    columns = len(first) - 1
    maker, reader = graph.edges
    bundles = Bundles.of(place[maker], place[reader])
    canvas = Canvas(
        title,
        "Left to right: levels, the longest path from the inputs. Area: how many nodes. "
        f"{bundles.caption}",
        width=StyleField.fit(styles, columns)[2],
    )
    lanes = StyleField.draw(canvas, styles, first, "level")
    count = np.bincount(place, minlength=columns * len(styles))
    largest = 0.46 * min(lanes.pitch, lanes.tall)
    radius = np.where(count, np.maximum(2, largest * np.sqrt(count / max(1, count.max()))), 0)

    named = functools.partial(lanes.named, where="at", step="level", steps="levels")
    bundles.draw(canvas, styles, lanes.at, named)
    for where in np.flatnonzero(count).tolist():
        k = where % len(styles)
        number, (x, y) = int(count[where]), lanes.at(where)
        hint = f"{counted(number, 'node')}: {named(where)}"
        marks = {"data_kind": "nodes", "data_count": str(number)}
        canvas.circle(x, y, radius[where], fill=styles.colours[k], title=hint, **marks)
        if text_width(f"{number}", 10) <= 2 * radius[where] - 3:
            canvas.text(x, y + 3.5, f"{number}", size=10, anchor="middle", fill="white")
    return canvas.picture(lanes.bottom)


@dataclass(frozen=True, eq=False)
class Bundles:
    """Edges between places, those with the same ends as one line; the largest 400.

    Attributes:
      ends: int[..., 2], from which place to which.
      count: int[...], how many edges.
      total: how many lines there would be.
    """

    ends: np.ndarray
    count: np.ndarray
    total: int

    @staticmethod
    def of(start: np.ndarray, end: np.ndarray) -> "Bundles":
        away = np.stack([start, end], 1)[start != end]
        ends, count = np.unique(away, axis=0, return_counts=True)
        drawn = np.sort(np.argsort(-count, kind="stable")[:MAX_BUNDLES])
        return Bundles(ends[drawn], count[drawn], len(ends))

    @property
    def caption(self) -> str:
        """A description of the lines."""
        few = f"the {len(self.ends)} largest of {self.total:,}, "
        drawn = few if len(self.ends) < self.total else ""
        return f"Lines, {drawn}in the colour of what is read: how many reads."

    def draw(
        self,
        canvas: Canvas,
        styles: TypeStyles,
        at: Callable[[int], tuple[float, float]],
        named: Callable[[int], str],
    ) -> None:
        """Draws them between places `at` some point; place p has style `p % len(styles)`."""
        most = max(100, self.count.max(initial=1))
        for (a, b), number in zip(self.ends.tolist(), self.count.tolist(), strict=True):
            canvas.path(
                [curve(*at(a), *at(b))],
                title=f"{counted(number, 'read')}: {named(b)} of {named(a)}",
                stroke=styles.colours[a % len(styles)],
                stroke_opacity="0.4",
                stroke_width=max(0.7, 7 * (number / most) ** 0.5),
                data_kind="bundle",
            )
