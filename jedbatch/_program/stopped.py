"""Loops that were stopped (`max_steps`): the nodes they are in, and the error that names them."""

from collections.abc import Callable, Sequence

import numpy as np

from jedbatch._graph.types import NodeType
from jedbatch._jaxpr.transfers import fetched
from jedbatch._program.placement import Placement
from jedbatch._program.signature import Signature
from jedbatch._support.types import Array
from jedbatch.errors import UnfinishedLoopError

SHOWN = 8  # instances that are named


def has_bounds(signature: Signature) -> bool:
    """Returns whether loops of a program have a bound."""
    return any(kernel.is_bounded for kernel in signature.kernels)


def check_plan(
    signature: Signature, flags: Sequence[Sequence[Array]], placed: Placement | None
) -> None:
    """Raises `UnfinishedLoopError` if a loop was stopped while a plan ran.

    Args:
      signature: of the program.
      flags: of each of its kernels bool[lanes], or nothing.
      placed: the nodes of the plan; None if they are not known, so that none is named.
    """
    check(signature, flags, lambda kernel, lanes: _instances_of(kernel, lanes, placed))


def check_shards(
    signature: Signature,
    flags: Sequence[Sequence[Array]],
    shards: Sequence[tuple[Placement, np.ndarray] | None],
) -> None:
    """Raises `UnfinishedLoopError` if a loop was stopped in a shard of a plan.

    Args:
      signature: of the program.
      flags: of each of its kernels bool[shards, lanes], or nothing.
      shards: of each its nodes, and the numbers of its instances; None if they are not known, as
        those of other processes, whose instances are named there.
    """

    def instances_of(kernel: object, lanes: np.ndarray) -> np.ndarray | None:
        named, unnamed = [np.zeros(0, np.int64)], False
        for own, known in zip(lanes, shards, strict=True):
            found = _instances_of(kernel, own, None if known is None else known[0])
            if known is None or found is None:
                unnamed |= found is None
            else:
                named.append(known[1][found])
        numbers = np.concatenate(named)
        return None if unnamed and not len(numbers) else numbers

    check(signature, flags, instances_of)


def _instances_of(kernel: object, lanes: np.ndarray, placed: Placement | None) -> np.ndarray | None:
    """Returns the instances of the lanes of a kernel that are marked; None if they are not known.

    Args:
      kernel: whose lanes they are.
      lanes: bool[lanes].
      placed: the nodes; None if they are not known.
    """
    if placed is None:
        return None if lanes.any() else np.zeros(0, np.int64)
    if kernel not in placed.kernels:
        return np.zeros(0, np.int64)
    nodes = placed.nodes[placed.type_ids[placed.kernels.index(kernel)]]
    nodes = nodes[lanes[placed.layout.lane[nodes]]]
    return np.searchsorted(placed.graph.node_ptr, nodes, side="right") - 1


def check(
    signature: Signature,
    flags: Sequence[Sequence[Array]],
    instances_of: Callable[[object, np.ndarray], np.ndarray | None],
) -> None:
    """Raises `UnfinishedLoopError` if a loop was stopped.

    Args:
      signature: of the program.
      flags: of each of its kernels bool[lanes], or nothing.
      instances_of: from a kernel and bool[lanes] to the instances whose lanes these are; None where
        lanes are marked and the instances are not known.
    """
    for kernel, of_kernel in zip(signature.kernels, flags, strict=True):
        for lanes in of_kernel:
            instances = instances_of(kernel, np.asarray(fetched(lanes)))
            if instances is None or len(instances):
                raise error_of(kernel.max_steps, kernel.node_type, instances)


def error_of(
    max_steps: int | None, node_type: NodeType | str, instances: np.ndarray | None
) -> UnfinishedLoopError:
    """Returns the error for a loop that was stopped in some instances; None if not known."""
    found = None if instances is None else tuple(np.unique(instances).tolist())
    where = "" if found is None else f", in {shown_instances(found)}"
    return UnfinishedLoopError(
        f"`batch` got max_steps={max_steps}, and a loop in `{node_type}` was to go on after that "
        f"many steps{where}. Expected loops that end before; give a larger max_steps, or bound the "
        "loop in its condition and return whether it has converged.",
        () if found is None else found,
    )


def shown_instances(instances: Sequence[int]) -> str:
    """Returns the numbers of instances in words, of the first few of many."""
    if len(instances) == 1:
        return f"instance {instances[0]}"
    more = f" and {len(instances) - SHOWN} others" if len(instances) > SHOWN else ""
    return f"instances {', '.join(map(str, instances[:SHOWN]))}{more}"
