"""Value types, sizes and targets as JSON.

Later versions read these, in processes with other versions of JAX. So everything is spelled out,
field by field, and nothing depends on how Python or JAX would print or pickle it.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jedbatch._graph.serialize import value_type_to_json
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.storage import Kind
from jedbatch._kernel.target import CPU, Target
from jedbatch._layout.bucketing import Buckets
from jedbatch._support.types import Dtype

KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


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


def value_type_of(written: Any) -> ValueType:
    """Returns the value type that `value_type_to_json` wrote."""
    shape, name, weak = written
    return ValueType(tuple(map(int, shape)), dtype_named(name), bool(weak))


def kind_to_json(kind: Kind) -> list[Any]:
    """Returns the shape and dtype of rows as JSON."""
    return value_type_to_json(ValueType(*kind))[:2]


def kind_of(written: Any) -> Kind:
    """Returns what `kind_to_json` wrote."""
    shape, name = written
    return tuple(map(int, shape)), dtype_named(name)


def buckets_to_json(buckets: Buckets) -> list[Any]:
    """Returns widths of chunks as JSON."""
    return [list(buckets.widths), buckets.overhead]


def buckets_of(written: Any) -> Buckets:
    """Returns what `buckets_to_json` wrote."""
    widths, overhead = written
    return Buckets(tuple(map(int, widths)), int(overhead))


def target_to_json(target: Target) -> dict[str, Any]:
    """Returns a target as JSON."""
    found = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
    return {
        name: buckets_to_json(x) if isinstance(x, Buckets) else list(x) if type(x) is tuple else x
        for name, x in found.items()
    }


def target_written(written: Mapping[str, Any]) -> Target:
    """Returns what `target_to_json` wrote, in this version or another one.

    What a version before did not have is as by default, and what a later one has besides is left
    out: tables depend on neither, or the version of files would be another one.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Target):
        if field.name not in written and field.name != "name":
            continue
        x = written[field.name]
        if isinstance(getattr(CPU, field.name), Buckets):
            values[field.name] = buckets_of(x)
        else:
            values[field.name] = tuple(x) if isinstance(x, list) else x
    return Target(**values)


def tuples(written: Any) -> Any:
    """Returns nested lists as tuples."""
    return tuple(map(tuples, written)) if isinstance(written, Sequence) else written


def version_of(package: str) -> str:
    """Returns the version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"
