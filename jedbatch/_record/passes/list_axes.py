"""The axes of arrays that have a row for each element of a list."""

from collections.abc import Hashable, Mapping, Sequence

from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.interpret import inlined
from jedbatch._jaxpr.list_expressions import Expressions
from jedbatch._jaxpr.rolling import CannotRollError, Roller
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.types.registry import Registry

Axes = Mapping[int, int]  # by the length of a list, the axis that is as long


def has_extent(value_type: ValueType, extent: int) -> bool:
    """Returns whether a value has an axis of some extent."""
    return not is_ragged(value_type.shape) and extent in value_type.shape


class ListAxes:
    """Finds the axes of lists: by extents, or by rolling up programs where these do not tell."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._axes: dict[Hashable, tuple[int | None, ...] | None] = {}

    def find(
        self, node_type: int, operands: Sequence[Axes], inputs: Sequence[int]
    ) -> tuple[Sequence[Axes], Sequence[Axes]]:
        """Returns along which axes operands and results have a row for each element of a list.

        Args:
          node_type: the id of the type.
          operands: along which its operands are known to have.
          inputs: operands, by position, that may have a row for each element along their first
            axis, such as masks.
        """
        of = self._registry.node_types[node_type]
        lengths = {n for axes in operands for n in axes}
        along = {axis for axes in operands for axis in axes.values()}
        if of.name == "concatenate" and all(operands) and len(along) == 1:  # lists end to end
            (common,) = along
            return operands, [{t.shape[common]: common} for t in of.results]
        given: list[dict[int, int]] = [dict(axes) for axes in operands]
        made: list[dict[int, int]] = [{} for _ in of.results]
        for n in lengths:
            known = [axes.get(n) for axes in operands]
            masks = [k for k in inputs if of.operands[k].shape[0] == n]
            for values, found in zip(
                (given, made), self._along(node_type, known, n, masks), strict=True
            ):
                for axes, axis in zip(values, found, strict=True):
                    if axis is not None:
                        axes[n] = axis
        return given, made

    def _along(
        self,
        node_type: int,
        axes: Sequence[int | None],
        length: int,
        inputs: Sequence[int],
    ) -> tuple[Sequence[int | None], Sequence[int | None]]:
        """Returns along which axes operands and results have a row for each element of one list.

        Args:
          node_type: the id of the type.
          axes: along which its operands are known to have; None of the others.
          length: of the list.
          inputs: operands, by position, that may have such rows along their first axis.
        """
        of = self._registry.node_types[node_type]
        told = [t.shape.index(length) if has_extent(t, length) else None for t in of.results]
        if not inputs and not any(axis is not None for axis in told):
            return axes, told
        shapes = [t.shape for t in of.operands]
        shapes += [self._registry.shared[s].aval.shape for s in of.shared]
        if sum(s.count(length) for s in shapes) == sum(axis is not None for axis in axes):
            return axes, told
        with_rows = [0 if k in inputs else axis for k, axis in enumerate(axes)]
        for operands in (axes, with_rows) if inputs else (axes,):
            roles: list[tuple] = [("input", k) for k in range(len(of.shared))]
            roles += [
                ("input", len(of.shared) + k) if axis is None else ("rows", k, axis)
                for k, axis in enumerate(operands)
            ]
            results = self.of_results(node_type, roles, (length,))
            if results is not None:
                return operands, results
        return axes, told

    def of_results(
        self, node_type: int, roles: list[tuple], lengths: tuple[int, ...]
    ) -> tuple[int | None, ...] | None:
        """Returns the axes of results, by rolling up the program; None if it cannot be."""
        key = node_type, *roles
        if key not in self._axes:
            program = inlined(operation_of(self._registry.node_types[node_type]).jaxpr)
            try:
                expressions = Expressions(self._registry.keys.params_key)
                self._axes[key] = tuple(Roller(expressions, program, roles, lengths, False).axes())
            except CannotRollError:
                self._axes[key] = None
        return self._axes[key]
