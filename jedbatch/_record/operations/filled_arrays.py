"""Arrays that are filled with a number while something is recorded, such as `jnp.zeros(8)`.

A function often begins with states of zeros, made anew for every instance. Nothing symbolic is in
them, so they are computed once and are constants. JAX makes one in two steps, the number as an
array and that repeated; each comes as a primitive with its parameters, and what is known of those
has to be found again. This is the short way to it: what a step gave is kept under its parameters
as they are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from jedbatch._record.identity.primitives import identity_of_constant
from jedbatch._record.operations.symbols import RecorderLike
from jedbatch._support.types import Array, Leaf

_FILLING = frozenset({"broadcast_in_dim", "convert_element_type"})
_NUMBERS = frozenset({bool, int, float, complex})
_WHOLE = frozenset({int})


def filling_key(primitive: Any, operands: Sequence[Leaf], params: dict[str, Any]) -> Any:
    """Returns what the result of a step depends on; None if this is none of a number.

    Arrays of JAX are known by their ids, so what is kept under a key has to keep them alive.

    Args:
      primitive: of the step.
      operands: what it reads.
      params: its parameters.
    """
    name = primitive.name
    if name not in _FILLING or len(operands) != 1 or params["sharding"] is not None:
        return None
    (x,) = operands
    if isinstance(x, Tracer):
        return None
    is_number = type(x) in _NUMBERS
    if not is_number and getattr(x, "ndim", None) != 0:
        return None
    by_value = is_number or isinstance(x, np.generic | np.ndarray)
    identity: Any = identity_of_constant(x) if by_value else id(x)
    if name == "convert_element_type":
        return name, identity, params["new_dtype"], params["weak_type"]
    shape = params["shape"]
    if not _WHOLE.issuperset(map(type, shape)):  # extents may be symbols
        return None
    return name, identity, shape, params["broadcast_dimensions"]


def known_filling(
    recorder: RecorderLike, primitive: Any, operands: Sequence[Leaf], params: dict[str, Any]
) -> tuple[Any, Array | None]:
    """Returns (the key of a step, see `filling_key`; the array that it gave before, or None)."""
    key = filling_key(primitive, operands, params)
    found = None if key is None else recorder.registry.constants.get(key)
    if found is None:
        return key, None
    recorder.trust(operands[0])
    return key, found[0]
