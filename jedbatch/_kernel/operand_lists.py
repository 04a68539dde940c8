"""Lists of operands, which the program of a lane takes as one array.

A node that stacks 500 others reads 500 operands. As arguments of its program these would be 500
gathers and a concatenation of 500 arrays: XLA:CPU takes 16 ms to compile each of them, and copies
every row twice. If all that a program does with operands that follow one another is to concatenate
them, it is written anew for an array that has a row for each of them, which one gather reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.interpret import (
    Bindings,
    is_reshape,
    reads,
    run_equation,
    shape_of,
    value_of,
)
from jedbatch._jaxpr.storage import Kind, stored
from jedbatch._jaxpr.versions import ClosedProgram, Equation
from jedbatch._support.types import Array

MIN_LIST = 4  # operands that are read together


class Parameter(NamedTuple):
    """An argument of the program of a lane: an operand of its node, or a list of operands.

    Attributes:
      first: the position of its first operand.
      length: the number of operands; None if it is an operand by itself.
      type: of each operand.
    """

    first: int
    length: int | None
    type: ValueType

    @property
    def num_operands(self) -> int:
        """Number of operands."""
        return 1 if self.length is None else self.length

    @property
    def operands(self) -> range:
        """The positions of its operands."""
        return range(self.first, self.first + self.num_operands)

    @property
    def kind(self) -> Kind:
        """(shape, dtype) in which it is given, with an axis for the operands of a list."""
        shape, dtype = stored(self.type)
        return (shape if self.length is None else (self.length, *shape)), dtype


class Piece(NamedTuple):
    """Operands that follow one another, put together along an axis.

    Attributes:
      first, length: the position of the first operand, and their number.
      axis: along which they are put together; None of an operand by itself.
      shape: of one of them before that.
    """

    first: int
    length: int
    axis: int | None
    shape: tuple[int, ...]


def single_parameters(operands: Sequence[ValueType]) -> tuple[Parameter, ...]:
    """Returns parameters that are one operand each."""
    return tuple(Parameter(j, None, t) for j, t in enumerate(operands))


def with_lists(
    closed: ClosedProgram, num_shared: int, operands: Sequence[ValueType]
) -> tuple[Any, tuple[Parameter, ...]]:
    """Returns the program of a lane with arrays in place of lists of operands, and its parameters.

    Args:
      closed: the program, without calls of others that are merely concatenated.
      num_shared: arguments before the operands.
      operands: their types.
    """
    jaxpr = closed.jaxpr
    pieces = _pieces(jaxpr.eqns, jaxpr.invars[num_shared:])
    lists = _lists(jaxpr, pieces, operands)
    if not lists:
        return closed, single_parameters(operands)
    in_list = {j for first, length in lists for j in range(first, first + length)}
    begins = dict(lists)
    parameters = tuple(
        Parameter(j, begins.get(j), t)
        for j, t in enumerate(operands)
        if j in begins or j not in in_list
    )

    def run(*args: Array) -> list[Array]:
        env: Bindings = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args[:num_shared], strict=False))
        arrays = {}
        for parameter, x in zip(parameters, args[num_shared:], strict=True):
            if parameter.length is None:
                env[jaxpr.invars[num_shared + parameter.first]] = x
            else:
                arrays[parameter.first] = x
        for eqn in jaxpr.eqns:
            piece = pieces.get(eqn.outvars[0]) if eqn.outvars else None
            if piece is None or piece.first not in in_list:
                values = [value_of(x, env) for x in eqn.invars]
                env.update(zip(eqn.outvars, run_equation(jaxpr, eqn, values), strict=True))
            elif piece.axis is not None and begins.get(piece.first) == piece.length:
                env[eqn.outvars[0]] = _put_together(arrays[piece.first], piece)
        return [value_of(x, env) for x in jaxpr.outvars]

    shared = map(shape_of, jaxpr.invars[:num_shared])
    given = []
    for parameter in parameters:
        aval = shape_of(jaxpr.invars[num_shared + parameter.first])
        length = () if parameter.length is None else (parameter.length,)
        given.append(jax.ShapeDtypeStruct((*length, *aval.shape), aval.dtype))
    return jax.make_jaxpr(run)(*shared, *given), parameters


def _pieces(equations: Sequence[Equation], operand_vars: Sequence[Var]) -> dict[Any, Piece]:
    """Returns the variables that are operands put together, or one of them in another shape."""
    pieces: dict[Any, Piece] = {
        v: Piece(j, 1, None, shape_of(v).shape) for j, v in enumerate(operand_vars)
    }
    for eqn in equations:
        parts = [None if isinstance(v, Literal) else pieces.get(v) for v in eqn.invars]
        piece = _joined(eqn, parts)
        if piece is not None:
            pieces[eqn.outvars[0]] = piece
    return pieces


def _joined(eqn: Equation, parts: Sequence[Piece | None]) -> Piece | None:
    """Returns what an equation makes of operands; None if it is nothing of the kind."""
    first = parts[0] if parts else None
    if first is None:
        return None
    if is_reshape(eqn):
        shape = eqn.outvars[0].aval.shape
        return first._replace(shape=shape) if first.axis is None and len(parts) == 1 else None
    if eqn.primitive.name == "concatenate":
        axis, shape = eqn.params["dimension"], first.shape
    elif eqn.primitive.name == "stack" and first.axis is None:
        axis = eqn.params["axis"]
        shape = (*first.shape[:axis], 1, *first.shape[axis:])
    else:
        return None
    end = first.first
    for part in parts:
        if part is None or (part.first, part.shape) != (end, first.shape):
            return None
        if part.axis is not None and (part.axis, eqn.primitive.name) != (axis, "concatenate"):
            return None
        end += part.length
    return Piece(first.first, end - first.first, axis, shape)


def _lists(
    jaxpr: Any, pieces: Mapping[Any, Piece], operands: Sequence[ValueType]
) -> list[tuple[int, int]]:
    """Returns (first, length) of the lists of operands that are read as a whole, and only so."""
    read: set[Any] = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in jaxpr.eqns:
        if not pieces.keys() & eqn.outvars:
            read.update(reads(eqn))
    whole = {(p.first, p.length) for v, p in pieces.items() if v in read}
    candidates = [(first, length) for first, length in sorted(whole) if length >= MIN_LIST]
    return [
        (first, length)
        for first, length in candidates
        if len(set(operands[first : first + length])) == 1
        and sum(a < first + length and first < a + n for a, n in whole) == 1
    ]


def _put_together(x: Array, piece: Piece) -> Array:
    """Returns what a program makes of a list that is given as an array."""
    assert piece.axis is not None
    shape, axis = list(piece.shape), piece.axis
    if axis:
        x = jnp.moveaxis(x.reshape(piece.length, *shape), 0, axis)
    shape[axis] *= piece.length
    return x.reshape(shape)
