"""Writes what the suite measured as CSV files and plots.

    pytest benchmarks/suite --benchmark-only --full --data DIRECTORY --benchmark-json FILE
    python benchmarks/suite/report.py FILE...
    python benchmarks/plot.py

Several files are put together; of a case that is in more than one, the last counts. Tables go to
`benchmarks/results/NAME.csv`, plots to `benchmarks/plots`; `plot.py` then takes the summary of
`README.md` from the tables. `--print` prints the tables as Markdown and writes nothing.

The lines of a CSV file that begin with `#` say what was asked, with which command, on which machine
and at which commit it was measured, and what came of it. Writing a table again keeps those that say
what was asked and what came of it.
"""

import argparse
import csv
import io
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suite import figures

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results"
COMMAND = "pytest benchmarks/suite --benchmark-only --full --data DIRECTORY --benchmark-json FILE"
Row = dict[str, Any]
STAGES = ("trace", "merge", "schedule", "layout", "lower", "other", "transfer", "execute")
TYPICAL = 64, 256  # the size of minibatch and of states that stages are shown for
RIVALS = ("by hand", "loop", "torch by hand", "torch eager", "agenda", "depth")


def load(paths: Iterable[str]) -> dict[str, list[Row]]:
    """Returns measurements by the name of the benchmark, each row with its machine and date."""
    found: dict[tuple[str, str], Row] = {}
    for path in paths:
        data = json.loads(Path(path).read_text())
        where = {"machine": data["machine_info"].get("line", ""), "date": data["datetime"][:10]}
        for one in data["benchmarks"]:
            name = one["fullname"].split("::")[1].split("[")[0]
            row = one["extra_info"] | where | one["stats"]
            found[name, f"{one['fullname']} {row.get('threads')}"] = row
    by_name: dict[str, list[Row]] = {}
    for (name, _), row in found.items():
        by_name.setdefault(name.removeprefix("test_"), []).append(row)
    return by_name


