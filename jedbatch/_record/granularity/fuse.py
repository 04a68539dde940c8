"""Finding cells without marks: operations that always run together become one node.

A model in plain `jax.numpy` is recorded operation by operation, and a node per operation costs
an order of magnitude more batches than a node per cell. Which operations make a cell can be read
off what was recorded. Every operation carries a *token*: its call site (see
`_record.granularity.call_sites`) and its kind. Two neighbours in recording order belong to one
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

Cells stay whole, except those that exist in several variants, such as a node of a tree with any
number of children. Nodes of different variants never run together, although their products might.
Such a cell is taken apart if variants have a product of matrices in common (see
`_record.granularity.inline`); then what does not depend on the number of children is a block of its
own.

The granularity of cells is that of TensorFlow Fold and ED-Batch, where the user writes them down;
the rule that finds them is ours.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._graph.types import operation_of
from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.interpret import performs
from jedbatch._jaxpr.storage import is_key
from jedbatch._record.granularity.call_sites import Sites
from jedbatch._record.granularity.inline import Nodes, Primitives, Template, apart, make_template
from jedbatch._record.operators import PICK
from jedbatch._record.recorder import Recorder
from jedbatch._record.registry import CallSpec, Registry
from jedbatch._support.types import Leaf

PRODUCTS = ("dot_general", "conv_general_dilated")
START, END, ELSEWHERE = -1, -2, -3
MAX_DISTINCT_WAYS = 2  # ways to an operation, or on from it, that may be told apart
MANY_WAYS = 8  # through one stretch, which are not told apart any more
MANY_VARIANTS = 3  # of a cell, from which on it may be taken apart


class Pattern(NamedTuple):
    """The computation of a block.

    Attributes:
      types: the node types of its operations.
      reads: what they read, one after the other: `k >= 0` is value k made inside, `-1 - k` is
        operand k of the block, and a pair (value type, bytes) is a number written into it.
    """

    types: tuple[int, ...]
    reads: tuple[Any, ...]


class Block(NamedTuple):
    """Nodes that become one node.

    Attributes:
      nodes: in the order of recording.
      pattern: what they compute.
      operands: what is read from outside, each once.
      values: what is made inside.
    """

    nodes: list[int]
    pattern: Pattern
    operands: list[int]
    values: list[int]


class Blocks:
    """Merges what always runs together: `granularity="auto"`.

    Belongs to one registry and learns from everything that is recorded for it.
    """

    def __init__(self, registry: Registry):
        self._registry = registry
        self._sites = Sites()
        self._variants = Variants(registry, self)
        self._tokens: dict[tuple, int] = {}
        self._after: dict[int, set[int]] = {}  # a few tokens that come next, and `ELSEWHERE`
        self._before: dict[int, set[int]] = {}
        self._ways: dict[int, set[tuple[int, ...]]] = {}  # stretches by their first token
        self._edges: set[tuple[int, int]] = set()  # of tokens
        self._joins: dict[int, bool] = {}
        self._picked: dict[tuple, int] = {}
        self._varying: set[tuple[int, int]] = set()
        self._numbers: dict[tuple[int, int], bytes | None] = {}  # None once they vary
        self._number_types: list[Any] = []  # dtypes, of every group of inputs that holds numbers
        self._leaving: dict[Pattern, int] = {}  # as bits
        self._call_specs: dict[tuple[Pattern, int], CallSpec] = {}
        self.here = self._sites.here
        self.met = self._variants.met

    @property
    def revision(self) -> int:
        """The number of times that what was recorded first would now be recorded otherwise."""
        return self._sites.revision + self._variants.revision

    def group(
        self, recorder: Recorder, outputs: Sequence[int], ends: Sequence[tuple[int, ...]]
    ) -> Nodes:
        """Returns the recorded nodes as nodes of blocks."""
        self._sites.release()
        nodes = apart(self._registry, recorder, outputs, ends, self._variants.template)
        tokens = self._learn(nodes)
        maker = nodes.makers(self._registry)
        cut = self._cut(tokens, [nodes_here for nodes_here, _ in nodes.instances()])
        parts = [
            [part for s in nodes_here for part in _connected(nodes, s, maker)] for nodes_here in cut
        ]
        leaving = _read_outside(nodes, parts, maker)
        starts = nodes.starts(self._registry)
        blocks = [[self._block(nodes, tokens, starts, p, leaving) for p in ps] for ps in parts]
        return self._merge(nodes, starts, blocks)

    # --- learning ---

    def _learn(self, nodes: Nodes) -> list[int]:
        """The tokens of the nodes; notes what follows what, and which numbers vary."""
        while True:
            tokens = self._tokens_of(nodes)
            if not self._find_picks(nodes, tokens):
                break
        for positions, _ in nodes.instances():
            before = START
            for n in positions:
                self._follow(before, tokens[n], before != START and self._goes_on(nodes, n))
                before = tokens[n]
            self._follow(before, END, goes_on=False)
        for token, operands in zip(tokens, nodes.operands, strict=True):
            for position, r in enumerate(operands):
                if r < 0 and self._numbers.get((token, position), b"") is not None:
                    number = self._number(nodes, r)
                    if number is None or number != self._numbers.setdefault(
                        (token, position), number
                    ):
                        self._numbers[token, position] = None
        maker = nodes.makers(self._registry)
        edges = {
            (tokens[maker[r]], token)
            for token, operands in zip(tokens, nodes.operands, strict=True)
            for r in operands
            if r >= 0
        }
        self._edges |= edges
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

    def _goes_on(self, nodes: Nodes, n: int) -> bool:
        """Returns whether a call of a function goes straight from the node before to this one."""
        (before, _), (site, same) = nodes.sites[n - 1 : n + 1]
        return same and self._sites.onward(before, site)

    def _tokens_of(self, nodes: Nodes) -> list[int]:
        intern, call_specs = self._tokens, self._registry.call_specs
        tokens = []
        for n, ((site, _), c) in enumerate(zip(nodes.sites, nodes.call_specs, strict=True)):
            token: tuple = (site, call_specs[c].node_type)
            if self._picks(token) and token not in self._varying:
                token = (*token, nodes.input_value[~nodes.operands[n][1]])
            tokens.append(intern.setdefault(token, len(intern)))
        return tokens

    def _picks(self, token: tuple) -> bool:
        """True of `value[i]` with a Python number."""
        return operation_of(self._registry.node_types[token[1]]).key[0] == PICK

    def _find_picks(self, nodes: Nodes, tokens: list[int]) -> bool:
        """Returns whether there are new places where `value[i]` follows the same with another i."""
        num_varying = len(self._varying)
        for positions, _ in nodes.instances():
            before = START
            for n in positions:
                call_spec = self._registry.call_specs[nodes.call_specs[n]]
                place = (nodes.sites[n][0], call_spec.node_type)
                if self._picks(place) and place not in self._varying:
                    i = nodes.input_value[~nodes.operands[n][1]]
                    if self._picked.setdefault((before, place), i) != i:
                        self._varying.add(place)
                before = tokens[n]
        return len(self._varying) > num_varying

    def _number(self, nodes: Nodes, reference: int) -> bytes | None:
        """An input as bytes, if it is a number."""
        types, registry = self._number_types, self._registry
        for how, kind, *_ in registry.groups[len(types) :]:
            value_type = registry.value_types[kind]
            plain = how == "value" and value_type.shape == () and not is_key(value_type.dtype)
            types.append(value_type.dtype if plain else None)
        dtype = types[nodes.input_group[~reference]]
        if dtype is None:
            return None
        return np.asarray(nodes.input_value[~reference], dtype).tobytes()

    # --- finding blocks ---

    def _cut(self, tokens: Sequence[int], instances: Sequence[range]) -> list[list[range]]:
        """Cuts the instances into stretches."""
        while True:
            cut = [list(self._stretches(tokens, positions)) for positions in instances]
            many = False
            for stretch in itertools.chain.from_iterable(cut):
                ways = self._ways.setdefault(tokens[stretch.start], set())
                if len(ways) <= MANY_WAYS:
                    ways.add(tuple(tokens[stretch.start : stretch.stop]))
                    many |= len(ways) > MANY_WAYS
            if not many:
                return cut

    def _stretches(self, tokens: Sequence[int], positions: range) -> Iterator[range]:
        begin = positions.start
        for n in positions[1:]:
            strict = len(self._ways.get(tokens[begin], ())) > MANY_WAYS
            if not self._joined(tokens[n - 1], tokens[n], strict):
                yield range(begin, n)
                begin = n
        if positions:
            yield range(begin, positions.stop)

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

    def _block(self, nodes: Nodes, tokens, starts, part: list[int], leaving: set[int]) -> Block:
        """Returns what a part of an instance computes and reads; notes what leaves it."""
        slots: dict[int, int] = {}
        operands: dict[int, int] = {}
        reads: list[Any] = []
        if len(part) == 1:  # stays what it is
            return Block(part, Pattern((), ()), [], [])
        for n in part:
            for position, r in enumerate(nodes.operands[n]):
                if r in slots:
                    reads.append(slots[r])
                    continue
                number = self._numbers.get((tokens[n], position)) if r < 0 else None
                if number is not None:
                    kind = self._registry.groups[nodes.input_group[~r]][1]
                    reads.append((kind, number))
                else:
                    reads.append(-1 - operands.setdefault(r, len(operands)))
            for v in range(starts[n], starts[n + 1]):
                slots[v] = len(slots)
        types = tuple([self._registry.call_specs[nodes.call_specs[n]].node_type for n in part])
        pattern = Pattern(types, tuple(reads))
        bits = sum([1 << k for v, k in slots.items() if v in leaving])
        self._leaving[pattern] = self._leaving.get(pattern, 0) | bits
        return Block(part, pattern, list(operands), list(slots))

    # --- merging ---

    def _merge(
        self, nodes: Nodes, starts: Sequence[int], blocks: Sequence[Sequence[Block]]
    ) -> Nodes:
        """The nodes with each block as one node."""
        merged = Nodes(input_group=nodes.input_group, input_value=nodes.input_value)
        place = [0] * nodes.num_values

        def placed(references: Sequence[int]) -> list[int]:
            return [place[r] if r >= 0 else r for r in references]

        for (_, returned), instance_blocks, end in zip(
            nodes.instances(), blocks, nodes.ends[1:], strict=True
        ):
            for block in instance_blocks:
                if len(block.nodes) == 1:
                    (n,) = block.nodes
                    call_spec = self._registry.call_specs[nodes.call_specs[n]]
                    first = merged.add(call_spec, nodes.sites[n], placed(nodes.operands[n]))
                    place[starts[n] : starts[n + 1]] = range(first, merged.num_values)
                elif leaving := self._leaving[block.pattern]:  # else it is never read
                    call_spec = self._call_spec(block, leaving, nodes)
                    v = merged.add(call_spec, nodes.sites[block.nodes[0]], placed(block.operands))
                    for k, value in enumerate(block.values):
                        if leaving >> k & 1:
                            place[value] = v
                            v += 1
            merged.outputs += placed(nodes.outputs[returned.start : returned.stop])
            merged.ends.append((len(merged.call_specs), *end[1:]))
        return merged

    def _call_spec(self, block: Block, leaving: int, nodes: Nodes) -> CallSpec:
        """Returns how to record a block of which some values leave."""
        pattern, registry = block.pattern, self._registry
        call_spec = self._call_specs.get((pattern, leaving))
        if call_spec is None:
            types = [registry.node_types[t] for t in pattern.types]
            shared = tuple(dict.fromkeys(s for t in types for s in t.shared))
            kinds = [0] * len(block.operands)
            reads = iter(pattern.reads)
            for value_type, read in zip((x for t in types for x in t.operands), reads, strict=True):
                if isinstance(read, int) and read < 0:
                    kinds[~read] = registry.value_type(
                        value_type.shape, value_type.dtype, value_type.weak
                    )
            name = self._sites.name(nodes.sites[n][0] for n in block.nodes)
            key = ("block", *pattern, leaving)
            call = _program(registry, pattern, shared, leaving)
            call_spec = registry.call_spec(name, key, call, shared, tuple(kinds), user_code=False)
            self._call_specs[pattern, leaving] = call_spec
        return call_spec


def _connected(nodes: Nodes, stretch: range, maker: Sequence[int]) -> list[list[int]]:
    """The nodes of a stretch; those that depend on each other together."""
    if len(stretch) == 1:
        return [list(stretch)]
    connected: UnionFind[int] = UnionFind()
    for n in stretch:
        for r in nodes.operands[n]:
            if r >= 0 and maker[r] >= stretch.start:
                connected.union(n, maker[r])
    parts: dict[int, list[int]] = {}
    for n in stretch:
        parts.setdefault(connected.find(n), []).append(n)
    return list(parts.values())


def _read_outside(nodes: Nodes, parts: Sequence[Sequence[list[int]]], maker) -> set[int]:
    """The values that instances return or other parts read."""
    part_of = [0] * len(nodes.call_specs)
    for number, part in enumerate(itertools.chain.from_iterable(parts)):
        for n in part:
            part_of[n] = number
    values = set(nodes.outputs)
    for n, operands in enumerate(nodes.operands):
        own_part = part_of[n]
        values.update([r for r in operands if r >= 0 and part_of[maker[r]] != own_part])
    return values


def _program(
    registry: Registry, pattern: Pattern, shared: tuple[int, ...], leaving: int
) -> Callable:
    """A function of (shared values, operands) that does what a block does."""
    types = [registry.node_types[t] for t in pattern.types]
    numbers = {}
    for read in pattern.reads:
        if not isinstance(read, int):
            kind, data = read
            value_type = registry.value_types[kind]
            number = np.frombuffer(data, value_type.dtype)[0]
            numbers[read] = number.item() if value_type.weak else number

    def call(shared_values: Sequence[Leaf], operand_values: Sequence[Leaf]) -> list[Leaf]:
        of_shared = dict(zip(shared, shared_values, strict=True))
        values_made: list[Any] = []
        reads = iter(pattern.reads)
        for node_type in types:
            operation = operation_of(node_type)
            operands_here = [
                numbers[r] if r in numbers else values_made[r] if r >= 0 else operand_values[~r]
                for r in itertools.islice(reads, len(node_type.operands))
            ]
            values = [*(of_shared[s] for s in node_type.shared), *operands_here]
            closed = operation.jaxpr
            values_made += jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *values)
        return [x for k, x in enumerate(values_made) if leaving >> k & 1]

    return call


class Variants:
    """Cells that were met with operands of several types, and what they are made of.

    Attributes:
      revision: how many cells have turned out to have variants, the first ones without a template.
    """

    def __init__(self, registry: Registry, blocks: Blocks):
        self._registry = registry
        self._blocks = blocks
        self._cell_of: dict[int, Hashable] = {}  # by node type
        self._templates: dict[Hashable, dict[int, Template | None]] = {}
        self._products: dict[Hashable, set[int]] = {}
        self._apart: set[Hashable] = set()
        self.revision = 0

    def met(self, cell: Hashable, call_spec: CallSpec, call: Callable) -> None:
        """Notes that a cell was called in a certain way."""
        variant = call_spec.node_type
        self._cell_of[variant] = cell
        variants = self._templates.setdefault(cell, {})
        variant_id = variants.setdefault(variant, None)
        if variant_id is not None or len(variants) < MANY_VARIANTS:
            return
        if cell not in self._products:  # the first ones have no template yet
            self.revision += 1
            self._registry.calls.clear()  # so that they come by here
            self._products[cell] = set()
        types = self._registry.node_types
        template = variants[variant] = make_template(
            self._registry,
            call,
            types[variant].shared,
            self._registry.kinds_of(types[variant].operands),
            self.template,
            self._blocks,
        )
        products = {self._registry.call_specs[c].node_type for c in template.call_specs}
        products = {t for t in products if performs(operation_of(types[t]).jaxpr, *PRODUCTS)}
        if products & self._products[cell]:
            self._apart.add(cell)
        self._products[cell] |= products

    def template(self, call_spec: CallSpec) -> Template | None:
        """Returns the replacement of a call, or None."""
        cell = self._cell_of.get(call_spec.node_type)
        if cell not in self._apart:
            return None
        return self._templates[cell][call_spec.node_type]


GRANULARITIES: dict[str, Callable[[Registry], Any]] = {
    "cell": lambda registry: None,
    "op": Primitives,
    "auto": Blocks,
}
