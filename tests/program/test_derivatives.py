"""Derivatives of any order and mode, against those of the loop over instances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, mostly_slow

import jedbatch

P = jnp.arange(1.0, 4.0)
XS = [1.0, 2.0]


@jedbatch.cell
def layer(p, x):
    return jnp.tanh(p * x)


def fn(p, x):
    return layer(p, layer(p, x)) if x > 1 else layer(p, x)


batched = jedbatch.batch(fn)


def by_batch(p):
    return (batched(p, XS) ** 2).sum()


def by_loop(p):
    return sum((fn(p, x) ** 2).sum() for x in XS)


def hvp(f, p, v):
    return jax.jvp(jax.grad(f), (p,), (v,))[1]


def twice(f):
    return jax.grad(lambda p: (jax.grad(f)(p) ** 2).sum())


TRANSFORMED = {
    "forward": lambda f: jax.jvp(f, (P,), (P,)),
    "linearize": lambda f: jax.vmap(jax.linearize(f, P)[1])(jnp.eye(3)),
    "jacfwd": lambda f: jax.jacfwd(f)(P),
    "reverse over reverse": lambda f: twice(f)(P),
    "jit of both": lambda f: jax.jit(
        jax.grad(lambda p: (jax.jit(jax.grad(f))(p) * jnp.arange(3)).sum())
    )(P),
    "hessian": lambda f: jax.hessian(f)(P),
    "reverse over forward over reverse": lambda f: jax.grad(lambda p: hvp(f, p, P).sum())(P),
    "forward over reverse over reverse": lambda f: jax.jvp(twice(f), (P,), (P,))[1],
    "third order": lambda f: jax.jacrev(jax.jacfwd(jax.grad(f)))(P),
    "twice a checkpoint": lambda f: twice(jax.checkpoint(f))(P),
    "checkpoint of a gradient": lambda f: jax.grad(lambda p: jax.checkpoint(jax.grad(f))(p).sum())(
        P
    ),
    "through steps of descent": lambda f: jax.grad(
        lambda p: jax.lax.scan(lambda q, _: (q - 0.1 * jax.grad(f)(q), None), p, length=2)[0].sum()
    )(P),
    "reverse over reverse of vmap": lambda f: twice(
        lambda p: jax.vmap(lambda s: f(p * s))(jnp.arange(1.0, 3.0)).sum()
    )(P),
}


FAST = ("forward", "linearize", "reverse over reverse", "hessian")


@pytest.mark.parametrize("name", mostly_slow(TRANSFORMED, *FAST))
def test_against_the_loop(name):
    run = TRANSFORMED[name]
    assert_close(run(by_batch), run(by_loop), 2e-4)


def attend(w, x):
    h = jnp.tanh(x @ w)
    return ((jax.nn.softmax(h @ h.T, axis=-1) @ h) ** 2).sum()


ROWS = [jnp.arange(2.0 * n).reshape(n, 2) / 5 for n in (2, 3, 2)]
W = jnp.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]])
OF_ROWS = {
    "linearize": lambda f: jax.linearize(lambda w: f(w, ROWS), W)[1](jnp.ones_like(W)),
    "reverse over forward": lambda f: jax.grad(
        lambda w: jax.jvp(lambda w: f(w, ROWS), (w,), (W,))[1]
    )(W),
    "by weights, then by rows": lambda f: jax.grad(lambda xs: (jax.grad(f)(W, xs) ** 2).sum())(
        ROWS
    ),
}


@pytest.mark.parametrize("target", mostly_slow(["cpu", "gpu"], "cpu"))
@pytest.mark.parametrize("name", mostly_slow(OF_ROWS, "reverse over forward"))
def test_of_arrays_of_any_length(name, target):
    run = OF_ROWS[name]
    many = jedbatch.batch(attend, target=target)
    assert many.plan(W, ROWS).ragged
    found = run(lambda w, xs: many(w, xs).sum())
    assert_close(found, run(lambda w, xs: sum(attend(w, x) for x in xs)), 2e-4)


def test_where_python_decides_there_is_reverse_mode_only():
    def decides(p, x):
        y = layer(p, x)
        return y * 2 if y.sum() > 0 else -y

    run = jedbatch.batch(decides)
    with pytest.raises(TypeError, match=r"decides on values.*reverse mode only.*jax\.grad"):
        jax.jvp(lambda p: run(p, XS).sum(), (P,), (P,))


def test_forces_in_a_loss():
    """Gradients with respect to inputs, in a loss that is differentiated by parameters."""
    plan = batched.plan(P, XS)
    xs = {name: x for name, x in plan.inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def loss(energy):
        def of(p):
            forces = jax.grad(lambda xs: energy(p, xs))(xs)
            return sum((x**2).sum() for x in jax.tree.leaves(forces))

        return jax.grad(of)(P)

    def by_loop(p, xs):
        rows = xs["float32[]"]
        return sum(
            (layer(p, layer(p, x)) if k else layer(p, x)).sum() for k, x in enumerate(rows[:2])
        )

    found = loss(lambda p, xs: batched.apply(p, plan, inputs={**plan.inputs, **xs}).sum())
    assert_close(found, loss(by_loop), 1e-4)


def test_zeros_stay_symbolic_in_second_derivatives():
    """A result that nobody differentiates has an infinite slope."""

    @jedbatch.cell
    def two(p, x):
        return jnp.sin(p * x), jnp.sqrt(0 * p.sum())

    run = jedbatch.batch(two)
    of = lambda both: twice(lambda p: both(p).sum())(P)  # noqa: E731
    assert_close(of(lambda p: run(p, XS)[0]), of(lambda p: sum(two(p, x)[0] for x in XS)), 1e-4)


def test_inside_of_shard_map():
    """Without `jit` around it, zeros are symbolic there too."""

    @jedbatch.cell
    def two(p, x):
        return p * x, jnp.sqrt(0 * p.sum())

    run = jedbatch.batch(two)
    plan = run.plan(P, [np.float32(1)])
    gradient = jax.shard_map(
        jax.grad(lambda p: run.apply(p, plan)[0].sum()),
        mesh=jax.make_mesh((1,), ("d",)),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )
    assert_close(gradient(P), jnp.ones(3), 1e-6)
