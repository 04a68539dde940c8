"""`Batched`: a function of many instances, made of one of one instance.

    instances ─trace→ graphs ─select→ Graph ─schedule→ Schedule ─layout→ lanes ─lower→ tables

The first half, `plan`, is host work in NumPy; the second, `apply`, is one XLA program. What can be
kept is kept by the `Batched` object and by nothing else (see `Session`).
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, TypeVarTuple

import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh

from jedbatch import checks
from jedbatch._batch.ahead import plans
from jedbatch._batch.lane_counts import counting_calls, lane_steps
from jedbatch._batch.learning import learn
from jedbatch._batch.nested import plain_loop, put_together
from jedbatch._batch.on_devices import (
    AxisNames,
    apply_on_devices,
    checked_devices,
    plan_on_devices,
)
from jedbatch._batch.planner import planner
from jedbatch._batch.streaming import stream
from jedbatch._batch.warming import warm
from jedbatch._control_flow.rounds import Stepwise
from jedbatch._export.exporting import export, graph
from jedbatch._jaxpr.configuration import (
    any_traced,
    configuration,
    differences,
    runs_without_jit,
    without_mesh,
)
from jedbatch._jaxpr.identity import Same, tree_key
from jedbatch._jaxpr.lane_policies import LanePolicy, checked_lane_policy, least_loss
from jedbatch._jaxpr.lane_steps import LaneCounter
from jedbatch._jaxpr.meshes import varies
from jedbatch._learn.adaptive import Adaptive
from jedbatch._program.executors import median_seconds
from jedbatch._program.host_arrays import results_from
from jedbatch._program.output_spec import Slice, TileRun
from jedbatch._program.plan import Plan
from jedbatch._program.sharded import DeviceAxis
from jedbatch._ragged.calls import find_calls, find_slices
from jedbatch._record.cell import recording
from jedbatch._record.environment import Environment
from jedbatch._record.inlining import without_jit
from jedbatch._schedule.heuristics import agenda
from jedbatch._schedule.policy import Policy, checked_policy
from jedbatch._session.arguments import Arguments, StackedInstances, TypesOfLeaves
from jedbatch._session.copies import find_batches, plan_copies
from jedbatch._session.mapped import MIN_ROWS, MappedProgram
from jedbatch._session.minibatch import Flags, Minibatch, graph_of
from jedbatch._session.options import Options
from jedbatch._session.outputs import InstanceOutput, Returned, form_of_results
from jedbatch._session.pipeline import (
    checked_inputs,
    make_plan,
    plan_again,
    programs_of,
    reverse_mode_only,
    run_plan,
)
from jedbatch._session.recording import Recording, arrays_of
from jedbatch._session.round import Round, Rounds
from jedbatch._session.session import Session, num_programs
from jedbatch._support.caches import Memory
from jedbatch._support.guards import GuardFailed, until_guards_hold
from jedbatch._support.types import Leaf, PyTree

DECIDES = (
    "it decides on values, which Python reads while they are computed: that has reverse mode only"
)
# Structures of shared arguments, before the one not used for longest is forgotten.
MAX_SESSIONS = 16

Made = TypeVar("Made")
Given = TypeVarTuple("Given")  # what it takes
Result = TypeVar("Result")


class Batched(Generic[*Given, Result]):
    """A function of many instances, made by `batch`.

    Use it like the function, with sequences of instances; `plan` and `apply` are its two halves.

    Attributes:
      last_rounds: what the last call ran, a tuple of rounds to look at or print: one, or, where
        the function decides on values (`if`, `while`, `int()` on arrays), one for each time that
        instances waited for values, and the last.
    """

    def __init__(
        self,
        fn: Callable,
        in_axes: int | tuple[int | None, ...],
        out_axes: int | None,
        policy: Policy | None,
        options: Options,
        lane_policy: LanePolicy = least_loss,
    ):
        functools.update_wrapper(self, fn, updated=())
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._fn = fn
        self._arguments = Arguments(self._name, in_axes)
        self._out_axes = out_axes
        self._options = options
        self._policy: Any = Adaptive() if policy is None else policy
        self._lane_policy = lane_policy
        self._recording = Recording(without_jit(fn), self._arguments.join, options.key)
        self._environment = Environment(self._recording.fn)
        self.last_rounds: Rounds = Rounds()
        self._sessions: Memory = Memory(MAX_SESSIONS)
        self._types_of_leaves = TypesOfLeaves()
        self._compiled_before = 0  # programs that were forgotten
        self._planning = threading.RLock()  # planning changes the sessions
        self._keeping = threading.Lock()

    @property
    def in_axes(self) -> int | tuple[int | None, ...]:
        """For each argument None if all instances share it, else 0; or 0 for all, as given."""
        return self._arguments.axes

    @property
    def _stacks(self) -> bool:
        """Whether results are stacked, and no list."""
        return self._out_axes is not None

    @property
    def compilations(self) -> int:
        """XLA programs built so far; it stops growing when topologies are new but programs not."""
        return self._compiled_before + num_programs(self._sessions)

    def clear(self) -> None:
        """Forgets everything that is cached: graphs of instances, programs, what was met.

        The batched function goes on working, and records and compiles again. The policy stays, and
        plans made before can still be applied.
        """
        with self._planning:
            self._compiled_before = self.compilations
            self._sessions.clear()
            self._environment.clear()

    @property
    def policy(self) -> Policy | None:
        """The policy that chooses the batches: the one given, or else the one learned.

        Without a policy of its own, a batched function learns one when the first minibatch is
        planned that needs it. As long as schedules by rank are optimal, this is a machine that
        does the same; before anything was planned, None. A policy can be assigned at any time; it
        holds for the plans made from then on.
        """
        with self._planning:
            return self._policy.machine if isinstance(self._policy, Adaptive) else self._policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._policy = Adaptive() if policy is None else checked_policy(policy)

    @property
    def lane_policy(self) -> LanePolicy:
        """The policy for lanes: which block of nested loops runs next on the device.

        Assigned, it holds for calls and plans made from then on, whose programs are compiled anew.
        """
        return self._lane_policy

    @lane_policy.setter
    def lane_policy(self, policy: LanePolicy) -> None:
        self._lane_policy = checked_lane_policy(policy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what copies and pickles are made of; they have empty caches, and learn anew."""
        policy = None if isinstance(self._policy, Adaptive) else self._policy
        options = replace(self._options, counter=self._options.counter and LaneCounter())
        given = self._arguments.axes, self._out_axes, policy, options
        return type(self), (self._fn, *given, self._lane_policy)

    def _twin(self) -> "Batched":
        """Returns the same function with empty caches, nothing to learn and a list of results."""
        given = agenda, self._options, self._lane_policy
        return Batched(self._fn, self._arguments.axes, None, *given)

    def _counting_twin(self) -> "Batched[*Given, Result]":
        """Returns the same function with empty caches, to be compiled for counting."""
        given = self._arguments.axes, self._out_axes, self.policy, self._options
        return Batched(self._fn, *given, self.lane_policy)

    @counting_calls
    def __call__(self, *args: *Given, **named: Any) -> Result:
        """Runs the function on all instances.

        Args:
          *args: as the function's, with a sequence of instances wherever `in_axes` has 0.
          **named: nothing, since `in_axes` counts arguments; an error says how to bind names.

        Returns:
          The results, stacked along a new first axis or as a list, as `out_axes` says.

        Raises:
          ValueError, TypeError: the arguments do not fit `in_axes`, shared arguments have leaves
            that are not arrays, or results do not stack.
        """
        if named:
            self._arguments.refuse_named(list(named))
        if recording.recorder is None and runs_without_jit():
            self.last_rounds = Rounds()
            return plain_loop(self._fn, self._arguments, args, self._stacks)
        if (results := self._run_mapped(args)) is not None:
            return results
        shared, instances = self._arguments.split(args)
        if recording.recorder is not None:  # what instances of both functions do is batched
            join = functools.partial(self._arguments.join, shared)
            calls = [functools.partial(self._fn, *join(x)) for x in instances]
            return put_together(self._name, recording.recorder.together(calls), self._stacks)
        session, leaves = self._session(shared)
        plan = self._unless_decides(
            session,
            lambda read: self._plan(session, instances, gradient=False, leaves=leaves, read=read),
        )
        if plan is None:
            return self._run_stepwise(session, leaves, instances)
        assert plan.host is not None
        took = sum(plan.host.seconds.values())
        rounds = [Round.of(plan.host.counted.layout, 0, took)]
        self.last_rounds = Rounds.of(rounds, session.forms)
        return self._run(plan, leaves, plan.inputs)

    def _unless_decides(self, session: Session, make: Callable[[Callable], Made]) -> Made | None:
        """Returns what is made of all that is computed; None if the function decides on values.

        `make` is given what to call when a value is read.
        """

        def attempt() -> Made | None:
            if session.decides:
                return None
            try:
                return make(session.note_decision)
            except Exception:
                if session.decides:  # whatever the function makes of it
                    raise GuardFailed from None
                raise

        return until_guards_hold(attempt, lambda: session.decides)

    def _run_mapped(self, args: tuple) -> Any:
        """Runs the function on rows of arrays; None if instances are to be planned one by one."""
        planned = recording.recorder is not None or self._options.plans
        if planned or (instances := self._arguments.stacked(args, MIN_ROWS)) is None:
            return None
        if varies((instances.shared, instances.arrays)):
            return None
        session, leaves = self._session(instances.shared)
        start = time.perf_counter()
        with self._planning:
            program = self._mapped_program(session, instances)
        if program is None:
            return None
        results = program(leaves, instances.arrays, stack=self._stacks)
        rounds = [program.round(instances.num_rows, time.perf_counter() - start)]
        self.last_rounds = Rounds.of(rounds, session.forms)
        return results

    def _mapped_program(
        self, session: Session, instances: StackedInstances
    ) -> MappedProgram | None:
        """Returns the program for rows of arrays; None if they are to be planned one by one."""
        key = session.mapped_key(self._environment.look().number, instances)
        program = None if key is None else session.mapped_again.get(key)
        if program is not None:
            return program if program.takes(instances.arrays) else None
        first = instances.first()
        recorded = self._unless_decides(
            session, lambda read: self._record(session, [first.arguments], read)
        )
        if recorded is None or recorded.tracers:  # it closes over values of an outer transformation
            return None
        (record,), (arrays,) = recorded.records, recorded.arrays
        program = session.mapped_program(record, arrays, first.rows, instances)
        if program is not None and recorded.num_known:
            key = session.mapped_key(recorded.reached.number, instances)
            if key is not None:
                session.mapped_again[key] = program
        return program

    def _run_stepwise(
        self,
        session: Session,
        leaves: list[Leaf],
        instances: list[tuple],
        *,
        on_host: bool = False,
        check: Callable[[], object] | None = None,
    ) -> Any:
        """Runs the function where it decides on values; `on_host` as `_results_on_host` does.

        Before each round `check` is called, which may raise an error to end the call.
        """
        with self._planning:
            arrays = arrays_of(instances, self._recording.classes)
            self._environment.meet(self._recording.classes)
            given = self._recording.fn, session, instances, self._arguments.join, self._policy
            results_of = functools.partial(self._results, stacked=False if on_host else None)
            call = Stepwise(*given, results_of, on_host=on_host)
            call.check = check
            reached, compiled = self._environment.look(), session.programs.compilations
            before = compiled["round"]
            try:
                session.records.read(reached)
                with reverse_mode_only(f"the batched `{self._name}`", DECIDES):
                    results = call.run(leaves, arrays, reached)
                session.note_rounds(arrays, compiled["round"] - before)
                return results
            finally:
                self.last_rounds = Rounds.of(call.rounds, session.forms)
                session.records.nothing_to_read()
                self._environment.settle(reached)

    def plan(
        self,
        *args: PyTree,
        gradient: bool = True,
        mesh: Mesh | None = None,
        axis: AxisNames = None,
    ) -> Plan:
        """Host work only: what to compute for these instances, and in what order.

        Args:
          *args: as for a call; shared arguments may be `jax.ShapeDtypeStruct`s.
          gradient: whether `apply` will be differentiated; planning is faster if not.
          mesh: a `jax.sharding.Mesh`, over whose devices the instances are cut so that all have
            about as much to do. Every device runs the same program on a schedule of its own. The
            results are on all devices, in the order of the instances. `apply` takes shared
            arguments that are cut over devices in any way, and gathers them. If it has devices of
            several processes, the instances are those of this process, equally many in each, and
            all processes plan in the same order; results are those of all, one after the other.
          axis: the axis of the mesh along which instances are cut, or several; devices along the
            others do the same. None for the only one.

        Returns:
          A plan for `apply`; print it. With a mesh it has `shards`, a plan for each, and its arrays
          are on their devices.

        Raises:
          TypeError: arguments are not what the function takes.
          ValueError: arguments disagree in length, or the function closes over a traced value of an
            outer transformation, which a plan cannot keep; or there is no such axis, there are
            fewer instances than devices along it, or arrays in instances that differ in length
            and do not run as tiles; or processes disagree.
          RuntimeError: another process cannot plan its minibatch, or has ended.
        """
        checks.flag("plan", "gradient", gradient)
        devices = checked_devices("plan", mesh, axis)
        shared, instances = self._arguments.split(args)
        session, _ = self._session(shared, devices)
        if devices is not None:
            return plan_on_devices(self, session, instances, gradient, devices)
        return self._lasting_plan(session, instances, gradient)

    learn = learn
    lane_steps = lane_steps
    plans = plans
    planner = planner
    stream = stream
    warm = warm
    export = export
    graph = graph

    def _lasting_plan(
        self,
        session: Session,
        instances: list[tuple],
        gradient: bool,
        stacked: bool | None = None,
    ) -> Plan:
        """A plan that can be kept, or an error if it needs values of an outer transformation."""
        plan = self._plan(session, instances, gradient, stacked=stacked)
        assert plan.host is not None
        self._refuse_tracers(plan.host.tracers)
        self._refuse_tracers(session.programs.reads_tracers(plan.static.signature))
        return plan

    def _refuse_tracers(self, there_are: object) -> None:
        if there_are:
            raise ValueError(
                f"`{self._name}` closes over a traced value of an outer transformation, which a "
                "plan cannot keep; make it a shared argument (`in_axes` None), or call the "
                "batched function instead of `plan` and `apply`."
            )

    def apply(self, *args: PyTree, inputs: dict[str, Any] | None = None) -> Result:
        """Device work only: runs a plan. Differentiable, and can be compiled with `jax.jit`.

        Args:
          *args: the shared arguments, then the plan.
          inputs: values in place of `plan.inputs`, for instance to differentiate them.

        Returns:
          What a call with the planned instances would return.

        Raises:
          TypeError: the last argument is no plan, or inputs are no arrays.
          ValueError: the shared arguments or the inputs are of other shapes or dtypes than those
            that the plan was made for.
        """
        if not args:
            raise TypeError(
                "`apply` got no arguments; expected the shared ones and then a plan, as in "
                "`batched.apply(params, batched.plan(params, instances))`."
            )
        *shared, plan = args
        if not isinstance(plan, Plan):
            raise TypeError(
                f"`apply` got {checks.shown(plan)} as its last argument; expected a plan, as in "
                "`batched.apply(params, batched.plan(params, instances))`."
            )
        session, leaves = self._session(tuple(shared), plan.static.devices)
        of_plan = programs_of(plan)  # which may have been forgotten
        if of_plan.environment is not self._environment:
            raise ValueError(
                f"`apply` of the batched `{self._name}` got a plan that another batched function "
                "made; make one with its own `plan(*shared, instances)`."
            )
        if of_plan.configuration != session.programs.configuration:
            raise ValueError(
                f"`apply` of the batched `{self._name}` got a plan that was made while JAX was "
                "configured in another way: "
                f"{differences(of_plan.configuration, session.programs.configuration)}. Make a "
                "new one with `plan(*shared, instances)`, or set the option as it was."
            )
        if of_plan.arguments_key != session.programs.arguments_key:
            raise ValueError(
                "`apply` got shared arguments of another structure, shapes or dtypes than the "
                "plan was made for; make a new one with `plan(*shared, instances)`."
            )
        inputs = plan.inputs if inputs is None else inputs
        if plan.static.devices is not None:
            return apply_on_devices(self, plan, leaves, inputs)
        return self._run(plan, leaves, checked_inputs(plan, inputs))

    def profile(self, *args: PyTree, repeat: int = 5) -> Plan:
        """Plans, runs and times: a plan that prints the median time of a run.

        Args:
          *args: as for a call.
          repeat: how often it is run.

        Returns:
          The plan; its `device_seconds` is the median of `repeat` runs, in seconds.

        Raises:
          TypeError: arguments are not what the function takes.
          ValueError: arguments disagree in length, or `repeat` is not positive.
        """
        checks.whole("profile", "repeat", repeat, least=1, most=10**6)
        shared, instances = self._arguments.split(args)
        session, leaves = self._session(shared)
        plan = self._plan(session, instances, gradient=False)
        (seconds,) = median_seconds([lambda: self._run(plan, leaves, plan.inputs)], repeat).tolist()
        return plan._timed(seconds)

    # --- what is kept ---

    def _session(
        self, shared: tuple, devices: DeviceAxis | None = None
    ) -> tuple[Session, list[Any]]:
        """Returns (the session for shared arguments of this structure, their leaves)."""
        leaves, structure = self._arguments.leaves(shared)
        types, found = self._types_of_leaves.of(leaves)
        target = self._options.target or (found if devices is None else devices.target)
        lanes = self._lane_policy
        key = tree_key(structure), types, target, configuration(), Same(lanes)
        session = self._sessions.use(key)
        if session is None or session.is_full:
            avals = [ShapedArray(s, d, weak_type=w) for s, d, w in types]
            session = Session.empty(
                avals, structure, self._options, target, self._environment, key, lanes
            )
            session = self._keep(key, session)
        return session, leaves

    def _keep(self, key: Hashable, new: Session) -> Session:
        """Keeps a new session in place of one that is full, unless another thread was first."""
        with self._keeping:
            session = self._sessions.get(key)
            if session is not None and not session.is_full:
                return session
            before = self.compilations
            self._sessions[key] = new
            self._compiled_before = before - num_programs(self._sessions)
            return new

    # --- planning ---

    def _plan(
        self,
        session: Session,
        instances: list[tuple],
        gradient: bool,
        leaves: Sequence[Leaf] = (),
        read: Callable | None = None,
        stacked: bool | None = None,
    ) -> Plan:
        """A plan, which can be differentiated if `gradient` or if the shared leaves are traced.

        Results are `stacked` as `out_axes` says, unless that is given.
        """
        with self._planning:
            minibatch = self._record(session, instances, read)
            values = itertools.chain(leaves, minibatch.reached.arrays, *minibatch.arrays)
            keeps = gradient or bool(minibatch.tracers) or any_traced(values)
            flags = Flags(gradient, keeps, self._stacks if stacked is None else stacked)
            return self._plan_recorded(minibatch, flags)

    def _record(
        self, session: Session, instances: list[tuple], read: Callable | None = None
    ) -> Minibatch:
        """Records instances; `read` is called where the function decides on a value."""
        start = time.perf_counter()
        cache, reached = session.records, self._environment.look()
        tracers: Sequence[Leaf] = ()
        found, num_known = self._recording.recall(cache, instances, reached), len(instances)
        if found is None:
            num_known = 0
            try:
                cache.read(reached)
                with without_mesh():
                    *found, tracers, num_known = self._recording.find(cache, instances, read)
            finally:
                cache.nothing_to_read()
                if num_known < len(instances):  # else the function was not called
                    self._environment.meet(self._recording.classes)
                    self._environment.settle(reached)
        seconds = {"trace": time.perf_counter() - start}
        return Minibatch(session, *found, self._policy, seconds, num_known, tracers, reached)

    def _plan_recorded(self, minibatch: Minibatch, flags: Flags) -> Plan:
        """Plans what was recorded before; see `make_plan`."""
        start = time.perf_counter()
        session, for_values = minibatch.session, not (flags.gradient or flags.keeps)
        if session.projections and isinstance(minibatch.policy, Adaptive) and for_values:
            minibatch = minibatch._replace(records=session.projections.cut(minibatch.records))
        again = plan_again(minibatch, flags)
        if again is not None:
            return again
        found = None if minibatch.tracers else find_batches(minibatch)
        if found is not None and for_values:
            plan = plan_copies(minibatch, found, self._results, stacked=flags.stacked)
            if plan is not None:
                return plan
        records = minibatch.records
        graph, calls = graph_of(records), find_calls(records, minibatch.arrays)
        slices = find_slices(calls, records)
        seconds = {**minibatch.seconds, "merge": time.perf_counter() - start}
        return make_plan(
            minibatch._replace(seconds=seconds),
            graph,
            self._results(records, graph.outputs, slices, stacked=flags.stacked),
            flags,
            calls=calls,
            batches=found and found.batches.expanded(found.copies, graph),
        )

    def _results(
        self,
        records: Sequence[InstanceOutput],
        outputs: np.ndarray,
        slices: Sequence[Mapping[int, Slice | TileRun]] = (),
        stacked: bool | None = None,
    ) -> Returned:
        """(what each arena returns, the form of the result) from what all instances return."""
        stacked = self._stacks if stacked is None else stacked
        return form_of_results(self._name, records, outputs, slices, stacked)

    def _run(self, plan: Plan, leaves: list[Leaf], inputs: Mapping[str, object]) -> Any:
        outputs, packed = run_plan(plan, leaves, inputs, f"the batched `{self._name}`")
        return results_from(plan.static.results, plan.static.signature, outputs, packed)
