"""JSON in and out: instances and results as JSON has them, and texts that are no such thing.

A text is looked at before it is parsed: one that is nested more deeply than is allowed is refused
in time that is proportional to its length, without recursion.
"""

import json
import re
from typing import Any

import jax
import numpy as np

from jedbatch import checks

# Strings are skipped as a whole; one that does not end takes the rest.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|$)|[\[{]|[\]}]', re.DOTALL)


class NoJsonError(ValueError):
    """A text is not JSON."""


class TooDeepError(ValueError):
    """A text in JSON is nested more deeply than is allowed."""


def parsed(text: bytes, max_depth: int) -> Any:
    """Returns the value of a text in JSON, as strict as RFC 8259 has it, in UTF-8.

    Args:
      text: any bytes.
      max_depth: how many arrays and objects may be inside of one another.

    Raises:
      NoJsonError: it is not JSON.
      TooDeepError: it is nested more deeply.
    """
    depth = 0
    for token in _TOKENS.finditer(text):
        first = token.group()[0]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise TooDeepError(
                    f"the JSON is nested more than {max_depth} deep; expected less than that."
                )
        elif first in b"]}":
            depth -= 1
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # of UTF-8, of JSON, of numbers with many digits
        raise NoJsonError(f"the body is no JSON: {checks.cut(error)}.") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def as_instance(value: Any) -> Any:
    """Returns a value of JSON as an instance: lists become tuples, which are remembered by value.

    Numbers, strings, objects, true, false and null are what `json` makes of them.
    """
    if isinstance(value, list):
        return tuple(map(as_instance, value))
    if isinstance(value, dict):
        return {key: as_instance(x) for key, x in value.items()}
    return value


def as_json(result: Any) -> Any:
    """Returns a result as JSON has it: arrays as lists, what is not finite as null.

    Dicts stay objects, and tuples and lists become arrays; other pytrees are refused.

    Raises:
      TypeError: there is something else in it, such as random keys or complex numbers.
    """
    if isinstance(result, dict):
        return {str(key): as_json(x) for key, x in result.items()}
    if isinstance(result, list | tuple):
        return [as_json(x) for x in result]
    if result is None or isinstance(result, bool | str):
        return result
    if isinstance(result, jax.Array) and jax.dtypes.issubdtype(result.dtype, jax.dtypes.prng_key):
        raise TypeError(f"a result has {checks.shown(result)}; expected arrays of numbers.")
    array = np.asarray(result)
    if jax.dtypes.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
        finite = np.isfinite(array)
        return (array if finite.all() else np.where(finite, array, np.array(None))).tolist()
    if array.dtype.kind not in "biu":
        raise TypeError(
            f"a result has {checks.shown(result)}; expected arrays of real numbers. Write an "
            "`encode` that makes them."
        )
    return array.tolist()
