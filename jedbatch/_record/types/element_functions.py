"""Functions of one element of a list, computed once where the element is made.

A child-sum TreeLSTM multiplies the state of every child by a matrix, and attention multiplies every
key. In a node type that serves lists of several lengths this is done in all places that there are
room for, whether an element exists or not, and again by every node that reads the element. What
depends on an element and on shared values alone is a function of the value it is, so the node that
makes the value computes it too, as one more result, and lists are of these results. The matrix
product is one of consecutive rows then, of which none is padding.

This is done where nodes make all elements that are met first, and at least one of `LEAST_USE`
values of a kind is an element, and only for functions that have a matrix product: others cost less
than to keep their results. Types that differ only in their operands, such as those of nodes with
few and with many children, compute the same functions, so that readers need not tell them apart.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._graph.operations import Operation
from jedbatch._graph.types import NodeType, ValueType, operation_of
from jedbatch._jaxpr.interpret import cares_for_padding, has_gradient, performs, work
from jedbatch._jaxpr.list_arrays import NumbersOfLength
from jedbatch._jaxpr.list_expressions import Expressions
from jedbatch._record.cell import pause
from jedbatch._record.identity.assumptions import Assumptions
from jedbatch._support.types import Array

LEAST_USE = 2  # one of so many values of a kind is an element at least
LEAST_WORK = 16  # floating-point operations for each number of the result


@dataclasses.dataclass(frozen=True, eq=False)
class ElementFunction:
    """A function of one leaf of an element, and of shared values.

    Attributes:
      key: equal for functions that are equal.
      part: the id of the expression that it is (see `Expressions`).
      leaf: of the element.
      shared: ids of the shared values that it reads.
      type: of what it returns.
      program: maps the shared values and the leaf to it.
    """

    key: Hashable
    part: int
    leaf: int
    shared: tuple[int, ...]
    type: ValueType
    program: Any


def find_functions(
    expressions: Expressions,
    results: Sequence[int],
    key: Hashable,
    shared: Sequence[int],
    first_shared: int,
    avals: Sequence[Any],
    elements: Sequence[Any],
    numbers: NumbersOfLength,
) -> tuple[ElementFunction, ...]:
    """Returns the functions of one element that are worth being computed where it is made.

    Args:
      expressions: of lists of any length.
      results: ids of those that are returned.
      key: tells these expressions apart from those of others.
      shared: ids of the shared values.
      first_shared: the number of the input that is the first of these.
      avals: types of the shared values.
      elements: types of the leaves of an element.
      numbers: of the expressions, those that depend on lengths.
    """
    found = []
    for part, leaf in expressions.of_one_element(results, first_shared, numbers):
        inputs = expressions.inputs_of(part)
        given = [avals[k - first_shared] for k in inputs]
        with pause():
            function = expressions.function(part, inputs, numbers)
            program = jax.make_jaxpr(function)(*given, elements[leaf])
        (aval,) = program.out_avals
        if _is_worth_it(program):
            of = tuple(shared[k - first_shared] for k in inputs)
            value_type = ValueType(aval.shape, np.dtype(aval.dtype))
            found.append(ElementFunction((key, part), part, leaf, of, value_type, program))
    return tuple(found)


def _is_worth_it(program: Any) -> bool:
    (aval,) = program.out_avals
    if not has_gradient(aval.dtype) or aval.weak_type or not _is_fixed(aval.shape):
        return False
    if any(map(cares_for_padding, program.eqns)):  # some of the values are elements of nothing
        return False
    least = LEAST_WORK * aval.size
    return performs(program, "dot_general") and sum(map(work, program.jaxpr.eqns)) >= least


def _is_fixed(shape: Sequence[Any]) -> bool:
    return all(isinstance(extent, int) for extent in shape)


def can_compute_more(node_type: NodeType) -> bool:
    """Returns whether nodes of a type can have more results.

    Not if extents are symbols, or if what runs depends on values: such lanes run step by step.
    """
    if node_type.operation is None:
        return False
    if not all(_is_fixed(t.shape) for t in (*node_type.operands, *node_type.results)):
        return False
    program = operation_of(node_type).jaxpr
    return not any(performs(program, name) for name in ("while", "cond"))


class Made(NamedTuple):
    """A function of a result, which the node that has the result computes as well.

    Attributes:
      result: position of the result.
      function: the function.
    """

    result: int
    function: ElementFunction


def with_functions(node_type: NodeType, made: Sequence[Made]) -> NodeType:
    """Returns a type whose nodes compute functions of their results too, behind the results."""
    functions = [m.function for m in made]
    own = node_type.shared
    more = tuple(dict.fromkeys(s for f in functions for s in f.shared if s not in own))
    avals = {
        s: aval for f in functions for s, aval in zip(f.shared, f.program.in_avals, strict=False)
    }

    def extended(closed: Any) -> Any:
        def run(*args: Array) -> list[Array]:
            before, rest = args[: len(own)], args[len(own) + len(more) :]
            values = dict(zip((*own, *more), args, strict=False))
            results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *before, *rest)
            computed = (
                jax.core.eval_jaxpr(
                    f.program.jaxpr, f.program.consts, *(values[s] for s in f.shared), results[r]
                )[0]
                for r, f in made
            )
            return [*results, *computed]

        given = closed.in_avals
        with pause():
            return jax.make_jaxpr(run)(
                *given[: len(own)], *(avals[s] for s in more), *given[len(own) :]
            )

    operation = operation_of(node_type)
    lists = operation.lists
    if lists is not None:
        lists = dataclasses.replace(lists, program=extended(lists.program))
    key = "with functions", operation.key, *((r, f.key) for r, f in made)
    types = ", ".join(f"{f.type} of {r}" for r, f in made)
    return NodeType(
        node_type.name,
        Operation(key, extended(operation.jaxpr), lists=lists),
        node_type.operands,
        (*own, *more),
        (*node_type.results, *(f.type for f in functions)),
        f"{node_type.label} and {types}",
    )


class ElementUse(NamedTuple):
    """Elements of lists that are the same result of nodes of one type.

    Attributes:
      node_type: the id of the type; None of elements that no node makes.
      result: position of the result.
      times: how many elements there are.
      nodes: how many nodes of the type.
    """

    node_type: int | None
    result: int
    times: int
    nodes: int


class Makers:
    """The types whose nodes compute functions of their results, since these are elements of lists.

    Args:
      node_types: the types by their ids.
      add_type: gives a type its id; the second argument is that of a type like it.
      assumptions: fail where types compute more than before.

    Attributes:
      made: what nodes compute besides, by the kind of their type.
    """

    def __init__(
        self,
        node_types: Sequence[NodeType],
        add_type: Callable[[NodeType, int], int],
        assumptions: Assumptions,
    ):
        self.made: dict[Hashable, tuple[Made, ...]] = {}
        self._assumptions = assumptions
        self._node_types = node_types
        self._add_type = add_type
        self._adopted: dict[tuple[ElementFunction, ...], bool] = {}
        self._decided: dict[tuple[Hashable, Made], bool] = {}
        self._capable: dict[int, bool] = {}
        self._cells: dict[int, Hashable] = {}
        self._by_type: dict[int, tuple[Made, ...]] = {}
        self._extended: dict[tuple[int, tuple[Made, ...]], int] = {}

    def note(self, node_type: int, cell: Hashable) -> None:
        """Notes of which cell a type is; types of one cell compute the same functions."""
        self._cells[node_type] = cell

    def _kind(self, node_type: int) -> Hashable:
        """Equal for types of one cell that have the same results."""
        return self._cells.get(node_type, node_type), self._node_types[node_type].results

    def adopts(
        self, functions: tuple[ElementFunction, ...], uses: Sequence[Sequence[ElementUse]]
    ) -> bool:
        """Returns whether nodes are given functions of the elements of their lists.

        If all elements that were met first can have them: else there would be twice as many types.

        Args:
          functions: that a cell takes of its elements.
          uses: for each of these the elements that there are now.
        """
        if functions not in self._adopted:
            self._adopted[functions] = all(self._pays(x) for of_one in uses for x in of_one)
        return self._adopted[functions]

    def _pays(self, use: ElementUse) -> bool:
        if use.node_type is None or use.times * LEAST_USE < use.nodes:
            return False
        return self._can_compute_more(use.node_type)

    def _can_compute_more(self, node_type: int) -> bool:
        if node_type not in self._capable:
            self._capable[node_type] = can_compute_more(self._node_types[node_type])
        return self._capable[node_type]

    def of(self, node_type: int) -> tuple[Made, ...]:
        """Returns what nodes of a type compute besides."""
        if node_type not in self._by_type:
            made = self.made.get(self._kind(node_type), ())
            self._by_type[node_type] = made if made and self._can_compute_more(node_type) else ()
        return self._by_type[node_type]

    def decide(self, function: ElementFunction, use: ElementUse) -> bool:
        """Returns whether the nodes that make some elements compute a function of them."""
        assert use.node_type is not None
        kind, made = self._kind(use.node_type), Made(use.result, function)
        if (kind, made) not in self._decided:
            self._decided[kind, made] = self._pays(use)
            if self._decided[kind, made]:
                self.made[kind] = (*self.made.get(kind, ()), made)
                self._by_type.clear()
                self._assumptions.fail("types")
        return self._decided[kind, made] and self._can_compute_more(use.node_type)

    def places(self, function: ElementFunction) -> Iterator[tuple[int, int, int]]:
        """Yields the results of which a function is computed.

        As (id of the type, position of the result, position of the function among the results).
        """
        for t, node_type in enumerate(self._node_types):
            for k, (result, f) in enumerate(self.of(t)):
                if f is function:
                    yield t, result, len(node_type.results) + k

    def extended(self, node_type: int, like: int) -> int:
        """The id of a type whose nodes compute what those of the type `like` do besides."""
        made = self.of(like)
        if not made:
            return node_type
        if (node_type, made) not in self._extended:
            new = with_functions(self._node_types[node_type], made)
            self._extended[node_type, made] = self._add_type(new, node_type)
        return self._extended[node_type, made]
