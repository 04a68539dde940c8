"""Graphs in npz files: which arrays are in there, and how large they are, before any is read.

An npz file is a zip archive of arrays. It comes from elsewhere, so nothing in it is unpacked before
it is known to be an array of the graph, to be as long as its header says, and to fit into memory:
zeros take a thousandth of their size in there.
"""

import json
import math
import os
import zipfile
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from jedbatch import checks
from jedbatch._support.files import replacing

FORMAT = "jedbatch graph, version 1"
ARRAYS = ("node_type", "operand_ptr", "operand", "outputs")
MAX_BYTES, MAX_RATIO = 1 << 28, 100  # of what is unpacked, if the caller does not say
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def save(
    path: Any, names: list[str], arrays: Sequence[np.ndarray], inputs: Sequence[np.ndarray]
) -> None:
    """Writes a graph: names of its types, its arrays in the order of `ARRAYS`, and its inputs."""
    for rows in inputs:
        if rows.dtype.kind not in "biufc":
            raise TypeError(
                f"`Graph.save` got inputs of dtype {rows.dtype}; expected numbers that NumPy knows "
                "by itself. Store them as float32 or as integers, and convert them in the cells."
            )
    members = dict(zip(ARRAYS, arrays, strict=True))
    members |= {f"input_{i}": rows for i, rows in enumerate(inputs)}
    header = np.array(json.dumps({"format": FORMAT, "names": names}))
    with replacing("Graph.save", path) as file:
        np.savez_compressed(file, header=header, **members)  # type: ignore[arg-type]


def load(path: object, max_bytes: int | None) -> tuple[list[str], list[Any], list[Any]]:
    """(names, arrays, inputs) of a file; raises `ValueError` if it was not written by `save`."""
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


def unreadable(path: Any, error: Exception) -> ValueError:
    """The error that says which file cannot be read."""
    reason = checks.cut(error) or type(error).__name__
    return ValueError(
        f"`Graph.load` cannot read {os.fspath(path)!r}: {reason.rstrip('.')}. It expects a file "
        "written by `Graph.save`."
    )


def _read(archive: zipfile.ZipFile, most: int) -> tuple[list[str], list[Any], list[Any]]:
    filenames = [info.filename for info in archive.infolist()]
    inputs = [f"input_{i}" for i in range(len(filenames) - len(ARRAYS) - 1)]
    expected = ["header", *ARRAYS, *inputs]
    if sorted(filenames) != sorted(f"{name}.npy" for name in expected):
        raise ValueError(
            f"it holds {checks.brief(sorted(filenames))}; expected header.npy, "
            f"{', '.join(f'{name}.npy' for name in ARRAYS)}, input_0.npy and so on, each once"
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
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        came = header.get("format") if isinstance(header, dict) else header
        raise ValueError(f"its format is {checks.brief(came)}, not {FORMAT!r}")
    if not isinstance(header.get("names"), list):
        raise ValueError(f"its names are {checks.brief(header.get('names'))}, not a list")
    return header["names"], arrays[1 : 1 + len(ARRAYS)], arrays[1 + len(ARRAYS) :]


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
