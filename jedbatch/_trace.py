"""Recording what one instance computes.

The user's function runs once per instance, as ordinary Python, on symbolic values. Each
operation it performs becomes a node of the instance's graph and nothing is computed. Work
enters through four doors:

1. a call of a `@cell`: a dictionary look-up and a few list appends, no JAX in it;
2. a call of a `jax.jit`-ted function, which reaches us as one primitive that brings its own
   program along: one node;
3. any other JAX operation (`jnp.tanh(x)`, `x @ w`, a Flax layer): one node per primitive;
4. `evaluate`, which records a whole prepared graph at once.

Doors 2 and 3 open because symbolic values are JAX tracers of a trace of our own, so that JAX
hands us every primitive together with its operands. What an operation reads decides what
becomes of it:

    something symbolic          a node of the graph
    shared arguments only       computed once per minibatch, before the nodes
    neither                     computed now; the result is a constant

Everything met is interned in a `Registry`, which belongs to one structure of shared
arguments and lives as long as the batched function: types, shared values and the graphs of
instances seen before.

Source: lazy recording after Zha et al., Just-in-time dynamic batching, 2019; tracing by a
custom `jax.core.Trace` as in the autodidax.
"""

import contextlib
import functools
import gc
import sys
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Trace, Tracer
from jax.extend.core import Literal, Var, set_current_trace, take_current_trace

from jedbatch._graph import Graph, InputRows, NodeType, ValueType, pointers, ranges
from jedbatch._instances import array_type, is_array, owned_arrays, replace_arrays, typed

MAX_FRAMES = 250_000  # Python frames a recursive model may be deep while it is recorded
MANY_VARIANTS = 32  # distinct closures of one cell before we warn


class SymbolicValueError(TypeError):
    """Python needed the value of something that has not been computed yet.

    **Symptom.** `if`, `while`, `bool()`, `int()`, `float()`, `range()`, `.item()`,
    `numpy.asarray` or indexing a list met a symbolic value.

    **Reason.** While a batched function is recorded, arrays of the instance and results of
    operations have a shape and a dtype but no value: values are computed later, for all
    instances at once.

    **Cure.** Decide on what is known: Python numbers, strings, shapes and the structure of
    the instance reach the function as they are. Choose between values with `jnp.where`, or
    put the decision inside a cell with `jax.lax.cond`. Python control flow on computed values
    is not supported yet.

        # instead of                     write
        if score > 0:                    h = jnp.where(score > 0, a(h), b(h))
            h = a(h)
        else:
            h = b(h)
    """


class EscapedValueError(RuntimeError):
    """A symbolic value was used after the function that made it had been recorded.

    **Symptom.** An operation outside the batched function met a symbolic value.

    **Reason.** Symbolic values live while one function is recorded. They got out through a
    global, an attribute, a list outside the function, or a cell that kept one.

    **Cure.** Return the value from the batched function. Do not cache what the function
    computes between calls: it is recorded once and then run many times.

        kept = []
        def model(params, x):
            h = layer(params, x)
            kept.append(h)      # h leaves through the list: return it instead
            return h
    """


class RecompilationWarning(UserWarning):
    """Something makes new node types again and again, and each must be compiled."""


class _Recording(threading.local):
    recorder: "Recorder | None" = None


_recording = _Recording()


class Cell:
    """One unit of batching; see `cell`."""

    def __init__(self, fn: Callable, name: str | None = None):
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self.identity = None if _free_values(fn) else _function_identity(fn)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **static: Any) -> Any:
        recorder = _recording.recorder
        if recorder is None:
            return self.fn(*args, **static)
        return recorder.call_cell(self, args, static)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"jedbatch.cell({self.name})"


def cell(fn: Callable | None = None, *, name: str | None = None) -> Any:
    """Makes a function one unit of batching.

    Inside a batched function each call is one node, and calls that agree in type (see
    "Identity") run together. Everywhere else the cell is the function it wraps, so the same
    model runs instance by instance without jedbatch.

    Args:
      fn: a pure function of arrays, for one instance: arrays or pytrees of arrays in, an
        array or a pytree of arrays out. Positional Python numbers are values; keyword
        arguments are static and part of the type, so they must be hashable.
      name: shown in plans; by default the function's name.

    Returns:
      The cell, callable like `fn`.

    Identity:
      Two cells are the same if their functions have the same code, defaults and closed-over
      values. A cell made inside the batched function is therefore the same at every call,
      unless it closes over something new each time (`RecompilationWarning`). Symbolic values
      it closes over directly become operands.

    Example:
      >>> import jax.numpy as jnp, jedbatch
      >>> @jedbatch.cell
      ... def halve(x, *, times):
      ...     return x * 0.5**times
      >>> float(halve(jnp.float32(8), times=2))
      2.0
    """
    if fn is None:
        return functools.partial(cell, name=name)
    if not callable(fn):
        raise TypeError(
            f"`cell` got {fn!r}, which is not callable; give it a function of arrays, as in\n"
            "    @jedbatch.cell\n    def layer(params, x): ..."
        )
    return Cell(fn, name)


def _free_values(fn: Any) -> tuple[Any, ...]:
    """What a Python function closes over."""
    cells = getattr(fn, "__closure__", None) or ()
    values = []
    for c in cells:
        with contextlib.suppress(ValueError):  # a name not assigned yet
            values.append(c.cell_contents)
    return tuple(values)


