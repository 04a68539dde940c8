"""Cutting a graph into batches.

Nodes of one type that are ready at the same time can run as one batch; which type to run next
is the whole question, because running a type too early splits what could have run together.
Finding the fewest batches is NP-hard. Like ED-Batch we run Algorithm 1 of the paper: ask a
policy for a type, run *every* ready node of that type, repeat.

    frontier = ready nodes of each type
    while nodes remain:
        t = policy(frontier)
        run all ready nodes of type t; their readers may become ready

The chain bound. Write G^a for the graph of the nodes of type a alone, one before another if a
path of G leads from the first to the second, through whatever types lie between. A chain of n
nodes of type a in it needs n batches of type a, so

    lower_bound(G) = sum over a of the longest chain of type a

batches are needed. A batch of type a is certainly no mistake if every node that could run next
in G^a is ready now, |Frontier_a(G)| / |Frontier(G^a)| = 1: it shortens every longest chain of
type a. (The first printed version of the paper has this ratio upside down.) The heuristic
`sufficient` takes the type whose ratio is largest.

Most types need little of this. Types that lie on no cycle of "some node of type a reads one of
type b" have no chains: their frontier in G^a is what is left of them. A type that is on a cycle
by reading itself only has chains of direct edges. Only types that read each other in a circle
(characters and words of a lattice) need paths through other types.

Everything is NumPy over CSR, a handful of calls a batch, whatever the number of nodes in it.

Sources: Chen et al., ED-Batch, ICML 2023 (Algorithm 1, the sufficient condition); Neubig,
Goldberg and Dyer, On-the-fly operation batching, 2017 (agenda); Looks et al., Deep learning
with dynamic computation graphs, 2017 (depth).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jedbatch._graph import Graph, distinct, pointers, ranges
from jedbatch.errors import NothingReadyError


@dataclass(frozen=True, eq=False)
class Schedule:
    """Batches in the order they run.

    Attributes:
      batch_type: int32[S], the node type of each batch.
      node_ptr: int64[S + 1] and
      node: int32[N], the nodes of each batch, ascending.
      policy: name of the policy that chose it.
    """

    batch_type: np.ndarray
    node_ptr: np.ndarray
    node: np.ndarray
    policy: str = ""

    def __len__(self) -> int:
        return len(self.batch_type)

    @property
    def batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields `(type id, nodes)` for each batch, in order."""
        for i, t in enumerate(self.batch_type.tolist()):
            yield t, self.node[self.node_ptr[i] : self.node_ptr[i + 1]]

    def check(self, graph: Graph) -> None:
        """Raises `ValueError` unless this is a valid schedule of `graph`.

        Every node runs once, after everything it reads, in a batch of its own type.
        """
        num_nodes = len(graph.node_type)
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


