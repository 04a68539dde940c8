"""From a graph to a plan for exported programs, or to an error that says what does not fit.

Planning here does what it does for a function (see `_session.plans.pipeline`), but programs do not
grow. There is room in the results for as many instances as a minibatch may have, whatever it has.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jedbatch._export.binding import called
from jedbatch._export.programs import Variant
from jedbatch._graph.graph import Graph
from jedbatch._program.alive import Refused
from jedbatch._program.capacity import Capacity
from jedbatch._program.fit import num_instructions
from jedbatch._program.lower import Lowered, lower, narrowed
from jedbatch._program.lower_vjp import find_readers, reverse_need, reverse_table
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.placement import Placement
from jedbatch._program.plan import Static, input_name
from jedbatch._program.returned import results_of_rows


@dataclass(frozen=True)
class ExportedStatic(Static):
    """The part of a plan that is compiled.

    Attributes:
      num_instances: of the minibatch; results have room for more.
    """

    num_instances: int = 0


@dataclass(frozen=True, eq=False)
class InstanceForm:
    """The structure and the types of the result of an instance (see `InstanceOutput`)."""

    structure: Any
    types: tuple[tuple, ...]


def lowered(placed: Placement, variant: Variant) -> Lowered:
    """Returns a minibatch for a program, or raises `ValueError` if it does not fit."""
    signature = variant.signature
    cut = narrowed(placed, signature)
    excess = beyond(signature.capacity, cut.need, "readings")
    if not excess:
        found = lower(placed, signature)
        if found is not None:
            return found
        excess = {("num_instructions", None): num_instructions(placed, signature)}
    raise does_not_fit(placed, signature.capacity, excess, signature.arenas)


def lowered_reverse(
    placed: Placement, form: OutputSpec, variant: Variant
) -> tuple[np.ndarray, tuple[Refused, ...]]:
    """Returns the table of the reverse of a minibatch, and what cannot be differentiated.

    Raises:
      ValueError: it does not fit.
    """
    signature, reverse = variant.signature, variant.reverse
    assert reverse is not None
    leaves = results_of_rows(placed, form) if reverse.tells else None
    readers = find_readers(placed, signature, leaves, None, reverse.sent is not None)
    need = reverse_need(placed, readers, signature)
    excess = beyond(reverse.capacity, need)
    count = len(readers.encoded(reverse.instructions))
    if count > reverse.num_instructions:
        excess["num_instructions", None] = count
    if excess:
        raise does_not_fit(placed, reverse.capacity, excess, signature.arenas)
    return reverse_table(placed, readers, reverse), readers.refused


def beyond(capacity: Capacity, need: Capacity, *ignored: str) -> dict[tuple[str, Any], int]:
    """Returns what is needed of everything of which there is too little room."""
    return {
        (name, key): size
        for name, sizes in need.sizes.items()
        if name not in ignored
        for key, size in sizes.items()
        if capacity[name].get(key, -1) < size
    }


def does_not_fit(
    placed: Placement, capacity: Capacity, excess: Mapping[tuple[str, Any], int], arenas: Any
) -> ValueError:
    """Returns the error that says what a minibatch needs, and how much room there is."""
    parts: list[str] = []
    sizes: dict[str, int] = {}
    for (name, key), size in excess.items():
        noun, option = _described(name, key, arenas, placed)
        parts.append(
            f"{size:,} {noun}, and there is room for {max(0, capacity[name].get(key, 0)):,}"
        )
        sizes[option] = max(size, sizes.get(option, 0))
    graph = placed.graph
    more = f"; and {len(parts) - 4} sizes more" if len(parts) > 4 else ""
    return ValueError(
        f"a minibatch of {graph.num_instances} instances and {len(graph.node_type):,} nodes does "
        f"not fit the exported program: it takes {'; '.join(parts[:4])}{more}. Take smaller "
        f"minibatches, or export the model with `sizes={sizes}`."
    )


def _described(name: str, key: Any, arenas: Any, placed: Placement) -> tuple[str, str]:
    """Returns (what a size counts, the option of `export` for it)."""
    if name == "lanes":
        what = f"lanes of `{key.node_type}` (nodes, and padding of batches)"
        return what, called(key.node_type, placed.graph.types)
    if name in ("inputs", "outputs", "shared_rows"):
        kind = input_name(key)
        what = {"inputs": "inputs", "outputs": "results", "shared_rows": "values at a time"}[name]
        return f"{what} of type {kind}", kind if name == "inputs" else f"{name} {kind}"
    if name in ("readers", "input_readers"):
        return "readers of one value (1, 2, or 4 for any number)", "readers"
    if name in ("sums", "sent"):
        what = "sums of cotangents" if name == "sums" else "cotangents at a time"
        return f"{what} of type {input_name(arenas[key])}", f"{name} {input_name(arenas[key])}"
    return "instructions (runs of batches)", "instructions"


def result_kinds(graph: Graph) -> list[tuple[tuple, ...]]:
    """Returns for each instance (shape, dtype) of every output."""
    of_type = [[(t.shape, t.dtype) for t in x.results] for x in graph.types]
    ends_of_inputs = np.cumsum([len(chunk) for chunk in graph.inputs])
    nodes, slots = graph.value_node, graph.value_slot
    kinds = []
    for value in graph.outputs.tolist():
        if value < 0:
            chunk = int(np.searchsorted(ends_of_inputs, -1 - value, side="right"))
            kinds.append((graph.inputs[chunk].type.shape, graph.inputs[chunk].type.dtype))
        else:
            kinds.append(of_type[graph.node_type[nodes[value]]][slots[value]])
    ends = graph.output_ptr.tolist()
    return [tuple(kinds[a:b]) for a, b in itertools.pairwise(ends)]
