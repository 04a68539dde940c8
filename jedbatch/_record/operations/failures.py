"""Notes of errors of users' functions, besides what JAX says: where they happened, and to what.

JAX knows neither cells nor instances, and its traceback leads through modules of both of us.
"""

import inspect
import linecache
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch import checks
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.symbolic_dims import (
    frame_of_user,
    is_user_code,
    line_of_user,
    user_line_in,
)
from jedbatch._record.cell import spelled
from jedbatch._record.instances.arrays import array_type, is_array
from jedbatch._support.types import Leaf, PyTree

MOST_LEAVES = 8  # of one argument that are listed
IN_OPERATION = " in the operation `"
TRACED = (
    "The instance holds values that an outer transformation traces, such as the numbers of a tree "
    "given to `jax.jit(batched)`. Plan outside of `jax.jit` and give it the plan: "
    "`step(params, batched.plan(params, instances))`, where `step` calls `batched.apply`."
)
RECORDED = (
    "Arrays of NumPy in an instance are a `jax.Array` each while it is recorded, so that "
    "`isinstance(x, np.ndarray)` is False. Write `isinstance(x, (np.ndarray, jax.Array))`, or ask "
    "for the other kind, such as `isinstance(x, tuple)`."
)

THREADS = (
    "Values are symbolic in the thread that calls the batched function alone, as under `jax.jit`. "
    "If the function starts threads, give them no symbolic values: prepare data in threads, and "
    "compute in the function itself."
)
CHANGED_MODULES = (
    "A module of Flax NNX that is made outside of the batched function changes in it: it counts "
    "random numbers, or keeps statistics. Write `module(x, rngs=nnx.Rngs(key))` with a key in each "
    "instance for dropout, and `use_running_average=True` for batch normalization; statistics are "
    "kept where you train, as of `nnx.merge(graphdef, state)` inside and of results outside."
)


def place_of(error: BaseException) -> str:
    """Returns " at file:line", the innermost line of the user's that an error came through.

    It is "" if there is none, or if the error says so already.
    """
    line = user_line_in(error)
    place = f" at {line}" if line else ""
    return "" if any(f"{place} " in note for note in getattr(error, "__notes__", ())) else place


def note_instance(
    error: Exception, number: int, instance: Sequence[PyTree], arrays: Sequence[Leaf]
) -> None:
    """Adds to an error while which instance was recorded it happened, and what may be the reason.

    Args:
      error: of the user's function.
      number: of the instance.
      instance: the mapped arguments.
      arrays: in them.
    """
    error.add_note(f"This happened{place_of(error)} while instance {number} was recorded.")
    if arrays:
        error.add_note(f"Its arrays are {_listed(_typed_arrays(instance, arrays))}.")
    if any(isinstance(x, Tracer) for x in arrays):
        error.add_note(TRACED)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    asks = any("ndarray" in frame.f_code.co_names for frame in frames if is_user_code(frame))
    if asks and any(isinstance(x, np.ndarray) for x in arrays):
        error.add_note(RECORDED)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        error.add_note(THREADS)
    if type(error).__module__.startswith("flax.") and type(error).__name__ == "TraceContextError":
        error.add_note(CHANGED_MODULES)


def note_call(
    error: Exception, name: str, fn: Callable, args: tuple, static: Mapping[str, object]
) -> None:
    """Adds to an error in which cell it happened, where that was called, and with what types."""
    caller = line_of_user()
    called = f"called at {caller} with" if caller else "called with"
    types = "; ".join(_types_of(fn, args)) or "no arguments"
    options = spelled(dict(static))
    error.add_note(f"This happened{place_of(error)} in cell `{name}{options}`, {called} {types}.")


def note_operation(error: Exception, name: str, operands: Sequence[Leaf]) -> None:
    """Adds to an error which operation was recorded outside of cells, and of what.

    It may be part of an operator of Python; the first one noted is the operation that failed.
    """
    if any(IN_OPERATION in note for note in getattr(error, "__notes__", ())):
        return
    types = ", ".join(map(_type_of, operands))
    error.add_note(f"This happened{place_of(error)}{IN_OPERATION}{name}` of {types}.")


