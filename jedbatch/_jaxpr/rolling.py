"""Programs of a list of values as programs of lists of any length.

Python unrolls what a function does with a list: of three elements `sum(xs)` is two additions, and
`jnp.stack(xs)` an array of three rows. *Rolled*, a program says what is done with each element,
once, and how the results are reduced over all of them. Then programs of lists of different lengths
are equal, and one that is compiled for some capacity serves all lists up to that length: elements
that do not exist take no part in reductions.

What can be rolled: functions of one element and of values that are no elements; sums, products,
maxima, minima and logical reductions of elements in order; arrays that stack one row for each
element, or put elements together along an axis of theirs, row-wise operations, reductions and
products over their rows; lists of results, of one for each element; numbers that are the length, or
one divided by it; as many rows of a table, or numbers such as those of `np.arange(n)`, as there are
elements; and any other operation on such arrays, as far as programs of other lengths
differ in numbers that are polynomials of the length (see `list_arrays`). All else, such as elements
that meet each other by themselves, raises `CannotRollError`. A program
of one element has no reductions to be seen; whether it is what a rolled one does with one element
is found out by comparing the two (`list_expressions.Expressions.are_of_one`).
"""

import contextlib
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
from jedbatch._jaxpr.list_expressions import LENGTHS, Expression, Expressions
from jedbatch._jaxpr.list_values import (
    CannotRollError,
    Chain,
    Element,
    Single,
    StackedElements,
    StackedRange,
    Whole,
)
from jedbatch._jaxpr.monoids import JOINED_BY, REDUCTIONS
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
      roles: what its arguments are: ("input", k); ("element", leaf, position), and the number of
        the list if it is not the first; or ("rows", leaf, axis) of an array that has a row for
        each element.
      lengths: of the lists.
      counts: whether numbers that are equal to a length, or to one by it, stand for these.
    """

    def __init__(
        self,
        expressions: Expressions,
        program: ClosedProgram,
        roles: Sequence[tuple],
        lengths: Sequence[int],
        counts: bool,
    ):
        self.expressions = expressions
        self.lengths = tuple(lengths)
        self.counts = counts
        self._extents = {*lengths, sum(lengths), math.prod(lengths)}
        self.each: set[int] = set()  # rows of elements that are put together
        self.numbers: dict[int, Numbers] = {}  # that programs may differ in, by expressions
        self._num_operations = 0  # on arrays of all elements
        self._finds_axes = False
        self.jaxpr = program.jaxpr
        self.env: dict[Any, Any] = {}
        for v, (kind, which, *position) in zip(self.jaxpr.invars, roles, strict=True):
            shape = v.aval.shape
            if kind == "rows":
                (axis,) = position
                shape = (*shape[:axis], *shape[axis + 1 :])
                index = expressions.given(shape, v.aval.dtype, "element", which)
                self.env[v] = StackedElements(index, axis)
                continue
            other = [k for k in position[1:] if k]
            index = expressions.given(shape, v.aval.dtype, kind, which, *other)
            self.env[v] = Element(index, position[0]) if position else Single(index)
        self._picked = _picked_rows(self.jaxpr.eqns)
        for v, const in zip(self.jaxpr.constvars, program.consts, strict=True):
            progression = self._progression(const, v.aval) if counts else None
            self.env[v] = progression or self._constant(Same(const), const)

    def results(self, listed: int = 0) -> tuple[int, ...]:
        """The ids of the results, which are of the element if the list has one only.

        The results begin with so many lists that have one for each element; the id of such a list
        is that of an element's result.
        """
        values, made = iter(self._values()), []
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

    def _progression(self, const: Any, aval: Any) -> Whole | None:
        """Numbers as many as elements, each so much more than the last, such as `np.arange(n)`."""
        if not self._is_extent(*aval.shape) or aval.shape[0] < 2 or is_key(aval.dtype):
            return None
        if aval.dtype.kind not in "biuf":
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
        if not isinstance(atom, Literal):
            value = self.env[atom]
            if isinstance(value, Chain) and value.num_elements == self._length(value.id):
                return self._reduction(value.op, False, value.id, value.base)
            return value
        dtype = atom.aval.dtype  # type: ignore[attr-defined]
        number = np.asarray(atom.val, dtype)
        if self.counts and not number.shape and number.dtype.kind in "if":
            for each, (k, n) in itertools.product((1, *sorted(self.each)), enumerate(self.lengths)):
                likes = [n * each] if dtype.kind == "i" else [n * each, 1 / (n * each)]
                for name, like in zip(LENGTHS, likes, strict=False):
                    if number == np.asarray(like, dtype):
                        return Single(self.expressions.given((), dtype, name, each, k))
        return self._constant((str(dtype), number.tobytes()), number)

    def _single(self, value: Any) -> int:
        is_only = isinstance(value, Element) and self._length(value.id) == 1
        if not isinstance(value, Single | Whole) and not is_only:
            raise CannotRollError("a result is of one element, or of a row for each")
        return value.id

    def axes(self) -> list[int | None]:
        """Along which axis results have a row for each element; None where they have none.

        Inputs that are as long as the list are not taken for something else.
        """
        self._finds_axes = True
        pairs = zip(self.jaxpr.outvars, self._values(), strict=True)
        return [self._axis_of_rows(x, v.aval.shape) for v, x in pairs]

    def _axis_of_rows(self, x: Any, shape: Sequence[int]) -> int | None:
        if isinstance(x, StackedElements):
            return x.axis
        axes = [axis for axis, n in enumerate(shape) if n in self.lengths]
        if not isinstance(x, Whole) or not axes:
            return None
        if len(axes) > 1:
            raise CannotRollError("several axes are as long as a list")
        return axes[0]

    def _values(self) -> list[Any]:
        for eqn in self.jaxpr.eqns:
            self.env.update(zip(eqn.outvars, self._equation(eqn), strict=True))
        return [self._read(v) for v in self.jaxpr.outvars]

    def _each(self, values: Sequence[Any]) -> int:
        index: int = values[0].id
        if values != [Element(index, k) for k in range(self._length(index))]:
            raise CannotRollError("a list of results has others than one for each element")
        return index

    def _reduction(
        self,
        op: str,
        rows: bool,
        index: int,
        base: int | None = None,
        axes: tuple[int, ...] = (),
        alone: int | None = None,
    ) -> Single:
        """A reduction over all elements, and over axes of each at the same time.

        `alone` is what it is for a list of one element, if that is not the element itself.
        """
        x = self.expressions.all[index]
        if op in ("and", "or") and x.dtype != bool:
            raise CannotRollError(f"`{op}` of integers")
        if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise CannotRollError(f"`{op}` of complex numbers")
        args = (index,) if base is None else (index, base)
        shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
        reduction = op, rows, axes
        expression = Expression(None, args, shape, x.dtype, reduction=reduction, alone=alone)
        return Single(self.expressions.add(("reduction", *reduction), expression))

    # --- equations ---

    def _equation(self, eqn: Equation) -> list[Any]:
        values = [self._read(x) for x in eqn.invars]
        if (joined := self._joined(eqn, values)) is not None:
            return [joined]
        values = list(map(self._array_of, values))
        name = eqn.primitive.name
        chain = self._chain(CHAINS.get(name), values)
        if chain is not None:
            return [chain]
        positions = {x.position for x in values if isinstance(x, Element)}
        if positions and name in ("stack", "concatenate"):
            return [self._put_together(eqn, values)]
        kinds = set(map(type, values))
        if name == "unstack" and kinds & {StackedElements, Whole}:
            return self._unstacked(eqn, *values)
        if StackedElements in kinds and Whole not in kinds:
            with contextlib.suppress(CannotRollError):
                return self._stacked(eqn, values)
        if kinds & {StackedElements, Whole} and not positions:
            return self._on_arrays(eqn, values)
        if self.counts and not positions and any(_makes_length(eqn, n) for n in self._extents):
            return self._on_arrays(eqn, values)
        if StackedElements in kinds:
            raise CannotRollError(f"`{name}` of one element and all")
        if len(positions) > 1:
            raise CannotRollError(f"`{name}` of several elements")
        if positions and inner_programs(eqn) and known_function(eqn) is None:
            raise CannotRollError(f"`{name}` of an element, which runs a program")
        pairs = list(zip(eqn.invars, values, strict=True))
        if any(
            isinstance(x, Whole) and v.aval.shape != self._expression(x).shape for v, x in pairs
        ):
            raise CannotRollError(f"`{name}` of an element and an array of all")
        if self.counts and not positions:
            values = [
                self._number(x) if _is_number(x) and self._is_constant(value) else value
                for x, value in pairs
            ]
        made = self._on_values(eqn, values)
        return [Element(i, *positions) if positions else Single(i) for i in made]

    def _on_values(self, eqn: Equation, values: Sequence[Any]) -> list[int]:
        """The ids of the results of an equation that does not mix elements."""
        ids = [x.id for x in values]
        facts: dict[str, Any] = {}
        name = eqn.primitive.name
        if name == "broadcast_in_dim":
            facts["repeated"] = ids[0], tuple(eqn.params["broadcast_dimensions"])
        elif name in CHAINS and len(values) == 2:
            facts["joins"] = CHAINS[name]
            if sum(isinstance(x, Single) for x in values) == 1:
                base, element = sorted(values, key=lambda x: isinstance(x, Element))
                facts["chained"] = CHAINS[name], base.id, element.id
        if (function := known_function(eqn)) is not None:
            return self.expressions.operation(function, lambda value: [function(value)], ids)
        jaxpr = self.jaxpr
        sources = [self.expressions.all[i].given or ("",) for i in ids]
        has_length = any(source[0] in (*LENGTHS, "number") for source in sources)

        def run(*given: Array) -> list[Array]:
            if has_length:  # in place of a literal
                return [eqn.primitive.bind(*given, **eqn.params)]
            return run_equation(jaxpr, eqn, given)

        key = eqn.primitive, self.expressions.key_of(eqn.params)
        return self.expressions.operation(key, run, ids, **facts)

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

    def _put_together(self, eqn: Equation, values: Sequence[Any]) -> Any:
        """An array of elements in a row, and of other things."""
        is_stack = eqn.primitive.name == "stack"
        axis = eqn.params["axis" if is_stack else "dimension"]
        parts, is_one = [], []
        for of, same in itertools.groupby(values, lambda x: isinstance(x, Element) and (x.id,)):
            several = list(same)
            parts += [self._part(several, is_stack, axis)] if of else several
            is_one += [False] if of else [is_stack] * len(several)
        if len(parts) == 1:
            return parts[0]
        parts = list(map(self._array_of, parts))

        def run(_: Any, *xs: Array) -> list[Array]:
            pairs = zip(xs, is_one, strict=True)
            rows = [lax.expand_dims(x, (axis,)) if one else x for x, one in pairs]
            return [lax.concatenate(rows, axis)]

        key = "concatenate", axis, *is_one
        return self._array_operation(key, run, {}, parts, [eqn.outvars[0].aval])[0]

    def _part(self, elements: Sequence[Element], is_stack: bool, axis: int) -> Any:
        """An array of elements that follow one another, forwards or backwards."""
        index, places = elements[0].id, [x.position for x in elements]
        first, last = min(places), max(places)
        ascending = list(range(first, last + 1))
        if places not in (ascending, ascending[::-1]):
            raise CannotRollError("an array of elements in some order")
        each = None if is_stack else self.expressions.all[index].shape[axis]
        if each == 1:
            index, each = self._without_axis(index, axis), None
        if each is not None:
            self.each.add(each)
        whole = StackedElements(index, axis, each)
        if places == ascending:
            return self._range(whole, first, last + 1)
        if each is not None:
            raise CannotRollError("an array of elements of several rows, backwards")

        def run(params: Any, x: Array) -> list[Array]:
            part = lax.slice_in_dim(x, params["first"], params["end"], axis=axis)
            return [lax.rev(part, (axis,))]

        params = {"first": first, "end": last + 1}
        types = [self._type_of_part(whole, len(places))]
        return self._array_operation(("backwards", axis), run, params, [whole], types)[0]

    def _range(self, whole: StackedElements, first: int, end: int) -> Any:
        """All elements, or those from one to another."""
        is_all = (first, end) == (0, self._length(whole.id))
        return whole if is_all else StackedRange(whole, first, end)

    def _array_of(self, x: Any) -> Any:
        """A range of elements as an array; any other value as it is."""
        if not isinstance(x, StackedRange):
            return x
        axis, rows = x.whole.axis, x.whole.each or 1

        def run(params: Any, x: Array) -> list[Array]:
            return [lax.slice_in_dim(x, params["first"], params["end"], axis=axis)]

        params = {"first": x.first * rows, "end": x.end * rows}
        types = [self._type_of_part(x.whole, x.end - x.first)]
        return self._array_operation(("part", axis), run, params, [x.whole], types)[0]

    def _type_of_part(self, whole: StackedElements, count: int) -> jax.ShapeDtypeStruct:
        """The type of an array of so many elements."""
        x = self.expressions.all[whole.id]
        shape, is_longer = list(x.shape), whole.each is not None
        shape[whole.axis : whole.axis + is_longer] = [count * (whole.each or 1)]
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    def _joined(self, eqn: Equation, values: Sequence[Any]) -> Any:
        """Ranges that follow one another, as JAX stacks many values, as one; None of others."""
        if eqn.primitive.name != "concatenate" or StackedRange not in set(map(type, values)):
            return None
        axis = eqn.params["dimension"]
        parts = [self._part([x], False, axis) if isinstance(x, Element) else x for x in values]
        first, last = parts[0], parts[-1]
        alike = all(type(x) is StackedRange and x.whole == first.whole for x in parts)
        if not alike or first.whole.axis != axis:
            return None
        if any(a.end != b.first for a, b in itertools.pairwise(parts)):
            return None
        return self._range(first.whole, first.first, last.end)

    def _without_axis(self, index: int, axis: int) -> int:
        """An expression without an axis along which it has one element, or repeats itself."""
        x = self.expressions.all[index]
        if not x.shape:
            return index
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        if x.shape[axis] == 1:
            run = lambda value: [value.reshape(shape)]  # noqa: E731
            return self.expressions.operation(("reshape", shape), run, [index])[0]
        if x.repeated is not None and axis not in x.repeated[1]:
            source, axes = x.repeated
            axes = tuple(a - (a > axis) for a in axes)
            run = lambda value: [lax.broadcast_in_dim(value, shape, axes)]  # noqa: E731
            return self.expressions.operation(
                ("broadcast", shape, axes), run, [source], repeated=(source, axes)
            )[0]
        raise CannotRollError("an array has other rows for the elements than theirs")

    # --- arrays with a row for each element ---

    def _stacked(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an operation that treats the rows of elements alike, or reduces them."""
        if any(isinstance(x, Element) for x in values):
            raise CannotRollError("one element meets all")
        return [self._on_rows(eqn, values)]

    def _on_rows(self, eqn: Equation, values: Sequence[Any]) -> StackedElements | Single | Element:
        name, params = eqn.primitive.name, dict(eqn.params)
        if (name in ELEMENTWISE_OPERATIONS and len(eqn.outvars) == 1) or known_function(
            eqn
        ) is not None:
            return self._elementwise(eqn, values)
        if name == "dot_general":
            return self._product(eqn, *values)
        if len(values) != 1:
            raise CannotRollError(f"`{name}` of a row for each element")
        ((index, axis, each),) = values
        kept = each is not None  # the axis, by an element's part

        def moved(axes: Sequence[int]) -> tuple[int, ...]:
            return tuple(a - (a > axis and not kept) for a in axes if kept or a != axis)

        reduction = REDUCTIONS.get(name)
        if reduction is not None:
            axes = params["axes"]
            others = moved(axes)
            reduced = index
            if others:
                given = params | {"axes": others}
                reduced = self.expressions.primitive(eqn.primitive, given, [index])
            if axis not in axes:
                return StackedElements(reduced, axis - sum(a < axis for a in axes), each)
            if others and reduction in ("max", "min"):  # all that are equal share the gradient
                return self._reduction(reduction, True, index, axes=others, alone=reduced)
            return self._reduction(reduction, True, reduced)
        if name == "broadcast_in_dim":
            axes, shape = params["broadcast_dimensions"], list(params["shape"])
            place = axes[axis]
            if shape[place] != self._length(index) * (each or 1):
                raise CannotRollError("rows of one element are repeated")
            if each is not None:
                params["shape"] = (*shape[:place], each, *shape[place + 1 :])
            else:
                of_element = [a - (a > place) for k, a in enumerate(axes) if k != axis]
                params["shape"] = (*shape[:place], *shape[place + 1 :])
                params["broadcast_dimensions"] = tuple(of_element)
        elif name == "transpose":
            place = params["permutation"].index(axis)
            params["permutation"] = moved(params["permutation"])
        elif name == "squeeze" and axis not in params["dimensions"]:
            place = axis - sum(a < axis for a in params["dimensions"])
            params["dimensions"] = moved(params["dimensions"])
        elif name == "slice" and _is_of_every_row(eqn, axis):
            place = axis
            for key, begin in (("start_indices", 0), ("limit_indices", each), ("strides", 1)):
                part = list(eqn.params[key] or [1] * len(eqn.params["start_indices"]))
                part[axis : axis + 1] = [] if each is None else [begin]
                params[key] = tuple(part)
        elif name == "slice" and each is None and self._picked.get(id(eqn)) == axis:
            return self._row(eqn, index, axis)
        elif name == "reshape":
            shape = list(params["new_sizes"])
            before = self.expressions.all[index].shape[:axis]
            place = next(
                (
                    k
                    for k, n in enumerate(shape)
                    if n == self._length(index) * (each or 1)
                    and np.prod(shape[:k]) == np.prod(before)
                ),
                -1,
            )
            if place < 0:
                raise CannotRollError("rows of elements are put together")
            shape[place : place + 1] = [] if each is None else [each]
            params["new_sizes"] = tuple(shape)
        else:
            raise CannotRollError(f"`{name}` of a row for each element")
        made = self.expressions.primitive(eqn.primitive, params, [index])
        return StackedElements(made, place, each)

    def _on_arrays(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an operation on arrays that are made of all elements."""
        name, axis = eqn.primitive.name, self._picked.get(id(eqn))
        if axis is not None and isinstance(values[0], Whole):
            return [self._row_of_array(eqn, values[0], axis)]
        operands = [
            self._number(x) if _is_number(x) else value
            for x, value in zip(eqn.invars, values, strict=True)
        ]
        types = [v.aval for v in eqn.outvars]
        function = known_function(eqn)
        if function is not None:
            run = lambda _, *xs: [function(*xs)]  # noqa: E731
            return self._array_operation(function, run, {}, operands, types)
        if inner_programs(eqn) and name not in INSIDE and name not in SCATTERS:
            raise CannotRollError(f"`{name}` of all elements, which runs a program")
        primitive = eqn.primitive

        def bound(params: dict[str, Any], *xs: Array) -> Sequence[Array]:
            made = primitive.bind(*xs, **params)
            return made if primitive.multiple_results else [made]

        return self._array_operation(primitive, bound, eqn.params, operands, types)

    def _array_operation(
        self,
        key: Hashable,
        run: Callable[..., Sequence[Array]],
        params: dict[str, Any],
        operands: Sequence[Any],
        types: Sequence[Any],
    ) -> list[Whole]:
        """The results of an operation whose numbers may depend on the length.

        Args:
          key: what it does, whatever its parameters are.
          run: of parameters and operands, returns the results.
          params: its parameters.
          operands: what it reads.
          types: of its results, in this program.
        """
        if not all(isinstance(x, Single | Whole | StackedElements) for x in operands):
            raise CannotRollError("an array of all elements meets a part of them")
        others = [self._expression(x).shape for x in operands if isinstance(x, Single)]
        if self._finds_axes and any(n in shape for n in self.lengths for shape in others):
            raise CannotRollError("an array of all elements meets one as long as a list")
        skeleton, numbers = split(params, self.expressions.key_of)
        rows = tuple([x if isinstance(x, StackedElements) else None for x in operands])
        lists = tuple([None if x is None else self._expression(x).list for x in rows])
        key = "array", key, skeleton, rows, self._num_operations
        self._num_operations += 1
        operation = ArrayOperation(run, params, rows, lists)
        made = self.expressions.results_of(key, operation, [x.id for x in operands], types)
        self.numbers.update(dict.fromkeys(made, numbers))
        return [Whole(i) for i in made]

    def _number(self, literal: Any) -> Single:
        """A number in which programs of other lengths may differ."""
        number = np.asarray(literal.val, literal.aval.dtype)[()]
        made = self.expressions.given((), number.dtype, "number", self._num_operations)
        self._num_operations += 1
        self.numbers[made] = (number,)
        return Single(made)

    def _is_constant(self, x: Any) -> bool:
        """Returns whether a value is a constant, and no length."""
        expression = self._expression(x)
        return expression.given is None and not expression.args

    def _row_of_array(self, eqn: Equation, array: Whole, axis: int) -> Element:
        """The row of one element, of an array of a row for each."""
        shape = eqn.outvars[0].aval.shape
        count = eqn.invars[0].aval.shape[axis]
        index = self._row_of(array, axis, (*shape[:axis], *shape[axis + 1 :]), count)
        return self._row(eqn, index, axis)

    def _row_of(self, array: Whole, axis: int, shape: tuple[int, ...], count: int) -> int:
        """The id of a row of an array of `count` rows, one for each element of a list."""
        if not self._is_extent(count):
            raise CannotRollError("an array has other rows than one for each element")
        of, dtype = self.lengths.index(count), self._expression(array).dtype
        expression = Expression(of, (array.id,), shape, dtype, row_of=axis)
        return self.expressions.add(("row of", axis, of), expression)

    def _unstacked(self, eqn: Equation, array: Any) -> list[Any]:
        """The parts of an array along an axis."""
        axis, params = eqn.params["axis"], dict(eqn.params)
        count = len(eqn.outvars)
        if isinstance(array, Whole) and self._is_extent(count):
            index = self._row_of(array, axis, eqn.outvars[0].aval.shape, count)
            return [Element(index, k) for k in range(count)]
        if isinstance(array, Whole) or (axis == array.axis and array.each is not None):
            return self._on_arrays(eqn, [array])
        if axis == array.axis:
            return [Element(array.id, k) for k in range(count)]
        place = array.axis - (axis < array.axis)
        params["axis"] = axis - (axis > array.axis and array.each is None)
        run = lambda x: list(eqn.primitive.bind(x, **params))  # noqa: E731
        key = eqn.primitive, self.expressions.key_of(params)
        made = self.expressions.operation(key, run, [array.id])
        return [StackedElements(i, place, array.each) for i in made]

    def _length(self, index: int) -> int:
        """The length of the list of whose elements an expression is."""
        return self.lengths[self.expressions.all[index].list or 0]

    def _is_extent(self, *shape: int) -> bool:
        """Returns whether a shape has one axis, which is as long as a list."""
        return len(shape) == 1 and shape[0] in self.lengths

    def _expression(self, x: Any) -> Expression:
        return self.expressions.all[x.id]

    def _row(self, eqn: Equation, index: int, axis: int) -> Element:
        """The row of one element."""
        before, after = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
        if after != (*before[:axis], 1, *before[axis + 1 :]):
            raise CannotRollError("a part of the elements is read")
        run = lambda value: [jnp.expand_dims(value, axis)]  # noqa: E731
        row = self.expressions.operation(("row", axis), run, [index])[0]
        return Element(row, eqn.params["start_indices"][axis])

    def _elementwise(self, eqn: Equation, values: Sequence[Any]) -> StackedElements:
        """The result of an operation that computes each element of an array by itself."""
        axes = {(x.axis, x.each) for x in values if isinstance(x, StackedElements)}
        if len(axes) != 1:
            raise CannotRollError("rows meet along other axes")
        ((axis, each),) = axes
        ids = [
            x.id if isinstance(x, StackedElements) else self._of_element(x.id, axis, each)
            for x in values
        ]
        function = known_function(eqn)
        if function is not None:
            run = lambda value: [function(value)]  # noqa: E731
            made = self.expressions.operation(function, run, ids)[0]
        else:
            made = self.expressions.primitive(eqn.primitive, dict(eqn.params), ids)
        return StackedElements(made, axis, each)

    def _of_element(self, index: int, axis: int, each: int | None) -> int:
        """The part that an element meets of a value that all share, see `StackedElements`."""
        x = self.expressions.all[index]
        if each is None or not x.shape:
            return self._without_axis(index, axis)
        if x.shape[axis] == 1:  # which operations repeat by themselves
            return index
        if x.repeated is None or axis in x.repeated[1]:
            raise CannotRollError("an array has other rows for the elements than theirs")
        source, axes = x.repeated
        shape = (*x.shape[:axis], each, *x.shape[axis + 1 :])
        run = lambda value: [lax.broadcast_in_dim(value, shape, axes)]  # noqa: E731
        key = "broadcast", shape, axes
        return self.expressions.operation(key, run, [source], repeated=(source, axes))[0]

    def _product(self, eqn: Equation, left: Any, right: Any) -> StackedElements | Single:
        """The result of a matrix product."""
        contracted, batch = eqn.params["dimension_numbers"]
        axes = [x.axis if isinstance(x, StackedElements) else None for x in (left, right)]
        rows = {x.each for x in (left, right) if isinstance(x, StackedElements)}
        if len(rows) != 1:
            raise CannotRollError("rows meet those of other elements")
        (each,) = rows

        def dims(pair: Any, keep: bool) -> Any:
            """Axes without that of the elements, which they may share, or not."""
            both = [p for p in zip(*pair, strict=True) if keep or not any(map(_equal, p, axes))]
            return tuple(
                tuple(a - (axis is not None and a > axis) for a in side)
                for side, axis in zip(
                    zip(*both, strict=True) if both else ((), ()), axes, strict=True
                )
            )

        def shares(pair: Any) -> int | None:
            """Where both meet along the axis of the elements; None if they do not."""
            pairs = list(zip(*pair, strict=True))
            touched = [k for k, p in enumerate(pairs) if any(map(_equal, p, axes))]
            if touched and pairs[touched[0]] != tuple(axes):
                raise CannotRollError("elements meet other things along their axis")
            return touched[0] if touched else None

        met, together = shares(contracted), shares(batch)
        params = dict(eqn.params)
        if each is None:
            numbers = dims(contracted, met is None), dims(batch, together is None)
            params["dimension_numbers"] = numbers
        index = self.expressions.primitive(eqn.primitive, params, [left.id, right.id])
        if met is not None:
            return self._reduction("add", True, index)
        if together is not None:
            return StackedElements(index, together, each)
        if None not in axes:
            raise CannotRollError("elements meet each other")
        ((side, axis),) = [(k, a) for k, a in enumerate(axes) if a is not None]
        ndims = [len(self._shape(x)) for x in (left, right)]
        free = [
            [a for a in range(n) if a not in c and a not in b]
            for n, c, b in zip(ndims, contracted, batch, strict=True)
        ]
        place = len(batch[0]) + (len(free[0]) if side else 0) + free[side].index(axis)
        return StackedElements(index, place, each)

    def _shape(self, x: Any) -> tuple[int, ...]:
        """A shape with as many axes."""
        shape = self.expressions.all[x.id].shape
        lacks_one = isinstance(x, StackedElements) and x.each is None
        return (*shape, self._length(x.id)) if lacks_one else shape


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


def _is_of_every_row(eqn: Equation, axis: int) -> bool:
    """Returns whether a slice takes the same part of all rows, which lie along an axis."""
    before, after = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
    others = after[:axis] + after[axis + 1 :] != before[:axis] + before[axis + 1 :]
    strides = eqn.params["strides"]
    in_order = strides is None or strides[axis] == 1
    return in_order and after[axis] == before[axis] and (before[axis] > 1 or others)


def _equal(a: int, axis: int | None) -> bool:
    return a == axis
