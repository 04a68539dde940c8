"""Arrays that are written before they are read, which nobody needs to fill with zeros first.

XLA:CPU knows no such arrays: it fills all memory that a program asks for, and has the kernel map
pages that are never used. So they come from a function that writes nothing (see
`_jaxpr.native_calls`); on Linux it asks for huge pages, which the kernel maps faster. They are
zeros where there is no such function, and under `jax_debug_nans`, which looks at all that a program
returns.
"""

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching

from jedbatch._jaxpr.configuration import finds_faults
from jedbatch._jaxpr.native_calls import register_lowering
from jedbatch._support.types import Array, Dtype

NAME = "uninitialized"

uninitialized_p = Primitive("uninitialized")
unfilled_p = Primitive("unfilled")


def uninitialized(
    shape: tuple[int, ...],
    dtype: Dtype,
    name: str,
    number: Array | None = None,
    filled: Array | None = None,
) -> Array:
    """Returns an array of any values.

    Args:
      shape: of the array.
      dtype: of its elements.
      name: tells it apart from others of its program, which XLA would take for the same one and
        copy.
      number: int32[], tells it apart from others of its name, which is that of all uses of a
        function; None if there is one.
      filled: int32[], how many rows will be written: those behind them are zeros; None if all are,
        or nobody reads the others.
    """
    given = [] if number is None else [number]
    kind = {"shape": shape, "dtype": np.dtype(dtype), "name": name}
    if filled is None:
        return uninitialized_p.bind(*given, **kind)
    return unfilled_p.bind(filled, *given, **kind)


def _zeros(*_, shape, dtype, name):
    return jnp.zeros(shape, dtype)


def _type(*_, shape, dtype, name):
    return ShapedArray(shape, dtype)


def _over_lanes(args, axes, **kind):
    return _zeros(**kind), None


for _primitive in (uninitialized_p, unfilled_p):
    _primitive.def_impl(_zeros)
    _primitive.def_abstract_eval(_type)
    batching.primitive_batchers[_primitive] = _over_lanes
    register_lowering(
        _primitive,
        _primitive.name,
        _zeros,
        lambda *, name, **_: {"name": name},
        is_wanted=lambda **_: not finds_faults(),
    )
