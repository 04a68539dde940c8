"""`cell`: a function as one unit of batching, and when two functions are the same.

Inside a batched function a call of a cell is recorded; everywhere else the cell is the function
it wraps. Who records is kept per thread.
"""

import contextlib
import enum
import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import set_current_trace

from jedbatch import checks
from jedbatch._jaxpr.identity import Same, attribute_names, is_frozen, typed, typed_or_same
from jedbatch._record.instances import flatten, is_array


class _Recording(threading.local):
    recorder: Any = None


recording = _Recording()


class Cell:
    """The identity of a decorated function.

    Attributes:
      fn: the function.
      name: shown in plans.
      closure: the cells of its closure and of the closures of functions in there, whose contents
        may change from call to call.
    """

    __slots__ = ("closure", "fn", "name")

    def __init__(self, fn: Callable, name: str):
        self.fn = fn
        self.name = name
        self.closure = reachable_cells(fn)


def cell(fn: Callable | None = None, *, name: str | None = None) -> Any:
    """Makes a function one unit of batching.

    Inside a batched function each call is one node, and calls that agree in type (see
    "Identity") run together. Everywhere else the cell is the function it wraps, so the same
    model runs instance by instance without jedbatch.

    Args:
      fn: a pure function of arrays, for one instance: arrays or pytrees of arrays in, an array
        or a pytree of arrays out. Positional Python numbers are values; keyword arguments are
        static and part of the type, so they must be hashable.
      name: shown in plans; by default the function's name.

    Returns:
      The cell, callable like `fn`.

    Raises:
      TypeError: `fn` is not callable. When the cell is recorded: it returns something other than
        arrays, has side effects, or gets an argument that is neither array nor number.

    Rounding:
      Calls that run together are computed to the same precision as alone, but sums and matrix
      products may differ in their last bits (see `jedbatch.batch`).

    Identity:
      Two cells are the same if their functions have the same code, globals, defaults and
      closed-over values, compared by content where it can be written out and else by identity. A
      cell made inside the batched function is therefore the same at every call, unless it closes
      over something new each time (`RecompilationWarning`). Symbolic values it closes over
      directly become operands. If what it closes over changes, weights of a module for instance,
      it is recorded again (see `jedbatch.batch`).

    Example:
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
    me = Cell(fn, name or str(getattr(fn, "__name__", type(fn).__name__)))

    @functools.wraps(fn, updated=())
    def call(*args: Any, **static: Any) -> Any:
        recorder = recording.recorder
        if recorder is None:
            return fn(*args, **static)
        return recorder.call_cell(me, args, static)

    call.cell = me  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Inside, cells are plain functions and JAX does what it did outside the batched function."""
    recorder, recording.recorder = recording.recorder, None
    try:
        with set_current_trace(recorder.caller) if recorder else contextlib.nullcontext():
            yield
    finally:
        recording.recorder = recorder


def reachable_cells(fn: Any) -> tuple[types.CellType, ...]:
    """The cells of a function's closure and of the closures of functions it leads to."""
    found: dict[int, types.CellType] = {}
    stack = [fn]
    while stack:
        x = stack.pop()
        if isinstance(x, functools.partial):
            stack += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            stack.append(x.__func__)
        stack += getattr(x, "__defaults__", None) or ()
        for c in getattr(x, "__closure__", None) or ():
            if id(c) not in found:
                found[id(c)] = c
                with contextlib.suppress(ValueError):  # a name not assigned yet
                    if isinstance(c.cell_contents, _FUNCTIONS):
                        stack.append(c.cell_contents)
    return tuple(found.values())


def free_values(fn: Any) -> tuple[Any, ...]:
    """Returns the values that a Python function closes over."""
    values = []
    for c in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a name not assigned yet
            values.append(c.cell_contents)
    return tuple(values)


def function_identity(
    fn: Any, ways: Mapping[int, Hashable] = types.MappingProxyType({})
) -> Hashable:
    """Equal for functions that compute the same: code, globals, defaults and closed-over values.

    `ways` names arrays, by their ids, that are told apart by name.
    """
    direct = free_values(getattr(getattr(fn, "cell", None), "fn", fn))
    operands = {id(x): "operand" for x in direct if isinstance(x, Tracer)}
    return _identity(fn, operands, ways, [])


