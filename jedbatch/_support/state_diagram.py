"""Drawing a state machine as SVG, from nothing but boxes and arrows."""

import math
from collections.abc import Sequence
from html import escape

from jedbatch._support.canvas import COLOURS, fitted

BOX, LINE, GAP = 188, 15, 56  # width of a box, height of a line of text, space between boxes
MAX_STATES = 36  # states drawn


def state_diagram(
    boxes: Sequence[tuple[str, Sequence[str]]], arrows: Sequence[tuple[int, int, int]]
) -> str:
    """An SVG picture of states, in rows, and of the moves between them.

    Args:
      boxes: title and further lines of text of each state; equal titles have equal colours.
      arrows: (from, to, how often); the width of an arrow grows with its logarithm.

    Returns:
      The picture as text. Of more than 36 states the first are drawn, and how many are not.
    """
    hidden = len(boxes) - MAX_STATES
    boxes = boxes[:MAX_STATES]
    columns = max(1, math.ceil(math.sqrt(len(boxes) * 0.8)))
    rows = math.ceil(len(boxes) / columns)
    tall = LINE * (1 + max((len(lines) for _, lines in boxes), default=1)) + 14
    width = columns * (BOX + GAP) + GAP
    height = rows * (tall + GAP) + GAP + (20 if hidden > 0 else 0)
    colours = {title: COLOURS[i % 8] for i, title in enumerate(dict.fromkeys(t for t, _ in boxes))}

    def centre(i: int) -> tuple[float, float]:
        row, column = divmod(i, columns)
        if row % 2:
            column = columns - 1 - column  # as the ox ploughs, so that neighbours stay close
        return GAP + BOX / 2 + column * (BOX + GAP), GAP + tall / 2 + row * (tall + GAP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, j, times in arrows:
        if max(i, j) < len(boxes):
            thick = 1 + math.log10(times)
            at, to = centre(i), centre(j)
            path, bend, tip = _loop(at, tall) if i == j else _curve(at, to, tall)
            parts.append(
                f'<g stroke="#555" stroke-opacity="0.6"><title>{times} times</title>'
                f'<path d="{path}" fill="none" stroke-width="{thick:.1f}"/>'
                f'<path d="{_head(bend, tip)}" fill="#555" stroke="none"/></g>'
            )
    for i, (title, lines) in enumerate(boxes):
        x, y = centre(i)
        left, top = x - BOX / 2, y - tall / 2
        parts.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX}" height="{tall}" rx="8" fill="white" '
            f'stroke="{colours[title]}" stroke-width="2"/>'
        )
        for k, text in enumerate([f"{i}: {title}", *lines]):
            style = f' font-weight="bold" fill="{colours[title]}"' if k == 0 else ' fill="#333"'
            shown = fitted(text, BOX - 20, 13 if k == 0 else 12)  # bold letters are wider
            parts.append(
                f'<text x="{left + 10:.0f}" y="{top + LINE * (k + 1) + 3:.0f}"{style}>'
                f"{escape(shown)}<title>{escape(text)}</title></text>"
            )
    if hidden > 0:
        parts.append(f'<text x="{GAP}" y="{height - 12}" fill="#333">… and {hidden} more</text>')
    return "\n".join([*parts, "</svg>"])


Point = tuple[float, float]


def _loop(at: Point, tall: float) -> tuple[str, Point, Point]:
    """A path from a box to itself over its upper right corner, its last bend and its end."""
    x, y = at[0] + BOX / 2, at[1] - tall / 2
    return (
        f"M{x - 30},{y} C{x - 30},{y - 40} {x + 40},{y - 20} {x},{y + 18}",
        (x + 40, y),
        (x, y + 18),
    )


def _curve(start: Point, end: Point, tall: float) -> tuple[str, Point, Point]:
    """A path from one box to another, its bend and its end.

    It is bent to the right, so that both ways can be told apart, and more if boxes lie between.
    """
    across, down = end[0] - start[0], end[1] - start[1]
    length = math.hypot(across, down)
    near = abs(across) < 1.5 * (BOX + GAP) and abs(down) < 1.5 * (tall + GAP)
    bend = (14 + 0.08 * length) if near else 0.9 * BOX
    x = (start[0] + end[0]) / 2 - bend * down / length
    y = (start[1] + end[1]) / 2 + bend * across / length

    def border(at: Point) -> Point:
        """Returns the point where the line from the middle of a box to the bend leaves the box."""
        dx, dy = x - at[0], y - at[1]
        share = min(BOX / 2 / max(abs(dx), 1e-9), tall / 2 / max(abs(dy), 1e-9), 1.0)
        return at[0] + dx * share, at[1] + dy * share

    (x0, y0), (x1, y1) = border(start), border(end)
    return f"M{x0:.1f},{y0:.1f} Q{x:.1f},{y:.1f} {x1:.1f},{y1:.1f}", (x, y), (x1, y1)


def _head(bend: Point, tip: Point) -> str:
    """The head of an arrow that comes from a bend."""
    across, down = tip[0] - bend[0], tip[1] - bend[1]
    length = math.hypot(across, down) or 1.0
    dx, dy = 9 * across / length, 9 * down / length
    x, y = tip[0] - dx, tip[1] - dy
    return (
        f"M{tip[0]:.1f},{tip[1]:.1f} L{x - dy / 2:.1f},{y + dx / 2:.1f} "
        f"L{x + dy / 2:.1f},{y - dx / 2:.1f} z"
    )
