"""Arrays that are filled with a number while something is recorded, such as `jnp.zeros(8)`.

A function often begins with states of zeros, made anew for every instance. Nothing symbolic is in
them, so they are computed once and are constants. JAX makes one in two steps, the number as an
array and that repeated; each comes as a primitive with its parameters, and what is known of those
has to be found again. This is the short way to it: what a step gave is kept under its parameters
as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import set_current_trace

from jedbatch._record.cell import pause
from jedbatch._record.identity.primitives import identity_of_constant
from jedbatch._record.operations.symbols import RecorderLike
from jedbatch._support.types import Array, AxisSize, Leaf

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
    """Returns (the key of a step, see `filling_key`; the array that it gives, or None).

    An array is repeated by NumPy, since JAX would compile each shape.
    """
    key = filling_key(primitive, operands, params)
    found = None if key is None else recorder.registry.constants.get(key)
    if found is None:
        (x,) = operands if key is not None else (None,)
        if primitive.name != "broadcast_in_dim" or not isinstance(x, jax.Array) or x.weak_type:
            return key, None
        with pause(), jax.ensure_compile_time_eval():
            array = jnp.asarray(np.full(params["shape"], np.asarray(x)))
        found = recorder.registry.constants[key] = [array, x]
    recorder.trust(operands[0])
    return key, found[0]


def filled(recorder: Any, x: Array, told: Mapping[int, AxisSize]) -> Leaf | None:
    """Returns a symbol for an array that is filled with a number; None if it is another one.

    Args:
      recorder: of the instance that makes it.
      x: the array.
      told: lengths with the extents that its axes have in place of them.
    """
    values = np.asarray(x)
    if not values.size or (values != values.flat[0]).any():
        return None
    with set_current_trace(recorder):  # there is none while an operation is processed
        return jnp.full([told.get(n, n) for n in x.shape], values.flat[0], x.dtype)
