"""A graph cut into batches, and how few batches there can be.

Nodes of one type that are ready at the same time can run as one batch; which type to run next
is the whole question, because running a type too early splits what could have run together.
Finding the fewest batches is NP-hard. Like ED-Batch we run Algorithm 1 of the paper (see
`_schedule.policy`): ask a policy for a type, run *every* ready node of that type, repeat.

The chain bound. Write G^a for the graph of the nodes of type a alone, one before another if a
path of G leads from the first to the second, through whatever types lie between. A chain of n
nodes of type a in it needs n batches of type a, so

    lower_bound(G) = sum over a of the longest chain of type a

batches are needed. A batch of type a is certainly no mistake if every node that could run next
in G^a is ready now, |Frontier_a(G)| / |Frontier(G^a)| = 1: it shortens every longest chain of
type a. (The first printed version of the paper has this ratio upside down.) The heuristic
`sufficient` takes the type whose ratio is largest.

Everything is NumPy over CSR, a handful of calls a batch, or a loop over the nodes of narrow ones.

Source: Chen et al., ED-Batch, ICML 2023 (Algorithm 1, the sufficient condition).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jedbatch import checks
from jedbatch._graph.analysis import sorted_by
from jedbatch._graph.graph import Graph, checked_graph

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64


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

    batch_type: Int32[np.ndarray, " S"]
    node_ptr: Int64[np.ndarray, " S+1"]
    node: Int32[np.ndarray, " N"]
    policy: str = ""
    bound: float = 0
    unseen: int = 0

    @staticmethod
    def of(
        batch_type: Sequence[int], batches: Sequence[Sequence[int]], policy: str, **found: Any
    ) -> Schedule:
        """A schedule from the type and the nodes of every batch, the nodes in any order.

        Args:
          batch_type: the type of every batch, S of them.
          batches: the nodes of every batch.
          policy: name of the policy.
          **found: other attributes of a schedule.

        Returns:
          The schedule.
        """
        sizes = np.fromiter(map(len, batches), np.int64, len(batches))
        node = np.fromiter(itertools.chain.from_iterable(batches), np.int32, int(sizes.sum()))
        when = np.empty(len(node), np.int32)
        when[node] = np.repeat(np.arange(len(batches), dtype=np.int32), sizes)
        return schedule_of(batch_type, when, policy, **found)

    def __len__(self) -> int:
        return len(self.batch_type)

    @functools.cached_property
    def batch(self) -> Int64[np.ndarray, " N"]:
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

        Args:
          graph: the graph that was scheduled.
        """
        num_nodes = len(checked_graph("Schedule.check", graph).node_type)
        if not np.array_equal(np.sort(self.node), np.arange(num_nodes)):
            raise ValueError("not a valid schedule: some node runs never or twice")
        when = self.batch
        if (graph.node_type != self.batch_type[when]).any():
            raise ValueError("not a valid schedule: a batch mixes node types")
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
            counts = sizes[self.batch_type == t]
            lines.append(
                f"  type {t}: {len(counts)} batches of {counts.min()} to {counts.max()} nodes"
            )
        return "\n".join(lines)


def schedule_of(
    batch_type: Sequence[int] | np.ndarray, when: np.ndarray, policy: str, **found: Any
) -> Schedule:
    """Returns the schedule with these types of batches and int32[N], the batch of each node."""
    ptr, node = sorted_by(when, len(batch_type))
    return Schedule(np.array(batch_type, np.int32), ptr, node, policy, **found)


def cost(schedule: Schedule, weights: np.ndarray) -> float:
    """Returns the cost of the batches at float[T] `weights`."""
    return float(weights[schedule.batch_type].sum())


def lower_bound(graph: Graph, weights: np.ndarray | None = None) -> float:
    """A number of batches no schedule can go below: the sum of the longest chains.

    For every type, the largest number of its nodes on one path, whatever lies between them; they
    need that many batches. Certified, not estimated. With the cost of a batch of each type as
    `weights`, float[T], a cost that no schedule can go below.

    Args:
      graph: the graph, of T types.
      weights: float[T], the cost of a batch of each type; one each if None.

    Returns:
      The bound: a number of batches, an integer, or with `weights` a cost.

    Raises:
      TypeError: it is no graph.
      ValueError: the weights are not one positive number for each type.

    Examples:
      >>> import jedbatch
      >>> jedbatch.lower_bound(jedbatch.Graph.from_dag([0, 1, 0], [[], [0], [1]]))
      3
    """
    longest = longest_by_type(checked_graph("lower_bound", graph))
    if weights is None:
        return int(longest.sum())
    return float(longest @ checked_weights("`lower_bound` got weights", weights, graph))


def checked_weights(came: str, weights: object, graph: Graph) -> np.ndarray:
    """float[T], the cost of a batch of each type; raises `ValueError` if it is no cost."""
    try:
        costs = np.asarray(weights, float)
    except (TypeError, ValueError, OverflowError):
        costs = np.zeros(0)
    if costs.shape != (len(graph.types),) or not (np.isfinite(costs) & (costs > 0)).all():
        raise ValueError(
            f"{came} {checks.brief(weights)} for a graph of {len(graph.types)} types; expected a "
            "positive number for each, in the order of `graph.types` and `graph.labels`."
        )
    return costs


def longest_by_type(graph: Graph, rank: np.ndarray | None = None) -> np.ndarray:
    """int64[T], the longest chain of every type, by the ranks of nodes."""
    rank = graph.rank if rank is None else rank
    longest = np.full(len(graph.types), -1)
    np.maximum.at(longest, graph.node_type, rank.astype(np.int64))
    return longest + 1
