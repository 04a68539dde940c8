"""Handing over what was made on the host, so that `jax.transfer_guard("disallow")` lets it pass.

A program takes arrays of NumPy as they are, which is the fastest way and an implicit transfer. Who
forbids those means their own by accident, not the tables of a plan: these are put on the device by
`jax.device_put`, an explicit one, as soon as a guard is set.
"""

from typing import Any

import jax
import numpy as np


def handed_over(values: Any) -> Any:
    """The same pytree, its arrays of NumPy put on the device if a transfer guard is set."""
    if jax.config.jax_transfer_guard_host_to_device in (None, "allow"):  # type: ignore[attr-defined]
        return values
    with jax.ensure_compile_time_eval():
        return jax.tree.map(
            lambda x: jax.device_put(x) if isinstance(x, (np.ndarray, np.generic)) else x, values
        )
