"""The command line, as a user runs it."""

import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from jedbatch.__main__ import EXAMPLES, command_line, main
from jedbatch.data import minibatches, synthetic_treebank


@pytest.mark.slow
def test_demo_trains(capsys):
    sizes = ["--trees", "240", "--epochs", "3", "--hidden", "16", "--batch-size", "8"]
    assert main(["demo", *sizes, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"training loss ([\d.]+)", text)]
    assert len(losses) == 3
    assert losses[-1] < 0.9 * losses[0]
    assert "208 trees for training, 32 held back" in text
    assert "Plan of 8 instances" in text
    assert re.search(r"\d+ XLA programs compiled, \d+ of them\s+after the first epoch", text)
    assert "batched, planned beforehand" in text


@pytest.mark.slow
def test_demo_tests_on_all_trees_held_back(monkeypatch):
    """Also where they make no whole minibatch at the end."""
    held_back = []

    def recorded(records, size, **options):
        for batch in minibatches(records, size, **options):
            if "seed" not in options:
                held_back.append(len(batch))
            yield batch

    monkeypatch.setattr("jedbatch._commands.demo.minibatches", recorded)
    sizes = ["--trees", "15", "--epochs", "1", "--hidden", "4", "--batch-size", "2"]
    assert main(["demo", *sizes]) == 0
    assert held_back == [2, 1]


@pytest.mark.slow
def test_demo_reads_a_treebank(tmp_path, capsys):
    def bracketed(t):
        if len(t) == 2:
            return f"({t[0]} word{t[1]})"
        return f"({t[0]} {bracketed(t[1])} {bracketed(t[2])})"

    path = tmp_path / "trees.txt"
    trees = synthetic_treebank(12, mean_length=4)
    path.write_text("".join(bracketed(t) + "\n" for t in trees))
    sizes = ["--epochs", "1", "--hidden", "4", "--batch-size", "2", "--seed", "3"]
    assert main(["demo", "--data", str(path), *sizes]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--hidden", "0"], "--hidden is 0; expected a positive number"),
        (["--trees", "1"], "--trees is 1; expected at least 2"),
        (["--epochs", "two"], "invalid int value"),
    ],
)
def test_demo_explains_what_is_wrong(args, match, capsys):
    try:
        status = main(["demo", *args])
    except SystemExit as stop:
        status = stop.code
    assert status != 0
    assert match in capsys.readouterr().err


def test_demo_needs_trees_to_hold_back(tmp_path, capsys):
    path = tmp_path / "trees.txt"
    path.write_text("(S (A a) (B b))\n")
    assert main(["demo", "--data", str(path)]) == 1
    assert "trees.txt holds 1 trees; expected at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_ends_with_an_example_that_is_parsed(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "-h"])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(f"example: jedbatch {command}")
    assert command_line().parse_args(shlex.split(EXAMPLES[command])).command == command


def test_the_script_is_the_command_line():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["jedbatch"]) is main


def test_arguments_are_parsed_without_jax():
    code = "import sys; sys.modules['jax'] = None\nfrom jedbatch.__main__ import main; main(['-h'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True)
def same_platform():
    """`--device` configures JAX for the whole process."""
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)
