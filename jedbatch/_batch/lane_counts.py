"""`Batched.lane_steps`: counts of what loops and branches run that values decide on."""

import collections
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from jedbatch import checks
from jedbatch._batch.streaming import MAX_BATCH
from jedbatch._jaxpr.lane_steps import LaneSteps, counting
from jedbatch._support.types import PyTree

Call = TypeVar("Call", bound=Callable)


def counting_calls(call: Call) -> Call:
    """Returns a call of a batched function whose rounds say how many steps ran, if it counts them.

    Where JAX traces the call, nothing has run yet, and nothing is said.
    """

    @functools.wraps(call)
    def counting_call(batched: Any, *args: Any, **named: Any) -> Any:
        counter, before = batched._options.counter, batched.last_rounds
        if counter is None:
            return call(batched, *args, **named)
        counter.begin()
        results = call(batched, *args, **named)
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(results))
        if batched.last_rounds is not before and not is_traced:
            batched.last_rounds.lane_steps = counter.result()
        return results

    return counting_call  # type: ignore[return-value]


def lane_steps(batched: Any, *args: PyTree, batch_size: int | None = None) -> LaneSteps:
    """Runs the function, and counts what loops and branches that values decide on did.

    They run some nodes at a time, their lanes, and some of these are empty or done with a loop
    (see `control_flow` of `jedbatch.batch`). For each loop, branch, and block of nested loops,
    the counts say how many steps ran, how many lanes they ran, and how many lanes had to run:
    the steps that each node takes by itself, added up, which is the least for any order. What
    runs in lock step is not counted; nodes that fill up a chunk count in branches alone. The
    function is compiled anew for this, so it is slow: for looking at a minibatch, not for
    running it. Of a function made with `count_steps`, `last_rounds.lane_steps` has the same of
    every call, without that.

    Args:
      batched: the batched function.
      *args: as for a call.
      batch_size: counts what `stream` runs with minibatches of so many instances; None counts what
        a call runs.

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
      >>> counts = halve_all.lane_steps([jnp.float32(2**(i % 10)) for i in range(64)])
      >>> counts.steps, counts.lanes, counts.needed
      (9, 480, 276)
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        raise TypeError(
            "`lane_steps` got values that JAX traces; expected arrays. It counts what has run: "
            "call it outside of `jax.jit` and of derivatives."
        )
    if batch_size is not None:
        checks.whole("lane_steps", "batch_size", batch_size, least=1, most=MAX_BATCH)
    with counting() as counter:
        twin = batched._counting_twin()
        if batch_size is None:
            twin(*args)
        else:
            collections.deque(twin.stream(*args, batch_size=batch_size, ahead=0), maxlen=0)
        return counter.result()
