"""Blocks of operations: a graph some of whose nodes have become one, and what they compute.

The arrays of a graph are kept, values by their numbers; which block makes each is what changes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import longest_paths, pointers, ranges
from jedbatch._record.passes.patterns import Pattern

# Numbers for places of operands, and for values of a block, whose sets are told apart by sums.
PLACES, SLOTS = np.random.default_rng(0).integers(1 << 40, size=(2, 1 << 10))


class Blocks(NamedTuple):
    """A graph whose nodes are blocks of operations (B blocks, V values, E operands).

    Blocks come after those that they read.

    Attributes:
      kind: int64[B], what each computes.
      ptr: int64[B + 1] and
      operand: int64[E], what each reads: values, or inputs as negative numbers.
      instance: int64[B], whose each is.
      maker: int64[V], the block of each value.
      slot: int64[V], which of the values of its block it is.
    """

    kind: np.ndarray
    ptr: np.ndarray
    operand: np.ndarray
    instance: np.ndarray
    maker: np.ndarray
    slot: np.ndarray

    @staticmethod
    def of(graph: Graph) -> "Blocks":
        """Returns a block for each node."""
        columns = graph.node_type, graph.operand_ptr, graph.operand, graph.node_instance
        return Blocks(*[x.astype(np.int64) for x in (*columns, graph.value_node, graph.value_slot)])

    def reads(self) -> "Reads":
        """Returns what blocks read of others."""
        inner = np.flatnonzero(self.operand >= 0)
        reader = np.repeat(np.arange(len(self.kind)), np.diff(self.ptr))[inner]
        value = self.operand[inner]
        place, slot = (inner - self.ptr[reader]) % len(PLACES), self.slot[value] % len(SLOTS)
        return Reads(self.maker[value], reader, PLACES[place] ^ SLOTS[slot])

    def joined(
        self, reads: "Reads", which: np.ndarray, depth: np.ndarray | None
    ) -> tuple["Merged", np.ndarray]:
        """(blocks of which some became one with their readers, the new block of each).

        Args:
          reads: what blocks read of others.
          which: bool[E], the operands that are made by blocks that become one with their readers.
          depth: int64[B], the most blocks on a path to each; None if those that become one with
            their readers have no others.
        """
        maker, reader = reads.maker[which], reads.reader[which]
        root, position = np.arange(len(self.kind)), np.arange(len(self.kind))
        if depth is None:  # all come where the last of them was
            root[maker] = reader
            while (root != root[root]).any():
                root = root[root]
        else:  # they come behind all that was there as early as the first
            root[reader[::-1]] = maker[::-1]  # one of them, if it reads several
            root[maker] = root[reader]
            is_joined = np.zeros(len(root), bool)
            is_joined[maker] = True
            order = np.lexsort((position, is_joined, depth, self.instance))
            position = _scattered(order, position)
        _, new = np.unique(position[root], return_inverse=True)
        return self.merged(new), new

    def merged(self, new: np.ndarray) -> "Merged":
        """Returns blocks made of these, given int64[B], the block that each becomes part of."""
        members = np.argsort(new, kind="stable")
        owner = new[members]
        first = pointers(np.bincount(owner))
        num_values = np.bincount(self.maker, minlength=len(self.kind))[members]
        begin = pointers(num_values)[:-1]
        begin -= begin[first[:-1]][owner]
        slot = self.slot + _scattered(members, begin)[self.maker]
        maker = new[self.maker]

        count = np.diff(self.ptr)[members]
        read = self.operand[ranges(self.ptr[:-1][members], count)]
        reader = owner.repeat(count)
        inside = read >= 0
        inside[inside] = maker[read[inside]] == reader[inside]
        outside = np.flatnonzero(~inside)
        # What merged blocks read from outside is an operand once; others keep their operands.
        of_merged = np.flatnonzero((np.diff(first) > 1)[reader[outside]])
        span = len(self.maker) - int(read.min(initial=0)) + 1
        code = reader[outside[of_merged]] * span + read[outside[of_merged]]
        _, once, same = np.unique(code, return_index=True, return_inverse=True)
        is_first = np.ones(len(outside), bool)
        is_first[of_merged] = False
        is_first[of_merged[once]] = True
        place = is_first.cumsum() - 1
        place[of_merged] = place[of_merged[once]][same]
        where = np.flatnonzero(is_first)
        ptr = pointers(np.bincount(reader[outside[where]], minlength=len(first) - 1))
        reads = np.empty(len(read), np.int64)
        reads[inside] = slot[read[inside]]
        reads[outside] = ptr[reader[outside]] - 1 - place
        kinds, of_first = self.kind[members], members[first[:-1]]
        parts = kinds[first[:-1]], ptr, read[outside[where]], self.instance[of_first], maker, slot
        return Merged(Blocks(*parts), kinds, first, reads, pointers(count)[first])


class Reads(NamedTuple):
    """Operands that other blocks make, by reader (E operands).

    Attributes:
      maker, reader: int64[E], blocks.
      place: int64[E], a number for the place where it is read and for the value that it is.
    """

    maker: np.ndarray
    reader: np.ndarray
    place: np.ndarray

    def depth(self, num_blocks: int) -> np.ndarray:
        """int32[B], the most blocks on a path to each."""
        return longest_paths(num_blocks, self.maker, self.reader)

    def last(self, depth: np.ndarray) -> np.ndarray:
        """bool[E], the operands that are there last, so that their readers could run at once."""
        return depth[self.reader] == depth[self.maker] + 1

    def edges(self, some: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """(makers, readers) of some operands, each pair of blocks once, by reader."""
        maker, reader = self.maker[some], self.reader[some]
        size = int(maker.max(initial=0)) + 1
        reader, maker = np.divmod(np.unique(reader * size + maker), size)
        return maker, reader

    def of_kinds(self, kind: np.ndarray, size: int, some: Any = slice(None)) -> "KindReads":
        """Returns, by the kinds of blocks, at which places some operands are read.

        Args:
          kind: int64[B], below `size`.
          size: the number of kinds.
          some: of the operands.
        """
        fed = kind[self.maker[some]] * len(kind) + self.reader[some]
        fed, which = np.unique(fed, return_inverse=True)
        places = np.bincount(which, self.place[some], len(fed)).astype(np.int64)
        maker_kind, reader = np.divmod(fed, len(kind))
        pairs = maker_kind * size + kind[reader]
        count = np.bincount(pairs, minlength=size * size).reshape(size, size)
        _, first = np.unique(places * (size * size) + pairs, return_index=True)
        return KindReads(count, [*zip(*(x[first].tolist() for x in (pairs, places)), strict=True)])


class KindReads(NamedTuple):
    """The reading of blocks of one kind by those of another (K kinds).

    Attributes:
      fed: int64[K, K], readers of the second kind that read a maker of the first.
      places: (pair of kinds, as one number, the places of all operands of one reader, as their
        sum), each once.
    """

    fed: np.ndarray
    places: list[tuple[int, int]]


class Merged(NamedTuple):
    """Blocks made of others, and of which (M members, E operands of theirs).

    Attributes:
      blocks: what they became; the kinds of those of several members are yet to be found.
      kinds: int64[M], of the members of each block, one block after the other.
      first: int64[B + 1], the first member of each block.
      reads: int64[E], what members read, as in `Pattern.reads`.
      first_read: int64[B + 1], the first operand of the members of each block.
    """

    blocks: Blocks
    kinds: np.ndarray
    first: np.ndarray
    reads: np.ndarray
    first_read: np.ndarray

    def patterns(self) -> Iterator[tuple[int, Pattern]]:
        """Yields the merged blocks with what they compute."""
        kinds, reads = self.kinds.tobytes(), self.reads.tobytes()
        known: dict[tuple[bytes, bytes], Pattern] = {}
        for b in np.flatnonzero(np.diff(self.first) > 1).tolist():
            places = [slice(8 * x[b], 8 * x[b + 1]) for x in (self.first, self.first_read)]
            written = kinds[places[0]], reads[places[1]]
            if written not in known:
                arrays = [np.frombuffer(x, np.int64).tolist() for x in written]
                known[written] = Pattern(*map(tuple, arrays))
            yield b, known[written]


def _scattered(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns values at places, which are all of 0, 1, ..."""
    array = np.empty_like(values)
    array[places] = values
    return array
