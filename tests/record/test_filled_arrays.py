"""Arrays filled with numbers while a function is recorded are what they are outside of it."""

import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch


@jedbatch.cell
def joined(w, x, *arrays):
    return sum((jnp.sum(a) for a in arrays), start=w * x)


FILLED = {
    "zeros": lambda w, x: jnp.zeros(3),
    "ones of a dtype": lambda w, x: jnp.ones((2, 2), jnp.float16),
    "zeros like a weight": lambda w, x: jnp.zeros_like(w),
    "whole numbers": lambda w, x: jnp.full(3, 7),
    "flags": lambda w, x: jnp.full(3, True),
    "a number of the instance": lambda w, x: jnp.full(2, x),
    "a whole number of the instance": lambda w, x: jnp.full(2, int(x)),
    "a shape of the instance": lambda w, x: jnp.ones(1 + int(x) % 3),
    "a weight": lambda w, x: jnp.full(2, w[0]),
    "a range": lambda w, x: jnp.arange(4),
    "an array of NumPy": lambda w, x: jnp.full(2, np.float32(x)),
}


@pytest.mark.parametrize("name", FILLED)
def test_filled_arrays_give_what_the_loop_gives(name):
    filled = FILLED[name]

    def fn(w, x):
        return joined(w, x, filled(w, x), filled(w, x))

    w = jnp.array([0.5, -2.0, 3.0])
    batched = jedbatch.batch(fn)
    for instances in ([1.0, 2.0, 4.0, 1.0], [5.0, 3.0]):
        expected = [fn(w, x) for x in instances]
        np.testing.assert_allclose(batched(w, instances), expected, rtol=1e-6)


def test_numbers_that_are_equal_are_told_apart():
    """0.0 and -0.0, and 1, 1.0 and True, fill arrays that differ."""
    fills = {"negative": -0.0, "zero": 0.0, "whole": 1, "real": 1.0, "flag": True}
    dtypes = []

    @jedbatch.cell
    def signs(w, a):
        return w + jnp.signbit(jnp.asarray(a, jnp.float32))

    def fn(w, name):
        array = jnp.full(2, fills[name])
        dtypes.append(array.dtype)
        return signs(w, array)

    w = jnp.zeros(2)
    names = [*fills, *fills]
    expected = [fn(w, name) for name in names]
    outside = dtypes.copy()
    dtypes.clear()
    np.testing.assert_array_equal(jedbatch.batch(fn)(w, names), expected)
    assert dtypes[: len(fills)] == outside[: len(fills)]
    assert [x[0] for x in expected[:2]] == [1.0, 0.0]


def test_an_array_is_made_once():
    """However often it is asked for, in however many instances: one object, and one input each."""
    met = []

    def fn(w, x):
        zeros = [jnp.zeros(3) for _ in range(4)]
        met.extend(zeros)
        return joined(w, x, *zeros)

    batched = jedbatch.batch(fn)
    plan = batched.plan(jnp.ones(3), [1.0, 2.0, 3.0])
    assert len({id(x) for x in met}) == 1
    assert plan.graph.num_inputs == 2 * 3  # x and the zeros
