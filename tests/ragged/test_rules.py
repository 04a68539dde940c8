"""The rules of the ragged engine by themselves, on traced functions of symbolic shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from jedbatch._jaxpr.interpret import interpret
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError, mixed_axes
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.padding.row_rules import run_row
from jedbatch._jaxpr.symbolic_dims import make_symbol, ragged_axes
from jedbatch._kernel.target import CPU
from jedbatch._ragged.length_families import LengthFamily
from jedbatch._ragged.packed_program import PackedProgram
from jedbatch._ragged.packing import RowCapacity
from jedbatch._ragged.phases import find_phases
from jedbatch._ragged.tiling import find_tiles

N = make_symbol("n", export.SymbolicScope(["n >= 2"]))
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
W = jnp.eye(4)
LAST, PADDED = 3, 5  # rows of X that exist, and all of them
ROW_WISE = {
    "tanh": jnp.tanh,
    "features": lambda x: x.sum(axis=1),
    "softmax of features": lambda x: jnp.exp(x - x.max(axis=1, keepdims=True)),
    "product": lambda x: x @ jnp.ones((4, 2)),
    "columns": lambda x: x[:, 1:3],
    "added to features": lambda x: x.at[:, jnp.array([0, 2])].add(x[:, :2]),
    "flattened features": lambda x: x.reshape(x.shape[0], 2, 2),
    "beside a repeated row": lambda x: x + jnp.tile(W[1:2], (x.shape[0], 1)),
}
ACROSS_ROWS = {
    "sum": lambda x: x.sum(axis=0),
    "maximum": lambda x: x.max(axis=0),
    "sums": lambda x: lax.cumsum(x, axis=0),
    "sorted": lambda x: lax.sort(x, dimension=0),
    "reversed": lambda x: lax.rev(x, (0,)),
    "gram": lambda x: x.T @ x,
    "joined": lambda x: lax.concatenate([x, x], 0),
    "first": lambda x: lax.slice(x, (0, 0), (1, 4)),
    "product of all": lambda x: lax.reduce_prod(x, axes=(0,)),
    "index of the largest": lambda x: lax.argmax(x, 0, jnp.int32),
    "sums from the end": lambda x: lax.cumsum(x, axis=0, reverse=True),
    "products": lambda x: lax.cumprod(x, axis=0),
    "maxima": lambda x: lax.cummax(x, axis=0),
    "flat": lambda x: 2 * x.reshape(-1),
    "joined with others": lambda x: lax.concatenate([W[:2], x, W[:1]], 0),
    "padded": lambda x: lax.pad(x, jnp.float32(7), [(1, 2, 0), (0, 0, 0)]),
    "largest": lambda x: lax.top_k(x.T, 2)[0].T,
    "repeated": lambda x: jnp.tile(x, (2, 3)),
    "columns one after the other": lambda x: 2 * x.T.reshape(-1),
    "branch": lambda x: lax.cond(x[0, 0] > 0, lambda: 1.0 * x.shape[0], lambda: 2.0) * x[::2],
    "loop": lambda x: lax.scan(lambda c, row: (jnp.sin(c + row),) * 2, jnp.zeros(4), x)[1],
}
BY_INDEX = {
    "added to": lambda x: x.at[jnp.array([0, 2, 0, 4])].add(1.0),
    "largest of some": lambda x: x.at[jnp.array([0, -1, 9])].max(0.5),
    "set": lambda x: x.at[jnp.array([1, 4]), 2].set(W[0, :2], mode="clip"),
    "some": lambda x: x[jnp.array([0, 4, -1])],
    "added up": lambda x: jnp.ones((3, 4)).at[lax.rem(jnp.arange(x.shape[0]), 2)].add(x),
    "added to columns": lambda x: x.T.at[:, jnp.arange(x.shape[0])].add(x.T).T,
}


def traced(fn, shape=(N, 4)):
    return jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, jnp.float32))


def run(closed, x, run_equation):
    """Evaluates a traced function of x, equation by equation."""
    return interpret(closed.jaxpr, closed.consts, [x], run_equation)[0]


@pytest.mark.parametrize("fn", ROW_WISE.values(), ids=ROW_WISE)
def test_row_wise(fn):
    closed = traced(fn)
    assert not any(map(mixed_axes, closed.jaxpr.eqns))
    rows = [run(closed, x, lambda eqn, values: run_row(eqn, values, jnp.int32(0))) for x in X]
    np.testing.assert_allclose(jnp.stack(rows), fn(X), rtol=1e-6)


@pytest.mark.parametrize(
    "fn",
    (ACROSS_ROWS | BY_INDEX).values(),
    ids=[*ACROSS_ROWS, *(f"by index: {k}" for k in BY_INDEX)],
)
def test_across_rows(fn):
    """Padding changes nothing in the rows that exist."""
    closed = traced(fn)
    assert any(map(mixed_axes, closed.jaxpr.eqns))
    padded = Padded({"n": PADDED}, {"n": jnp.int32(LAST)}, guarded=True)
    result, expected = run(closed, X, padded.run), fn(X[:LAST])
    np.testing.assert_allclose(result[: len(expected)], expected, rtol=1e-6)


@pytest.mark.parametrize("fn", (ROW_WISE | ACROSS_ROWS).values(), ids=[*ROW_WISE, *ACROSS_ROWS])
def test_what_is_row_wise_is_seen_from_values(fn):
    """A change of one row changes that row of the result alone, and of every result as long."""
    changed = fn(X.at[1].add(0.5)) != fn(X)
    as_long = changed.ndim > 0 and len(changed) == len(X)
    alone = as_long and not np.delete(np.asarray(changed), 1, axis=0).any()
    mixes = any(map(mixed_axes, traced(fn).jaxpr.eqns))
    assert alone != mixes


def test_unknown_operations_are_refused():
    (eqn,) = traced(lambda x: lax.linalg.qr(x, full_matrices=False)[0], (N, N)).jaxpr.eqns[:1]
    with pytest.raises(CannotMergeError, match=eqn.primitive.name):
        mixed_axes(eqn)


def attention(x):
    queries, keys, values = (x @ (k * W) for k in range(3))
    return jnp.exp(queries @ keys.T) @ values


def test_phases_alternate():
    program = find_phases(traced(lambda x: (attention(x) @ W).sum(axis=0)), 0)
    assert [phase.extent for phase in program.phases] == [N, None, N, None]
    for phase, later in zip(program.phases, program.phases[1:], strict=False):
        assert set(phase.writes) & set(later.reads)
    for phase in program.phases:  # the scores are not kept
        assert all(len(ragged_axes(v.aval.shape)) <= 1 for v in (*phase.reads, *phase.writes))


def test_maxima_need_rows():
    program = find_phases(traced(lambda x: x.max(axis=0)), 0)
    assert [what for _, what in program.needed.nonempty] == ["a maximum"]
    assert not find_phases(traced(lambda x: x.mean(axis=0)), 0).needed.nonempty


def test_tiles():
    (*_, phase) = find_phases(traced(attention), 0).phases
    tiles = find_tiles(phase)
    assert tiles[phase.writes[0]] == {0}
    assert sum(v in tiles for v in phase.reads) == 1  # the queries; keys and values are whole
    (*_, phase) = find_phases(traced(lambda x: lax.cumsum(x, axis=0)), 0).phases
    assert not find_tiles(phase)


def test_tables_say_where_rows_are():
    packed = PackedProgram(find_phases(traced(lambda x: jnp.tanh(x).sum(axis=0)), 0))
    capacity = RowCapacity(4, (16,), (8, 16), False, CPU)
    table = packed.table(capacity, {"n": np.array([3, 1, 10])})
    form = packed.form(capacity)
    assert form.view(table, "calls").tolist() == [3]
    assert form.view(table, "starts", 0)[:3].tolist() == [0, 3, 4]
    assert form.view(table, "call", 0)[:14].tolist() == [0] * 3 + [1] + [2] * 10
    assert form.view(table, "total", 0).tolist() == [14]


def test_arrays_of_equal_lengths_share_a_symbol():
    family = LengthFamily([((n, 4), jnp.float32, False) for n in (3, 3, 5)])
    family.observe([3, 3, 5])
    assert family.varied == [False] * 3
    family.observe([3, 4, 5])
    assert family.varied == [False, True, False]
    family.add([(0, 1), (1, 2)])
    assert [family.classes(e) for e in family.equal([[3, 3, 5], [3, 5, 5], [2, 2, 2]])] == [
        [0, 0, 2],
        [0, 1, 1],
        [0, 0, 0],
    ]
