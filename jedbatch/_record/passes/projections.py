"""Input projections: products of a cell that no recursion waits for become nodes of their own.

A step of a recurrent network multiplies its input and its state by weights. Code written by hand
multiplies the inputs of all steps at once, before the loop: then a step reads half of the weights,
which is what takes its time in small minibatches, and one large product takes the place of many
small ones (Appleyard, Kočiský and Blunsom, *Optimizing Performance of Recurrent Neural Networks on
GPUs*, 2016). Cells are written step by step. So a node of a cell whose nodes depend on each other
is cut in two, where large weights meet operands that none of its nodes has made: a node for these
products, and one for all else.

A cell whose nodes have made an operand once is not cut there: a tree that leans to one side has
words on the other side, but most trees do not lean.

Cuts hold for plans of values alone, on a CPU and not on a mesh. Steps of training took longer with
them: what the two nodes give each other must be kept, and so must its cotangents.
"""

import itertools
from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import pointers
from jedbatch._graph.record import Record
from jedbatch._graph.rewrite import Rewrite, rewrite
from jedbatch._graph.types import NodeType, operation_of
from jedbatch._jaxpr.early_part import ProgramPart, early_part
from jedbatch._jaxpr.interpret import performs
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.types.registry import Registry

OF_NUMBERS = 4  # times the gain, where numbers enter, whose rows of a table are read there, too
MANY_MINIBATCHES = 8  # that a type was new in before it is taken for one that does not recur
FEW_CODES = 1 << 14  # of an operand: its reader's type, its position, and its maker's type
CONTROL_FLOW = ("while", "scan", "cond")


class TwoTypes(NamedTuple):
    """A type of nodes as two.

    Attributes:
      first, second: their types; the second one makes the results.
      first_reads, second_reads: positions of what they read, among the operands of the node. The
        second one then reads the results of the first one.
    """

    first: int
    second: int
    first_reads: tuple[int, ...]
    second_reads: tuple[int, ...]


class Halves(NamedTuple):
    """A graph with nodes cut in two, and the records of its instances that were asked for."""

    graph: Graph
    records: dict[int, Record]

    def of(self, record: Record) -> Record:
        """Returns the record of an instance of the graph that was cut."""
        found = self.records.get(record.index)
        if found is None:
            found = Record(self.graph, record.index, record.structure, record.types)
            self.records[record.index] = found
        return found


class Projections:
    """Cuts nodes in two. Belongs to one registry.

    Args:
      registry: where types are interned.
      least: bytes of the weights of a product that is worth a node.

    Attributes:
      followed: gives what another registry has decided of a type, see `decided`; None if nothing.
    """

    followed: Callable[[int], tuple[int, ...] | None] | None = None

    def __init__(self, registry: Registry, least: int):
        self._registry = registry
        self._least = least
        self._cuts: dict[int, TwoTypes | None] = {}  # by node type, once that is decided
        self._late: dict[int, set[int]] = {}  # operands that came late in some graph, of cut types
        self._seen: dict[int, int] = {}  # in how many minibatches, for other types
        self._graphs: MutableMapping[Graph, Halves | None] = WeakKeyDictionary()

    @property
    def decided(self) -> dict[int, tuple[int, ...]]:
        """For each type that might be cut positions of operands that come late; () if it is not."""
        types = self._registry.node_types
        return {t: (*sorted(self._late.get(t, ())),) for t in self._cuts if _may_be_cut(types[t])}

    def cut(self, records: Sequence[Record]) -> Sequence[Record]:
        """Returns the records of instances with nodes cut in two, where that pays."""
        if set(map(type, records)) != {Record}:
            return records
        graphs = {r.whole for r in records}
        types = set(itertools.chain.from_iterable([graph.present_types for graph in graphs]))
        if self._cuts.keys() >= types and not any(map(self._cuts.get, types)):
            return records
        new = [graph for graph in graphs if graph not in self._graphs]
        if new:
            self._decide(new)
        for graph in graphs:
            if graph not in self._graphs:
                cuts = {t: c for t in graph.present_types if (c := self._cuts.get(t)) is not None}
                self._graphs[graph] = None
                if cuts:
                    known = self._registry.types
                    whole = rewrite(graph, halves(graph, cuts, known), known)
                    self._graphs[graph] = Halves(whole, {})
        found = {graph: self._graphs[graph] for graph in graphs}
        return [r if (cut := found[r.whole]) is None else cut.of(r) for r in records]

    def _decide(self, graphs: Sequence[Graph]) -> None:
        """Finds out which types of the graphs of a minibatch are to be cut, and where.

        A type is cut anew, or no longer, once an operand comes late that never did before.
        """
        late: dict[int, set[int]] = {}
        for graph in graphs:
            types = []
            for t in graph.present_types:
                if t not in self._cuts and not _may_be_cut(graph.types[t]):
                    self._cuts[t] = None
                if t not in self._cuts and self.followed is not None:
                    self._follow(t, self.followed(t))
                if self._cuts.get(t, True) is not None:
                    types.append(t)
            if types:
                for t, places in late_operands(graph, types).items():
                    late.setdefault(t, set()).update(places)
        for t, places in late.items():
            before = self._late.get(t, set())
            if not places <= before:
                self._late[t] = before | places
                self._cuts[t] = self._cut(t, self._late[t])
                self._graphs.clear()
            elif not before:
                self._seen[t] = self._seen.get(t, 0) + 1
                if self._seen[t] >= MANY_MINIBATCHES:
                    self._cuts[t] = None

    def _follow(self, node_type: int, places: tuple[int, ...] | None) -> None:
        """Decides of a type as was decided elsewhere."""
        if places is not None:
            self._late[node_type] = set(places)
            self._cuts[node_type] = self._cut(node_type, set(places)) if places else None

    def _cut(self, node_type: int, late: set[int]) -> TwoTypes | None:
        registry = self._registry
        whole = registry.node_types[node_type]
        shared, kinds = whole.shared, registry.kinds_of(whole.operands)
        parts = early_part(operation_of(whole).jaxpr, len(shared), [len(shared) + k for k in late])
        if parts is None:
            return None
        first, second, weights = parts
        reads_rows = any(
            whole.operands[i - len(shared)].shape for i in first.read if i >= len(shared)
        )
        if weights * (1 if reads_rows else OF_NUMBERS) < self._least:
            return None
        name, of = f"inputs of {whole.name}", (node_type, *sorted(late))
        of_first = self._type(name, ("projection", *of), first, shared, kinds, [])
        given = registry.kinds_of(registry.node_types[of_first].results)
        key = ("after projection", *of)
        of_second = self._type(whole.name, key, second, shared, kinds, given)
        for part in (of_first, of_second):
            registry.lines[part] = registry.lines[node_type]
        return TwoTypes(
            of_first,
            of_second,
            tuple(i - len(shared) for i in first.read if i >= len(shared)),
            tuple(i - len(shared) for i in second.read if i >= len(shared)),
        )

    def _type(
        self,
        name: str,
        key: tuple,
        part: ProgramPart,
        shared: Sequence[int],
        kinds: Sequence[int],
        given: Sequence[int],
    ) -> int:
        """Returns the id of the type of a part of a node."""
        count = len(shared)
        read = [kinds[i - count] for i in part.read if i >= count]
        return self._registry.call_spec(
            name,
            key,
            lambda weights, operands: part.call([*weights, *operands]),
            tuple(shared[i] for i in part.read if i < count),
            (*read, *given),
        ).node_type


