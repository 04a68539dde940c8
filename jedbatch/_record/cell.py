"""`cell`: a function as one unit of batching.

Inside a batched function a call of a cell is recorded; everywhere else the cell is the function
it wraps. The recorder is kept per thread.
"""

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

from jax.extend.core import set_current_trace

from jedbatch import checks
from jedbatch._jaxpr.identity import typed
from jedbatch._record.instances.arrays import flatten, is_array
from jedbatch._support.native import core, function_types
from jedbatch._support.types import PyTree

try:
    import cloudpickle  # type: ignore[import-untyped]
except ImportError:
    cloudpickle = None

P = ParamSpec("P")
Result = TypeVar("Result")


class _Recording(threading.local):
    """The recorder of each thread; under gevent of each greenlet, as its `threading.local` does."""

    recorder: Any = None

    def __reduce__(self) -> str:
        return "recording"  # of the process that reads it


def _recording() -> Any:
    """Returns the same, compiled if it can be, as every call of a cell asks for it."""
    compiled = core()
    # The class that gevent puts in its place is that of `_thread`, too, but is made elsewhere.
    if compiled is None or threading.local.__module__ != "_thread":
        return _Recording()
    return compiled.Recording()


recording = _recording()


class Cell:
    """The identity of a decorated function.

    Attributes:
      fn: the function.
      name: shown in plans.
      is_inner: whether it was made while something was recorded.
    """

    __slots__ = ("fn", "is_inner", "name")

    def __init__(self, fn: Callable, name: str):
        self.fn = fn
        self.name = name
        self.is_inner = recording.recorder is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Cell,), (self.fn, self.name)

    def __setstate__(self, state: tuple[Callable, str]) -> None:
        self.fn, self.name = state
        self.is_inner = False


