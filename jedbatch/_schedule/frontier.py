"""The state of Algorithm 1: which nodes could run now.

A policy looks at a `Frontier` and names a type; `Frontier.run` runs every ready node of it. Some
readers of these nodes become ready, and the policy is asked again.

    frontier = ready nodes of each type
    while nodes remain:
        t = policy(frontier)
        run all ready nodes of type t; their readers may become ready

Lattices and chains have a dozen nodes to a batch, minibatches of trees have thousands. NumPy needs
13 to 16 µs for the calls that a narrow batch takes; a loop in Python needs 0.2 to 0.4 µs a node. So
narrow batches are run by a loop, wide ones by NumPy, on the same arrays.

What policies may want to know beyond the number of ready nodes is computed when it is first asked
for and kept up to date from then on: heights, longest chains, and how many nodes could run next if
only one type counted (`num_next`).

Where nodes count as several, as those of one structure do for all of its copies (see
`_graph.structures`), so they do in all that policies ask for: then it is what they would see of a
graph of all copies, which run side by side.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.paths import distinct, kinds_before, ranges
from jedbatch._graph.structures import weight_of
from jedbatch.errors import NothingReadyError

WIDE_BATCH = 96  # nodes from which NumPy is faster than a loop


class Frontier:
    """The nodes of a graph that could run now, and those that have not run.

    Attributes:
      graph: what is being scheduled.
      num_left: list of int, T; nodes of each type that have not run.
    """

    def __init__(self, graph: Graph):
        self.graph = checked_graph("Frontier", graph)
        weight = weight_of(graph)
        self._weight: list[int] | None = None if weight is None else weight.tolist()
        self._succ_ptr, self._succ = graph.succs
        self._num_succ = np.diff(self._succ_ptr)
        self._waiting = np.diff(graph.preds[0])  # int64: `subtract.at` is slow when it casts
        self._few = (  # the same for loops
            memoryview(self._waiting.data),
            self._succ_ptr.tolist(),
            self._succ.tolist(),
            graph.node_type.tolist(),
        )
        self._ready: list[list[int]] = [[] for _ in graph.types]
        self._looked = [0] * len(graph.types)  # ready nodes of each type that `_look` has seen
        self._tallest = [(-1, 0, 0)] * len(graph.types)
        self._longest = [-1] * len(graph.types)  # rows of the longest chains of nodes looked at
        self._watchers: list[Callable[[int, np.ndarray, np.ndarray], None]] = []
        self.num_left = nodes_by_type(graph).tolist()
        self._admit(np.flatnonzero(self._waiting == 0))

    def __repr__(self) -> str:
        ready = {str(self.graph.types[t]): self.num_ready[t] for t in self.ready_types}
        return f"Frontier: {sum(self.num_left)} nodes left, ready are {ready}"

    @property
    def num_ready(self) -> list[int]:
        """Nodes of each type that could run now."""
        return list(map(self._count, self._ready))

    def _count(self, nodes: Sequence[int] | np.ndarray) -> int:
        """As how many some nodes count.

        Args:
          nodes: their ids.

        Returns:
          The number.
        """
        if self._weight is None:
            return len(nodes)
        return sum(map(self._weight.__getitem__, nodes))

    @property
    def ready_types(self) -> list[int]:
        """Ids of the types with ready nodes, ascending."""
        return [t for t, nodes in enumerate(self._ready) if nodes]

    @property
    def left(self) -> np.ndarray:
        """bool[N], the nodes that have not run."""
        left = self._waiting > 0
        for nodes in self._ready:
            left[nodes] = True
        return left

    def readers(self, nodes: np.ndarray) -> np.ndarray:
        """The readers of the nodes, one entry per edge.

        Args:
          nodes: int[n], ids of nodes.

        Returns:
          int32[m], ids of the nodes that read them.
        """
        return self._succ[ranges(self._succ_ptr[nodes], self._num_succ[nodes])]

    def run(self, t: int) -> list[int]:
        """Runs every ready node of type t and returns them, in no particular order.

        Args:
          t: id of a type with ready nodes.

        Returns:
          int[n], the nodes.

        Raises:
          NothingReadyError: no node of the type is ready, or there is no such type.
        """
        try:
            nodes = self._ready[t] if t >= 0 else []
        except (TypeError, ValueError, IndexError):
            nodes = []
        if not nodes:
            raise NothingReadyError(
                f"the policy chose type {checks.brief(t)}, which has no ready node; the types that "
                "have are "
                f"{self.ready_types}. Return one of `frontier.ready_types`; "
                "`help(jedbatch.errors.NothingReadyError)` says more."
            )
        if "_ahead" in self.__dict__:
            self._look(t)
            self._looked[t], self._tallest[t], self._longest[t] = 0, (-1, 0, 0), -1
        self._ready[t] = []
        self.num_left[t] -= self._count(nodes)
        if len(nodes) < WIDE_BATCH and not self._watchers:
            waiting, ptr, succ, type_of = self._few
            ready = self._ready
            for node in nodes:
                for reader in succ[ptr[node] : ptr[node + 1]]:
                    waiting[reader] = num_waiting = waiting[reader] - 1
                    if not num_waiting:
                        ready[type_of[reader]].append(reader)
        else:
            ran = np.array(nodes)
            reached = self.readers(ran)
            np.subtract.at(self._waiting, reached, 1)
            for watcher in self._watchers:
                watcher(t, ran, reached)
            self._admit(distinct(reached[self._waiting[reached] == 0]))
        return nodes

    def _admit(self, nodes: np.ndarray) -> None:
        types = self.graph.node_type[nodes]
        for t in np.flatnonzero(np.bincount(types)).tolist():
            self._ready[t] += nodes[types == t].tolist()

    def tallest(self, t: int) -> tuple[int, int, int]:
        """(longest path from a ready node of type t, how many begin one, how many of them turn).

        Lengths are in edges, -1 if no node is ready. A node turns if the longest path goes on to
        a node of another type.

        Args:
          t: id of a type.

        Returns:
          Three numbers; the path is measured in edges.
        """
        self._look(t)
        return self._tallest[t]

    def shortens(self, t: int) -> bool:
        """Returns whether all longest chains of type t that are left begin in nodes that are ready.

        Then the lower bound on what is left is one batch less when type t has run.

        Args:
          t: id of a type.

        Returns:
          True if running its ready nodes lowers the bound on batches of the type.
        """
        self._look(t)
        *_, waiting, longest_waiting = self._ahead
        while not waiting[longest_waiting[t]]:
            longest_waiting[t] -= 1
        return self._longest[t] > longest_waiting[t]

    @functools.cached_property
    def _ahead(self) -> tuple[list[int], list[bool], list[int], list[int], list[int]]:
        """Returns the paths ahead of each node, and which nodes have not been looked at.

        (Height of each node, whether it turns, its row; nodes not yet looked at of each row; a row
        of each type, above which all have been looked at.)
        """
        graph, left = self.graph, self.left
        row, waiting, last = chain_rows(graph, left)
        return tuple(x.tolist() for x in (graph.height, graph.changes_type, row, waiting, last))

    def _look(self, t: int) -> None:
        """Looks at the ready nodes of type t that are new."""
        nodes, num_looked = self._ready[t], self._looked[t]
        if num_looked == len(nodes):
            return
        height, changes_type, row, waiting, _ = self._ahead
        top, count, turning = self._tallest[t]
        longest = self._longest[t]
        weight = self._weight
        for node in nodes[num_looked:] if num_looked else nodes:
            copies = 1 if weight is None else weight[node]
            if (h := height[node]) > top:
                top, count, turning = h, copies, copies * changes_type[node]
            elif h == top:
                count += copies
                turning += copies * changes_type[node]
            node_rows = row[node]
            waiting[node_rows] -= 1
            if node_rows > longest:
                longest = node_rows
        self._looked[t], self._tallest[t] = len(nodes), (top, count, turning)
        self._longest[t] = longest

    def num_next(self, t: int) -> int:
        """|Frontier(G^t)|: nodes of type t left with no other of type t left before them.

        Args:
          t: id of a type.

        Returns:
          The number of nodes.
        """
        return self.chains.num_next(t)

    def mean_depth(self, t: int) -> float:
        """Mean depth of the nodes of type t that have not run.

        Args:
          t: id of a type.

        Returns:
          The mean, in edges.
        """
        return self._depths.sums[t] / self.num_left[t]

    def _watch(self, watcher: Any) -> Any:
        self._watchers.append(watcher)
        return watcher

    @functools.cached_property
    def chains(self) -> "Chains":
        """The sizes that `num_next` returns, kept up to date."""
        return self._watch(Chains(self))

    @functools.cached_property
    def _depths(self) -> "_Depths":
        return self._watch(_Depths(self))


def nodes_by_type(graph: Graph) -> np.ndarray:
    """Returns int64[T], the nodes of each type, those counted as several as so many."""
    weight = weight_of(graph)
    if weight is None:
        return graph.nodes_per_type
    return np.bincount(graph.node_type, weight, len(graph.types)).astype(np.int64)


def chain_rows(graph: Graph, left: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Returns the nodes of a graph in rows, those of one type and equal chain in each.

    The rows of a type follow each other, longer chains later, and one that is never empty comes
    before them.

    Args:
      graph: the graph.
      left: bool[N], the nodes to count; all of them if None.

    Returns:
      (int64[N] the row of each node, int64[R] nodes in each row, int64[T] the last row of each
      type).
    """
    lengths = np.zeros(len(graph.types), np.int64)
    np.maximum.at(lengths, graph.node_type, graph.chain)
    ends = (lengths + 1).cumsum()
    row = (ends - lengths - 1)[graph.node_type] + graph.chain
    num_nodes = np.bincount(row if left is None else row[left], minlength=int(ends[-1]))
    num_nodes[ends - lengths - 1] = 1
    return row, num_nodes, ends - 1


