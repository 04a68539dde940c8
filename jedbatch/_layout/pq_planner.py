"""An order of variables in memory in which batches read and write without gathering.

A batch runs several operations at once. Its result and each of its sources is an operand: a
sequence of variables, of which number k belongs to operation k. An operand is read or written in
one piece if its variables are

- adjacent: no other variable lies between them, and
- aligned: they come in the order in which the batch runs its operations, the same for all of its
  operands.

Variables are results of one batch and sources of others, so what suits one batch may not suit
another. This is the memory planning of ED-Batch (Chen et al., ICML 2023, section 4):

1. Adjacency. A PQ-tree holds the orders in which the operands so far are adjacent.
2. Broadcast. What the tree says of the variables of one operand must hold of the other operands
   of the batch, position by position. Sets that are consecutive in one are made so in the others,
   and batches that share variables with them are looked at again, until the parts of the tree
   below the operands of each batch have equal shapes.
3. Alignment. Equal shapes still leave choices: directions of Q-nodes, permutations of P-nodes.
   Those of corresponding nodes are united in a union-find, together with the bijection between
   their places, which are the two ends of a Q-node and the children of a P-node. It is a
   contradiction if a node is united with itself by anything but the identity.
4. Every class of nodes makes one choice, and the order is read off the tree.

Steps 1 and 2 exclude nothing that could be part of a solution, and after them the orders of the
tree are its choices, each independent of the others. So an order with every operand adjacent and
aligned is found whenever there is one.

Where there is none, we depart from the paper, which drops whole batches: operands are admitted one
by one, those of an earlier batch first; in a batch, the result before the sources. An operand that
no order allows together with those admitted before it is dropped, and everything is as if it had
not been there. This is exact: trying all orders would admit the same operands. Most can be tried
many at a time, since operands that all fit together also fit one by one; where they do not, fewer
are tried, down to the one that is to blame.

An operand that repeats a variable can never be adjacent: it constrains nothing and is a gather. If
all its variables are one, it constrains nothing either, and is read in one piece, repeatedly.

The question is a case of simultaneous PQ-ordering (Bläsius and Rutter, 2013).
"""

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from jedbatch._layout.pq_tree import PQTree

Batch = Sequence[Sequence[int]]  # operands, the result first
Operand = tuple[int, int]  # number of its batch, its number there


