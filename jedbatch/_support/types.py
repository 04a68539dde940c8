"""Names of types that annotations need.

The first ones Python cannot express: to a type checker they are all `Any`. Then come the options
that are chosen by name.
"""

from typing import Any, Literal

Array = Any  # of JAX or NumPy, or a tracer in its place
AxisSize = Any  # an int, or an expression of symbols where it differs between instances
Dtype = Any  # of NumPy, or one that JAX adds: of random keys, and of tangents of integers
Leaf = Any  # of a pytree: an array, a number, a tracer or any other object
PyTree = Any  # containers of leaves, as users and JAX nest them

ControlFlowName = Literal["auto", "lanes", "lockstep"]
EncodingName = Literal["base", "max", "sort", "phase"]
GranularityName = Literal["cell", "auto"]
OrderName = Literal["auto", "append", "longest", "reader", "pq"]
TargetName = Literal["cpu", "gpu"]
