"""Policies, and Algorithm 1: runs a policy until every node of a graph is in a batch.

A policy maps a `Frontier` to the type to run next; *every* ready node of that type runs, and the
policy is asked again. A policy with a method `schedule` cuts a whole graph into batches instead.
Without a policy, each component of types is scheduled by rank if that is possible, which is
optimal, and otherwise by the heuristic with the fewest batches.

Source: Chen et al., ED-Batch, ICML 2023, Algorithm 1.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._schedule.compiled import run_compiled
from jedbatch._schedule.components import by_component, by_rank
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.heuristics import FALLBACKS, HEURISTICS, agenda, depth
from jedbatch._schedule.schedule import Schedule, schedule_of


class Scheduler(Protocol):
    """A policy that schedules a whole graph at once."""

    def schedule(self, graph: Graph) -> Schedule:
        """A schedule of the graph."""


Policy = Callable[[Frontier], int] | Scheduler


def version_of(policy: Policy) -> Hashable:
    """Returns what the schedules of a policy depend on besides graphs: how often it has changed."""
    return getattr(policy, "version", None)


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

    Examples:
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
    name = getattr(policy, "__name__", type(policy).__name__)
    if FALLBACKS.get(name) is policy and (done := run_compiled(graph, name)) is not None:
        return schedule_of(done[0], done[1], name)
    frontier = Frontier(graph)
    num_left = len(graph.node_type)
    types, batches = [], []
    while num_left:
        t = policy(frontier)
        nodes = frontier.run(t)
        types.append(t)
        batches.append(nodes)
        num_left -= len(nodes)
    return Schedule.of(types, batches, name)


def schedule_copies(graph: Graph, policy: Policy | None, num_instances: int) -> Schedule | None:
    """Cuts a graph into batches whose nodes count as several (see `_graph.structures.counted`).

    Copies of a node run together: those that are ready are, whatever the policy chooses.

    Args:
      graph: one instance of each structure.
      policy: as for `schedule`.
      num_instances: as how many they count.

    Returns:
      The schedule; None if the policy has to see every node.
    """
    own = getattr(policy, "_schedule_copies", None)
    if own is not None:
        return own(graph, num_instances)
    name = getattr(policy, "__name__", "")
    if policy is None or policy is depth or FALLBACKS.get(name) is policy:
        return schedule(graph, policy)
    return None


def checked_policy(policy: object) -> Policy:
    """The policy, or a `TypeError` if it is none."""
    if (callable(policy) or hasattr(policy, "schedule")) and not isinstance(policy, type):
        return policy
    raise TypeError(
        f"got policy={checks.brief(policy)}; expected a callable from a `Frontier` to a type id, "
        "such as `jedbatch.policies.agenda`, what `jedbatch.learn` returned, or None."
    )


def policies_compared(graph: Graph) -> dict[str, int]:
    """Batches that other systems would need: agenda batching and depth batching."""
    return {"agenda": len(schedule(graph, agenda)), "depth": len(schedule(graph, depth))}


def best_of_heuristics(graph: Graph) -> Schedule:
    """The schedule by rank, or if there is none the best that a heuristic finds."""
    return by_rank(graph) or min((schedule(graph, p) for p in HEURISTICS), key=len)
