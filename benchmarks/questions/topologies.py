"""Bare graphs of seven kinds of models, from real data or made up, for counting batches.

An instance is `(types, operands)`: names of node types, and for each node the nodes it reads.
`--data DIRECTORY` may hold any of the files named in `WORKLOADS`; what is missing is made up.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jedbatch import Graph
from jedbatch.data import (
    read_code,
    read_dependencies,
    read_tagged,
    read_translations,
    read_trees,
    synthetic_treebank,
)
from jedbatch.data.lines import read_lines
from jedbatch.data.rooted import unrooted

Instance = tuple[list[str], list[list[int]]]


class Builder:
    """An instance in the making."""

    def __init__(self):
        self.types: list[str] = []
        self.operands: list[list[int]] = []

    def add(self, name: str, *operands: int) -> int:
        """A node; returns its number."""
        self.types.append(name)
        self.operands.append(list(operands))
        return len(self.types) - 1

    def done(self) -> Instance:
        """Returns the instance."""
        return self.types, self.operands


def tree(rng: np.random.Generator, sentence: Any, kinds: int) -> Instance:
    """A binary TreeLSTM with an output at every node; its inner nodes are of random kinds."""
    made = Builder()

    def node(x: Any) -> int:
        if len(x) == 2:
            return made.add("leaf")
        _, left, right = x
        below = node(left), node(right)
        return made.add(f"node {rng.integers(kinds)}", *below)

    node(sentence)
    for n in range(len(made.types)):
        made.add("output", n)
    return made.done()


def lattice(characters: int, words: Sequence[tuple[int, int]]) -> Instance:
    """A LatticeLSTM: characters in a chain, words from their first to their last character."""
    made, ending, cell = Builder(), {}, []
    for start, end in words:
        ending.setdefault(end - 1, []).append(start)
    for i in range(characters):
        read = [made.add("word", cell[start]) for start in ending.get(i, ())]
        cell.append(made.add("character", *cell[-1:], *read))
    for n in cell:
        made.add("output", n)
    return made.done()


def tagger(length: int) -> Instance:
    """Two layers of LSTMs in both directions and an output per word."""
    made = Builder()

    def chain(name: str, read: Sequence[Sequence[int]]) -> list[int]:
        cells: list[int] = []
        for operands in read:
            cells.append(made.add(name, *cells[-1:], *operands))
        return cells

    below: list[list[int]] = [[]] * length
    for layer in (1, 2):
        forward = chain(f"forward {layer}", below)
        backward = chain(f"backward {layer}", below[::-1])[::-1]
        below = [list(pair) for pair in zip(forward, backward, strict=True)]
    for pair in below:
        made.add("output", *pair)
    return made.done()


def translation(source: int, target: int) -> Instance:
    """An LSTM encoder, a teacher-forced decoder, and an output per word of the target."""
    made, state = Builder(), []
    for name, length in (("encoder", source), ("decoder", target)):
        for _ in range(length):
            state = [made.add(name, *state)]
            if name == "decoder":
                made.add("output", *state)
    return made.done()


def rooted(parents: Sequence[int], name: Callable[[int, int], str]) -> Instance:
    """A tree given by the parent of each node (negative for the root), children read in order."""
    children: list[list[int]] = [[] for _ in parents]
    root = 0
    for n, parent in enumerate(parents):
        if parent < 0:
            root = n
        else:
            children[parent].append(n)
    made = Builder()
    place: dict[int, int] = {}
    stack = [(root, False)]
    while stack:
        n, ready = stack.pop()
        if ready:
            place[n] = made.add(name(n, len(children[n])), *(place[c] for c in children[n]))
        else:
            stack.append((n, True))
            stack += [(c, False) for c in reversed(children[n])]
    return made.done()


# --- where the shapes come from ---


def trees(path: Path | None, rng: np.random.Generator, kinds: int) -> Iterator[Instance]:
    found = read_trees(path) if path else synthetic_treebank(1200)
    return (tree(rng, x, kinds) for x in found)


def lattices(path, rng):
    if path:
        for record in read_lines(path, None, json.loads, "one lattice a line"):
            yield lattice(len(record["chars"]), [(a, b) for a, b, _ in record["words"]])
        return
    for _ in range(1200):
        characters = int(np.clip(rng.gamma(1.9, 28), 10, 175))
        starts = np.flatnonzero(rng.random(characters - 1) < 0.31)
        ends = starts + rng.choice([2, 3, 4], len(starts), p=[0.89, 0.08, 0.03])
        ends = np.minimum(ends, characters)
        yield lattice(characters, list(zip(starts.tolist(), ends.tolist(), strict=True)))


def lengths(rng: np.random.Generator, mean: float) -> list[int]:
    return np.clip(rng.gamma(4, mean / 4, 1200), 3, 100).astype(int).tolist()


def taggers(path, rng):
    if path:
        return (tagger(len(words)) for words, _ in read_tagged.stream(path))
    return map(tagger, lengths(rng, 25))


def translations(path, rng):
    if path:
        return (translation(len(a), len(b)) for a, b in read_translations.stream(path))
    return (translation(n, max(2, n + int(rng.integers(-3, 8)))) for n in lengths(rng, 19))


def dependencies(path, rng):
    """A cell for every number of children."""
    if path:
        parents = (unrooted(tree)[1] for tree in read_dependencies.stream(path))
    else:
        sizes = lengths(rng, 24)
        parents = ([-1, *(int(n * rng.random() ** 2) for n in range(1, size))] for size in sizes)
    return (rooted(p, lambda _, k: f"{k} children") for p in parents)


def code(path, rng):
    """A cell for every kind of node."""
    if path:
        for types, parents in map(unrooted, read_code.stream(path)):
            yield rooted(parents, lambda n, _, types=types: types[n])
        return
    for _ in range(1200):
        size = int(np.clip(rng.lognormal(3.6, 0.9), 8, 800))
        parents = [-1, *(int(rng.integers(max(0, n - 12), n)) for n in range(1, size))]
        kinds = (60 * rng.random(size) ** 3).astype(int)
        yield rooted(parents, lambda n, _, kinds=kinds: f"kind {kinds[n]}")


WORKLOADS = {
    "TreeLSTM": ("ptb.bin.txt.gz", functools.partial(trees, kinds=1)),
    "TreeLSTM, 2 types": ("ptb.bin.txt.gz", functools.partial(trees, kinds=2)),
    "LatticeLSTM": ("weibo_lattice.jsonl.gz", lattices),
    "BiLSTM tagger": ("wikiner.jsonl.gz", taggers),
    "encoder-decoder": ("iwslt15_envi.tsv.gz", translations),
    "dependency trees": ("ptb_dep.jsonl.gz", dependencies),
    "code trees": ("python_ast.jsonl.gz", code),
}


def instances(workload: str, directory: Path | None, most: int = 1200) -> list[Graph]:
    """Graphs of up to `most` instances, all over the same types."""
    file, make = WORKLOADS[workload]
    path = directory / file if directory and (directory / file).exists() else None
    rng = np.random.default_rng(0)
    made = [instance for instance, _ in zip(make(path, rng), range(most), strict=False)]
    names = sorted({name for types, _ in made for name in types})
    number = {name: i for i, name in enumerate(names)}
    return [
        Graph.from_dag([number[t] for t in types], operands, names=names)
        for types, operands in made
    ]
