"""Packages import each other in one direction, and so do the modules of each."""

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import jedbatch
from jedbatch import ragged
from jedbatch._record.run.trace import trace
from jedbatch._support import frames

PACKAGE = Path(jedbatch.__file__).parent
# Which packages a package may import, a name of the public ones included. All may import `LEAVES`.
LEAVES = {"errors", "checks"}
ALLOWED = {
    "_support": "",
    "_graph": "_support",
    "_jaxpr": "_graph _support",
    "_schedule": "_graph _support",
    "_learn": "_schedule _graph _support",
    "_record": "_jaxpr _graph _support",
    "_layout": "_schedule _graph _support",
    "_kernel": "_layout _jaxpr _graph _support",
    "_program": "_kernel _layout _schedule _jaxpr _graph _support",
    "_ragged": "_program _kernel _layout _record _jaxpr _graph _support",
    "_session": "_ragged _program _kernel _layout _learn _schedule _record _jaxpr _graph _support",
    "_control_flow": "_session _ragged _program _kernel _layout _schedule _record _jaxpr _graph "
    "_support",
    "_lazy": "_session _program _kernel _layout _learn _schedule _record _jaxpr _graph _support",
    "_draw": "_program _layout _schedule _jaxpr _graph _support",
    "_export": "_session _ragged _program _kernel _layout _learn _schedule _record _jaxpr _graph "
    "_support",
    "_batch": "_export _control_flow _session _learn _ragged _program _kernel _schedule _record "
    "_jaxpr _graph _support",
    "_commands": "data models policies serve testing viz",
    "policies": "_schedule",
    "ragged": "",
    "viz": "_draw _program _schedule _graph _support",
    "__init__": "_batch _export _lazy _kernel _layout _record _learn _schedule _graph errors "
    "policies ragged viz",
}
WITHOUT_JAX = ("_support", "_graph", "_schedule", "_layout")
PRIVATE = [name for name in ALLOWED if name.startswith("_") and name != "__init__"]
LISTED = re.compile(r"^\d+\. `([\w.]+)`: ", re.MULTILINE)


def imported(path):
    """Names of the modules of this package that a file imports, without `jedbatch.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            of_names = node.module == "jedbatch" or is_package(node.module)
            names = [f"{node.module}.{a.name}" for a in node.names] if of_names else [node.module]
        found.update(n.removeprefix("jedbatch.") for n in names if n.startswith("jedbatch."))
    return found


def is_package(module):
    """Whether there are modules in it, so that `from it import` imports these."""
    root, *parts = module.split(".")
    return root == "jedbatch" and PACKAGE.joinpath(*parts).is_dir()


def name_of(path):
    """The module in a file, without `jedbatch.`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules_of(package):
    """The files of a private package without those that are its charter."""
    return [path for path in (PACKAGE / package).rglob("*.py") if path.stem != "__init__"]


def charter_of(package):
    """Returns the docstring of a package."""
    return ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text()))


def test_the_house_is_complete():
    """Every entry is a package that is known here, or public."""
    found = {path.stem for path in PACKAGE.glob("*.py")} - {"__main__"}
    found |= {path.parent.name for path in PACKAGE.glob("_*/__init__.py")}
    assert found == ALLOWED.keys() | LEAVES
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 29


def test_allowed_imports_are_no_circle():
    left = {name: set(allowed.split()) for name, allowed in ALLOWED.items()}
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, f"these import each other in a circle: {sorted(left)}"


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_between_packages(name):
    """Only those that are allowed, and no allowance that nobody needs."""
    paths = modules_of(name) if name in PRIVATE else [PACKAGE / f"{name}.py"]
    allowed, used = set(ALLOWED[name].split()), set()
    for path in paths:
        for other in imported(path):
            top = other.partition(".")[0]
            if top != name and top not in LEAVES - allowed:
                assert top in allowed, f"{name_of(path)} imports {other}"
                used.add(top)
    assert used == allowed, f"{name} need not import {sorted(allowed - used)}"


