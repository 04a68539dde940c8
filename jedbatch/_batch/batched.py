"""`Batched`: a function of many instances, made of one of one instance.

Its first half, `plan`, is host work in NumPy; the second, `apply`, is one XLA program. This is what
users see of a `Core`, which does all of it.
"""

from __future__ import annotations  # shown as they are written

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, TypeVarTuple

import jax

from jedbatch import checks
from jedbatch._batch.ahead import Plans, plans
from jedbatch._batch.calling import apply, call, plan
from jedbatch._batch.lane_counts import lane_steps
from jedbatch._batch.learning import learn
from jedbatch._batch.on_devices import checked_devices
from jedbatch._batch.planner import Planner, planner
from jedbatch._batch.streaming import stream
from jedbatch._batch.warming import warm
from jedbatch._export.exported import NO_EXECUTABLES, Exported
from jedbatch._export.exporting import export, graph
from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.lane_steps import LaneSteps
from jedbatch._learn.adaptive import Adaptive
from jedbatch._program.executors import median_seconds
from jedbatch._program.plan import Plan
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.policy import Policy, checked_policy
from jedbatch._session.core import Core
from jedbatch._session.plans.round import Rounds
from jedbatch._support.types import PyTree

Given = TypeVarTuple("Given")  # what it takes
Result = TypeVar("Result")