class Frontier:
    """The state of Algorithm 1, which policies look at.

    Attributes:
      graph: what is being scheduled.
      num_ready: list of int, T; nodes of each type that could run now.
      num_left: list of int, T; nodes of each type that have not run.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._succ_ptr, self._succ = graph.succs
        self._num_succ = np.diff(self._succ_ptr)
        self._waiting = np.diff(graph.preds[0])  # int64: `subtract.at` is slow when it casts
        self._ready: list[list[np.ndarray]] = [[] for _ in graph.types]
        self._tallest: dict[int, tuple[int, int]] = {}  # (parts looked at, greatest height)
        self._watchers: list[Callable[[int, np.ndarray, np.ndarray], None]] = []
        self.num_left = np.bincount(graph.node_type, minlength=len(graph.types)).tolist()
        self.num_ready = [0] * len(graph.types)
        self._admit(np.flatnonzero(self._waiting == 0))

    @property
    def ready_types(self) -> list[int]:
        """Ids of the types with ready nodes, ascending."""
        return [t for t, n in enumerate(self.num_ready) if n]

    def readers(self, nodes: np.ndarray) -> np.ndarray:
        """The readers of the nodes, one entry per edge."""
        return self._succ[ranges(self._succ_ptr[nodes], self._num_succ[nodes])]

    def run(self, t: int) -> np.ndarray:
        """Runs every ready node of type t and returns them, ascending."""
        try:
            some = self.num_ready[t] > 0 <= t
        except (TypeError, IndexError):
            some = False
        if not some:
            raise NothingReadyError(
                f"the policy chose type {t!r}, which has no ready node; the types that have are "
                f"{self.ready_types}. Return one of `frontier.ready_types`; "
                "`help(jedbatch.errors.NothingReadyError)` says more."
            )
        parts = self._ready[t]
        nodes = np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]
        self._ready[t] = []
        self._tallest.pop(t, None)
        self.num_ready[t] = 0
        self.num_left[t] -= len(nodes)
        reached = self.readers(nodes)
        if len(reached):
            np.subtract.at(self._waiting, reached, 1)
        for watcher in self._watchers:
            watcher(t, nodes, reached)
        if len(reached):
            self._admit(distinct(reached[self._waiting[reached] == 0]))
        return nodes

    def _admit(self, nodes: np.ndarray) -> None:
        if not len(nodes):
            return
        types = self.graph.node_type[nodes]
        for t in np.flatnonzero(np.bincount(types)).tolist():
            mine = nodes[types == t]
            self._ready[t].append(mine)
            self.num_ready[t] += len(mine)

    def _watch(self, watcher: Any) -> Any:
        if sum(self.num_left) != len(self.graph.node_type):
            raise RuntimeError("ask for what the frontier tracks before the first batch runs")
        self._watchers.append(watcher)
        return watcher

    @functools.cached_property
    def _chains(self) -> "_Chains":
        return self._watch(_Chains(self))

    @functools.cached_property
    def _depths(self) -> "_Depths":
        return self._watch(_Depths(self))

    @functools.cached_property
    def _heights(self) -> np.ndarray:
        return levels(self.graph.succs, self.graph.preds)

    def num_next(self, t: int) -> int:
        """|Frontier(G^t)|: nodes of type t left with no other of type t left before them."""
        return self._chains.num_next(t)

    def mean_depth(self, t: int) -> float:
        """Mean depth of the nodes of type t that have not run."""
        return self._depths.sums[t] / self.num_left[t]

    def max_height(self, t: int) -> int:
        """Longest path that begins in a ready node of type t."""
        parts = self._ready[t]
        seen, tallest = self._tallest.get(t, (0, 0))
        for part in parts[seen:]:
            tallest = max(tallest, int(self._heights[part].max()))
        self._tallest[t] = len(parts), tallest
        return tallest


class _Depths:
    """Sum of the depths of the nodes of each type that have not run."""

    def __init__(self, frontier: Frontier):
        graph = frontier.graph
        self.depth = depths(graph)
        sums = np.bincount(graph.node_type, weights=self.depth, minlength=len(graph.types))
        self.sums = sums.tolist()

    def __call__(self, t: int, nodes: np.ndarray, reached: np.ndarray) -> None:
        self.sums[t] -= int(self.depth[nodes].sum())


class _Chains:
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
        maker, reader = graph.edges
        for types in graph.circles:
            if len(types) == 1:
                blocks = {types[0]: self.node_type[maker] == types[0]}
            else:
                chain = graph.chain_lengths(types)
                blocks = {a: chain[maker, c] > 0 for c, a in enumerate(types)}
            for a, blocking in blocks.items():
                count = np.bincount(reader[blocking], minlength=len(self.node_type))
                self.blockers[a] = count
                self.sizes[a] = int(np.count_nonzero((count == 0) & (self.node_type == a)))
        self.relayed = {a for types in graph.circles if len(types) > 1 for a in types}

    def num_next(self, a: int) -> int:
        return self.sizes[a] if a in self.sizes else self.frontier.num_left[a]

    def __call__(self, a: int, nodes: np.ndarray, reached: np.ndarray) -> None:
        if a not in self.sizes:
            return
        blockers, size = self.blockers[a], self.sizes[a] - len(nodes)
        while len(reached):
            np.subtract.at(blockers, reached, 1)
            released = reached[blockers[reached] == 0]
            mine = self.node_type[released] == a
            size += len(distinct(released[mine]))
            if a not in self.relayed:
                break
            others = distinct(released[~mine])
            reached = self.frontier.readers(others)
        self.sizes[a] = size


def levels(
    before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """int32[N], the longest path that ends in each node, given CSR of what is on either side."""
    waiting = np.diff(before[0])
    ptr, index = after
    count = np.diff(ptr)
    level = np.zeros(len(waiting), np.int32)
    depth, nodes = 0, np.flatnonzero(waiting == 0)
    while len(nodes):
        level[nodes] = depth
        depth += 1
        reached = index[ranges(ptr[nodes], count[nodes])]
        np.subtract.at(waiting, reached, 1)
        nodes = distinct(reached[waiting[reached] == 0])
    return level


def depths(graph: Graph) -> np.ndarray:
    """int32[N], the longest path that ends in each node; 0 if it reads no node."""
    return levels(graph.preds, graph.succs)


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
        `schedule(graph)` instead. With None, the heuristic with the fewest batches on this
        graph: `sufficient` if it reaches the lower bound, and otherwise the best of
        `sufficient`, `agenda`, `height` and `depth`, the first of equals.

    Returns:
      The schedule. The same graph and policy give the same schedule.

    Raises:
      NothingReadyError: the policy chose a type with no ready node.

    Example:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 0, 1], [[], [0], [0, 1]])
      >>> len(jedbatch.schedule(graph, jedbatch.policies.agenda))
      3
    """
    if policy is None:
        best = by_rank(graph)
        return best or min((schedule(graph, p) for p in HEURISTICS), key=len)
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
    sizes = np.fromiter(map(len, batches), np.int64, len(batches))
    node = np.concatenate(batches) if batches else np.zeros(0)
    name = getattr(policy, "__name__", type(policy).__name__)
    return Schedule(np.array(types, np.int32), pointers(sizes), node.astype(np.int32), name)


