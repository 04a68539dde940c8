"""The cores of a CPU as devices of a mesh, one for each shard of a minibatch.

XLA:CPU runs the operations of a loop one after the other, and splits only large ones over several
threads. Those of a chunk are small: a program for one device seldom uses a second core. Two shards
of a minibatch have nothing in common but the shared values, so each can run on a core of its own.
"""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jedbatch import checks

AXIS = "cores"
FLAG = "xla_force_host_platform_device_count"  # of XLA, which goes before what JAX is told


def cores(count: int | None = None) -> Mesh:
    """Makes a mesh of devices on the CPU, one for each core, to cut minibatches over.

    A program for one device seldom uses a second core. With a mesh each device runs the same
    program on a part of the minibatch, in a thread of its own: `batched.plan(params, instances,
    mesh=jedbatch.cores())`. As on other devices, gradients are summed up once, at the end.

    JAX makes its devices when it first computes something, and never again, so call this before.
    Take fewer devices than cores if each would get only a few instances.

    Args:
      count: devices; None for as many as cores that this process may use.

    Returns:
      A `jax.sharding.Mesh` with one axis, "cores", of so many devices of this process.

    Raises:
      TypeError, ValueError: `count` is no whole number of at least 1.
      RuntimeError: JAX has made fewer devices already.

    Examples:
      >>> import jedbatch
      >>> jedbatch.cores(1).shape["cores"]
      1
    """
    count = _usable() if count is None else checks.whole("cores", "count", count, 1)
    _ask_for(count)
    devices = jax.local_devices(backend="cpu")
    if len(devices) < count:
        raise RuntimeError(
            f"`cores` was asked for {count} devices on the CPU, and JAX has made {len(devices)} "
            "already; expected to be called before JAX computes anything, and no other number in "
            f"`jax_num_cpu_devices` or `--{FLAG}`. Call it right after `import jedbatch`, or set "
            f'`jax.config.update("jax_num_cpu_devices", {count})` there.'
        )
    return Mesh(np.array(devices[:count]), (AXIS,))


def _usable() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ask_for(count: int) -> None:
    """Asks JAX for so many devices on the CPU, unless it has been asked for some before."""
    config: Any = jax.config  # its options are not typed
    is_asked = config.jax_num_cpu_devices > 0 or FLAG in os.environ.get("XLA_FLAGS", "")
    if count == 1 or is_asked:
        return
    try:
        config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # it has made them
        return
