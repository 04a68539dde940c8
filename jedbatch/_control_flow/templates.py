"""Templates of rounds, made of rounds that ran (see `_program.round_template`)."""

import collections

import numpy as np

from jedbatch._control_flow.recorded import Recorded
from jedbatch._control_flow.recorded_graph import RecordedGraph
from jedbatch._graph.paths import distinct, pointers, ranges
from jedbatch._program.placement import Placement
from jedbatch._program.round_template import NOT_RUN, RoundTemplate, TemplateInputs, find_sources


def template_of(
    graph: RecordedGraph, new: Recorded, nodes: np.ndarray, placed: Placement, values: np.ndarray
) -> RoundTemplate | None:
    """Returns the template of the round that ran last; None if it cannot be repeated.

    A round that runs nodes of earlier rounds cannot.

    Args:
      graph: all that was recorded.
      new: what was recorded since the round before.
      nodes: those that ran.
      placed: the same in batches.
      values: what was wanted.
    """
    first, registry, layout = new.first, graph.recorder.registry, placed.layout
    place, operand = new.node_places(nodes), new.counted(graph.operands_of(nodes))
    inputs = distinct(-1 - first.inputs - operand[operand < -first.inputs])
    groups = distinct(new.groups[inputs]).tolist()
    if (place < 0).any():
        return None
    num_nodes, num_values = len(new.calls), new.num_values
    own_nodes, own_values = (
        new.nodes_at(np.arange(num_nodes)),
        new.values_at(np.arange(num_values)),
    )
    value_node = graph.value_node.array[own_values]
    source, old = find_sources(operand, first.values, first.inputs, num_values, inputs)
    arity = np.diff(graph.operand_ptr.array)[own_nodes]
    places = ranges(pointers(arity)[place], arity[place])[old]
    node_type = graph.node_type.array
    kernel = np.zeros(len(registry.types), np.int64)
    kernel[list(placed.type_ids)] = np.arange(len(placed.type_ids))
    position = np.full(num_nodes, -1)
    position[place] = np.arange(len(nodes))
    runs = position[new.node_places(value_node)]
    slot = own_values - graph.value_ptr.array[value_node]
    pending = node_type[own_nodes[position < 0]]
    return RoundTemplate(
        placed,
        place,
        np.where(runs < 0, 0, kernel[node_type[value_node]]),
        np.append(layout.lane, NOT_RUN)[runs],
        np.where(runs < 0, 0, slot),
        source,
        places,
        inputs,
        len(new.groups),
        tuple([_inputs_of(graph, new, inputs, g) for g in groups]),
        {kind: new.value_places(own) for kind, own in graph.by_kind(values).items()},
        collections.Counter(pending.tolist()),
    )


def _inputs_of(
    graph: RecordedGraph, new: Recorded, inputs: np.ndarray, group: int
) -> TemplateInputs:
    """Returns those among the inputs of a round that belong to a group."""
    registry = graph.recorder.registry
    value_type = registry.value_types[registry.groups[group][1]]
    places = np.flatnonzero(new.groups[inputs] == group)
    numbers, (is_brought,) = inputs[places].tolist(), graph.is_brought([group])
    return TemplateInputs(value_type, graph.kind_of_group(group), places, numbers, is_brought)
