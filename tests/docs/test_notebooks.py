"""Notebooks run from a clean kernel, and are committed with what they print."""

import re
from pathlib import Path

import nbformat
import pytest
from cases.helpers import mostly_slow
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
LARGEST = 400_000  # bytes; a repository page shows no more
FOLDERS = "home|root|tmp|usr|opt|var|mnt|work|content|Users|private"
PATH = re.compile(rf"(?<![\w.:/])(/({FOLDERS})/|[A-Z]:\\)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def read(name):
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What the outputs of a cell are: streams by name, displays by the richest form they have."""
    forms = ("image/svg+xml", "image/png", "text/html", "text/plain")
    found = []
    for output in cell.outputs:
        data = output.get("data", {})
        kind = output.get("name") or next((f for f in forms if f in data), output.output_type)
        if kind not in found[-1:]:  # what is printed may come in pieces
            found.append(kind)
    return found


def strings(output):
    """All that is written in an output, wherever it stands."""
    if isinstance(output, str):
        yield output
    elif isinstance(output, (list, dict)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from strings(part)


def says_what_is_compiled(output):
    """Returns whether this is the log of programs that take long to compile on this machine."""
    lines = output.get("text", "").splitlines() if output.get("name") == "stderr" else ()
    return bool(lines) and all(line.startswith("jedbatch is compiling ") for line in lines)


def names_a_path(outputs):
    return any(map(PATH.search, strings(outputs)))


@pytest.mark.parametrize("name", mostly_slow(NAMES, NAMES[0]))
def test_runs(name, tmp_path, monkeypatch):
    """Without an error, and every cell shows what it shows on the repository page."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    stored = read(name)
    notebook = read(name)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    for mine, theirs in zip(code_cells(notebook), code_cells(stored), strict=True):
        mine.outputs = [x for x in mine.outputs if not says_what_is_compiled(x)]
        assert kinds(mine) == kinds(theirs), f"{name}, cell {mine.id}"


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs(name):
    """No error, no warning, nothing of the machine they were made on, and not large."""
    assert (NOTEBOOKS / name).stat().st_size < LARGEST
    for number, cell in enumerate(code_cells(read(name)), 1):
        where = f"{name}, cell {cell.id}"
        assert cell.execution_count == number, where
        assert not {"error", "stderr"} & set(kinds(cell)), where
        assert not names_a_path(cell.outputs), where


@pytest.mark.parametrize("name", NAMES)
def test_metadata(name):
    """Of a kernel that is everywhere; cells have names that stay, so that changes are small."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec == KERNEL
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"execution"}, cell.id  # the times that nbclient writes
        assert re.fullmatch(r"[a-z][a-z0-9-]*", cell.id)


def test_numbers_and_list():
    """They are numbered, and the list says what each is about."""
    assert [name[:3] for name in NAMES] == [f"{k:02}-" for k in range(1, len(NAMES) + 1)]
    listed = re.findall(r"\]\((.*?\.ipynb)\)", (NOTEBOOKS / "README.md").read_text())
    assert listed == NAMES


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("/tmp/x.py", True),
        ("see /home/me/a", True),
        ("x\n/tmp/y", True),
        ("/content/a.ipynb", True),
        (r"C:\Users", True),
        ("https://a.b/home/c", False),
        ("a/tmp/b", False),
    ],
)
def test_paths_are_found(text, is_path):
    assert bool(PATH.search(text)) == is_path
    stream = nbformat.v4.new_output("stream", text=f"a\n{text}")
    shown = nbformat.v4.new_output("display_data", {"text/html": "b", "text/plain": text})
    assert names_a_path([stream]) == names_a_path([shown]) == is_path
