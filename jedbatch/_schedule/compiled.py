"""Algorithm 1 by the compiled core, for the policies of this package.

The core runs a graph to its end at once (`_support/c/frontier.c`); here it is given what
`_schedule.frontier` computes when it is asked for, as arrays.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import int32_arrays
from jedbatch._graph.structures import weight_of
from jedbatch._schedule.encodings import ENCODINGS, Code
from jedbatch._schedule.frontier import Frontier, nodes_by_type
from jedbatch._support.native import core

AHEAD = ("height", "critical")  # heuristics that look at heights and chains alone
NUMBERS = {"agenda": 0, "height": 1, "critical": 2, "sufficient": 3}  # of heuristics


def run_compiled(
    graph: Graph,
    heuristic: str,
    encoding: str = "base",
    table: Mapping[Code, int] | None = None,
    numbers: Sequence[int] = (),
) -> tuple[list[int], np.ndarray, int] | None:
    """Cuts a graph into batches; None if there is no compiled core.

    Args:
      graph: what to schedule.
      heuristic: the name of a heuristic, which decides where `table` does not.
      encoding: what the codes of `table` mean.
      table: the type to run by the code of a frontier, in a machine's numbers.
      numbers: the machine's numbers of the types.

    Returns:
      (type of each batch, int32[N] the batch of each node, batches left to the heuristic).
    """
    compiled = core()
    if compiled is None or not len(graph.node_type):
        return None
    succ_ptr, succ = graph.succs
    when = np.empty(len(graph.node_type), np.int32)
    looks = heuristic in AHEAD or (table is not None and encoding == "phase")
    arrays = (
        succ_ptr,
        succ,
        *int32_arrays(graph.node_type),
        when,
        *((graph.height, graph.chain) if looks else [None] * 2),
        *(_of_depths(graph) if heuristic == "agenda" else [None] * 2),
        *(_of_chains(graph) if heuristic == "sufficient" else [None] * 4),
        None if table is None else np.array(numbers, np.int64),
        weight_of(graph),
    )
    codes = list(ENCODINGS).index(encoding)
    batch_types, unseen = compiled.schedule(
        len(graph.types), NUMBERS[heuristic], codes, table, arrays
    )
    return batch_types, when, unseen


def _of_depths(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """(depths, float64[T] their sums)."""
    weight = weight_of(graph)
    depth = graph.depth if weight is None else graph.depth * weight
    return graph.depth, np.bincount(graph.node_type, depth, len(graph.types))


def _of_chains(graph: Graph) -> tuple[np.ndarray, ...]:
    """(row of `blockers` of each type, whether they are relayed, blockers, nodes next)."""
    chains = Frontier(graph).chains
    chain_of = np.full(len(graph.types), -1)
    chain_of[list(chains.blockers)] = np.arange(len(chains.blockers))
    num_next = nodes_by_type(graph).copy()
    num_next[list(chains.sizes)] = list(chains.sizes.values())
    relayed = np.zeros(len(graph.types), np.uint8)
    relayed[list(chains.relayed)] = 1
    blockers = np.array([*chains.blockers.values()], np.int64)
    return chain_of, relayed, blockers.reshape(-1, len(graph.node_type)), num_next