class Table(NamedTuple):
    """The names of columns, and rows of as many cells, as they are printed."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Returns a Markdown table, its first column to the left."""
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.rows))

    def csv(self) -> str:
        """Returns the table as CSV, a number a cell where cells hold a number and its quartiles."""
        table = self.split(r"(\S+) \((\S+)–(\S+)\)", "{0}", "{0} (25 %)", "{0} (75 %)")
        table = table.split(r"(\S+) \((\S+)\)", "{0}", "{0} 95 %", suffix=" (95 %)")
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(table.header)
        for row in table.rows:
            plain = (re.sub(r"(?<=\d),(?=\d{3})", "", cell) for cell in row)
            lines.writerow("" if cell == "–" else cell for cell in plain)
        return text.getvalue()

    def split(self, pattern: str, *names: str, suffix: str = "") -> "Table":
        """Returns the table with columns whose cells hold several numbers cut into columns.

        Args:
          pattern: of such a cell, a group for each of the new columns.
          names: of the new columns, made from the name of the old one.
          suffix: of the names of columns that may be cut; it is left out.
        """
        columns: list[list[str]] = []
        for name, *cells in zip(self.header, *self.rows, strict=True):
            found = [re.fullmatch(pattern, cell) for cell in cells]
            fits = all(m or cell in ("–", "") for m, cell in zip(found, cells, strict=True))
            if fits and any(found) and name.endswith(suffix):
                name = name.removesuffix(suffix)
                groups = [m.groups() if m else ("–",) * len(names) for m in found]
                parts = zip(*groups, strict=True)
                columns += [[n.format(name), *p] for n, p in zip(names, parts, strict=True)]
            else:
                columns.append([name, *cells])
        header, *rows = map(list, zip(*columns, strict=True))
        return Table(header, rows)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Returns a table of cells as text."""
    return Table(list(header), [list(map(str, row)) for row in rows])


def number(x: float | None, digits: int = 3) -> str:
    """A number with so many digits that count."""
    return "–" if x is None else f"{x:,.{max(0, digits - 1 - len(str(int(abs(x)))) + 1)}f}"


def origin(rows: Sequence[Row]) -> str:
    """Machine, date and data of some rows."""
    origins = dict.fromkeys((row["machine"], row["date"]) for row in rows)
    return "\n".join(f"{machine}, {date}." for machine, date in origins)


# --- tables ---


def throughput(rows: Sequence[Row], mode: str) -> Table:
    """Instances per second, and how many times as long the others take."""
    rows = [row for row in rows if row["mode"] == mode]
    head = ["workload", "batch", "hidden", "planned /s", "known /s", "unseen /s"]
    rivals = [name for name in RIVALS if any(name in row["seconds"] for row in rows)]
    head += [*(f"{name} ×" for name in rivals), "GFLOP/s", "of product", "compiled"]
    lines = []
    for row in rows:
        speed = row["flop"] / row["seconds"]["planned"] / 1e9
        first = [row["title"], row["batch"], row["hidden"], *rates(row)]
        ratios = [ratio(row, name) for name in rivals]
        last = [f"{speed:.0f}", f"{share(row):.0%}", row["compilations_unseen"]]
        lines.append([*first, *ratios, *last])
    return table(head, lines)


def rates(row: Row) -> list[str]:
    """Instances per second: planned, known, unseen."""
    unseen = row["unseen"]["whole"] / 1e3 if row["unseen"] else None
    each = [row["seconds"].get("planned"), row["seconds"].get("known"), unseen]
    return [number(row["batch"] / seconds if seconds else None) for seconds in each]


def ratio(row: Row, name: str) -> str:
    """Returns the time of a rival over ours, with quartiles."""
    if name not in row["ratios"]:
        return "–"
    low, _, high = row["ratios"][name]
    middle = row["seconds"][name] / row["seconds"]["planned"]
    if name in ("loop", "torch eager"):
        return f"{middle:.1f}"
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def share(row: Row) -> float:
    """The fraction of the matrix product of the same run."""
    return row["flop"] / row["seconds"]["planned"] / row["product_rate"]


def published(rows: Sequence[Row]) -> Table:
    """The figures of the peers, carried over, and fractions of the product."""
    rows = [row for row in rows if row["threads"] in figures.XLA_PRODUCT]
    head = ["workload", "mode", "threads", "batch", "hidden"]
    head += ["planned /s", "known /s", "unseen /s"]
    head += ["of product", *(f"{name}: there → here (of product)" for name in figures.PEERS)]
    head += ["share / best peer's"]
    lines = []
    for row in rows:
        threads = row["threads"]
        known = figures.INFERENCE if threads == 1 else figures.TWO_THREADS
        if row["mode"] == "training":
            known = figures.TRAINING if threads == 1 else {}
        theirs = known.get(row["workload"], {}).get((row["batch"], row["hidden"]))
        if theirs is None:
            continue
        here = row["product_rate"] / figures.XLA_PRODUCT[threads]
        shares = [x and x * work(row) / figures.PEERS_PRODUCT[threads] for x in theirs]
        cells = [
            f"{number(x)} → {number(x * here)} ({part:.0%})" if x else "–"
            for x, part in zip(theirs, shares, strict=True)
        ]
        first = [row[key] for key in ("title", "mode", "threads", "batch", "hidden")]
        first += rates(row)
        gain = share(row) / max(filter(None, shares))
        lines.append([*first, f"{share(row):.0%}", *cells, f"{gain:.2f}"])
    return table(head, lines)


def work(row: Row) -> float:
    """Operations of one of the peers' instances; ours where theirs are not known."""
    if row["workload"] not in figures.FLOP:
        return row["flop"] / row["batch"]
    forwards = figures.FLOP[row["workload"]] * row["hidden"] ** 2
    return forwards * (3 if row["mode"] == "training" else 1)


def best(rows: Sequence[Row]) -> Table:
    """The batch size with the highest throughput, by workload and hidden size.

    Workloads that were measured with one size only are left out.
    """
    found: dict[tuple[str, str, int], list[tuple[float, int]]] = {}
    for row in rows:
        rate = row["batch"] / row["seconds"]["planned"]
        key = row["title"], row["mode"], row["hidden"]
        found.setdefault(key, []).append((rate, row["batch"]))
    found = {key: rates for key, rates in found.items() if len(rates) > 1}
    hidden = sorted({h for *_, h in found})
    lines = []
    for title, mode in dict.fromkeys(key[:2] for key in found):
        at = [max(found.get((title, mode, h), [(0.0, 0)])) for h in hidden]
        best_sizes = [f"{size} ({number(rate)} /s)" if size else "–" for rate, size in at]
        lines.append([title, mode, *best_sizes])
    return table(["workload", "mode", *(f"hidden {h}" for h in hidden)], lines)


def split(rows: Sequence[Row]) -> Table:
    """Milliseconds of each stage.

    Instances are `unseen`, never recorded before; `equal` to such as were, but other objects of
    Python; or `known`, the same objects.
    """
    head = ["workload", "mode", "batch", "hidden", "instances", *STAGES]
    lines = []
    for row in rows:
        for kind in ("unseen", "equal", "known"):
            if row.get(kind):
                times = [row[kind].get(stage, 0.0) for stage in STAGES]
                first = [row["title"], row["mode"], row["batch"], row["hidden"], kind]
                lines.append([*first, *(f"{ms:.2f}" for ms in times)])
    return table(head, lines)


