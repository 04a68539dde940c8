"""Names of types that annotations need and Python cannot express.

To a type checker they are all `Any`.
"""

from typing import Any

Array = Any  # of JAX or NumPy, or a tracer in its place
AxisSize = Any  # an int, or an expression of symbols where it differs between instances
Dtype = Any  # of NumPy, or one that JAX adds: of random keys, and of tangents of integers
Leaf = Any  # of a pytree: an array, a number, a tracer or any other object
PyTree = Any  # containers of leaves, as users and JAX nest them
