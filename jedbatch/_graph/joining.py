"""The columns of instances of several graphs, one after the other.

The twin in C is `join` in `_support/c/graph.c`.
"""

from collections.abc import Sequence

import numpy as np

from jedbatch._graph.paths import int32_arrays, int64_arrays, pointers
from jedbatch._support.native import core

NODES, OPERANDS, INPUTS, OUTPUTS, RESULTS = range(5)  # rows of pointers


def bounds_of(pointers_of: Sequence[np.ndarray]) -> list[bytes]:
    """Returns where the rows of each instance begin and end: int64[5, 2] of each, as bytes.

    Args:
      pointers_of: int64[B + 1] of nodes, operands, inputs, outputs and results.
    """
    ends = np.stack(pointers_of, axis=1, dtype=np.int64)
    raw = np.stack([ends[:-1], ends[1:]], axis=2).tobytes()
    size = 10 * ends.itemsize
    return [raw[i : i + size] for i in range(0, len(raw), size)]


def join(
    graphs: Sequence[Sequence[np.ndarray]], which: Sequence[int], bounds: Sequence[bytes]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the columns of the union of some instances, and int64[5, P + 1] pointers to them.

    Args:
      graphs: the columns of each graph: `node_type`, `operand_ptr`, `operand`, `outputs`, and
        int32[N] that are carried over.
      which: the graph of each instance, P of them.
      bounds: of each instance in its graph (see `bounds_of`).

    Returns:
      (columns as those of a graph; where nodes, operands, inputs, outputs and results of each
      instance begin).
    """
    places = np.empty((len(which), 11), np.int64)
    places[:, :10] = np.frombuffer(b"".join(bounds), np.int64).reshape(len(which), 10)
    places[:, 10] = which
    ptr = np.zeros((5, len(which) + 1), np.int64)
    np.cumsum((places[:, 1:10:2] - places[:, 0:10:2]).T, axis=1, out=ptr[:, 1:])
    compiled = core()
    if compiled is None:
        return _join_in_python(graphs, places, ptr), ptr
    num_nodes, num_operands, _, num_outputs, _ = ptr[:, -1].tolist()
    carried = [np.empty(num_nodes, np.int32) for _ in graphs[0][4:]]
    columns = [
        np.empty(num_nodes, np.int32),
        np.empty(num_nodes + 1, np.int64),
        np.empty(num_operands, np.int32),
        np.empty(num_outputs, np.int32),
        *carried,
    ]
    given = [
        (
            *int32_arrays(node_type),
            *int64_arrays(operand_ptr),
            *int32_arrays(operand, outputs, *more),
        )
        for node_type, operand_ptr, operand, outputs, *more in graphs
    ]
    compiled.join(given, (places, *columns))
    return columns, ptr


def _join_in_python(
    graphs: Sequence[Sequence[np.ndarray]], places: np.ndarray, ptr: np.ndarray
) -> list[np.ndarray]:
    """Returns the columns of the union."""
    rows = places.tolist()
    first = places[:, 0:10:2]

    def join_column(number: int, column: int) -> np.ndarray:
        begin, end = 2 * column, 2 * column + 1
        return np.concatenate([graphs[r[10]][number][r[begin] : r[end]] for r in rows])

    up = ptr[RESULTS, :-1] - first[:, RESULTS]
    down = ptr[INPUTS, :-1] - first[:, INPUTS]

    def moved(references: np.ndarray, ends: np.ndarray) -> np.ndarray:
        counts = np.diff(ends)
        shift = np.where(references >= 0, np.repeat(up, counts), -np.repeat(down, counts))
        return (references + shift).astype(np.int32)

    sizes = np.concatenate([np.diff(graphs[r[10]][1][r[0] : r[1] + 1]) for r in rows])
    carried = [join_column(4 + i, NODES) for i in range(len(graphs[0]) - 4)]
    return [
        join_column(0, NODES),
        pointers(sizes),
        moved(join_column(2, OPERANDS), ptr[OPERANDS]),
        moved(join_column(3, OUTPUTS), ptr[OUTPUTS]),
        *carried,
    ]
