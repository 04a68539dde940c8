"""Graphs in npz files: which arrays are in there, and how large they are, before any is read.

An npz file is a zip archive of arrays. It comes from elsewhere, so nothing in it is unpacked before
it is known to be an array of the graph, to be as long as its header says, and to fit into memory:
zeros take a thousandth of their size in there.

Version 1 has names of types, for one instance. Version 2 has all of a type that has no Python in it
(see `type_to_json`), and where the instances begin.
"""

import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from jedbatch import checks
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._support.files import replacing

BARE, TYPED = "jedbatch graph, version 1", "jedbatch graph, version 2"
ARRAYS = ("node_type", "operand_ptr", "operand", "outputs")
INSTANCES = ("node_ptr", "input_ptr", "output_ptr")
MAX_BYTES, MAX_RATIO = 1 << 28, 100  # of what is unpacked, if the caller does not say
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def save(
    path: Any, types: Sequence[NodeType], arrays: Mapping[str, np.ndarray], inputs: Sequence[Any]
) -> None:
    """Writes a graph.

    Args:
      path: the file.
      types: of its nodes.
      arrays: those named in `ARRAYS`, and for version 2 those in `INSTANCES`.
      inputs: the value type and the rows of each.
    """
    for _, rows in inputs:
        if rows.dtype.kind not in "biufc" or rows.dtype.isbuiltin == 2:  # not NumPy's
            raise TypeError(
                f"`Graph.save` got inputs of dtype {rows.dtype}; expected numbers that NumPy knows "
                "by itself. Store them as float32 or as integers, and convert them in the cells."
            )
    header: dict[str, Any] = {"format": BARE, "names": [t.name for t in types]}
    if len(arrays) > len(ARRAYS):
        input_types = [value_type_to_json(kind) for kind, _ in inputs]
        header = {"format": TYPED, "inputs": input_types, "types": list(map(type_to_json, types))}
    members = dict(arrays) | {f"input_{i}": rows for i, (_, rows) in enumerate(inputs)}
    written = np.array(json.dumps(header))
    with replacing("Graph.save", path) as file:
        np.savez_compressed(file, header=written, **members)


