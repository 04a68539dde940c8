"""Searching for good schedules: teachers of learned policies, and their judges.

Scheduling by Algorithm 1 is a walk through sets of nodes that have run; a move is a type, and
leads to the set with all ready nodes of that type added. `beam` keeps the most promising sets
after every move, `optimal` is an A* search. Both are too slow for planning every minibatch, and
tell how good a policy is that is not.

What makes the walk short:

- Components of types are searched one by one (see `_schedule.components`).
- Nodes of one type that read the same nodes run at the same time always, so they count as one
  (`quotient`). Equal subtrees of all instances collapse.
- A type whose every node that could come next is ready, |Frontier_a(G)| = |Frontier(G^a)|, is
  run without looking at others: an exchange of batches shows that this loses nothing.
- The cost still to come is at least the sum over types of the cost of a batch times the longest
  chain of nodes left (the bound of ED-Batch), which A* needs: it never overestimates.

A batch of type t costs `weights[t]`, which is 1 if batches are to be counted (see
`_batch.calibrate`).
"""

import dataclasses
import heapq
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.paths import bits
from jedbatch._schedule.components import by_component, by_rank
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.heuristics import critical
from jedbatch._schedule.policy import schedule
from jedbatch._schedule.schedule import Schedule, checked_weights, cost, lower_bound


def quotient(graph: Graph, mark: np.ndarray | None = None) -> tuple[Graph, np.ndarray]:
    """Counts nodes that always run together as one: (bare graph of classes, class int32[N]).

    Nodes of a class also agree in `mark`, int[N], if it is given.
    """
    ptr, makers = (x.tolist() for x in graph.preds)
    of = [0] * len(graph.node_type)
    classes: dict[tuple[int, ...], int] = {}
    kinds = graph.node_type if mark is None else graph.node_type + len(graph.types) * mark
    for node, kind in enumerate(kinds.tolist()):
        read = sorted({of[m] for m in makers[ptr[node] : ptr[node + 1]]})
        of[node] = classes.setdefault((kind, *read), len(classes))
    merged = Graph.from_dag(
        [key[0] % len(graph.types) for key in classes],
        [key[1:] for key in classes],
        names=[t.name for t in graph.types],
    )
    return merged, np.array(of, np.int32)


def in_turn(types: Iterable[int]) -> Callable[[Frontier], int]:
    """The policy that runs these types in turn, without those that have no ready node then."""
    ahead = iter(types)
    return lambda frontier: next(t for t in ahead if frontier.num_ready[t])


Objective = Callable[[Graph], np.ndarray]


def same_weights(graph: Graph) -> np.ndarray:
    """The objective that counts batches: float[T] of ones."""
    return np.ones(len(graph.types))


def checked_objective(who: str, objective: object) -> Objective:
    """The objective, or a `TypeError` if it cannot be called."""
    return checks.function(
        who,
        "objective",
        objective,
        "a function of a graph",
        "It gives the cost of a batch of each type, as a `Calibration` does.",
    )


def weights_of(graph: Graph, objective: Objective, who: str = "learn") -> np.ndarray:
    """float[T], the cost of a batch of each type; raises `ValueError` if it is no cost."""
    return checked_weights("the objective returned", objective(checked_graph(who, graph)), graph)


def of_part(part: Graph, whole: Graph, weights: np.ndarray) -> np.ndarray:
    """The weights of the types of a part of a graph."""
    by_label = dict(zip(whole.labels, weights.tolist(), strict=True))
    return np.array([by_label[label] for label in part.labels])


MAX_MOVES = 8  # types that beam search tries from a set: those with the longest paths ahead


