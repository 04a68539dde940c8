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

from jedbatch._record.passes.node_arrays import NodeArrays

MANY_OPERANDS = 48  # of a node, which are more than bits of a float


class Stretch(NamedTuple):
    """The blocks that a stretch of nodes is cut into.

    Attributes:
      parts: what it is cut into; None for a single node.
      numbers: those written into it: which of the operands of all nodes, dtype, and its bytes.
    """

    parts: Any
    numbers: tuple[tuple[int, Any, bytes], ...]


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

    def parse(self, nodes: NodeArrays) -> Parsed | None:
        """Returns nodes as known stretches, the longest first; None if there are others."""
        types, ptr, first = nodes.node_type.tolist(), nodes.ptr.tolist(), nodes.start.tolist()
        operand, root, keys = nodes.operand.tolist(), self._root, _first_keys(nodes)
        starts: list[int] = []
        parts: list[Any] = []
        outside: list[list[int]] = []
        for (begin, _, _), (end, _, _) in itertools.pairwise(nodes.ends):
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
                for position, dtype, number in stretch.numbers:
                    value = nodes.input_value[~operand[base + position]]
                    if np.asarray(value, dtype).tobytes() != number:
                        return None
                starts.append(begin)
                parts.append(stretch.parts)
                is_single = stretch.parts is None
                outside.append(operand[base : ptr[n]] if is_single else list(external)[:num_read])
                begin = n
        return Parsed([*starts, len(types)], parts, outside)


def _first_keys(nodes: NodeArrays) -> list[tuple[int, ...]]:
    """Returns what each node reads, as `relative` has it where a stretch begins with the node."""
    ptr, reader, operand = nodes.ptr, nodes.reader, nodes.operand
    arity, position = np.diff(ptr), np.arange(len(operand)) - ptr[reader]
    marks = np.where(operand < 0, 2.0 ** np.minimum(position, MANY_OPERANDS), 0)
    inputs = np.bincount(reader, marks, len(arity)).astype(np.int64)
    keys = list(map(_key_of_different, arity.tolist(), inputs.tolist()))
    span = len(nodes.maker) + len(nodes.input_group)
    read = np.sort(reader * span + operand + len(nodes.input_group))
    repeats = read[1:][read[1:] == read[:-1]] // max(span, 1)
    for n in {*repeats.tolist(), *np.flatnonzero(arity > MANY_OPERANDS).tolist()}:
        keys[n] = tuple(relative(operand[ptr[n] : ptr[n + 1]].tolist(), len(nodes.maker), {}))
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
