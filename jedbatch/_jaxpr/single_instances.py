"""Operations of Equinox that know of `vmap`, as what they do for a single instance.

The loops of Equinox, in which Diffrax, Lineax and Optimistix run, are written for lock step: a loop
goes on until `unvmap_any` says that all instances are done, and `nonbatchable` values, such as the
number of steps, are an error where they differ between instances. Lanes that do not wait for each
other leave when they themselves are done, with a number of steps of their own. A program of one
instance, mapped by the rules of JAX, is right for such lanes too: there, `unvmap_any` of a scalar
is that scalar, and `nonbatchable` is nothing at all.

Errors are the exception: whether to raise one, `unvmap_any` decides for all lanes that run, as a
branch with a call of Python that each lane took for itself would be run for every lane.

Equinox is not imported: its primitives are known by name.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jedbatch._jaxpr.interpret import as_call, performs, with_programs
from jedbatch._jaxpr.versions import with_equations, without_consts

_SAME: dict[str, Callable] = {"nonbatchable": lambda x: x}
_ALONE: dict[str, Callable] = {**_SAME, "unvmap_any": jnp.any, "unvmap_all": jnp.all}
_GOING_ON: dict[str, Callable] = {**_SAME, "select_if_vmap": lambda _, new, old: new}


def may_differ(program: Any) -> Any:
    """Returns a program in which no value need be the same for all lanes, however deep inside."""
    return _with(program, _SAME)


def ends_alone(condition: Any) -> Any:
    """Returns the condition of a loop as what the lane by itself says."""
    return _with(condition, _ALONE)


def goes_on_alone(body: Any) -> Any:
    """Returns the body of a loop that runs for lanes alone that are not done.

    In lock step it keeps what others carry, which is a copy of an array where nobody is done. Loops
    inside of it, which no longer keep it either, end for each lane by itself, so that JAX's rule
    for lock step does.
    """
    return _with(body, _GOING_ON)


def _with(program: Any, functions: dict[str, Callable]) -> Any:
    if not performs(program, *functions):
        return program

    eqns = []
    for eqn in without_consts(program).eqns:
        if (fn := functions.get(eqn.primitive.name)) is not None:
            eqns.append(as_call(eqn, fn))
            continue
        eqn = with_programs(eqn, functools.partial(_with, functions=functions))
        if eqn.primitive.name == "while" and functions is _GOING_ON:
            cond = ends_alone(eqn.params["cond_jaxpr"])
            eqn = eqn.replace(params={**eqn.params, "cond_jaxpr": cond})
        eqns.append(eqn)
    return with_equations(program, eqns)
