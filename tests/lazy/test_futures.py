"""What a lazy scope leaves behind is an array of JAX, under its transformations too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.helpers import assert_close, loop, mostly_slow, number
from cases.scopes import PARAMS, TREES, H, encode, leaf, node, total, total_by_loop

import jedbatch
from jedbatch.errors import SymbolicValueError


def test_a_computed_future_is_an_array():
    eye = jnp.eye(3)
    with jedbatch.lazy():
        x = eye @ np.arange(3, dtype=np.float32)
        s = x.sum()
    plain = jnp.arange(3.0)
    assert isinstance(x, jax.Array)
    assert_close(jnp.asarray(x), plain, 1e-6)
    assert_close(jnp.stack([x, x]), jnp.stack([plain, plain]), 1e-6)
    assert_close(jax.jit(lambda a, b: a * b)(x, s), plain * 3, 1e-6)
    assert_close(jax.jit(lambda a: a * x + s)(plain), plain * plain + 3, 1e-6)
    assert_close(jax.vmap(lambda a: a * s)(x), plain * 3, 1e-6)
    assert_close(jax.vmap(lambda a: a * x)(jnp.ones(2)), jnp.stack([plain, plain]), 1e-6)
    assert_close(jax.grad(lambda a: (a * a * x).sum())(x), 2 * plain * plain, 1e-6)
    assert_close(jax.grad(jax.jit(lambda a: (a * a * x).sum()))(x), 2 * plain * plain, 1e-6)
    assert_close(jax.grad(lambda a: jax.jit(lambda b: b * a * x)(a).sum())(x), 2 * plain**2, 1e-6)
    assert_close(jax.lax.fori_loop(0, 3, lambda _, a: a + x, x), 4 * plain, 1e-6)
    assert_close(jax.lax.cond(s > 1, lambda a: a + x, lambda a: a, x), 2 * plain, 1e-6)
    assert_close(jax.tree.map(lambda a: a + 1, {"x": x}), {"x": plain + 1}, 1e-6)
    for _ in range(3):
        assert_close(jax.jit(jnp.sin)(x), jnp.sin(plain), 1e-6)
    assert_close(jax.device_put(jnp.asarray(x)), plain, 1e-6)
    assert_close(x.at[0].set(5.0), plain.at[0].set(5.0), 1e-6)
    assert_close(jedbatch.batch(lambda p, i: p * i)(x, [1, 2]), jnp.stack([plain, 2 * plain]), 1e-6)
    assert x.sharding == plain.sharding
    assert x.devices() == plain.devices()
    np.testing.assert_array_equal(np.add(np.ones(3), x), 1 + np.arange(3))


def test_futures_of_earlier_scopes():
    """They are data: nodes that read different ones run together."""
    with jedbatch.lazy():
        states = [leaf(PARAMS, i) for i in range(6)]
    with jedbatch.lazy() as scope:
        states = [node(PARAMS, h, h) + h for h in states]
    assert scope.rounds[0].batches == 2
    expected = [leaf(PARAMS, i) for i in range(6)]
    expected = [node(PARAMS, h, h) + h for h in expected]
    assert_close([jnp.asarray(h) for h in states], expected, 1e-5)


# --- transformations ---


def several_scopes(params):
    """States go from scope to scope, some values are decided on, some added up outside."""
    with jedbatch.lazy():
        states = [leaf(params, i) for i in range(4)]
    mean = sum(states) / 4
    with jedbatch.lazy():
        states = [node(params, h, mean) for h in states]
        if states[0].sum() > 0:
            states = [h * 2 for h in states]
        loss = sum(h.sum() for h in states)
    return loss * loss + mean[0]


def several_by_loop(params):
    states = [leaf(params, i) for i in range(4)]
    mean = sum(states) / 4
    states = [node(params, h, mean) for h in states]
    if states[0].sum() > 0:
        states = [h * 2 for h in states]
    loss = sum(h.sum() for h in states)
    return loss * loss + mean[0]


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (3 * x * g,))

MANY = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), PARAMS)
TRANSFORMED = {
    "grad": lambda f: jax.grad(f)(PARAMS),
    "value_and_grad": lambda f: jax.value_and_grad(f)(PARAMS),
    "has_aux": lambda f: jax.value_and_grad(lambda p: (f(p) * 2, {"aux": f(p)}), has_aux=True)(
        PARAMS
    ),
    "vjp": lambda f: jax.vjp(f, PARAMS)[1](2.0),
    "jacrev": lambda f: jax.jacrev(f)(PARAMS),
    "grad of a result used twice": lambda f: jax.grad(lambda p: (x := f(p)) * x + jnp.sin(x))(
        PARAMS
    ),
    "grad of a closure": lambda f: jax.grad(lambda s: f({**PARAMS, "b": PARAMS["b"] * s}))(2.0),
    "forward over reverse": lambda f: jax.hessian(lambda b: f({**PARAMS, "b": b}))(PARAMS["b"]),
    "jit in grad": lambda f: jax.grad(lambda p: jax.jit(lambda y: y * y)(f(p)))(PARAMS),
    "closed over by a jit in grad": lambda f: jax.grad(
        lambda p: (lambda x: jax.jit(lambda y: y * x)(2.0))(f(p))
    )(PARAMS),
    "scan in grad": lambda f: jax.grad(
        lambda p: (lambda x: jax.lax.scan(lambda c, _: (c * x, x), x, length=2)[0])(f(p))
    )(PARAMS),
    "cond in grad": lambda f: jax.grad(
        lambda p: (lambda x: jax.lax.cond(x > 0, lambda: x * x, lambda: x))(f(p))
    )(PARAMS),
    "custom rule in grad": lambda f: jax.grad(lambda p: jax.nn.silu(optax.l2_loss(f(p))))(PARAMS),
    "two rules in grad": lambda f: jax.grad(lambda p: clipped(f(p) / 100) + clipped(f(p)))(PARAMS),
    "outer tracers in an inner grad": lambda f: jax.grad(
        lambda p: jax.grad(lambda s: s * s * f(p))(2.0) * f(p)
    )(PARAMS),
    "vmap in grad": lambda f: jax.grad(
        lambda p: (lambda x: jax.vmap(lambda y: y * x)(jnp.arange(3.0)).sum())(f(p))
    )(PARAMS),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(PARAMS),
}
STAGED = {
    "jit": lambda f: jax.jit(f)(PARAMS),
    "jit of grad": lambda f: jax.jit(jax.value_and_grad(f))(PARAMS),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(PARAMS),
    "vmap": lambda f: jax.vmap(f)(MANY),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(MANY),
    "grad of vmap": lambda f: jax.grad(lambda p: jax.vmap(f)(p).sum())(MANY),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(MANY),
    "scan": lambda f: jax.lax.scan(lambda s, _: (s + f(PARAMS) * s, s), 1.0, length=2),
}


FAST = ["value_and_grad", "two rules in grad"]


@pytest.mark.parametrize("name", mostly_slow([*FAST, "checkpoint", *STAGED], *FAST, "grad of jit"))
def test_transformations_of_a_scope(name):
    """Those that stage it, and a few; all others are tried on several rounds."""
    run = (TRANSFORMED | STAGED)[name]
    assert_close(run(total), run(total_by_loop), 1e-4)


@pytest.mark.parametrize("name", mostly_slow(list(TRANSFORMED)[:-1], "two rules in grad"))
def test_transformations_of_several_rounds(name):
    run = TRANSFORMED[name]
    assert_close(run(several_scopes), run(several_by_loop), 1e-4)


@pytest.mark.slow
def test_reverse_over_reverse():
    twice = lambda f: jax.grad(lambda p: number(jax.grad(f)(p)))(PARAMS)  # noqa: E731
    assert_close(twice(total), twice(total_by_loop), 1e-4)


def test_forward_mode():
    assert_close(
        jax.jvp(total, (PARAMS,), (PARAMS,)), jax.jvp(total_by_loop, (PARAMS,), (PARAMS,)), 1e-4
    )


def test_pytrees_of_futures_leave_a_transformation():
    def states(params):
        with jedbatch.lazy():
            found = {"h": [encode(params, t) for t in TREES[:2]], "n": jnp.argmax(params["b"])}
        return found["h"][0].sum(), found

    def by_loop(params):
        found = {"h": [encode(params, t) for t in TREES[:2]], "n": jnp.argmax(params["b"])}
        return found["h"][0].sum(), found

    for transform in (lambda f: jax.value_and_grad(f, has_aux=True), jax.jit):
        got, expected = transform(states)(PARAMS), transform(by_loop)(PARAMS)
        assert_close(jax.tree.map(jnp.asarray, got), expected, 1e-5)


def test_a_value_under_jit():
    def decides(params):
        with jedbatch.lazy():
            h = encode(params, (1, 2))
            return h if h.sum() > 0 else -h

    with pytest.raises(SymbolicValueError, match=r"jedbatch\.errors\.SymbolicValueError"):
        jax.jit(decides)(PARAMS)
    with pytest.raises(SymbolicValueError):
        jax.grad(lambda p: float(total(p)) * p["b"].sum())(PARAMS)


@pytest.mark.slow
def test_grad_inside_of_a_scope():
    loss = lambda p, t: (encode(p, t) ** 2).sum()  # noqa: E731
    with jedbatch.lazy():
        got = [jax.value_and_grad(loss)(PARAMS, t) for t in TREES]
    expected = [jax.value_and_grad(loss)(PARAMS, t) for t in TREES]
    assert_close(jax.tree.map(jnp.asarray, got), expected, 1e-5)


@pytest.mark.slow
def test_transformations_of_futures_inside_of_a_scope():
    with jedbatch.lazy():
        h = encode(PARAMS, (1, 2))
        got = {
            "grad": jax.grad(lambda x: (x * x * h).sum())(h),
            "vmap": jax.vmap(lambda x: x * h)(np.ones(2, np.float32)),
            "jit": jax.jit(lambda x: x + h)(h),
            "scan": jax.lax.scan(lambda c, x: (c + x, c * h), h[0], h)[1],
            "outer": jax.grad(lambda p: total(p) * h[0])(PARAMS),
            "batch": jedbatch.batch(encode)(PARAMS, TREES) * h[None],
            "batch over futures": jedbatch.batch(lambda p, x: p["b"] * x + h)(PARAMS, [h, h * 2]),
        }
    h = encode(PARAMS, (1, 2))
    expected = {
        "grad": 2 * h * h,
        "vmap": jnp.stack([h, h]),
        "jit": h + h,
        "scan": jax.lax.scan(lambda c, x: (c + x, c * h), h[0], h)[1],
        "outer": jax.grad(lambda p: total_by_loop(p) * h[0])(PARAMS),
        "batch": loop(encode, PARAMS, TREES) * h[None],
        "batch over futures": jnp.stack([PARAMS["b"] * h + h, PARAMS["b"] * h * 2 + h]),
    }
    assert_close(jax.tree.map(jnp.asarray, got), expected, 1e-5)


def test_gradients_of_a_batched_function_inside_of_a_scope():
    batched = jedbatch.batch(encode)

    def by_scope(params):
        with jedbatch.lazy():
            return number(batched(params, TREES)) + encode(params, TREES[0]).sum()

    def by_loop(params):
        return number(loop(encode, params, TREES)) + encode(params, TREES[0]).sum()

    assert_close(jax.value_and_grad(by_scope)(PARAMS), jax.value_and_grad(by_loop)(PARAMS), 1e-5)


def test_a_scope_inside_of_a_batched_function():
    def fn(params, t):
        with jedbatch.lazy() as scope:
            h = encode(params, t)
        assert not scope.rounds
        return h

    assert_close(jedbatch.batch(fn)(PARAMS, TREES), loop(encode, PARAMS, TREES), 1e-5)


def test_a_scope_inside_of_a_cell():
    @jedbatch.cell
    def pair(params, x):
        with jedbatch.lazy():
            return node(params, x, x) + x

    x = jnp.ones(H)
    assert_close(jnp.asarray(pair(PARAMS, x)), node(PARAMS, x, x) + x, 1e-5)
    with jedbatch.lazy():
        y = pair(PARAMS, leaf(PARAMS, 1))
    x = leaf(PARAMS, 1)
    assert_close(jnp.asarray(y), node(PARAMS, x, x) + x, 1e-5)
