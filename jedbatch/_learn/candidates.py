"""Learning a policy from graphs: teachers, imitation, Q-learning, and a comparison of them.

Good schedules of a few training graphs are not hard to find, given a second (`_schedule.search`).
What is wanted is a rule that finds them at once for graphs not seen before. `learn` makes
candidates,

- for every encoding, what it can imitate of the best heuristic and of beam search (`imitate`);
- Q-learning over every encoding, begun from the better imitation (`q_learn`);

counts the batches of each on the training instances, on instances held back and on random parts of
both, and returns the best. What is better by less than a hundredth is not known to be better: then
it is the imitation of a heuristic that is returned, and of equals the one with the fewest entries.
If imitation reaches the certified bound, nothing else is tried.

Budgets are counted in episodes, not in seconds, and random numbers come from an explicit key: the
same graphs give the same policy.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph
from jedbatch._learn.q_learning import Problem, QTable, preferred, q_learn, salts, slot
from jedbatch._schedule.components import by_rank
from jedbatch._schedule.encodings import CODES, ENCODINGS, Code, encode
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.fsm import FALLBACKS, FSM
from jedbatch._schedule.heuristics import HEURISTICS
from jedbatch._schedule.policy import Policy, schedule
from jedbatch._schedule.schedule import Schedule, cost, lower_bound
from jedbatch._schedule.search import (
    Beam,
    Objective,
    checked_objective,
    in_turn,
    of_part,
    same_weights,
    weights_of,
)
from jedbatch._support.types import EncodingName

# Instances, and nodes of these, learned from; as many may be held back.
MAX_INSTANCES, MAX_NODES = 32, 8000
MAX_WORK = 4e8  # nodes * batches * states of beam search, or * types * episodes of Q-learning
NUM_TRIALS = 8  # random halves of all instances that candidates are judged by
COST_MARGIN = 0.99  # what is not this much better is taken for as good


@dataclass(frozen=True)
class Entry:
    """A row of a report.

    Attributes:
      name: the policy.
      training, held_back: cost of scheduling these instances; the same if none are held back.
      size: encodings in its table; None if it is no FSM.
      micros: microseconds to schedule a batch of the training instances.
    """

    name: str
    training: float
    held_back: float
    size: int | None
    micros: float


@dataclass(frozen=True)
class Report:
    """A report of how a policy was learned and how it compares; prints as a table.

    Costs are numbers of batches, unless another objective was given.

    Attributes:
      entries: every policy tried, the one chosen first.
      bound: certified lower bounds for the training instances and for those held back.
      num_instances: how many instances were learned from and how many were held back.
      seconds: what learning took.
      curves: for Q-learning on each encoding, episodes and the cost of the greedy policy on the
        training instances after them.
    """

    entries: tuple[Entry, ...]
    bound: tuple[float, float]
    num_instances: tuple[int, int]
    seconds: float
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)

    def __str__(self) -> str:
        training, held_back = self.num_instances
        lines = [
            f"Learned in {self.seconds:.1f} s from {training} instances; {held_back} held back",
            "  training  held back  entries  µs/batch  policy",
            f"  {self.bound[0]:8g}  {self.bound[1]:9g}  {'':7}  {'':8}  certified lower bound",
        ]
        for e in self.entries:
            size = "" if e.size is None else e.size
            lines.append(
                f"  {e.training:8g}  {e.held_back:9g}  {size:>7}  {e.micros:8.1f}  {e.name}"
            )
        return "\n".join(lines)


def learn(
    graphs: Graph | Sequence[Graph],
    *,
    encoding: EncodingName | None = None,
    episodes: int = 512,
    teachers: bool = True,
    key: Any = 0,
    objective: Objective | None = None,
    progress: bool = False,
) -> FSM:
    """Learns a policy that schedules graphs like these in few batches.

    Args:
      graphs: graphs of one or more instances each, over the same types, such as
        `batched.plan(params, instances).graph`; of what `batched.learn(params, instances)` is
        short for. One is enough; 32 instances are plenty.
      encoding: what the policy sees of a frontier: "base", "max", "sort" or "phase" (see
        `jedbatch.policies.FSM`); None tries all.
      episodes: budget of Q-learning for each encoding and component; 0 for imitation only. On
        graphs so large that an episode takes long, fewer are run.
      teachers: whether to imitate heuristics and beam search; without, Q-learning begins with
        nothing.
      key: a `jax.random.key`, or an integer to make one of.
      objective: cost of a batch of each type of a graph, such as a `Calibration`; None counts
        batches.
      progress: whether to show a progress bar.

    Returns:
      The policy; its `report` says what was tried and prints as a table.

    Raises:
      TypeError: `graphs` are no graphs, or an option is of a wrong type.
      ValueError: their types do not agree, or an option makes no sense.

    Examples:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 1, 1, 0], [[], [0], [], [2]])
      >>> fsm = jedbatch.learn(graph)
      >>> len(jedbatch.schedule(graph, fsm))
      3

    References:
      Chen et al., ED-Batch: Efficient automatic batching of dynamic neural networks via learned
      finite state machines, ICML 2023.
    """
    graphs = _checked_graphs(graphs)
    checks.one_of("learn", "encoding", encoding, (*ENCODINGS, None))
    instead = "0 learns from teachers only."
    episodes = checks.whole("learn", "episodes", episodes, 0, 10**9, instead)
    if episodes == 0 and not checks.flag("learn", "teachers", teachers):
        raise ValueError(
            f"`learn` got episodes={episodes!r} and teachers={teachers!r}; expected a number of "
            "episodes of Q-learning, or 0 to learn from teachers only."
        )
    checks.flag("learn", "progress", progress)
    if objective is not None:
        checked_objective("learn", objective)
    encodings: list[str] = [encoding] if encoding else list(ENCODINGS)
    key = _checked_key(key)

    def run() -> FSM:
        start = time.perf_counter()
        with _plain_jax():
            first = jax.random.key(key) if isinstance(key, int) else key
            candidates = _Candidates(
                graphs, first, same_weights if objective is None else objective
            )
            candidates.run(encodings, episodes, teachers, progress)
        return candidates.result(time.perf_counter() - start)

    # A thread of its own is in no transformation of JAX, whatever the caller is in.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _checked_graphs(graphs: Any) -> list[Graph]:
    """Returns the graphs to learn from, whose types begin those of the next."""
    try:
        graphs = [graphs] if isinstance(graphs, Graph) else list(graphs)
    except TypeError:
        graphs = [graphs]  # for the message below
    if not graphs or not all(isinstance(g, Graph) for g in graphs):
        came = next((type(g).__name__ for g in graphs if not isinstance(g, Graph)), "nothing")
        raise TypeError(
            f"`learn` got {came}; expected graphs, such as `batched.plan(params, instances).graph`."
            " To learn from instances of a batched function, call `batched.learn(params, "
            "instances)`."
        )
    longest = max((g.types for g in graphs), key=len)
    if any(g.types != longest[: len(g.types)] for g in graphs):
        raise ValueError(
            "`learn` got graphs over different types; expected the types of each to begin those "
            "of the next, as in graphs made by one batched function or with the same names."
        )
    return graphs


def _checked_key(key: Any) -> Any:
    """Returns a `jax.random.key`, or an integer to make one of."""
    is_array = isinstance(key, jax.Array) and key.ndim == 0
    if is_array and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    hint = "Or pass a `jax.random.key`; `jax.random.wrap_key_data` makes one of old keys."
    return checks.whole("learn", "key", key, -(2**31), 2**32 - 1, hint)


@contextlib.contextmanager
def _plain_jax() -> Iterator[None]:
    """JAX as learning expects it, whatever the user has configured: on the host, in 32 bits."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to see other devices only
        host = jax.local_devices()[0]
    with (
        jax.default_device(host),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_nans(False),
    ):
        yield


