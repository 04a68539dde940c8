"""`Session`: what a batched function keeps between minibatches; `Minibatch`: what was recorded."""

import itertools
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

from jax.core import ShapedArray
from jax.tree_util import PyTreeDef

from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._graph.structures import Structure, Structures
from jedbatch._graph.types import NodeType
from jedbatch._jaxpr.identity import Same
from jedbatch._jaxpr.lane_steps import LaneForms
from jedbatch._jaxpr.zeros import Sources
from jedbatch._kernel.target import Target
from jedbatch._record.identity.environment import Environment, Reached
from jedbatch._record.operations.symbols import Symbol
from jedbatch._record.passes.projections import Projections
from jedbatch._record.types.registry import Registry
from jedbatch._schedule.policy import Policy, version_of
from jedbatch._session.options import Options
from jedbatch._session.programs.mapped import MappedProgram, places_of
from jedbatch._session.programs.program_cache import MAX_PROGRAMS, ProgramCache
from jedbatch._session.records.arguments import StackedInstances
from jedbatch._session.records.degenerate import (
    is_run,
    last_for_a_length,
    lengths_that_differ,
    warn_if_lengths_grow,
    warn_if_rounds_grow,
)
from jedbatch._session.records.record_cache import RecordCache
from jedbatch._support.caches import Budget, Memory
from jedbatch._support.guards import GuardFailed, until_guards_hold
from jedbatch._support.types import Array

Made = TypeVar("Made")
MAX_MINIBATCHES = 1024  # that are kept as they were planned
MANY_ENTRIES = 50_000  # of what types are made of, before all is forgotten
NOTHING_REACHED = Reached(0, (), ())
NO_SECONDS: Mapping[str, float] = {}


