"""Indexing symbols, and Python's operators on them.

`x[i]`, `x @ w` and `x + y` are most of what a model in plain `jax.numpy` does. Indices known
while recording give inputs, or look-ups whose row is a value, instead of slices of which every
index makes a type of its own.

Operators take 20 to 40 microseconds through `jax.numpy`, which checks types, broadcasts and
promotes, only to come to the same operation whenever the types are the same. So what an operator
came to is remembered by the types of both sides, and the second time a node is recorded at once.
Everything unusual takes the slow path: tracers of other transformations, arrays, and operations on
a shared value and a number.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import take_current_trace

from jedbatch._graph.operations import CallSpec
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.identity.arithmetic import read_by_jax
from jedbatch._record.identity.primitives import identity_of_constant
from jedbatch._record.operations.symbols import (
    RecorderLike,
    Shared,
    Symbol,
    Value,
    frozen,
    is_static,
    row_index,
)
from jedbatch._support.types import Leaf, PyTree

NUMBERS, WHOLE = (int, float, np.generic), (int, np.integer)
SMALL = 1 << 31  # whole numbers below can be computed with
PICK = "pick"  # the operation `value[i]`, where i is a value


# --- indexing ---


def index_value(recorder: RecorderLike, value: Value, item: Any) -> Leaf:
    """Static indexing of an array of the instance gives an input, not a node."""
    item = recorder.with_constants(item)
    leaf = recorder.leaves.get(value.index) if recorder.active else None
    number = isinstance(item, WHOLE) and not isinstance(item, bool)
    if leaf is None or not is_static(item) or is_ragged(value.shape):
        if recorder.active and value.shape and not is_ragged(value.shape):
            part = BasicIndex.of(value.shape, item)
            if part is not None and _differs(recorder, value, part):
                starts = [recorder.input(start) for start in part.starts]
                return recorder.node(PICK, (PICK, part.form), part.take, (), [value, *starts])
        of_tracer = super(Value, value).__getitem__
        if not _is_plain(item):
            return of_tracer(item)
        return step_by_step(recorder, ("item", frozen(item)), lambda _: of_tracer(item), value)
    if number:
        if not value.shape:
            raise IndexError("an array with no dimensions cannot be indexed")
        item = row_index(item, value.shape[0])
        shape = value.shape[1:]
    else:
        shape = np.broadcast_to(np.False_, value.shape)[item].shape
    kind = recorder.registry.value_type(shape, value.dtype, value.aval.weak_type)
    return recorder.leaf_value(kind, leaf[0], (*leaf[1], item))


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
    item = recorder.with_constants(item)
    items = item if isinstance(item, tuple) else (item,)
    if recorder.stacking is not None:
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
    if arrays and not recorder.registry.varies(("row", kinds), (value.index,), (), arrays):
        return super(Shared, value).__getitem__(item)
    way = ("row", value.index, kinds, frozen(further))
    recorded = recorder.registry.operators.get(way)
    if recorded is None:
        rows = [recorder.input(x) if isinstance(x, WHOLE) else recorder.symbol(x) for x in places]

        def look_up(shared, operands):
            return shared[0][(*operands, *further)]

        out = recorder.node("row", ("row", kinds, way[-1]), look_up, (value.index,), rows)
        call_spec = recorder.registry.call_specs[recorder.call_specs[-1]]
        of_numbers = [r.index for r, kind in zip(rows, kinds, strict=True) if kind is None]
        group = recorder.input_group[~of_numbers[0]] if of_numbers else None
        recorder.registry.operators[way] = Known(call_spec, (0,) * count, group)
        return out
    recorder.references += [
        recorder.new_input(recorded.group, x) if isinstance(x, WHOLE) else recorder.symbol(x).index
        for x in places
    ]
    return recorder.record(recorded.call_spec)


def _place(recorder: RecorderLike, x: Leaf, extent: int) -> Leaf:
    """Returns an index; raises `IndexError` of a number that names no row."""
    if isinstance(x, WHOLE):
        return row_index(x, extent)
    if recorder.stacking is not None and recorder.stacking.is_element(x):
        recorder.stacking.check_row(x, extent)
    return x


def _is_place(recorder: RecorderLike, x: object) -> bool:
    """Returns whether an index is a whole number, or an array of them that is at hand.

    Numbers may be elements of a sequence.
    """
    if recorder.stacking is not None and recorder.stacking.is_element(x):
        return True
    if isinstance(x, np.ndarray) or id(x) in recorder.computed:
        return x.dtype.kind in "iu"  # type: ignore[attr-defined]
    return isinstance(x, WHOLE) and not isinstance(x, bool)


class StaticSlice(NamedTuple):
    """A slice of an array, with its place as numbers.

    Attributes:
      cut: the axes that are cut.
      sizes: extents of the result.
      call: does it, given the array and the place.
      starts: the place, along the axes that are cut.
    """

    cut: tuple[int, ...]
    sizes: tuple[int, ...]
    call: Callable
    starts: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], params: Mapping[str, Any]) -> "StaticSlice":
        """Returns JAX's primitive on an array of a shape."""
        starts = params["start_indices"]
        sizes = tuple(b - a for a, b in zip(starts, params["limit_indices"], strict=True))
        cut = tuple(k for k, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size)

        def call(x, *starts):
            if cut == (0,) and sizes[0] == 1:
                return [x[starts[0]][None]]
            where: list[Any] = [0] * x.ndim
            for k, start in zip(cut, starts, strict=True):
                where[k] = start
            return [jax.lax.dynamic_slice(x, where, sizes)]

        return StaticSlice(cut, sizes, call, tuple([starts[k] for k in cut]))

    @property
    def key(self) -> Hashable:
        """Returns the key that it is told apart by, whatever its place."""
        return "slice", self.cut, self.sizes

    @property
    def is_row(self) -> bool:
        """Returns whether it is one row of a table, or one element of a vector."""
        return self.cut == (0,) and self.sizes[0] == 1 and len(self.sizes) <= 2


