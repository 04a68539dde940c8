"""Types of nodes on tiles: what takes the place of a node on arrays of any length.

Which nodes become nodes on tiles shows while instances are recorded. A program of ragged values
that all instances share is a region (see `_ragged.regions`), and so are a few of them. Nodes of
types that are met in more programs than that, as those of trees are, become nodes on tiles. Those
of one instance count as one as long as they are few: all instances may have the same, such as one
for each of six results of a function.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._ragged.joined_tiles import JoinedProgram, RowAxis, find_joined
from jedbatch._ragged.tile_reductions import TileRows
from jedbatch._ragged.tile_steps import Combination, StepProgram, TileStep, find_steps
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import AxisSize

MAX_PROGRAMS = 4  # of ragged values that a type of nodes is part of, before it has tiles
MAX_JOINED = 16  # types of nodes that are several nodes
MAX_TOGETHER = 8  # programs of one instance that count as one
TILE_ROWS = (128, 64, 32, 16, 8)  # that a tile may have
MAX_PADDING = 0.1  # rows of tiles beyond those that exist
MAX_WASTE, FEW_ROWS = 4, 4096  # times the rows, or the tiles, of another size; and rows that matter
ROW_NUMBER = ValueType((), np.dtype(np.int32))  # of the first row of a tile, and of its rows


class StepOnTiles(NamedTuple):
    """A step of a node (see `_ragged.tile_steps`). Values are numbered: these are *slots*.

    Attributes:
      type: id of the type of its nodes.
      symbol: position among the symbols of the node of that of its tiles; -1 if it runs once.
      reads: slots.
      writes: how many slots it fills, behind all before.
      reads_rows: whether it reads which rows those of the tile are.
      combines: whether it combines the results of tiles.
      joins: whether it reads all tiles of arrays, and gives all of its results.
      identity: if it combines, the values of no tile; if it joins, what it reads of no tile.
      rows_of: if it joins, for each read the position of the symbol of its rows, or that it is the
        value of; -1 of others.
    """

    type: int
    symbol: int
    reads: tuple[int, ...]
    writes: int
    reads_rows: bool
    combines: bool
    joins: bool
    identity: tuple[np.ndarray, ...]
    rows_of: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class NodeOnTiles:
    """The steps that take the place of a node of a type.

    Attributes:
      steps: in order.
      lengths: extents whose values are in the slots behind the operands, and types of these.
      returned: slots of the results.
      symbols: of the extents, in order.
      nonempty: extents that must not be 0, each with the operation that says so.
    """

    steps: tuple[StepOnTiles, ...]
    lengths: tuple[tuple[AxisSize, ValueType], ...]
    returned: tuple[int, ...]
    symbols: tuple[str, ...]
    nonempty: tuple[tuple[AxisSize, str], ...]

    @property
    def asks(self) -> bool:
        """Returns whether extents are read, or must not be 0."""
        return bool(self.lengths or self.nonempty)


class RaggedNodeType(NamedTuple):
    """A type of nodes that read or give ragged values.

    Attributes:
      number: equal for types that differ in the names of symbols only.
      id: of the type.
      symbols: these names, in order.
    """

    number: int
    id: int
    symbols: tuple[str, ...]


class Singles(NamedTuple):
    """How many values without rows there are of a node that joins tiles.

    Attributes:
      operands: that it reads, ahead of tiles.
      results: that it gives, ahead of tiles.
    """

    operands: int
    results: int


class TileTypes:
    """The types of nodes on tiles.

    Attributes:
      registry: where types are interned.
      every: whether all nodes on arrays become nodes on tiles, not only those in many programs.
      rows: of a tile now, T; 0 as long as there are no tiles.
      apart: why nodes of types in many programs have no tiles, if there are such.
      singles: of each type of nodes that join tiles.
      joins_nodes: whether several nodes may be one (see `_ragged.joined_nodes`).
    """

    def __init__(self, registry: Registry, every: bool = False):
        self.registry = registry
        self.every = every
        self.rows = 0
        self.apart: str | None = None
        self.singles: dict[int, Singles] = {}
        self.joins_nodes = True
        self._joining: dict[int, Callable[[int, bool], int]] = {}
        self._programs: dict[int, set[Hashable]] = {}
        self._together: dict[int, int] = {}  # most programs of one instance with a type
        self._many: set[int] = set()  # types in many programs
        self._nodes: dict[tuple[int, int], NodeOnTiles | str] = {}  # by rows and number
        self._ragged: dict[int, RaggedNodeType] = {}  # of which there are nodes on tiles, by number

    @property
    def is_used(self) -> bool:
        """Returns whether there are nodes on tiles, or would be if they were possible."""
        return self.every or bool(self._many)

    def note(self, programs: Iterable[tuple[Hashable, Collection[RaggedNodeType]]]) -> None:
        """Takes note of the programs of ragged values of one instance.

        Args:
          programs: for each a key, equal for programs that are equal; and the types of its ragged
            nodes.
        """
        if self.every:
            return
        met: dict[int, set[Hashable]] = {}
        for key, types in programs:
            for node_type in types:
                met.setdefault(node_type.number, set()).add(key)
        known = len(self._many)
        for number, keys in met.items():
            if number in self._many:
                continue
            every = self._programs.setdefault(number, set())
            every |= keys
            together = max(self._together.get(number, 1), min(len(keys), MAX_TOGETHER))
            self._together[number] = together
            if len(every) - together + 1 > MAX_PROGRAMS:
                self._many.add(number)
                del self._programs[number], self._together[number]
        self.registry.assumptions.fail("regions", len(self._many) > known)

    def is_many(self, ragged: RaggedNodeType) -> bool:
        """Returns whether a type has been met in many programs."""
        return self.every or ragged.number in self._many

    def note_joined(self, whole: RaggedNodeType, parts: Iterable[RaggedNodeType]) -> bool:
        """Takes note of a type of nodes that are several nodes, met in as many programs.

        Returns whether there may be nodes of this type.
        """
        holds = self.registry.assumptions.holds
        self.joins_nodes &= holds("joined nodes", None, whole.number, MAX_JOINED)
        if any(map(self.is_many, parts)):
            self._many.add(whole.number)
        return self.joins_nodes

    def wanted(self, types: Collection[RaggedNodeType]) -> bool:
        """Returns whether ragged nodes of these types become nodes on tiles."""
        if not any(map(self.is_many, types)):
            return False
        reasons = [x for x in map(self.nodes, types) if isinstance(x, str)]
        self.apart = reasons[0] if reasons else self.apart
        return not reasons

    def all_wanted(self, types: Collection[RaggedNodeType]) -> bool:
        """Returns whether ragged nodes of these types become nodes on tiles, wherever they are."""
        if not (self.is_used and all(map(self.is_many, types))):
            return False
        return not any(isinstance(self.nodes(t), str) for t in types)

    def choose_rows(self, lengths: Sequence[int]) -> None:
        """Chooses how many rows a tile has, for a minibatch of arrays of these lengths.

        They stay as many as before where that makes little difference, so that minibatches that are
        alike run by the same programs. There are programs for each of a few sizes at most.
        """
        if not lengths:
            return
        counts = np.array(lengths)[:, None]
        tiles = (-(-counts // TILE_ROWS)).sum(0)
        computed = tiles * TILE_ROWS
        fits = computed <= (1 + MAX_PADDING) * counts.sum()
        best, before = int(fits.argmax()) if fits.any() else -1, self.rows
        if before:
            now = TILE_ROWS.index(before)
            costs = [(computed[k], TILE_ROWS[-1] * tiles[k]) for k in (now, best)]
            pairs = zip(*costs, strict=True)
            if not any(a > MAX_WASTE * b and a - b > FEW_ROWS for a, b in pairs):
                return
        self.rows = TILE_ROWS[best]
        if any(isinstance(self.nodes(t), str) for t in list(self._ragged.values())):
            self.rows = before  # JAX may not know what to do with tiles of this size

    def nodes(self, ragged: RaggedNodeType) -> NodeOnTiles | str:
        """Returns what takes the place of nodes of a type; or why there is nothing, in words."""
        key = self.rows, ragged.number
        if key not in self._nodes:
            try:
                self._nodes[key] = self._make(ragged)
                self._ragged[ragged.number] = ragged
            except Exception as error:  # of JAX too, from what is not known to run on tiles
                reason = str(error)
                if not isinstance(error, CannotMergeError):
                    name = self.registry.node_types[ragged.id].name
                    reason = f"`{name}` raises {type(error).__name__} on a tile"
                line = self.registry.lines.get(ragged.id)
                self._nodes[key] = f"{reason}{f' at {line}' if line else ''}"
        return self._nodes[key]

    def joining(self, type_id: int, tiles: int, guarded: bool) -> int:
        """Returns the type of nodes that join so many tiles, given that of those of one.

        Args:
          type_id: of nodes that join one.
          tiles: of each array.
          guarded: whether a length may be 0.
        """
        return self._joining[type_id](tiles, guarded)

    def of_tile(self, shape: Sequence[AxisSize]) -> tuple[int, ...]:
        """Returns the shape of a tile."""
        return tuple(self.rows if is_ragged((d,)) else d for d in shape)

    def _make(self, ragged: RaggedNodeType) -> NodeOnTiles:
        node_type = self.registry.node_types[ragged.id]
        num_shared = len(node_type.shared)
        closed = operation_of(node_type).jaxpr
        try:
            program = find_steps(closed, num_shared, self.rows)
        except CannotMergeError as error:
            try:
                return self._make_joined(ragged, find_joined(closed, num_shared))
            except CannotMergeError:
                raise error from None
        shared = dict(zip(program.invars[:num_shared], node_type.shared, strict=True))
        symbol = {name: k for k, name in enumerate(ragged.symbols)}
        slot = {v: k for k, v in enumerate(program.invars[num_shared:])}
        for v in program.lengths:
            slot[v] = len(slot)
        end = len(slot)
        steps = []
        for k, step in enumerate(program.steps):
            name = node_type.name
            if len(program.steps) > 1:
                name += f" {k + 1}/{len(program.steps)}"
            key = "tiles", self.rows, ragged.number, k
            combines = isinstance(step, Combination)
            ids: tuple[int, ...] = ()
            if isinstance(step, Combination):
                reads = 2 * step.parts
                kinds = [self._value_type(program, v) for v in reads]
                call, reads_rows = _combining(step), False
            else:
                reads, reads_rows = step.reads, step.reads_rows
                kinds = [self._value_type(program, v) for v in reads]
                kinds += self.registry.kinds_of([ROW_NUMBER, ROW_NUMBER] * reads_rows)
                call = _running(program, step, self.rows)
                ids = tuple(shared[v] for v in step.shared)
            call_spec = self.registry.call_spec(name, key, call, ids, tuple(kinds))
            type_id = call_spec.node_type
            self.registry.lines[type_id] = self.registry.lines.get(ragged.id, "")
            identity: tuple[np.ndarray, ...] = ()
            if isinstance(step, Combination):
                results = self.registry.node_types[type_id].results
                nothing = [np.zeros(t.shape, t.dtype) for t in results]  # see `nonempty`
                identity = tuple(nothing) if step.identity is None else step.identity
            steps.append(
                StepOnTiles(
                    type_id,
                    -1 if step.extent is None else symbol[str(step.extent)],
                    tuple(slot[v] for v in reads),
                    len(call_spec.results),
                    reads_rows,
                    combines,
                    False,
                    identity,
                )
            )
            slot.update((v, end + i) for i, v in enumerate(step.writes))
            end += len(call_spec.results)
        return NodeOnTiles(
            tuple(steps),
            tuple(
                (extent, self.registry.value_types[self._value_type(program, v)])
                for v, extent in program.lengths.items()
            ),
            tuple(slot[v] for v in program.outvars),
            ragged.symbols,
            program.nonempty,
        )

    def _make_joined(self, ragged: RaggedNodeType, program: JoinedProgram) -> NodeOnTiles:
        """Returns a step that reads all tiles of arrays."""
        registry = self.registry
        node_type = registry.node_types[ragged.id]
        operands = _by_rows(registry.kinds_of(node_type.operands), program.operands)
        kinds, tiles = ([self._tile_type(kind) for _, kind in part] for part in operands)
        kinds += registry.kinds_of([ROW_NUMBER] * len(program.extents))

        @functools.cache
        def joining(count: int, guarded: bool) -> int:
            name = f"{node_type.name}, {count} tile{'s' * (count != 1)}"
            key = "joined tiles", self.rows, ragged.number, count, guarded
            read = (*kinds, *[kind for kind in tiles for _ in range(count)])
            call = functools.partial(program.run, size=self.rows, tiles=count, guarded=guarded)
            spec = registry.call_spec(name, key, call, node_type.shared, read)
            registry.lines[spec.node_type] = registry.lines.get(ragged.id, "")
            return spec.node_type

        type_id = joining(1, False)
        results = [k for part in _by_rows(program.results, program.results) for k, _ in part]
        self.singles[type_id] = Singles(len(kinds), program.results.count(None))
        self._joining[type_id] = joining
        count, more = len(program.operands), len(program.extents)
        lengths = range(count, count + more)
        of_tiles = [rows.symbol for rows in program.operands if rows is not None]
        symbols = [ragged.symbols.index(name) for name in (*program.extents, *of_tiles)]
        zeros = [np.zeros(t.shape, t.dtype) for t in map(registry.value_types.__getitem__, tiles)]
        step = StepOnTiles(
            type_id,
            0,
            (*[k for k, _ in operands[0]], *lengths, *[k for k, _ in operands[1]]),
            len(results),
            False,
            False,
            True,
            tuple(zeros),
            (*[-1] * len(operands[0]), *symbols),
        )
        slot = {r: count + more + k for k, r in enumerate(results)}
        return NodeOnTiles(
            (step,),
            tuple([(extent, ROW_NUMBER) for extent in program.extents.values()]),
            tuple([slot[r] for r in range(len(results))]),
            ragged.symbols,
            program.nonempty,
        )

    def _tile_type(self, kind: int) -> int:
        """Returns the type of a tile of values of a type, or that type."""
        value_type = self.registry.value_types[kind]
        shape = self.of_tile(value_type.shape)
        return self.registry.value_type(shape, value_type.dtype, value_type.weak)

    def _value_type(self, program: StepProgram, variable: Hashable) -> int:
        shape, dtype, weak = program.types[variable]
        return self.registry.value_type(self.of_tile(shape), dtype, weak)


def _by_rows(
    values: Iterable[Any], rows: Sequence[RowAxis | None]
) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Returns (number, value) of the values without rows, and of those with rows."""
    numbered = list(zip(enumerate(values), rows, strict=True))
    without = [x for x, own in numbered if own is None]
    return without, [x for x, own in numbered if own is not None]


def _combining(step: Combination) -> Callable:
    def call(_: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(step.combine(*operands))

    return call


def _running(program: StepProgram, step: TileStep, size: int) -> Callable:
    def call(shared: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
        count = len(step.reads)
        rows = None
        if step.extent is not None:
            start, exist = operands[count:] if step.reads_rows else (None, None)
            rows = TileRows(size, start, exist)
        return tuple(program.run(step, shared, operands[:count], rows))

    return call
