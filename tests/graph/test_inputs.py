"""Columns of inputs are cut into the parts that each instance has of them."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._graph.inputs import InputColumns, InputRows, bytes_of_inputs, types_and_counts
from jedbatch._graph.types import ValueType

INT, VECTOR = ValueType((), np.dtype(np.int32)), ValueType((2,), np.dtype(np.float32))


def _drawn(seed):
    """(columns of parts of random lengths and types, the parts)."""
    rng = np.random.default_rng(seed)
    types = (INT, VECTOR)
    parts = []
    for c in rng.integers(0, 2, 12).tolist():
        shape = int(rng.integers(0, 4)), *types[c].shape
        parts.append((c, rng.integers(0, 9, shape).astype(types[c].dtype)))
    columns = [
        np.concatenate([np.zeros((0, *t.shape), t.dtype), *(x for p, x in parts if p == c)])
        for c, t in enumerate(types)
    ]
    ends = np.cumsum([0, *(len(x) for _, x in parts)])
    return InputColumns(types, columns, np.array([c for c, _ in parts]), ends), parts


@pytest.mark.parametrize("seed", range(5))
def test_columns_are_cut_into_their_parts(seed):
    columns, parts = _drawn(seed)
    assert len(columns) == len(parts)
    for found, (c, rows) in zip(columns, parts, strict=True):
        assert found.type is columns.types[c]
        assert found.leaf is None
        np.testing.assert_array_equal(found.rows, rows)
    assert columns[3:5] == tuple(columns)[3:5]
    assert columns[-1] is list(columns)[-1]


@pytest.mark.parametrize("seed", range(3))
def test_columns_say_the_same_as_their_parts(seed):
    columns, parts = _drawn(seed)
    same = tuple(InputRows(columns.types[c], rows) for c, rows in parts)
    assert types_and_counts(columns) == types_and_counts(same)
    assert bytes_of_inputs(columns) == bytes_of_inputs(same)
    again = pickle.loads(pickle.dumps(columns))
    assert types_and_counts(again) == types_and_counts(same)
    for a, b in zip(again, same, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)


@jedbatch.cell
def look_up(w, n, scale, vector):
    return w[n] * scale + vector


def total(w, numbers):
    out = jnp.zeros(2)
    for k, n in enumerate(numbers):
        out = look_up(w, n, float(n) / 2, np.full(2, k, np.float32)) + out
    return out


@pytest.mark.parametrize("native", ["0", "1"])
def test_inputs_are_the_same_joined_from_instances_and_taken_as_recorded(native, monkeypatch):
    monkeypatch.setenv("JEDBATCH_NATIVE", native)
    w = jnp.arange(40.0).reshape(20, 2)
    rng = np.random.default_rng(0)
    instances = [tuple(rng.integers(0, 20, n).tolist()) for n in (3, 1, 4, 1, 5, 9, 2, 6)]
    together, apart = jedbatch.batch(total), jedbatch.batch(total)
    recorded = together.plan(w, instances)
    for first in (0, 4):
        apart.plan(w, instances[first : first + 4])
    joined = apart.plan(w, instances)
    assert recorded.host.num_known == 0
    assert joined.host.num_known == len(instances)
    assert isinstance(recorded.graph.inputs, InputColumns)
    assert recorded.inputs.keys() == joined.inputs.keys()
    for name, rows in recorded.inputs.items():
        assert rows.dtype == joined.inputs[name].dtype
        count = min(len(rows), len(joined.inputs[name]))
        np.testing.assert_array_equal(rows[:count], joined.inputs[name][:count])
    expected = [total(w, x) for x in instances]
    for plan, function in ((recorded, together), (joined, apart)):
        np.testing.assert_allclose(function.apply(w, plan), expected)
    some = [instances[i] for i in (5, 0, 7)]  # parts of what was recorded together
    np.testing.assert_allclose(together(w, some), [expected[i] for i in (5, 0, 7)])
