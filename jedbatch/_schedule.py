"""Cutting a graph into batches.

Nodes of one type that are ready at the same time can run as one batch; which type to run
next is the whole question, because running a type too early splits what could have run
together. Finding the fewest batches is NP-hard. Like ED-Batch we run Algorithm 1 of the
paper: ask a policy for a type, run *every* ready node of that type, repeat.

    frontier = ready nodes of each type
    while nodes remain:
        t = policy(frontier)
        run all ready nodes of type t; their readers may become ready

The chain bound. Write G^a for the graph of the nodes of type a alone, one before another
if a path of G leads from the first to the second, through whatever types lie between. A
chain of n nodes of type a in it needs n batches of type a, so

    lower_bound(G) = sum over a of the longest chain of type a

batches are needed. A batch of type a is certainly no mistake if every node that could run
next in G^a is ready now: |Frontier_a(G)| / |Frontier(G^a)| = 1. (The first printed version
of the paper has this ratio upside down.) The heuristic `sufficient` takes the type whose
ratio is largest.

Everything is NumPy over CSR, a handful of calls a batch, whatever the number of nodes in it.

Sources: Chen et al., ED-Batch, ICML 2023 (Algorithm 1, the sufficient condition); Neubig,
Goldberg and Dyer, On-the-fly operation batching, 2017 (agenda); Looks et al., Deep
learning with dynamic computation graphs, 2017 (depth).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jedbatch._graph import Graph, distinct, pointers, ranges


class NothingReadyError(ValueError):
    """A policy chose a type that has no ready node.

    **Symptom.** Scheduling stops with the id the policy returned and the types that had
    ready nodes.

    **Reason.** A policy is called with a `Frontier` and must return the id of a type with
    `frontier.num_ready[t] > 0`. A policy that computes a score sometimes produces NaN (0/0
    when a type is exhausted), and `numpy.argmax` of an array with NaN picks the NaN.

    **Cure.** Choose among `frontier.ready_types` only:

        def most_ready(frontier):
            return max(frontier.ready_types, key=lambda t: frontier.num_ready[t])
    """


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
        pred_ptr, pred = graph.preds
        reader = np.repeat(np.arange(num_nodes), np.diff(pred_ptr))
        early = np.flatnonzero(when[pred] >= when[reader])
        if len(early):
            node, operand = reader[early[0]], pred[early[0]]
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
        topology = graph.topology
        self._succ_ptr, self._succ = topology.succ_ptr, topology.succ
        self._num_succ = np.diff(topology.succ_ptr)
        self._waiting = topology.num_preds.astype(np.int64)
        self._ready: list[list[np.ndarray]] = [[] for _ in graph.types]
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
        if not (0 <= t < len(self.num_ready) and self.num_ready[t]):
            raise NothingReadyError(
                f"the policy chose type {t!r}, which has no ready node; the types that have are "
                f"{self.ready_types}. Return one of `frontier.ready_types`."
            )
        parts = self._ready[t]
        nodes = np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]
        self._ready[t] = []
        self.num_ready[t] = 0
        self.num_left[t] -= len(nodes)
        reached = self.readers(nodes)
        np.subtract.at(self._waiting, reached, 1)
        for watcher in self._watchers:
            watcher(t, nodes, reached)
        self._admit(distinct(reached[self._waiting[reached] == 0]))
        return nodes

    def _admit(self, nodes: np.ndarray) -> None:
        types = self.graph.node_type[nodes]
        for t in np.flatnonzero(np.bincount(types)).tolist():
            mine = nodes[types == t]
            self._ready[t].append(mine)
            self.num_ready[t] += len(mine)

    def _watch(self, state):
        if self.num_left != np.bincount(
            self.graph.node_type, minlength=len(self.graph.types)
        ).tolist():
            raise RuntimeError("ask for what the frontier tracks before the first batch runs")
        self._watchers.append(state)
        return state

    @functools.cached_property
    def _chains(self) -> "_Chains":
        return self._watch(_Chains(self))

    @functools.cached_property
    def _depths(self) -> "_Depths":
        return self._watch(_Depths(self))

    @functools.cached_property
    def _heights(self) -> np.ndarray:
        return heights(self.graph)

    def num_next(self, t: int) -> int:
        """|Frontier(G^t)|: nodes of type t with no node of type t before them left to run."""
        return self._chains.num_next(t)

    def mean_depth(self, t: int) -> float:
        """Mean depth of the nodes of type t that have not run."""
        return self._depths.sums[t] / self.num_left[t]

    def max_height(self, t: int) -> int:
        """Longest path that begins in a ready node of type t."""
        return max(int(self._heights[part].max()) for part in self._ready[t])


class _Depths:
    """Sum of the depths of the nodes of each type that have not run."""

    def __init__(self, frontier: Frontier):
        graph = frontier.graph
        self.depth = graph.topology.depth
        sums = np.bincount(graph.node_type, weights=self.depth, minlength=len(graph.types))
        self.sums = sums.tolist()

    def __call__(self, t: int, nodes: np.ndarray, reached: np.ndarray) -> None:
        self.sums[t] -= int(self.depth[nodes].sum())


class _Chains:
    """Size of Frontier(G^a) for every type a, kept up to date batch by batch.

    A node is blocked for a if a node of type a that has not run lies before it. It counts
    its blockers: the nodes it reads that are of type a and have not run, or are blocked for a
    themselves. Running nodes of type a releases readers, and what is released but is not of
    type a passes the release on. A type none of whose nodes lies before another needs none of
    this: its frontier is what is left of it.
    """

    def __init__(self, frontier: Frontier):
        graph, topology = frontier.graph, frontier.graph.topology
        self.frontier = frontier
        self.node_type = graph.node_type
        self.has_readers = np.diff(topology.succ_ptr) > 0
        pred_ptr, pred = graph.preds
        reader = np.repeat(np.arange(len(graph.node_type)), np.diff(pred_ptr))
        self.blockers: dict[int, np.ndarray] = {}
        self.sizes: dict[int, int] = {}
        for a in np.flatnonzero(topology.chain.max(axis=0, initial=0) > 1).tolist():
            chain = topology.chain[:, a]
            blocked = chain[pred] > 0
            self.blockers[a] = np.bincount(reader[blocked], minlength=len(chain))
            self.sizes[a] = int(np.count_nonzero((chain == 1) & (self.node_type == a)))

    def num_next(self, a: int) -> int:
        return self.sizes[a] if a in self.sizes else self.frontier.num_left[a]

    def __call__(self, a: int, nodes: np.ndarray, reached: np.ndarray) -> None:
        if a not in self.sizes:
            return
        blockers, size = self.blockers[a], self.sizes[a] - len(nodes)
        while len(reached):
            np.subtract.at(blockers, reached, 1)
            released = distinct(reached[blockers[reached] == 0])
            mine = self.node_type[released] == a
            size += int(np.count_nonzero(mine))
            others = released[~mine & self.has_readers[released]]
            reached = self.frontier.readers(others) if len(others) else others
        self.sizes[a] = size


def heights(graph: Graph) -> np.ndarray:
    """int32[N], the longest path that begins in each node; 0 if nobody reads it."""
    topology = graph.topology
    pred_ptr, pred = graph.preds
    waiting = np.diff(topology.succ_ptr)
    height = np.zeros(len(graph.node_type), np.int32)
    level, nodes = 0, np.flatnonzero(waiting == 0)
    while len(nodes):
        reached = pred[ranges(pred_ptr[nodes], np.diff(pred_ptr)[nodes])]
        np.subtract.at(waiting, reached, 1)
        nodes = distinct(reached[waiting[reached] == 0])
        level += 1
        height[nodes] = level
    return height


Policy = Callable[[Frontier], int]


def schedule(graph: Graph, policy: Policy | None = None) -> Schedule:
    """Cuts a graph into batches.

    Args:
      graph: what to schedule; `Graph.from_dag` makes one from arrays.
      policy: a callable from a `Frontier` to the id of the type to run next, such as those
        in `jedbatch.policies`; a policy that plans the whole graph at once has a method
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
        best = schedule(graph, sufficient)
        if len(best) > lower_bound(graph):
            others = [schedule(graph, p) for p in (agenda, height, depth)]
            best = min([best, *others], key=len)
        return best
    if hasattr(policy, "schedule"):
        return policy.schedule(graph)
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

    For every type, the largest number of its nodes on one path, whatever lies between them;
    they need that many batches. Certified, not estimated.

    Example:
      >>> import jedbatch
      >>> jedbatch.lower_bound(jedbatch.Graph.from_dag([0, 1, 0], [[], [0], [1]]))
      3
    """
    return int(graph.topology.chain.max(axis=0, initial=0).sum())


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

    Depth is the longest path that ends in the node. Unlike the others this policy does not
    run every ready node of a type, so it plans the whole graph at once.
    """

    __name__ = "depth"

    def schedule(self, graph: Graph) -> Schedule:
        depth_of, type_of = graph.topology.depth, graph.node_type
        node = np.lexsort((type_of, depth_of)).astype(np.int32)
        level, kind = depth_of[node], type_of[node]
        first = np.ones(len(node), bool)
        first[1:] = (level[1:] != level[:-1]) | (kind[1:] != kind[:-1])
        starts = np.flatnonzero(first)
        return Schedule(kind[starts], np.append(starts, len(node)), node, "depth")

    def __repr__(self) -> str:
        return "jedbatch.policies.depth"


depth = _Depth()
