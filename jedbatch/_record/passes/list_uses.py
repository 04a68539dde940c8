"""Uses of lists: what is done with a list at one time, where it is read again and again.

A decoder attends over the states of an encoder in every step. All steps read one stack, but each
waits for the one before, and how many there are differs from instance to instance. So what is done
with a list falls into *uses*: operations that depend on each other and on nothing that comes of the
list and waits for them outside. Each use becomes a node of its own that reads the elements.

An operation on rows of the list begins a use if it reads something computed besides them, such as
the state of a decoder. Elements that it reads, and results with a row for each, such as keys that
are computed once, belong to an earlier use.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jedbatch._graph.union_find import UnionFind
from jedbatch._record.passes.list_regions import RecordedNodes


class Use(NamedTuple):
    """Operations on a list that make up one of its uses.

    Attributes:
      nodes: in the order of recording, without stacks.
      stacks: the stacks that they read.
      earlier: the values of earlier uses, with a row for each element, that they read.
      lengths: of the lists; a use of lists of several lengths is no node.
    """

    nodes: list[int]
    stacks: list[int]
    earlier: list[int]
    lengths: set[int]


def find_uses(
    recorded: RecordedNodes,
    nodes: range,
    length_of: Mapping[int, int],
    listed: Mapping[int, int],
) -> list[Use]:
    """Returns the uses of lists in an instance.

    Args:
      recorded: the recording.
      nodes: of the instance, from the first stack on.
      length_of: by node that makes or reads values with an axis as long as a list, that length.
      listed: the maker of each such value.
    """
    of_lists = {n for n in nodes if n in length_of and n not in recorded.stacks}
    level = _levels(recorded, nodes, of_lists)
    members = of_lists | _between(recorded, of_lists, level)
    connected: UnionFind[int] = UnionFind()
    for n in members:
        for m in recorded.makers(n):
            if m in members and level[m] == level[n]:
                connected.union(n, m)
    together: dict[int, list[int]] = {}
    for n in sorted(members):
        together.setdefault(connected.find(n), []).append(n)
    uses = []
    for own in together.values():
        inside = set(own)
        read = dict.fromkeys(r for n in own for r in recorded.reads(n) if r in listed)
        makers = {r: listed[r] for r in read if listed[r] not in inside}
        stacks = [m for m in dict.fromkeys(makers.values()) if m in recorded.stacks]
        earlier = [r for r, m in makers.items() if m not in recorded.stacks]
        lengths = {length_of[n] for n in (*own, *makers.values()) if n in length_of}
        uses.append(Use(own, stacks, earlier, lengths))
    return uses


def _levels(recorded: RecordedNodes, nodes: range, of_lists: Collection[int]) -> dict[int, int]:
    """Returns numbers of nodes: equal in a use, and higher in one that waits for it.

    Nodes have one that work on lists, stack them, or depend on nodes of one level alone; such are
    of a use if it reads them.
    """
    level: dict[int, int] = {}
    after: dict[int, int] = {}  # of other nodes: the level of what reads them, at least
    for n in nodes:
        makers = recorded.makers(n)
        inside = {level[m] for m in makers if m in level and m not in recorded.stacks}
        stacked = {level[m] for m in makers if m in recorded.stacks and m in level}
        outside = {after.get(m, 0) for m in makers if m not in level}
        if n in of_lists:
            begins = bool(outside)
            level[n] = max([*(k + begins for k in inside | stacked), *outside])
        elif len(inside) == 1 and not stacked and not outside and not recorded.picks(n):
            level[n] = inside.pop()
        else:
            waits = max([0, *stacked, *outside, *(k + 1 for k in inside)])
            (level if n in recorded.stacks else after)[n] = waits
    return level


def _between(
    recorded: RecordedNodes, of_lists: Collection[int], level: Mapping[int, int]
) -> set[int]:
    """Returns the nodes besides those on lists that these read within a use."""
    between: set[int] = set()
    waiting = list(of_lists)
    while waiting:
        n = waiting.pop()
        for m in recorded.makers(n):
            others = m not in of_lists and m not in recorded.stacks and m not in between
            if others and m in level and level[m] == level[n]:
                between.add(m)
                waiting.append(m)
    return between
