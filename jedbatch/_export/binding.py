"""Graphs of other origin as graphs of the node types of an exported model.

A type is found by its identity, which graphs that `Batched.graph` recorded bring along, or by name.
In a graph that was written down by hand, or by `Graph.from_dag`, an entry names a node and stands
for all of its results, in order, as where a cell takes what another one returned.
"""

import collections
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jedbatch import checks
from jedbatch._graph.arguments import checked_operands, checked_rows
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers, ranges
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.storage import Kind, is_key, stored

MAX_NAMED = 8  # types in a message


class NodeTypes:
    """The node types of an exported model, and how graphs are bound to them.

    Attributes:
      types: in order.
    """

    def __init__(self, types: Sequence[NodeType]):
        self.types = tuple(types)
        numbers = {t: t for t in range(len(self.types))}
        self._by_identity = {self.types[t].identity: t for t in numbers if self.types[t].identity}
        self._by_name: dict[str, list[int]] = collections.defaultdict(list)
        for t, node_type in enumerate(self.types):
            for name in {node_type.label, node_type.name} - {""}:
                self._by_name[name].append(t)
        self._bound: weakref.WeakKeyDictionary[Graph, Graph] = weakref.WeakKeyDictionary()
        self._kinds: dict[Kind, int] = {}
        for node_type in self.types:
            for value_type in (*node_type.operands, *node_type.results):
                self._kinds.setdefault(stored(value_type), len(self._kinds))

    def number(self, who: str, name: str) -> int:
        """Returns the number of the type of a name, or of a label.

        Raises:
          ValueError: there is none, or there are several.
        """
        exact = [t for t, x in enumerate(self.types) if x.label == name]
        found = exact if len(exact) == 1 else self._by_name.get(name, [])
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"`{who}` got nodes of type {name!r}, a name of {len(found)} types: "
                f"{self._shown(found)}. Give the number of the type, or its label."
            )
        raise ValueError(
            f"`{who}` got nodes of type {name!r}, which was not exported; expected one of the "
            f"{len(self.types)} types {self._shown(range(len(self.types)))}. Export the model with "
            "a sample of instances that has nodes of all types."
        )

    def _shown(self, numbers: Sequence[int]) -> str:
        names = [f"{t} `{self.types[t].label or self.types[t]}`" for t in numbers]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return ", ".join(names[:MAX_NAMED]) + more

    def bound(self, who: str, graph: Graph) -> Graph:
        """Returns a graph with these node types.

        Raises:
          ValueError: it has nodes of other types, or operands are of other types.
        """
        if graph.types is self.types:
            return graph
        if graph not in self._bound:
            self._bound[graph] = self._bind(who, graph)
        return self._bound[graph]

    def _bind(self, who: str, graph: Graph) -> Graph:
        """Does that for a graph that was not met before."""
        number = np.zeros(max(1, len(graph.types)), np.int32)
        typed = []
        for t in graph.present_types:
            came = graph.types[t]
            found = self._by_identity.get(came.identity) if came.identity else None
            number[t] = self.number(who, came.label or came.name) if found is None else found
            typed.append(bool(came.results))
            own = self.types[number[t]]
            if typed[-1] and list(map(stored, own.results)) != list(map(stored, came.results)):
                raise ValueError(
                    f"`{who}` got nodes of type `{came.label}` that return "
                    f"{_listed(came.results)}; expected {_listed(own.results)}, as exported."
                )
        if any(chunk.rows is None or chunk.leaf is not None for chunk in graph.inputs):
            raise ValueError(
                f"`{who}` got a graph that reads arrays of a Python instance; expected one that "
                "holds its inputs, made by `Batched.graph(params, instances)` or `exported.graph`."
            )
        columns = graph.node_type, graph.operand_ptr, graph.operand, graph.outputs
        node_type, ptr, operand, outputs = columns
        node_type = number[node_type]
        output_ptr = graph.output_ptr
        if not all(typed):
            if any(typed):
                raise ValueError(f"`{who}` got a graph with types of both kinds, bare and typed.")
            ptr, operand = self._expanded(node_type, ptr, operand)
            output_ptr, outputs = self._expanded(node_type, output_ptr, outputs)
        return self._graph(who, node_type, ptr, operand, graph.inputs, outputs, graph, output_ptr)

    def _graph(
        self,
        who: str,
        node_type: np.ndarray,
        ptr: np.ndarray,
        operand: np.ndarray,
        inputs: Sequence[InputRows],
        outputs: np.ndarray,
        like: Graph | None = None,
        output_ptr: np.ndarray | None = None,
    ) -> Graph:
        """Returns a graph of these types, of the instances of another one."""
        rows = tuple(self._input(who, chunk) for chunk in inputs)
        ends = (like.node_ptr, like.input_ptr, output_ptr) if like is not None else (None,) * 3
        graph = Graph(
            self.types,
            node_type.astype(np.int32),
            np.asarray(ptr, np.int64),
            operand.astype(np.int32),
            rows,
            outputs.astype(np.int32),
            *ends,
        )
        self._check(who, graph)
        return graph

    def _results(self, node_type: np.ndarray) -> np.ndarray:
        counts = np.array([t.num_results for t in self.types], np.int64)
        return counts[node_type]

    def _expanded(
        self, node_type: np.ndarray, ptr: np.ndarray, nodes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (pointers, values), the results of nodes in place of the nodes."""
        counts = self._results(node_type)
        bad = nodes[nodes >= len(node_type)]
        if len(bad):
            raise ValueError(f"a graph of {len(node_type)} nodes reads node {bad[0]}")
        first = pointers(counts)
        is_node = nodes >= 0
        starts, sizes = nodes.astype(np.int64), np.ones(len(nodes), np.int64)
        starts[is_node] = first[nodes[is_node]]
        sizes[is_node] = counts[nodes[is_node]]
        return pointers(sizes)[np.asarray(ptr, np.int64)], ranges(starts, sizes)

    def _input(self, who: str, chunk: InputRows) -> InputRows:
        """Returns inputs in a dtype that JAX has."""
        if is_key(chunk.type.dtype):
            return chunk
        rows = np.asarray(chunk.rows)
        dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
        if rows.dtype != dtype and rows.dtype.kind in "iu" and rows.size:
            low, high, info = int(rows.min()), int(rows.max()), np.iinfo(dtype)
            if low < info.min or high > info.max:
                raise OverflowError(
                    f"`{who}` got {rows.dtype} inputs from {low} to {high}, which do not fit the "
                    f"{dtype} that JAX computes in."
                )
        return InputRows(ValueType(rows.shape[1:], np.dtype(dtype)), rows.astype(dtype, copy=False))

    def _check(self, who: str, graph: Graph) -> None:
        """Raises `ValueError` unless every operand is of the type that its reader expects."""
        unknown = [chunk for chunk in graph.inputs if stored(chunk.type) not in self._kinds]
        if unknown:
            kinds = {str(chunk.type) for chunk in graph.inputs}
            expected = {str(t) for x in self.types for t in x.operands}
            raise ValueError(
                f"`{who}` got inputs of type {', '.join(sorted(kinds))}; nodes read values of "
                f"{', '.join(sorted(expected))}."
            )
        counts = np.diff(graph.operand_ptr)
        arity = np.array([len(t.operands) for t in self.types], np.int64)[graph.node_type]
        wrong = np.flatnonzero(counts != arity)
        if len(wrong):
            n = wrong[0]
            node_type = self.types[graph.node_type[n]]
            raise ValueError(
                f"`{who}` got node {n} with {counts[n]} operands; a node of type `{node_type}` has "
                f"{arity[n]}. The results of a node are an operand each."
            )
        graph.check()
        counts_of_chunks = list(map(len, graph.inputs))
        of_chunks = np.array([self._kinds[stored(c.type)] for c in graph.inputs], np.int64)
        of_inputs = np.repeat(of_chunks, counts_of_chunks)
        of_results = [[self._kinds[stored(t)] for t in x.results] for x in self.types]
        flat = np.array([k for kinds in of_results for k in kinds] or [0], np.int64)
        first = pointers(np.array(list(map(len, of_results)), np.int64))[:-1]
        came_from = flat[first[graph.node_type[graph.value_node]] + graph.value_slot]
        of_values = np.concatenate([came_from, of_inputs[::-1]])
        for t in graph.present_types:
            nodes = np.flatnonzero(graph.node_type == t)
            for j, expected_type in enumerate(self.types[t].operands):
                read = graph.operand[graph.operand_ptr[nodes] + j]
                bad = np.flatnonzero(of_values[read] != self._kinds[stored(expected_type)])
                if len(bad):
                    kind = list(self._kinds)[of_values[read[bad[0]]]]
                    raise ValueError(
                        f"`{who}` got node {nodes[bad[0]]} of type `{self.types[t].name}` whose "
                        f"operand {j} is {ValueType(*kind)}; expected {expected_type}, as in "
                        f"`{self.types[t]}`."
                    )

    def graph(
        self,
        node_type: Sequence[int | str] | np.ndarray,
        preds: Any,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[int | tuple[int, int]] | None,
    ) -> Graph:
        """Returns a graph from arrays; see `Exported.graph`."""
        who = "Exported.graph"
        names = {x for x in node_type if isinstance(x, str)}
        named = {name: self.number(who, name) for name in names}
        numbers = [named[x] if isinstance(x, str) else x for x in node_type]
        of_nodes = checks.whole_array(who, "`node_type`", numbers)
        bad = np.flatnonzero((of_nodes < 0) | (of_nodes >= len(self.types)))
        if len(bad):
            raise ValueError(
                f"`{who}` got type {of_nodes[bad[0]]} of node {bad[0]}; expected the number or the "
                f"name of one of the {len(self.types)} types {self._shown(range(len(self.types)))}."
            )
        is_csr = isinstance(preds, tuple) and len(preds) == 2 and hasattr(preds[0], "dtype")
        if is_csr:
            ptr, operand = self._expanded(of_nodes, *checked_operands(preds))
        else:
            rows = [self._values(who, of_nodes, row) for row in preds]
            ptr, operand = checked_operands(rows)
        if len(ptr) != len(of_nodes) + 1:
            raise ValueError(
                f"`{who}` got {len(of_nodes)} node types and operands for {len(ptr) - 1} nodes; "
                "give one list of operands per node, an empty one for a node that reads nothing."
            )
        arrays = map(checked_rows, checks.items(who, "inputs", inputs, "a list of arrays"))
        chunks = [InputRows(ValueType(x.shape[1:], x.dtype), x) for x in arrays]
        if outputs is None:
            is_read = np.zeros(int(self._results(of_nodes).sum()), bool)
            is_read[operand[operand >= 0]] = True
            returned = np.flatnonzero(~is_read)
        else:
            values = self._values(who, of_nodes, outputs)
            returned = checks.whole_array(who, "`outputs`", values)
        return self._graph(who, of_nodes, ptr, operand, chunks, returned)

    def _values(self, who: str, node_type: np.ndarray, entries: Any) -> list[int]:
        """Returns the values that entries name: a node, a result of a node, or an input."""
        counts = self._results(node_type)
        first = pointers(counts)
        found: list[int] = []
        for entry in entries:
            node, slot = entry if isinstance(entry, tuple) else (entry, None)
            if slot is None and node < 0:
                found.append(node)
                continue
            if not 0 <= node < len(node_type) or (
                slot is not None and not 0 <= slot < counts[node]
            ):
                raise ValueError(
                    f"`{who}` got {checks.brief(entry)} as an operand or output; expected a node "
                    f"from 0 to {len(node_type) - 1}, a pair of one and the number of its result, "
                    "or an input as -1 - i."
                )
            start = int(first[node])
            found += range(start, int(first[node + 1])) if slot is None else [start + slot]
        return found


def _listed(types: Sequence[ValueType]) -> str:
    return ", ".join(map(str, types)) or "nothing"


def called(node_type: NodeType, types: Sequence[NodeType]) -> str:
    """Returns the name of a type, or its label if others have that name."""
    alone = sum(other.name == node_type.name for other in types) == 1
    return node_type.name if alone else node_type.label


def labelled(types: Sequence[NodeType]) -> Mapping[str, int]:
    """Returns the number of every type by its label, numbered if several have one."""
    bare = Graph(tuple(types), np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int32))
    return {label: t for t, label in enumerate(bare.labels)}
