"""Types, shared values and calls seen while recording, interned.

A `Registry` belongs to one structure of shared arguments and lives as long as the batched
function. It turns "the same operation on the same types" into small integers: value types, node
types, shared values, groups of inputs. An operation is traced by JAX once, when its type is new.
"""

import collections
import functools
import itertools
import types
import typing
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.tree_util import PyTreeDef

from jedbatch._graph.graph import Graph
from jedbatch._graph.operations import CallSpec, Operation
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.identity import Same, carried_key, is_immutable, tree_key
from jedbatch._jaxpr.interpret import performs
from jedbatch._jaxpr.numbers import with_numbers
from jedbatch._jaxpr.symbolic_dims import (
    RaggedType,
    line_of_user,
)
from jedbatch._record.cell import pause
from jedbatch._record.identity.assumptions import Assumptions
from jedbatch._record.identity.environment import NOWHERE, AccessPath, Reached
from jedbatch._record.identity.number_operands import CellSpec, NumberOperands
from jedbatch._record.identity.primitives import Keys, memory_of_constants
from jedbatch._record.identity.unseen import check_shared, shows_arrays
from jedbatch._record.types.custom_rules import CustomFunctions
from jedbatch._record.types.list_cells import Arities
from jedbatch._record.types.shared_operands import SharedOperands
from jedbatch._record.types.shared_values import SharedValue, derived, prologue
from jedbatch._record.types.tracing import traced
from jedbatch._support.caches import Budget, Memory, each
from jedbatch._support.types import Dtype
from jedbatch.errors import RecompilationWarning

CALL_BYTES = 1 << 12  # of the description of a call, and of what it keeps alive, about
MEMO_BYTES = 1 << 9  # of another way of recording, about
MANY_CLOSURES = 32  # of one cell, or closed-over arrays, before we warn
MANY_REPEATED = 256  # operations on shared values, recorded again for the instances of a minibatch
SINGLE = jax.tree.structure(0)  # of a result that is an array
MAX_READ_STATES = 4  # of what the function reads beside its arguments, of which records are kept