def batches(rows: Sequence[Row]) -> Table:
    """Batches by policy."""
    names = list(rows[0]["counts"])
    head = ["workload", "batch", "nodes", "bound", *names, "µs/batch"]
    head += ["published: agenda, depth, best FSM"]
    lines = []
    for row in rows:
        theirs = figures.BATCHES.get(row["workload"]) if row["batch"] == 64 else None
        peers = "–"
        if theirs:
            peers = f"{theirs[0]}, {theirs[1]}, {min(filter(None, theirs[2:]))}"
        counts = [row["counts"][name] for name in names]
        micros = 1e6 * row["median"] / row["counts"]["learned"]
        first = [row["title"], row["batch"], row["nodes"], row["bound"]]
        lines.append([*first, *counts, f"{micros:.0f}", peers])
    return table(head, lines)


def learning(rows: Sequence[Row]) -> Table:
    """Milliseconds to learn a policy."""
    lines = [
        [
            row["title"],
            row["nodes"],
            f"{1e3 * row['median']:.0f}",
            figures.LEARNING_MS.get(row["workload"], "–"),
        ]
        for row in rows
    ]
    return table(["workload", "nodes of 32 instances", "learning ms", "published ms"], lines)


def latency(rows: Sequence[Row]) -> Table:
    """Milliseconds of small minibatches never seen before."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    head = ["workload", "batch", "hidden", *(f"{name} ms (95 %)" for name in names)]
    lines = []
    for row in rows:
        times = [
            f"{1e3 * row['seconds'][n]:.2f} ({1e3 * row['p95'][n]:.2f})"
            if n in row["seconds"]
            else "–"
            for n in names
        ]
        lines.append([row["title"], row["batch"], row["hidden"], *times])
    return table(head, lines)


def cells(rows: Sequence[Row]) -> Table:
    """A call of a cell: as written, by hand, ours."""
    head = ["cell", "batch", "hidden", "products", "moves", "kB moved"]
    head += ["as written µs", "by hand µs", "jedbatch µs", "packing µs", "planning ms"]
    lines = []
    for row in rows:
        three = [" / ".join(f"{x:.0f}" for x in row[k]) for k in ("products", "moves", "kilobytes")]
        micros = [f"{x:.1f}" for x in row["micros"]]
        first = [row["cell"], row["batch"], row["hidden"]]
        last = [f"{row['packing_us']:.0f}", f"{row['planning_ms']:.1f}"]
        lines.append([*first, *three, *micros, *last])
    return table(head, lines)


def models(rows: Sequence[Row]) -> Table:
    """The models of `jedbatch.models` against the loop over their instances."""
    head = ["model", "batch", "hidden", "mode", "nodes", "batches", "bound"]
    head += ["loop /s", "known /s", "planned /s", "known × loop", "planned × loop"]
    lines = []
    for row in rows:
        seconds = row["seconds"]
        rates = [number(row["batch"] / seconds[n]) for n in ("loop", "known", "planned")]
        gains = [f"{seconds['loop'] / seconds[n]:.1f}" for n in ("known", "planned")]
        first = [row[k] for k in ("title", "batch", "hidden", "mode", "nodes", "batches", "bound")]
        lines.append([*first, *rates, *gains])
    return table(head, lines)


def place(row: Row) -> tuple[str, str, int, int]:
    """Returns the sort key of a row."""
    title = row.get("title", row.get("cell", ""))
    return title, row.get("mode", ""), row.get("hidden", 0), row.get("batch", 0)


def unlimited(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that ran on the most threads."""
    most = max((row["threads"] for row in rows), default=0)
    return [row for row in rows if row["threads"] == most]


def tables(found: dict[str, list[Row]]) -> dict[str, tuple[str, Table]]:
    """Returns (origin, table) by name, for everything that was measured."""
    rows = {name: sorted(some, key=place) for name, some in found.items()}
    rows["unlimited"] = unlimited(rows.get("throughput", []))
    made: dict[str, tuple[str, Table]] = {}

    def add(name: str, source: str, make: Callable[..., Table], *more: Any) -> None:
        some = rows.get(source)
        if some:
            made[name] = origin(some), make(some, *more)

    add("inference", "unlimited", throughput, "inference")
    add("training", "unlimited", throughput, "training")
    add("published_figures", "throughput", published)
    add("best_batch_size", "unlimited", best)
    rows["typical"] = [row for row in rows["unlimited"] if (row["batch"], row["hidden"]) == TYPICAL]
    add("stages", "typical" if rows["typical"] else "unlimited", split)
    for name, make in (
        ("batches", batches),
        ("learning", learning),
        ("latency", latency),
        ("cells", cells),
        ("models", models),
    ):
        add(name, name, make)
    return made


