"""Finding cells without marks: operations that always run together become one node.

A model in plain `jax.numpy` is recorded operation by operation, and a node per operation costs
an order of magnitude more batches than a node per cell. Which operations make a cell can be read
off what was recorded. Every operation carries a *token*: its call site (see
`_record.passes.call_sites`) and its kind. Two neighbours in recording order belong to one
*block* if the first is always followed by the second and the second always preceded by the first,
in all instances met so far. Whatever happens between two recursive calls, or in one round of a
loop, is thus one block, up to operations that are not always the same: those of which there is one
per child, say.

Taken literally, this cuts too often. The first step of a recurrence reads a constant where others
read a state; the `h` of leaves and of nodes is computed from their `c` by the same lines. So a
choice among a few ways is no reason to cut as long as a call of a function goes on straight, from
one line to a later one, on each of them; each way is a block. Where ways join, this is done only
if a recursion passes through what follows, since it would be one more batch from child to parent;
what is off the recursion (a score of every node) stays a block of its own, of which all can run
together in the end. Decisions in a row make many ways; from some number on they are cut after all.

Why this is safe and settles down:

- A stretch of the recording is convex, since operations are recorded after what they read: no
  path leaves it and comes back. So is each connected part of it, and parts are what becomes a
  node, so that what runs together depends on each other.
- What has come after what, and what has been read by what, is only added to, and all instances of
  a minibatch are taken into account before any of them is cut: their order makes no difference.
- Node types come from what a block computes, not from where: equal blocks run together, and a
  block read in a new way makes one new type. The results of a block are those that were read
  outside of it in any instance so far.

Numbers are inputs of operations (`1 - x` reads a 1), but an operand of a node is read row by row.
A number that has been the same wherever its token was met is written into the block, until it is
seen to vary. The same holds for `value[i]`, unless different i follow on the same operation: those
of a loop have an order, and a label that is looked up has none.

Cells stay whole.

Once a minibatch would have been cut in the same way by the blocks known from before, call sites are
not taken any more (see `_record.passes.known`), until something new is met.

The granularity of cells is that of TensorFlow Fold and ED-Batch, where the user writes them down;
the rule that finds them is ours.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import pointers
from jedbatch._graph.rewrite import Rewrite, rewrite, with_inputs
from jedbatch._graph.union_find import UnionFind
from jedbatch._record.passes.call_sites import Sites, Unit
from jedbatch._record.passes.known import KnownStretches, Numbers, Parsed, Stretch, relative
from jedbatch._record.passes.patterns import Pattern, merged_call_spec
from jedbatch._record.passes.tokens import Tokens
from jedbatch._record.types.registry import CallSpec, Registry

MANY_STRETCHES = 10_000  # known, before all are forgotten


@dataclass(eq=False)
class Block:
    """A kind of block: nodes that become one node.

    Attributes:
      name: of the innermost function that they are performed in.
      units: functions that would be cells, and how many of the operations each has.
      pattern: what they compute.
      operands: value types of what is read from outside.
      leaving: the values made inside that were read outside in any instance so far, as bits.
      call_specs: how it is recorded, by what leaves it.
    """

    name: str
    units: Counter[Unit | None]
    pattern: Pattern
    operands: tuple[int, ...]
    leaving: int = 0
    call_specs: dict[int, CallSpec] = field(default_factory=dict)


class Part(NamedTuple):
    """Nodes of a stretch that depend on each other.

    Attributes:
      nodes: in the order of recording, from the first of the stretch.
      block: what they become; None for a single node, which stays what it is.
      operands: what they read, from what the stretch reads; a block reads each once.
      values: what they make, from the first value of the stretch.
    """

    nodes: tuple[int, ...]
    block: Block | None
    operands: tuple[int, ...]
    values: tuple[int, ...]


class Blocks:
    """Merges what always runs together: `granularity="auto"`.

    Belongs to one registry and learns from everything that is recorded for it.

    Attributes:
      picks: `value[i]` is one operation, of which i may be a number.
    """

    picks = True

    def __init__(self, registry: Registry):
        self._registry = registry
        self._sites = Sites(registry.assumptions)
        self._tokens = Tokens(registry, self._sites)
        self._blocks: dict[Pattern, Block] = {}
        self._stretches: dict[tuple, list[Part] | None] = {}
        self._known = KnownStretches()
        self._numbers_changed = 0
        self._needs_sites = True

    @property
    def here(self) -> Callable[[], tuple[int, bool]] | None:
        """Returns what gives call sites; None while blocks are found without them."""
        return self._sites.here if self._needs_sites else None

    def group(self, graph: Graph, sites: Sequence[tuple[int, bool]]) -> Graph | None:
        """Returns the recorded nodes as nodes of blocks; None if it takes call sites."""
        self._sites.release()
        numbers = Numbers(graph)
        learns = self._needs_sites
        parsed = self._learn(graph, sites, numbers) if learns else self._known.parse(graph, numbers)
        if parsed is None:
            self._needs_sites = True
            return None
        self._note_leaving(graph, parsed.starts, parsed.parts)
        return self._merge(graph, *parsed)

    def _learn(self, graph: Graph, sites: Sequence[tuple[int, bool]], numbers: Numbers) -> Parsed:
        """Cuts nodes by their call sites, and finds out whether these are needed again."""
        tokens = self._tokens.learn(graph, sites, numbers)
        changed = self._registry.assumptions.version("same numbers")
        if changed != self._numbers_changed or len(self._stretches) > MANY_STRETCHES:
            self._stretches.clear()
            self._known = KnownStretches()
            self._numbers_changed = changed
        starts = self._tokens.cut(tokens, graph)
        site = np.array(sites, np.int64).reshape(-1, 2)[:, 0]
        parts, reads = self._parts(graph, site, tokens, starts)
        if not self._known.is_ambiguous:
            without = self._known.parse(graph, numbers)
            self._needs_sites = without is None or without.starts != starts
        return Parsed(starts, parts, reads)

    def operations(self, graph: Graph) -> Counter[Unit | None]:
        """Returns how many operations became nodes of a graph, by what would be a cell of them.

        Those that no block is made of are counted under None.
        """
        block_of = {
            call_spec.node_type: block
            for block in self._blocks.values()
            for call_spec in block.call_specs.values()
        }
        found: Counter[Unit | None] = Counter()
        for node_type, num_nodes in enumerate(np.bincount(graph.node_type).tolist()):
            block = block_of.get(node_type)
            for unit, num_operations in block.units.items() if block else [(None, 1)]:
                found[unit] += num_nodes * num_operations
        return found

    # --- finding blocks ---

    def _parts(
        self, graph: Graph, site: np.ndarray, tokens: np.ndarray, starts: list[int]
    ) -> tuple[list[list[Part] | None], list[list[int]]]:
        """(the parts of each stretch, None for a single node; what each reads from outside)."""
        operand, ptr = graph.operand.tolist(), graph.operand_ptr.tolist()
        first = graph.value_ptr.tolist()
        data, width = tokens.tobytes(), tokens.itemsize
        parts: list[list[Part] | None] = []
        outside: list[list[int]] = []
        for a, b in itertools.pairwise(starts):
            read = operand[ptr[a] : ptr[b]]
            external: dict[int, int] = {}
            reads = relative(read, first[a], external)
            key = data[a * width : b * width], tuple(reads)
            if key not in self._stretches:
                several = b - a > 1
                new = self._find_parts(graph, site, tokens, a, b, reads) if several else None
                self._stretches[key] = new
                self._note_known(graph, a, b, reads, new)
            stretch = self._stretches[key]
            parts.append(stretch)
            outside.append(read if stretch is None else list(external))
        return parts, outside

    def _note_known(
        self, graph: Graph, begin: int, end: int, reads: list[int], parts: list[Part] | None
    ) -> None:
        """Makes a stretch known by what it computes."""
        ptr = graph.operand_ptr[begin : end + 1] - graph.operand_ptr[begin]
        numbers = []
        for part in parts or ():
            written = iter(part.block.pattern.reads if part.block else ())
            for n in part.nodes if part.block else ():
                for position in range(int(ptr[n]), int(ptr[n + 1])):
                    read = next(written)
                    if not isinstance(read, int):
                        numbers.append((position, read[1]))
        stretch = Stretch(parts, tuple(numbers))
        types = graph.node_type[begin:end].tolist()
        self._known.add(types, np.diff(ptr).tolist(), reads, stretch)

    def _find_parts(
        self,
        graph: Graph,
        site: np.ndarray,
        tokens: np.ndarray,
        begin: int,
        end: int,
        reads: list[int],
    ) -> list[Part]:
        """Cuts a stretch into what depends on each other.

        `reads` has what it reads: its own values, and `-1 - 2 * k` or, for an input, `-2 - 2 * k`.
        """
        ptr, origin = graph.operand_ptr, int(graph.operand_ptr[begin])
        start = graph.value_ptr[begin : end + 1] - graph.value_ptr[begin]
        maker = np.repeat(np.arange(end - begin), np.diff(start)).tolist()
        operands = [reads[ptr[n] - origin : ptr[n + 1] - origin] for n in range(begin, end)]
        connected: UnionFind[int] = UnionFind()
        for n, read in enumerate(operands):
            for r in read:
                if r >= 0:
                    connected.union(n, maker[r])
        members: dict[int, list[int]] = {}
        for n in range(end - begin):
            members.setdefault(connected.find(n), []).append(n)
        parts = []
        for part in members.values():
            values = [v for n in part for v in range(int(start[n]), int(start[n + 1]))]
            if len(part) == 1:
                outside = [(-1 - r) // 2 for r in operands[part[0]]]
                parts.append(Part(tuple(part), None, tuple(outside), tuple(values)))
                continue
            slots = {v: k for k, v in enumerate(values)}
            pattern, read_once, kinds = self._pattern(graph, tokens, begin, part, operands, slots)
            block = self._blocks.get(pattern)
            if block is None:
                sites = site[[begin + n for n in part]].tolist()
                code = self._sites.function(sites)
                name = "block" if code is None else code.co_name
                units = Counter(map(self._sites.unit, sites))
                block = self._blocks[pattern] = Block(name, units, pattern, kinds)
            parts.append(Part(tuple(part), block, read_once, tuple(values)))
        return parts

    def _pattern(
        self, graph: Graph, tokens: np.ndarray, begin: int, part, operands, slots
    ) -> tuple[Pattern, tuple[int, ...], tuple[int, ...]]:
        """(what nodes of a stretch compute, what they read from outside, value types of that)."""
        types = tuple(graph.node_type[[begin + n for n in part]].tolist())
        once: dict[int, int] = {}
        kinds: list[int] = []
        written: list[Any] = []
        for n, node_type in zip(part, types, strict=True):
            its_kinds = self._registry.kinds_of(self._registry.node_types[node_type].operands)
            for position, (r, kind) in enumerate(zip(operands[n], its_kinds, strict=True)):
                if r >= 0:
                    written.append(slots[r])
                    continue
                is_input = r % 2 == 0
                number = self._tokens.number(int(tokens[begin + n]), position) if is_input else None
                if number is not None:
                    written.append((kind, number))
                    continue
                outside = (-1 - r) // 2
                if outside not in once:
                    kinds.append(kind)
                written.append(-1 - once.setdefault(outside, len(once)))
        return Pattern(types, tuple(written)), tuple(once), tuple(kinds)

    def _note_leaving(
        self, graph: Graph, starts: list[int], parts: Sequence[list[Part] | None]
    ) -> None:
        """Notes which values of blocks instances return, or other parts read."""
        part_of = np.repeat(np.arange(len(parts)), np.diff(starts))
        total = len(parts)
        for k, stretch in enumerate(parts):
            if stretch is not None and len(stretch) > 1:
                for part in stretch:
                    part_of[[starts[k] + n for n in part.nodes]] = total
                    total += 1
        outside = np.zeros(graph.num_values, bool)
        outside[graph.outputs[graph.outputs >= 0]] = True
        inner = np.flatnonzero(graph.operand >= 0)
        values = graph.operand[inner]
        apart = part_of[graph.value_node[values]] != part_of[graph.operand_reader[inner]]
        outside[values[apart]] = True
        leaves, first = outside.tobytes(), graph.value_ptr.tolist()
        seen: set[tuple] = set()
        for a, b, stretch in zip(starts, starts[1:], parts, strict=False):
            if stretch is None:
                continue
            mark = id(stretch), leaves[first[a] : first[b]]
            if mark in seen:
                continue
            seen.add(mark)
            for part in stretch:
                if part.block is not None:
                    bits = sum([1 << k for k, v in enumerate(part.values) if mark[1][v]])
                    part.block.leaving |= bits

    # --- merging ---

    def _merge(
        self,
        graph: Graph,
        starts: list[int],
        parts: Sequence[list[Part] | None],
        outside: Sequence[list[int]],
    ) -> Graph:
        """Returns the nodes with each block as one node."""
        kept = np.ones(len(graph.node_type), bool)
        first, num_values = graph.value_ptr.tolist(), graph.num_values
        merged: list[int] = []  # the nodes of blocks
        anchor: list[int] = []
        node_type: list[int] = []
        arity: list[int] = []
        operand: list[int] = []
        left: list[int] = []  # the values that leave blocks, in the order of results of these
        for a, stretch, read in zip(starts, parts, outside, strict=False):
            for part in stretch or ():
                if part.block is None:
                    continue
                merged += [a + n for n in part.nodes]
                leaving = part.block.leaving
                if not leaving:  # it is never read
                    continue
                call_spec = part.block.call_specs.get(leaving)
                if call_spec is None:
                    call_spec = self._call_spec(part.block)
                anchor.append(a + part.nodes[0])
                node_type.append(call_spec.node_type)
                arity.append(len(part.operands))
                operand += [read[k] for k in part.operands]
                left += [first[a] + v for k, v in enumerate(part.values) if leaving >> k & 1]
        kept[merged] = False
        value = np.arange(num_values)
        value[left] = num_values + np.arange(len(left))
        new = np.array(node_type, np.int32), pointers(np.array(arity, np.int64))
        change = Rewrite(kept, np.array(anchor, np.int64), *new, np.array(operand, np.int64), value)
        return with_inputs(rewrite(graph, change, self._registry.types))

    def _call_spec(self, block: Block) -> CallSpec:
        """Returns how to record a block of which some values leave."""
        call_spec = merged_call_spec(self._registry, block.name, block.pattern, block.leaving)
        block.call_specs[block.leaving] = call_spec
        return call_spec


GRANULARITIES: dict[str, Callable[[Registry], Any]] = {
    "cell": lambda registry: None,
    "auto": Blocks,
}
