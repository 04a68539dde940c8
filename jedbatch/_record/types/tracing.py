"""Programs of operations and cells that a registry meets for the first time."""

import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jedbatch import checks
from jedbatch._jaxpr.interpret import cares_for_padding, one_by_one, performs
from jedbatch._jaxpr.single_instances import may_differ
from jedbatch._jaxpr.transfers import unguarded
from jedbatch._record.cell import pause
from jedbatch._record.identity.escapes import is_kept, live_tracers, only_new_garbage
from jedbatch._record.instances.arrays import flatten, is_array
from jedbatch._record.types.shared_values import owned
from jedbatch.errors import EscapedValueError, SymbolicValueError

NUMBER_TYPES = (int, float, complex, np.generic)


@unguarded
def traced(registry, name, call, shared, operands, alone):
    """(jaxpr, result tree, ids of shared values it closes over) of an operation."""
    shared_avals = [registry.shared[s].aval for s in shared]
    operand_avals = [registry.avals[v] for v in operands]
    trees = []

    def flat(shared_values, operand_values):
        result = call(shared_values, operand_values)
        leaves, tree = flatten(result, f"the result of cell `{name}`")
        for leaf in leaves:
            if not (is_array(leaf) or isinstance(leaf, NUMBER_TYPES)):
                raise TypeError(
                    f"cell `{name}` returned {checks.shown(leaf)}; "
                    "expected an array or a pytree of arrays. Return arrays only, and pass "
                    "other results around the cell."
                )
        trees.append(tree)
        return leaves

    def trace():
        return jax.make_jaxpr(flat)(shared_avals, operand_avals)

    with pause():
        jaxpr = _traced_alone(name, trace) if alone else trace()
        if jaxpr.effects:
            raise TypeError(
                f"cell `{name}` has the side effect {next(iter(jaxpr.effects))} (a print, a "
                "callback or a reference); expected a pure function, since batches pad and "
                "reorder calls. Return the value and look at it outside."
            )
        if not jaxpr.out_avals:
            raise TypeError(
                f"cell `{name}` returned {jax.tree.unflatten(trees[-1], [])!r}, which holds no "
                "array; expected an array or a pytree of arrays. Did you forget `return`?"
            )
        return _closed(registry, name, may_differ(one_by_one(jaxpr)), trees[-1], shared)


def _traced_alone(name: str, trace: Callable) -> Any:
    """Returns the jaxpr of user code, or raises an error if it keeps a traced value."""
    try:
        with only_new_garbage(), jax.checking_leaks():
            return trace()
    except Exception as error:
        # JAX's search for who keeps a value fails itself with some holders.
        if "leaked trace" not in str(error).lower() and not isinstance(error, IndexError):
            raise
    before = set(map(id, gc.get_objects()))
    jaxpr = trace()
    tracers = [x for x in live_tracers() if id(x) not in before]
    if is_kept(tracers, before):
        raise EscapedValueError(
            f"cell `{name}` keeps a traced value after it returns (a side effect); "
            "expected a pure function. Return the value instead of storing it in a "
            "list, global or attribute."
        )
    return jaxpr


def _closed(registry, name, jaxpr, tree, shared):
    """Makes shared values among the constants of a jaxpr its leading arguments.

    JAX refuses a gradient of what a function with a rule for the reverse closes over, or
    through loops. Arrays reached, and values that do not move, have none.
    """
    extra = []
    lifted = [isinstance(c, Tracer) or id(c) in registry.reached for c in jaxpr.consts]
    for const in itertools.compress(jaxpr.consts, lifted):
        if id(const) in registry.reached:
            extra.append(registry.outer(registry.reached[id(const)], jax.typeof(const)))
        else:
            index = getattr(const, "shared_index", None)
            if index is None:
                raise SymbolicValueError(
                    f"cell `{name}` uses a symbolic or traced value of type "
                    f"{const.aval.str_short()} that is not among its arguments and that "
                    "neither it nor a function in it closes over (a container or an object "
                    "holds it); pass the value to the cell as an argument."
                )
            extra.append(index)
    has_loops = any(map(cares_for_padding, jaxpr.eqns))
    refuses = has_loops or performs(jaxpr, "custom_vjp_call")
    stays = (
        (lambda s: not _moves(registry, s))
        if has_loops
        else functools.partial(_is_array_reached, registry)
    )
    stopped = [refuses and stays(s) for s in (*extra, *shared)]
    if not extra and not any(stopped):
        return jaxpr.replace(consts=list(map(owned, jaxpr.consts))), tree, ()

    def call(leading, args):
        values = [*leading, *args]
        for i in itertools.compress(range(len(values)), stopped):
            values[i] = jax.lax.stop_gradient(values[i])
        leading, args = iter(values[: len(extra)]), values[len(extra) :]
        pairs = zip(jaxpr.consts, lifted, strict=True)
        consts = [next(leading) if is_lifted else owned(c) for c, is_lifted in pairs]
        return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *args)

    avals = [registry.shared[s].aval for s in extra], list(jaxpr.in_avals)
    return jax.make_jaxpr(call)(*avals), tree, tuple(extra)


def _moves(registry: Any, index: int) -> bool:
    """Returns whether something may be differentiated by a shared value."""
    value = registry.shared[index]
    if value.call is not None:
        return any(_moves(registry, i) for i in value.follows)
    return value.array is None and not _is_array_reached(registry, index)


def _is_array_reached(registry: Any, index: int) -> bool:
    array = registry.arrays_reached.get(registry.shared[index].tracer)
    return array is not None and not isinstance(array, Tracer)
