"""The ragged parts of an instance's graph, taken out of it.

What an instance does to arrays whose length differs from instance to instance is recorded like
everything else, with symbols for the lengths (see `_jaxpr.symbolic_dims`). Such nodes do not go
through the scheduler: instances that do the same run side by side whatever their lengths (see
`_ragged.packed_program`), and first of all. So a recorded graph is cut in two:

    ragged nodes and what they depend on  →  calls of regions; run first
    everything else                       →  a graph, for which results of regions are inputs

A *region* is a connected part of the first kind, as a program. Calls of one region, in whatever
instances and however many in each (the sentences at the leaves of a tree), run together. Arrays
have symbols of their own, so that what is done to two sentences of a tree is recorded with n for
one and m for the other: parts that differ in the names of symbols only are calls of one region (see
`NumberedKeys`).

A program for a GPU pays for each instruction of a graph, and nothing for one without any. There the
rest of the graph joins its ragged parts as long as it is the same for all instances, and little.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var

from jedbatch._graph.inputs import InputRows
from jedbatch._graph.record import Record
from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.interpret import any_performs, is_inexact, reads, work
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.padding.flat_programs import INSIDE
from jedbatch._jaxpr.padding.padded_loops import find_limit, may_not_end
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import is_ragged, symbols_in
from jedbatch._jaxpr.versions import without_consts
from jedbatch._ragged.packed_program import PackedProgram
from jedbatch._ragged.padded_types import PaddedTypes, RaggedNodeType
from jedbatch._ragged.phases import find_phases
from jedbatch._record.identity.primitives import NumberedKeys, numbered
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import AxisSize


class Region:
    """A program of ragged arrays that calls of many instances run together.

    Attributes:
      id: position among the regions of a session.
      shared: ids of the shared values it reads, its first arguments.
      operands, results: value types of a call. A table is a result with a row for every entry.
      shapes: of the results, as the function has them.
      packed: the program.
      operand_names: of the operands among the inputs of a plan.
      operand_extents: for each operand the number of its extent; None if it is not ragged.
      order: for each symbol of the program, its number among those of a call.
    """

    def __init__(
        self,
        id: int,
        shared: Sequence[int],
        operands,
        results,
        shapes,
        packed: PackedProgram,
        order,
    ):
        self.id = id
        self.order: tuple[int, ...] = tuple(order)
        self.shared = tuple(shared)
        self.operands: tuple[ValueType, ...] = tuple(operands)
        self.results: tuple[ValueType, ...] = tuple(results)
        self.shapes: tuple[tuple[AxisSize, ...], ...] = tuple(shapes)
        self.packed = packed
        self.operand_names = tuple(
            f"region {id}, operand {k}: {kind}" for k, kind in enumerate(self.operands)
        )
        self.operand_extents = tuple(
            packed.extents.index(kind.shape[0]) if is_ragged(kind.shape) else None
            for kind in self.operands
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols whose values a call must bring."""
        return self.packed.phased.symbols


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a region by one instance.

    Attributes:
      region: that is called.
      operands: where each operand comes from, one row each.
      leaves: for each symbol, an array of the instance whose length it is.
    """

    region: Region
    operands: tuple[InputRows, ...]
    leaves: tuple[int, ...]

    def lengths(self, arrays: Sequence[jax.Array]) -> list[int]:
        """The value of every symbol, for the arrays of an instance."""
        return [len(arrays[leaf]) for leaf in self.leaves]


def some_are_ragged(records: Iterable[Record]) -> bool:
    """Returns whether some of the records are `RaggedRecord`s: a look at their few classes."""
    kinds = set(map(type, records))
    kinds.discard(Record)
    return any(issubclass(kind, RaggedRecord) for kind in kinds)


@dataclass(frozen=True, eq=False)
class RaggedRecord(Record):
    """The record of an instance with ragged arrays.

    Attributes:
      calls: of regions. Their results are inputs of the graph: what an `InputRows` names as leaf
        `num_arrays + k` is result number k of all calls.
      num_arrays: arrays of the instance.
      ragged: for each leaf of the function's result that has a ragged axis, (its position, call,
        result).
      places: (call, result) of each number k.
      constants: the last of its arrays, which the function makes.
    """

    calls: tuple[Call, ...] = ()
    num_arrays: int = 0
    ragged: tuple[tuple[int, int, int], ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    constants: tuple[jax.Array | np.ndarray, ...] = ()

    @staticmethod
    def of(record: Record, num_arrays: int) -> "RaggedRecord":
        """Returns a record of an instance without ragged nodes as one of these."""
        form = record.structure, record.types
        return RaggedRecord(record.whole, record.index, *form, (), num_arrays)

    @functools.cached_property
    def told_apart_by(self) -> tuple[Hashable, ...]:
        """Returns what tells instances apart, besides their graphs, that are planned in one way.

        Those call the same regions, and read the same results of them.
        """
        leaves = [chunk.leaf for chunk in self.whole.chunks[self.index]]
        results = tuple([None if k is None else max(-1, k - self.num_arrays) for k in leaves])
        regions = tuple([call.region.id for call in self.calls])
        return *super().told_apart_by, results, regions, self.places, self.ragged


@dataclass(frozen=True, eq=False)
class Subgraph:
    """A connected part of a graph, apart from where in the graph it is.

    Attributes:
      nodes: (type, what it reads) of each: operands by number, results by (node, number).
      sources: where operands come from.
      returned: the results: (node, number), or the number of an operand.
      stopped: of each result, whether nothing comes back to it.
      symbols: in the order in which they come up.
      key: equal for calls that differ in values and in the names of symbols alone.
    """

    nodes: tuple[tuple[int, tuple[Any, ...]], ...]
    sources: tuple[InputRows, ...]
    returned: tuple[Any, ...]
    stopped: tuple[bool, ...]
    symbols: tuple[str, ...]
    key: Hashable

    @property
    def kinds(self) -> tuple[ValueType, ...]:
        """The value types of operands."""
        return tuple(source.type for source in self.sources)

    @functools.cached_property
    def numbers(self) -> dict[int, np.ndarray]:
        """The operands that are numbers, which the function or the instance has brought."""
        numbers = {}
        for k, source in enumerate(self.sources):
            number = source.leaf is None and source.type.shape == ()
            if number and not is_key(source.type.dtype):
                assert source.rows is not None
                numbers[k] = source.rows[0]
        return numbers


class Regions:
    """The regions met so far.

    Numbers in a function are operands of what reads them, and most are the same in all instances
    (the divisor of a score, an epsilon). Those are constants of a region, until they differ.

    Parts that would be a region of their own for nearly every instance are left in the graph, for
    nodes on padded arrays (see `_ragged.padded_types`).

    Attributes:
      rest_work: floating-point operations up to which the rest of a graph joins its ragged parts.
      packs: whether there are regions; without, nodes that are not padded are told apart by shapes.
      joins_rest: whether it does as long as it is the same for all instances; not once one differs.
      padded: types of nodes on padded arrays.
      limit: from a type to the operand that its nodes, loops, count to; None of others.
    """

    def __init__(self, registry: Registry, rest_work: float = 0, packs: bool = True):
        self.registry = registry
        self.rest_work = rest_work if packs else 0
        self.packs = packs
        self.joins_rest = self.rest_work > 0
        self._whole: Hashable = None
        self._changes = 0  # of that
        self.regions: list[Region] = []
        self._ids: dict[Hashable, Region] = {}
        self._ragged: dict[int, bool] = {}
        self._joins: dict[int, bool] = {}
        self._stopped: dict[int, frozenset[int]] = {}
        self.limit = functools.cache(lambda type_id: find_limit(registry.node_types[type_id]))
        self._renamed: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._canonical: dict[Hashable, int] = {}
        self._numbers: dict[tuple[Hashable, int], bytes | None] = {}  # None where they differ
        self.padded = PaddedTypes(registry, every=not packs)

    def is_ragged(self, type_id: int) -> bool:
        """Returns whether nodes of a type read or give ragged values, or ask for an extent."""
        if type_id not in self._ragged:
            node_type = self.registry.node_types[type_id]
            operation = operation_of(node_type)
            self._ragged[type_id] = any(
                is_ragged(t.shape) for t in (*node_type.operands, *node_type.results)
            ) or bool(symbols_in(operation.jaxpr))
        return self._ragged[type_id]

    def stopped(self, type_id: int) -> frozenset[int]:
        """The operands of a type, among those that have a gradient, to which nothing comes back."""
        if type_id not in self._stopped:
            node_type = self.registry.node_types[type_id]
            jaxpr = without_consts(operation_of(node_type).jaxpr)
            moving = {v for v in jaxpr.outvars if isinstance(v, Var) and is_inexact(v)}
            for eqn in reversed(jaxpr.eqns):
                if eqn.primitive.name != "stop_gradient" and not moving.isdisjoint(eqn.outvars):
                    moving.update(filter(is_inexact, reads(eqn)))
            operands = enumerate(jaxpr.invars[len(node_type.shared) :])
            self._stopped[type_id] = frozenset(
                k for k, v in operands if is_inexact(v) and v not in moving
            )
        return self._stopped[type_id]

    def renamed(self, type_id: int) -> tuple[int, tuple[str, ...]]:
        """Returns (a number equal for types that differ in the names of symbols only, these)."""
        if type_id not in self._renamed:
            key, symbols = _written(self.registry, type_id)
            number = self._canonical.setdefault(key, len(self._canonical))
            self._renamed[type_id] = number, symbols
        return self._renamed[type_id]

    def ragged_type(self, type_id: int) -> RaggedNodeType:
        """Returns a type of ragged nodes as `padded` knows it."""
        number, symbols = self.renamed(type_id)
        return RaggedNodeType(number, type_id, symbols)

    def is_padded(self, subgraph: Subgraph) -> bool:
        """Returns whether the nodes of a connected part are to be padded."""
        limits = ((refs, self.limit(t)) for t, refs in subgraph.nodes)
        read = [refs[k] for refs, k in limits if k is not None and not isinstance(refs[k], int)]
        if any(self.is_ragged(subgraph.nodes[maker][0]) for maker, _ in read):
            return False  # a loop to a length, whose room is known in a region alone
        return self.padded.wanted(self._ragged_types(subgraph))

    def _ragged_types(self, subgraph: Subgraph) -> list[RaggedNodeType]:
        types = dict.fromkeys(t for t, _ in subgraph.nodes)
        return [self.ragged_type(t) for t in types if self.is_ragged(t)]

    def note(self, subgraphs: Sequence[Subgraph]) -> None:
        """Takes note of the parts of an instance, and of numbers they read, perhaps constants."""
        self.padded.note((s.key, self._ragged_types(s)) for s in subgraphs)
        for subgraph in subgraphs:
            if not self.is_padded(subgraph):
                self._note_numbers(subgraph)

    def note_whole(self, subgraphs: Sequence[Subgraph]) -> None:
        """Takes note of the parts of a graph that nothing is left of, since the rest joins them.

        Once it may be another one than before: operations are merged from some time on (see
        `_record.passes.coalesce`).
        """
        key = tuple([subgraph.key for subgraph in subgraphs])
        if self._whole not in (key, None):
            self.registry.assumptions.fail("regions")
            self.joins_rest, self._changes = self._changes == 0, self._changes + 1
        self._whole = key
        for subgraph in subgraphs:
            self._note_numbers(subgraph)

    def leave_rest(self) -> None:
        """Has the rest of graphs be graphs from now on."""
        self.joins_rest = False
        self.registry.assumptions.fail("regions", self._whole is not None)

    def forget_rest(self) -> None:
        """Forgets what graphs are like: types that had been met have become others."""
        self.joins_rest, self._changes, self._whole = self.rest_work > 0, 0, None

    def joins(self, type_id: int) -> bool:
        """Returns whether nodes of a type may run with ragged ones.

        Loops and branches may not, which kernels run by lanes; nor do random keys have rows.
        """
        if type_id not in self._joins:
            node_type = self.registry.node_types[type_id]
            kinds = (*node_type.operands, *node_type.results)
            equations = without_consts(operation_of(node_type).jaxpr).eqns
            apart = any_performs(equations, *INSIDE, "custom_vjp_call")
            self._joins[type_id] = not (apart or any(is_key(t.dtype) for t in kinds))
        return self._joins[type_id]

    def work(self, type_id: int) -> int:
        """Returns the floating-point operations of a node of a type, roughly."""
        jaxpr = operation_of(self.registry.node_types[type_id]).jaxpr
        return sum(map(work, without_consts(jaxpr).eqns))

    def _note_numbers(self, subgraph: Subgraph) -> None:
        for k, number in subgraph.numbers.items():
            value = number.tobytes()
            if self._numbers.setdefault((subgraph.key, k), value) not in (value, None):
                self._numbers[subgraph.key, k] = None
                self.registry.assumptions.fail("regions")

    def fixed(self, subgraph: Subgraph) -> dict[int, np.ndarray]:
        """Returns the numbers among the operands of a call that were the same in all calls."""
        numbers = subgraph.numbers.items()
        return {k: x for k, x in numbers if self._numbers[subgraph.key, k] is not None}

    def region(self, key: Hashable, symbols: Sequence[str], make: Callable[[], tuple]) -> Region:
        """Returns the region of a key; `make()` gives its (shared, operands, program, shapes).

        `symbols` are those of the call, in the order of their numbers.
        """
        region = self._ids.get(key)
        if region is None:
            shared, operands, closed, shapes = make()
            if self.registry.bounds_loops and may_not_end(closed):
                raise CannotMergeError("loops that `max_steps` bounds are not run packed")
            packed = PackedProgram(find_phases(closed, len(shared)), self.registry.keys.jaxpr_key)
            packed.try_out([self.registry.shared[s].aval for s in shared])
            results = [ValueType(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
            order = map(list(symbols).index, packed.phased.symbols)
            region = Region(len(self.regions), shared, operands, results, shapes, packed, order)
            self._ids[key] = region
            self.regions.append(region)
        return region


def _written(registry: Registry, type_id: int) -> tuple[Hashable, tuple[str, ...]]:
    """Returns (a key equal for types that differ in the names of symbols only, these)."""
    node_type = registry.node_types[type_id]
    operation = operation_of(node_type)
    numbers: dict[str, int] = {}
    operands = [numbered((t.shape, t.dtype, t.weak), numbers) for t in node_type.operands]
    program = NumberedKeys(registry.keys, numbers).jaxpr_key(operation.jaxpr)
    return (tuple(operands), program, node_type.shared), tuple(numbers)
