"""`batch`: the composition of everything else."""

from __future__ import annotations  # shown as they are written

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

    `fn` is written for one instance: recursion, loops and branches may depend on it. What all
    instances compute runs in batches as one XLA program, compiled once for every topology, and
    differentiable. Each option is described at length, with what a batched function promises, in
    `docs/api/batching.md`.

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

    Args:
      fn: a pure function of one instance. Arrays in the instance are symbolic while it is
        recorded; numbers, strings, lists and objects reach it as they are.
      in_axes: for each argument, None if all instances share it (a pytree of arrays, such as
        parameters) or 0 if it has the instances: a list, a tuple, the rows of an array or of all
        arrays in a pytree. A single 0 for all arguments.
      out_axes: 0 stacks the results, as `jax.vmap` does; None gives a list, one for each instance.
      policy: chooses which type of node runs next: one of `jedbatch.policies`, or what
        `jedbatch.learn` returned. None learns one where a schedule by rank is not optimal.
      key: maps the mapped arguments of an instance to something hashable that decides its graph,
        for instances that cannot be compared by value; their graphs are then remembered too.
      cache_size: how many instances' graphs are remembered.
      cache_bytes: how many bytes these and all else that saves time may take, about.
      layout: how nodes are ordered inside of batches: "auto", or see `jedbatch.layout`.
      reuse: whether inference uses memory again after its last read. None does where results take
        more than 32 MB.
      control_flow: how loops and branches of `jax.lax` run that values decide on: "lockstep" as
        under `jax.vmap`, "lanes" each node for itself, "auto" what pays.
      max_steps: most steps of a loop that values decide on, before a call raises; None for any.
      count_steps: whether `last_rounds.lane_steps` counts what such loops do; calls take longer.
      granularity: what a node is: "cell", a call of a cell or one operation outside of them;
        "auto", what always runs together; None, the same once enough has been met.
      target: "cpu", "gpu" or a `jedbatch.Target` to make programs for; None asks JAX.

    Returns:
      The batched function; `Batched.plan` and `Batched.apply` are its two halves.

    Raises:
      ValueError, TypeError: `fn` is no function, or an option makes no sense.
      jedbatch.errors.UnfinishedLoopError: when it is called, see `max_steps`.
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
