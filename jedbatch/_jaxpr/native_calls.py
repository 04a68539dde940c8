"""Functions of the compiled core that XLA:CPU calls in programs.

A call starts in less than a microsecond and compiles in no time, where XLA compiles each of its own
operations by itself, in some 4 ms. Programs have them where the core is there (`_support.native`);
elsewhere operations of XLA take their place, on other devices, for numbers of less than a byte, and
in exported programs, which other processes run, unless `calls_in_exports` says that these have the
core. Compiled programs that are stored need this module where they are loaded.

Source: `jax.ffi`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jedbatch._support import native
from jedbatch._support.types import Dtype


class _Exports(threading.local):
    """Whether programs that this thread exports have calls."""

    have_calls = False


_exports = _Exports()


@contextlib.contextmanager
def calls_in_exports() -> Iterator[list[str]]:
    """Inside, programs that are exported call the core; gives the names by which XLA knows it.

    They run where the core is of the same revision. No names where there is no core.
    """
    core, before = native.core(), _exports.have_calls
    _exports.have_calls = True
    try:
        yield [] if core is None else [target_of(name) for name in core.xla_calls()]
    finally:
        _exports.have_calls = before


def target_of(name: str) -> str:
    """Returns the name by which XLA knows a function of the core."""
    return f"jedbatch_{name}_{native.REVISION}"


@functools.cache
def _register(core: ModuleType) -> frozenset[str]:
    """Makes the functions of the core known to XLA; returns their names."""
    calls = core.xla_calls()
    for name, function in calls.items():
        jax.ffi.register_ffi_target(target_of(name), function, platform="cpu")
    return frozenset(calls)


@functools.cache
def has_whole_bytes(dtype: Dtype) -> bool:
    """Returns whether each number of a dtype has bytes of its own, so that rows can be copied.

    XLA packs several numbers of 1, 2, 4 or 6 bits into a byte.
    """
    if not isinstance(dtype, np.dtype) or dtype.isbuiltin == 1:  # keys, and NumPy's own
        return isinstance(dtype, np.dtype)
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return dtype == jnp.bfloat16 or info(dtype).bits == 8


def register_lowering(
    primitive: Primitive,
    name: str,
    operations: Callable,
    attributes: Callable[..., dict[str, Any]],
    is_wanted: Callable[..., bool] = lambda **_: True,
) -> None:
    """Says how a primitive is compiled: as a call where that can be, else as operations of XLA.

    Args:
      primitive: what is compiled.
      name: of the function of the core.
      operations: from operands and parameters to results, by operations of XLA.
      attributes: from parameters to further arguments of `jax.ffi.ffi_lowering`, those under
        `attributes` excepted, which the function gets.
      is_wanted: from parameters to whether the function is to be called now.
    """
    otherwise = mlir.lower_fun(operations, multiple_results=primitive.multiple_results)

    def lower_on_cpu(ctx, *operands, **params):
        is_exported = ctx.module_context.lowering_parameters.for_export
        core = native.core() if not is_exported or _exports.have_calls else None
        if core is None or name not in _register(core) or not is_wanted(**params):
            return otherwise(ctx, *operands, **params)
        if not all(has_whole_bytes(x.dtype) for x in (*ctx.avals_in, *ctx.avals_out)):
            return otherwise(ctx, *operands, **params)
        given = attributes(**params)
        rule = jax.ffi.ffi_lowering(
            target_of(name), operand_output_aliases=given.pop("aliases", None)
        )
        return rule(ctx, *operands, **given)

    mlir.register_lowering(primitive, otherwise)
    mlir.register_lowering(primitive, lower_on_cpu, platform="cpu")


def register_call(primitive: Primitive, operations: Callable) -> None:
    """Says all of a primitive of one result and no parameters, but its type.

    Where the compiled core is there, it is a call of the function of the primitive's name; its
    tangents, and what it is under `vmap`, are those of operations of XLA.
    """

    def tangents(primals: Any, moving: Any) -> Any:
        given = map(ad.instantiate_zeros, moving)
        return primitive.bind(*primals), jax.jvp(operations, primals, tuple(given))[1]

    primitive.def_impl(operations)
    register_lowering(primitive, primitive.name, operations, dict)
    ad.primitive_jvps[primitive] = tangents
    batching.primitive_batchers[primitive] = over_lanes_of(operations)


def over_lanes_of(operations: Callable) -> Callable:
    """Returns the rule of `vmap` for a primitive: that of operations of XLA."""

    def rule(args: Any, axes: Any, **params: Any) -> Any:
        outs = jax.vmap(functools.partial(operations, **params), axes)(*args)
        return outs, jax.tree.map(lambda _: 0, outs)

    return rule


if (_core := native.core()) is not None:
    _register(_core)
