"""Arrays of instances cut into tiles.

Every array becomes whole tiles of as many rows: the rows of the last one beyond the last row of the
array repeat that row. A minibatch has thousands of them (the sequences at the leaves of trees), so
that those of one type are joined at once, with gaps between them, and the gaps are filled then.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._graph.paths import pointers, ranges
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._jaxpr.transfers import fetched
from jedbatch._ragged.tile_templates import Numbers, TemplateForm, TiledArrays
from jedbatch._support.types import Array, AxisSize


def added_arrays(
    instances: Sequence[tuple[TemplateForm, Sequence[Array], Sequence[int]]], size: int
) -> list[list[Array]]:
    """Returns the arrays that nodes on tiles read, behind those of each instance.

    Args:
      instances: what belongs to the template of each, its arrays, and the values of its symbols.
      size: rows of a tile.
    """
    alike: dict[tuple, list[tuple[int, int, list[Array]]]] = {}
    added: list[list[Any]] = []
    for i, (form, arrays, lengths) in enumerate(instances):
        added.append([_values(form.lengths, lengths)])
        for k, of_tiles in enumerate(form.arrays):
            if of_tiles.whole is not None:
                parts = [arrays[leaf] for leaf in of_tiles.whole]
                kind = _common_type(parts)
                if kind is not None:
                    alike.setdefault(kind, []).append((i, 1 + k, parts))
                    added[i].append(None)
                    continue
            added[i].append(_tiles_apart(of_tiles, arrays, size))
        added[i] += [row_numbers(lengths[symbol], size) for symbol in form.starts]
    for places in alike.values():
        tiles, ends = _tiles_of_all([parts for _, _, parts in places], size)
        for (i, k, _), begin, end in zip(places, ends, ends[1:], strict=False):
            added[i][k] = tiles[begin:end]
    return added


def _values(lengths: Sequence[tuple[AxisSize, Numbers]], values: Sequence[int]) -> np.ndarray:
    """Returns the values of extents, int32[...], given those of symbols."""
    return np.array(
        [
            extent_at(extent, {name: values[k] for name, k in numbers.items()})
            for extent, numbers in lengths
        ],
        np.int32,
    )


@functools.lru_cache(maxsize=1024)
def row_numbers(count: int, size: int) -> np.ndarray:
    """Returns the first rows of tiles, then how many rows each has: int32[2 * tiles]."""
    starts = np.arange(0, count, size, dtype=np.int32)
    both = np.concatenate([starts, np.minimum(count - starts, size)])
    both.flags.writeable = False
    return both


def _common_type(parts: Sequence[Array]) -> tuple | None:
    """Returns the (dtype, shape without rows) of arrays of NumPy; None if they are not alike."""
    if set(map(type, parts)) != {np.ndarray}:
        return None
    dtypes, shapes = {x.dtype for x in parts}, {x.shape[1:] for x in parts}
    return (*dtypes, *shapes) if len(dtypes) == len(shapes) == 1 else None


def _tiles_of_all(
    arrays: Sequence[Sequence[np.ndarray]], size: int
) -> tuple[np.ndarray, list[int]]:
    """Returns ([tiles, size, ...] of all arrays, where those of each sequence begin and end)."""
    flat = [x for own in arrays for x in own]
    lengths = np.array(list(map(len, flat)))
    missing = -lengths % size
    gap = np.empty((size, *flat[0].shape[1:]), flat[0].dtype)
    gaps = [gap[:count] for count in range(size)]
    parts = [gap] * (2 * len(flat))
    parts[::2], parts[1::2] = flat, [gaps[count] for count in missing.tolist()]
    rows = np.concatenate(parts)
    ends = pointers(lengths + missing)
    after = ends[1:] - missing
    rows[ranges(after, missing)] = rows[np.repeat(after - 1, missing)]
    first = ends[pointers(np.array(list(map(len, arrays))))] // size
    return _cut(rows, size), first.tolist()


def _tiles_apart(of_tiles: TiledArrays, arrays: Sequence[Array], size: int) -> Array:
    """Returns the tiles of arrays that may be traced, or parts of others."""
    tiles = [_tiles(arrays[leaf], path, axis, size) for leaf, path, axis in of_tiles.parts]
    if len(tiles) == 1:
        return tiles[0]
    xp: Any = np if all(isinstance(x, np.ndarray) for x in tiles) else jnp
    return xp.concatenate(tiles)


def _tiles(array: Array, path: Sequence[Any], axis: int, size: int) -> Array:
    """Returns [k, ...], the tiles of an array or of a part of it; the last row is repeated."""
    if not isinstance(array, Tracer):
        array = fetched(array)
    array = functools.reduce(lambda x, index: x[index], path, array)
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    rows = xp.moveaxis(array, axis, 0) if axis else array
    count, rest = rows.shape[0], rows.shape[1:]
    missing = -count % size
    if missing and xp is np:
        padded = np.empty((count + missing, *rest), rows.dtype)
        padded[:count], padded[count:] = rows, rows[-1]
        rows = padded
    elif missing:
        rows = jnp.concatenate([rows, jnp.repeat(rows[-1:], missing, 0)])
    tiles = _cut(rows, size)
    return xp.moveaxis(tiles, 1, 1 + axis) if axis else tiles


def _cut(rows: Array, size: int) -> Array:
    """Returns [tiles, size, ...] of so many rows; there may be no numbers in a row."""
    return rows.reshape(len(rows) // size, size, *rows.shape[1:])
