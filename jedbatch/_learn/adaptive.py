"""The policy of a batched function that was given none."""

from jedbatch._graph.graph import Graph
from jedbatch._learn.candidates import COST_MARGIN, MAX_INSTANCES, learn
from jedbatch._schedule.components import by_rank
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.schedule import Schedule, lower_bound

EPISODES = 64  # of Q-learning when a minibatch is planned: two seconds with compilation
MAX_MINIBATCHES = 4  # minibatches to learn from
MAX_WORK = 3e7  # nodes * types * batches from which learning would take longer than it is worth


class Adaptive:
    """Schedules by rank as long as that works, which is optimal, and by a learned machine after.

    The machine is learned from the first minibatch that needs it, while that is planned. It is
    learned again when a minibatch has four times as many instances as the largest so far, up to
    the number that learning can use, and when it has more new types than were there before. So
    there are few times, and the same minibatches in the same order give the same schedules.

    Imitation takes a second or less, and is left at that if it comes within a hundredth of the
    search that it imitates; otherwise there is some Q-learning. Where even imitation would take
    long, the machine is an empty one, which leaves all to `critical`.

    Attributes:
      version: how often the schedule of a graph may have become another one.
    """

    def __init__(self) -> None:
        self.version = 0
        self._machine: FSM | None = None
        self._by_rank = True
        self._graphs: list[Graph] = []
        self._last: Graph | None = None  # scheduled by rank
        self._labels: set[str] = set()
        self._most = 0  # instances of a minibatch learned from

    def schedule(self, graph: Graph) -> Schedule:
        """Schedules a graph, and learns how to if need be."""
        if self._by_rank:
            batches = by_rank(graph)
            if batches is not None:
                self._last, self._machine = graph, None
                return batches
            self._by_rank, self._machine, self._last = False, None, None
            self.version += 1
        if self._machine is None or self._is_new(graph, graph.num_instances):
            graphs = [g for g in self._graphs if g.types == graph.types[: len(g.types)]]
            self._graphs = [*graphs, graph.bare()][-MAX_MINIBATCHES:]
            self._labels |= self._present(graph)
            self._most = max(self._most, graph.num_instances)
            self._machine = self._learned(graph)
            self.version += 1
        return self._machine.schedule(graph)

    def _schedule_copies(self, graph: Graph, num_instances: int) -> Schedule | None:
        """Schedules a graph whose nodes count as several, of so many instances.

        None if there is something to learn from all of them.
        """
        if self._by_rank:
            batches = by_rank(graph)
            if batches is not None:
                self._last, self._machine = graph, None
            return batches
        if self._machine is None or self._is_new(graph, num_instances):
            return None
        return self._machine.schedule(graph)

    def _learned(self, graph: Graph) -> FSM:
        used = min(1, 2 * MAX_INSTANCES / graph.num_instances) * len(graph.node_type)
        if used * max(map(len, graph.components)) * lower_bound(graph) > MAX_WORK:
            return FSM("phase", tuple(sorted(self._present(graph))), ())
        copied = learn(self._graphs, encoding="phase", episodes=0)
        costs = {entry.name: entry.training for entry in copied.report.entries}
        best = min(cost for name, cost in costs.items() if name.startswith("FSM"))
        if COST_MARGIN * best <= costs.get("beam 16", best):
            return copied
        return learn(self._graphs, encoding="phase", episodes=EPISODES)

    def _present(self, graph: Graph) -> set[str]:
        return {graph.labels[t] for t in graph.present_types}

    def _is_new(self, graph: Graph, num_instances: int) -> bool:
        more = 4 * self._most <= num_instances and self._most < MAX_INSTANCES
        return more or len(self._present(graph) - self._labels) > len(self._labels)

    @property
    def learned(self) -> FSM | None:
        """The machine that was learned; None as long as schedules are made by rank."""
        return None if self._by_rank else self._machine

    @property
    def machine(self) -> FSM | None:
        """The machine in use; None before anything was planned.

        As long as schedules are made by rank it is one that imitates them.
        """
        if self._machine is None and self._last is not None:
            self._machine = learn([self._last.bare()], episodes=0)
        return self._machine


class FixedPolicy(Adaptive):
    """One that goes by what another one has learned, and learns nothing: equal in all processes.

    Args:
      machine: in use by the other one.
    """

    def __init__(self, machine: FSM) -> None:
        super().__init__()
        self._machine, self._by_rank = machine, False

    def _is_new(self, graph: Graph, num_instances: int) -> bool:
        return False
