"""Lists of operands, which the program of a lane takes as one array.

A node that stacks 500 others reads 500 operands. As arguments of its program these would be 500
gathers and a concatenation of 500 arrays: XLA:CPU takes 16 ms to compile each of them, and copies
every row twice. If all that a program does with operands that follow one another is to concatenate
them, it is written anew for an array that has a row for each of them, which one gather reads.

Where there is room for more elements than exist, and nothing is read of a list but the sum of those
that do, the program takes this sum, which is made as rows are read. One cotangent comes back then
for all elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jedbatch._graph.operations import ListOperands
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
      is_sum: whether the sum of those that exist is given in place of a list.
    """

    first: int
    length: int | None
    type: ValueType
    is_sum: bool = False

    @property
    def num_operands(self) -> int:
        """Number of operands."""
        return 1 if self.length is None else self.length

    @property
    def num_rows(self) -> int:
        """Number of rows in which it is given, and its cotangent is sent back."""
        return 1 if self.is_sum else self.num_operands

    @property
    def operands(self) -> range:
        """The positions of its operands."""
        return range(self.first, self.first + self.num_operands)

    @property
    def kind(self) -> Kind:
        """(shape, dtype) in which it is given, with an axis for the operands of a list."""
        shape, dtype = stored(self.type)
        return (shape if self.length is None or self.is_sum else (self.length, *shape)), dtype


class ListPlaces(NamedTuple):
    """The operands that are elements of lists, of which some do not exist.

    Attributes:
      first: position of the first; the lists follow one another.
      capacity: elements of each that there is room for.
      length: position of the operand that says how many exist, behind the last of them.
    """

    first: int
    capacity: int
    length: int

    @staticmethod
    def of(lists: ListOperands | None) -> "ListPlaces | None":
        """Returns the places of some lists."""
        return None if lists is None else ListPlaces(lists.first, lists.capacity, lists.length)

    def exist(self, lengths: np.ndarray) -> np.ndarray:
        """bool[operands, nodes]: which operands of nodes exist whose lists have some lengths."""
        position = np.arange(self.length + 1)
        element = (position - self.first) % self.capacity
        element[: self.first] = element[self.length] = -1
        return element[:, None] < lengths


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


def single_parameters(
    operands: Sequence[ValueType], lists: ListOperands | None = None, sums: bool = False
) -> tuple[Parameter, ...]:
    """Returns parameters that are one operand each, or a sum of some where `sums` are taken.

    Args:
      operands: their types.
      lists: those among them that are elements of lists.
      sums: whether the program is `ListOperands.program`.
    """
    if lists is None:
        return tuple(Parameter(j, None, t) for j, t in enumerate(operands))
    parameters = [Parameter(j, None, t) for j, t in enumerate(operands[: lists.first])]
    for leaf, is_sum in enumerate(lists.summed):
        first, n = lists.first + leaf * lists.capacity, lists.capacity
        if is_sum and sums:
            parameters.append(Parameter(first, n, operands[first], is_sum=True))
        else:
            parameters += [Parameter(j, None, operands[j]) for j in range(first, first + n)]
    return *parameters, Parameter(lists.length, None, operands[lists.length])


def with_lists(
    closed: ClosedProgram, num_shared: int, single: Sequence[Parameter]
) -> tuple[Any, tuple[Parameter, ...]]:
    """Returns the program of a lane with arrays in place of lists of operands, and its parameters.

    Args:
      closed: the program, without calls of others that are merely concatenated.
      num_shared: arguments before the operands.
      single: its parameters before.
    """
    jaxpr = closed.jaxpr
    pieces = _pieces(jaxpr.eqns, jaxpr.invars[num_shared:])
    lists = _lists(jaxpr, pieces, single)
    if not lists:
        return closed, tuple(single)
    in_list = {j for first, length in lists for j in range(first, first + length)}
    begins = dict(lists)
    places = [j for j in range(len(single)) if j in begins or j not in in_list]
    parameters = tuple(
        single[j]._replace(length=begins[j]) if j in begins else single[j] for j in places
    )

    def run(*args: Array) -> list[Array]:
        env: Bindings = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args[:num_shared], strict=False))
        arrays = {}
        for j, x in zip(places, args[num_shared:], strict=True):
            if j in begins:
                arrays[j] = x
            else:
                env[jaxpr.invars[num_shared + j]] = x
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
    for j in places:
        aval = shape_of(jaxpr.invars[num_shared + j])
        length = (begins[j],) if j in begins else ()
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
    jaxpr: Any, pieces: Mapping[Any, Piece], single: Sequence[Parameter]
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
        if len({(x.type, x.is_sum) for x in single[first : first + length]}) == 1
        and not single[first].is_sum
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