def _function_identity(fn: Any) -> Hashable:
    """Equal for functions that compute the same: code, defaults and closed-over values."""
    if isinstance(fn, Cell):
        return _function_identity(fn.fn)
    if isinstance(fn, functools.partial):
        items = tuple(sorted(fn.keywords.items()))
        return _function_identity(fn.func), *map(_value_identity, (*fn.args, *items))
    if isinstance(fn, types.MethodType):
        return _function_identity(fn.__func__), _value_identity(fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return _value_identity(fn)
    parts = (*_free_values(fn), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items())
    return fn.__code__, tuple(map(_value_identity, parts))


def _value_identity(value: Any) -> Hashable:
    if isinstance(value, Tracer):
        return "operand"
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial | Cell):
        return _function_identity(value)
    if isinstance(value, tuple):
        return tuple, *map(_value_identity, value)
    try:
        return typed(value)
    except TypeError:
        return _Same(value)


class _Same:
    """Equal to another exactly if both hold the same object; keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


# --- what is recorded, interned ---------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """What the nodes of a type compute; compared by `key` alone.

    `jaxpr` maps the shared values and then the operands to the results.
    """

    key: Hashable
    jaxpr: Any = field(compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class SharedValue:
    """A value that does not depend on the instance.

    It is leaf number `leaf` of the shared arguments, a tracer or array number `lifted` that
    the function closes over, or result `result` of `call(*args)` on earlier shared values.
    """

    aval: ShapedArray
    leaf: int | None = None
    lifted: int | None = None
    call: Callable | None = None
    args: tuple[int, ...] = ()
    result: int = 0


class _Callee:
    """How calls with equal keys are recorded: their type, and what they return."""

    __slots__ = ("results", "tree", "type", "unit", "widths")

    def __init__(self, node_type, widths, results, tree, unit):
        self.type = node_type  # id of the node type
        self.widths = widths  # operands per reference
        self.results = results  # (aval, value type id) of each result
        self.tree = tree  # None if the result is one array, else its pytree structure
        self.unit = unit  # token of the result as a whole, if it is a flat tuple


class Registry:
    """All that has been met while recording for one structure of shared arguments.

    Attributes:
      node_types: the node types, by id.
      value_types: the value types, by id.
      shared: the shared values, by id; the leaves of the shared arguments come first.
      arrays: concrete arrays that functions close over, by position among the lifted.
    """

    def __init__(self, leaf_avals: Sequence[ShapedArray], structure: Any):
        self.structure = structure
        self.node_types: list[NodeType] = []
        self.value_types: list[ValueType] = []
        self.avals: list[ShapedArray] = []
        self.shared = [SharedValue(aval, leaf=i) for i, aval in enumerate(leaf_avals)]
        self.num_leaves = len(leaf_avals)
        self.arrays: list[Any] = []
        self.graphs: dict[Hashable, Any] = {}
        self._type_ids: dict[Hashable, int] = {}
        self._value_ids: dict[ValueType, int] = {}
        self._shared_ids: dict[Hashable, int] = {}
        self._units: dict[tuple[int, ...], int] = {}
        self._groups: dict[Hashable, int] = {}
        self._jaxprs: dict[Hashable, Hashable] = {}
        self._callees: dict[Hashable, _Callee] = {}
        self._fast_callees: dict[Hashable, _Callee] = {}
        self._constants: dict[Hashable, list[Any]] = {}
        self._variants: dict[Hashable, set[Hashable]] = {}
        self._types: tuple[NodeType, ...] = ()

    @property
    def types(self) -> tuple[NodeType, ...]:
        """The node types as a tuple, one object as long as nothing is added."""
        if len(self._types) != len(self.node_types):
            self._types = tuple(self.node_types)
        return self._types

    def value_type(self, shape: tuple[int, ...], dtype: Any, weak: bool) -> int:
        """The id of a value type."""
        key = ValueType(shape, dtype, weak)
        index = self._value_ids.get(key)
        if index is None:
            index = self._value_ids[key] = len(self.value_types)
            self.value_types.append(key)
            self.avals.append(ShapedArray(shape, dtype, weak_type=weak))
        return index

    def unit(self, value_ids: tuple[int, ...]) -> int:
        """A negative token for a tuple of values of these types."""
        return -1 - self._units.setdefault(value_ids, len(self._units))

    def group(self, *key: Hashable) -> int:
        """The id of a group of inputs that are read the same way."""
        return self._groups.setdefault(key, len(self._groups))

    @property
    def groups(self) -> list[tuple]:
        return list(self._groups)

    def node_type(self, name, key, call, shared, operands, *, user_code=False) -> int:
        """The id of the type of nodes that compute `call(shared values, operands)`.

        `operands` are value type ids. `call` is traced once, when the type is new.
        """
        full = (key, shared, operands)
        index = self._type_ids.get(full)
        if index is None:
            jaxpr, tree, extra = self._abstract(name, call, shared, operands, user_code)
            results = tuple(self.value_type(a.shape, a.dtype, a.weak_type) for a in jaxpr.out_avals)
            node_type = NodeType(
                name,
                Operation((key, tree), jaxpr),
                tuple(self.value_types[v] for v in operands),
                (*extra, *shared),
                tuple(self.value_types[v] for v in results),
            )
            index = self._type_ids[full] = len(self.node_types)
            self.node_types.append(node_type)
            self._trees = {**getattr(self, "_trees", {}), index: (tree, results)}
        return index

    def _abstract(self, name, call, shared, operands, user_code):
        """The jaxpr of a call, its result tree, and the shared values it closes over."""
        shared_avals = [self.shared[s].aval for s in shared]
        operand_avals = [self.avals[v] for v in operands]
        trees = []

        def flat(shared_values, operand_values):
            leaves, tree = jax.tree.flatten(call(shared_values, operand_values))
            for leaf in leaves:
                if not (is_array(leaf) or isinstance(leaf, int | float | complex | np.generic)):
                    raise TypeError(
                        f"cell `{name}` returned {leaf!r} of type {type(leaf).__name__}; "
                        "expected an array or a pytree of arrays. Return arrays only, and pass "
                        "other results around the cell."
                    )
            if not leaves:
                raise TypeError(
                    f"cell `{name}` returned {jax.tree.unflatten(tree, [])!r}, which holds no "
                    "array; expected an array or a pytree of arrays. Did you forget `return`?"
                )
            trees.append(tree)
            return leaves

        leaks = jax.checking_leaks() if user_code else contextlib.nullcontext()
        with pause(), take_current_trace():
            try:
                with leaks:
                    jaxpr = jax.make_jaxpr(flat)(shared_avals, operand_avals)
            except Exception as error:
                if "leaked trace" not in str(error).lower():
                    raise
                raise EscapedValueError(
                    f"cell `{name}` keeps a traced value after it returns (a side effect); "
                    "expected a pure function. Return the value instead of storing it in a "
                    f"list, global or attribute. JAX says: {str(error).splitlines()[0]}"
                ) from None
        if jaxpr.effects:
            raise TypeError(
                f"cell `{name}` has the side effect {next(iter(jaxpr.effects))} (a print, a "
                "callback or a reference); expected a pure function, since batches pad and "
                "reorder calls. Return the value and look at it outside."
            )
        return self._close(name, jaxpr, trees[-1])

    def _close(self, name, jaxpr, tree):
        """Turns shared values among the constants of a jaxpr into leading arguments."""
        inner = jaxpr.jaxpr
        if not any(isinstance(c, Tracer) for c in jaxpr.consts):
            return jaxpr, tree, ()
        lifted, extra, kept, consts = [], [], [], []
        recorder = _recording.recorder
        for var, const in zip(inner.constvars, jaxpr.consts, strict=True):
            if isinstance(const, Value):
                raise SymbolicValueError(
                    f"cell `{name}` uses a symbolic value of shape {const.shape} that is not "
                    "among its arguments and that it does not close over directly (a helper "
                    "function does); pass the value to the cell as an argument."
                )
            if isinstance(const, Tracer):
                lifted.append(var)
                extra.append(recorder.lift(const).index)
            else:
                kept.append(var)
                consts.append(const)
        args = [*lifted, *inner.invars]

        def call(shared, operands):
            values = dict(zip(args, (*shared, *operands), strict=True))
            return jax.core.eval_jaxpr(
                inner,
                [values[v] if v in values else consts[kept.index(v)] for v in inner.constvars],
                *(values[v] for v in inner.invars),
            )

        closed = jax.make_jaxpr(call)(
            [self.shared[s].aval for s in extra] + [v.aval for v in inner.invars], []
        )
        return closed, tree, tuple(extra)

    def results_of(self, index: int) -> tuple[Any, tuple[int, ...]]:
        """(pytree structure, value type ids) of what nodes of a type return."""
        return self._trees[index]

    def shared_values(self, key, call, args) -> list[int]:
        """Ids of the results of `call(*shared values)`, which is traced if it is new."""
        full = (key, args)
        first = self._shared_ids.get(full)
        if first is None:
            with pause(), take_current_trace():
                avals = jax.make_jaxpr(lambda *xs: call(*xs))(
                    *(self.shared[a].aval for a in args)
                ).out_avals
            first = self._shared_ids[full] = (len(self.shared), len(avals))
            for k, aval in enumerate(avals):
                self.shared.append(SharedValue(aval, call=call, args=args, result=k))
        return list(range(first[0], first[0] + first[1]))

    def lifted(self, key: Hashable, aval: ShapedArray, position: int) -> int:
        """The id of the shared value that stands for something the function closes over."""
        index = self._shared_ids.get(key)
        if index is None:
            index = self._shared_ids[key] = len(self.shared)
            self.shared.append(SharedValue(aval, lifted=position))
        return index

    def jaxpr_key(self, jaxpr: Any) -> Hashable:
        """Equal for programs that are equal up to the names of their variables."""
        same = _Same(jaxpr)
        key = self._jaxprs.get(same)
        if key is None:
            written = _write_jaxpr(jaxpr)
            key = self._jaxprs[same] = self._jaxprs.setdefault(
                ("written", written), ("program", len(self._jaxprs))
            )
        return key

    def params_key(self, value: Any) -> Hashable:
        """The parameters of a primitive as something hashable; unequal if in doubt."""
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            return self.jaxpr_key(value)
        if isinstance(value, dict):
            return dict, *((k, self.params_key(v)) for k, v in sorted(value.items()))
        if isinstance(value, tuple | list):
            return type(value), *map(self.params_key, value)
        try:
            return typed(value)
        except TypeError:
            return _Same(value)

    def warn_if_many(self, code: Hashable, key: Hashable, name: str) -> None:
        """Warns once a cell has been met with many different closures."""
        seen = self._variants.setdefault(code, set())
        seen.add(key)
        if len(seen) == MANY_VARIANTS:
            warnings.warn(
                f"cell `{name}` has been met with {len(seen)} different closures, each a node "
                "type of its own that is compiled and batched by itself. Pass what changes as "
                "a positional argument.",
                RecompilationWarning,
                stacklevel=2,
            )


def _write_jaxpr(jaxpr: Any) -> Hashable:
    """A jaxpr as nested tuples, variables numbered by first appearance."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        if isinstance(x, Literal):
            return "literal", np.asarray(x.val).tobytes(), str(x.aval)
        return numbers.setdefault(x, len(numbers)), str(x.aval)

    def value(x: Any) -> Hashable:
        if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
            return _write_jaxpr(x)
        if isinstance(x, tuple | list):
            return tuple(map(value, x))
        try:
            return typed(x)
        except TypeError:
            return _Same(x)

    consts = [_Same(c) for c in getattr(jaxpr, "consts", ())]
    heads = [*map(atom, inner.constvars), *map(atom, inner.invars)]
    eqns = [
        (
            eqn.primitive,
            *map(atom, eqn.invars),
            tuple((k, value(v)) for k, v in sorted(eqn.params.items())),
            *map(atom, eqn.outvars),
        )
        for eqn in inner.eqns
    ]
    return (*consts, *heads, *eqns, *map(atom, inner.outvars))


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