class Dropped(NamedTuple):
    """An operand that could not be admitted."""

    batch: int
    operand: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The places of variables, and the order in which batches run their operations.

    Attributes:
      order: all variables in the order of memory.
      operations: of each batch, its operations in the order in which they run.
      contiguous: of each batch, for every operand, whether its variables follow each other in
        memory in the order of the operations (or are all the same one).
      dropped: operands that could not be admitted, by batch; some may be contiguous by luck.
    """

    order: tuple[int, ...]
    operations: tuple[tuple[int, ...], ...]
    contiguous: tuple[tuple[bool, ...], ...]
    dropped: tuple[Dropped, ...]

    def check(self, batches: Sequence[Batch]) -> None:
        """Raises `AssertionError` unless this is a correct account of the batches."""
        assert sorted(self.order) == list(range(len(self.order)))
        row = _rows(self.order)
        for batch, operations, contiguous in zip(
            batches, self.operations, self.contiguous, strict=True
        ):
            assert sorted(operations) == list(range(len(batch[0]) if batch else 0))
            is_slice = tuple(_is_contiguous(operand, operations, row) for operand in batch)
            assert contiguous == is_slice
        refused = {(b, k) for b, k, _ in self.dropped}
        for b, batch in enumerate(batches):
            for k, operand in enumerate(batch):
                distinct = len(set(operand)) == len(operand)
                assert self.contiguous[b][k] or (b, k) in refused or not distinct

    def __str__(self) -> str:
        """The order, and for each batch what must be gathered."""
        reasons = {(b, k): f" ({reason})" for b, k, reason in self.dropped}
        lines = ["order " + " ".join(map(str, self.order))]
        for b, (operations, contiguous) in enumerate(
            zip(self.operations, self.contiguous, strict=True)
        ):
            gathered = [
                f"{k}{reasons.get((b, k), ' (repeats variables)')}"
                for k, is_contiguous in enumerate(contiguous)
                if not is_contiguous
            ]
            text = "gathers operand " + ", ".join(gathered) if gathered else "no gather"
            lines.append(f"batch {b} runs {' '.join(map(str, operations))}: {text}")
        return "\n".join(lines)


def arrange(num_variables: int, batches: Sequence[Batch]) -> Arrangement:
    """Orders variables in memory so that operands of batches are contiguous and aligned.

    Examples:
      >>> print(arrange(4, [[(0, 1), (3, 2)]]))
      order 0 1 3 2
      batch 0 runs 0 1: no gather

    Args:
      num_variables: variables are 0, …, num_variables - 1.
      batches: of each, its operands, the result first; variable k of each belongs to operation k.

    Returns:
      The arrangement. The same arguments give the same one.

    Raises:
      ValueError: if there is no such variable, or operands of a batch differ in length.
    """
    _validate(num_variables, batches)
    batches = [[tuple(map(int, operand)) for operand in batch] for batch in batches]
    planner = _Planner(num_variables, batches)
    planner.admit(
        [
            (b, k)
            for b, batch in enumerate(batches)
            for k, operand in enumerate(batch)
            if len(set(operand)) == len(operand) > 0
        ]
    )
    order = planner.state.read()
    row = _rows(order)
    operations = [
        _operations(batch, admitted, row)
        for batch, admitted in zip(batches, planner.admitted, strict=True)
    ]
    contiguous = (
        tuple(_is_contiguous(operand, runs, row) for operand in batch)
        for batch, runs in zip(batches, operations, strict=True)
    )
    return Arrangement(
        tuple(order), tuple(operations), tuple(contiguous), tuple(sorted(planner.dropped))
    )


def _validate(num_variables: int, batches: Sequence[Batch]) -> None:
    for b, batch in enumerate(batches):
        lengths = list(map(len, batch))
        if len(set(lengths)) > 1:
            raise ValueError(
                f"operands of batch {b} have {lengths} variables; expected as many in each as the "
                "batch has operations. Leave out operands that all operations share."
            )
        for v in itertools.chain(*batch):
            if not 0 <= v < num_variables:
                raise ValueError(
                    f"batch {b} has variable {v}; expected 0 to {num_variables - 1}. Raise "
                    "`num_variables` or renumber the variables."
                )


def _rows(order: Sequence[int]) -> list[int]:
    """The place of each variable."""
    row = [0] * len(order)
    for place, v in enumerate(order):
        row[v] = place
    return row


def _is_contiguous(operand: Sequence[int], operations: Sequence[int], row: list[int]) -> bool:
    """Returns whether an operand is one slice, or one variable repeated."""
    if len(set(operand)) <= 1:
        return True
    rows = [row[operand[k]] for k in operations]
    return rows == list(range(rows[0], rows[0] + len(rows)))


def _operations(batch: Batch, admitted: list[int], row: list[int]) -> tuple[int, ...]:
    """The order of memory of admitted operands; without any, the one that suits most operands."""
    runs = [sorted(range(len(operand)), key=lambda k: row[operand[k]]) for operand in batch]
    if admitted:
        return tuple(runs[admitted[0]])
    suits = [sum(_is_contiguous(operand, run, row) for operand in batch) for run in runs]
    return tuple(runs[suits.index(max(suits))]) if runs else ()


class _Choices:
    """A union-find of nodes whose choices are one, with the bijections between their places."""

    def __init__(self) -> None:
        self.above: dict[Hashable, tuple[Hashable, dict[int, int]]] = {}
        self.size: dict[Hashable, int] = {}

    def copy(self) -> "_Choices":
        """An independent copy."""
        copy = _Choices()
        copy.above, copy.size = self.above.copy(), self.size.copy()
        return copy

    def find(self, node: Hashable) -> tuple[Hashable, dict[int, int] | None]:
        """(the node that speaks for the class, the places there; None if they are the same)."""
        places = None
        while node in self.above:
            node, more = self.above[node]
            places = more if places is None else {a: more[b] for a, b in places.items()}
        return node, places

    def unite(self, a: Hashable, b: Hashable, bijection: dict[int, int]) -> bool:
        """Makes two nodes choose alike, places of a being those of b; False if they cannot."""
        (a, from_a), (b, from_b) = self.find(a), self.find(b)
        between = {
            from_a[x] if from_a else x: from_b[y] if from_b else y for x, y in bijection.items()
        }
        if a == b:
            return all(x == y for x, y in between.items())
        sizes = self.size.get(a, 1), self.size.get(b, 1)
        if sizes[0] > sizes[1]:
            a, b, between = b, a, {y: x for x, y in between.items()}
        self.above[a] = b, between
        self.size[b] = sum(sizes)
        return True


class _Node(NamedTuple):
    """A node of the tree that orders operations of an operand."""

    choice: Hashable
    is_ordered: bool  # a Q-node
    places: list[int]
    inside: list[int]  # names of its children


class _Form(NamedTuple):
    """The order that the tree gives an operand, in terms of the batch's operations.

    Leaves are named by their operations, and nodes so that those of equal names, in all forms of
    the batch, order the same operations in the same ways; their places then correspond in turn.
    """

    name: int  # of the whole
    nodes: dict[int, _Node]  # by name, bottom-up


class _PlannerState:
    """The orders permitted by what was admitted so far."""

    def __init__(self, tree: PQTree, choices: _Choices):
        self.tree, self.choices = tree, choices
        self.num_dissolved = len(tree.dissolved)  # those whose choices are known to be united

    def copy(self) -> "_PlannerState":
        """An independent copy."""
        return _PlannerState(self.tree.copy(), self.choices.copy())

    def _choice(self, node: int) -> Hashable:
        """Returns the key of a node's choice: P-nodes that lost children choose anew."""
        return node, self.tree.size(node) if self.tree.kind[node] == "P" else 0

    def form(self, operand: Sequence[int], names: dict[tuple[int, ...], int]) -> _Form:
        """The form of an operand that is consecutive; `names` grows with the nodes met."""
        name = {v: k for k, v in enumerate(operand)}
        first = dict(name)  # the first operation below each node
        least = {v: v for v in operand}  # the least variable below each node
        nodes: dict[int, _Node] = {}
        node = operand[0]
        for node, children in self.tree.subtree(operand):
            is_ordered = self.tree.kind[node] == "Q"
            if is_ordered:
                places = [0, 1]
                if first[children[-1]] < first[children[0]]:
                    children.reverse()
                    places.reverse()
            else:
                children.sort(key=first.__getitem__)
                places = [least[child] for child in children]
            inside = [name[child] for child in children]
            name[node] = names.setdefault((is_ordered, *inside), len(operand) + len(names))
            first[node] = min(first[child] for child in children)
            least[node] = min(least[child] for child in children)
            nodes[name[node]] = _Node(self._choice(node), is_ordered, places, inside)
        return _Form(name[node], nodes)

    def unite(self, form: _Form, other: _Form) -> bool:
        """Makes equal forms choose alike; False if they cannot."""
        for name, node in form.nodes.items():
            same = other.nodes[name]
            bijection = dict(zip(node.places, same.places, strict=True))
            if not self.choices.unite(node.choice, same.choice, bijection):
                return False
        return True

    def unite_dissolved(self) -> bool:
        """The same for Q-nodes that have become one."""
        for node in self.tree.dissolved[self.num_dissolved :]:
            into, turned = self.tree.find(node)
            bijection = {0: int(turned), 1: int(not turned)}
            if not self.choices.unite((node, 0), (into, 0), bijection):
                return False
        self.num_dissolved = len(self.tree.dissolved)
        return True

    def read(self) -> list[int]:
        """An order: the first node read of each class chooses as if it were alone."""
        chosen: dict[Hashable, dict[int, int]] = {}  # rank of each place

        def choose(node: int, children: list[int], least: list[int]) -> list[int]:
            is_ordered = self.tree.kind[node] == "Q"
            places = [0, 1] if is_ordered else [least[child] for child in children]
            speaker, there = self.choices.find(self._choice(node))
            there = there or {place: place for place in places}
            if speaker not in chosen:
                by_least = sorted(places)
                if is_ordered and least[children[-1]] < least[children[0]]:
                    by_least = [1, 0]
                chosen[speaker] = {there[place]: rank for rank, place in enumerate(by_least)}
            ranks = [chosen[speaker][there[place]] for place in places]
            if is_ordered:
                return children[::-1] if ranks[0] else children
            return [child for _, child in sorted(zip(ranks, children, strict=True))]

        return self.tree.frontier(choose)


