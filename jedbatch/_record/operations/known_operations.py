"""Operations that were recorded before: they are recorded again by what they read.

`x @ w`, `x + y` and `x[i]` are most of what a model in plain `jax.numpy` does. Operators take 20 to
40 microseconds through `jax.numpy`, which checks types, broadcasts and promotes, only to come to
the same operations whenever the types are the same. So what an operator came to is kept by the
types of what it reads, and the second time its nodes are recorded at once. Everything unusual takes
the slow path: tracers of other transformations, arrays, and operations on a shared value and a
number.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import take_current_trace

from jedbatch._graph.operations import CallSpec
from jedbatch._record.operations.symbols import RecorderLike, Shared, Symbol, Value
from jedbatch._support.types import Leaf

NUMBERS, WHOLE = (int, float, np.generic), (int, np.integer)
SMALL = 1 << 31  # whole numbers below can be computed with


class Known(NamedTuple):
    """The nodes that an operation was recorded as.

    Attributes:
      nodes: how each is recorded, and what it reads: argument k of the operation as k, and result k
        of the nodes as ~k.
      groups: (position, group of inputs) of the arguments that become inputs.
    """

    nodes: tuple[tuple[CallSpec, tuple[int, ...]], ...]
    groups: tuple[tuple[int, int], ...]


def way_of(recorder: RecorderLike, operation: Hashable, args: Sequence[Any]) -> Any:
    """Returns what operations are equal by that come to the same; None if that is not known.

    That is what is done, and the types of what is read.
    """
    way: list[Any] = [operation]
    for x in args:
        kind = type(x)
        if kind is Value and x._trace is recorder:
            way.append(x.type)
        elif kind is Shared and x._trace is recorder:
            way.append(~x.index)
        elif kind is float:
            way.append(kind)
        elif isinstance(x, NUMBERS) and (not isinstance(x, WHOLE) or -SMALL <= x < SMALL):
            # The type that NumPy, or JAX to a number of Python, has given it, if one has.
            way.append((kind, getattr(x, "dtype", None), getattr(x, "weak_type", None)))
        else:
            return None
    return tuple(way)


def record_again(recorder: RecorderLike, known: Known, args: Sequence[Any]) -> Any:
    """Records an operation as before, and returns the results of its last node."""
    nodes, groups = known
    read: list[Any] = [getattr(x, "index", None) for x in args]
    for k, group in groups:
        read[k] = recorder.new_input(group, args[k])
    first, out = recorder.counter[0], None
    for call_spec, places in nodes:
        recorder.references += [read[k] if k >= 0 else first + ~k for k in places]
        out = recorder.record(call_spec)
    return out


def note_last_node(recorder: RecorderLike, way: Any, args: Sequence[Any], num_inputs: int) -> None:
    """Keeps what an operation was recorded as: the last node, which reads its arguments in order.

    Not if numbers among these became no inputs, of which there were `num_inputs` before.
    """
    numbers = [k for k, x in enumerate(args) if not isinstance(x, Symbol)]
    inputs = range(num_inputs, len(recorder.input_group))
    if len(numbers) == len(inputs):
        call_spec = recorder.registry.call_specs[recorder.call_specs[-1]]
        nodes = ((call_spec, tuple([k for k, x in enumerate(args) if type(x) is not Shared])),)
        groups = tuple([(k, recorder.input_group[i]) for k, i in zip(numbers, inputs, strict=True)])
        recorder.registry.operations[way] = Known(nodes, groups)


def operate(recorder: RecorderLike, how: Hashable, slow_path: Callable, *args: Any) -> Leaf:
    """Records an operator on symbols, and maybe a number, as before, or by `slow_path`."""
    args = recorder.with_constants(args) if recorder.constants else args
    way = way_of(recorder, how, args) if recorder.active else None
    if way is None:
        return slow_path(*args)
    with take_current_trace() as current:
        here = current is recorder
    if not here:
        return slow_path(*args)
    known = recorder.registry.operations.get(way)
    if known is None:
        return _noted(recorder, way, slow_path, args)
    if type(known) is int:
        return Shared(recorder, known)
    out = record_again(recorder, known, args)
    return out[0] if type(out) is list else out


def _noted(recorder: RecorderLike, way: Any, slow_path: Callable, args: Sequence[Any]) -> Leaf:
    """Takes the slow path, and keeps where it led, if that is one shared value, or nodes."""
    kinds = set(map(type, args))
    if Value not in kinds and kinds != {Shared}:
        return slow_path(*args)
    before = len(recorder.call_specs), len(recorder.references), len(recorder.input_group)
    first = recorder.num_values
    out = slow_path(*args)
    if type(out) is Shared:
        recorder.registry.operations[way] = out.index
    elif type(out) is Value and out.index == recorder.num_values - 1 >= first:
        known = _known(recorder, args, first, before)
        if known is not None:
            recorder.registry.operations[way] = known
    return out


def _known(
    recorder: RecorderLike, args: Sequence[Any], first: int, before: tuple[int, int, int]
) -> Known | None:
    """Returns the nodes recorded since then; None if others may follow from the same types.

    Args:
      recorder: the recorder.
      args: of the operation that they are.
      first: the first result of them.
      before: the nodes, references and inputs that there were.
    """
    inputs = range(before[2], len(recorder.input_group))
    numbers = [k for k, x in enumerate(args) if not isinstance(x, Symbol)]
    if len(numbers) != len(inputs):
        return None
    of_value = {x.index: k for k, x in enumerate(args) if type(x) is Value}
    if len(of_value) != sum(type(x) is Value for x in args):  # one that is read twice
        return None
    groups = []
    for k, i in zip(numbers, inputs, strict=True):
        if not _is_number(recorder, i, args[k]):  # it may have decided what was done
            return None
        of_value[~i] = k
        groups.append((k, recorder.input_group[i]))
    made = range(first, recorder.num_values)
    of_value |= {value: ~k for k, value in enumerate(made)}
    read = iter(recorder.references[before[1] :])
    nodes: list[Any] = []
    for node_type in recorder.call_specs[before[0] :]:
        call_spec = recorder.registry.call_specs[node_type]
        places = tuple([of_value.get(next(read)) for _ in range(call_spec.arity)])
        nodes.append((call_spec, places))
    if any(None in places for _, places in nodes) or len(nodes[-1][0].results) != 1:
        return None
    return Known(tuple(nodes), tuple(groups))


def _is_number(recorder: RecorderLike, place: int, number: Any) -> bool:
    """Returns whether an input is this number."""
    kind = recorder.registry.value_types[recorder.registry.groups[recorder.input_group[place]][1]]
    x = recorder.input_value[place]
    return kind.shape == () and bool(np.asarray(x, kind.dtype) == np.asarray(number, kind.dtype))