def load(path: object, max_bytes: int | None) -> tuple[dict, dict[str, Any], list[Any]]:
    """(header, arrays, inputs) of a file; raises `ValueError` if it was not written by `save`."""
    if max_bytes is not None:
        checks.whole("Graph.load", "max_bytes", max_bytes)
    with open(checks.path("Graph.load", path), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            most = max(MAX_BYTES, MAX_RATIO * size) if max_bytes is None else max_bytes
            with zipfile.ZipFile(file) as archive:
                return _read(archive, most)
        except Exception as error:
            raise unreadable(path, error) from error


def value_type_to_json(value_type: ValueType) -> list[Any]:
    """Returns a type of values as JSON."""
    return [list(value_type.shape), str(value_type.dtype), value_type.weak]


def value_type_from_json(written: Any) -> ValueType:
    """Returns the type of values that `value_type_to_json` wrote."""
    shape, dtype, weak = written
    return ValueType(tuple(map(int, shape)), np.dtype(dtype), bool(weak))


def type_to_json(node_type: NodeType) -> dict[str, Any]:
    """Returns what a node type is to another process, as JSON."""
    return {
        "name": node_type.name,
        "label": node_type.label,
        "identity": node_type.identity,
        "operands": list(map(value_type_to_json, node_type.operands)),
        "results": list(map(value_type_to_json, node_type.results)),
    }


def type_from_json(written: Any) -> NodeType:
    """Returns the node type that `type_to_json` wrote."""
    return NodeType(
        str(written["name"]),
        operands=tuple(map(value_type_from_json, written["operands"])),
        results=tuple(map(value_type_from_json, written["results"])),
        label=str(written["label"]),
        identity=str(written["identity"]),
    )


def typed(
    header: dict, arrays: Mapping[str, Any], inputs: Sequence[np.ndarray]
) -> tuple[tuple[NodeType, ...], list[ValueType], dict[str, np.ndarray]]:
    """Returns (node types, types of inputs, arrays) of a file of version 2, or raises an error."""
    kinds = list(map(value_type_from_json, header["inputs"]))
    for kind, rows in zip(kinds, inputs, strict=True):
        if (rows.shape[1:], rows.dtype) != (kind.shape, kind.dtype) or not rows.ndim:
            raise ValueError(f"inputs of type {kind} have rows {rows.shape} of {rows.dtype}")
    wide = ("operand_ptr", *INSTANCES)
    columns = {
        name: checks.whole_array(
            "Graph.load", f"`{name}`", x, np.int64 if name in wide else np.int32
        )
        for name, x in arrays.items()
    }
    return tuple(map(type_from_json, header["types"])), kinds, columns


def unreadable(path: Any, error: Exception) -> ValueError:
    """The error that says which file cannot be read."""
    reason = checks.cut(error) or type(error).__name__
    return ValueError(
        f"`Graph.load` cannot read {os.fspath(path)!r}: {reason.rstrip('.')}. It expects a file "
        "written by `Graph.save`."
    )


def _read(archive: zipfile.ZipFile, most: int) -> tuple[dict, dict[str, Any], list[Any]]:
    filenames = [info.filename for info in archive.infolist()]
    is_typed = f"{INSTANCES[0]}.npy" in filenames
    names = ARRAYS + INSTANCES if is_typed else ARRAYS
    inputs = [f"input_{i}" for i in range(len(filenames) - len(names) - 1)]
    expected = ["header", *names, *inputs]
    if sorted(filenames) != sorted(f"{name}.npy" for name in expected):
        raise ValueError(
            f"it holds {checks.brief(sorted(filenames))}; expected header.npy, "
            f"{', '.join(f'{name}.npy' for name in names)}, input_0.npy and so on, each once"
        )
    total = sum(info.file_size for info in archive.infolist())
    if total > most:
        raise ValueError(
            f"it unpacks to {total:,} bytes, more than {most:,}; if it is to be trusted, pass "
            f"`max_bytes={total}`"
        )
    sizes = {info.filename: info.file_size for info in archive.infolist()}
    arrays = []
    for name in expected:
        with archive.open(f"{name}.npy") as member:
            arrays.append(_array(member, name, sizes[f"{name}.npy"]))
    header = json.loads(str(arrays[0]))
    wanted = TYPED if is_typed else BARE
    if not isinstance(header, dict) or header.get("format") != wanted:
        came = header.get("format") if isinstance(header, dict) else header
        raise ValueError(f"its format is {checks.brief(came)}, not {wanted!r}")
    for name in ("types", "inputs") if is_typed else ("names",):
        if not isinstance(header.get(name), list):
            raise ValueError(f"its {name} are {checks.brief(header.get(name))}, not a list")
    if is_typed and len(header["inputs"]) != len(inputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(header['inputs'])} types of these")
    found = dict(zip(names, arrays[1:], strict=False))
    return header, found, arrays[1 + len(names) :]


def _array(member: IO[bytes], name: str, size: int) -> np.ndarray:
    """An array, whose length is compared with that of the file before it is made."""
    version = np.lib.format.read_magic(member)
    if version not in HEADERS:
        raise ValueError(f"`{name}` is of version {version} of the npy format")
    shape, fortran, dtype = HEADERS[version](member)
    if dtype.kind not in ("U" if name == "header" else "biufc"):
        raise ValueError(f"`{name}` is of dtype {checks.cut(dtype, 60)}")
    num_bytes = size - member.tell()
    if min(shape, default=0) < 0 or num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"`{name}` has {num_bytes} bytes for shape {shape} of {dtype}")
    data = member.read()  # all of it, so that its checksum is compared
    array = np.frombuffer(data, dtype) if num_bytes else np.zeros(0, dtype)
    return np.array(array.reshape(shape, order="F" if fortran else "C"))
