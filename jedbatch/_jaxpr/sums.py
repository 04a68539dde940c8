"""Results of a program added to totals, in place where the program puts rows into zeros.

What reads a row or a slice of an array has as its derivative an array of zeros with this slice in
it. To add it to a total would read and write all of the total, and make the zeros before. Here the
slice is added to the same slice of the total.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import is_reshape, run_equation, run_equations, value_of
from jedbatch._jaxpr.versions import Atom, ClosedProgram, Equation
from jedbatch._support.types import Array


def added(closed: ClosedProgram, args: Sequence[Array], totals: Sequence[Array]) -> list[Array]:
    """Returns the totals with the results of a program added to them, one to each.

    Args:
      closed: a program, whose calls were inlined.
      args: its arguments.
      totals: arrays of the shapes of its results.
    """
    jaxpr = closed.jaxpr
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    env: dict[Any, Array] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    run_equations(jaxpr.eqns, env, functools.partial(run_equation, jaxpr))

    def makes_zeros(atom: Atom) -> bool:
        if isinstance(atom, Literal):
            return bool(np.all(np.asarray(atom.val) == 0))
        eqn = maker.get(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return makes_zeros(eqn.invars[0])

    def onto(total: Array, atom: Atom) -> Array:
        """Returns the sum of a total and a value."""
        if makes_zeros(atom):
            return total
        eqn = maker.get(atom) if isinstance(atom, Var) else None
        found = None if eqn is None else in_place(total, eqn)
        return total + value_of(atom, env).astype(total.dtype) if found is None else found

    def in_place(total: Array, eqn: Equation) -> Array | None:
        """Returns the sum of a total and the result of an operation, or None if it must be made."""
        name, operands = eqn.primitive.name, eqn.invars
        if name == "add_any":
            return onto(onto(total, operands[0]), operands[1])
        if is_reshape(eqn):
            inside = onto(total.reshape(operands[0].aval.shape), operands[0])
            return inside.reshape(total.shape)
        if name == "pad" and makes_zeros(operands[1]) and _only_around(eqn):
            low = [int(low) for low, _, _ in eqn.params["padding_config"]]
            return _onto_slice(total, value_of(operands[0], env), low)
        if name == "dynamic_update_slice" and makes_zeros(operands[0]):
            first = [value_of(v, env) for v in operands[2:]]
            return _onto_slice(total, value_of(operands[1], env), first)
        if name == "scatter-add" and makes_zeros(operands[0]):
            return run_equation(jaxpr, eqn, [total, *(value_of(v, env) for v in operands[1:])])[0]
        return None

    return [onto(x, v) for x, v in zip(totals, jaxpr.outvars, strict=True)]


def _only_around(eqn: Any) -> bool:
    """Returns whether an operation pads around what it is given: none in between, none cut off."""
    config = eqn.params["padding_config"]
    return all(low >= 0 and high >= 0 and between == 0 for low, high, between in config)


def _onto_slice(total: Array, update: Array, first: Sequence[Any]) -> Array:
    first = [jnp.asarray(i, jnp.int32) for i in first]
    before = lax.dynamic_slice(total, first, update.shape)
    return lax.dynamic_update_slice(total, before + update.astype(total.dtype), first)
