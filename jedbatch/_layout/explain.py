"""The text of `Layout.explain`: how each batch reads its operands, and why."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._layout.access import GATHER, NAMES, find_modes
from jedbatch._schedule.schedule import Schedule


class LaidOut(Protocol):
    """The attributes of a `Layout` that are read here, with letters as there."""

    @property
    def graph(self) -> Graph: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def node(self) -> np.ndarray: ...

    @property
    def rows(self) -> np.ndarray: ...

    @property
    def values(self) -> tuple[np.ndarray, np.ndarray]: ...


def explain(layout: LaidOut) -> str:
    """Per batch and operand: slice or gather, and why."""
    graph, schedule = layout.graph, layout.schedule
    sizes = np.diff(schedule.node_ptr)
    space, row = _places(layout)
    lines: list[tuple[str, list[str]]] = []
    for i, t in enumerate(schedule.batch_type.tolist()):
        nodes = layout.node[schedule.node_ptr[i] : schedule.node_ptr[i + 1]]
        first = graph.operand_ptr[nodes]
        arity = int((graph.operand_ptr[nodes + 1] - first).min())
        operands = (graph.operand[first + j] for j in range(arity))
        words = [_explain_operand(layout, values, space, row) for values in operands]
        lines.append((graph.types[t].name, words))
    text = [str(layout), "  batches      nodes        type: how each operand is read"]
    begin = 0
    for i in range(1, len(lines) + 1):
        if i < len(lines) and lines[i] == lines[begin]:
            continue
        name, words = lines[begin]
        which = f"{begin}" if i == begin + 1 else f"{begin}–{i - 1}"
        most, least = int(sizes[begin:i].max()), int(sizes[begin:i].min())
        count = f"{most}" if most == least else f"{least}–{most}"
        text.append(f"  {which:11}  {count:11}  {name}: {_counted(words) or 'reads nothing'}")
        begin = i
    return "\n".join(text)


def _places(layout: LaidOut) -> tuple[np.ndarray, np.ndarray]:
    """(int64[V + I], int64[V + I]): space and row of every value and input; input i is at -1 - i.

    Inputs of one shape and dtype have a space, beyond those of results.
    """
    graph = layout.graph
    space, row = (np.append(x, np.zeros(graph.num_inputs, np.int64)) for x in layout.values)
    kinds: dict[Any, int] = {}
    spaces: dict[Any, int] = {}
    first = 0
    for chunk in graph.inputs:
        kind = chunk.type.shape, chunk.type.dtype
        inputs = -1 - np.arange(first, first + len(chunk))
        space[inputs] = len(layout.rows) + kinds.setdefault(kind, len(kinds))
        row[inputs] = spaces.get(kind, 0) + np.arange(len(chunk))
        spaces[kind] = spaces.get(kind, 0) + len(chunk)
        first += len(chunk)
    return space, row


def _counted(words: Sequence[str]) -> str:
    """The words in a row, equal neighbours once: `0–1 slice · 2 gather (...)`."""
    parts = []
    begin = 0
    for j in range(1, len(words) + 1):
        if j == len(words) or words[j] != words[begin]:
            which = f"{begin}" if j == begin + 1 else f"{begin}–{j - 1}"
            parts.append(f"{which} {words[begin]}")
            begin = j
    return " · ".join(parts)


def _explain_operand(
    layout: LaidOut, values: np.ndarray, space: np.ndarray, row: np.ndarray
) -> str:
    """Returns a line that says how one operand of one batch is read over its live lanes."""
    inputs = values < 0
    if inputs.any() and not inputs.all():
        return "gather (inputs and results)"
    if len(np.unique(space[values])) == 1:
        everything = np.full((1, 1), len(values))
        mode = int(find_modes(row[values][None], np.zeros(1, np.int64), everything)[0, 0])
        if mode != GATHER:
            return NAMES[mode]
    if len(np.unique(values)) < len(values):
        return "gather (some rows more than once)"
    if inputs.all():
        return "gather (inputs lie in the order of instances)"
    graph = layout.graph
    batches = len(np.unique(layout.schedule.batch[graph.value_node[values]]))
    if batches > 1:
        return f"gather (from {batches} batches)"
    return "gather (in another order than they were computed)"
