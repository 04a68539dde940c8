"""Stacks of the elements of a sequence, or of what is computed from each, from an array of them.

    jnp.stack([f(w) for w in words])        recorded: f(w0), f(w1), ..., then a stack of them
                                            in its place: jax.vmap(f)(array of words)

The operations that lead from an element to its part of the stack are compared with those of the
first element, one by one. If they are the same, the first element's run on the whole array.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jedbatch._graph.types import NodeType, operation_of
from jedbatch._record.operations.sequences import MOST_LEFT_OUT, Elements
from jedbatch._record.operations.symbols import Shared, Value
from jedbatch._record.types.shared_operands import STACKS

# What makes a stack; of one value JAX may make one by giving it an axis.
MAKES_STACKS = frozenset({*STACKS, "broadcast_in_dim"})


class StackAxis(NamedTuple):
    """How values are stacked.

    Attributes:
      axis: of the result, along which they are.
      is_new: whether they have no such axis; else they have one row along it, or are stacks.
    """

    axis: int
    is_new: bool


@functools.lru_cache(maxsize=256)
def stack_axis(node_type: NodeType) -> StackAxis | None:
    """Returns how a type of nodes stacks its operands; None if it does something else."""
    if node_type.name not in MAKES_STACKS or node_type.shared or not node_type.operands:
        return None
    eqns = operation_of(node_type).jaxpr.jaxpr.eqns
    if len(eqns) != 1 or eqns[0].primitive.name != node_type.name:
        return None  # a function of the user that has this name
    params, part, (result,) = eqns[0].params, node_type.operands[0], node_type.results
    if node_type.name == "stack":
        return StackAxis(params["axis"], True)
    if node_type.name == "concatenate":
        return StackAxis(params["dimension"], False)
    new = set(range(len(result.shape))).difference(params["broadcast_dimensions"])
    is_row = len(new) == 1 and result.shape == (*part.shape[: min(new)], 1, *part.shape[min(new) :])
    return StackAxis(min(new), True) if is_row else None


class Stacking:
    """Finds stacks of sequences among what is recorded of an instance.

    Args:
      recorder: of the instance, which has recorded nothing of it yet.

    Attributes:
      rows: (elements, number) of elements that operations of JAX have read.
    """

    def __init__(self, recorder: Any):
        self._recorder = recorder
        self.rows: dict[int, tuple[Elements, int]] = {}
        self._next = len(recorder.call_specs), len(recorder.references), recorder.num_values
        self._makers: dict[int, tuple[int, int, int]] = {}  # (type, first reference, result)
        self._cut: set[Elements] = set()  # of which stacks were met that lack some at either end
        self._stacks: dict[
            int, tuple[StackAxis, list[int]]
        ] = {}  # made of arrays, with their parts

    def is_element(self, x: object) -> bool:
        """Returns whether this is an element of a sequence, as operations of JAX read it."""
        return type(x) is Value and x.index in self.rows

    def check_row(self, element: Value, extent: int) -> None:
        """Raises `GuardFailed` if an element names no row, which is an error of the function."""
        elements, k = self.rows[element.index]
        known = elements.of_place
        known.rows = extent if known.rows is None else min(known.rows, extent)
        if not -extent <= elements.number(k) < extent:
            known.changed()

    def check(self, results: Sequence[int]) -> None:
        """Raises `GuardFailed` if an element leads to results other than in a stack."""
        left, seen = list(results), set(results)
        while left:
            value = left.pop()
            if value in self.rows:
                self._leave(self.rows[value][0])
            more = set(self._operands(value)) - seen
            seen |= more
            left += more

    def _leave(self, elements: Elements) -> NoReturn:
        """Has sequences like one be cut, or left what they are; raises `GuardFailed`."""
        known = elements.of_place
        if elements in self._cut:
            known.are_cut = True
        elif elements.length <= 1 + MOST_LEFT_OUT:
            known.short.add(elements.length)
        else:
            known.are_apart = True
        known.changed()

    def of_array(self, stack: Value) -> Value | None:
        """Returns a stack computed from the array of a sequence; None if it is none of one."""
        way = self._way(stack.index)
        if way is None:
            return None
        parts = given = self._parts(stack.index, way)
        made_by, new = way, StackAxis(way.axis, True)
        if all(self._way(part) == new for part in parts):  # each was given the axis before
            parts, way = [self._operands(part)[0] for part in parts], new
        first = self._row_of(parts[0])
        if first is None:
            return None
        elements, begin = first
        step = self._step(parts, begin)
        numbers = range(begin, begin + step * len(parts), step)
        pairs = zip(parts, numbers, strict=True)
        if not all(self._are_alike(parts[0], x, first, k, {}) for x, k in pairs):
            return None
        if len(parts) == 1 < elements.length:  # given an axis, for whatever reason
            return None
        before, after = min(numbers), elements.length - 1 - max(numbers)
        if max(before, after) > MOST_LEFT_OUT:
            return None
        if (before or after) and not elements.of_place.are_cut:
            self._cut.add(elements)
            return None
        array = elements.array
        if before or after:
            array = array[before : array.shape[0] - after]
        rows, is_mapped = self._mapped(parts[0], array[::step] if step < 0 else array, {})
        if not is_mapped:
            return None
        stacked: Any = jnp.moveaxis(rows, 0, way.axis)
        stacked = stacked if way.is_new else jnp.squeeze(stacked, way.axis + 1)
        self._stacks[stacked.index] = made_by, given
        return stacked

    def _look(self) -> None:
        """Notes what has made the results recorded since the last time."""
        recorder, (node, reference, value) = self._recorder, self._next
        types = recorder.registry.node_types
        for type_id in recorder.call_specs[node:]:
            for result in range(types[type_id].num_results):
                self._makers[value + result] = type_id, reference, result
            value += types[type_id].num_results
            reference += len(types[type_id].operands)
        self._next = len(recorder.call_specs), reference, value

    def _maker(self, value: int) -> tuple[int, int, int] | None:
        """Returns (type of the node, its first reference, number of the result); None of inputs."""
        if value >= self._next[2]:
            self._look()
        return self._makers.get(value)

    def _operands(self, value: int) -> list[int]:
        """Returns what the node reads that makes a value; nothing of inputs."""
        maker = self._maker(value)
        if maker is None:
            return []
        type_id, first, _ = maker
        count = len(self._recorder.registry.node_types[type_id].operands)
        return list(self._recorder.references[first : first + count])

    def _way(self, value: int) -> StackAxis | None:
        """Returns how a value is a stack of others; None if it is none."""
        maker = self._maker(value)
        return None if maker is None else stack_axis(self._recorder.registry.node_types[maker[0]])

    def _parts(self, value: int, way: StackAxis) -> list[int]:
        """Returns the parts of a stack, which JAX makes of stacks of several each."""
        known, parts = self._stacks.get(value), self._operands(value)
        if known is not None and known[0] == way:
            return known[1]
        if self._way(value) != way:
            return [value]
        return parts if way.is_new else [part for own in parts for part in self._parts(own, way)]

    def _row_of(self, value: int) -> tuple[Elements, int] | None:
        """Returns (elements, number) of an element that leads to a value; None if none does."""
        left = [value]
        while left:
            value = left.pop()
            if value in self.rows:
                return self.rows[value]
            left += self._operands(value)
        return None

    def _step(self, parts: Sequence[int], begin: int) -> int:
        """Returns 1, or -1 if the parts of a stack are in the reverse order of their elements."""
        second = self._row_of(parts[1]) if len(parts) > 1 else None
        return -1 if second is not None and second[1] < begin else 1

    def _are_alike(
        self, first: int, other: int, row: tuple[Elements, int], number: int, known: dict[int, int]
    ) -> bool:
        """Returns whether a value is to an element what another is to the first one.

        Args:
          first: the value of the first element.
          other: that of another.
          row: (elements, number) of the first element.
          number: of the other element.
          known: values that are, by those of the first element.
        """
        if first in known:
            return known[first] == other
        known[first] = other
        if first in self.rows or other in self.rows:
            return self.rows.get(first) == row and self.rows.get(other) == (row[0], number)
        mine, its = self._maker(first), self._maker(other)
        if mine is None or its is None:
            return first == other or (mine is its and self._are_equal(first, other))
        if mine[0] != its[0] or mine[2] != its[2]:
            return False
        pairs = zip(self._operands(first), self._operands(other), strict=True)
        return all(self._are_alike(a, b, row, number, known) for a, b in pairs)

    def _are_equal(self, first: int, other: int) -> bool:
        """Returns whether two values are inputs, and equal numbers."""
        recorder = self._recorder
        if first >= 0 or other >= 0 or recorder.input_group[~first] != recorder.input_group[~other]:
            return False
        a, b = recorder.input_value[~first], recorder.input_value[~other]
        return a is b or (type(a) is type(b) and not getattr(a, "ndim", 0) and repr(a) == repr(b))

    def _mapped(
        self, value: int, array: Value, found: dict[int, tuple[Any, bool]]
    ) -> tuple[Any, bool]:
        """Returns what leads to a value, of all elements at once; and whether it has an axis more.

        Args:
          value: of the first element.
          array: the elements.
          found: results so far.
        """
        if value in found:
            return found[value]
        recorder = self._recorder
        if value in self.rows:
            return array, True
        maker = self._maker(value)
        if maker is None:
            kind = recorder.registry.groups[recorder.input_group[~value]][1]
            return found.setdefault(value, (Value(recorder, value, kind), False))
        type_id, _, result = maker
        node_type = recorder.registry.node_types[type_id]
        operands = [self._mapped(x, array, found) for x in self._operands(value)]
        if not any(is_mapped for _, is_mapped in operands):
            (kind,) = recorder.registry.kinds_of([node_type.results[result]])
            return found.setdefault(value, (Value(recorder, value, kind), False))
        values = [Shared(recorder, i) for i in node_type.shared] + [x for x, _ in operands]
        axes = [None] * len(node_type.shared) + [0 if mapped else None for _, mapped in operands]
        run = jaxpr_as_fun(operation_of(node_type).jaxpr)
        results = jax.vmap(run, axes)(*values)
        first = value - result
        found.update((first + k, (x, True)) for k, x in enumerate(results))
        return found[value]
