"""Calls of a batched function inside of another one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jedbatch._record.cell import recording
from jedbatch._record.instance_arrays import array_type
from jedbatch._record.recorder import result_leaf
from jedbatch._session.outputs import check_stack


def results_inside(name: str, calls: Sequence[Callable[[], Any]], stack: bool) -> Any:
    """Returns the results of instances, as part of what another function computes for its own.

    So what they do is batched across the instances of both, and both may decide on values.

    Args:
      name: of the function, for messages.
      calls: each runs it on one instance.
      stack: along a new first axis; or else a list.
    """
    results = recording.recorder.together(calls)
    if not stack:
        return results
    results = jax.tree.map(result_leaf, results)
    forms = [
        (jax.tree.structure(result), [array_type(x)[:2] for x in jax.tree.leaves(result)])
        for result in results
    ]
    for i, form in enumerate(forms):
        check_stack(name, i, forms[0], form)
    return jax.tree.map(lambda *rows: jnp.stack(list(map(jnp.asarray, rows))), *results)
