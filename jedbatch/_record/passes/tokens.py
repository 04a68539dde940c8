"""Tokens: operations by the parts they play, and what has been met before and after each.

The *token* of an operation is its call site (see `_record.passes.call_sites`) and its kind.
What follows what, what reads what, and which numbers are always the same is noted by token. From
it `Tokens.cut` tells where one block of operations ends and another begins; the rule, and why it is
one, is in `_record.passes.fuse`.

Minibatches have tens of thousands of operations and a few dozen tokens, so everything is looked at
in NumPy and noted once for each pair that there is.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.types import operation_of
from jedbatch._record.operations.operators import PICK
from jedbatch._record.passes.call_sites import Sites
from jedbatch._record.passes.known import Numbers
from jedbatch._record.types.registry import Registry

START, END, ELSEWHERE = -1, -2, -3
MAX_DISTINCT_WAYS = 2  # ways to an operation, or on from it, that may be told apart
MANY_WAYS = 8  # through one stretch, which are not told apart any more


class Tokens:
    """The operations of a function that have been met."""

    def __init__(self, registry: Registry, sites: Sites):
        self._registry = registry
        self._sites = sites
        self._ids: dict[tuple, int] = {}
        self._after: dict[int, set[int]] = {}  # a few tokens that come next, and `ELSEWHERE`
        self._before: dict[int, set[int]] = {}
        self._known_ways: set[bytes] = set()  # stretches
        self._many_ways: set[int] = set()
        self._edges: set[tuple[int, int]] = set()  # of tokens
        self._joins: dict[int, bool] = {}
        self._picked: dict[tuple, bytes | None] = {}
        self._varying: set[tuple[int, int]] = set()
        self._numbers: dict[tuple[int, int], bytes | None] = {}  # None once they vary

    def number(self, token: int, position: int) -> bytes | None:
        """Returns the number that an operand has always been, as bytes; None if it varies."""
        return self._numbers.get((token, position))

    # --- learning ---

    def learn(
        self, graph: Graph, sites: Sequence[tuple[int, bool]], numbers: Numbers
    ) -> np.ndarray:
        """int64[N], the tokens of nodes; notes what follows what, and which numbers vary.

        Args:
          graph: of the nodes.
          sites: where each was recorded, and whether in the same call of a function as the one
            before.
          numbers: that enter the graph.
        """
        site, same = np.array(sites, np.int64).reshape(-1, 2).T
        begins = first_nodes(graph)
        while True:
            tokens, picks = self._tokens_of(graph, site, numbers)
            if not self._find_picks(graph, site, numbers, tokens, picks):
                break
        before = np.concatenate([[START], tokens[:-1]]) if len(tokens) else tokens
        before[begins] = START
        goes_on = (same > 0) & (before != START)
        size = len(self._ids)
        for n in _firsts(((before + 1) * size + tokens) * 2 + goes_on):
            straight = bool(goes_on[n]) and self._sites.onward(int(site[n - 1]), int(site[n]))
            self._follow(int(before[n]), int(tokens[n]), straight)
        for a, b in itertools.pairwise(graph.node_ptr.tolist()):
            self._follow(int(tokens[b - 1]) if b > a else START, END, goes_on=False)
        self._note_numbers(graph, tokens, numbers)
        inner = np.flatnonzero(graph.operand >= 0)
        maker = graph.value_node[graph.operand[inner]]
        pairs = tokens[maker] * size + tokens[graph.operand_reader[inner]]
        self._edges.update([divmod(x, size) for x in np.unique(pairs).tolist()])
        self._joins.clear()
        return tokens

    def _follow(self, a: int, b: int, goes_on: bool) -> None:
        """Notes that b comes after a."""
        for beside, here, there in ((self._after, a, b), (self._before, b, a)):
            neighbours = beside.setdefault(here, set())
            if len(neighbours) <= MAX_DISTINCT_WAYS:
                neighbours.add(there)
            if not goes_on:
                neighbours.add(ELSEWHERE)

    def _tokens_of(
        self, graph: Graph, site: np.ndarray, numbers: Numbers
    ) -> tuple[np.ndarray, list[int]]:
        """(tokens, the nodes that are `value[i]` whose i has not been seen to vary)."""
        num_types = len(self._registry.node_types)
        places, inverse = np.unique(site * num_types + graph.node_type, return_inverse=True)
        ids = np.zeros(len(places), np.int64)
        picking = np.zeros(len(places), bool)
        for k, place in enumerate(places.tolist()):
            token = divmod(place, num_types)
            picking[k] = self._picks(token[1]) and token not in self._varying
            if not picking[k]:
                ids[k] = self._ids.setdefault(token, len(self._ids))
        tokens = ids[inverse]
        picks = np.flatnonzero(picking[inverse]).tolist()
        for n in picks:
            place = int(site[n]), int(graph.node_type[n]), _index(graph, numbers, n)
            tokens[n] = self._ids.setdefault(place, len(self._ids))
        return tokens, picks

    def _picks(self, node_type: int) -> bool:
        """True of `value[i]` with a Python number."""
        return operation_of(self._registry.node_types[node_type]).key[0] == PICK

    def _find_picks(
        self,
        graph: Graph,
        site: np.ndarray,
        numbers: Numbers,
        tokens: np.ndarray,
        picks: list[int],
    ) -> bool:
        """Returns whether there are new places where `value[i]` follows the same with another i."""
        num_varying = len(self._varying)
        begins = first_nodes(graph)
        for n in picks:
            place = int(site[n]), int(graph.node_type[n])
            before = START if begins[n] else int(tokens[n - 1])
            i = _index(graph, numbers, n)
            if place not in self._varying and self._picked.setdefault((before, place), i) != i:
                self._varying.add(place)
        return len(self._varying) > num_varying

    def _note_numbers(self, graph: Graph, tokens: np.ndarray, numbers: Numbers) -> None:
        """Notes which inputs are the same number wherever a token reads them."""
        reads = np.flatnonzero(graph.operand < 0)
        if not len(reads):
            return
        reader = graph.operand_reader[reads]
        position = reads - graph.operand_ptr[reader]
        size = int(position.max(initial=0)) + 1
        which = ~graph.operand[reads]
        order = np.lexsort((numbers.which[which], tokens[reader] * size + position))
        read_by, which = (tokens[reader] * size + position)[order], which[order]
        cuts = np.flatnonzero(np.diff(read_by, prepend=-1, append=-1))
        for a, b in itertools.pairwise(cuts.tolist()):
            where = divmod(int(read_by[a]), size)
            known = self._numbers.get(where, b"")
            if known is None:
                continue
            is_one = numbers.which[which[a]] == numbers.which[which[b - 1]]
            number = numbers.bytes_of(int(which[a])) if is_one else None
            if number is None or number != self._numbers.setdefault(where, number):
                self._registry.assumptions.fail("same numbers", where in self._numbers)
                self._numbers[where] = None

    # --- finding blocks ---

    def cut(self, tokens: np.ndarray, graph: Graph) -> list[int]:
        """Returns the first node of each stretch of nodes that belong together, and N."""
        if not len(tokens):
            return [0]
        size = len(self._ids)
        pairs, inverse = np.unique(tokens[:-1] * size + tokens[1:], return_inverse=True)
        begins = first_nodes(graph)
        across = np.unique(inverse[~begins[1:]]) if len(pairs) else ()
        joined = np.zeros(len(pairs), bool)
        for k in across:
            joined[k] = self._joined(*divmod(int(pairs[k]), size), strict=False)
        begins[1:] |= ~joined[inverse]
        starts = [*np.flatnonzero(begins).tolist(), len(tokens)]
        while True:
            finer = starts
            if self._many_ways:
                cuts = (self._strictly(tokens, a, b) for a, b in itertools.pairwise(starts))
                finer = [*itertools.chain.from_iterable(cuts), len(tokens)]
            if not self._note_ways(tokens, finer):
                return finer

    def _note_ways(self, tokens: np.ndarray, starts: list[int]) -> bool:
        """Notes the stretches; returns whether there are now too many from one of the tokens on."""
        num_many = len(self._many_ways)
        width = tokens.itemsize
        data = tokens.tobytes()
        for way in {data[a * width : b * width] for a, b in itertools.pairwise(starts)}:
            if way in self._known_ways:
                continue
            self._known_ways.add(way)
            first = int(np.frombuffer(way, tokens.dtype, 1)[0])
            if not self._registry.assumptions.holds("ways", first, way, MANY_WAYS):
                self._many_ways.add(first)
        return len(self._many_ways) > num_many

    def _strictly(self, tokens: np.ndarray, begin: int, end: int) -> Iterator[int]:
        """Cuts a stretch further where there are too many ways."""
        yield begin
        first = int(tokens[begin])
        for n in range(begin + 1, end):
            a, b = int(tokens[n - 1]), int(tokens[n])
            if first in self._many_ways and not self._joined(a, b, strict=True):
                yield n
                first = b

    def _joined(self, a: int, b: int, strict: bool) -> bool:
        """Returns whether b, which comes after a, goes with it."""
        after, before = self._after[a] - {ELSEWHERE}, self._before[b] - {ELSEWHERE}
        if len(after) == len(before) == 1:
            return True
        if strict or ELSEWHERE in self._after[a] | self._before[b]:
            return False
        if max(len(after), len(before)) > MAX_DISTINCT_WAYS:
            return False
        if b not in self._joins:
            self._joins[b] = len(before) == 1 or not before.isdisjoint(self._readers(b))
        return self._joins[b]

    def _readers(self, token: int) -> set[int]:
        """The tokens of what depends on the results of operations with a token."""
        readers: dict[int, list[int]] = {}
        for a, b in self._edges:
            readers.setdefault(a, []).append(b)
        all_readers: set[int] = set()
        stack = [token]
        while stack:
            new = set(readers.get(stack.pop(), ())) - all_readers
            all_readers |= new
            stack += new
        return all_readers


def first_nodes(graph: Graph) -> np.ndarray:
    """Returns bool[N], whether a node is the first one of its instance."""
    begins = np.zeros(len(graph.node_type) + 1, bool)
    begins[graph.node_ptr] = True
    return begins[:-1]


def _index(graph: Graph, numbers: Numbers, node: int) -> bytes | None:
    """Returns the i of a node that is `value[i]`."""
    return numbers.bytes_of(~int(graph.operand[graph.operand_ptr[node] + 1]))


def _firsts(codes: np.ndarray) -> list[int]:
    """Where each code occurs first, in order."""
    _, first = np.unique(codes, return_index=True)
    return np.sort(first).tolist()
