"""How the applications are compared with their rivals, and how tables and pictures are made.

A `Side` prepares a minibatch on the host and runs it. All sides run the same minibatches in turns,
each until its results are there, and what they return is compared before anything is timed. Columns
of the table:

first s      seconds from new functions to the first result, compiling included; in brackets of CPU.
unseen ms    milliseconds for a minibatch never met before, from instances to results.
prepared ms  the same, of what the host prepares made before.
late         programs that XLA compiled for unseen minibatches, after three others.
lines        of code, without blank ones, comments and docstrings.

`×` is how many times as long a side takes as the first one, `jedbatch`.
"""

import argparse
import ast
import functools
import io
import os
import platform
import re
import time
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jedbatch
from jedbatch.testing import assert_close, compilations

PAGES = Path(__file__).parents[2] / "docs" / "applications"
WARM = 3  # minibatches before those that count as unseen


class Side(NamedTuple):
    """One way to compute a minibatch.

    Attributes:
      prepare: host work, a function of the parameters and the minibatch.
      run: a function of the parameters and what was prepared; returns what all sides return.
      few: minibatches to run it on, where it takes long; None for all.
      scale: what its seconds are multiplied by, where it runs a part of the instances.
      part: of what the others return, that part.
    """

    prepare: Callable[[Any, Any], Any]
    run: Callable[[Any, Any], Any]
    few: int | None = None
    scale: float = 1.0
    part: Callable[[Any], Any] = lambda results: results


class Application(NamedTuple):
    """A problem, and the sides that are compared.

    Attributes:
      params: shared by all instances.
      minibatches: `WARM` and some more, none like another.
      loop: a function of parameters and a minibatch, the plain loop over its instances.
      sides: by name, that of jedbatch first, made anew at each call.
      rtol: to which results agree, relative to the largest.
    """

    params: Any
    minibatches: Sequence[Any]
    loop: Callable[[Any, Any], Any]
    sides: Callable[[], dict[str, Side]]
    rtol: float = 1e-4


class Found(NamedTuple):
    """The times of a side, in seconds, and its lines of code."""

    first: float
    first_cpu: float
    unseen: np.ndarray
    prepared: np.ndarray
    late: int
    lines: int | None


# --- measuring ---


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Returns (seconds, results) of one run."""
    start = time.perf_counter()
    results = jax.block_until_ready(run())
    return time.perf_counter() - start, results


def measure(application: Application, lines: dict[str, int], turns: int) -> dict[str, Found]:
    """Runs all sides in turns.

    Args:
      application: what to run.
      lines: of code, by the name of the side.
      turns: how often prepared minibatches run.
    """
    params, minibatches, _, make, rtol = application
    sides = make()
    firsts, results, ready = {}, {}, {}
    for name, side in sides.items():
        wall, cpu = time.perf_counter(), time.process_time()
        ready[name] = side.prepare(params, minibatches[0])
        results[name] = jax.block_until_ready(side.run(params, ready[name]))
        took = time.perf_counter() - wall, time.process_time() - cpu
        firsts[name] = [side.scale * seconds for seconds in took]
    expected = next(iter(results.values()))
    for name, got in results.items():
        assert_close(got, sides[name].part(expected), rtol, what=name)

    late: dict[str, int] = dict.fromkeys(sides, 0)
    unseen: dict[str, list[float]] = {name: [] for name in sides}
    for i, minibatch in enumerate(minibatches[1:], 1):
        for name, side in sides.items():
            if side.few is not None and not WARM <= i < WARM + side.few:
                continue
            with compilations() as compiled:
                run = lambda s=side, m=minibatch: s.run(params, s.prepare(params, m))
                seconds, _ = timed(run)
            if i >= WARM:
                late[name] += round(side.scale * len(compiled))
                unseen[name].append(side.scale * seconds)

    prepared: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, side in sides.items():
            if side.few is None or turn <= side.few:
                seconds, _ = timed(functools.partial(side.run, params, ready[name]))
                prepared[name] += [side.scale * seconds] if turn else []
    return {
        name: Found(
            *firsts[name],
            np.array(unseen[name]),
            np.array(prepared[name]),
            late[name],
            lines.get(name),
        )
        for name in sides
    }


def sections(path: str | Path) -> dict[str, str]:
    """The code of a script below each line `# --- heading ---`, by heading."""
    parts = re.split(r"^# --- (.*) ---\n", Path(path).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def lines_of_code(text: str) -> int:
    """The number of lines that are neither blank nor comments nor docstrings."""
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docs = [
        (node.body[0].lineno, node.body[0].end_lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
    skipped |= {tokenize.INDENT, tokenize.DEDENT}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - {line for first, last in docs for line in range(first, last + 1)})


# --- showing ---


def table(found: dict[str, Found]) -> str:
    """The table of all sides, in Markdown."""
    header = ["", "first s", "unseen ms", "×", "prepared ms", "×", "late", "lines"]
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    base = next(iter(found.values()))

    def ratio(ours: np.ndarray, theirs: np.ndarray) -> str:
        count = min(len(ours), len(theirs))
        return f"{np.median(theirs[:count] / ours[:count]):.2f}" if theirs is not ours else ""

    def milliseconds(seconds: np.ndarray) -> str:
        ms = 1e3 * np.median(seconds)
        return f"{ms:.4g}" if ms < 1000 else f"{ms:,.0f}"

    for name, side in found.items():
        rows.append(
            [
                name,
                f"{side.first:.1f} ({side.first_cpu:.1f})",
                milliseconds(side.unseen),
                ratio(base.unseen, side.unseen),
                milliseconds(side.prepared),
                ratio(base.prepared, side.prepared),
                str(side.late),
                "–" if side.lines is None else str(side.lines),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary() -> str:
    """The rivals of all applications, in Markdown, from the tables of their pages."""
    header = ["application", "rival", "× unseen", "× prepared", "late", "lines, rival's"]
    rows = [header, ["---"] * 2 + ["---:"] * 4]
    navigation = (PAGES.parents[1] / "mkdocs.yml").read_text()
    for name in re.findall(r"applications/(\w+)\.md", navigation):
        if name == "index":
            continue
        page = (PAGES / f"{name}.md").read_text()
        title = page.split("\n")[0].removeprefix("# ")
        made = page.split("<!-- measured -->")[1].split("<!-- end -->")[0]
        sides = [line[2:-2].split(" | ") for line in made.split("\n") if line.startswith("| ")][2:]
        *_, late, lines = sides[0]
        for side, _, _, unseen, _, prepared, _, of_rival in sides[1:]:
            if not side.startswith("jedbatch"):
                ratios = [f"{float(x):,.2f}" if float(x) < 100 else f"{float(x):,.0f}"
                          for x in (unseen, prepared)]  # fmt: skip
                rows.append([f"[{title}]({name}.md)", side, *ratios, late, f"{lines}, {of_rival}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def put_in(page: Path, mark: str, text: str) -> None:
    """Puts a text into a page, between a comment that is the mark and one that ends it."""
    before, rest = page.read_text().split(f"<!-- {mark} -->", 1)
    _, after = rest.split("<!-- end -->", 1)
    page.write_text(f"{before}<!-- {mark} -->\n{text}\n<!-- end -->{after}")


def machine() -> str:
    """The machine and the versions, in one line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor()
    return (
        f"{name}, {os.cpu_count()} cores, device {jax.devices()[0].device_kind}; "
        f"Python {platform.python_version()}, JAX {jax.__version__}, NumPy {np.__version__}"
    )


