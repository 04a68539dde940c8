"""Arrays that are filled with a number while something is recorded, such as `jnp.zeros(8)`.

A function often begins with states of zeros, made anew for every instance. Nothing symbolic is in
them, so they are computed once and are constants. JAX makes one in two steps, the number as an
array and that repeated; each comes as a primitive with its parameters, and what is known of those
has to be found again. This is the short way to it: what a step gave is kept under its parameters
as they are.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from jedbatch._record.keys import identity_of_constant
from jedbatch._record.symbols import RecorderLike
from jedbatch._support.types import Array, Leaf

# The parameters by which each primitive is known; all others have to be None.
FILLING = {
    "broadcast_in_dim": ("shape", "broadcast_dimensions"),
    "convert_element_type": ("new_dtype", "weak_type"),
}


def filling_key(primitive: Any, operands: Sequence[Leaf], params: dict[str, Any]) -> Any:
    """Returns what the result of a step depends on; None if this is none of a number.

    Args:
      primitive: of the step.
      operands: what it reads.
      params: its parameters.
    """
    names = FILLING.get(primitive.name)
    if names is None or len(operands) != 1 or isinstance(operands[0], Tracer):
        return None
    x = operands[0]
    if isinstance(x, jax.Array) and x.ndim:
        return None
    values = [primitive.name]
    for name, value in params.items():
        if name not in names:
            if value is not None:
                return None
        elif type(value) is tuple:
            if not all(type(n) is int for n in value):  # extents may be symbols
                return None
            values.append(value)
        else:
            values.append(value)
    return "filled", identity_of_constant(x), *values


def known_filling(
    recorder: RecorderLike, primitive: Any, operands: Sequence[Leaf], params: dict[str, Any]
) -> tuple[Any, Array | None]:
    """Returns (the key of a step, see `filling_key`; the array that it gave before, or None)."""
    key = filling_key(primitive, operands, params)
    found = None if key is None else recorder.registry.constants.get(key)
    if found is None:
        return key, None
    recorder.trust(operands[0])
    recorder.computed[id(found[0])] = found[0]
    return key, found[0]
