"""Parameters: in npz files, which need no pickle to be read, and others in place of them.

The name of an array is the path to it, joined by slashes: `encoder/kernel`, `layers/0/bias`.
"""

import os
from typing import Any

import jax
import numpy as np

from jedbatch import checks
from jedbatch._graph.types import ValueType
from jedbatch._record.instances.arrays import array_type, is_array
from jedbatch._support.files import replacing
from jedbatch._support.types import Leaf

SEPARATOR = "/"


def save_params(params: Any, path: str | os.PathLike[str]) -> None:
    """Writes a pytree of arrays as an npz file.

    Args:
      params: arrays in dicts, lists, tuples or other containers with names. Functions and strings
        in them are part of the structure, which is not written.
      path: of the file; its name ends with `.npz`.

    Raises:
      TypeError: something in it is no array of numbers that NumPy has, such as bfloat16.
      ValueError: two arrays have one name, or the name of the file ends otherwise.
    """
    _check_name("save_params", path)
    arrays: dict[str, np.ndarray] = {}
    for keys, leaf in jax.tree.leaves_with_path(params):
        if _is_static(leaf):
            continue
        name = jax.tree_util.keystr(keys, simple=True, separator=SEPARATOR)
        array = np.asarray(leaf)
        if array.dtype.kind not in "biufc" or array.dtype.isbuiltin == 2:  # not NumPy's
            raise TypeError(
                f"`save_params` got {checks.shown(leaf)} at {name!r}, which npz files do not have; "
                "expected arrays of numbers. Write `x.astype(numpy.float32)`."
            )
        if name in arrays:
            raise ValueError(f"`save_params` got two arrays of one name, {name!r}.")
        arrays[name] = array
    with replacing("save_params", path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_params(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads what `save_params` wrote.

    Args:
      path: of the file.
      like: a pytree of the structure and shapes that are expected; its values are not looked at.
        None makes nested dicts of the names.

    Returns:
      Arrays of NumPy in the structure of `like`, or in dicts.

    Raises:
      ValueError: the file is no npz file of arrays, or not like it.
    """
    _check_name("load_params", path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except OSError:
        raise
    except Exception as error:  # of zip files, and of arrays in them
        raise ValueError(
            f"{os.fspath(path)} is no npz file of arrays: {checks.cut(error)}"
        ) from None
    if like is None:
        return _nested(arrays)
    leaves = []
    for keys, leaf in jax.tree.leaves_with_path(like):
        if _is_static(leaf):
            leaves.append(leaf)
            continue
        name = jax.tree_util.keystr(keys, simple=True, separator=SEPARATOR)
        if name not in arrays:
            raise ValueError(
                f"{os.fspath(path)} has no {name!r}; it has {checks.brief(sorted(arrays))}"
            )
        array = arrays.pop(name)
        if array.shape != np.shape(leaf):
            raise ValueError(
                f"{os.fspath(path)} has {name!r} of shape {array.shape}; expected {np.shape(leaf)}"
            )
        leaves.append(array)
    if arrays:
        raise ValueError(f"{os.fspath(path)} has {checks.brief(sorted(arrays))}, too")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _is_static(leaf: Any) -> bool:
    """Returns whether a leaf of shared arguments is part of their structure."""
    return callable(leaf) or isinstance(leaf, str | bytes)


def _nested(arrays: dict[str, np.ndarray]) -> Any:
    """Returns nested dicts; a single array without a name is itself."""
    if list(arrays) == [""]:
        return arrays[""]
    root: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split(SEPARATOR)
        place: Any = root
        for key in parents:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ValueError(f"{name!r} is inside of an array of the file")
        if last in place:
            raise ValueError(f"{name!r} is an array and a folder of the file")
        place[last] = array
    return root


def _check_name(who: str, path: str | os.PathLike[str]) -> None:
    checks.path(who, path)
    if not os.fspath(path).endswith(".npz"):
        raise ValueError(
            f"`{who}` got {checks.brief(os.fspath(path))}; expected a name that ends with .npz."
        )


def check_same(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    """Raises `ValueError` unless arguments have the same structure, shapes and dtypes."""
    came: Any = jax.tree.structure(new)
    expected: Any = jax.tree.structure(old)
    if came != expected:
        raise ValueError(
            f"a server got shared arguments of structure {checks.cut(came)}; expected that of "
            f"those it has, {checks.cut(expected)}. For others make another server."
        )
    for (path, x), y in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if _type(x) != _type(y):
            raise ValueError(
                f"a server got {_type(x)} at {jax.tree_util.keystr(path)} of its shared arguments; "
                f"expected {_type(y)}, which it has there. For others make another server."
            )


def _type(leaf: Leaf) -> str:
    """Returns the type of an array, or what else a leaf is."""
    return str(ValueType(*array_type(leaf))) if is_array(leaf) else checks.brief(leaf)
