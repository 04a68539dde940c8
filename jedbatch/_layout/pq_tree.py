"""Orders in which given sets are consecutive: the PQ-tree of Booth and Lueker.

Which orders of some leaves keep every set of a family together? There may be exponentially many,
yet one small tree describes them all. Its leaves are read from left to right, and

- the children of a P-node may be permuted at will, `(a b c)`,
- the children of a Q-node may be reversed, and nothing else, `[a b c]`.

The tree starts as one P-node, which permits every order. `reduce` takes a set and keeps of the
permitted orders those in which the set is consecutive; if none would be left, it says so and
changes nothing. Nodes of two children are Q-nodes here, as reversing is all there is to do; they
are printed as P-nodes are, `(a b)`.

The method. A node is full if all its leaves are in the set, partial if only some are. The apex is
the lowest node over the whole set. Partial nodes below it must form at most two paths that lead
down from it, its arms, and every partial node of an arm must be able to show its full children
at one end. Booth and Lueker update the tree by nine templates. Hsu and McConnell saw that a
single rule is enough if all of the arms becomes one Q-node, and this is what is done here:

    a node of an arm becomes a Q-node `[empty children, what its own arm became, full children]`,
    which dissolves in the Q-node that its parent becomes, and so on up to the apex.

Since the full children of a node move and the empty ones stay, the work is that of the set and of
the arms, and arms vanish, so in sum it grows with the sizes of the sets and not with the tree:

- Children of a dissolved Q-node do not learn of their new parent; a union-find tells it. Nor are
  they turned around: siblings are linked both ways, and the union-find also tells whether left
  and right have changed places.
- The apex is found without climbing far above it: all partial nodes climb in turns, a step each,
  those that meet go on as one, and the last one stops.

A set that is refused may cost the length of its arms again and again: they do not vanish then.
All state is in flat lists, so that a copy of a tree costs little.

K. S. Booth and G. S. Lueker, Testing for the consecutive ones property, interval graphs, and graph
planarity using PQ-tree algorithms, JCSS 1976. W.-L. Hsu and R. M. McConnell, PC trees and
circular-ones arrangements, TCS 2003. S. D. Fink, M. Pfretzschner, I. Rutter, Experimental
comparison of PC-trees and PQ-trees, ESA 2021 (the union-find).
"""

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

Choose = Callable[[int, list[int], list[int]], Sequence[int]]  # see `PQTree.frontier`


