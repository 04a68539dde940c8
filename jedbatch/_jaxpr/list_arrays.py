"""Operations on arrays that are made of all elements of a list.

All that is done without single elements is such an operation. If its numbers and the shapes of what
it reads are the same for all lengths, it runs as it is.

Programs of lists of different lengths that do the same have the same operations, whose parameters
differ in numbers at most. What is left of an operation without its numbers is its *skeleton*:

    reshape[new_sizes=(3, 4, 2)], reshape[new_sizes=(5, 4, 2)]  →  reshape[new_sizes=(·, ·, ·)]

A number that is the same polynomial of a length in all programs, such as n, n - 1 or n², stands for
this polynomial; so does one of n // 2, or of the sum or the product of several lengths. Then JAX
says for symbolic lengths what the operation gives, and the rules for padded arrays (see
`padding.padded_rules`) run it where there is room for more elements.
"""

import math
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jedbatch._jaxpr.interpret import interpret
from jedbatch._jaxpr.list_values import StackedElements
from jedbatch._jaxpr.padding.axis_rules import MAKE_MORE, CannotMergeError, mixed_axes
from jedbatch._jaxpr.padding.flat_programs import flattened
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.padding.singular import makes_others
from jedbatch._jaxpr.symbolic_dims import LengthDecisionError, is_ragged, make_symbol
from jedbatch._jaxpr.versions import ClosedProgram
from jedbatch._support.types import Array, AxisSize

MAX_DEGREE = 2  # of polynomials
# What JAX says of operations that it cannot trace for all lengths.
NOT_FOR_ALL_LENGTHS = (
    TypeError,
    ValueError,
    LengthDecisionError,
    jax.errors.InconclusiveDimensionOperation,
)

Numbers = tuple[Any, ...]  # of one operation, in order
NumbersOf = Mapping[int, Numbers]  # by expressions


@dataclass(frozen=True, eq=False)
class ArrayOperation:
    """An operation on arrays whose shapes may depend on the length of a list.

    Attributes:
      run: of the parameters and the operands, returns a list of results.
      params: its parameters in some program.
      rows: for each operand, how elements are stacked in it; None if it is an array.
      lists: for each operand, the list of these elements; None if it is an array.
    """

    run: Callable[..., Sequence[Any]]
    params: Mapping[str, Any]
    rows: tuple[StackedElements | None, ...]
    lists: tuple[int | None, ...]

    def __call__(self, *values: Array) -> Sequence[Any]:
        """Returns the results with the parameters that it has in some program."""
        return self.run(self.params, *values)


