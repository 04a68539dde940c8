"""`Core`: records and plans minibatches of a function.

    instances ─trace→ graphs ─select→ Graph ─schedule→ Schedule ─layout→ lanes ─lower→ tables

All of this is host work in NumPy. What can be kept is kept by this object and by nothing else (see
`Session`).
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.core import ShapedArray

from jedbatch._graph.record import Record
from jedbatch._jaxpr.configuration import any_traced, configuration, without_mesh
from jedbatch._jaxpr.identity import tree_key
from jedbatch._jaxpr.lane_steps import LaneCounter
from jedbatch._learn.adaptive import Adaptive
from jedbatch._program.host_arrays import results_from
from jedbatch._program.plan import Plan
from jedbatch._program.sharded import DeviceAxis
from jedbatch._ragged.calls import RegionCalls, find_calls, find_slices
from jedbatch._record.identity.environment import Environment, Reached
from jedbatch._record.operations.inlining import without_jit
from jedbatch._schedule.policy import Policy
from jedbatch._session.options import Options, written
from jedbatch._session.plans.copies import Batches, Copies, plan_copies
from jedbatch._session.plans.outputs import Returned, form_of_results
from jedbatch._session.plans.pipeline import make_plan, plan_again, run_plan
from jedbatch._session.plans.round import Rounds
from jedbatch._session.records.arguments import Arguments, TypesOfLeaves
from jedbatch._session.records.recording import Recording
from jedbatch._session.session import Flags, Minibatch, Session, graph_of, num_programs
from jedbatch._support.caches import Memory
from jedbatch._support.types import Leaf

# Structures of shared arguments, before the one not used for longest is forgotten.
MAX_SESSIONS = 16


class Core:
    """Records and plans minibatches of a function, and keeps what can be kept.

    Attributes:
      fn: the function of one instance.
      name: of the function, for messages.
      arguments: which of them instances share, and which are mapped.
      out_axes: None for a list of results.
      policy: cuts graphs into batches; it learns if none was given.
      options: of the batched function.
      recording: makes records of instances.
      environment: what the function reads besides its arguments.
      sessions: what is kept for each structure of shared arguments.
      planning: is held while a minibatch is planned, which changes the sessions.
      last_rounds: what the last call ran.
    """

    def __init__(
        self,
        fn: Callable,
        in_axes: int | tuple[int | None, ...],
        out_axes: int | None,
        policy: Policy | None,
        options: Options,
    ):
        self.fn = fn
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.arguments = Arguments(self.name, in_axes)
        self.out_axes = out_axes
        self.policy: Policy = Adaptive() if policy is None else policy
        self.options = options
        self.recording = Recording(without_jit(fn), self.arguments.join, options.key)
        self.environment = Environment(self.recording.fn)
        self.sessions: Memory = Memory(MAX_SESSIONS)
        self.planning = threading.RLock()
        self.last_rounds = Rounds()
        self._types_of_leaves = TypesOfLeaves()
        self._compiled_before = 0  # programs that were forgotten
        self._keeping = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what copies and pickles are made of; they have empty caches, and learn anew."""
        policy = None if isinstance(self.policy, Adaptive) else self.policy
        options = replace(self.options, counter=self.options.counter and LaneCounter())
        return type(self), (self.fn, self.arguments.axes, self.out_axes, policy, options)

    def twin(self, **changes: Any) -> "Core":
        """Returns the same function with empty caches, and with what is given in place of its."""
        given = {"out_axes": self.out_axes, "policy": self.policy, "options": self.options}
        return Core(self.fn, self.arguments.axes, **{**given, **changes})

    @property
    def stacks(self) -> bool:
        """Whether results are stacked, and no list."""
        return self.out_axes is not None

    @property
    def fixed_policy(self) -> Policy | None:
        """The policy given, or else the machine learned by now; None before there is one."""
        with self.planning:
            return self.policy.machine if isinstance(self.policy, Adaptive) else self.policy

    def __repr__(self) -> str:
        given: dict[str, Any] = {"in_axes": self.arguments.axes}
        given |= {} if self.stacks else {"out_axes": None}
        given |= {} if isinstance(self.policy, Adaptive) else {"policy": self.policy}
        known = sum(session.records.num_known for session in list(self.sessions.values()))
        return (
            f"batch({self.name}, {written(given | self.options.given)}): "
            f"{self.compilations} programs, {known} instances known"
        )

    # --- what is kept ---

    @property
    def compilations(self) -> int:
        """XLA programs built so far."""
        return self._compiled_before + num_programs(self.sessions)

    def clear(self) -> None:
        """Forgets all that is kept, but for the policy."""
        with self.planning:
            self._compiled_before = self.compilations
            self.sessions.clear()
            self.environment.clear()

    def session(
        self, shared: tuple, devices: DeviceAxis | None = None, packs: bool = True
    ) -> tuple[Session, list[Any]]:
        """Returns (the session for shared arguments of this structure, their leaves).

        Args:
          shared: the arguments.
          devices: that minibatches are cut over.
          packs: see `Options`.
        """
        leaves, structure = self.arguments.leaves(shared)
        types, found = self._types_of_leaves.of(leaves)
        target = self.options.target or (found if devices is None else devices.target)
        packs = packs and self.options.packs
        key = tree_key(structure), types, target, packs, configuration()
        session = self.sessions.use(key)
        if session is None or session.is_full:
            avals = [ShapedArray(s, d, weak_type=w) for s, d, w in types]
            options = self.options if packs else replace(self.options, packs=False)
            session = Session.empty(avals, structure, options, target, self.environment, key)
            session = self._keep(key, session)
        return session, leaves

    def _keep(self, key: Hashable, new: Session) -> Session:
        """Keeps a new session in place of one that is full, unless another thread was first."""
        with self._keeping:
            session = self.sessions.get(key)
            if session is not None and not session.is_full:
                return session
            before = self.compilations
            self.sessions[key] = new
            self._compiled_before = before - num_programs(self.sessions)
            return new

    @contextlib.contextmanager
    def reading(self, session: Session) -> Iterator[Reached]:
        """Has recordings inside read what the function reads besides its arguments by now."""
        reached = self.environment.look()
        try:
            session.records.read(reached)
            yield reached
        finally:
            session.records.nothing_to_read()
            self.environment.settle(reached)

    # --- recording and planning ---

    def record(
        self, session: Session, instances: list[tuple], read: Callable | None = None
    ) -> Minibatch:
        """Records instances; `read` is called where the function decides on a value."""
        start = time.perf_counter()
        cache, reached = session.records, self.environment.look()
        tracers: Sequence[Leaf] = ()
        recalled, num_known = self.recording.recall(cache, instances, reached), len(instances)
        if recalled is not None:
            records, arrays = recalled
        else:
            num_known, find = 0, self.recording.find
            try:
                cache.read(reached)
                with without_mesh():
                    records, arrays, tracers, num_known = find(cache, instances, read)
            finally:
                cache.nothing_to_read()
                if num_known < len(instances):  # else the function was not called
                    self.environment.meet(self.recording.classes)
                    self.environment.settle(reached)
        seconds = {"trace": time.perf_counter() - start}
        given = session, records, arrays, self.policy, seconds, num_known, tracers, reached
        return Minibatch(*given, results=self.results)

    def record_graphs(
        self, shared: tuple, instances: list[tuple], devices: DeviceAxis | None = None
    ) -> Minibatch:
        """Records instances as graphs alone, ahead of which nothing runs.

        What runs on several devices, in exports and in other processes are graphs. There nodes on
        padded arrays take the place of packed rows, in a session of their own.
        """
        session, _ = self.session(shared, devices)
        with self.planning:
            if not session.padded:
                minibatch = self.record(session, instances)
                session.padded = bool(find_calls(minibatch.records, minibatch.arrays))
                if not session.padded:
                    return minibatch
            return self.record(self.session(shared, devices, packs=False)[0], instances)

    def plan(
        self,
        session: Session,
        instances: list[tuple],
        gradient: bool,
        leaves: Sequence[Leaf] = (),
        read: Callable | None = None,
        stacked: bool | None = None,
    ) -> Plan:
        """Returns a plan, which can be differentiated if `gradient` or if shared leaves are traced.

        Results are `stacked` as `out_axes` says, unless that is given.
        """
        with self.planning:
            minibatch = self.record(session, instances, read)
            values = itertools.chain(leaves, minibatch.reached.arrays, *minibatch.arrays)
            keeps = gradient or bool(minibatch.tracers) or any_traced(values)
            flags = Flags(gradient, keeps, self.stacks if stacked is None else stacked)
            return self.plan_recorded(minibatch, flags)

    def lasting_plan(
        self,
        session: Session,
        instances: list[tuple],
        gradient: bool,
        stacked: bool | None = None,
    ) -> Plan:
        """A plan that can be kept, or an error if it needs values of an outer transformation."""
        plan = self.plan(session, instances, gradient, stacked=stacked)
        assert plan.host is not None
        self.refuse_tracers(plan.host.tracers)
        self.refuse_tracers(session.programs.reads_tracers(plan.static.signature))
        return plan

    def refuse_tracers(self, there_are: object) -> None:
        """Raises an error if there are values of an outer transformation."""
        if there_are:
            raise ValueError(
                f"`{self.name}` closes over a traced value of an outer transformation, which a "
                "plan cannot keep; make it a shared argument (`in_axes` None), or call the "
                "batched function instead of `plan` and `apply`."
            )

    def plan_recorded(self, minibatch: Minibatch, flags: Flags) -> Plan:
        """Plans what was recorded before; see `make_plan`."""
        start = time.perf_counter()
        session, for_values = minibatch.session, not (flags.gradient or flags.keeps)
        if session.projections and isinstance(minibatch.policy, Adaptive) and for_values:
            minibatch = minibatch._replace(records=session.projections.cut(minibatch.records))
        minibatch = minibatch.to_be_found()
        again = plan_again(minibatch, flags, start)
        if again is not None:
            return again
        copies, clock = Copies.of(minibatch), [start, time.perf_counter()]
        batches = copies and Batches.find(minibatch, copies)
        if copies and batches and for_values:
            clock.append(time.perf_counter())
            plan = plan_copies(minibatch, copies, batches, clock, flags)
            if plan is not None:
                return plan
        records = minibatch.records
        graph, calls = graph_of(records), find_calls(records, minibatch.arrays)
        return make_plan(
            minibatch,
            graph,
            self.results(records, graph.outputs, calls, flags.stacked),
            flags,
            calls=calls,
            batches=batches.expanded(copies, graph) if copies and batches else None,
            begun=start,
        )

    def results(
        self,
        records: Sequence[Record],
        outputs: np.ndarray,
        calls: Sequence[RegionCalls] = (),
        stacked: bool | None = None,
    ) -> Returned:
        """(what each arena returns, the form of the result) from what all instances return."""
        stacked = self.stacks if stacked is None else stacked
        slices = find_slices(calls, records)
        return form_of_results(self.name, records, outputs, slices, stacked)

    def run(self, plan: Plan, leaves: list[Leaf], inputs: Mapping[str, object]) -> Any:
        """Returns the results of a plan."""
        outputs, packed = run_plan(plan, leaves, inputs, f"the batched `{self.name}`")
        return results_from(plan.static.results, plan.static.signature, outputs, packed)