class _Symbol(Tracer):
    """A tracer of ours: has a type, has no value."""

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


class Value(_Symbol):
    """A symbolic value of one instance: result `index`, or input `-1 - index`."""

    __slots__ = ("type",)

    def __init__(self, recorder, aval, index, value_type):
        self._trace = recorder
        self.aval = aval
        self.index = index
        self.type = value_type

    def __getitem__(self, item):
        return self._trace.index_value(self, item)

    def __iter__(self):
        if not self.shape:
            raise TypeError("a symbolic array with no dimensions cannot be iterated over")
        return (self[i] for i in range(self.shape[0]))


class Shared(_Symbol):
    """A symbolic value that all instances share: `registry.shared[index]`."""

    __slots__ = ()

    def __init__(self, recorder, aval, index):
        self._trace = recorder
        self.aval = aval
        self.index = index

    def __getitem__(self, item):
        return self._trace.index_shared(self, item)


_NUMBERS = (int, float, complex, np.generic)


class _GoOn(Exception):
    """The short way does not apply."""


class Recorder(Trace):
    """Records instances, one after the other, into flat lists."""

    def __init__(self, registry: Registry, parent: Trace):
        super().__init__()
        self.registry = registry
        self.parent = parent
        self.active = True
        self.instance: Any = None
        self.tracers: list[Any] = []  # closed-over tracers, in order of appearance
        self.caching = True  # False once the instance depends on one of them
        self.callees: list[_Callee] = []  # one entry per node
        self.references: list[int] = []  # what the nodes read
        self.num_values = 0
        self.input_group: list[int] = []
        self.input_value: list[Any] = []
        self._leaf_inputs: dict[int, tuple[int, Any]] = {}
        self._units: dict[int, tuple[int, int]] = {}
        self._kept: list[Any] = []
        self._made: dict[int, Any] = {}
        self._owned: set[int] | None = None
        self._containers: dict[int, Hashable] = {}
        self._number_groups: dict[type, tuple[int, int]] = {}

    def is_valid(self) -> bool:
        if self.active:
            return True
        raise EscapedValueError(
            "a symbolic value is used after its function was recorded; expected it to be "
            "returned from the function. `help(jedbatch.errors.EscapedValueError)` says how "
            "values escape."
        )

    # --- values ---

    def share(self, tree: Any) -> Any:
        """The shared arguments with symbols for leaves."""
        leaves = [
            Shared(self, self.registry.shared[i].aval, i)
            for i in range(self.registry.num_leaves)
        ]
        shared = jax.tree.unflatten(tree, leaves)
        stack = [shared]
        while stack:  # remember the containers: cells get them whole
            x = stack.pop()
            if isinstance(x, Shared):
                continue
            leaves, structure = jax.tree.flatten(x)
            self._containers[id(x)] = (structure, *(leaf.index for leaf in leaves))
            self._kept.append(x)
            stack.extend(jax.tree.leaves(x, is_leaf=lambda y, x=x: y is not x) if leaves else ())
        self._shared_kept = list(self._kept)
        return shared

    def begin(self, instance: Any, arrays: Sequence[Any]) -> Any:
        """Starts an instance; its arrays are replaced by symbols."""
        self.instance = instance
        self.caching = True
        self._owned = None
        self._units.clear()
        self._leaf_inputs.clear()
        self._kept = []
        if not arrays:
            return instance
        values = []
        for leaf, array in enumerate(arrays):
            kind = self.registry.value_type(*array_type(array))
            values.append(self._leaf_value(kind, leaf, None))
        return replace_arrays(instance, iter(values))

    def _leaf_value(self, kind: int, leaf: int, index: Any) -> Value:
        single = isinstance(index, int)
        group = self.registry.group("leaf", kind, leaf, None if single else _freeze(index), single)
        self.input_group.append(group)
        self.input_value.append(index)
        position = -len(self.input_group)
        self._leaf_inputs[position] = (leaf, index)
        return Value(self, self.registry.avals[kind], position, kind)

    def input(self, x: Any) -> Value:
        """A number or concrete array as an input of the instance."""
        kind = self.registry.value_type(*array_type(x))
        self.input_group.append(self.registry.group("value", kind))
        self.input_value.append(x)
        return Value(self, self.registry.avals[kind], -len(self.input_group), kind)

    def lift(self, x: Any) -> "Shared":
        """Something the function closes over as a shared value."""
        if isinstance(x, Shared):
            return x
        if isinstance(x, Tracer):
            self.caching = False
            position = next((k for k, t in enumerate(self.tracers) if t is x), None)
            if position is None:
                position = len(self.tracers)
                self.tracers.append(x)
            aval = jax.typeof(x)
            index = self.registry.lifted(("tracer", position, aval), aval, -1 - position)
            return Shared(self, aval, index)
        key = ("array", _Same(x))
        if key not in self.registry._shared_ids:
            self.registry.arrays.append(x)
        aval = jax.typeof(x)
        index = self.registry.lifted(key, aval, len(self.registry.arrays) - 1)
        return Shared(self, aval, index)

    def _symbol(self, x: Any) -> "Value | Shared":
        """Any operand of an operation as a symbol."""
        if isinstance(x, _Symbol) and x._trace is self:
            return x
        if isinstance(x, Tracer):
            if isinstance(x, _Symbol):
                x._trace.is_valid()
            return self.lift(x)
        if isinstance(x, jax.Array) and x.ndim and id(x) not in self._made:
            if self._owned is None:
                self._owned = owned_arrays(self.instance)
            if id(x) not in self._owned:
                return self.lift(x)
        return self.input(x)

    # --- door 1: cells ---

    def call_cell(self, cell: Cell, args: tuple, static: dict) -> Any:
        if cell.identity is None or static:
            return self._call_cell(cell, args, static, None)
        # The short way: what a call of this kind was found to be the last time.
        key: list[Hashable] = [cell]
        references = []
        units, containers = self._units, self._containers
        for arg in args:
            kind = arg.__class__
            if kind is Value:
                key.append(arg.type)
                references.append(arg.index)
            elif kind is int or kind is float:
                group, token = self._number(kind)
                key.append(token)
                self.input_group.append(group)
                self.input_value.append(arg)
                references.append(-len(self.input_group))
            elif (unit := units.get(id(arg))) is not None:
                key.append(unit[0])
                references.append(unit[1])
            elif (token := containers.get(id(arg))) is not None:
                key.append(token)
            else:
                return self._call_cell(cell, args, static, None)
        callee = self.registry._fast_callees.get(fast := tuple(key))
        if callee is None:
            return self._call_cell(cell, args, static, fast)
        self.references += references
        return self._record(callee)

    def _number(self, kind: type) -> tuple[int, Hashable]:
        found = self._number_groups.get(kind)
        if found is None:
            value_type = self.registry.value_type(*array_type(kind(0)))
            found = self.registry.group("value", value_type), (kind, value_type)
            self._number_groups[kind] = found
        return found

    def _record(self, callee: _Callee) -> Any:
        """Appends a node whose references are already in place; returns its results."""
        self.callees.append(callee)
        index = self.num_values
        results = callee.results
        self.num_values = index + len(results)
        if callee.tree is None:
            aval, kind = results[0]
            return Value(self, aval, index, kind)
        values = [Value(self, r[0], k, r[1]) for k, r in enumerate(results, index)]
        if callee.unit is None:
            return jax.tree.unflatten(callee.tree, values)
        out = tuple(values)
        self._units[id(out)] = (callee.unit, index)
        self._kept.append(out)
        return out

    def _call_cell(self, cell: Cell, args: tuple, static: dict, fast: Hashable) -> Any:
        """The long way: any pytrees of anything."""
        fn = cell.fn
        free = _free_values(fn)
        for name, value in static.items():
            if any(is_array(leaf) for leaf in jax.tree.leaves(value)):
                raise TypeError(
                    f"cell `{cell.name}` got an array as keyword argument `{name}`; keyword "
                    "arguments are static, part of the node's type. Pass arrays positionally."
                )
        try:
            options = tuple(sorted((k, typed(v)) for k, v in static.items()))
        except TypeError:
            raise TypeError(
                f"cell `{cell.name}` got keyword arguments {static!r}, not all hashable; "
                "keyword arguments are static, part of the node's type. Pass a tuple instead of "
                "a list, and arrays positionally."
            ) from None

        leaves, tree = jax.tree.flatten((args, [x for x in free if isinstance(x, Tracer)]))
        if self._foreign(leaves):  # inside another transformation: not ours to record
            return fn(*args, **static)
        slots: list[Hashable] = []
        operands: list[Value] = []
        shared: list[int] = []
        fixed: list[Any] = []
        for leaf in leaves:
            if is_array(leaf) or isinstance(leaf, _NUMBERS):
                symbol = self._symbol(leaf)
                if isinstance(symbol, Value):
                    slots.append("value")
                    operands.append(symbol)
                else:
                    slots.append("shared")
                    shared.append(symbol.index)
            else:
                try:
                    slots.append(("fixed", typed(leaf)))
                except TypeError:
                    raise TypeError(
                        f"cell `{cell.name}` got {leaf!r} of type {type(leaf).__name__} as a "
                        "positional argument; expected arrays, numbers or pytrees of them. "
                        "Pass it by keyword if it is hashable, or close over it."
                    ) from None
                fixed.append(leaf)

        identity = cell.identity or _function_identity(fn)
        if free:
            self.registry.warn_if_many(fn.__code__, identity, cell.name)
        key = ("cell", identity, options, tree, tuple(slots))

        def call(shared_values, operand_values):
            sources = {"shared": iter(shared_values), "value": iter(operand_values)}
            constants = iter(fixed)
            filled = [
                next(sources[s]) if isinstance(s, str) else next(constants) for s in slots
            ]
            args, captured = jax.tree.unflatten(tree, filled)
            return _with_free_values(fn, iter(captured))(*args, **static)

        try:
            return self._node(cell.name, key, call, shared, operands, fast=fast, user_code=True)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(
                f"This happened inside cell `{cell.name}`, whose positional arguments are "
                "values, Python numbers too. If Python must decide on one, pass it by keyword: "
                "keyword arguments are static."
            )
            raise

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

        return self._custom("custom_jvp", fun, call, tracers)

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

        return self._custom("custom_vjp", fun, call, tracers)

    def _custom(self, kind, fun, call, tracers):
        avals = [jax.typeof(t) for t in tracers]
        before = len(self.registry.node_types), len(self.registry.shared)
        out = self._operation(getattr(fun, "__name__", kind), (kind, _hashable(fun)), call, tracers)
        if before == (len(self.registry.node_types), len(self.registry.shared)):
            with pause(), take_current_trace():  # JAX reads the result's structure off this run
                jax.make_jaxpr(lambda *xs: fun.call_wrapped(*xs))(*avals)
        return out

    def stage_value(self, val):
        return val

    def _operation(self, name, key, call, args) -> list[Any]:
        """Records `call(*args) -> list of arrays`, or computes it if nothing is symbolic."""
        if not any(isinstance(x, Tracer) for x in args):
            return self._constant(key, call, args)
        symbols = [self._symbol(x) for x in args]
        if all(isinstance(s, Shared) or not isinstance(x, Tracer) for s, x in zip(symbols, args)):
            return self._shared_operation(key, call, args)
        slots = tuple(isinstance(s, Value) for s in symbols)

        def arranged(shared_values, operand_values):
            shared_values, operand_values = iter(shared_values), iter(operand_values)
            return call(*(next(operand_values if s else shared_values) for s in slots))

        shared = [s.index for s in symbols if isinstance(s, Shared)]
        operands = [s for s in symbols if isinstance(s, Value)]
        return self._node(name, (key, slots), arranged, shared, operands)

    def _constant(self, key, call, args) -> list[Any]:
        """Computes an operation on concrete values, or finds what it gave before."""
        try:
            full = (key, *(typed(x) if not is_array(x) else _Same(x) for x in args))
            hash(full)
        except TypeError:
            full = None
        cache = self.registry._constants
        out = cache.get(full) if full is not None else None
        if out is None:
            with pause(), take_current_trace():
                out = list(call(*args))
            if full is not None:
                if len(cache) >= 4096:
                    cache.clear()
                cache[full] = out
        for x in out:
            self._made[id(x)] = x
        return out

    def _shared_operation(self, key, call, args) -> list[Any]:
        """Records an operation on shared arguments and constants, done once per minibatch."""
        constants = [None if isinstance(x, Tracer) else x for x in args]
        shared = tuple(self._symbol(x).index for x in args if isinstance(x, Tracer))
        marks = tuple(
            "shared" if isinstance(x, Tracer) else typed(x) if not is_array(x) else _Same(x)
            for x in args
        )

        def filled(*values):
            values = iter(values)
            return call(*(next(values) if c is None else c for c in constants))

        ids = self.registry.shared_values((key, marks), filled, shared)
        return [Shared(self, self.registry.shared[i].aval, i) for i in ids]

    def _node(self, name, key, call, shared, operands, *, fast=None, user_code=False):
        """Records one node; returns its results as `call` arranges them."""
        registry = self.registry
        shared_ids = tuple(shared)
        kinds = tuple(v.type for v in operands)
        callee = registry._callees.get((key, shared_ids, kinds))
        if callee is None:
            index = registry.node_type(
                name, key, call, shared_ids, kinds, user_code=user_code
            )
            tree, results = registry.results_of(index)
            flat = tree == jax.tree.structure((0,) * len(results))
            callee = _Callee(
                index,
                (1,) * len(kinds),
                tuple((registry.avals[v], v) for v in results),
                None if tree == jax.tree.structure(0) else tree,
                registry.unit(results) if flat else None,
            )
            registry._callees[key, shared_ids, kinds] = callee
        if fast is not None and fast not in registry._fast_callees:
            widths = self._widths(fast)
            registry._fast_callees[fast] = _Callee(
                callee.type, widths, callee.results, callee.tree, callee.unit
            )
        self.references += [v.index for v in operands]
        return self._record(callee)

    def _widths(self, fast: tuple) -> tuple[int, ...]:
        """How many operands each reference of a short key stands for."""
        units = list(self.registry._units)
        widths = []
        for token in fast[1:]:
            if isinstance(token, int):
                widths.append(1 if token >= 0 else len(units[-1 - token]))
            elif isinstance(token[0], type):
                widths.append(1)
        return tuple(widths)

    # --- indexing ---

    def index_value(self, value: Value, item: Any) -> Any:
        """Static indexing of an array of the instance gives an input, not a node."""
        found = self._leaf_inputs.get(value.index) if self.active else None
        if found is None or found[1] is not None or not _is_static(item):
            return super(Value, value).__getitem__(item)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            if not value.shape:
                raise IndexError("an array with no dimensions cannot be indexed")
            item = _row(int(item), value.shape[0])
            shape = value.shape[1:]
        else:
            shape = np.empty(value.shape, np.bool_)[item].shape
        kind = self.registry.value_type(shape, value.dtype, value.aval.weak_type)
        return self._leaf_value(kind, found[0], item)

    def index_shared(self, value: Shared, item: Any) -> Any:
        """`table[i]` with a Python int is a row look-up whose row is a value."""
        first, rest = (item[0], item[1:]) if isinstance(item, tuple) and item else (item, ())
        plain = isinstance(first, int | np.integer) and not isinstance(first, bool)
        if not plain or not value.shape or not _is_static(rest):
            return super(Shared, value).__getitem__(item)
        row = self.input(_row(int(first), value.shape[0]))

        def look_up(shared, operands):
            return shared[0][(operands[0], *rest)]

        with set_current_trace(self):
            return self._node("row", ("row", _freeze(rest)), look_up, [value.index], [row])

    # --- results ---

    def output(self, leaf: Any) -> tuple[int, tuple]:
        """(reference, (shape, dtype)) of a leaf of what the function returns."""
        if not (is_array(leaf) or isinstance(leaf, _NUMBERS)):
            raise TypeError(
                f"the function returned {leaf!r} of type {type(leaf).__name__}; expected an "
                "array, a number or a pytree of them."
            )
        if isinstance(leaf, _Symbol) and leaf._trace is not self:
            leaf._trace.is_valid()
        symbol = self._symbol(leaf) if isinstance(leaf, Tracer) else self.input(leaf)
        if isinstance(symbol, Shared):
            symbol = self._node(
                "shared", "identity", lambda shared, _: shared[0], [symbol.index], []
            )
        return symbol.index, (symbol.shape, symbol.dtype)


