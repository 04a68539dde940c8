"""Trees whose nodes have any number of children, `(value, *children)`, handled without recursion.

Syntax trees and dependency trees may be deeper than Python's stack.
"""

from collections.abc import Sequence
from typing import Any

from jedbatch import checks
from jedbatch.data.vocabulary import Vocabulary

A_TREE = "trees such as (value, *children)"

Rooted = tuple[Any, ...]  # (value, *children)


def rooted(values: Sequence[Any], parents: Sequence[int]) -> Rooted:
    """The tree of nodes that come after their parents; children are in the order of nodes."""
    below: list[list[Rooted]] = [[] for _ in values]
    for number in range(len(values) - 1, 0, -1):
        below[parents[number]].append((values[number], *reversed(below[number])))
    return (values[0], *reversed(below[0]))


def unrooted(root: Rooted) -> tuple[list[Any], list[int]]:
    """(values, parents) of the nodes of a tree, those near the root first."""
    nodes, parents = [root], [-1]
    for number, node in enumerate(nodes):
        if not isinstance(node, (tuple, list)) or not node:
            raise TypeError(f"{checks.brief(node)} is no tree; expected {A_TREE}")
        nodes += node[1:]
        parents += [number] * (len(node) - 1)
    return [node[0] for node in nodes], parents


def renumbered(root: Rooted, vocabulary: Vocabulary) -> Rooted:
    """The tree with numbers for values."""
    values, parents = unrooted(root)
    return rooted([vocabulary[value] for value in values], parents)
