"""Sums over lanes, by calls of the compiled core, by XLA, and by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch
from jedbatch._kernel.sums_over_lanes import sum_of_products, sums_of_rows

# Numbers of rows and of cotangents: of less than a vector, of a few, and with some left over.
SIZES = [(1, 1), (3, 8), (6, 64), (13, 65), (64, 200), (128, 24)]


def lanes_with_gaps(rng, count):
    """Which of some lanes are alive: none, some that follow one another, and some that do not."""
    alive = rng.random(count) < 0.6
    alive[5:9], alive[count // 2 : count // 2 + 70] = False, True
    return alive


def rows(rng, alive, *shape):
    """Rows of lanes, in which those that are not alive hold anything."""
    x = rng.normal(size=(len(alive), *shape))
    x[~alive] = np.nan
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_are_those_of_lanes_that_are_alive(maker, dtype):
    rng, cases, expected = np.random.default_rng(0), [], []
    for m, n in SIZES:
        for alive in (lanes_with_gaps(rng, 200), np.zeros(3, bool), np.ones(1, bool)):
            x, y = rows(rng, alive, m), rows(rng, alive, n)
            cases.append((alive, x, y))
            expected.append(x[alive].T @ y[alive])
    with jax.enable_x64(dtype == "float64"):
        arrays = [
            (jnp.asarray(alive), *(jnp.asarray(x, dtype) for x in xs)) for alive, *xs in cases
        ]
        found = jax.jit(lambda arrays: [sum_of_products(*x) for x in arrays])(arrays)
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == dtype
            assert_close(got, want, 1e-4 if dtype == "float32" else 1e-12)


def test_little_is_lost_in_sums_over_many_lanes(maker):
    """Of equal terms, the rounding of all of which goes the same way."""
    count, x, y = 200_000, np.float32(0.3), np.float32(0.1)
    arrays = np.ones(count, bool), np.full((count, 8), x), np.full((count, 9), y)
    expected = np.full((8, 9), count * float(x) * float(y))
    assert_close(jax.jit(lambda *given: sum_of_products(*given))(*arrays), expected, 3e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("clamps", [False, True])
def test_sums_of_rows_go_where_their_numbers_say(maker, clamps, dtype):
    rng, count = np.random.default_rng(1), 5
    alive = lanes_with_gaps(rng, 200)
    numbers = rng.integers(-3, count + 3, len(alive)).astype("int32")
    assert numbers[alive].min() < 0 < count <= numbers[alive].max()
    for shape in ((), (7,), (3, 5)):
        x = rows(rng, alive, *shape)
        expected = np.zeros((count, *shape))
        for lane in np.flatnonzero(alive):
            place = min(max(numbers[lane], 0), count - 1) if clamps else numbers[lane]
            if 0 <= place < count:
                expected[place] += x[lane]
        with jax.enable_x64(dtype == "float64"):
            given = jnp.asarray(alive), jnp.asarray(x, dtype), numbers
            found = jax.jit(lambda *given: sums_of_rows(*given, count, clamps))(*given)
            assert found.dtype == dtype
            assert_close(found, expected, 1e-4 if dtype == "float32" else 1e-12)


@jedbatch.cell
def step(params, word, before):
    scaled = before * params["scale"]
    return jnp.tanh(params["words"][word] + scaled @ params["w"] + params["b"]) @ params["out"]


def chain(params, instance):
    state, words = instance
    for word in words:
        state = step(params, word, state)
    return state


def test_gradients_of_weights_are_one_call_each(maker):
    """Of matrices and of look-ups; in the reverse of a program, and in tangents of it."""
    rng = np.random.default_rng(2)
    shapes = {"words": (9, 6), "w": (5, 6), "b": (6,), "out": (6, 5), "scale": (5,)}
    params, tangents = (
        {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in shapes.items()}
        for _ in range(2)
    )
    chains = [
        (rng.normal(size=5).astype("float32"), rng.integers(9, size=n).tolist())
        for n in (1, 4, 2, 7)
    ]
    batched = jedbatch.batch(chain)
    plan = batched.plan(params, chains, gradient=True)
    gradient = jax.jit(jax.grad(lambda p: jnp.square(batched.apply(p, plan)).sum()))
    loop = jax.grad(lambda p: sum(jnp.square(chain(p, x)).sum() for x in chains))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-4), gradient(params), loop(params))
    text = gradient.lower(params).as_text()
    calls = maker == "calls"
    assert text.count("@jedbatch_row_products") == 3 * calls  # of `w`, `out` and `b`
    assert text.count("@jedbatch_row_sums") == 1 * calls  # of `words`
    pushed = [jax.jvp(fn, (params,), (tangents,))[1] for fn in (gradient, loop)]
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-3), *pushed)
