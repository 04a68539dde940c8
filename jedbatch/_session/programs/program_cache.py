"""`ProgramCache`: the kernels and programs that are kept between minibatches."""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.configuration import finds_faults, without_mesh
from jedbatch._jaxpr.faults import located
from jedbatch._jaxpr.lane_steps import LaneCounter
from jedbatch._jaxpr.storage import Kind
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import Buckets
from jedbatch._layout.layout import assign_lanes
from jedbatch._program.capacity import MAX_OVERSIZE, find_or_grow
from jedbatch._program.device_axis import OnDevices
from jedbatch._program.executors import Executor
from jedbatch._program.fit import (
    fits,
    lowered_for,
    make_ample_reverse,
    make_ample_signature,
    make_signature,
    resembles,
    reverse_tables,
)
from jedbatch._program.lower import Lowered, lower, narrowed
from jedbatch._program.lower_vjp import (
    Readers,
    ReverseSignature,
    find_readers,
    make_reverse_signature,
    reverse_fits,
    reverse_need,
    reverse_table,
    with_all_refused,
)
from jedbatch._program.placement import Placement
from jedbatch._program.plan import Static
from jedbatch._program.round_template import RoundTemplate
from jedbatch._program.sharded import DeviceAxis
from jedbatch._program.signature import Signature
from jedbatch._ragged.calls import RegionCalls, Stage, run_regions
from jedbatch._ragged.packing import RowCapacity
from jedbatch._ragged.regions import Region
from jedbatch._ragged.row_capacities import calls_fit, make_row_capacity
from jedbatch._ragged.shared_values import run_gated
from jedbatch._record.identity.environment import AccessPath, Environment
from jedbatch._record.types.registry import Registry
from jedbatch._schedule.schedule import Schedule
from jedbatch._session.programs.identities import identity_of
from jedbatch._session.programs.outside_values import OutsideValues
from jedbatch._session.programs.types_in_use import TypesInUse
from jedbatch._support.announce import announce, announced
from jedbatch._support.caches import Memory
from jedbatch._support.types import ControlFlowName, Leaf

MAX_ROUNDS = 512  # layouts of rounds that are kept
ROUND_BYTES = 1 << 15  # of one, about, besides its nodes
MAX_PROGRAMS = 64  # compiled for one structure of shared arguments
MAX_ROW_CAPACITIES = 16  # for the calls of a region
RowCapacities = dict[tuple[Region, bool], list[RowCapacity]]  # with a reverse, or without one


