"""Instances that run together: their numbers and rows, by calls of the core, by XLA, by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch
from jedbatch import ragged
from jedbatch._jaxpr.native_calls import target_of
from jedbatch._ragged.instance_rows import (
    InstanceRows,
    Members,
    find_members,
    read_instances,
    write_instances,
)
from jedbatch._ragged.moving_calls import moving_calls
from jedbatch._support import native

ROWS, LENGTH = 12, 4
COUNTS, STARTS = [3, 0, 5, 1, 3], [0, 3, 3, 8, 9]
ALIVE = [True, True, True, False, True]
KINDS = [((3,), np.float32), ((2, 2), np.int32), ((), np.float16), ((2,), jnp.bfloat16)]


def with_and_without_core(monkeypatch, run, *args):
    """Returns both results, compiled; the second one is XLA's."""
    found = [jax.jit(lambda *args: run(*args))(*args)]
    with monkeypatch.context() as patch:
        patch.setenv(native.SWITCH, "0")
        found.append(jax.jit(lambda *args: run(*args))(*args))
    return found


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
def test_rows_of_instances_are_read(monkeypatch, kind, offset, zeros):
    x = packed_rows(kind)
    expected = np.zeros((len(STARTS), LENGTH, *kind[0]), x.dtype)
    for g, (start, count, alive) in enumerate(zip(STARTS, COUNTS, ALIVE, strict=True)):
        for i in range(LENGTH):
            if (alive and offset + i < count) or not zeros:
                expected[g, i] = x[max(0, start + min(offset + i, count - 1))]
    run = lambda x, rows: read_instances(rows, x, LENGTH, zeros)  # noqa: E731
    for found in with_and_without_core(monkeypatch, run, x, places(offset)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("add", [False, True])
def test_rows_of_instances_are_written(monkeypatch, kind, offset, add):
    x = packed_rows(kind)
    new = jnp.stack([packed_rows(kind, seed)[:LENGTH] for seed in range(len(STARTS))])
    expected = np.array(x)
    for g, (start, count, alive) in enumerate(zip(STARTS, COUNTS, ALIVE, strict=True)):
        for i in range(LENGTH):
            if alive and offset + i < count:
                row = start + offset + i
                expected[row] = np.asarray(new[g, i] + x[row] if add else new[g, i])
    run = lambda x, new, rows: write_instances(rows, x, new, add)  # noqa: E731
    for found in with_and_without_core(monkeypatch, run, x, new, places(offset)):
        np.testing.assert_array_equal(found, expected)


def test_transforms_of_rows_of_instances(monkeypatch):
    """They are linear, and run under `vmap`."""
    x, t = (packed_rows(KINDS[0], seed) for seed in range(2))
    rows = places(0)

    def both(x):
        read = read_instances(rows, x, LENGTH)
        return read, write_instances(rows, x, 2 * read, add=True)

    run = lambda x, t: (jax.jvp(both, (x,), (t,))[1], jax.vmap(both)(jnp.stack([x, t])))  # noqa: E731
    of_x, of_t = both(x), both(t)
    for pushed, mapped in with_and_without_core(monkeypatch, run, x, t):
        assert_close(pushed, of_t, 0)
        assert_close(mapped, jax.tree.map(lambda *values: jnp.stack(values), of_x, of_t), 0)


@pytest.mark.parametrize("moves", [None, [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("first", [False, True])
def test_numbers_of_instances(monkeypatch, moves, first):
    calls = 5
    order, lengths, starts = [9, 3, 5, 2, 4, 0], [2, 7, 5, 1, 4], [0, 2, 9, 14, 15]
    table = jnp.array([*lengths, *order, *starts], jnp.int32)
    of = Members(5, calls, 4, (0, 11), (6,), first and moves is None)
    flags = None if moves is None else jnp.array(moves, bool)
    exist = [n < calls and (moves is None or bool(moves[n])) for n in order[1:5]]
    other = order[1] if of.first else int(np.argmax(moves or [1]))
    expected = [n if there else other for n, there in zip(order[1:5], exist, strict=True)]
    run = lambda table, place, flags: find_members(of, table, place, flags)  # noqa: E731
    found = with_and_without_core(monkeypatch, run, table, jnp.int32(1), flags)
    for members, alive, (of_length, of_start) in found:
        assert alive.tolist() == exist
        assert members.tolist() == expected
        assert of_length.tolist() == [min(6, lengths[n]) for n in expected]
        assert of_start.tolist() == [starts[n] for n in expected]


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


@pytest.mark.skipif(native.core() is None, reason="no compiled core")
def test_programs_gather_as_often_whatever_lengths_there_are():
    """XLA would compile each gather and scatter for each length."""
    batched = jedbatch.batch(lambda params, x: ragged.attention(x @ params, x, x).sum(0))
    params = np.eye(2, dtype=np.float32)

    def slope(params, plan):
        return jax.grad(lambda p: batched.apply(p, plan).sum())(params)

    found = []
    for lengths in ([3, 4, 3], [3, 20, 90]):
        plan = batched.plan(params, [np.ones((n, 2), np.float32) for n in lengths])
        text = jax.jit(slope).lower(params, plan).as_text()
        places = text.count("stablehlo.gather"), text.count("stablehlo.scatter")
        found.append((places, text.count(f"@{target_of('read_instances')}(")))
    (few_places, few_reads), (many_places, many_reads) = found
    assert few_places == many_places
    assert few_reads < many_reads


def test_members_without_jit():
    """As when one looks for an error; tables are arrays of NumPy then."""
    table = np.array([1, 0, 2, 30, 31], np.int32)
    of = Members(0, 2, 3, (3,), (), True)
    with jax.disable_jit():
        calls, alive, (numbers,) = find_members(of, table, 0, None)
    assert calls.tolist() == [1, 0, 1]
    assert alive.tolist() == [True, True, False]
    assert numbers.tolist() == [31, 30, 31]