def _sets(form: _Form, known: Collection[int]) -> Iterator[list[int]]:
    """The operations that a form keeps together, without those of nodes that are known."""
    below: dict[int, list[int]] = {}
    for name, node in form.nodes.items():
        parts = [below.get(child, [child]) for child in node.inside]
        below[name] = list(itertools.chain(*parts))
        if name in known:
            continue
        if node.is_ordered:
            yield from ([*a, *b] for a, b in itertools.pairwise(parts))
        else:
            yield below[name]


class _Planner:
    """Admits operands in turn, many at a time as long as that goes well."""

    def __init__(self, num_variables: int, batches: Sequence[Batch]):
        self.batches = batches
        self.state = _PlannerState(PQTree(num_variables), _Choices())
        self.admitted: list[list[int]] = [[] for _ in batches]
        self.dropped: list[Dropped] = []
        self._users: list[dict[int, None]] = [{} for _ in range(num_variables)]  # batches
        for b, batch in enumerate(batches):
            for v in itertools.chain(*batch):
                self._users[v][b] = None

    def admit(self, operands: Sequence[Operand]) -> None:
        """Admits what it can; the outcome is that of admitting one at a time."""
        start, count = 0, max(1, len(operands))
        while start < len(operands):
            chunk = operands[start : start + count]
            before = self.state.copy()
            at_odds = self._try(chunk)
            if at_odds is None:
                start += len(chunk)
                count *= 2
                continue
            self.state = before
            count = max(1, len(chunk) // 4)
            if len(chunk) == 1:
                (b, k), start = chunk[0], start + 1
                where = "its batch" if at_odds == b else f"batch {at_odds}"
                reason = f"it cannot be aligned without parting or turning operands of {where}"
                self.dropped.append(Dropped(b, k, reason))

    def _try(self, operands: Sequence[Operand]) -> int | None:
        """Admits operands but for those that cannot be adjacent; or none, and returns at odds."""
        dirty: set[int] = set()
        admitted, dropped = [], []
        for b, k in operands:
            if self._reduce(self.batches[b][k], dirty):
                self.admitted[b].append(k)
                admitted.append(b)
                dirty.add(b)
            else:
                dropped.append(Dropped(b, k, "its variables cannot be adjacent"))
        at_odds = self._settle(dirty)
        if at_odds is None:
            self.dropped += dropped
        else:
            for b in admitted:
                self.admitted[b].pop()
        return at_odds

    def _settle(self, dirty: set[int]) -> int | None:
        """Broadcasts and aligns until nothing changes; returns the batch where that fails.

        Batches are visited in descending and ascending order by turns, so that what is found out
        in one passes through a whole chain of them at once.
        """
        b, sign = len(self.batches), -1
        while dirty:
            ahead = [sign * c for c in dirty]
            heapq.heapify(ahead)
            while ahead:
                b = sign * heapq.heappop(ahead)
                if b not in dirty:
                    continue
                dirty.remove(b)
                if len(self.admitted[b]) < 2:
                    continue
                marked: set[int] = set()
                if not self._align(b, marked):
                    return b
                for c in marked - dirty:
                    dirty.add(c)
                    if sign * c > sign * b:
                        heapq.heappush(ahead, sign * c)
            sign = -sign
        return None if self.state.unite_dissolved() else b

    def _reduce(self, variables: Sequence[int], dirty: set[int]) -> bool:
        """Makes variables adjacent, and notes which batches are to be looked at again then."""
        changes = self.state.tree.num_changes
        if not self.state.tree.reduce(variables):
            return False
        if self.state.tree.num_changes > changes:
            for v in variables:
                dirty.update(self._users[v])
        return True

    def _align(self, b: int, dirty: set[int]) -> bool:
        """Unites the choices of a batch's operands, or makes their forms more alike."""
        operands = [self.batches[b][k] for k in self.admitted[b]]
        names: dict[tuple[int, ...], int] = {}
        first, *others = (self.state.form(operand, names) for operand in operands)
        for operand, form in zip(operands[1:], others, strict=True):
            if form.name == first.name:
                if not self.state.unite(first, form):
                    return False
                continue
            exchange = (first, form, operand), (form, first, operands[0])
            for constraint, names_known, variables in exchange:
                for operations in _sets(constraint, names_known.nodes):
                    if not self._reduce([variables[k] for k in operations], dirty):
                        return False
        return True
