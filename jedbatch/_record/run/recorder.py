"""A recorder of what a function does to symbolic values.

The user's function runs once per instance, as ordinary Python, on symbolic values. Each
operation it performs becomes a node of the instance's graph and nothing is computed. Work enters
through three entry points:

1. a call of a `@cell`: a dictionary look-up and a few list appends, no JAX in it;
2. a call of a `jax.jit`-ted function, which reaches us as one primitive that brings its own
   program along: one node;
3. any other JAX operation (`jnp.tanh(x)`, `x @ w`, a Flax layer): one node per primitive.

The second and third exist because symbolic values are JAX tracers of a trace of our own, so that
JAX hands us every primitive together with its operands. What an operation reads decides what
becomes of it:

    something symbolic          a node of the graph
    shared arguments only       computed once per minibatch, before the nodes; unless it depends
                                on the instance by a number (`params * len(tree)`) or by how
                                often it is repeated: a node
    neither                     computed now; the result is a constant

A tuple that a cell returns is remembered as a whole, so that a state (h, c) that is passed on is
looked up once.

Source: lazy recording after Zha et al., Just-in-time dynamic batching, 2019; a custom
`jax.core.Trace` as in JAX's autodidax.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Trace, Tracer
from jax.extend.core import set_current_trace

from jedbatch import checks
from jedbatch._graph.operations import PrimitiveKey
from jedbatch._jaxpr.interpret import has_gradient, returns_nothing
from jedbatch._jaxpr.numbers import Number, traced_bodies
from jedbatch._jaxpr.symbolic_dims import are_lengths_told, as_number, as_numbers
from jedbatch._jaxpr.versions import failing_without_trace
from jedbatch._record.calls.fast_path import (
    DescribedCell,
    Description,
    describe_call,
    described_cell,
    fast_path,
    in_order,
    lists_of_ints,
    nothing_to_forget,
    refuse_call,
)
from jedbatch._record.calls.slow_path import cell_call_spec, slow_path
from jedbatch._record.cell import Cell, pause
from jedbatch._record.identity.arithmetic import PythonNumber, read_by_jax
from jedbatch._record.identity.mutation import (
    Holders,
    Watched,
)
from jedbatch._record.identity.number_operands import CellSpec, with_operands
from jedbatch._record.identity.primitives import identity_of_array, identity_of_constant
from jedbatch._record.instances.arrays import array_type, is_array, owned_arrays, replace_arrays
from jedbatch._record.operations.containers import shared_token, tokens_of_containers
from jedbatch._record.operations.failures import note_operation
from jedbatch._record.operations.filled_arrays import known_filling
from jedbatch._record.operations.floats import Floating, check_rule, check_rules, refused
from jedbatch._record.operations.indexing import index_shared, index_value
from jedbatch._record.operations.inlining import record_inlined
from jedbatch._record.operations.known_operations import (
    note_last_node,
    operate,
    record_again,
    way_of,
)
from jedbatch._record.operations.lengths_told import MAKES_ARRAYS, params_with_extents
from jedbatch._record.operations.sequences import Elements, Sequenced, check_elements
from jedbatch._record.operations.stacking import MAKES_STACKS, Row, Stacking
from jedbatch._record.operations.static_numbers import (
    STATIC,
    lifted_numbers,
    row_of_weight,
    with_data,
)
from jedbatch._record.operations.symbols import Shared, Symbol, Value, frozen, value_reached
from jedbatch._record.types.custom_rules import calling_with_rule, record_custom
from jedbatch._record.types.registry import CallSpec, Registry
from jedbatch._record.types.shared_operands import VALUE
from jedbatch._record.types.tracing import NUMBER_TYPES
from jedbatch._support.types import Array, Leaf, PyTree
from jedbatch.errors import EscapedValueError

MANY_WATCHED = 64  # containers that are kept for other instances


def symbolic(
    recorder: Any,
    instance: PyTree,
    arrays: Sequence[Array],
    types: Any = None,
) -> PyTree:
    """The instance with its arrays replaced by symbols; for arguments see
    `Recorder.begin`.
    """
    if not arrays:
        return instance
    types = list(map(array_type, arrays)) if types is None else types
    kind_of = {id(t): recorder.registry.value_type(*t) for t in {id(t): t for t in types}.values()}
    kinds = [kind_of[id(t)] for t in types]
    recorder.has_numbers = type(instance) in (Floating, Sequenced)
    symbols: list[Any]
    if type(instance) is Floating:
        symbols = instance.as_symbols(recorder, kinds)
        sequences, instance = instance.sequences, instance.with_arrays()
    else:
        symbols = [recorder.leaf_value(kind, leaf, ()) for leaf, kind in enumerate(kinds)]
        sequences = {}
        if type(instance) is Sequenced:
            sequences, instance = instance.sequences, tuple(instance)
    for leaf, x in enumerate(arrays if sequences else ()):
        if id(x) in sequences:
            symbols[leaf] = Elements(recorder, symbols[leaf], leaf, sequences[id(x)]).given
    return replace_arrays(instance, iter(symbols))


def output(recorder: Any, leaf: Leaf) -> tuple[int, tuple]:
    """(reference, (shape, dtype)) of a leaf of what the function returns."""
    if type(leaf) is Value and leaf._trace is recorder:
        return _output_of(recorder, leaf)
    if type(leaf) is int or type(leaf) is float:
        return _output_of(recorder, recorder.input(leaf))
    leaf = result_leaf(read_by_jax(leaf))
    if isinstance(leaf, Tracer) or recorder.is_weight_reached(leaf):
        symbol = recorder.symbol(leaf)
    else:
        recorder.trust(leaf)
        symbol = recorder.input(leaf)
    if isinstance(symbol, Shared):
        symbol = recorder.shared_value(symbol)
    return _output_of(recorder, symbol)


def _output_of(recorder: Any, symbol: Value) -> tuple[int, tuple]:
    value_type = recorder.registry.value_types[symbol.type]
    return symbol.index, (value_type.shape, value_type.dtype)


def result_leaf(leaf: Leaf) -> Leaf:
    """Returns a leaf of what a function returns; raises `TypeError` if it is no array or number."""
    leaf = as_number(leaf)
    if not (is_array(leaf) or isinstance(leaf, NUMBER_TYPES)):
        raise TypeError(
            f"the function returned {checks.shown(leaf)}; expected an array, a number or a pytree "
            "of them."
        )
    return leaf


class Recorder(Trace):
    """Records instances, one after the other, into flat lists.

    Attributes:
      result: the class of the results of nodes.
      caller: JAX's trace around the batched function.
      counter: a list of one number, that of results so far.
      call_specs: the type of every node.
      references: what the nodes read: results, or inputs as `-1 - i`.
      input_group, input_value: how every input is read, and its value or position.
      tracers: tracers of outer transformations that the function closes over.
      caching: whether the current instance's graph is good for later calls too.
      containers: (token, None) by the id of containers of shared values, as in `known`.
      cells: descriptions of the functions of cells.
      computed: arrays that were computed from numbers and constants, by id.
      leaves: (number, path) of the instance's arrays and their parts, by reference.
      constants: places symbols for arrays that the function makes; or None.
      read: gives the value of a symbol as a NumPy array; None if values are not to be had.
      leaving: is told of symbols whose values leave JAX, and by what, before they do; or None.
      together: what some functions return, which may wait for values each on its own.
      keeps_types: whether operations are to have the types at first that they have later, as far as
        that can be; programs of rounds would otherwise grow when types change.
      noting: is called for each operation outside of cells; or None.
      elements: (elements, number) of sequences, by the values that operations of JAX read.
      stacking: finds stacks of rows of arrays of the instance; None as long as there are no rows.
      has_unread: whether others took the place of stacks, so that some nodes may not be read.
    """

    __slots__ = ("__dict__", "call_cell")  # the compiled core reads `call_cell` for every call

    result: type[Value] = Value

    def __init__(
        self,
        registry: Registry,
        caller: Any,
        read: Callable[[Symbol], np.ndarray] | None = None,
        together: Callable[[Sequence[Callable[[], Any]]], list[Any]] = in_order,
        noting: Callable[[], None] | None = None,
    ):
        super().__init__()
        self.registry = registry
        self.caller = caller
        self.active = True
        self.caching = True
        self.read = read
        self.together = together
        self.leaving: Callable[[Symbol, str], None] | None = None
        ints: list[list[int]] = lists_of_ints(self.result, 4)
        self.call_specs, self.references, self.input_group, self.counter = ints
        self.counter.append(0)
        self.input_value: list[Leaf] = []
        self.tracers: list[Leaf] = []
        self._instance: Any = None
        self.known: dict[int, tuple[Any, int | None]] = {}
        self.kept: list[Any] = []  # keeps what `known` knows by id alive
        self.containers: dict[int, tuple[Hashable, None]] = {}
        self._kept_containers: list[Any] = []
        self.cells: dict[Cell, DescribedCell] = {}
        self.cells_of_instance: list[Cell] = []
        self.made_cells: dict[Hashable, tuple[Holders, str]] = {}  # by what they hold
        self._shared: Any = None
        self.leaves: dict[int, tuple[int, Leaf]] = {}
        self.computed: dict[int, Any] = {}
        self._owned: set[int] | None = None
        self.watched: dict[int, Watched] = {}  # containers that may change
        self._fast_path, self._forget_objects, self._next_instance = fast_path(self)
        self.call_cell = self._fast_path
        self.constants: Any = None
        self.noting = noting
        self.keeps_types = False
        self.has_numbers = False  # of Python, for floats and elements of the instance
        self.elements: dict[int, tuple[Elements, Any]] = {}
        self.stacking: Stacking | None = None
        self.has_unread = False
        self._begin = 0, 0, 0  # nodes, references and results before the instance

    def is_valid(self) -> bool:
        if self.active:
            return True
        raise EscapedValueError(
            "a symbolic value is used after its function was recorded; expected it to be "
            "returned from the function. `help(jedbatch.errors.EscapedValueError)` says how "
            "values escape."
        )

    def share(self) -> PyTree:
        """The shared arguments with symbols for leaves."""
        leaves = [Shared(self, i) for i in range(self.registry.num_leaves)]
        self._shared = jax.tree.unflatten(self.registry.structure, leaves)
        self.containers = tokens_of_containers(self.registry, self._shared)
        return self._shared

    def begin(
        self,
        instance: PyTree,
        arrays: Sequence[Array],
        types: Any = None,
    ) -> PyTree:
        """Starts an instance after another is done; its arrays are replaced by symbols.

        Args:
          instance: the instance.
          arrays: of it.
          types: (shape, dtype, weak) of the arrays, if an extent is not to be known.
        """
        self._next_instance()
        for memory in (self.known, self.kept, self.leaves, self.elements):
            memory.clear()
        self.known.update(self.containers)
        if len(self.watched) > MANY_WATCHED:  # others are looked at where they are met again
            self.watched.clear()
        while self.cells_of_instance:
            cell = self.cells_of_instance.pop()
            self.cells.pop(cell, None)
            self.registry.cells.pop(cell, None)
        self.caching = True
        self.registry.shared_operands.num_instances += 1
        self.turn_to(instance)
        self.has_numbers, self.stacking = False, None
        self._begin = len(self.call_specs), len(self.references), self.num_values
        self.call_cell = self._fast_path
        self.constants = None
        return self.symbolic(instance, arrays, types) if arrays else instance

    def turn_to(self, instance: PyTree) -> None:
        """Records into an instance from now on, begun now or before."""
        self._instance = instance
        self._owned = None

    def forget(self) -> None:
        """Lets go of everything symbolic, and of those who computed its values."""
        self.active = False
        self.read, self.leaving, self.noting, self.together = None, None, None, in_order
        self.call_cell = self._fast_path = refuse_call  # the function there holds this recorder
        self._forget_objects()
        self._forget_objects = self._next_instance = nothing_to_forget
        self._instance = self._shared = self._owned = None
        if self.result is Value and type(self.registry) is not weakref.ProxyType:
            # The collector may not follow symbols that users keep; these keep this recorder.
            self.registry = weakref.proxy(self.registry)
        for memory in (self.known, self.containers, self.kept, self.computed, self.leaves):
            memory.clear()
        self.constants = None
        self.cells.clear()
        self.watched.clear()
        self.cells_of_instance.clear()
        self.made_cells.clear()
        self._kept_containers.clear()

    @property
    def num_values(self) -> int:
        """Results so far."""
        return self.counter[0]

    @num_values.setter
    def num_values(self, number: int) -> None:
        self.counter[0] = number

    @property
    def written(self) -> tuple[list, ...]:
        """(types of nodes, references, groups of inputs, values of inputs)."""
        return self.call_specs, self.references, self.input_group, self.input_value

    def new_input(self, group: int, value: Any) -> int:
        self.input_group.append(group)
        self.input_value.append(value)
        return -len(self.input_group)

    def leaf_value(self, kind: int, leaf: int, path: tuple) -> Value:
        """An array of the instance, or the part of it that static indices lead to."""
        row = len(path) == 1 and isinstance(path[0], int)
        group = self.registry.group("leaf", kind, leaf, row, None if row else frozen(path))
        position = self.new_input(group, path[0] if row else path)
        self.leaves[position] = (leaf, path)
        return Value(self, position, kind)

    def note_row(self, value: Value, row: Row) -> None:
        """Notes that a value of the instance is a row of an array of any length."""
        self._stacking().note(value, row)

    def _stacking(self) -> Stacking:
        """Returns what finds stacks of rows of the instance."""
        if self.stacking is None:
            self.stacking = Stacking(self, self._begin)
        return self.stacking

    def input(self, x: Leaf) -> Value:
        """A number or concrete array as an input of the instance."""
        kind = self.registry.value_type(*array_type(x))
        x = x.copy() if isinstance(x, np.ndarray) else x  # it may change before it is read
        return Value(self, self.new_input(self.registry.group("value", kind), x), kind)

    def symbol(self, x: Leaf) -> Leaf:
        """Any array or number as a symbol."""
        if isinstance(x, Tracer):
            if type(x) is PythonNumber:
                raise refused(x, "a cell holds")  # and Python computes with it there
            if isinstance(x, Symbol):
                x._trace.is_valid()
            if x._trace is self:
                return x
            if (way := self.registry.reached.get(id(x))) is not None:
                return Shared(self, self.registry.outer(way, jax.typeof(x)))
            self.caching = False  # a tracer of an outer transformation: here today, gone tomorrow
            position = next((k for k, t in enumerate(self.tracers) if t is x), len(self.tracers))
            if position == len(self.tracers):
                self.tracers.append(x)
            return Shared(self, self.registry.outer(position, jax.typeof(x)))
        if id(x) in self.computed:  # it cannot change: one input for all who read it
            if id(x) not in self.known:
                value = self.input(x)
                self.known[id(x)] = value.type, value.index
            kind, index = self.known[id(x)]
            assert index is not None
            return Value(self, index, kind)
        if isinstance(x, jax.Array) and x.ndim and not self._is_owned(x):
            self.trust(x)
            way = self.registry.reached.get(id(x))
            if way is None:
                return Shared(self, self.registry.closed_over(x))
            shared = Shared(self, self.registry.outer(way, jax.typeof(x)))
            self.known[id(x)] = self.containers[id(x)] = shared_token(self.registry, way, shared)
            return shared
        self.trust(x)
        return self.input(x)

    def have_constants(self, constants: Any) -> None:
        """Has symbols take the place of constants, in calls of cells, too."""
        self.constants = constants
        self.call_cell = self._fast_path if constants is None else self._call_with_constants

    def with_constants(self, tree: PyTree) -> PyTree:
        """A pytree with symbols for arrays of NumPy that are constants of the instance."""

        def constant(x: Leaf) -> Leaf:
            is_array_of_numpy = isinstance(x, np.ndarray) and x.ndim
            return self.constants.get(identity_of_array(x), x) if is_array_of_numpy else x

        if not self.constants or np.ndarray not in map(type, jax.tree.leaves(tree)):
            return tree
        return jax.tree.map(constant, tree)

    def _call_with_constants(self, cell: Cell, args: tuple, static: dict) -> PyTree:
        """Records a call of a cell, some of whose arguments may be constants of the instance."""
        return self._fast_path(cell, self.with_constants(args), static)

    def _is_owned(self, x: Leaf) -> bool:
        """Returns whether an array is part of the instance."""
        if self._owned is None:
            self._owned = owned_arrays(self._instance)
        return id(x) in self._owned

    def is_weight_reached(self, x: Leaf) -> bool:
        """True of arrays that the function reaches and that programs read: all but numbers."""
        if id(x) not in self.registry.reached or not isinstance(x, jax.Array):
            return False
        return x.ndim > 0 and has_gradient(x.dtype) and not self._is_owned(x)

    def value_of(self, symbol: Symbol) -> np.ndarray | None:
        """The value of a symbol; None if values are not to be had."""
        if type(symbol) is Value and self.read is not None:
            return self.read(symbol)
        value = value_reached(self, symbol)
        return self.read(symbol) if value is None and self.read is not None else value

    def trust(self, x: Leaf) -> None:
        """Notes that an instance reads an array; another one may be read the next time."""
        if isinstance(x, jax.Array) and self.caching:
            is_known = id(x) in self.computed or id(x) in self.registry.reached
            self.caching = is_known or self._is_owned(x)

    # --- cells ---

    def results(self, call_spec: CallSpec, index: int) -> PyTree:
        """Returns the results of a recorded call, in its structure."""
        values = [self.result(self, i, kind) for i, kind in enumerate(call_spec.results, index)]
        if call_spec.tree is None:
            return values[0]
        out = jax.tree.unflatten(call_spec.tree, values)
        if call_spec.unit is not None:
            self.known[id(out)] = call_spec.unit, index
            self.kept.append(out)
        return out

    def record(self, call_spec: CallSpec) -> PyTree:
        """Appends a node whose references are in place already; returns its results."""
        self.call_specs.append(call_spec.node_type)
        if self.noting is not None:
            self.noting()
        index = self.num_values
        self.num_values = index + len(call_spec.results)
        return self.results(call_spec, index)

    def description(self, cell: Cell, args: tuple, static: dict) -> Description:
        """The description of a call; raises `NotDescribedError` if it has none."""
        return describe_call(self, cell, args, static, writes=False)

    def note_container(self, x: Any, token: Hashable) -> None:
        """Notes the token of a container that stays as it is while something is recorded."""
        self.known[id(x)] = self.containers[id(x)] = token, None
        self._kept_containers.append(x)

    def slow_path(self, cell: Cell, args: tuple, static: dict) -> PyTree:
        """Records a call of a cell: any pytrees of anything."""
        if self.has_numbers and any(type(x) is PythonNumber for x in jax.tree.leaves(args)):
            check_elements(args)
            return self.call_cell(cell, jax.tree.map(read_by_jax, args), static)
        return slow_path(self, cell, args, static)

    def cell_call_spec(self, cell: Cell, args: tuple, static: dict) -> tuple[CellSpec, list] | None:
        """(how to record a call of a cell, its references); None if it is not ours to record."""
        return cell_call_spec(self, cell, args, static)

    # --- jit-ted functions and other primitives ---

    described_cell = described_cell
    index_value = index_value
    index_shared = index_shared
    operate = operate
    output = output
    symbolic = symbolic

    def process_primitive(self, primitive, tracers, params, /):
        if primitive.multiple_results and returns_nothing(params):
            return []
        if self.has_numbers:
            tracers = list(map(read_by_jax, tracers))
            for program in traced_bodies(primitive.name, params):
                check_rules(program)
        if self.constants and any(isinstance(x, Tracer) for x in tracers):
            tracers = self.with_constants(list(tracers))
        if primitive.name == "slice" and type(tracers[0]) is not Value:
            row = row_of_weight(self, tracers[0], params)
            if row is not None:
                return self._operation("slice", "row", _row, [tracers[0], row])[0]
        if primitive.name in MAKES_ARRAYS and (self.constants or primitive.name == "reshape"):
            params = params_with_extents(self.constants, primitive.name, tracers, params)
        filling, known = known_filling(self, primitive, tracers, params)
        if known is not None:
            return self.made([known], tracers)[0]
        tracers = as_numbers(tracers, self)
        inlined = record_inlined(self, primitive, tracers, params)
        if inlined is not None:
            return inlined
        if primitive.name in STATIC:
            made = with_data(self, primitive, tracers, params)
            if made is not None:
                return made if primitive.multiple_results else made[0]
        key = self.registry.keys.primitive_key(primitive, params)

        def call(*values):
            out = primitive.bind(*values, **params)
            return out if primitive.multiple_results else [out]

        name = params["name"] if primitive.name == "jit" else primitive.name
        out = self.perform(name, key, call, tracers)
        if filling is not None and not isinstance(out[0], Tracer):
            self.registry.constants[filling] = [*out, *filter(is_array, tracers)]
        if name in MAKES_STACKS and type(out[0]) is Value and are_lengths_told():
            with set_current_trace(self):  # there is none while an operation is processed
                of_array = self._stacking().of_array(out[0])
            if of_array is not None:
                self.has_unread, out = True, [of_array]
        return out if primitive.multiple_results else out[0]

    def perform(
        self,
        name: str,
        key: PrimitiveKey,
        call: Callable,
        args: Sequence[Leaf],
        lift: Callable = with_operands,
    ) -> list:
        """Records `call(*args) -> list of arrays`, of which `key` tells what it is.

        With some of its numbers as operands, by position, it is `lift(call, positions)`.
        """
        lifted = lifted_numbers(self, key, args) if key.numbers else ()
        operation: Hashable = key
        if lifted:
            constant = (x.key for k, x in enumerate(key.numbers) if k not in lifted)
            operation = (key.skeleton, lifted, *constant)
            args = [*(self.number(key.numbers[k]) for k in lifted), *args]
        way = way_of(self, operation, args) if self.active else None
        known = None if way is None else self.registry.operations.get(way)
        if known is not None:
            return record_again(self, known, args)
        before = len(self.input_group), len(self.call_specs)
        written = operation if lifted else key.written
        computed = lift(call, lifted) if lifted else call
        try:
            out = self._operation(name, written, computed, args, is_ragged=key.is_ragged)
        except Exception as error:
            note_operation(error, name, args)
            raise
        if way is not None and before[1] == len(self.call_specs) - 1:
            note_last_node(self, way, args, before[0])
        return out

    def number(self, number: Number) -> Value:
        """A number in the body of an operation as an input of the instance."""
        value = number.value
        kind = self.registry.value_type(value.shape, value.dtype, number.weak)
        return Value(self, self.new_input(self.registry.group("value", kind), value), kind)

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **told):
        if self.has_numbers:
            check_rule(fun)
        call = calling_with_rule("process_custom_jvp_call", primitive, fun, jvp, **told)
        return record_custom(self, (fun, jvp), call, list(map(read_by_jax, tracers)))

    def process_custom_vjp_call(self, primitive, fun, fwd, bwd, tracers, /, **told):
        if self.has_numbers:
            check_rule(fun)
        forward = failing_without_trace(fwd)
        call = calling_with_rule("process_custom_vjp_call", primitive, fun, forward, bwd, **told)
        return record_custom(self, (fun, fwd, bwd), call, list(map(read_by_jax, tracers)))

    def stage_value(self, val):
        """A number or array of NumPy as an immutable array of JAX."""
        if isinstance(val, jax.Array):
            return val
        shape, dtype, weak = array_type(val)
        number = next((t for t in (int, float, complex) if isinstance(val, t)), None)

        def stage(x):
            return [jnp.asarray(number(x)) if weak and number else jnp.asarray(np.array(x, dtype))]

        return self._constant(("stage", shape, dtype, weak), stage, [val])[0]

    def _operation(
        self, name: str, key: Hashable, call: Callable, args: Sequence[Leaf], is_ragged=False
    ) -> list:
        """Records `call(*args) -> list of arrays`, or computes it if nothing is symbolic.

        What `is_ragged` depends on the extent of an array of the instance.
        """
        if self.registry.reached:
            args = [self.symbol(x) if self.is_weight_reached(x) else x for x in args]
        is_computed_before = not is_ragged and not self.registry.is_bounded(key, call, args)
        if is_computed_before and not any(isinstance(x, Tracer) for x in args):
            return self._constant(key, call, args)
        tracers = {i: self.symbol(x) for i, x in enumerate(args) if isinstance(x, Tracer)}
        indices = {i: s.index if isinstance(s, Shared) else VALUE for i, s in tracers.items()}
        known, shared_values = self.registry.shared_operands, self.registry.shared
        values = known.values_of(name, key, len(args), indices, shared_values)
        tracers |= {i: self.shared_value(tracers[i]) for i in values}
        shared = tuple(s.index for s in tracers.values() if isinstance(s, Shared))
        if len(shared) == len(tracers) and is_computed_before:
            numbers = tuple(map(identity_of_constant, (x for x in args if not np.ndim(x))))
            arrays = tuple(map(identity_of_constant, filter(self._is_value, args)))
            if not known.varies(key, shared, shared_values, numbers, arrays):
                return self._shared_operation(key, call, args, tracers)
        symbols = [tracers[i] if i in tracers else self.symbol(x) for i, x in enumerate(args)]
        slots = tuple(isinstance(s, Value) for s in symbols)

        def arranged(shared_values, operand_values):
            sources = iter(shared_values), iter(operand_values)
            return list(call(*(next(sources[is_value]) for is_value in slots)))

        shared = tuple(s.index for s in symbols if isinstance(s, Shared))
        operands = [s for s in symbols if isinstance(s, Value)]
        return self.node(name, (key, slots), arranged, shared, operands)

    def _is_value(self, x: Leaf) -> bool:
        """Returns whether this is an array that counts as a value, not as a weight."""
        return np.ndim(x) > 0 and (isinstance(x, np.ndarray) or id(x) in self.computed)

    def node(self, name, key, call, shared, operands) -> PyTree:
        kinds = tuple(v.type for v in operands)
        call_spec = self.registry.call_spec(name, key, call, shared, kinds)
        self.references += [v.index for v in operands]
        return self.record(call_spec)

    def shared_value(self, symbol: Shared) -> Value:
        """A shared value as a value of the instance."""
        return self.node("shared", "identity", lambda shared, _: shared[0], (symbol.index,), [])

    def _constant(self, key: Hashable, call: Callable, args: Sequence[Leaf]) -> list[Leaf]:
        """Computes an operation on concrete values, or finds what it gave before."""
        for x in args:
            self.trust(x)
        constants = self.registry.constants
        full = (key, *map(identity_of_constant, args))
        out = constants.get(full)
        if out is None:
            with pause(), jax.ensure_compile_time_eval():
                out = list(call(*args))
            constants[full] = out
        return self.made(out, args)

    def made(self, out: list[Array], args: Sequence[Leaf]) -> list[Leaf]:
        """Returns what an operation on concrete values gives: symbols of the instance's constants.

        The operation read `args`.
        """
        for x in out:
            self.computed[id(x)] = x
            if np.ndim(x):
                self.registry.note_length(x.shape, x.dtype)
        return [self.constants.get(id(x), x) for x in out] if self.constants else out

    def _shared_operation(self, key, call, args, tracers) -> list[Leaf]:
        """Records an operation on shared values and constants, done once per minibatch."""
        self.registry.note_repeated()
        marks = tuple(
            "shared" if i in tracers else identity_of_constant(x) for i, x in enumerate(args)
        )

        def filled(*values):
            source = iter(values)
            return call(*(next(source) if i in tracers else x for i, x in enumerate(args)))

        # A call kept for later must not keep this recorder's tracers alive.
        args = [None if i in tracers else x for i, x in enumerate(args)]
        shared = tuple(s.index for s in tracers.values())
        tracers = set(tracers)
        return [Shared(self, i) for i in self.registry.shared_results((key, marks), filled, shared)]


def _row(x: Array, k: Array) -> list[Array]:
    """The slice that is row k of an array."""
    return [x[k][None]]
