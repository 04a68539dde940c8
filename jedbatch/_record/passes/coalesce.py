"""Finding cells without marks: operations that always run together become one node.

A model in plain `jax.numpy` is recorded operation by operation, and a node for each operation costs
an order of magnitude more batches than a node for each call of a cell. `Coalescing` contracts edges
of the graph until its nodes are such as cells would be. Two rules say which, each about all nodes
of a type P, in all instances met so far:

1. *One reader.* The results of each P are read by one node alone. Then P becomes part of its
   readers.
2. *Last operand.* Each P is followed by exactly one node of a type R that could run right after it,
   as all else that this one reads is there no later. Then the two become one.

So contraction tells apart what computes the same. A sum may be part of anything, but a sum that
reads a product with `params["W"]` is a type of its own once rule 1 has been applied to the product.
Readers of one type may become several types, as they read P at different places, such as a left or
a right child, or not at all; in return P vanishes. What would make types more is not done.

By rule 1 no node waits for more than before. By rule 2 other readers of P do, for an R that could
have run as early as they. Steps of a recursion or a loop are not joined with each other, since the
last state of each instance has no step behind it. There are two exceptions:

- What recurs (types on a cycle of types) is not joined with readers that do not. Scores of all
  states would run level by level, and are one batch in the end otherwise.
- What happens once an instance at most is not joined with what recurs: the first state of a chain
  with the first of many steps.

Why there are no cycles. A node contracted by rule 1 has one way out, to its reader. In rule 2, let
p and r become one, and p' and r', with p and p' of one type. A path from the first pair to the
second ends in p', or in an operand of r', which is there no later than p'. So p is earlier than p'
or, if the path is the edge from p to r', as early; but then r' could run right after p, which r
does, and each p is followed by one. Paths both ways would make p earlier than itself. Pairs of
other types may become one in the same step if none of the readers reads what vanishes in another.

The order of instances makes no difference, as all of a minibatch are looked at before any is
contracted. What was met is kept for each stage of contraction. A graph that fits the steps taken
before is contracted by these. Another one is looked at stage by stage, and steps may be others from
then on.

A number that was the same in all nodes of a type, at one place, is written into it if there were
several when the type was first met. Results of a node are those values that were read outside of it
so far. Calls of cells stay what they are, and so are nodes that take lists of any length (see
`_record.passes.lists`).

The granularity of cells is that of TensorFlow Fold and ED-Batch, where the user writes them down;
the rules that find them are ours.
"""

import collections
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jedbatch._graph.analysis import transitive_closure
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import held_values
from jedbatch._graph.paths import pointers
from jedbatch._graph.rewrite import Rewrite, rewrite, with_inputs
from jedbatch._graph.types import NodeType, operation_of
from jedbatch._jaxpr.interpret import performs
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import ragged_axes, symbols_in
from jedbatch._record.passes.blocks import Blocks, Merged, Reads
from jedbatch._record.passes.patterns import Pattern, merged_call_spec
from jedbatch._record.types.registry import CallSpec, Registry

CELL, LISTS = "cell", "lists"
CONTROL_FLOW = ("while", "scan", "cond")
ENOUGH = 8, 512  # instances and nodes that are met before any are merged
MAX_KINDS = 256  # of operations that are known, before all that was met is forgotten
MANY_TIMES = 2  # nodes of a type an instance, from which on it happens many times
Places = dict[tuple[int, int], set[int]]


