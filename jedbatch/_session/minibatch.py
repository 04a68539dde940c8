"""`Minibatch`: what was recorded of instances that are planned together."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._graph.structures import Structure
from jedbatch._jaxpr.identity import Same
from jedbatch._record.identity.environment import Reached
from jedbatch._schedule.policy import Policy, version_of
from jedbatch._session.session import Session
from jedbatch._support.types import Array

NOTHING_REACHED = Reached(0, (), ())
NO_SECONDS: Mapping[str, float] = {}


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
