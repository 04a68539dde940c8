"""Schedules by component of types, and by rank.

Types that do not read each other in a circle do not compete: if no node of type b comes before one
of type a, all of a may run before any of b. So a graph falls into *components* of types that can be
scheduled in sequence, and the fewest batches of the whole are the sum of the fewest of each
(`by_component`). And in a component of one type, all nodes with as many others before them run
together, in as many batches as the bound says (`by_rank`). Chains and trees consist of such
components; so does much of everything else.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jedbatch._graph.analysis import MANY_TYPES, MIN_CHAINED_SHARE
from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import int32_arrays, int64_arrays, pointers
from jedbatch._schedule.schedule import Schedule, cost, longest_by_type, schedule_of
from jedbatch._support.native import core

BY_RANK = "by rank"  # the policy of such schedules


def by_component(
    graph: Graph,
    solve: Callable[[Graph], Schedule],
    weights: np.ndarray | None = None,
    *,
    needs_chains: bool = False,
) -> Schedule:
    """Schedules one component of types after the other.

    Components of one type are run by rank, which is optimal; `solve` schedules the others, most
    often as bare graphs. If it is optimal, so is the whole. Bounds add up; those of components run
    by rank are what they cost, at float[T] `weights` for a batch of each type, or one.

    If it `needs_chains`, those of all components are found at once, and kept for instances that
    come again.
    """
    batches = _alone_by_rank(graph)
    if batches is not None:
        return batches if weights is None else replace(batches, bound=cost(batches, weights))
    if needs_chains:
        _ = graph.chain
    components = graph.components
    if len(components) == 1 and len(graph.types) == len(components[0]):
        return solve(graph)
    rank = graph.rank_alone
    longest = longest_by_type(graph, rank).tolist()
    first = np.zeros(len(graph.types), np.int32)  # batch of each type that is alone
    parts: list[tuple[np.ndarray, Schedule, int]] = []  # of others: nodes, batches, the first one
    batch_types, bound, unseen, name = [np.zeros(0, np.int32)], 0.0, 0, ""
    start = 0
    for types in components:
        if len(types) == 1:
            (t,) = types
            first[t] = start
            batch_types.append(np.full(longest[t], t, np.int32))
            start += longest[t]
            bound += longest[t] if weights is None else float(np.full(longest[t], weights[t]).sum())
            continue
        nodes, part = graph.restrict(types)
        batches = solve(part)
        name = name or batches.policy
        parts.append((nodes, batches, start))
        batch_types.append(np.array(types, np.int32)[batches.batch_type])
        start += len(batches)
        bound += batches.bound
        unseen += batches.unseen
    when = first[graph.node_type] + rank
    for nodes, batches, begin in parts:
        when[nodes] = begin + batches.batch
    return schedule_of(np.concatenate(batch_types), when, name, bound=bound, unseen=unseen)


def by_rank(graph: Graph) -> Schedule | None:
    """Nodes of equal type and rank as batches; None if these would wait for each other.

    There are as many such batches as the lower bound says, so the schedule is optimal. It exists
    for chains and trees, whatever their outputs and reductions, and costs no search.
    """
    batches = _alone_by_rank(graph)
    if batches is not None:
        return batches
    longest = longest_by_type(graph)
    start = pointers(longest)
    num_groups = int(start[-1])
    group = start[graph.node_type] + graph.rank
    order = _sorted_groups(graph, group, num_groups)
    if len(order) < num_groups:
        return None
    place = np.empty(num_groups, np.int32)
    place[order] = np.arange(num_groups, dtype=np.int32)
    types = np.repeat(np.arange(len(graph.types), dtype=np.int32), longest)
    return schedule_of(types[order], place[group], BY_RANK, bound=num_groups)


def _alone_by_rank(graph: Graph) -> Schedule | None:
    """The same, one type after the other; None if types read each other in a circle."""
    if core() is not None and len(graph.types) <= MANY_TYPES:
        return _compiled_by_rank(graph, core())
    if any(len(types) > 1 for types in graph.components):
        return None
    longest = longest_by_type(graph)
    alone = np.array([t for (t,) in graph.components], np.int32)
    first = np.zeros(len(graph.types), np.int32)
    first[alone] = pointers(longest[alone])[:-1]
    when, types = first[graph.node_type] + graph.rank, np.repeat(alone, longest[alone])
    return schedule_of(types, when, BY_RANK, bound=len(types))


def _compiled_by_rank(graph: Graph, compiled: Any) -> Schedule | None:
    """The same, with what is found on the way: edges, relations of types, chains and ranks."""
    num_nodes, num_types = len(graph.node_type), len(graph.types)
    read = int64_arrays(graph.operand_ptr)[0], int32_arrays(graph.operand)[0]
    ptr, batch_ptr = np.empty((2, num_nodes + 1), np.int64)
    maker, reader = np.empty((2, len(graph.operand)), np.int32)
    rank, when, node, types = np.empty((4, num_nodes), np.int32)
    in_chains = np.empty(num_types, bool)
    reads, reaches = np.empty((2, num_types, num_types), bool)
    given = *int32_arrays(graph.node_type, graph.results_per_type), *read
    found = ptr, maker, reader, rank, when, batch_ptr, node, types, in_chains, reads, reaches
    num_edges, num_batches = compiled.rank_batches(MIN_CHAINED_SHARE, (*given, *found))
    known = graph.__dict__
    known["_edges"] = ptr, maker[:num_edges], reader[:num_edges]
    known["_relations"] = reaches, reads.diagonal()
    known["makes_chains"] = in_chains
    if num_batches < 0:
        known.setdefault("rank_alone", rank)
        return None
    known["rank"] = rank
    types = types[:num_batches]
    return Schedule(types, batch_ptr[: num_batches + 1], node, BY_RANK, num_batches)


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
        for later in readers[ptr[g] : ptr[g + 1]]:
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    return np.array(order, np.int64)
