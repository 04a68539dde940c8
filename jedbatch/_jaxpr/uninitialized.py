"""Arrays that are written before they are read, which nobody needs to fill with zeros first.

XLA:CPU knows no such arrays: it fills all memory that a program asks for, and has the kernel map
pages that are never used. So they come from a function that does
nothing, where the compiled core (`_support.native`) is there; elsewhere they are zeros, and also in
exported programs, which other processes run, and under `jax_debug_nans`, which looks at all that a
program returns. Compiled programs that are stored need this module where they are loaded.

Source: `jax.ffi`.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jedbatch._jaxpr.configuration import finds_faults
from jedbatch._support import native
from jedbatch._support.types import Array, Dtype

TARGET = "jedbatch_uninitialized"

uninitialized_p = Primitive("uninitialized")


def uninitialized(shape: tuple[int, ...], dtype: Dtype, name: str) -> Array:
    """Returns an array of any values.

    Args:
      shape: of the array.
      dtype: of its elements.
      name: tells it apart from others of its program, which XLA would take for the same one and
        copy.
    """
    return uninitialized_p.bind(shape=shape, dtype=np.dtype(dtype), name=name)


@uninitialized_p.def_impl
def _zeros(*, shape, dtype, name):
    return jnp.zeros(shape, dtype)


@uninitialized_p.def_abstract_eval
def _type(*, shape, dtype, name):
    return ShapedArray(shape, dtype)


_lower_to_zeros = mlir.lower_fun(_zeros, multiple_results=False)


@functools.cache
def _register(core: ModuleType) -> None:
    """Makes the function that does nothing known to XLA."""
    jax.ffi.register_ffi_target(TARGET, core.uninitialized_handler(), platform="cpu")


def _lower_on_cpu(ctx, *, shape, dtype, name):
    is_exported = ctx.module_context.lowering_parameters.for_export
    core = native.core()
    if core is None or is_exported or finds_faults():
        return _lower_to_zeros(ctx, shape=shape, dtype=dtype, name=name)
    _register(core)
    return jax.ffi.ffi_lowering(TARGET)(ctx, name=name)


if (_core := native.core()) is not None:
    _register(_core)
mlir.register_lowering(uninitialized_p, _lower_to_zeros)
mlir.register_lowering(uninitialized_p, _lower_on_cpu, platform="cpu")
