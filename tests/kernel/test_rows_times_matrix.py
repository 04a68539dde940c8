"""Products of rows and a matrix that lanes share: by the compiled core, by XLA, and by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close
from jax import lax

import jedbatch
from jedbatch._kernel.rows_times_matrix import MATRIX_BYTES, times_matrix_p, with_calls

# Lanes, and axes of the matrix: less than a vector, some, some left over, and more than at a time.
SIZES = [(1, 1, 1), (2, 3, 5), (7, 16, 16), (9, 300, 49), (13, 257, 101), (64, 64, 48), (3, 600, 7)]
MOST = 1 << 22


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_are_those_of_numpy(maker, dtype):
    rng = np.random.default_rng(0)
    cases = [(rng.normal(size=(a, b)), rng.normal(size=(b, c))) for a, b, c in SIZES]
    with jax.enable_x64(dtype == "float64"):
        arrays = [[jnp.asarray(x, dtype) for x in pair] for pair in cases]
        found = jax.jit(lambda arrays: [times_matrix_p.bind(*x) for x in arrays])(arrays)
        for got, (rows, matrix) in zip(found, cases, strict=True):
            assert got.dtype == dtype
            assert_close(got, rows @ matrix, 1e-4 if dtype == "float32" else 1e-12)


def test_a_row_does_not_depend_on_the_others(maker):
    """Nor do rows of which some are infinite or no numbers touch the others."""
    rng = np.random.default_rng(1)
    rows, matrix = (rng.normal(size=s).astype("float32") for s in ((21, 70), (70, 50)))
    multiply = jax.jit(times_matrix_p.bind)
    expected = np.array(multiply(rows, matrix))
    rows[4, 3], rows[17, 69] = np.nan, np.inf
    found = np.array(multiply(rows, matrix))
    others = [i for i in range(21) if i not in (4, 17)]
    np.testing.assert_array_equal(found[others], expected[others])
    assert np.isnan(found[4]).all()
    assert np.isinf(found[17]).all()
    if maker == "calls":  # of XLA, the order of additions may depend on how many rows there are
        one = np.array(multiply(rows[7:8], matrix))
        np.testing.assert_array_equal(one, expected[7:8])


# Products of a vector [4] and a matrix [3, 4] of a lane with [4, 5] that lanes share.
PRODUCTS = {
    "vector": (lambda x, a, w: x @ w, 1),
    "vector behind": (lambda x, a, w: lax.dot_general(w, x, (((0,), (0,)), ((), ()))), 1),
    "matrix": (lambda x, a, w: a @ w, 1),
    "computed": (lambda x, a, w: jnp.tanh(x) @ jnp.exp(w), 1),
    "two": (lambda x, a, w: (x @ w)[None] + a @ w, 2),
    "highest": (lambda x, a, w: jnp.matmul(x, w, precision="highest"), 1),
    "matrix behind": (lambda x, a, w: w.T @ a.T, 0),
    "last axis": (lambda x, a, w: w @ w.T @ x, 0),
    "number": (lambda x, a, w: jnp.dot(x[0], 2.0) * x, 0),
    "shared": (lambda x, a, w: (w.T @ w) * x[0], 0),
    "of the lane": (lambda x, a, w: a @ x, 0),
    "wider result": (lambda x, a, w: jnp.matmul(x, w, preferred_element_type=jnp.float64), 0),
    "integers": (lambda x, a, w: x.astype(int) @ w.astype(int), 0),
    "algorithm": (
        lambda x, a, w: lax.dot(x[None], w, precision=lax.DotAlgorithmPreset.F32_F32_F32),
        0,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("most", [MOST, 2 * 4 * 5 - 1])
def test_small_products_by_what_lanes_share_are_calls(name, most):
    fn, expected = PRODUCTS[name]
    rng = np.random.default_rng(2)
    with jax.enable_x64(name == "wider result"):
        args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4,), (3, 4), (4, 5))]
        closed = jax.make_jaxpr(fn)(*args)
        program = with_calls(closed.jaxpr, closed.jaxpr.invars[2:], most)
        one = lambda *args: jax.core.eval_jaxpr(program, closed.consts, *args)[0]  # noqa: E731
        lanes = [jnp.stack([x, 2 * x]) for x in args[:2]]
        over_lanes = jax.vmap(one, (0, 0, None))
        traced = str(jax.make_jaxpr(over_lanes)(*lanes, args[2]))
        assert traced.count("times_matrix") == (expected if most == MOST else 0)
        found = jnp.stack([fn(*lane, args[2]) for lane in zip(*lanes, strict=True)])
        assert_close(one(*args), fn(*args), 1e-5)
        assert_close(over_lanes(*lanes, args[2]), found, 1e-5)
        assert_close(jax.vmap(one)(*lanes, jnp.stack([args[2]] * 2)), found, 1e-5)


def test_large_matrices_are_left_to_xla():
    x, w = jnp.zeros(4), jnp.zeros((4, MATRIX_BYTES // 16 + 1))
    closed = jax.make_jaxpr(lambda x, w: x @ w)(x, w)
    assert with_calls(closed.jaxpr, closed.jaxpr.invars[1:], MOST).eqns == closed.jaxpr.eqns


@jedbatch.cell
def step(params, word, before):
    return jnp.tanh(params["words"][word] + before @ params["w"]) @ params["out"]


def chain(params, instance):
    state, words = instance
    for word in words:
        state = step(params, word, state)
    return state


def of_arrays(params, instance):
    return step(params, 1, step(params, 0, instance))


def test_values_and_derivatives_are_those_of_a_loop(maker):
    """Of programs of nodes, and of one for all instances, of which JAX finds the derivatives."""
    rng = np.random.default_rng(3)
    shapes = {"words": (9, 6), "w": (5, 6), "out": (6, 5)}
    params, tangents = (
        {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in shapes.items()}
        for _ in range(2)
    )
    states = rng.normal(size=(20, 5)).astype("float32")
    lengths = rng.integers(1, 6, size=20)
    chains = [(x, rng.integers(9, size=n).tolist()) for x, n in zip(states, lengths, strict=True)]
    batched = jedbatch.batch(chain)
    plan = batched.plan(params, chains, gradient=True)
    text = jax.jit(batched.apply).lower(params, plan).as_text()
    assert (text.count("@jedbatch_times_matrix") > 0) == (maker == "calls")
    pairs = [
        (jax.jit(lambda p: batched.apply(p, plan)), lambda p: [chain(p, x) for x in chains]),
        (
            lambda p: jedbatch.batch(of_arrays)(p, states),
            lambda p: [of_arrays(p, x) for x in states],
        ),
    ]
    for together, one_by_one in pairs:
        fns = together, lambda p, one_by_one=one_by_one: jnp.stack(one_by_one(p))
        assert_close(*(fn(params) for fn in fns), 1e-4)
        slopes = [jax.grad(lambda p, fn=fn: jnp.square(fn(p)).sum()) for fn in fns]
        jax.tree.map(lambda a, b: assert_close(a, b, 1e-3), *(slope(params) for slope in slopes))
        pushed = [jax.jvp(slope, (params,), (tangents,))[1] for slope in slopes]
        jax.tree.map(lambda a, b: assert_close(a, b, 2e-3), *pushed)
