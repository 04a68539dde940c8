"""The axes of arrays that have a row for each element of a list.

An axis that is as long as the list is that of the elements, if no other extent equals the length.
Else JAX says which it is: the axis of the operands gets a symbol for its extent, and numbers in the
program that are the length become this symbol too, the fewest with which all shapes are right.
"""

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import export
from jax.extend.core import Var

from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.interpret import inlined, inner_programs
from jedbatch._jaxpr.list_arrays import NOT_FOR_ALL_LENGTHS, length_symbol
from jedbatch._jaxpr.padding.axis_rules import is_elementwise
from jedbatch._jaxpr.symbolic_dims import is_ragged, make_symbol, ragged_axes
from jedbatch._jaxpr.versions import ClosedProgram, Equation
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import AxisSize

MOST_TRIED = 64  # shapes for the operations of a program
Axes = Mapping[int, int]  # by the length of a list, the axis that is as long


def has_extent(value_type: ValueType, extent: int) -> bool:
    """Returns whether a value has an axis of some extent."""
    return not is_ragged(value_type.shape) and extent in value_type.shape


class ListAxes:
    """Finds the axes of lists: by extents, or by symbolic shapes where these do not tell."""

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
            key = node_type, length, *operands
            if key not in self._axes:
                unknown = [None] * len(of.shared)
                program = inlined(operation_of(of).jaxpr)
                self._axes[key] = _axes_of_results(program, [*unknown, *operands], length)
            results = self._axes[key]
            if results is not None:
                return operands, results
        return axes, told


def _axes_of_results(
    closed: ClosedProgram, axes: Sequence[int | None], length: int
) -> tuple[int | None, ...] | None:
    """Returns the axes of results that are as long as a list; None if JAX does not say.

    Args:
      closed: a program.
      axes: those of its arguments.
      length: of the list.
    """
    name = length_symbol(0)
    symbol = make_symbol(name, export.SymbolicScope([f"{name} >= 2"]))
    types = {v: v.aval for v in closed.jaxpr.constvars}
    for v, axis in zip(closed.jaxpr.invars, axes, strict=True):
        shape = [symbol if k == axis else n for k, n in enumerate(v.aval.shape)]
        types[v] = jax.ShapeDtypeStruct(tuple(shape), v.aval.dtype)
    equations = closed.jaxpr.eqns
    tried: list[Iterator[Sequence[Any]]] = []  # for each equation up to one, what is left to try
    for _ in range(MOST_TRIED + len(equations)):
        if len(tried) == len(equations):
            break
        tried.append(_results(equations[len(tried)], types, length, symbol))
        while tried:
            results = next(tried[-1], None)
            if results is not None:
                types.update(zip(equations[len(tried) - 1].outvars, results, strict=True))
                break
            tried.pop()
        if not tried:
            return None
    if len(tried) < len(equations):
        return None
    found = []
    for v in closed.jaxpr.outvars:
        ragged = ragged_axes(types[v].shape) if isinstance(v, Var) else ()
        if len(ragged) > 1:
            return None
        found.append(ragged[0] if ragged else None)
    return tuple(found)


def _results(
    eqn: Equation, types: Mapping[Var, Any], length: int, symbol: AxisSize
) -> Iterator[Sequence[Any]]:
    """Yields the types that results of an operation may have, those with fewest symbols first."""
    operands = [types[v] if isinstance(v, Var) else v.aval for v in eqn.invars]
    ragged = [x for x in operands if is_ragged(x.shape)]
    if not ragged:
        yield [v.aval for v in eqn.outvars]
    if inner_programs(eqn):
        if ragged and len(operands) == 1 and is_elementwise(eqn):
            yield ragged
        return
    leaves, structure = jax.tree.flatten(eqn.params)
    places = [k for k, x in enumerate(leaves) if type(x) is int and x == length]
    for count in range(0 if ragged else 1, len(places) + 1):
        for chosen in itertools.combinations(places, count):
            changed = [symbol if k in chosen else x for k, x in enumerate(leaves)]
            params = jax.tree.unflatten(structure, changed)
            bind = lambda *xs, params=params: eqn.primitive.bind(*xs, **params)  # noqa: E731
            with contextlib.suppress(*NOT_FOR_ALL_LENGTHS):
                yield jax.make_jaxpr(bind)(*operands).out_avals
