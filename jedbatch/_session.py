"""What a batched function keeps: types, graphs of instances, kernels and programs."""

import collections
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray, Tracer

from jedbatch._blocks import GRANULARITIES
from jedbatch._cells import Kernel
from jedbatch._cotangents import (
    ReverseSignature,
    find_readers,
    make_reverse_signature,
    reverse_fits,
    reverse_table,
)
from jedbatch._executors import EXECUTORS
from jedbatch._layout import Layout
from jedbatch._lengths import Given, Lengths
from jedbatch._plan import Static
from jedbatch._prelude import Calls, Stage, make_room, run_prelude
from jedbatch._program import (
    Lowered,
    Placed,
    Signature,
    fits,
    lower,
    make_signature,
    resembles,
)
from jedbatch._regions import RaggedRecord, Region, Regions
from jedbatch._registry import Registry
from jedbatch._rooms import Room
from jedbatch._trace import Record

ROUNDS = 512  # layouts of rounds that are kept


class Memory(collections.OrderedDict):
    """A dict that forgets what was put in first once it holds more than `limit`."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: Hashable, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > self.limit:
            self.popitem(last=False)


class Session:
    """What a batched function keeps for one structure of shared arguments.

    Attributes:
      registry: types met so far.
      grouping: merges nodes or takes them apart; None if nodes are what was recorded.
      records: what recording gave, by the key of the instance.
      seen: (instance, record) by the id of an instance that cannot change.
      decides: whether the function has been seen to decide on values.
      rounds, workspaces: what is kept for that: layouts of rounds by their structure, and the
        largest program in use by the number of instances.
      lengths, regions: of arrays whose length differs, and what is done to them.
      compilations: XLA programs built, counted by kind.
    """

    def __init__(
        self,
        avals: Sequence[ShapedArray],
        structure: Any,
        executor: str | None,
        limit: int,
        granularity: str,
    ):
        self.registry = Registry(avals, structure)
        self.grouping = GRANULARITIES[granularity](self.registry)
        self.records: dict[Hashable, Record] = Memory(limit)
        self.seen: dict[int, tuple[Any, Record]] = Memory(limit)
        self.decides = False
        self.rounds: dict[Hashable, Layout] = Memory(ROUNDS)
        self.workspaces: dict[int, Signature] = {}
        self.compilations: collections.Counter[str] = collections.Counter()
        self._executor = executor
        self._signatures: list[Signature] = []
        self._reverses: list[ReverseSignature] = []
        self._kernels: dict[int, Kernel] = {}
        self._programs: dict[Signature, tuple[Callable, list[int]]] = {}
        self._executors: dict[Any, Any] = {}
        self._statics: dict[Static, Static] = Memory(ROUNDS)
        apart = None if self.grouping is None else f"granularity is {granularity!r}"
        self.lengths = Lengths(apart, Memory(limit))
        self.regions = Regions(self.registry)
        self._rooms: dict[Region, list[Room]] = collections.defaultdict(list)
        self._preludes: dict[tuple[Stage, ...], tuple[Callable, list[int]]] = {}

    def kernel(self, type_id: int) -> Kernel:
        """The kernel of a node type."""
        if type_id not in self._kernels:
            node_type = self.registry.node_types[type_id]
            transient = any(map(self.registry.is_transient, node_type.shared))
            self._kernels[type_id] = Kernel(node_type, transient)
        return self._kernels[type_id]

    def static(self, *parts: Any) -> Static:
        """The static part of a plan, one object for equal parts."""
        made = Static(self, *parts)
        return self._statics.setdefault(made, made)

    def lower(self, placed: Placed, brought: Collection[Any] | None = None) -> Lowered:
        """A minibatch for a program in use if it fits one, or for a new one.

        A program is used, or grown, only if what it reads from outside is `brought`.
        """
        usable = [s for s in self._signatures if brought is None or self._reads(s) <= set(brought)]
        for signature in sorted(usable, key=lambda s: sum(s.lanes)):
            if fits(placed, signature) and (lowered := lower(placed, signature)) is not None:
                return lowered
        similar = (s for s in reversed(usable) if resembles(placed, s))
        signature = make_signature(placed, next(similar, None))
        self._signatures.append(signature)
        lowered = lower(placed, signature)
        assert lowered is not None
        return lowered

    def reverse(
        self, placed: Placed, forward: Signature, leaves: Any = None, wanted: Any = None
    ) -> tuple[ReverseSignature, Any]:
        """What to compile for the reverse of a minibatch, and its table; see `find_readers`."""
        readers = find_readers(placed, forward, leaves, wanted)
        needed = make_reverse_signature(placed, readers, forward, None)
        signature = next((s for s in self._reverses if reverse_fits(needed, s)), None)
        if signature is None:
            model = next((s for s in reversed(self._reverses) if s.forward == forward), None)
            signature = make_reverse_signature(placed, readers, forward, model)
            self._reverses.append(signature)
        return signature, reverse_table(placed, readers, signature)

    def program(self, signature: Signature) -> tuple[Callable, list[int]]:
        """(consts of every kernel from the shared values, ids of the closed-over ones needed)."""
        if signature not in self._programs:
            wanted = [kernel.node_type.shared for kernel in signature.kernels]
            compute, closed_over = self.registry.prologue(wanted)

            def prepare(shared: Sequence[Any]) -> list[list[Any]]:
                values = compute(shared)
                return [k.prologue(v) for k, v in zip(signature.kernels, values, strict=True)]

            self._programs[signature] = prepare, closed_over
        return self._programs[signature]

    def _reads(self, signature: Signature) -> set[Any]:
        """Names of the values from outside that a program reads."""
        return {self.registry.shared[index].tracer for index in self.program(signature)[1]} - {None}

    def executor(self, signature: Signature, values: Any) -> Any:
        """Who runs a program on these values; on traced ones always the fused executor."""
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(values))
        name = "fused" if traced or self._executor is None else self._executor
        key = signature, name
        if key not in self._executors:
            prepare, _ = self.program(signature)
            for other in self._executors.values():  # they may never be used again
                other.release()
            self._executors[key] = EXECUTORS[name](prepare, signature, self._count)
        return self._executors[key]

    def look(self, keys: Sequence[Hashable], arrays: Sequence[Sequence[Any]]) -> list[Given | None]:
        """How instances are recorded (see `Lengths.look`)."""
        given = self.lengths.look(keys, arrays)
        bound = self.lengths.bound
        if bound is None or self.lengths.longest <= bound:
            return given
        if self.bind():
            return self.look(keys, arrays)
        return [  # what is longer than any table is the function's to refuse
            None if g and any(len(mine[i]) > bound for s in g.symbols.values() for i in s) else g
            for g, mine in zip(given, arrays, strict=True)
        ]

    def numbers_differ(self) -> bool:
        """Whether a number has been found to differ that records take to be a constant.

        If so, they are forgotten.
        """
        if not self.regions.changed:
            return False
        self.regions.changed = False
        old = [key for key, record in self.records.items() if isinstance(record, RaggedRecord)]
        for key in old:
            del self.records[key]
        return True

    def bind(self) -> bool:
        """Bounds lengths by what shared tables have room for; whether that changes anything."""
        return self.lengths.next_bound(value.aval.shape for value in self.registry.shared)

    def stage(self, calls: Calls) -> Stage:
        """What the calls of a region in a minibatch are compiled for."""
        rooms = self._rooms[calls.region]
        room, is_new = make_room(calls, rooms)
        if is_new:
            rooms.append(room)
        return Stage(calls.region, room)

    def prelude(
        self, stages: tuple[Stage, ...], leaves: Sequence[Any], tracers: Any, tables, inputs
    ) -> Any:
        """Runs regions: (inputs of the graph, results of each region); see `run_prelude`."""
        if stages not in self._preludes:
            compute, closed_over = self.registry.prologue([s.region.shared for s in stages])

            def run(shared, tables, targets, inputs):
                self._count("ragged")
                return run_prelude(stages, compute(shared), tables, targets, inputs)

            self._preludes[stages] = jax.jit(run), closed_over
        run, closed_over = self._preludes[stages]
        shared = shared_values(self, closed_over, leaves, tracers)
        return run(shared, *tables, dict(inputs))

    def _count(self, kind: str) -> None:
        self.compilations[kind] += 1


def shared_values(
    session: Session, closed_over: Sequence[int], leaves: Sequence[Any], tracers: Any
) -> list[Any]:
    """The leaves of the shared arguments, followed by what is closed over (see `SharedValue`)."""
    found = list(leaves)
    for index in closed_over:
        value = session.registry.shared[index]
        found.append(value.array if value.tracer is None else tracers[value.tracer])
    return found
