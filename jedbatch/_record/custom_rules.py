"""Functions with a derivative rule of their own, as programs.

A `jax.custom_vjp` or `jax.custom_jvp` made inside of the batched function mostly closes over
something of the instance: the bound that a gradient is clipped to, the scale of a noise. JAX keeps
such a function and its rule as Python, and runs the rule when somebody differentiates. By then
symbolic values are gone, and a number that Python holds would make another type for each value.

So what closes over symbols, or was met with other numbers before, is traced while it is recorded,
rule and all. Numbers of the programs are data like those in the bodies of loops (`_jaxpr.numbers`),
and arrays are operands. As in JAX, it is an error to differentiate with respect to them.

Functions that are made in the body of a loop, branch or call reach us as equations of its program.
Where these hold symbols or vary, the body is traced again with programs in their place, so that
what they hold belongs to the body.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._graph.operations import PrimitiveKey
from jedbatch._jaxpr.interpret import (
    bodies_of,
    has_gradient,
    interpret,
    is_fixed,
    run_equation,
    run_with_bodies,
)
from jedbatch._jaxpr.numbers import BODIES, literal, traced_bodies
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._jaxpr.versions import (
    RULES_OF,
    consts_of,
    failing_without_trace,
    traced_rule,
    without_consts,
)
from jedbatch._record.arithmetic import read_by_jax
from jedbatch._record.cell import pause
from jedbatch._record.held import held_values
from jedbatch._record.keys import Keys
from jedbatch._record.rule_programs import CustomPrograms, custom_programs
from jedbatch._record.variants import VariantsMet
from jedbatch._support.caches import Budget, Memory, each
from jedbatch._support.types import Leaf

FUNCTION_BYTES = 1 << 14  # of a function that is known as programs, about
BODY_BYTES = 1 << 10  # of an operation whose functions with rules are known to be constant
MAX_CONSTANT_RULES = 1  # of functions in bodies that are equal but for numbers and rules


class CustomFunctions:
    """The functions with derivative rules that were met.

    Args:
      keys: what operations are told apart by.
      variants: how many variants of operations were met.
      budget: of bytes.
    """

    def __init__(self, keys: Keys, variants: VariantsMet, budget: Budget | None = None):
        self._keys = keys
        self._variants = variants
        of_function = each(FUNCTION_BYTES)
        self._known: dict[Hashable, CustomPrograms | None] = Memory(None, budget, of_function)
        self._constant: dict[Hashable, None] = Memory(None, budget, each(BODY_BYTES))
        self._stores: dict[Hashable, Any] = Memory(None, budget, of_function)

    def programs(
        self,
        is_weight: Callable[[Any], bool],
        key: Hashable,
        functions: Sequence[Any],
        call: Callable,
        args: Sequence[Leaf],
    ) -> CustomPrograms | None:
        """Returns a function as programs if it varies or closes over symbols; else None.

        Args:
          is_weight: whether an array is one that the batched function reaches.
          key: what the function and its rules are made of.
          functions: the function and its rules, as for `custom_programs`.
          call: calls the function.
          args: the arguments.
        """
        types = tuple([jax.typeof(x) for x in args])
        if any(is_ragged(t.shape) for t in types):
            return None
        code = getattr(getattr(functions[0], "f", functions[0]), "__code__", None)
        varies = self._variants.are_many(("custom", code), key, 1)
        if (key, types) in self._known and not varies:
            return None
        programs = self._known.get((key, types))
        if programs is None:

            def is_captured(x: object) -> bool:
                return isinstance(x, Tracer) or is_weight(x)

            programs = custom_programs(functions, call, args, is_captured, self._keys.rule_key)
            if programs is None or not programs.captured:
                self._known[key, types] = programs
            elif not programs.holds_tracers and not varies:
                self._known[key, types] = None
        return programs if programs is not None and (varies or programs.holds_tracers) else None

    def note_run(self, fun: Any, key: Hashable, args: Sequence[Leaf]) -> None:
        """Has JAX know the structure of the result of a function that is not run.

        Args:
          fun: the function.
          key: what it and its rules are made of.
          args: the arguments.
        """
        types = tuple([jax.typeof(x) for x in args])
        if any(is_ragged(t.shape) for t in types):
            note_run(fun, args)
            return
        stores = self._stores.get((key, types))
        if stores is None:
            note_run(fun, args)
            self._stores[key, types] = fun.stores
        else:
            fun.populate_stores(stores)

    def vary_inside(self, key: PrimitiveKey, name: str, params: Mapping[str, Any]) -> bool:
        """Returns whether functions in the bodies of an operation vary or close over symbols.

        Args:
          key: of the operation.
          name: of its primitive.
          params: its parameters.
        """
        if key in self._constant:
            return False
        vary = [self._varies(eqn) for body in traced_bodies(name, params) for eqn in _calls(body)]
        if not any(vary):
            self._constant[key] = None
        return any(vary)

    def _varies(self, eqn: Any) -> bool:
        name, params = eqn.primitive.name, eqn.params
        if _reads_tracers(eqn):
            return True
        code = getattr(getattr(params.get("bwd"), "f", None), "__code__", None)
        place = code, self._keys.programs_key(name, [params["call_jaxpr"]]).skeleton
        variant = self._keys.rule_key(name, params)
        return self._variants.are_many(("inside", place), variant, MAX_CONSTANT_RULES)

    def run_opened(self, call: Callable, args: Sequence[Leaf], is_weight: Callable) -> list[Leaf]:
        """Returns `call(*args)` of an operation, functions with rules in its bodies as programs.

        Args:
          call: of one operation with bodies.
          args: the arguments.
          is_weight: whether an array is one that the batched function reaches.
        """

        def run(program: Any, *values: Any) -> list[Any]:
            inner = without_consts(program)

            def rule(eqn: Any, values: list[Any]) -> list[Any]:
                name, values = eqn.primitive.name, list(map(read_by_jax, values))
                if name in RULES_OF:
                    return self._as_programs(inner, eqn, values, is_weight)
                if name not in BODIES or is_fixed(eqn) or not has_calls(name, eqn.params):
                    return run_equation(inner, eqn, values)
                bodies = [functools.partial(run, body) for body in bodies_of(eqn)]
                if name == "jit":
                    body: Any = bodies[0]
                    body.__name__ = eqn.params["name"]
                    return jax.jit(body)(*values)
                return run_with_bodies(eqn, bodies, values)

            return interpret(inner, consts_of(program), values, rule)

        with pause():
            program = jax.make_jaxpr(call)(*map(jax.typeof, args))
        return run(program, *args)

    def _as_programs(
        self, jaxpr: Any, eqn: Any, values: Sequence[Any], is_weight: Callable
    ) -> list[Any]:
        """The results of a function with a rule, called by an equation; numbers are literals."""
        num_consts = eqn.params["num_consts"]

        def apply(*args: Any) -> list[Any]:
            return run_equation(jaxpr, eqn, [*values[:num_consts], *args])

        def is_captured(x: object) -> bool:
            return isinstance(x, Tracer) or is_weight(x)

        functions = (None,) * (2 if eqn.primitive.name == "custom_jvp_call" else 3)
        args = values[num_consts:]
        programs = custom_programs(functions, apply, args, is_captured, self._keys.rule_key)
        if programs is None:
            return apply(*args)
        numbers = {k: x for k, x in enumerate(programs.numbers) if has_gradient(x.value.dtype)}
        held = [jax.lax.stop_gradient(literal(x)) for x in numbers.values()]
        captured = map(read_by_jax, programs.captured)
        return programs.operation(tuple(numbers))(*held, *captured, *args)


def reads_tracers_inside(name: str, params: Mapping[str, Any]) -> bool:
    """Returns whether functions in the bodies of an operation close over traced values."""
    return any(_reads_tracers(eqn) for body in traced_bodies(name, params) for eqn in _calls(body))


def _reads_tracers(eqn: Any) -> bool:
    """Returns whether the rule of a function that an equation calls closes over traced values."""
    try:
        _, consts, rest = traced_rule(eqn.primitive.name, eqn.params)
    except Exception:  # it may be an error to differentiate it at all
        return False
    held = [x for fn in rest for x in held_values(getattr(fn, "f", fn))]
    return any(isinstance(x, Tracer) for x in (*consts, *held))


def _calls(program: Any) -> Iterator[Any]:
    """Yields the calls of functions with rules in the bodies of a program."""
    for eqn in without_consts(program).eqns:
        if eqn.primitive.name in RULES_OF:
            yield eqn
        for body in traced_bodies(eqn.primitive.name, eqn.params):
            yield from _calls(body)


def has_calls(name: str, params: Mapping[str, Any]) -> bool:
    """Returns whether functions with rules are called in the bodies of an operation."""
    return any(next(_calls(body), None) is not None for body in traced_bodies(name, params))


def record_custom(
    recorder: Any, functions: Sequence[Any], call: Callable, tracers: Sequence[Leaf]
) -> list[Leaf]:
    """Records a function with a derivative rule of its own, rule included.

    Args:
      recorder: of the instance.
      functions: the function and its rules, as for `custom_programs`.
      call: calls the function.
      tracers: the arguments.
    """
    fun, *rules = functions
    ran = []

    def noted(*values):
        ran.append(True)
        return call(*values)

    name, variants = getattr(fun, "__name__", "custom"), recorder.registry.variants
    key = recorder.registry.keys.custom_key(fun, rules)
    code = getattr(getattr(fun, "f", fun), "__code__", None)
    programs = recorder.registry.custom.programs(
        recorder.is_weight_reached, key, functions, call, tracers
    )
    if programs is not None:
        out = recorder.perform(
            name,
            programs.key(recorder.registry.keys),
            programs.operation(),
            [*programs.captured, *tracers],
            lambda _, lifted: programs.operation(lifted),
        )
    else:
        if code is not None:
            variants.warn_if_many(code, key, f"`{name}`, which has a derivative rule,")
        out = recorder._operation(name, key, noted, tracers)
    if not ran and programs is None:
        recorder.registry.custom.note_run(fun, key, tracers)
    elif not ran:
        note_run(fun, tracers)
    return out


def note_run(fun: Any, args: Sequence[Leaf]) -> None:
    """Runs a function, as JAX reads the structure of the result off its run."""
    with pause():
        jax.make_jaxpr(lambda *xs: fun.call_wrapped(*xs))(*map(jax.typeof, args))


def calling_with_forward_rule(primitive: Any, *functions: Any, **told: Any) -> Callable:
    """Returns what calls a function with a rule within the trace that is there then."""

    def call(*values):
        with take_current_trace() as trace, set_current_trace(trace):
            return trace.process_custom_jvp_call(primitive, *functions, values, **told)

    return call


def calling_with_reverse(
    primitive: Any, function: Any, forward: Any, back: Any, **told: Any
) -> Callable:
    """Returns the same of a function with a rule for the reverse."""
    forward = failing_without_trace(forward)

    def call(*values):
        with take_current_trace() as trace, set_current_trace(trace):
            return trace.process_custom_vjp_call(primitive, function, forward, back, values, **told)

    return call


def record_opened(
    recorder: Any,
    key: PrimitiveKey,
    name: str,
    params: Mapping[str, Any],
    call: Callable,
    args: Sequence[Leaf],
) -> list[Leaf] | None:
    """Records an operation whose bodies make functions with rules of something of the instance.

    Args:
      recorder: of the instance.
      key: of the operation.
      name: of its primitive.
      params: its parameters.
      call: `call(*args)` is its results.
      args: the arguments.

    Returns:
      Its results; None where there are no such functions.
    """
    if recorder.is_opened or key.is_ragged:
        return None
    custom = recorder.registry.custom
    if not custom.vary_inside(key, name, params):
        return None
    recorder.is_opened = True
    try:
        with set_current_trace(recorder):
            return custom.run_opened(call, args, recorder.is_weight_reached)
    finally:
        recorder.is_opened = False
