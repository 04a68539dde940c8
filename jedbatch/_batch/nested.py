"""Results of instances that are recorded inside of another function, or run line by line."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jedbatch._record.instances.arrays import array_type, replace_arrays
from jedbatch._record.run.recorder import result_leaf
from jedbatch._session.plans.outputs import check_stack
from jedbatch._session.records.arguments import Arguments
from jedbatch._session.records.recording import arrays_of


def put_together(name: str, results: Sequence[Any], stack: bool) -> Any:
    """Returns the results of instances as the results of a batched function.

    Args:
      name: of the function, for messages.
      results: of each instance.
      stack: along a new first axis; or else a list.
    """
    if not stack:
        return list(results)
    results = jax.tree.map(result_leaf, results)
    forms = [
        (jax.tree.structure(result), [array_type(x)[:2] for x in jax.tree.leaves(result)])
        for result in results
    ]
    for i, form in enumerate(forms):
        check_stack(name, i, forms[0], form)
    return jax.tree.map(lambda *rows: jnp.stack(list(map(jnp.asarray, rows))), *results)


def plain_loop(fn: Callable, arguments: Arguments, args: Sequence[Any], stack: bool) -> Any:
    """Returns the results of the loop over instances, in which Python runs on values.

    Args:
      fn: the function of one instance.
      arguments: which of them are shared, and the name of the function.
      args: of the batched function; arrays of NumPy become those of JAX, as in recordings.
      stack: as of `put_together`.
    """
    shared, instances = arguments.split(args)
    leaves, structure = arguments.leaves(shared)
    shared = jax.tree.unflatten(structure, list(map(jnp.asarray, leaves)))
    results = []
    for i, (instance, arrays) in enumerate(zip(instances, arrays_of(instances, {}), strict=True)):
        mapped = replace_arrays(instance, map(jnp.asarray, arrays))
        try:
            results.append(fn(*arguments.join(shared, mapped)))
        except Exception as error:
            error.add_note(f"This happened in instance {i} of the batched `{arguments.name}`.")
            raise
    return put_together(arguments.name, results, stack)
