"""Recorded runs of lanes, and a simulator that runs them again under any policy.

Where a lane goes does not depend on who runs with it. So what a run of a machine of program
counters was, each lane's blocks in order, is known once and for all, and how many steps another
policy would need is found without computing anything. The simulator does what the machine does,
queue by queue (see `_jaxpr.program_counters`): its counts are those of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jedbatch._schedule.lane_policies import LaneBlocks, LaneFrontier, LanePolicy, next_step


@dataclass(frozen=True, eq=False)
class LaneRun:
    """The way of each lane through the blocks of a program, from the first queue to the last.

    Attributes:
      blocks: the program.
      ptr: int64[N + 1], where the visits of each lane begin.
      block: int32[V], the block of each visit.
      trips: int32[V], how often the lane ran it in a row.
    """

    blocks: LaneBlocks
    ptr: np.ndarray
    block: np.ndarray
    trips: np.ndarray

    @staticmethod
    def of(blocks: LaneBlocks, lanes: Sequence[Sequence[tuple[int, int]]]) -> "LaneRun":
        """The run in which lanes make these visits, (block, trips in a row) each."""
        ptr = np.append(0, np.cumsum([len(visits) for visits in lanes])).astype(np.int64)
        flat = np.array([x for visits in lanes for x in visits], np.int32).reshape(-1, 2)
        return LaneRun(blocks, ptr, flat[:, 0].copy(), flat[:, 1].copy())

    def check(self) -> None:
        """Raises `AssertionError` if a lane visits what there is not, or a block twice in a row."""
        assert len(self.ptr) - 1 <= self.blocks.size
        assert (self.trips > 0).all()
        assert ((self.block >= 0) & (self.block < len(self.blocks.work))).all()
        first = np.zeros(len(self.block) + 1, bool)
        first[self.ptr] = True
        again = self.block[1:] == self.block[:-1]
        assert not (again & ~first[1:-1]).any()

    @property
    def needed(self) -> int:
        """The trips of all lanes, the certified least."""
        return int(self.trips.sum())

    @property
    def useful(self) -> float:
        """The floating-point operations of the trips of all lanes."""
        return float((np.array(self.blocks.work, float)[self.block] * self.trips).sum())

    def part(self, lanes: np.ndarray) -> "LaneRun":
        """Returns the run of some lanes, in this order; as many places are there for them."""
        rows = [np.arange(self.ptr[i], self.ptr[i + 1]) for i in lanes.tolist()]
        visits = np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)
        ptr = np.append(0, np.cumsum([len(x) for x in rows])).astype(np.int64)
        return LaneRun(self.blocks, ptr, self.block[visits], self.trips[visits])


class SimulatedStep(NamedTuple):
    """A step of a simulated run.

    Attributes:
      step: its number.
      trips: how often its block ran for these lanes.
      needed: for how many lanes of these trips.
      cost: S + trips W c, in floating-point operations.
    """

    step: int
    trips: int
    needed: int
    cost: float


class LaneSimulator:
    """The queues of a machine while a recorded run is run again.

    Attributes:
      waiting: int32[B], how many lanes wait at each block.
    """

    def __init__(self, run: LaneRun):
        self.run = run
        blocks = run.blocks
        self._queues: list[list[int]] = [[] for _ in blocks.work]
        self.waiting = np.zeros(len(blocks.work), np.int32)
        self._at = run.ptr[:-1].tolist()
        self._end = run.ptr[1:].tolist()
        self._block, self._left = run.block.tolist(), run.trips.tolist()
        for lane, (at, end) in enumerate(zip(self._at, self._end, strict=True)):
            if at < end:
                self._arrive(lane, self._block[at])

    @property
    def is_done(self) -> bool:
        """Returns whether all lanes have come to the last block."""
        return not self.waiting.any()

    @property
    def frontier(self) -> LaneFrontier:
        """Returns the state that a policy sees."""
        return LaneFrontier(self.run.blocks, self.waiting, np)

    def _arrive(self, lane: int, block: int) -> None:
        self._queues[block].append(lane)
        self.waiting[block] += 1

    def advance(self, step: int) -> SimulatedStep:
        """Runs a step for which a lane waits."""
        blocks = self.run.blocks
        block, width = blocks.block[step], blocks.width[step]
        queue = self._queues[block]
        lanes, self._queues[block] = queue[:width], queue[width:]
        assert lanes, f"nobody waits at block {block}"
        full = min(width, int(self.waiting.sum()))
        trips = needed = 0
        if blocks.repeats[block]:
            trips, needed = self._repeat(lanes, full, blocks.work[block])
        else:
            trips, needed = 1, len(lanes)
            for lane in lanes:
                self._left[self._at[lane]] -= 1
        self.waiting[block] -= len(lanes)
        for lane in lanes:
            at = self._at[lane]
            if not self._left[at]:
                at = self._at[lane] = at + 1
            if at < self._end[lane]:
                self._arrive(lane, self._block[at])
        cost = blocks.start + trips * width * blocks.work[block]
        return SimulatedStep(step, trips, needed, cost)

    def _repeat(self, lanes: list[int], full: int, work: float) -> tuple[int, int]:
        """Runs a block for lanes until many have left; returns (trips, lanes that needed them)."""
        left = np.array([self._left[self._at[lane]] for lane in lanes])
        wasted = np.float32(0)
        trips = needed = 0
        while True:
            needed += int((left > trips).sum())
            trips += 1
            stay = int((left > trips).sum())
            wasted += np.float32(full - stay)
            goes_on = wasted * np.float32(work) < np.float32(self.run.blocks.start)
            if not stay or not goes_on:
                break
        for lane in lanes:
            at = self._at[lane]
            self._left[at] = max(0, self._left[at] - trips)
        return trips, needed


class SimulatedRun(NamedTuple):
    """Counts of a simulated run.

    Attributes:
      counts: int64[K, 3], for each step how often it ran, the lanes it ran, and those needed, as
        `Batched.lane_steps` counts them.
      started: how many steps were started; one may run a block several times.
      cost: of all steps, in floating-point operations.
    """

    counts: np.ndarray
    started: int
    cost: float


def simulate(run: LaneRun, policy: LanePolicy) -> SimulatedRun:
    """Runs recorded lanes again under a policy.

    Args:
      run: what each lane does.
      policy: chooses the steps.

    Returns:
      The counts.
    """
    simulator = LaneSimulator(run)
    counts = np.zeros((len(run.blocks.block), 3), np.int64)
    started, cost = 0, 0.0
    while not simulator.is_done:
        done = simulator.advance(int(next_step(policy, simulator.frontier)))
        width = run.blocks.width[done.step]
        counts[done.step] += done.trips, done.trips * width, done.needed
        started, cost = started + 1, cost + done.cost
    return SimulatedRun(counts, started, cost)
