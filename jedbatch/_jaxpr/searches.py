"""Binary searches in tables of which the extent is not known.

`jnp.searchsorted` halves an interval of places as often as a table of so many rows needs. It asks
for the number of rows as one of Python, for the number of steps and for the end of the interval.
A step too many changes nothing: there is one place left. So there are as many steps as the longest
table could need, and the end is a number that no table has, which is replaced by the extent before
anything runs.

A step that halves no more costs a comparison; to count rows instead costs one for each of them.
"""

from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jedbatch._jaxpr.associative import ANY_NUMBER, is_jax, is_of_jax
from jedbatch._jaxpr.interpret import interpret, run_equation, shape_of
from jedbatch._jaxpr.versions import Atom, ClosedProgram, Equation, consts_of, without_consts
from jedbatch._support.types import Dtype

SEARCH = "_searchsorted_scan_impl"
# These see to it that a type of integers is wide enough.
OPERATION = "SearchSorted"
CHECKS = ("searchsorted", f"{OPERATION}.__init__")
MOST_STEPS = 31.0  # of tables of up to `ANY_NUMBER` rows


def is_search(frame: FrameType | None) -> bool:
    """Returns whether a binary search of JAX asks for a number of rows."""
    while frame is not None and frame.f_code.co_name in ("is_constant_dim", "int_dtype_for_dim"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_qualname in (SEARCH, *CHECKS) and is_of_jax(frame)


def searched(eqn: Equation) -> Any:
    """Returns the program of a search, (table, what is looked for) to places.

    None of other equations. Raises `NotImplementedError` if a table has an extent among others.
    """
    operation: Any = eqn.params.get("_prim")  # of JAX from 0.12 on
    if type(operation).__name__ == OPERATION and is_jax(type(operation).__module__):
        return jax.make_jaxpr(operation.expand)(*map(shape_of, eqn.invars))
    if eqn.params.get("name") != SEARCH:
        return None
    table, called = eqn.invars[0].aval.shape, eqn.params["jaxpr"]
    extents = [d for d in table if type(d) is not int]
    if not extents:
        return called
    if len(extents) > 1:
        raise NotImplementedError(f"a search in tables of {extents} rows")

    def run(*args: Any) -> list[Any]:
        return _with_extent(called, args, extents[0])

    return jax.make_jaxpr(run)(*map(shape_of, eqn.invars))


def _with_extent(program: ClosedProgram, args: Any, extent: Any) -> list[Any]:
    """Returns the results of a program, with an extent wherever there is `ANY_NUMBER`."""
    jaxpr = without_consts(program)

    def rule(eqn: Equation, values: list[Any]) -> list[Any]:
        if eqn.params.get("name") == SEARCH:
            return _with_extent(eqn.params["jaxpr"], values, extent)
        atoms = [_variable(v.aval.dtype) if _stands_for_extent(v) else v for v in eqn.invars]
        values = [
            jnp.asarray(extent).astype(v.aval.dtype) if _stands_for_extent(v) else x
            for v, x in zip(eqn.invars, values, strict=True)
        ]
        return run_equation(jaxpr, eqn.replace(invars=atoms), values)

    return interpret(jaxpr, consts_of(program), args, rule)


def _variable(dtype: Dtype) -> Any:
    """Returns a variable that holds a number."""
    return jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((), dtype)).jaxpr.invars[0]


def _stands_for_extent(atom: Atom) -> bool:
    return isinstance(atom, Literal) and jnp.ndim(atom.val) == 0 and atom.val == ANY_NUMBER