@pytest.mark.parametrize("name", PRIVATE)
def test_imports_inside_of_a_package(name):
    """Its charter lists its modules in an order in which they can be read."""
    listed = LISTED.findall(charter_of(name))
    modules = {name_of(path).removeprefix(f"{name}."): path for path in modules_of(name)}
    assert sorted(listed) == sorted(modules)
    for position, module in enumerate(listed):
        for other in imported(modules[module]):
            package, _, inside = other.partition(".")
            if package == name:
                known = any(inside == m or inside.startswith(f"{m}.") for m in listed[:position])
                assert known, f"{name}.{module} imports {other}"


def test_charters_hold_no_code():
    """Names are imported from where they are defined; nothing is exported a second time."""
    for path in PACKAGE.glob("_*/**/__init__.py"):
        (only,) = ast.parse(path.read_text()).body
        assert isinstance(only, ast.Expr), path


def test_models_and_data_use_public_names():
    paths = [path for name in ("models", "data") for path in (PACKAGE / name).glob("*.py")]
    for path in paths:
        for name in imported(path):
            assert not any(part.startswith("_") for part in name.split(".")), f"{path} uses {name}"


def test_commands_use_public_names():
    for path in [*modules_of("_commands"), PACKAGE / "__main__.py"]:
        for name in imported(path):
            private = [part for part in name.split(".") if part.startswith("_")]
            assert set(private) <= {"_commands"}, f"{path} uses {name}"


