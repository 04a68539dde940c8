"""Dataflow graphs of instances, as data.

A batched program starts as a graph: every node is one call of one operation, every
edge one value read. Nothing of the user's Python is left in it and nothing of JAX is
needed to handle it, so that graphs can be merged, scheduled, laid out, stored on disk
and prepared by a data loader with NumPy alone.

Two nodes may share a batch exactly when their types are equal (see `_graph.types`).

Everything of variable length is a pointer/index pair: row `i` of `x` is
`x[x_ptr[i]:x_ptr[i + 1]]`. Letters: `N` nodes, `V` results of nodes, `E` operands read,
`M` edges between nodes, `I` inputs, `O` outputs, `T` node types, `B` instances.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jedbatch import checks
from jedbatch._graph import analysis, serialize
from jedbatch._graph.arguments import checked_names, checked_operands, checked_rows
from jedbatch._graph.inputs import InputRows, bytes_of_inputs, count_inputs
from jedbatch._graph.invariants import check_invariants
from jedbatch._graph.joining import INPUTS, NODES, OUTPUTS, bounds_of, join
from jedbatch._graph.paths import longest_paths, pointers
from jedbatch._graph.types import NodeType, ValueType

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32, Int64

# What graphs know of their nodes and their union takes over: what depends on the instance alone.
CARRIED = ("rank", "height", "chain")


@dataclass(frozen=True, eq=False)
class Graph:
    """A typed dataflow graph of one or more instances.

    Nodes are in an order in which operands come before their readers. An operand is the
    index of a result (`>= 0`) or names input `i` as `-1 - i`.

    Attributes:
      types: the node types, T; ids without nodes are allowed.
      node_type: int32[N], index into `types`.
      operand_ptr: int64[N + 1] and
      operand: int32[E], what each node reads.
      inputs: the values that enter, in order; I in all.
      outputs: int32[O], what the instances return: results or inputs, like `operand`.
      node_ptr, input_ptr, output_ptr: int64[B + 1], the share of each instance; one
        instance by default.
    """

    types: tuple[NodeType, ...]
    node_type: Int32[np.ndarray, " N"]
    operand_ptr: Int64[np.ndarray, " N+1"]
    operand: Int32[np.ndarray, " E"]
    inputs: Sequence[InputRows] = ()
    outputs: Int32[np.ndarray, " O"] = field(default_factory=lambda: np.zeros(0, np.int32))
    node_ptr: Int64[np.ndarray, " B+1"] = None  # type: ignore[assignment]  # until it is built
    input_ptr: Int64[np.ndarray, " B+1"] = None  # type: ignore[assignment]
    output_ptr: Int64[np.ndarray, " B+1"] = None  # type: ignore[assignment]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [x for x in vars(self).values() if isinstance(x, np.ndarray)]
        return sum(x.nbytes for x in arrays) + bytes_of_inputs(self.inputs)

    @functools.cached_property
    def nbytes_each(self) -> int:
        """The share of an instance in the bytes of all arrays."""
        return self.nbytes // max(1, self.num_instances)

    @functools.cached_property
    def nodes_each(self) -> int:
        """The share of an instance in the nodes, rounded up."""
        return -(-len(self.node_type) // max(1, self.num_instances))

    def __post_init__(self) -> None:
        if self.node_ptr is None:
            object.__setattr__(self, "node_ptr", np.array([0, len(self.node_type)]))
            object.__setattr__(self, "input_ptr", np.array([0, self.num_inputs]))
            object.__setattr__(self, "output_ptr", np.array([0, len(self.outputs)]))

    @staticmethod
    def from_dag(
        node_type: Sequence[int] | np.ndarray,
        preds: Sequence[Sequence[int]] | tuple[np.ndarray, np.ndarray],
        *,
        names: Sequence[str] | None = None,
        inputs: Sequence[np.ndarray] = (),
        outputs: Sequence[int] | None = None,
    ) -> Graph:
        """A bare graph from arrays, without running any Python per node.

        It can be scheduled as it is. With `names`, the cells are told apart by name and
        `jedbatch.evaluate` computes it inside (or outside) a batched function.

        Args:
          node_type: int[N], the type of each node; ids may have gaps.
          preds: what each node reads, in order: a list of lists, or a CSR pair
            `(ptr int[N + 1], index int[E])`. An entry `k >= 0` is node `k` and must be
            smaller than the reader; `-1 - i` is input `i`.
          names: name of each type id; `type 0`, `type 1`, … by default.
          inputs: arrays whose rows are the inputs, numbered through: input `i` is row `i`
            of their concatenation along the first axis.
          outputs: nodes the graph returns; by default those that are not read.

        Returns:
          The graph.

        Raises:
          TypeError: a number is not a whole one, a name is no string, or inputs are no arrays.
          ValueError: lengths disagree, an entry is out of range, or an operand does not
            come before its reader.

        Examples:
          >>> from jedbatch import Graph
          >>> graph = Graph.from_dag([0, 0, 1], [[], [], [0, 1]])
          >>> print(graph)
          Graph of 1 instance: 3 nodes, 2 types, 2 operands, 0 inputs
            2 × type 0
            1 × type 1
        """
        node_type = checks.whole_array("Graph.from_dag", "`node_type`", node_type)
        ptr, operand = checked_operands(preds)
        if len(ptr) != len(node_type) + 1:
            raise ValueError(
                f"`Graph.from_dag` got {len(node_type)} node types and operands for "
                f"{len(ptr) - 1} nodes; give one list of operands per node (an empty one "
                "for a node that reads nothing)."
            )
        names = checked_names(names, node_type)
        if outputs is None:
            is_read = np.zeros(len(node_type), bool)
            is_read[operand[(operand >= 0) & (operand < len(node_type))]] = True
            outputs = np.flatnonzero(~is_read).tolist()
        arrays = list(map(checked_rows, checks.items("Graph.from_dag", "inputs", inputs, "arrays")))
        graph = Graph(
            types=tuple(NodeType(name) for name in names),
            node_type=node_type,
            operand_ptr=ptr,
            operand=operand,
            inputs=tuple(InputRows(ValueType(a.shape[1:], a.dtype), a) for a in arrays),
            outputs=checks.whole_array("Graph.from_dag", "`outputs`", outputs),
        )
        graph.check()
        return graph

    @staticmethod
    def concatenate(graphs: Sequence[Graph]) -> Graph:
        """The disjoint union of graphs over the same types, instance after instance.

        The graphs' `types` must be prefixes of one another, as they are when one batched
        function recorded them.

        Args:
          graphs: of one or more instances each.

        Returns:
          A graph of all instances, in this order.

        Raises:
          TypeError: these are no graphs.
          ValueError: there are none, or their types are others.
        """
        graphs = checks.items("Graph.concatenate", "graphs", graphs, "a list of graphs")
        for graph in graphs:
            checks.of_type("Graph.concatenate", graph, Graph, "a list of graphs")
        return Graph.select([(g, i) for g in graphs for i in range(g.num_instances)])

    def split(self) -> list[Graph]:
        """One graph per instance; the inverse of `concatenate`.

        Returns:
          B graphs of one instance each.
        """
        return [Graph.select([(self, i)]) for i in range(self.num_instances)]

    @staticmethod
    def select(parts: Sequence[tuple[Graph, int]]) -> Graph:
        """The disjoint union of single instances `(graph, index)`, in this order.

        Args:
          parts: pairs of a graph and the index of one of its instances.

        Returns:
          A graph of these instances.

        Raises:
          ValueError: there are none, or their types are others.
        """
        if not parts:
            raise ValueError("`Graph.concatenate` got no graphs; expected at least one.")
        if are_whole(parts):
            return parts[0][0]
        graphs = {id(g): g for g, _ in parts}
        types = _common_types(list(graphs.values()))
        number = {name: i for i, name in enumerate(graphs)}
        carried = [name for name in CARRIED if all(name in g.__dict__ for g in graphs.values())]
        names = "node_type", "operand_ptr", "operand", "outputs", *carried
        columns, ptr = join(
            [tuple([getattr(g, name) for name in names]) for g in graphs.values()],
            [number[id(g)] for g, _ in parts],
            [g.bounds[i] for g, i in parts],
        )
        node_type, operand_ptr, operand, outputs, *more = columns
        inputs = tuple([chunk for g, i in parts for chunk in g.chunks[i]])
        ends = ptr[NODES], ptr[INPUTS], ptr[OUTPUTS]
        union = Graph(types, node_type, operand_ptr, operand, inputs, outputs, *ends)
        union.__dict__["num_inputs"] = int(ptr[INPUTS, -1])
        union.__dict__.update(zip(carried, more, strict=True))
        return union

    @functools.cached_property
    def bounds(self) -> list[bytes]:
        """Where every instance's nodes, operands, inputs, outputs and results begin and end."""
        nodes = self.node_ptr
        columns = nodes, self.operand_ptr[nodes], self.input_ptr, self.output_ptr
        return bounds_of([*columns, self.value_ptr[nodes]])

    @functools.cached_property
    def chunks(self) -> list[tuple[InputRows, ...]]:
        """The inputs of every instance."""
        inputs = tuple(self.inputs)
        ends = pointers(np.fromiter(map(len, inputs), np.int64, len(inputs)))
        ptr = np.searchsorted(ends, self.input_ptr).tolist()
        return [inputs[a:b] for a, b in itertools.pairwise(ptr)]

    @property
    def num_instances(self) -> int:
        return len(self.node_ptr) - 1

    @functools.cached_property
    def num_results(self) -> Int32[np.ndarray, " N"]:
        """int32[N], results of each node."""
        return self.results_per_type[self.node_type]

    @functools.cached_property
    def results_per_type(self) -> Int32[np.ndarray, " T"]:
        """int32[T], results of a node of each type."""
        return np.array([t.num_results for t in self.types], np.int32)

    @functools.cached_property
    def value_ptr(self) -> Int64[np.ndarray, " N+1"]:
        """int64[N + 1], the results of each node."""
        return pointers(self.num_results)

    @property
    def num_values(self) -> int:
        return int(self.value_ptr[-1])

    @functools.cached_property
    def value_node(self) -> Int64[np.ndarray, " V"]:
        """int64[V], the node whose result each value is."""
        return np.repeat(np.arange(len(self.node_type)), self.num_results)

    @functools.cached_property
    def value_slot(self) -> Int64[np.ndarray, " V"]:
        """int64[V], which of its node's results each value is."""
        return np.arange(self.num_values) - self.value_ptr[:-1][self.value_node]

    @functools.cached_property
    def num_inputs(self) -> int:
        return count_inputs(self.inputs)

    @functools.cached_property
    def operand_reader(self) -> Int64[np.ndarray, " E"]:
        """int64[E], the node that reads each operand."""
        return np.repeat(np.arange(len(self.node_type)), np.diff(self.operand_ptr))

    @functools.cached_property
    def node_instance(self) -> Int64[np.ndarray, " N"]:
        """int64[N], the instance of each node."""
        return np.repeat(np.arange(self.num_instances), np.diff(self.node_ptr))

    @functools.cached_property
    def nodes_per_type(self) -> Int64[np.ndarray, " T"]:
        """int64[T], nodes of each type."""
        return np.bincount(self.node_type, minlength=len(self.types))

    @functools.cached_property
    def present_types(self) -> list[int]:
        """The types that have nodes, in order."""
        return [t for t, count in enumerate(self.nodes_per_type.tolist()) if count]

    @functools.cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(int64[N + 1], int32[M], int32[M]): edges to each node, maker and reader of each."""
        return analysis.find_edges(
            self.node_type, self.results_per_type, self.operand_ptr, self.operand
        )

    @functools.cached_property
    def preds(self) -> tuple[Int64[np.ndarray, " N+1"], Int32[np.ndarray, " M"]]:
        """(int64[N + 1], int32[M]): the nodes each node reads, most repeats left out."""
        return self._edges[:2]

    @functools.cached_property
    def edges(self) -> tuple[Int32[np.ndarray, " M"], Int32[np.ndarray, " M"]]:
        """(int32[M], int32[M]): maker and reader of every edge, by reader."""
        return self._edges[1:]

    @functools.cached_property
    def succs(self) -> tuple[Int64[np.ndarray, " N+1"], Int32[np.ndarray, " M"]]:
        """(int64[N + 1], int32[M]): the nodes that read each node."""
        return analysis.readers(len(self.node_type), self.edges)

    @functools.cached_property
    def makes_chains(self) -> Bool[np.ndarray, " T"]:
        """bool[T], the types whose nodes nearly all continue one node of their type, and it alone
        them.

        Nodes that begin a chain do not count. In a tree, others have two children of their type.
        """
        return analysis.chain_types(self.node_type, len(self.types), self.edges)

    @functools.cached_property
    def rank(self) -> Int32[np.ndarray, " N"]:
        """int32[N], the place of each node among those of its type.

        The most other nodes of its own type on a path that ends in it, whatever lies between
        them. Nodes of one type and different rank lie on no common batch if ranks are to be run
        in order; one more than the greatest rank of a type is a lower bound on its batches.
        """
        return analysis.ranks(self.node_type, len(self.types), self.edges, self.cyclic_components)

    @functools.cached_property
    def rank_alone(self) -> Int32[np.ndarray, " N"]:
        """int32[N], the rank of nodes whose type is the only one of its component; 0 of others."""
        if "rank" in self.__dict__ or all(len(types) == 1 for types in self.components):
            return self.rank
        alone = [types for types in self.cyclic_components if len(types) == 1]
        return analysis.ranks(self.node_type, len(self.types), self.edges, alone)

    @functools.cached_property
    def chain(self) -> Int32[np.ndarray, " N"]:
        """int32[N], nodes of its own type on the longest chain that begins in each node.

        The node itself counts; paths may lead through other types.
        """
        return analysis.chains(self.node_type, len(self.types), self.edges, self.cyclic_components)

    def inside(self, types: Sequence[int]) -> tuple[np.ndarray, np.ndarray, tuple[Any, ...]]:
        """(nodes of these types, place of each type among them, edges between these nodes).

        Args:
          types: ids of types.

        Returns:
          (int64[n] nodes; int32[T] places, -1 for other types; a pair of int32[m], maker and reader
          of each edge, in terms of these n nodes).
        """
        return analysis.induced(self.node_type, len(self.types), self.edges, types)

    @functools.cached_property
    def depth(self) -> Int32[np.ndarray, " N"]:
        """int32[N], edges on the longest path that ends in each node; 0 if it reads no node."""
        return longest_paths(len(self.node_type), *self.edges)

    @functools.cached_property
    def height(self) -> Int32[np.ndarray, " N"]:
        """int32[N], edges on the longest path that begins in each node; 0 if it is not read."""
        return analysis.heights(len(self.node_type), self.edges)

    @functools.cached_property
    def changes_type(self) -> Bool[np.ndarray, " N"]:
        """bool[N], whether a longest path from the node goes on to a node of another type."""
        return analysis.changes_of_type(self.node_type, self.edges, self.height)

    @functools.cached_property
    def _relations(self) -> tuple[Bool[np.ndarray, "T T"], Bool[np.ndarray, " T"]]:
        """(bool[T, T], bool[T]): where paths lead, and types that read themselves."""
        return analysis.type_relations(self.node_type, len(self.types), self.edges)

    @functools.cached_property
    def components(self) -> list[list[int]]:
        """The types that have nodes, grouped: strongly connected ones go together.

        A group comes after those it reads from.
        """
        return analysis.strong_components(self._relations[0], self.present_types)

    @functools.cached_property
    def cyclic_components(self) -> list[list[int]]:
        """The components whose types read each other, or themselves."""
        is_cycle = self._relations[1].tolist()
        return [group for group in self.components if len(group) > 1 or is_cycle[group[0]]]

    @functools.cached_property
    def labels(self) -> list[str]:
        """A label for each type, all different: equal ones are numbered in the order of ids."""
        counts: dict[str, int] = {}
        labels: dict[str, None] = {}
        for node_type in self.types:
            name = label = node_type.label or node_type.name
            while label in labels:
                counts[name] = counts.get(name, 1) + 1
                label = f"{name} #{counts[name]}"
            labels[label] = None
        return list(labels)

    def bare(self) -> Graph:
        """The same graph without inputs and outputs, which is enough to schedule it.

        Returns:
          A graph of the same nodes, types and edges.
        """
        none = np.zeros_like(self.node_ptr)
        ptr, maker = self.preds
        operand = self.value_ptr[maker].astype(np.int32)
        empty = np.zeros(0, np.int32)
        return Graph(self.types, self.node_type, ptr, operand, (), empty, self.node_ptr, none, none)

    def restrict(self, types: Sequence[int]) -> tuple[np.ndarray, Graph]:
        """The part made of some types: (its nodes int64[n], a bare graph of them).

        The types of the part are numbered by their place in `types`, and named by their labels.
        Heights are those of the whole graph; whether a node changes type is asked within the part.

        Args:
          types: ids of types.

        Returns:
          (int64[n], the nodes of these types; a bare graph of them).
        """
        nodes, place, (maker, reader) = self.inside(types)
        ptr = pointers(np.bincount(reader, minlength=len(nodes)))
        names = tuple(NodeType(self.labels[t]) for t in types)
        part = Graph(names, place[self.node_type[nodes]], ptr, maker)
        part.__dict__["_edges"] = ptr, maker, reader
        part.__dict__["height"] = self.height[nodes]
        for name in ("rank", "chain", "weight"):
            if name in self.__dict__:
                part.__dict__[name] = self.__dict__[name][nodes]
        if list(types) in self.components:
            part.__dict__["components"] = [list(range(len(types)))]
        return nodes, part

    def check(self) -> None:
        """Raises `ValueError` unless every invariant of the class holds."""
        check_invariants(self)

    def __str__(self) -> str:
        counts = self.nodes_per_type
        noun = "instance" if self.num_instances == 1 else "instances"
        lines = [
            f"Graph of {self.num_instances} {noun}: {len(self.node_type)} nodes, "
            f"{np.count_nonzero(counts)} types, {len(self.operand)} operands, "
            f"{self.num_inputs} inputs"
        ]
        width = len(str(counts.max(initial=0)))
        lines += [f"  {counts[t]:{width}} × {self.types[t]}" for t in np.flatnonzero(counts)]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the graph as an npz file (no pickle inside), whole or not at all.

        Types made by `Graph.from_dag` are stored by name, those of `Batched.graph` as a whole.

        Args:
          path: the file.

        Raises:
          TypeError: inputs are of a dtype that NumPy cannot store, such as bfloat16.
          ValueError: inputs are read from an instance.
        """
        if any(chunk.leaf is not None for chunk in self.inputs):
            raise ValueError(
                "`Graph.save` got a graph that reads arrays of a Python instance; store graphs "
                "made by `Graph.from_dag` or `Batched.graph`, which hold their inputs."
            )
        inputs = [(chunk.type, np.asarray(chunk.rows)) for chunk in self.inputs]
        is_typed = self.num_instances != 1 or any(t.results for t in self.types)
        names = serialize.ARRAYS + serialize.INSTANCES * is_typed
        serialize.save(path, self.types, {x: getattr(self, x) for x in names}, inputs)

    @staticmethod
    def load(path: str | Path, *, max_bytes: int | None = None) -> Graph:
        """Reads what `save` wrote.

        Args:
          path: the file.
          max_bytes: what its arrays may take in memory; by default 256 MB, or a hundred times the
            size of the file if that is more, since a small file can hold a gigabyte of zeros.

        Returns:
          The graph.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no graph, is damaged, or takes more memory.
        """
        header, arrays, inputs = serialize.load(path, max_bytes)
        try:
            if "names" in header:
                node_type, ptr, operand, outputs = (arrays[x] for x in serialize.ARRAYS)
                given = {"names": header["names"], "inputs": inputs, "outputs": outputs}
                return Graph.from_dag(node_type, (ptr, operand), **given)
            types, kinds, columns = serialize.typed(header, arrays, inputs)
            graph = Graph(types=types, inputs=tuple(map(InputRows, kinds, inputs)), **columns)
            graph.check()
            return graph
        except (KeyError, TypeError, ValueError) as error:
            raise serialize.unreadable(path, error) from error


