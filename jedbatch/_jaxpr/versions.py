"""Differences between versions of JAX: 0.10, 0.11 and 0.12.

A program and its constants: in 0.10 a `ClosedJaxpr` holds constants and a `Jaxpr`, the program;
from 0.11 on both names are one class, whose `jaxpr` is the program itself. Some primitives have
programs with constants as parameters, others without, and which do changes too. `is_program`,
`without_consts`, `consts_of` and `with_equations` serve all of them.

A `scan`: its parameters name the numbers of constants and carried values in 0.10, and describe
containers of them from 0.11 on. `scan_parts` reads both numbers off shapes instead.

Wrappers of functions are private classes of JAX, which `wrapped_by_jax` knows by name.

JAX keeps what it has found of an operation by the parameters of that, thousands of operations, and
these parameters with them. It lets go of an entry once a program among the parameters has gone
(`token_program`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from jedbatch._support.types import Array


class Equation(Protocol):
    """An equation of a program, `jax.extend.core.JaxprEqn`; variables have an `aval`."""

    @property
    def primitive(self) -> Primitive: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def invars(self) -> list[Any]: ...

    @property
    def outvars(self) -> list[Any]: ...

    @property
    def effects(self) -> Any: ...

    @property
    def replace(self) -> Callable[..., Any]: ...


class Atom(Protocol):
    """A variable or literal, `jax.extend.core.Var` or `Literal`."""

    @property
    def aval(self) -> Any: ...


class OpenProgram(Protocol):
    """A program without the values of its constants, `jax.extend.core.Jaxpr`."""

    @property
    def eqns(self) -> Sequence[Equation]: ...

    @property
    def constvars(self) -> list[Any]: ...

    @property
    def invars(self) -> list[Any]: ...

    @property
    def outvars(self) -> list[Any]: ...

    @property
    def replace(self) -> Callable[..., Any]: ...


class ClosedProgram(Protocol):
    """A program and its constants, `jax.extend.core.ClosedJaxpr`."""

    @property
    def jaxpr(self) -> OpenProgram: ...

    @property
    def consts(self) -> list[Any]: ...

    @property
    def replace(self) -> Callable[..., Any]: ...


# Records of a wrapper that say what a function returned when it ran, or where it was written.
_RECORDS_OF_JAX = frozenset({"Store", "EqualStore", "DebugInfo"})


# Parameters that are rules of differentiation, or go with one: functions that are made anew
# whenever the operation is run.
RULES_OF = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}

# Calls whose body is a program, by the names of the parameter that has it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
}


@functools.cache
def _empty() -> ClosedProgram:
    return jax.make_jaxpr(lambda: ())()


def token_program() -> ClosedProgram:
    """Returns an empty program, which is equal to no other.

    As a parameter of an operation it has JAX forget all parameters when the operation has gone.
    """
    return _empty().replace(consts=[])


def traced_rule(name: str, params: dict[str, Any]) -> tuple[Any, Sequence[Any], tuple]:
    """Returns a rule of differentiation as a program, its constants, and what else tells it apart.

    Args:
      name: of an operation that has a rule.
      params: its parameters.
    """
    num_args = len(params["call_jaxpr"].in_avals) - params["num_consts"]
    none_is_zero = [False] * num_args
    if name == "custom_jvp_call":
        program, consts, zeros = params["jvp_jaxpr_fun"].call_wrapped(*none_is_zero)
        return program, consts, tuple(zeros)
    program, consts = params["fwd_jaxpr_thunk"].call_wrapped(*none_is_zero)
    return program, consts, (params["bwd"],)


def is_program(value: object) -> bool:
    """True of programs of JAX, with constants or without."""
    return isinstance(value, Jaxpr | ClosedJaxpr)


def without_consts(program: Any) -> Any:
    """Returns the `Jaxpr` of a program with constants or without."""
    return getattr(program, "jaxpr", program)


def consts_of(program: Any) -> Sequence[Any]:
    """Returns the constants of a program; none if they are not part of it."""
    return getattr(program, "consts", ())


def with_equations(program: Any, equations: Sequence[Equation]) -> Any:
    """Returns the program with other equations, and with its constants if it has them."""
    jaxpr = without_consts(program)
    replaced = jaxpr.replace(eqns=equations)
    return replaced if program is jaxpr else program.replace(jaxpr=replaced)


def scan_parts(eqn: Equation) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a `scan`.

    Scanned values have one axis more outside than in the body; constants and carried values have
    as many.
    """
    body = without_consts(eqn.params["jaxpr"])

    def num_whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(
            len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outer, inner, strict=True)
        )

    num_carried = num_whole(eqn.outvars, body.outvars)
    return num_whole(eqn.invars, body.invars) - num_carried, num_carried


def static_arguments(compiled: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns (numbers, names) of the arguments for which `jax.jit` compiles a function anew.

    They are in nothing but the state by which such functions are copied and pickled.
    """
    state = compiled.__getstate__()
    return tuple(state["static_argnums"]), tuple(state["static_argnames"])


def wrapped_by_jax(value: Array) -> tuple[Any, ...] | None:
    """Returns the parts of a wrapper in which JAX hands on a function; None of anything else.

    Wrappers of an unknown name are told apart by identity, which is never wrong.
    """
    cls = type(value)
    if not cls.__module__.startswith("jax."):
        return None
    if cls.__name__ == "WrappedFun":
        return value.f, value.transforms, value.params
    if cls.__name__ == "Unhashable":  # an argument that derivatives do not see
        return (value.val,)
    return () if cls.__name__ in _RECORDS_OF_JAX else None


def failing_without_trace(forward: Any) -> Any:
    """Returns a forward rule that leaves what it stored, if a later call of it fails.

    JAX clears what a rule tells about its results before each call for other arguments that are
    differentiated, and reads it again where it remembers the rest of an earlier call.
    """
    last: dict[Any, Any] = {}

    def run(call: Callable, *args: Any) -> Any:
        try:
            results = call(*args)
        except Exception:
            for store, value in last.items():
                store.reset()
                store.store(value)
            raise
        last.update((store, store.val) for store in forward.stores if store)
        return results

    return forward.wrap(run, (), None)


@functools.cache
def traced_number() -> Tracer:
    """A number that JAX traces, of no trace that is left.

    `jax.closure_convert`, which `odeint` and others call, asks what values are made of to find out
    which may be differentiated later.
    """
    kinds: list[type[Tracer]] = []
    jax.make_jaxpr(lambda x: kinds.append(type(x)))(0.0)
    number = kinds[0].__new__(kinds[0])
    number.aval = jax.core.ShapedArray((), np.dtype(np.float32))
    return number