@dataclasses.dataclass(frozen=True)
class Beam:
    """Breadth-first search that keeps the most promising sets of nodes after every move.

    Promising is what has the least cost so far, bound and longest path left in sum; among equals
    what has the fewest nodes left where long paths begin. As a policy it plans a whole graph:
    `jedbatch.schedule(graph, jedbatch.policies.beam(width=64))`.

    Attributes:
      width: sets kept.
      objective: cost of a batch of each type of a graph.
    """

    width: int = 16
    objective: Objective = same_weights

    def __post_init__(self) -> None:
        checks.whole("beam", "width", self.width, least=1)
        checked_objective("beam", self.objective)

    def __call__(self, **options: Any) -> "Beam":
        """The same search with other options."""
        return dataclasses.replace(self, **options)

    def schedule(self, graph: Graph) -> Schedule:
        """The best schedule found."""
        weights = weights_of(graph, self.objective, "beam.schedule")
        batches = by_component(
            graph, lambda part: by_rank(part) or self.search(part, of_part(part, graph, weights))
        )
        return dataclasses.replace(batches, bound=0, policy=f"beam {self.width}")

    def search(self, graph: Graph, weights: np.ndarray) -> Schedule:
        """The best schedule found of a component."""
        small, of = quotient(graph)
        by_type = np.argsort(small.node_type, kind="stable")  # nodes, those of a type together
        types = small.node_type[by_type]
        first = np.searchsorted(types, np.arange(len(small.types)))
        place = np.empty(len(types), np.int64)
        place[by_type] = np.arange(len(types))
        maker, reader = (place[end] for end in small.edges)
        maker = maker[np.argsort(reader, kind="stable")]
        readers, edges = np.unique(reader), np.bincount(reader)
        begins = (edges.cumsum() - edges)[readers]
        chain, height = small.chain[by_type], small.height[by_type] + 1
        mass = np.bincount(of)[by_type] * np.exp2(height - float(height.max()))
        digest = np.random.default_rng(0).integers(1, 1 << 62, len(types))

        left = np.ones((1, len(types)), bool)
        spent = np.zeros(1)
        moves = []
        while left.any(1).all():
            ready = left.copy()
            ready[:, readers] &= ~np.logical_or.reduceat(left[:, maker], begins, axis=1)
            top = np.maximum.reduceat(ready * height, first, axis=1)
            tried = np.argsort(-top, axis=1, kind="stable")[:, :MAX_MOVES]
            parent, column = np.nonzero(np.take_along_axis(top, tried, 1))
            move = tried[parent, column]
            after = left[parent] & ~(ready[parent] & (types == move[:, None]))
            paid = spent[parent] + weights[move]
            mark = after @ digest
            order = np.lexsort((paid, mark))
            order = order[np.append(True, np.diff(mark[order]) != 0)]
            parent, move, paid, after = (x[order] for x in (parent, move, paid, after))
            bound = np.maximum.reduceat(after * chain, first, axis=1) @ weights
            promise = paid + bound + weights.mean() * (after * height).max(1)
            survivors = np.lexsort((after @ mass, promise))[: self.width]
            left, spent = after[survivors], paid[survivors]
            moves.append((parent[survivors], move[survivors]))
        at = int(np.flatnonzero(~left.any(1))[0])
        chosen = []
        for parents, run in reversed(moves):
            chosen.append(int(run[at]))
            at = parents[at]
        return schedule(graph, in_turn(chosen[::-1]))


