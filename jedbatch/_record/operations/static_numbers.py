"""Numbers that JAX keeps as parameters of operations, as data: lengths of loops, and exponents.

`lax.fori_loop(0, n, step, x)` is a scan of n steps, and `x**n` a power whose exponent is constant.
With an n of the instance either would be another type for each n. As long as few have been met,
they are, since XLA computes with constants best. Then the steps of such a loop are nodes, which run
in batches with those of other instances, however many each of them has; and exponents are operands.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun, set_current_trace

from jedbatch._graph.operations import PrimitiveKey
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import extents_told, is_ragged
from jedbatch._jaxpr.versions import scan_parts
from jedbatch._record.identity.assumptions import MAX_CONSTANT_NUMBERS
from jedbatch._record.operations.symbols import RecorderLike, Shared, Symbol, Value
from jedbatch._record.types.shared_operands import MAX_SIZE
from jedbatch._support.types import AxisSize, Leaf

MAX_STEPS = 4096  # longer loops have a type for each length
STATIC = {"scan": "length", "integer_pow": "y"}


def with_data(
    recorder: RecorderLike, primitive: Any, values: Sequence[Leaf], params: dict[str, Any]
) -> list[Leaf] | None:
    """Returns the results of an operation whose static number differs from instance to instance.

    None if the number is to stay a parameter.

    Args:
      recorder: records the operations that are performed in its place.
      primitive: one of `STATIC`.
      values: what it reads.
      params: its parameters.
    """
    name = STATIC[primitive.name]
    number = params[name]
    extent = extents_told(recorder).get(number) if primitive.name == "scan" else None
    if extent is not None and sum(parts := _parts(primitive, values, params)) == len(values):
        return _scanned(recorder, values, params, parts, extent)
    if any(isinstance(x, jax.core.Tracer) and is_ragged(x.shape) for x in values):
        return None
    if primitive.name == "scan":
        if not isinstance(number, int) or number > MAX_STEPS:
            return None
    elif not jnp.issubdtype(values[0].dtype, jnp.inexact):
        return None
    registry = recorder.registry
    key = registry.keys.primitive_key(primitive, params | {name: None})
    about = "parameter", key.skeleton
    if registry.assumptions.holds("variants", about, number, MAX_CONSTANT_NUMBERS):
        return None
    parts = _parts(primitive, values, params) if primitive.name == "scan" else (0, 1)
    read = _with_values(recorder, values, range(parts[0], sum(parts)))
    if read is None:
        return None
    with set_current_trace(recorder):
        if primitive.name == "integer_pow":
            return [lax.pow(read[0], np.int32(number))]
        call = jaxpr_as_fun(params["jaxpr"])
        step = lambda *args: recorder.perform("scan_step", key, call, args)  # noqa: E731
        return _unrolled(step, read, params, parts)


def _with_values(
    recorder: RecorderLike, values: Sequence[Leaf], candidates: range
) -> Sequence[Leaf] | None:
    """Returns what an operation reads, of which something is a value of the instance.

    If nothing is, small arrays among the candidates are made values; None if there are none.
    """
    symbols = [recorder.symbol(x) if isinstance(x, jax.core.Tracer) else x for x in values]
    if any(type(x) is Value for x in symbols):
        return symbols
    small = [k for k in candidates if np.ndim(symbols[k]) and np.size(symbols[k]) <= MAX_SIZE]
    for k in small:
        x = symbols[k]
        symbols[k] = recorder.shared_value(x) if type(x) is Shared else recorder.input(x)
    return symbols if small else None


def lifted_numbers(
    recorder: RecorderLike, key: PrimitiveKey, args: Sequence[Leaf]
) -> tuple[int, ...]:
    """Positions of the numbers in the bodies of an operation that are operands.

    None are where nothing is symbolic, or where an extent differs from instance to instance.
    """
    symbols = [x for x in args if isinstance(x, Symbol)]
    if not symbols or key.is_ragged or any(is_ragged(x.aval.shape) for x in symbols):
        return ()
    return recorder.registry.number_operands.positions(key.skeleton, key.numbers)


def row_of_weight(recorder: RecorderLike, x: Leaf, params: Mapping[str, Any]) -> int | None:
    """Returns which row of a table, or element of a vector, a slice of a weight is; None if none.

    Its number may be the instance's.

    Args:
      recorder: records the look-up.
      x: what a slice is taken of.
      params: of the slice.
    """
    if params["strides"] is not None or is_ragged(x.shape) or len(x.shape) > 2:
        return None
    starts, limits = params["start_indices"], params["limit_indices"]
    is_row = limits[0] - starts[0] == 1 < x.shape[0]
    if not is_row or (starts[1:], limits[1:]) != ((0,) * len(x.shape[1:]), x.shape[1:]):
        return None
    is_weight = isinstance(x, jax.core.Tracer) or recorder.is_weight_reached(x)
    return starts[0] if is_weight and isinstance(recorder.symbol(x), Shared) else None


def _parts(primitive: Any, values: Sequence[Leaf], params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a scan (see `scan_parts`)."""
    kinds = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in values]
    traced = jax.make_jaxpr(lambda *xs: primitive.bind(*xs, **params))(*kinds)
    return scan_parts(traced.eqns[-1])


def _scanned(
    recorder: RecorderLike,
    values: Sequence[Leaf],
    params: dict[str, Any],
    parts: tuple[int, int],
    extent: AxisSize,
) -> list[Leaf]:
    """Returns the results of a scan of no rows whose number of steps is an extent."""
    num_consts, num_carry = parts
    program = jaxpr_as_fun(params["jaxpr"])

    def step(carry: list[Leaf], _: Leaf) -> tuple[list[Leaf], list[Leaf]]:
        out = list(program(*values[:num_consts], *carry))
        return out[:num_carry], out[num_carry:]

    with set_current_trace(recorder):
        steps = jnp.arange(extent)
        carry, rows = lax.scan(step, list(values[num_consts:]), steps, reverse=params["reverse"])
    return [*carry, *rows]


def _unrolled(
    step: Callable[..., list[Leaf]],
    values: Sequence[Leaf],
    params: dict[str, Any],
    parts: tuple[int, int],
) -> list[Leaf]:
    """Returns the results of a scan whose steps are calls of a function."""
    num_consts, num_carry = parts
    program, length = params["jaxpr"], params["length"]
    consts, carry = values[:num_consts], list(values[num_consts : num_consts + num_carry])
    lists = [
        x if isinstance(x, Symbol) or is_key(x.dtype) else np.asarray(x)
        for x in values[num_consts + num_carry :]
    ]
    rows: list[Any] = [None] * length
    for k in range(length):
        place = length - 1 - k if params["reverse"] else k
        out = step(*consts, *carry, *(x[place] for x in lists))
        carry, rows[place] = list(out[:num_carry]), out[num_carry:]
    of_rows = program.out_avals[num_carry:]
    if not length:
        return [*carry, *(lax.full((0, *x.shape), 0, x.dtype) for x in of_rows)]
    return [*carry, *(jnp.stack([row[i] for row in rows]) for i in range(len(of_rows)))]
