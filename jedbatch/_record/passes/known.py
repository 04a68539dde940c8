"""`KnownStretches`: stretches of operations that were met before, found by what they compute.

To find where one block of operations ends and another begins takes the call site of each (see
`_record.passes.call_sites`), which costs as much as a third of the recording. Once a program
has shown its blocks, they can mostly be read off the operations alone: the longest stretch known
that does the same, to operands that are related in the same way. Whether they can is tried on
minibatches of which the call sites are known. A stretch that is not known, or a number that is
another one than has been written into a block, is learned with call sites.
"""

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import held_values
from jedbatch._jaxpr.storage import is_key

MANY_OPERANDS = 48  # of a node, which are more than bits of a float


class Stretch(NamedTuple):
    """The blocks that a stretch of nodes is cut into.

    Attributes:
      parts: what it is cut into; None for a single node.
      numbers: those written into it: which of the operands of all nodes, and its bytes.
    """

    parts: Any
    numbers: tuple[tuple[int, bytes], ...]


class Parsed(NamedTuple):
    """A minibatch as stretches.

    Attributes:
      starts: the first node of each, and the number of nodes.
      parts: of each.
      outside: what each reads from outside.
    """

    starts: list[int]
    parts: list[Any]
    outside: list[list[int]]


class Numbers:
    """The numbers among the inputs of a graph.

    Attributes:
      which: int64[I], equal for inputs that are the same number; -1 of those that are none.
    """

    def __init__(self, graph: Graph):
        held = held_values(graph.inputs)
        self.which = np.full(graph.num_inputs, -1)
        self._bytes: list[bytes] = []
        for c, (kind, values) in enumerate(zip(held.types, held.values, strict=True)):
            if kind.shape != () or is_key(kind.dtype):
                continue
            size = kind.dtype.itemsize
            raw = np.ascontiguousarray(values).view(f"u{size}" if size <= 8 else f"V{size}")
            distinct, inverse = np.unique(raw, return_inverse=True)
            own = held.which == c
            self.which[own] = len(self._bytes) + inverse[held.row[own]]
            self._bytes += [x.tobytes() for x in distinct]

    def bytes_of(self, number: int) -> bytes | None:
        """Returns an input as bytes; None if it is no number."""
        which = self.which[number]
        return self._bytes[which] if which >= 0 else None


class KnownStretches:
    """Stretches, by what their nodes do and read.

    Attributes:
      is_ambiguous: whether two that do and read the same become different blocks.
    """

    def __init__(self) -> None:
        self._root: dict[Any, Any] = {}
        self.is_ambiguous = False

    def add(self, node_types: list[int], arity: list[int], reads: list[int], new: Stretch) -> None:
        """Adds a stretch.

        Args:
          node_types: of its nodes.
          arity: how much each of them reads.
          reads: what they read, as `relative` has it.
          new: what becomes of it.
        """
        place = self._root
        ends = itertools.accumulate(arity)
        for node_type, num, end in zip(node_types, arity, ends, strict=True):
            of_type = place.setdefault(node_type, {})
            place = of_type.setdefault(tuple(reads[end - num : end]), {})
        old = place.setdefault(None, new)
        self.is_ambiguous |= old.numbers != new.numbers or _blocks(old) != _blocks(new)

    def parse(self, graph: Graph, numbers: Numbers) -> Parsed | None:
        """Returns nodes as known stretches, the longest first; None if there are others.

        `numbers` are those that enter the graph.
        """
        types, ptr = graph.node_type.tolist(), graph.operand_ptr.tolist()
        first, operand = graph.value_ptr.tolist(), graph.operand.tolist()
        root, keys = self._root, _first_keys(graph)
        starts: list[int] = []
        parts: list[Any] = []
        outside: list[list[int]] = []
        for begin, end in itertools.pairwise(graph.node_ptr.tolist()):
            while begin < end:
                place, n, found = root, begin, None
                external: dict[int, int] = {}
                while n < end and types[n] in place:
                    if n == begin + 1:  # not before: most stretches are single nodes
                        relative(operand[ptr[begin] : ptr[n]], first[begin], external)
                    reads = operand[ptr[n] : ptr[n + 1]]
                    key = tuple(relative(reads, first[begin], external)) if n > begin else keys[n]
                    if key not in place[types[n]]:
                        break
                    place, n = place[types[n]][key], n + 1
                    if None in place:
                        found = n, place[None], len(external)
                if found is None:
                    return None
                n, stretch, num_read = found
                base = ptr[begin]
                for position, number in stretch.numbers:
                    if numbers.bytes_of(~operand[base + position]) != number:
                        return None
                starts.append(begin)
                parts.append(stretch.parts)
                is_single = stretch.parts is None
                outside.append(operand[base : ptr[n]] if is_single else list(external)[:num_read])
                begin = n
        return Parsed([*starts, len(types)], parts, outside)


def _first_keys(graph: Graph) -> list[tuple[int, ...]]:
    """Returns what each node reads, as `relative` has it where a stretch begins with the node."""
    ptr, reader, operand = graph.operand_ptr, graph.operand_reader, graph.operand
    arity, position = np.diff(ptr), np.arange(len(operand)) - ptr[reader]
    marks = np.where(operand < 0, 2.0 ** np.minimum(position, MANY_OPERANDS), 0)
    inputs = np.bincount(reader, marks, len(arity)).astype(np.int64)
    keys = list(map(_key_of_different, arity.tolist(), inputs.tolist()))
    span = graph.num_values + graph.num_inputs
    read = np.sort(reader * span + operand + graph.num_inputs)
    repeats = read[1:][read[1:] == read[:-1]] // max(span, 1)
    for n in {*repeats.tolist(), *np.flatnonzero(arity > MANY_OPERANDS).tolist()}:
        keys[n] = tuple(relative(operand[ptr[n] : ptr[n + 1]].tolist(), graph.num_values, {}))
    return keys


@functools.lru_cache(4096)
def _key_of_different(arity: int, inputs: int) -> tuple[int, ...]:
    """Returns what a node reads, different values, of which some are inputs, given as bits."""
    return tuple([-1 - 2 * k - (inputs >> k & 1) for k in range(arity)])


def relative(operands: list[int], origin: int, external: dict[int, int]) -> list[int]:
    """Returns operands relative to a stretch: its own values, the rest by order and by kind.

    What lies outside is numbered in `external`, k: `-1 - 2 * k`, or `-2 - 2 * k` if it is an input.
    """
    return [
        r - origin if r >= origin else -1 - 2 * external.setdefault(r, len(external)) - (r < 0)
        for r in operands
    ]


def _blocks(stretch: Stretch) -> list[int] | None:
    return stretch.parts and [id(part.block) for part in stretch.parts]