def write(name: str, machine: str, made: Table) -> None:
    """Writes a table as CSV; comments of the last one stay, except for machine and commit."""
    path = RESULTS / f"{name}.csv"
    old = path.read_text().splitlines() if path.exists() else [f"# question: {name}", "#"]
    comments = [line for line in old if line.startswith("#")]
    keys = ("# command: ", "# machine: ", "# commit: ")
    comments = [line for line in comments if not line.startswith(keys)]
    git = ["git", "-C", str(BENCHMARKS), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    values = [COMMAND], machine.splitlines(), [commit]
    origin = [f"{key}{x}" for key, some in zip(keys, values, strict=True) for x in some]
    RESULTS.mkdir(exist_ok=True)
    path.write_text("\n".join([comments[0], *origin, *comments[1:], made.csv()]))


# --- plots ---


def plots(found: dict[str, list[Row]], folder: Path) -> None:
    """Throughput over batch sizes, one panel a workload, and where the time goes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jedbatch"  # the same picture, the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters: a third of the size
    folder.mkdir(exist_ok=True)
    rows = unlimited(found.get("throughput", []))
    for mode in ("inference", "training"):
        some = [row for row in rows if row["mode"] == mode]
        small = [row["hidden"] for row in some if row["hidden"] <= 256]
        if small:
            hidden, titles = max(small), {row["title"] for row in some}
            drawn = [r for r in some if r["hidden"] == hidden]
            sizes = {title: {r["batch"] for r in drawn if r["title"] == title} for title in titles}
            if several := [r for r in drawn if len(sizes[r["title"]]) > 1]:
                curves(several, folder / f"{mode}.svg")
    some = [row for row in rows if row["unseen"] and row["mode"] == "inference"]
    typical = [row for row in some if (row["batch"], row["hidden"]) == TYPICAL]
    if some:
        typical.sort(key=lambda row: sum(row["unseen"][stage] for stage in STAGES))
        bars(typical or some, folder / "stages.svg")


def curves(rows: Sequence[Row], path: Path) -> None:
    """Instances per second over batch sizes."""
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    titles = list(dict.fromkeys(row["title"] for row in rows))
    columns = min(3, len(titles))
    lines = -(-len(titles) // columns)
    height = 2.7 * lines + 0.9  # with room for the legend
    figure, axes = plt.subplots(lines, columns, figsize=(3.6 * columns, height), squeeze=False)
    names = {
        "planned": ("jedbatch, planned", "C0", "-o"),
        "known": ("jedbatch, planning included", "C0", "--o"),
        "by hand": ("JAX by hand", "C1", "-o"),
        "torch by hand": ("PyTorch by hand", "C2", "-s"),
        "torch eager": ("PyTorch, one by one", "C2", ":x"),
        "loop": ("the loop, jit-compiled cells", "C3", ":x"),
    }
    for axis, title in zip(axes.flat, titles, strict=False):
        of_title = sorted((r for r in rows if r["title"] == title), key=lambda r: r["batch"])
        for name, (label, colour, style) in names.items():
            some = [r for r in of_title if name in r["seconds"]]
            points = [(r["batch"], r["batch"] / r["seconds"][name]) for r in some]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, label=label, ms=4)
        axis.set(title=title, xscale="log", yscale="log")
        axis.set_xticks(sorted({r["batch"] for r in rows}), sorted({r["batch"] for r in rows}))
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(titles) :]:
        axis.remove()
    for row in axes:
        row[0].set_ylabel("instances per second")
    drawn = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(drawn.values(), drawn.keys(), loc="lower center", ncols=3, frameon=False)
    hidden, mode = rows[0]["hidden"], rows[0]["mode"]
    figure.suptitle(f"{mode}, hidden {hidden}, over the size of the minibatch")
    figure.tight_layout(rect=(0, 0.7 / height, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds of the stages of minibatches never seen before."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.8 + 0.34 * len(rows)))
    left = [0.0] * len(rows)
    names = [f"{r['title']}, {r['batch']}, h {r['hidden']}" for r in rows]
    for k, stage in enumerate(STAGES):
        wide = [row["unseen"].get(stage, 0.0) for row in rows]
        axis.barh(names, wide, left=left, label=stage, color=f"C{k}")
        left = [a + b for a, b in zip(left, wide, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds, instances never seen before")
    axis.legend(ncols=4, frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="of --benchmark-json")
    parser.add_argument("--print", action="store_true", help="as Markdown, and write nothing")
    args = parser.parse_args()
    found = load(args.files)
    made = tables(found)
    for name, (machine, one) in made.items():
        if args.print:
            print(f"\n## {name}\n\n{machine}\n\n{one.markdown()}")
        else:
            write(name, machine, one)
    if not args.print:
        plots(found, BENCHMARKS / "plots")


if __name__ == "__main__":
    main()
