"""Finds what the command line names: an attribute of a module."""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

EXPECTED = (
    "expected module:attribute, with a module as in an import statement, or file.py:attribute"
)


class CommandError(ValueError):
    """The command line names what is not there, or what does not fit."""


def attribute_of(name: str) -> tuple[ModuleType, Any]:
    """Returns (the module, its attribute) of module:attribute or file.py:attribute.

    Modules are found as those are that a script in the current folder imports, or in the folder of
    the file. That folder stays on the path, for what functions import when they are called.

    Raises:
      CommandError: there is no such module or attribute. What the module raises is passed on.
    """
    place, _, path = name.rpartition(":")
    module = _of_file(place) if place.endswith(".py") else _of_name(place, name)
    try:
        return module, nested(module, path)
    except AttributeError:
        raise CommandError(
            f"{name} cannot be found: {described(module)} has no {path!r}; {EXPECTED}"
        ) from None


def nested(module: ModuleType, path: str) -> Any:
    """Returns an attribute, or one of an attribute: "Model.score"."""
    return functools.reduce(getattr, path.split("."), module)


def described(module: ModuleType) -> str:
    """Returns the file of a module, or its name if it has none."""
    return getattr(module, "__file__", None) or module.__name__


def _of_name(place: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise CommandError(f"{name} cannot be imported: {place!r} is no module; {EXPECTED}")
    _search(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place != missing and not place.startswith(f"{missing}."):
            raise  # something that the module imports
        raise CommandError(
            f"{name} cannot be imported: {error.msg}, neither installed nor in {Path.cwd()}; "
            f"{EXPECTED}"
        ) from None


def _of_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise CommandError(f"there is no file {place} in {Path.cwd()}; {EXPECTED}")
    known = sys.modules.get(path.stem)
    if known is not None:
        file = getattr(known, "__file__", None)
        if file and Path(file).resolve() == path:
            return known
        raise CommandError(
            f"{place} would be imported as `{path.stem}`, which is {described(known)} already; "
            "give the file another name"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    _search(path.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
