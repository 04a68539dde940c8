"""What Python and NumPy compute with numbers that cells hold, to the last bit, against the loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._jaxpr.interpret import performs
from jedbatch._jaxpr.numbers import number_in
from jedbatch._jaxpr.same_programs import has_same_rules_with, is_same_with

pytestmark = pytest.mark.unoptimized

# In the first minibatch nothing tells 32 bits from 64: all numbers are far from where they do.
MINIBATCHES = ([0.25, 0.27, 0.31, 0.42, 0.45], [0.3, 0.25, 0.1, 0.2, 0.6, 0.7])

OF_REALS = {
    "//": lambda t: t // 0.1,
    "%": lambda t: t % 0.1,
    "% of another": lambda t: 1 % (t + 1),
    "divmod": lambda t: sum(divmod(t, 0.1)),
    "divmod of another": lambda t: sum(divmod(5.0, t + 0.1)),
    "cancellation": lambda t: 1 / (t - 0.3 + 1e-9),
    "**": lambda t: (1 + 1e-9) ** (t * 1e9),
    "round": lambda t: round(t, 1) + round(t * 7),
    "comparison": lambda t: (t == 0.1 + 0.2) + 2 * (t <= 0.3),
    "branch of JAX": lambda t: jnp.where(t >= 0.3, 1.0, 2.0),
    "steps": lambda t: functools.reduce(lambda y, _: y * 1.0000001, range(30), t) - t,
    "abs": lambda t: abs(t - 0.3) - 1e-17,
    "complex": lambda t: (t * 1j * t).imag - t * t,
    "attributes": lambda t: t.real // 0.1 + t.imag,
    "NumPy's number": lambda t: np.float64(0.1) + t - 0.3,
    "NumPy's array": lambda t: (np.array([0.1, 0.2]) * t - 0.03 + 1e-9).sum(),
    "element of an array": lambda t: np.array([t, 1.0])[0] // 0.1 if type(t) is float else t // 0.1,
    "of JAX's array": lambda t: jnp.asarray(t) // 0.1,
    "of another of JAX's arrays": lambda t: jnp.array(t) % 0.1,
    "of 32 bits": lambda t: jnp.float32(t) // 0.1,
    "of JAX and of Python": lambda t: jnp.sin(t) + (t - 0.3) * 1e8,
}


def call(scale, p, t):
    return jedbatch.cell(lambda p: p * jnp.stack([jnp.asarray(scale[k](t), float) for k in scale]))(
        p
    )


@pytest.mark.parametrize("wide", [False, True])
def test_python_computes_with_numbers_as_in_the_loop(wide):
    with jax.enable_x64(wide):
        p = jnp.asarray(2.0)
        fn = functools.partial(call, OF_REALS)
        batched = jedbatch.batch(fn)
        for numbers in (*MINIBATCHES, *MINIBATCHES):
            found = batched(p, numbers)
            rtol = 1e-13 if wide else 1e-6
            np.testing.assert_allclose(found, [fn(p, t) for t in numbers], rtol=rtol, atol=0)
