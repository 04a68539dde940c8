"""All rounds of a call as one graph and one schedule, as the reverse undoes them at once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jedbatch._control_flow.recorded_graph import RecordedGraph
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers
from jedbatch._jaxpr.storage import Kind
from jedbatch._program.placement import Placement
from jedbatch._schedule.schedule import Schedule


def as_one(
    recorded: RecordedGraph,
    rounds: Sequence[tuple[np.ndarray, Placement]],
    chunks: Sequence[tuple[InputRows, int, np.ndarray]],
    returned: Mapping[Kind, Sequence[int]],
) -> tuple[np.ndarray, Graph, Schedule, dict[Kind, list[int]]]:
    """Returns (the nodes that ran, their graph, its batches, what each arena returns).

    Args:
      recorded: all that was recorded.
      rounds: the nodes of each, and the same in batches.
      chunks: inputs in the order of their rows, with the instance and the numbers of each chunk.
      returned: values by arena, as they were recorded; in the result, as they are in the graph.
    """
    recorded.take_up()
    nodes = np.concatenate([round_nodes for round_nodes, _ in rounds])
    nodes = nodes[np.lexsort((nodes, recorded.node_owner.array[nodes]))]
    order = [numbers for _, _, numbers in chunks]
    place = np.full(len(recorded.input_row), -1)
    inputs = np.concatenate(order) if order else np.zeros(0, np.int64)
    place[inputs] = np.arange(len(inputs))
    local_node = np.full(len(recorded.node_type), -1)
    local_node[nodes] = np.arange(len(nodes))
    part = recorded.part(nodes)
    value = np.full(len(recorded.value_node), -1)
    value[recorded.values_of(nodes)] = np.arange(part.num_values)

    def moved(references: np.ndarray) -> np.ndarray:
        inner = references >= 0
        new_references = np.empty(len(references), np.int32)
        new_references[inner] = value[references[inner]]
        new_references[~inner] = -1 - place[-1 - references[~inner]]
        return new_references

    read = recorded.operands_of(nodes)
    graph = replace(part, operand=moved(read), inputs=tuple(chunk for chunk, _, _ in chunks))
    schedules = [placed.schedule for _, placed in rounds]
    sizes = np.concatenate([np.diff(s.node_ptr) for s in schedules])
    batches = [local_node[own[placed.schedule.node]] for own, placed in rounds]
    every = Schedule(
        np.concatenate([s.batch_type for s in schedules]),
        pointers(sizes),
        np.concatenate(batches).astype(np.int32),
    )
    return nodes, graph, every, {k: moved(np.array(v)).tolist() for k, v in returned.items()}
