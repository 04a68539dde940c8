"""`rewrite`: a graph with some nodes in place of others; `with_inputs`: with other inputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows, chosen_inputs
from jedbatch._graph.paths import pointers, ranges, renumbered
from jedbatch._graph.types import NodeType

GONE = -(1 << 30)  # in place of the number of a result that is no more


class Rewrite(NamedTuple):
    """New nodes in place of some of a graph's (N nodes, V results; K new nodes).

    Attributes:
      kept: bool[N], the nodes that stay.
      anchor: int64[K], ascending: each new node comes before this old one, in its instance.
      node_type: int32[K], of new nodes.
      operand_ptr: int64[K + 1] and
      operand: int64[...], what new nodes read: an old result or input as in the graph, or result r
        of the new nodes as V + r.
      value: int64[V], what stands for each old result, likewise; that of a node that stays is
        itself. Of what nobody reads it is anything.
      rank: int64[N], where old nodes would come if all of them stayed, each within its instance;
        None if they keep their order. Anchors ascend by it then.
    """

    kept: np.ndarray
    anchor: np.ndarray
    node_type: np.ndarray
    operand_ptr: np.ndarray
    operand: np.ndarray
    value: np.ndarray
    rank: np.ndarray | None = None


def rewrite(graph: Graph, change: Rewrite, types: tuple[NodeType, ...] | None = None) -> Graph:
    """Returns a graph with new nodes in place of some; `types`, if there are more than before."""
    types = graph.types if types is None else types
    results = np.array([t.num_results for t in types], np.int64)
    kept, anchor, counted = np.flatnonzero(change.kept), change.anchor, change.kept
    kept_rank = kept
    if change.rank is not None:
        kept = kept[np.argsort(change.rank[kept])]
        kept_rank, anchor = change.rank[kept], change.rank[anchor]
        counted = np.zeros(len(change.kept), bool)
        counted[kept_rank] = True
    before = pointers(counted)
    place = before[kept_rank] + np.searchsorted(anchor, kept_rank, side="right")
    new_place = before[anchor] + np.arange(len(anchor))

    node_type = np.empty(len(kept) + len(new_place), np.int32)
    arity = np.empty(len(node_type), np.int64)
    old_arity, new_arity = np.diff(graph.operand_ptr)[kept], np.diff(change.operand_ptr)
    node_type[place], arity[place] = graph.node_type[kept], old_arity
    node_type[new_place], arity[new_place] = change.node_type, new_arity
    value_ptr, operand_ptr = pointers(results[node_type]), pointers(arity)

    # The numbers of results: those of kept nodes where they were, and of new ones behind.
    new_results = results[change.node_type]
    number = np.full(graph.num_values + int(new_results.sum()), GONE, np.int64)
    of_kept = graph.num_results[kept]
    number[ranges(graph.value_ptr[kept], of_kept)] = ranges(value_ptr[place], of_kept)
    number[graph.num_values :] = ranges(value_ptr[new_place], new_results)
    number[: graph.num_values] = renumbered(change.value, number)

    operand = np.empty(int(operand_ptr[-1]), np.int32)
    read = graph.operand[ranges(graph.operand_ptr[kept], old_arity)]
    operand[ranges(operand_ptr[place], old_arity)] = renumbered(read, number)
    operand[ranges(operand_ptr[new_place], new_arity)] = renumbered(change.operand, number)
    outputs = renumbered(graph.outputs, number)
    assert min(operand.min(initial=0), outputs.min(initial=0)) > GONE, (
        "a value is read that is gone"
    )
    return replace(
        graph,
        types=types,
        node_type=node_type,
        operand_ptr=operand_ptr,
        operand=operand,
        outputs=outputs,
        node_ptr=before[graph.node_ptr] + np.searchsorted(anchor, graph.node_ptr),
    )


def with_inputs(graph: Graph, new: Sequence[tuple[int, InputRows]] = ()) -> Graph:
    """Returns a graph without inputs that nobody reads, and with new ones.

    Args:
      graph: references in it count on from its I inputs to new ones, `-1 - I - k`.
      new: (instance, inputs), which come after all others of the instance, in this order.
    """
    owner = np.repeat(np.arange(graph.num_instances), np.diff(graph.input_ptr))
    added = [np.full(len(rows), instance) for instance, rows in new]
    owner = np.concatenate([owner, *added])
    places = [np.flatnonzero(read < 0) for read in (graph.operand, graph.outputs)]
    used = np.zeros(len(owner), bool)
    for read, at in zip((graph.operand, graph.outputs), places, strict=True):
        used[~read[at]] = True
    if used.all() and not new:
        return graph
    order = np.flatnonzero(used)
    order = order[np.argsort(owner[order], kind="stable")]
    place = np.zeros(len(owner), np.int32)
    place[order] = np.arange(len(order))
    operand, outputs = graph.operand.copy(), graph.outputs.copy()
    for read, at in zip((operand, outputs), places, strict=True):
        read[at] = ~place[~read[at]]
    return replace(
        graph,
        operand=operand,
        inputs=chosen_inputs([*graph.inputs, *(rows for _, rows in new)], order),
        outputs=outputs,
        input_ptr=pointers(np.bincount(owner[order], minlength=graph.num_instances)),
    )


def without(graph: Graph, dropped: np.ndarray) -> Graph:
    """Returns a graph without nodes, bool[N], that no other one reads, nor an instance returns."""
    none = np.zeros(0, np.int64)
    ptr, value = np.zeros(1, np.int64), np.arange(graph.num_values)
    return rewrite(graph, Rewrite(~dropped, none, none, ptr, none, value))