def are_whole(parts: Sequence[tuple[Graph, int]]) -> bool:
    """Returns whether instances `(graph, index)`, at least one, are all of one graph, in order."""
    graph = parts[0][0]
    if len(parts) != graph.num_instances:
        return False
    return all(g is graph and i == k for k, (g, i) in enumerate(parts))


def checked_graph(who: str, graph: object) -> Graph:
    """The graph, or a `TypeError` if it is none."""
    return checks.of_type(
        who,
        graph,
        Graph,
        "a graph",
        "`plan.graph` is that of a plan; `jedbatch.Graph.from_dag` makes one from arrays.",
    )


def _common_types(graphs: Sequence[Graph]) -> tuple[NodeType, ...]:
    """The types of all graphs, or a `ValueError` if they are not prefixes of one another."""
    distinct = {id(g.types): g.types for g in graphs}.values()
    longest = max(distinct, key=len)
    for types in distinct:
        if types is not longest and types != longest[: len(types)]:
            place = next(t for t, node_type in enumerate(types) if node_type != longest[t])
            raise ValueError(
                f"`Graph.concatenate` got graphs of different types: type {place} is "
                f"{types[place].name!r} and {longest[place].name!r}; expected the types of each to "
                "begin those of the next. Give all graphs the same `names`."
            )
    return longest
