"""Node types in pictures: their names and colours, and a lane for each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._support.canvas import (
    GREY,
    HEIGHT,
    MARGIN,
    SLIM_WIDTH,
    TINT,
    WIDTH,
    Canvas,
    colours,
    fitted,
    text_width,
    ticks,
)

MAX_LANES = 24  # node types told apart
MAX_MARKS = 800  # in lanes
REST_COLOUR = "#c9c9c9"


@dataclass(frozen=True)
class TypeStyles:
    """The node types of a graph as its pictures show them, in every picture the same.

    Of more than 24 types the rarest have one style, the last. Letters: `K` styles, `T` types.

    Attributes:
      names, colours: of each style.
      counts: int64[K], nodes of each.
      of_type: int64[T], the style of each type; -1 where it has no nodes.
      explained: each type in full.
    """

    names: list[str]
    colours: list[str]
    counts: np.ndarray
    of_type: np.ndarray
    explained: list[str]

    @staticmethod
    def of(graph: Graph) -> "TypeStyles":
        """Returns the styles of a graph, by type id."""
        counts, present = graph.nodes_per_type, np.array(graph.present_types, np.int64)
        drawn = present
        if len(present) > MAX_LANES:
            drawn = np.sort(present[np.argsort(-counts[present], kind="stable")[: MAX_LANES - 1]])
        of_type = np.full(len(graph.types), -1)
        of_type[present] = len(drawn)
        of_type[drawn] = np.arange(len(drawn))
        names = numbered_names([graph.types[t].name for t in drawn])
        shades = colours(len(drawn))
        explained = [str(t) for t in graph.types]
        if len(drawn) < len(present):
            names.append(f"{len(present) - len(drawn)} other types")
            shades.append(REST_COLOUR)
        per_style = np.bincount(of_type[graph.node_type], minlength=len(names))
        return TypeStyles(names, shades, per_style, of_type, explained)

    def __len__(self) -> int:
        return len(self.names)

    def counted_in(self, part: Graph) -> "TypeStyles":
        """Returns the same names and colours for a part of the graph, of its types alone."""
        counts = np.bincount(self.of_type[part.node_type], minlength=len(self))
        counted = np.flatnonzero(counts)
        place = np.full(len(self) + 1, -1)
        place[counted] = np.arange(len(counted))
        return TypeStyles(
            [self.names[k] for k in counted],
            [self.colours[k] for k in counted],
            counts[counted],
            place[self.of_type],
            self.explained,
        )

    def legend(self) -> list[tuple[str, str, str]]:
        """Returns (colour, text, explanation) of each style."""
        entries = []
        for k, (name, colour) in enumerate(zip(self.names, self.colours, strict=True)):
            types = [self.explained[t] for t in np.flatnonzero(self.of_type == k)]
            entries.append((colour, f"{name} × {self.counts[k]:,}", "\n".join(types)))
        return entries


def numbered_names(names: Sequence[str]) -> list[str]:
    """Returns the names, those that occur more than once with a number."""
    return [
        name if names.count(name) == 1 else f"{name}.{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def binned(
    step: np.ndarray, steps: int, lane: np.ndarray, lanes: int, most: int
) -> tuple[list[int], np.ndarray]:
    """Puts steps into columns, so few that they can be drawn.

    Args:
      step: int[n], when things happen, below `steps`.
      steps: how many there are.
      lane: int[n], below `lanes`.
      lanes: how many there are.
      most: columns; fewer if more than 800 pairs of a column and a lane would be met.

    Returns:
      The first step of every column and, last, `steps`; and int64[n], the place
      `column * lanes + lane` of each thing.
    """
    columns = max(1, min(steps, most))
    while True:
        place = step.astype(np.int64) * columns // max(1, steps) * lanes + lane
        if columns == 1 or len(np.unique(place)) <= MAX_MARKS:
            return [-(-c * steps // columns) for c in range(columns + 1)], place
        columns = -(-columns // 2)


@dataclass(frozen=True)
class StyleField:
    """A field with a lane for every style of nodes, in columns from left to right.

    Attributes:
      styles: of the lanes.
      first: the step with which each column begins, and how many steps there are.
      left, top: its upper left corner, right of the names.
      pitch: pixels from column to column.
      tall: pixels of a lane.
      bottom: the lowest line that it takes.
    """

    styles: TypeStyles
    first: Sequence[int]
    left: float
    top: float
    pitch: float
    tall: float
    bottom: float

    @staticmethod
    def fit(styles: TypeStyles, columns: int) -> tuple[float, float, float]:
        """Returns (where lanes begin, pixels of a column, width of a picture with so many)."""
        longest = max((text_width(name, 12) for name in styles.names), default=0)
        left = MARGIN + min(200.0, max(longest, 70) + 34)
        pitch = min(96.0, (WIDTH - MARGIN - left) / max(1, columns))
        return left, pitch, max(SLIM_WIDTH, left + pitch * columns + MARGIN)

    @staticmethod
    def draw(canvas: Canvas, styles: TypeStyles, first: Sequence[int], axis: str) -> "StyleField":
        """Draws lanes, their names and an axis; columns begin as `binned` says."""
        columns, steps = len(first) - 1, first[-1]
        left, pitch, width = StyleField.fit(styles, columns)
        tall = min(72.0, (HEIGHT - 66 - canvas.top) / max(1, len(styles)))
        end = canvas.top + tall * len(styles)
        lanes = StyleField(styles, first, left, canvas.top, pitch, tall, end + 34)
        for k, (colour, text, hint) in enumerate(styles.legend()):
            y = lanes.middle(k)
            if k % 2 == 0:
                canvas.rect(MARGIN, y - tall / 2, width - 2 * MARGIN, tall, fill=TINT)
            name = fitted(styles.names[k], left - MARGIN - 30, 12)
            roomy = tall >= 34
            canvas.rect(MARGIN + 7, y - (9 if roomy else 5), 10, 10, fill=colour, rx=2, title=hint)
            canvas.text(MARGIN + 24, y + (0 if roomy else 4), name, size=12, title=hint)
            if roomy:
                count = text.removeprefix(styles.names[k]).strip()
                canvas.text(MARGIN + 24, y + 15, count, fill=GREY)
        for step in ticks(steps, max(2, int(columns * pitch / 60))):
            x = lanes.x(step * columns / steps)
            canvas.text(x, end + 15, f"{step:,}", fill=GREY, anchor="middle")
        canvas.text(left, end + 32, axis, fill=GREY)
        return lanes

    def x(self, column: float) -> float:
        """The middle of a column."""
        return self.left + (column + 0.5) * self.pitch

    def middle(self, kind: float) -> float:
        """The middle of a lane."""
        return self.top + (kind + 0.5) * self.tall

    def at(self, place: int) -> tuple[float, float]:
        """The middle of a place, as `binned` numbers them."""
        return self.x(place // len(self.styles)), self.middle(place % len(self.styles))

    def named(self, place: int, where: str, step: str, steps: str) -> str:
        """A place in words, such as `leaf at level 3`, or `leaf at levels 3–5`."""
        column, k = divmod(place, len(self.styles))
        begin, end = self.first[column : column + 2]
        span = f"{step} {begin}" if end == begin + 1 else f"{steps} {begin}–{end - 1}"
        return f"{self.styles.names[k]} {where} {span}"
