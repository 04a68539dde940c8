"""Uses of lists: what is done with a list at one time, where it is read again and again.

A decoder attends over the states of an encoder in every step. All steps read one stack, but each
waits for the one before, and how many there are differs from instance to instance. So what is done
with a list falls into *uses*: operations that depend on each other and on nothing that comes of the
list and waits for them outside. Each use becomes a node of its own that reads the elements.

An operation on rows of the list begins a use if it reads something computed besides them, such as
the state of a decoder. Elements that it reads, and results with a row for each, such as keys that
are computed once, belong to an earlier use.

Uses of the same stacks that begin with these are one, such as the mean and the maximum of a list.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import NamedTuple

from jedbatch._graph.union_find import UnionFind
from jedbatch._record.passes.list_regions import RecordedNodes


class Use(NamedTuple):
    """Operations on a list that make up one of its uses.

    Attributes:
      nodes: in the order of recording, without stacks.
      stacks: the stacks that they read.
      earlier: the values of earlier uses, with a row for each element, that they read.
    """

    nodes: list[int]
    stacks: list[int]
    earlier: list[int]


def find_uses(recorded: RecordedNodes, nodes: range, on_lists: Set[int]) -> list[Use]:
    """Returns the uses of lists in an instance.

    Args:
      recorded: the recording, whose values with axes as long as lists are known.
      nodes: of the instance, from the first stack on.
      on_lists: those that read such values.
    """
    level = _levels(recorded, nodes, on_lists)
    members = on_lists | _between(recorded, on_lists, level)
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
        read = dict.fromkeys(r for n in own for r in recorded.reads(n) if r >= 0)
        listed = [r for r in read if r in recorded.axes_of and recorded.maker[r] not in inside]
        stacks = [m for r in listed if (m := recorded.maker[r]) in recorded.stacks]
        earlier = [r for r in listed if recorded.maker[r] not in recorded.stacks]
        uses.append(Use(own, stacks, earlier))
    return _joined(recorded, uses, level)


def _joined(recorded: RecordedNodes, uses: Sequence[Use], level: Mapping[int, int]) -> list[Use]:
    """Makes one use of those that read nothing but the same stacks, such as a mean and a maximum.

    Not if two of them are alike, which others may have more of.
    """
    together: dict[Hashable, list[Use]] = {}
    for k, use in enumerate(uses):
        of_stacks = max([level[m] for m in use.stacks], default=-1)
        begins = use.earlier or level[use.nodes[0]] > of_stacks
        together.setdefault(k if begins else tuple(sorted(use.stacks)), []).append(use)
    joined = []
    for same in together.values():
        kinds = {tuple(recorded.name(n) for n in use.nodes) for use in same}
        if len(kinds) == len(same):
            nodes = sorted(n for use in same for n in use.nodes)
            same = [same[0]._replace(nodes=nodes)]
        joined += same
    return joined


def _levels(recorded: RecordedNodes, nodes: range, on_lists: Set[int]) -> dict[int, int]:
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
        if n in on_lists:
            begins = bool(outside)
            level[n] = max([*(k + begins for k in inside | stacked), *outside])
        elif len(inside) == 1 and not stacked and not outside and not recorded.picks(n):
            level[n] = inside.pop()
        else:
            waits = max([0, *stacked, *outside, *(k + 1 for k in inside)])
            (level if n in recorded.stacks else after)[n] = waits
    return level


def _between(recorded: RecordedNodes, on_lists: Set[int], level: Mapping[int, int]) -> set[int]:
    """Returns the nodes besides those on lists that these read within a use."""
    between: set[int] = set()
    waiting = list(on_lists)
    while waiting:
        n = waiting.pop()
        for m in recorded.makers(n):
            others = m not in on_lists and m not in recorded.stacks and m not in between
            if others and m in level and level[m] == level[n]:
                between.add(m)
                waiting.append(m)
    return between
