"""Arrays among the constants of a cell: those that tracing makes, and those that it finds."""

import contextvars

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import compilations

import jedbatch

XS = [np.arange(6, dtype=np.float32) + n for n in range(3)]


def test_whole_numbers_that_tracing_makes_are_constants():
    traces = 0

    @jedbatch.cell
    def picked(x):
        nonlocal traces
        traces += 1
        with jax.ensure_compile_time_eval():
            table = jnp.arange(3) * 2
        return x[table]

    batched = jedbatch.batch(lambda x: picked(x), 0)
    for _ in range(3):
        np.testing.assert_array_equal(batched(XS), np.stack(XS)[:, ::2])
        before = traces
        with compilations() as compiled:
            batched(XS)
        assert traces == before
        assert not compiled


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_arrays_found_where_nobody_looks_may_change(dtype):
    found = contextvars.ContextVar("found")

    @jedbatch.cell
    def scaled(x):
        return x * found.get().astype(jnp.float32)

    batched = jedbatch.batch(lambda x: scaled(x), 0)
    for scale in (2, 3):
        found.set(jnp.full(6, scale, dtype))
        np.testing.assert_array_equal(batched(XS), np.stack(XS) * scale)
