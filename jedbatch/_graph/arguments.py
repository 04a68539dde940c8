"""Checks of the arrays that `Graph.from_dag` is given.

Each returns the arrays of a graph, or raises a `TypeError` or `ValueError` that says what came,
what was expected and what to write instead.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jedbatch import checks
from jedbatch._graph.paths import pointers

CALLER = "Graph.from_dag"
MAX_UNUSED_TYPES = 1 << 20  # ids without nodes that a graph may have


def checked_operands(preds: object) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64[N + 1], int32[E]), the operands of each node, from lists or a CSR pair."""
    if isinstance(preds, tuple) and len(preds) == 2 and hasattr(preds[0], "dtype"):
        ptr = checks.whole_array(CALLER, "the pointers of `preds`", preds[0], np.int64)
        return ptr, checks.whole_array(CALLER, "`preds`", preds[1])
    rows = checks.items(CALLER, "preds", preds, "a list of lists, or a pair of arrays")
    for row in rows:
        if isinstance(row, str) or not hasattr(row, "__len__") or not getattr(row, "ndim", 1):
            raise TypeError(
                checks.wrong(CALLER, f"{checks.brief(row)} in `preds`", "lists of nodes")
            )
    ptr = pointers(np.fromiter(map(len, rows), np.int64, len(rows)))
    flat = list(itertools.chain.from_iterable(rows))
    return ptr, checks.whole_array(CALLER, "`preds`", flat)


def checked_names(names: Sequence[str] | None, node_type: np.ndarray) -> Sequence[str]:
    """Returns a name for every id of a type among int32[N]."""
    num_types = int(node_type.max(initial=-1)) + 1
    if num_types > MAX_UNUSED_TYPES + len(node_type):
        raise ValueError(
            f"`{CALLER}` got type id {num_types - 1} among {len(node_type)} nodes; ids "
            "may have gaps, but there is a type for every id below the largest. Number types "
            "from 0: `numpy.unique(node_type, return_inverse=True)[1]`."
        )
    if names is None:
        return [f"type {t}" for t in range(num_types)]
    names = checks.names(CALLER, "names", names)
    if len(names) < num_types:
        raise ValueError(
            f"`{CALLER}` got type id {num_types - 1} and {len(names)} names; "
            "give a name for every id."
        )
    return names


def checked_rows(rows: object) -> np.ndarray:
    """Returns an array whose rows are inputs."""
    array = np.asarray(rows)
    not_numbers = (np.object_, np.character, np.datetime64, np.timedelta64, np.void)
    if not array.ndim or issubclass(array.dtype.type, not_numbers):
        raise TypeError(
            f"`{CALLER}` got inputs {checks.brief(rows)} of dtype {array.dtype} with {array.ndim} "
            "axes; expected a list of arrays of numbers, whose rows along the first axis are the "
            "inputs, as in `inputs=[np.array([1.0, 5.0], np.float32)]`."
        )
    return array
