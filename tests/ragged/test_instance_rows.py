"""Rows of instances that run together: read and written as by NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jedbatch._ragged.instance_rows import InstanceRows, read_instances, write_instances
from jedbatch._ragged.moving_calls import moving_calls

ROWS, LENGTH = 12, 4
COUNTS, STARTS = [3, 0, 5, 1, 3], [0, 3, 3, 8, 9]
ALIVE = [True, True, True, False, True]
KINDS = [((3,), np.float32), ((2, 2), np.int32), ((), np.float16), ((2,), jnp.bfloat16)]


def packed_rows(kind, seed=0):
    shape, dtype = kind
    numbers = np.random.default_rng(seed).integers(1, 99, (ROWS, *shape))
    return jnp.asarray(numbers).astype(dtype)


def places(offset):
    of_each = (jnp.array(x, jnp.int32) for x in (STARTS, COUNTS))
    return InstanceRows(*of_each, jnp.array(ALIVE), jnp.int32(offset))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_instances_are_read(kind, offset, zeros):
    x = packed_rows(kind)
    expected = np.zeros((len(STARTS), LENGTH, *kind[0]), x.dtype)
    for g, (start, count, alive) in enumerate(zip(STARTS, COUNTS, ALIVE, strict=True)):
        for i in range(LENGTH):
            if (alive and offset + i < count) or not zeros:
                expected[g, i] = x[max(0, start + min(offset + i, count - 1))]
    found = read_instances(places(offset), x, LENGTH, zeros)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("add", [False, True])
def test_rows_of_instances_are_written(kind, offset, add):
    x = packed_rows(kind)
    new = jnp.stack([packed_rows(kind, seed)[:LENGTH] for seed in range(len(STARTS))])
    expected = np.array(x)
    for g, (start, count, alive) in enumerate(zip(STARTS, COUNTS, ALIVE, strict=True)):
        for i in range(LENGTH):
            if alive and offset + i < count:
                row = start + offset + i
                expected[row] = np.asarray(new[g, i] + x[row] if add else new[g, i])
    found = write_instances(places(offset), x, new, add)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_calls_to_which_something_comes_back(dtype):
    """Also where that is no number; zeros may be negative."""
    cotangents = np.zeros((ROWS, 3), np.float64)
    cotangents[1] = -0.0
    cotangents[4, 2], cotangents[8, 0], cotangents[11, 1] = np.nan, 1e-3, 5
    call = jnp.array(np.repeat(np.arange(5), COUNTS), jnp.int32)
    x = jnp.asarray(cotangents).astype(dtype)
    nothing, all_columns, one_column = moving_calls(call, jnp.int32(11), [None, x, x[:, :1]], 6)
    assert not nothing.any()
    assert all_columns.tolist() == [False, False, True, True, False, False]
    assert one_column.tolist() == [False, False, False, True, False, False]
