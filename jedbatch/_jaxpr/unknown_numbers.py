"""Numbers that XLA does not know, so that operations which differ in them alone are compiled once.

XLA:CPU compiles every fusion of operations by itself, which takes some 10 ms however small it is,
but equal ones once. Many differ in nothing but a constant, such as the opcode that a loop waits
for. A number that enters a loop from outside behind an `optimization_barrier` is an operand there,
not a constant.
"""

import jax.numpy as jnp
from jax import lax

from jedbatch._support.types import Array


def unknown(number: int) -> Array:
    """Returns int32[], a number that XLA does not know inside of loops that begin after it."""
    return lax.optimization_barrier(jnp.int32(number))