class PQTree:
    """All orders of leaves that keep some sets consecutive.

    Nodes are integers, the leaves those from 0 on.

    Attributes:
      num_leaves: how many leaves there are.
      root: the topmost node, -1 of a tree without leaves.
      kind: "leaf", "P" or "Q" of every node; those that are no longer in the tree keep theirs.
      num_changes: how often `reduce` has changed which orders are permitted.
      dissolved: Q-nodes that are now part of another, in the order in which it happened.
    """

    def __init__(self, num_leaves: int):
        self.num_leaves = num_leaves
        self.root = -1
        self.num_changes = 0
        self.kind: list[str] = []
        self.dissolved: list[int] = []
        self._parent: list[int] = []  # as it was when the node came to its place, see `find`
        self._near: tuple[list[int], list[int]] = ([], [])  # siblings left, right as it was then
        self._end: tuple[list[int], list[int]] = ([], [])  # first and last child
        self._size: list[int] = []  # number of children
        self._into: list[int] = []  # the Q-node that a Q-node has dissolved in
        self._turned: list[bool] = []  # whether it was reversed then
        for _ in range(num_leaves):
            self._new("leaf")
        if num_leaves:
            self.root = self._group(list(range(num_leaves)))

    def copy(self) -> "PQTree":
        """An independent copy."""
        copy = PQTree(0)
        copy.num_leaves, copy.root = self.num_leaves, self.root
        copy.num_changes = self.num_changes
        copy.kind, copy.dissolved = self.kind.copy(), self.dissolved.copy()
        copy._parent, copy._size = self._parent.copy(), self._size.copy()
        copy._near = self._near[0].copy(), self._near[1].copy()
        copy._end = self._end[0].copy(), self._end[1].copy()
        copy._into, copy._turned = self._into.copy(), self._turned.copy()
        return copy

    # --- reading ---

    def find(self, node: int) -> tuple[int, bool]:
        """(the Q-node that a Q-node is part of by now, whether it is reversed in it)."""
        into = self._into
        if into[node] < 0:
            return node, False
        path = []
        while into[node] >= 0:
            path.append(node)
            node = into[node]
        turned = False
        for passed in reversed(path):
            turned ^= self._turned[passed]
            self._turned[passed], into[passed] = turned, node
        return node, turned

    def parent(self, node: int) -> int:
        """The parent of a node, -1 of the root."""
        above = self._parent[node]
        return above if above < 0 or self._into[above] < 0 else self.find(above)[0]

    def children(self, node: int) -> list[int]:
        """The children of a node from left to right."""
        return self._walk(self._end[0][node], self._size[node])

    def size(self, node: int) -> int:
        """The number of children of a node."""
        return self._size[node]

    def subtree(self, leaves: Iterable[int]) -> list[tuple[int, list[int]]]:
        """The nodes that order a set that was reduced: (node, children in the set), bottom-up.

        Only the last may have other children as well; then it is a Q-node.
        """
        full, nodes = self._label(leaves)
        pairs = [(node, self.children(node)) for node in nodes]
        for node, members in full.items():
            if 1 < len(members) < self._size[node]:
                run = self._run(members)
                assert run, f"{members} are not consecutive"
                pairs.append((node, run))
        return pairs

    def frontier(self, choose: Choose | None = None) -> list[int]:
        """One of the permitted orders.

        Args:
          choose: given (node, its children from left to right, the least leaf below each node of
            the tree), returns the children in the order to read them, one that the node permits.
            By default the least leaf decides: children of P-nodes ascend, and Q-nodes are read
            from the end that has the smaller one. The order depends on the permitted orders
            alone then, not on how the tree came to be.
        """
        return [word for word in self._words(choose) if isinstance(word, int)]

    def orders(self, node: int | None = None) -> Iterator[list[int]]:
        """All permitted orders, one after the other; for small trees."""
        node = self.root if node is None else node
        if node < self.num_leaves:
            yield [node] if node >= 0 else []
            return
        children = self.children(node)
        ways: Iterable[Sequence[int]] = (children, children[::-1])
        if self.kind[node] == "P":
            ways = itertools.permutations(children)
        for way in ways:
            for parts in itertools.product(*(list(self.orders(child)) for child in way)):
                yield list(itertools.chain(*parts))

    def __str__(self) -> str:
        """Such as `(0 1 [2 3 (4 5)])`; trees that permit the same orders are printed alike."""
        text = " ".join(map(str, self._words(None)))
        for bracket in "([":
            text = text.replace(bracket + " ", bracket)
        for bracket in ")]":
            text = text.replace(" " + bracket, bracket)
        return text

    def _words(self, choose: Choose | None) -> Iterator[int | str]:
        """The leaves in an order, and brackets around the leaves of each inner node."""
        least = self._least()
        choose = choose or _least_first(self.kind)
        stack: list[int | str] = [self.root] if self.root >= 0 else []
        while stack:
            node = stack.pop()
            if isinstance(node, str) or node < self.num_leaves:
                yield node
            else:
                opening, closing = "[]" if self.kind[node] == "Q" and self._size[node] > 2 else "()"
                yield opening
                stack.append(closing)
                stack += reversed(choose(node, self.children(node), least))

    def check(self) -> None:
        """Raises `AssertionError` if the tree is inconsistent."""
        nodes = self._nodes()
        assert sorted(x for x in nodes if x < self.num_leaves) == list(range(self.num_leaves))
        assert not nodes or self.parent(self.root) == -1
        for node in nodes:
            children = self.children(node)
            if self.kind[node] == "leaf":
                assert node < self.num_leaves
                assert not children
                continue
            assert len(children) >= (3 if self.kind[node] == "P" else 2)
            assert self._end[0][node] == children[0]
            assert self._end[1][node] == children[-1]
            for left, right in itertools.pairwise([-1, *children, -1]):
                assert left < 0 or (self.parent(left) == node and self._beside(left, 1) == right)
                assert right < 0 or self._beside(right, 0) == left

    def _nodes(self) -> list[int]:
        """All nodes, parents before children."""
        nodes = [self.root] if self.root >= 0 else []
        for node in nodes:
            nodes += self.children(node)
        return nodes

    def _least(self) -> list[int]:
        """The least leaf below each node of the tree."""
        least = [*range(self.num_leaves), *[self.num_leaves] * (len(self.kind) - self.num_leaves)]
        for node in reversed(self._nodes()):
            if (above := self.parent(node)) >= 0:
                least[above] = min(least[above], least[node])
        return least

    def _beside(self, node: int, side: int) -> int:
        """The sibling on the left (side 0) or on the right (side 1), -1 if there is none."""
        above = self._parent[node]
        if self._into[above] >= 0 and self.find(above)[1]:
            side = 1 - side
        return self._near[side][node]

    def _walk(self, node: int, count: int) -> list[int]:
        """So many siblings from a node to the right."""
        visited = []
        for _ in range(count):
            visited.append(node)
            node = self._beside(node, 1)
        return visited

    def _run(self, members: Collection[int]) -> list[int] | None:
        """Children of a node from left to right if they follow each other, else None."""
        members = set(members)
        first = last = next(iter(members))
        count = 1
        while (node := self._beside(first, 0)) in members:
            first, count = node, count + 1
        while (node := self._beside(last, 1)) in members:
            last, count = node, count + 1
        return self._walk(first, count) if count == len(members) else None

    # --- reducing ---

    def reduce(self, leaves: Iterable[int]) -> bool:
        """Makes a set of leaves consecutive; False, and nothing has changed, if it cannot be."""
        full, _ = self._label(leaves)
        apex, below = self._climb(full)
        if apex < 0:
            return True
        partial = below[apex]
        arms = [self._arm(node, below) for node in partial]
        if len(arms) > 2 or any(len(below[arm[-1]]) > 1 for arm in arms):
            return False
        run = None
        if self.kind[apex] == "Q":
            run = self._run(full.get(apex, []) + partial)
            if run is None or not {run[0], run[-1]}.issuperset(partial):
                return False
        sides = self._full_sides(itertools.chain(*arms), full, below)
        if sides is None:
            return False
        self.num_changes += bool(arms or (not run and len(full[apex]) > 1))
        straight = [self._straighten(arm, full, sides) for arm in arms]
        if run:
            for first, (node, side) in zip(partial, straight, strict=True):
                self._dissolve(node, side != (first == run[0]))
        else:
            self._gather(apex, straight, full.get(apex, []))
        return True

    def _label(self, leaves: Iterable[int]) -> tuple[dict[int, list[int]], list[int]]:
        """(the full children of nodes that have some, full inner nodes bottom-up)."""
        full: dict[int, list[int]] = {}
        nodes = list(dict.fromkeys(map(int, leaves)))
        count = len(nodes)
        parent, into, size = self._parent, self._into, self._size
        for node in nodes:
            above = parent[node]
            if above < 0:
                break  # the root is full
            if into[above] >= 0:
                above = self.find(above)[0]
            members = full.setdefault(above, [])
            members.append(node)
            if len(members) == size[above]:
                nodes.append(above)
        return full, nodes[count:]

    def _climb(self, full: dict[int, list[int]]) -> tuple[int, dict[int, list[int]]]:
        """(apex or -1 if no node is partial, the partial children of every partial node)."""
        starts = [node for node, members in full.items() if len(members) < self._size[node]]
        below: dict[int, list[int]] = {node: [] for node in starts}
        climbing = collections.deque(starts)
        apex = -1
        while len(climbing) + (apex >= 0) > 1:
            node = climbing.popleft()
            above = self.parent(node)
            if above < 0:
                apex = node  # the root; the others will come to where this one passed
            elif above in below:
                below[above].append(node)
            else:
                below[above] = [node]
                climbing.append(above)
        if climbing:
            apex = climbing[0]
        while apex >= 0 and apex not in full and len(below[apex]) == 1:
            apex = below[apex][0]
        return apex, below

    def _arm(self, node: int, below: dict[int, list[int]]) -> list[int]:
        """The nodes of an arm from the top; the rest of a path that forks is left out."""
        arm = [node]
        while len(below[node]) == 1:
            node = below[node][0]
            arm.append(node)
        return arm

    def _full_sides(
        self, nodes: Iterable[int], full: dict[int, list[int]], below: dict[int, list[int]]
    ) -> dict[int, int] | None:
        """The side on which Q-nodes of an arm show their full children; None if one cannot."""
        sides = {}
        for node in nodes:
            if self.kind[node] == "Q":
                run = self._run(full.get(node, []) + below[node])
                if run is None:
                    return None
                for side, outer, inner in ((1, run[-1], run[0]), (0, run[0], run[-1])):
                    if self._beside(outer, side) < 0 and below[node] in ([], [inner]):
                        sides[node] = side
                        break
                else:
                    return None
        return sides

    def _straighten(
        self, arm: list[int], full: dict[int, list[int]], sides: dict[int, int]
    ) -> tuple[int, int]:
        """Makes an arm one Q-node in its place: (Q-node, its full side)."""
        straight, side = -1, 1
        for node in reversed(arm):
            if self.kind[node] == "Q":
                if straight >= 0:
                    self._dissolve(straight, side != sides[node])
                straight, side = node, sides[node]
                continue
            members = full.get(node, [])
            for member in members:
                self._remove(member)
            if straight >= 0:
                self._remove(straight)
            else:
                straight = self._new("Q")
            self._replace(node, straight)
            empty = self._settle(node)
            if empty >= 0:
                self._attach(straight, 1 - side, empty)
            if members:
                self._attach(straight, side, self._group(members))
        return straight, side

    def _gather(self, apex: int, straight: list[tuple[int, int]], full: list[int]) -> None:
        """The last step at a P-node: straightened arms and full children become one child."""
        if not straight and len(full) == 1:
            return
        for node in [*full, *(node for node, _ in straight)]:
            self._remove(node)
        if straight:
            middle, side = straight[0]
            if full:
                self._attach(middle, side, self._group(full))
            for node, full_side in straight[1:]:
                self._attach(middle, side, node)
                self._dissolve(node, full_side == side)
        else:
            middle = self._group(full)
        if self._size[apex]:
            self._attach(apex, 1, middle)
            self._settle(apex)
        else:
            self._replace(apex, middle)

    # --- changing ---

    def _new(self, kind: str) -> int:
        """A node that is not in the tree yet."""
        self.kind.append(kind)
        self._size.append(0)
        self._turned.append(False)
        for links in (self._parent, *self._near, *self._end, self._into):
            links.append(-1)
        return len(self.kind) - 1

    def _link(self, parent: int, left: int, right: int) -> None:
        """Makes two children of a node neighbours; -1 is what is beyond its first or last child."""
        for node, other, side in ((left, right, 1), (right, left, 0)):
            if node < 0:
                self._end[1 - side][parent] = other
            else:
                turned = self.find(self._parent[node])[1]
                self._near[side ^ turned][node] = other

    def _attach(self, parent: int, side: int, node: int) -> None:
        """Makes a node the first (side 0) or last (side 1) child of another."""
        self._parent[node] = parent
        end = self._end[side][parent]
        left, right = (end, -1) if side else (-1, end)
        self._link(parent, left, node)
        self._link(parent, node, right)
        self._size[parent] += 1

    def _remove(self, node: int) -> None:
        """Takes a node from its parent."""
        above = self.parent(node)
        self._link(above, self._beside(node, 0), self._beside(node, 1))
        self._parent[node] = -1
        self._size[above] -= 1

    def _replace(self, node: int, new: int) -> None:
        """Puts a new node in the place of one that leaves the tree."""
        above = self.parent(node)
        self._parent[new] = above
        if above < 0:
            self.root = new
        else:
            left, right = self._beside(node, 0), self._beside(node, 1)
            self._link(above, left, new)
            self._link(above, new, right)
        self._parent[node] = -1

    def _dissolve(self, node: int, turned: bool) -> None:
        """Puts the children of a Q-node in its place in a Q-node, reversed if need be."""
        above = self.parent(node)
        left, right = self._beside(node, 0), self._beside(node, 1)
        first, last = self._end[turned][node], self._end[not turned][node]
        self._into[node], self._turned[node] = above, turned
        self._link(above, left, first)
        self._link(above, last, right)
        self._size[above] += self._size[node] - 1
        self.dissolved.append(node)

    def _group(self, nodes: list[int]) -> int:
        """The node, not in the tree yet, that permits all orders of these."""
        if len(nodes) == 1:
            return nodes[0]
        group = self._new("P")
        for node in nodes:
            self._attach(group, 1, node)
        return self._settle(group)

    def _settle(self, node: int) -> int:
        """Returns what replaces a P-node that lost children: itself, its only child, or -1."""
        if self._size[node] == 1:
            only = self._end[0][node]
            self._remove(only)
            return only
        if self._size[node] == 2:
            self.kind[node] = "Q"
        return node if self._size[node] else -1


def _least_first(kind: list[str]) -> Choose:
    """The order of children that depends on the permitted orders alone."""

    def choose(node: int, children: list[int], least: list[int]) -> list[int]:
        if kind[node] == "P":
            return sorted(children, key=least.__getitem__)
        return children[::-1] if least[children[-1]] < least[children[0]] else children

    return choose
