"""The invariants of graphs, such as those that come from files."""

from typing import Any

import numpy as np


def check_invariants(graph: Any) -> None:
    """Raises `ValueError` unless every invariant of a `Graph` holds."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"not a valid graph: {what}")

    num_nodes, num_inputs = len(graph.node_type), graph.num_inputs
    in_range = (graph.node_type >= 0) & (graph.node_type < len(graph.types))
    require(bool(in_range.all()), "`node_type` has an id that is not in `types`")
    require(len(graph.operand_ptr) == num_nodes + 1, "`operand_ptr` needs N + 1 entries")
    require(int(graph.operand_ptr[0]) == 0, "`operand_ptr` must start at 0")
    counts = np.diff(graph.operand_ptr)
    require(bool((counts >= 0).all()), "`operand_ptr` decreases")
    require(int(graph.operand_ptr[-1]) == len(graph.operand), "`operand_ptr` must end at E")
    reader = np.repeat(np.arange(num_nodes), counts)
    late = np.flatnonzero(graph.operand >= graph.value_ptr[reader])
    if len(late):
        k = late[0]
        require(
            False,
            f"node {reader[k]} reads {graph.operand[k]}, which does not come before it; "
            "list nodes so that operands precede their readers",
        )
    for name in ("operand", "outputs"):
        low = int(getattr(graph, name).min(initial=0))
        high = int(getattr(graph, name).max(initial=-1))
        require(
            low >= -num_inputs,
            f"`{name}` names input {-1 - low} of {num_inputs} inputs",
        )
        require(high < graph.num_values, f"`{name}` names result {high} of {graph.num_values}")
    for name, end in (
        ("node_ptr", num_nodes),
        ("input_ptr", num_inputs),
        ("output_ptr", len(graph.outputs)),
    ):
        ptr = getattr(graph, name)
        rising = bool((np.diff(ptr) >= 0).all())
        require(rising and ptr[0] == 0 and ptr[-1] == end, f"`{name}` must rise from 0 to {end}")
    for t in graph.present_types:
        node_type = graph.types[t]
        if node_type.operation is not None:
            arity = counts[graph.node_type == t]
            require(
                bool((arity == len(node_type.operands)).all()),
                f"a node of type {node_type.name} has {arity.max()} operands and its type "
                f"{len(node_type.operands)}",
            )