@dataclass(eq=False)
class Session:
    """The caches of a batched function for one structure of shared arguments.

    Attributes:
      registry: types met so far.
      records: graphs of instances.
      programs: kernels and programs.
      options: of the batched function.
      decides: whether the function has been seen to decide on values.
      num_types: node types when a minibatch was planned last.
      new_in_a_row: minibatches, up to the last, each of which had types that none before had.
      num_regions: programs of arrays of any length when a minibatch was planned last.
      padded: whether instances are recorded anew where they are to be graphs alone, with padded
        arrays in place of packed rows.
      regions_in_a_row: minibatches, up to the last, each of which had such programs that none
        before had.
      lengths_in_a_row: calls that decided on values, up to the last, each of which had types for
        arrays of lengths that none before had.
      arranged: minibatches that were planned, by their `PlanKey`.
      structures: of the instances that were planned.
      mapped: programs for rows of arrays, by the record of an instance and where its arrays are.
      mapped_again: these, by what decides the record (see `mapped_key`).
      projections: cut nodes in two, in plans of values alone; None where no node is to be cut.
      followed: of types of nodes the operands that each result has a derivative by, if asked.
      of_thread: what each thread keeps for itself.
    """

    registry: Registry
    records: RecordCache
    programs: ProgramCache
    options: Options
    decides: bool = False
    num_types: int = 0
    new_in_a_row: int = 0
    num_regions: int = 0
    padded: bool = False
    regions_in_a_row: int = 0
    lengths_in_a_row: int = 0
    arranged: Memory = field(default_factory=lambda: Memory(0))
    structures: Structures = field(default_factory=lambda: Structures(0, Budget()))
    mapped: dict[tuple[Record, tuple[int, ...]], MappedProgram] = field(
        default_factory=lambda: Memory(MAX_PROGRAMS)
    )
    mapped_again: dict[Hashable, MappedProgram] = field(
        default_factory=lambda: Memory(MAX_PROGRAMS)
    )
    projections: Projections | None = None
    followed: dict[int, list[Sources]] = field(default_factory=dict)
    of_thread: threading.local = field(default_factory=threading.local)

    @classmethod
    def empty(
        cls,
        avals: Sequence[ShapedArray],
        structure: PyTreeDef,
        options: Options,
        target: Target,
        environment: Environment | None = None,
        key: tuple[Hashable, ...] = (),
    ) -> "Session":
        """Returns a session in which nothing has been met.

        Args:
          avals: of the leaves of the shared arguments.
          structure: of the shared arguments.
          options: of the batched function.
          target: what to make programs for.
          environment: what the function reads besides its arguments.
          key: of this session among those of the batched function.
        """
        budget = Budget(options.cache_bytes)
        registry = Registry(avals, structure, budget, options.max_steps is not None)
        programs = ProgramCache(registry, target, environment, key, options)
        session = cls(registry, RecordCache(registry, options, target), programs, options)
        limit = min(MAX_MINIBATCHES, options.cache_size) if options.cache_bytes else 0
        session.arranged = Memory(limit, budget, lambda _, arranged: arranged.nbytes)
        session.structures = Structures(options.cache_size, budget)
        if options.granularity is None and target.projection_bytes:
            session.projections = Projections(registry, target.projection_bytes)
        return session

    def forms(self, node_types: Collection[NodeType]) -> dict[NodeType, LaneForms]:
        """Returns how loops and branches that values decide on run, of types that have some."""
        ids = [t for t, kind in enumerate(self.registry.node_types) if kind in node_types]
        found = {t: self.programs.kernel(t).forms for t in ids}
        return {self.registry.node_types[t]: forms for t, forms in found.items() if forms}

    @property
    def is_full(self) -> bool:
        """Returns whether so much has been met that it is better to begin again."""
        return self.registry.size > MANY_ENTRIES

    def planned(self, key: Hashable) -> Any:
        """Returns what was planned before by a key, whose programs are used again; or None."""
        found, use_again = self.arranged.use(key), self.programs.use_again
        return found if found is not None and all(use_again(*x) for x in found.programs) else None

    def mapped_key(self, number: int, instances: StackedInstances) -> Hashable | None:
        """Returns what decides the record of instances that are rows; None if that is not known.

        Args:
          number: of what the function reads besides its arguments.
          instances: the rows.
        """
        key = None if self.decides else instances.key()
        return key if key is None else (number, self.records.assumed(), key)

    def mapped_program(
        self,
        record: Record,
        arrays: Sequence[Array],
        rows: Sequence[Array],
        instances: StackedInstances,
    ) -> MappedProgram | None:
        """Returns the program for rows of arrays; None if they are better planned.

        Args:
          record: of the first instance.
          arrays: of the first instance.
          rows: the first ones, among which these are.
          instances: all rows.
        """
        places = places_of(arrays, rows)
        if places is None or type(record) is not Record:  # some of its arrays differ in length
            return None
        program = self.mapped.get((record, places))
        if program is None:
            program = self.mapped[record, places] = MappedProgram(record, self.programs, places)
        return program if program.takes(instances.arrays) else None

    def _note_decision(self, symbol: Symbol) -> NoReturn:
        """Notes that the function decides on values, and stops it."""
        self.decides = True
        symbol._trace.caching = False
        raise GuardFailed

    def unless_decides(self, make: Callable[[Callable], Made]) -> Made | None:
        """Returns what is made of all that is computed; None if the function decides on values.

        `make` is given what to call when a value is read.
        """

        def attempt() -> Made | None:
            if self.decides:
                return None
            try:
                return make(self._note_decision)
            except Exception:
                if self.decides:  # whatever the function makes of it
                    raise GuardFailed from None
                raise

        return until_guards_hold(attempt, lambda: self.decides)

    def note_types(self) -> None:
        """Notes how many node types and regions there are when a minibatch is planned."""
        num_types = len(self.registry.node_types)
        are_run = (is_run(self.registry, t) for t in range(self.num_types, num_types))
        self.new_in_a_row = self.new_in_a_row + 1 if any(are_run) else 0
        self.num_types = num_types
        regions = len(self.records.regions.regions)
        self.regions_in_a_row = self.regions_in_a_row + 1 if regions > self.num_regions else 0
        self.num_regions = regions

    def note_rounds(self, arrays: Sequence[Sequence[Array]], num_compiled: int) -> None:
        """Notes a call that decided on values, and warns if such calls compile again and again.

        Args:
          arrays: of its instances.
          num_compiled: programs for rounds that it compiled.
        """
        warn_if_rounds_grow(self.registry, num_compiled, self.records.regions.padded.ids)
        last = None
        if num_compiled:
            kinds = lengths_that_differ(itertools.chain.from_iterable(arrays))
            last = last_for_a_length(self.registry, self.num_types, kinds) if kinds else None
        self.num_types = len(self.registry.node_types)
        self.lengths_in_a_row = 0 if last is None else self.lengths_in_a_row + 1
        if last is not None:
            apart = self.records.lengths.shown
            warn_if_lengths_grow(self.registry, self.lengths_in_a_row, last, apart)


