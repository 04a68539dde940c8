"""Checks of arguments where they enter: what came, what was expected, what to write instead.

Every public function says its own name and that of the argument; a wrong type is a `TypeError`, a
wrong value a `ValueError`. What came is shown in a few words, however large it is.
"""

import functools
import inspect
import math
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

Options = ParamSpec("Options")
Made = TypeVar("Made")

SIZES = ("hidden", "heads", "layers", "max_length", "features")
LARGEST = 1 << 31  # of sizes: larger ones are mistakes
LONGEST = 500  # characters of what somebody else says about an error

_reprs = reprlib.Repr()
_reprs.maxstring = _reprs.maxother = _reprs.maxlong = 60
_reprs.maxlevel = 3


def shown(x: object) -> str:
    """Returns a short description of a value and its type: `'adam' of type str`."""
    return f"{brief(x)} of type {type(x).__name__}"


def brief(x: object) -> str:
    """The value in at most some hundred characters."""
    try:
        text = _reprs.repr(x)
    except Exception:  # whatever it makes of `repr`
        text = object.__repr__(x)
    return cut(text, 100)


def cut(text: object, length: int = LONGEST) -> str:
    """The text, or the beginning and the end of a long one."""
    text = str(text)
    return text if len(text) <= length else f"{text[: length - 43]}...{text[-40:]}"


def wrong(who: str, came: str, expected: str, instead: str = "") -> str:
    """A message: who got what, what was expected, what to write instead."""
    return f"`{who}` got {came}; expected {expected}.{' ' * bool(instead)}{instead}"


def whole(
    who: str, name: str, value: Any, least: int = 0, most: int | None = None, instead: str = ""
) -> int:
    """A whole number, of Python or NumPy, within bounds."""
    bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
    message = wrong(who, f"{name}={brief(value)}", f"a whole number {bounds}", instead)
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(message)
    try:
        integer = operator.index(value)
    except TypeError:
        raise TypeError(message) from None
    if integer < least or (most is not None and integer > most):
        raise ValueError(message)
    return integer