def _hashable(x: Any) -> Hashable:
    try:
        hash(x)
    except TypeError:
        return _Same(x)
    return x


def _with_free_values(fn: Any, captured: Iterator[Any]) -> Any:
    """The function with the tracers it closes over replaced, in order."""
    if not any(isinstance(x, Tracer) for x in _free_values(fn)):
        return fn
    cells = tuple(
        types.CellType(next(captured)) if isinstance(c.cell_contents, Tracer) else c
        for c in fn.__closure__
    )
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _is_static(item: Any) -> bool:
    """True of an index without arrays: ints, slices, None, Ellipsis and tuples of them."""
    if isinstance(item, tuple):
        return all(map(_is_static, item))
    if isinstance(item, slice):
        return all(map(_is_static, (item.start, item.stop, item.step)))
    return item is None or item is Ellipsis or isinstance(item, int | np.integer)


def _freeze(item: Any) -> Hashable:
    """A static index as something hashable."""
    if isinstance(item, tuple):
        return tuple(map(_freeze, item))
    if isinstance(item, slice):
        return "slice", item.start, item.stop, item.step
    return item


def _row(i: int, length: int) -> int:
    if not -length <= i < length:
        raise IndexError(f"index {i} is out of bounds for an axis of length {length}")
    return i % length


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Cells called inside are plain functions."""
    recorder, _recording.recorder = _recording.recorder, None
    try:
        yield
    finally:
        _recording.recorder = recorder


# --- recording a minibatch --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Record:
    """What recording an instance gave: its graph and the form of its result."""

    graph: Graph
    structure: Any  # of the pytree the function returned
    types: tuple[tuple, ...]  # (shape, dtype) of its leaves


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
      For each instance its record and whether it may be cached, and the tracers of outer
      transformations that `fn` closes over.
    """
    with take_current_trace() as parent:
        recorder = Recorder(registry, parent)
        shared = recorder.share(registry.structure)
        outputs: list[int] = []
        forms, caching, ends = [], [], []
        with set_current_trace(recorder), _recording_with(recorder):
            for i, instance in enumerate(instances):
                mapped = recorder.begin(instance, arrays[i])
                try:
                    leaves, structure = jax.tree.flatten(fn(*arrange(shared, mapped)))
                    results = [recorder.output(leaf) for leaf in leaves]
                except Exception as error:
                    error.add_note(f"This happened while instance {i} was recorded.")
                    raise
                outputs += [index for index, _ in results]
                forms.append((structure, tuple(kind for _, kind in results)))
                caching.append(recorder.caching)
                ends.append(
                    (
                        len(recorder.callees),
                        len(recorder.references),
                        len(recorder.input_group),
                        len(outputs),
                    )
                )
        recorder.active = False
    graphs = _finish(recorder, outputs, ends)
    records = [Record(g, *form) for g, form in zip(graphs, forms, strict=True)]
    return records, caching, recorder.tracers