def lower_bound(graph: Graph) -> int:
    """A number of batches no schedule can go below: the sum of the longest chains.

    For every type, the largest number of its nodes on one path, whatever lies between them; they
    need that many batches. Certified, not estimated.

    Example:
      >>> import jedbatch
      >>> jedbatch.lower_bound(jedbatch.Graph.from_dag([0, 1, 0], [[], [0], [1]]))
      3
    """
    return int(_longest(graph).sum())


def _longest(graph: Graph) -> np.ndarray:
    """int64[T], the longest chain of every type."""
    longest = np.zeros(len(graph.types), np.int64)
    np.maximum.at(longest, graph.node_type, graph.rank + np.int64(1))
    return longest


def agenda(frontier: Frontier) -> int:
    """The type whose nodes still to run have the least mean depth (Neubig et al. 2017).

    The smallest id among equals.
    """
    return min(frontier.ready_types, key=frontier.mean_depth)


def height(frontier: Frontier) -> int:
    """The type with the ready node from which the longest path begins.

    The smallest id among equals.
    """
    return max(frontier.ready_types, key=frontier.max_height)


def sufficient(frontier: Frontier) -> int:
    """The type with the largest |Frontier_a(G)| / |Frontier(G^a)| (ED-Batch).

    A type with ratio 1 can run without loss. The smallest id among equals.
    """
    num_ready, num_next = frontier.num_ready, frontier.num_next
    return max(frontier.ready_types, key=lambda t: num_ready[t] / num_next(t))


class _Depth:
    """Nodes of equal type and equal depth form a batch (Looks et al. 2017).

    Depth is the longest path that ends in the node. Unlike the others this policy does not run
    every ready node of a type, so it plans the whole graph at once.
    """

    __name__ = "depth"

    def schedule(self, graph: Graph) -> Schedule:
        depth_of, type_of = depths(graph), graph.node_type
        node = np.lexsort((type_of, depth_of)).astype(np.int32)
        level, kind = depth_of[node], type_of[node]
        first = np.ones(len(node), bool)
        first[1:] = (level[1:] != level[:-1]) | (kind[1:] != kind[:-1])
        starts = np.flatnonzero(first)
        return Schedule(kind[starts], np.append(starts, len(node)), node, "depth")

    def __repr__(self) -> str:
        return "jedbatch.policies.depth"


depth = _Depth()
HEURISTICS = (sufficient, agenda, height, depth)


def policies_compared(graph: Graph) -> dict[str, int]:
    """Batches that other systems would need: agenda batching and depth batching."""
    return {"agenda": len(schedule(graph, agenda)), "depth": len(schedule(graph, depth))}


def by_rank(graph: Graph) -> Schedule | None:
    """Nodes of equal type and rank as batches; None if these would wait for each other.

    There are as many such batches as the lower bound says, so the schedule is optimal. It exists
    for chains and trees, whatever their outputs and reductions, and costs no search.
    """
    longest = _longest(graph)
    start = pointers(longest)
    group = start[graph.node_type] + graph.rank
    num_groups = int(start[-1])
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
    if len(order) < num_groups:
        return None
    place = np.empty(num_groups, np.int64)
    place[order] = np.arange(num_groups)
    when = place[group]
    small = when.astype(np.int16) if num_groups < 1 << 15 else when  # sorted by radix
    node = np.argsort(small, kind="stable").astype(np.int32)
    sizes = np.bincount(when, minlength=num_groups)
    types = np.repeat(np.arange(len(graph.types), dtype=np.int32), longest)
    return Schedule(types[order], pointers(sizes), node, "by rank")
