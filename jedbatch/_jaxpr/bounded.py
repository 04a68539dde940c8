"""Loops with a bound: a `while_loop` that does not end stops after so many trips, and says so.

Every loop counts its trips. One that would go on after the last of them stops; the real numbers of
its results are then NaN, and the program has one more result, whether any loop in it stopped so.
That goes through the loops, branches and calls around it. A loop ends where one in its condition
was stopped, since that has no value then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.interpret import (
    any_performs,
    has_gradient,
    performs,
    run_equation,
    run_equations,
    shape_of,
    value_of,
)
from jedbatch._jaxpr.versions import (
    ClosedProgram,
    Equation,
    consts_of,
    scan_parts,
    without_consts,
)
from jedbatch._support.types import Array

# Calls whose body is gone through, by the names of the parameter that has it.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CHECKPOINTS = ("checkpoint", "remat2")


def bounded(closed: ClosedProgram, max_steps: int) -> Any:
    """Returns a program with a bound for its loops, and one more result, bool[].

    Args:
      closed: a program of one lane.
      max_steps: how many trips a loop makes at most, each time it is run.

    Raises:
      ValueError: a loop is where no bound can be put, such as in a function that has a rule of its
        own for derivatives.
    """
    run = _Bounded(max_steps)
    kinds = map(shape_of, closed.jaxpr.invars)

    def whole(*args: Array) -> list[Array]:
        outs, stopped = run.program(closed, args)
        return [*outs, stopped]

    return jax.make_jaxpr(whole)(*kinds)


class _Bounded:
    """Runs programs whose loops have a bound; see `bounded`."""

    def __init__(self, max_steps: int):
        self.max_steps = max_steps

    def program(self, program: Any, args: Sequence[Array]) -> tuple[list[Array], Array]:
        """Returns (the results of a program, whether a loop in it stopped)."""
        jaxpr = without_consts(program)
        if not performs(program, "while"):
            return jax.core.eval_jaxpr(jaxpr, consts_of(program), *args), jnp.bool_(False)
        flags: list[Array] = []

        def rule(eqn: Equation, values: list[Array]) -> list[Array]:
            if not any_performs([eqn], "while"):
                return run_equation(jaxpr, eqn, values)
            outs, stopped = self._equation(eqn, values)
            flags.append(stopped)
            return outs

        env = dict(zip(jaxpr.constvars, consts_of(program), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        run_equations(jaxpr.eqns, env, rule)
        return [value_of(v, env) for v in jaxpr.outvars], _any(flags)

    def _equation(self, eqn: Equation, values: list[Array]) -> tuple[list[Array], Array]:
        name = eqn.primitive.name
        if name in _CALLS:
            return self.program(eqn.params[_CALLS[name]], values)
        if name in _CHECKPOINTS:
            options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
            inner = eqn.params["jaxpr"]
            return jax.checkpoint(lambda *xs: self.program(inner, xs), **options)(*values)
        runs: dict[str, Callable] = {"while": self._while, "scan": self._scan, "cond": self._cond}
        if name not in runs:
            raise ValueError(
                f"`batch` got max_steps={self.max_steps}, but there is a loop inside of `{name}`, "
                "where it cannot be stopped: a function with a rule of its own for derivatives, or "
                "a solver, is taken as it is. Bound that loop where it is written, such as by "
                "`(step < 1000) & ...` in its condition, or leave max_steps out."
            )
        return runs[name](eqn, values)

    def _while(self, eqn: Equation, values: list[Array]) -> tuple[list[Array], Array]:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]

        def goes_on(carry: Sequence[Array]) -> tuple[Array, Array]:
            (more,), inside = self.program(cond, [*of_cond, *carry])
            return more, inside

        def step(state: Any) -> Any:
            count, stopped, carry = state
            carry, inside = self.program(body, [*of_body, *carry])
            return count + 1, stopped | inside, carry

        def checked(state: Any) -> Any:
            return *state, *goes_on(state[2])

        start = jnp.int32(0), jnp.bool_(False), values[num_cond + num_body :]
        if performs(cond, "while"):  # a condition has no other result, so steps evaluate it
            _, inside, carry, more, in_cond = lax.while_loop(
                lambda state: (state[0] < self.max_steps) & state[3] & ~state[4],
                lambda state: checked(step(state[:3])),
                checked(start),
            )
            stopped = more | in_cond
        else:
            _, inside, carry = lax.while_loop(
                lambda state: (state[0] < self.max_steps) & goes_on(state[2])[0], step, start
            )
            stopped = goes_on(carry)[0]
        return [_without_value(stopped, x) for x in carry], stopped | inside

    def _scan(self, eqn: Equation, values: list[Array]) -> tuple[list[Array], Array]:
        num_consts, num_carried = scan_parts(eqn)
        consts, carry = values[:num_consts], values[num_consts : num_consts + num_carried]

        def step(state: Any, rows: Any) -> Any:
            carry, stopped = state
            outs, inside = self.program(eqn.params["jaxpr"], [*consts, *carry, *rows])
            return (outs[:num_carried], stopped | inside), outs[num_carried:]

        (carry, stopped), stacked = lax.scan(
            step,
            (carry, jnp.bool_(False)),
            values[num_consts + num_carried :],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *stacked], stopped

    def _cond(self, eqn: Equation, values: list[Array]) -> tuple[list[Array], Array]:
        branches = [
            lambda *xs, branch=branch: self.program(branch, xs) for branch in eqn.params["branches"]
        ]
        found: tuple[list[Array], Array] = lax.switch(values[0], branches, *values[1:])
        return found


def _any(flags: Sequence[Array]) -> Array:
    stopped = jnp.bool_(False)
    for flag in flags:
        stopped = stopped | flag
    return stopped


def _without_value(stopped: Array, x: Array) -> Array:
    """Returns a value, NaN in place of real numbers of a loop that was stopped; their tangents too.

    A `where` of the value itself would have a tangent of zero there.
    """
    if not has_gradient(x.dtype):
        return x
    return x * jnp.where(stopped, jnp.asarray(jnp.nan, x.dtype), jnp.asarray(1, x.dtype))
