"""What `Batched.warm` runs so that programs are compiled."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch import checks
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._program.plan import Plan
from jedbatch._record.instance_arrays import array_type
from jedbatch._support.types import Leaf, PyTree

Instance = TypeVar("Instance")


def check_values(name: str, leaves: Sequence[Leaf]) -> None:
    """Raises an error if shared arguments are shapes or traced: programs are run on them.

    Args:
      name: of the function, for messages.
      leaves: of the shared arguments.
    """
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
            raise TypeError(
                f"`warm` got {checks.shown(leaf)} among the shared arguments of `{name}`; expected "
                "arrays, since programs are compiled for where these are. Call it outside of "
                "transformations of JAX, with parameters as they will be."
            )


def check_possible(
    name: str, leaves: Sequence[Leaf], plans: Sequence[Plan] | None, gradient: bool, calls: bool
) -> None:
    """Raises an error if there is nothing to plan, or nothing to take gradients with respect to.

    Args:
      name: of the function, for messages.
      leaves: of the shared arguments.
      plans: of minibatches; None if the function decides on values.
      gradient: as `Batched.warm` got it.
      calls: as it got that.
    """
    if plans is None and not calls:
        raise ValueError(
            f"`warm` got calls=False, and `{name}` decides on values, which are read while they "
            "are computed: there is no plan to apply. Leave `calls` out."
        )
    if gradient and not moves([leaves, [plan.inputs for plan in plans or ()]]):
        raise ValueError(
            f"`warm` got gradient=True, and neither the shared arguments of `{name}` nor its "
            "instances have floats; expected something to take gradients with respect to."
        )


def cut_evenly(instances: Sequence[Instance], size: int) -> list[list[Instance]]:
    """Returns minibatches of exactly `size` instances, which together hold all of them.

    The last one has some that another has if they are not a multiple; all of them repeat if there
    are fewer.
    """
    count = len(instances)
    if count < size:
        return [[instances[i % count] for i in range(size)]]
    starts = [*range(0, count - size, size), count - size]
    return [list(instances[i : i + size]) for i in starts]


def one_of_each(minibatches: Sequence[Any], plans: Sequence[Plan]) -> list[Any]:
    """Returns one minibatch for every program that their plans run."""
    chosen: dict[Any, Any] = {}
    for minibatch, plan in zip(minibatches, plans, strict=True):
        static = plan.static
        chosen.setdefault((static.signature, static.reverse, static.stages), minibatch)
    return list(chosen.values())


def num_lanes(plan: Plan) -> int:
    """Returns how many lanes a plan runs."""
    assert plan.host is not None
    return sum(plan.host.placed.lanes)


def pull_back(run: Callable[[Any], PyTree], values: PyTree) -> None:
    """Runs a function of arrays, and its reverse on zeros.

    Args:
      run: the function.
      values: a pytree of arrays, of which it is differentiated with respect to floats.
    """
    leaves, structure = jax.tree.flatten(values)
    moving = [i for i, x in enumerate(leaves) if has_gradient(array_type(x)[1])]

    def of_moving(moving_leaves: Sequence[Any]) -> PyTree:
        full = list(leaves)
        for i, x in zip(moving, moving_leaves, strict=True):
            full[i] = x
        return run(jax.tree.unflatten(structure, full))

    results, reverse = jax.vjp(of_moving, [jnp.asarray(leaves[i]) for i in moving])
    reverse(jax.tree.map(_zero_cotangent, results))


def _zero_cotangent(x: Any) -> Any:
    if has_gradient(x.dtype):
        return jnp.zeros(x.shape, x.dtype)
    return np.zeros(x.shape, jax.dtypes.float0)


def moves(values: PyTree) -> bool:
    """Returns whether there is something to take gradients with respect to."""
    return any(has_gradient(array_type(x)[1]) for x in jax.tree.leaves(values))


def stack_rows(instances: Sequence[PyTree]) -> PyTree:
    """Returns the arrays whose rows some instances are."""

    def stacked(*rows: Any) -> Any:
        return np.stack(rows) if isinstance(rows[0], np.ndarray) else jnp.stack(rows)

    return jax.tree.map(stacked, *instances)