@contextlib.contextmanager
def _recording_with(recorder: Recorder) -> Iterator[None]:
    """Cells called inside are recorded; recursion may be deep; no collections in between.

    The lists and tracers of a large minibatch make the cyclic collector run again and again
    over objects that are all alive.
    """
    before, collecting, limit = _recording.recorder, gc.isenabled(), sys.getrecursionlimit()
    _recording.recorder = recorder
    gc.disable()
    sys.setrecursionlimit(max(limit, MAX_FRAMES))
    try:
        yield
    finally:
        _recording.recorder = before
        sys.setrecursionlimit(limit)
        if collecting:
            gc.enable()


def _finish(recorder: Recorder, outputs: list[int], ends: list[tuple]) -> list[Graph]:
    """The lists of a recorder as graphs, one per instance."""
    registry = recorder.registry
    node_ptr, reference_ptr, input_ptr, output_ptr = (
        np.concatenate([[0], column]) for column in np.array(ends, np.int64).reshape(-1, 4).T
    )
    # References to operands: a reference to a tuple stands for all that is in it.
    distinct = {callee: k for k, callee in enumerate(dict.fromkeys(recorder.callees))}
    which = np.fromiter((distinct[c] for c in recorder.callees), np.int32, len(recorder.callees))
    references = np.array(recorder.references, np.int64)
    types = np.array([c.type for c in distinct], np.int32)
    widths = [np.array(c.widths, np.int64) for c in distinct]
    per_kind = np.array([len(w) for w in widths], np.int64)
    starts = pointers(per_kind)[:-1]
    flat = np.concatenate(widths) if widths else np.zeros(0, np.int64)
    width = flat[ranges(starts[which], per_kind[which])]
    operand = ranges(references, width)
    arity = np.array([w.sum() for w in widths], np.int64)[which] if widths else which

    # Inputs: drop what nobody reads, group what is read the same way, instance by instance.
    group = np.array(recorder.input_group, np.int64)
    result = np.array(outputs, np.int64)
    used = np.zeros(len(group), bool)
    for references in (operand, result):
        used[-1 - references[references < 0]] = True
    kept = np.flatnonzero(used)
    owner = np.searchsorted(input_ptr, kept, side="right") - 1
    kept = kept[np.lexsort((kept, group[kept], owner))]
    owner = np.searchsorted(input_ptr, kept, side="right") - 1
    place = np.zeros(len(group), np.int64)
    place[kept] = np.arange(len(kept))
    for references in (operand, result):
        negative = references < 0
        references[negative] = -1 - place[-1 - references[negative]]
    chunks = _input_rows(registry, recorder.input_value, kept, owner, group[kept])

    whole = Graph(
        registry.types,
        types[which] if len(which) else np.zeros(0, np.int32),
        pointers(arity),
        operand.astype(np.int32),
        tuple(chunks),
        result.astype(np.int32),
        node_ptr,
        pointers(np.bincount(owner, minlength=len(ends))),
        output_ptr,
    )
    return whole.split()


