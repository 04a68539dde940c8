"""Floating-point operations of cells that solve linear systems, against those of the textbook."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jedbatch._jaxpr.interpret import work


def operations(fn, *args):
    return sum(map(work, jax.make_jaxpr(fn)(*args).eqns))


def of_elimination(n):
    """Multiplications and subtractions of Gaussian elimination, and divisions, step by step."""
    return sum((n - k - 1) + 2 * (n - k - 1) ** 2 for k in range(n))


@pytest.mark.parametrize("n", [8, 40])
def test_factorizations(n):
    matrix = jnp.eye(n)
    assert operations(lambda x: lax.linalg.lu(x)[0], matrix) == pytest.approx(
        of_elimination(n), rel=0.2
    )
    assert operations(jnp.linalg.cholesky, matrix) >= of_elimination(n) / 2.5
    solve = lambda x, b: lax.linalg.triangular_solve(x, b, left_side=True)  # noqa: E731
    assert operations(solve, matrix, jnp.ones((n, 3))) == pytest.approx(3 * n * n, rel=0.1)