def lost_gradient(what: str, aval: Any) -> str:
    """Returns the message of an error: an array leaves JAX, by `what`, and has a gradient."""
    frame = frame_of_user()
    call = _source_of(frame)
    written = f"`{call}`" if call else what
    place = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    function = _in_jax(call)
    instead = f"write `{function}` instead" if function else "compute with the array as it is"
    return (
        f"{written}{place} takes the value of an array {aval.str_short()} out of JAX, by {what}, "
        "and a gradient is wanted through it, which would be lost there. Expected operations of "
        f"JAX: {instead}. To decide, compare arrays, or use `if`, `while` or `int()`; for a number "
        "without a gradient write `jax.lax.stop_gradient` around the array. "
        "`help(jedbatch.errors.SymbolicValueError)` says more."
    )


def _source_of(frame: FrameType | None) -> str:
    """Returns the source of what a frame is at, on one line; "" if it is not known."""
    positions = None if frame is None else inspect.getframeinfo(frame, context=0).positions
    if frame is None or positions is None or None in positions:
        return ""
    first, last, begin, end = (x or 0 for x in positions)
    found = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    lines = [line.encode() for line in found]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]  # before the first, which may be the same
    lines[0] = lines[0][begin:]
    return b" ".join(map(bytes.strip, lines)).decode()


def _in_jax(call: str) -> str:
    """Returns the function of `jax.numpy` that has the name of the one called; "" if none has.

    Of `np.linalg.norm(h)` and of `math.exp(h)` these are `jnp.linalg.norm` and `jnp.exp`.
    """
    name = call.partition("(")[0].strip()
    for path in (name.partition(".")[2], name, f"linalg.{name}"):
        try:
            function = operator.attrgetter(path)(jnp)
        except AttributeError:
            continue
        if path and callable(function):
            return f"jnp.{path}"
    return ""


def _types_of(fn: Callable, args: tuple) -> Iterator[str]:
    """Yields the types of each argument, such as `p['w']: f32[3,4]`."""
    for name, value in named(fn, args):
        leaves = jax.tree.leaves_with_path(value)
        shown = [f"{name}{jax.tree_util.keystr(path)}: {_type_of(x)}" for path, x in leaves]
        yield _listed(shown, f" of {name}")


def _listed(shown: Sequence[str], of: str = "") -> str:
    rest = len(shown) - MOST_LEAVES
    return ", ".join([*shown[:MOST_LEAVES], *[f"and {rest} more{of}"] * (rest > 0)])


def _typed_arrays(instance: Sequence[PyTree], arrays: Sequence[Leaf]) -> list[str]:
    """Returns the types of arrays in an instance, with their places if JAX knows all of them."""
    try:
        leaves = jax.tree.leaves_with_path(instance[0] if len(instance) == 1 else instance)
    except Exception:  # such as keys of a dictionary that cannot be sorted
        leaves = []
    found = [(jax.tree_util.keystr(path), x) for path, x in leaves if is_array(x)]
    if len(found) != len(arrays):
        return list(map(_type_of, arrays))
    return [f"{place}: {_type_of(x)}" if place else _type_of(x) for place, x in found]


def named(fn: Callable, args: tuple) -> Iterator[tuple[str, PyTree]]:
    """Yields positional arguments with the names of parameters, or their positions."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # of functions that are built in
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    for i, value in enumerate(args):
        if i < len(names):
            yield names[i], value
        else:
            yield f"{others}[{i - len(names)}]" if others else f"argument {i}", value


def _type_of(leaf: Leaf) -> str:
    if not is_array(leaf):
        return checks.brief(leaf)
    try:
        return str(ValueType(*array_type(leaf)))
    except Exception:  # what is wrong with it may be the error
        return type(leaf).__name__
