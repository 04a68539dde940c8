"""The golden texts as files."""

import difflib
from pathlib import Path

FOLDER = Path(__file__).parent


def path_of(name: str) -> Path:
    """The file of a text."""
    return FOLDER / f"{name}.txt"


def write(name: str, text: str) -> None:
    """Replaces a text."""
    path_of(name).write_text(text)


def difference(name: str, text: str) -> str:
    """How a text differs from its file; nothing if it does not."""
    path = path_of(name)
    expected = path.read_text() if path.exists() else ""
    lines = expected.splitlines(), text.splitlines()
    found = list(difflib.unified_diff(*lines, f"{name}, golden", f"{name}, now", "", "", 2, ""))
    return "\n".join(found)