def _input_rows(registry, values, kept, owner, group) -> Iterator[InputRows]:
    """The inputs in order, as few chunks as there are changes of instance or group."""
    if not len(kept):
        return
    groups = registry.groups
    change = np.flatnonzero((np.diff(group) != 0) | (np.diff(owner) != 0)) + 1
    for part in np.split(np.arange(len(kept)), change):
        kind, value_id, *where = groups[group[part[0]]]
        value_type = registry.value_types[value_id]
        items = [values[k] for k in kept[part].tolist()]
        if kind == "value":
            yield InputRows(value_type, host_rows(items, value_type))
        elif where[2]:  # rows of a leaf
            yield InputRows(value_type, np.array(items), where[0])
        else:
            for item in items:
                yield InputRows(value_type, None, where[0], item)


def host_rows(items: Sequence[Any], value_type: ValueType) -> np.ndarray:
    """Numbers or concrete arrays of one type, stacked on the host."""
    if jax.dtypes.issubdtype(value_type.dtype, jax.dtypes.extended):
        return np.stack([np.asarray(jax.random.key_data(x)) for x in items])
    if not value_type.shape:
        return np.array([np.asarray(x) for x in items] if is_array(items[0]) else items).astype(
            value_type.dtype
        )
    return np.stack([np.asarray(x) for x in items]).astype(value_type.dtype, copy=False)


def shared_consts(
    registry: Registry, wanted: Sequence[Sequence[int]]
) -> tuple[Callable, list[int]]:
    """How to compute shared values: (function, ids of the lifted values it needs).

    The function maps the leaves of the shared arguments followed by the lifted values to one
    list of values for each list of ids wanted.
    """
    shared = registry.shared
    order: list[int] = []
    seen: set[int] = set()

    def visit(index: int) -> None:
        if index not in seen:
            seen.add(index)
            for earlier in shared[index].args:
                visit(earlier)
            order.append(index)

    for ids in wanted:
        for index in ids:
            visit(index)
    lifted = [index for index in order if shared[index].lifted is not None]

    def compute(values: Sequence[Any]) -> list[list[Any]]:
        env = dict(zip(lifted, values[registry.num_leaves :], strict=True))
        calls: dict[tuple, list[Any]] = {}
        for index in order:
            value = shared[index]
            if value.leaf is not None:
                env[index] = values[value.leaf]
            elif value.lifted is None:
                call = (value.call, value.args)
                if call not in calls:
                    calls[call] = list(value.call(*(env[a] for a in value.args)))
                env[index] = calls[call][value.result]
        return [[env[index] for index in ids] for ids in wanted]

    return compute, lifted
