"""Gradients of matrices among the consts of a kernel are one product over all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close
from jax import lax

import jedbatch
from jedbatch._kernel.weight_gradients import MatrixProduct

SHAPES = [((5,), 0), ((4, 5), 1), ((5, 4), 0)]  # of a row or rows, and the axis that is summed


def product(row_axis, weight_axis, weight_first, **options):
    """A product of a row or rows and a matrix, summed over an axis of each."""

    def run(x, w):
        pairs = [(x, row_axis), (w, weight_axis)]
        (a, i), (b, j) = pairs[::-1] if weight_first else pairs
        return lax.dot_general(a, b, (((i,), (j,)), ((), ())), **options)

    return run


def found(fn, x, w):
    """Returns the `MatrixProduct` of a function of a row and a const, which is one product."""
    closed = jax.make_jaxpr(fn)(x, w)
    (eqn,) = closed.jaxpr.eqns
    return MatrixProduct.of(eqn, lambda v: v is closed.jaxpr.invars[1])


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("weight_axis", [0, 1])
@pytest.mark.parametrize(("shape", "row_axis"), SHAPES)
def test_gradients_are_those_of_jax(shape, row_axis, weight_axis, weight_first):
    fn = product(row_axis, weight_axis, weight_first)
    rng = np.random.default_rng(0)
    weight_shape = (5, 3) if weight_axis == 0 else (3, 5)
    rows, w = (jnp.asarray(rng.normal(size=s), "float32") for s in ((7, *shape), weight_shape))
    results, pull_back = jax.vjp(lambda w: jax.vmap(lambda x: fn(x, w))(rows), w)
    cotangents = jnp.asarray(rng.normal(size=results.shape), "float32")
    matrix = found(fn, rows[0], w)
    assert_close(matrix.gradient(rows, cotangents), *pull_back(cotangents), 1e-5)
    alive = jnp.array([True, False, True, True, False, True, False])
    there = jnp.reshape(alive, (-1, *[1] * (cotangents.ndim - 1)))
    expected = pull_back(jnp.where(there, cotangents, 0))
    of_others = cotangents.at[1].set(jnp.nan), rows.at[4].set(jnp.nan)
    assert_close(matrix.sum(alive, *of_others[::-1]), *expected, 1e-5)


LOPSIDED = lax.Precision.HIGHEST, lax.Precision.DEFAULT
OTHERS = {
    "over both axes": (lambda x, w: lax.dot_general(x, w, (((0, 1), (0, 1)), ((), ()))), "float32"),
    "a matrix for each row": (
        lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((0,), (0,)))),
        "float32",
    ),
    "of 16 bits": (product(1, 1, False), "bfloat16"),
    "of two precisions": (product(1, 1, False, precision=LOPSIDED), "float32"),
    "in more bits": (product(1, 1, False, preferred_element_type="float32"), "bfloat16"),
    "of a const with itself": (lambda _, w: lax.dot(w, w), "float32"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_left_to_jax(name):
    fn, dtype = OTHERS[name]
    assert found(fn, jnp.ones((4, 4), dtype), jnp.ones((4, 4), dtype)) is None


def test_rows_of_lists_need_no_transposition(maker):
    """Sums over lists that are padded, whose weight gradients sum over lanes and elements."""

    @jedbatch.cell
    def node(w, children):
        return sum(jnp.tanh(child @ w) for child in children)

    rng = np.random.default_rng(0)
    instances = [rng.normal(size=(n, 6)).astype("float32") for n in (1, 2, 3, 4, 5, 6, 2, 3)]
    w = jnp.asarray(rng.normal(size=(6, 6)), "float32")
    batched = jedbatch.batch(lambda w, xs: node(w, list(xs)))
    loss = lambda run: lambda w: jnp.sum(jnp.sin(run(w)))  # noqa: E731
    got = jax.grad(loss(lambda w: batched(w, instances)))(w)
    each = lambda w: jnp.stack([sum(jnp.tanh(x @ w) for x in xs) for xs in instances])  # noqa: E731
    assert_close(got, jax.grad(loss(each))(w), 1e-5)
    plan = batched.plan(w, instances, gradient=True)
    step = jax.jit(jax.grad(lambda w: batched.apply(w, plan).sum()))
    lines = step.lower(w).as_text().splitlines()
    of_weights = [x for x in lines if x.endswith("-> tensor<6x6xf32>")]
    products = [x for x in of_weights if "dot_general" in x]
    calls = [x for x in of_weights if "@jedbatch_row_products" in x]
    assert products if maker == "XLA" else calls and not products
    assert all("contracting_dims = [0] x [0]" in x for x in products)


@jedbatch.cell
def attended(params, image, weights):
    """Two products of the rows of an image, one of which is over its columns."""
    rows = jnp.tanh(image @ params["w"]) * (params["v"] @ image.T).T
    return jnp.tanh(rows @ params["out"] + jnp.sum(rows) * weights)


def test_gradients_by_rows_of_inputs_are_those_of_a_loop(maker):
    """Matrices that nodes read again in reverse, of more nodes than a block has."""
    rng = np.random.default_rng(4)
    shapes = {"w": (5, 6), "v": (6, 5), "out": (6,)}
    params = {name: jnp.asarray(rng.normal(size=s), "float32") for name, s in shapes.items()}
    images = rng.normal(size=(23, 3, 5)).astype("float32")
    lengths = rng.integers(1, 4, size=23).tolist()

    def chain(params, instance):
        length, image = instance
        state = jnp.zeros(3)
        for _ in range(length):
            state = attended(params, image, state)
        return state

    instances = list(zip(lengths, images, strict=True))
    batched = jedbatch.batch(chain)
    plan = batched.plan(params, instances, gradient=True)
    gradient = jax.jit(jax.grad(lambda p: jnp.square(batched.apply(p, plan)).sum()))
    loop = jax.grad(lambda p: sum(jnp.square(chain(p, x)).sum() for x in instances))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-4), gradient(params), loop(params))
    ones = (jax.tree.map(jnp.ones_like, params),)
    pushed = [jax.jvp(fn, (params,), ones)[1] for fn in (gradient, loop)]
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-3), *pushed)
    calls = gradient.lower(params).as_text().count("@jedbatch_row_products")
    assert calls if maker == "calls" else not calls
