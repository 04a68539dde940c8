"""The public surface: names, parameters and defaults, without annotations."""

import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from typing import Any

import jedbatch
import jedbatch.data
import jedbatch.models
import jedbatch.serve
import jedbatch.testing

MODULES = ("errors", "policies", "ragged", "viz", "models", "data", "testing", "serve")


def signatures() -> str:
    """Every public name of every public module, a line each."""
    names = ["jedbatch", *(f"jedbatch.{name}" for name in MODULES)]
    for package in (jedbatch.models, jedbatch.data, jedbatch.testing, jedbatch.serve):
        inside = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        names += [m.name for m in inside if not m.ispkg]
    return "\n".join(line for name in sorted(names) for line in _module(name)) + "\n"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or sorted(
        key
        for key, x in vars(module).items()
        if not key.startswith("_") and getattr(x, "__module__", None) == name
    )
    yield name
    for key in public:
        x = getattr(module, key)
        if isinstance(x, types.ModuleType):
            yield f"  {key}: a module"
            continue
        yield f"  {key}{_shown(x)}"
        if inspect.isclass(x):
            yield from _methods(x)


def _methods(cls: type) -> Iterator[str]:
    """Public methods and properties that are defined by this package."""
    found = {
        key: x
        for c in reversed(cls.__mro__)
        if c.__module__.startswith("jedbatch")
        for key, x in vars(c).items()
        if not key.startswith("_") or key == "__call__"
    }
    for key in sorted(found):
        if isinstance(found[key], property):
            yield f"    .{key}: a property"
        elif callable(getattr(cls, key)):
            yield f"    .{key}{_shown(getattr(cls, key))}"


def _shown(x: Any) -> str:
    """The parameters of something that can be called, with their defaults; else its type."""
    if not callable(x):
        return f": {type(x).__name__}"
    try:
        found = inspect.signature(x)
    except ValueError:  # of classes that are built in
        return "(...)"
    empty = inspect.Parameter.empty
    parameters = [
        p.replace(annotation=empty, default=p.default if p.default is empty else _Default(p))
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=parameters, return_annotation=empty))


class _Default:
    """A default, shown without addresses and modules."""

    def __init__(self, parameter: inspect.Parameter):
        self.value = parameter.default

    def __repr__(self) -> str:
        if callable(self.value):
            return getattr(self.value, "__name__", type(self.value).__name__)
        return re.sub(r"(\w+\.)+(?=[A-Z])|( object)? at 0x\w+", "", repr(self.value))
