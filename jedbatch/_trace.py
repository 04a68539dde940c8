"""Recording what one instance computes.

The user's function runs once per instance, as ordinary Python, on symbolic values. Each
operation it performs becomes a node of the instance's graph and nothing is computed. Work enters
through four doors:

1. a call of a `@cell`: a dictionary look-up and a few list appends, no JAX in it;
2. a call of a `jax.jit`-ted function, which reaches us as one primitive that brings its own
   program along: one node;
3. any other JAX operation (`jnp.tanh(x)`, `x @ w`, a Flax layer): one node per primitive;
4. `evaluate`, which records a graph prepared with NumPy, all nodes at once.

Doors 2 and 3 open because symbolic values are JAX tracers of a trace of our own, so that JAX
hands us every primitive together with its operands. What an operation reads decides what becomes
of it:

    something symbolic          a node of the graph
    shared arguments only       computed once per minibatch, before the nodes; unless a number
                                goes into it that varies (`params * len(tree)`): a node
    neither                     computed now; the result is a constant

A tuple that a cell returns is remembered as a whole, so that passing a state (h, c) on is one
reference, not two. References are turned into operands for all instances together, in NumPy.

Source: lazy recording after Zha et al., Just-in-time dynamic batching, 2019; a custom
`jax.core.Trace` as in JAX's autodidax.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Trace, Tracer
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._cell import (
    Cell,
    free_values,
    function_identity,
    pause,
    recording,
    with_free_values,
)
from jedbatch._graph import Graph, InputRows, ValueType, pointers, ranges
from jedbatch._instances import (
    Same,
    array_type,
    is_array,
    owned_arrays,
    replace_arrays,
    typed,
    typed_or_same,
)
from jedbatch._registry import END, NUMBERS, Callee, Registry
from jedbatch.errors import EscapedValueError, SymbolicValueError

MAX_FRAMES = 250_000  # Python frames a recursive model may be deep while it is recorded
MANY_CONSTANTS = 10_000  # kept, before all are forgotten


# --- symbolic values --------------------------------------------------------------------


def _needs_value(what: str) -> Callable:
    def method(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        raise SymbolicValueError(
            f"{what} needs the value of a symbolic array of type {self.aval.str_short()}, which "
            "has not been computed: while a batched function is recorded, values are unknown. "
            "Decide on Python numbers or the structure of the instance, use `jnp.where`, or "
            "`jax.lax.cond` inside a cell; `help(jedbatch.errors.SymbolicValueError)` says more."
        )

    return method


class Symbol(Tracer):
    """A tracer of ours: it has a type and no value."""

    __slots__ = ("index",)

    __bool__ = _needs_value("`if`, `while`, `and`, `or`, `not` or `bool()`")
    __int__ = _needs_value("`int()`")
    __float__ = _needs_value("`float()`")
    __complex__ = _needs_value("`complex()`")
    __index__ = _needs_value("`range()` or indexing a Python list")
    __array__ = _needs_value("`numpy.asarray`")
    item = _needs_value("`.item()`")
    tolist = _needs_value("`.tolist()`")

    def full_lower(self):
        return self

    @property
    def aval(self):  # type: ignore[override]
        self._trace.is_valid()
        return self._type()

    def __repr__(self):
        return f"symbolic {self._type().str_short()}"


class Value(Symbol):
    """A symbolic value of one instance: result `index`, or input `-1 - index`."""

    __slots__ = ("type",)

    def __init__(self, recorder: "Recorder", index: int, value_type: int):
        self._trace = recorder
        self.index = index
        self.type = value_type

    def _type(self):
        return self._trace.registry.avals[self.type]

    def __getitem__(self, item):
        return self._trace.index_value(self, item)

    def __iter__(self):
        if not self.shape:
            raise TypeError("a symbolic array with no dimensions cannot be iterated over")
        return (self[i] for i in range(self.shape[0]))


class Shared(Symbol):
    """A symbolic value that all instances share: `registry.shared[index]`."""

    __slots__ = ()

    def __init__(self, recorder: "Recorder", index: int):
        self._trace = recorder
        self.index = index

    def _type(self):
        return self._trace.registry.shared[self.index].aval

    @property
    def shared_index(self):
        return self.index

    def __getitem__(self, item):
        return self._trace.index_shared(self, item)


# --- recording --------------------------------------------------------------------------


class Recorder(Trace):
    """Records instances, one after the other, into flat lists.

    Attributes:
      caller: JAX's trace around the batched function.
      callees: the kind of call of every node.
      references: what the nodes read: results, or inputs as `-1 - i`; a reference to a tuple is
        its first element's.
      input_group, input_value: how every input is read, and its value or position.
      tracers: tracers of outer transformations that the function closes over.
      caching: whether the current instance's graph is good for later calls too.
    """

    def __init__(self, registry: Registry, caller: Any):
        super().__init__()
        self.registry = registry
        self.caller = caller
        self.active = True
        self.caching = True
        self.callees: list[int] = []
        self.references: list[int] = []
        self.num_values = 0
        self.input_group: list[int] = []
        self.input_value: list[Any] = []
        self.tracers: list[Any] = []
        self._instance: Any = None
        self._known: dict[int, tuple[Any, int | None]] = {}
        self._kept: list[Any] = []  # keeps what `_known` knows by id alive
        self._containers: dict[int, tuple[Hashable, None]] = {}
        self._shared: Any = None
        self._leaves: dict[int, tuple[int, Any]] = {}
        self._made: dict[int, Any] = {}
        self._owned: set[int] | None = None
        self._numbers: dict[type, tuple[int, Hashable]] = {}
        self.call_cell = self._short_way()

    def is_valid(self) -> bool:
        if self.active:
            return True
        raise EscapedValueError(
            "a symbolic value is used after its function was recorded; expected it to be "
            "returned from the function. `help(jedbatch.errors.EscapedValueError)` says how "
            "values escape."
        )

    def share(self) -> Any:
        """The shared arguments with symbols for leaves."""
        leaves = [Shared(self, i) for i in range(self.registry.num_leaves)]
        self._shared = jax.tree.unflatten(self.registry.structure, leaves)
        stack = [self._shared]
        while stack:  # remember the containers: cells get them whole
            x = stack.pop()
            leaves, structure = jax.tree.flatten(x)
            token = self.registry.token(structure, *(leaf.index for leaf in leaves))
            self._containers[id(x)] = (token, None)
            if not isinstance(x, Shared) and leaves:
                stack += _parts(x)
        return self._shared

    def begin(self, instance: Any, arrays: Sequence[Any]) -> Any:
        """Starts an instance; its arrays are replaced by symbols."""
        self._instance = instance
        self._owned = None
        self._known.clear()
        self._known.update(self._containers)
        self._kept.clear()
        self._leaves.clear()
        self.caching = True
        if not arrays:
            return instance
        kinds = [self.registry.value_type(*array_type(x)) for x in arrays]
        values = [self._leaf_value(kind, leaf, ()) for leaf, kind in enumerate(kinds)]
        return replace_arrays(instance, iter(values))

    def forget(self) -> None:
        """Lets go of everything symbolic."""
        self.active = False
        self._instance = self._shared = self._owned = None
        for kept in (self._known, self._containers, self._kept, self._made, self._leaves):
            kept.clear()

    def _new_input(self, group: int, value: Any) -> int:
        self.input_group.append(group)
        self.input_value.append(value)
        return -len(self.input_group)

    def _leaf_value(self, kind: int, leaf: int, path: tuple) -> Value:
        """An array of the instance, or the part of it that static indices lead to."""
        row = len(path) == 1 and isinstance(path[0], int)
        group = self.registry.group("leaf", kind, leaf, row, None if row else _frozen(path))
        position = self._new_input(group, path[0] if row else path)
        self._leaves[position] = (leaf, path)
        return Value(self, position, kind)

    def input(self, x: Any) -> Value:
        """A number or concrete array as an input of the instance."""
        kind = self.registry.value_type(*array_type(x))
        return Value(self, self._new_input(self.registry.group("value", kind), x), kind)

    def symbol(self, x: Any) -> Any:
        """Any array or number as a symbol."""
        if isinstance(x, Tracer):
            if isinstance(x, Symbol):
                x._trace.is_valid()
            if x._trace is self:
                return x
            self.caching = False  # a tracer of an outer transformation: here today, gone tomorrow
            position = next((k for k, t in enumerate(self.tracers) if t is x), len(self.tracers))
            if position == len(self.tracers):
                self.tracers.append(x)
            return Shared(self, self.registry.outer(position, jax.typeof(x)))
        if isinstance(x, jax.Array) and x.ndim and id(x) not in self._made:
            if self._owned is None:
                self._owned = owned_arrays(self._instance)
            if id(x) not in self._owned:
                return Shared(self, self.registry.closed_over(x))
        return self.input(x)

    # --- door 1: cells ---

    def _short_way(self) -> Callable:
        """How calls of cells are recorded; a closure, since attributes would cost a quarter more.

        A call is described by what its arguments are, without looking into them, and recorded
        the way a call of that description was recorded before: `registry.calls` is a tree of
        dictionaries with a `Callee` at the end of every known description.
        """
        known, kept, numbers = self._known, self._kept, self._numbers
        calls, references, callees = self.registry.calls, self.references, self.callees
        input_group, input_value = self.input_group, self.input_value

        def call_cell(cell: Cell, args: tuple, static: dict) -> Any:
            reads = []
            try:
                callee = calls[cell]
                for c in cell.closure:
                    callee = callee[id(c.cell_contents)]
                for arg in args:
                    found = known.get(id(arg))
                    if found is not None:
                        token, index = found
                        callee = callee[token]
                        if index is not None:
                            reads.append(index)
                        continue
                    kind = type(arg)
                    if kind is Value:
                        callee = callee[arg.type]
                        reads.append(arg.index)
                    else:
                        group, token = numbers[kind]  # an int or a float, if it is found
                        callee = callee[token]
                        input_group.append(group)
                        input_value.append(arg)
                        reads.append(-len(input_group))
                callee = callee[END]
            except KeyError:
                callee = None
            if callee is None or static:
                return self._call_cell(cell, args, static)
            kinds = callee.results
            references.extend(reads)
            callees.append(callee.id)
            index = self.num_values
            self.num_values = index + len(kinds)
            if callee.tree is None:
                return Value(self, index, kinds[0])
            if callee.unit is None:
                return self._results(callee, index)
            if len(kinds) == 2:  # a state (h, c), spelled out
                out: tuple = (Value(self, index, kinds[0]), Value(self, index + 1, kinds[1]))
            else:
                out = tuple([Value(self, i, kind) for i, kind in enumerate(kinds, index)])
            known[id(out)] = callee.unit, index
            kept.append(out)
            return out

        return call_cell

    def _description(self, cell: Cell, args: tuple) -> list[Hashable] | None:
        """The way to a call in `registry.calls`; None if it needs a closer look every time."""
        tokens: list[Hashable] = [cell]
        for c in cell.closure:
            if isinstance(c.cell_contents, Tracer):
                return None
            tokens.append(id(c.cell_contents))
        for arg in args:
            if id(arg) in self._known:
                tokens.append(self._known[id(arg)][0])
            elif type(arg) is Value:
                tokens.append(arg.type)
            elif type(arg) in (int, float):
                tokens.append(self._number(type(arg))[1])
            else:
                return None
        return [*tokens, END]

    def _results(self, callee: Callee, index: int) -> Any:
        """What a recorded call returns."""
        values = [Value(self, i, kind) for i, kind in enumerate(callee.results, index)]
        if callee.tree is None:
            return values[0]
        out = jax.tree.unflatten(callee.tree, values)
        if callee.unit is not None:
            self._known[id(out)] = callee.unit, index
            self._kept.append(out)
        return out

    def _record(self, callee: Callee) -> Any:
        """Appends a node whose references are in place already; returns its results."""
        self.callees.append(callee.id)
        index = self.num_values
        self.num_values = index + len(callee.results)
        return self._results(callee, index)

    def _number(self, kind: type) -> tuple[int, Hashable]:
        """(input group, token) of Python numbers of a kind."""
        value_type = self.registry.value_type(*array_type(kind(0)))
        found = self.registry.group("value", value_type), self.registry.token(kind, value_type)
        self._numbers[kind] = found
        return found

    def _call_cell(self, cell: Cell, args: tuple, static: dict) -> Any:
        """The long way: any pytrees of anything."""
        found = self.cell_callee(cell, args, static)
        if found is None:  # inside another transformation: not ours to record
            return cell.fn(*args, **static)
        callee, references = found
        way = None if static else self._description(cell, args)
        if way is not None:
            self.registry.remember(
                way, callee, self._widths(args), keep=[c.cell_contents for c in cell.closure]
            )
        self.references += references
        return self._record(callee)

    def _widths(self, args: tuple) -> tuple[int, ...]:
        """How many operands each reference of a short description stands for."""
        found = [self._known.get(id(x), (0, 0)) for x in args]  # others are single values
        return tuple(
            1 if token == 0 else len(self.registry.units[-1 - token])
            for token, index in found
            if index is not None
        )

    def cell_callee(self, cell: Cell, args: tuple, static: dict) -> tuple[Callee, list] | None:
        """(how to record a call of a cell, its references); None if it is not ours to record."""
        fn = cell.fn
        options = _static_options(cell, static)
        captured = [x for x in free_values(fn) if isinstance(x, Tracer)]
        leaves, tree = jax.tree.flatten((args, captured))
        if self._foreign(leaves):
            return None
        slots: list[Hashable] = []
        operands: list[Value] = []
        shared: list[int] = []
        fixed: list[Any] = []
        for leaf in leaves:
            if is_array(leaf) or isinstance(leaf, NUMBERS):
                symbol = self.symbol(leaf)
                if isinstance(symbol, Value):
                    slots.append("value")
                    operands.append(symbol)
                else:
                    slots.append("shared")
                    shared.append(symbol.index)
                continue
            try:
                slots.append(("fixed", typed(leaf)))
            except TypeError:
                raise TypeError(
                    f"cell `{cell.name}` got {leaf!r} of type {type(leaf).__name__} as a "
                    "positional argument; expected arrays, numbers or pytrees of them. Pass it "
                    "by keyword if it is hashable, or close over it."
                ) from None
            fixed.append(leaf)
        identity = function_identity(fn)
        if hasattr(fn, "__code__"):
            self.registry.warn_if_many(fn.__code__, identity, f"cell `{cell.name}`")

        def call(shared_values, operand_values):
            sources = {"shared": iter(shared_values), "value": iter(operand_values)}
            constants = iter(fixed)
            filled = [next(sources[s]) if isinstance(s, str) else next(constants) for s in slots]
            args, captured = jax.tree.unflatten(tree, filled)
            return with_free_values(fn, iter(captured))(*args, **static)

        key = ("cell", identity, options, tree, tuple(slots))
        kinds = tuple(v.type for v in operands)
        try:
            callee = self.registry.callee(
                cell.name, key, call, tuple(shared), kinds, user_code=True
            )
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(
                f"This happened inside cell `{cell.name}`, whose positional arguments are "
                "values, Python numbers too. If Python must decide on one, pass it by keyword: "
                "keyword arguments are static."
            )
            raise
        return callee, [v.index for v in operands]

    def _foreign(self, leaves: Sequence[Any]) -> bool:
        """True if a leaf belongs to a transformation that is running inside the function."""
        if not any(isinstance(x, Tracer) and x._trace is not self for x in leaves):
            return False
        with take_current_trace() as current:
            return current is not self

    # --- doors 2 and 3: everything else ---

    def process_primitive(self, primitive, tracers, params, /):
        def call(*values):
            out = primitive.bind(*values, **params)
            return out if primitive.multiple_results else [out]

        key = (primitive, self.registry.params_key(params))
        name = params["name"] if primitive.name == "jit" else primitive.name
        out = self._operation(name, key, call, tracers)
        return out if primitive.multiple_results else out[0]

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, *, symbolic_zeros):
        def call(*values):
            with take_current_trace() as trace, set_current_trace(trace):
                return trace.process_custom_jvp_call(
                    primitive, fun, jvp, values, symbolic_zeros=symbolic_zeros
                )

        return self._custom(fun, call, tracers)

    def process_custom_vjp_call(
        self, primitive, fun, fwd, bwd, tracers, /, *, out_trees, symbolic_zeros
    ):
        def call(*values):
            with take_current_trace() as trace, set_current_trace(trace):
                return trace.process_custom_vjp_call(
                    primitive,
                    fun,
                    fwd,
                    bwd,
                    values,
                    out_trees=out_trees,
                    symbolic_zeros=symbolic_zeros,
                )

        return self._custom(fun, call, tracers)

    def _custom(self, fun: Any, call: Callable, tracers: Sequence[Any]) -> list[Any]:
        """Records a function with a derivative rule of its own, rule included."""
        ran = []

        def noted(*values):
            ran.append(True)
            return call(*values)

        name = getattr(fun, "__name__", "custom")
        out = self._operation(name, ("custom", fun), noted, tracers)
        if not ran:  # JAX reads the structure of the result off a run of `fun`
            with pause():
                jax.make_jaxpr(lambda *xs: fun.call_wrapped(*xs))(*map(jax.typeof, tracers))
        return out

    def stage_value(self, val):
        return val

    def _operation(self, name: str, key: Hashable, call: Callable, args: Sequence[Any]) -> list:
        """Records `call(*args) -> list of arrays`, or computes it if nothing is symbolic."""
        if not any(isinstance(x, Tracer) for x in args):
            return self._constant(key, call, args)
        tracers = {i: self.symbol(x) for i, x in enumerate(args) if isinstance(x, Tracer)}
        shared = tuple(s.index for s in tracers.values() if isinstance(s, Shared))
        if len(shared) == len(tracers):
            numbers = tuple(map(_identity_of_constant, (x for x in args if not np.ndim(x))))
            if not self.registry.varies((key, shared), numbers):
                return self._shared_operation(key, call, args, tracers)
        symbols = [tracers[i] if i in tracers else self.symbol(x) for i, x in enumerate(args)]
        slots = tuple(isinstance(s, Value) for s in symbols)

        def arranged(shared_values, operand_values):
            sources = iter(shared_values), iter(operand_values)
            return list(call(*(next(sources[is_value]) for is_value in slots)))

        shared = tuple(s.index for s in symbols if isinstance(s, Shared))
        operands = [s for s in symbols if isinstance(s, Value)]
        return self._node(name, (key, slots), arranged, shared, operands)

    def _node(self, name, key, call, shared, operands) -> Any:
        kinds = tuple(v.type for v in operands)
        callee = self.registry.callee(name, key, call, shared, kinds, user_code=False)
        self.references += [v.index for v in operands]
        return self._record(callee)

    def _constant(self, key: Hashable, call: Callable, args: Sequence[Any]) -> list[Any]:
        """Computes an operation on concrete values, or finds what it gave before."""
        constants = self.registry.constants
        full = (key, *map(_identity_of_constant, args))
        out = constants.get(full)
        if out is None:
            with pause(), jax.ensure_compile_time_eval():
                out = list(call(*args))
            if len(constants) > MANY_CONSTANTS:
                constants.clear()
            constants[full] = out
        self._made.update((id(x), x) for x in out)
        return out

    def _shared_operation(self, key, call, args, tracers) -> list[Any]:
        """Records an operation on shared values and constants, done once per minibatch."""
        marks = tuple(
            "shared" if i in tracers else _identity_of_constant(x) for i, x in enumerate(args)
        )

        def filled(*values):
            source = iter(values)
            return call(*(next(source) if i in tracers else x for i, x in enumerate(args)))

        # A call kept for later must not keep this recorder's tracers alive.
        args = [None if i in tracers else x for i, x in enumerate(args)]
        shared = tuple(s.index for s in tracers.values())
        tracers = set(tracers)
        ids = self.registry.shared_results((key, marks), filled, shared)
        return [Shared(self, i) for i in ids]

    # --- indexing ---

    def index_value(self, value: Value, item: Any) -> Any:
        """Static indexing of an array of the instance gives an input, not a node."""
        leaf = self._leaves.get(value.index) if self.active else None
        if leaf is None or not _is_static(item):
            return super(Value, value).__getitem__(item)
        if isinstance(item, int | np.integer):
            if not value.shape:
                raise IndexError("an array with no dimensions cannot be indexed")
            item = _row(item, value.shape[0])
            shape = value.shape[1:]
        else:
            shape = np.broadcast_to(np.False_, value.shape)[item].shape
        kind = self.registry.value_type(shape, value.dtype, value.aval.weak_type)
        return self._leaf_value(kind, leaf[0], (*leaf[1], item))

    def index_shared(self, value: Shared, item: Any) -> Any:
        """`table[i]` with a Python int is a row look-up with i as a value."""
        first, rest = (item[0], item[1:]) if isinstance(item, tuple) and item else (item, ())
        number = isinstance(first, int | np.integer) and not isinstance(first, bool)
        if not (number and self.active and value.shape and _is_static(rest)):
            return super(Shared, value).__getitem__(item)
        row = self.input(_row(first, value.shape[0]))

        def look_up(shared, operands):
            return shared[0][(operands[0], *rest)]

        return self._node("row", ("row", _frozen(rest)), look_up, (value.index,), [row])

    # --- door 4: prepared graphs ---

    def evaluate(self, graph: Graph, cells: Sequence[Cell], shared: tuple) -> "Results":
        """Records a whole graph, whose type t is `cells[t]`."""
        first_input = len(self.input_group)
        kinds: list[int] = []
        for chunk in graph.inputs:
            assert chunk.rows is not None
            _, dtype, weak = array_type(chunk.rows)
            kind = self.registry.value_type(chunk.type.shape, dtype, weak)
            self.input_group += [self.registry.group("value", kind)] * len(chunk)
            self.input_value += chunk.rows.tolist() if chunk.rows.ndim == 1 else list(chunk.rows)
            kinds += [kind] * len(chunk)

        # Every operand is described by the callee that made it, or by the input's type.
        made_by: dict[int, Callee] = {}
        operand, ptr, node_type = graph.operand, graph.operand_ptr, graph.node_type
        described = np.empty(len(operand), np.int64)
        inputs = operand < 0
        described[inputs] = -1 - np.array(kinds, np.int64)[-1 - operand[inputs]]
        described[~inputs] = node_type[operand[~inputs]]

        def stand_in(what: int) -> Any:
            if what < 0:
                return Value(self, -1, -1 - what)
            maker = made_by[what]
            values = [Value(self, 0, kind) for kind in maker.results]
            return values[0] if maker.tree is None else jax.tree.unflatten(maker.tree, values)

        arity = np.diff(ptr)
        most = int(arity.max(initial=0))
        forms = np.full((len(node_type), 1 + most), np.iinfo(np.int64).min)
        forms[:, 0] = node_type
        forms[:, 1:][np.arange(most) < arity[:, None]] = described
        distinct, first, which = np.unique(forms, axis=0, return_index=True, return_inverse=True)
        callees: list[Any] = [None] * len(distinct)
        for d in np.argsort(first).tolist():  # makers come before readers
            t, *operands = distinct[d][: 1 + int(arity[first[d]])].tolist()
            args = [stand_in(what) for what in operands]
            found = self.cell_callee(cells[t], (*shared, *args), {})
            assert found is not None
            callee = found[0]
            widths = tuple(1 if w < 0 else len(made_by[w].results) for w in operands)
            callees[d] = self.registry.add_callee(
                callee.node_type, widths, callee.results, callee.tree, callee.unit
            )
            same = made_by.setdefault(t, callee)
            if (same.results, same.tree) != (callee.results, callee.tree):
                raise TypeError(
                    f"cell `{cells[t].name}` returns values of different shapes or dtypes at "
                    "different nodes of a prepared graph; expected the same at all of them. Give "
                    "them different types, or call the cells from Python."
                )
        ids = np.array([c.id for c in callees], np.int64)[which.ravel()]
        sizes = np.array([len(c.results) for c in callees], np.int64)[which.ravel()]
        starts = self.num_values + pointers(sizes)
        references = np.where(inputs, operand - first_input, starts[operand])
        self.callees += ids.tolist()
        self.references += references.tolist()
        self.num_values = int(starts[-1])
        return Results(self, [made_by[t] for t in node_type.tolist()], starts[:-1])

    # --- results ---

    def output(self, leaf: Any) -> tuple[int, tuple]:
        """(reference, (shape, dtype)) of a leaf of what the function returns."""
        if not (is_array(leaf) or isinstance(leaf, NUMBERS)):
            raise TypeError(
                f"the function returned {leaf!r} of type {type(leaf).__name__}; expected an "
                "array, a number or a pytree of them."
            )
        symbol = self.symbol(leaf) if isinstance(leaf, Tracer) else self.input(leaf)
        if isinstance(symbol, Shared):
            shared = (symbol.index,)
            symbol = self._node("shared", "identity", lambda shared, _: shared[0], shared, [])
        value_type = self.registry.value_types[symbol.type]
        return symbol.index, (value_type.shape, value_type.dtype)


class Results(Sequence):
    """What every node of an evaluated graph returned."""

    def __init__(self, recorder: Recorder, callees: Sequence[Callee], starts: np.ndarray):
        self._recorder = recorder
        self._callees = callees
        self._starts = starts

    def __len__(self) -> int:
        return len(self._callees)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return [self[i] for i in range(*item.indices(len(self)))]
        item = _row(item, len(self))
        callee, start = self._callees[item], int(self._starts[item])
        values = [Value(self._recorder, i, kind) for i, kind in enumerate(callee.results, start)]
        return values[0] if callee.tree is None else jax.tree.unflatten(callee.tree, values)


def evaluate(graph: Graph, cells: Mapping[str, Callable], *shared: Any) -> Sequence[Any]:
    """Computes every node of a prepared graph with cells.

    Inside a batched function all nodes are recorded at once, without running Python per node.
    Outside, the cells are called one by one.

    Args:
      graph: made by `Graph.from_dag` with `names`, or read by `Graph.load`.
      cells: the cell of each name. A node of type `name` computes
        `cells[name](*shared, *operands)`, where an operand is what a node returned, or a row of
        the graph's inputs.
      shared: leading arguments of every cell, such as parameters.

    Returns:
      A sequence with what each node returned, in order.

    Raises:
      ValueError: the graph names a type that is not among `cells`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jedbatch
      >>> double = jedbatch.cell(lambda x: 2 * x)
      >>> add = jedbatch.cell(lambda x, y: x + y)
      >>> graph = jedbatch.Graph.from_dag(
      ...     [0, 0, 1], [[-1], [-2], [0, 1]], names=["double", "add"],
      ...     inputs=[np.array([1.0, 5.0], np.float32)])
      >>> model = lambda g: jedbatch.evaluate(g, {"double": double, "add": add})[-1]
      >>> float(model(graph)), jedbatch.batch(model, in_axes=0)([graph, graph]).tolist()
      (12.0, [12.0, 12.0])
    """
    for t in np.flatnonzero(np.bincount(graph.node_type, minlength=len(graph.types))):
        if graph.types[t].name not in cells:
            raise ValueError(
                f"`evaluate` got a graph with nodes of type {graph.types[t].name!r} and cells "
                f"{sorted(cells)}; give a cell for every type, "
                f"`jedbatch.evaluate(graph, {{{graph.types[t].name!r}: ...}}, ...)`."
            )
    by_type = [cells.get(t.name) for t in graph.types]
    if recording.recorder is not None:
        made = [getattr(c, "cell", None) or (c and Cell(c, c.__name__)) for c in by_type]
        return recording.recorder.evaluate(graph, made, shared)
    inputs = [row for chunk in graph.inputs for row in chunk.rows]  # type: ignore[union-attr]
    results: list[Any] = []
    for n, t in enumerate(graph.node_type.tolist()):
        reads = graph.operand[graph.operand_ptr[n] : graph.operand_ptr[n + 1]].tolist()
        operands = [results[r] if r >= 0 else inputs[-1 - r] for r in reads]
        results.append(by_type[t](*shared, *operands))
    return results


# --- small helpers ----------------------------------------------------------------------


def _parts(x: Any) -> list[Any]:
    """What a container holds directly."""
    return jax.tree.leaves(x, is_leaf=lambda y: y is not x)


def _static_options(cell: Cell, static: dict) -> Hashable:
    """The keyword arguments of a call as part of its key."""
    for name, value in static.items():
        if any(is_array(leaf) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"cell `{cell.name}` got an array as keyword argument `{name}`; keyword arguments "
                "are static, part of the node's type. Pass arrays positionally."
            )
    try:
        return tuple(sorted((name, typed(value)) for name, value in static.items()))
    except TypeError:
        raise TypeError(
            f"cell `{cell.name}` got keyword arguments {static!r}, not all hashable; keyword "
            "arguments are static, part of the node's type. Pass a tuple instead of a list, and "
            "arrays positionally."
        ) from None


def _identity_of_constant(x: Any) -> Hashable:
    return Same(x) if is_array(x) else typed_or_same(x)


def _is_static(item: Any) -> bool:
    """True of an index without arrays: ints, slices, None, Ellipsis and tuples of them."""
    if isinstance(item, tuple):
        return all(map(_is_static, item))
    if isinstance(item, slice):
        return all(map(_is_static, (item.start, item.stop, item.step)))
    return item is None or item is Ellipsis or isinstance(item, int | np.integer)


def _frozen(item: Any) -> Hashable:
    """A static index as something hashable."""
    if isinstance(item, tuple):
        return tuple(map(_frozen, item))
    if isinstance(item, slice):
        return "slice", item.start, item.stop, item.step
    return item


def _row(i: Any, length: int) -> int:
    if not -length <= i < length:
        raise IndexError(f"index {i} is out of bounds for an axis of length {length}")
    return int(i) % length


# --- recording a minibatch --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Record:
    """What recording an instance gave.

    Attributes:
      whole, index: the instance is number `index` of this graph.
      structure: of the pytree the function returned.
      types: (shape, dtype) of its leaves.
    """

    whole: Graph
    index: int
    structure: Any
    types: tuple[tuple, ...]


def trace(
    fn: Callable,
    registry: Registry,
    instances: Sequence[Sequence[Any]],
    arrays: Sequence[Sequence[Any]],
    arrange: Callable,
) -> tuple[list[Record], list[bool], list[Any]]:
    """Runs `fn` on symbolic values, once per instance.

    Args:
      fn: the function of one instance.
      registry: where types are interned.
      instances: the mapped arguments of each instance.
      arrays: the arrays in them, in order.
      arrange: makes the arguments of `fn` from the shared and the mapped ones.

    Returns:
      For each instance its record and whether it may be kept for later calls, and the tracers of
      outer transformations that `fn` closes over.
    """
    outputs: list[int] = []
    forms, caching = [], []
    ends: list[tuple[int, ...]] = [(0, 0, 0, 0)]
    with take_current_trace() as caller:
        recorder = Recorder(registry, caller)
        with set_current_trace(recorder), _recording_with(recorder):
            shared = recorder.share()
            for i, instance in enumerate(instances):
                mapped = recorder.begin(instance, arrays[i])
                try:
                    leaves, structure = jax.tree.flatten(fn(*arrange(shared, mapped)))
                    results = [recorder.output(leaf) for leaf in leaves]
                except Exception as error:
                    error.add_note(f"This happened while instance {i} was recorded.")
                    raise
                outputs += [index for index, _ in results]
                forms.append((structure, tuple([kind for _, kind in results])))
                caching.append(recorder.caching)
                counts = recorder.callees, recorder.references, recorder.input_group, outputs
                ends.append(tuple(map(len, counts)))
            del mapped, shared, leaves, results, instance
    whole = _finish(recorder, outputs, np.array(ends, np.int64).T)
    records = [Record(whole, i, *form) for i, form in enumerate(forms)]
    return records, caching, recorder.tracers


@contextlib.contextmanager
def _recording_with(recorder: Recorder) -> Iterator[None]:
    """Cells called inside are recorded; recursion may be deep; no collections in between.

    The lists and tracers of a large minibatch make the cyclic collector run again and again over
    objects that are all alive.
    """
    before, collecting, limit = recording.recorder, gc.isenabled(), sys.getrecursionlimit()
    recording.recorder = recorder
    gc.disable()
    sys.setrecursionlimit(max(limit, MAX_FRAMES))
    try:
        yield
    finally:
        recording.recorder = before
        recorder.forget()
        sys.setrecursionlimit(limit)
        if collecting:
            gc.enable()


def _finish(recorder: Recorder, outputs: list[int], ends: np.ndarray) -> Graph:
    """The lists of a recorder as one graph of all instances."""
    registry = recorder.registry
    node_ptr, _, input_ptr, output_ptr = ends
    callee = np.array(recorder.callees, np.int64)
    present = np.flatnonzero(np.bincount(callee))
    callees = [registry.callees[c] for c in present.tolist()]
    local = np.zeros(len(registry.callees), np.int64)
    local[present] = np.arange(len(present))
    which = local[callee]

    # References to operands: a reference to a tuple stands for all that is in it.
    operand = np.array(recorder.references, np.int64)
    num_references = np.array([len(c.widths) for c in callees], np.int64)
    if any(width != 1 for c in callees for width in c.widths):
        flat = np.array([width for c in callees for width in c.widths], np.int64)
        starts = pointers(num_references)
        operand = ranges(operand, flat[ranges(starts[which], num_references[which])])
    arity = np.array([sum(c.widths) for c in callees], np.int64)[which]

    # Inputs: drop what nobody reads, and group what is read the same way, by instance.
    result = np.array(outputs, np.int64)
    group = np.array(recorder.input_group, np.int64)
    used = np.zeros(len(group), bool)
    for references in (operand, result):
        used[-1 - references[references < 0]] = True
    kept = np.flatnonzero(used)
    owner = np.searchsorted(input_ptr, kept, side="right") - 1
    if len(np.flatnonzero(np.bincount(group[kept]))) > 1:
        kept = kept[np.lexsort((kept, group[kept], owner))]
        owner = np.searchsorted(input_ptr, kept, side="right") - 1
    place = np.zeros(len(group), np.int64)
    place[kept] = np.arange(len(kept))
    for references in (operand, result):
        negative = references < 0
        references[negative] = -1 - place[-1 - references[negative]]

    return Graph(
        registry.types,
        np.array([c.node_type for c in callees], np.int32)[which],
        pointers(arity),
        operand.astype(np.int32),
        tuple(_input_rows(registry, recorder.input_value, kept, owner, group[kept])),
        result.astype(np.int32),
        node_ptr,
        pointers(np.bincount(owner, minlength=len(node_ptr) - 1)),
        output_ptr,
    )


def _input_rows(registry, values, kept, owner, group) -> Iterator[InputRows]:
    """The inputs in order, cut where the instance or the group changes."""
    if not len(kept):
        return
    change = np.flatnonzero((np.diff(group) != 0) | (np.diff(owner) != 0)) + 1
    cuts = [0, *change.tolist(), len(kept)]
    items = [values[k] for k in kept.tolist()]
    kinds = [registry.groups[g] for g in group[cuts[:-1]].tolist()]
    stacked: dict[tuple, np.ndarray] = {}
    if len(set(kinds)) == 1 and kinds[0][0] == "value":  # most models: one conversion for all
        value_type = registry.value_types[kinds[0][1]]
        stacked[kinds[0]] = host_rows(items, value_type)
    for kind, a, b in zip(kinds, cuts, cuts[1:], strict=False):
        how, value_id, *where = kind
        value_type = registry.value_types[value_id]
        if how == "value":
            whole = stacked.get(kind)
            yield InputRows(
                value_type, host_rows(items[a:b], value_type) if whole is None else whole[a:b]
            )
            continue
        leaf, row, _ = where
        if row:
            yield InputRows(value_type, np.array(items[a:b]), leaf)
        else:
            for item in items[a:b]:
                yield InputRows(value_type, None, leaf, item)


def host_rows(items: Sequence[Any], value_type: ValueType) -> np.ndarray:
    """Numbers or concrete arrays of one type, stacked on the host."""
    if jax.dtypes.issubdtype(value_type.dtype, jax.dtypes.extended):
        items = [jax.random.key_data(x) for x in items]
        return np.stack([np.asarray(x) for x in items])
    if is_array(items[0]):
        items = [np.asarray(x) for x in items]
    return np.array(items, value_type.dtype)
