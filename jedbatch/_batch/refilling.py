"""Lanes that take instances of a stream across its minibatches.

The thread that reads a stream runs segments: a minibatch that comes, beside the lanes that earlier
ones have left (see `_jaxpr.lane_segments`). It does not wait for the device. Whoever uses the
results looks at one segment after the other: which lanes are at the end, and where those are that
were left; so it knows whose they are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jedbatch._batch.one_by_one import OneByOne, Settled, settled
from jedbatch._jaxpr.lane_segments import Coming, LeftLanes, Segment
from jedbatch._jaxpr.transfers import fetched
from jedbatch._session.refilled import RefilledProgram
from jedbatch._support.types import Leaf, PyTree

PATIENCE = 8  # minibatches that come while results wait for a lane before them


class BegunSegment(NamedTuple):
    """A segment that the device computes.

    Attributes:
      first: the number of the first instance that comes.
      instances: the mapped arguments of those that come.
      program: that runs; None if no segment could begin.
      segment: its results; None if it could not begin.
    """

    first: int
    instances: Sequence[tuple]
    program: RefilledProgram | None
    segment: Segment | None


class StreamLanes:
    """The lanes of a stream, as whoever runs segments sees them.

    Args:
      one_by_one: the batched function.
      shared: the shared arguments.
      size: instances in a minibatch.
      ordered: whether results are used in the order of the instances, so that no lane may be left
        any number of times.
    """

    def __init__(self, one_by_one: OneByOne, shared: tuple[Any, ...], size: int, ordered: bool):
        self._one_by_one, self._shared, self._size = one_by_one, shared, size
        self._patience = PATIENCE if ordered else None
        self._program: RefilledProgram | None = None
        self._left: LeftLanes | None = None  # None if nobody is
        self._values: Sequence[Leaf] | None = None  # the shared ones that those who are left read
        self._inputs: dict[str, np.ndarray] = {}
        self._number = 0
        self._has_failed = False

    def take(self, first: int, instances: Sequence[tuple]) -> list[BegunSegment] | None:
        """Has instances begin; None if they have to be planned.

        Where shared values are others than before, lanes that are left come to the end with those
        that they began with, in a segment before. Once a segment could not begin, such as where a
        loop refuses weights on several devices, nothing else is run by lanes.

        Args:
          first: the number of the first.
          instances: the mapped arguments of each; fewer than a minibatch has are the last.
        """
        if self._has_failed:
            return None
        found = self._one_by_one.refilled(self._shared, instances, first, self._size)
        if found is None or (self._program is not None and found[0] is not self._program):
            return None
        leaves = self._one_by_one.leaves(self._shared)
        try:
            values = found[0].read(leaves, self._values)
        except Exception:  # found again where they are planned
            return None
        begun = [] if values is self._values else list(self.end(first))
        self._values = values
        self._program, self._inputs = found
        begun.append(self._run(first, instances, is_last=len(instances) < self._size))
        return begun

    def end(self, number: int) -> Iterator[BegunSegment]:
        """Yields the segment in which all lanes come to the end, if some are left.

        Args:
          number: of the instance that would come next.
        """
        if self._left is not None:
            yield self._run(number, [], is_last=True)

    def _run(self, first: int, instances: Sequence[tuple], is_last: bool) -> BegunSegment:
        program, number = self._program, self._number
        assert program is not None
        assert program.shape is not None
        assert self._values is not None
        few = 0 if is_last else program.shape.left
        oldest = 0 if self._patience is None else number - self._patience
        told = Coming(*map(np.int32, (len(instances), number, few, oldest)))
        self._number += 1
        try:
            before = program.nobody(self._values) if self._left is None else self._left
            segment = program(self._values, self._inputs, before, told)
        except Exception:  # in its turn, and once it is known whose it is
            self._left, self._has_failed = None, True
            return BegunSegment(first, instances, None, None)
        self._left = None if is_last else segment.lanes
        return BegunSegment(first, instances, program, segment)


class OpenInstances:
    """Instances of a stream that are not done, as whoever uses the results sees them.

    Args:
      run: from instances to their results, by themselves.
    """

    def __init__(self, run: Callable[[Sequence[tuple]], Sequence[PyTree]]):
        self._run = run
        self._open: list[tuple[int, tuple] | None] = []  # at each place of lanes that are left

    def any_before(self, number: int) -> bool:
        """Returns whether an instance with a lower number is not done."""
        return any(x[0] < number for x in self._open if x is not None)

    def settle(self, begun: BegunSegment) -> Iterator[tuple[int, Settled]]:
        """Yields (number, outcome) of the instances that are done after a segment, ascending."""
        came = list(enumerate(begun.instances, begun.first))
        program, segment = begun.program, begun.segment
        try:
            if program is None or segment is None:
                raise RuntimeError("the segment did not begin")
            columns = list(map(fetched, segment.results))
            at_end, left = fetched(segment.at_end), fetched(segment.left)
        except Exception:  # found again below
            still_open = [x for x in self._open if x is not None]
            self._open = []
            yield from self._by_themselves([*still_open, *came])
            return
        room, size = len(left), len(at_end)
        nobody = [None] * room
        before = (self._open + nobody)[:room]
        lanes = [*before, *came, *[None] * (size - room - len(came))]
        self._open = [lanes[place] if place < size else None for place in left.tolist()]
        for place in np.flatnonzero(at_end).tolist():
            lane = lanes[place]
            if lane is None:
                continue
            if program.was_stopped(columns, place):
                yield from self._by_themselves([lane])
            else:
                yield lane[0], Settled(program.results(columns, place), None)

    def _by_themselves(self, lanes: Sequence[tuple[int, tuple]]) -> Iterator[tuple[int, Settled]]:
        """Yields the outcomes of instances that are run without the others."""
        if not lanes:
            return
        numbers, instances = zip(*lanes, strict=True)
        yield from zip(numbers, settled(self._run, instances), strict=True)
