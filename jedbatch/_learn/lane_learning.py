"""Learning a policy for lanes from recorded runs: Q-learning on a simulator.

Choosing steps is a Markov decision process like scheduling (see `q_learning`): the state is where
each lane is, an action is a step, and an episode ends when all lanes have come to the end. An
action's reward is what it loses,

    -(S + trips W c - needed c) / S,

the cost of the step less the work that lanes needed anyway: the sum over an episode is the cost but
for a constant. The learner sees, for each block, whether nobody, few, many or enough lanes wait
there (see `_schedule.lane_fsm`), and updates a table by N-step returns, as `q_learning` does. It
begins with what the better of `least_loss` and `most_lanes` does, which is valued by its returns;
what was never tried is tried by exploration alone. Each episode has a random part of the lanes of a
run, of which a quarter is held back. The returns of a few words about each block are noisy, so what
has the greatest value is only proposed: code by code, what was met most often first, it is kept
where that makes runs cheaper of as many lanes, drawn from those that are learned from, some twice
and others never.

Where a lane goes does not depend on the policy, so a recorded run is all there is to know: episodes
run on the host and compute nothing. What was learned is kept for a program of blocks if it costs
less than `least_loss` on the recorded runs, and less by a hundredth on runs of lanes held back;
otherwise all is left to that.
"""

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch._schedule.lane_fsm import LaneCode, LaneFSM, lane_code
from jedbatch._schedule.lane_policies import (
    MAX_WIDTHS,
    LaneFrontier,
    LanePolicy,
    least_loss,
    most_lanes,
    next_step,
)
from jedbatch._schedule.lane_runs import LaneRun, LaneSimulator, SimulatedRun, simulate
from jedbatch._support.progress import progress_bar

MAX_SIMULATED = 200_000  # steps of all episodes on a program: some twenty seconds
NUM_TRIALS = 3  # runs of drawn lanes that tables are judged by, and as many of those held back
HELD_BACK = 0.25  # of the lanes of each run
COST_MARGIN = 0.99  # what is not this much better is taken for as good
JUDGED_EVERY = 8  # episodes
STEPS = 8  # N of the returns
DISCOUNT = 0.9
RATE = 0.1
PROPOSED = 2  # choices for each code
EXPLORES = (0.3, 0.02)  # share of random actions in the first episode, and in the last fifth

Table = dict[LaneCode, tuple[int, int]]  # a block, and which of its widths, by code


@dataclass(frozen=True)
class LaneEntry:
    """A row of a report: a policy on the recorded runs of a program.

    Attributes:
      program: its blocks.
      policy: by its name.
      cost: floating-point operations that its steps take as long as, over those that lanes need.
      steps: how many steps ran, each time that a block ran again for the same lanes included.
      lanes: how many lanes ran in them.
    """

    program: str
    policy: str
    cost: float
    steps: int
    lanes: int


@dataclass(frozen=True)
class LaneReport:
    """A report of how a policy for lanes was learned; prints as a table.

    Attributes:
      entries: of each program the policies tried, the one chosen first.
      needed: of each program how many lanes had to run, the certified least.
      num_runs: how many recorded runs were learned from.
      seconds: what learning took.
      curves: of each program, episodes and the cost of what was learned after them.
    """

    entries: tuple[LaneEntry, ...]
    needed: dict[str, int]
    num_runs: int
    seconds: float
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"Learned in {self.seconds:.1f} s from {self.num_runs} runs"]
        for program, needed in self.needed.items():
            lines += [f"  blocks: {program}", "      cost     steps      lanes  policy"]
            lines.append(f"  {1:8.3f}  {'':8}  {needed:9}  certified least")
            for e in self.entries:
                if e.program == program:
                    lines.append(f"  {e.cost:8.3f}  {e.steps:8}  {e.lanes:9}  {e.policy}")
        return "\n".join(lines)