class ProgramCache:
    """Kernels and programs for one structure of shared arguments.

    Attributes:
      registry: node types, and the values that their kernels share.
      target: what programs are made for.
      control_flow: how loops and branches run that values decide on (see `_jaxpr.divergent`).
      max_steps: the bound of these loops; None if they have none.
      outside: what programs read besides instances.
      environment: what the function reads besides its arguments; None if that does not change.
      key: of the structure.
      rounds, templates, workspaces: for functions that decide on values: rounds laid out, by
        structure; their templates, by what is recorded; the largest programs, by instances.
      depths: for these, how many steps instances went on in loops of the latest calls, by the
        types of nodes in a step.
      ways: how the numbers are foreseen that steps of loops bring, by the same; None if loops have
        to repeat themselves first in every call.
      compilations: XLA programs built, counted by kind.
    """

    def __init__(
        self,
        registry: Registry,
        target: Target,
        environment: Environment | None,
        key: tuple[Hashable, ...],
        control_flow: ControlFlowName = "auto",
        max_steps: int | None = None,
        counter: LaneCounter | None = None,
    ):
        self.registry, self.control_flow, self.max_steps = registry, control_flow, max_steps
        self.outside = OutsideValues(registry, environment)
        self._loops: Any = {
            "control_flow": control_flow,
            "max_steps": max_steps,
            "counter": counter,
        }
        self.target = target
        self.environment, self.key = environment, key
        budget = registry.budget
        self.rounds: dict[Hashable, Placement] = Memory(MAX_ROUNDS, budget, _bytes_of_round)
        self.templates: dict[Hashable, RoundTemplate | None] = Memory(
            MAX_ROUNDS, budget, _bytes_of_round
        )
        self.workspaces: dict[int, Signature] = Memory(MAX_PROGRAMS)
        self.ways: dict[tuple[int, ...], Mapping[int, tuple[int, int]] | None] = Memory(MAX_ROUNDS)
        self.depths: dict[Hashable, tuple[np.ndarray, ...]] = Memory(MAX_ROUNDS)
        self.compilations: collections.Counter[str] = collections.Counter()
        self._signatures: list[Signature] = []
        self._reverses: list[ReverseSignature] = []
        self._kernels: dict[int, Kernel] = {}
        self._identities: dict[Kernel, str] = {}
        self._programs: dict[Signature, tuple[Callable, list[int]]] = {}
        self._reserved: set[Signature] = set()  # used before others
        self._types = TypesInUse()
        self._latest: Signature | None = None
        self._used: dict[Signature, None] = collections.OrderedDict()  # the latest is the last
        self._executors: dict[tuple[Signature, bool], Executor] = {}
        self._on_devices: dict[tuple[Signature, DeviceAxis], OnDevices] = {}
        self._statics: dict[Static, Static] = Memory(MAX_ROUNDS)
        self._row_capacities: RowCapacities = collections.defaultdict(list)
        self._region_programs: dict[tuple[Stage, ...], tuple[Callable, list[int]]] = Memory(
            MAX_PROGRAMS
        )

    @property
    def packs(self) -> bool:
        """Whether rows of arrays of any length may run packed (see `Options`)."""
        return bool(self.key[-2])

    @property
    def configuration(self) -> Any:
        """How JAX is configured for these programs, by which the key ends."""
        return self.key[-1]

    def kernel(self, type_id: int) -> Kernel:
        """The kernel of a node type."""
        if type_id not in self._kernels:
            node_type = self.registry.node_types[type_id]
            transient = any(map(self.registry.is_transient, node_type.shared))
            _, read = self.registry.prologue([node_type.shared])
            reached = any(isinstance(self.registry.shared[i].tracer, AccessPath) for i in read)
            with without_mesh():
                made = Kernel(node_type, self.target, transient, reached, **self._loops)
            self._kernels[type_id] = made
        return self._kernels[type_id]

    def identity(self, kernel: Kernel) -> str:
        """Returns what tells a kernel apart in all processes; "" if nothing does."""
        if kernel not in self._identities:
            known = kernel.node_type.identity
            self._identities[kernel] = known or identity_of(kernel, self.registry)
        return self._identities[kernel]

    def place(
        self,
        graph: Graph,
        batches: Schedule,
        returned: dict[Kind, list[int]],
        order: str,
        *,
        node: np.ndarray | None = None,
        weight: np.ndarray | None = None,
        **how: Any,
    ) -> Placement:
        """Returns a scheduled graph laid out; see `assign_lanes` and `Placement.find`."""
        type_ids = tuple(graph.present_types)
        kernels = tuple(map(self.kernel, type_ids))
        buckets: list[Buckets | None] = [None] * len(graph.types)
        for t, kernel in zip(type_ids, kernels, strict=True):
            buckets[t] = kernel.buckets
        return Placement.find(
            assign_lanes(graph, batches, buckets, order, node, weight),
            kernels,
            type_ids,
            returned,
            target=self.target,
            **how,
        )

    @property
    def in_use(self) -> tuple[list[Signature], list[ReverseSignature], list[Signature]]:
        """The programs, their reverses, and the programs that are used before others.

        Programs that read values of outer transformations are left out.
        """
        lasting = [s for s in self._signatures if not any(k.transient for k in s.kernels)]
        reverses = [r for r in self._reverses if r.forward in lasting]
        return lasting, reverses, [s for s in lasting if s in self._reserved]

    def static(self, *parts: Any) -> Static:
        """The static part of a plan, one object for equal parts."""
        static = Static(self, *parts)
        return self._statics.setdefault(static, static)

    def lower(self, placed: Placement, brought: Collection[Hashable] | None = None) -> Lowered:
        """A minibatch for a program in use if it fits one, or for a new one.

        A program is used, or grown, only if what it reads from outside is `brought`.
        """
        usable = self._usable(placed, brought)
        lowered = find_or_grow(
            self._signatures,
            fitting=self._fitting(placed, usable),
            similar=(s for s in reversed(usable) if resembles(placed, s)),
            make=functools.partial(self._make, placed),
            use=functools.partial(lower, placed),
        )
        self.note_used(lowered.signature, placed.kernels)
        return lowered

    def fitting(self, placed: Placement) -> Signature | None:
        """Returns the program in use that a minibatch is lowered for; None if it fits none."""
        return next(self._fitting(placed, self._usable(placed)), None)

    def use_again(self, signature: Signature, placed: Placement) -> bool:
        """Returns whether the program of a minibatch is still there, and notes that it is used."""
        if signature not in self._used or not self.can_read(signature, placed.kernels):
            return False
        self.note_used(signature, placed.kernels)
        return True

    def note_used(self, signature: Signature, kernels: Sequence[Kernel]) -> None:
        """Notes that a program is used, for nodes of these kernels."""
        self._types.note_used(kernels)
        self._use(signature)

    def _make(self, placed: Placement, model: Signature | None) -> Signature:
        """Returns a new program for a minibatch, grown from another one."""
        before = model.kernels if model is not None else ()
        forgotten = self._types.to_forget(before, set(placed.kernels))
        self._types.note_made(placed.kernels)
        return make_signature(placed, model, forgotten)

    def _usable(
        self, placed: Placement, brought: Collection[Hashable] | None = None
    ) -> list[Signature]:
        """Returns programs in use which read nothing that is not there."""
        usable = [s for s in self._signatures if brought is None or self._reads(s) <= set(brought)]
        return [s for s in usable if self.can_read(s, placed.kernels)]

    def _fitting(self, placed: Placement, usable: Sequence[Signature]) -> Iterator[Signature]:
        """Yields the programs that a minibatch fits: reserved ones, then those for as many results.

        Of others the smallest comes first.
        """
        equal = {s for s in usable if placed.stacked and placed.returned == s.returned}
        order = lambda s: (s not in self._reserved, s not in equal, sum(s.lanes))  # noqa: E731
        for s in sorted(usable, key=order):
            reserved = s in self._reserved and s in equal
            if fits(placed, s, math.inf if reserved else MAX_OVERSIZE):
                yield s

    def reserve(
        self,
        minibatches: Sequence[Placement],
        leaves: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> Signature:
        """Returns a program with room for minibatches like these, used for them from now on.

        Args:
          minibatches: with as many instances each, which agree in whether results share rows.
          leaves: None if there need be no program for the reverse; else those of each minibatch,
            see `find_readers`, or nothing where results are not told apart.
        """
        first = max(minibatches, key=lambda placed: sum(placed.lanes))
        usable = self._usable(first)
        similar = (s for s in reversed(usable) if resembles(first, s))
        model = next(similar, None)
        present = {kernel for placed in minibatches for kernel in placed.kernels}
        forgotten = self._types.to_forget(model.kernels if model else (), present)
        signature = make_ample_signature(minibatches, model, forgotten)
        self._types.note_used(signature.kernels)
        self._types.note_made(signature.kernels, times=2)  # so that they stay
        self.adopt(signature)
        if leaves is None:
            return signature
        of_minibatch = dict(zip(map(id, minibatches), leaves, strict=True))
        for tells in {False, any(map(len, leaves))}:

            def readers_of(placed: Placement, shares: bool | None, tells: bool = tells) -> Readers:
                given = of_minibatch[id(placed)] if tells else None
                return find_readers(narrowed(placed, signature), signature, given, None, shares)

            known = [r for r in self._reverses if r.forward == signature and r.tells == tells]
            last = known[-1] if known else None
            reverse = make_ample_reverse(minibatches, readers_of, signature, last)
            if reverse not in self._reverses:
                self._reverses.append(reverse)
        return signature

    def reserve_rows(self, minibatches: Sequence[RegionCalls], keeps: bool) -> None:
        """Makes capacities for calls of a region in minibatches like these; see `stage`."""
        region, target = minibatches[0].region, self.target.for_rows(keeps)
        capacities = self._row_capacities[region, keeps]
        made: list[RowCapacity] = []
        for calls in sorted(minibatches, key=lambda calls: -sum(calls.rows)):
            if not any(calls_fit(calls, c) for c in made):
                model = made[-1] if made else None
                made.append(make_row_capacity(calls, target, model))
        capacities += [c for c in made if c not in capacities]

    def lower_both(
        self, placed: Placement, leaves: Any, brought: Collection[Hashable] | None = None
    ) -> tuple[Lowered, tuple[ReverseSignature, Any]]:
        """Returns a minibatch for a program, and for its reverse: for a pair in use if it fits one.

        Of several programs, the smallest may have no reverse with room where a larger one has.
        `leaves` as in `reverse`.
        """
        lowered = self.lower(placed, brought)
        others = (
            s
            for s in self._fitting(placed, self._usable(placed, brought))
            if s is not lowered.signature and any(r.forward == s for r in self._reverses)
        )
        for signature in itertools.chain([lowered.signature], others):
            own = signature is lowered.signature
            found = lowered if own else lower(placed, signature)
            if found is None:
                continue
            readers, fitting, _ = self._reverses_of(found.placed, signature, leaves)
            reverse = next(fitting, None)
            if reverse is not None:
                self._use(signature)
                return found, (reverse, reverse_table(found.placed, readers, reverse))
        return lowered, self.reverse(lowered.placed, lowered.signature, leaves)

    def lower_together(
        self, shards: Sequence[Placement], leaves: Sequence[Any] | None
    ) -> tuple[list[Lowered], ReverseSignature | None, list[Any]]:
        """Returns minibatches for one program, its reverse, and the tables for that.

        They agree in what they return and whether results share rows. `leaves` are those of each,
        as in `reverse`, or None if there need be no reverse.
        """
        largest = max(shards, key=lambda placed: sum(placed.lanes))
        present = {kernel for placed in shards for kernel in placed.kernels}
        usable = [s for s in self._usable(largest) if self.can_read(s, present)]
        found: list[Lowered] = []
        for signature in self._fitting(largest, usable):
            several = lowered_for(shards, signature)
            if several and leaves is None:
                self.note_used(signature, list(present))
                return several, None, []
            if several:
                readers, fitting = self._reverses_of_all(several, leaves)
                reverse = next(fitting, None)
                if reverse is not None:
                    self.note_used(signature, list(present))
                    return several, reverse, reverse_tables(several, readers, reverse)
                found = found or several
        if not found:
            similar = (s for s in reversed(usable) if resembles(largest, s))
            model = next(similar, None)
            forgotten = self._types.to_forget(model.kernels if model else (), present)
            signature = make_ample_signature(shards, model, forgotten)
            if signature not in self._signatures:
                self._signatures.append(signature)
            self._types.note_made(list(present))
            found = lowered_for(shards, signature)
            assert found
        self.note_used(found[0].signature, list(present))
        if leaves is None:
            return found, None, []
        return found, *self.reverse_together(found, leaves)

    def reverse_together(
        self, shards: Sequence[Lowered], leaves: Sequence[Any]
    ) -> tuple[ReverseSignature, list[Any]]:
        """Returns the reverse of the program of minibatches, and their tables for it."""
        readers, fitting = self._reverses_of_all(shards, leaves)
        reverse = next(fitting, None) or self._make_reverse_of_all(shards, readers)
        return reverse, reverse_tables(shards, readers, reverse)

    def adopt(self, signature: Signature, reverse: ReverseSignature | None = None) -> None:
        """Keeps a program made elsewhere, to be used before others, and perhaps its reverse."""
        if signature not in self._signatures:
            self._signatures.append(signature)
        self._reserved.add(signature)
        self._use(signature)
        if reverse is not None and reverse not in self._reverses:
            self._reverses.append(reverse)

    def _reverses_of_all(
        self, shards: Sequence[Lowered], leaves: Any
    ) -> tuple[list[Readers], Iterator[ReverseSignature]]:
        """(readers of values of minibatches for a program, reverses that all of them fit)."""
        forward = shards[0].signature
        tells = leaves[0] is not None
        programs = [s for s in self._reverses if s.forward == forward and s.tells == tells]
        shares = programs[-1].sent is not None if programs else None
        by_size = sorted(range(len(shards)), key=lambda i: -sum(shards[i].placed.lanes))
        found: dict[int, Readers] = {}
        for i in by_size:
            found[i] = find_readers(shards[i].placed, forward, leaves[i], None, shares)
            shares = found[i].sent is not None
        readers = with_all_refused([found[i] for i in range(len(shards))])
        needs = [
            reverse_need(x.placed, own, forward) for x, own in zip(shards, readers, strict=True)
        ]
        pairs = list(zip(needs, readers, strict=True))
        return readers, (s for s in programs if all(reverse_fits(*pair, s) for pair in pairs))

    def _make_reverse_of_all(
        self, shards: Sequence[Lowered], readers: Sequence[Readers]
    ) -> ReverseSignature:
        """Returns a new reverse program for minibatches, grown from another one."""
        forward = shards[0].signature
        own = {id(x.placed): r for x, r in zip(shards, readers, strict=True)}
        kin = (forward.kernels, forward.arenas, readers[0].leads_to is not None)
        similar = [
            s for s in self._reverses if (s.forward.kernels, s.forward.arenas, s.tells) == kin
        ]
        reverse = make_ample_reverse(
            [x.placed for x in shards],
            lambda placed, _: own[id(placed)],
            forward,
            similar[-1] if similar else None,
        )
        self._reverses.append(reverse)
        return reverse

    def reverse(
        self, placed: Placement, forward: Signature, leaves: Any = None, wanted: Any = None
    ) -> tuple[ReverseSignature, Any]:
        """Returns the reverse signature of a minibatch and its table; see `find_readers`."""
        readers, fitting, similar = self._reverses_of(placed, forward, leaves, wanted)
        return find_or_grow(
            self._reverses,
            fitting=fitting,
            similar=similar,
            make=functools.partial(self._make_reverse, placed, readers, forward),
            use=lambda signature: (signature, reverse_table(placed, readers, signature)),
        )

    def _make_reverse(
        self,
        placed: Placement,
        readers: Readers,
        forward: Signature,
        model: ReverseSignature | None,
    ) -> ReverseSignature:
        """Returns a new reverse program for a minibatch, grown from another one."""
        return make_reverse_signature(placed, readers, forward, model)

    def _reverses_of(
        self, placed: Placement, forward: Signature, leaves: Any, wanted: Any = None
    ) -> tuple[Readers, Iterator[ReverseSignature], Iterator[ReverseSignature]]:
        """(readers of values of a minibatch, reverses in use that it fits, and similar ones)."""
        programs = [s for s in self._reverses if s.forward == forward]
        kin = (forward.kernels, forward.arenas)
        similar = [s for s in self._reverses if (s.forward.kernels, s.forward.arenas) == kin]
        shares = programs[-1].sent is not None if programs else None
        readers = find_readers(placed, forward, leaves, wanted, shares)
        need = reverse_need(placed, readers, forward)
        fitting = (s for s in programs if reverse_fits(need, readers, s))
        return readers, fitting, reversed(similar)

    def stage(self, calls: RegionCalls, keeps: bool) -> Stage:
        """Returns the stage that calls of a region are compiled for, with a reverse or without."""
        capacities, target = self._row_capacities[calls.region, keeps], self.target.for_rows(keeps)
        stage = find_or_grow(
            capacities,
            fitting=(c for c in capacities if calls_fit(calls, c)),
            similar=reversed(capacities),
            make=functools.partial(make_row_capacity, calls, target),
            use=functools.partial(Stage, calls.region),
        )
        del capacities[:-MAX_ROW_CAPACITIES]
        return stage

    def _use(self, signature: Signature) -> None:
        """Notes that a program is used; the one that was not for longest is forgotten."""
        if signature is self._latest:
            return
        self._latest = signature
        self._used.pop(signature, None)
        self._used[signature] = None
        if len(self._used) <= MAX_PROGRAMS:
            return
        oldest = next(iter(self._used))
        del self._used[oldest]
        self._reserved.discard(oldest)
        self._signatures = [s for s in self._signatures if s != oldest]
        self._reverses = [r for r in self._reverses if r.forward != oldest]
        self._programs.pop(oldest, None)
        for key in [key for key in list(self._executors) if key[0] == oldest]:
            del self._executors[key]
        for pair in [pair for pair in list(self._on_devices) if pair[0] == oldest]:
            del self._on_devices[pair]

    def program(self, signature: Signature) -> tuple[Callable, list[int]]:
        """(consts of every kernel from the shared values, ids of the closed-over ones needed)."""
        program = self._programs.get(signature)
        if program is None:
            shared_ids = [kernel.node_type.shared for kernel in signature.kernels]
            compute, closed_over = self.registry.prologue(shared_ids)

            def prepare(shared: Sequence[Any]) -> list[list[Any]]:
                values = compute(shared)
                return [k.prologue(v) for k, v in zip(signature.kernels, values, strict=True)]

            program = self._programs[signature] = prepare, closed_over
        return program

    def executor(self, signature: Signature) -> Executor:
        """Returns the executor of a program."""
        key = signature, finds_faults()  # programs return rows that nobody reads
        executor = self._executors.get(key)
        if executor is None:
            prepare, _ = self.program(signature)
            for another in list(self._executors.values()):  # they may never be used again
                another.release()
            executor = self._executors[key] = Executor(prepare, signature, self.count)
        return executor

    def executor_on(self, signature: Signature, devices: DeviceAxis) -> OnDevices:
        """Returns the executor of a program on the devices of an axis."""
        key = signature, devices
        executor = self._on_devices.get(key)
        if executor is None:
            prepare, _ = self.program(signature)
            single = Executor(prepare, signature, self.count)
            executor = self._on_devices[key] = OnDevices(single, devices)
        return executor

    def run_regions(
        self,
        stages: tuple[Stage, ...],
        leaves: Sequence[Leaf],
        tracers: Sequence[Leaf],
        tables,
        inputs,
    ) -> Any:
        """Runs regions: (inputs of the graph, results of each region); see `_ragged.calls`."""
        region_program = self._region_programs.get(stages)
        if region_program is None:
            compute, closed_over = self.registry.prologue([s.region.shared for s in stages])

            def run(shared, tables, targets, inputs):
                self.count("ragged")
                announce(f"compiling {len(stages)} regions over arrays of different lengths")
                return run_regions(stages, run_gated(compute, shared), tables, targets, inputs)

            compiled = located(announced(jax.jit(run)), announced(run))
            region_program = self._region_programs[stages] = compiled, closed_over
        run, closed_over = region_program
        shared = self.shared_values(closed_over, leaves, tracers)
        return run(shared, *tables, dict(inputs))

    def count(self, kind: str) -> None:
        """Counts a program that is built."""
        self.compilations[kind] += 1

    # --- values that kernels share ---

    def shared_values(
        self,
        closed_over: Sequence[int],
        leaves: Sequence[Leaf],
        tracers: Any,
    ) -> list[Any]:
        """Returns leaves of shared arguments, and closed-over values; see `OutsideValues.read`."""
        return self.outside.read(closed_over, leaves, tracers)

    def reads_tracers(self, signature: Signature) -> bool:
        """Returns whether a program reads values of an outer transformation, which are reached."""
        shared = self.registry.shared
        reads = [i for i in self.program(signature)[1] if isinstance(shared[i].tracer, AccessPath)]
        return any(isinstance(self.outside.reach(i), Tracer) for i in reads)

    def can_read(self, signature: Signature, kernels: Collection[Kernel] = ()) -> bool:
        """Returns whether what a program reads is there, but for what these kernels read anyway.

        A kernel that does not run must not read what has gone, such as a tracer.
        """
        there = self.outside.has
        return all(
            k in kernels or not k.reached or there(k.node_type.shared) for k in signature.kernels
        )

    def _reads(self, signature: Signature) -> set[Hashable]:
        """Names of the values from outside that a program reads."""
        return {self.registry.shared[index].tracer for index in self.program(signature)[1]} - {None}


def _bytes_of_round(key: tuple, _: Placement | RoundTemplate | None) -> int:
    return ROUND_BYTES + 8 * sum(len(part) for part in key if isinstance(part, bytes))
