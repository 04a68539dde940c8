"""Kernels, programs and types as JSON.

Later versions read these, in processes with other versions of JAX. So an object is written as the
name of its class with its fields, and nothing depends on how Python or JAX would print or pickle
it. Only the classes below are read. What a version before did not have is as by default, and what a
later one has besides is left out: where that would be misunderstood, the version of files is
another one (see `archive`).
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jedbatch._export.trees import ParameterType
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._kernel.kernel_spec import KernelSpec, VjpSpec
from jedbatch._kernel.operand_lists import ListPlaces, Parameter
from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import Buckets
from jedbatch._program.alive import Refused
from jedbatch._program.instructions import Branch
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.signature import Signature
from jedbatch._support.types import Dtype

KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
RECORDS = (
    *(ValueType, NodeType, Parameter, ListPlaces, Buckets, Target, KernelSpec, VjpSpec),
    *(Branch, Signature, Refused, ReverseSignature, ParameterType),
)


def to_json(x: Any) -> Any:
    """Returns an object as JSON, for `from_json`: numbers, dtypes, containers, `RECORDS`."""
    if isinstance(x, RECORDS):
        return {"is": type(x).__name__, **{name: to_json(getattr(x, name)) for name in _names(x)}}
    if isinstance(x, list | tuple):
        return list(map(to_json, x))
    if isinstance(x, frozenset):
        return {"is": "frozenset", "of": sorted(x)}
    if isinstance(x, Mapping):
        return {"is": "dict", "of": [[key, to_json(x[key])] for key in sorted(x)]}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    return x.item() if isinstance(x, np.generic) else {"is": "dtype", "of": str(x)}


def from_json(written: Any) -> Any:
    """Returns what `to_json` wrote, with tuples in place of lists.

    Raises:
      KeyError, TypeError, ValueError: something else wrote it.
    """
    if isinstance(written, list):
        return tuple(map(from_json, written))
    if not isinstance(written, dict):
        return written
    made: Any = READ_BY[written["is"]]
    if "of" in written:
        return made(from_json(written["of"]))
    return made(**{name: from_json(written[name]) for name in _names(made) if name in written})


def _names(record: Any) -> tuple[str, ...]:
    """Returns the names of the fields of a record, or of a class of records."""
    return getattr(record, "_fields", None) or tuple(f.name for f in dataclasses.fields(record))


@functools.cache
def dtype_named(name: str) -> Dtype:
    """Returns the dtype of a name; raises `ValueError` if this process knows none."""
    for impl in KEY_IMPLS if name.startswith("key<") else ():
        dtype = jax.eval_shape(functools.partial(jax.random.key, impl=impl), 0).dtype
        if str(dtype) == name:
            return dtype
    try:
        return np.dtype(name)
    except TypeError:
        raise ValueError(f"its values are of dtype {name!r}, which is not known here") from None


READ_BY = {x.__name__: x for x in (*RECORDS, frozenset, dict)} | {"dtype": dtype_named}


def version_of(package: str) -> str:
    """Returns the version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"
