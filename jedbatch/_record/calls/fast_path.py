"""Recording calls of cells the second time: by a description of their arguments.

This is the hottest path of recording, so it has a twin in C (`_support/c/fast_path.c`). A call is
described by its arguments, which are flattened as pytrees are, in the same order: symbols by their
types, numbers and arrays of NumPy by theirs, keyword arguments that hold no array by their values,
and functions by which they are. What was described as a whole before is not looked into again: the
containers of shared values, and tuples and frozen objects that a cell returned. `registry.calls`
leads from such a description to a `CallSpec`, the way in which a call like this was recorded
before. Whatever has no description takes the slow path every time (see `Recorder.slow_path`).

The compiled core writes nodes and references to flat lists of ints, and keeps two tables for a
recording (`_support/c/memo.c`): from descriptions as numbers to call specs, and from containers and
states of the instance at hand, by their addresses, to their tokens. `known` has the latter, too, as
soon as a call takes the slow path. Tuples of symbols that cells returned for one instance, and that
nobody has when it is done, serve the next one.
"""

import functools
import struct
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.identity import Same, typed
from jedbatch._record.cell import Cell, holds_array
from jedbatch._record.identity.function_leaves import (
    code_of,
    held_functions,
    held_values,
    made_of,
    objects_held,
)
from jedbatch._record.identity.functions import FUNCTIONS_OF_RULES, function_identity
from jedbatch._record.identity.mutation import (
    Holders,
    Watched,
    hold_the_same,
    holders_in,
    own_holders,
)
from jedbatch._record.instances.arrays import array_type
from jedbatch._record.instances.key import may_change
from jedbatch._record.operations.symbols import RecorderLike, Shared, Value
from jedbatch._record.types.registry import Registry
from jedbatch._support.native import core
from jedbatch._support.types import Leaf, PyTree
from jedbatch.errors import EscapedValueError

PLAIN_NUMBERS = {bool, int, float, complex}
# What a part of a description is, as in `_support/c/fast_path.c`.
REFERENCE, STRING, LIST, TUPLE, DICT, NODE, SHARED, IDENTITY, KEYWORD, INT, BOOL, FLOAT = range(12)
STATIC = 12  # what Python alone describes
# Functions that are no constants (see `is_constant`): they are known by what they are made of.
FUNCTION_TYPES = (functools.partial, *FUNCTIONS_OF_RULES)


def lists_of_ints(result: type[Value], count: int) -> list[Any]:
    """Returns what `fast_path` writes ints to, given the class of symbols: as many empty lists."""
    compiled = core()
    if compiled is None or result is not Value:
        return [[] for _ in range(count)]
    return [compiled.Ints() for _ in range(count)]


def fast_path(recorder: RecorderLike) -> tuple[Callable, Callable[[], None], Callable[[], None]]:
    """Returns what records calls of cells, compiled if its symbols are plain and it can be.

    Two functions follow, to be called before the containers that it knows are let go: at the end,
    and where another instance follows.
    """
    in_python, compiled = fast_path_in_python(recorder), core()
    if compiled is None or not isinstance(recorder.counter, compiled.Ints):
        return in_python, nothing_to_forget, nothing_to_forget
    return compiled.fast_path(
        recorder,
        (Value, Shared, Cell, np.ndarray, Same),
        recorder.known,
        recorder.computed,
        recorder.kept,
        (recorder.registry.numbers, recorder.registry.arrays, recorder.registry.nodes),
        recorder.registry.units,
        recorder.watched,
        (recorder.registry.calls, recorder.cells),
        (recorder.call_specs, recorder.references, recorder.input_group, recorder.counter),
        recorder.input_value,
        jax.tree_util.default_registry.flatten_one_level,
        in_python,
    )


def nothing_to_forget() -> None:
    """Does nothing: what is known is in `known`, which others clear."""


