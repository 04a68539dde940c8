"""The axes of arrays that have a row for each element of a list."""

from collections.abc import Hashable, Sequence

from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.interpret import inlined
from jedbatch._jaxpr.list_expressions import Expressions
from jedbatch._jaxpr.rolling import CannotRollError, Roller
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.types.registry import Registry


def has_extent(value_type: ValueType, extent: int) -> bool:
    """Returns whether a value has an axis of some extent."""
    return not is_ragged(value_type.shape) and extent in value_type.shape


class ListAxes:
    """Finds the axes of lists: by extents, or by rolling up programs where these do not tell."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._axes: dict[Hashable, tuple[int | None, ...] | None] = {}

    def find(
        self,
        node_type: int,
        axes: Sequence[int | None],
        length: int,
        inputs: Sequence[int],
    ) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Returns along which axes operands and results have a row for each element of a list.

        Args:
          node_type: the id of the type.
          axes: along which its operands are known to have; None of the others.
          length: of the list.
          inputs: operands, by position, that may have a row for each element along their first
            axis, such as masks.
        """
        of = self._registry.node_types[node_type]
        told = tuple(t.shape.index(length) if has_extent(t, length) else None for t in of.results)
        if not inputs and not any(axis is not None for axis in told):
            return tuple(axes), told
        shapes = [t.shape for t in of.operands]
        shapes += [self._registry.shared[s].aval.shape for s in of.shared]
        if sum(s.count(length) for s in shapes) == sum(axis is not None for axis in axes):
            return tuple(axes), told
        as_they_are = tuple(axes)
        with_rows = tuple([0 if k in inputs else axis for k, axis in enumerate(axes)])
        for operands in dict.fromkeys((as_they_are, with_rows)):
            roles: list[tuple] = [("input", k) for k in range(len(of.shared))]
            roles += [
                ("input", len(of.shared) + k) if axis is None else ("rows", k, axis)
                for k, axis in enumerate(operands)
            ]
            results = self.of_results(node_type, roles, length)
            if results is not None:
                return operands, results
        return as_they_are, told

    def of_results(
        self, node_type: int, roles: list[tuple], length: int
    ) -> tuple[int | None, ...] | None:
        """Returns the axes of results, by rolling up the program; None if it cannot be."""
        key = node_type, *roles
        if key not in self._axes:
            program = inlined(operation_of(self._registry.node_types[node_type]).jaxpr)
            try:
                expressions = Expressions(self._registry.keys.params_key)
                self._axes[key] = tuple(
                    Roller(expressions, program, roles, (length,), False).axes()
                )
            except CannotRollError:
                self._axes[key] = None
        return self._axes[key]
