"""What is written runs: examples in docstrings and in the README."""

import doctest
import importlib
import inspect
import pkgutil
import pydoc
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from cases.helpers import mostly_slow

import jedbatch

README = Path(__file__).parents[2] / "README.md"
MODULES = [
    m.name
    for m in pkgutil.walk_packages(jedbatch.__path__, "jedbatch.")
    for path in [Path(m.module_finder.find_spec(m.name).origin)]
    if path.suffix == ".py" and ">>>" in path.read_text()
]
FAST = [name for name in MODULES if not name.startswith("jedbatch.models.")]


@pytest.mark.parametrize("name", mostly_slow(MODULES, *FAST))
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_public_functions_have_examples():
    for name in (
        "batch",
        "calibrate",
        "cell",
        "evaluate",
        "layout",
        "lazy",
        "learn",
        "lower_bound",
        "schedule",
    ):
        assert ">>>" in inspect.getdoc(getattr(jedbatch, name)), name


def test_help_of_batch_is_a_page():
    text = pydoc.render_doc(jedbatch.batch, renderer=pydoc.plaintext)
    assert len(text.splitlines()) <= 60
    assert text.index(">>>") < text.index("Args:") < text.index("Returns:")
    page = (README.parent / "docs" / "api" / "batching.md").read_text()
    options = list(inspect.signature(jedbatch.batch).parameters)[1:]
    assert set(re.findall(r"^- `(\w+)`: ", page, re.MULTILINE)) == {*options} - {"key"}


def test_signatures_are_shown_as_they_are_written():
    shown = str(inspect.signature(jedbatch.batch(len, 0).plan))
    assert "mesh: 'jax.sharding.Mesh | None' = None" in shown


def test_everything_public_is_documented():
    for name in jedbatch.__all__:
        thing = getattr(jedbatch, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and callable(value):
                    assert inspect.getdoc(value), f"{name}.{member}"


def test_readme_runs():
    """All Python blocks, one after the other; `print` shows what the README says it shows."""
    text = README.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"```\n(Plan of .*?)\.\.\.\n```", text, re.DOTALL).group(1)
    printed = []
    names = {"print": lambda x: printed.append(str(x))}
    first = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        first = first or dict(names)
    params, trees, encode = first["params"], first["trees"], first["encode"]
    loop = jax.grad(lambda p: sum(encode(p, tree) for tree in trees).sum())(params)
    for name, slope in loop.items():
        assert np.abs(slope).max() > 0.1, "there is something to compare"
        np.testing.assert_allclose(first["slope"][name], slope, atol=1e-5)
    assert printed[0].startswith(shown)
    assert names["states"].shape == (2, 4)
    assert "3 calls with 25 rows" in printed[1]
    assert " rounds: " in printed[2]


def test_packages_hold_what_the_table_says():
    page = README.parent / "docs" / "algorithms" / "index.md"
    table = page.read_text().split("## How it works")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:3] == "| `"]
    package = Path(jedbatch.__file__).parent
    assert {row[0].strip("`") for row in rows} == {
        path.name for path in package.iterdir() if path.is_dir() and path.name.startswith("_")
    } - {"__pycache__"}
    for name, _, noun, files in rows:
        folder = package / name.strip("`")
        for file in re.findall("`(.*?)`", files):
            path = folder.joinpath(*file.split(".")).with_suffix(".py")
            assert path.exists(), (name, file)
        text = "\n".join(path.read_text() for path in folder.rglob("*.py"))
        assert re.search(rf"^class {noun.strip('`')}\b", text, re.MULTILINE), (name, noun)


def test_readme_has_two_commands():
    commands = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(commands) == 2
    assert commands[0].strip().endswith("python -m jedbatch demo")
    assert commands[1].strip().endswith("python -m pytest")
