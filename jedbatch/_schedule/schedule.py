"""Cutting a graph into batches.

Nodes of one type that are ready at the same time can run as one batch; which type to run next
is the whole question, because running a type too early splits what could have run together.
Finding the fewest batches is NP-hard. Like ED-Batch we run Algorithm 1 of the paper (see
`_schedule.frontier`): ask a policy for a type, run *every* ready node of that type, repeat.

The chain bound. Write G^a for the graph of the nodes of type a alone, one before another if a
path of G leads from the first to the second, through whatever types lie between. A chain of n
nodes of type a in it needs n batches of type a, so

    lower_bound(G) = sum over a of the longest chain of type a

batches are needed. A batch of type a is certainly no mistake if every node that could run next
in G^a is ready now, |Frontier_a(G)| / |Frontier(G^a)| = 1: it shortens every longest chain of
type a. (The first printed version of the paper has this ratio upside down.) The heuristic
`sufficient` takes the type whose ratio is largest.

Two facts save most of the search. Types that do not read each other in a circle do not compete:
if no node of type b comes before one of type a, all of a may run before any of b, so a graph falls
into *components* of types that can be scheduled one after the other, and the fewest batches of
the whole are the sum of the fewest of each (`by_component`). And in a component of one type, all
nodes with as many others before them run together, in as many batches as the bound says. Chains
and trees consist of such components; so does much of everything else.

Everything is NumPy over CSR, a handful of calls a batch, or a loop over the nodes of narrow ones.

Sources: Chen et al., ED-Batch, ICML 2023 (Algorithm 1, the sufficient condition); Neubig,
Goldberg and Dyer, On-the-fly operation batching, 2017 (agenda); Looks et al., Deep learning
with dynamic computation graphs, 2017 (depth).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.paths import pointers
from jedbatch._schedule.frontier import Frontier


@dataclass(frozen=True, eq=False)
class Schedule:
    """Batches in the order they run.

    Attributes:
      batch_type: int32[S], the node type of each batch.
      node_ptr: int64[S + 1] and
      node: int32[N], the nodes of each batch, ascending.
      policy: name of the policy that chose it.
      bound: a certified lower bound that the policy found on the way; 0 if it did not look.
      unseen: batches that a learned policy had to leave to its fallback.
    """

    batch_type: np.ndarray
    node_ptr: np.ndarray
    node: np.ndarray
    policy: str = ""
    bound: float = 0
    unseen: int = 0

    @staticmethod
    def of(
        batch_type: Sequence[int], batches: Sequence[Sequence[int]], policy: str, **found: Any
    ) -> "Schedule":
        """A schedule from the type and the nodes of every batch, the nodes in any order."""
        sizes = np.fromiter(map(len, batches), np.int64, len(batches))
        ptr = pointers(sizes)
        node = np.fromiter(itertools.chain.from_iterable(batches), np.int32, int(ptr[-1]))
        when = np.empty(len(node), np.int32)
        when[node] = np.repeat(np.arange(len(batches), dtype=np.int32), sizes)
        return Schedule(np.array(batch_type, np.int32), ptr, in_order(when), policy, **found)

    def __len__(self) -> int:
        return len(self.batch_type)

    @functools.cached_property
    def batch(self) -> np.ndarray:
        """int64[N], the batch in which each node runs."""
        batch = np.empty(len(self.node), np.int64)
        batch[self.node] = np.repeat(np.arange(len(self)), np.diff(self.node_ptr))
        return batch

    @property
    def batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields `(type id, nodes)` for each batch, in order."""
        for i, t in enumerate(self.batch_type.tolist()):
            yield t, self.node[self.node_ptr[i] : self.node_ptr[i + 1]]

    def check(self, graph: Graph) -> None:
        """Raises `ValueError` unless this is a valid schedule of `graph`.

        Every node runs once, after everything it reads, in a batch of its own type.
        """
        num_nodes = len(checked_graph("Schedule.check", graph).node_type)
        if not np.array_equal(np.sort(self.node), np.arange(num_nodes)):
            raise ValueError("not a valid schedule: some node runs never or twice")
        batch = np.repeat(np.arange(len(self)), np.diff(self.node_ptr))
        if (graph.node_type[self.node] != self.batch_type[batch]).any():
            raise ValueError("not a valid schedule: a batch mixes node types")
        when = np.empty(num_nodes, np.int64)
        when[self.node] = batch
        maker, reader = graph.edges
        early = np.flatnonzero(when[maker] >= when[reader])
        if len(early):
            node, operand = reader[early[0]], maker[early[0]]
            raise ValueError(
                f"not a valid schedule: node {node} runs in batch {when[node]} and reads node "
                f"{operand}, which runs in batch {when[operand]}"
            )

    def __str__(self) -> str:
        lines = [f"Schedule of {len(self.node)} nodes in {len(self)} batches ({self.policy})"]
        sizes = np.diff(self.node_ptr)
        for t in np.unique(self.batch_type):
            mine = sizes[self.batch_type == t]
            lines.append(f"  type {t}: {len(mine)} batches of {mine.min()} to {mine.max()} nodes")
        return "\n".join(lines)


