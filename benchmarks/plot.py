"""Puts the summary of the tables in `results` into `README.md`, as ten rows and as one plot.

    python benchmarks/plot.py

The rows are of inference with minibatches of 64 instances and 256 hidden units, or the most hidden
units that were measured where those are fewer.
"""

import csv
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BATCH, HIDDEN = 64, 256
RIVALS = ("hand-written JAX", "loop", "PyTorch")
STYLES = {"hand-written JAX": "oC1", "loop": "xC3", "PyTorch": "sC2"}


class Row(NamedTuple):
    """A workload: instances per second, and how many times as long rivals take, as tables say."""

    title: str
    hidden: int
    rate: float
    ratios: tuple[str, ...]


def read(name: str) -> list[dict[str, str]]:
    """Returns the rows of a table, by the names of its columns."""
    lines = (RESULTS / f"{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def summary() -> list[Row]:
    """Returns the ten rows."""
    chosen: dict[str, dict[str, str]] = {}
    for row in read("inference"):
        if int(row["batch"]) == BATCH and int(row["hidden"]) <= HIDDEN:
            best = chosen.setdefault(row["workload"], row)
            if int(row["hidden"]) > int(best["hidden"]):
                chosen[row["workload"]] = row
    found = []
    for title, row in chosen.items():
        ratios = tuple(row[f"{name} ×"] for name in ("by hand", "loop", "torch by hand"))
        found.append(Row(title, int(row["hidden"]), float(row["planned /s"]), ratios))
    (row,) = (
        row
        for row in read("padding")
        if (row["mode"], row["hidden"], row["batch"]) == ("inference", str(HIDDEN), str(BATCH))
    )
    by_hand = min((row[f"{name} ×"] for name in ("longest", "buckets", "eights")), key=float)
    rate = 1e6 / float(row["jedbatch µs"])
    found.append(Row("Transformer encoder", HIDDEN, rate, (by_hand, row["loop ×"], "")))
    return found


def markdown(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [["workload", "instances/s", *(f"× {name}" for name in RIVALS)]]
    lines.append(["---"] + ["---:"] * (len(lines[0]) - 1))
    for row in rows:
        title = row.title if row.hidden == HIDDEN else f"{row.title}, hidden {row.hidden}"
        lines.append([title, f"{row.rate:,.0f}", *(x or "–" for x in row.ratios)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draws how many times as long the rivals take, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jedbatch"  # the same picture, the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.32 * len(rows)))
    heights = range(len(rows))
    for rival, ratios in zip(RIVALS, zip(*(row.ratios for row in rows), strict=True), strict=True):
        points = [(float(x), y) for x, y in zip(ratios, heights, strict=True) if x]
        marker, colour = STYLES[rival][0], STYLES[rival][1:]
        axis.plot(*zip(*points, strict=True), marker, color=colour, label=rival, ms=6)
    axis.axvline(1, color="C0", label="jedbatch")
    axis.set_yticks(heights, [row.title for row in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    ticks = [1, 2, 3, 4, 6, 8, 12]
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_xlabel("times as long as jedbatch (right of 1, jedbatch is faster)")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    rows = summary()
    readme = HERE / "README.md"
    pattern = r"(<!-- summary -->\n).*?(<!-- end -->)"
    put = lambda m: f"{m[1]}{markdown(rows)}\n{m[2]}"  # noqa: E731
    text, count = re.subn(pattern, put, readme.read_text(), flags=re.DOTALL)
    if not count:
        raise SystemExit("README.md has no line `<!-- summary -->`")
    readme.write_text(text)
    draw(rows, HERE / "plots" / "summary.svg")


if __name__ == "__main__":
    main()
