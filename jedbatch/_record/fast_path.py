"""Recording calls of cells the second time: by a short description of their arguments.

This is the hottest path of recording, so it has a twin in C (`_support/c/fast_path.c`). A call is
described without looking into its arguments: a symbol by its type, a number by its kind, a tuple
that a cell returned, keyword arguments and a container of shared values by a token.
`registry.calls` is a tree of dictionaries that leads from such a description to a `CallSpec`, the
way in which a call like this was recorded before. Whatever has no description takes the slow path
every time (see `Recorder.slow_path`).

The compiled core writes nodes and references to flat lists of ints, and keeps two tables for a
recording (`_support/c/memo.c`): from descriptions as numbers to call specs, which saves following
the tree, and from containers and states of the instance at hand, by their addresses, to their
tokens. `known` has the latter, too, as soon as a call takes the slow path. Tuples of symbols that
cells returned for one instance, and that nobody has when it is done, serve the next one.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import PyTreeDef

from jedbatch._jaxpr.identity import tree_key
from jedbatch._record.cell import Cell
from jedbatch._record.closures import reachable_cells
from jedbatch._record.held import held_values, holds_what_may_change
from jedbatch._record.instance_arrays import array_type
from jedbatch._record.instance_key import may_change
from jedbatch._record.registry import END
from jedbatch._record.symbols import RecorderLike, Value
from jedbatch._support.native import core
from jedbatch._support.types import Leaf, PyTree
from jedbatch.errors import EscapedValueError

PLAIN_NUMBERS = {bool, int, float, complex}
PLAIN_TYPES = {bool, int, str, type(None)}  # of keyword arguments, equal values are the same


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
        (Value, Cell, np.ndarray),
        recorder.known,
        recorder.computed,
        recorder.kept,
        recorder.registry.numbers,
        recorder.registry.arrays,
        recorder.watched,
        recorder.registry.calls,
        (recorder.call_specs, recorder.references, recorder.input_group, recorder.counter),
        recorder.input_value,
        END,
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
    known, kept = recorder.known, recorder.kept
    computed = recorder.computed  # empty for a lazy scope, which has another one later
    numbers, arrays = recorder.registry.numbers, recorder.registry.arrays
    watched, result = recorder.watched, recorder.result
    calls, call_specs = recorder.registry.calls, recorder.call_specs
    references, counter = recorder.references, recorder.counter
    input_group, input_value = recorder.input_group, recorder.input_value

    def call_cell(cell: Cell, args: tuple, static: dict) -> PyTree:
        reads = []
        try:
            call_spec = calls[cell]
            if static:
                call_spec = call_spec[options_token(static)]
            for c in cell.closure:
                call_spec = call_spec[id(c.cell_contents)]
            for arg in args:
                found = known.get(id(arg))
                if found is not None:
                    token, index = found
                    call_spec = call_spec[token]
                    if index is not None:
                        reads.append(index)
                    continue
                kind = type(arg)
                if kind is result and arg._trace is recorder:
                    call_spec = call_spec[arg.type]
                    reads.append(arg.index)
                elif kind is np.ndarray:
                    group, token = arrays[arg.shape, arg.dtype]
                    call_spec = call_spec[token]
                    input_group.append(group)
                    input_value.append(arg.copy())  # it may change before it is read
                    reads.append(-len(input_group))
                elif id(arg) in watched:
                    call_spec = call_spec[watched[id(arg)].token_of(arg)]
                elif kind is tuple or kind is list:  # a state put together by hand
                    call_spec = call_spec[kind, len(arg)]
                    for x in arg:
                        found = known.get(id(x))
                        if found is not None:
                            call_spec = call_spec[found[0]]
                            if found[1] is not None:
                                reads.append(found[1])
                        elif type(x) is result and x._trace is recorder:
                            call_spec = call_spec[x.type]
                            reads.append(x.index)
                        elif id(x) in computed:  # an input of the instance
                            symbol = recorder.symbol(x)
                            call_spec = call_spec[symbol.type]
                            reads.append(symbol.index)
                        else:
                            is_array = type(x) is np.ndarray
                            group, token = (
                                arrays[x.shape, x.dtype] if is_array else numbers[type(x)]
                            )
                            call_spec = call_spec[token]
                            input_group.append(group)
                            input_value.append(x.copy() if is_array else x)
                            reads.append(-len(input_group))
                elif id(arg) in computed:
                    symbol = recorder.symbol(arg)
                    call_spec = call_spec[symbol.type]
                    reads.append(symbol.index)
                else:
                    group, token = numbers[kind]  # a number, if it is found
                    call_spec = call_spec[token]
                    input_group.append(group)
                    input_value.append(arg)
                    reads.append(-len(input_group))
            call_spec = call_spec[END]
        except (KeyError, ValueError):
            call_spec = None
        if call_spec is None:
            return recorder.slow_path(cell, args, static)
        kinds = call_spec.results
        references.extend(reads)
        call_specs.append(call_spec.id)
        index = counter[0]
        counter[0] = index + len(kinds)
        if call_spec.tree is None:
            return result(recorder, index, kinds[0])
        if call_spec.unit is None:
            return recorder.results(call_spec, index)
        if len(kinds) == 2:  # a state (h, c), spelled out
            out: tuple = (result(recorder, index, kinds[0]), result(recorder, index + 1, kinds[1]))
        else:
            out = tuple([result(recorder, i, kind) for i, kind in enumerate(kinds, index)])
        known[id(out)] = call_spec.unit, index
        kept.append(out)
        return out

    return call_cell


def describe_call(
    recorder: RecorderLike, cell: Cell, args: tuple, static: dict
) -> list[Hashable] | None:
    """The way to a call in `registry.calls`; None if it needs a closer look every time."""
    tokens: list[Hashable] = [cell]
    if reachable_cells(cell.fn) != cell.closure:
        return None
    if any(isinstance(x, Tracer | np.ndarray) for x in held_values(cell.fn)):
        return None
    if holds_what_may_change(cell.fn, recorder.registry.things_reached):
        return None
    if static:
        try:
            tokens.append(options_token(static))
        except KeyError:
            return None
    for c in cell.closure:
        try:
            x = c.cell_contents
        except ValueError:  # a name not assigned yet
            return None
        if isinstance(x, Tracer) or may_change(x):
            return None
        tokens.append(id(x))
    for arg in args:
        if is_referred(recorder, arg):
            tokens.append(reference_token(recorder, arg))
        elif is_plain(arg):
            tokens.append(input_token(recorder, arg))
        elif id(arg) in recorder.watched:
            tokens.append(recorder.watched[id(arg)].token_of(arg))
        elif is_put_together(recorder, arg):
            tokens += [(type(arg), len(arg)), *(_part_token(recorder, x) for x in arg)]
        else:
            return None
    return [*tokens, END]


def is_referred(recorder: RecorderLike, x: object) -> bool:
    """Returns whether something is a symbol, or a container that has a token of its own."""
    return id(x) in recorder.known or (type(x) is recorder.result and x._trace is recorder)


def reference_token(recorder: RecorderLike, x: Leaf) -> Hashable:
    """The token of what is referred to."""
    return recorder.known[id(x)][0] if id(x) in recorder.known else x.type


def is_put_together(recorder: RecorderLike, x: Leaf) -> bool:
    """Returns whether something is a tuple or list of symbols, what cells returned, and inputs."""
    if type(x) not in (tuple, list) or is_referred(recorder, x):
        return False
    return all(is_plain(part) or is_referred(recorder, part) for part in x)


def _part_token(recorder: RecorderLike, x: Leaf) -> Hashable:
    """Returns the token of a part of such a tuple or list."""
    if is_referred(recorder, x):
        return reference_token(recorder, x)
    return input_token(recorder, x)


def options_token(static: dict) -> Hashable:
    """A token of keyword arguments; raises `KeyError` if one of them has none."""
    kinds = tuple(map(type, static.values()))  # True, 1 and 1.0 are equal, but not the same
    if PLAIN_TYPES.issuperset(kinds):
        return kinds, tuple(static.items())
    raise KeyError(kinds)


def is_plain(x: object) -> bool:
    """Returns whether something is a number or array of Python or NumPy, known by its type."""
    return type(x) in PLAIN_NUMBERS or type(x) is np.ndarray or isinstance(x, np.generic)


def input_token(recorder: RecorderLike, x: Leaf) -> Hashable:
    """The token of an input like this one, which `numbers` or `arrays` have from now on."""
    registry = recorder.registry
    kind: Any = type(x)
    value_type = registry.value_type(*array_type(x))
    token = registry.token(kind, value_type)
    group_and_token = registry.group("value", value_type), token
    if kind is np.ndarray:
        registry.arrays[x.shape, x.dtype] = group_and_token
    else:
        registry.numbers[kind] = group_and_token
    return token


def reference_widths(recorder: RecorderLike, args: tuple) -> tuple[int, ...]:
    """Returns how many operands each reference of a short description stands for."""
    single = (0, 0)
    parts = [x for arg in args for x in (arg if is_put_together(recorder, arg) else [arg])]
    references = [recorder.known.get(id(x), single) for x in parts if id(x) not in recorder.watched]
    return tuple(
        1 if token >= 0 else len(recorder.registry.units[-1 - token])
        for token, index in references
        if index is not None
    )


class Watched:
    """A container that may change: what it held when it was described, and the description."""

    __slots__ = ("container", "keys", "leaves", "structure", "token")

    def __init__(self, container: object, leaves: list, structure: PyTreeDef, token: Hashable):
        self.container = container
        self.leaves = leaves
        self.structure = tree_key(structure)
        self.token = token
        self.keys = None
        if type(container) is dict and {*map(id, container.values())} == {*map(id, leaves)}:
            self.keys, self.leaves = tuple(container), list(container.values())

    def token_of(self, x: Leaf) -> Hashable:
        """The description; raises `KeyError` if the container holds something else by now."""
        if self.keys is not None:  # a flat dict; `tree.flatten` takes three times as long
            if tuple(x) == self.keys and all(map(operator.is_, x.values(), self.leaves)):
                return self.token
            raise KeyError(self.token)
        leaves, structure = jax.tree.flatten(x)
        if tree_key(structure) == self.structure and all(map(operator.is_, leaves, self.leaves)):
            return self.token
        raise KeyError(self.token)