class Flags(NamedTuple):
    """The uses that a plan is made for.

    Attributes:
      gradient: whether to plan the reverse too.
      keeps: whether everything is kept that the reverse would read.
      stacked: whether results are stacked, and no list.
      shards: over how many devices it is cut; 0 if it is not.
    """

    gradient: bool = False
    keeps: bool = False
    stacked: bool = True
    shards: int = 0


class PlanKey(NamedTuple):
    """All that decides a plan but the values of inputs; minibatches are found again by it.

    Attributes:
      structures: of the instances, in order; or the distinct ones, in theirs.
      counts: int64[D], instances of each distinct one, as bytes; b"" for any numbers of them.
      flags: what the plan is for.
      policy, version: what cuts the graph into batches, and how often it has changed.
    """

    structures: tuple[Structure, ...]
    counts: bytes | None
    flags: Flags
    policy: Same
    version: Hashable


class Minibatch(NamedTuple):
    """Recorded instances, and what it takes to plan them.

    Attributes:
      session: whose programs may be used, and who keeps new ones.
      records: of the instances.
      arrays: of the instances, which inputs are read from.
      policy: cuts graphs into batches.
      seconds: spent in the stages before.
      num_known: instances whose graphs were known already.
      tracers: what is read from outside, by number or by name (see `SharedValue`).
      reached: what the function reads besides its arguments.
      structures: of the instances (see `Structures.of`); nothing if it need not be found again.
      results: from records and what their graph returns to what arenas return, and the form of the
        results (see `Core.results`); None if rows are all that is asked for.
    """

    session: Session
    records: Sequence[Record]
    arrays: Sequence[Sequence[Array]]
    policy: Policy
    seconds: Mapping[str, float] = NO_SECONDS
    num_known: int = 0
    tracers: Any = ()
    reached: Reached = NOTHING_REACHED
    structures: Sequence[Structure] = ()
    results: Any = None

    def to_be_found(self) -> "Minibatch":
        """Returns the same with structures, unless its plan reads tracers."""
        structures = () if self.tracers else self.session.structures.of(self.records)
        return self._replace(structures=structures)

    def key(
        self,
        flags: Flags,
        structures: Sequence[Structure] | None = None,
        counts: bytes | None = None,
    ) -> PlanKey:
        """Returns the key of plans of these instances in order, or as often as counted."""
        parts = tuple(self.structures if structures is None else structures)
        return PlanKey(parts, counts, flags, Same(self.policy), version_of(self.policy))

    def part(self, which: Sequence[int]) -> "Minibatch":
        """Returns some of the instances."""
        records, arrays = [self.records[i] for i in which], [self.arrays[i] for i in which]
        return self._replace(records=records, arrays=arrays)

    def cut(self, size: int) -> list["Minibatch"]:
        """Returns minibatches of so many instances, one after the other."""
        return [self.part(range(i, i + size)) for i in range(0, len(self.records), size)]


def graph_of(records: Sequence[Record]) -> Graph:
    """Returns the graph of instances."""
    return Graph.select([(r.whole, r.index) for r in records])


def num_programs(sessions: Mapping[Hashable, Session]) -> int:
    """Returns how many XLA programs were built for some sessions."""
    return sum(sum(s.programs.compilations.values()) for s in list(sessions.values()))
