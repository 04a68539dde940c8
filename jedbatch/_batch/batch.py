"""`batch`: the composition of everything else."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from jedbatch import checks
from jedbatch._batch.batched import Batched
from jedbatch._jaxpr.lane_steps import LaneCounter
from jedbatch._kernel.target import Target, checked_target
from jedbatch._schedule.policy import Policy, checked_policy
from jedbatch._session.core import Core
from jedbatch._session.options import ONE_EXECUTOR, ONE_LANE_POLICY, Options
from jedbatch._session.records.arguments import checked_axes
from jedbatch._support.types import (
    ControlFlowName,
    GranularityName,
    OrderName,
    TargetName,
)

Shared = TypeVar("Shared")
Instance = TypeVar("Instance")
Result = TypeVar("Result")
Anything = tuple[Any, ...]


class BatchOptions(TypedDict, total=False):
    """The options of `batch`, for type checkers."""

    policy: Policy | None
    key: Callable[..., Hashable] | None
    cache_size: int
    cache_bytes: int
    layout: OrderName
    reuse: bool | None
    control_flow: ControlFlowName
    max_steps: int | None
    count_steps: bool
    granularity: GranularityName | None
    target: TargetName | Target | None


@overload
def batch(
    fn: Callable[[Shared, Instance], Result],
    in_axes: tuple[None, Literal[0]] = (None, 0),
    out_axes: Literal[0] = 0,
    **options: Unpack[BatchOptions],
) -> Batched[Shared, Sequence[Instance] | Instance, Result]: ...
@overload
def batch(
    fn: Callable[[Shared, Instance], Result],
    in_axes: tuple[None, Literal[0]] = (None, 0),
    *,
    out_axes: None,
    **options: Unpack[BatchOptions],
) -> Batched[Shared, Sequence[Instance] | Instance, list[Result]]: ...
@overload
def batch(
    fn: Callable[[Instance], Result],
    in_axes: Literal[0] | tuple[Literal[0]],
    out_axes: Literal[0] = 0,
    **options: Unpack[BatchOptions],
) -> Batched[Sequence[Instance] | Instance, Result]: ...
@overload
def batch(
    fn: Callable[[Instance], Result],
    in_axes: Literal[0] | tuple[Literal[0]],
    out_axes: None,
    **options: Unpack[BatchOptions],
) -> Batched[Sequence[Instance] | Instance, list[Result]]: ...
@overload
def batch(
    fn: Callable[..., Result],
    in_axes: int | Sequence[int | None] = (None, 0),
    out_axes: Literal[0] = 0,
    **options: Unpack[BatchOptions],
) -> Batched[*Anything, Result]: ...
@overload
def batch(
    fn: Callable[..., Result],
    in_axes: int | Sequence[int | None] = (None, 0),
    out_axes: int | None = 0,
    **options: Unpack[BatchOptions],
) -> Batched[*Anything, Any]: ...
@checks.without(executor=ONE_EXECUTOR, lane_policy=ONE_LANE_POLICY)
def batch(
    fn: Callable,
    in_axes: int | Sequence[int | None] = (None, 0),
    out_axes: int | None = 0,
    *,
    policy: Policy | None = None,
    key: Callable[..., Hashable] | None = None,
    cache_size: int = 65536,
    cache_bytes: int = 1 << 30,
    layout: OrderName = "auto",
    reuse: bool | None = None,
    control_flow: ControlFlowName = "auto",
    max_steps: int | None = None,
    count_steps: bool = False,
    granularity: GranularityName | None = None,
    target: TargetName | Target | None = None,
) -> Batched[*Anything, Any]:
    """`jax.vmap` for functions whose computation depends on the instance.

    `fn` is written for one instance, as a pure function in ordinary Python and JAX: recursion,
    loops and branches may depend on the instance. The batched function records what each
    instance computes, groups operations of all instances into batches and runs everything as one
    XLA program, compiled once for every topology, and differentiable.

    Derivatives may be of any order, in both modes and mixed. What has a `jax.custom_vjp` in it has
    no forward mode and no second reverse, for which the rule of a `jax.custom_jvp` is taken to be
    a derivative; nor have functions that decide on values. Nothing is pulled back from results
    that nobody differentiates, but zeros are from those of instances that a loss does not read, if
    `apply` runs under `jax.jit` and `out_axes` is None.

    Arrays in instances may differ in length, `[n, ...]` with another n in each. Operations on them
    run on the rows of all instances, whatever n is, without padding one to the other, and are
    compiled once for all lengths. Inside of `fn`, `x.shape[0]` is then a symbol, which can be used
    for shapes (`jnp.arange(n)`) and as a number in computations (`x.sum(0) / n`), but which Python
    cannot decide on: a function that does is run for each length by itself, and so is one that does
    to such arrays what is not known to work for several lengths; the plan says why. Of no rows, a
    sum is 0, a softmax empty, a mean NaN, and a maximum a `ValueError` that names the instance.
    Where instances do the same to such arrays, all rows run before the other nodes; where each does
    it in a way of its own, as a recursion over trees does, nodes run on tiles of a fixed number of
    rows, if they treat rows alike or reduce them.
    What Python gives no say in tells nothing about lengths: `n is m`, `type(n)`, and, inside of
    cells and of jit-ted functions, whether `jax.typeof(x) == jax.typeof(y)`; compare `n == m`.

    The same minibatch gives the same bits every time. Which other instances are in it changes no
    value, but may change its last bits: sums and matrix products add up in an order that depends on
    how many run together (measured in float32: up to 8.5 eps of the largest value for trees). What
    is done element by element, looked up, compared, sorted or moved is the same to the last bit.
    Numbers of an instance that name rows of a shared array, `params["embedding"][word]`, must name
    rows that exist: that is checked when instances are planned.

    Instances that are the rows of arrays are recorded once, and mapped as `jax.vmap` does, unless
    `fn` decides on values, is long, or has a loop whose length depends on values.

    Recursion may be tens of thousands of frames deep. What is deeper than Python's limit is
    recorded once more, on a thread of its own with a larger stack, so that what `fn` does besides
    computing, such as printing, may happen twice.

    Args:
      fn: a pure function of one instance. Arrays in the instance are symbolic while it is
        recorded; numbers, strings, lists and objects reach it as they are.
      in_axes: for each argument, None if all instances share it (a pytree of arrays, such as
        parameters) or 0 if it has the instances; a single 0 for all arguments. Instances are the
        items of a list, tuple or other sequence, the rows of an array, or, as `jax.vmap` has it,
        the rows of all arrays in another pytree, such as a dict, a named tuple or a module.
      out_axes: 0 stacks the results along a new first axis, as `jax.vmap` does. None gives a list
        with one result per instance, whose shapes may differ.
      policy: chooses which type of node runs next: one of `jedbatch.policies`, what
        `jedbatch.learn` returned, or any callable from a `Frontier` to a type id. None learns one
        while the first minibatch is planned, unless a schedule by rank is optimal.
      key: maps the mapped arguments of an instance to something hashable that decides its graph,
        for instances that cannot be compared by value; their graphs are then remembered too.
      cache_size: how many instances' graphs are remembered. Instances are remembered if they are
        made of tuples, lists, dicts, frozen dataclasses, numbers, strings and arrays.
      cache_bytes: how many bytes these and all else that is kept to save time may take together,
        about, for each structure of shared arguments; the kind that takes most forgets what came
        first. Types and programs are not among them. `Batched.clear` forgets all.
      layout: how nodes are ordered inside of batches, so that operands are slices: "auto" does
        what pays on arbitrary minibatches; "append", "longest", "reader" and "pq" are described
        in `jedbatch.layout`.
      reuse: whether inference uses memory again after its last read. None does for minibatches
        with more than 32 MB of results; for smaller ones planning takes longer than it saves. What
        can be differentiated keeps everything in any case.
      control_flow: how `jax.lax.while_loop`, `cond` and `switch` run where their values differ from
        node to node. "lockstep": as under `jax.vmap`, loops until the last is done, and all
        branches for all. "lanes": once some of the nodes in a chunk are done with a loop, the
        others run a few at a time, each in the place of one that is done; each branch runs for its
        own nodes; and of loops in loops, and branches with much work in loops, each node is where
        it is by itself, and those at the same place run together. "auto": so where the nodes are
        many and a step is work enough; on CPUs loops with less work run in lock step until waiting
        has cost as much as exchanging nodes, and then sixteen at a time in one kernel, or, where
        XLA has no kernel for a step, only those that are left, once these are few.
      max_steps: how many steps a `while_loop`, or a `fori_loop` whose length is a value, takes at
        most, and how often an instance waits for values on which Python decides. Where more would
        be taken, a call raises `jedbatch.errors.UnfinishedLoopError`, which names the instances.
        Under `jax.jit`, in derivatives and in exported functions nothing can be raised: real
        numbers that come of a loop which was stopped are NaN. Loops over the rows of arrays whose
        lengths differ end with these, and have no bound. None, the default, stops no loop, as JAX
        does.
      count_steps: whether calls count the steps of loops and branches that values decide on and
        that do not run in lock step: `last_rounds.lane_steps` then says how many ran, for how many
        nodes, and how many were needed, and so does what `last_rounds` prints. The programs tell
        the host for this, so a call waits until all has run, and takes longer. Such functions are
        not exported, and not called by several threads at a time.
      granularity: what a node is. "cell": a call of a `cell`, of a jit-ted function, or one
        operation outside of them. "auto" finds operations that always run together and makes each
        such group one node, so that a model without any `cell` runs like one with cells; cells
        stay whole, and so do loops and branches. Functions that decide on values run as they are
        recorded, as with "cell". None is "cell" for a function that calls cells, except that
        operations after the last cell become one node. For a function that calls no cell both are
        compared once 512 operations have been recorded, until 8 instances have been: then "auto" is
        taken if it leaves at most two thirds of nodes and batches, and no more types. Operations on
        the stack of a Python list become one node once lists of two lengths have been met, except
        with "cell". Any of this may change the last bits of what was computed before.
      target: the kind of device to make programs for, "cpu" or "gpu", or a `jedbatch.Target`. None
        takes that of the shared arguments, if they are bound to a device, or else JAX's default.
        A program for another kind of device gives the same results, more slowly.

    Returns:
      The batched function; `Batched.plan` and `Batched.apply` are its two halves.

    Raises:
      ValueError, TypeError: `fn` is no function, or an option makes no sense.
      jedbatch.errors.UnfinishedLoopError: when it is called, see `max_steps`.

    Examples:
      >>> import jax, jax.numpy as jnp, jedbatch
      >>> @jedbatch.cell
      ... def node(params, left, right):
      ...     return jnp.tanh(params @ (left + right))
      >>> def encode(params, tree):
      ...     if isinstance(tree, tuple):
      ...         return node(params, encode(params, tree[0]), encode(params, tree[1]))
      ...     return jnp.full(3, tree / 10)
      >>> encode_all = jedbatch.batch(encode)
      >>> encode_all(jnp.eye(3), [(1, 2), ((1, 2), 3), 4]).shape
      (3, 3)

    References:
      Chen et al., ED-Batch: Efficient automatic batching of dynamic neural networks via learned
      finite state machines, ICML 2023; InsNet for padding-free batching.
    """
    axes = checked_axes(fn, in_axes, out_axes)
    if policy is not None:
        checked_policy(policy)
    options = Options(
        layout,
        reuse,
        control_flow,
        granularity,
        key,
        cache_size,
        cache_bytes,
        checked_target(target, "`batch`"),
        max_steps,
        LaneCounter() if checks.flag("batch", "count_steps", count_steps) else None,
    )
    return Batched(Core(fn, axes, out_axes, policy, options.checked("batch")))
