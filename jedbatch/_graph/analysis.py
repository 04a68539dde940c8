"""Relations between the types of a graph, from the type of every node and the edges alone.

A group of types that read each other in a cycle is a strongly connected component of the graph
of types. Paths between nodes of one type stay inside of its component, so that ranks and chains
are computed component by component. Letters are those of `_graph.graph`; edges are a pair of
makers and readers, int32[...] each, by reader.

The compiled core finds edges, relations of types, chains and ranks in one pass, where types do not
read each other (see `_schedule.components`).
"""

import functools
from collections.abc import Sequence

import numpy as np

from jedbatch._graph.paths import longest_chains, longest_paths, pointers

# Share of the edges inside of a type that are in chains, for it to make chains.
MIN_CHAINED_SHARE = 0.9

MANY_TYPES = 128  # up to which the compiled core looks at all pairs of them

Edges = tuple[np.ndarray, np.ndarray]


def find_edges(
    node_type: np.ndarray, num_results: np.ndarray, operand_ptr: np.ndarray, operand: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (int64[N + 1], int32[M], int32[M]): the edges to each node, makers and readers.

    Neighbours that are equal are one edge: a node that reads two results of another one.

    Args:
      node_type: int32[N].
      num_results: int32[T], results of a node of each type.
      operand_ptr: int64[N + 1] and
      operand: int32[E], what each node reads.
    """
    num_nodes = len(node_type)
    value_node = np.repeat(np.arange(num_nodes, dtype=np.int32), num_results[node_type])
    operand_reader = np.repeat(np.arange(num_nodes, dtype=np.int32), np.diff(operand_ptr))
    internal = np.flatnonzero(operand >= 0)
    reader = operand_reader[internal]
    maker = value_node[operand[internal]]
    fresh = np.ones(len(maker), bool)
    fresh[1:] = (maker[1:] != maker[:-1]) | (reader[1:] != reader[:-1])
    reader, maker = reader[fresh], maker[fresh]
    return pointers(np.bincount(reader, minlength=num_nodes)), maker, reader


def readers(num_nodes: int, edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64[N + 1], int32[M]): the nodes that read each node, ascending."""
    maker, reader = edges
    ptr, order = sorted_by(maker, num_nodes)
    return ptr, reader[order]


def sorted_by(key: np.ndarray, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64[keys + 1], int32[len]): where each key begins, and the places with it."""
    ptr = pointers(np.bincount(key, minlength=num_keys))
    if num_keys < 1 << 15:
        key = key.astype(np.int16)  # sorted by radix
    return ptr, np.argsort(key, kind="stable").astype(np.int32)


def heights(num_nodes: int, edges: Edges) -> np.ndarray:
    """Returns int32[N], edges on the longest path that begins in each node."""
    maker, reader = edges
    return longest_paths(num_nodes, reader[::-1], maker[::-1])


def induced(
    node_type: np.ndarray, num_types: int, edges: Edges, types: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, Edges]:
    """Returns the subgraph of some types: nodes, place of each type id, edges between them.

    The edges number the nodes of the subgraph; the place of other types is -1.
    """
    place = np.full(num_types, -1, np.int32)
    place[types] = np.arange(len(types))
    maker, reader = edges
    is_inside = place[node_type] >= 0
    index = np.cumsum(is_inside, dtype=np.int32) - np.int32(1)
    inside = is_inside[maker] & is_inside[reader]
    return np.flatnonzero(is_inside), place, (index[maker[inside]], index[reader[inside]])


def ranks(
    node_type: np.ndarray, num_types: int, edges: Edges, components: Sequence[Sequence[int]]
) -> np.ndarray:
    """Returns int32[N]: other nodes of its type on a longest path that ends in each node.

    Nodes of types outside of the components are of rank 0.
    """
    rank = np.zeros(len(node_type), np.int32)
    for types in components:
        nodes, place, inner = induced(node_type, num_types, edges, types)
        rank[nodes] = longest_chains(place[node_type[nodes]], *inner) - 1
    return rank


def chains(
    node_type: np.ndarray, num_types: int, edges: Edges, components: Sequence[Sequence[int]]
) -> np.ndarray:
    """Returns int32[N]: nodes of its type on a longest path that begins in each, it included."""
    chain = np.ones(len(node_type), np.int32)
    for types in components:
        nodes, place, (maker, reader) = induced(node_type, num_types, edges, types)
        places = place[node_type[nodes]][::-1]
        last = len(nodes) - 1
        chain[nodes[::-1]] = longest_chains(places, last - reader[::-1], last - maker[::-1])
    return chain


def chain_types(node_type: np.ndarray, num_types: int, edges: Edges) -> np.ndarray:
    """Returns bool[T]: types with at least `MIN_CHAINED_SHARE` of their inner edges in chains."""
    maker, reader = edges
    same = node_type[maker] == node_type[reader]
    maker, reader = maker[same], reader[same]
    num_readers = np.bincount(maker, minlength=len(node_type))
    num_makers = np.bincount(reader, minlength=len(node_type))
    is_link = (num_readers[maker] == 1) & (num_makers[reader] == 1)
    num_edges = np.bincount(node_type[reader], minlength=num_types)
    num_links = np.bincount(node_type[reader[is_link]], minlength=num_types)
    return (num_links >= MIN_CHAINED_SHARE * num_edges) & (num_edges > 0)


def changes_of_type(node_type: np.ndarray, edges: Edges, height: np.ndarray) -> np.ndarray:
    """Returns bool[N]: whether a longest path goes on from the node to one of another type."""
    maker, reader = edges
    onward = height[maker] == height[reader] + 1
    changes = np.zeros(len(node_type), bool)
    changes[maker[onward & (node_type[maker] != node_type[reader])]] = True
    return changes


def type_relations(
    node_type: np.ndarray, num_types: int, edges: Edges
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (bool[T, T], bool[T]): where paths lead, and which types read themselves.

    A path leads from one type to another if it does from some node of the one to one of the other.
    """
    return reachable_types(node_type, num_types, edges), reads_itself(node_type, num_types, edges)


def reachable_types(node_type: np.ndarray, num_types: int, edges: Edges) -> np.ndarray:
    """Returns bool[T, T]: whether a path leads from some node of one type to one of another."""
    present = np.flatnonzero(np.bincount(node_type, minlength=num_types))
    place = np.zeros(num_types, np.int64)
    place[present] = np.arange(len(present))
    places = place[node_type]
    maker, reader = edges
    # Of the types present only: NumPy multiplies large matrices in threads of its own, which
    # keep a core busy long after.
    reach = np.zeros((len(present), len(present)), bool)
    pairs = places[maker] * len(present) + places[reader]
    reach.ravel()[np.unique(pairs) if len(present) > 300 else np.bincount(pairs).nonzero()] = 1
    of_all_types = np.zeros((num_types, num_types), bool)
    of_all_types[np.ix_(present, present)] = transitive_closure(reach)
    return of_all_types


def transitive_closure(leads: np.ndarray) -> np.ndarray:
    """Returns bool[K, K], whether a path leads from one to another, given edges."""
    while True:
        further = leads | ((leads.astype(np.float32) @ leads) > 0)
        if (further == leads).all():
            return further
        leads = further


def reads_itself(node_type: np.ndarray, num_types: int, edges: Edges) -> np.ndarray:
    """Returns bool[T]: whether a node of the type reads another one of it."""
    maker, reader = (node_type[end] for end in edges)
    return np.bincount(maker[maker == reader], minlength=num_types) > 0


def strong_components(reach: np.ndarray, present: Sequence[int]) -> list[list[int]]:
    """Returns the strongly connected components of the types present, makers before readers.

    Args:
      reach: bool[T, T], from `reachable_types`.
      present: the types that have nodes.
    """
    if len(reach) > MANY_TYPES:
        return _components(reach, present)
    known = _known_components(reach.tobytes(), len(reach), tuple(present))
    return [list(group) for group in known]


@functools.lru_cache(maxsize=256)
def _known_components(reach: bytes, num_types: int, present: tuple[int, ...]) -> list[list[int]]:
    """The same, found once: minibatches of one function mostly have the same."""
    return _components(np.frombuffer(reach, bool).reshape(num_types, num_types), present)


def _components(reach: np.ndarray, present: Sequence[int]) -> list[list[int]]:
    mutual = (reach & reach.T) | np.eye(len(reach), dtype=bool)
    before = (reach & ~mutual).sum(0)
    groups = {tuple(np.flatnonzero(mutual[t]).tolist()) for t in present}
    return sorted(map(list, groups), key=lambda group: (before[group[0]], group))
