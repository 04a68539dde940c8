"""`ProgramCache`: the kernels and programs that are kept between minibatches."""

import collections
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.configuration import finds_faults, without_mesh
from jedbatch._jaxpr.faults import located
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import Buckets
from jedbatch._layout.layout import assign_lanes
from jedbatch._program.capacity import MAX_OVERSIZE, find_or_grow
from jedbatch._program.device_axis import OnDevices
from jedbatch._program.executors import Executor
from jedbatch._program.fit import (
    by_size,
    fits,
    make_ample_reverse,
    make_ample_signature,
    make_signature,
    resembles,
)
from jedbatch._program.lower import Lowered, lower, narrowed
from jedbatch._program.lower_vjp import (
    Readers,
    ReverseSignature,
    find_readers,
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
from jedbatch._session.options import Options
from jedbatch._session.plans.outputs import Returned
from jedbatch._session.programs.identities import identity_of
from jedbatch._session.programs.outside_values import OutsideValues
from jedbatch._session.programs.types_in_use import TypesInUse
from jedbatch._support.announce import announce, announced
from jedbatch._support.caches import Memory
from jedbatch._support.types import Leaf

MAX_ROUNDS = 512  # layouts of rounds that are kept
ROUND_BYTES = 1 << 15  # of one, about, besides its nodes
MAX_PROGRAMS = 64  # compiled for one structure of shared arguments
MAX_ROW_CAPACITIES = 16  # for the calls of a region
# Minibatches for one program, its reverse if there is one, and the table of each for that.
Together = tuple[list[Lowered], ReverseSignature | None, list[np.ndarray]]
RowCapacities = dict[tuple[Region, bool], list[RowCapacity]]  # with a reverse, or without one


class ProgramCache:
    """Kernels and programs for one structure of shared arguments.

    Attributes:
      registry: node types, and the values that their kernels share.
      target: what programs are made for.
      options: of the batched function.
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
        options: Options,
    ):
        self.registry, self.target, self.options = registry, target, options
        self.outside = OutsideValues(registry, environment)
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
            names = "control_flow", "max_steps", "counter"
            loops = {name: getattr(self.options, name) for name in names}
            with without_mesh():
                made = Kernel(node_type, self.target, transient, reached, **loops)
            self._kernels[type_id] = made
        return self._kernels[type_id]

    def identity(self, kernel: Kernel) -> str:
        """Returns what tells a kernel apart in all processes; "" if nothing does."""
        if kernel not in self._identities:
            known = kernel.node_type.identity
            self._identities[kernel] = known or identity_of(kernel, self.registry)
        return self._identities[kernel]

    def place(self, graph: Graph, batches: Schedule, returned: Returned, **how: Any) -> Placement:
        """Returns a scheduled graph laid out, as the options and `how` have it."""
        how = {"order": self.options.layout, "reuse": self.options.reuse, **how}
        return place(self.kernel, graph, batches, returned, target=self.target, **how)

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

    def lower(
        self,
        minibatches: Sequence[Placement],
        leaves: Sequence[Any] | None = None,
        brought: Collection[Hashable] | None = None,
    ) -> Together:
        """Returns minibatches for one program, its reverse, and the tables for that.

        That is a program in use, with a reverse in use, if they fit one, or else a new one. Of
        several programs, the smallest may have no reverse with room where a larger one has.

        Args:
          minibatches: which agree in what they return and whether results share rows.
          leaves: of each (see `find_readers`); None if there need be no reverse.
          brought: names of what is there to be read from outside (see `SharedValue`); None if a
            program may be used, or grown, whatever it reads.
        """
        present = _kernels_of(minibatches)
        usable = self._usable(present, brought)
        found: list[Lowered] = []
        reverse: ReverseSignature | None = None
        tables: list[np.ndarray] = []
        for signature in self._fitting(minibatches, usable):
            several = _lowered(minibatches, signature)
            if several and leaves is not None:
                own = [x.placed for x in several]
                reverse, tables = self.reverses(own, signature, leaves, grows=False)
            found = several if reverse is not None or not found else found
            if found and (leaves is None or reverse is not None):
                break
        if not found:
            signature = self._make(minibatches, usable, ample=len(minibatches) > 1)
            if signature not in self._signatures:
                self._signatures.append(signature)
            found = _lowered(minibatches, signature)
            assert found
        signature = found[0].signature
        self.note_used(signature, present)
        if leaves is not None and reverse is None:
            reverse, tables = self.reverses([x.placed for x in found], signature, leaves)
        return found, reverse, tables

    def fitting(self, placed: Placement) -> Signature | None:
        """Returns the program in use that a minibatch is lowered for; None if it fits none."""
        return next(self._fitting([placed], self._usable(placed.kernels)), None)

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

    def _make(
        self, minibatches: Sequence[Placement], usable: Sequence[Signature], ample: bool
    ) -> Signature:
        """Returns a new program for minibatches, grown from the last one in use like it.

        With `ample` room for others like these it may be that one.
        """
        largest, *_ = by_size(minibatches)
        model = next((s for s in reversed(usable) if resembles(largest, s)), None)
        present = _kernels_of(minibatches)
        forgotten = self._types.to_forget(model.kernels if model else (), present)
        self._types.note_made(present)
        if ample:
            return make_ample_signature(minibatches, model, forgotten)
        return make_signature(largest, model, forgotten)

    def _usable(
        self, kernels: Collection[Kernel], brought: Collection[Hashable] | None = None
    ) -> list[Signature]:
        """Returns programs in use which read nothing that is not there (see `can_read`)."""
        usable = [s for s in self._signatures if brought is None or self._reads(s) <= set(brought)]
        return [s for s in usable if self.can_read(s, kernels)]

    def _fitting(
        self, minibatches: Sequence[Placement], usable: Sequence[Signature]
    ) -> Iterator[Signature]:
        """Yields the programs that minibatches fit: reserved ones, those for as many results.

        Of others the smallest comes first. None is much too large for the largest minibatch.
        """
        largest, *others = by_size(minibatches)
        equal = {s for s in usable if largest.stacked and largest.returned == s.returned}
        order = lambda s: (s not in self._reserved, s not in equal, sum(s.lanes))  # noqa: E731
        for s in sorted(usable, key=order):
            most = math.inf if s in self._reserved and s in equal else MAX_OVERSIZE
            if fits(largest, s, most) and all(fits(placed, s, math.inf) for placed in others):
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
        signature = self._make(minibatches, self._usable(_kernels_of(minibatches)), ample=True)
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

    def adopt(self, signature: Signature, reverse: ReverseSignature | None = None) -> None:
        """Keeps a program made elsewhere, to be used before others, and perhaps its reverse."""
        if signature not in self._signatures:
            self._signatures.append(signature)
        self._reserved.add(signature)
        self._use(signature)
        if reverse is not None and reverse not in self._reverses:
            self._reverses.append(reverse)

    def reverse(
        self, placed: Placement, forward: Signature, wanted: Any = None
    ) -> tuple[ReverseSignature, np.ndarray]:
        """Returns the reverse of the program of a minibatch and its table; see `find_readers`."""
        reverse, (table,) = self.reverses([placed], forward, [None], wanted)
        assert reverse is not None
        return reverse, table

    def reverses(
        self,
        minibatches: Sequence[Placement],
        forward: Signature,
        leaves: Sequence[Any],
        wanted: Any = None,
        *,
        grows: bool = True,
    ) -> tuple[ReverseSignature | None, list[np.ndarray]]:
        """Returns the reverse of the program of minibatches, and the table of each.

        Args:
          minibatches: narrowed for the program.
          forward: the program.
          leaves: of each minibatch (see `find_readers`).
          wanted: of any of them.
          grows: whether to make a new one if they fit none in use; otherwise there may be none.
        """
        programs = [s for s in self._reverses if s.forward == forward]
        if not programs and not grows:
            return None, []
        shares = programs[-1].sent is not None if programs else None
        found: dict[int, Readers] = {}
        for placed, own in sorted(
            zip(minibatches, leaves, strict=True), key=lambda x: -sum(x[0].lanes)
        ):
            found[id(placed)] = find_readers(placed, forward, own, wanted, shares)
            shares = found[id(placed)].sent is not None
        readers = with_all_refused([found[id(placed)] for placed in minibatches])
        pairs = list(zip(minibatches, readers, strict=True))
        needs = [(reverse_need(*pair, forward), pair[1]) for pair in pairs]
        fitting = (s for s in programs if all(reverse_fits(*need, s) for need in needs))
        reverse = next(fitting, None)
        if reverse is None and not grows:
            return None, []
        if reverse is None:
            reverse = self._make_reverse(minibatches, readers, forward)
            self._reverses.append(reverse)
        return reverse, [reverse_table(*pair, reverse) for pair in pairs]

    def _make_reverse(
        self, minibatches: Sequence[Placement], readers: Sequence[Readers], forward: Signature
    ) -> ReverseSignature:
        """Returns a new reverse program for minibatches, grown from the last one like it."""
        kin = forward.kernels, forward.arenas
        similar = [s for s in self._reverses if (s.forward.kernels, s.forward.arenas) == kin]
        own = dict(zip(map(id, minibatches), readers, strict=True))
        readers_of = lambda placed, _: own[id(placed)]  # noqa: E731
        return make_ample_reverse(
            minibatches, readers_of, forward, similar[-1] if similar else None
        )

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
        shared = self.outside.read(closed_over, leaves, tracers)
        return run(shared, *tables, dict(inputs))

    def count(self, kind: str) -> None:
        """Counts a program that is built."""
        self.compilations[kind] += 1

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


def place(
    kernel_of: Callable[[int], Any],
    graph: Graph,
    batches: Schedule,
    returned: Returned,
    *,
    order: str,
    node: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    **how: Any,
) -> Placement:
    """Returns a scheduled graph laid out; see `assign_lanes` and `Placement.find`.

    Args:
      kernel_of: returns the kernel of a node type.
      graph: what is scheduled.
      batches: the schedule.
      returned: the values that each arena returns, and how they become results.
      order: of nodes inside of batches, by its name.
      node: as of `assign_lanes`.
      weight: as of that, too.
      **how: as of `Placement.find`.
    """
    type_ids = tuple(graph.present_types)
    kernels = tuple(map(kernel_of, type_ids))
    buckets: list[Buckets | None] = [None] * len(graph.types)
    for t, kernel in zip(type_ids, kernels, strict=True):
        buckets[t] = kernel.buckets
    layout, (rows, form) = assign_lanes(graph, batches, buckets, order, node, weight), returned
    return Placement.find(layout, kernels, type_ids, rows, stacked=form.batch is not None, **how)


def _kernels_of(minibatches: Sequence[Placement]) -> list[Kernel]:
    """Returns the kernels of minibatches, each once."""
    return list(dict.fromkeys(kernel for placed in minibatches for kernel in placed.kernels))


def _lowered(minibatches: Sequence[Placement], signature: Signature) -> list[Lowered]:
    """Returns minibatches for a program that they fit; none if one has no room in its table."""
    several = [lower(placed, signature) for placed in minibatches]
    return [x for x in several if x is not None] if None not in several else []


def _bytes_of_round(key: tuple, _: Placement | RoundTemplate | None) -> int:
    return ROUND_BYTES + 8 * sum(len(part) for part in key if isinstance(part, bytes))
