"""Results of instances that are recorded inside of another function, or run line by line."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jedbatch._record.instances.arrays import array_type, replace_arrays
from jedbatch._record.run.recorder import result_leaf
from jedbatch._session.core import Core
from jedbatch._session.plans.outputs import check_stack
from jedbatch._session.records.recording import arrays_of


def put_together(core: Core, results: Sequence[Any]) -> Any:
    """Returns the results of instances as those of a batched function, stacked or as a list."""
    if not core.stacks:
        return list(results)
    results = jax.tree.map(result_leaf, results)
    forms = [
        (jax.tree.structure(result), [array_type(x)[:2] for x in jax.tree.leaves(result)])
        for result in results
    ]
    for i, form in enumerate(forms):
        check_stack(core.name, i, forms[0], form)
    return jax.tree.map(lambda *rows: jnp.stack(list(map(jnp.asarray, rows))), *results)


def plain_loop(core: Core, args: Sequence[Any]) -> Any:
    """Returns the results of the loop over instances, in which Python runs on values.

    Arrays of NumPy among the arguments become those of JAX, as in recordings.
    """
    arguments = core.arguments
    shared, instances = arguments.split(args)
    leaves, structure = arguments.leaves(shared)
    shared = jax.tree.unflatten(structure, list(map(jnp.asarray, leaves)))
    results = []
    for i, (instance, arrays) in enumerate(zip(instances, arrays_of(instances, {}), strict=True)):
        mapped = replace_arrays(instance, map(jnp.asarray, arrays))
        try:
            results.append(core.fn(*arguments.join(shared, mapped)))
        except Exception as error:
            error.add_note(f"This happened in instance {i} of the batched `{core.name}`.")
            raise
    return put_together(core, results)