def _is_plain(item: Any) -> bool:
    """True of indices that are alike if they are equal."""
    if isinstance(item, tuple):
        return all(map(_is_plain, item))
    if isinstance(item, slice):
        return all(map(_is_plain, (item.start, item.stop, item.step)))
    return item is None or item is Ellipsis or type(item) is int


# --- operations and operators ---


def known_operation(recorder: RecorderLike, key: Hashable, args: Sequence[Leaf]) -> CallSpec | None:
    """Returns how an operation was recorded before; if it is known, adds what it reads."""
    way: list[Any] = [key]
    reads: list[Any] = []
    numbers = []
    for x in args:
        kind = type(x)
        if kind is Value and x._trace is recorder:
            way.append(x.type)
            reads.append(x.index)
        elif kind is Shared and x._trace is recorder:
            way.append(~x.index)
        elif isinstance(x, NUMBERS) and (not isinstance(x, WHOLE) or -SMALL <= x < SMALL):
            way.append((kind, *_kind_of_number(x)))
            numbers.append((len(reads), x))
            reads.append(None)
        else:
            return None
    known = recorder.registry.operations.get(tuple(way)) if recorder.active else None
    if known is None:
        return None
    call_spec, groups = known
    for (position, number), group in zip(numbers, groups, strict=True):
        reads[position] = recorder.new_input(group, number)
    recorder.references += reads
    return call_spec


def remember_operation(
    recorder: RecorderLike, key: Hashable, args: Sequence[Leaf], num_inputs: int
) -> None:
    """Files the last node under its operation and what it reads: symbols, and numbers.

    There were `num_inputs` inputs before these numbers became some.
    """
    kinds: list[Any] = []
    for x in args:
        if isinstance(x, Symbol) and x._trace is recorder:
            kinds.append(x.type if isinstance(x, Value) else ~x.index)
        elif isinstance(x, NUMBERS):
            kinds.append((type(x), *_kind_of_number(x)))
        else:
            return
    groups = tuple(recorder.input_group[num_inputs:])
    if len(groups) == sum(isinstance(k, tuple) for k in kinds) and any(
        isinstance(x, Value) for x in args
    ):
        call_spec = recorder.registry.call_specs[recorder.call_specs[-1]]
        recorder.registry.operations[key, *kinds] = call_spec, groups


def _kind_of_number(x: Any) -> tuple[Any, Any]:
    """The type that NumPy, or JAX to a number of Python, has given a number, if one has."""
    return getattr(x, "dtype", None), getattr(x, "weak_type", None)


