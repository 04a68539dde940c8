"""Cells that take lists of any length: one type for many lengths.

A cell that sums over the children of a node is another program for every number of children, and
so another node type, which is compiled and batched by itself. As long as few numbers have been met
that is fastest. Then the programs are rolled up (see `_jaxpr.rolling`), and where those of
different lengths say the same, nodes take part in one type that has room for so many elements;
so do long lists from the first one on, which are programs of thousands of operations otherwise. A
node of this type reads its elements, the first of them again in the places that are left, and how
many there are. Lists that were not equally long in all calls have lengths of their own, and room
for as many elements as the longest.

Types are changed where a graph is written down: until then every call is recorded with the
arguments it has.

A cell that does nothing but reduce its arguments, `plus(*states)`, has types for a few lengths as
soon as one of them is met, and programs have room for all: they are small, and a minibatch in which
three states meet for the first time is no reason to compile.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.operations import ListOperands, Operation
from jedbatch._graph.types import LENGTH, NodeType, ValueType, operation_of
from jedbatch._jaxpr.interpret import inlined
from jedbatch._jaxpr.list_arrays import NumbersOf, NumbersOfLength, numbers_of_length
from jedbatch._jaxpr.list_expressions import Expressions
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.padding.flat_programs import called
from jedbatch._jaxpr.rolling import CannotRollError, Roller
from jedbatch._record.cell import pause
from jedbatch._record.identity.assumptions import Assumptions
from jedbatch._record.types.element_functions import ElementFunction, Makers, find_functions
from jedbatch._record.types.list_arguments import (
    Given,
    ListArgument,
    first_variable_of,
    lists_among,
    weak_among_others,
)
from jedbatch._record.types.padded_calls import GivenFunctions, PaddedCalls, pad
from jedbatch._support.types import Array

MAX_ARITIES = 4  # lengths of the lists of a cell that are types of their own
# Elements there is room for in types that serve several lengths.
CAPACITIES = (4, 8, 32, *(1 << k for k in range(7, 15)))
CAPACITIES_OF_SUMS = CAPACITIES[1:]  # where all lists are summed as they are read
LONG = 64  # longer lists are rolled up as soon as they are met
SUMMED = (np.dtype(np.float32), np.dtype(np.float64))  # lists of these are summed as they are read


class Rolled(NamedTuple):
    """A type of calls, rolled up.

    Attributes:
      node_type: its id.
      lengths: of its lists.
      roles: what its operands are, ("input", k) or ("element", leaf, position, list).
      key: equal for types that compute the same for lists of any length, apart from numbers.
      numbers: those in which such types may differ (see `list_arrays`).
      varying: see `Roller`.
    """

    node_type: int
    lengths: tuple[int, ...]
    roles: tuple[tuple, ...]
    key: Hashable
    numbers: NumbersOf
    varying: Set[int]


class CellCalls:
    """The types of calls of one cell, which may differ in the length of lists.

    Attributes:
      first_variable: the position of the first of `*args`; None if there are none.
      lists: by type, the arguments that may be lists.
      slots: by type, for each leaf of the arguments whether it is an operand.
      listed: by type, how many lists there are among the results, of one result for each element;
        they come first.
      rolled: the types that were rolled up, by their ids; None of those that cannot be.
      padded_types: ids of the types that serve several lengths, by their keys, capacities, and
        whether functions of elements are given.
    """

    def __init__(self, fn: Callable, key_of: Callable[[Any], Hashable]):
        self.first_variable = first_variable_of(fn)
        self.lists: dict[int, tuple[ListArgument, ...]] = {}
        self.slots: dict[int, tuple[bool, ...]] = {}
        self.listed: dict[int, int] = {}
        self.rolled: dict[int, Rolled | None] = {}
        self.padded_types: dict[tuple[Hashable, int, bool], int] = {}
        self._expressions = Expressions(key_of)
        self._functions: dict[Hashable, tuple[ElementFunction, ...]] = {}
        self._numbers: dict[Hashable, NumbersOfLength] = {}  # by keys
        self._refused: set[Hashable] = set()  # keys of programs that cannot run with more room
        self._together: tuple[frozenset[tuple], ...] = ()  # arguments that are equally long

    def add(
        self, node_type: int, of: NodeType, given: Given, slots: Sequence[bool], listed: int
    ) -> tuple[Hashable, ...]:
        """Adds a type of calls, which has the id `node_type`.

        Returns the lengths of its lists, and which elements are weak where some are.
        """
        self.listed[node_type] = listed
        self.lists[node_type] = lists = tuple(lists_among(given, self.first_variable, len(slots)))
        self.slots[node_type] = tuple(slots)
        return weak_among_others(of, lists, slots), *(x.length for x in lists)

    @property
    def longest(self) -> int:
        """The length of the longest list that has been met."""
        return max((x.length for lists in self.lists.values() for x in lists), default=0)

    def roll(self, node_types: Sequence[NodeType], many: bool) -> dict[Hashable, list[Rolled]]:
        """Returns types that compute the same for lists of any length.

        Those of long lists, and if there are `many` lengths, those that others are like.
        """
        together = self._find_together()
        if together != self._together:  # lists that varied together, or did not vary
            self._together = together
            self.rolled.clear()
        for t in self.lists.keys() - self.rolled.keys():
            if varying := self._varying(t):  # lists of others may vary yet
                self.rolled[t] = self._rolled(t, node_types[t], varying)
        types = [r for r in self.rolled.values() if r is not None]
        groups: dict[Hashable, list[Rolled]] = {}
        for r in types:
            if r.key not in self._refused:
                groups.setdefault(r.key, []).append(r)
        alike: dict[Hashable, list[Rolled]] = {}
        for key, same in groups.items():
            lengths = {r.lengths for r in same}
            long = max(map(max, lengths)) > LONG
            if (long or (many and len(lengths) > 1)) and (fitting := self._fitting(key, same)):
                alike[key] = fitting
        taken = {r.node_type for same in alike.values() for r in same}
        for r in types:
            if set(r.lengths) == {1} and r.node_type not in taken:
                for key, same in alike.items():
                    if self._is_of_one(r, key):
                        same.append(r)
                        break
        return alike

    def refuse(self, key: Hashable) -> None:
        """Leaves types of a key as they are, whose programs cannot run with room for more."""
        self._refused.add(key)

    def _fitting(self, key: Any, same: Sequence[Rolled]) -> list[Rolled]:
        """Returns the types of a key whose numbers are what they are known to be of the length."""
        known = self._numbers.get(key)
        if known is None or not all(known.agree(r.lengths, r.numbers) for r in same):
            numbers = {r.lengths: r.numbers for r in same}
            varying = same[0].varying
            found = numbers_of_length(numbers, varying)
            if found is None:  # as `max(n - 1, 1)` of one element is another number
                several = {n: x for n, x in numbers.items() if min(n) > 1}
                found = numbers_of_length(several, varying)
            if found is not None and (known is None or found.of != known.of):
                self._numbers[key] = known = found
                padded = self.padded_types.items()  # those of what fewer lengths had said
                self.padded_types = {k: t for k, t in padded if k[0] != key}
                self._functions.pop(key, None)
        return [r for r in same if known and known.agree(r.lengths, r.numbers)]

    def _is_of_one(self, single: Rolled, key: Any) -> bool:
        """Returns whether a type of lists of one element is what a key says of such lists."""
        own: Any = single.key
        return own[1:] == key[1:] and self._expressions.are_of_one(
            own[0], single.numbers, key[0], self._numbers[key]
        )

    def _find_together(self) -> tuple[frozenset[tuple], ...]:
        """Returns which arguments are lists that are long, or of which other lengths were met.

        Those that were equally long in all calls are together.
        """
        met: dict[tuple, list[int | None]] = {}
        for k, lists in enumerate(self.lists.values()):
            for x in lists:
                met.setdefault(x.which, [None] * len(self.lists))[k] = x.length
        together: dict[tuple[int | None, ...], set[tuple]] = {}
        for which, lengths in met.items():
            known = {n for n in lengths if n is not None}
            if len(known) > 1 or max(known) > LONG:
                together.setdefault(tuple(lengths), set()).add(which)
        return tuple(map(frozenset, together.values()))

    def _varying(self, node_type: int) -> list[list[ListArgument]]:
        """Returns the lists of a type that vary in length, those that are equally long together.

        Those without elements are left out, and beside longer ones those of one, which nothing
        tells apart from an argument by itself.
        """
        lists = [x for x in self.lists[node_type] if x.length]
        several = ([x for x in lists if x.which in which] for which in self._together)
        found = [own for own in several if own]
        return [own for own in found if own[0].length > 1] or found

    def _rolled(
        self, node_type: int, of: NodeType, varying: Sequence[Sequence[ListArgument]]
    ) -> Rolled | None:
        lengths = tuple([own[0].length for own in varying])
        if max(lengths) > CAPACITIES[-1]:
            return None
        roles = self._roles(node_type, varying)
        if roles is None:
            return None
        program = inlined(operation_of(of).jaxpr, called)
        num_shared = len(of.shared)
        num_inputs = sum(role[0] == "input" for role in roles)
        shared: list[tuple] = [("input", num_inputs + k) for k in range(num_shared)]
        types = tuple(t for r, t in zip(roles, of.operands, strict=True) if r[0] == "input")
        elements = tuple(  # what weak types mean has been settled in the program
            dataclasses.replace(t, weak=False)
            for r, t in zip(roles, of.operands, strict=True)
            if r[2:3] == (0,)
        )
        lists = tuple(r[3] for r in roles if r[2:3] == (0,))
        listed = self.listed[node_type]
        roller = Roller(self._expressions, program, [*shared, *roles], lengths)
        try:
            made = roller.results(listed)
        except CannotRollError:
            return None
        ends = list(itertools.accumulate(lengths[k] for k in self._lists_of(made[:listed])))
        first, end = [0, *ends][:listed], [0, *ends][listed]
        kinds = tuple(of.results[k] for k in first), of.results[end:]
        key = made, of.shared, types, elements, kinds, lists
        return Rolled(node_type, lengths, roles, key, roller.numbers, roller.varying)

    def _lists_of(self, expressions: Iterable[int]) -> list[int]:
        """The numbers of the lists of whose elements some expressions are."""
        return [self._expressions.all[index].list or 0 for index in expressions]

    def results_of(self, rolled: Rolled, key: Any, capacity: int) -> np.ndarray:
        """Returns which results of the type with room for more elements a type has."""
        made, _, _, _, (in_lists, single), _ = key
        of_lists = [rolled.lengths[k] for k in self._lists_of(made[: len(in_lists)])]
        first = [k * capacity + np.arange(n) for k, n in enumerate(of_lists)]
        return np.concatenate([*first, len(of_lists) * capacity + np.arange(len(single))])

    def _roles(
        self, node_type: int, varying: Sequence[Sequence[ListArgument]]
    ) -> tuple[tuple, ...] | None:
        """Returns what the operands of a type are; None if some element is no operand."""
        of_leaf: dict[int, tuple] = {}
        first_leaf = 0
        for number, x in ((number, x) for number, own in enumerate(varying) for x in own):
            for k in range(x.length * x.leaves):
                position, leaf = divmod(k, x.leaves)
                of_leaf[x.first + k] = "element", first_leaf + leaf, position, number
            first_leaf += x.leaves
        slots = self.slots[node_type]
        if not all(slots[k] for k in of_leaf):
            return None
        inputs = itertools.count()
        return tuple(
            of_leaf[k] if k in of_leaf else ("input", next(inputs))
            for k, is_operand in enumerate(slots)
            if is_operand
        )

    def capacity(self, rolled: Rolled, key: Any) -> int:
        """Returns the elements there is room for in the type that serves a type of a key.

        Elements that do not exist cost next to nothing in lists that are summed as they are read,
        so there are fewer types of these.
        """
        summed, (in_lists, _) = self._summed(key), key[4]
        capacities = CAPACITIES_OF_SUMS if all(summed) and not in_lists else CAPACITIES
        return next(c for c in capacities if c >= max(rolled.lengths))

    def _summed(self, key: Any, functions: Sequence[ElementFunction] = ()) -> tuple[bool, ...]:
        """Returns for each part of the elements whether nothing but its sum is read."""
        known = [f.part for f in functions]
        return tuple(
            t.dtype in SUMMED
            and not self._expressions.all[part].list
            and self._expressions.is_only_summed(key[0], part, known)
            for part, t in self._parts(key, functions)
        )

    def _parts(self, key: Any, functions: Sequence[ElementFunction]) -> list[tuple[int, ValueType]]:
        """(id of the expression, type) of the values that elements consist of.

        All leaves; or those of the first list that are read besides functions of them, all of the
        other lists, and these functions.
        """
        leaves = list(zip(self._leaves(key), key[3], strict=True))
        if functions:
            known = [f.part for f in functions]
            read = self._expressions.parts(key[0], known)
            all_of = self._expressions.all
            leaves = [(part, t) for part, t in leaves if part in read or all_of[part].list]
        return [*leaves, *((f.part, f.type) for f in functions)]

    def _leaves(self, key: Any) -> list[int]:
        """The ids of the expressions of the leaves of elements."""
        return [
            self._expressions.given(t.shape, t.dtype, "element", leaf, *([k] if k else []))
            for leaf, (t, k) in enumerate(zip(key[3], key[5], strict=True))
        ]

    def functions(self, rolled: Rolled, key: Any, of: NodeType) -> tuple[ElementFunction, ...]:
        """Returns functions of an element of the first list that its maker can compute."""
        if key not in self._functions:
            _, shared, inputs, _, _, lists = key
            avals = operation_of(of).jaxpr.in_avals
            of_element = [
                aval
                for role, aval in zip(rolled.roles, avals[len(shared) :], strict=True)
                if role[2:3] == (0,)
            ]
            own_key = operation_of(of).key
            found = find_functions(
                self._expressions,
                key[0],
                own_key,
                shared,
                len(inputs),
                avals,
                of_element,
                self._numbers[key],
            )
            self._functions[key] = tuple([f for f in found if not lists[f.leaf]])
        return self._functions[key]

    def leaves_read(self, key: Any, functions: Sequence[ElementFunction]) -> list[int]:
        """The leaves of elements that are read besides functions of them."""
        parts = {index for index, _ in self._parts(key, functions)}
        return [leaf for leaf, part in enumerate(self._leaves(key)) if part in parts]

    def padded_type(
        self,
        rolled: Rolled,
        key: Any,
        of: NodeType,
        capacity: int,
        functions: Sequence[ElementFunction] = (),
    ) -> NodeType:
        """Returns the type with room for so many elements that serves types of one key.

        It reads its inputs; elements and lengths of all lists but the first; those of the first.

        Args:
          rolled: one of these types.
          key: the key.
          of: the type.
          capacity: elements there is room for.
          functions: of one element, whose values are given.
        """
        results, shared, inputs, _, (in_lists, single), _ = key
        avals = operation_of(of).jaxpr.in_avals
        shared_avals, operand_avals = avals[: len(shared)], avals[len(shared) :]
        pairs = list(zip(rolled.roles, operand_avals, strict=True))
        given = [aval for role, aval in pairs if role[0] == "input"]
        leaf_avals = [aval for role, aval in pairs if role[2:3] == (0,)]
        of_element = [leaf_avals[leaf] for leaf in self.leaves_read(key, functions)]
        of_element += [f.program.out_avals[0] for f in functions]
        parts, elements = zip(*self._parts(key, functions), strict=True)
        is_first = [not self._expressions.all[part].list for part in parts]
        num_others, num_lengths = is_first.count(False), len(rolled.lengths) - 1
        first = len(inputs) + capacity * num_others + num_lengths

        def traced(summed: Sequence[bool]) -> Any:
            """The program, with sums in place of some lists."""
            numbers = range(len(inputs) + len(shared))
            in_order = _first_true(is_first, parts)  # as they are given below
            are_sums = _first_true(is_first, summed)
            program = self._expressions.program(
                results, numbers, are_sums, capacity, in_order, self._numbers[key]
            )

            def run(*values: Array) -> list[Array]:
                others, rest = values[: len(shared)], values[len(shared) :]
                own, apart, rest = rest[: len(inputs)], rest[len(inputs) : first], rest[first:]
                lengths = [rest[-1], *apart[capacity * num_others :]]
                elements = [*rest[:-1], *apart[: capacity * num_others]]
                made = program([*own, *others], elements, lengths)
                rows = (x[k] for x in made[: len(in_lists)] for k in range(capacity))
                return [*rows, *made[len(in_lists) :]]

            triples = list(zip(of_element, summed, is_first, strict=True))
            lists = [x for x, s, own in triples if own for x in [x] * (1 if s else capacity)]
            apart = [x for x, _, own in triples if not own for x in [x] * capacity]
            length = jax.ShapeDtypeStruct(LENGTH.shape, LENGTH.dtype)
            apart += [length] * num_lengths
            with pause():
                return jax.make_jaxpr(run)(*shared_avals, *given, *apart, *lists, length)

        closed = traced([False] * len(elements))
        summed = self._summed(key, functions)
        lists = ListOperands(
            first,
            capacity,
            first + capacity * is_first.count(True),
            tuple(itertools.compress(summed, is_first)),
            traced(summed) if any(summed) else closed,
        )
        where = of.label[of.label.rindex(")") + 1 :]
        pairs = list(zip(elements, is_first, strict=True))
        own, apart = (
            [t for t, x in pairs if x == y for _ in range(capacity)] for y in (True, False)
        )
        operands = (*inputs, *apart, *[LENGTH] * num_lengths, *own, LENGTH)
        listed = ", ".join(map(str, (*inputs, *(f"≤{capacity} × {t}" for t in elements))))
        kind = "list of functions" if functions else "list"
        return NodeType(
            of.name,
            Operation((kind, capacity, operation_of(of).key), closed, lists=lists),
            operands,
            of.shared,
            (*(t for t in in_lists for _ in range(capacity)), *single),
            f"{of.name}({listed}){where}",
        )


def _first_true(is_first: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """Returns some values, those that are first before the others."""
    pairs = list(zip(is_first, values, strict=True))
    return [x for y in (True, False) for first, x in pairs if first == y]


class Arities:
    """The calls of cells with lists, and the types that serve several lengths.

    Args:
      node_types: the types by their ids.
      add_type: gives a type its id; the second argument is that of a type like it.
      key_of: gives what parameters of operations are told apart by.
      assumptions: which cells have lists of few lengths.

    Attributes:
      padded: by the id of a type, how its nodes are nodes of another type.
    """

    def __init__(
        self,
        node_types: Sequence[NodeType],
        add_type: Callable[[NodeType, int], int],
        key_of: Callable[[Any], Hashable],
        assumptions: Assumptions,
    ):
        self.padded: dict[int, PaddedCalls] = {}
        self._assumptions = assumptions
        self._node_types = node_types
        self._add_type = add_type
        self._makers = Makers(node_types, add_type, assumptions)
        self._key_of = key_of
        self._cells: dict[Hashable, CellCalls] = {}

    def note(
        self,
        cell: Hashable,
        fn: Callable,
        given: Given,
        slots: Sequence[bool],
        node_type: int,
        listed: int = 0,
    ) -> None:
        """Notes a type of calls of a cell.

        Args:
          cell: what calls of one function with one set of options have in common.
          fn: the function.
          given: the positional arguments, and those given by keyword that hold operands.
          slots: for each leaf of the positional arguments, of what `fn` closes over, and of the
            others, whether it is an operand.
          node_type: the id of the type.
          listed: how many lists, of one result for each element, its results begin with.
        """
        calls = self._cells.get(cell)
        if calls is None:
            calls = self._cells[cell] = CellCalls(fn, self._key_of)
        if node_type in calls.lists:
            return
        lengths = calls.add(node_type, self._node_types[node_type], given, slots, listed)
        self._makers.note(node_type, cell)
        few = self._assumptions.holds("lengths of lists", cell, lengths, MAX_ARITIES)
        if few and calls.longest <= LONG:
            return
        for key, same in calls.roll(self._node_types, not few).items():
            for rolled in same:
                if rolled.node_type not in self.padded:
                    try:
                        self.padded[rolled.node_type] = self._padded(cell, rolled, key)
                    except CannotMergeError:
                        calls.refuse(key)
                        break
                    self._assumptions.fail("types", rolled.node_type != node_type)

    def _padded(self, cell: Hashable, rolled: Rolled, key: Any) -> PaddedCalls:
        calls = self._cells[cell]
        capacity = calls.capacity(rolled, key)
        of = self._node_types[rolled.node_type]
        functions = calls.functions(rolled, key, of)
        for given in ((), functions) if functions else ((),):
            if (key, capacity, bool(given)) not in calls.padded_types:
                new = calls.padded_type(rolled, key, of, capacity, given)
                new_id = self._add_type(new, rolled.node_type)
                self._makers.note(new_id, cell)
                calls.padded_types[key, capacity, bool(given)] = new_id
        place = {role: k for k, role in enumerate(rolled.roles)}
        inputs = [k for role, k in place.items() if role[0] == "input"]
        lists, lengths = key[5], rolled.lengths

        def order(leaves: Sequence[int]) -> list[int]:
            """The operands that are elements, one leaf after the other."""
            pairs = itertools.product(leaves, range(capacity))
            of_leaf = ((leaf, k, lists[leaf]) for leaf, k in pairs)
            return [place["element", x, k if k < lengths[of] else 0, of] for x, k, of in of_leaf]

        def reads(leaves: Sequence[int]) -> np.ndarray:
            """The operands before the lengths, where those of other lists than the first are 0."""
            apart = order([leaf for leaf, k in enumerate(lists) if k])
            own = order([leaf for leaf in leaves if not lists[leaf]])
            return np.array([*inputs, *apart, *[0] * (len(lengths) - 1), *own], np.int64)

        others = len(inputs) + capacity * sum(map(bool, lists))
        given_functions = None
        if functions:
            given_functions = GivenFunctions(
                calls.padded_types[key, capacity, True],
                reads(calls.leaves_read(key, functions)),
                functions,
                np.array(order([f.leaf for f in functions])).reshape(len(functions), capacity),
            )
        return PaddedCalls(
            calls.padded_types[key, capacity, False],
            reads(range(len(key[3]))),
            lengths,
            others,
            calls.results_of(rolled, key, capacity),
            given_functions,
        )

    def pad(self, graph: Graph, types: Callable[[], tuple[NodeType, ...]]) -> Graph:
        """Returns a graph whose nodes with lists are of the types that serve several lengths.

        `types` gives the types by their ids.
        """
        return pad(self.padded, self._makers, types, graph)
