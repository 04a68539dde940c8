"""The policy of a batched function that was given none."""

from jedbatch._fsm import FSM
from jedbatch._graph import Graph
from jedbatch._learn import learn
from jedbatch._schedule import Schedule, by_rank

EPISODES = 64  # of Q-learning when a minibatch is planned: about a second with compilation
REMEMBERED = 4  # minibatches to learn from when new types appear


class Adaptive:
    """Schedules by rank as long as that works, which is optimal, and by a learned machine after.

    The machine is learned from the first minibatch that needs it, while that is planned, and again
    when more types have appeared that it does not know than it knows. So there are few times, and
    the same minibatches in the same order give the same schedules.
    """

    def __init__(self) -> None:
        self._machine: FSM | None = None
        self._by_rank = True
        self._graphs: list[Graph] = []

    def schedule(self, graph: Graph) -> Schedule:
        """Schedules a graph, and learns how to if need be."""
        if self._by_rank:
            found = by_rank(graph)
            if found is not None:
                self._graphs = [graph]
                return found
            self._by_rank = False
            self._machine = None
        if self._machine is None or self._is_new(graph):
            kept = [g for g in self._graphs if g.types == graph.types[: len(g.types)]]
            self._graphs = [*kept, graph][-REMEMBERED:]
            self._machine = learn(self._graphs, encoding="phase", episodes=EPISODES)
        return self._machine.schedule(graph)

    def _is_new(self, graph: Graph) -> bool:
        assert self._machine is not None
        labels = [graph.labels[t] for types in graph.components for t in types]
        unknown = sum(n < 0 for n in self._machine.numbers(labels))
        return unknown > len(self._machine.types)

    @property
    def machine(self) -> FSM | None:
        """The machine in use; None before anything was planned.

        As long as schedules are made by rank it is one that imitates them.
        """
        if self._machine is None and self._graphs:
            self._machine = learn(self._graphs, episodes=0)
        return self._machine
