"""Lengths that Python knows, where it hands them to JAX as numbers.

    rows = x + params["positions"][: len(x)]            # Python has been told that x is 7 rows long
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))

What is recorded is for instances of these lengths alone, so a number that is one of them may as
well be the extent that it is the value of. Then it is of the same types as for other lengths:
`positions[:n]` and `ones((n, n))`. A number may be a length by chance. The result is the same, but
where JAX cannot tell that it goes with another number, such as the features of a weight, the
instance is recorded again with numbers as they are (see `_ragged.lengths`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.symbolic_dims import LengthDecisionError, extents_told, is_ragged, is_told
from jedbatch._record.operations.symbols import RecorderLike
from jedbatch._support.types import Leaf

FEW_ROWS = 3  # of which one more or less is none of the lengths that are told
MAKES_ARRAYS = frozenset({"broadcast_in_dim", "iota", "reshape"})


def index_with_extents(recorder: RecorderLike, item: Any) -> Any:
    """Returns an index that cuts at extents where it cuts at lengths that Python has been told.

    `table[: len(x)]` is as long as x then, for whatever length. So it is with one row more or less.
    """
    told = extents_told(recorder)
    if told and isinstance(item, tuple):
        return tuple([index_with_extents(recorder, x) for x in item])
    if not told or not isinstance(item, slice) or item.step not in (None, 1):
        return item
    start, stop = item.start, item.stop
    if start in (None, 0):
        return slice(None, _bound(stop, told))
    is_end = stop is None and type(start) is int and start < 0
    return slice(-_bound(-start, told), None) if is_end else item


def _bound(bound: Any, told: Mapping[int, Any]) -> Any:
    if type(bound) is not int or bound < 2:
        return bound
    near = (bound,) if bound < FEW_ROWS else (bound, bound + 1, bound - 1)
    return next((told[number] + (bound - number) for number in near if number in told), bound)


def params_with_extents(
    made: Any, name: str, operands: Sequence[Leaf], params: dict[str, Any]
) -> dict[str, Any]:
    """Returns parameters of an operation that makes arrays, of extents in place of lengths.

    Args:
      made: the arrays that the instance makes; None if its lengths are not known.
      name: of the operation, one of `MAKES_ARRAYS`.
      operands: what it reads.
      params: its parameters.

    Raises:
      LengthDecisionError: an array is reshaped to other sizes than it has for all lengths.
    """
    of = [x.shape if isinstance(x, Tracer) else np.shape(x) for x in operands]
    if name == "reshape":
        return {**params, "new_sizes": _sizes(made, of[0], params["new_sizes"])}
    shape = list(params["shape"])
    if not shape or is_ragged(shape):
        return params
    told = {} if made is None else made.extents(shape, params.get("dtype") or operands[0].dtype)
    places = params.get("broadcast_dimensions", ())
    for axis, n in enumerate(shape):
        own = of[0][places.index(axis)] if axis in places else 1
        if type(own) is not int:
            shape[axis] = own if is_told(own, n, told) else n
        elif own != n and n > 1:
            shape[axis] = told.get(n, n)
    return {**params, "shape": tuple(shape)}


def _sizes(made: Any, shape: Sequence[Any], sizes: Sequence[Any]) -> Sequence[Any]:
    """Returns the sizes that an array is reshaped to, which JAX does not compare with extents."""
    if not is_ragged(shape) or is_ragged(sizes):
        return sizes
    told = {} if made is None or not sizes else made.extents(sizes, None)
    axes = [axis for axis, n in enumerate(sizes) if n in told]
    for replaced in (*([axis] for axis in axes), axes):
        new = [told[n] if axis in replaced else n for axis, n in enumerate(sizes)]
        if math.prod(new) == math.prod(shape):
            return tuple(new)
    raise LengthDecisionError("an array of any length is given a fixed shape")
