"""Loops as single kernels of a CPU: compiled by XLA as one function, without a call per operation.

XLA:CPU runs a program as a list of kernels, each of which costs a fraction of a microsecond to
begin. A step of a loop that does a few hundred operations for a few lanes takes as long as its
kernels take to begin. A computation that is called with the attribute `xla_cpu_small_call` is one
kernel instead, loops and conditionals in it included. XLA itself sets the attribute on loops whose
step touches less than 1 KiB (its pass `small_while_loop_hoisting`); here it is set on larger ones.

In such a kernel XLA has no code for products of matrices, for sorting, for scattering to several
places, or for calls of other libraries, by which it reduces arrays of some thousand elements: it
refuses to compile them. Nor is there anything to gain where arrays are large. So a program is
looked through before (`runs_in_kernel`), and small products of matrices are written as sums
(`with_sums`). What `vmap` would make of a program afterwards, nobody has looked through: there the
kernel gives way to another function of the same values (`in_kernel`).

Where the attribute is not known, as on other devices, the call is one like any other. It is not
documented, and what XLA cannot compile may abort the process: with versions of jaxlib newer than
`NEWEST`, which nobody has tried, there are no such kernels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jedbatch._jaxpr.interpret import as_call, inner_programs, names_in, with_programs
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.versions import (
    CALLS,
    Equation,
    with_equations,
    without_consts,
)
from jedbatch._support.types import Array

NEWEST = (0, 12)  # version of jaxlib, which holds XLA, with which kernels were tried
MOST_ELEMENTS = 512  # of a value in a kernel; XLA reduces 2048 there, and 8192 not
MOST_PRODUCTS = 32  # of a product of matrices of a lane, to be written as a sum

_OPERATIONS = names_in(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz",
    "convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt",
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not",
    "or population_count pow real rem round rsqrt select_n shift_left shift_right_arithmetic",
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor",
    "argmax argmin bitcast_convert_type broadcast_in_dim concatenate cummax cummin cumprod cumsum",
    "dynamic_slice dynamic_update_slice expand_dims gather iota pad reduce_and reduce_max",
    "reduce_min reduce_or reduce_prod reduce_sum reshape rev slice split squeeze stack transpose",
    "unstack",
    "random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32",
    "nonbatchable select_if_vmap unvmap_all unvmap_any unvmap_max",
)
_CONTROL = frozenset({"while", "scan", "cond", *CALLS})
_KINDS = "biuf"  # of numbers: truth values, whole ones and floating-point ones


def is_tried() -> bool:
    """Returns whether kernels were tried with the jaxlib that is installed."""
    return tuple(map(int, jax.lib.__version__.split(".")[:2])) <= NEWEST


def runs_in_kernel(program: Any) -> bool:
    """Returns whether a program, closed or open, is one that XLA:CPU compiles as one kernel."""
    jaxpr = without_consts(program)
    # XLA makes constants of arrays without elements, and no result depends on these operands then.
    operands = all(v.aval.size and _is_of_known_kind(v) for v in jaxpr.invars)
    return operands and all(map(_runs, jaxpr.eqns))


def _runs(eqn: Equation) -> bool:
    if eqn.effects or not all(map(_is_known, (*eqn.invars, *eqn.outvars))):
        return False
    match eqn.primitive.name:
        case "dot_general":
            return not _is_of_matrices(eqn)
        case "scatter":
            indices = eqn.invars[1].aval
            return math.prod(indices.shape[:-1]) == 1
        case "vprim":  # of Equinox: what sets a slice of an array does so at one place for all
            place = eqn.params["__batch_axes"][-1]
            return str(eqn.params["prim"]) == "maybe_set" and place is None
        case name if name in _CONTROL:
            return all(map(runs_in_kernel, inner_programs(eqn)))
        case name:
            return name in _OPERATIONS


def _is_known(atom: Any) -> bool:
    """Returns whether a value is small, and its elements of a kind that kernels compute with."""
    return atom.aval.size <= MOST_ELEMENTS and _is_of_known_kind(atom)


def _is_of_known_kind(atom: Any) -> bool:
    dtype = atom.aval.dtype
    return is_key(dtype) or (np.dtype(dtype).kind in _KINDS and np.dtype(dtype) != np.float16)


def _is_of_matrices(eqn: Equation) -> bool:
    """Returns whether both operands have rows that are not contracted."""
    contracted, batched = eqn.params["dimension_numbers"]
    rows = [
        math.prod(n for i, n in enumerate(v.aval.shape) if i not in {*inside, *outside})
        for v, inside, outside in zip(eqn.invars, contracted, batched, strict=True)
    ]
    return min(rows) > 1


# --- products as sums ---


def with_sums(program: Any) -> Any:
    """Returns a program of one lane with small products of vectors and matrices as sums.

    Mapped over lanes, a product with a matrix that all share would be one of two matrices.
    """
    eqns = []
    for eqn in without_consts(program).eqns:
        if eqn.primitive.name == "dot_general" and _is_small(eqn):
            eqns.append(_as_sum(eqn))
        else:
            eqns.append(with_programs(eqn, with_sums))
    return with_equations(program, eqns)


def _is_small(eqn: Equation) -> bool:
    (x, y), (z,) = eqn.invars, eqn.outvars
    of_one_kind = x.aval.dtype == y.aval.dtype == z.aval.dtype
    (inside, _), _ = eqn.params["dimension_numbers"]
    products = z.aval.size * math.prod(x.aval.shape[i] for i in inside)
    return of_one_kind and products <= MOST_PRODUCTS


def _as_sum(eqn: Equation) -> Any:
    """Returns a product as the call of a function that multiplies and adds."""
    (inside, also_inside), (batched, also_batched) = eqn.params["dimension_numbers"]

    def product(x: Array, y: Array) -> Array:
        rows = [i for i in range(x.ndim) if i not in {*inside, *batched}]
        columns = [i for i in range(y.ndim) if i not in {*also_inside, *also_batched}]
        x = lax.transpose(x, [*batched, *rows, *inside])
        y = lax.transpose(y, [*also_batched, *columns, *also_inside])
        start, end = len(batched), len(batched) + len(rows)
        x = lax.expand_dims(x, range(end, end + len(columns)))
        y = lax.expand_dims(y, range(start, end))
        return (x * y).sum(range(end + len(columns), x.ndim))

    return as_call(eqn, product)


# --- calls ---


def in_kernel(
    run: Callable[..., Sequence[Array]], otherwise: Callable[..., Sequence[Array]]
) -> Callable[..., list[Array]]:
    """Returns a function that runs another one in one kernel.

    Args:
      run: from arrays to arrays; its program has been looked through.
      otherwise: computes the same from the same, and is what is mapped.
    """

    def apart(*args: Array) -> Sequence[Array]:
        with set_xla_metadata(xla_cpu_small_call=None, inlineable=None):  # not of what is inside
            return run(*args)

    @jax.custom_batching.custom_vmap
    def called(*args: Array) -> Sequence[Array]:
        # XLA would put constants into the kernel, which then no longer reads them: see `reading`.
        args = lax.optimization_barrier(args)
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            return jax.jit(apart)(*args)

    def over_instances(size: int, in_batched: Sequence[bool], *args: Array) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        outs = jax.vmap(otherwise, axes, axis_size=size)(*args)
        return outs, [True] * len(outs)

    called.def_vmap(over_instances)
    return lambda *args: list(called(*args))


def reading(number: Array, arrays: Sequence[Array]) -> Array:
    """Returns a number that is not negative, computed in such a way that all arrays are read.

    Where a kernel has an operand of which nothing depends, such as a constant that a loop carries
    and no result needs, XLA aborts the process. It does not know that the number is not negative.

    Args:
      number: int32[], 0 or more.
      arrays: of kinds that kernels compute with.
    """
    sums = []
    for x in arrays:
        numbers = jax.random.key_data(x) if is_key(x.dtype) else x
        first = lax.slice(numbers, [0] * numbers.ndim, [min(1, n) for n in numbers.shape])
        sums.append(first.astype(number.dtype).sum(dtype=number.dtype))
    return jnp.where(number < 0, sum(sums, number), number)


def rows_at(arrays: Sequence[Array], place: Array) -> list[Array]:
    """Returns the row of each array at one place, by slices."""
    return [lax.dynamic_index_in_dim(x, place, 0, keepdims=False) for x in arrays]


def with_rows_at(arrays: Sequence[Array], rows: Sequence[Array], place: Array) -> list[Array]:
    """Returns arrays with other rows at one place, by slices."""
    pairs = zip(arrays, rows, strict=True)
    return [lax.dynamic_update_index_in_dim(x, row, place, 0) for x, row in pairs]


def where_one(flag: Array, xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
    """Returns the first values if a flag is set, the others if not."""
    return [jnp.where(flag, x, y) for x, y in zip(xs, ys, strict=True)]
