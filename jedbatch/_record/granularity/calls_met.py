"""Calls of functions of the user, and whether they are like those of a cell.

A call is like that of a cell if all that it reads is among its arguments, and if what it does
depends on their types alone. Both can be read off what was recorded meanwhile: the operations, and
where each operand comes from. Calls with arguments of equal types must agree in all of that; an
operand may be a constant, too, as long as it is the same one in all of them. A Python number among
the arguments must be read as it is: where Python computes with it, JAX would do so in other digits.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._record.instance_arrays import array_type, is_array
from jedbatch._record.registry import NUMBER_TYPES
from jedbatch._record.symbols import Shared, Value

MAX_WRITTEN = 4096  # elements of a constant that is compared with others by what is in it


class Origin(NamedTuple):
    """Where an operand may come from, or a result.

    Attributes:
      ways: arguments that it may be, values made before, constants.
      computed_from: where that comes from which JAX has computed it from, while it was recorded;
        empty if it has not.
    """

    ways: frozenset[Hashable]
    computed_from: tuple["Origin", ...] = ()

    def both(self, other: "Origin") -> "Origin | None":
        """Returns what holds of two calls; None if nothing does."""
        ways, computed_from = (
            self.ways & other.ways,
            _all_both(self.computed_from, other.computed_from),
        )
        return Origin(ways, computed_from or ()) if ways or computed_from else None


def _all_both(some: Sequence[Origin], others: Sequence[Origin]) -> tuple[Origin, ...] | None:
    if len(some) != len(others):
        return None
    found = [a.both(b) for a, b in zip(some, others, strict=True)]
    return None if None in found else tuple(filter(None, found))


class Done(NamedTuple):
    """The operations of a call, and where they take their operands from.

    Attributes:
      call_specs: of its operations.
      structure: of its result.
      sources: of each operand and each result, one after the other.
    """

    call_specs: tuple[int, ...]
    structure: Hashable
    sources: tuple[Origin, ...]

    def both(self, other: "Done") -> "Done | None":
        """Returns the same of two calls; None if they do not do the same."""
        if self.call_specs != other.call_specs or self.structure != other.structure:
            return None
        sources = _all_both(self.sources, other.sources)
        return None if sources is None else self._replace(sources=sources)


@dataclass(eq=False)
class CallsMet:
    """The calls of a function met so far.

    Attributes:
      fn: the function.
      is_cell: whether nothing yet says that it is none.
      asks: whether the user's code in it may ask what a number is, as `isinstance` does.
      changes: whether it may change things that there were before.
      num: how many there were.
      instances: the instances they were in, by number.
      done: what was done, by the types of the arguments.
      num_varying: of the registry, when that was noted.
    """

    fn: Callable
    is_cell: bool
    asks: bool
    changes: bool
    num: int = 0
    instances: set[int] = field(default_factory=set)
    done: dict[Hashable, Done] = field(default_factory=dict)
    num_varying: int = 0

    @property
    def num_operations(self) -> int:
        """The operations of the longest call."""
        return max([len(d.call_specs) for d in self.done.values()], default=0)

    def record(self, recorder: Any, target: Callable, args: tuple, static: dict) -> Any:
        """Returns the result of a call, and notes what it does.

        Args:
          recorder: of the instance.
          target: what is called.
          args: its positional arguments.
          static: its keyword arguments.
        """
        self.num += 1
        self.instances.add(recorder.registry.shared_operands.num_instances)
        before = len(recorder.call_specs), len(recorder.references), recorder.num_values
        result = target(*args, **static)
        if self.is_cell:
            self.is_cell = self._note(recorder, before, args, static, result)
        return result

    def _note(
        self, recorder: Any, before: tuple[int, int, int], args: tuple, static: dict, result: Any
    ) -> bool:
        """Notes what a call has done; returns whether that is like what a cell does."""
        try:
            kinds = tuple(_kinds(args, static, recorder))
        except TypeError:
            return False
        has_numbers = any(isinstance(x, str) for x in kinds)
        done = None if has_numbers and self.asks else _done(recorder, before, args, result)
        num_varying = recorder.registry.variants.num_varying
        if num_varying != self.num_varying:  # what was shared may be a node from now on
            self.done.clear()
            self.num_varying = num_varying
        if done is not None and kinds in self.done:
            done = done.both(self.done[kinds])
        if done is not None:
            self.done[kinds] = done
        return done is not None


def _kinds(args: tuple, static: dict, recorder: Any) -> Iterator[Hashable]:
    """Yields the types of arguments and their structure; a `TypeError` is that cells take no such.

    Shared arguments are told apart.
    """
    leaves: list[Any]
    leaves, structure = jax.tree.flatten(args)
    if any(map(is_array, jax.tree.leaves(static))):
        raise TypeError("keyword arguments are static")
    yield structure
    yield frozenset(static.items())
    for leaf in leaves:
        if type(leaf) is Value and leaf._trace is recorder:
            yield "value", leaf.type
        elif type(leaf) is Shared and leaf._trace is recorder:
            yield "shared", leaf.index
        elif isinstance(leaf, NUMBER_TYPES) and not isinstance(leaf, bool):  # Python decides on it
            yield type(leaf).__name__
        elif is_array(leaf) and not isinstance(leaf, Tracer):  # of a body that JAX traces
            yield array_type(leaf)
        else:
            raise TypeError("neither array nor number")


def _done(recorder: Any, before: tuple[int, int, int], args: tuple, result: Any) -> Done | None:
    """Returns what a call has done; None if that is not what cells do.

    Args:
      recorder: of the instance.
      before: how many operations, references and values there were before.
      args: the arguments.
      result: of the call.
    """
    num_calls, num_references, num_values = before
    leaves: list[Any] = jax.tree.leaves(args)
    symbols: dict[int, set[Hashable]] = {}
    numbers: dict[Hashable, set[Hashable]] = {}
    for k, leaf in enumerate(leaves):
        if type(leaf) is Value:
            symbols.setdefault(leaf.index, set()).add(("argument", k))
        elif type(leaf) is not Shared:
            numbers.setdefault(_written(leaf), set()).add(("argument", k))

    def shared(index: int) -> Origin:
        made_of = tuple(map(constant, recorder.origins.get(("shared", index), ())))
        return Origin(frozenset({("shared", index)}), made_of)

    def constant(value: Any) -> Origin:
        if type(value) is Shared:
            return shared(value.index)
        written = _written(value)
        ways = frozenset({("constant", written), *numbers.get(written, ())})
        return Origin(ways, tuple(map(constant, recorder.origins.get(id(value), ()))))

    def source(reference: int) -> Origin:
        if reference >= num_values:
            return Origin(frozenset({("made", reference - num_values)}))
        if reference in symbols:
            return Origin(frozenset(symbols[reference]))
        if reference in recorder.leaves:
            return Origin(frozenset(_parts(recorder.leaves[reference], leaves, recorder)))
        if reference < 0:
            return constant(recorder.input_value[-1 - reference])
        return Origin(frozenset())  # a value that the function holds

    sources = list(map(source, recorder.references[num_references:]))
    outs, structure = jax.tree.flatten(result)
    for out in outs:
        if type(out) is Value:
            sources.append(source(out.index))
        elif type(out) is Shared:
            sources.append(shared(out.index))
        else:  # a number stays one for Python, where the result of a cell is an array
            return None
    if not outs or not all(x.ways for x in sources):
        return None
    return Done(tuple(recorder.call_specs[num_calls:]), structure, tuple(sources))


def _parts(part: tuple, leaves: list[Any], recorder: Any) -> Iterator[Hashable]:
    """Yields the arguments that an array of the instance is part of, or is."""
    number, path = part
    for k, leaf in enumerate(leaves):
        whole = recorder.leaves.get(leaf.index) if type(leaf) is Value else None
        if whole is not None and whole[0] == number and path[: len(whole[1])] == whole[1]:
            yield "part", k, repr(path[len(whole[1]) :])


def _written(value: Any) -> Hashable:
    """Returns a number, or what is in an array; large ones by which one they are."""
    if not is_array(value):
        return value.item() if isinstance(value, np.generic) else value
    if value.size > MAX_WRITTEN or not isinstance(value.dtype, np.dtype):
        return "array", id(value)
    read = np.asarray(value)
    return read.item() if not read.ndim else ("array", read.shape, str(read.dtype), read.tobytes())
