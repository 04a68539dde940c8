"""Indexing symbols.

Indices known while recording give inputs, or look-ups whose row is a value, instead of slices of
which every index makes a type of its own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._jaxpr.symbolic_dims import are_lengths_told, is_ragged, length_known
from jedbatch._record.identity.arithmetic import read_by_jax
from jedbatch._record.identity.primitives import identity_of_constant
from jedbatch._record.operations.known_operations import (
    WHOLE,
    note_last_node,
    operate,
    record_again,
)
from jedbatch._record.operations.lengths_told import index_with_extents
from jedbatch._record.operations.stacking import Row
from jedbatch._record.operations.symbols import (
    RecorderLike,
    Shared,
    Value,
    frozen,
    is_static,
    row_index,
)
from jedbatch._support.types import Leaf, PyTree

PICK = "pick"  # the operation `value[i]`, where i is a value


def index_value(recorder: RecorderLike, value: Value, item: Any) -> Leaf:
    """Static indexing of an array of the instance gives an input, not a node.

    So are rows of an array whose length Python has been told, which have one type for all lengths.
    """
    item = index_with_extents(recorder, recorder.with_constants(item))
    leaf = recorder.leaves.get(value.index) if recorder.active else None
    number = isinstance(item, WHOLE) and not isinstance(item, bool)
    shape, length = value.shape, None
    if is_ragged(shape) and are_lengths_told() and (number or _is_window(item)):
        length = length_known(shape[0])
        shape = (length or shape[0], *shape[1:])  # the place may be known
    if leaf is not None and is_static(item) and not is_ragged(shape):
        part = _part_of_leaf(recorder, value, leaf, shape, item)
    elif recorder.active and shape and not is_ragged(shape):
        found = BasicIndex.of(shape, item)
        if found is None or not ((number and length) or _differs(recorder, value, found)):
            return _index(recorder, value, item)
        starts = [recorder.input(start) for start in found.starts]
        part = recorder.node(PICK, (PICK, found.form), found.take, (), [value, *starts])
    else:
        return _index(recorder, value, item)
    if number and length:
        recorder.note_row(part, Row(value, row_index(item, length), length))
    elif recorder.stacking is not None and value.index in recorder.stacking.rows:
        row = recorder.stacking.rows[value.index]
        recorder.note_row(part, row._replace(indices=(*row.indices, item)))
    return part


def _index(recorder: RecorderLike, value: Value, item: Any) -> Leaf:
    """Returns what a tracer of JAX gives."""
    of_tracer = super(Value, value).__getitem__
    if is_ragged(value.shape) or not _is_plain(item):
        return of_tracer(item)
    return operate(recorder, ("item", frozen(item)), lambda _: of_tracer(item), value)


def _part_of_leaf(
    recorder: RecorderLike, value: Value, leaf: tuple[int, Any], shape: tuple[int, ...], item: Any
) -> Value:
    """Returns the part of an array of the instance that a static index leads to."""
    if isinstance(item, WHOLE) and not isinstance(item, bool):
        if not shape:
            raise IndexError("an array with no dimensions cannot be indexed")
        item = row_index(item, shape[0])
        shape = shape[1:]
    else:
        shape = np.broadcast_to(np.False_, shape)[item].shape
    kind = recorder.registry.value_type(shape, value.dtype, value.aval.weak_type)
    return recorder.leaf_value(kind, leaf[0], (*leaf[1], item))


def _is_window(item: Any) -> bool:
    """Returns whether an index takes rows between two numbers."""
    first = item[0] if isinstance(item, tuple) and item else item
    if not isinstance(first, slice):
        return False
    start, stop = 0 if first.start is None else first.start, first.stop
    return type(start) is int and type(stop) is int and 0 <= start < stop


class BasicIndex(NamedTuple):
    """Numbers and slices that index an array, with the place of the part as numbers.

    Attributes:
      form: of each axis its extent in the part; None where the axis is left out, by a number.
      cut: the axes that are cut.
      starts: the place, along these.
    """

    form: tuple[int | None, ...]
    cut: tuple[int, ...]
    starts: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...], item: Any) -> "BasicIndex | None":
        """Returns the part that numbers and slices give; None if they give another, or are others.

        Numbers out of bounds are left to JAX.
        """
        items = item if isinstance(item, tuple) else (item,)
        if len(items) > len(shape):
            return None
        form: list[int | None] = list(shape)
        starts = {}
        for axis, (x, extent) in enumerate(zip(items, shape, strict=False)):
            if isinstance(x, WHOLE) and not isinstance(x, bool):
                if not -extent <= x < extent:
                    return None
                starts[axis], form[axis] = row_index(x, extent), None
            elif isinstance(x, slice) and is_static(x):
                start, stop, step = x.indices(extent)
                if step != 1 or stop <= start:
                    return None
                if stop - start < extent:
                    starts[axis], form[axis] = start, stop - start
            else:
                return None
        return BasicIndex(tuple(form), tuple(starts), tuple(starts.values())) if starts else None

    def take(self, _: Any, operands: Sequence[Any]) -> PyTree:
        """Returns the part of the first operand whose place the others are."""
        x, *starts = operands
        where: list[Any] = [0] * x.ndim
        for axis, start in zip(self.cut, starts, strict=True):
            where[axis] = start
        cut = jax.lax.dynamic_slice(x, where, [1 if n is None else n for n in self.form])
        return jax.lax.squeeze(cut, [k for k, n in enumerate(self.form) if n is None])


def _differs(recorder: RecorderLike, value: Value, part: BasicIndex) -> bool:
    """Returns whether the place of a part of some values is data, not part of an operation.

    So it is if values differ in the extents that are cut, as those of lists of many lengths do; and
    from the first part on where types are to stay what they are, whatever comes.
    """
    if recorder.keeps_types:
        return True
    extents = tuple(None if k in part.cut else n for k, n in enumerate(value.shape))
    of = PICK, extents, str(value.dtype), part.form
    place = (*part.starts, *(value.shape[k] for k in part.cut))
    return not recorder.registry.assumptions.holds("variants", of, place, 1)


def index_shared(recorder: RecorderLike, value: Shared, item: object) -> Leaf:
    """`table[i]`, `table[i, j]` or `table[array]` is one look-up with these as values.

    Numbers are those of Python. Arrays hold whole numbers that are known, and differ from instance
    to instance: JAX would compute where they are, operation by operation.
    """
    item = index_with_extents(recorder, recorder.with_constants(item))
    items = item if isinstance(item, tuple) else (item,)
    if recorder.has_numbers:
        items = tuple(map(read_by_jax, items))
    is_place = [_is_place(recorder, x) for x in items]
    count = is_place.index(False) if False in is_place else len(items)
    further = items[count:]
    if not (count and recorder.active and count <= len(value.shape) and is_static(further)):
        return super(Shared, value).__getitem__(item)
    places = [_place(recorder, x, n) for x, n in zip(items[:count], value.shape, strict=False)]
    kinds = tuple([None if isinstance(x, WHOLE) else (x.shape, x.dtype) for x in places])
    known = [x for x in places if not isinstance(x, WHOLE) and type(x) is not Value]
    arrays = tuple(map(identity_of_constant, known))
    varies, shared = recorder.registry.shared_operands.varies, recorder.registry.shared
    if arrays and not varies(("row", kinds), (value.index,), shared, (), arrays):
        return super(Shared, value).__getitem__(item)
    way = ("row", value.index, kinds, frozen(further))
    recorded = recorder.registry.operations.get(way)
    places = [x if isinstance(x, WHOLE) else recorder.symbol(x) for x in places]
    if recorded is not None:
        return record_again(recorder, recorded, places)
    num_inputs = len(recorder.input_group)
    rows = [recorder.input(x) if isinstance(x, WHOLE) else x for x in places]

    def look_up(shared, operands):
        return shared[0][(*operands, *further)]

    out = recorder.node("row", ("row", kinds, way[-1]), look_up, (value.index,), rows)
    note_last_node(recorder, way, places, num_inputs)
    return out


def _place(recorder: RecorderLike, x: Leaf, extent: int) -> Leaf:
    """Returns an index; raises `IndexError` of a number that names no row."""
    if isinstance(x, WHOLE):
        return row_index(x, extent)
    if type(x) is Value and x.index in recorder.elements:
        elements, number = recorder.elements[x.index]
        elements.check_row(number, extent)
    return x


def _is_place(recorder: RecorderLike, x: object) -> bool:
    """Returns whether an index is a whole number, or an array of them that is at hand.

    Numbers may be elements of a sequence.
    """
    if type(x) is Value and x.index in recorder.elements:
        return True
    if isinstance(x, np.ndarray) or id(x) in recorder.computed:
        return x.dtype.kind in "iu"  # type: ignore[attr-defined]
    return isinstance(x, WHOLE) and not isinstance(x, bool)


def _is_plain(item: Any) -> bool:
    """True of indices that are alike if they are equal."""
    if isinstance(item, tuple):
        return all(map(_is_plain, item))
    if isinstance(item, slice):
        return all(map(_is_plain, (item.start, item.stop, item.step)))
    return item is None or item is Ellipsis or type(item) is int
