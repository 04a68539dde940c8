"""Types of nodes on padded arrays: what takes the place of a node on arrays of any length.

Which nodes become nodes on padded arrays shows while instances are recorded. A program of ragged
values that all instances share is a region (see `_ragged.regions`), and so are a few of them. Nodes
of types that are met in more programs than that, as those of trees are, become nodes on padded
arrays. Those of one instance count as one as long as they are few: all instances may have the same,
such as one for each of six results of a function.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jedbatch._graph.types import LENGTH, ValueType, operation_of
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.symbolic_dims import is_ragged, shape_at
from jedbatch._ragged.padded_programs import PaddedProgram, find_padded
from jedbatch._record.types.registry import Registry

MAX_PROGRAMS = 4  # of ragged values that a type of nodes is part of, before it is padded
MAX_TOGETHER = 8  # programs of one instance that count as one


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


class PaddedNodeType(NamedTuple):
    """The type that takes the place of a ragged one, for arrays of some capacities.

    Attributes:
      id: of the type.
      lengths: the symbols, by number, whose values its nodes read behind their operands.
    """

    id: int
    lengths: tuple[int, ...]


class PaddedTypes:
    """The types of nodes on padded arrays.

    Attributes:
      registry: where types are interned.
      every: whether all nodes on arrays are padded, not only those in many programs.
      apart: why nodes of types in many programs are not padded, if there are such.
    """

    def __init__(self, registry: Registry, every: bool = False):
        self.registry = registry
        self.every = every
        self.apart: str | None = None
        self._programs: dict[int, set[Hashable]] = {}
        self._together: dict[int, int] = {}  # most programs of one instance with a type
        self._many: set[int] = set()  # types in many programs
        self._padded: dict[int, PaddedProgram | str] = {}  # by number
        self._types: dict[tuple[int, tuple[int, ...], bool], PaddedNodeType] = {}

    @property
    def ids(self) -> frozenset[int]:
        """The types that took the place of ragged ones."""
        return frozenset(known.id for known in self._types.values())

    @property
    def is_used(self) -> bool:
        """Returns whether there are padded nodes, or would be if they were possible."""
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

    def wanted(self, types: Collection[RaggedNodeType]) -> bool:
        """Returns whether ragged nodes of these types are padded."""
        if not any(map(self.is_many, types)):
            return False
        reasons = [x for x in map(self.program, types) if isinstance(x, str)]
        self.apart = reasons[0] if reasons else self.apart
        return not reasons

    def all_wanted(self, types: Collection[RaggedNodeType]) -> bool:
        """Returns whether ragged nodes of these types are padded, wherever they are."""
        if not (self.is_used and all(map(self.is_many, types))):
            return False
        return not any(isinstance(self.program(t), str) for t in types)

    def program(self, ragged: RaggedNodeType) -> PaddedProgram | str:
        """Returns the program of nodes of a type on padded arrays; or why there is none."""
        if ragged.number not in self._padded:
            node_type = self.registry.node_types[ragged.id]
            closed, num_shared = operation_of(node_type).jaxpr, len(node_type.shared)
            found: PaddedProgram | str
            try:
                found = find_padded(closed, num_shared, ragged.symbols)
            except Exception as error:  # of JAX too, from what is not known to run padded
                found = str(error)
                if not isinstance(error, CannotMergeError):
                    found = f"`{node_type.name}` raises {type(error).__name__} on padded arrays"
                line = self.registry.lines.get(ragged.id)
                found += f" at {line}" if line else ""
            self._padded[ragged.number] = found
        return self._padded[ragged.number]

    def padded(
        self, ragged: RaggedNodeType, sizes: tuple[int, ...], guarded: bool
    ) -> PaddedNodeType:
        """Returns the type in the place of a ragged one.

        Args:
          ragged: the type.
          sizes: the capacity of each of its symbols.
          guarded: whether a length may be 0.
        """
        key = ragged.number, sizes, guarded
        if key not in self._types:
            registry, program = self.registry, self.program(ragged)
            assert isinstance(program, PaddedProgram)  # as of all ragged nodes that are left
            node_type = registry.node_types[ragged.id]
            lengths = program.reads(guarded)
            capacity = dict(zip(ragged.symbols, sizes, strict=True))
            own_capacity = dict(zip(program.symbols, sizes, strict=True))
            kinds = [padded_kind(kind, capacity) for kind in node_type.operands]
            count, names = len(kinds), [program.symbols[k] for k in lengths]

            def call(shared: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
                named = dict(zip(names, operands[count:], strict=True))
                return program.run(shared, operands[:count], own_capacity, named, guarded)

            operands = tuple(registry.kinds_of([*kinds, *[LENGTH] * len(lengths)]))
            spec = registry.call_spec(
                f"{node_type.name}, {' × '.join(map(str, dict.fromkeys(sizes)))} rows",
                ("padded", *key),
                call,
                node_type.shared,
                operands,
            )
            registry.lines[spec.node_type] = registry.lines.get(ragged.id, "")
            self._types[key] = PaddedNodeType(spec.node_type, lengths)
        return self._types[key]


def padded_kind(kind: ValueType, capacity: Mapping[str, int]) -> ValueType:
    """Returns the type of a value that is padded, given the capacity of every symbol."""
    if not is_ragged(kind.shape):
        return kind
    return ValueType(shape_at(kind.shape, capacity), kind.dtype, kind.weak)
