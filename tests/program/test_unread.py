"""Results that no loss reads add nothing to gradients, whatever runs the program.

The derivative of the second result of each function is infinite; the loop over instances does not
compute it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close
from jax.sharding import Mesh

import jedbatch
from jedbatch import Exported

WEIGHT = jnp.asarray([0.5, -1.0, 2.0])
XS = [np.asarray(x, np.float32) for x in ([1, 2, 3], [-1, 0.5, 2], [2, 1, -3], [0.5, 1, 1])]


@jedbatch.cell
def value_and_norm(w, x):
    return jnp.tanh(w * x), jnp.linalg.norm(0 * w * x)


def norms(w, x):
    y, norm = value_and_norm(w, x)
    return (y * x).sum(), jnp.log(norm) + y


def decides(w, x):
    y, norm = value_and_norm(w, x)
    while y.sum() > 0.5:
        y = y - value_and_norm(w, y)[0] ** 2
    return y.sum(), jnp.log(norm) + jnp.sqrt(0 * y)


@jedbatch.cell
def steps(w, n, x):
    """A loop of branches with two results."""

    def step(k, carry):
        y, norm = carry
        y = jax.lax.cond(k % 2 == 0, lambda y: jnp.tanh(w * y), lambda y: y * w, y)
        return y, norm

    y, _ = jax.lax.fori_loop(0, 3, step, (x, 0.0))
    y = jax.lax.switch(n, [jnp.sin, jnp.cos, lambda y: y * w], y)
    return y, jnp.sqrt(0 * y)


def branches(w, x):
    y, norm = steps(w, jnp.int32(x[0] > 0) + jnp.int32(x[1] > 0), x)
    return y.sum(), norm * y


@jedbatch.cell
def carries(w, x):
    """A loop that carries a norm beside a value, and weights inside."""

    def step(carry, _):
        y = jnp.tanh(w * carry[0])
        return (y, jnp.sqrt(0 * y)), jnp.log(0 * y)

    (y, norm), _ = jax.lax.scan(step, (x, x), None, 3)
    return y, norm


def loops(w, x):
    y, norm = carries(w, x)
    return y.sum(), norm * carries(w, y)[0]


@jedbatch.cell
def multiplies(w, x):
    """A loop and a branch that multiply infinite values by weights."""

    def step(carry, _):
        y = jnp.tanh(w * carry[0])
        return (y, w @ jnp.log(0 * y) * w), None

    (y, infinite), _ = jax.lax.scan(step, (x, x), None, 2)
    branches = lambda y: (jnp.tanh(y), w * jnp.log(0 * y)), lambda y: (y * y, y)
    z, other = jax.lax.cond(x[0] > 0, *branches, y)
    return y + z, infinite + other


def multiplied(w, x):
    y, infinite = multiplies(w, x)
    return y.sum(), infinite


@jedbatch.cell
def chooses(w, x):
    branches = lambda y: (jnp.tanh(y), jnp.sqrt(0 * y)), lambda y: (y * y, jnp.log(0 * y))
    return jax.lax.cond(x[0] > 0, *branches, w * x)


def chosen(w, x):
    y, norm = chooses(w, x)
    return y.sum(), norm


def products_with_roots(w, x):
    """Products with what is made of the weight alone, of which two have infinite derivatives."""
    matrix = jnp.outer(w, w)
    biased = x @ jnp.tanh(matrix) + w, x @ matrix + jnp.linalg.norm(0 * matrix, axis=0)
    rows = jnp.outer(x, x)
    return *biased, rows @ jnp.tanh(matrix), rows @ jnp.sqrt(0 * matrix)


@jedbatch.cell
def maxima(w, x):
    """Maxima of what is no number, which no element equals: in a loop, and of the weight alone."""

    def step(y, _):
        return jnp.tanh(w * y), jnp.max(jnp.nan * y) * w

    y, largest = jax.lax.scan(step, w * x, None, 2)
    return y, largest, x * jnp.max(jnp.nan * w)


def by_batch(fn, w, xs, **options):
    return jedbatch.batch(fn, out_axes=None, **options)(w, xs)


def by_plan(fn, w, xs, **options):
    batched = jedbatch.batch(fn, out_axes=None, **options)
    return batched.apply(w, batched.plan(WEIGHT, xs))


def by_stacked(fn, w, xs):
    """As arrays of the results of all instances; a loss reads arrays or not."""
    first, second = jedbatch.batch(fn)(w, xs)
    return [(first, second)]


def exported_and_planned(fn, xs):
    batched = jedbatch.batch(fn, out_axes=None)
    exported = Exported.deserialize(batched.export(WEIGHT, xs, gradient=True).serialize())
    return exported, exported.plan(batched.graph(WEIGHT, xs).split(), gradient=True)


def by_export(fn, w, xs):
    exported, plan = exported_and_planned(fn, xs)
    return exported.apply(w, plan)


def by_mesh(fn, w, xs):
    batched = jedbatch.batch(fn, out_axes=None)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return batched.apply(w, batched.plan(WEIGHT, xs, mesh=mesh))


def by_scope(fn, w, xs):
    with jedbatch.lazy():
        return [fn(w, x) for x in xs]


CASES = {
    "batch": (by_batch, norms),
    "plan": (by_plan, norms),
    "arrays": (by_stacked, norms),
    "decisions": (by_batch, decides),
    "lanes": (functools.partial(by_plan, control_flow="lanes"), branches),
    "lock step": (functools.partial(by_plan, control_flow="lockstep"), branches),
    "carried": (by_plan, loops),
    "carried in remat": (by_plan, lambda w, x: jax.checkpoint(loops)(w, x)),
    "multiplied": (by_plan, multiplied),
    "chosen": (by_plan, chosen),
    "chosen by lanes": (functools.partial(by_plan, control_flow="lanes"), chosen),
    "roots of weights": (by_plan, jedbatch.cell(products_with_roots)),
    "maxima": (by_plan, maxima),
    "export": (by_export, norms),
    "mesh": (by_mesh, norms),
    "scope": (by_scope, norms),
}


@pytest.mark.parametrize("name", CASES)
def test_unread_results_add_nothing(name):
    run, fn = CASES[name]

    def slope(run, read):
        return jax.grad(lambda w: read(run(w)))(WEIGHT)

    for read in (
        lambda found: sum(own[0].sum() for own in found),
        lambda found: jnp.sum(found[-1][0]) ** 2,
    ):
        expected = slope(lambda w: [fn(w, x) for x in XS], read)
        if name == "arrays":
            expected = slope(lambda w: [(jnp.stack([fn(w, x)[0] for x in XS]),)], read)
        assert np.isfinite(expected).all()
        assert_close(slope(lambda w: run(fn, w, XS), read), expected, 1e-5)


@jedbatch.cell
def switches(w, x):
    """A branch of three, of which two multiply by weights."""
    branches = [
        lambda y: (jnp.tanh(y), jnp.sqrt(0 * y)),
        lambda y: (y * y, jnp.log(0 * y)),
        lambda y: (jnp.sin(y) * w, w * jnp.log(0 * y)),
    ]
    return jax.lax.switch(jnp.int32(x[0] > 0) + jnp.int32(x[1] > 0), branches, w * x)


@pytest.mark.parametrize("control_flow", ["lanes", "auto"])
def test_unread_results_of_many_lanes_add_nothing(control_flow):
    """Of so many that each branch runs for its own."""

    def fn(w, x):
        return switches(w, switches(w, x)[0])

    xs = list(np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32))
    batched = jedbatch.batch(fn, out_axes=None, control_flow=control_flow)
    plan = batched.plan(WEIGHT, xs)
    own = jax.jit(jax.grad(lambda w, x: fn(w, x)[0].sum()))
    for which in (range(len(xs)), [70]):
        found = jax.grad(
            lambda w, which=which: sum(batched.apply(w, plan)[i][0].sum() for i in which)
        )
        expected = sum(own(WEIGHT, xs[i]) for i in which)
        assert np.isfinite(expected).all()
        assert_close(found(WEIGHT), expected, 1e-4)


def root(w, x):
    """A root whose derivative is infinite for the first instance alone."""
    return (jnp.sqrt(w * w * jnp.abs(x[0] - 1)).sum(),)


@pytest.mark.parametrize("run", [by_batch, by_plan, by_mesh, by_scope, by_export])
def test_unread_instances_add_nothing(run):
    def slope(run):
        return jax.grad(lambda w: run(root, w, XS)[-1][0])(WEIGHT)

    expected = slope(lambda fn, w, xs: [fn(w, x) for x in xs])
    assert np.isfinite(expected).all()
    assert_close(slope(run), expected, 1e-5)


def test_unread_instances_of_plans_that_a_jit_takes():
    exported, plan = exported_and_planned(root, XS)
    step = jax.jit(jax.grad(lambda w, plan: sum(y for (y,) in exported.apply(w, plan)[1:])))
    expected = jax.grad(lambda w: sum(root(w, x)[0] for x in XS[1:]))(WEIGHT)
    assert_close(step(WEIGHT, plan), expected, 1e-5)


@jax.custom_vjp
def projected(w, x):
    """Two results with a derivative that is a rule, in which there are no gates."""
    return jnp.tanh(x @ w), jnp.sqrt(1 + jnp.square(x))


def _forward(w, x):
    return projected(w, x), (w, x)


def _back(kept, cotangents):
    return jax.vjp(lambda w, x: (jnp.tanh(x @ w), jnp.sqrt(1 + jnp.square(x))), *kept)[1](
        cotangents
    )


projected.defvjp(_forward, _back)


def test_a_rule_of_several_results():
    weight, rows = (
        jnp.linspace(-1, 1, 16).reshape(4, 4),
        list(jnp.linspace(-1, 1, 24).reshape(6, 4)),
    )
    cell = jedbatch.cell(projected)
    batched = jedbatch.batch(lambda w, x: cell(w, x + 0)[0], out_axes=None)
    ours = jax.grad(lambda w: sum(y.sum() for y in batched(w, rows)))(weight)
    theirs = jax.grad(lambda w: sum(projected(w, x)[0].sum() for x in rows))(weight)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