def learn_lanes(
    runs: Iterable[LaneRun], *, episodes: int = 64, key: int = 0, progress: bool = False
) -> LaneFSM:
    """Learns a policy for lanes from recorded runs.

    Args:
      runs: what lanes did, of one program of blocks or several.
      episodes: budget of Q-learning for each program; 0 to compare the others only. Of long runs
        fewer are simulated.
      key: of random numbers, a whole number.
      progress: whether to show a progress bar.

    Returns:
      The policy; its `report` says what was tried and prints as a table. On these runs it costs at
      most as much as `least_loss`.

    Raises:
      TypeError, ValueError: an option makes no sense.
    """
    episodes = checks.whole("learn", "episodes", episodes, 0, 10**9)
    rng = np.random.default_rng(checks.whole("learn", "key", key, 0, 2**63 - 1))
    checks.flag("learn", "progress", progress)
    start = time.perf_counter()
    by_program: dict[str, list[LaneRun]] = collections.defaultdict(list)
    num_runs = 0
    for run in runs:
        if len(run.blocks.block) > 1 and len(run.block):
            by_program[run.blocks.label].append(run)
            num_runs += 1
    tables: dict[str, Table] = {}
    entries: list[LaneEntry] = []
    curves: dict[str, list[tuple[int, float]]] = {}
    for label, same in by_program.items():
        learner = _LaneLearner(same, rng)
        found = learner.learn(episodes, progress)
        entries += [LaneEntry(label, *entry) for entry in learner.entries]
        curves[label] = learner.curve
        if found:
            tables[label] = found
    needed = {label: sum(run.needed for run in same) for label, same in by_program.items()}
    seconds = time.perf_counter() - start
    report = LaneReport(tuple(entries), needed, num_runs, seconds, curves)
    return replace(LaneFSM.of(tables), report=report)


