"""Branches in reverse: what they save, and to which gradients a block of lanes adds."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jedbatch
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.branch_residuals import saving_little
from jedbatch._jaxpr.branches import LaneBranch, apart_with_reverse
from jedbatch._jaxpr.interpret import inlined, used_variables
from jedbatch._jaxpr.sums import added
from jedbatch._kernel.kernel import Kernel

rng = np.random.default_rng(0)
X = jnp.asarray(rng.normal(size=4), jnp.float32)
STACK = jnp.asarray(rng.normal(size=(5, 4, 4)), jnp.float32)


# --- sums ---

READS = {
    "slice": lambda w: jnp.tanh(X @ w[3]),
    "part of a slice": lambda w: (X[:2] @ w[1, 2:])[:3],
    "with steps": lambda w: X @ w[2, :, ::2],
    "several": lambda w: jnp.tanh(X @ w[0]) + X @ w[4] + X @ w[0],
    "a number of a value": lambda w: X @ w[jnp.argmax(X)],
    "rows": lambda w: w.reshape(20, 4)[jnp.array([3, 3, 17])].sum(0) * X,
    "reshaped": lambda w: X @ w.reshape(10, 2, 4)[2:4].reshape(4, 4),
    "all": lambda w: X @ w.sum(0),
    "none": lambda w: X,
}


@pytest.mark.parametrize("how", READS)
def test_sums_are_totals_plus_results(how):
    gradient = jax.grad(lambda w: jnp.square(READS[how](w)).sum())
    closed = inlined(jax.make_jaxpr(gradient)(STACK))
    total = jnp.ones_like(STACK)
    (ours,) = added(closed, [STACK], [total])
    np.testing.assert_allclose(ours, total + gradient(STACK), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["slice", "part of a slice", "several", "a number of a value"])
def test_slices_are_added_to_slices(how):
    """No operation but writing in place has a result of the size of the total."""
    gradient = jax.grad(lambda w: jnp.square(READS[how](w)).sum())
    closed = inlined(jax.make_jaxpr(gradient)(STACK))
    program = jax.make_jaxpr(lambda w, total: added(closed, [w], [total]))(STACK, STACK).jaxpr
    used = used_variables(program)
    large = [
        eqn.primitive.name
        for eqn in program.eqns
        if eqn.outvars[0] in used and eqn.outvars[0].aval.shape == STACK.shape
    ]
    assert set(large) == {"dynamic_update_slice"}


# --- what is saved ---


def stacked(w, index, x):
    return lax.switch(index, [lambda x, i=i: jnp.tanh(x @ w[i]) @ w[i] for i in range(5)], x)


def uneven(w, index, x):
    """Branches that save differently, and one that reads a table by a number of a value."""

    def looked_up(x):
        return x * w[jnp.argmax(x), 0]

    def long(x):
        return lax.scan(lambda x, m: (jnp.sin(x @ m), None), x, w)[0]

    branches = [lambda x: x, looked_up, long, lambda x: jnp.where(x > 0, x, jnp.exp(x)) @ w[0]]
    return lax.switch(index, branches, x)


def in_a_scan(w, index, x):
    def step(x, i):
        y = lax.cond(i < index, lambda x: jnp.tanh(x @ (w[1] * 2)), lambda x: x, x)
        return y, y.sum()

    return lax.scan(step, x, jnp.arange(4))[0]


def unread(w, index, x):
    """A result that nobody reads, and one that is a whole number."""
    a, _, n = lax.cond(
        index > 1, lambda x: (x @ w[0], x @ w[1], 3), lambda x: (x, jnp.sin(x), index), x
    )
    return a * n


PROGRAMS = {"stacked": stacked, "uneven": uneven, "in a scan": in_a_scan, "unread": unread}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_saved_gives_the_derivatives_of_jax(name):
    fn = PROGRAMS[name]
    program = saving_little(jax.make_jaxpr(fn)(STACK, 0, X))

    def ours(w, index, x):
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, w, index, x)[0]

    for moving in ((0, 2), (2,)):
        pulled = [
            jax.jit(jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), moving)) for f in (ours, fn)
        ]
        for index in range(5):
            args = STACK, jnp.int32(index), X
            pairs = zip(*(f(*args) for f in pulled), strict=True)
            for mine, theirs in pairs:
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_lanes_save_no_weights(name):
    closed = jax.make_jaxpr(PROGRAMS[name])(STACK, 0, X)
    number, row = ValueType((), jnp.dtype("int32")), ValueType((4,), jnp.dtype("float32"))
    operation = types.SimpleNamespace(jaxpr=closed, lists=None)
    kernel = Kernel(NodeType("node", operation, (number, row), (0,), (row,)))
    assert kernel.reverse.taps
    sizes = [math.prod(shape) for shape, _ in kernel.reverse.saved]
    assert max(sizes) == {"in a scan": 4 * 4}.get(name, 1)


# --- which gradients a block adds to ---


def test_a_branch_that_is_not_taken_adds_nothing():
    """The derivative of its weights is infinite, and that times zero is NaN."""

    def fn(w, index, x):
        branches = [lambda x, i=i: x * jnp.log(w[i]) for i in range(3)]
        return lax.switch(index, branches, x)

    w = jnp.asarray([[2.0], [0.0], [3.0]])
    index, x = jnp.asarray(rng.integers(0, 2, 80) * 2), jnp.ones((80, 1))
    closed = [jax.make_jaxpr(lambda w, x, i=i: [x * jnp.log(w[i])])(w, x[0]) for i in range(3)]
    branches = [
        LaneBranch(functools.partial(jax.core.eval_jaxpr, c.jaxpr, c.consts), frozenset([0, 1]))
        for c in closed
    ]
    ours = jax.grad(lambda w: apart_with_reverse(branches, index, [w, x], [False, True])[0].sum())
    theirs = jax.grad(lambda w: lax.map(lambda one: fn(w, *one), (index, x)).sum())
    np.testing.assert_allclose(ours(w)[::2], theirs(w)[::2], rtol=1e-6)
    assert ours(w)[1, 0] == 0


def test_gradients_are_those_of_the_loop():
    node = jedbatch.cell(uneven)

    def fn(w, instance):
        index, x = instance
        return node(w, index, node(w, 3 - index, x))

    batched = jedbatch.batch(fn, control_flow="lanes")
    given = [(int(rng.integers(4)), rng.normal(size=4).astype(np.float32)) for _ in range(150)]
    index = jnp.asarray([i for i, _ in given])
    x = jnp.stack([x for _, x in given])

    def by_loop(w):
        return jnp.square(lax.map(lambda one: fn(w, one), (index, x))).sum()

    ours = jax.grad(lambda w: jnp.square(batched(w, given)).sum())(STACK)
    np.testing.assert_allclose(ours, jax.grad(by_loop)(STACK), rtol=1e-3, atol=1e-4)
    compiled = batched.compilations
    jax.grad(lambda w: jnp.square(batched(w, given[::-1])).sum())(STACK)
    assert batched.compilations == compiled