class Contraction(NamedTuple):
    """A step of contraction, by kinds of blocks.

    Attributes:
      single: kinds that become part of their only readers.
      pairs: kinds that become one with a reader of another kind that could run right after them.
    """

    single: frozenset[int] = frozenset()
    pairs: frozenset[tuple[int, int]] = frozenset()

    @property
    def makers(self) -> frozenset[int]:
        """Returns the kinds that vanish."""
        return self.single.union(p for p, _ in self.pairs)

    def joined(
        self, blocks: Blocks, reads: Reads, depth: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns which operands are of blocks that vanish, and depths (see `Blocks.joined`)."""
        if self.single:
            return np.isin(blocks.kind[reads.maker], list(self.single)), None
        kinds = blocks.kind[reads.maker], blocks.kind[reads.reader]
        found = [(kinds[0] == p) & (kinds[1] == r) for p, r in self.pairs]
        return np.logical_or.reduce(found) & reads.last(depth), depth

    def fits(
        self, blocks: Blocks, reads: Reads, joined: np.ndarray, depth: np.ndarray | None
    ) -> bool:
        """Returns whether each block of the kinds that vanish becomes one with one other.

        And whether none that grows could run right after one that vanishes in another. What is
        `joined`, and `depth`, are as `joined` returns them.
        """
        maker, _ = reads.edges(joined)
        times = np.bincount(maker, minlength=len(blocks.kind))
        if (times[np.isin(blocks.kind, list(self.makers))] != 1).any():
            return False
        if depth is None:
            return True
        vanishes, grows = np.zeros((2, len(blocks.kind)), bool)
        vanishes[reads.maker[joined]] = grows[reads.reader[joined]] = True
        others = vanishes[reads.maker] & grows[reads.reader] & ~joined
        return not (others & reads.last(depth)).any()


NO_STEP = Contraction()


@dataclass(eq=False)
class ContractionStage:
    """All that was met after some steps of contraction, by kinds of blocks (K kinds).

    Attributes:
      number: of each kind, in what follows.
      num_instances: met so far.
      count: int64[K], blocks.
      many: bool[K], makers of which one was read by none or by several.
      fed: int64[K, K], readers of the second kind that read a maker of the first.
      followed: int64[K, K], makers that exactly one reader of the second kind could run after.
      places, last_places: by two kinds, the sets of places at which readers of the second read
        makers of the first, or those that they could run after.
      most_added: how many types a kind that vanishes may add; fewer once types became more.
      step: the step that follows; none yet.
      then: the stage after it.
    """

    number: dict[int, int] = field(default_factory=dict)
    num_instances: int = 0
    count: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    many: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    fed: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    followed: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    places: Places = field(default_factory=lambda: collections.defaultdict(set))
    last_places: Places = field(default_factory=lambda: collections.defaultdict(set))
    most_added: int = 1
    step: Contraction = NO_STEP
    then: "ContractionStage | None" = None

    def note(self, blocks: Blocks, reads: Reads, depth: np.ndarray, num_instances: int) -> None:
        """Notes what a minibatch has, given int64[B], the most blocks on a path to each."""
        kinds, kind = np.unique(blocks.kind, return_inverse=True)
        for k in kinds.tolist():
            self.number.setdefault(k, len(self.number))
        size = len(self.number)
        for name in ("count", "many", "fed", "followed"):
            old = getattr(self, name)
            setattr(self, name, np.pad(old, [(0, size - n) for n in old.shape]))
        kind = np.array([self.number[k] for k in kinds.tolist()])[kind]
        self.num_instances += num_instances
        self.count += np.bincount(kind, minlength=size)
        maker, _ = reads.edges()
        self.many[kind[np.bincount(maker, minlength=len(kind)) != 1]] = True
        every = reads.of_kinds(kind, size)
        self.fed += every.fed
        last = np.flatnonzero(reads.last(depth))
        maker, reader = reads.edges(last)
        pairs, times = np.unique(maker * size + kind[reader], return_counts=True)
        maker, reader_kind = np.divmod(pairs[times == 1], size)
        followed = np.bincount(kind[maker] * size + reader_kind, minlength=size * size)
        self.followed += followed.reshape(size, size)
        of_last = reads.of_kinds(kind, size, last)
        for places, found in ((self.places, every), (self.last_places, of_last)):
            for pair, place in found.places:
                places[divmod(pair, size)].add(place)

    def next_step(self, fixed: set[int], ragged: set[int], names: dict[int, str]) -> Contraction:
        """Returns the step that should follow, `NO_STEP` if none.

        Args:
          fixed: kinds that are not contracted.
          ragged: kinds on arrays of any length, of which each has a type for every capacity. What
            reads their results and is none of them does not become one with them.
          names: of kinds, which decide between steps that are as good.
        """
        kinds, reads = list(self.number), self.fed > 0
        is_fixed, is_ragged = (np.array([k in some for k in kinds]) for some in (fixed, ragged))
        leads = transitive_closure(reads)
        recurs = np.diag(leads)
        rare = (self.count <= self.num_instances) & ~recurs
        often = (self.count > MANY_TIMES * self.num_instances) & recurs
        barred = recurs[:, None] & ~leads.T | rare[:, None] & often | is_fixed[:, None] | is_fixed
        barred |= is_ragged[:, None] & ~is_ragged
        np.fill_diagonal(barred, val=True)
        stay = self.fed < self.count  # readers of the second kind that read no maker of the first
        adds = np.where(reads, stay, 0) - reads
        for pair, places in self.places.items():
            adds[pair] += len(places)
        added = adds.sum(axis=1)
        single = ~self.many & (added <= self.most_added) & ~(reads & barred).any(axis=1)
        # Rounds of a loop would become one if all kinds of a cycle did at once.
        loops = np.diag(transitive_closure(reads & single[:, None] & single)) & (added > 0)
        found = [kinds[k] for k in np.flatnonzero(single & ~loops)]
        if single.any() and not found:  # one of them, then
            found = [min([kinds[k] for k in np.flatnonzero(single)], key=lambda k: names[k])]
        if found:
            return Contraction(single=frozenset(found))
        pairs = [
            (p, r)
            for p, r in np.argwhere((self.followed == self.count[:, None]) & ~barred).tolist()
            if len(self.last_places[p, r]) + stay[p, r] - 1 <= self.most_added
        ]
        pairs.sort(key=lambda x: (-self.count[x[0]], names[kinds[x[0]]], names[kinds[x[1]]]))
        chosen: list[tuple[int, int]] = []  # none of which reads what vanishes in another
        for p, r in pairs:
            if not any({p, r} & {q, s} or reads[p, s] or reads[q, r] for q, s in chosen):
                chosen.append((p, r))
        return Contraction(pairs=frozenset((kinds[p], kinds[r]) for p, r in chosen))


class Coalescing:
    """Merges what always runs together.

    Belongs to one registry and learns from graphs that do not fit what was met before. In few
    instances much runs together that does not in others.

    Args:
      registry: of the types.
      asked: whether to begin with the first graph (`granularity="auto"`), and not only once enough
        was met, or calls of cells, or regions of arrays of any length.
    """

    def __init__(self, registry: Registry, asked: bool):
        self._registry = registry
        self._begun = asked
        self._met = np.zeros(2, np.int64)  # instances and nodes, before it has begun
        self._start = ContractionStage()
        self._kinds: dict[Pattern, int] = {}  # of blocks, below 0
        self._names: dict[int, str] = {}
        self._fixed: set[int] = set()  # types that stay what they are
        self._ragged: set[int] = set()  # kinds on arrays of any length
        self._leaving: dict[Pattern, int] = {}
        self._written: dict[tuple[Pattern, int], bytes | None] = {}  # None if numbers differ
        self._takes_ragged = False

    def merge(self, graph: Graph) -> Graph:
        """Returns a graph of instances with nodes merged."""
        present = set(graph.present_types)
        if not present or not self._begins(graph):
            return graph
        for t in present - self._names.keys():
            node_type = graph.types[t]
            self._names[t] = f"{node_type.name}{node_type.shared}"
            if self._is_fixed(node_type):
                self._fixed.add(t)
            if _is_ragged(node_type):
                self._ragged.add(t)
        if present <= self._fixed:
            return graph
        if len(self._start.number) > MAX_KINDS:
            self._forget()
        block = self._contracted(graph, learns=False)
        block = self._contracted(graph, learns=True) if block is None else block
        assert block is not None
        return self._rewritten(graph, block)

    def _begins(self, graph: Graph) -> bool:
        """Returns whether nodes are merged; what was recorded before is forgotten once they are."""
        if self._begun:
            return True
        before = self._met.any()
        self._met += graph.num_instances, len(graph.node_type)
        types = [graph.types[t] for t in graph.present_types]
        self._begun = bool((self._met >= ENOUGH).all())
        self._begun |= any(is_cell(t) or (_is_ragged(t) and not self._takes_ragged) for t in types)
        if self._begun and before:
            self._registry.assumptions.fail("types")
        return self._begun

    def begin(self) -> None:
        """Begins with the next graph: there are as many types as lengths of arrays."""
        if not self._begun:
            self._begun = True
            self._registry.assumptions.fail("types", int(self._met.any()))

    def take_ragged(self) -> None:
        """Takes operations on arrays of any length for others from now on."""
        if not self._takes_ragged:
            self._takes_ragged = True
            self._registry.assumptions.fail("types")
            self._names.clear()
            self._fixed.clear()
            self._ragged.clear()
            self._forget()

    def _forget(self) -> None:
        """Forgets what was met."""
        self._start = ContractionStage()
        for known in (self._kinds, self._leaving, self._written):
            known.clear()

    def _is_fixed(self, node_type: NodeType) -> bool:
        """Returns whether nodes of a type stay what they are."""
        if origin(node_type) in (CELL, LISTS):
            return True
        if _is_ragged(node_type) and not self._takes_ragged:
            return True
        return performs(operation_of(node_type).jaxpr, *CONTROL_FLOW)

    def _contracted(self, graph: Graph, *, learns: bool) -> np.ndarray | None:
        """int64[N], the block that each node becomes part of, in an order to compute them in.

        By the steps of graphs before, if nothing is to be learned; None if they do not fit.
        """
        blocks, stage, before = Blocks.of(graph), self._start, len(self._kinds)
        block = np.arange(len(blocks.kind))
        if not learns and not set(graph.present_types) <= stage.number.keys():
            return None
        while learns or stage.step != NO_STEP:
            reads = blocks.reads()
            depth = reads.depth(len(blocks.kind))
            if learns:
                self._learn(stage, blocks, reads, depth, graph.num_instances)
            step = stage.step
            if step == NO_STEP:
                break
            joined = step.joined(blocks, reads, depth)
            if not learns and not step.fits(blocks, reads, *joined):
                return None
            merged, new = blocks.joined(reads, *joined)
            blocks, block = self._with_kinds(merged), new[block]
            if not learns and len(self._kinds) > before:
                return None
            assert stage.then is not None
            stage = stage.then
        return block

    def _learn(
        self,
        stage: ContractionStage,
        blocks: Blocks,
        reads: Reads,
        depth: np.ndarray,
        num_instances: int,
    ) -> None:
        """Notes blocks at a stage of contraction, and finds the step that follows it."""
        known = set(stage.number)
        stage.note(blocks, reads, depth, num_instances)
        while (step := stage.next_step(self._fixed, self._ragged, self._names)) != NO_STEP:
            merged, _ = blocks.joined(reads, *step.joined(blocks, reads, depth))
            if num_kinds(self._with_kinds(merged)) <= num_kinds(blocks):
                break
            stage.most_added -= 1
        if step != stage.step:
            is_another = bool(known & (step.makers ^ stage.step.makers))
            self._registry.assumptions.fail("types", is_another)
            stage.step, stage.then = step, ContractionStage()

    def _with_kinds(self, merged: Merged) -> Blocks:
        """Returns merged blocks with the kinds of their patterns."""
        for b, pattern in merged.patterns():
            number = self._kinds.get(pattern)
            if number is None:
                number = self._kinds[pattern] = -1 - len(self._kinds)
                parts = " ".join(self._names[k] for k in pattern.types)
                self._names[number] = f"[{parts}]{pattern.reads}"
                if not self._ragged.isdisjoint(pattern.types):
                    self._ragged.add(number)
            merged.blocks.kind[b] = number
        return merged.blocks

    # --- nodes ---

    def _rewritten(self, graph: Graph, block: np.ndarray) -> Graph:
        """Returns a graph with a node for each block, given the block of each node."""
        if block.max() + 1 == len(block):
            return graph
        order = np.argsort(block, kind="stable")
        merged = Blocks.of(graph).merged(block)
        blocks, num_blocks = merged.blocks, len(merged.blocks.kind)
        is_read = np.zeros(graph.num_values, bool)
        for read in (blocks.operand, graph.outputs):
            is_read[read[read >= 0]] = True
        value = np.lexsort((blocks.slot, blocks.maker))  # of each block, one after the other
        value_ptr = pointers(np.bincount(blocks.maker, minlength=num_blocks))
        by_pattern: dict[Pattern, list[int]] = {}
        for b, pattern in merged.patterns():
            by_pattern.setdefault(pattern, []).append(b)

        numbers = Numbers(graph)
        node_type, arity, made = np.zeros((3, num_blocks), np.int64)
        written = []  # (blocks, what they read, the values that leave them)
        for pattern, members in by_pattern.items():
            own = np.array(members)
            columns = np.arange(blocks.ptr[own[0] + 1] - blocks.ptr[own[0]])
            operand = blocks.operand[blocks.ptr[own][:, None] + columns]
            count = value_ptr[own[0] + 1] - value_ptr[own[0]]
            values = value[value_ptr[own][:, None] + np.arange(count)]
            before = leaving = self._leaving.get(pattern, 0)
            leaving |= sum(1 << k for k in np.flatnonzero(is_read[values].any(axis=0)).tolist())
            self._leaving[pattern] = leaving
            self._registry.assumptions.fail("types", bool(before) and before != leaving)
            if not leaving:  # nobody reads it
                continue
            constant = self._constants(pattern, operand, numbers)
            call_spec = self._call_spec(pattern, leaving, constant)
            left = values[:, [k for k in range(count) if leaving >> k & 1]]
            operand = operand[:, [k for k in columns.tolist() if k not in constant]]
            node_type[own], arity[own], made[own] = (
                call_spec.node_type,
                operand.shape[1],
                left.shape[1],
            )
            written.append((own, operand, left))
        new = np.flatnonzero(made)
        operand_ptr, result = pointers(arity), graph.num_values + pointers(made)
        operands = np.empty(int(operand_ptr[-1]), np.int64)
        stands_for = np.arange(graph.num_values)
        for own, operand, left in written:
            operands[operand_ptr[own][:, None] + np.arange(operand.shape[1])] = operand
            stands_for[left] = result[own][:, None] + np.arange(left.shape[1])
        change = Rewrite(
            (np.diff(merged.first) == 1)[block],
            order[merged.first[new]],
            node_type[new],
            operand_ptr[np.append(new, num_blocks)],
            operands,
            stands_for,
            order.argsort(),
        )
        return with_inputs(rewrite(graph, change, self._registry.types))

    def _constants(
        self, pattern: Pattern, operand: np.ndarray, numbers: "Numbers"
    ) -> dict[int, bytes]:
        """Returns operands of all blocks of a pattern that have been one number so far."""
        found = {}
        for k, read in enumerate(operand.T):
            which = np.full(len(read), -1)
            which[read < 0] = numbers.which[~read[read < 0]]
            number = numbers.bytes_of(which[0]) if (which == which[0]).all() else None
            first = number if len(read) > 1 else None  # one node alone says nothing
            before = self._written.setdefault((pattern, k), first)
            if before is not None and before != number:
                self._written[pattern, k] = None
                self._registry.assumptions.fail("types")
            elif before is not None:
                found[k] = before
        return found

    def _call_spec(self, pattern: Pattern, leaving: int, constant: dict[int, bytes]) -> CallSpec:
        """Returns how to record blocks, with numbers in place of some operands."""
        kinds = self._registry.kinds_of
        types = [self._registry.node_types[t] for t in pattern.types]
        kind = itertools.chain.from_iterable(kinds(t.operands) for t in types)
        place: dict[int, int] = {}
        reads: list[Any] = []
        for read, its_kind in zip(pattern.reads, kind, strict=True):
            number = constant.get(-1 - read)
            if number is not None:
                reads.append((its_kind, number))
            else:
                reads.append(read if read >= 0 else -1 - place.setdefault(read, len(place)))
        pattern = Pattern(pattern.types, tuple(reads))
        return merged_call_spec(self._registry, pattern, leaving)


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
        """Returns a number, as `which` has it, as bytes; None if it is none."""
        return self._bytes[number] if number >= 0 else None


def num_kinds(blocks: Blocks) -> int:
    """Returns how many kinds of blocks there are."""
    return len(np.unique(blocks.kind))


def _is_ragged(node_type: NodeType) -> bool:
    """Returns whether nodes of a type are on arrays of any length, or ask for one."""
    values = *node_type.operands, *node_type.results
    if any(ragged_axes(t.shape) for t in values):
        return True
    return bool(symbols_in(operation_of(node_type).jaxpr))


def num_operations(graph: Graph) -> int:
    """Returns the number of nodes that are no calls of cells."""
    counts = graph.nodes_per_type.tolist()
    return sum(counts[t] for t in graph.present_types if not is_cell(graph.types[t]))


def is_cell(node_type: NodeType) -> bool:
    """Returns whether nodes of a type are calls of cells, maybe with room for longer lists."""
    return _calls_cell(operation_of(node_type).key)


def _calls_cell(key: Any) -> bool:
    """Returns whether an operation is a cell, or made of one (see `list_cells`), by its key."""
    first = key[0] if isinstance(key, tuple) else key
    if type(first) is str and first not in (CELL, LISTS):
        return any(_calls_cell(part) for part in key[1:] if isinstance(part, tuple))
    return first == CELL or (isinstance(first, tuple) and first[:1] == (CELL,))


def origin(node_type: NodeType) -> Any:
    """Returns where nodes of a type come from: `CELL`, `LISTS`, or an operation of JAX."""
    key = operation_of(node_type).key[0]
    return key[0] if isinstance(key, tuple) else key
