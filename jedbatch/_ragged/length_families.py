"""Families of instances that are equal but for the lengths of their arrays."""

import array
from collections.abc import Iterable, Sequence

import numpy as np

from jedbatch._support.caches import Memory
from jedbatch._support.types import AxisSize, Dtype

ArrayType = tuple[
    tuple[AxisSize, ...], Dtype, bool
]  # (shape, dtype, weak), an extent may be a symbol
Pair = tuple[int, int]  # of arrays of an instance
# Types of arrays, arrays by symbol, and for each array its length, or -1 - the first array that it
# shares a symbol with.
SymbolicTypes = tuple[list[ArrayType], dict[str, list[int]], tuple[int, ...]]
MAX_KNOWN = 64  # types with symbols that are kept for a family


class LengthFamily:
    """Instances that are equal but for the lengths of arrays, and numbers.

    Attributes:
      types: of the arrays of the first instance.
      kind_of: these without lengths.
      sequences: arrays that take the place of sequences, whose lengths are known to differ.
      kinds: (shape without length, dtype) of others that have a length.
      varied: for each array, whether it had another length in a later one.
      pairs: arrays whose lengths have been compared, so that instances are told apart by whether
        they are equal.
      supposed: those of the pairs that were not seen to be compared (see `Lengths.join_equal`).
      refuted: those that were supposed in vain.
      groups: arrays, in any number, that instances are told apart by which of are equally long.
      short: which arrays are empty, bool[arrays] each, in instances that lack rows for some part.
      shared: the arrays that share a symbol, by which are equal.
      known: types of arrays with symbols, by what these depend on (see `Lengths`).
    """

    def __init__(self, types: Sequence[ArrayType], sequences: frozenset[int] = frozenset()):
        self.types = list(types)
        self.sequences = sequences
        self.kind_of = [(shape[1:], dtype, weak) for shape, dtype, weak in types]
        others = [t for i, t in enumerate(types) if t[0] and i not in sequences]
        self.kinds = {(shape[1:], dtype) for shape, dtype, _ in others}
        self.lengths = [_length(t) for t in types]
        self.varied = [False] * len(types)
        self.pairs: dict[Pair, None] = {}
        self.supposed: list[Pair] = []
        self.refuted: set[Pair] = set()
        self.groups: list[list[int]] = []
        self.short: set[tuple[bool, ...]] = set()
        self.shared: dict[bytes, list[int]] = {}
        self.known: Memory = Memory(MAX_KNOWN)

    def observe(self, lengths: Sequence[int]) -> bool:
        """Takes note of one instance; returns whether another array varies now."""
        if lengths == self.lengths:
            return False
        known = self.varied
        self.varied = [
            is_varied or n != before
            for is_varied, n, before in zip(known, lengths, self.lengths, strict=True)
        ]
        return self.varied != known

    def add(self, pairs: Iterable[Pair]) -> None:
        """Tells instances apart by more pairs."""
        self.pairs.update(dict.fromkeys(pairs))
        self._forget()

    def drop_supposed(self) -> None:
        """No longer tells instances apart by pairs that were not seen to be compared."""
        for pair in self.supposed:
            del self.pairs[pair]
        self.refuted.update(self.supposed)
        self.supposed.clear()
        self._forget()

    def _forget(self) -> None:
        """Forgets what follows from how instances are told apart."""
        self.shared.clear()
        self.known.clear()

    def group(self, groups: list[list[int]]) -> None:
        """Tells instances apart by which arrays of each group are equally long."""
        if groups != self.groups:
            self.groups = groups
            self._forget()

    def tells(self, a: int, b: int) -> bool:
        """Returns whether instances are told apart by whether two arrays are equally long."""
        return (a, b) in self.pairs or any(a in group and b in group for group in self.groups)

    def equal(self, lengths: Sequence[Sequence[int]]) -> list[bytes]:
        """Returns for each instance which of the pairs, and of the groups, are equally long.

        In zeros and numbers: 0 for each pair that is, and for each array of a group that is as long
        as its first one.
        """
        if not (self.pairs or self.groups):
            return [b""] * len(lengths)
        if len(lengths) == 1:  # NumPy takes longer
            (own,) = lengths
            found = [int(own[a] != own[b]) for a, b in self.pairs]
            for group in self.groups:
                of_group = [own[i] for i in group]
                found += map(of_group.index, of_group)
            return [array.array("i", found).tobytes()]
        every = np.array(lengths)
        columns = []
        if self.pairs:
            a, b = np.array(list(self.pairs)).T
            columns.append(every[:, a] != every[:, b])
        for group in self.groups:
            mine = every[:, group]
            columns.append(np.argmax(mine[:, :, None] == mine[:, None], axis=2))
        return [row.tobytes() for row in np.concatenate(columns, axis=1).astype(np.int32)]

    def classes(self, equal: bytes) -> list[int]:
        """Returns for each array the first one that it shares a symbol with."""
        classes = self.shared.get(equal)
        if classes is None:
            found = array.array("i", equal).tolist()
            same = [pair for pair, differ in zip(self.pairs, found, strict=False) if not differ]
            begin = len(self.pairs)
            for group in self.groups:
                first = found[begin : begin + len(group)]
                same += [(group[k], i) for k, i in zip(first, group, strict=True)]
                begin += len(group)
            if self.pairs:
                classes = _least_of_sets(len(self.types), same)
            else:  # groups are apart from each other, and in order
                classes = list(range(len(self.types)))
                for first_array, i in same:
                    classes[i] = first_array
            self.shared[equal] = classes
        return classes


def _length(array: ArrayType) -> int:
    return array[0][0] if array[0] else -1


def _least_of_sets(count: int, pairs: Iterable[Pair]) -> list[int]:
    """Returns for each of so many numbers the least of its set; pairs are in one set."""
    above = list(range(count))  # less, or the number itself if it is the least
    for a, b in pairs:
        while above[a] != a:
            above[a] = a = above[above[a]]
        while above[b] != b:
            above[b] = b = above[above[b]]
        if a < b:
            above[b] = a
        else:
            above[a] = b
    for i, least in enumerate(above):  # that of what is above is known
        above[i] = above[least]
    return above
