"""Instances whose arrays have no rows, beside others that have some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check
from jax import lax

import jedbatch

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)) / 2


def of_lengths(*lengths):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(n, 4)).astype(np.float32) for n in lengths]


def test_a_mean_of_nothing_is_not_a_number():
    """In reverse, nothing of that reaches weights."""

    def fn(w, x):
        y = jnp.tanh(x @ w)
        means = y.mean(0), y.var(0), ((y - y.mean(0)[None]) ** 2 / x.shape[0]).sum(0)
        return jax.tree.map(jnp.nan_to_num, means), jnp.isnan(jnp.stack(means))

    check(fn, W, of_lengths(2, 300, 0, 1, 37), rtol=1e-4)


def test_a_covariance_of_nothing_is_not_a_number():
    check(lambda _, x: jnp.cov(x.T), {}, of_lengths(0, 3, 2), gradients=False)


def test_arrays_of_which_none_has_rows():
    """Beside others, of another structure, that have some."""

    def fn(w, arrays):
        return jnp.sqrt(jnp.square(sum(jnp.tanh(x @ w) for x in arrays) + 1).sum(0))

    x, y, z = of_lengths(5, 0, 3)
    check(fn, W, [(x, x), (y, y, y), (z, z)])


def test_a_maximum_of_nothing_names_the_instance():
    batched = jedbatch.batch(lambda w, x: x.max(0) @ w)
    with pytest.raises(ValueError, match=r"instance 3 .*length 0.* takes a maximum"):
        batched(W, of_lengths(2, 1, 3, 0))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.sin(x)[0],
        lambda x: jnp.sin(x)[jnp.array([1, 0])],
        lambda x: jnp.sin(x).at[-1].add(1.0).sum(),
        lambda x: lax.slice_in_dim(jnp.sin(x), 0, 1),
        lambda x: lax.fori_loop(0, 2, lambda i, c: c + jnp.sin(x)[i], 0.0),
        lambda x: lax.fori_loop(0, 2, lambda i, c: c + (2 * x).max(), 0.0),
    ],
)
def test_rows_that_an_instance_has_none_of(fn):
    """The loop's error, where a row of another instance was read."""
    instances = [np.arange(n, dtype=np.float32) for n in (3, 2, 0)]
    (batched := jedbatch.batch(fn, in_axes=(0,), out_axes=None))(instances[:2])
    with pytest.raises((IndexError, TypeError, ValueError)) as loop:
        fn(jnp.asarray(instances[2]))
    with pytest.raises(loop.type, match="while instance 2 was recorded") as caught:
        batched(instances)
    assert str(caught.value) == str(loop.value)


def test_rolls_of_nothing():
    batched = jedbatch.batch(lambda x: jnp.roll(x, 1, axis=0) * x, in_axes=(0,), out_axes=None)
    instances = [np.arange(n, dtype=np.float32) for n in (3, 0, 2)]
    for out, x in zip(batched(instances), instances, strict=True):
        np.testing.assert_array_equal(out, np.roll(x, 1) * x)


def test_last_rows_of_nothing():
    batched = jedbatch.batch(lambda x: jnp.sin(x)[-1:], in_axes=(0,), out_axes=None)
    instances = [np.arange(n, dtype=np.float32) for n in (3, 0, 2)]
    for out, x in zip(batched(instances), instances, strict=True):
        np.testing.assert_allclose(out, np.sin(x)[-1:], rtol=1e-6)