class _Depths:
    """Sum of the depths of the nodes of each type that have not run."""

    def __init__(self, frontier: Frontier):
        graph = frontier.graph
        weight = weight_of(graph)
        self.depth = graph.depth if weight is None else graph.depth * weight
        depth = self.depth * frontier.left
        self.sums = np.bincount(graph.node_type, depth, len(graph.types)).tolist()

    def __call__(self, t: int, nodes: np.ndarray, reached: np.ndarray) -> None:
        self.sums[t] -= int(self.depth[nodes].sum())


class Chains:
    """The size of Frontier(G^a) for every type a, kept up to date batch by batch.

    A node is blocked for a if a node of type a that has not run lies before it. It counts its
    blockers: the nodes it reads that are of type a and have not run, or are blocked for a
    themselves. Running nodes of type a releases readers, and what is released but is not of type
    a passes the release on.
    """

    def __init__(self, frontier: Frontier):
        graph = frontier.graph
        self.frontier = frontier
        self.node_type = graph.node_type
        self.blockers: dict[int, np.ndarray] = {}
        self.sizes: dict[int, int] = {}
        left = frontier.left
        for types in graph.cyclic_components:
            place = np.full(len(graph.types), -1)
            place[types] = np.arange(len(types))
            kind = np.where(left, place[self.node_type], -1)
            maker, reader = (end[left[graph.edges[0]]] for end in graph.edges)
            inside = (kind[maker] >= 0) & (kind[reader] >= 0)
            maker, reader = maker[inside], reader[inside]
            earlier = kinds_before(np.maximum(kind, 0), maker, reader)
            for a in types:
                bit = int(place[a])
                blocks = np.array([x >> bit & 1 for x in earlier], bool)
                count = np.bincount(reader[blocks[maker]], minlength=len(kind))
                self.blockers[a] = count
                next_ones = np.flatnonzero((count == 0) & left & (self.node_type == a))
                self.sizes[a] = frontier._count(next_ones)
        self.relayed = {a for types in graph.cyclic_components if len(types) > 1 for a in types}

    def num_next(self, a: int) -> int:
        return self.sizes[a] if a in self.sizes else self.frontier.num_left[a]

    def __call__(self, a: int, nodes: np.ndarray, reached: np.ndarray) -> None:
        if a not in self.sizes:
            return
        blockers, size = self.blockers[a], self.sizes[a] - self.frontier._count(nodes)
        while len(reached):
            np.subtract.at(blockers, reached, 1)
            released = reached[blockers[reached] == 0]
            is_same = self.node_type[released] == a
            size += self.frontier._count(distinct(released[is_same]))
            if a not in self.relayed:
                break
            elsewhere = distinct(released[~is_same])
            reached = self.frontier.readers(elsewhere)
        self.sizes[a] = size
