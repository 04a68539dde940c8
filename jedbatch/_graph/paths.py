"""Arrays of variable length, and longest paths in graphs given by their edges.

A path is long by its edges, a chain by how many nodes of one type it has. Both are found in one
pass, since edges come in an order in which all that lead to a node come before any that leave it:
by reader, in a graph whose nodes read earlier nodes only. A pass is a loop over the edges, and has
a twin in C (`_support/c/paths.c`).
"""

from collections.abc import Iterator

import numpy as np

from jedbatch._support.native import core


def pointers(counts: np.ndarray) -> np.ndarray:
    """Row pointers of a CSR pair from the length of each row: int64[len + 1]."""
    ptr = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=ptr[1:])
    return ptr


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ranges `starts[i], …, starts[i] + counts[i] - 1` one after the other, int64[...]."""
    ends = counts.cumsum()
    index = (starts - ends + counts).repeat(counts)
    index += np.arange(len(index))
    return index


def renumbered(references: np.ndarray, place: np.ndarray) -> np.ndarray:
    """References to results (`>= 0`) and inputs, with results where they are now: int32[...]."""
    inputs = np.arange(references.min(initial=0), 0)  # as negative numbers index: from the end
    return np.concatenate([place, inputs]).astype(np.int32)[references]


def distinct(indices: np.ndarray) -> np.ndarray:
    """The indices ascending, each once (`np.unique` costs five times as much on a few)."""
    if len(indices) < 2:
        return indices
    indices = np.sort(indices)
    first = np.empty(len(indices), bool)
    first[0] = True
    np.not_equal(indices[1:], indices[:-1], out=first[1:])
    return indices[first]


def int64_of(numbers: list[int], start: int = 0) -> np.ndarray:
    """int64[len - start], numbers as an array; of long lists, faster than `np.array`."""
    compiled = core()
    if compiled is None:
        return np.array(numbers[start:], np.int64)
    array = np.empty(len(numbers) - start, np.int64)
    compiled.copy_ints(numbers, (array,))
    return array


def longest_paths(num_nodes: int, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """int32[N], the most edges on a path that ends in each node.

    Edge i leads from node `before[i]` to node `after[i]`; all that lead to a node come before
    those that leave it.
    """
    compiled = core()
    if compiled is not None:
        longest = np.zeros(num_nodes, np.int32)
        compiled.longest_paths((*int32_arrays(before, after), longest))
        return longest
    length = [0] * num_nodes
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        if length[b] <= length[a]:
            length[b] = length[a] + 1
    return np.array(length, np.int32)


def longest_chains(kind: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """int32[N], the most nodes of its own kind on a path that ends in each node, itself too.

    Edges are given as in `longest_paths`; kinds are numbered from 0.
    """
    compiled = core()
    longest = np.ones(len(kind), np.int32)
    if compiled is not None:
        compiled.longest_chains((*int32_arrays(before, after), longest, *int32_arrays(kind)))
        return longest
    ends = before.tolist(), after.tolist()
    for k in range(int(kind.max(initial=-1)) + 1):
        same_kind = kind == k
        step = same_kind.astype(np.int32).tolist()
        chain = list(step)
        for a, b in zip(*ends, strict=True):
            if (length := chain[a] + step[b]) > chain[b]:
                chain[b] = length
        longest[same_kind] = np.array(chain, np.int32)[same_kind]
    return longest


def int64_arrays(*arrays: np.ndarray) -> list[np.ndarray]:
    """Arrays as the compiled core takes them."""
    return [np.ascontiguousarray(x, np.int64) for x in arrays]


def int32_arrays(*arrays: np.ndarray) -> list[np.ndarray]:
    """Arrays as the compiled core takes them."""
    return [np.ascontiguousarray(x, np.int32) for x in arrays]


def kinds_before(kind: np.ndarray, before: np.ndarray, after: np.ndarray) -> list[int]:
    """The kinds of the nodes on paths that end in each node, itself too, as bits of an int."""
    bits = [1 << k for k in kind.tolist()]
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        bits[b] |= bits[a]
    return bits


def bits(x: int) -> Iterator[int]:
    """The places of the ones of a number."""
    while x:
        low = x & -x
        yield low.bit_length() - 1
        x ^= low


def padded(ptr: np.ndarray, index: np.ndarray) -> np.ndarray:
    """int64[N, widest], the rows of a CSR pair, filled up with N."""
    counts = np.diff(ptr)
    table = np.full((len(counts), int(counts.max(initial=1))), len(counts))
    row = np.repeat(np.arange(len(counts)), counts)
    table[row, ranges(np.zeros(len(counts), np.int64), counts)] = index
    return table