@dataclass(frozen=True, eq=False)
class Component:
    """A component of a graph to learn from.

    Attributes:
      graph: bare, its types named by labels.
      numbers: what the machine calls each type.
      nodes: which nodes of the whole they are.
    """

    graph: Graph
    numbers: list[int]
    nodes: np.ndarray


Decide = Callable[[Frontier, Code, list[int]], int | None]  # the number of a type


class _Candidates:
    """Candidates for a policy and what they cost."""

    def __init__(self, graphs: Sequence[Graph], key: jax.Array, objective: Objective):
        parts = [(g, i) for g in graphs for i in range(g.num_instances)]
        self.key, shuffle = jax.random.split(key)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(shuffle)).tolist())
        parts = [parts[i] for i in rng.permutation(len(parts))]
        num_held = enough(parts[: len(parts) // 4])
        learned = parts[num_held:][: enough(parts[num_held:])]
        middle = (len(learned) + 1) // 2
        self.takes_part = np.ones((3 if middle > 1 else 1, len(learned)), np.float32)
        self.takes_part[1:2, middle:] = self.takes_part[2:, :middle] = 0
        self.training = [
            Graph.select([learned[i] for i in np.flatnonzero(row)]) for row in self.takes_part
        ]
        self.whole = self.training[0]
        self.held_back = Graph.select(parts[:num_held]) if num_held else self.whole
        instances = parts[:num_held] + learned
        half = (len(instances) + 1) // 2
        drawn = [sorted(rng.choice(len(instances), half, replace=False)) for _ in range(NUM_TRIALS)]
        different = {tuple(subset) for subset in drawn if half < len(instances)}
        self.trials = [Graph.select([instances[i] for i in subset]) for subset in sorted(different)]
        self.num_instances = len(learned), num_held
        self.objective = objective
        self.weights = weights_of(self.whole, objective)
        self.bound = self._bound(self.whole), self._bound(self.held_back)

        self.present = self.whole.present_types
        self.labels = [self.whole.labels[t] for t in self.present]
        self.entries: list[Entry] = []
        self.machines: dict[str, FSM] = {}
        self.totals: dict[str, float] = {}  # what the machines cost in all
        self.curves: dict[str, list[tuple[int, float]]] = {}
        for policy in HEURISTICS:
            self._enter(policy.__name__, functools.partial(schedule, policy=policy))
        ranks = {e.name: self._rank(e) for e in self.entries}
        self.fallback = min(FALLBACKS, key=lambda name: ranks[name])
        self.components = [list(self._components(graph)) for graph in self.training]

    def _components(self, graph: Graph) -> Iterator[Component]:
        for types in graph.components:
            nodes, part = graph.restrict(types)
            yield Component(part, [self.present.index(t) for t in types], nodes)

    def _bound(self, graph: Graph) -> float:
        return lower_bound(graph, weights_of(graph, self.objective))

    def _cost(self, batches: Schedule, graph: Graph) -> float:
        return cost(batches, weights_of(graph, self.objective))

    def _rank(self, e: Entry) -> tuple[float, int]:
        return e.training + e.held_back, e.size or 0

    def _enter(self, name: str, run: Callable[[Graph], Schedule], size: int | None = None) -> None:
        """Counts what a policy needs and notes it."""
        clock = time.perf_counter()
        batches = run(self.whole)
        micros = 1e6 * (time.perf_counter() - clock) / max(len(batches), 1)
        again = batches if self.held_back is self.whole else run(self.held_back)
        held_back = self._cost(again, self.held_back)
        self.entries.append(Entry(name, self._cost(batches, self.whole), held_back, size, micros))

    def _add(self, name: str, encoding: str, decide: Decide) -> None:
        """Enters the machine that decides like this, and like its fallback where that is None."""
        fallback = FALLBACKS[self.fallback]
        table: dict[Code, int] = {}
        moves: collections.Counter[tuple[Code, Code]] = collections.Counter()

        def settled(frontier: Frontier, code: Code, numbers: list[int]) -> int:
            t = table.get(code, decide(frontier, code, numbers))
            return numbers[fallback(frontier)] if t is None else t

        for components in self.components:
            steps = []
            for x in components:
                for code, t in walk(x, encoding, settled):
                    table[code] = t
                    steps.append(code)
            moves.update(itertools.pairwise(steps))
        machine = FSM.of(encoding, self.labels, table, moves, self.fallback)
        self._enter(name, machine.schedule, sum(len(state.when) for state in machine.states))
        self.machines[name] = machine
        trials = sum(self._cost(machine.schedule(graph), graph) for graph in self.trials)
        self.totals[name] = trials + self.entries[-1].training + self.entries[-1].held_back

    def run(self, encodings: list[str], episodes: int, teachers: bool, progress: bool) -> None:
        """Enters candidates until one reaches the bound."""
        beam = Beam(16, self.objective)
        if teachers:
            for encoding in encodings:
                self.imitate(encoding, self.fallback, FALLBACKS[self.fallback])
                if self.at_bound():
                    return
        if beam.width * len(self.whole.node_type) * self.bound[0] < MAX_WORK:
            self._enter("beam 16", beam.schedule)
            for encoding in encodings if teachers else []:
                self.imitate(encoding, "beam 16", beam)
        for encoding in encodings if episodes else []:
            if not self.at_bound():
                self.q_learn(encoding, episodes, progress)

    def at_bound(self) -> bool:
        """Returns whether the best machine needs no more than the certified bounds."""
        costs = (e.training + e.held_back for e in self.entries if e.name in self.machines)
        return min(costs, default=np.inf) <= sum(self.bound) + 1e-6

    def imitate(self, encoding: str, teacher: str, policy: Policy) -> None:
        """Enters what an encoding can copy of a teacher: what it does most often in each state."""
        votes: dict[Code, collections.Counter[int]] = {}
        for components in self.components:
            for x in components:
                batches = by_rank(x.graph) or self._taught(x.graph, policy)
                taught = in_turn(batches.batch_type.tolist())
                copied: Decide = lambda frontier, _, numbers: numbers[taught(frontier)]  # noqa: B023, E731
                for code, t in walk(x, encoding, copied):
                    votes.setdefault(code, collections.Counter())[t] += 1
        table = {code: min(v, key=lambda t: (-v[t], t)) for code, v in votes.items()}
        self._add(f"FSM {encoding} after {teacher}", encoding, lambda _, code, __: table.get(code))

    def _taught(self, part: Graph, policy: Policy) -> Schedule:
        if isinstance(policy, Beam):
            return policy.search(part, of_part(part, self.whole, self.weights))
        return schedule(part, policy)

    def q_learn(self, encoding: str, episodes: int, progress: bool) -> None:
        """Enters what Q-learning makes of the best imitation; without one, of nothing."""
        name = f"FSM {encoding} by Q-learning"
        begun: dict[Code, int] = {}
        if f"FSM {encoding} after {self.fallback}" in self.machines:
            begun = self.machines[self.best(f"FSM {encoding} ")].table
        instance = self.whole.node_instance
        learned: list[tuple[list[int], QTable]] = []
        points: list[tuple[int, float]] = []
        for x in self.components[0]:
            if len(x.numbers) == 1:
                continue
            self.key, key = jax.random.split(self.key)
            weights = of_part(x.graph, self.whole, self.weights)
            episode = len(x.nodes) * len(weights) * lower_bound(x.graph)
            affordable = min(episodes, int(MAX_WORK / episode))
            if affordable < min(episodes, 16):
                continue
            problem = Problem.of(x.graph, instance[x.nodes], self.whole.num_instances, weights)
            table, curve = q_learn(
                problem,
                encoding,
                self.takes_part,
                [
                    (by_type(code, x.numbers), x.numbers.index(t))
                    for code, t in begun.items()
                    if len(code) > 1 and {c // CODES for c in code} <= set(x.numbers)
                ],
                key,
                episodes=affordable,
                progress=progress,
            )
            points += [(n, float(paid * weights.mean())) for n, paid in curve]
            learned.append((x.numbers, table))

        if not learned and self.machines:
            return  # too much work
        self.curves[name] = points

        def decide(frontier: Frontier, code: Code, numbers: list[int]) -> int | None:
            for type_numbers, table in learned:
                if set(numbers) <= set(type_numbers):
                    words = by_type(code, type_numbers)
                    row = slot(words, salts(len(type_numbers)))
                    on = words >= 0
                    if (table.tries[row] * on).any():
                        return type_numbers[preferred(table, row, on, -np.inf, np)]
            return None

        self._add(name, encoding, decide)

    def best(self, prefix: str = "") -> str:
        """The best machine so far of those whose names begin like this."""
        size = {e.name: e.size for e in self.entries}
        names = [name for name in self.machines if name.startswith(prefix)]
        order = sorted(names, key=lambda name: (self.totals[name], size[name]))
        safe = next((n for n in order if n.endswith(f" after {self.fallback}")), order[0])
        return order[0] if self.totals[order[0]] < COST_MARGIN * self.totals[safe] else safe

    def result(self, seconds: float) -> FSM:
        """The best machine with a report."""
        best = self.best()
        entries = sorted(self.entries, key=lambda e: (e.name != best, *self._rank(e)))
        report = Report(tuple(entries), self.bound, self.num_instances, seconds, dict(self.curves))
        return dataclasses.replace(self.machines[best], report=report)


def enough(parts: Sequence[tuple[Graph, int]]) -> int:
    """Returns how many of the first instances to use: not too many, nor too many nodes."""
    sizes = [g.node_ptr[i + 1] - g.node_ptr[i] for g, i in parts[:MAX_INSTANCES]]
    return min(len(sizes), max(1, int(np.searchsorted(np.cumsum(sizes), MAX_NODES))))


def walk(component: Component, encoding: str, decide: Decide) -> Iterator[tuple[Code, int]]:
    """Runs a component and yields, batch by batch, the encoding and the type run."""
    frontier, numbers = Frontier(component.graph), component.numbers
    while ready := frontier.ready_types:
        if len(ready) == 1:
            code: Code = (CODES * numbers[ready[0]],)
        else:
            code = encode(encoding, frontier, ready, numbers)
        t = decide(frontier, code, numbers)
        assert t is not None
        frontier.run(numbers.index(t))
        yield code, t


def by_type(code: Code, numbers: Sequence[int]) -> np.ndarray:
    """int[len(numbers)], what a code says about each of these types, -1 if it is not ready."""
    words = dict.fromkeys(numbers, -1) | {c // CODES: c % CODES for c in code}
    return np.array([words[n] for n in numbers])
