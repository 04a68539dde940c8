"""Heuristics: policies that need no learning.

A heuristic maps a `Frontier` to the type to run next; `depth` plans the whole graph at once. All
take the smallest id among equals, so the same graph has the same schedule.

Sources: Neubig, Goldberg and Dyer, On-the-fly operation batching, 2017 (`agenda`); Looks et al.,
Deep learning with dynamic computation graphs, 2017 (`depth`); Chen et al., ED-Batch, ICML 2023
(`sufficient`). `height` and `critical` are ours.
"""

import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.schedule import Schedule


def _ready(who: str, frontier: object) -> list[int]:
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

    Args:
      frontier: the state of scheduling.

    Returns:
      The id of a type with ready nodes.

    Raises:
      TypeError: it is no frontier.
    """
    return min(_ready("agenda", frontier), key=frontier.mean_depth)


def height(frontier: Frontier) -> int:
    """The type with the ready node from which the longest path begins.

    The smallest id among equals.

    Args:
      frontier: the state of scheduling.

    Returns:
      The id of a type with ready nodes.

    Raises:
      TypeError: it is no frontier.
    """
    return max(_ready("height", frontier), key=lambda t: frontier.tallest(t)[0])


def critical(frontier: Frontier) -> int:
    """The type that certainly makes progress and is most urgent.

    A type that shortens all its longest chains (`Frontier.shortens`) goes before one that does
    not; then the one with the longest path from a ready node; then the one with most such nodes.
    `height` alone leaves open what to do while several types are equally tall, which is most of
    the time in large minibatches. The smallest id among equals.

    Args:
      frontier: the state of scheduling.

    Returns:
      The id of a type with ready nodes.

    Raises:
      TypeError: it is no frontier.
    """
    ready = _ready("critical", frontier)
    return max(ready, key=lambda t: (frontier.shortens(t), frontier.tallest(t)))


def sufficient(frontier: Frontier) -> int:
    """The type with the largest |Frontier_a(G)| / |Frontier(G^a)| (ED-Batch).

    A type with ratio 1 can run without loss. The smallest id among equals.

    Args:
      frontier: the state of scheduling.

    Returns:
      The id of a type with ready nodes.

    Raises:
      TypeError: it is no frontier.
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
FALLBACKS = {p.__name__: p for p in (critical, sufficient, height, agenda)}
HEURISTICS = (sufficient, critical, height, agenda, depth)
