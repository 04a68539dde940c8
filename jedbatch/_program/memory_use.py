"""Bytes that the results of a minibatch take, and how they are written."""

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.storage import row_bytes, stored
from jedbatch._layout.allocator import live_bound
from jedbatch._layout.live_ranges import last_reads
from jedbatch._program.placement import Placement
from jedbatch._schedule.schedule import Schedule


def held_bytes(placed: Placement) -> tuple[int, int]:
    """(bytes kept for results, bytes if every lane had rows of its own), padding included."""
    layout = placed.layout
    once = sum(
        int(layout.lanes[t]) * kernel.result_bytes
        for t, kernel in zip(placed.type_ids, placed.kernels, strict=True)
    )
    if not placed.reuse:
        return once, once
    rows = zip(layout.rows.tolist(), placed.arenas, strict=True)
    return sum(n * row_bytes(kind) for n, kind in rows), once


def live_bytes(graph: Graph, schedule: Schedule) -> int:
    """Most bytes of results alive at the same time, without padding.

    A result is alive from the batch that computes it to the last that reads it, or to the end if
    it is returned. No allocation can do with less.
    """
    per_result = [
        row_bytes(stored(t)) if count else 0
        for node_type, count in zip(graph.types, graph.nodes_per_type, strict=True)
        for t in node_type.results
    ]
    first = np.cumsum([0] + [len(t.results) for t in graph.types])[graph.node_type]
    weight = np.array(per_result, np.int64)[first[graph.value_node] + graph.value_slot]
    born = schedule.batch[graph.value_node]
    return live_bound(weight, born, last_reads(graph, schedule))


def size(num_bytes: float) -> str:
    """Bytes for people."""
    units = ["B", "kB", "MB", "GB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        del units[0]
    return f"{num_bytes:.3g} {units[0]}"
