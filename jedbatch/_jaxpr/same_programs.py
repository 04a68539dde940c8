"""Whether programs compute the same, one of which takes numbers that the other one holds.

Python may take another way where a number is no number but an operand. So a function is traced in
both ways, and the programs count as the same if they are written alike (see `Keys`), once what
depends on constants alone is evaluated.

A derivative rule of the user's (`jax.custom_vjp`, `jax.custom_jvp`) says what no equation of a
program does; it is written with the operation that it belongs to (see `Keys.rule_key`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.interpret import (
    bodies_of,
    interpret,
    is_fixed,
    names_in,
    run_equation,
    run_with_bodies,
    used_variables,
)
from jedbatch._jaxpr.numbers import BODIES, Number, is_literal, is_number, literal, number_in
from jedbatch._jaxpr.versions import (
    CALLS,
    RULES_OF,
    Equation,
    consts_of,
    without_consts,
)

# What may differ where a number is an operand: its value does not.
MOVES = names_in(
    "broadcast_in_dim convert_element_type copy copy_p reshape squeeze stop_gradient transpose"
)

# Returns a program without its numbers, written, and these (see `Keys.written`).
Written = Callable[[Any], tuple[Any, tuple[Number, ...]]]


def is_same_with(numbers: Sequence[Number], program: Any, constant: Any, written: Written) -> bool:
    """Returns whether a program computes what another does that holds some numbers as constants.

    Args:
      numbers: the values of the last arguments of `program`.
      program: takes the numbers as operands.
      constant: the same function, traced with these numbers.
      written: says what programs are told apart by.
    """
    pair = _both(numbers, program, constant)
    return pair is not None and _are_same(*pair, written)


def _both(numbers: Sequence[Number], program: Any, constant: Any) -> tuple[Any, Any] | None:
    """Returns two programs, in both of which the numbers are constants.

    None if they compute different things of constants: where JAX and Python would do the same, the
    results for these numbers may be equal, but not for others.
    """
    ours: list[str] = []
    theirs: list[str] = []
    pair = (
        _with_constants(program, list(map(literal, numbers)), computed=ours),
        _with_constants(constant, computed=theirs),
    )
    return pair if ours == theirs else None


def _are_same(ours: Any, theirs: Any, written: Written) -> bool:
    """Returns whether programs have the same equations, and numbers that are equal."""
    (ours, own_numbers), (theirs, numbers) = (written(_live(x)) for x in (ours, theirs))
    return ours == theirs and all(map(_is_equal, own_numbers, numbers))


def _with_constants(
    program: Any,
    known: Sequence[Any] = (),
    *,
    computed: list[str] | None = None,
) -> Any:
    """The program without its last arguments, which are known; bodies hold what they read of it.

    The names of operations on what is known are added to `computed`.
    """

    def run(inner: Any, *args: Any) -> list[Any]:
        return interpret(without_consts(inner), [*map(_known, consts_of(inner))], args, rule)

    def rule(eqn: Equation, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        values = [*map(_in_own_dtype, eqn.invars, values)]
        is_known = not any(isinstance(x, Tracer) for x in values)
        if name in RULES_OF and is_known:  # constants have no derivative
            return run(eqn.params[CALLS[name]], *values)
        if name in BODIES and not is_fixed(eqn):
            bodies = [functools.partial(run, body) for body in bodies_of(eqn)]
            if name in CALLS:  # would pass constants on as arguments
                return bodies[0](*values)
            if not is_known:
                parts = _closing_over_known(bodies, values) if name == "cond" else (bodies, values)
                return run_with_bodies(eqn, *parts)
        if eqn.effects or not is_known:
            return run_equation(without_consts(program), eqn, values)
        with jax.ensure_compile_time_eval():
            results = run_equation(without_consts(program), eqn, values)
        if computed is not None and name not in MOVES:
            computed.append(name)
        return [*map(_known, results)]

    types = program.in_avals[: len(program.in_avals) - len(known)]
    return jax.make_jaxpr(lambda *args: run(program, *args, *known))(*types)


def _in_own_dtype(atom: Any, value: Any) -> Any:
    """The value of a literal with the dtype that it has in its program; others as they are."""
    is_weak = not is_literal(atom) or atom.aval.weak_type
    return value if is_weak else np.asarray(value, atom.aval.dtype)[()]


def _known(x: Any) -> Any:
    """A constant, as a literal if it is a number."""
    return literal(number_in(x)) if is_number(x) else x


def _closing_over_known(
    branches: Sequence[Callable], values: Sequence[Any]
) -> tuple[list[Callable], list[Any]]:
    """Branches without the arguments that are known, which they close over, and other operands."""
    choice, *args = values
    is_known = [not isinstance(x, Tracer) for x in args]

    def closed(branch: Callable, *unknown: Any) -> Any:
        rest = iter(unknown)
        return branch(
            *(x if known else next(rest) for x, known in zip(args, is_known, strict=True))
        )

    others = [x for x, known in zip(args, is_known, strict=True) if not known]
    return [functools.partial(closed, branch) for branch in branches], [choice, *others]


def _live(program: Any) -> Any:
    """The program without equations and constants that no result depends on."""
    jaxpr = without_consts(program)
    used = used_variables(jaxpr)
    equations = [e for e in jaxpr.eqns if e.effects or not used.isdisjoint(e.outvars)]
    run = functools.partial(jax.core.eval_jaxpr, jaxpr.replace(eqns=equations), consts_of(program))
    return jax.make_jaxpr(run)(*program.in_avals)


def _is_equal(a: Number, b: Number) -> bool:
    """Returns whether numbers of one type are equal; real numbers but for their last bit.

    JAX rounds a number of Python once where it is a literal. As an operand it is rounded to the
    default dtype first, and then to a dtype of fewer bits that it meets.
    """
    if not jnp.issubdtype(a.value.dtype, jnp.inexact):
        return a.key == b.key
    ours, theirs = (x.value.astype(np.complex128) for x in (a, b))
    eps = float(jnp.finfo(a.value.dtype).eps)
    return bool(np.allclose(ours, theirs, rtol=eps, atol=0, equal_nan=True))
