"""How long until somebody new sees the first result, and how much of what they read is checked?

`install` and `demo` are the two commands of the README, in an environment made for them, in seconds
of the clock: packages come from the index or from the cache of `pip`, and nothing is compiled
beforehand. `first loss` is from the start of the second command to the first line of the training.

`names` are public classes, functions and methods; `documented` are those with a docstring. `blocks`
are Python blocks of the README and of the pages of the site, and files of examples; the tests run
all of them.
"""

import importlib
import inspect
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

import jedbatch
from benchmarks import common

ROOT = Path(__file__).parents[2]
MODULES = ("data", "models", "policies", "ragged", "serve", "testing", "viz", "errors")
BLOCK = re.compile(r"```python\n.*?```", re.DOTALL)


def commands() -> list[str]:
    """The first two commands of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"## Set up.*?```sh\n(.*?)\n```", text, re.DOTALL)
    assert found is not None
    install, demo = found[1].split(" && ")
    return [install, demo]


def seconds_of(command: str, environment: Path) -> tuple[float, float]:
    """(seconds that a command took, seconds until it printed a loss)."""
    begin, first = time.perf_counter(), 0.0
    words = [str(environment / "bin" / "python"), *command_of_python(command)]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not first and re.search(r"loss.*\d\.\d", line):
                first = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"`{command}` ended with {process.returncode}")
    return time.perf_counter() - begin, first


def command_of_python(command: str) -> list[str]:
    """The arguments of Python for `pip install …` or `python …` of the README."""
    program, *words = command.replace('"', "").split()
    return words if program == "python" else ["-m", program, *words]


def public_things() -> Iterator[tuple[str, object]]:
    """Public classes, functions and methods, by name, each once."""
    seen = set()
    for module in (jedbatch, *(importlib.import_module(f"jedbatch.{m}") for m in MODULES)):
        for name in module.__all__:
            thing = getattr(module, name)
            if id(thing) in seen or isinstance(thing, types.ModuleType) or not callable(thing):
                continue
            seen.add(id(thing))
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing) and thing.__module__.startswith("jedbatch"):
                for member, value in vars(thing).items():
                    if not member.startswith("_") and callable(value):
                        yield f"{module.__name__}.{name}.{member}", value


def documents() -> list[Path]:
    """The README, pages with Python blocks, and examples, all of which the tests run."""
    pages = [ROOT / "README.md", ROOT / "examples" / "answers.md", *(ROOT / "docs").rglob("*.md")]
    scripts = [p for p in (ROOT / "examples").rglob("*.py") if p.stem != "measuring"]
    return [p for p in pages if BLOCK.search(p.read_text())] + scripts


def main() -> None:
    options = common.options(__doc__).parse_args()
    print(common.machine())
    if not options.quick:  # which installs nothing
        with tempfile.TemporaryDirectory() as folder:
            environment = Path(folder) / "environment"
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
            install, demo = commands()
            installed, _ = seconds_of(install, environment)
            took, first = seconds_of(demo, environment)
        table = common.Table("install s", "demo s", "first loss s")
        table.row(f"{installed:.0f}", f"{took:.0f}", f"{first:.0f}")
    things = list(public_things())
    documented = [name for name, thing in things if inspect.getdoc(thing)]
    pages = documents()
    blocks = sum(len(BLOCK.findall(p.read_text())) if p.suffix == ".md" else 1 for p in pages)
    table = common.Table("names", "documented", "pages with code", "blocks")
    table.row(len(things), len(documented), len(pages), blocks)


if __name__ == "__main__":
    main()
