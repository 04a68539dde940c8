"""Trees of a minibatch, level by level: how an expert batches recursion by hand.

All nodes of equal height are computed together. States of all nodes are in one buffer, in which a
level is a slice; a level gathers the states of its children. Where there are several kinds of
inner node, a level has a part for each. Parts are as wide as in the widest of all minibatches, so
that the program is compiled once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# (instance, node) → (kind, number or array, children); the kind of a leaf is of no account
Read = Callable[[int, Any], tuple[int, Any, Sequence[Any]]]


class Part(NamedTuple):
    """Nodes of one height and kind.

    Attributes:
      data: of the nodes, [width, ...].
      child: rows of their children, int[edges].
      parent: which of the nodes they are children of, int[edges]; `width` for padding.
    """

    data: np.ndarray
    child: np.ndarray
    parent: np.ndarray


class Forest(NamedTuple):
    """The trees of a minibatch.

    Attributes:
      leaves: their data, [leaves, ...]; they have the first rows of the buffer.
      levels: parts of each height, from 1 on; None where no minibatch has such nodes.
      roots: rows, int[instances].
    """

    leaves: np.ndarray
    levels: list[list[Part | None]]
    roots: np.ndarray


class _Node(NamedTuple):
    place: tuple[int, int]  # height and kind
    data: Any
    children: list[int]


def prepare(minibatches: Sequence[Sequence[Any]], read: Read, kinds: int = 1) -> list[Forest]:
    """The trees of each minibatch; of inner nodes there are so many kinds."""
    listed = [_listed(roots, read) for roots in minibatches]
    heights = 1 + max(n.place[0] for nodes, _ in listed for n in nodes)
    places = [(0, 0)] + [(height, kind) for height in range(1, heights) for kind in range(kinds)]
    found = [{p: [i for i, n in enumerate(nodes) if n.place == p] for p in places}
             for nodes, _ in listed]  # fmt: skip
    widths = {p: max(len(parts[p]) for parts in found) for p in places}
    edges = {
        p: max(
            sum(len(nodes[i].children) for i in parts[p])
            for (nodes, _), parts in zip(listed, found, strict=True)
        )
        for p in places
    }
    like = {n.place: np.zeros_like(n.data) for nodes, _ in listed for n in nodes}
    first = dict(zip(places, np.cumsum([0, *widths.values()]), strict=False))
    forests = []
    for (nodes, roots), parts in zip(listed, found, strict=True):
        row = np.zeros(len(nodes), np.int32)
        for p in places:
            row[parts[p]] = first[p] + np.arange(len(parts[p]))

        def part(p: tuple[int, int], nodes: Any = nodes, parts: Any = parts, row: Any = row) -> Any:
            if not widths[p]:
                return None
            within = [nodes[i] for i in parts[p]]
            data = np.stack([n.data for n in within] or [like[p]])
            data = data.astype(np.float32 if data.dtype.kind == "f" else np.int32)
            data = np.concatenate([data, data[:1].repeat(widths[p] - len(data), 0)])
            child = row[[c for n in within for c in n.children]]
            parent = np.repeat(np.arange(len(within)), [len(n.children) for n in within])
            room = (0, edges[p] - len(child))
            parent = np.pad(parent, room, constant_values=widths[p])
            return Part(data, np.pad(child, room).astype(np.int32), parent.astype(np.int32))

        levels = [[part((h, kind)) for kind in range(kinds)] for h in range(1, heights)]
        forests.append(Forest(part((0, 0)).data, levels, row[roots]))
    return forests


def _listed(roots: Sequence[Any], read: Read) -> tuple[list[_Node], list[int]]:
    """(all nodes, which of them are roots)."""
    nodes: list[_Node] = []

    def visit(instance: int, node: Any) -> int:
        kind, data, below = read(instance, node)
        children = [visit(instance, child) for child in below]
        height = 1 + max((nodes[c].place[0] for c in children), default=-1)
        nodes.append(_Node((height, kind if height else 0), np.asarray(data), children))
        return len(nodes) - 1

    return nodes, [visit(i, root) for i, root in enumerate(roots)]


def climb(forest: Forest, leaf: Callable, inner: Sequence[Callable]) -> Any:
    """States of the roots, a pytree of arrays [instances, ...].

    Args:
      forest: made by `prepare`.
      leaf: maps data [leaves, ...] to states.
      inner: for each kind a function of data [width, ...], states of children [edges, ...] and
        their parents [edges]; it returns states [width, ...].
    """
    buffer = leaf(forest.leaves)
    row = len(forest.leaves)
    rows = row + sum(len(part.data) for level in forest.levels for part in level if part)
    buffer = jax.tree.map(lambda x: jnp.pad(x, [(0, rows - row)] + [(0, 0)] * (x.ndim - 1)), buffer)
    for level in forest.levels:
        for kind, part in enumerate(level):
            if part is not None:
                below = jax.tree.map(lambda x, part=part: x[part.child], buffer)
                states = inner[kind](part.data, below, part.parent)
                place = lambda x, y, row=row: jax.lax.dynamic_update_slice_in_dim(x, y, row, 0)  # noqa: E731
                buffer = jax.tree.map(place, buffer, states)
                row += len(part.data)
    return jax.tree.map(lambda x: x[forest.roots], buffer)


def total(x: jax.Array, parent: jax.Array, width: int) -> jax.Array:
    """Sums over children, [edges, ...] to [width, ...]."""
    return jax.ops.segment_sum(x, parent, width)
