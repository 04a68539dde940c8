"""Functions with derivative rules that are made inside of a cell, of values of the cell.

    @jedbatch.cell
    def clipped(params, x, bound):
        @jax.custom_vjp
        def identity(y): ...            # its rule clips gradients to `bound`

JAX keeps the rule as Python, and runs it when somebody differentiates. In a plain loop `bound` is
still there by then; of a cell, which is traced, it is gone. So while a cell is traced, functions of
which something reads a traced value are traced with their rules (see `custom_rules`), and what they
read of the cell is an operand of their programs. Everything else is handed on as it is, unless
traced cells are to be compared: then all functions with rules are programs. In place of numbers
with which Python computes, operands are handed on (see `arithmetic`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Trace, Tracer
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._jaxpr.numbers import BODIES
from jedbatch._record.arithmetic import read_by_jax
from jedbatch._record.custom_rules import (
    CustomFunctions,
    calling_with_forward_rule,
    calling_with_reverse,
    has_calls,
    note_run,
    reads_tracers_inside,
)
from jedbatch._record.keys import Keys
from jedbatch._record.rule_programs import custom_programs
from jedbatch._support.types import Leaf


class RulesAsPrograms(Trace):
    """Hands operations on to another trace, functions whose rules read its values as programs.

    Args:
      inner: the trace.
      registry: has what is reached.
      all_rules: whether other functions with rules are handed on as programs, too.
    """

    def __init__(self, inner: Any, registry: Any, all_rules: bool):
        super().__init__()
        self.requires_low = inner.requires_low
        self.inner = inner
        self.registry = registry
        self.all_rules = all_rules

    def __getattr__(self, name: str) -> Any:  # what some operations ask of the trace
        return getattr(self.inner, name)

    def stage_value(self, val):
        return self.inner.stage_value(val)

    def process_primitive(self, primitive, tracers, params, /):
        tracers = list(map(read_by_jax, tracers))
        name = primitive.name
        if name not in BODIES or not self._opens(name, params):
            return self.inner.process_primitive(primitive, tracers, params)

        def call(*values):
            out = primitive.bind(*values, **params)
            return out if primitive.multiple_results else [out]

        with set_current_trace(self.inner):
            custom = CustomFunctions(Keys(), self.registry.variants)
            out = custom.run_opened(call, tracers, self._is_reached)
        return out if primitive.multiple_results else out[0]

    def _opens(self, name: str, params: Mapping[str, Any]) -> bool:
        """Returns whether functions with rules in the bodies of an operation become programs."""
        return reads_tracers_inside(name, params) or (self.all_rules and has_calls(name, params))

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, *, symbolic_zeros):
        call = calling_with_forward_rule(primitive, fun, jvp, symbolic_zeros=symbolic_zeros)
        return self._call((fun, jvp), call, tracers)

    def process_custom_vjp_call(
        self, primitive, fun, fwd, bwd, tracers, /, *, out_trees, symbolic_zeros
    ):
        told = {"out_trees": out_trees, "symbolic_zeros": symbolic_zeros}
        call = calling_with_reverse(primitive, fun, fwd, bwd, **told)
        return self._call((fun, fwd, bwd), call, tracers)

    def _call(self, functions: Sequence[Any], call: Callable, args: Sequence[Leaf]) -> list[Leaf]:
        args = list(map(read_by_jax, args))
        keys = Keys()  # of this function alone: they hold traced values
        programs = custom_programs(functions, call, args, self._is_captured, keys.rule_key)
        with set_current_trace(self.inner):
            if programs is None or not (self.all_rules or programs.holds_tracers):
                return call(*args)
            note_run(functions[0], args)
            return programs.operation()(*map(read_by_jax, programs.captured), *args)

    def _is_captured(self, x: object) -> bool:
        return isinstance(x, Tracer) or self._is_reached(x)

    def _is_reached(self, x: object) -> bool:
        return isinstance(x, jax.Array) and id(x) in self.registry.reached


@contextlib.contextmanager
def rules_as_programs(registry: Any, all_rules: bool) -> Iterator[RulesAsPrograms]:
    """Inside, a cell is traced whose functions with rules may read its values.

    For arguments see `RulesAsPrograms`.
    """
    with take_current_trace() as inner:
        trace = RulesAsPrograms(inner, registry, all_rules)
        with set_current_trace(trace):
            yield trace