class Planner(Protocol):
    """A policy that schedules a whole graph at once."""

    def schedule(self, graph: Graph) -> Schedule:
        """A schedule of the graph."""


Policy = Callable[[Frontier], int] | Planner


def schedule(graph: Graph, policy: Policy | None = None) -> Schedule:
    """Cuts a graph into batches.

    Args:
      graph: what to schedule; `Graph.from_dag` makes one from arrays.
      policy: a callable from a `Frontier` to the id of the type to run next, such as those in
        `jedbatch.policies`; a policy that plans the whole graph at once has a method
        `schedule(graph)` instead. With None, each component of types is scheduled by rank if
        that is possible, which is optimal, and otherwise by the heuristic with the fewest
        batches: the first of equals among `sufficient`, `critical`, `height`, `agenda`, `depth`.

    Returns:
      The schedule. The same graph and policy give the same schedule.

    Raises:
      NothingReadyError: the policy chose a type with no ready node.
      TypeError: the graph or the policy is none.

    Example:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 0, 1], [[], [0], [0, 1]])
      >>> len(jedbatch.schedule(graph, jedbatch.policies.agenda))
      3
    """
    checked_graph("schedule", graph)
    if policy is None:
        return by_component(graph, best_of_heuristics)
    checked_policy(policy)
    if hasattr(policy, "schedule"):
        return policy.schedule(graph)
    assert callable(policy)
    frontier = Frontier(graph)
    left = len(graph.node_type)
    types, batches = [], []
    while left:
        t = policy(frontier)
        nodes = frontier.run(t)
        types.append(t)
        batches.append(nodes)
        left -= len(nodes)
    return Schedule.of(types, batches, getattr(policy, "__name__", type(policy).__name__))


def checked_policy(policy: Any) -> Policy:
    """The policy, or a `TypeError` if it is none."""
    if (callable(policy) or hasattr(policy, "schedule")) and not isinstance(policy, type):
        return policy
    raise TypeError(
        f"got policy={checks.brief(policy)}; expected a callable from a `Frontier` to a type id, "
        "such as `jedbatch.policies.agenda`, what `jedbatch.learn` returned, or None."
    )


def cost(schedule: Schedule, weights: np.ndarray) -> float:
    """Returns the cost of the batches at float[T] `weights`."""
    return float(weights[schedule.batch_type].sum())


def in_order(when: np.ndarray) -> np.ndarray:
    """int32[N], the nodes by the batch they run in, ascending in each."""
    if len(when) and when.max() < 1 << 15:
        when = when.astype(np.int16)  # sorted by radix
    return np.argsort(when, kind="stable").astype(np.int32)


