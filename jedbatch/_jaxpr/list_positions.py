"""Positions in lists of any length: of all elements, of elements in order, and rows at some."""

from collections.abc import Sequence
from typing import Any

from jedbatch._jaxpr import list_order
from jedbatch._jaxpr.list_expressions import Expression, Expressions
from jedbatch._jaxpr.list_values import CannotRollError, Single, StackedElements
from jedbatch._jaxpr.versions import Equation
from jedbatch._support.types import Dtype


def all_positions(
    expressions: Expressions, shape: tuple[int, ...], axis: int, dtype: Dtype
) -> StackedElements:
    """An array of the positions of elements, which lie along an axis."""
    of_element = (*shape[:axis], *shape[axis + 1 :])
    whole = list_order.positions_like(of_element, dtype)
    expression = Expression(True, (), of_element, dtype, whole=whole)
    return StackedElements(expressions.add(("positions",), expression), axis)


def in_order(
    expressions: Expressions, eqn: Equation, values: Sequence[Any]
) -> list[StackedElements | Single]:
    """The results of a sort of several arrays, or the first in the order of one."""
    name, params = eqn.primitive.name, dict(eqn.params)
    kinds = {(x.axis, x.each) for x in values if isinstance(x, StackedElements)}
    if len(kinds) != 1 or not all(isinstance(x, StackedElements) for x in values):
        raise CannotRollError(f"`{name}` of a row for each element and other things")
    ((axis, each),) = kinds
    ids = [x.id for x in values]
    parameter = "dimension" if name == "sort" else "axis"
    along = params[parameter]
    if along != axis:
        params[parameter] = along - (along > axis and each is None)
        run = lambda *xs: eqn.primitive.bind(*xs, **params)  # noqa: E731
        key = eqn.primitive, expressions.key_of(params)
        return [StackedElements(made, axis, each) for made in expressions.operation(key, run, ids)]
    if each is not None:
        raise CannotRollError(f"`{name}` of elements that are put together")
    is_sort = name == "sort"
    results = []
    for k, v in enumerate(eqn.outvars):
        shape, dtype = v.aval.shape, v.aval.dtype
        of_element = (*shape[:axis], *shape[axis + 1 :]) if is_sort else shape
        whole = list_order.in_order(name, params, k)
        expression = Expression(is_sort, tuple(ids), of_element, dtype, whole=whole)
        made = expressions.add(("in order", name, expressions.key_of(params), k), expression)
        results.append(StackedElements(made, axis) if is_sort else Single(made))
    return results


def rows_at(
    expressions: Expressions, eqn: Equation, values: Sequence[Any]
) -> StackedElements | Single:
    """The rows of elements at positions that are computed, one for each element or others."""
    rows, places = values
    how, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    of_rows, of_places = (x.aval for x in eqn.invars)
    is_stack = isinstance(rows, StackedElements) and rows.each is None
    if not is_stack or of_places.dtype.kind != "i":
        raise CannotRollError("rows of other things are read")
    axis = rows.axis
    whole_rows = (*of_rows.shape[:axis], 1, *of_rows.shape[axis + 1 :])
    reads_rows = how.start_index_map == how.collapsed_slice_dims == (axis,)
    if not reads_rows or tuple(sizes) != whole_rows or how.operand_batching_dims:
        raise CannotRollError("parts of the elements are read")
    if isinstance(places, StackedElements):
        if places != (places.id, 0, None) or len(of_places.shape) != 2:
            raise CannotRollError("rows are read at positions of other elements")
    elif not isinstance(places, Single):
        raise CannotRollError("rows are read at a position of one element")
    shape, dtype = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype
    batch = tuple(k for k in range(len(shape)) if k not in how.offset_dims)
    ids, is_listed = (rows.id, places.id), isinstance(places, StackedElements)
    mode, fill = eqn.params["mode"], eqn.params["fill_value"]
    key = "rows at", axis, batch, str(mode), repr(fill), is_listed
    whole = list_order.rows_at(mode, fill, None if is_listed else batch)
    of_element = tuple(n for k, n in enumerate(shape) if not is_listed or k not in batch)
    expression = Expression(is_listed, ids, of_element, dtype, whole=whole)
    made = expressions.add(key, expression)
    return StackedElements(made, *batch) if is_listed else Single(made)