def step_by_step(recorder: RecorderLike, how: Hashable, slow_path: Callable, x: "Value") -> Leaf:
    """Records what is done to one value, as recorded before, or by `slow_path`.

    It is known from then on if it comes to nodes that read the result of the one before.
    """
    if type(x) is not Value or not recorder.active or is_ragged(x.shape):
        return slow_path(x)
    with take_current_trace() as current:
        here = current is recorder
    if not here:
        return slow_path(x)
    way = (how, x.type)
    chain = recorder.registry.chains.get(way)
    if chain is not None:
        out: Leaf = x
        for call_spec in chain:
            recorder.references.append(out.index)
            out = recorder.record(call_spec)
            out = out[0] if type(out) is list else out
        return out
    before = len(recorder.call_specs), len(recorder.references), len(recorder.input_group)
    first = recorder.num_values
    out = slow_path(x)
    nodes = recorder.call_specs[before[0] :]
    reads = [x.index, *range(first, recorder.num_values - 1)]
    if type(out) is Value and nodes and len(recorder.input_group) == before[2]:
        is_chain = recorder.num_values - first == len(nodes) and out.index == first + len(nodes) - 1
        if is_chain and recorder.references[before[1] :] == reads:
            all_call_specs = recorder.registry.call_specs
            recorder.registry.chains[way] = [all_call_specs[c] for c in nodes]
    return out


class Known(NamedTuple):
    """The recording of an operator.

    Attributes:
      call_spec: the kind of the one node it records.
      reads: the sides that are its operands, 0 or 1 each.
      group: of the inputs made of the other side, if that is a Python number.
    """

    call_spec: CallSpec
    reads: tuple[int, ...]
    group: int | None


def operate(recorder: RecorderLike, slow_path: Callable, a: object, b: object) -> Leaf:
    """An operator on a symbol `a` and anything: as recorded before, or by `slow_path`."""
    b = recorder.with_constants(b)
    way = (slow_path, _described(recorder, a), _described(recorder, b))
    of_numbers = type(a) is Shared and type(b) not in (Value, Shared)
    if None in way or of_numbers or not recorder.active:
        return slow_path(a, b)
    with take_current_trace() as current:
        here = current is recorder
    if not here:
        return slow_path(a, b)
    recorded = recorder.registry.operators.get(way)
    if recorded is None:
        return _noted(recorder, way, a, b)
    if type(recorded) is int:
        return Shared(recorder, recorded)
    sides = [getattr(a, "index", None), getattr(b, "index", None)]
    if recorded.group is not None:
        sides[1] = recorder.new_input(recorded.group, b)
    recorder.references += [sides[side] for side in recorded.reads]
    out = recorder.record(recorded.call_spec)
    return out[0] if type(out) is list else out


def _described(recorder: RecorderLike, x: Leaf) -> Any:
    """Returns what the result of an operator depends on; None if it needs a closer look."""
    kind = type(x)
    if kind is Value:
        return x.type if x._trace is recorder else None
    if kind is Shared:
        return ~x.index if x._trace is recorder else None
    return kind if kind is int or kind is float or issubclass(kind, np.generic) else None


def _noted(recorder: RecorderLike, way: tuple, a: object, b: object) -> Leaf:
    """Takes the slow path, and remembers where it led.

    That is a shared value, or one node with both sides.
    """
    num_nodes, num_inputs = len(recorder.call_specs), len(recorder.input_group)
    num_reads = len(recorder.references)
    out = way[0](a, b)
    new_inputs = recorder.input_group[num_inputs:]
    if type(a) is Shared and type(out) is Shared:
        recorder.registry.operators[way] = out.index
        return out
    if len(recorder.call_specs) != num_nodes + 1 or type(out) is not Value:
        return out
    sides = [getattr(a, "index", None), getattr(b, "index", None)]
    group = None
    if sides[1] is None:  # a number; it may have decided what was done
        if len(new_inputs) != 1 or not _same_number(recorder, b):
            return out
        sides[1], group = -1 - num_inputs, new_inputs[0]
    elif new_inputs:
        return out
    reads = recorder.references[num_reads:]
    call_spec = recorder.registry.call_specs[recorder.call_specs[-1]]
    positions = [k for k, x in enumerate((a, b)) if type(x) is not Shared]
    if len(call_spec.results) != 1 or sides[0] == sides[1] or len(reads) != len(positions):
        return out
    if all(r in [sides[k] for k in positions] for r in reads):
        order = tuple([k for r in reads for k in positions if sides[k] == r])
        recorder.registry.operators[way] = Known(call_spec, order, group)
    return out


def _same_number(recorder: RecorderLike, number: Any) -> bool:
    """Returns whether the last input is this number."""
    _, kind, *_ = recorder.registry.groups[recorder.input_group[-1]]
    value_type = recorder.registry.value_types[kind]
    x = recorder.input_value[-1]
    if value_type.shape != ():
        return False
    return bool(np.asarray(x, value_type.dtype) == np.asarray(number, value_type.dtype))
