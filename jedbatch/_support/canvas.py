"""Pictures as SVG, from nothing but rectangles, circles, lines and text.

A picture is text that a browser shows. It must not depend on fonts or libraries, so widths of text
are estimated and what does not fit is cut; and it must not disturb the page it is shown on, so
there are no styles and no names in it. A mark says what it stands for when the mouse rests on it.
"""

import colorsys
import functools
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from jedbatch import checks
from jedbatch._support.files import write_text

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#bab0ac")
PALE_COLOURS = (
    "#a0cbe8",
    "#ffbe7d",
    "#8cd17d",
    "#d4a6c8",
    "#ff9d9a",
    "#2f7f7a",
    "#d7b5a6",
    "#79706e",
)
INK, GREY, RULE, TINT = "#333333", "#777777", "#e6e6e6", "#f6f7f9"
WIDTH, HEIGHT = 960, 700  # what pictures fit into, in pixels
SLIM_WIDTH = 640  # width of small ones
MARGIN, LINE = 20, 16  # around a picture; from one line of text to the next
UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in no XML


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawing. A notebook shows it; `save` writes it to a file that browsers show.

    Attributes:
      svg: the drawing as SVG text.
      title: what it shows.
    """

    svg: str
    title: str

    def _repr_svg_(self) -> str:
        """For notebooks."""
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the drawing to a file, whole or not at all.

        Args:
          path: its name, which ends in `.svg`.

        Raises:
          TypeError: it is no name of a file.
          ValueError: the name ends otherwise.
        """
        path = os.fsdecode(checks.path("Picture.save", path))
        if Path(path).suffix.lower() != ".svg":
            raise ValueError(
                f"`Picture.save` got {str(path)!r}, and writes SVG only; save it as "
                f"{str(Path(path).with_suffix('.svg'))!r}. A browser prints it to PDF, Inkscape "
                "and others turn it into PNG."
            )
        write_text("Picture.save", path, self.svg + "\n")

    def __repr__(self) -> str:
        return (
            f"<Picture of {len(self.svg) / 1000:.0f} kB: {self.title}; a notebook shows it, "
            "save('picture.svg') writes it>"
        )


def colours(count: int) -> list[str]:
    """As many colours as asked for: eight that differ much, eight paler ones, then any hue."""
    golden = (colorsys.hls_to_rgb(i * 0.618 % 1, 0.45 + 0.15 * (i % 3), 0.45) for i in range(count))
    generated = ("#" + "".join(f"{round(255 * x):02x}" for x in rgb) for rgb in golden)
    return [*COLOURS, *PALE_COLOURS, *generated][:count]