def lower_bound(graph: Graph, weights: np.ndarray | None = None) -> float:
    """A number of batches no schedule can go below: the sum of the longest chains.

    For every type, the largest number of its nodes on one path, whatever lies between them; they
    need that many batches. Certified, not estimated. With the cost of a batch of each type as
    `weights`, float[T], a cost that no schedule can go below.

    Raises:
      TypeError: it is no graph.
      ValueError: the weights are not one positive number for each type.

    Example:
      >>> import jedbatch
      >>> jedbatch.lower_bound(jedbatch.Graph.from_dag([0, 1, 0], [[], [0], [1]]))
      3
    """
    longest = _longest(checked_graph("lower_bound", graph))
    if weights is None:
        return int(longest.sum())
    return float(longest @ checked_weights("`lower_bound` got weights", weights, graph))


def checked_weights(came: str, weights: Any, graph: Graph) -> np.ndarray:
    """float[T], the cost of a batch of each type; raises `ValueError` if it is no cost."""
    try:
        found = np.asarray(weights, float)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros(0)
    if found.shape != (len(graph.types),) or not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(
            f"{came} {checks.brief(weights)} for a graph of {len(graph.types)} types; expected a "
            "positive number for each, in the order of `graph.types` and `graph.labels`."
        )
    return found


def _longest(graph: Graph) -> np.ndarray:
    """int64[T], the longest chain of every type."""
    longest = np.zeros(len(graph.types), np.int64)
    np.maximum.at(longest, graph.node_type, graph.rank + np.int64(1))
    return longest


def _ready(who: str, frontier: Any) -> list[int]:
    """The types with ready nodes."""
    if not isinstance(frontier, Frontier):
        raise TypeError(
            f"`policies.{who}` got {checks.shown(frontier)}; expected a `Frontier`. To cut a graph "
            f"into batches, write `jedbatch.schedule(graph, jedbatch.policies.{who})`."
        )
    return frontier.ready_types


def agenda(frontier: Frontier) -> int:
    """The type whose nodes still to run have the least mean depth (Neubig et al. 2017).

    The smallest id among equals.
    """
    return min(_ready("agenda", frontier), key=frontier.mean_depth)


def height(frontier: Frontier) -> int:
    """The type with the ready node from which the longest path begins.

    The smallest id among equals.
    """
    return max(_ready("height", frontier), key=lambda t: frontier.tallest(t)[0])


def critical(frontier: Frontier) -> int:
    """The type that certainly makes progress and is most urgent.

    A type that shortens all its longest chains (`Frontier.shortens`) goes before one that does
    not; then the one with the longest path from a ready node; then the one with most such nodes.
    `height` alone leaves open what to do while several types are equally tall, which is most of
    the time in large minibatches. The smallest id among equals.
    """
    ready = _ready("critical", frontier)
    return max(ready, key=lambda t: (frontier.shortens(t), frontier.tallest(t)))


def sufficient(frontier: Frontier) -> int:
    """The type with the largest |Frontier_a(G)| / |Frontier(G^a)| (ED-Batch).

    A type with ratio 1 can run without loss. The smallest id among equals.
    """
    ready = _ready("sufficient", frontier)
    num_ready, num_next = frontier.num_ready, frontier.num_next
    return max(ready, key=lambda t: num_ready[t] / num_next(t))


class _Depth:
    """Nodes of equal type and equal depth form a batch (Looks et al. 2017).

    Depth is the longest path that ends in the node. Unlike the others this policy does not run
    every ready node of a type, so it plans the whole graph at once.
    """

    __name__ = "depth"

    def schedule(self, graph: Graph) -> Schedule:
        depth_of, type_of = checked_graph("depth.schedule", graph).depth, graph.node_type
        node = np.lexsort((type_of, depth_of)).astype(np.int32)
        level, kind = depth_of[node], type_of[node]
        first = np.ones(len(node), bool)
        first[1:] = (level[1:] != level[:-1]) | (kind[1:] != kind[:-1])
        starts = np.flatnonzero(first)
        return Schedule(kind[starts], np.append(starts, len(node)), node, "depth")

    def __repr__(self) -> str:
        return "jedbatch.policies.depth"


depth = _Depth()
HEURISTICS = (sufficient, critical, height, agenda, depth)