@overload
def cell(fn: Callable[P, Result], *, name: str | None = None) -> Callable[P, Result]: ...
@overload  # mypy finds no `P` of lambdas where it expects `Callable[..., Result]`
def cell(  # type: ignore[overload-cannot-match]
    fn: Callable[..., Result], *, name: str | None = None
) -> Callable[..., Result]: ...
@overload
def cell(
    fn: None = None, *, name: str | None = None
) -> Callable[[Callable[P, Result]], Callable[P, Result]]: ...
def cell(fn: Callable[P, Result] | None = None, *, name: str | None = None) -> Any:
    """Makes a function one unit of batching.

    Inside a batched function each call is one node, and calls that agree in type (see
    "Identity") run together. Everywhere else the cell is the function it wraps, so the same
    model runs instance by instance without jedbatch.

    Args:
      fn: a pure function of arrays, for one instance: arrays or pytrees of arrays in, an array
        or a pytree of arrays out. Positional Python numbers are values, those of `jax.jit`. Arrays
        as keyword arguments, and containers of arrays, are operands like positional ones; other
        keyword arguments are static, part of the type, and must be hashable.
      name: shown in plans; by default the function's name.

    Returns:
      The cell, callable like `fn`, with its signature.

    Raises:
      TypeError: `fn` is not callable. When the cell is recorded: it returns something other than
        arrays, has side effects, or gets an argument that is neither array nor number.

    Rounding:
      Calls that run together are computed to the same precision as alone, but sums and matrix
      products may differ in their last bits (see `jedbatch.batch`).

    Identity:
      Two calls are of one type if the programs that JAX traces of them are the same, under one name
      and with operands of the same types. A function of the same code, globals, defaults,
      attributes and closed-over values, compared by content where it can be written out and else by
      identity, is not traced again; one that closes over something new each time is
      (`RecompilationWarning`). Symbolic values it closes over become operands, and so do numbers
      and small arrays of NumPy that differ from call to call, unless Python must know them; those
      that are its defaults or the arguments of a `functools.partial`, and those that functions,
      tuples, lists, dicts and objects among these hold, too. What Python and NumPy compute with
      such numbers, they compute, in 64 bits, and an operand is what an operation of JAX reads: `t
      // 0.1` in `x * (t // 0.1)`. With positional numbers JAX computes, as under `jax.jit` in 32
      bits: `(k * 4) // 4` of 2**30 is 0. If what it closes over changes, weights of a module for
      instance, it is recorded again (see `jedbatch.batch`).

    Examples:
      >>> import jax.numpy as jnp, jedbatch
      >>> @jedbatch.cell
      ... def shrink(x, *, times):
      ...     return x * 0.5**times
      >>> float(shrink(jnp.float32(8), times=2))
      2.0
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(checks.wrong("cell", f"name={checks.brief(name)}", "a string"))
    if fn is None:
        return functools.partial(cell, name=name)
    if not callable(fn):
        raise TypeError(
            f"`cell` got {checks.brief(fn)}, which is not callable; give it a function of "
            "arrays, as in\n"
            "    @jedbatch.cell\n    def layer(params, x): ..."
        )
    return as_function(fn, Cell(fn, name or str(getattr(fn, "__name__", type(fn).__name__))))


def as_function(fn: Callable, me: Cell) -> Any:
    """The function that users call, compiled if it can be (`_support/c/cells.c`).

    A Python function that takes any arguments makes a tuple and a dict of them for every call,
    which costs as much as everything else that is done to record it.
    """
    compiled = core()
    if compiled is not None:
        function = compiled.CellFunction(fn, me, recording, types.MethodType, reduced)
    else:
        function = _in_python(fn, me)
    for name in ("__name__", "__qualname__"):
        if not hasattr(fn, name):  # as objects with `__call__` have none
            setattr(function, name, me.name)
    functools.update_wrapper(function, fn, updated=())
    function.cell = me
    return function


def _in_python(fn: Callable, me: Cell) -> Any:
    """Returns the same, not compiled."""

    def call(*args: Any, **static: Any) -> Any:
        recorder = recording.recorder
        if recorder is None:
            return fn(*args, **static)
        return recorder.call_cell(me, args, static)

    return call


def reduced(function: Any) -> str | tuple[Any, ...]:
    """Returns how the function of a cell is pickled: by name, as functions are, if it has one."""
    names = vars(function)
    found: Any = sys.modules.get(names.get("__module__") or "")
    for name in str(names.get("__qualname__", "")).split("."):
        found = getattr(found, name, None)
    return names["__qualname__"] if found is function else by_value(function)


def by_value(function: Any) -> tuple[Any, ...]:
    """Returns how the function of a cell is pickled as what it is made of.

    Where the function calls itself, what is read is not complete yet.
    """
    return as_function, (function.__wrapped__, function.cell), vars(function)


if cloudpickle:

    def _reduced_by_cloudpickle(function: Any) -> Any:
        """Returns how the function of a cell is sent: as cloudpickle sends other functions.

        Those of a script are sent by value, and those of modules of which the user says so
        (`cloudpickle.register_pickle_by_value`), or of which the user says it of a package.
        """
        module = f"{function.__module__}."
        packages = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
        is_sent_by_value = any(module.startswith(f"{package}.") for package in packages)
        return (by_value if is_sent_by_value else reduced)(function)

    for _kind in function_types()[1:]:
        cloudpickle.Pickler.dispatch_table[_kind] = _reduced_by_cloudpickle


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Inside, cells are plain functions and JAX does what it did outside the batched function."""
    recorder, recording.recorder = recording.recorder, None
    try:
        with set_current_trace(recorder.caller) if recorder else contextlib.nullcontext():
            yield
    finally:
        recording.recorder = recorder


def spelled(static: dict) -> str:
    """Keyword arguments as text, as far as it is the same in every process."""
    plain = {k: v for k, v in sorted(static.items()) if isinstance(v, (bool, int, float, str))}
    return "[" + ", ".join(f"{k}={v!r}" for k, v in plain.items()) + "]" if plain else ""


def holds_array(name: str, value: PyTree) -> bool:
    """Returns whether a keyword argument is an array, or a container of arrays."""
    return any(is_array(leaf) for leaf in flatten(value, f"keyword argument `{name}`")[0])


def static_options(cell: Cell, static: dict) -> Hashable:
    """Keyword arguments without arrays as part of the key of a call."""
    try:
        return tuple(sorted((name, typed(value)) for name, value in static.items()))
    except TypeError:
        raise TypeError(
            f"cell `{cell.name}` got keyword arguments {checks.brief(static)}, not all hashable; "
            "keyword arguments without arrays are static, part of the node's type. Pass a tuple "
            "instead of a list."
        ) from None