def _may_be_cut(node_type: NodeType) -> bool:
    """Returns whether a type has operands of which one might come early, and a product."""
    operation = operation_of(node_type)
    if len(node_type.operands) < 2 or operation.lists is not None:
        return False
    if any(is_ragged(t.shape) for t in (*node_type.operands, *node_type.results)):
        return False
    program = operation.jaxpr
    return performs(program, "dot_general") and not performs(program, *CONTROL_FLOW)


def late_operands(graph: Graph, types: Sequence[int]) -> dict[int, set[int]]:
    """Returns positions of operands that a type's own nodes had a part in making, by type.

    Types are what counts: nodes of one type that depend on each other through another one.
    """
    codes, most = codes_of_operands(graph)
    readers: dict[int, set[int]] = {}
    edges = []
    for code in codes.tolist():
        place, made_by = divmod(code, len(graph.types))
        read_by, at = divmod(place, most)
        readers.setdefault(made_by, set()).add(read_by)
        edges.append((made_by, read_by, at))
    late = {}
    for t in types:
        reached, new = {t}, [t]
        while new:
            new = [r for x in new for r in readers.get(x, ()) if r not in reached]
            reached.update(new)
        late[t] = {at for made_by, read_by, at in edges if read_by == t and made_by in reached}
    return late


def codes_of_operands(graph: Graph) -> tuple[np.ndarray, int]:
    """Returns which types make which operands of which types.

    Returns:
      (int64[...], (reader's type * most + position) * types + maker's type, ascending; `most`).
    """
    num_types = len(graph.types)
    most = int(np.diff(graph.operand_ptr).max(initial=0)) + 1
    few = most * num_types**2 <= FEW_CODES  # sorting takes longer than counting these
    inner = np.flatnonzero(graph.operand >= 0)
    node = graph.operand_reader[inner]
    reader = graph.node_type[node].astype(np.int64)
    maker = graph.node_type[graph.value_node[graph.operand[inner]]]
    codes = (reader * most + inner - graph.operand_ptr[node]) * num_types + maker
    return np.flatnonzero(np.bincount(codes)) if few else np.unique(codes), most


def halves(graph: Graph, cuts: dict[int, TwoTypes], types: tuple[NodeType, ...]) -> Rewrite:
    """Returns two nodes in place of each that is cut."""
    has_cut = np.zeros(len(graph.types), bool)
    has_cut[list(cuts)] = True
    is_cut = has_cut[graph.node_type]
    nodes = np.flatnonzero(is_cut)
    node_type, arity, made = np.empty((3, 2 * len(nodes)), np.int64)
    number = np.cumsum(is_cut) - 1
    of = {t: 2 * number[graph.node_type == t] for t in cuts}  # the first halves
    for t, cut in cuts.items():
        for half, new_type in ((of[t], cut.first), (of[t] + 1, cut.second)):
            node_type[half], made[half] = new_type, types[new_type].num_results
        arity[of[t]] = len(cut.first_reads)
        arity[of[t] + 1] = len(cut.second_reads) + types[cut.first].num_results
    operand_ptr, new_value = pointers(arity), graph.num_values + pointers(made)
    operand, value = np.empty(int(operand_ptr[-1]), np.int64), np.arange(graph.num_values)
    for t, cut in cuts.items():
        old, first = nodes[of[t] // 2], of[t]
        begin = graph.operand_ptr[old][:, None]
        given = new_value[first][:, None] + np.arange(types[cut.first].num_results)
        own = [graph.operand[begin + np.array(x, int)] for x in (cut.first_reads, cut.second_reads)]
        for half, read in ((first, own[0]), (first + 1, np.hstack([own[1], given]))):
            operand[operand_ptr[half][:, None] + np.arange(read.shape[1])] = read
        results = np.arange(types[t].num_results)
        value[graph.value_ptr[old][:, None] + results] = new_value[first + 1][:, None] + results
    return Rewrite(~is_cut, np.repeat(nodes, 2), node_type, operand_ptr, operand, value)