def number(
    who: str,
    name: str,
    value: object,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A finite real number, at least `least`, more than `above` and at most `most`."""
    bounds = f" above {above:g}" if above > -math.inf else ""
    bounds = f" of at least {least:g}" if least > -math.inf else bounds
    bounds += f", at most {most:g}" if most < math.inf else ""
    message = wrong(who, f"{name}={brief(value)}", f"a finite number{bounds}")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(message)
    try:
        real = float(value)
    except OverflowError:
        raise ValueError(message) from None
    if not (math.isfinite(real) and least <= real <= most and real > above):
        raise ValueError(message)
    return real


def flag(who: str, name: str, value: object, instead: str = "") -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(wrong(who, f"{name}={brief(value)}", "True or False", instead))
    return bool(value)


def one_of(
    who: str, name: str, value: object, choices: Collection[object], instead: str = ""
) -> Any:
    """One of some choices."""
    if not isinstance(value, Hashable) or value not in tuple(choices):
        listed = ", ".join(map(repr, choices))
        raise ValueError(wrong(who, f"{name}={brief(value)}", f"one of {listed}", instead))
    return value


def of_type(who: str, value: Any, kind: Any, expected: str, instead: str = "") -> Any:
    """Something of a class."""
    if not isinstance(value, kind):
        raise TypeError(wrong(who, shown(value), expected, instead))
    return value


def function(who: str, name: str, value: object, expected: str, instead: str = "") -> Any:
    """Something that can be called."""
    if not callable(value):
        raise TypeError(wrong(who, f"{name}={brief(value)}", expected, instead))
    return value


def items(who: str, name: str, value: object, expected: str) -> list[Any]:
    """Returns an iterable as a list; raises `TypeError` for other values, str, bytes and dict."""
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        raise TypeError(wrong(who, f"{name}={brief(value)}", expected))
    return list(value)


def path(who: str, value: Any) -> str | bytes:
    """The name of a file; numbers, which `open` takes for open files, are none."""
    try:
        return os.fspath(value)
    except TypeError:
        raise TypeError(
            wrong(who, shown(value), "the name of a file", "Write a string or a `pathlib.Path`.")
        ) from None


def whole_array(who: str, name: str, values: Any, dtype: Any = np.int32) -> np.ndarray:
    """Whole numbers as an array of one axis, none of them cut or wrapped."""
    expected = f"whole numbers along one axis, such as a list of int, for {name}"
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise TypeError(wrong(who, shown(values), expected)) from None
    if array.ndim != 1:
        raise TypeError(wrong(who, f"{name} with {array.ndim} axes: {brief(values)}", expected))
    if not array.size:
        return array.astype(dtype)
    if array.dtype.kind not in "iuO":
        raise TypeError(wrong(who, f"{name} of dtype {array.dtype}: {brief(values)}", expected))
    if array.dtype.kind == "O" and not all(isinstance(x, int) for x in array.tolist()):
        raise TypeError(wrong(who, f"{name} of objects: {brief(values)}", expected))
    low, high, bounds = int(array.min()), int(array.max()), np.iinfo(dtype)
    if low < bounds.min or high > bounds.max:
        bad = low if low < bounds.min else high
        raise ValueError(
            wrong(who, f"{brief(bad)} in {name}", f"numbers that fit {np.dtype(dtype).name}")
        )
    return array.astype(dtype)


def names(who: str, name: str, value: object) -> list[str]:
    """A sequence of strings."""
    sequence = value if isinstance(value, Sequence) and not isinstance(value, str) else None
    bad = sequence is None or next((True for x in sequence if not isinstance(x, str)), False)
    if sequence is None or bad:
        raise TypeError(wrong(who, f"{name}={brief(value)}", "a list of strings"))
    return list(sequence)


def sizes(function: Callable[Options, Made]) -> Callable[Options, Made]:
    """A function whose arguments are checked by their names before it runs.

    `num_things`, `hidden` and other sizes are whole numbers from 1 on, but for the first of a
    function that makes up so many things; `seed` is one from 0 on; `mean_size` is a number above 0.
    """
    who, signature = function.__name__, inspect.signature(function)
    counted = next(iter(signature.parameters)) if who.startswith("synthetic_") else None

    @functools.wraps(function)
    def checked(*args: Options.args, **kwargs: Options.kwargs) -> Made:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            default = signature.parameters[name].default
            if value is None and default is None:
                continue
            if name == "seed":
                whole(who, name, value, 0, 2**63 - 1)
            elif name.startswith("num_") or name in SIZES:
                whole(who, name, value, int(name != counted), LARGEST)
            elif name.startswith("mean_"):
                number(who, name, value, above=0, most=LARGEST)
            elif isinstance(default, bool):
                flag(who, name, value)
            elif isinstance(default, int):
                whole(who, name, value, 1, LARGEST)
            elif isinstance(default, float):
                number(who, name, value)
        return function(*args, **kwargs)

    return checked


def fields(kind: Any) -> Callable[[Callable[Options, Made]], Callable[Options, Made]]:
    """Makes functions check that their first argument has what a named tuple of a kind has."""

    def decorate(function: Callable[Options, Made]) -> Callable[Options, Made]:
        @functools.wraps(function)
        def checked(*args: Options.args, **kwargs: Options.kwargs) -> Made:
            first = args[0] if args else next(iter(kwargs.values()), None)
            missing = [name for name in kind._fields if not hasattr(first, name)]
            if missing:
                expected = f"something with {', '.join(kind._fields)}"
                instead = f"It has no {missing[0]}; see `{kind.__module__}.{kind.__name__}`."
                raise TypeError(wrong(function.__name__, shown(first), expected, instead))
            return function(*args, **kwargs)

        return checked

    return decorate


def without(**gone: str) -> Callable[[Callable[Options, Made]], Callable[Options, Made]]:
    """Makes functions say what to write instead of options that they no longer have.

    Args:
      **gone: by the name of each option, what to do without it.
    """

    def decorate(function: Callable[Options, Made]) -> Callable[Options, Made]:
        @functools.wraps(function)
        def checked(*args: Options.args, **kwargs: Options.kwargs) -> Made:
            for name in gone.keys() & kwargs.keys():
                came = f"{name}={brief(kwargs[name])}"
                expected = "no such option, which an earlier version had"
                raise TypeError(wrong(function.__qualname__, came, expected, gone[name]))
            return function(*args, **kwargs)

        return checked

    return decorate
