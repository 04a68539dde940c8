"""Loops with a bound: a `while_loop` that does not end stops after so many trips, and says so.

Every loop counts its trips. One that would go on after the last of them stops; the real numbers of
its results are then NaN, and the program has one more result, whether any loop in it stopped so.
That goes through the loops, branches and calls around it. A loop ends where one in its condition
was stopped, since that has no value then.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.interpret import (
    REBUILT,
    any_performs,
    bodies_of,
    has_gradient,
    interpret,
    performs,
    run_equation,
    run_with_bodies,
    shape_of,
)
from jedbatch._jaxpr.versions import ClosedProgram, Equation, consts_of, without_consts
from jedbatch._support.types import Array


def bounded(closed: ClosedProgram, max_steps: int) -> Any:
    """Returns a program with a bound for its loops, and one more result, bool[].

    Args:
      closed: a program of one lane.
      max_steps: how many trips a loop makes at most, each time it is run.

    Raises:
      ValueError: a loop is where no bound can be put, such as in a function that has a rule of its
        own for derivatives.
    """
    kinds = map(shape_of, closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: _run(closed, args, max_steps))(*kinds)


def _run(program: Any, args: Sequence[Array], max_steps: int) -> list[Array]:
    """Returns the results of a program, and whether a loop in it stopped."""
    jaxpr, stopped = without_consts(program), jnp.bool_(False)

    def rule(eqn: Equation, values: list[Array]) -> list[Array]:
        nonlocal stopped
        if not any_performs([eqn], "while"):
            return run_equation(jaxpr, eqn, values)
        *outs, flag = _equation(eqn, values, max_steps)
        stopped = stopped | flag.any()
        return outs

    outs = interpret(jaxpr, consts_of(program), args, rule)
    return [*outs, stopped]


def _equation(eqn: Equation, values: list[Array], max_steps: int) -> list[Array]:
    """Returns the results of an operation and whether a loop in it stopped, in any step of it."""
    if eqn.primitive.name == "while":
        return _while(eqn, values, max_steps)
    if eqn.primitive.name not in REBUILT:
        raise ValueError(
            f"`batch` got max_steps={max_steps}, but there is a loop inside of "
            f"`{eqn.primitive.name}`, where it cannot be stopped: a function with a rule of its "
            "own for derivatives, or a solver, is taken as it is. Bound that loop where it is "
            "written, such as by `(step < 1000) & ...` in its condition, or leave max_steps out."
        )
    bodies = [lambda *xs, body=body: _run(body, xs, max_steps) for body in bodies_of(eqn)]
    return run_with_bodies(eqn, bodies, values)


def _while(eqn: Equation, values: list[Array], max_steps: int) -> list[Array]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]

    def goes_on(carry: Sequence[Array]) -> list[Array]:
        return _run(cond, [*of_cond, *carry], max_steps)

    def step(state: Any) -> Any:
        count, stopped, carry = state
        *carry, inside = _run(body, [*of_body, *carry], max_steps)
        return count + 1, stopped | inside, carry

    def checked(state: Any) -> Any:
        return *state, *goes_on(state[2])

    start = jnp.int32(0), jnp.bool_(False), values[num_cond + num_body :]
    if performs(cond, "while"):  # a condition has no other result, so steps evaluate it
        _, inside, carry, more, in_cond = lax.while_loop(
            lambda state: (state[0] < max_steps) & state[3] & ~state[4],
            lambda state: checked(step(state[:3])),
            checked(start),
        )
        stopped = more | in_cond
    else:
        _, inside, carry = lax.while_loop(
            lambda state: (state[0] < max_steps) & goes_on(state[2])[0], step, start
        )
        stopped = goes_on(carry)[0]
    return [*(_without_value(stopped, x) for x in carry), stopped | inside]


def _without_value(stopped: Array, x: Array) -> Array:
    """Returns a value, NaN in place of real numbers of a loop that was stopped; their tangents too.

    A `where` of the value itself would have a tangent of zero there.
    """
    if not has_gradient(x.dtype):
        return x
    return x * jnp.where(stopped, jnp.asarray(jnp.nan, x.dtype), jnp.asarray(1, x.dtype))
