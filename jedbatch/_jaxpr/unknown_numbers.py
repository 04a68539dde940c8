"""Numbers that XLA does not know, so that operations which differ in them alone are compiled once.

XLA:CPU compiles every fusion of operations by itself, which takes some 10 ms however small it is,
but equal ones once. Many differ in nothing but a constant, such as the opcode that a loop waits
for, or where the pre-activations of a gate begin among those of all gates. A number that enters a
loop from outside behind an `optimization_barrier` is an operand there, not a constant.
"""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.interpret import interpret, run_equation
from jedbatch._jaxpr.versions import Equation, OpenProgram
from jedbatch._support.types import Array

Starts = Mapping[int, Array]  # int32[], the unknown number in place of each number


def unknown(number: int) -> Array:
    """Returns int32[], a number that XLA does not know inside of loops that begin after it."""
    return lax.optimization_barrier(jnp.int32(number))


def unknown_starts(jaxpr: OpenProgram) -> dict[int, Array]:
    """Returns where the pieces of arrays begin that a program splits, for those of one size."""
    starts = {a for eqn in jaxpr.eqns if _splits_evenly(eqn) for a in _starts(eqn)}
    return {a: unknown(a) for a in sorted(starts)}


def run_with_starts(
    jaxpr: OpenProgram, consts: Sequence[Array], args: Sequence[Array], starts: Starts
) -> list[Array]:
    """Returns the results of a program, whose pieces of one size begin at unknown numbers.

    Args:
      jaxpr: the program.
      consts: the values of its constants.
      args: the values of its arguments.
      starts: as from `unknown_starts`; without any, the program runs as it is.
    """

    def rule(eqn: Equation, values: Sequence[jax.Array]) -> list[Array]:
        if not starts or not _splits_evenly(eqn):
            return run_equation(jaxpr, eqn, values)
        (x,), axis = values, eqn.params["axis"]
        return [
            lax.dynamic_slice_in_dim(x, starts[a], int(n), axis, allow_negative_indices=False)
            for a, n in zip(_starts(eqn), eqn.params["sizes"], strict=True)
        ]

    return interpret(jaxpr, consts, args, rule)


def _splits_evenly(eqn: Equation) -> bool:
    """Returns whether an equation splits an array into pieces of one size."""
    return eqn.primitive.name == "split" and 1 == len(set(eqn.params["sizes"])) < len(eqn.outvars)


def _starts(eqn: Equation) -> list[int]:
    """Returns where the pieces of a split begin."""
    return [int(a) for a in itertools.accumulate(eqn.params["sizes"][:-1], initial=0)]
