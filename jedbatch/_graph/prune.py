"""Graphs of imperative code: without nodes that are not read, and cut where no edge leads across.

A lazy scope records one long graph. Some of it was computed in vain, and mostly it is one instance
after the other, which the code does not say; how many there are says how much minibatches vary.
"""

from dataclasses import replace

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.rewrite import without


def without_unread(graph: Graph) -> Graph:
    """The graph without nodes that no output depends on. Inputs stay as they are."""
    read = np.zeros(graph.num_values, bool)
    for references in (graph.operand, graph.outputs):
        read[references[references >= 0]] = True
    first = graph.value_ptr[:-1]
    if not len(first) or np.logical_or.reduceat(read, first).all():
        return graph
    is_read = [False] * len(graph.node_type)
    maker = graph.value_node.tolist()
    for value in graph.outputs[graph.outputs >= 0].tolist():
        is_read[maker[value]] = True
    ptr, operands = graph.operand_ptr.tolist(), graph.operand.tolist()
    for node in reversed(range(len(is_read))):
        if is_read[node]:
            for value in operands[ptr[node] : ptr[node + 1]]:
                if value >= 0:
                    is_read[maker[value]] = True
    return without(graph, ~np.array(is_read))


def cut_apart(graph: Graph) -> Graph:
    """The graph of one instance as many, cut wherever no edge leads across.

    All inputs and outputs are said to be the first one's: they may be anybody's.
    """
    num_nodes = len(graph.node_type)
    maker, reader = graph.edges
    opened = np.bincount(maker, minlength=num_nodes) - np.bincount(reader, minlength=num_nodes)
    ends = np.flatnonzero(np.cumsum(opened) == 0) + 1
    node_ptr = np.concatenate([[0], ends])

    def all_first(count: int) -> np.ndarray:
        return np.concatenate([[0], np.full(len(ends), count)])

    return replace(
        graph,
        node_ptr=node_ptr,
        input_ptr=all_first(graph.num_inputs),
        output_ptr=all_first(len(graph.outputs)),
    )
