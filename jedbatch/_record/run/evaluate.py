"""`evaluate`: graphs prepared with NumPy, computed with cells.

A data loader can write down a graph once, as arrays, and keep it on disk; recording it later takes
one look at each *kind* of call in it, not one at each node.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.straight import calls_of, inputs_of, straight
from jedbatch._record.cell import Cell, recording
from jedbatch._record.identity.functions import cell_of
from jedbatch._record.instances.arrays import array_type
from jedbatch._record.operations.symbols import Value, row_index
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.types.registry import CallSpec
from jedbatch._support.types import PyTree


def record_graph(
    recorder: Recorder, graph: Graph, cells: Sequence[Any], shared: tuple
) -> "Results | None":
    """Records a whole graph, whose type t is `cells[t]`.

    Returns None, and records nothing, where cells read more than shared values and operands: values
    of the instance, or of a transformation that runs inside of the function.
    """
    first_input = len(recorder.input_group)
    kinds: list[int] = []
    for chunk in graph.inputs:
        assert chunk.rows is not None
        _, dtype, weak = array_type(chunk.rows)
        kind = recorder.registry.value_type(chunk.type.shape, dtype, weak)
        recorder.input_group += [recorder.registry.group("value", kind)] * len(chunk)
        recorder.input_value += chunk.rows.tolist() if chunk.rows.ndim == 1 else list(chunk.rows)
        kinds += [kind] * len(chunk)

    # Every operand is described by the call spec that made it, or by the input's type.
    made_by: dict[int, CallSpec] = {}
    operand, ptr, node_type = graph.operand, graph.operand_ptr, graph.node_type
    described = np.empty(len(operand), np.int64)
    inputs = operand < 0
    described[inputs] = -1 - np.array(kinds, np.int64)[-1 - operand[inputs]]
    described[~inputs] = node_type[operand[~inputs]]

    def stand_in(origin: int) -> PyTree:
        if origin < 0:
            return Value(recorder, -1, -1 - origin)
        maker = made_by[origin]
        values = [Value(recorder, 0, kind) for kind in maker.results]
        return values[0] if maker.tree is None else jax.tree.unflatten(maker.tree, values)

    arity = np.diff(ptr)
    most = int(arity.max(initial=0))
    forms = np.full((len(node_type), 1 + most), np.iinfo(np.int64).min)
    forms[:, 0] = node_type
    forms[:, 1:][np.arange(most) < arity[:, None]] = described
    distinct, first, which = np.unique(forms, axis=0, return_index=True, return_inverse=True)
    call_specs: list[Any] = [None] * len(distinct)
    for d in np.argsort(first).tolist():  # makers come before readers
        t, *operands = distinct[d][: 1 + int(arity[first[d]])].tolist()
        args = [stand_in(what) for what in operands]
        recorded = recorder.cell_call_spec(cells[t], (*shared, *args), {})
        num_values = sum(1 if w < 0 else len(made_by[w].results) for w in operands)
        if recorded is None or len(recorded[1]) != num_values:
            del recorder.input_group[first_input:], recorder.input_value[first_input:]
            return None
        call_spec = call_specs[d] = recorded[0].call_spec
        same = made_by.setdefault(t, call_spec)
        if (same.results, same.tree) != (call_spec.results, call_spec.tree):
            raise TypeError(
                f"cell `{cells[t].name}` returns values of different shapes or dtypes at "
                "different nodes of a prepared graph; expected the same at all of them. Give "
                "them different types, or call the cells from Python."
            )
    which = which.ravel()
    ids = np.array([c.node_type for c in call_specs], np.int64)[which]
    sizes = np.array([len(c.results) for c in call_specs], np.int64)[which]
    starts = recorder.num_values + pointers(sizes)
    references = np.where(inputs, operand - first_input, starts[operand])
    references = ranges(references, np.where(inputs, 1, sizes[operand]))
    recorder.call_specs += ids.tolist()
    recorder.references += references.tolist()
    recorder.num_values = int(starts[-1])
    return Results(recorder, [made_by[t] for t in node_type.tolist()], starts[:-1])


class Results(Sequence):
    """The results of every node of an evaluated graph."""

    def __init__(self, recorder: Recorder, call_specs: Sequence[CallSpec], starts: np.ndarray):
        self._recorder = recorder
        self._call_specs = call_specs
        self._starts = starts

    def __len__(self) -> int:
        return len(self._call_specs)

    def __getitem__(self, item: Any) -> PyTree:
        if isinstance(item, slice):
            return [self[i] for i in range(*item.indices(len(self)))]
        item = row_index(item, len(self))
        call_spec, start = self._call_specs[item], int(self._starts[item])
        values = [Value(self._recorder, i, kind) for i, kind in enumerate(call_spec.results, start)]
        return values[0] if call_spec.tree is None else jax.tree.unflatten(call_spec.tree, values)


def evaluate(
    graph: Graph, cells: Mapping[str, Callable[..., Any]], *shared: PyTree
) -> Sequence[PyTree]:
    """Computes every node of a prepared graph with cells.

    Inside a batched function all nodes are recorded at once, without running Python per node.
    Outside, or where cells read values of the instance besides their operands, or inside of a
    transformation such as `jax.grad` or `jax.vmap`, the cells are called one by one.

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
    by_type = [cells.get(t.name) for t in graph.types]
    if recording.recorder is not None:
        cells_of_types = [
            cell_of(c) or (c and Cell(c, getattr(c, "__name__", t.name)))
            for c, t in zip(by_type, graph.types, strict=True)
        ]
        recorded = record_graph(recording.recorder, graph, cells_of_types, shared)
        if recorded is not None:
            return recorded
    inputs = inputs_of(row for chunk in graph.inputs for row in chunk.rows)  # type: ignore[union-attr]

    def run(t: int, operands: Sequence[PyTree]) -> list[PyTree]:
        return [cells[graph.types[t].name](*shared, *operands)]

    values = straight(calls_of(graph), inputs, run)
    return [values[n] for n in range(len(graph.node_type))]
