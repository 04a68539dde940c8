"""Rows that chunks read and write: by calls of the compiled core, by XLA, and by NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases.helpers import assert_close

from jedbatch._jaxpr.native_calls import target_of
from jedbatch._kernel.target import CPU, TARGETS
from jedbatch._program.rows import Read, Write, put_rows, take_rows
from jedbatch._support import native

compiled = pytest.mark.skipif(native.core() is None, reason="no compiled core")
WIDTH = 5
SHAPES = [((40,), np.float32), ((40, 3), np.float32), ((30, 2, 2), np.int32), ((40, 3), np.bool_)]
SHAPES += [((9, 4), ml_dtypes.bfloat16), ((9, 2), np.complex64), ((25, 0), np.float32)]
SHAPES += [((9, 4), np.float16), ((9,), np.uint8), ((9, 1), ml_dtypes.float8_e4m3fn)]


def values(rng, shape, dtype):
    numbers = rng.integers(0, 100, shape)
    return np.asarray(numbers + 1j * numbers[::-1] if dtype == np.complex64 else numbers, dtype)


def some_reads(rng, arrays, table_size, count):
    """Single rows, lists of them, sums of lists."""
    reads = []
    for _ in range(count):
        array, kind = int(rng.integers(len(arrays))), rng.integers(3)
        length = None if kind == 0 else int(rng.integers(1, 4))
        stride = int(rng.integers(WIDTH + 5, 12))
        offset = int(rng.integers(table_size - 3 * stride))
        is_sum = bool(kind == 2 and np.issubdtype(arrays[array].dtype, np.floating))
        reads.append(Read(array, offset, stride if length else 0, length, is_sum))
    return reads


def rows_read(table, lane, arrays, read):
    """By the definition."""
    count = 1 if read.length is None else read.length
    index = [table[read.offset + k * read.stride + lane :][:WIDTH] for k in range(count)]
    rows = np.stack([arrays[read.array][i] for i in index], axis=1)
    if read.length is None:
        return rows[:, 0]
    return rows.sum(axis=1, dtype=rows.dtype) if read.is_sum else rows


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(3))
def test_reads(maker, target, seed):
    rng = np.random.default_rng(seed)
    arrays = [values(rng, shape, dtype) for shape, dtype in SHAPES]
    table = rng.integers(0, 9, 80).astype(np.int32)
    table[20:40] = np.arange(20) % 9  # that follow one another
    reads = some_reads(rng, arrays, len(table), 12)

    @jax.jit
    def run(table, lane, arrays):
        return take_rows(TARGETS[target], table, lane, arrays, reads, WIDTH)

    for lane in (0, 2, 5):
        got = run(table, jnp.int32(lane), arrays)
        for x, read in zip(got, reads, strict=True):
            expected = rows_read(table, lane, arrays, read)
            assert x.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(x), expected)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_writes(maker, target):
    rng = np.random.default_rng(0)
    arrays = [values(rng, shape, dtype) for shape, dtype in SHAPES]
    table = np.array([0, 0, 7, 9, 0], np.int32)
    writes = [
        Write(0, base=3),
        Write(0, base=10, stride=2),
        Write(0, offset=2),
        Write(2, base=1, stride=3),
        *(Write(a) for a in range(3, len(arrays))),
    ]
    rows = [values(rng, (2, *arrays[w.array].shape[1:]), arrays[w.array].dtype) for w in writes]

    @jax.jit
    def run(table, lane, arrays, rows):
        return put_rows(TARGETS[target], table, lane, arrays, rows, writes)

    for lane in (0, 1):
        expected = [x.copy() for x in arrays]
        for x, write in zip(rows, writes, strict=True):
            first = write.base + write.stride * lane
            if write.offset is not None:
                first = table[write.offset + lane]
            expected[write.array][first : first + 2] = x
        for x, y in zip(run(table, jnp.int32(lane), arrays, rows), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x), y)


@compiled
def test_rows_are_written_in_place():
    """A loop over chunks copies no array."""

    @jax.jit
    def run(x, table):
        def chunk(i, x):
            (rows,) = take_rows(CPU, table, i, [x], [Read(0, 0)], 2)
            return put_rows(CPU, table, i, [x], [rows + 1], [Write(0, base=50, stride=2)])[0]

        return jax.lax.fori_loop(0, 9, chunk, x)

    args = jnp.zeros((100, 7)), jnp.arange(20, dtype=jnp.int32)
    text = run.lower(*args).compile().as_text()
    assert text.count(f'custom_call_target="{target_of("put_rows")}"') == 1
    copies = [line for line in text.splitlines() if " copy(" in line and "f32[100,7]" in line]
    assert len(copies) <= 1  # of the argument, which is not donated
    np.testing.assert_array_equal(run(*args)[50:68], 1)


def test_sums_are_taken_in_order(maker):
    """Nothing else changes their rounding: first to last, one after the other."""
    table = np.arange(4, dtype=np.int32)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        rows = np.array([[1e8], [1.0], [-1e8], [1.0]], dtype)
        run = jax.jit(lambda x: take_rows(CPU, table, 0, [x], [Read(0, 0, 1, 4, True)], 1)[0])
        expected = dtype(0)
        for x in rows[:, 0]:
            expected = dtype(expected + x)
        assert run(rows).item() == expected


def test_transforms(maker):
    """Derivatives and `vmap` are those of the operations."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, 8, 40).astype(np.int32)
    reads = [Read(0, 3), Read(1, 0, 9, 3), Read(0, 2, 8, 2, True)]
    writes = [Write(0, base=9), Write(1, offset=4)]

    def run(arrays, lane):
        one, several, total = take_rows(CPU, table, lane, arrays, reads, WIDTH)
        return put_rows(CPU, table, lane, arrays, [one * total, several.sum(1)], writes)

    def plainly(arrays, lane):
        def row(a, offset):
            return arrays[a][table[offset + lane : offset + lane + WIDTH]]

        total = row(0, 2) + row(0, 10)
        several = row(1, 0) + row(1, 9) + row(1, 18)
        first = int(table[4 + lane])
        ones = arrays[0].at[9 + lane : 9 + lane + WIDTH].set(row(0, 3) * total)
        return [ones, arrays[1].at[first : first + WIDTH].set(several)]

    arrays = [jnp.asarray(rng.normal(size=(20, 3)), jnp.float32) for _ in range(2)]
    tangents = [x[::-1] for x in arrays]
    for lane in (0, 1):
        run_there, plain = (lambda x, f=f, lane=lane: f(x, lane) for f in (run, plainly))
        for run_it in (run_there, jax.jit(run_there)):
            assert_close(run_it(arrays), plain(arrays), 1e-6)
            moved = [jax.jvp(f, (arrays,), (tangents,)) for f in (run_it, plain)]
            assert_close(*moved, 1e-6)
            both = [jnp.stack([x, 2 * x]) for x in arrays]
            assert_close(jax.vmap(run_it)(both), jax.vmap(plain)(both), 1e-6)
    held = [
        jax.jvp(lambda x, f=f: f([x, arrays[1]], 1), arrays[:1], tangents[:1])
        for f in (run, plainly)
    ]
    assert_close(*held, 1e-6)


@compiled
def test_exported_programs_hold_no_calls():
    def run(x, table):
        rows = take_rows(CPU, table, 1, [x], [Read(0, 0)], 2)
        return put_rows(CPU, table, 1, [x], rows, [Write(0)])[0]

    args = jnp.arange(20.0), jnp.arange(5, 10, dtype=jnp.int32)
    exported = jax.export.export(jax.jit(run))(*args)
    assert target_of("take_rows") not in exported.mlir_module()
    assert_close(exported.call(*args), run(*args), 0)
