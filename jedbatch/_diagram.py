"""Drawing a state machine as SVG, from nothing but boxes and arrows."""

import math
from collections.abc import Sequence
from html import escape

BOX, LINE, GAP = 168, 15, 56  # width of a box, height of a line of text, space between boxes
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#bab0ac")
MOST = 36  # states drawn


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
    hidden = len(boxes) - MOST
    boxes = boxes[:MOST]
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
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, j, times in arrows:
        if max(i, j) < len(boxes):
            thick = 1 + math.log10(times)
            path = _loop(centre(i), tall) if i == j else _curve(centre(i), centre(j), tall)
            parts.append(
                f'<path d="{path}" fill="none" stroke="#555" stroke-opacity="0.6" '
                f'stroke-width="{thick:.1f}" marker-end="url(#tip)">'
                f"<title>{times} times</title></path>"
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
            shown = text if len(text) <= 26 else text[:25] + "…"
            parts.append(
                f'<text x="{left + 10:.0f}" y="{top + LINE * (k + 1) + 3:.0f}"{style}>'
                f"{escape(shown)}<title>{escape(text)}</title></text>"
            )
    if hidden > 0:
        parts.append(f'<text x="{GAP}" y="{height - 12}" fill="#333">… and {hidden} more</text>')
    return "\n".join([*parts, "</svg>"])


def _loop(at: tuple[float, float], tall: float) -> str:
    """A path from a box to itself, over its upper right corner."""
    x, y = at[0] + BOX / 2, at[1] - tall / 2
    return f"M{x - 30},{y} C{x - 30},{y - 40} {x + 40},{y - 20} {x},{y + 18}"


def _curve(start: tuple[float, float], end: tuple[float, float], tall: float) -> str:
    """A path from one box to another, bent to the right so that both ways can be told apart."""
    across, down = end[0] - start[0], end[1] - start[1]
    length = math.hypot(across, down)
    side = -down / length, across / length
    bend = 14 + 0.08 * length
    middle = [(a + b) / 2 + bend * s for a, b, s in zip(start, end, side, strict=True)]

    def border(at: tuple[float, float]) -> tuple[float, float]:
        """Where the line from the middle of a box to the bend leaves the box."""
        dx, dy = middle[0] - at[0], middle[1] - at[1]
        share = min(BOX / 2 / max(abs(dx), 1e-9), tall / 2 / max(abs(dy), 1e-9), 1.0)
        return at[0] + dx * share, at[1] + dy * share

    (x0, y0), (x1, y1) = border(start), border(end)
    return f"M{x0:.1f},{y0:.1f} Q{middle[0]:.1f},{middle[1]:.1f} {x1:.1f},{y1:.1f}"
