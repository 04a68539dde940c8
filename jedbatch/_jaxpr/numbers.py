"""Numbers in programs, as operands.

A program that reads a number of the instance, such as the body of a loop in
`lax.scan(lambda c, _: (c * rate, None), x)`, holds it as a literal, or as a constant if it is an
array. Programs that differ in such numbers only can be one program that takes them as operands.

Numbers are counted in one order: of a program its constants; of each of its equations the literals
it reads and then the numbers of its bodies; at last the literals among the results.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from jedbatch._jaxpr.interpret import (
    has_gradient,
    inner_programs,
    run_equation,
    run_with_bodies,
    value_of,
)
from jedbatch._jaxpr.versions import RULES_OF, Equation, consts_of, without_consts
from jedbatch._support.types import Array, Dtype

MAX_ELEMENTS = 4096  # of a constant that may become an operand

# Operations with bodies that can be traced again, and the names of their bodies.
BODIES: Mapping[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),  # its name in JAX 0.10
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


class Number(NamedTuple):
    """A number in a program.

    Attributes:
      value: the number, or a small array.
      weak: whether its dtype gives way to that of others.
    """

    value: np.ndarray
    weak: bool

    @property
    def key(self) -> bytes:
        """Equal for equal numbers of one type."""
        return self.value.tobytes()


def traced_bodies(name: str, params: Mapping[str, object]) -> list[Any]:
    """Returns the programs in which an operation may hold numbers, in order."""
    if params.get("differentiated"):  # the second half of a `jax.checkpoint`
        return []
    bodies: list[Any] = []
    for param in BODIES.get(name, ()):
        value = params[param]
        bodies += value if isinstance(value, tuple | list) else [value]
    return bodies


def is_number(const: object) -> bool:
    """True of constants of a program that may become operands: arrays that are small."""
    if isinstance(const, Tracer) or not isinstance(const, np.ndarray | np.generic | jax.Array):
        return False
    return const.size <= MAX_ELEMENTS and _is_numeric(const.dtype)


def _is_numeric(dtype: Dtype) -> bool:
    """True of booleans and numbers; False of random keys and of the zeros of integers."""
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and dtype != jax.dtypes.float0


def reads_numbers(eqn: Equation) -> bool:
    """Returns whether literals of an equation may become operands: not if it has other bodies."""
    name = eqn.primitive.name
    return name in BODIES or name in RULES_OF or not inner_programs(eqn)


def is_literal(atom: object) -> bool:
    """True of literals that may become operands."""
    if not isinstance(atom, Literal):
        return False
    aval: Any = atom.aval
    return not aval.shape and _is_numeric(aval.dtype)


def numbers_of(program: Any) -> Iterator[Number]:
    """Yields the numbers of a program, in order."""
    for const in consts_of(program):
        if is_number(const):
            yield number_in(const)
    jaxpr = without_consts(program)
    for eqn in jaxpr.eqns:
        if reads_numbers(eqn):
            yield from map(_number, filter(is_literal, eqn.invars))
        for body in traced_bodies(eqn.primitive.name, eqn.params):
            yield from numbers_of(body)
    yield from map(_number, filter(is_literal, jaxpr.outvars))


def number_in(array: Any) -> Number:
    return Number(np.asarray(array), bool(jax.typeof(array).weak_type))


def _number(literal: Literal) -> Number:
    aval: Any = literal.aval
    return Number(np.asarray(literal.val, aval.dtype), bool(aval.weak_type))


def with_numbers(
    program: Any, numbers: Mapping[int, Any], args: Sequence[jax.Array]
) -> list[Array]:
    """Returns the results of a program some of whose numbers are replaced.

    Args:
      program: the program.
      numbers: values for numbers, by their positions.
      args: the arguments.
    """
    constant = {
        k: jax.lax.stop_gradient(x) if has_gradient(x.dtype) else x for k, x in numbers.items()
    }
    return run_program(constant, program, 0, *args)


def run_program(
    numbers: Mapping[int, object],
    program: Any,
    position: int,
    *args: Array,
) -> list[Array]:
    """Runs a program whose first number has this position, some of whose numbers are replaced."""

    def next_number(value: object) -> Array:
        nonlocal position
        position += 1
        return numbers.get(position - 1, value)

    jaxpr = without_consts(program)
    env = dict(zip(jaxpr.invars, args, strict=True))
    for var, const in zip(jaxpr.constvars, consts_of(program), strict=True):
        env[var] = next_number(const) if is_number(const) else const
    for eqn in jaxpr.eqns:
        first = position
        literals = reads_numbers(eqn)
        values = [
            next_number(x.val) if literals and is_literal(x) else value_of(x, env)
            for x in eqn.invars
        ]
        starts = []
        bodies = traced_bodies(eqn.primitive.name, eqn.params)
        for body in bodies:
            starts.append(position)
            position += sum(1 for _ in numbers_of(body))
        if starts and any(starts[0] <= k < position for k in numbers):
            functions = [
                functools.partial(run_program, numbers, body, start)
                for body, start in zip(bodies, starts, strict=True)
            ]
            results = run_with_bodies(eqn, functions, values)
        elif any(first <= k < position for k in numbers):
            results = run_equation(jaxpr, _reading_variables(eqn), values)
        else:
            results = run_equation(jaxpr, eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [next_number(x.val) if is_literal(x) else value_of(x, env) for x in jaxpr.outvars]


def _reading_variables(eqn: Equation) -> Equation:
    """The same equation with variables in place of literals."""
    literals = [x for x in eqn.invars if isinstance(x, Literal)]
    others = iter(jax.make_jaxpr(lambda *xs: xs)(*(x.aval for x in literals)).jaxpr.invars)
    return eqn.replace(invars=[next(others) if isinstance(x, Literal) else x for x in eqn.invars])
