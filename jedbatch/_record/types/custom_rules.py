"""Functions with a derivative rule of their own, as operations.

JAX keeps such a function (`jax.custom_vjp`, `jax.custom_jvp`) and its rules as Python, and runs the
rules when somebody differentiates. By then what was symbolic while they were recorded is gone. So
rules read their arguments, and constants: one that holds a value of the instance, or of the cell,
loop or branch that its function was made in, is an error, which says what to write (see also
`Keys.rule_key`).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._jaxpr.closed_over import value_that_is_gone
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._record.cell import pause
from jedbatch._record.identity.function_leaves import held_values
from jedbatch._support.caches import Budget, Memory, each
from jedbatch._support.types import Leaf

FUNCTION_BYTES = 1 << 14  # of a function that was met, about


class CustomFunctions:
    """The functions with derivative rules that were met.

    Args:
      budget: of bytes.
    """

    def __init__(self, budget: Budget | None = None):
        self._stores: dict[Hashable, Any] = Memory(None, budget, each(FUNCTION_BYTES))
        self._checked: dict[Hashable, None] = Memory(None, budget, each(FUNCTION_BYTES))

    def check(self, key: Hashable, functions: Sequence[Any]) -> None:
        """Raises `EscapedValueError` if a function or a rule of it holds something symbolic.

        Args:
          key: what they are made of.
          functions: the function and its rules.
        """
        if key in self._checked:
            return
        for function in functions:
            for x in held_values(getattr(function, "f", function)):
                if isinstance(x, Tracer):
                    raise value_that_is_gone(x)
        self._checked[key] = None

    def note_run(self, fun: Any, key: Hashable, args: Sequence[Leaf]) -> None:
        """Has JAX know the structure of the result of a function that is not run.

        Args:
          fun: the function.
          key: what it and its rules are made of.
          args: the arguments.
        """
        types = tuple([jax.typeof(x) for x in args])
        stores = None if any(is_ragged(t.shape) for t in types) else self._stores.get((key, types))
        if stores is not None:
            fun.populate_stores(stores)
            return
        with pause():
            jax.make_jaxpr(lambda *xs: fun.call_wrapped(*xs))(*types)
        if not any(is_ragged(t.shape) for t in types):
            self._stores[key, types] = fun.stores


def record_custom(
    recorder: Any, functions: Sequence[Any], call: Callable, tracers: Sequence[Leaf]
) -> list[Leaf]:
    """Records a function with a derivative rule of its own, rule included.

    Args:
      recorder: of the instance.
      functions: the function and its rules, as JAX hands them on.
      call: calls the function, with its rules, within the trace of its arguments.
      tracers: the arguments.
    """
    fun, *rules = functions
    ran = []

    def noted(*values):
        ran.append(True)
        return call(*values)

    registry, name = recorder.registry, getattr(fun, "__name__", "custom")
    key = registry.keys.custom_key(fun, rules)
    registry.custom.check(key, functions)
    code = getattr(getattr(fun, "f", fun), "__code__", None)
    if code is not None:
        registry.warn_if_many(code, key, f"`{name}`, which has a derivative rule,")
    out = recorder._operation(name, key, noted, tracers)
    if not ran:
        registry.custom.note_run(fun, key, tracers)
    return out


def calling_with_rule(how: str, *functions: Any, **told: Any) -> Callable:
    """Returns what calls a function with a rule within the trace that is there then.

    Args:
      how: the name of the method by which traces process it.
      functions: the primitive, the function and its rules.
      told: what else the method gets.
    """

    def call(*values):
        with take_current_trace() as trace, set_current_trace(trace):
            return getattr(trace, how)(*functions, values, **told)

    return call