def in_order(parts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of functions, called one after the other."""
    return [part() for part in parts]


def refuse_call(cell: Cell, args: tuple, static: dict) -> PyTree:
    """Raises `EscapedValueError`: this recorder is done."""
    raise EscapedValueError(
        f"cell `{cell.name}` is called by something that was recorded before; expected calls while "
        "a function is recorded. `help(jedbatch.errors.EscapedValueError)` says how values escape."
    )


def fast_path_in_python(recorder: RecorderLike) -> Callable:
    """Returns the recorder of calls of cells: a closure, as attributes cost a quarter more."""
    calls, call_specs = recorder.registry.calls, recorder.call_specs
    references, counter = recorder.references, recorder.counter

    def call_cell(cell: Cell, args: tuple, static: dict) -> PyTree:
        try:
            described = describe_call(recorder, cell, args, static)
            call_spec = calls.get(tuple(described.key))
        except NotDescribedError:
            call_spec = None
        if call_spec is None:
            return recorder.slow_path(cell, args, static)
        reads = described.reads
        made_values = iter(call_spec.made_values)
        for position, node_type in zip(made_values, made_values, strict=True):
            (index,) = recorder.registry.node_types[node_type].shared
            reads.insert(position, recorder.shared_value(Shared(recorder, index)).index)
        references.extend(reads)
        call_specs.append(call_spec.node_type)
        index = counter[0]
        counter[0] = index + len(call_spec.results)
        return recorder.results(call_spec, index)

    return call_cell


class NotDescribedError(Exception):
    """A call has no description; the message says why, after the name of its cell."""


class Description:
    """A call as a flat key, and what its node reads.

    Each part of an argument adds two items to the key, what it is and what tells it from others
    that are the same:

        a value, or a tuple or frozen object of them that a cell returned    the type
        a shared value, or a container of shared values                      the number or token
        a number, an array of NumPy                                          the type
        a tuple, a list, a dict, another node of JAX's registry of pytrees   how many parts it has

    What a node carries besides its parts, and the names in a dict, follow it; then come the parts.

    Attributes:
      key: the token of the function, and these items.
      reads: references to results, or inputs as `-1 - i`.
      shared: the shared values in it.
    """

    __slots__ = ("_recorder", "_writes", "key", "reads", "shared")

    def __init__(self, recorder: RecorderLike, token: Hashable, writes: bool):
        self.key: list[Hashable] = [token]
        self.reads: list[int] = []
        self.shared: list[int] = []
        self._recorder = recorder
        self._writes = writes

    def add_call(self, args: tuple, static: dict, held: Sequence[int]) -> None:
        """Describes the arguments of a call; raises `NotDescribedError`.

        `held` has references to the operands that the function holds.
        """
        for arg in args:
            self.add(arg)
        self.reads += held
        for name in sorted(static):
            self.key += KEYWORD, name
            is_operand = id(static[name]) in self._recorder.known or holds_array(name, static[name])
            (self.add if is_operand else self._add_static)(static[name])

    def add(self, x: Any) -> None:
        """Describes an argument or a part of one."""
        recorder, kind = self._recorder, type(x)
        found = recorder.known.get(id(x))
        if found is not None:
            token, index = found
            self._add_reference(token, index)
        elif kind is recorder.result and x._trace is recorder:
            self._add_reference(x.type, x.index)
        elif kind is Shared and x._trace is recorder:
            self.key += SHARED, x.index
            self.shared.append(x.index)
        elif is_plain(x):
            group, value_type = input_of(recorder.registry, x)
            index = -1
            if self._writes:
                index = recorder.new_input(group, x.copy() if kind is np.ndarray else x)
            self._add_reference(value_type, index)
        elif id(x) in recorder.computed:  # an input of the instance
            symbol = recorder.symbol(x)
            self._add_reference(symbol.type, symbol.index)
        elif id(x) in recorder.watched and hold_the_same(recorder.watched[id(x)].holders):
            self._add_reference(recorder.watched[id(x)].token, None)
        elif kind is str:
            self.key += STRING, x
        elif isinstance(x, jax.Array):
            self._add_array_reached(x)
        elif kind in (tuple, list, dict) and id(x) not in recorder.registry.things_reached:
            self._add_node(x)
        else:
            self._add_whole(x)

    def _add_array_reached(self, x: jax.Array) -> None:
        """Describes a weight that the batched function reaches, which has a token from now on."""
        recorder = self._recorder
        if not isinstance(x, Tracer) and recorder.is_weight_reached(x):
            recorder.symbol(x)
        if id(x) not in recorder.known:
            raise NotDescribedError(
                f"gets an array, {type(x).__name__}, that is neither part of the instance nor a "
                "weight; pass it to the batched function"
            )
        self._add_reference(*recorder.known[id(x)])

    def _add_whole(self, x: Any) -> None:
        """Describes a container; one that holds weights alone by a token, as long as it does.

        A large one that the batched function reaches counts as one that stays the same.
        """
        within = Description(self._recorder, None, self._writes)
        within._add_node(x)
        if within.reads or not within.shared:
            self.key += within.key[1:]
            self.reads += within.reads
            self.shared += within.shared
            return
        registry = self._recorder.registry
        token = registry.memo_token("container", tuple(within.key))
        registry.shared_in[token] = tuple(within.shared)
        holders = holders_in(x)
        if holders is not None:
            self._recorder.watched[id(x)] = Watched(x, token, holders)
        elif id(x) in registry.things_reached:
            self._recorder.note_container(x, token)
        self._add_reference(token, None)

    def _add_node(self, x: Any) -> None:
        """Describes a container, or what is static."""
        kind, parts = type(x), x
        if kind is tuple or kind is list:
            self.key += TUPLE if kind is tuple else LIST, len(x)
        elif kind is dict and all(type(name) is str for name in x):
            names = sorted(x)
            self.key += DICT, len(x)
            for name in names:
                self.key += STRING, name
            parts = [x[name] for name in names]
        else:
            node = jax.tree_util.default_registry.flatten_one_level(x)
            if node is None:
                self._add_identity(x)
                return
            parts, carried = tuple(node[0]), node[1]
            self.key += NODE, len(parts), REFERENCE, self._recorder.registry.node(kind, carried)
        for part in parts:
            self.add(part)

    def _add_reference(self, token: Any, index: int | None) -> None:
        self.key += REFERENCE, token
        registry = self._recorder.registry
        if index is None:
            self.shared += registry.shared_in.get(token, ())
        else:
            self.reads += range(index, index + registry.width(token))

    def _add_static(self, x: Any) -> None:
        """Describes the value of a keyword argument that is part of the type."""
        kind = type(x)
        if kind is str:
            self.key += STRING, x
        elif kind is float:
            self.key += FLOAT, *struct.unpack("q", struct.pack("d", x))
        elif kind in (int, bool) and -(1 << 63) <= x < 1 << 63:
            self.key += INT if kind is int else BOOL, int(x)
        elif kind is tuple:
            self.key += TUPLE, len(x)
            for part in x:
                self._add_static(part)
        else:
            written = Same(x) if x is None else typed(x)
            self.key += (IDENTITY if isinstance(written, Same) else STATIC), written

    def _add_identity(self, x: Any) -> None:
        """Describes something as the object that it is, or a function by what it is made of."""
        is_function = isinstance(x, FUNCTION_TYPES)
        holders = holders_in(x) if is_function else ()
        if holders is None or may_change(x):
            raise NotDescribedError(f"gets an object of class {type(x).__name__} that may change")
        if is_function:
            token = self._recorder.registry.memo_token("function", function_identity(x))
            self._recorder.watched[id(x)] = Watched(x, token, holders)
            self._add_reference(token, None)
        else:
            self.key += IDENTITY, Same(x)


def describe_call(
    recorder: RecorderLike, cell: Cell, args: tuple, static: dict, writes: bool = True
) -> Description:
    """Returns the description of a call.

    The inputs among the arguments are written down, if it `writes`. Raises `NotDescribedError` if
    the call needs a closer look every time.
    """
    try:
        _, token, held = recorder.described_cell(cell)
        described = Description(recorder, token, writes)
        described.add_call(args, static, held)
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise NotDescribedError(f"gets an argument that is refused: {error}") from error
    return described


# What holds what a function reads, its token, and references to operands that it holds.
DescribedCell = tuple[Holders, str, tuple[int, ...]]


def describe_cell(recorder: RecorderLike, cell: Cell) -> DescribedCell:
    """Returns the description of a cell's function, as long as it holds what it does now.

    Raises `NotDescribedError` for what may change without a trace: functions that hold arrays of
    NumPy, or objects that are not seen into.
    """
    fn = cell.fn
    holders = holders_in(fn) if cell.is_inner else None
    if holders is None:  # the environment looks at what the batched function reaches
        holders = holders_in(fn, Staying(recorder))
    values = held_values(fn)
    if holders is None or any(isinstance(x, np.ndarray) for x in values):
        raise NotDescribedError(
            "closes over an array of NumPy, or over an object that may change unseen; pass what it "
            "reads as an argument"
        )
    captured = {k: x for k, x in enumerate(values) if isinstance(x, Tracer)}
    identity = identity_without(recorder, fn, captured)
    symbols = list(map(recorder.symbol, captured.values()))
    held = [x for x in symbols if isinstance(x, Value)]
    slots = [("value", x.type) if isinstance(x, Value) else ("shared", x.index) for x in symbols]
    token = recorder.registry.memo_token("cell", identity, *slots)
    return holders, token, tuple([x.index for x in held])


def described_cell(recorder: Any, cell: Cell) -> DescribedCell:
    """Returns the description of a cell's function, made anew if it holds other things.

    Raises `NotDescribedError` if it has none.
    """
    of_cells = recorder.cells if cell.is_inner else recorder.registry.cells
    known = of_cells.get(cell)
    if known is None or not hold_the_same(known[0]):
        known = of_cells[cell] = _described_like(recorder, cell)
        if known[2]:
            recorder.cells_of_instance.append(cell)
    recorder.cells[cell] = known
    return known


def _described_like(recorder: Any, cell: Cell) -> DescribedCell:
    """Returns the description of a cell, that of one made of the same if there is one."""
    finding = recorder.registry.finding
    by_object = bool(finding) and code_of(cell.fn) in finding
    made = made_of(cell.fn, None if by_object else Staying(recorder)) if cell.is_inner else None
    if made is None:
        return describe_cell(recorder, cell)
    holders = own_holders(made.holders)
    known = recorder.made_cells.get(made.key)
    if holders is not None and known is not None and hold_the_same(known[0]):
        return (*holders, *known[0]), known[1], ()
    described = describe_cell(recorder, cell)
    within = holders_in(made.objects)
    if within is not None and not described[2]:
        recorder.made_cells[made.key] = within, described[1]
    return described


class Staying(Container[int]):
    """The ids of containers that hold the same things for good while something is recorded."""

    def __init__(self, recorder: RecorderLike):
        self._containers, self._things = recorder.containers, recorder.registry.things_reached

    def __contains__(self, key: object) -> bool:
        return key in self._containers or key in self._things


class Named(Mapping[int, Hashable]):
    """Names of containers of shared values, of arrays that the function reaches, and of operands.

    By their ids. Of containers that is their token, beside the shared values in them.
    """

    def __init__(self, recorder: RecorderLike, operands: Collection[int]):
        self._containers, self._registry = recorder.containers, recorder.registry
        self._operands = operands

    def __contains__(self, key: object) -> bool:
        return key in self._operands or key in self._containers or key in self._registry.reached

    def __getitem__(self, key: int) -> Hashable:
        if key in self._operands:
            return "operand"
        if key not in self._containers:
            return self._registry.reached[key]
        token = self._containers[key][0]
        return ("shared", *self._registry.shared_in.get(token, ()), token)

    def __iter__(self) -> Iterator[int]:
        return iter({*self._operands, *self._containers, *self._registry.reached})

    def __len__(self) -> int:
        return len(list(iter(self)))


def identity_without(recorder: RecorderLike, fn: Any, places: Collection[int]) -> Hashable:
    """Returns the identity of a function without operands, by position among `held_values`.

    Objects that it holds, made anew for each instance, say, are told apart by their attributes, and
    by which object they are only if Python asks that.
    """
    values = held_values(fn) if places else ()
    operands = {id(values[k]) for k in places}
    objects = objects_held(fn, Staying(recorder), operands)
    by_object = bool(objects) and code_of(fn) in recorder.registry.finding
    names = {
        id(x): Same(x) if by_object and not holds_operands else k
        for k, (x, holds_operands) in enumerate(objects)
    }
    identity = function_identity(fn, Named(recorder, operands), objects=names)
    if not objects and not places:
        return identity
    if by_object or not objects:
        return identity, held_functions(fn)
    return ByAttributes(identity, held_functions(fn))


class ByAttributes(NamedTuple):
    """The identity of a function that may hold other objects of equal attributes."""

    identity: Hashable
    functions: Hashable


def is_plain(x: object) -> bool:
    """Returns whether something is a number or array of Python or NumPy, known by its type."""
    return type(x) in PLAIN_NUMBERS or type(x) is np.ndarray or isinstance(x, np.generic)


def input_of(registry: Registry, x: Leaf) -> tuple[int, int]:
    """(input group, value type) of a number or array, which the registry has from now on."""
    is_array = type(x) is np.ndarray
    key: Any = (x.shape, x.dtype) if is_array else type(x)
    inputs: dict[Any, tuple[int, int]] = registry.arrays if is_array else registry.numbers
    found = inputs.get(key)
    if found is None:
        value_type = registry.value_type(*array_type(x))
        found = inputs[key] = registry.group("value", value_type), value_type
    return found
