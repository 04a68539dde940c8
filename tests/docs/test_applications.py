"""The applications: all sides compute what the loop computes, and nothing compiles late."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases.helpers import assert_close, assert_no_recompile, mostly_slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "applications"
if not FOLDER.exists():
    pytest.skip("examples are not installed", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import measuring  # noqa: E402

SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "measuring")


@pytest.fixture(autouse=True)
def _rows_and_biases():
    with jax.numpy_rank_promotion("allow"):
        yield


def load(name):
    code = (FOLDER / f"{name}.py").read_text()
    for library in re.findall(r"^import (\w+)$", code, re.MULTILINE):
        pytest.importorskip(library)
    return __import__(name)


@pytest.mark.parametrize("name", mostly_slow(SCRIPTS, "symbolic_regression"))
def test_all_sides_are_the_loop(name):
    """Later minibatches too, for which our side compiles nothing."""
    params, minibatches, loop, make, rtol = load(name).make(True)
    expected = [loop(params, minibatch) for minibatch in minibatches]
    sides = make()

    def check(name, i):
        side = sides[name]
        got = side.run(params, side.prepare(params, minibatches[i]))
        assert_close(got, side.part(expected[i]), rtol, what=f"{name}, minibatch {i}")

    for side in sides:
        check(side, 0)
    for i in range(1, measuring.WARM):
        check("jedbatch", i)
    with assert_no_recompile():
        for i in range(measuring.WARM, len(minibatches)):
            check("jedbatch", i)


def test_lines_of_code():
    text = '''
# one
def double(x):
    """Doubles.

    A number.
    """
    y = [
        2 * x,
    ]

    return y  # two
'''
    assert measuring.lines_of_code(text) == 5


def test_columns_of_the_table():
    seconds = np.array([0.5, 1.0, 2.0])
    found = {
        "jedbatch": measuring.Found(2.0, 1.5, seconds, seconds / 10, 0, 7),
        "by hand": measuring.Found(1.0, 0.5, 2 * seconds, seconds[:2], 3, None),
    }
    rows = [line.strip("| ").split(" | ") for line in measuring.table(found).splitlines()]
    assert rows[2] == ["jedbatch", "2.0 (1.5)", "1,000", "", "100", "", "0", "7"]
    assert rows[3] == ["by hand", "1.0 (0.5)", "2,000", "2.00", "750", "10.00", "3", "–"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_pages_show_what_was_measured(name):
    """Tables have the sides of the script, and name parts of it that are there."""
    page = (measuring.PAGES / f"{name}.md").read_text()
    shares = load(name).SHARES
    measured = page.split("<!-- measured -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| (\S.*?) \| .* \| (\d+) \|$", measured, re.MULTILINE)
    assert [side for side, _ in rows] == list(shares)
    parts = measuring.sections(FOLDER / f"{name}.py")
    assert set().union(*shares.values()) <= parts.keys()
    shown = re.findall(r"<!-- code: (\S+) (.*?) -->", page)
    assert shown
    for path, heading in shown:
        assert path == f"examples/applications/{name}.py"
        assert heading in parts
    assert (measuring.PAGES / f"{name}.svg").exists()


def test_summary_is_that_of_the_pages():
    index = (measuring.PAGES / "index.md").read_text()
    assert f"<!-- summary -->\n{measuring.summary()}\n<!-- end -->" in index
