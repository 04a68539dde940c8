"""Signatures and types of cells and batched functions; `cases/typed.py` has what mypy checks."""

import functools
import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jedbatch
from jedbatch._kernel.target import TARGETS
from jedbatch._layout.node_order import ORDERS
from jedbatch._schedule.encodings import ENCODINGS
from jedbatch._session.options import GRANULARITIES


def scale(params: dict, x: jax.Array, *, times: int = 2) -> jax.Array:
    """Scales an array."""
    return params["w"] * x**times


class Module:
    def __call__(self, params, x):
        return params * x

    @jedbatch.cell
    def method(self, params: float, x: float = 1.0) -> float:
        return params * x


FUNCTIONS = {
    "function": scale,
    "partial": functools.partial(scale, times=3),
    "jit": jax.jit(scale, static_argnames="times"),
    "lambda": lambda params, *xs: sum(xs, params),
    "callable object": Module(),
    "bound method": Module().__call__,
    "another cell": jedbatch.cell(scale),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("make", [jedbatch.cell, jedbatch.cell(name="other"), jedbatch.batch])
def test_signatures_are_those_of_the_function(name, make):
    fn = FUNCTIONS[name]
    made = make(fn)
    assert inspect.signature(made) == inspect.signature(fn)
    assert made.__wrapped__ is fn
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        if hasattr(fn, attribute):
            assert getattr(made, attribute) == getattr(fn, attribute)


def test_annotations_are_those_of_the_function():
    for make in (jedbatch.cell, jedbatch.batch):
        assert typing.get_type_hints(make(scale)) == typing.get_type_hints(scale)
    assert list(inspect.signature(Module().method).parameters) == ["params", "x"]
    assert typing.get_type_hints(Module.method)["x"] is float
    assert float(jedbatch.cell(scale)({"w": jnp.float32(3)}, x=2.0)) == 12


@pytest.mark.parametrize(
    ("function", "option", "names"),
    [
        (jedbatch.batch, "granularity", GRANULARITIES),
        (jedbatch.batch, "layout", ORDERS),
        (jedbatch.batch, "target", TARGETS),
        (jedbatch.Lazy.__init__, "layout", ORDERS),
        (jedbatch.compiler_options, "target", TARGETS),
        (jedbatch.Target.named, "name", TARGETS),
        (jedbatch.layout, "order", ORDERS),
        (jedbatch.learn, "encoding", ENCODINGS),
    ],
)
def test_options_are_annotated_with_the_names_there_are(function, option, names):
    assert set(names_in(typing.get_type_hints(function)[option])) == set(names)


def names_in(hint):
    """Returns the names that a union of literals and other types allows."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [name for part in typing.get_args(hint) for name in names_in(part)]


def test_overloads_take_the_options_of_the_function():
    own = inspect.signature(jedbatch.batch).parameters
    for overload in typing.get_overloads(jedbatch.batch):
        hints = typing.get_type_hints(overload)
        (options,) = typing.get_args(hints.pop("options"))
        names = set(hints) - {"return"} | set(typing.get_type_hints(options))
        assert names == set(own)
    assert len(typing.get_overloads(jedbatch.batch)) == 6


def test_the_package_says_that_it_is_typed():
    assert (Path(jedbatch.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_pyright_sees_what_mypy_sees(tmp_path):
    """In its strict mode, in which types of the package that are not known are errors, too."""
    pytest.importorskip(
        "basedpyright", reason="pyright is not installed: the extra `pyright` has it"
    )
    root = Path(jedbatch.__file__).parents[1]
    typed = Path(__file__).parents[1] / "cases" / "typed.py"
    options = {
        "include": [str(typed)],
        "extraPaths": [str(root)],
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": True,
    }
    config = tmp_path / "pyrightconfig.json"

    def check():
        config.write_text(json.dumps(options))
        command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(config)]
        command += ["--pythonpath", sys.executable]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(ran.stdout)
        assert found["summary"]["filesAnalyzed"] == 1, ran.stdout
        return [
            (e["range"]["start"]["line"] + 1, e["message"]) for e in found["generalDiagnostics"]
        ]

    assert not check()
    options["enableTypeIgnoreComments"] = False
    lines = typed.read_text().splitlines()
    marked = {n for n, line in enumerate(lines, 1) if "# type: ignore" in line}
    assert {line for line, _ in check()} == marked
