"""Finds what the command line names: an attribute of a module."""

import importlib
import operator
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
    module = _module(place, name)
    try:
        return module, nested(module, path)
    except AttributeError:
        raise CommandError(
            f"{name} cannot be found: {described(module)} has no {path!r}; {EXPECTED}"
        ) from None


def nested(module: ModuleType, path: str) -> Any:
    """Returns an attribute, or one of an attribute: "Model.score"."""
    return operator.attrgetter(path)(module)


def described(module: ModuleType) -> str:
    """Returns the file of a module, or its name if it has none."""
    return getattr(module, "__file__", None) or module.__name__


def _module(place: str, name: str) -> ModuleType:
    """Imports a module or a file."""
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise CommandError(f"there is no file {place} in {Path.cwd()}; {EXPECTED}")
    called = file.stem if file else place
    if file is None and not all(part.isidentifier() for part in place.split(".")):
        raise CommandError(f"{name} cannot be imported: {place!r} is no module; {EXPECTED}")
    folder = str(file.parent if file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(called)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if called != missing and not called.startswith(f"{missing}."):
            raise  # something that the module imports
        raise CommandError(
            f"{name} cannot be imported: {error.msg}, neither installed nor in {Path.cwd()}; "
            f"{EXPECTED}"
        ) from None
    if file is not None and Path(described(module)).resolve() != file:
        raise CommandError(
            f"{place} would be imported as `{called}`, which is {described(module)} already; "
            "give the file another name"
        )
    return module
