"""Every dtype that JAX has, and numbers of them."""

import jax
import jax.numpy as jnp
import numpy as np


def _exists(dtype):
    """Returns whether XLA:CPU computes with a dtype, by itself and not under another name."""
    if str(dtype).startswith("float6"):
        return False  # of JAX 0.12 it makes arrays of them and ends the process where they are read
    try:
        return jnp.zeros(1, dtype).dtype == dtype
    except jax.errors.JaxRuntimeError:
        return False


with jax.enable_x64(True):
    _scalars = [x for x in vars(jnp).values() if isinstance(x, type(jnp.float32))]
    DTYPES = tuple(filter(_exists, sorted({np.dtype(x) for x in _scalars}, key=str)))


def is_whole(dtype):
    return bool(jnp.issubdtype(dtype, jnp.integer))


def numbers(dtype, shape, seed=0, ends=True):
    """Numbers of a dtype: among others the least, the largest and infinite ones, its `ends`."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(2, size=shape).astype(bool)
    if is_whole(dtype):
        info = jnp.iinfo(dtype)
        least, most = int(info.min), int(info.max)
        kind = np.uint64 if least == 0 else np.int64
        some = rng.integers(least, most, 99, kind, endpoint=True).tolist()
    else:
        info = jnp.finfo(dtype)
        least, most = float(info.min), float(info.max)
        if can_be_infinite(dtype) and rng.integers(2):
            least, most = -np.inf, np.inf
        some = [x for x in (-2, -0.5, 0, 0.5, 1, 2) if np.array(x, dtype) == x]
        some = rng.choice(some, 99).tolist()
        if dtype.kind == "c":
            some = [complex(x, rng.choice([-1, 0, 2])) for x in some]
    some = [least, most, *some] if ends else some
    return np.array([some[k] for k in rng.integers(12, size=np.prod(shape))], dtype).reshape(shape)


def can_be_infinite(dtype):
    return bool(np.isinf(np.array(np.inf, dtype)))


def as_written(x):
    """An array of any dtype as one that NumPy compares, number by number."""
    x = np.asarray(x)
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.inexact) else object)