def draw(found: dict[str, Found], path: Path, illustrate: Callable[[Any], None]) -> None:
    """Draws an illustration of the application, and how long each side takes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jedbatch"  # the same picture, the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    illustrate(left)
    names = list(found)
    for name, mark in (("unseen", "o"), ("prepared", "D")):
        times = [1e3 * float(np.median(getattr(found[side], name))) for side in names]
        label = "from instances to results" if name == "unseen" else "of what is prepared"
        right.plot(times, range(len(names)), mark, label=label, alpha=0.8)
    first, last = right.get_xlim()
    if last > 10 * first:
        right.set_xscale("log")
    else:
        right.set_xlim(0, last)
    right.set_yticks(range(len(names)), [name.replace("`", "") for name in names])
    right.set_ylim(len(names) - 0.5, -0.5)
    right.set_xlabel("milliseconds for a minibatch")
    right.grid(axis="x", which="both", alpha=0.3)
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 2, "frameon": False}
    right.legend(fontsize="small", **above)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(
    script: str,
    doc: str | None,
    make: Callable[[bool], Application],
    illustrate: Callable[[Any], None],
    shares: dict[str, Sequence[str]],
) -> None:
    """Measures an application and prints the table.

    Args:
      script: the file of the application.
      doc: its docstring.
      make: makes the application, a tiny one if its argument is true.
      illustrate: draws something about it on an axis of matplotlib.
      shares: by the name of a side, the headings in the script of the code that it needs.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--turns", type=int, default=10, help="of prepared minibatches")
    parser.add_argument("--write", action="store_true", help="put table and picture into the page")
    options = parser.parse_args()
    parts = sections(script)
    lines = {
        name: lines_of_code("\n".join(parts[heading] for heading in headings))
        for name, headings in shares.items()
    }
    found = measure(make(options.quick), lines, options.turns)
    text = table(found)
    print(machine(), text, sep="\n\n")
    if options.write and not options.quick:
        name = Path(script).stem
        draw(found, PAGES / f"{name}.svg", illustrate)
        put_in(PAGES / f"{name}.md", "measured", f"{text}\n\n{machine()}.")
        put_in(PAGES / "index.md", "summary", summary())


def planned(batched: jedbatch.Batched, kind: Callable = lambda fn: fn, **options: Any) -> Side:
    """The side of jedbatch for functions of (params, instance): plan, and apply under `jax.jit`.

    Args:
      batched: made by `jedbatch.batch`.
      kind: maps a function of (params, plan) to what is run, such as its gradient.
      **options: of `plan`.
    """
    run = jax.jit(kind(batched.apply), compiler_options=jedbatch.compiler_options())
    return Side(functools.partial(batched.plan, **options), run)
