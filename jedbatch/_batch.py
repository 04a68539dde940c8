"""`batch`: the composition of everything else.

    instances ─trace→ graphs ─concatenate→ Graph ─schedule→ Schedule ─layout→ lanes ─lower→ tables

The first half, `plan`, is host work in NumPy; the second, `apply`, is one XLA program. What can
be kept is kept by the `Batched` object and by nothing else: node types and graphs of instances
in a `Registry` for each structure of shared arguments, and programs by signature.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from jedbatch._cells import Kernel, is_key, stored
from jedbatch._execute import EXECUTORS, differentiable_run
from jedbatch._graph import Graph, InputRows
from jedbatch._instances import array_type, immutable, instance_key, is_array
from jedbatch._layout import Layout, assign_lanes
from jedbatch._program import (
    Placed,
    ReverseSignature,
    Signature,
    find_readers,
    fits,
    forward_table,
    make_reverse_signature,
    make_signature,
    reverse_fits,
    reverse_table,
)
from jedbatch._schedule import Policy, Schedule, lower_bound, schedule
from jedbatch._registry import Registry
from jedbatch._trace import Record, trace

STAGES = ("trace", "merge", "schedule", "layout", "lower")


@dataclasses.dataclass(frozen=True)
class ResultForm:
    """How rows become results.

    Attributes:
      structures: the pytree structure of each instance's result, or of all stacked ones.
      places: for each of them, ((shape, dtype) of the arena, first row) of every leaf.
      batch: instances stacked along the first axis; None for a list of results.
    """

    structures: tuple[Any, ...]
    places: tuple[tuple[tuple[Any, int], ...], ...]
    batch: int | None


@dataclasses.dataclass(frozen=True)
class Static:
    """The part of a plan that is compiled: hashable, and equal for plans that share programs."""

    session: "Session"
    signature: Signature
    reverse: ReverseSignature | None
    results: ResultForm
    tracers: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """What planning found out, for people."""

    graph: Graph
    schedule: Schedule
    layout: Layout
    seconds: dict[str, float]
    placed: Placed
    lifted: list[Any]
    num_cached: int


@jax.tree_util.register_pytree_node_class
class Plan:
    """A minibatch ready to run: integer tables, inputs, and what to compile.

    As a pytree a plan has its tables and its inputs for leaves, and a hashable rest, so a train
    step that takes a plan compiles once for every topology:

        step = jax.jit(lambda params, plan: jax.grad(loss)(params, plan))

    Attributes:
      inputs: dict from dtype and shape to array `[rows, *shape]`: the values that enter.
      graph, schedule: what the plan was made from; None once it has been through `jax.jit`.
    """

    def __init__(self, static, table, reverse, inputs, host=None):
        self.static = static
        self._table = table
        self._reverse = reverse
        self.inputs = inputs
        self._host = host

    def tree_flatten(self):
        return (self._table, self._reverse, self.inputs), self.static

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(static, *children)

    @property
    def graph(self) -> Graph | None:
        return self._host.graph if self._host else None

    @property
    def schedule(self) -> Schedule | None:
        return self._host.schedule if self._host else None

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if self._host is None:
            return f"Plan (through a JAX transformation; {self.static.signature.steps} steps)"
        from jedbatch._poster import poster

        return poster(self)


class Session:
    """What a batched function keeps for one structure of shared arguments.

    Attributes:
      registry: node types met so far, graphs of instances seen before.
      signatures: programs in use, newest last.
      compilations: counts of XLA programs built, by kind.
    """

    def __init__(self, avals: Sequence[ShapedArray], structure: Any, executor: str | None):
        self.registry = Registry(avals, structure)
        self.executor = executor
        self.signatures: list[Signature] = []
        self.reverses: list[ReverseSignature] = []
        self.compilations: collections.Counter[str] = collections.Counter()
        self.graphs: collections.OrderedDict[Hashable, Record] = collections.OrderedDict()
        self.seen: collections.OrderedDict[int, tuple[Any, Record]] = collections.OrderedDict()
        self._kernels: dict[int, Kernel] = {}
        self._executors: dict[Any, Any] = {}
        self._runs: dict[Any, Any] = {}
        self._statics: dict[Static, Static] = {}

    def kernel(self, type_id: int) -> Kernel:
        """The kernel of a node type."""
        if type_id not in self._kernels:
            self._kernels[type_id] = Kernel(self.registry.node_types[type_id])
        return self._kernels[type_id]

    def count(self, kind: str) -> None:
        """Called when an XLA program is traced."""
        self.compilations[kind] += 1

    def lifted(self, signature: Signature) -> list[int]:
        """Ids of the closed-over arrays and tracers that a program reads."""
        return self._program(signature)[1]

    @functools.lru_cache(maxsize=None)  # noqa: B019  (lives as long as the session)
    def _program(self, signature: Signature) -> tuple[Callable, list[int]]:
        ids = [kernel.node_type.shared for kernel in signature.kernels]
        compute, lifted = self.registry.prologue(ids)

        def prepare(shared):
            values = compute(shared)
            return [k.prologue(v) for k, v in zip(signature.kernels, values, strict=True)]

        return prepare, lifted

    def run(self, signature: Signature, traced: bool) -> Any:
        """The executor of a program."""
        name = "fused" if traced or self.executor is None else self.executor
        key = signature, name
        if key not in self._executors:
            prepare, _ = self._program(signature)
            self._executors[key] = EXECUTORS[name](prepare, signature, self.count)
        return self._executors[key]

    def choose(self, placed: Placed) -> Signature:
        """A program for a minibatch: one in use if it fits, or a new one."""
        signatures = self.signatures
        for signature in sorted(signatures, key=lambda s: sum(s.lanes)):
            if fits(placed, signature):
                return signature
        outputs = {kind: len(x) for kind, x in zip(placed.arenas, placed.outputs, strict=True)}
        model = None
        for other in reversed(signatures):
            small = sum(other.lanes) <= 4 * max(64, sum(placed.lanes))
            same = {k: n for k, n in zip(other.arenas, other.outputs, strict=True) if n} == {
                k: n for k, n in outputs.items() if n
            }
            if small and same:
                model = other
                break
        signature = make_signature(placed, model)
        signatures.append(signature)
        return signature

    def choose_reverse(self, needed: ReverseSignature, make: Callable) -> ReverseSignature:
        """A reverse program that lists enough readers."""
        for signature in self.reverses:
            if reverse_fits(needed, signature):
                return signature
        same = [s for s in self.reverses if s.forward == needed.forward]
        signature = make(same[-1] if same else None)
        self.reverses.append(signature)
        return signature


class Batched:
    """A function of many instances; made by `batch`."""

    def __init__(self, fn, in_axes, out_axes, policy, executor, key, cache_size):
        self.fn = fn
        self.in_axes = in_axes
        self.out_axes = out_axes
        self.policy = policy
        self.executor = executor
        self._key = key
        self._cache_size = cache_size
        self._sessions: dict[Hashable, Session] = {}
        functools.update_wrapper(self, fn, updated=())

    @property
    def compilations(self) -> int:
        """XLA programs built so far."""
        return sum(sum(s.compilations.values()) for s in self._sessions.values())

    # --- arguments ---

    def _arguments(self, args: Sequence[Any]) -> tuple[tuple, list[tuple]]:
        """(shared arguments, the mapped arguments of each instance)."""
        axes = self.in_axes
        if isinstance(axes, int):
            axes = (axes,) * len(args)
        if len(axes) != len(args):
            raise ValueError(
                f"the batched `{self.__name__}` got {len(args)} arguments and `in_axes` has "
                f"{len(axes)} entries: {self.in_axes}. Pass one entry per argument: None for "
                "what all instances share, 0 for a sequence of instances."
            )
        shared = tuple(x for x, axis in zip(args, axes, strict=True) if axis is None)
        mapped = []
        for position, (x, axis) in enumerate(zip(args, axes, strict=True)):
            if axis is None:
                continue
            sized = hasattr(x, "__len__") and hasattr(x, "__getitem__")
            if not sized or isinstance(x, dict | str | bytes) or (is_array(x) and not x.ndim):
                raise TypeError(
                    f"argument {position} of the batched `{self.__name__}` is {_show(x)}, but "
                    "`in_axes` says 0 for it; expected a sequence of instances, such as a list "
                    "(or an array, whose rows are the instances). If all instances share it, "
                    "write None in `in_axes`."
                )
            mapped.append(list(x))
        lengths = [len(x) for x in mapped]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"the mapped arguments of the batched `{self.__name__}` have {lengths} "
                "instances; expected equally many."
            )
        if not lengths[0]:
            raise ValueError(
                f"the batched `{self.__name__}` got an empty list of instances; expected at "
                "least one, since the shape of the result follows from them."
            )
        return shared, list(zip(*mapped, strict=True))

    def _session(self, shared: tuple) -> tuple[Session, list[Any]]:
        leaves, structure = jax.tree.flatten(shared)
        types = []
        for path, leaf in jax.tree.leaves_with_path(shared):
            shaped = is_array(leaf) or isinstance(
                leaf, int | float | complex | np.generic | jax.ShapeDtypeStruct
            )
            if not shaped:
                where = jax.tree_util.keystr(path)
                raise TypeError(
                    f"shared argument{where} of the batched `{self.__name__}` is {_show(leaf)}; "
                    "expected arrays only. Close over configuration, or bind it with "
                    "`functools.partial`, before calling `jedbatch.batch`."
                )
            types.append(array_type(leaf))
        key = structure, tuple(types)
        session = self._sessions.get(key)
        if session is None:
            avals = [ShapedArray(s, d, weak_type=w) for s, d, w in types]
            session = self._sessions[key] = Session(avals, structure, self.executor)
        return session, leaves

    def _arrange(self, shared: tuple, mapped: tuple) -> list[Any]:
        axes = self.in_axes
        if isinstance(axes, int):
            return list(mapped)
        shared, mapped = iter(shared), iter(mapped)
        return [next(shared if axis is None else mapped) for axis in axes]

    # --- planning ---

    def plan(self, *args: Any, gradient: bool = True) -> Plan:
        """Host work only: what to compute for these instances, and in what order."""
        shared, instances = self._arguments(args)
        session, _ = self._session(shared)
        return self._plan(session, instances, gradient)

    def _plan(self, session: Session, instances: list[tuple], gradient: bool) -> Plan:
        clock = [time.perf_counter()]

        def tick():
            clock.append(time.perf_counter())

        records, arrays, tracers, num_cached = self._records(session, instances)
        tick()
        graph = Graph.select([(r.whole, r.index) for r in records])
        tick()
        cut = schedule(graph, self.policy)
        tick()
        layout = assign_lanes(graph, cut)
        tick()
        placed, form = self._place(session, graph, cut, layout, records)
        signature = session.choose(placed)
        table = forward_table(placed, signature)
        reverse_signature = table_back = None
        if gradient:
            reverse_signature, table_back = _reverse(session, placed, signature)
        inputs = _assemble(placed, signature, records, arrays)
        static = Static(session, signature, reverse_signature, form, len(tracers))
        static = session._statics.setdefault(static, static)
        tick()
        seconds = dict(zip(STAGES, np.diff(clock).tolist(), strict=True))
        host = Host(graph, cut, layout, seconds, placed, tracers, num_cached)
        return Plan(static, table, table_back, inputs, host)

    def _records(self, session, instances):
        """Graphs of the instances, recorded or remembered."""
        seen = session.seen
        records: list[Record | None] = [None] * len(instances)
        keys: list[Hashable] = [None] * len(instances)
        arrays: list[Any] = [()] * len(instances)
        for i, instance in enumerate(instances):
            what = instance if len(instance) > 1 else instance[0]
            if (same := seen.get(id(what))) is not None:
                records[i] = same[1]
                continue
            try:
                found, arrays[i] = instance_key(what)
            except TypeError as error:
                error.add_note(f"This happened while instance {i} was read.")
                raise
            if self._key is not None:
                found = ("user", self._key(*instance), found)
            keys[i] = found
            records[i] = session.graphs.get(found) if found is not None else None
        cache = session.graphs
        todo: list[int] = []
        first: dict[Hashable, int] = {}
        for i, (k, record) in enumerate(zip(keys, records, strict=True)):
            if record is None and (k is None or first.setdefault(k, i) == i):
                todo.append(i)
        tracers: list[Any] = []
        num_cached = len(records) - len(todo)
        if todo:
            made, caching, tracers = trace(
                self.fn,
                session.registry,
                [instances[i] for i in todo],
                [arrays[i] for i in todo],
                self._arrange,
            )
            for i, record, keep in zip(todo, made, caching, strict=True):
                records[i] = record
                if keep and keys[i] is not None:
                    cache[keys[i]] = record
                    what = instances[i] if len(instances[i]) > 1 else instances[i][0]
                    if isinstance(keys[i], bytes) and immutable(what):
                        seen[id(what)] = what, record
            while len(seen) > self._cache_size:
                seen.popitem(last=False)
            while len(cache) > self._cache_size:
                cache.popitem(last=False)
        records = [
            record if record is not None else records[first[k]]
            for k, record in zip(keys, records, strict=True)
        ]
        return records, arrays, tracers, num_cached

    def _place(self, session, graph, cut, layout, records):
        """Finds the arena of everything, and the form of the result."""
        type_ids = np.flatnonzero(np.bincount(graph.node_type, minlength=len(graph.types)))
        type_ids = tuple(type_ids.tolist())
        kernels = tuple(map(session.kernel, type_ids))
        arenas: dict[Any, int] = {}
        for kernel in kernels:
            for t in (*kernel.operands, *kernel.results):
                arenas.setdefault(stored(t), len(arenas))
        sizes = [len(chunk) for chunk in graph.inputs]
        input_arena = np.repeat(
            [arenas.setdefault(stored(chunk.type), len(arenas)) for chunk in graph.inputs], sizes
        ).astype(np.int64)
        input_row = np.empty(len(input_arena), np.int64)
        for a in range(len(arenas)):
            mine = np.flatnonzero(input_arena == a)
            input_row[mine] = np.arange(len(mine))

        refs = graph.outputs
        if self.out_axes is None:
            structures = tuple(r.structure for r in records)
            leaves = [kind for r in records for kind in r.types]
            rows: dict[Any, list[int]] = {}
            for ref, kind in zip(refs.tolist(), leaves, strict=True):
                rows.setdefault(kind, []).append(ref)
            counts = collections.Counter()
            places = []
            for r in records:
                mine = []
                for kind in r.types:
                    mine.append((kind, counts[kind]))
                    counts[kind] += 1
                places.append(tuple(mine))
            form = ResultForm(structures, tuple(places), None)
        else:
            self._check_stackable(records)
            columns = refs.reshape(len(records), -1).T
            rows, place = {}, []
            for kind, column in zip(records[0].types, columns, strict=True):
                found = rows.setdefault(kind, [])
                place.append((kind, len(found)))
                found.extend(column.tolist())
            form = ResultForm((records[0].structure,), (tuple(place),), len(records))
        for kind in rows:
            arenas.setdefault(kind, len(arenas))
        outputs = []
        for kind in arenas:
            found = np.array(rows.get(kind, []), np.int64)
            if self.out_axes is None and len(found):
                found = np.concatenate([found, np.full(_room(len(found)), found[0])])
            outputs.append(found)
        placed = Placed(
            graph, cut, layout, kernels, type_ids, tuple(arenas), input_arena, input_row,
            tuple(outputs),
        )
        return placed, form

    def _check_stackable(self, records: Sequence[Record]) -> None:
        first = records[0]
        for i, record in enumerate(records):
            if record.structure == first.structure and record.types == first.types:
                continue
            raise ValueError(
                f"the results of instances 0 and {i} of the batched `{self.__name__}` do not "
                f"stack: {_show_form(first)} and {_show_form(record)}. Return the same shapes "
                "for every instance, or write `jedbatch.batch(fn, out_axes=None)` to get a list "
                "with one result per instance."
            )

    # --- running ---

    def apply(self, *args: Any, inputs: dict[str, Any] | None = None) -> Any:
        """Device work only: runs a plan."""
        *shared, plan = args
        if not isinstance(plan, Plan):
            raise TypeError(
                f"`apply` got {_show(plan)} as its last argument; expected a plan: "
                "`batched.apply(params, batched.plan(params, instances))`."
            )
        session, leaves = self._session(tuple(shared))
        if session is not plan.static.session:
            raise ValueError(
                "`apply` got shared arguments of another structure, shapes or dtypes than the "
                "plan was made for; make a new plan with `plan(*shared, instances)`."
            )
        return self._run(plan, leaves, plan.inputs if inputs is None else inputs)

    def __call__(self, *args: Any) -> Any:
        shared, instances = self._arguments(args)
        session, leaves = self._session(shared)
        plan = self._plan(session, instances, gradient=False)
        return self._run(plan, leaves, plan.inputs)

    def _run(self, plan: Plan, leaves: list[Any], inputs: dict[str, Any]) -> Any:
        static, session = plan.static, plan.static.session
        signature = static.signature
        lifted = []
        for index in session.lifted(signature):
            value = session.registry.shared[index]
            lifted.append(plan._host.lifted[value.tracer] if value.array is None else value.array)
        shared = [*leaves, *lifted]
        rows = tuple(inputs[_name(kind)] for kind in signature.arenas)
        traced = any(isinstance(x, Tracer) for x in (*shared, *rows, plan._table))
        executor = session.run(signature, traced)
        if not traced:
            outputs = executor.infer(shared, rows, plan._table)
        else:
            def reverse_of(table):
                if static.reverse is not None:
                    return static.reverse, table
                return _reverse(session, plan._host.placed, signature)

            run = differentiable_run(executor, reverse_of)
            outputs = run(shared, rows, plan._table, plan._reverse)
        return _results(static.results, signature, outputs)


def _room(n: int) -> int:
    return (1 << (n - 1).bit_length()) - n


def _name(kind: Any) -> str:
    shape, dtype = kind
    return f"{dtype}[{','.join(map(str, shape))}]"


def _reverse(session: Session, placed: Placed, signature: Signature):
    readers = find_readers(placed, signature)
    make = functools.partial(make_reverse_signature, placed, readers, signature)
    reverse_signature = session.choose_reverse(make(None), make)
    return reverse_signature, reverse_table(placed, readers, reverse_signature)


def _assemble(placed, signature, records, arrays) -> dict[str, Any]:
    """The input rows of each arena, up to capacity."""
    parts: dict[Any, list[Any]] = {}
    for record, mine in zip(records, arrays, strict=True):
        for chunk in record.whole.chunks[record.index]:
            parts.setdefault(stored(chunk.type), []).append(_rows(chunk, mine))
    inputs = {}
    for kind, room in zip(signature.arenas, signature.inputs, strict=True):
        shape, dtype = kind
        found = parts.get(kind, [])
        if any(isinstance(x, Tracer) for x in found):
            rows = jnp.concatenate([jnp.asarray(x, dtype) for x in found])
            padding = [(0, room - len(rows))] + [(0, 0)] * len(shape)
            inputs[_name(kind)] = jnp.pad(rows, padding)
        else:
            rows = np.zeros((room, *shape), dtype)
            if found:
                n = sum(map(len, found))
                np.concatenate(found, out=rows[:n], casting="unsafe")
            inputs[_name(kind)] = rows
    return inputs


def _rows(chunk: InputRows, arrays: Sequence[Any]) -> Any:
    if chunk.leaf is None:
        return chunk.rows
    array = arrays[chunk.leaf]
    if is_key(chunk.type.dtype):
        array = jax.random.key_data(array)
    if not isinstance(array, Tracer):
        array = np.asarray(array)
    if chunk.rows is not None:
        return array[chunk.rows]
    return array[None] if chunk.index is None else array[chunk.index][None]


def _results(form: ResultForm, signature: Signature, outputs: Sequence[Any]) -> Any:
    arena = {kind: rows for kind, rows in zip(signature.arenas, outputs, strict=True)}
    if form.batch is not None:
        (structure,), (places,) = form.structures, form.places
        leaves = [arena[kind][first : first + form.batch] for kind, first in places]
        return jax.tree.unflatten(structure, leaves)
    return [
        jax.tree.unflatten(structure, [arena[kind][i] for kind, i in places])
        for structure, places in zip(form.structures, form.places, strict=True)
    ]


def _show(x: Any) -> str:
    text = repr(x)
    text = text if len(text) < 60 else text[:57] + "..."
    return f"{text} of type {type(x).__name__}"


def _show_form(record: Record) -> str:
    shapes = [f"{np.dtype(d).name}[{','.join(map(str, s))}]" for s, d in record.types]
    return str(jax.tree.unflatten(record.structure, shapes)).replace("'", "")


def batch(
    fn: Callable,
    in_axes: int | None | Sequence[int | None] = (None, 0),
    out_axes: int | None = 0,
    *,
    policy: Policy | None = None,
    executor: str | None = None,
    key: Callable[..., Hashable] | None = None,
    cache_size: int = 65536,
) -> Batched:
    """`vmap` for functions whose computation depends on the instance."""
    return Batched(fn, in_axes, out_axes, policy, executor, key, cache_size)
