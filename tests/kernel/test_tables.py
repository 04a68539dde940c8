"""Functions of rows of small tables are computed once for each row, with the loop's answers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, compilations, mostly_slow

import jedbatch
from jedbatch._kernel import tables

ROWS = jnp.array([[0.3, -0.7, 0.0], [0.0, 4.0, 0.1], [1.5, 0.2, 2.0], [0.5, 0.5, 0.7]])
NAN = jnp.nan


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    """Tables are made however little they save."""
    monkeypatch.setattr(tables, "LEAST_WORK", 1)


@jedbatch.cell
def scaled(p, kind, x):
    return x * jax.nn.log_softmax(p[kind])


@jedbatch.cell
def joined(a, b):
    return jnp.tanh(a + b)


def of_tree(cell):
    def fn(p, tree):
        if isinstance(tree, int):
            return cell(p, tree, 0.5 * tree + 1.0)
        return joined(fn(p, tree[0]), fn(p, tree[1]))

    return fn


TREES = [((1, 2), 1), (0, (1, (2, 2))), 1]


def tables_of(batched, *args):
    """How many tables the kernels of a plan have."""
    kernels = batched.plan(*args).static.signature.kernels
    return [len(kernel.tables) for kernel in kernels if kernel.node_type.shared]


def test_rows_are_computed_once():
    fn = of_tree(scaled)
    batched = check(fn, ROWS, TREES, inference=True)
    assert tables_of(batched, ROWS, TREES) == [1]
    with compilations() as made:
        batched(ROWS, [(3, 2), ((1, 0), 2), 2])
    assert not made


@pytest.mark.parametrize("target", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_gradients_of_any_order(target):
    fn = of_tree(scaled)
    batched = jedbatch.batch(fn, target=target)
    value = lambda run: lambda p: jnp.sin(run(p)).sum()  # noqa: E731
    ours = value(lambda p: batched(p, TREES))
    loop = value(lambda p: jnp.stack([fn(p, tree) for tree in TREES]))
    ones = jnp.ones_like(ROWS)
    for of in (
        lambda f: jax.grad(f)(ROWS),
        lambda f: jax.jvp(f, (ROWS,), (ones,)),
        lambda f: jax.jvp(jax.grad(f), (ROWS,), (ones,)),
    ):
        for a, b in zip(jax.tree.leaves(of(ours)), jax.tree.leaves(of(loop)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


ROOTS = {  # whose derivatives are infinite, or NaN, somewhere
    "infinite": (lambda row: jnp.sqrt(row), ROWS.at[3].set(0.0)),
    "not a number": (lambda row: jnp.log(row - 1.0).sum() * row, ROWS.at[3].set(NAN)),
    "where": (lambda row: jnp.where(row > 0, jnp.sqrt(row), 0.0), ROWS.at[2, 0].set(0.0)),
}


@pytest.mark.parametrize("name", mostly_slow(ROOTS, "infinite"))
@pytest.mark.parametrize("kinds", [[0, 1, 2], [3, 1, 1]])
def test_rows_that_are_not_read_send_nothing_back(name, kinds):
    """Nor do those that are read for a result that nobody reads."""
    function, rows = ROOTS[name]
    rows = jnp.abs(rows) + 1e-3 * (rows > 0) * (name == "where")
    cell = jedbatch.cell(lambda p, kind, x: (x * function(p[kind]), x))
    batched = jedbatch.batch(lambda p, x: cell(p, *x)[x[0] % 2], out_axes=None)
    instances = [(kind, 1.0 + k) for k, kind in enumerate(kinds)]

    def loop(p):
        return [cell(p, *x)[x[0] % 2] for x in instances]

    ours = lambda p: sum(jnp.sum(y) for y in batched(p, instances))  # noqa: E731
    expected = jax.grad(lambda p: sum(jnp.sum(y) for y in loop(p)))(rows)
    np.testing.assert_allclose(jax.grad(ours)(rows), expected, rtol=1e-5)
    np.testing.assert_array_equal(jnp.isnan(jax.grad(ours)(rows)), jnp.isnan(expected))
    assert tables_of(batched, rows, instances) == [1]


def test_rows_of_arrays_as_instances():
    """They run as under `jax.vmap`, whose derivatives are JAX's."""
    rows = ROWS.at[3].set(0.0)
    cell = jedbatch.cell(lambda p, kind, x: x * jnp.sqrt(p[kind]))
    kinds, xs = jnp.array([2, 0, 2]), jnp.array([1.0, 2.0, 3.0])
    batched = jedbatch.batch(lambda p, kind, x: cell(p, kind, x), in_axes=(None, 0, 0))
    rows = jnp.abs(rows) + 0.1 * (jnp.arange(4) < 3)[:, None]
    ours = jax.grad(lambda p: batched(p, kinds, xs).sum())(rows)
    loop = jax.grad(lambda p: sum(cell(p, *x).sum() for x in zip(kinds, xs, strict=True)))(rows)
    assert_close(ours, loop, rtol=1e-5)


def test_an_index_that_is_out_of_bounds_is_clamped():
    def cell(p, kind, x):
        return x * jax.nn.softmax(jax.lax.dynamic_index_in_dim(p, kind, keepdims=False))

    fn = of_tree(jedbatch.cell(cell))
    batched = check(fn, ROWS, [(1, 9), (-1, 3), 7])
    assert tables_of(batched, ROWS, [(1, 9)]) == [1]


def both(p, kind, x):
    row = p[kind]
    return x * jnp.tanh(row) @ jnp.exp(row) + p[0, 0] * row.sum()


def test_a_row_may_be_read_as_it_is_too():
    fn = of_tree(jedbatch.cell(both))
    assert tables_of(check(fn, ROWS, TREES), ROWS, TREES) == [1]


NO_TABLES = {
    "of another weight": lambda p, kind, x: x * jnp.tanh(p[kind] * p.sum()),
    "of an operand": lambda p, kind, x: jnp.tanh(p[kind] * x),
    "nothing but moved": lambda p, kind, x: x * p[kind][::-1].reshape(3, 1),
    "more than is read": lambda p, kind, x: x * jnp.outer(p[kind], jnp.ones(9)),
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_what_gains_nothing_has_no_table(name):
    batched = jedbatch.batch(lambda p, x: jedbatch.cell(NO_TABLES[name])(p, *x).sum())
    assert tables_of(batched, ROWS, [(1, 2.0)]) == [0]


def test_large_tables_are_looked_up_as_they_are():
    """A table costs no more than a chunk of lanes."""
    target = dataclasses.replace(jedbatch.Target.named("cpu"), chunk_work=10.0)
    plans = [jedbatch.batch(of_tree(scaled), target=t) for t in ("cpu", target)]
    assert [tables_of(batched, ROWS, TREES) for batched in plans] == [[1], [0]]
