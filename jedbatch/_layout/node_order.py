"""The order of nodes inside of a batch: it says which operands are slices.

`append` leaves nodes as they were recorded. Where structures recur, this and all that follows is
the order of distinct ones: copies of a node lie next to each other (see `_session.plans.copies`).

`longest` puts nodes with the longest way still to go first. Where a type makes chains (an LSTM
over sentences), every step then reads the first rows of what the step before it wrote, whatever
the lengths. It is one sort of all nodes at once.

`reader` goes through the batches backwards and sorts each by who reads it.

`pq` plans all batches together on a PQ-tree, as ED-Batch does (see `_layout.pq_planner`).

The last two find slices in lattices too, at a price: a loop over batches, or a plan that takes
several times as long as it runs.
`auto`, the default, looks at the minibatch alone, so that results do not depend on what ran before:
`longest` for types that make chains, what they read (embeddings) in the order in which they read
it, and `append` for everything else.

Source: Chen et al., ED-Batch, ICML 2023, section 4, for adjacency and alignment.
"""

import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import int32_arrays, int64_arrays
from jedbatch._layout.pq_planner import arrange
from jedbatch._schedule.schedule import Schedule
from jedbatch._support.native import core

MIN_SORTED_SHARE = 0.2  # share of all nodes that are of such types, for anything to be sorted


def append(graph: Graph, schedule: Schedule) -> np.ndarray:
    """Nodes as they were recorded."""
    return schedule.node


def longest(graph: Graph, schedule: Schedule) -> np.ndarray:
    """Nodes with the longest path still to go first."""
    return _sorted_in_batches(schedule, schedule.node, np.ones(len(schedule), bool), -graph.height)


def auto(graph: Graph, schedule: Schedule) -> np.ndarray:
    """`longest` for types that make chains; what they read in the order in which they read it."""
    chained = graph.makes_chains
    num_chained = int(graph.nodes_per_type[chained].sum())
    if not num_chained or num_chained < MIN_SORTED_SHARE * len(schedule.node):
        return schedule.node
    in_chains = chained[schedule.batch_type]
    node = _sorted_in_batches(schedule, schedule.node, in_chains, -graph.height)
    place = np.empty(len(node), np.int32)
    place[node] = np.arange(len(node), dtype=np.int32)
    read_at = _first_reads(graph, chained, place)
    return node if read_at is None else _sorted_in_batches(schedule, node, ~in_chains, read_at)


def _first_reads(graph: Graph, chained: np.ndarray, place: np.ndarray) -> np.ndarray | None:
    """Returns int32[N], the first place of a node in a chain that reads each node outside of one.

    N if there is none; None if that is so of all nodes.

    Args:
      graph: the graph.
      chained: bool[T], types that make chains.
      place: int32[N], the place of each node.
    """
    maker, reader = graph.edges
    read_at = np.full(len(place), len(place), np.int32)
    in_chains = chained[graph.node_type]
    feeds = np.flatnonzero(in_chains[reader] & ~in_chains[maker])
    np.minimum.at(read_at, maker[feeds], place[reader[feeds]])
    return read_at if len(feeds) else None


def _sorted_in_batches(
    schedule: Schedule, node: np.ndarray, of: np.ndarray, key: np.ndarray
) -> np.ndarray:
    """Returns the nodes of a schedule with those of some batches sorted.

    Args:
      schedule: the schedule.
      node: int32[N], its nodes in some order inside of batches.
      of: bool[S], the batches to be sorted.
      key: int32[N], what to sort nodes by; those with equal keys stay as they are.
    """
    compiled = core()
    node = np.array(node, np.int32)
    if compiled is not None:
        compiled.sort_batches((node, *int64_arrays(schedule.node_ptr), of, *int32_arrays(key)))
        return node
    positions = np.flatnonzero(of[schedule.batch[node]])
    nodes = node[positions]
    node[positions] = nodes[np.lexsort((key[nodes], schedule.batch[nodes]))]
    return node


def by_reader(graph: Graph, schedule: Schedule) -> np.ndarray:
    """Nodes in the order in which they are read, by the batch that reads them first.

    Goes through the batches backwards. Those read as an earlier operand come before those read as
    a later one, and what no batch reads comes last.
    """
    reader = graph.operand_reader
    position = np.arange(len(graph.operand)) - graph.operand_ptr[reader]
    read = np.flatnonzero(graph.operand >= 0)
    maker = graph.value_node[graph.operand[read]]
    reader, position = reader[read], position[read]
    batch = schedule.batch
    order = np.lexsort((position, batch[reader], maker))
    first = order[np.flatnonzero(np.diff(maker[order], prepend=-1))]
    read_by = np.full(len(batch), -1)
    read_by[maker[first]] = reader[first]
    when = np.full(len(batch), len(schedule))
    when[maker[first]] = batch[reader[first]] * (int(position.max(initial=0)) + 1) + position[first]
    place = np.zeros(len(batch) + 1, np.int64)  # in its batch; the last is for unread ones
    node = schedule.node.copy()
    for i in reversed(range(len(schedule))):
        part = slice(schedule.node_ptr[i], schedule.node_ptr[i + 1])
        nodes = node[part]
        node[part] = nodes = nodes[np.lexsort((nodes, place[read_by[nodes]], when[nodes]))]
        place[nodes] = np.arange(len(nodes))
    return node


def planned(graph: Graph, schedule: Schedule) -> np.ndarray:
    """Nodes as the PQ-tree planner of ED-Batch arranges them.

    Its variables are nodes, since the results of a node always lie in one lane. An operand whose
    values come from more than one batch cannot be a slice and constrains nothing.
    """
    if not len(schedule):
        return schedule.node
    batch = schedule.batch
    requests = []
    batches = np.split(schedule.node, schedule.node_ptr[1:-1])
    for nodes in batches:
        operands = [nodes]
        first = graph.operand_ptr[nodes]
        for j in range(int((graph.operand_ptr[nodes + 1] - first).min())):
            values = graph.operand[first + j]
            if (values < 0).any():
                continue
            made_by = graph.value_node[values]
            if (batch[made_by] == batch[made_by[0]]).all():
                operands.append(made_by)
        requests.append([x.tolist() for x in operands])
    arrangement = arrange(len(batch), requests)
    pieces = [nodes[list(o)] for nodes, o in zip(batches, arrangement.operations, strict=True)]
    return np.concatenate(pieces)


ORDERS = {
    "append": append,
    "auto": auto,
    "longest": longest,
    "reader": by_reader,
    "pq": planned,
}


def checked_order(order: str, argument: str) -> str:
    """The order if there is one of that name; raises `ValueError` if not."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(
            f"{argument}={checks.brief(order)} names no order of nodes inside of batches; expected "
            "one of "
            f"{sorted(ORDERS)}."
        )
    return order
