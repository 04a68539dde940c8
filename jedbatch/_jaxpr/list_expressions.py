"""Expressions of programs of lists of any length.

An expression is computed once, or once for each element of a list, or reduces the elements that
exist. A program that they make up runs for any lengths up to a capacity (`Expressions.program`).
Lists may have lengths of their own: they are numbered, and so are their lengths.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.list_arrays import (
    NO_NUMBERS,
    ArrayOperation,
    Numbers,
    NumbersOf,
    NumbersOfLength,
    PaddedOperation,
    rows_of,
)
from jedbatch._jaxpr.list_reductions import reduced, without_others
from jedbatch._jaxpr.list_values import CannotRollError
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._support.types import Array, AxisSize, Dtype


@dataclass(frozen=True, eq=False)
class Expression:
    """A value that is computed once, or once for each element of the list.

    Attributes:
      list: the number of the list of which each element has one; None if it is computed once.
      args: ids of the expressions it reads.
      shape, dtype: of the value, or of one element's.
      run: maps the values of `args` to the value; None of what is below. Of an operation with many
        results, to all of them.
      result: which of the results of `run`, or of `array`, it is; None if `run` returns it alone.
      given: what it is if it is not computed: ("input", k), ("element", leaf) or, of another list
        than the first, ("element", leaf, list); or ("number", ...), one of those that programs may
        differ in.
      reduction: the operation if it reduces elements.
      array: the operation whose result it is, on arrays. Its shape is that in some program.
      numbers: of an operation of JAX on an element, those of its parameters.
      row_of: of a row of such an array for each element, the axis along which they are.
      joins: the operation of a chain whose result it is; None if it is of no such operation.
      chained: (operation, base, element) if it is an element's part in a chain.
    """

    list: int | None
    args: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Dtype
    run: Callable[..., Any] | None = None
    result: int | None = None
    given: tuple[Any, ...] | None = None
    reduction: str | None = None
    array: ArrayOperation | None = None
    numbers: Numbers = ()
    row_of: int | None = None
    joins: str | None = None
    chained: tuple[str, int, int] | None = None

    def value_of(self, made: Any) -> Any:
        """The value, from what `run` returns."""
        return made if self.result is None else made[self.result]


class Expressions:
    """The expressions of programs of lists of any length, equal ones once.

    Args:
      key_of: gives what parameters of operations are told apart by.
    """

    def __init__(self, key_of: Callable[[Any], Hashable]):
        self.key_of = key_of
        self.all: list[Expression] = []
        self._keys: list[Hashable] = []
        self._ids: dict[Hashable, int] = {}
        self._made: dict[Hashable, list[int]] = {}

    def add(self, key: Hashable, expression: Expression) -> int:
        """The id of an expression; `key` says what it does with its arguments."""
        full = key, expression.numbers, expression.args, expression.shape, expression.dtype
        if full not in self._ids:
            self.all.append(expression)
            self._keys.append(key)
            self._ids[full] = len(self.all) - 1
        return self._ids[full]

    def given(self, shape: tuple[int, ...], dtype: Dtype, *what: Hashable) -> int:
        """The id of a value that is not computed."""
        of: Any = (what[2] if len(what) > 2 else 0) if what[0] == "element" else None
        return self.add(what, Expression(of, (), shape, dtype, given=what))

    def results_of(
        self,
        key: Hashable,
        number: int,
        operation: ArrayOperation,
        args: Sequence[int],
        types: Sequence[Any],
    ) -> list[int]:
        """The ids of the results of an operation on arrays, which may be made of all elements.

        Args:
          key: what it does, whatever its numbers are.
          number: of the operation among those of a program that are equal but for their numbers.
          operation: the operation.
          args: ids of what it reads.
          types: shapes, which do not tell operations apart, and dtypes of its results.
        """
        ids = []
        for k, x in enumerate(types):
            full = key, number, k, tuple(args), len(x.shape), x.dtype
            if full not in self._ids:
                expression = Expression(
                    None, tuple(args), x.shape, x.dtype, result=k, array=operation
                )
                self.all.append(expression)
                self._keys.append((key, k))
                self._ids[full] = len(self.all) - 1
            ids.append(self._ids[full])
        return ids

    def operation(
        self,
        key: Hashable,
        run: Callable[..., Any],
        args: Sequence[int],
        numbers: Numbers = (),
        **facts: Any,
    ) -> list[int]:
        """The ids of what a function makes of expressions, a list of arrays.

        Raises:
          CannotRollError: they are of elements of several lists.
        """
        known = self._made.get((key, numbers, *args))
        if known is not None:
            return known
        read = [self.all[a] for a in args]
        lists = {x.list for x in read} - {None}
        if len(lists) > 1:
            raise CannotRollError("elements of several lists meet")
        made = jax.eval_shape(run, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in read))
        of = next(iter(lists), None)
        ids = []
        for k, x in enumerate(made):
            facts["numbers"] = numbers
            expression = Expression(of, tuple(args), x.shape, x.dtype, run, k, **facts)
            ids.append(self.add((key, k), expression))
        self._made[key, numbers, *args] = ids
        return ids

    def primitive(self, primitive: Any, params: dict[str, Any], args: Sequence[int]) -> int:
        """The id of the result of an operation of JAX."""
        run = lambda *values: [primitive.bind(*values, **params)]  # noqa: E731
        return self.operation((primitive, self.key_of(params)), run, args)[0]

    def are_of_one(
        self,
        singles: Sequence[int],
        own: NumbersOf,
        rolled: Sequence[int],
        numbers: NumbersOfLength,
    ) -> bool:
        """Returns whether expressions are what others say of lists of one element.

        Args:
          singles: the ids of expressions of the first element, without reductions.
          own: their numbers.
          rolled: the ids of expressions of lists of any length.
          numbers: of the latter, those that depend on lengths.
        """
        known: dict[tuple[int, int], bool] = {}

        def is_of_one(single: int, rolled: int) -> bool:
            pair = single, rolled
            if pair not in known:
                x, y = self.all[single], self.all[rolled]
                if y.reduction is not None and x.reduction is None:
                    known[pair] = self._is_reduced(single, y, is_of_one)
                else:
                    given = own.get(single, x.numbers)
                    same = (
                        numbers.are_of_one(rolled, given)
                        if rolled in numbers.of
                        else given == y.numbers
                    )
                    known[pair] = same and self._are_alike(single, rolled, is_of_one)
            return known[pair]

        return all(map(is_of_one, singles, rolled))

    def _is_reduced(
        self, single: int, reduced: Expression, is_of_one: Callable[[int, int], bool]
    ) -> bool:
        """Returns whether an expression is a reduction of one element."""
        element, *base = reduced.args
        if not base:
            return is_of_one(single, element)
        x = self.all[single]
        return x.joins == reduced.reduction and any(
            is_of_one(first, *base) and is_of_one(second, element)
            for first, second in (x.args, x.args[::-1])
        )

    def _are_alike(self, single: int, rolled: int, is_of_one: Callable[[int, int], bool]) -> bool:
        """Returns whether expressions are the same, apart from numbers and from what they read."""
        x, y = self.all[single], self.all[rolled]
        if x.given is not None and y.given is not None and "number" == x.given[0] == y.given[0]:
            return x.dtype == y.dtype
        same = self._keys[single] == self._keys[rolled] and len(x.shape) == len(y.shape)
        if not same or x.dtype != y.dtype or (y.array is None and x.shape != y.shape):
            return False
        return all(is_of_one(*both) for both in zip(x.args, y.args, strict=True))

    def parts(self, results: Sequence[int], known: Sequence[int] = ()) -> list[int]:
        """The ids of the values of elements that results read, if some expressions are known.

        Args:
          results: ids of expressions.
          known: ids of expressions of an element whose values are given.

        Returns:
          Those of the leaves of elements, in their order, and then those of `known`.
        """
        read = map(self.all.__getitem__, read_ids := self.read_by(results, known))
        pairs = zip(read_ids, read, strict=True)
        leaves = [i for i, x in pairs if x.given is not None and x.given[0] == "element"]
        return [*sorted(leaves, key=lambda i: self.all[i].given or ()), *known]

    def of_one_element(
        self, results: Sequence[int], fixed: int, numbers: NumbersOfLength
    ) -> list[tuple[int, int]]:
        """Expressions that depend on one leaf of an element, and on what all lists share.

        Args:
          results: ids of expressions.
          fixed: the number of the first input that all lists share.
          numbers: those that depend on lengths.

        Returns:
          (id, leaf) of the largest such expressions, which other expressions or results read.
        """
        read_by = self.read_by(results)
        leaves: dict[int, frozenset[int]] = {}  # of the elements, by expressions of nothing else
        for index in read_by:
            x = self.all[index]
            if x.given is not None:
                kind, *where = x.given
                if kind == "element":
                    leaves[index] = frozenset(where[:1])
                elif numbers.are_fixed(index) if kind == "number" else where[0] >= fixed:
                    leaves[index] = frozenset()
            elif self._is_fixed(index, numbers) and all(a in leaves for a in x.args):
                leaves[index] = frozenset().union(*(leaves[a] for a in x.args))
        alone = {i for i, found in leaves.items() if len(found) == 1}
        read = {a for i in read_by if i not in alone for a in self.all[i].args} | {*results}
        found = sorted(i for i in alone & read if self.all[i].given is None)
        return [(i, min(leaves[i])) for i in found]

    def function(
        self, index: int, inputs: Sequence[int], numbers: NumbersOfLength
    ) -> Callable[..., Array]:
        """Returns an expression of one element as a function of inputs and a leaf.

        Args:
          index: its id, one of `of_one_element`.
          inputs: the numbers of the inputs.
          numbers: those that depend on lengths, of which it reads none.
        """

        def run(*given: Array) -> Array:
            *others, leaf = given
            by_number = dict(zip(inputs, others, strict=True))
            values: dict[int, Array] = {}
            for i in self.read_by([index]):
                x = self.all[i]
                if x.given is not None:
                    is_leaf = x.given[0] == "element"
                    values[i] = leaf if is_leaf else _given(i, x, by_number, (), numbers)
                else:
                    run_one = x.run or x.array
                    assert run_one is not None
                    values[i] = x.value_of(run_one(*(values[a] for a in x.args)))
            return values[index]

        return run

    def _is_fixed(self, index: int, numbers: NumbersOfLength) -> bool:
        """Returns whether an operation is the same for all lengths, apart from what it reads."""
        x = self.all[index]
        if x.array is None:
            return x.run is not None
        return not any(x.array.rows) and numbers.are_fixed(index)

    def inputs_of(self, index: int) -> list[int]:
        """The numbers of the inputs that an expression depends on."""
        given = [self.all[i].given for i in self.read_by([index])]
        return sorted(x[1] for x in given if x is not None and x[0] == "input")

    def is_only_summed(self, results: Sequence[int], part: int, known: Sequence[int] = ()) -> bool:
        """Returns whether results read nothing of a value of the elements but its sum.

        Args:
          results: ids of expressions.
          part: the id of the value, one of `parts`.
          known: ids of expressions of an element whose values are given.
        """
        if part in results:
            return False
        for index in self.read_by(results, known):
            x = self.all[index]
            if index not in known and part in (x.args[1:] if x.reduction == "add" else x.args):
                return False
        return True

    def program(
        self,
        results: Sequence[int],
        inputs: Sequence[int],
        summed: Sequence[bool],
        capacity: int,
        parts: Sequence[int],
        numbers: NumbersOfLength = NO_NUMBERS,
    ) -> Callable[..., list[Array]]:
        """Returns the program of lists of at most so many elements.

        Args:
          results: ids of what it returns.
          inputs: the numbers of the inputs, in the order in which they are given.
          summed: for each of the values that an element consists of, whether their sum is given in
            place of them.
          capacity: elements of each list that there is room for.
          parts: ids of the values that elements consist of.
          numbers: those that depend on lengths.

        Returns:
          A function of the inputs in a list, of the elements' values in a list, one part after the
          other, of whose elements some may be anything, and of how many of each list exist.

        Raises:
          CannotMergeError: an operation on arrays of all elements has no rule for room for more.
        """
        arrays = self._padded(results, parts, numbers)
        guarded = any(x.makes_more for x in arrays.values())
        positioned = None if any(x.makes_others for x in arrays.values()) else frozenset[int]()
        sums = {part for part, is_sum in zip(parts, summed, strict=True) if is_sum}

        def run(
            given: Sequence[Array], elements: Sequence[Array], lengths: Sequence[Array]
        ) -> list[Array]:
            exists = [jnp.arange(capacity) < length for length in lengths]
            rest = list(elements)
            values: dict[int, Array] = {}
            for part, is_sum in zip(parts, summed, strict=True):
                own, rest = rest[: 1 if is_sum else capacity], rest[1 if is_sum else capacity :]
                if is_sum:
                    values[part] = own[0]
                else:
                    values[part] = without_others(jnp.stack(own), exists[self._list_of(part)])
            by_number = dict(zip(inputs, given, strict=True))
            made: dict[Any, Any] = {}  # by operations, all results
            for index in self.read_by(results, parts):
                x = self.all[index]
                if index in values:
                    continue
                if x.given is not None:
                    values[index] = _given(index, x, by_number, lengths, numbers)
                elif x.args and x.args[0] in sums:
                    base = [values[a] for a in x.args[1:]]
                    values[index] = functools.reduce(lax.add, [*base, values[x.args[0]]])
                elif x.array is not None:
                    if x.array not in made:
                        read, padded = [values[a] for a in x.args], arrays.get(x.array)
                        made[x.array] = (
                            x.array(*read)
                            if padded is None
                            else padded.run(read, lengths, capacity, guarded, positioned)
                        )
                    values[index] = x.value_of(made[x.array])
                elif x.row_of is not None:
                    values[index] = jnp.moveaxis(values[x.args[0]], x.row_of, 0)
                elif x.reduction is not None:
                    there = exists[self._list_of(x.args[0])]
                    values[index] = reduced(x.reduction, [values[a] for a in x.args], there)
                else:
                    assert x.run is not None
                    operation = x.run, x.args
                    if operation not in made:
                        axes = [None if self.all[a].list is None else 0 for a in x.args]
                        call = x.run
                        if x.list is not None:
                            call = jax.vmap(x.run, axes, axis_size=capacity)
                        made[operation] = call(*(values[a] for a in x.args))
                    values[index] = x.value_of(made[operation])
            return [values[index] for index in results]

        return run

    def _list_of(self, index: int) -> int:
        """The list of whose elements an expression is."""
        of = self.all[index].list
        assert of is not None
        return of

    def _padded(
        self,
        results: Sequence[int],
        parts: Sequence[int],
        numbers: NumbersOfLength,
    ) -> dict[ArrayOperation, PaddedOperation]:
        """Returns the operations on arrays of all elements with room for more of them.

        JAX may have to know that a table has rows for all. Those for longer lists have the same
        operations only if it has.
        """
        try:
            return self._padded_for(results, parts, numbers, numbers.symbols())
        except CannotMergeError:
            return self._padded_for(results, parts, numbers, numbers.symbols(bounded=True))

    def _padded_for(
        self,
        results: Sequence[int],
        parts: Sequence[int],
        numbers: NumbersOfLength,
        lengths: Sequence[AxisSize],
    ) -> dict[ArrayOperation, PaddedOperation]:
        """Does so for symbols of the lengths."""
        padded: dict[ArrayOperation, PaddedOperation] = {}
        types: dict[int, Any] = {}
        for index in self.read_by(results, parts):
            x = self.all[index]
            operands = [] if index in parts else [types[a] for a in x.args]
            types[index] = jax.ShapeDtypeStruct(x.shape, x.dtype)
            reads_ragged = any(is_ragged(t.shape) for t in operands)
            if x.row_of is not None:
                types[index] = rows_of(operands[0], x.row_of, lengths[self._list_of(index)])
            elif x.array is None and reads_ragged:
                raise CannotMergeError("an element meets an array of all of them")
            elif x.array is not None and (reads_ragged or not self._is_fixed(index, numbers)):
                if x.array not in padded:
                    padded[x.array] = PaddedOperation(x.array, numbers.of[index], operands, lengths)
                types[index] = x.value_of(padded[x.array].results)
        if any(is_ragged(types[index].shape) for index in results):
            raise CannotMergeError("a result is an array of all elements")
        return padded

    def read_by(self, results: Sequence[int], known: Sequence[int] = ()) -> list[int]:
        """Returns the ids that some expressions read, in an order in which they can run.

        Of what is `known` nothing is read.
        """
        needed: set[int] = set()
        waiting = list(results)
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                if index not in known:
                    waiting += self.all[index].args
        return sorted(needed)  # what is read has been made before


def _given(
    index: int,
    x: Expression,
    inputs: Mapping[int, Array],
    lengths: Sequence[Array],
    numbers: NumbersOfLength,
) -> Array:
    """The value of an expression that is neither computed nor of an element."""
    assert x.given is not None
    if x.given[0] == "input":
        return inputs[x.given[1]]
    (number,) = numbers.of[index]
    if number.is_fixed:
        return jnp.asarray(number.of(0), x.dtype)
    return jnp.asarray(number.at([n.astype(x.dtype) for n in lengths]), x.dtype)
