"""Programs of a list of values as programs of lists of any length.

Python unrolls what a function does with a list: of three elements `sum(xs)` is two additions, and
`jnp.stack(xs)` an array of three rows. *Rolled*, a program says what is done with each element,
once, and how the results are reduced over all of them. Then programs of lists of different lengths
are equal, and one that is compiled for some capacity serves all lists up to that length: elements
that do not exist take no part in reductions.

What can be rolled:

- functions of one element and of values that are no elements;
- sums, products, maxima, minima and logical reductions of elements in order;
- arrays that stack elements or put them together along an axis of theirs, and all operations on
  such arrays that have a rule for padding (see `list_arrays`);
- lists of results, of one for each element;
- as many rows of a table, or numbers such as those of `np.arange(n)`, as there are elements;
- whatever is done without elements.

Programs of other lengths may differ in numbers that are polynomials of the length. All else, such
as elements that meet each other by themselves, raises `CannotRollError`.

An operation on an array of all elements that treats each row by itself, such as a matrix product
with weights, is one on each element: then the node that makes the element can compute it (see
`_record.types.element_functions`). A sum over all rows is a reduction, which may be read as a sum.

A program of one element has no reductions to be seen; whether it is what a rolled one does with one
element is found out by comparing the two (`list_expressions.Expressions.are_of_one`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jedbatch._jaxpr.identity import Same
from jedbatch._jaxpr.interpret import (
    ELEMENTWISE_OPERATIONS,
    inner_programs,
    run_equation,
)
from jedbatch._jaxpr.known_functions import known_function
from jedbatch._jaxpr.list_arrays import ArrayOperation, Numbers, split
from jedbatch._jaxpr.list_expressions import Expression, Expressions
from jedbatch._jaxpr.list_values import (
    CannotRollError,
    Chain,
    Element,
    JoinedValues,
    Single,
    StackedElements,
)
from jedbatch._jaxpr.monoids import JOINED_BY
from jedbatch._jaxpr.padding.axis_rules import SCATTERS
from jedbatch._jaxpr.padding.flat_programs import INSIDE
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.versions import ClosedProgram, Equation
from jedbatch._support.types import Array

REPEATED = "iota", "broadcast_in_dim"  # what makes rows of nothing, or of one
TAKEN = "slice", "dynamic_slice"  # and of those of a table
MOST_COUNTED = 1 << 24  # which all types of numbers hold
CHAINS = {x: x for x in JOINED_BY} | {"add_any": "add"}  # by operation


class Roller:
    """Rolls one program of a list.

    Args:
      expressions: where expressions are kept.
      program: the program, without calls (see `interpret.inlined`).
      roles: what its arguments are: ("input", k); or ("element", leaf, position), and the number of
        the list if it is not the first.
      lengths: of the lists.

    Attributes:
      numbers: that programs may differ in, by expressions.
      varying: expressions whose numbers or shapes may depend on the length: literals, and arrays
        that are made of all elements.
    """

    def __init__(
        self,
        expressions: Expressions,
        program: ClosedProgram,
        roles: Sequence[tuple],
        lengths: Sequence[int],
    ):
        self.expressions = expressions
        self.lengths = tuple(lengths)
        self.numbers: dict[int, Numbers] = {}
        self._extents = {*lengths, sum(lengths), math.prod(lengths)}
        self.varying: set[int] = set()
        self._met: dict[Hashable, dict[Hashable, int]] = {}  # numbers, by what has them
        self.jaxpr = program.jaxpr
        self.env: dict[Any, Any] = {}
        for v, (kind, which, *position) in zip(self.jaxpr.invars, roles, strict=True):
            other = [k for k in position[1:] if k]
            index = expressions.given(v.aval.shape, v.aval.dtype, kind, which, *other)
            self.env[v] = Element(index, position[0]) if position else Single(index)
        self._picked = _picked_rows(self.jaxpr.eqns)
        for v, const in zip(self.jaxpr.constvars, program.consts, strict=True):
            self.env[v] = self._progression(const, v.aval) or self._constant(Same(const), const)

    def results(self, listed: int = 0) -> tuple[int, ...]:
        """The ids of the results, which are of the element if the list has one only.

        The results begin with so many lists that have one for each element; the id of such a list
        is that of an element's result.
        """
        for eqn in self.jaxpr.eqns:
            self.env.update(zip(eqn.outvars, self._equation(eqn), strict=True))
        values, made = map(self._array, self.jaxpr.outvars), []
        for first in itertools.islice(values, listed):
            if not isinstance(first, Element):
                raise CannotRollError("a list of results has others than one for each element")
            others = itertools.islice(values, self._length(first.id) - 1)
            made.append(self._each([first, *others]))
        made += map(self._single, values)
        read = set(self.expressions.read_by(made))
        self.numbers = {index: own for index, own in self.numbers.items() if index in read}
        return tuple(made)

    def _constant(self, key: Hashable, value: Any) -> Single:
        shape, dtype = np.shape(value), jnp.result_type(value)
        run = lambda: value  # noqa: E731
        return Single(
            self.expressions.add(("constant", key), Expression(None, (), shape, dtype, run))
        )

    def _progression(self, const: Any, aval: Any) -> Single | None:
        """Numbers as many as elements, each so much more than the last, such as `np.arange(n)`."""
        is_range = aval.ndim == 1 and aval.shape[0] > 1 and aval.shape[0] in self.lengths
        if not is_range or is_key(aval.dtype) or aval.dtype.kind not in "biuf":
            return None
        first, second, *_ = values = np.asarray(const).tolist()
        step, most = second - first, max(map(abs, values))
        if values != [first + k * step for k in range(len(values))] or not most < MOST_COUNTED:
            return None
        if first % 1 or step % 1:
            return None

        def run(params: Mapping[str, Any]) -> list[Array]:
            places = lax.iota(jnp.int32, params["count"])
            return [(params["first"] + params["step"] * places).astype(aval.dtype)]

        params = {"first": int(first), "step": int(step), "count": len(values)}
        return self._array_operation(("progression", aval.dtype), run, params, [], [aval])[0]

    def _read(self, atom: Any) -> Any:
        """The value that a variable or literal stands for."""
        if isinstance(atom, Literal):
            number = np.asarray(atom.val, atom.aval.dtype)  # type: ignore[attr-defined]
            return self._constant((str(number.dtype), number.tobytes()), number)
        value = self.env[atom]
        if isinstance(value, Chain) and value.num_elements == self._length(value.id):
            return self._reduction(value.op, value.id, value.base)
        return value

    def _array(self, atom: Any) -> Any:
        """The same, as an array if it is put together of several."""
        value = self._read(atom)
        if isinstance(value, JoinedValues):
            value = self.env[atom] = self._put_together(value, atom.aval)
        return value

    def _single(self, value: Any) -> int:
        is_only = isinstance(value, Element) and self._length(value.id) == 1
        if not isinstance(value, Single) and not is_only:
            raise CannotRollError("a result is of one element, or of a row for each")
        return value.id

    def _each(self, values: Sequence[Any]) -> int:
        index: int = values[0].id
        if values != [Element(index, k) for k in range(self._length(index))]:
            raise CannotRollError("a list of results has others than one for each element")
        return index

    def _reduction(self, op: str, index: int, base: int | None = None) -> Single:
        """A reduction over all elements."""
        x = self.expressions.all[index]
        if op in ("and", "or") and x.dtype != bool:
            raise CannotRollError(f"`{op}` of integers")
        if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise CannotRollError(f"`{op}` of complex numbers")
        args = (index,) if base is None else (index, base)
        expression = Expression(None, args, x.shape, x.dtype, reduction=op)
        return Single(self.expressions.add(("reduction", op), expression))

    # --- equations ---

    def _equation(self, eqn: Equation) -> list[Any]:
        name = eqn.primitive.name
        if name in ("stack", "concatenate"):
            parts = list(map(self._read, eqn.invars))
            if any(isinstance(x, Element | JoinedValues) for x in parts):
                return [self._together(eqn, parts)]
        values = list(map(self._array, eqn.invars))
        chain = self._chain(CHAINS.get(name), values)
        if chain is not None:
            return [chain]
        positions = {x.position for x in values if isinstance(x, Element)}
        is_stacked = any(isinstance(x, StackedElements) for x in values)
        if not positions:
            rows = self._on_rows(eqn, values) if is_stacked else None
            return self._on_arrays(eqn, values) if rows is None else rows
        if is_stacked:
            raise CannotRollError(f"`{name}` of one element and all")
        if len(positions) > 1:
            raise CannotRollError(f"`{name}` of several elements")
        if inner_programs(eqn) and known_function(eqn) is None:
            raise CannotRollError(f"`{name}` of an element, which runs a program")
        pairs = zip(eqn.invars, values, strict=True)
        if any(v.aval.shape != self._expression(x).shape for v, x in pairs):
            raise CannotRollError(f"`{name}` of an element and an array of all")
        return [Element(i, *positions) for i in self._on_element(eqn, values)]

    def _on_element(self, eqn: Equation, values: Sequence[Any]) -> list[int]:
        """The ids of the results of an operation on one element."""
        ids = [x.id for x in self._with_numbers(eqn, values)]
        facts: dict[str, Any] = {}
        name = eqn.primitive.name
        if name in CHAINS and len(values) == 2:
            facts["joins"] = CHAINS[name]
            if sum(isinstance(x, Single) for x in values) == 1:
                element = isinstance(values[1], Element)
                facts["chained"] = CHAINS[name], ids[not element], ids[element]
        if (function := known_function(eqn)) is not None:
            return self.expressions.operation(function, lambda value: [function(value)], ids)
        skeleton, numbers = split(eqn.params, self.expressions.key_of)
        key = eqn.primitive, skeleton, (None,) * len(ids)
        run = functools.partial(_run, eqn, eqn.params)
        return self.expressions.operation(key, run, ids, numbers, **facts)

    def _chain(self, op: str | None, values: Sequence[Any]) -> Chain | None:
        """The chain that an equation begins or goes on with; None if it does neither."""
        chains = [x for x in values if isinstance(x, Chain)]
        elements = sorted(x for x in values if isinstance(x, Element))
        if chains:
            if op is None or len(chains) != 1 or len(elements) != 1 or len(values) != 2:
                raise CannotRollError("a part of the elements is read")
            (chain,), (element,) = chains, elements
            if (element.id, element.position, op) != (chain.id, chain.num_elements, chain.op):
                raise CannotRollError("elements are not treated alike")
            return chain._replace(num_elements=chain.num_elements + 1)
        if op is None or len(elements) != 2 or len(values) != 2:
            return None
        first, second = sorted(elements, key=lambda x: x.position)
        if (first.position, second.position) != (0, 1):
            return None
        if first.id == second.id:
            return Chain(second.id, op, None, 2)
        chained = self.expressions.all[first.id].chained
        if chained is not None and chained[0] == op and chained[2] == second.id:
            return Chain(second.id, op, chained[1], 2)
        return None

    # --- arrays of elements ---

    def _together(self, eqn: Equation, values: Sequence[Any]) -> JoinedValues:
        """Values put together; `jnp.array` does so with some at a time."""
        is_stack = eqn.primitive.name == "stack"
        axis = eqn.params["axis" if is_stack else "dimension"]
        parts: list[Any] = []
        for atom, x in zip(eqn.invars, values, strict=True):
            goes_on = (
                isinstance(x, JoinedValues) and not (x.is_stack or is_stack) and x.axis == axis
            )
            parts += x.values if goes_on else [self._array(atom)]
        return JoinedValues(tuple(parts), axis, is_stack)

    def _put_together(self, x: JoinedValues, aval: Any) -> Any:
        """An array of elements in a row, and of other things."""
        parts, is_one = [], []
        for of, same in itertools.groupby(x.values, lambda x: isinstance(x, Element) and (x.id,)):
            several = list(same)
            parts += [self._part(several, x.is_stack, x.axis)] if of else several
            is_one += [False] if of else [x.is_stack] * len(several)
        if len(parts) == 1:
            return parts[0]
        axis = x.axis

        def run(_: Any, *xs: Array) -> list[Array]:
            pairs = zip(xs, is_one, strict=True)
            rows = [lax.expand_dims(x, (axis,)) if one else x for x, one in pairs]
            return [lax.concatenate(rows, axis)]

        key = "concatenate", axis, *is_one
        return self._array_operation(key, run, {}, parts, [aval])[0]

    def _part(self, elements: Sequence[Element], is_stack: bool, axis: int) -> Any:
        """An array of elements that follow one another, forwards or backwards."""
        index, places = elements[0].id, [x.position for x in elements]
        x = self.expressions.all[index]
        shape = list(x.shape)
        if is_stack:
            shape.insert(axis, 1)
        elif shape[axis] == 1:
            index = self._without_axis(index, axis)
        is_joined = shape[axis] != 1  # elements have several rows
        rows = StackedElements(index, axis)
        if places == list(range(self._length(index))) and not is_joined:
            return rows
        first, last = min(places), max(places)
        ascending = list(range(first, last + 1))
        if places not in (ascending, ascending[::-1]):
            raise CannotRollError("an array of elements in some order")
        is_reversed = places != ascending
        shape[axis] *= len(places)

        def run(params: Any, x: Array) -> list[Array]:
            x = lax.slice_in_dim(x, params["first"], params["end"], axis=axis)
            x = lax.rev(x, (axis,)) if is_reversed else x
            return [lax.reshape(x, params["shape"]) if is_joined else x]

        params = {"first": first, "end": last + 1, "shape": tuple(shape)}
        types = [jax.ShapeDtypeStruct(tuple(shape), x.dtype)]
        key = "part", axis, is_reversed, is_joined
        return self._array_operation(key, run, params, [rows], types)[0]

    def _without_axis(self, index: int, axis: int) -> int:
        """An expression without an axis along which it has one entry."""
        shape = self.expressions.all[index].shape
        if shape[axis : axis + 1] != (1,):  # as of rows of a table, of which there is one by chance
            raise CannotRollError("an array has other rows than one for each element")
        shape = (*shape[:axis], *shape[axis + 1 :])
        run = lambda value: [value.reshape(shape)]  # noqa: E731
        return self.expressions.operation(("reshape", shape), run, [index])[0]

    def _on_rows(self, eqn: Equation, values: Sequence[Any]) -> list[Any] | None:
        """The results of an operation that treats rows of elements by themselves, or adds them up.

        None of other operations.
        """
        name, params = eqn.primitive.name, eqn.params
        (index, axis), *others = [x for x in values if isinstance(x, StackedElements)]
        of = self.expressions.all[index].list
        if any(x.axis != axis or self._expression(x).list != of for x in others):
            return None
        if self._axis_of_rows(eqn) == axis:
            return self._rows(eqn, index, axis)
        if name == "reduce_sum" and tuple(params["axes"]) == (axis,):
            return [self._reduction("add", index)]
        if name == "dot_general" and not others:
            return self._product(eqn, values)
        function = known_function(eqn)
        if function is None and name not in ELEMENTWISE_OPERATIONS:
            return None
        ids = []
        for v, x in zip(eqn.invars, self._with_numbers(eqn, values), strict=True):
            if isinstance(x, StackedElements) or not v.aval.shape:
                ids.append(x.id)
            elif v.aval.shape[axis] == 1 and not self._is_of_all(x):
                ids.append(self._without_axis(x.id, axis))
            else:
                return None
        if function is None:
            return [StackedElements(self.expressions.primitive(eqn.primitive, params, ids), axis)]
        run = lambda value: [function(value)]  # noqa: E731
        return [StackedElements(self.expressions.operation(function, run, ids)[0], axis)]

    def _product(self, eqn: Equation, values: Sequence[Any]) -> list[Any] | None:
        """The product of each element and what is none; None if elements meet along their axis."""
        contracted, batch = eqn.params["dimension_numbers"]
        side = int(isinstance(values[1], StackedElements))
        axis, other = values[side].axis, values[1 - side]
        taken = *contracted[side], *batch[side]
        if axis in taken or self._is_of_all(other):
            return None
        numbers: Any = [list(contracted), list(batch)]
        for dims in numbers:
            dims[side] = tuple(a - (a > axis) for a in dims[side])
        params = {**eqn.params, "dimension_numbers": tuple(map(tuple, numbers))}
        made = self.expressions.primitive(eqn.primitive, params, [x.id for x in values])
        before = [a for a in range(axis) if a not in taken]
        free = len(eqn.invars[0].aval.shape) - len(contracted[0]) if side else len(batch[0])
        return [StackedElements(made, free + len(before))]

    def _on_arrays(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an operation on arrays, which may be made of all elements."""
        name, axis = eqn.primitive.name, self._axis_of_rows(eqn)
        of_all = any(map(self._is_of_all, values))
        if axis is not None and of_all and isinstance(values[0], Single):
            shape = list(eqn.invars[0].aval.shape)
            if (count := shape.pop(axis)) in self.lengths:
                of, x = self.lengths.index(count), self._expression(values[0])
                row = Expression(of, (values[0].id,), tuple(shape), x.dtype, row_of=axis)
                return self._rows(eqn, self.expressions.add(("row of", axis, of), row), axis)
        operands = self._with_numbers(eqn, values)
        types, params = [v.aval for v in eqn.outvars], dict(eqn.params)
        key: Any = known_function(eqn) or eqn.primitive
        run: Callable[..., Sequence[Array]] = functools.partial(_run, eqn)
        if key is not eqn.primitive:
            params, run = {}, lambda _, *xs: [key(*xs)]
        elif inner_programs(eqn) and name not in INSIDE and name not in SCATTERS:
            if of_all:
                raise CannotRollError(f"`{name}` of all elements, which runs a program")
            jaxpr, params = self.jaxpr, {}
            key = key, self.expressions.key_of(eqn.params)
            run = lambda _, *xs: run_equation(jaxpr, eqn, xs)  # noqa: E731
        of_all = of_all or any(_makes_length(eqn, n) for n in self._extents)
        return self._array_operation(key, run, params, operands, types, of_all)

    def _array_operation(
        self,
        key: Hashable,
        run: Callable[..., Sequence[Array]],
        params: dict[str, Any],
        operands: Sequence[Any],
        types: Sequence[Any],
        of_all: bool = True,
    ) -> list[Single]:
        """The results of an operation on arrays, whose numbers may depend on the length.

        Args:
          key: what it does, whatever its parameters are.
          run: of parameters and operands, returns the results.
          params: its parameters.
          operands: what it reads.
          types: of its results, in this program.
          of_all: whether these may be made of all elements.
        """
        if not all(isinstance(x, Single | StackedElements) for x in operands):
            raise CannotRollError("an array of all elements meets a part of them")
        skeleton, numbers = split(params, self.expressions.key_of)
        rows = tuple([x if isinstance(x, StackedElements) else None for x in operands])
        lists = tuple([None if x is None else self._expression(x).list for x in rows])
        key, args = (key, skeleton, rows), tuple([x.id for x in operands])
        operation = ArrayOperation(run, params, rows, lists)
        number = self._number((key, args), numbers)
        made = self.expressions.results_of(key, number, operation, args, types)
        self.numbers.update(dict.fromkeys(made, numbers))
        self.varying.update(made if of_all else ())
        return list(map(Single, made))

    def _number(self, key: Hashable, value: Hashable) -> int:
        """The number of a value among those of operations that are equal but for them."""
        met = self._met.setdefault(key, {})
        return met.setdefault(value, len(met))

    def _with_numbers(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        """Operands, with numbers in which programs of other lengths may differ for literals."""
        operands = []
        for x, value in zip(eqn.invars, values, strict=True):
            if not _is_number(x):
                operands.append(value)
                continue
            number = np.asarray(x.val, x.aval.dtype)[()]
            which = self._number(eqn.primitive, (number.dtype, number.tobytes()))
            made = self.expressions.given((), number.dtype, "number", eqn.primitive, which)
            self.numbers[made] = (number,)
            self.varying.add(made)
            operands.append(Single(made))
        return operands

    def _is_of_all(self, x: Any) -> bool:
        """Returns whether a value is made of all elements, so that its shape may be another."""
        return isinstance(x, StackedElements) or x.id in self.varying

    def _axis_of_rows(self, eqn: Equation) -> int | None:
        """The axis along which an operation takes an array apart; None if it does not."""
        return eqn.params["axis"] if eqn.primitive.name == "unstack" else self._picked.get(id(eqn))

    def _rows(self, eqn: Equation, index: int, axis: int) -> list[Element]:
        """Rows of an array, which are elements: all of them, or one that keeps the axis."""
        if eqn.primitive.name == "unstack":
            return [Element(index, k) for k in range(len(eqn.outvars))]
        run = lambda value: [jnp.expand_dims(value, axis)]  # noqa: E731
        row = self.expressions.operation(("row", axis), run, [index])[0]
        return [Element(row, eqn.params["start_indices"][axis])]

    def _length(self, index: int) -> int:
        """The length of the list of whose elements an expression is."""
        return self.lengths[self.expressions.all[index].list or 0]

    def _expression(self, x: Any) -> Expression:
        return self.expressions.all[x.id]


def _makes_length(eqn: Equation, length: int) -> bool:
    """Returns whether an operation makes so many rows as a list has elements.

    It counts or repeats them, or takes them from a table; a single row says little.
    """
    if eqn.primitive.name not in (REPEATED if length == 1 else (*REPEATED, *TAKEN)):
        return False
    made = sum(v.aval.shape.count(length) for v in eqn.outvars)
    return made > sum(x.aval.shape.count(length) for x in eqn.invars)


def _is_number(atom: Any) -> bool:
    return isinstance(atom, Literal) and not np.shape(atom.val) and atom.aval.dtype.kind in "iuf"  # type: ignore[attr-defined]


def _picked_rows(equations: Sequence[Equation]) -> dict[int, int]:
    """Returns the slices that take single rows, of arrays all rows of which are taken like that.

    They are given by their ids, with the axis along which the rows are.
    """
    axis_of = {
        e.invars[0]: e.params["dimensions"] for e in equations if e.primitive.name == "squeeze"
    }
    found: dict[Any, dict[int, int]] = {}
    for eqn in equations:
        if eqn.primitive.name == "slice" and len(axes := axis_of.get(eqn.outvars[0], ())) == 1:
            before, after = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
            (axis,) = axes
            if (*before[:axis], 1, *before[axis + 1 :]) == after:
                rows = found.setdefault((eqn.invars[0], axis), {})
                rows[id(eqn)] = eqn.params["start_indices"][axis]
    return {
        i: axis
        for (array, axis), rows in found.items()
        if set(rows.values()) == set(range(array.aval.shape[axis]))
        for i in rows
    }


def _run(eqn: Equation, params: Mapping[str, Any], *values: Array) -> Sequence[Array]:
    """The results of an operation of JAX with some parameters, as a list."""
    made = eqn.primitive.bind(*values, **params)
    return made if eqn.primitive.multiple_results else [made]
