"""Functions under `jax.jit` or `jax.checkpoint`, inlined where JAX traces them into many programs.

A call of such a function is one node, of one type for each program that it is traced into. Where it
takes a whole tree, these are as many as trees have shapes. So once it has been traced into a few
programs of different numbers of operations, the operations are recorded in place of the call.
Functions of JAX itself, such as `jax.numpy.where`, and those that are traced again for other shapes
alone stay nodes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Primitive, set_current_trace

from jedbatch import checks
from jedbatch._record.operations.symbols import Symbol
from jedbatch._support.types import Leaf

PROGRAMS = {"jit", "remat2"}  # operations that run a program, and do nothing else
MAX_PROGRAMS = 4  # of a function that is not inlined
JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
INSTALLED = JAX_FOLDER, "site-packages", os.path.dirname(checks.__file__) + os.sep


def record_inlined(
    recorder: Any, primitive: Primitive, args: Sequence[Leaf], params: Mapping[str, Any]
) -> list[Leaf] | None:
    """Records the operations of a function that is traced into many programs.

    Args:
      recorder: of the instance.
      primitive: a call of a function, or any other operation.
      args: the arguments.
      params: its parameters.

    Returns:
      The results of the function; None if it is not inlined.
    """
    if primitive.name not in PROGRAMS or not any(isinstance(x, Symbol) for x in args):
        return None
    program = params["jaxpr"]
    body, consts = (program, ()) if isinstance(program, Jaxpr) else (program.jaxpr, program.consts)
    function = body.debug_info.func_src_info
    if function is None or JAX_FOLDER in function:
        return None
    size = len(body.invars), len(body.eqns)
    of = "inlined", primitive.name, function, params.get("name")  # which wrappers may share
    if recorder.registry.assumptions.holds("variants", of, size, MAX_PROGRAMS):
        if primitive.name == "jit" and is_of_user(function):
            why = f"goes through `jax.jit` ({function}); write `@jedbatch.cell` above `@jax.jit`"
            recorder.registry.slow_calls[params["name"], why] += 1
        return None
    with set_current_trace(recorder):
        return jax.core.eval_jaxpr(body, consts, *args)


def is_of_user(source: str) -> bool:
    """Returns whether a function, as "name at file:line", is of no installed package, nor ours."""
    return not any(folder in source for folder in INSTALLED)


def without_jit(function: Callable) -> Callable:
    """Returns the function that another one compiles, if that was made by `jax.jit`.

    A batched function compiles all of it anyway, and records cells in it as cells.
    """
    compiled: Any = function
    return compiled.__wrapped__ if isinstance(function, jax.stages.Wrapped) else function