def test_planning_imports_numpy_only():
    paths = [path for package in WITHOUT_JAX for path in modules_of(package)]
    for path in [*paths, PACKAGE / "checks.py", PACKAGE / "policies.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert not any(n.partition(".")[0] in ("jax", "jaxlib") for n in names), path


def test_only_public_names_of_jax():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path


def test_importing_computes_nothing():
    """No device is touched, so that users can still configure JAX."""
    code = (
        "from jedbatch import *; import jedbatch.models, jedbatch.data; "
        "import jax; jax.config.update('jax_platforms', 'cpu'); print(len(jax.devices()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True).returncode == 0


def test_names_are_loaded_when_they_are_used():
    code = """
        import sys
        def loaded():
            return sorted(name for name in sys.modules if name.startswith("jedbatch"))
        import jedbatch
        assert loaded() == ["jedbatch"] and "jax" not in sys.modules, loaded()
        assert dir(jedbatch) == sorted([*jedbatch.__all__, "__version__"])
        from jedbatch import cell
        assert "jedbatch._batch" not in loaded()
        from jedbatch import batch, errors
        assert jedbatch.batch is batch and jedbatch.errors is errors
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_type_checkers_see_the_names_that_are_loaded():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name in jedbatch.__all__:
        home = jedbatch._HOMES.get(name)
        assert seen[name] == (f"jedbatch.{home}" if home else "jedbatch")
        assert getattr(jedbatch, name) is not None
    with pytest.raises(AttributeError, match="module 'jedbatch' has no attribute 'bacth'"):
        _ = jedbatch.bacth


def test_marks_of_frames():
    """Where functions of users are recorded, and which public modules may ask about lengths."""
    marked = {name: set() for name in (frames.RECORDS_CALLS, frames.HOLDS_FOR_ALL_LENGTHS)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jedbatch":
            for mark in marked:
                if getattr(module, mark, None) is True:
                    marked[mark].add(name)
    assert marked == {
        frames.RECORDS_CALLS: {trace.__module__},
        frames.HOLDS_FOR_ALL_LENGTHS: {ragged.__name__},
    }


READ_FRAMES = {
    "_jaxpr/symbolic_dims.py",  # who asks for a length, and the user's line
    "_record/operations/failures.py",  # what the user wrote there
    "_support/frames.py",  # the depth of a recursion
    "_record/run/recursion.py",
    "_record/identity/escapes.py",  # what keeps a traced value
    "_record/identity/concretization.py",  # whether code asks what a number is, or which object
    "_record/run/units.py",  # which functions would be cells
    "_lazy/scope.py",  # where a scope is opened
}
OF_FRAMES = {"_getframe", "currentframe", "f_back", "f_code", "f_globals", "f_locals", "tb_frame"}


def test_frames_are_read_in_few_modules():
    """Beside `CHECKS` and `DECISIONS`, names are those of methods that Python calls."""
    read, named = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in OF_FRAMES:
                read.add(path.relative_to(PACKAGE).as_posix())
            operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if any(getattr(x, "attr", "") in ("co_name", "co_qualname") for x in operands):
                named |= {
                    x.value
                    for x in ast.walk(node)
                    if isinstance(x, ast.Constant) and isinstance(x.value, str)
                }
    assert read == READ_FRAMES
    assert named == {"__eq__", "__ne__", "__hash__", "__exit__", "singledispatch"}


def test_the_core_needs_nothing_that_is_optional(tmp_path):
    served = tmp_path / "mine.py"
    served.write_text("def fn(x): return 2 * x\ninstances = [1.0, 2.0]\n")
    code = """
        import sys
        for name in ("flax", "optax", "tqdm", "starlette", "uvicorn", "httpx", "greenlet"):
            sys.modules[name] = None
        import jax.numpy as jnp, numpy as np, pytest
        import jedbatch, jedbatch.data, jedbatch.testing, jedbatch.serve
        total = jedbatch.batch(lambda w, xs: sum(w * x for x in xs))
        assert total(2.0, [(1.0,), (1.0, 2.0)]).tolist() == [2.0, 6.0]
        decides = jedbatch.batch(lambda w, x: w if w * x > 1 else x)
        with pytest.raises(ModuleNotFoundError, match="pip install greenlet"):
            decides(jnp.ones(()), [1.0, 2.0])
        from jedbatch._support.progress import progress_bar
        assert list(progress_bar(range(2), "rounds", False)) == [0, 1]
        for run in (lambda: __import__("jedbatch.models"), lambda: progress_bar([], "", True)):
            with pytest.raises(ModuleNotFoundError, match="pip install 'jedbatch.models.'"):
                run()
        with pytest.raises(ModuleNotFoundError, match="pip install 'jedbatch.serve.'"):
            jedbatch.serve.application(jedbatch.serve.Server(total, 2.0))
    """
    shows, serves = ["show", f"{served}:fn"], ["serve", f"{served}:fn"]
    run, (demo, learn, show) = run_commands(
        textwrap.dedent(code), ["demo"], ["learn", "treelstm"], shows
    )
    assert show == 0, run.stderr
    assert "Plan of 2 instances" in run.stdout
    assert (demo, learn, run.stderr.count("pip install 'jedbatch[models]'")) == (1, 1, 2)
    code = "import sys\nfor name in ('optax', 'uvicorn'): sys.modules[name] = None\n"
    run, returned = run_commands(code, ["demo"], serves)
    assert returned == [1, 1]
    assert "pip install 'jedbatch[models]'" in run.stderr
    assert "pip install 'jedbatch[serve]'" in run.stderr


def run_commands(code, *commands):
    """(the process that runs code and then commands, what each of them returned)."""
    code += "\nfrom jedbatch.__main__ import main"
    code += f"\nprint([main(args) for args in {list(commands)}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


def attributes_set(function):
    """Returns the attributes of its first argument that a method assigns to."""
    if not function.args.args:
        return set()
    self = function.args.args[0].arg
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == self
    }


def is_setter(function):
    return any(isinstance(x, ast.Attribute) and x.attr == "setter" for x in function.decorator_list)


def known_attributes(name, classes):
    """Returns fields, what has a setter and what `__init__` sets, of a class and its bases."""
    if name not in classes:
        return set()
    known = set()
    for statement in classes[name].body:
        if isinstance(statement, ast.AnnAssign) and classes[name].decorator_list:
            known.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            known |= attributes_set(statement)
        elif isinstance(statement, ast.FunctionDef) and is_setter(statement):
            known.add(statement.name)
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return known.union(*(known_attributes(base, classes) for base in bases))


def test_attributes_are_set_in_init():
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = [x for tree in trees for x in ast.walk(tree) if isinstance(x, ast.ClassDef)]
    by_name = {x.name: x for x in classes}
    for found in classes:
        methods = [x for x in found.body if isinstance(x, ast.FunctionDef)]
        known = known_attributes(found.name, {**by_name, found.name: found})
        for method in methods:
            unknown = attributes_set(method) - known
            assert not unknown, f"{found.name}.{method.name} sets {sorted(unknown)}"
