"""Stacks of rows of arrays of any length, or of what is computed from each row, from the arrays.

    jnp.stack([f(x, k) for k, x in enumerate(xs)])      recorded: f(x0, 0), f(x1, 1), ..., then
                                                        a stack of them
                                                        in its place: jax.vmap(f)(xs, arange(n))

The operations that lead from rows to a part of the stack are compared with those that lead to the
first part, one by one. If they are the same but for rows and numbers, of which each part reads the
next, those of the first part run on whole arrays. The result has one type for all lengths then,
where a stack has one for each.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jedbatch._graph.types import NodeType, operation_of
from jedbatch._jaxpr.symbolic_dims import extents_told
from jedbatch._record.operations.symbols import Shared, Value
from jedbatch._record.types.shared_operands import STACKS

# What makes a stack; of one value JAX may make one by giving it an axis.
MAKES_STACKS = frozenset({*STACKS, "broadcast_in_dim"})
MOST_LEFT_OUT = 2  # rows at either end that a stack may lack, as that of `x[:-1]`
CHUNKS = (16, 256, 4096)  # values in stacks that `jnp.concatenate` makes on its way


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


class Row(NamedTuple):
    """A row of an array of any length, or the part of it that static indices lead to.

    Attributes:
      array: the array.
      number: of the row.
      length: of the array in the instance that is recorded.
      indices: that lead from the row to the part.
    """

    array: Value
    number: int
    length: int
    indices: tuple[Any, ...] = ()

    def of_each(self, step: int, count: int, most: int) -> Any:
        """Returns the same part of a number of rows from this one on.

        None if rows are left out between them, or too many at the ends.

        Args:
          step: from one row to the next; -1 if they are in reverse order.
          count: of the rows.
          most: rows that may be left out at either end.
        """
        if abs(step) != 1:
            return None
        last = self.number + step * (count - 1)
        before, after = min(self.number, last), self.length - 1 - max(self.number, last)
        if max(before, after) > most:
            return None
        rows: Any = self.array
        if before or after:
            rows = rows[before : rows.shape[0] - after]
        rows = rows[::-1] if step < 0 else rows
        for index in self.indices:
            rows = rows[(slice(None), *(index if isinstance(index, tuple) else (index,)))]
        return rows


class Stacking:
    """Finds stacks of rows among what is recorded of an instance.

    Args:
      recorder: of the instance.
      begin: (nodes, references, results) that were recorded before it.

    Attributes:
      rows: what was picked of arrays of which Python has been told the length, by value.
    """

    def __init__(self, recorder: Any, begin: tuple[int, int, int]):
        self._recorder, self._next = recorder, begin
        self.rows: dict[int, Row] = {}
        self._only: dict[int, int] = {}  # 1 for each row that is the only one of its array
        self._makers: dict[int, tuple[int, int, int]] = {}  # (type, first reference, result)
        self._stacks: dict[int, tuple[StackAxis, list[int]]] = {}  # made of arrays, their parts
        self._is_mapping = False

    def note(self, value: Value, row: Row) -> None:
        """Notes that a value is a row."""
        self.rows[value.index] = row
        if row.length == 1:
            self._only[value.index] = 1

    def of_array(self, stack: Value) -> Value | None:
        """Returns a stack computed from arrays; None if it is none of their rows."""
        way = self._way(stack.index)
        if way is None or self._is_mapping:
            return None
        parts = given = self._parts(stack.index, way)
        made_by, new = way, StackAxis(way.axis, True)
        if all(self._way(part) == new for part in parts):  # each was given the axis before
            parts, way = [self._operands(part)[0] for part in parts], new
        steps = self._steps(parts)
        if not any(steps.values()):
            return None
        self._is_mapping = True
        try:
            found = self._arrays_of(steps, len(parts), made_by)
            rows, is_mapped = self._mapped(parts[0], steps, found)
        except NotImplementedError:  # of an operation that JAX cannot map
            return None
        finally:
            self._is_mapping = False
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

    def _steps(self, parts: Sequence[int]) -> dict[int, int]:
        """Returns how far each row and number is from that of the part before, by the first ones.

        It is 0 for all that parts have in common; nothing if they are not alike.
        """
        if len(parts) == 1:
            return self._only
        steps: dict[int, int] = {}
        for k, part in enumerate(parts[1:], 1):
            if not self._are_alike(parts[0], part, k, steps, {}):
                return {}
        return steps

    def _are_alike(
        self, first: int, other: int, number: int, steps: dict[int, int], known: dict[int, int]
    ) -> bool:
        """Returns whether a value is in a part of a stack what another is in the first one.

        Args:
          first: the value in the first part.
          other: that in another.
          number: of that part.
          steps: see `_steps`; those from the first part to the second are added.
          known: values that are, by those in the first part.
        """
        if first in known:
            return known[first] == other
        known[first] = other
        distance = self._distance(first, other)
        if distance is not None:
            if number == 1:
                steps[first] = distance
            return distance == number * steps.get(first, distance + 1)
        mine, its = self._maker(first), self._maker(other)
        if mine is None or its is None or mine[0] != its[0] or mine[2] != its[2] or first in steps:
            return False
        pairs = zip(self._operands(first), self._operands(other), strict=True)
        return all(self._are_alike(a, b, number, steps, known) for a, b in pairs)

    def _distance(self, first: int, other: int) -> int | None:
        """Returns how far a row or number is from another one; None if they are neither."""
        if first == other:
            return 0
        mine, its = self.rows.get(first), self.rows.get(other)
        if mine is not None and its is not None:
            are_of_one = mine.array.index == its.array.index and mine.indices == its.indices
            return its.number - mine.number if are_of_one else None
        recorder = self._recorder
        if first >= 0 or other >= 0 or recorder.input_group[~first] != recorder.input_group[~other]:
            return None
        a, b = recorder.input_value[~first], recorder.input_value[~other]
        if a is b or (type(a) is type(b) and not getattr(a, "ndim", 0) and repr(a) == repr(b)):
            return 0
        return b - a if type(a) is type(b) is int else None

    def _arrays_of(
        self, steps: dict[int, int], count: int, way: StackAxis
    ) -> dict[int, tuple[Any, bool]]:
        """Returns arrays that take the place of rows and numbers; nothing if there are none.

        Args:
          steps: see `_steps`.
          count: of the parts.
          way: how they are stacked.
        """
        most = 0 if count in CHUNKS and not way.is_new else MOST_LEFT_OUT
        told = extents_told(self._recorder)
        moving = {value: step for value, step in steps.items() if step and told}
        arrays: dict[int, Any] = {}
        for value in moving.keys() & self.rows.keys():
            arrays[value] = self.rows[value].of_each(moving[value], count, most)
            if arrays[value] is None:
                return {}
        extent = next((x.shape[0] for x in arrays.values()), told.get(count))
        for value in moving.keys() - self.rows.keys():
            if extent is None:
                return {}
            number = self._recorder.input_value[~value]
            numbers = number + moving[value] * jnp.arange(extent)
            arrays[value] = numbers.astype(self._value(value).aval.dtype)
        return {value: (x, True) for value, x in arrays.items()}

    def _mapped(
        self, value: int, steps: dict[int, int], found: dict[int, tuple[Any, bool]]
    ) -> tuple[Any, bool]:
        """Returns what leads to a value, of all parts at once; and whether it has an axis more.

        Args:
          value: of the first part.
          steps: see `_steps`.
          found: results so far.
        """
        if value in found:
            return found[value]
        maker = self._maker(value)
        if maker is None or value in steps:
            return found.setdefault(value, (self._value(value), False))
        type_id, _, result = maker
        node_type = self._recorder.registry.node_types[type_id]
        operands = [self._mapped(x, steps, found) for x in self._operands(value)]
        if not any(is_mapped for _, is_mapped in operands):
            return found.setdefault(value, (self._value(value), False))
        shared = [Shared(self._recorder, i) for i in node_type.shared]
        axes = [None] * len(shared) + [0 if is_mapped else None for _, is_mapped in operands]
        run = jaxpr_as_fun(operation_of(node_type).jaxpr)
        results = jax.vmap(run, axes)(*shared, *[x for x, _ in operands])
        first = value - result
        found.update((first + k, (x, True)) for k, x in enumerate(results))
        return found[value]

    def _value(self, value: int) -> Value:
        """Returns a value that was recorded, given its number."""
        recorder, maker = self._recorder, self._maker(value)
        if maker is None:
            kind = recorder.registry.groups[recorder.input_group[~value]][1]
        else:
            result = recorder.registry.node_types[maker[0]].results[maker[2]]
            (kind,) = recorder.registry.kinds_of([result])
        return Value(recorder, value, kind)