class _LaneLearner:
    """Q-learning on the runs of one program.

    Attributes:
      entries: (policy, cost, steps, lanes) of the policies compared, the best first.
      curve: episodes and the cost of what was learned after them.
    """

    def __init__(self, runs: Sequence[LaneRun], rng: np.random.Generator):
        self.runs, self.rng = runs, rng
        self.entries: list[tuple[str, float, int, int]] = []
        self.curve: list[tuple[int, float]] = []
        self._label = runs[0].blocks.label
        orders = [rng.permutation(len(run.ptr) - 1) for run in runs]
        ends = [round(HELD_BACK * len(order)) for order in orders]
        pairs = list(zip(orders, ends, strict=True))
        self._learned = [order[end:] for order, end in pairs]
        held_back = [order[:end] if end else order for order, end in pairs]
        self._trials = [self._drawn(self._learned) for _ in range(NUM_TRIALS)]
        self._held_back = [self._drawn(held_back) for _ in range(NUM_TRIALS)]
        self._num_choices = len(runs[0].blocks.work) * MAX_WIDTHS
        self._value: dict[LaneCode, np.ndarray] = {}  # by choice, see `LaneBlocks`
        self._tries: dict[LaneCode, np.ndarray] = {}
        self._simulated = 0

    def learn(self, episodes: int, progress: bool) -> Table:
        """Returns what to run by code; nothing if `least_loss` costs no more."""
        costs = {policy: self._enter(policy.__name__, policy) for policy in TEACHERS}
        teacher = min(TEACHERS, key=lambda policy: costs[policy])
        table: Table = {}
        least, done = self._cost(self._trials, least_loss)[0], 0
        for run in self._trials if episodes else ():
            self._episode(run, teacher, 0.0)
        if episodes and teacher is not least_loss:
            table, least = self._better(table, least, self._greedy())
        for done in progress_bar(range(1, 1 + episodes), "Q-learning of lanes", progress):
            share = min(1.0, done / (0.8 * episodes))
            self._episode(self._part(), None, EXPLORES[0] + np.diff(EXPLORES)[0] * share)
            is_last = done == episodes or 2 * self._simulated > MAX_SIMULATED
            if not done % JUDGED_EVERY or is_last:
                table, least = self._better(table, least, self._greedy())
                self.curve.append((done, least))
            if is_last:
                break
        for code, choice in self._proposals() if episodes else ():
            if table.get(code) != choice and self._simulated <= MAX_SIMULATED:
                table, least = self._better(table, least, {**table, code: choice})
        if table and not self._is_better(LaneFSM.of({self._label: table})):
            table = {}
        if episodes:
            policy = LaneFSM.of({self._label: table}) if table else least_loss
            self._enter(f"LaneFSM by Q-learning, {done} episodes", policy)
        self.entries.sort(key=lambda entry: entry[1])
        return table

    def _better(self, table: Table, least: float, other: Table) -> tuple[Table, float]:
        """Returns the cheaper of two tables and its cost, of which that of the first is known."""
        cost = self._cost(self._trials, LaneFSM.of({self._label: other}))[0]
        return (other, cost) if cost < least else (table, least)

    def _is_better(self, machine: LaneFSM) -> bool:
        """Returns whether a machine costs less on the runs, and clearly on lanes held back."""
        own, default = (self._cost(self.runs, p)[0] for p in (machine, least_loss))
        other, usual = (self._cost(self._held_back, p)[0] for p in (machine, least_loss))
        return own < default and other < COST_MARGIN * usual

    def _cost(
        self, runs: Sequence[LaneRun], policy: LanePolicy
    ) -> tuple[float, list[SimulatedRun]]:
        """Returns operations of all steps over those that lanes need, and the simulated runs."""
        found = [simulate(run, policy) for run in runs]
        self._simulated += sum(x.started for x in found)
        useful = sum(run.useful for run in runs)
        return sum(x.cost for x in found) / max(1.0, useful), found

    def _enter(self, name: str, policy: LanePolicy) -> float:
        """Notes what a policy costs on the runs, and returns it."""
        cost, found = self._cost(self.runs, policy)
        steps, lanes, _ = sum(x.counts.sum(0) for x in found).tolist()
        self.entries.append((name, cost, steps, lanes))
        return cost

    def _drawn(self, lanes: Sequence[np.ndarray]) -> LaneRun:
        """Returns a run of as many lanes as one of the runs, drawn from some with replacement."""
        i = int(self.rng.integers(len(self.runs)))
        return self.runs[i].part(self.rng.choice(lanes[i], len(self.runs[i].ptr) - 1))

    def _part(self) -> LaneRun:
        """Returns a random part of the lanes of a run that are learned from."""
        i = int(self.rng.integers(len(self.runs)))
        count = max(1, round(len(self._learned[i]) * self.rng.uniform(0.25, 1.0)))
        return self.runs[i].part(np.sort(self.rng.choice(self._learned[i], count, replace=False)))

    def _choose(self, frontier: LaneFrontier, code: LaneCode, explores: float) -> int:
        """Returns the step of greatest value, or a random one."""
        ready = np.flatnonzero(frontier.taken)
        if self.rng.random() < explores:
            return int(self.rng.choice(ready))
        choices = frontier.blocks.choices[ready]
        if code not in self._tries or not self._tries[code][choices].any():
            return int(next_step(least_loss, frontier))
        value = np.where(self._tries[code] > 0, self._value[code], -np.inf)
        return int(ready[value[choices].argmax()])

    def _episode(self, run: LaneRun, teacher: LanePolicy | None, explores: float) -> None:
        """Runs an episode, under a teacher if there is one, and updates the values."""
        simulator, blocks = LaneSimulator(run), run.blocks
        codes: list[LaneCode] = []
        choices: list[int] = []
        rewards: list[float] = []
        while not simulator.is_done:
            frontier = simulator.frontier
            code = tuple(lane_code(frontier).tolist())
            if teacher is None:
                step = self._choose(frontier, code, explores)
            else:
                step = int(next_step(teacher, frontier))
            done = simulator.advance(step)
            useful = done.needed * blocks.work[blocks.block[step]]
            codes.append(code)
            choices.append(int(blocks.choices[step]))
            rewards.append(-(done.cost - useful) / blocks.start)
        self._simulated += len(choices)
        ahead = [self._ahead(code) for code in codes] + [0.0] * (STEPS + 1)
        window = np.append(rewards, np.zeros(STEPS))
        weights = DISCOUNT ** np.arange(STEPS)
        for i, (code, choice) in enumerate(zip(codes, choices, strict=True)):
            value = self._value.setdefault(code, np.zeros(self._num_choices))
            tries = self._tries.setdefault(code, np.zeros(self._num_choices, int))
            found = window[i : i + STEPS] @ weights + DISCOUNT**STEPS * ahead[i + STEPS]
            tries[choice] += 1
            value[choice] += max(RATE, 1 / tries[choice]) * (found - value[choice])

    def _ahead(self, code: LaneCode) -> float:
        """Returns the greatest value of a code."""
        if code not in self._tries:
            return 0.0
        return float(self._value[code][self._tries[code] > 0].max())

    def _ranked(self, code: LaneCode) -> list[tuple[int, int]]:
        """Returns the blocks and widths that were tried, of greatest value first."""
        tried = np.flatnonzero(self._tries[code])
        order = tried[np.argsort(-self._value[code][tried], kind="stable")]
        return [divmod(choice, MAX_WIDTHS) for choice in order.tolist()]

    def _met(self) -> list[LaneCode]:
        """Returns the codes, the most met first."""
        return sorted(self._tries, key=lambda code: (-self._tries[code].sum(), code))

    def _greedy(self) -> Table:
        """Returns the block of greatest value, and its width, by code."""
        return {code: self._ranked(code)[0] for code in self._met()}

    def _proposals(self) -> Iterator[tuple[LaneCode, tuple[int, int]]]:
        """Yields codes with what is best for them, and then with what is next."""
        for rank in range(PROPOSED):
            for code in self._met():
                yield from ((code, choice) for choice in self._ranked(code)[rank : rank + 1])


TEACHERS: tuple[Callable[[LaneFrontier], Any], ...] = (least_loss, most_lanes)
