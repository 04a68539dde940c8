"""`evaluate`: graphs prepared with NumPy, computed with cells.

A data loader can write down a graph once, as arrays, and keep it on disk.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import take_current_trace

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.straight import calls_of
from jedbatch._record.cell import cell, recording
from jedbatch._record.identity.functions import cell_of
from jedbatch._support.types import PyTree


def evaluate(
    graph: Graph, cells: Mapping[str, Callable[..., Any]], *shared: PyTree
) -> Sequence[PyTree]:
    """Computes every node of a prepared graph with cells.

    Inside a batched function each node is one call of a cell, functions that are no cells included;
    under a transformation inside of it, such as `jax.grad`, these are called.

    Args:
      graph: made by `Graph.from_dag` with `names`, or read by `Graph.load`.
      cells: the cell of each name. A node of type `name` computes
        `cells[name](*shared, *operands)`, where an operand is what a node returned, or a row of
        the graph's inputs.
      shared: leading arguments of every cell, such as parameters.

    Returns:
      A sequence with what each node returned, in order.

    Raises:
      TypeError: this is no graph, or the cells are no dict of functions.
      ValueError: the graph names a type that is not among `cells`, or it reads arrays of an
        instance that it was recorded of.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, jedbatch
      >>> double = jedbatch.cell(lambda x: 2 * x)
      >>> add = jedbatch.cell(lambda x, y: x + y)
      >>> graph = jedbatch.Graph.from_dag(
      ...     [0, 0, 1], [[-1], [-2], [0, 1]], names=["double", "add"],
      ...     inputs=[np.array([1.0, 5.0], np.float32)])
      >>> model = lambda g: jedbatch.evaluate(g, {"double": double, "add": add})[-1]
      >>> float(model(graph)), jedbatch.batch(model, in_axes=0)([graph, graph]).tolist()
      (12.0, [12.0, 12.0])
    """
    checked_graph("evaluate", graph)
    checks.of_type("evaluate", cells, Mapping, "a dict from the name of each type to its cell")
    if any(chunk.leaf is not None for chunk in graph.inputs):
        raise ValueError(
            "`evaluate` got a graph that was recorded, and reads arrays of its instance; expected "
            "one made by `Graph.from_dag`, which holds its inputs. To compute what was recorded, "
            "write `batched.apply(params, plan)`."
        )
    for t in graph.present_types:
        if graph.types[t].name not in cells:
            raise ValueError(
                f"`evaluate` got a graph with nodes of type {graph.types[t].name!r} and cells "
                f"{checks.brief(sorted(map(str, cells)))}; give a cell for every type, "
                f"`jedbatch.evaluate(graph, {{{graph.types[t].name!r}: ...}}, ...)`."
            )
        instead = "It computes a node from its operands."
        checks.function(
            "evaluate",
            f"cells[{graph.types[t].name!r}]",
            cells[graph.types[t].name],
            "a cell",
            instead,
        )
    functions = {t: cells[graph.types[t].name] for t in graph.present_types}
    with take_current_trace() as current:
        is_recorded = current is recording.recorder  # not under `jax.grad` inside of the function
    if is_recorded:
        functions = {t: f if cell_of(f) else cell(f) for t, f in functions.items()}
    inputs = [row for chunk in graph.inputs for row in chunk.rows]  # type: ignore[union-attr]
    values: list[PyTree] = []
    for t, operands in calls_of(graph):
        read = [values[k] if k >= 0 else inputs[~k] for k in operands]
        values.append(functions[t](*shared, *read))
    return values
