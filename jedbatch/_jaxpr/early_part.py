"""A program in two: products that need some operands only, and all else.

A step of a recurrent network multiplies its input and its state by weights, often as one product,
`concatenate([x, h]) @ w`. What is done to the input alone need not wait for the state.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Var

from jedbatch._jaxpr.interpret import (
    dependents,
    inlined,
    interpret,
    reads,
    run_equation,
    shape_of,
    used_variables,
)
from jedbatch._jaxpr.versions import ClosedProgram, Equation, OpenProgram
from jedbatch._support.types import Array

FEWER = 8  # times as many bytes of weights as of results, for a program of its own


@dataclass(frozen=True, eq=False)
class ProgramPart:
    """A part of a program.

    Attributes:
      read: positions of the program's arguments that it reads.
      results: how many there are.
      call: maps these arguments, and for the rest then the results of the early part, to results.
    """

    read: tuple[int, ...]
    results: int
    call: Callable[[Sequence[Array]], list[Array]]


class Parts(NamedTuple):
    """A program in two.

    Attributes:
      early: products that do not wait for late arguments.
      rest: all else.
      weights: bytes of the weights of these products.
    """

    early: ProgramPart
    rest: ProgramPart
    weights: int


def early_part(closed: ClosedProgram, num_weights: int, late: Collection[int]) -> Parts | None:
    """Returns the products of a program that do not wait for some arguments, and the rest of it.

    Both together compute what the program computes, up to rounding: a product of arguments that
    come early and others, put together, is the sum of two.

    Args:
      closed: the program.
      num_weights: how many of its arguments are weights; they come first.
      late: positions of the arguments that come late.

    Returns:
      The early part and the rest; None if there is no such product, or what it gives is not much
      smaller than the weights.
    """
    program = inlined(closed)
    if any(eqn.effects for eqn in program.jaxpr.eqns):
        return None
    program = _products_apart(program, num_weights, late)
    jaxpr = program.jaxpr
    varying = dependents(jaxpr, jaxpr.invars[num_weights:])
    waiting = dependents(jaxpr, [jaxpr.invars[i] for i in late])
    used = used_variables(jaxpr)
    equations = [eqn for eqn in jaxpr.eqns if used.intersection(eqn.outvars)]
    early = [eqn for eqn in equations if _is_all(eqn.outvars, varying - waiting)]
    heavy = [eqn for eqn in early if _weight_bytes(eqn, varying)]
    part = jaxpr.replace(eqns=early)
    after = dependents(part, [v for eqn in heavy for v in eqn.outvars])
    needed = used_variables(part.replace(outvars=list(after)))
    moved = [eqn for eqn in early if needed.intersection(eqn.outvars)]
    made = [v for eqn in moved for v in eqn.outvars]
    left = [eqn for eqn in equations if eqn.outvars[0] not in made]
    wanted = {v for eqn in left for v in reads(eqn)}.union(
        v for v in jaxpr.outvars if isinstance(v, Var)
    )
    given = [v for v in made if v in wanted]
    weights = sum(_weight_bytes(eqn, varying) for eqn in heavy)
    if not given or FEWER * sum(map(_bytes, given)) > weights:
        return None
    consts = dict(zip(jaxpr.constvars, program.consts, strict=True))
    before = [eqn for eqn in equations if not waiting.intersection(eqn.outvars)]
    return Parts(
        _part(jaxpr, consts, before, given, []),
        _part(jaxpr, consts, left, jaxpr.outvars, given),
        weights,
    )


def _part(
    jaxpr: OpenProgram,
    consts: dict[Var, Array],
    equations: Sequence[Equation],
    results: Sequence[Any],
    given: Sequence[Var],
) -> ProgramPart:
    """The part of a program that computes some results, where other variables are given."""
    part = jaxpr.replace(eqns=list(equations), outvars=list(results))
    used = used_variables(part)
    read = [i for i, v in enumerate(jaxpr.invars) if v in used]
    part = part.replace(
        eqns=[eqn for eqn in equations if used.intersection(eqn.outvars)],
        constvars=list(consts),
        invars=[*(jaxpr.invars[i] for i in read), *given],
    )
    values = list(consts.values())
    return ProgramPart(
        tuple(read), len(results), lambda args: jax.core.eval_jaxpr(part, values, *args)
    )


def _products_apart(
    program: ClosedProgram, num_weights: int, late: Collection[int]
) -> ClosedProgram:
    """The program, where products with operands of both kinds, put together, are two products."""
    jaxpr = program.jaxpr
    varying = dependents(jaxpr, jaxpr.invars[num_weights:])
    waiting = dependents(jaxpr, [jaxpr.invars[i] for i in late])

    def apart(*args: Array) -> list[Array]:
        joined: dict[Any, tuple[Equation, list[Array]]] = {}

        def rule(eqn: Equation, values: list[jax.Array]) -> Sequence[Array]:
            if eqn.primitive.name == "concatenate":
                joined[eqn.outvars[0]] = eqn, values
            elif _sums_in_order(eqn):
                for side, v in enumerate(eqn.invars):
                    if v in joined and eqn.invars[1 - side] not in varying:
                        two = _two_products(eqn, values, side, *joined[v], waiting)
                        if two is not None:
                            return [two]
            return run_equation(jaxpr, eqn, values)

        return interpret(jaxpr, program.consts, args, rule)

    return jax.make_jaxpr(apart)(*map(shape_of, jaxpr.invars))


def _two_products(
    eqn: Equation,
    values: Sequence[jax.Array],
    side: int,
    concatenation: Equation,
    pieces: Sequence[jax.Array],
    waiting: set[Var],
) -> jax.Array | None:
    """A product with weights of what was put together, as that of early operands and of late ones.

    Returns None if all operands are of one kind, or the product is not over their axis.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    axis = concatenation.params["dimension"]
    is_late = [v in waiting for v in concatenation.invars]
    if any(batch) or tuple(contracted[side]) != (axis,) or len(set(is_late)) == 1:
        return None
    weights, of_weights = values[1 - side], contracted[1 - side][0]
    ends = np.cumsum([x.shape[axis] for x in pieces]).tolist()
    sums = []
    for late in (False, True):
        some = [
            (x, end) for x, end, is_one in zip(pieces, ends, is_late, strict=True) if is_one is late
        ]
        rows = [lax.slice_in_dim(weights, e - x.shape[axis], e, axis=of_weights) for x, e in some]
        both = lax.concatenate([x for x, _ in some], axis), lax.concatenate(rows, of_weights)
        sums.append(eqn.primitive.bind(*(both if side == 0 else both[::-1]), **eqn.params))
    return sums[0] + sums[1]


def _sums_in_order(eqn: Equation) -> bool:
    """Returns whether it is a product of which a sum of two loses no more bits than one of both.

    Sums in half precision are rounded once more than inside of a product. A product with a number
    that the program holds sums nothing.
    """
    if eqn.primitive.name != "dot_general" or not all(isinstance(v, Var) for v in eqn.invars):
        return False
    dtype = eqn.outvars[0].aval.dtype
    return bool(jax.dtypes.issubdtype(dtype, np.inexact)) and jax.numpy.finfo(dtype).bits >= 32


def _is_all(variables: Sequence[Any], among: set[Any]) -> bool:
    return bool(variables) and all(v in among for v in variables)


def _bytes(v: Any) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize


def _weight_bytes(eqn: Equation, varying: set[Var]) -> int:
    """Bytes of the weights that a product reads; 0 if it is none, or has none."""
    if eqn.primitive.name != "dot_general":
        return 0
    return sum(_bytes(v) for v in reads(eqn) if v not in varying)
