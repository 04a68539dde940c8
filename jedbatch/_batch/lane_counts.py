"""`Batched.lane_steps`: counts of what loops and branches run that values decide on."""

import collections

import jax
from jax.core import Tracer

from jedbatch import checks
from jedbatch._batch.calling import call
from jedbatch._batch.streaming import MAX_BATCH, stream
from jedbatch._jaxpr.lane_steps import LaneSteps, counting
from jedbatch._session.core import Core


def lane_steps(core: Core, args: tuple, batch_size: int | None) -> LaneSteps:
    """Counts the steps of loops and branches; see `Batched.lane_steps`."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        raise TypeError(
            "`lane_steps` got values that JAX traces; expected arrays. It counts what has run: "
            "call it outside of `jax.jit` and of derivatives."
        )
    if batch_size is not None:
        checks.whole("lane_steps", "batch_size", batch_size, least=1, most=MAX_BATCH)
    with counting() as counter:
        twin = core.twin(policy=core.fixed_policy)
        if batch_size is None:
            call(twin, args)
        else:
            results = stream(twin, args, batch_size, ahead=0, ordered=True)
            collections.deque(results, maxlen=0)
        return counter.result()