def spelled(static: dict) -> str:
    """Keyword arguments as text, as far as it is the same in every process."""
    plain = {k: v for k, v in sorted(static.items()) if isinstance(v, (bool, int, float, str))}
    return "[" + ", ".join(f"{k}={v!r}" for k, v in plain.items()) + "]" if plain else ""


def static_options(cell: Cell, static: dict) -> Hashable:
    """The keyword arguments of a call as part of its key."""
    for name, value in static.items():
        if any(is_array(leaf) for leaf in flatten(value, f"keyword argument `{name}`")[0]):
            raise TypeError(
                f"cell `{cell.name}` got an array as keyword argument `{name}`; keyword arguments "
                "are static, part of the node's type. Pass arrays positionally."
            )
    try:
        return tuple(sorted((name, typed(value)) for name, value in static.items()))
    except TypeError:
        raise TypeError(
            f"cell `{cell.name}` got keyword arguments {checks.brief(static)}, not all hashable; "
            "keyword "
            "arguments are static, part of the node's type. Pass a tuple instead of a list, and "
            "arrays positionally."
        ) from None


# What a function returned when it ran, and where it was written: not what it computes.
_RECORDS_OF_JAX = frozenset({"Store", "EqualStore", "DebugInfo"})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _identity(
    value: Any, operands: Mapping[int, str], ways: Mapping[int, Hashable], path: list[int]
) -> Hashable:
    """Returns the key of a function or of something that it leads to.

    Tracers it closes over directly become operands. Elsewhere, values that all instances share
    are told apart, and others find no equal: they make an error when the cell is traced.
    """
    value = getattr(getattr(value, "cell", None), "fn", value)
    if id(value) in path:  # a function that calls itself
        return "around", len(path) - path.index(id(value))
    path = [*path, id(value)]

    def each(parts: Any) -> tuple[Hashable, ...]:
        return tuple(_identity(x, operands, ways, path) for x in parts)

    if isinstance(value, Tracer):
        if len(path) == 2 and id(value) in operands:
            return "operand"
        shared = getattr(value, "shared_index", None)
        if shared is not None:
            return "shared", shared
    if id(value) in ways:
        return ways[id(value)]
    if isinstance(value, Tracer):
        return Same(value)
    if isinstance(value, functools.partial):
        return "partial", *each((value.func, *value.args, *sorted(value.keywords.items())))
    if isinstance(value, types.MethodType):
        return "method", *each((value.__func__, value.__self__))
    if isinstance(value, types.FunctionType):
        keywords = (value.__kwdefaults__ or {}).items()
        parts = (*free_values(value), "defaults", *(value.__defaults__ or ()), *keywords)
        return value.__code__, Same(value.__globals__), *each(parts)
    if (held := _held_by_jax(value)) is not None:
        return type(value), *each(held)
    if isinstance(value, tuple | list) and not isinstance(value, enum.Enum):
        return type(value), *each(value)
    if isinstance(value, dict):
        return dict, *each(value.items())
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.tobytes()
    if is_frozen(value):
        kind: Any = type(value)
        names = attribute_names(value)
        return kind, *names, *each(getattr(value, name) for name in names)
    return typed_or_same(value)


def _held_by_jax(value: Any) -> tuple[Any, ...] | None:
    """The parts of a wrapper in which JAX hands on a function; None of anything else.

    Wrappers are known by name. Without it they are told apart by identity, which is never wrong.
    """
    kind = type(value)
    if not kind.__module__.startswith("jax."):
        return None
    if kind.__name__ == "WrappedFun":
        return value.f, value.transforms, value.params
    if kind.__name__ == "Unhashable":  # an argument that derivatives do not see
        return (value.val,)
    return () if kind.__name__ in _RECORDS_OF_JAX else None


def with_free_values(fn: Any, captured: Iterator[Any]) -> Any:
    """The function with the tracers it closes over replaced, in order."""
    if not any(isinstance(x, Tracer) for x in free_values(fn)):
        return fn
    cells = tuple(
        types.CellType(next(captured)) if isinstance(c.cell_contents, Tracer) else c
        for c in fn.__closure__
    )
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
