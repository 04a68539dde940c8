"""Recording calls of cells the first time, and those without a short description.

The arguments of a call are flattened. Arrays and numbers are operands, whether they are symbolic or
not, and so are symbolic values that the function holds, and numbers that differ from call to call
(see `number_operands`). Everything else is part of the type.
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import take_current_trace

from jedbatch import checks
from jedbatch._jaxpr.identity import tree_key, typed_or_same
from jedbatch._jaxpr.symbolic_dims import as_number
from jedbatch._record.calls.fast_path import (
    FUNCTION_TYPES,
    ByAttributes,
    NotDescribedError,
    identity_without,
)
from jedbatch._record.cell import Cell, holds_array, spelled, static_options
from jedbatch._record.identity.concretization import finds_objects, noting_calls
from jedbatch._record.identity.function_leaves import (
    code_of,
    held_values,
    holds_traced_objects,
    with_held_values,
)
from jedbatch._record.identity.functions import function_identity
from jedbatch._record.identity.number_operands import CellSpec, numbers_held
from jedbatch._record.instances.arrays import flatten, is_array
from jedbatch._record.instances.key import is_constant
from jedbatch._record.operations.failures import note_call
from jedbatch._record.operations.symbols import RecorderLike, Shared, Symbol, Value
from jedbatch._record.types.shared_operands import VALUE
from jedbatch._record.types.tracing import NUMBER_TYPES
from jedbatch._support.types import Leaf, PyTree
from jedbatch.errors import SymbolicValueError


def slow_path(recorder: RecorderLike, cell: Cell, args: tuple, static: dict) -> PyTree:
    """Records a call of a cell: any pytrees of anything."""
    registry = recorder.registry
    num_nodes, num_values = len(recorder.call_specs), recorder.num_values
    recorded = recorder.cell_call_spec(cell, args, static)
    if recorded is None:  # inside another transformation: not ours to record
        return cell.fn(*args, **static)
    spec, references = recorded
    call_spec = spec.call_spec
    try:
        if spec.positions:
            raise NotDescribedError  # numbers that are operands, as they are meant to be
        if call_spec.node_type in registry.unseen:
            raise NotDescribedError("reads arrays that no argument shows; pass them")
        made_values = _made_values(recorder, references, num_nodes, num_values)
        described = recorder.description(cell, args, static)
        registry.remember(described, call_spec.making(made_values) if made_values else call_spec)
    except NotDescribedError as error:
        registry.slow_calls[cell.name, str(error)] += 1
    recorder.references += references
    return recorder.record(call_spec)


def _made_values(
    recorder: RecorderLike, references: Sequence[int], num_nodes: int, num_values: int
) -> tuple[int, ...]:
    """Returns the operands of a call that were made of shared values (see `CallSpec`).

    Args:
      recorder: the recorder.
      references: of the operands.
      num_nodes: recorded before the call; each node since then has made one value.
      num_values: recorded before the call.
    """
    made = recorder.call_specs[num_nodes:]
    of_value = dict(enumerate(made, num_values))
    places = [(k, of_value[i]) for k, i in enumerate(references) if i in of_value]
    return tuple(itertools.chain.from_iterable(places))


class PreparedCall(NamedTuple):
    """A call of a cell, before it is traced.

    Attributes:
      key: equal for calls that compute the same.
      call: computes it, of shared values and operands.
      shared: ids of the shared values.
      operands: the operands.
      identity: what the function is known by.
      options: the keyword arguments, as part of the key.
      slots: the kind of each leaf of the arguments.
      named: the keyword arguments that hold operands.
      captured: the symbolic values that the function holds, by position.
      finds: whether Python asked which objects the function holds, each time it was traced.
    """

    key: tuple
    call: Callable
    shared: tuple[int, ...]
    operands: list[Value]
    identity: Hashable
    options: Hashable
    slots: list[Hashable]
    named: dict[str, Any]
    captured: dict[int, Tracer]
    finds: list[bool]

    @property
    def kinds(self) -> tuple[int, ...]:
        """Value type ids of the operands."""
        return tuple([v.type for v in self.operands])


def _prepared(recorder: RecorderLike, cell: Cell, args: tuple, static: dict) -> PreparedCall | None:
    """Returns a call of a cell; None if it is not ours to record. For arguments see below."""
    fn = cell.fn
    named = {name: value for name, value in static.items() if holds_array(name, value)}
    static = {name: value for name, value in static.items() if name not in named}
    options = static_options(cell, static)
    captured = {k: x for k, x in enumerate(held_values(fn)) if isinstance(x, Tracer)}
    from_closure = list(captured.values())
    leaves, tree = flatten((args, from_closure, named), f"an argument of cell `{cell.name}`")
    leaves = [as_number(leaf) for leaf in leaves]
    if _is_foreign(recorder, leaves):
        return None
    identity = identity_without(recorder, fn, captured)
    _make_values(recorder, (identity, options, tree_key(tree)), leaves)
    slots, operands, shared, fixed = _sorted_out(recorder, cell, leaves)
    finds: list[bool] = []

    def call(shared_values, operand_values):
        sources = {"shared": iter(shared_values), "value": iter(operand_values)}
        constants = iter(fixed)
        filled = [next(sources[s]) if isinstance(s, str) else next(constants) for s in slots]
        args, values, arrays = jax.tree.unflatten(tree, filled)
        watched: Any = contextlib.nullcontext()
        if isinstance(identity, ByAttributes) or holds_traced_objects(fn):
            watched = noting_calls(finds, finds_objects(fn))
        held = dict(zip(captured, values, strict=True))
        try:
            with watched:
                return with_held_values(fn, held)(*args, **static, **arrays)
        except Exception as error:
            note_call(error, cell.name, fn, args, static | arrays)
            raise

    key = ("cell", identity, options, tree_key(tree), tuple(slots))
    own = identity, options, slots, named, captured, finds
    return PreparedCall(key, call, tuple(shared), operands, *own)


def cell_call_spec(
    recorder: RecorderLike, cell: Cell, args: tuple, static: dict
) -> tuple[CellSpec, list] | None:
    """(how to record a call of a cell, its references); None if it is not ours to record.

    Args:
      recorder: the recorder.
      cell: the cell.
      args: its positional arguments.
      static: its keyword arguments.
    """
    found = _prepared(recorder, cell, args, static)
    if found is None:
        return None
    fn, registry, num_types = cell.fn, recorder.registry, len(recorder.registry.node_types)
    numbers = numbers_held(fn, recorder.computed)
    last = len(found.slots) - len(flatten(found.named, "an argument")[0])
    place = found.slots[:last].count("value")

    def family() -> Hashable:
        """What the function is known by without the numbers that it holds."""
        return identity_without(recorder, fn, [*found.captured, *numbers]), found.options

    try:
        spec = registry.cell_spec(
            cell.name,
            found.key,
            found.call,
            found.shared,
            found.kinds,
            static=spelled(static),
            holds=family if numbers else None,
            place=place,
        )
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            "Positional arguments of cells are values, Python numbers too, and so are arrays of "
            "instances that a cell's function holds. If Python must decide on one, pass it by "
            "keyword: keyword arguments are static."
        )
        raise
    call_spec = spec.call_spec
    if any(found.finds):
        registry.finding.add(code_of(fn))
        if isinstance(found.identity, ByAttributes):
            return cell_call_spec(recorder, cell, args, static)
    if found.captured and code_of(fn) in registry.finding and holds_traced_objects(fn):
        raise SymbolicValueError(
            f"cell `{cell.name}` holds an object with a value of the instance in it, and "
            "compares objects by which one they are, or looks one up; but it is traced with "
            "a copy of the object. Pass the value to the cell as an argument."
        )
    is_new = call_spec.node_type >= num_types
    recorder.caching &= call_spec.node_type not in registry.unseen
    if hasattr(fn, "__code__") and is_new:
        registry.warn_if_many(fn.__code__, found.identity, f"cell `{cell.name}`")
    references = [v.index for v in found.operands]
    references[place:place] = [recorder.number(x).index for x in spec.operands]
    is_operand = [slot == "value" for slot in found.slots]
    is_operand[last:last] = [True] * len(spec.operands)
    calls = spec.family or (found.identity, found.options)
    registry.arities.note(calls, fn, (args, found.named), is_operand, call_spec.node_type)
    return spec, references


def _make_values(recorder: RecorderLike, cell: Hashable, leaves: list[Leaf]) -> None:
    """Makes values of shared arrays that are values in other calls (see `SharedOperands`)."""
    registry = recorder.registry
    places = [k for k, x in enumerate(leaves) if isinstance(x, Symbol)]
    arguments = [
        (x.index if type(x) is Shared else VALUE, x.aval.shape, x.aval.dtype)
        for x in (leaves[k] for k in places)
    ]
    before = registry.assumptions.version("shared")
    for k in registry.shared_operands.note((cell, tuple(places)), arguments):
        leaves[places[k]] = recorder.shared_value(leaves[places[k]])
    if registry.assumptions.version("shared") != before:
        registry.forget_calls()


def _sorted_out(
    recorder: RecorderLike, cell: Cell, leaves: Sequence[Leaf]
) -> tuple[list[Hashable], list[Value], list[int], list[Any]]:
    """Returns the kind of each leaf of the arguments, and the leaves by kind.

    Operands are values, ids of shared values, and constants, which are part of the type.
    """
    slots: list[Hashable] = []
    operands: list[Value] = []
    shared: list[int] = []
    fixed: list[Leaf] = []
    for leaf in leaves:
        if is_array(leaf) or isinstance(leaf, NUMBER_TYPES):
            symbol = recorder.symbol(leaf)
            if isinstance(symbol, Value):
                slots.append("value")
                operands.append(symbol)
            else:
                slots.append("shared")
                shared.append(symbol.index)
            continue
        if isinstance(leaf, FUNCTION_TYPES):
            slots.append(("fixed", function_identity(leaf)))
            fixed.append(leaf)
            continue
        if not is_constant(leaf):
            raise TypeError(
                f"cell `{cell.name}` got {checks.shown(leaf)} as a "
                "positional argument; expected arrays, numbers or pytrees of them. Pass it "
                "by keyword if it is hashable, or close over it; if it is the `self` of a method, "
                "make its class a pytree, for instance by `jax.tree_util.register_dataclass`."
            )
        slots.append(("fixed", typed_or_same(leaf)))
        fixed.append(leaf)
    return slots, operands, shared, fixed


def _is_foreign(recorder: RecorderLike, leaves: Sequence[Leaf]) -> bool:
    """True if a leaf belongs to a transformation that is running inside the function."""
    if not any(isinstance(x, Tracer) and x._trace is not recorder for x in leaves):
        return False
    with take_current_trace() as current:
        return current is not recorder
