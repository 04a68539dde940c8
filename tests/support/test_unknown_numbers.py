"""Numbers that XLA does not know."""

import jax
import numpy as np

from jedbatch._jaxpr.unknown_numbers import unknown


def test_unknown_numbers_are_numbers():
    assert unknown(7).dtype == np.int32
    assert int(unknown(7)) == int(jax.jit(lambda: unknown(7))()) == 7