class Batched(Generic[*Given, Result]):
    """A function of many instances, made by `batch`.

    Use it like the function, with sequences of instances; `plan` and `apply` are its two halves.
    """

    def __init__(self, core: Core):
        functools.update_wrapper(self, core.fn, updated=())
        self._core = core

    def __repr__(self) -> str:
        return repr(self._core)

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what copies and pickles are made of; they have empty caches, and learn anew."""
        return type(self), (copy.copy(self._core),)

    @property
    def in_axes(self) -> int | tuple[int | None, ...]:
        """For each argument None if all instances share it, else 0; or 0 for all, as given."""
        return self._core.arguments.axes

    @property
    def compilations(self) -> int:
        """XLA programs built so far; it stops growing when topologies are new but programs not."""
        return self._core.compilations

    @property
    def last_rounds(self) -> Rounds:
        """The rounds that the last call ran, a tuple to look at or print.

        That is one, or, where the function decides on values (`if`, `while`, `int()` on arrays),
        one for each time that instances waited for values, and the last.
        """
        return self._core.last_rounds

    def clear(self) -> None:
        """Forgets everything that is cached: graphs of instances, programs, what was met.

        The batched function goes on working, and records and compiles again. The policy stays, and
        plans made before can still be applied.
        """
        self._core.clear()

    @property
    def policy(self) -> Policy | None:
        """The policy that chooses the batches: the one given, or else the one learned.

        Without a policy of its own, a batched function learns one when the first minibatch is
        planned that needs it. As long as schedules by rank are optimal, this is a machine that
        does the same; before anything was planned, None. A policy can be assigned at any time; it
        holds for the plans made from then on.
        """
        return self._core.fixed_policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._core.policy = Adaptive() if policy is None else checked_policy(policy)

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
            self._core.arguments.refuse_named(list(named))
        results: Result = call(self._core, args)
        return results

    def plan(
        self,
        *args: PyTree,
        gradient: bool = True,
        mesh: jax.sharding.Mesh | None = None,
        axis: str | Sequence[str] | None = None,
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
            outer transformation, which a plan cannot keep; or there is no such axis, or there are
            fewer instances than devices along it; or processes disagree.
          RuntimeError: another process cannot plan its minibatch, or has ended.
        """
        checks.flag("plan", "gradient", gradient)
        return plan(self._core, args, gradient, checked_devices("plan", mesh, axis))

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
        results: Result = apply(self._core, args, inputs)
        return results

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
        core = self._core
        shared, instances = core.arguments.split(args)
        session, leaves = core.session(shared)
        plan = core.plan(session, instances, gradient=False)
        (seconds,) = median_seconds([lambda: core.run(plan, leaves, plan.inputs)], repeat).tolist()
        return plan._timed(seconds)

    def learn(self, *args: PyTree, **options: Any) -> FSM:
        """Learns a policy from instances and uses it for the plans made from then on.

        Args:
          *args: as for a call; shared arguments may be `jax.ShapeDtypeStruct`s. 32 instances are
            plenty.
          **options: see `jedbatch.learn`.

        Returns:
          The policy: print it, print its `report`, `save` it.

        Raises:
          TypeError, ValueError: as a call does, or an option makes no sense.
        """
        return learn(self._core, args, options)

    def lane_steps(self, *args: PyTree, batch_size: int | None = None) -> LaneSteps:
        """Runs the function, and counts what loops and branches that values decide on did.

        They run some nodes at a time, their lanes, and some of these are empty or done with a loop
        (see `control_flow` of `jedbatch.batch`). For each loop, branch, and block of loops,
        the counts say how many steps ran, how many lanes they ran, and how many lanes had to run:
        the steps that each node takes by itself, added up, which is the least for any order. What
        runs in lock step is not counted; nodes that fill up a chunk count in branches alone. The
        function is compiled anew for this, so it is slow: for looking at a minibatch, not for
        running it. Of a function made with `count_steps`, `last_rounds.lane_steps` has the same of
        every call, without that.

        Args:
          *args: as for a call.
          batch_size: counts what `stream` runs with minibatches of so many instances; None counts
            what a call runs.

        Returns:
          The counts, to look at or print.

        Raises:
          ValueError, TypeError: as a call does, or arguments are traced.

        Examples:
          >>> import jax, jax.numpy as jnp, jedbatch
          >>> @jedbatch.cell
          ... def halve(x):
          ...     return jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)
          >>> halve_all = jedbatch.batch(halve, in_axes=0, control_flow="lanes")
          >>> counts = halve_all.lane_steps([jnp.float32(2**(i % 10)) for i in range(61)])
          >>> counts.steps, counts.lanes, counts.needed
          (9, 576, 270)
        """
        return lane_steps(self._core, args, batch_size)

    def plans(
        self,
        *args: Any,
        gradient: bool = True,
        ahead: int = 2,
        workers: int = 0,
        mesh: jax.sharding.Mesh | None = None,
        axis: str | Sequence[str] | None = None,
    ) -> Plans:
        """Returns plans for minibatches, made in a thread or in processes while others are used.

        The device computes with one plan while the next ones are made. That saves time where steps
        wait for results and the host has a core to spare. The thread ends once the iterator is
        closed, as where a `for` loop is left, and sees JAX configured as it is where `plans` is
        called.

        Args:
          *args: as for `plan`, with an iterable of minibatches in place of each sequence of
            instances: a list, a generator, a `torch.utils.data.DataLoader` with `collate_fn=list`,
            a Grain dataset batched with `batch_fn=list`. They are read in the thread, `ahead`
            before they are needed at most. With `workers` they are read where plans are asked for.
          gradient: whether `apply` will be differentiated; planning is faster if not.
          ahead: plans made before they are asked for. With 0 they are made when they are, in the
            thread of the caller. With `workers`, at least as many.
          workers: processes that plan; 0 for a thread.
          mesh: devices over which minibatches are cut, as for `plan`; without `workers`.
          axis: of the mesh, as for `plan`.

        Returns:
          An iterator of plans for `apply`, in the order of the minibatches. Its `get_state` says
          how far it has come, for a checkpoint, and `set_state` continues from there.

        Raises:
          TypeError: something is no iterable of minibatches, or what `plan` raises for one of them,
            with a note that says which; the function cannot be sent to other processes.
          ValueError: there are more minibatches of one argument than of another, there are
            `workers` and a mesh, or what `plan` raises.
          RuntimeError: a process that plans ended.

        Examples:
          >>> import jax.numpy as jnp, jedbatch
          >>> total = jedbatch.batch(lambda w, xs: sum(w * x for x in xs))
          >>> minibatches = [[(1.0, 2.0), (3.0,)], [(4.0,), (5.0, 6.0)]]
          >>> [total.apply(2.0, plan).tolist() for plan in total.plans(2.0, minibatches)]
          [[6.0, 6.0], [8.0, 22.0]]
        """
        return plans(self._core, args, gradient, ahead, workers, mesh, axis)

    def planner(self, *args: PyTree, gradient: bool = True) -> Planner:
        """Makes what plans minibatches in other processes, such as those of a loader of data.

        It can be pickled. A process calls it with a list of instances, and `attach` makes a plan
        here of what came back. Minibatches that need a new program are planned by `attach`. For
        processes of its own `plans` has `workers`.

        Args:
          *args: as for `plan`, with a sample of instances: a minibatch like those to come.
          gradient: whether `apply` will be differentiated.

        Returns:
          The planner: `collate_fn` of a `torch.utils.data.DataLoader` with
          `multiprocessing_context="spawn"`, or `batch_fn` of a Grain dataset.

        Raises:
          TypeError: the function, its options or its arguments cannot be pickled.
          ValueError: what `plan` raises.

        Examples:
          >>> import jax.numpy as jnp, jedbatch
          >>> total = jedbatch.batch(jedbatch.cell(jnp.dot))
          >>> w, minibatches = jnp.ones(2), [[jnp.ones(2), 2 * jnp.ones(2)], [3 * jnp.ones(2)]]
          >>> planner = total.planner(w, minibatches[0])
          >>> prepared = map(planner, minibatches)        # elsewhere, once it has been pickled
          >>> [total.apply(w, planner.attach(x)).tolist() for x in prepared]
          [[2.0, 4.0], [6.0]]
        """
        return planner(self._core, args, gradient)

    def stream(
        self, *args: Any, batch_size: int = 64, ahead: int = 2, ordered: bool = True
    ) -> Iterator[Any]:
        """Yields the result of each of any number of instances, which are read as they are needed.

        Instances are put into minibatches, which a thread plans and has the device compute while
        others are used. No more of them is held than `ahead` minibatches and the one at hand. The
        thread ends once the iterator is closed, as where a `for` loop is left, and sees JAX
        configured as it is where `stream` is called. Functions that decide on values run in it.

        A minibatch ends with its slowest instance. `lane_steps` with a `batch_size` counts what
        loops of a stream run.

        Args:
          *args: as for a call, with an iterable of instances, such as a generator, in place of each
            sequence of instances.
          batch_size: instances in a minibatch; the last one has what is left, and compiles nothing
            that a plan of another minibatch would not.
          ahead: minibatches that are computed before they are asked for. With 0 they are planned
            and computed when they are, in the thread of the caller.
          ordered: whether results come in the order of the instances, by themselves. If not, pairs
            `(number, result)` come as soon as results are there, with the number of the instance
            from 0 on.

        Returns:
          An iterator of results, pytrees of arrays of NumPy, which are read-only; random keys are
          arrays of JAX. They are not stacked, and may differ in shape.

        Raises:
          TypeError: something is no iterable of instances, or shared arguments are traced.
          ValueError: there are more instances of one argument than of another.

          Whatever an instance raises, with a note that says its number, after the results of all
          instances before it. The same goes for what the iterables raise.

        Examples:
          >>> import jax.numpy as jnp, jedbatch
          >>> total = jedbatch.batch(lambda w, xs: sum(w * x for x in xs))
          >>> numbers = ((float(n), 1.0) for n in range(5))
          >>> [float(x) for x in total.stream(2.0, numbers, batch_size=2)]
          [2.0, 4.0, 6.0, 8.0, 10.0]
        """
        return stream(self._core, args, batch_size, ahead, ordered)

    def warm(
        self,
        *args: PyTree,
        batch_size: int | None = None,
        gradient: bool = False,
        calls: bool = True,
        mesh: jax.sharding.Mesh | None = None,
        axis: str | Sequence[str] | None = None,
    ) -> Plan | None:
        """Compiles ahead of time what minibatches of instances like these need.

        Programs have room for the largest minibatch of the sample, and headroom, so that
        minibatches never seen before find theirs. A function that decides on values (`if`,
        `while`, `int()` on arrays) has no plans: minibatches of the sample are run, one after the
        other, with the shared arguments given, which say what is decided.

        Args:
          *args: as for a call, with a sample of the instances that will come: those of ten
            minibatches are plenty.
          batch_size: how many instances later minibatches have. The sample is cut into minibatches
            of so many; one that is smaller is repeated. None takes it for one minibatch.
          gradient: whether gradients will be taken, too.
          calls: whether the function will be called, or plans applied, outside of `jax.jit`, so
            that this is to be compiled now. If False, programs are chosen and nothing is run, for
            plans that are applied in a `jax.jit` of yours; it compiles once.
          mesh: devices over which minibatches will be cut, as for `plan`. Then functions are not
            called, and `calls` says whether plans are applied outside of `jax.jit`.
          axis: of the mesh, as for `plan`.

        Returns:
          A plan of the largest minibatch of the sample, for instance to compile a train step ahead
          of time: `jax.jit(step).lower(params, plan).compile()`. None if the function decides on
          values.

        Raises:
          ValueError, TypeError: arguments do not fit `in_axes`, shared arguments are no arrays or
            are traced, there is no instance, or nothing to take gradients with respect to.

        Examples:
          >>> import jax.numpy as jnp, jedbatch
          >>> add = jedbatch.cell(lambda p, x, y: jnp.tanh(p * (x + y)), name="add")
          >>> def total(p, t):
          ...     return add(p, total(p, t[0]), total(p, t[1])) if isinstance(t, tuple) else p * t
          >>> total_all, p = jedbatch.batch(total), jnp.ones(3)
          >>> sample = [(1, 2), ((3, 4), 5), 6, (7, (8, 9))]
          >>> plan = total_all.warm(p, sample, batch_size=2, gradient=True)
          >>> compiled = total_all.compilations
          >>> total_all(p, [((1, 2), 3), (4, 5)]).shape
          (2, 3)
          >>> total_all.compilations - compiled
          0
        """
        return warm(self._core, args, batch_size, gradient, calls, mesh, axis)

    @checks.without(compiled=NO_EXECUTABLES)
    def export(
        self,
        *args: PyTree,
        batch_size: int | None = None,
        gradient: bool = False,
        platforms: Sequence[str] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Exported:
        """Exports the function, so that other processes compute it without the model's Python.

        The exported programs compute any graph of the node types that the sample has, up to their
        sizes: they have room for the largest minibatch of the sample, and headroom. Arrays that
        the function closes over are part of it; shared arguments are not.

        Args:
          *args: as for a call, with a sample of the instances that will come, of all node types:
            those of ten minibatches are plenty. Shared arguments may be `jax.ShapeDtypeStruct`s.
          batch_size: the most instances of a minibatch. The sample is cut into minibatches of so
            many; one that is smaller is repeated. None takes it for one minibatch.
          gradient: whether results will be differentiated (once, in reverse mode), too.
          platforms: any of "cpu", "cuda", "rocm" and "tpu", whether they are here or not; None for
            that of the shared arguments.
          sizes: room for at least so many of what `Exported.sizes` lists, such as nodes of a type
            by its label; and "readers": how many nodes may read one value if there are gradients.

        Returns:
          The exported function: `save` it, or call it as the function, with graphs for instances.

        Raises:
          TypeError: the policy is a function of yours, or as `plan` does.
          ValueError: there is no such platform or size, results differ in length, the
            function is batched with `count_steps`, or as `plan` does.
          ImportError: the package flatbuffers is missing, with which JAX writes programs.

        Examples:
          >>> import jax.numpy as jnp, numpy as np, jedbatch
          >>> add = jedbatch.cell(lambda p, x, y: jnp.tanh(p * (x + y)), name="add")
          >>> leaf = jedbatch.cell(lambda p, n: p * n, name="leaf")
          >>> def total(p, t):
          ...     is_node = isinstance(t, tuple)
          ...     return add(p, total(p, t[0]), total(p, t[1])) if is_node else leaf(p, t)
          >>> p, trees = jnp.ones(3), [((1, 2), 3), (4, 5)]
          >>> exported = jedbatch.batch(total).export(p, trees)
          >>> again = jedbatch.Exported.deserialize(exported.serialize())     # in another process
          >>> numbers = np.array([1, 2, 3], np.int32)
          >>> nodes = ["leaf", "leaf", "leaf", "add", "add"]
          >>> reads = [[-1], [-2], [-3], [1, 2], [0, 3]]
          >>> again(p, [again.graph(nodes, reads, inputs=[numbers])])[0].tolist()[0] > 0.9
          True
        """
        return export(self._core, args, batch_size, gradient, platforms, sizes)

    def graph(self, *args: PyTree) -> Graph:
        """Returns the graph of instances, with their inputs, to be stored and computed elsewhere.

        Its types say what they compute, so that a model exported in another process knows them.

        Args:
          *args: as for a call; shared arguments may be `jax.ShapeDtypeStruct`s.

        Returns:
          A graph of all instances: `save` it, or `split` it into one for each.

        Raises:
          TypeError: arguments are not what the function takes.
          ValueError: results differ in length, or as `plan` does.

        Examples:
          >>> import jax.numpy as jnp, jedbatch
          >>> double = jedbatch.batch(jedbatch.cell(lambda p, x: p * x, name="double"))
          >>> print(double.graph(jnp.ones(2), [3.0, 4.0]))
          Graph of 2 instances: 2 nodes, 1 types, 2 operands, 2 inputs
            2 × double(f32[]~) -> f32[2]
        """
        return graph(self._core, args)


def core_of(batched: Batched) -> Core:
    """Returns what records and plans for a batched function."""
    return batched._core
