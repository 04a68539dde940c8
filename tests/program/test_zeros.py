"""Symbolic zeros: nothing comes back from results that nobody differentiates, as in the loop.

Every function has a slope that is infinite, a backward rule that is not linear, or a loop that has
no reverse, where the loop over instances does not look.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, mostly_slow

import jedbatch
from jedbatch._jaxpr.zeros import keeps_zeros

PARAMS = {"b": jnp.arange(3.0) + 1, "z": jnp.zeros(3)}
XS = [np.ones(3, np.float32), np.full(3, 2, np.float32), np.full(3, 0.5, np.float32)]


@jedbatch.cell
def scaled_and_norm(p, x):
    return p["b"] * x, jnp.sqrt(jnp.sum((p["z"] * x) ** 2))  # with an infinite slope at 0


@jedbatch.cell
def grown(x):
    return jax.lax.while_loop(lambda c: c.sum() < 20, lambda c: 2 * c, x)


@jax.custom_vjp
def shifted(x):
    return 2 * x


shifted.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g + 1,))


def read_by_comparison(p, x):
    y, n = scaled_and_norm(p, x)
    return jnp.where(n > 1, y / 2, y)


def last_of_a_chain(p, x):
    """Only the last of three nodes has a result that nobody reads."""
    y, n = x, jnp.float32(1)
    for _ in range(3):
        y, n = scaled_and_norm(p | {"z": p["b"]}, y * n)
    return scaled_and_norm(p, y)[0] * n


def shared_and_compared(p, x):
    return jnp.where(jnp.sqrt(p["z"]) > x, p["b"], p["b"] * x)


def stopped(p, x):
    return p["b"] * x + jax.lax.stop_gradient(jnp.sqrt(jnp.sum(p["z"] * x)))


def divided(p, x):
    return jnp.where(jnp.isfinite(p["b"] / (x - x)), 1.0, p["b"] * x)


def ruled(p, x):
    return jnp.where(jax.lax.stop_gradient(shifted(p["b"] * x)) > 2, p["b"], 2 * p["b"])


def loop_of_stopped(p, x):
    n = jax.lax.stop_gradient(jnp.abs(p["b"] * x).sum())
    return p["b"] * jax.lax.while_loop(lambda c: c < n, lambda c: c + 1, jnp.zeros(()))


def loop_on_data(p, x):
    return p["b"] * grown(x)


def loop_on_data_in_a_cell(p, x):
    return jedbatch.cell(lambda b, y, x: (b + y) * grown(x))(p["b"], p["b"] * x, x)


def loop_stopped(p, x):
    return p["b"] * jax.lax.stop_gradient(grown(p["b"] * x))


UNREAD = [
    lambda p, x: scaled_and_norm(p, x)[0],
    read_by_comparison,
    last_of_a_chain,
    shared_and_compared,
    stopped,
    divided,
    ruled,
    loop_of_stopped,
    loop_on_data,
    loop_on_data_in_a_cell,
    loop_stopped,
]


def gradients(run):
    return jax.grad(lambda p: sum(jnp.sum(x) for x in run(p)))(PARAMS)


FAST = ("stopped", "ruled", "loop_on_data", "loop_stopped")


@pytest.mark.parametrize("fn", mostly_slow(UNREAD, *FAST))
def test_results_nobody_differentiates(fn):
    batched = jedbatch.batch(fn, out_axes=None)
    expected = gradients(lambda p: [fn(p, x) for x in XS])
    assert_close(gradients(lambda p: batched(p, XS)), expected, 1e-5)


PAIRS = {
    "a slope": scaled_and_norm,
    "a rule": lambda p, x: (p["b"] * x, shifted(p["b"] * x)),
    "a loop": lambda p, x: (p["b"] * x, grown(p["b"] * x)),
    "a weight": lambda p, x: (p["b"] * x, jnp.sqrt(p["z"])),
}


@pytest.mark.parametrize("name", mostly_slow(PAIRS, "a slope", "a loop"))
def test_loss_reads_one_of_two_results(name):
    fn = PAIRS[name]
    expected = gradients(lambda p: [fn(p, x)[0] for x in XS])
    batched = jedbatch.batch(fn)
    assert_close(gradients(lambda p: batched(p, XS)[0]), expected, 1e-5)
    step = jax.grad(lambda p, plan: batched.apply(p, plan)[0].sum())
    assert_close(jax.jit(step)(PARAMS, batched.plan(PARAMS, XS)), expected, 1e-5)


def test_loss_reads_both_results_of_one_program():
    batched = jedbatch.batch(scaled_and_norm)
    p = PARAMS | {"z": PARAMS["b"]}
    plan = batched.plan(p, XS)
    step = jax.jit(jax.grad(lambda p, plan: sum(x.sum() for x in batched.apply(p, plan))))
    loop = jax.grad(lambda p: sum(jnp.sum(y) for x in XS for y in scaled_and_norm(p, x)))
    assert_close(step(p, plan), loop(p), 1e-5)


def test_loss_reads_one_instance():
    def fn(p, x):
        return jnp.sqrt(jnp.abs((p["b"] - 1) * (x - 2))).sum()

    batched = jedbatch.batch(fn, out_axes=None)
    expected = jax.grad(lambda p: fn(p, XS[2]))(PARAMS)
    assert_close(jax.grad(lambda p: batched(p, XS)[2])(PARAMS), expected, 1e-5)


@jedbatch.cell
def shifted_weight(w, x):
    return w + x


@jedbatch.cell
def root(a, x):
    return jnp.sqrt(a * x), jnp.tanh(a) * x  # with an infinite slope where x is 0


def roots(w, xs):
    """Many results of one value, each by a way of its own."""
    shared = shifted_weight(w, sum(xs))
    found = []
    for x in xs:
        a, b = root(shared, x)
        found.append(root(w, a + b)[0] if len(xs) > 2 else a)
    return found


MANY = [(0.5, 0.0, 2.0, 0.0, 0.25, 1.0, 0.0), (0.0, 3.0), (1.0, 0.5, 0.0)]


@pytest.mark.parametrize(
    "how",
    mostly_slow(["eager", "argument", "closure", "gpu"], "eager", "gpu"),
)
def test_loss_reads_some_of_many_results(how):
    """Those whose slope is finite; others share what they are made of."""
    batched = jedbatch.batch(roots, out_axes=None, target="gpu" if how == "gpu" else None)
    w = jnp.float32(1.5)

    def read(results):
        flat = [
            r
            for xs, rs in zip(MANY, results, strict=True)
            for x, r in zip(xs, rs, strict=True)
            if x
        ]
        return sum((i + 1) * r for i, r in enumerate(flat))

    plan = batched.plan(w, MANY)
    step = jax.grad(lambda w, plan: read(batched.apply(w, plan)))
    if how in ("argument", "gpu"):
        step = jax.jit(step)
    elif how == "closure":
        step = jax.jit(lambda w, _, step=step: step(w, plan))
    expected = jax.grad(lambda w: read([roots(w, xs) for xs in MANY]))(w)
    assert jnp.isfinite(expected)
    assert_close(step(w, plan), expected, 1e-5)
    before = batched.compilations
    assert_close(step(w, batched.plan(w, MANY)), expected, 1e-5)
    assert batched.compilations == before


def test_futures_that_are_held_and_not_read():
    w = jnp.float32(1.5)

    def lazily(w):
        with jedbatch.lazy():
            results = [roots(w, xs) for xs in MANY]
        return sum(
            r
            for xs, rs in zip(MANY, results, strict=True)
            for x, r in zip(xs, rs, strict=True)
            if x
        )

    expected = jax.grad(
        lambda w: sum(r for xs in MANY for x, r in zip(xs, roots(w, xs), strict=True) if x)
    )(w)
    assert_close(jax.grad(lazily)(w), expected, 1e-5)
    assert_close(jax.jit(jax.grad(lazily))(w), expected, 1e-5)


def test_a_function_that_decides_on_values():
    def fn(p, x):
        y, n = scaled_and_norm(p, x)
        return (y, n) if y.sum() > 3 else (2 * y, n)

    batched = jedbatch.batch(fn)
    expected = gradients(lambda p: [fn(p, x)[0] for x in XS])
    assert_close(gradients(lambda p: batched(p, XS)[0]), expected, 1e-5)


def test_a_lazy_scope():
    def lazily(p):
        with jedbatch.lazy():
            return [scaled_and_norm(p, x)[0] for x in XS]

    expected = gradients(lambda p: [scaled_and_norm(p, x)[0] for x in XS])
    assert_close(gradients(lazily), expected, 1e-5)


def test_ragged_parts():
    def fn(p, x):
        n = jnp.sqrt((p["z"][None] * x).sum(1))  # rows, and below an instance
        y = jnp.where((n > 1)[:, None], x, p["b"][None] * x)
        return y.sum(0), jnp.sqrt((p["z"][None] * x).sum())

    rows = [np.ones((n, 3), np.float32) for n in (2, 3)]
    batched = jedbatch.batch(fn)
    expected = gradients(lambda p: [fn(p, x)[0] for x in rows])
    assert_close(gradients(lambda p: batched(p, rows)[0]), expected, 1e-5)


def of_rows(p, x):
    """Row by row, then by instance; slopes are infinite where x is 0."""
    y = jnp.sqrt(p["b"][None] * x)
    return jnp.sqrt(jnp.cumsum(y, axis=0)).sum(), y, (p["b"][None] * x).sum(0)


@pytest.mark.parametrize("target", mostly_slow(["cpu", "gpu"], "cpu"))
def test_ragged_instances_that_are_not_read(target):
    def read(results):
        return results[1][0] + results[1][1].sum() + results[0][2].sum()

    rows = [np.zeros((4, 3), np.float32), np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)]
    batched = jedbatch.batch(of_rows, out_axes=None, target=target)
    expected = jax.grad(lambda p: read([of_rows(p, x) for x in rows]))(PARAMS)
    assert jnp.isfinite(expected["b"]).all()
    assert_close(jax.grad(lambda p: read(batched(p, rows)))(PARAMS), expected, 1e-5)
    step = jax.jit(jax.grad(lambda p, plan: read(batched.apply(p, plan))))
    assert_close(step(PARAMS, batched.plan(PARAMS, rows)), expected, 1e-5)


def test_a_loop_that_must_be_differentiated_is_an_error():
    batched = jedbatch.batch(lambda p, x: p["b"] * grown(p["b"] * x))
    plan = batched.plan(PARAMS, XS)  # for inference it is fine
    assert batched.apply(PARAMS, plan).shape == (3, 3)
    with pytest.raises(ValueError, match="Reverse-mode differentiation") as error:
        jax.grad(lambda p: batched.apply(p, plan).sum())(PARAMS)
    assert any("stop_gradient" in note for note in error.value.__notes__)


def test_a_dead_result_makes_no_new_program():
    """Which results are read differs by topology, and is data."""

    def fn(p, x):
        y, n = scaled_and_norm(p, jnp.asarray(x[1], jnp.float32) * p["b"])
        return y + n if x[0] else y

    batched = jedbatch.batch(fn)
    step = jax.jit(jax.grad(lambda p, plan: batched.apply(p, plan).sum()))
    p = PARAMS | {"z": PARAMS["b"]}
    step(p, batched.plan(p, [(True, 1.0), (False, 2.0)]))
    before = batched.compilations
    step(p, batched.plan(p, [(False, 1.0), (False, 2.0)]))
    step(p, batched.plan(p, [(True, 1.0), (True, 2.0)]))
    assert batched.compilations == before


@pytest.mark.parametrize(
    ("made", "is_guarded"),
    [(lambda p: (p["b"], p["z"]), False), (lambda p: (jnp.sqrt(p["b"]), p["z"]), True)],
)
def test_guards_of_gradients_that_are_sums(made, is_guarded):
    @jedbatch.cell
    def weighed(p, x, y):
        u, v = made(p)
        return x @ u + y @ v

    shapes = {"b": (3, 2), "z": (3, 2)}
    params = {name: jnp.arange(6.0).reshape(shape) + 1 for name, shape in shapes.items()}
    xs = [np.ones(3, np.float32), np.full(3, 2, np.float32)]
    batched = jedbatch.batch(lambda p, x: weighed(p, x, 2 * x).sum())
    slope = jax.grad(lambda p, plan: batched.apply(p, plan).sum())
    plan = batched.plan(params, xs, gradient=True)
    assert ("reduce_or" in jax.jit(slope).lower(params, plan).compile().as_text()) == is_guarded
    loop = jax.grad(lambda p: sum((x @ made(p)[0] + 2 * x @ made(p)[1]).sum() for x in xs))
    assert_close(jax.jit(slope)(params, plan), loop(params), 1e-5)


@pytest.mark.parametrize(
    ("back", "expected"),
    [
        (lambda g, h, c: (jnp.concatenate([g, h])[1:4], g.sum()), [True, True]),
        (lambda g, h, c: (g + h + c, -h), [False, True]),
        (lambda g, h, c: (g * c, jnp.split(h, 3)[1]), [False, True]),
        (lambda g, h, c: (jnp.pad(g, 1, constant_values=1), c), [False, False]),
    ],
)
def test_sums_and_pieces_keep_zeros(back, expected):
    shapes = [jax.ShapeDtypeStruct((3,), jnp.float32)] * 3
    jaxpr = jax.make_jaxpr(back)(*shapes).jaxpr
    assert keeps_zeros(jaxpr, jaxpr.invars[:2]) == expected
    found = back(jnp.zeros(3), jnp.zeros(3), jnp.full(3, jnp.inf))
    assert [not np.any(x) for x in found] == expected
