"""Imports point one way only, and planning needs NumPy alone."""

import ast
import subprocess
import sys
from pathlib import Path

import jedbatch
from jedbatch import _frames, ragged
from jedbatch._templates import Template
from jedbatch._trace import trace

PACKAGE = Path(jedbatch.__file__).parent
ORDER = [
    "errors",
    "checks",
    "_files",
    "_frames",
    "_paths",
    "_types",
    "_stored_graphs",
    "_graph",
    "_records",
    "_frontier",
    "_schedule",
    "_search",
    "_drawing",
    "_diagram",
    "_fsm",
    "policies",
    "ragged",
    "_progress",
    "_episodes",
    "_learn",
    "_caches",
    "_identity",
    "_environment",
    "_escapes",
    "_instances",
    "_cell",
    "_configuration",
    "_extents",
    "_jaxpr",
    "_operations",
    "_keys",
    "_transfers",
    "_registry",
    "_symbols",
    "_operators",
    "_calls",
    "_recorder",
    "_evaluate",
    "_renaming",
    "_zeros",
    "_derivatives",
    "_stored",
    "_along",
    "_phases",
    "_tiles",
    "_lanes",
    "_sites",
    "_templates",
    "_blocks",
    "_restored",
    "_deep",
    "_trace",
    "_ladder",
    "_pqtree",
    "_arrange",
    "_orders",
    "_memory",
    "_reads",
    "_layout",
    "_target",
    "_instructions",
    "_products",
    "_rectangles",
    "_fusion",
    "_taps",
    "_reverse",
    "_cells",
    "_stretches",
    "_tables",
    "_program",
    "_alive",
    "_sent",
    "_cotangents",
    "_verify",
    "_verify_reverse",
    "_plan",
    "_returned",
    "_arenas",
    "_sweep",
    "_execute",
    "_executors",
    "_groups",
    "_differentiable",
    "_rooms",
    "_over_rows",
    "_over_instances",
    "_packed",
    "_regions",
    "_lengths",
    "_kinds",
    "_draw_graph",
    "_draw_batches",
    "_draw_memory",
    "viz",
    "_rows",
    "_prelude",
    "_verify_plan",
    "_forms",
    "_session",
    "_recording",
    "_indices",
    "_minibatch",
    "_fibers",
    "_workspace",
    "_rounds",
    "_adaptive",
    "_batch",
    "_pieces",
    "_futures",
    "_lazy",
    "_calibrate",
    "__init__",
]


def imported(path):
    """Modules of the package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
            if node.module == "jedbatch":
                names = [f"jedbatch.{alias.name}" for alias in node.names]
        yield from (n.removeprefix("jedbatch.") for n in names if n.startswith("jedbatch."))


def test_order_is_complete():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__main__"}
    assert modules == set(ORDER)


def test_imports_point_backwards():
    for position, module in enumerate(ORDER):
        for other in imported(PACKAGE / f"{module}.py"):
            assert other in ORDER[:position], f"{module} imports {other}"


def test_models_and_data_use_public_names():
    paths = [*(PACKAGE / "models").glob("*.py"), *(PACKAGE / "data").glob("*.py")]
    for path in [*paths, PACKAGE / "__main__.py"]:
        for name in imported(path):
            assert not any(part.startswith("_") for part in name.split(".")), f"{path} uses {name}"


def test_planning_imports_numpy_only():
    first, last = ORDER.index("_ladder"), ORDER.index("_layout")
    for module in (*ORDER[1 : ORDER.index("policies")], *ORDER[first : last + 1]):
        text = (PACKAGE / f"{module}.py").read_text()
        assert "jax" not in {
            line.split()[1].split(".")[0]
            for line in text.splitlines()
            if line.startswith(("import ", "from "))
        }


def test_only_public_names_of_jax():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path


def test_the_core_needs_neither_flax_nor_optax_nor_tqdm():
    code = """if True:
        import sys
        for name in ("flax", "optax", "tqdm"):
            sys.modules[name] = None
        import jax.numpy as jnp, numpy as np, pytest
        import jedbatch, jedbatch.data, jedbatch.testing
        total = jedbatch.batch(lambda w, xs: sum(w * x for x in xs))
        assert total(2.0, [(1.0,), (1.0, 2.0)]).tolist() == [2.0, 6.0]
        from jedbatch._progress import progress_bar
        assert list(progress_bar(range(2), "rounds", False)) == [0, 1]
        for run in (lambda: __import__("jedbatch.models"), lambda: progress_bar([], "", True)):
            with pytest.raises(ModuleNotFoundError, match="pip install 'jedbatch.models.'"):
                run()
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    command = "import sys, runpy; sys.modules['flax'] = None; runpy.run_module('jedbatch')"
    run = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pip install 'jedbatch[models]'" in run.stderr


def test_importing_computes_nothing():
    """No device is touched, so that users can still configure JAX."""
    code = (
        "import jedbatch, jedbatch.models, jedbatch.data; from jax.extend import backend; "
        "import jax; jax.config.update('jax_platforms', 'cpu'); print(len(jax.devices()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True).returncode == 0


def test_marks_of_frames():
    """Where functions of users are recorded, and which public modules may ask about lengths."""
    marked = {name: set() for name in (_frames.RECORDS_CALLS, _frames.HOLDS_FOR_ALL_LENGTHS)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jedbatch":
            for mark in marked:
                if getattr(module, mark, None) is True:
                    marked[mark].add(name)
    assert marked == {
        _frames.RECORDS_CALLS: {trace.__module__, Template.__module__},
        _frames.HOLDS_FOR_ALL_LENGTHS: {ragged.__name__},
    }
