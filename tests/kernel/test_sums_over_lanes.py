"""Sums over lanes, by calls of the compiled core, by XLA, and by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

from jedbatch._kernel.sums_over_lanes import sum_of_products

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