@dataclasses.dataclass(frozen=True)
class Optimal:
    """A* search for a schedule of least cost, as far as the budget goes.

    The schedule's `bound` is certified: no schedule of Algorithm 1 costs less. If it equals the
    cost, the schedule is optimal; if the budget was spent before, the schedule is the best known,
    by beam search if need be.

    Attributes:
      max_nodes: sets of nodes to expand in each component.
      seconds: time to spend in each component, about; None for any. Counting nodes is
        reproducible, counting seconds is not.
      objective: cost of a batch of each type of a graph.
    """

    max_nodes: int = 10_000
    seconds: float | None = None
    objective: Objective = same_weights

    def __post_init__(self) -> None:
        checks.whole("optimal", "max_nodes", self.max_nodes)
        if self.seconds is not None:
            checks.number("optimal", "seconds", self.seconds, least=0)
        checked_objective("optimal", self.objective)

    def __call__(self, **options: Any) -> "Optimal":
        """The same search with other options."""
        return dataclasses.replace(self, **options)

    def schedule(self, graph: Graph) -> Schedule:
        """The best schedule found and a certified bound."""
        weights = weights_of(graph, self.objective, "optimal.schedule")

        def solve(part: Graph) -> Schedule:
            part_weights = of_part(part, graph, weights)
            ranked = by_rank(part)
            if ranked is not None:
                return dataclasses.replace(ranked, bound=cost(ranked, part_weights))
            return self._search(part, part_weights)

        return dataclasses.replace(by_component(graph, solve, weights), policy="optimal")

    def _search(self, graph: Graph, weights: np.ndarray) -> Schedule:
        deadline = np.inf if self.seconds is None else time.perf_counter() + self.seconds
        incumbent, bound = schedule(graph, critical), lower_bound(graph, weights)
        beam_work = 64 * len(graph.node_type) * len(incumbent)
        if self.seconds is None or beam_work < 1e8 * self.seconds:
            searched = Beam(64).search(graph, weights)
            incumbent = min(searched, incumbent, key=lambda x: cost(x, weights))
        least = cost(incumbent, weights)
        if time.perf_counter() > deadline or self.max_nodes == 0:
            return dataclasses.replace(incumbent, bound=bound)
        game = _Game(quotient(graph)[0], weights)

        came_from: dict[int, tuple[float, int, int]] = {0: (0.0, -1, -1)}  # spent, from, by type
        queue = [(game.bound(0), 0, 0, 0.0)]  # cost at least, order, set, spent
        count, bound, goal = 0, least, None
        while queue:
            at_least, _, done, spent = heapq.heappop(queue)
            if at_least >= least - 1e-9:
                break
            if done == game.all:
                least, goal = at_least, done
                break
            if spent > came_from[done][0]:
                continue  # reached more cheaply since
            late = time.perf_counter() > deadline
            if count == self.max_nodes or late:
                bound = at_least
                break
            count += 1
            for t, after in game.moves(done):
                total = spent + weights[t]
                earlier = came_from.get(after)
                if earlier is None or total < earlier[0] - 1e-9:
                    came_from[after] = total, done, t
                    hope = total + game.bound(after)
                    if hope < least - 1e-9:
                        heapq.heappush(queue, (hope, -len(came_from), after, total))
        if goal is None:
            return dataclasses.replace(incumbent, bound=bound)
        types = []
        while goal:
            _, goal, t = came_from[goal]
            types.append(t)
        return dataclasses.replace(schedule(graph, in_turn(types[::-1])), bound=least)


class _Game:
    """Moves and bounds of Algorithm 1 on a small graph; sets of nodes are the bits of an int."""

    def __init__(self, graph: Graph, weights: np.ndarray):
        self.weights = weights.tolist()
        types, (ptr, makers) = graph.node_type.tolist(), (x.tolist() for x in graph.preds)
        num_nodes = len(types)
        self.all = (1 << num_nodes) - 1
        self.of_type = [0] * len(graph.types)
        self.reads = [0] * num_nodes
        # Nodes of the same type on paths that lead to a node, as bits.
        self.same_type_ancestors = [0] * num_nodes
        before = [0] * num_nodes
        self.layers: list[dict[int, int]] = [{} for _ in graph.types]  # by length of chain
        for node, (t, chain) in enumerate(zip(types, graph.chain.tolist(), strict=True)):
            for m in makers[ptr[node] : ptr[node + 1]]:
                self.reads[node] |= 1 << m
                before[node] |= before[m] | 1 << m
            self.same_type_ancestors[node] = before[node] & self.of_type[t]
            self.of_type[t] |= 1 << node
            self.layers[t][chain] = self.layers[t].get(chain, 0) | 1 << node
        self.layers = [dict(sorted(layers.items(), reverse=True)) for layers in self.layers]

    def bound(self, done: int) -> float:
        """The least that what is left can cost."""
        total = 0.0
        for weight, layers in zip(self.weights, self.layers, strict=True):
            for length, nodes in layers.items():
                if nodes & ~done:
                    total += weight * length
                    break
        return total

    def moves(self, done: int) -> list[tuple[int, int]]:
        """(type, set after running it) of the types worth running."""
        choices = []
        remaining = self.all & ~done
        ready = sum(1 << n for n in bits(remaining) if not self.reads[n] & remaining)
        for t, nodes in enumerate(self.of_type):
            run = nodes & ready
            if not run:
                continue
            if all(
                self.same_type_ancestors[n] & remaining for n in bits(nodes & remaining & ~ready)
            ):
                return [(t, done | run)]  # all that could come next of type t is ready
            choices.append((t, done | run))
        return choices


beam = Beam()
optimal = Optimal()