def policies_compared(graph: Graph) -> dict[str, int]:
    """Batches that other systems would need: agenda batching and depth batching."""
    return {"agenda": len(schedule(graph, agenda)), "depth": len(schedule(graph, depth))}


def best_of_heuristics(graph: Graph) -> Schedule:
    """The schedule by rank, or if there is none the best that a heuristic finds."""
    return by_rank(graph) or min((schedule(graph, p) for p in HEURISTICS), key=len)


def by_component(
    graph: Graph,
    solve: Callable[[Graph], Schedule],
    weights: np.ndarray | None = None,
) -> Schedule:
    """Schedules one component of types after the other.

    Components of one type are run by rank, which is optimal; `solve` schedules the others, most
    often as bare graphs. If it is optimal, so is the whole. Bounds add up; those of components run
    by rank are what they cost, at float[T] `weights` for a batch of each type, or one.
    """
    components = graph.components
    if all(len(types) == 1 for types in components):
        found = by_rank(graph)
        assert found is not None
        return found if weights is None else replace(found, bound=cost(found, weights))
    if len(components) == 1 and len(graph.types) == len(components[0]):
        return solve(graph)
    when = np.zeros(len(graph.node_type), np.int32)
    batch_types, bound, unseen, name = [np.zeros(0, np.int32)], 0.0, 0, ""
    start = 0
    for types in components:
        nodes, part = graph.restrict(types)
        if len(types) == 1:
            found = by_rank(part)
            assert found is not None
            if weights is not None:
                found = replace(found, bound=cost(found, weights[types]))
        else:
            found = solve(part)
            name = name or found.policy
        when[nodes[found.node]] = np.repeat(
            np.arange(start, start + len(found), dtype=np.int32), np.diff(found.node_ptr)
        )
        batch_types.append(np.array(types, np.int32)[found.batch_type])
        start += len(found)
        bound += found.bound
        unseen += found.unseen
    sizes = np.bincount(when, minlength=start)
    batch_type = np.concatenate(batch_types)
    return Schedule(batch_type, pointers(sizes), in_order(when), name, bound, unseen)


def by_rank(graph: Graph) -> Schedule | None:
    """Nodes of equal type and rank as batches; None if these would wait for each other.

    There are as many such batches as the lower bound says, so the schedule is optimal. It exists
    for chains and trees, whatever their outputs and reductions, and costs no search.
    """
    longest = _longest(graph)
    start = pointers(longest)
    num_groups = int(start[-1])
    group = start[graph.node_type] + graph.rank
    if all(len(types) == 1 for types in graph.components):
        blocks = [np.arange(start[t], start[t + 1]) for (t,) in graph.components]
        order = np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
    else:
        order = _sorted_groups(graph, group, num_groups)
        if len(order) < num_groups:
            return None
    place = np.empty(num_groups, np.int64)
    place[order] = np.arange(num_groups)
    when = place[group]
    sizes = np.bincount(when, minlength=num_groups)
    types = np.repeat(np.arange(len(graph.types), dtype=np.int32), longest)
    return Schedule(types[order], pointers(sizes), in_order(when), "by rank", num_groups)


def _sorted_groups(graph: Graph, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Groups of nodes in an order in which they can run; those on cycles are left out."""
    maker, reader = graph.edges
    pairs = group[maker] * num_groups + group[reader]
    if num_groups**2 <= 4 * len(pairs):
        pairs = np.flatnonzero(np.bincount(pairs))
    else:
        pairs = np.unique(pairs)
    waiting = np.bincount(pairs % num_groups, minlength=num_groups).tolist()
    ptr = np.searchsorted(pairs, np.arange(num_groups + 1) * num_groups).tolist()
    readers = (pairs % num_groups).tolist()
    order = []
    ready = [g for g in range(num_groups - 1, -1, -1) if not waiting[g]]
    while ready:
        order.append(g := ready.pop())
        for other in readers[ptr[g] : ptr[g + 1]]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return np.array(order, np.int64)