def extents_of(lengths: Sequence[Any]) -> tuple[Any, ...]:
    """Returns what numbers may depend on: lengths of lists, their sum and product, their halves."""
    return *lengths, sum(lengths), math.prod(lengths), *(n // 2 for n in lengths)


class NumberOfLength(NamedTuple):
    """A number that depends on the lengths of lists.

    Attributes:
      coefficients: of a polynomial, that of the constant first.
      divides: whether the number is one by the polynomial.
      extent: which of `extents_of` the lengths it is a polynomial of.
    """

    coefficients: tuple[Any, ...]
    divides: bool = False
    extent: int = 0

    @property
    def is_fixed(self) -> bool:
        """Returns whether the number is the same for all lengths."""
        return len(self.coefficients) == 1

    def at(self, lengths: Sequence[Any]) -> Any:
        """The number for some lengths: ints, extents, or arrays."""
        return self.of(extents_of(lengths)[self.extent])

    def of(self, length: Any) -> Any:
        """The number for one of the extents."""
        first, *rest = self.coefficients
        value = first
        for power, c in enumerate(rest, start=1):
            if c:
                value = value + c * length**power
        return 1 / value if self.divides else value

    def is_at(self, numbers: Mapping[int, Any]) -> bool:
        """Returns whether these are the numbers for some lengths, to the last bit."""
        if self.divides and not all(map(self._replace(divides=False).of, numbers)):
            return False
        return all(_bits(x) == _bits(_like(self.of(n), x)) for n, x in numbers.items())


def split(params: Mapping[str, Any], key_of: Callable[[Any], Hashable]) -> tuple[Hashable, Numbers]:
    """(what is left of parameters without their numbers, the numbers)."""
    leaves, structure = jax.tree.flatten(dict(params))
    others = [None if type(x) is int else key_of(x) for x in leaves]
    return (structure, *others), tuple([x for x in leaves if type(x) is int])


def joined(params: Mapping[str, Any], numbers: Iterator[Any]) -> dict[str, Any]:
    """Parameters with other numbers, which are taken in the order of `split`."""
    return jax.tree.map(lambda x: next(numbers) if type(x) is int else x, dict(params))


def number_of_length(numbers: Mapping[int, Any]) -> NumberOfLength | None:
    """Returns what a number is of the length, given by length; None if it is not known to be any.

    Either integers or NumPy's numbers of one dtype. What a number is of one length is a guess.
    """
    values = list(numbers.values())
    if len(values) == 1:
        return _guessed(*numbers, *values)
    if len({_bits(x) for x in values}) == 1:
        return NumberOfLength((values[0],))
    if isinstance(values[0], np.generic) and not np.isfinite(values).all():
        return None
    for divides in (False, True):
        if divides and (type(values[0]) is int or not all(values)):
            continue
        points = {n: 1 / x.item() if divides else float(x) for n, x in numbers.items()}
        degree = min(MAX_DEGREE, len(points) - 1)
        fitted = np.polynomial.polynomial.polyfit(list(points), list(points.values()), degree)
        if isinstance(values[0], np.floating):  # as of n / 2
            found = NumberOfLength(tuple(round(2 * c) / 2 for c in fitted.tolist()), divides)
        else:
            found = NumberOfLength(tuple(map(round, fitted.tolist())), divides)
        if found.is_at(numbers):
            return found
    return None


def _guessed(length: int, number: Any) -> NumberOfLength:
    """The length, one less or more, a multiple, or one by it, if it is equal to one of these."""
    guesses = [NumberOfLength((k, 1)) for k in (0, -1, 1)]
    if type(number) is int and number % length == 0:
        guesses.append(NumberOfLength((0, number // length)))
    if isinstance(number, np.floating):
        guesses.append(NumberOfLength((0, 1), divides=True))
    return next((x for x in guesses if x.is_at({length: number})), NumberOfLength((number,)))


def _bits(x: Any) -> Hashable:
    return x.tobytes() if isinstance(x, np.generic) else x


def _like(value: Any, x: Any) -> Any:
    return x.dtype.type(float(value)) if isinstance(x, np.generic) else value


class NumbersOfLength(NamedTuple):
    """The numbers of programs of lists, as they depend on the lengths.

    Attributes:
      least, longest: of each list the lengths of the programs from which that is known.
      of: the numbers, by operations.
    """

    least: tuple[int, ...] = (1,)
    longest: tuple[int, ...] = (1,)
    of: Mapping[int, Sequence[NumberOfLength]] = MappingProxyType({})

    def agree(self, lengths: Sequence[int], numbers: NumbersOf) -> bool:
        """Returns whether numbers of a program are those that are known of its lengths."""
        extents = extents_of(lengths)
        return self.of.keys() == numbers.keys() and all(
            known.is_at({extents[known.extent]: x})
            for operation, own in self.of.items()
            for known, x in zip(own, numbers[operation], strict=True)
        )

    def are_of_one(self, operation: int, numbers: Numbers) -> bool:
        """Returns whether numbers are those of an operation for lists of one element."""
        known, extents = self.of[operation], extents_of([1] * len(self.least))
        return len(known) == len(numbers) and all(
            one.is_at({extents[one.extent]: x}) for one, x in zip(known, numbers, strict=True)
        )

    def are_fixed(self, operation: int) -> bool:
        """Returns whether the numbers of an operation are the same for all lengths."""
        return all(x.is_fixed for x in self.of.get(operation, ()))

    def symbols(self, bounded: bool = False) -> list[AxisSize]:
        """Returns symbols for the lengths, which may be `bounded` by those that were met."""
        names = list(map(length_symbol, range(len(self.least))))
        known = [f"{s} >= {n}" for s, n in zip(names, self.least, strict=True)]
        if bounded:
            known += [f"{s} <= {n}" for s, n in zip(names, self.longest, strict=True)]
        scope = export.SymbolicScope(known)
        return [make_symbol(name, scope) for name in names]


def length_symbol(list: int) -> str:
    """Returns the symbol of the length of a list."""
    return f"n{list}"


NO_NUMBERS = NumbersOfLength()


def numbers_of_length(
    programs: Mapping[tuple[int, ...], NumbersOf], varying: Container[int] | None = None
) -> NumbersOfLength | None:
    """Returns what the numbers of each operation are of the lengths; None if some are not known.

    Args:
      programs: those of the programs of lists, by the lengths of these.
      varying: operations whose numbers may be guessed from one length; None if all.
    """
    if not programs:
        return None
    found: dict[int, Sequence[NumberOfLength]] = {}
    for operation, first in next(iter(programs.values())).items():
        own = [numbers[operation] for numbers in programs.values()]
        if len(own) == 1 and varying is not None and operation not in varying:
            found[operation] = [NumberOfLength((x,)) for x in first]
            continue
        known = [
            _of_some_length(dict(zip(programs, same, strict=True)))
            for same in zip(*own, strict=True)
        ]
        found[operation] = [x for x in known if x is not None]
        if len(found[operation]) < len(known):
            return None
    of_lists = list(zip(*programs, strict=True))
    return NumbersOfLength(tuple(map(min, of_lists)), tuple(map(max, of_lists)), found)


def _of_some_length(numbers: Mapping[tuple[int, ...], Any]) -> NumberOfLength | None:
    """Returns what a number is of one of the extents: a guess at last, of others the simplest."""
    found: list[tuple[bool, float, NumberOfLength]] = []
    pairs = [(extents_of(lengths), x) for lengths, x in numbers.items()]
    for k in range(len(pairs[0][0])):
        by_extent: dict[int, Any] = {}
        for extents, x in pairs:
            if _bits(by_extent.setdefault(extents[k], x)) != _bits(x):
                break
        else:
            if (number := number_of_length(by_extent)) is not None:
                size = float(sum(map(abs, number.coefficients)))
                found.append((len(by_extent) == 1, size, number._replace(extent=k)))
    return min(found, key=lambda x: x[:2])[-1] if found else None


class PaddedOperation:
    """An operation on arrays that have room for more elements than there are.

    Args:
      operation: the operation.
      numbers: those of its parameters.
      operands: their shapes and dtypes; where elements are stacked, those of one.
      lengths: the symbols of the lengths.

    Attributes:
      results: shapes and dtypes.
      makes_more: whether it computes values in padding that may be too large, or zero.
      makes_others: whether what it has in padding is no copy of a row.

    Raises:
      CannotMergeError: no rule says how it runs where there is room for more.
    """

    def __init__(
        self,
        operation: ArrayOperation,
        numbers: Sequence[NumberOfLength],
        operands: Sequence[jax.ShapeDtypeStruct],
        lengths: Sequence[AxisSize],
    ):
        self._operation = operation
        params = joined(operation.params, iter([x.at(lengths) for x in numbers]))
        avals = [
            x if rows is None or of is None else _of_all(x, rows, lengths[of])
            for x, rows, of in zip(operands, operation.rows, operation.lists, strict=True)
        ]
        try:
            closed = jax.make_jaxpr(lambda *xs: operation.run(params, *xs))(*avals)
        except NOT_FOR_ALL_LENGTHS as error:
            raise CannotMergeError(f"JAX: {error}") from error
        self._closed: ClosedProgram = flattened(closed)
        equations = self._closed.jaxpr.eqns
        for eqn in equations:
            mixed_axes(eqn)  # complains of what is not known
        self.makes_more = any(eqn.primitive.name in MAKE_MORE for eqn in equations)
        self.makes_others = makes_others(equations)
        self.results = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._closed.jaxpr.outvars
        ]

    def run(
        self,
        values: Sequence[Array],
        lengths: Sequence[Array],
        capacity: int,
        guarded: bool,
        positioned: frozenset[int] | None,
    ) -> list[Array]:
        """Returns the results, with room for so many elements.

        Args:
          values: of the operands, those of elements in rows.
          lengths: how many elements of each list exist.
          capacity: how many there is room for.
          guarded: as of `Padded`.
          positioned: the same.
        """
        symbols = list(map(length_symbol, range(len(lengths))))
        sizes, exist = dict.fromkeys(symbols, capacity), dict(zip(symbols, lengths, strict=True))
        padded = Padded(sizes, exist, guarded, positioned=positioned, is_list=True)
        arrays = [
            x if rows is None else jnp.moveaxis(x, 0, rows.axis)
            for x, rows in zip(values, self._operation.rows, strict=True)
        ]
        try:
            return interpret(self._closed.jaxpr, self._closed.consts, arrays, padded.run)
        except NOT_FOR_ALL_LENGTHS as error:
            raise CannotMergeError(f"JAX: {error}") from error


def _of_all(
    x: jax.ShapeDtypeStruct, rows: StackedElements, length: AxisSize
) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the values of all elements as one array."""
    return jax.ShapeDtypeStruct((*x.shape[: rows.axis], length, *x.shape[rows.axis :]), x.dtype)


def rows_of(x: jax.ShapeDtypeStruct, axis: int, length: AxisSize) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of one row of an array that has a row for each element.

    Raises `CannotMergeError` if it has others.
    """
    if str(x.shape[axis]) != str(length) or is_ragged((*x.shape[:axis], *x.shape[axis + 1 :])):
        raise CannotMergeError("an array has other rows than one for each element")
    return jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
