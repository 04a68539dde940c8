"""Live ranges of the results of batches: the first batch that needs their rows, and the last."""

from dataclasses import dataclass

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import pointers
from jedbatch._schedule.schedule import Schedule


@dataclass(frozen=True, eq=False)
class LiveRanges:
    """The results of every batch: one block for each of them.

    Attributes:
      batch: int64[K], which batch computes it.
      slot: int64[K], which of its results it holds.
      size: int64[K], rows, padding included.
      last: int64[K], the last batch that reads one of the rows; as many as there are batches if
        one of them is returned.
    """

    batch: np.ndarray
    slot: np.ndarray
    size: np.ndarray
    last: np.ndarray


def last_reads(graph: Graph, schedule: Schedule) -> np.ndarray:
    """int64[V], the last batch that needs each value: its own, or a reader's, or none but the end.

    The number of batches stands for the end, for values that are returned.
    """
    batch = schedule.batch
    last = batch[graph.value_node]
    read = np.flatnonzero(graph.operand >= 0)
    np.maximum.at(last, graph.operand[read], batch[graph.operand_reader[read]])
    last[graph.outputs[graph.outputs >= 0]] = len(schedule)
    return last


def find_live_ranges(graph: Graph, schedule: Schedule, padded: np.ndarray) -> LiveRanges:
    """The blocks of a schedule whose batches have so many lanes."""
    counts = graph.results_per_type.astype(np.int64)[schedule.batch_type]
    block_ptr = pointers(counts)
    batch = np.repeat(np.arange(len(schedule)), counts)
    slot = np.arange(len(batch)) - block_ptr[batch]
    last = np.empty(len(batch), np.int64)
    value_last = last_reads(graph, schedule)
    for s in range(int(counts.max(initial=0))):
        has = graph.num_results[schedule.node] > s
        of_node = np.where(has, graph.value_ptr[schedule.node] + s, 0)
        latest = np.maximum.reduceat(value_last[of_node], schedule.node_ptr[:-1])
        values = np.flatnonzero(slot == s)
        last[values] = latest[batch[values]]
    return LiveRanges(batch, slot, padded[batch], last)
