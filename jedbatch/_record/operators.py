"""Indexing symbols, and Python's operators on them.

`x[i]`, `x @ w` and `x + y` are most of what a model in plain `jax.numpy` does. Indices known
while recording give inputs, or look-ups whose row is a value, instead of slices of which every
index makes a type of its own.

Operators take 20 to 40 microseconds through `jax.numpy`, which checks types, broadcasts and
promotes, only to come to the same operation whenever the types are the same. So what an operator
came to is remembered by the types of both sides, and the second time a node is recorded at once.
Everything unusual takes the slow path: tracers of other transformations, arrays, and operations on
shared values alone.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import take_current_trace

from jedbatch._graph.operations import CallSpec
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.symbols import (
    RecorderLike,
    Shared,
    Symbol,
    Value,
    frozen,
    is_static,
    row_index,
)
from jedbatch._support.types import Leaf, PyTree

PICK = "pick"  # the operation `value[i]`, if a grouping decides whether i is a value


# --- indexing ---


def index_value(recorder: RecorderLike, value: Value, item: Any) -> Leaf:
    """Static indexing of an array of the instance gives an input, not a node."""
    leaf = recorder.leaves.get(value.index) if recorder.active else None
    number = isinstance(item, int | np.integer) and not isinstance(item, bool)
    if leaf is None or not is_static(item) or is_ragged(value.shape):
        if recorder.locates and number and recorder.active and value.shape:
            row = recorder.input(row_index(item, value.shape[0]))
            return recorder.node(PICK, PICK, _pick, (), [value, row])
        return super(Value, value).__getitem__(item)
    if number:
        if not value.shape:
            raise IndexError("an array with no dimensions cannot be indexed")
        item = row_index(item, value.shape[0])
        shape = value.shape[1:]
    else:
        shape = np.broadcast_to(np.False_, value.shape)[item].shape
    kind = recorder.registry.value_type(shape, value.dtype, value.aval.weak_type)
    return recorder.leaf_value(kind, leaf[0], (*leaf[1], item))


def _pick(_: Any, operands: Sequence[Any]) -> PyTree:
    """A row of a value, by number."""
    return jax.lax.dynamic_index_in_dim(*operands, keepdims=False)


def index_shared(recorder: RecorderLike, value: Shared, item: object) -> Leaf:
    """`table[i]` with a Python int is a row look-up with i as a value."""
    first, further = (item[0], item[1:]) if isinstance(item, tuple) and item else (item, ())
    number = isinstance(first, int | np.integer) and not isinstance(first, bool)
    if not (number and recorder.active and value.shape and is_static(further)):
        return super(Shared, value).__getitem__(item)
    row = recorder.input(row_index(first, value.shape[0]))

    def look_up(shared, operands):
        return shared[0][(operands[0], *further)]

    return recorder.node("row", ("row", frozen(further)), look_up, (value.index,), [row])


# --- operations and operators ---


def known_operation(recorder: RecorderLike, key: Hashable, args: Sequence[Leaf]) -> CallSpec | None:
    """Returns how an operation was recorded before; if it is known, adds the symbols it reads."""
    way: list[Any] = [key]
    reads = []
    for x in args:
        if type(x) is Value and x._trace is recorder:
            way.append(x.type)
            reads.append(x.index)
        elif type(x) is Shared and x._trace is recorder:
            way.append(~x.index)
        else:
            return None
    call_spec = recorder.registry.operations.get(tuple(way)) if recorder.active else None
    if call_spec is not None:
        recorder.references += reads
    return call_spec


def remember_operation(recorder: RecorderLike, key: Hashable, args: Sequence[Leaf]) -> None:
    """Files the last node under its operation and what it reads, if that is symbols only."""
    is_here = all(isinstance(x, Symbol) and x._trace is recorder for x in args)
    if is_here and any(isinstance(x, Value) for x in args):
        kinds = [x.type if isinstance(x, Value) else ~x.index for x in args]
        call_spec = recorder.registry.call_specs[recorder.call_specs[-1]]
        recorder.registry.operations[key, *kinds] = call_spec


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
    way = (slow_path, _described(recorder, a), _described(recorder, b))
    if None in way or (type(a) is Shared and type(b) is not Value) or not recorder.active:
        return slow_path(a, b)
    with take_current_trace() as current:
        here = current is recorder
    if not here:
        return slow_path(a, b)
    recorded = recorder.registry.operators.get(way)
    if recorded is None:
        return _noted(recorder, way, a, b)
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
    return kind if kind is int or kind is float else None


def _noted(recorder: RecorderLike, way: tuple, a: object, b: object) -> Leaf:
    """Takes the slow path, and remembers where it led if that is one node with both sides."""
    num_nodes, num_inputs = len(recorder.call_specs), len(recorder.input_group)
    num_reads = len(recorder.references)
    out = way[0](a, b)
    new_inputs = recorder.input_group[num_inputs:]
    if len(recorder.call_specs) != num_nodes + 1 or type(out) is not Value:
        return out
    recorder.mark_again()  # as if it had come by the fast path
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
    return value_type.shape == () and bool(np.asarray(x) == np.asarray(number, value_type.dtype))