class Registry:
    """All that has been met while recording for one structure of shared arguments.

    Attributes:
      budget: of bytes for what can be forgotten, since it only saves time.
      structure, containers: of the shared arguments; see `_record.operations.containers`.
      node_types, value_types, shared, groups: what is interned, by id. The leaves of
        the shared arguments come first among the shared values.
      bounds_loops: whether loops have a bound (`max_steps`).
      avals: the value types as JAX has them.
      ragged_types: those of them with ragged axes as user code gets them, by their ids.
      calls: call specs by the description of a call (see `fast_path`).
      cells: descriptions of the functions of cells that the batched function does not make.
      numbers, arrays: (input group, value type) by kind of number, and by shape and dtype of an
        array.
      nodes: tokens of containers, by their class and what they carry besides their parts.
      shared_in: the shared values in containers, by their tokens.
      num_recorded, slow_calls: nodes that were recorded last, and of these the calls of a cell that
        took the slow path, and why.
      num_repeated, line_repeated: operations on shared values that were met, and where one is, if
        they were many.
      constants: results of operations on concrete values.
      most_lengths: that arrays of one kind, none of the instances' own, had in other instances than
        the first with such arrays.
      assumptions: what is constant, as few variants of it were met.
      number_operands: which numbers that operations hold are operands.
      finding: code of functions in which Python asks which objects they hold.
      unseen: ids of types of cells that read arrays which are found nowhere: they are traced
        at each call, and not recorded for later calls.
      arities: the calls of cells that differ in the length of lists.
      shared_operands: arguments of cells that are values, though they are shared in some calls.
      reads: what recordings read besides their arguments.
      reached: the way to arrays by which they are known, by their ids (see
        `_record.identity.environment`).
      things_reached: ids of all that the function reaches, which stays as it is.
      arrays_reached: these arrays, by the way to them.
      tokens_reached: (type, token) of those that cells were given, by the way to them.
      is_traced: whether some of them are traced.
      keys: what operations are told apart by.
      operations: how operations, and Python's operators on symbols, were recorded.
    """

    def __init__(
        self,
        leaf_avals: Sequence[ShapedArray],
        structure: PyTreeDef,
        budget: Budget | None = None,
        bounds_loops: bool = False,
    ):
        self.budget = budget = budget or Budget()
        self.structure = structure
        self.num_leaves = len(leaf_avals)
        self.bounds_loops = bounds_loops
        self.containers: list[tuple[Hashable | None, bool]] | None = None
        self.node_types: list[NodeType] = []
        self.lines: dict[int, str] = {}  # of the user's code, where each type was met first
        self.value_types: list[ValueType] = []
        self.avals: list[ShapedArray] = []
        self.ragged_types: dict[int, RaggedType] = {}
        self.shared = [SharedValue(aval, leaf=i) for i, aval in enumerate(leaf_avals)]
        self.call_specs: dict[int, CallSpec] = {}
        self._arity = np.zeros(0, np.int64)
        self.groups: list[tuple] = []
        self.units: list[tuple[tuple[int, ...], Hashable]] = []
        self.calls: dict[Hashable, CallSpec] = Memory(None, budget, each(CALL_BYTES))
        self.cells: dict[Any, Any] = Memory(None, budget, each(CALL_BYTES))
        self.numbers: dict[type, tuple[int, int]] = {}
        self.arrays: dict[tuple, tuple[int, int]] = {}
        self.nodes: dict[Hashable, str] = Memory(None, budget, each(MEMO_BYTES))
        self.shared_in: dict[Hashable, tuple[int, ...]] = Memory(None, budget, each(MEMO_BYTES))
        self._memo_tokens: dict[Hashable, str] = Memory(None, budget, each(MEMO_BYTES))
        self._num_memo_tokens = 0
        self.num_recorded = 0
        self.num_repeated = 0
        self.line_repeated = ""
        self.slow_calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self.constants = memory_of_constants(budget)
        # By shape without length, and dtype: the instance that had such an array first, and the
        # lengths of all, and whether other instances had them first.
        self._lengths: dict[tuple, tuple[int, dict[int, bool]]] = {}
        self.most_lengths = 0
        self._ids: dict[Hashable, Any] = {}
        self._value_type_ids: dict[tuple, int] = {}  # by what makes them, for those met before
        self.keys = Keys(budget)
        self._of_states: dict[int, dict[Hashable, CellSpec]] = Memory(MAX_READ_STATES)
        self._of_user = self._of_state(0)
        self.operations: dict[tuple, Any] = Memory(None, budget, each(MEMO_BYTES))
        self._known_transient: dict[int, bool] = {}
        self._known_paths: dict[int, set[tuple]] = {}
        self.reads: Reached = NOWHERE
        self.reached: Mapping[int, AccessPath] = {}
        self.things_reached: Set[int] = frozenset()
        self.arrays_reached: Mapping[Any, Any] = {}
        self.tokens_reached: dict[Any, tuple[Any, Hashable]] = {}
        self.is_traced = False
        self.unseen: set[int] = set()
        self._number = 0
        self.warned: set[type] = set()  # of performance
        self.assumptions = Assumptions(budget)
        self.custom = CustomFunctions(budget)
        self.number_operands = NumberOperands(self.assumptions)
        self.finding: set[types.CodeType | None] = set()
        self.arities = Arities(
            self.node_types, self._add_type_like, self.keys.params_key, self.assumptions
        )
        self.shared_operands = SharedOperands(self.operations, self.assumptions)
        self.table_rows: dict[int, tuple] = {}  # by node type, see `_session.plans.indices`
        self._types: tuple[NodeType, ...] = ()

    def pad(self, graph: Graph) -> Graph:
        """Returns a graph whose nodes with lists are of the types that serve several lengths."""
        return self.arities.pad(graph, lambda: self.types) if self.arities.padded else graph

    def note_repeated(self) -> None:
        """Counts an operation on shared values, computed once, and notes where one of them is."""
        self.num_repeated += 1
        if self.num_repeated == MANY_REPEATED:
            self.line_repeated = line_of_user()

    @property
    def size(self) -> int:
        """The number of entries that types are made of, and that are not forgotten one by one."""
        num_known = len(self._ids) + len(self.keys) + len(self.assumptions)
        return num_known + len(self.shared_operands)

    @property
    def types(self) -> tuple[NodeType, ...]:
        """The node types as a tuple, one object as long as nothing is added."""
        if len(self._types) != len(self.node_types):
            self._types = tuple(self.node_types)
        return self._types

    @property
    def arity(self) -> np.ndarray:
        """int64[T], the number of operands of each type."""
        new = self.node_types[len(self._arity) :]
        if new:
            self._arity = np.append(self._arity, [len(t.operands) for t in new])
        return self._arity

    def _intern(self, items: list, item: Hashable) -> int:
        """The number of an item among its like.

        Here and below, a number is given out last: an interrupt leaves an item without a number,
        which nobody reads, never a number without an item.
        """
        index = self._ids.get((id(items), item))
        if index is None:
            index = len(items)
            items.append(item)
            self._ids[id(items), item] = index
        return index

    def value_type(self, shape: tuple[int, ...], dtype: Dtype, weak: bool) -> int:
        """The id of a value type."""
        known = self._value_type_ids.get((shape, dtype, weak))
        if known is not None:
            return known
        index = self._intern(self.value_types, ValueType(shape, dtype, weak))
        while len(self.avals) <= index:
            new = self.value_types[len(self.avals)]
            aval, ragged = RaggedType.of(new.shape, new.dtype, new.weak)
            if ragged is not None:
                self.ragged_types[len(self.avals)] = ragged
            self.avals.append(aval)
        self._value_type_ids[shape, dtype, weak] = index
        return index

    def unit(self, value_types: tuple[int, ...], tree: PyTreeDef | None) -> int | None:
        """A negative token for what a cell returns as a whole; None if it may be changed."""
        if tree is None or not is_immutable(tree):
            return None
        return -1 - self._intern(self.units, (value_types, tree_key(tree)))

    def width(self, token: int) -> int:
        """How many operands a reference by this token stands for: a value type, or a unit."""
        return 1 if token >= 0 else len(self.units[-1 - token][0])

    def node(self, kind: type, carried: Any) -> str:
        """A token for containers of a class that carry the same besides their parts.

        What can be compared without looking into it is remembered, for the compiled core.
        """
        items = carried if type(carried) is tuple else (carried,)
        types = tuple(map(type, items))
        key = kind, carried, types if bool in types else None
        is_simple = all(t in (str, int, bool) or t.__eq__ is object.__eq__ for t in types)
        token = self.nodes.get(key) if is_simple else None
        if token is None:
            token = self.memo_token("node", kind, carried_key(carried))
            if is_simple:
                self.nodes[key] = token
        return token

    def token(self, *key: Hashable) -> str:
        """A short name for a part of the description of a call; strings hash fastest."""
        return self._ids.setdefault(("token", key), f"token {len(self._ids)}")

    def memo_token(self, *key: Hashable) -> str:
        """Does the same for what may be made anew again and again, and is forgotten."""
        token = self._memo_tokens.get(key)
        if token is None:
            self._num_memo_tokens += 1
            token = self._memo_tokens[key] = f"memo {self._num_memo_tokens}"
        return token

    def group(self, *key: Hashable) -> int:
        """The id of a group of inputs that are read the same way."""
        known = len(self.groups)
        number = self._intern(self.groups, key)
        if number == known and key[0] == "value":
            of = self.value_types[typing.cast(int, key[1])]
            self.note_length(of.shape, of.dtype)
        return number

    def note_length(self, shape: tuple[int, ...], dtype: Dtype) -> None:
        """Notes the length of an array that is read, or made of what is no array."""
        if not shape:
            return
        number = self.shared_operands.num_instances
        first, found = self._lengths.setdefault((shape[1:], dtype), (number, {}))
        if shape[0] not in found:
            found[shape[0]] = number > first
            self.most_lengths = max(self.most_lengths, sum(found.values()))

    def call_spec(self, name, key, call, shared, operands, static: str = "") -> CallSpec:
        """Returns how to record nodes that compute `call(shared values, operands)`.

        Args:
          name: for people.
          key: equal for operations that are equal, whatever they read.
          call: returns a pytree of arrays; traced if the type is new.
          shared: ids of the shared values it reads.
          operands: value type ids of the operands.
          static: the static arguments, for people.
        """
        if self.is_traced:
            key = "traced", key  # there may be a gradient of what is reached, see `_closed`
        full = (key, shared, operands)
        call_spec: CallSpec | None = self._ids.get(full)
        if call_spec is None:
            program = self.trace(name, call, shared, operands, alone=False)
            label = self._label(name, static, operands, shared)
            call_spec = self._ids[full] = self._typed(name, label, key, program, shared, operands)
        return call_spec

    def cell_spec(
        self,
        name: str,
        key: Hashable,
        call: Callable,
        shared: tuple[int, ...],
        operands: tuple[int, ...],
        *,
        static: str = "",
        holds: Callable[[], Hashable] | None = None,
        place: int = 0,
    ) -> CellSpec:
        """Returns how to record calls of a cell, as `call_spec` does of other operations.

        The key is a memo in front of tracing: types are told apart by their programs.

        Args:
          name: for people.
          key: equal for calls that compute the same, whatever they read.
          call: as of `call_spec`.
          shared: ids of the shared values it reads.
          operands: value type ids of the operands.
          static: the static arguments, for people.
          holds: if its function holds numbers, returns what is equal for calls that differ in these
            alone.
          place: where numbers in its program go that are operands, among the others.
        """
        full = (key, shared, operands)
        known = self._of_user.get(full)
        if known is not None and self._positions(known) == known.positions:
            return known
        found = program, tree, extra = self.trace(name, call, shared, operands, alone=True)
        read = itertools.filterfalse(self.is_reached, extra)
        check_shared(name, key, {s: self.shared[s].aval.str_short() for s in read})
        again = lambda: self.trace(name, call, shared, operands, alone=True)[0]  # noqa: E731
        is_seen = shows_arrays(key, program, again)
        skeleton, numbers = self.keys.written(program, is_kept=holds is None)
        made = CellSpec(None)
        if holds is not None:
            family = holds()
            written = family, skeleton, tree_key(tree), (*extra, *shared), operands
            made = CellSpec(None, family, written, numbers)
            made = made._replace(positions=self._positions(made))
        if made.positions:
            call_spec = self._taking_numbers(name, made, program, tree, static, place)
        else:
            label = self._label(name, static, operands, shared)
            own = "cell", skeleton, *(x.key for x in numbers)
            call_spec = self._typed(name, label, own, found, shared, operands)
        made = made._replace(call_spec=call_spec)
        if is_seen:
            self._of_user[full] = made
        else:
            self.unseen.add(call_spec.node_type)
            self._of_user.pop(full, None)
        return made

    def _positions(self, known: CellSpec) -> tuple[int, ...]:
        """Returns which numbers in the program of a call are operands by now.

        Calls with numbers that were constants until now are described anew.
        """
        before = self.assumptions.version("numbers")
        found = self.number_operands.positions(known.program, known.numbers, known.family)
        if self.assumptions.version("numbers") != before:
            self.forget_calls()
        return found

    def _taking_numbers(
        self, name: str, made: CellSpec, program: Any, tree: PyTreeDef, static: str, place: int
    ) -> CallSpec:
        """Returns how to record a program some of whose numbers are operands."""
        *_, shared, operands = made.program
        kinds = [self.value_type(x.value.shape, x.value.dtype, x.weak) for x in made.operands]
        last = place + len(kinds)

        def call(shared_values, operand_values):
            numbers = dict(zip(made.positions, operand_values[place:last], strict=True))
            args = [*shared_values, *operand_values[:place], *operand_values[last:]]
            return jax.tree.unflatten(tree, with_numbers(program, numbers, args))

        constants = [x.key for k, x in enumerate(made.numbers) if k not in made.positions]
        key = "cell", made.program, made.positions, *constants
        operands = (*operands[:place], *kinds, *operands[place:])
        return self.call_spec(name, key, call, shared, operands, static)

    def _typed(
        self,
        name: str,
        label: str,
        key: Hashable,
        found: tuple[Any, PyTreeDef, tuple[int, ...]],
        shared: tuple[int, ...],
        operands: tuple[int, ...],
    ) -> CallSpec:
        """Returns how to record nodes of the type that computes what was traced."""
        program, tree, extra = found
        results = tuple(self.value_type(a.shape, a.dtype, a.weak_type) for a in program.out_avals)
        node_type = NodeType(
            name,
            Operation((key, tree_key(tree)), program),
            tuple(self.value_types[v] for v in operands),
            (*extra, *shared),
            tuple(self.value_types[v] for v in results),
            label,
        )
        type_id = self._intern(self.node_types, node_type)
        self.lines.setdefault(type_id, line_of_user())
        return self.add_call_spec(type_id, results, None if tree == SINGLE else tree)

    def _add_type_like(self, node_type: NodeType, other: int) -> int:
        """The id of a type that takes the place of another."""
        type_id = self._intern(self.node_types, node_type)
        self.lines.setdefault(type_id, self.lines[other])
        return type_id

    def read(self, reached: Reached) -> None:
        """Sets the values that recordings from now on read besides their arguments."""
        if reached.number != self._number:
            self.forget_calls()
            self._number = reached.number
            self._of_user = self._of_state(reached.number)
        self.reads, self.reached, self.things_reached = reached, reached.ways, reached.things
        self.keys.reached = self.reached
        self.arrays_reached = dict(zip(reached.names, reached.arrays, strict=True))
        self.is_traced = any(isinstance(x, Tracer) for x in reached.arrays)

    def _of_state(self, number: int) -> dict[Hashable, CellSpec]:
        """Returns how cells are recorded that read what they read then, besides their arguments."""
        if number not in self._of_states:
            self._of_states[number] = Memory(None, self.budget, each(CALL_BYTES))
        return self._of_states[number]

    def is_reached(self, index: int) -> bool:
        """Returns whether a shared value depends on arrays that the function reaches alone."""
        value = self.shared[index]
        if value.call is not None:
            return all(map(self.is_reached, value.args))
        return value.tracer in self.arrays_reached

    def forget_calls(self) -> None:
        """Forgets the descriptions of calls."""
        self.calls.clear()
        self.cells.clear()

    def _label(self, name: str, static: str, operands, shared) -> str:
        """A type in words that do not depend on what was met before."""
        types = [str(self.value_types[v]) for v in operands]
        paths = [path for s in shared for path in self._paths(s)]
        parts = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*paths, strict=False))
        where = tuple(keys[0] for keys in parts)
        at = f" @ {jax.tree_util.keystr(where)}" if where else ""
        return f"{name}{static}({', '.join(types)}){at}"

    def _paths(self, index: int) -> set[tuple]:
        """Returns paths of the leaves of shared arguments that a shared value is made of."""
        if index not in self._known_paths:
            value = self.shared[index]
            if value.leaf is not None:
                paths = {self._leaf_paths[value.leaf]}
            else:
                paths = {path for arg in value.args for path in self._paths(arg)}
            self._known_paths[index] = paths
        return self._known_paths[index]

    @property
    def leaf_types(self) -> dict[tuple, ValueType]:
        """The types of the leaves of shared arguments, by their paths."""
        avals = [value.aval for value in self.shared[: self.num_leaves]]
        types = [ValueType(x.shape, x.dtype, bool(x.weak_type)) for x in avals]
        return dict(zip(self._leaf_paths, types, strict=True))

    @functools.cached_property
    def _leaf_paths(self) -> list[tuple]:
        with pause():  # containers of Flax ask JAX who is tracing
            tree = jax.tree.unflatten(self.structure, range(self.num_leaves))
        return [path for path, x in jax.tree.leaves_with_path(tree) if type(x) is int]

    def add_call_spec(self, node_type, results, tree) -> CallSpec:
        """The recording of nodes of a type; what it returns depends on the type."""
        call_spec = self.call_specs.get(node_type)
        if call_spec is None:
            unit, arity = self.unit(results, tree), len(self.node_types[node_type].operands)
            call_spec = CallSpec(node_type, arity, results, tree, unit)
            self.call_specs[node_type] = call_spec
        return call_spec

    def kinds_of(self, types: Sequence[ValueType]) -> list[int]:
        """The ids of value types."""
        return [self.value_type(t.shape, t.dtype, t.weak) for t in types]

    def remember(self, described: Any, call_spec: CallSpec) -> None:
        """Files a call spec under a `Description` of a call."""
        self.calls.setdefault(tuple(described.key), call_spec)

    trace = traced

    # --- shared values ---

    def is_bounded(self, key: Hashable, call: Callable, args: Sequence[Any]) -> bool:
        """Returns whether an operation has loops with a bound, which nodes alone observe."""
        if not self.bounds_loops:
            return False
        full = ("bounded", key)
        if full not in self._ids:
            with pause():
                closed = jax.make_jaxpr(lambda *xs: call(*xs))(*map(jax.typeof, args))
            self._ids[full] = performs(closed, "while")
        return self._ids[full]

    def shared_results(self, key: tuple, call: Callable, args: tuple[int, ...]) -> list[int]:
        """Ids of the results of `call(*shared values)`, which is traced if it is new.

        `key` is the operation and the constants it reads.
        """
        full = ("shared", key, args)
        results = self._ids.get(full)
        if results is None:
            values = derived(key[0], call, args, self.shared)
            results = self._ids[full] = list(map(self._share, values))
        return results

    def closed_over(self, array: object) -> int:
        """The id of a concrete array that the function closes over."""
        key = ("array", Same(array))
        if key not in self._ids:
            self._ids[key] = self._share(SharedValue(jax.typeof(array), array=array))
            self.warn_if_many("arrays", key, "an operation reads")
        return self._ids[key]

    def outer(self, name: Hashable, aval: Any) -> int:
        """The id of a tracer that the function closes over, or of a lazy scope's weight."""
        key = ("tracer", name, aval)
        if key not in self._ids:
            self._ids[key] = self._share(SharedValue(aval, tracer=name))
            if isinstance(name, AccessPath):
                self.warn_if_many("arrays", key, "an operation reads")
        return self._ids[key]

    def _share(self, value: SharedValue) -> int:
        """The id of a new shared value."""
        self.shared.append(value)
        return len(self.shared) - 1

    def prologue(self, wanted: Sequence[Sequence[int]]) -> tuple[Callable, list[int]]:
        """Returns a function that computes shared values, and ids of closed-over ones it needs.

        The function maps the leaves of the shared arguments followed by those closed-over
        values to one list of values for each list of ids wanted.
        """
        return prologue(self.shared, self.num_leaves, wanted)

    def is_transient(self, index: int) -> bool:
        """Returns whether a shared value depends on a tracer that the function closes over."""
        if index not in self._known_transient:
            value = self.shared[index]
            transient = isinstance(value.tracer, int) or any(map(self.is_transient, value.args))
            self._known_transient[index] = transient
        return self._known_transient[index]

    def warn_if_many(self, of: Hashable, variant: Hashable, what: str) -> None:
        """Warns once something, as `what` says it, has been met with many closures."""
        known = self.assumptions.version("closures")
        self.assumptions.holds("closures", of, variant, MANY_CLOSURES - 1)
        if self.assumptions.version("closures") > known:
            warnings.warn(
                f"{what} has been met with {MANY_CLOSURES} different closures, each of which makes "
                "node types of its own that are compiled and batched by themselves. Pass what "
                "changes as a positional argument, and arrays as part of the instance; "
                "`help(jedbatch.errors.RecompilationWarning)` says more.",
                RecompilationWarning,
                stacklevel=2,
            )
            self.warned.add(RecompilationWarning)