def paler(colour: str) -> str:
    """A colour for grounds on which to write: five parts of white to one of it."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(5 * 255 + x) // 6:02x}" for x in parts)


def text_width(text: str, size: float = 11) -> float:
    """About how wide a text is in pixels in a wide font, such as DejaVu Sans."""
    return size * sum(map(_letter_width, text))


@functools.cache
def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.05
    if letter in " .,:;|!'ijlIftr()[]-":
        return 0.38
    return 0.95 if letter in "mwMW@%—" else 0.72 if letter.isupper() else 0.64


def fitted(text: str, room: float, size: float = 11) -> str:
    """The text, cut to the room there is; empty if there is next to none."""
    if text_width(text, size) <= room:
        return text
    while text and text_width(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…" if len(text) > 1 else ""


def short(x: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{x:.1f}".removesuffix(".0")


def written(text: str) -> str:
    """A text as XML has it."""
    return escape(UNPRINTABLE.sub("�", text))


@dataclass
class Canvas:
    """A picture in the making.

    Attributes:
      title, caption: what is written above it.
      legend: (colour, text, explanation) of every kind of mark.
      width: in pixels; at least what the title takes.
      top: the first free line below title, caption and legend.
    """

    title: str
    caption: str = ""
    legend: Sequence[tuple[str, str, str]] = ()
    width: float = WIDTH
    top: float = field(init=False, default=MARGIN + 12)
    parts: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.width = min(WIDTH, max(self.width, text_width(self.title, 15) + 2 * MARGIN))
        room = self.width - 2 * MARGIN
        self.text(MARGIN, self.top, fitted(self.title, room, 15), size=15, bold=True)
        for line in wrapped(self.caption, room):
            self.top += LINE + 2
            self.text(MARGIN, self.top, line, fill=GREY)
        if self.legend:
            self.top += LINE + 6
            self._legend(room)
        self.top += LINE

    def _legend(self, room: float) -> None:
        x = float(MARGIN)
        for colour, text, explanation in self.legend:
            shown = fitted(text, room - 16)
            taken = 16 + text_width(shown)
            if x > MARGIN and x + taken > MARGIN + room:
                x, self.top = float(MARGIN), self.top + LINE + 2
            ring = colour == "ring"
            self.rect(
                *(x, self.top - 9, 10, 10),
                fill="white" if ring else colour,
                title=explanation,
                rx=2,
                **({"stroke": INK, "stroke_width": 2} if ring else {}),
            )
            self.text(x + 16, self.top, shown, title=explanation)
            x += taken + 18

    # --- marks ---

    def rect(self, x, y, width, height, *, fill: str, title: str = "", **attributes) -> None:
        """A rectangle from its upper left corner."""
        size = {"x": x, "y": y, "width": width, "height": height}
        self.mark("rect", title, {**size, "fill": fill, **attributes})

    def circle(self, x, y, radius, *, fill: str, title: str = "", **attributes) -> None:
        """A disk around its middle."""
        self.mark("circle", title, {"cx": x, "cy": y, "r": radius, "fill": fill, **attributes})

    def path(self, steps: Iterable[str], *, title: str = "", **attributes) -> None:
        """Lines; nothing if there are no steps."""
        if joined := "".join(steps):
            self.mark("path", title, {"d": joined, "fill": "none", **attributes})

    def area(self, boxes: Iterable[str], *, fill: str, opacity: float) -> None:
        """Shades parts of what is drawn, which still answers to the mouse."""
        through = {"fill_opacity": f"{opacity}", "pointer_events": "none"}
        self.path(boxes, **{"fill": fill, **through})

    def text(self, x, y, text: str, *, size=11.0, bold=False, fill=INK, anchor="start", title=""):
        """A line of text; nothing if it is empty."""
        if text:
            style: dict = {"font_size": size} if size != 11 else {}
            style |= {"font_weight": "bold"} if bold else {}
            style |= {"text_anchor": anchor} if anchor != "start" else {}
            hint = f"<title>{written(title)}</title>" if title else ""
            opened = self._opened("text", {"x": x, "y": y, "fill": fill, **style})
            self.parts.append(f"{opened}>{written(text)}{hint}</text>")

    def mark(self, name: str, title: str, attributes: dict) -> None:
        """Any element; the title is shown when the mouse rests on it."""
        opened = self._opened(name, attributes)
        hint = f"><title>{written(title)}</title></{name}>" if title else "/>"
        self.parts.append(opened + hint)

    def _opened(self, name: str, attributes: dict) -> str:
        parts = (
            f'{key.replace("_", "-")}="{written(x) if isinstance(x, str) else short(x)}"'
            for key, x in attributes.items()
        )
        return f"<{name} {' '.join(parts)}"

    def picture(self, bottom: float) -> Picture:
        """The picture, down to some line."""
        wide, tall = short(self.width), short(bottom + MARGIN)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" '
            f'width="{wide}" height="{tall}" role="img" aria-label="{written(self.title)}" '
            'font-family="sans-serif" font-size="11">'
        )
        ground = '<rect width="100%" height="100%" fill="white"/>'
        return Picture("\n".join([head, ground, *self.parts, "</svg>"]), self.title)


def wrapped(text: str, room: float) -> list[str]:
    """The text in lines that fit."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}") <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def curve(x0: float, y0: float, x1: float, y1: float) -> str:
    """A step of a path: from one point to another, level at both ends."""
    middle = (x0 + x1) / 2
    ends = f"{short(middle)},{short(y0)} {short(middle)},{short(y1)} {short(x1)},{short(y1)}"
    return f"M{short(x0)},{short(y0)}C{ends}"


def ticks(count: int, most: int = 12) -> range:
    """Some of the numbers below `count`, at round distances."""
    steps = (k * 10**e for e in range(12) for k in (1, 2, 5))
    return range(0, count, next(step for step in steps if count <= most * step))


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 node`, `2 nodes`, `3 batches`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
