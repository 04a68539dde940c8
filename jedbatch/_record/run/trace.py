"""Recording a minibatch: every instance of it as a graph.

The recorder writes flat lists of what happens, instance after instance. Here they become one
`Graph` of all instances, in NumPy.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._graph.analysis import sorted_by
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputColumns, InputRows
from jedbatch._graph.paths import int64_of, pointers
from jedbatch._graph.prune import without_unread
from jedbatch._graph.record import Record
from jedbatch._graph.rewrite import with_inputs
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.storage import is_key
from jedbatch._record.cell import recording
from jedbatch._record.instances.arrays import flatten, is_array
from jedbatch._record.operations.failures import note_instance
from jedbatch._record.operations.symbols import Value
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.run.recursion import deeply
from jedbatch._record.types.registry import SINGLE, Registry
from jedbatch._support.guards import until_guards_hold
from jedbatch._support.native import core
from jedbatch._support.restored import Restored

RECORDS_CALLS = True  # see `_support.frames`
MAX_RECORDINGS = 8  # of a minibatch, to record all in one way; classes made each time prevent it


class Instances(NamedTuple):
    """Instances to record.

    Attributes:
      mapped: the mapped arguments of each.
      arrays: the arrays in them, in order.
      numbers: of the instances in the minibatch, for messages.
      types: called with the place of an instance that is about to be recorded, gives (shape, dtype,
        weak) of its arrays; None, or given none, if extents are to be known.
      begun: called with the recorder and the place of an instance that has begun; or None.
    """

    mapped: Sequence[Sequence[Any]]
    arrays: Sequence[Sequence[Any]]
    numbers: Sequence[int]
    types: Callable[[int], Any] | None = None
    begun: Callable[[Recorder, int], None] | None = None

    def single(self, place: int) -> "Instances":
        """Returns one of them."""
        only, types = slice(place, place + 1), self.types
        of_it = types and (lambda _: types(place))
        begun = self.begun
        note = begun and (lambda recorder, _: begun(recorder, place))
        mapped, arrays, numbers = self.mapped[only], self.arrays[only], self.numbers[only]
        return Instances(mapped, arrays, numbers, of_it, note)


class Traced(NamedTuple):
    """A recorded minibatch.

    Attributes:
      graph: of the instances, a node for each operation and each call of a cell.
      forms: (structure, types of its leaves) of the result of each instance.
      caching: whether what each was recorded as may be kept for later calls.
      tracers: of outer transformations that the function closes over.
    """

    graph: Graph
    forms: list[tuple[Any, tuple]]
    caching: list[bool]
    tracers: list[Any]

    def records(self, passes: Sequence[Callable[[Graph], Graph]] = ()) -> list[Record]:
        """Returns the record of each instance, after passes over the graph of all."""
        graph = functools.reduce(lambda graph, make: make(graph), passes, self.graph)
        return Record.of_all(graph, self.forms)


def trace(
    fn: Callable,
    registry: Registry,
    instances: Instances,
    arrange: Callable,
    read: Callable | None = None,
    noting: Callable[[], None] | None = None,
) -> Traced:
    """Runs `fn` on symbolic values, once per instance.

    Args:
      fn: the function of one instance.
      registry: where types are interned.
      instances: to record.
      arrange: makes the arguments of `fn` from the shared and the mapped ones.
      read: called with a symbol whose value is needed; by default that is an error.
      noting: is called for each operation outside of cells; or None.

    Returns:
      The graph of the instances, and what else is known of them.
    """
    record = functools.partial(_record, fn, registry, instances, arrange, read, noting)
    looks = itertools.count()

    def assumed() -> int:
        """The operands: where they change, the same is recorded in two ways."""
        more = () if next(looks) > 2 * MAX_RECORDINGS else ("numbers", "variants")
        return registry.assumptions.version("shared", *more)

    recorded = until_guards_hold(lambda: deeply(record), assumed)
    recorder, outputs, forms, caching, ends = recorded
    columns = recorder.written
    flat = np.fromiter(itertools.chain.from_iterable(ends), np.int64)
    try:
        graph = finish(registry, columns, outputs, flat.reshape(len(ends), -1).T)
    except OverflowError as error:
        raise _overflow(registry, columns, ends, instances.numbers) or error from None
    if recorder.has_unread:
        graph = with_inputs(without_unread(graph))
    return Traced(graph, forms, caching, recorder.tracers)


def _overflow(
    registry: Registry,
    columns: Sequence[list],
    ends: Sequence[tuple[int, ...]],
    numbers: Sequence[int],
) -> OverflowError | None:
    """Returns the error that names a number that does not fit; None if there is none."""
    groups, values = columns[2:]
    for number, (begin, end) in zip(numbers, itertools.pairwise(e[2] for e in ends), strict=True):
        for group, value in zip(groups[begin:end], values[begin:end], strict=True):
            dtype = registry.value_types[registry.groups[group][1]].dtype
            if dtype != np.int32 or not isinstance(value, int | np.integer):
                continue
            if not -(2**31) <= value < 2**31:
                return OverflowError(
                    f"instance {number} has the number {value}, which does not fit the {dtype} "
                    "that JAX computes in; use smaller numbers, or "
                    "`jax.config.update('jax_enable_x64', True)`."
                )
    return None


def _record(fn, registry, instances, arrange, read, noting):
    """(recorder, outputs, form of each result, whether to keep each, where each instance ends)."""
    caller = trace_of_caller()
    recorder = Recorder(registry, caller, read, noting=noting)
    registry.slow_calls.clear()
    registry.num_repeated = 0
    end = ending(recorder)
    with Restored(end), Restored(end), set_current_trace(caller), set_current_trace(recorder):
        begin_recording(recorder)
        recorded = _record_all(fn, recorder, instances, arrange)
        registry.num_recorded = len(recorder.call_specs)
        return recorder, *recorded


def _record_all(fn, recorder, instances, arrange):
    outputs: list[int] = []
    forms: list[tuple[Any, tuple]] = []
    caching = []
    ends: list[tuple[int, ...]] = [(0, 0, 0, 0)]
    shared = recorder.share()
    calls, references, groups = recorder.call_specs, recorder.references, recorder.input_group
    _, arrays, numbers, types, begun = instances
    for i, instance in enumerate(instances.mapped):
        mapped = recorder.begin(instance, arrays[i], types and types(i))
        if begun is not None:
            begun(recorder, i)
        try:
            result = fn(*arrange(shared, mapped))
            if type(result) is Value:
                structure, results = SINGLE, [recorder.output(result)]
            else:
                leaves, structure = flatten(result, "the result of the function")
                results = [recorder.output(leaf) for leaf in leaves]
        except Exception as error:
            note_instance(error, numbers[i], instance, arrays[i])
            raise
        outputs += [index for index, _ in results]
        form = structure, tuple([kind for _, kind in results])
        forms.append(forms[-1] if forms and forms[-1] == form else form)  # told apart by their ids
        caching.append(recorder.caching)
        ends.append((len(calls), len(references), len(groups), len(outputs)))
    return outputs, forms, caching, ends


def trace_of_caller() -> Any:
    """JAX's trace around what is recorded next.

    Raises:
      RuntimeError: another greenlet records in this thread.
    """
    with take_current_trace() as trace:
        caller = trace
    if isinstance(caller, Recorder) and recording.recorder is not caller:
        raise RuntimeError(
            "a batched function or a lazy scope of another greenlet is being recorded in this "
            "thread, and JAX keeps its traces per thread; expected one greenlet to record at a "
            "time. Do not wait for others (`gevent.sleep`, I/O) inside of batched functions and "
            "lazy scopes, or let them take turns by a lock."
        )
    return caller


def begin_recording(recorder: Recorder) -> None:
    """From now on cells that are called in this thread are recorded."""
    recording.recorder = recorder


def ending(recorder: Recorder) -> Callable[[], None]:
    """Undoes `begin_recording`, for `Restored`; to be called before it."""
    before = recording.recorder

    def end() -> None:
        recording.recorder = before
        recorder.forget()

    return end


def finish(
    registry: Registry, columns: Sequence[list], outputs: list[int], ends: np.ndarray
) -> Graph:
    """Returns one graph of all instances from the lists of a recorder."""
    node_ptr, _, _, output_ptr = ends
    compiled = core()
    write = _write if compiled is None else functools.partial(_write_compiled, compiled)
    recorded, references, group = map(int64_of, columns[:3])
    arrays = recorded, references, group, int64_of(outputs)
    node_type, operand_ptr, operand, result, kept, kept_ptr, cuts = write(registry, arrays, ends)
    inputs = grouped_inputs(registry, columns[3], kept, group[kept], cuts)
    columns_of_nodes = registry.types, node_type, operand_ptr, operand, inputs, result
    return Graph(*columns_of_nodes, node_ptr, kept_ptr, output_ptr)


def _write(registry: Registry, arrays: Sequence[np.ndarray], ends: np.ndarray) -> tuple[Any, ...]:
    """Returns columns of a graph from those of a recorder.

    Inputs that are not read are dropped, and what is read the same way is grouped, by instance.

    Returns:
      (types of nodes, pointers to operands, operands, outputs; the inputs that are kept, in order,
      pointers to those of each instance, and where the instance or the group changes).
    """
    node_type, operand, group, result = arrays
    node_ptr, _, input_ptr, _ = ends
    owner_of = np.repeat(np.arange(len(input_ptr) - 1), np.diff(input_ptr))
    kept = np.flatnonzero(inputs_read((operand, result), len(group)))
    owner = owner_of[kept]
    groups = np.flatnonzero(np.bincount(group[kept]))
    if len(groups) > 1:
        number = np.zeros(len(registry.groups), np.int64)
        number[groups] = np.arange(len(groups))
        key = owner * len(groups) + number[group[kept]]
        _, order = sorted_by(key, len(groups) * (len(node_ptr) - 1))
        kept, owner = kept[order], owner[order]
    place = np.zeros(len(group), np.int64)
    place[kept] = np.arange(len(kept))
    renumber_inputs((operand, result), place)
    types, *references = (x.astype(np.int32) for x in (node_type, operand, result))
    kept_ptr = pointers(np.bincount(owner, minlength=len(node_ptr) - 1))
    operand_ptr = pointers(registry.arity[node_type])
    return types, operand_ptr, *references, kept, kept_ptr, _cuts(owner, group[kept])


def _write_compiled(
    compiled: Any, registry: Registry, arrays: Sequence[np.ndarray], ends: np.ndarray
) -> tuple[Any, ...]:
    """Returns the same by compiled code."""
    call_spec, reference, group, result = arrays
    node_ptr, _, input_ptr, _ = ends
    num_nodes, num_inputs = len(call_spec), len(group)
    node_type, operand_ptr = np.empty(num_nodes, np.int32), np.empty(num_nodes + 1, np.int64)
    operand, kept_result = (np.empty(len(x), np.int32) for x in (reference, result))
    kept, cuts = np.empty((2, num_inputs), np.int64)
    kept_ptr, first_input = np.empty(len(node_ptr), np.int64), np.ascontiguousarray(input_ptr)
    recorded = call_spec, reference, registry.arity, group, result, first_input
    written = node_type, operand_ptr, operand, kept_result, kept, kept_ptr, cuts
    num_kept, num_cuts = compiled.write_graph(len(registry.groups), (*recorded, *written))
    bounds = [*cuts[:num_cuts].tolist(), num_kept]
    return node_type, operand_ptr, operand, kept_result, kept[:num_kept], kept_ptr, bounds


def inputs_read(references: Sequence[np.ndarray], num_inputs: int) -> np.ndarray:
    """Returns bool[I], the inputs that references, int64[...], name as `-1 - i`."""
    used = np.zeros(num_inputs, bool)
    for read in references:
        used[-1 - read[read < 0]] = True
    return used


def renumber_inputs(references: Sequence[np.ndarray], place: np.ndarray) -> None:
    """Makes references to inputs name their places, int64[I]."""
    for read in references:
        negative = read < 0
        read[negative] = -1 - place[-1 - read[negative]]


def cut_inputs(registry, values, kept, owner, group) -> Iterator[InputRows]:
    """Inputs in order, cut where the instance or the group changes.

    `values` has those of all inputs, of which some are `kept`; `owner` and `group` belong to these.
    """
    yield from _rows_between(registry, values, kept, group, _cuts(owner, group))


def _cuts(owner: np.ndarray, group: np.ndarray) -> list[int]:
    """Returns where the instance or the group changes, the beginning and the end as well."""
    if not len(owner):
        return [0]
    change = np.flatnonzero((np.diff(group) != 0) | (np.diff(owner) != 0)) + 1
    return [0, *change.tolist(), len(owner)]


def grouped_inputs(
    registry: Registry, values: list[Any], kept: np.ndarray, group: np.ndarray, cuts: list[int]
) -> Sequence[InputRows]:
    """Returns what `_rows_between` yields, as columns if graphs hold all of the values."""
    numbers = group[cuts[:-1]]
    groups = list(dict.fromkeys(numbers.tolist()))
    if not groups or any(registry.groups[g][0] != "value" for g in groups):
        return tuple(_rows_between(registry, values, kept, group, cuts))
    types = [registry.value_types[registry.groups[g][1]] for g in groups]
    place = np.zeros(len(registry.groups), np.int64)
    place[groups] = np.arange(len(groups))
    places = [kept[group == g] for g in groups] if len(groups) > 1 else [kept]
    rows = [_values_at(values, own, kind) for own, kind in zip(places, types, strict=True)]
    return InputColumns(types, rows, place[numbers], np.array(cuts, np.int64))


def _values_at(values: list[Any], places: np.ndarray, value_type: ValueType) -> np.ndarray:
    """Returns some of the items of a list, all of one type, stacked: one conversion for all."""
    is_all = len(places) == len(values)  # in order, as these are
    items = values if is_all else list(map(values.__getitem__, places.tolist()))
    return host_rows(items, value_type)


def _rows_between(
    registry: Registry, values: list[Any], kept: np.ndarray, group: np.ndarray, cuts: list[int]
) -> Iterator[InputRows]:
    """Yields the inputs between every two cuts, of one group each, in order.

    Args:
      registry: of the groups.
      values: of all inputs.
      kept: those that are read, in order.
      group: of these.
      cuts: where the rows begin, and where the last ones end.
    """
    numbers = group[cuts[:-1]].tolist()
    groups = dict.fromkeys(numbers)
    rows: dict[int, Iterator[np.ndarray]] = {}
    for g in groups:
        how, value_id, *_ = registry.groups[g]
        if how == "value":
            own, ends = kept, cuts
            if len(groups) > 1:
                own, ends = kept[group == g], pointers(group == g)[cuts].tolist()
            stacked = _values_at(values, own, registry.value_types[value_id])
            chunks = [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]
            rows[g] = map(stacked.__getitem__, chunks)
    whole: dict[int, InputRows] = {}  # arrays as they are, the same for all instances
    for g, a, b in zip(numbers, cuts, cuts[1:], strict=False):
        if g in whole and b - a == 1:
            yield whole[g]
            continue
        how, value_id, *where = registry.groups[g]
        value_type = registry.value_types[value_id]
        if how == "value":
            yield InputRows(value_type, next(rows[g]))
            continue
        leaf, row, _ = where
        items = [values[k] for k in kept[a:b].tolist()]
        if row:
            yield InputRows(value_type, np.array(items), leaf)
        else:
            for item in items:
                yield (chunk := InputRows(value_type, None, leaf, item))
                if item == ():
                    whole[g] = chunk


def host_rows(items: Sequence[Any], value_type: ValueType) -> np.ndarray:
    """Numbers or concrete arrays of one type, stacked on the host."""
    if is_key(value_type.dtype):
        items = [jax.random.key_data(x) for x in items]
        return np.stack([np.asarray(x) for x in items])
    if is_array(items[0]):
        items = [np.asarray(x) for x in items]
    elif type(items[0]) is int and value_type.dtype == np.int32:
        with contextlib.suppress(TypeError, OverflowError):  # not all of them are such
            numbers = int64_of(items if type(items) is list else list(items))
            if not len(numbers) or (numbers.min() >= -(2**31) and numbers.max() < 2**31):
                return numbers.astype(np.int32)
    return np.array(items, value_type.dtype)
