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

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive, set_current_trace, take_current_trace
from jax.interpreters import ad, batching, mlir

from jedbatch._graph.operations import PrimitiveKey
from jedbatch._jaxpr.closed_over import closed_over
from jedbatch._jaxpr.interpret import (
    bodies_of,
    has_gradient,
    interpret,
    is_fixed,
    run_equation,
    run_with_bodies,
)
from jedbatch._jaxpr.numbers import BODIES, Number, literal, numbers_of, run_program, traced_bodies
from jedbatch._jaxpr.symbolic_dims import is_ragged
from jedbatch._jaxpr.versions import RULES_OF, consts_of, traced_rule, without_consts
from jedbatch._record.cell import pause
from jedbatch._record.closures import held_values
from jedbatch._record.keys import Keys
from jedbatch._record.shared_values import owned
from jedbatch._record.variants import VariantsMet
from jedbatch._support.caches import Memory
from jedbatch._support.types import Array, Leaf

MANY_FUNCTIONS = 256  # that are known as programs
MANY_BODIES = 1024  # of operations whose functions with rules are known to be constant
MAX_CONSTANT_RULES = 1  # of functions in bodies that are equal but for numbers and rules

CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class CustomPrograms(NamedTuple):
    """A function with a derivative rule, traced.

    Attributes:
      programs: of the function and of its rule, the forward and the backward one for the reverse.
        The arrays that they close over are their first arguments.
      captured: these arrays.
      is_inexact: for each argument of the function whether it has a gradient.
    """

    programs: tuple[Any, ...]
    captured: tuple[Any, ...]
    is_inexact: tuple[bool, ...]

    @property
    def numbers(self) -> list[Number]:
        """The numbers of all programs."""
        return [x for program in self.programs for x in numbers_of(program)]

    @property
    def holds_tracers(self) -> bool:
        """True of what differs from one recording to the next."""
        return any(isinstance(x, Tracer) for x in self.captured)

    def key(self, keys: Keys) -> PrimitiveKey:
        """The key of the operation, with the numbers of its programs."""
        return keys.programs_key("custom", self.programs)

    def operation(self, lifted: Sequence[int] = ()) -> Callable[..., list[Array]]:
        """The function of some numbers, by position, of what it closes over and its arguments."""
        counts = [0, *itertools.accumulate(len(list(numbers_of(x))) for x in self.programs)]
        are_tracers = [isinstance(x, Tracer) for x in self.captured]
        num_captured = len(self.captured)
        kept = self._replace(captured=())  # JAX keeps what follows, for longer than tracers live

        def run(place: int, held: Sequence[Any], captured: Sequence[Any], *args: Any) -> list[Any]:
            numbers: Mapping[int, Any] = dict(zip(lifted, held, strict=True))
            again = {"custom_itself": lambda *xs: whole(held, captured, *xs)}
            inputs = kept.programs[place], counts[place], *captured, *args
            return run_program(numbers, *inputs, replaced=again)

        differentiate = kept._with_forward_rule if len(kept.programs) == 2 else kept._with_reverse
        whole = differentiate(run)

        def call(*values: Any) -> list[Any]:
            rest = values[len(lifted) :]
            held = [
                jax.lax.stop_gradient(x) if has_gradient(x.dtype) else x
                for x in values[: len(lifted)]
            ]
            captured = [
                (closed_over if is_tracer else jax.lax.stop_gradient)(x)
                if has_gradient(x.dtype)
                else x
                for x, is_tracer in zip(rest[:num_captured], are_tracers, strict=True)
            ]
            return list(whole(held, captured, *rest[num_captured:]))

        return call

    def _with_forward_rule(self, run: Callable) -> Callable:
        @jax.custom_jvp
        def function(held, captured, *args):
            return run(0, held, captured, *args)

        @function.defjvp
        def rule(primals, tangents):
            held, captured, *args = primals
            moving = itertools.compress(tangents[2:], self.is_inexact)
            results = run(1, held, captured, *args, *moving)
            num_results = len(without_consts(self.programs[0]).outvars)
            slopes = iter(results[num_results:])
            # What is closed over counts too, for its tangents to be looked at (see `closed_over`).
            others = [x.sum() for x in tangents[1] if x.dtype != jax.dtypes.float0]
            return results[:num_results], [
                functools.reduce(lambda a, b: a + b.astype(x.dtype), others, next(slopes))
                if has_gradient(x.dtype)
                else np.zeros(x.shape, jax.dtypes.float0)
                for x in results[:num_results]
            ]

        return function

    def _with_reverse(self, run: Callable) -> Callable:
        num_results = len(without_consts(self.programs[0]).outvars)

        @jax.custom_vjp
        def function(held, captured, *args):
            return run(0, held, captured, *args)

        def forward(held, captured, *args):
            results = run(1, held, captured, *args)
            return results[:num_results], (held, captured, results[num_results:])

        def backward(kept, slopes):
            held, captured, residuals = kept
            moving = [x for x in slopes if has_gradient(x.dtype)]
            found = iter(run(2, held, captured, *residuals, *moving))
            return None, None, *(next(found) if inexact else None for inexact in self.is_inexact)

        function.defvjp(forward, backward)
        return function


class CustomFunctions:
    """The functions with derivative rules that were met.

    Args:
      keys: what operations are told apart by.
      variants: how many variants of operations were met.
    """

    def __init__(self, keys: Keys, variants: VariantsMet):
        self._keys = keys
        self._variants = variants
        self._known: dict[Hashable, CustomPrograms | None] = Memory(MANY_FUNCTIONS)
        self._constant: dict[Hashable, None] = Memory(MANY_BODIES)

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
        if name != "custom_jvp_call":  # what the rule of others is made of differs every time
            return False
        place = self._keys.programs_key(name, [params["call_jaxpr"]]).skeleton
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
                name = eqn.primitive.name
                if name in RULES_OF:
                    return self._as_programs(inner, eqn, values, is_weight)
                if name not in BODIES or is_fixed(eqn) or not _has_calls(eqn):
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
        return programs.operation(tuple(numbers))(*held, *programs.captured, *args)


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


def _has_calls(eqn: Any) -> bool:
    bodies = traced_bodies(eqn.primitive.name, eqn.params)
    return any(next(_calls(body), None) is not None for body in bodies)


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
    if not ran:
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


def calling_with_reverse(primitive: Any, *functions: Any, **told: Any) -> Callable:
    """Returns the same of a function with a rule for the reverse."""

    def call(*values):
        with take_current_trace() as trace, set_current_trace(trace):
            return trace.process_custom_vjp_call(primitive, *functions, values, **told)

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


def custom_programs(
    functions: Sequence[Any],
    call: Callable,
    args: Sequence[Leaf],
    is_captured: Callable,
    rule_key: Callable[[str, Any], Any],
) -> CustomPrograms | None:
    """Traces a function with a derivative rule; None if its rule cannot be traced like this.

    Args:
      functions: the function and its rules, as JAX hands them on; they have not been run since.
      call: calls the function, with its rules, within the trace of its arguments.
      args: the arguments.
      is_captured: whether an array that they close over is an operand.
      rule_key: equal for the parameters of two operations that have equal rules.
    """
    types = [jax.typeof(x) for x in args]
    inexact = tuple(has_gradient(t.dtype) for t in types)
    trace = _traced_reverse if len(functions) == 3 else _traced_forward
    try:
        with pause():
            first = jax.make_jaxpr(call)(*types)
            programs = (first, *trace(call, types, inexact, first.out_avals))
            consts = {id(c): c for program in programs for c in consts_of(program)}
            captured = tuple(filter(is_captured, consts.values()))
            whole = _closed(first, captured)
            in_rule: Any = _in_reverse
            if trace is _traced_forward:
                in_rule = _InForwardRule(rule_key, first, len(types))
            others = [_closed(program, captured, in_rule) for program in programs[1:]]
    except Exception:  # it may be an error to differentiate it at all
        return None
    finally:
        for x in functions:  # JAX asks which of them were run
            forget_runs(x)
    return CustomPrograms((whole, *others), captured, inexact)


def forget_runs(function: Any) -> None:
    """Lets a function that JAX hands on be run once more."""
    for store in getattr(function, "stores", ()):
        if store is not None:
            with contextlib.suppress(AttributeError):
                store.reset()


def _traced_forward(call: Callable, types: Sequence[Any], inexact: Sequence[bool], out: Any) -> Any:
    """The program of the results and their tangents, of the arguments and theirs."""

    def rule(xs, moving):
        rest = iter(moving)
        tangents = [
            next(rest) if is_inexact else np.zeros(t.shape, jax.dtypes.float0)
            for t, is_inexact in zip(types, inexact, strict=True)
        ]
        results, slopes = jax.jvp(lambda *ys: tuple(call(*ys)), tuple(xs), tuple(tangents))
        return results, [x for x, t in zip(slopes, out, strict=True) if has_gradient(t.dtype)]

    return (jax.make_jaxpr(rule)(types, list(itertools.compress(types, inexact))),)


def _traced_reverse(call: Callable, types: Sequence[Any], inexact: Sequence[bool], out: Any) -> Any:
    """The programs of the results and what is kept, and from there of the cotangents."""
    structure = []

    def forward(*xs):
        results, pull = jax.vjp(lambda *ys: tuple(call(*ys)), *xs)
        leaves, tree = jax.tree.flatten(pull)
        structure.append(tree)
        return results, leaves

    def backward(leaves, slopes):
        rest = iter(slopes)
        cotangents = tuple(
            next(rest) if has_gradient(t.dtype) else np.zeros(t.shape, jax.dtypes.float0)
            for t in out
        )
        found = jax.tree.unflatten(structure[-1], leaves)(cotangents)
        return list(itertools.compress(found, inexact))

    forth = jax.make_jaxpr(forward)(*types)
    moving = [t for t in out if has_gradient(t.dtype)]
    return forth, jax.make_jaxpr(backward)(list(forth.out_avals[len(out) :]), moving)


class _InForwardRule:
    """Runs calls of functions with rules in a forward rule, which may be differentiated.

    The function itself is another operation, as it closes over arrays; all else is left.
    """

    def __init__(self, rule_key: Callable[[str, Any], Any], first: Any, num_args: int):
        me = first.eqns[0]
        self._of = rule_key
        self._key = rule_key(me.primitive.name, me.params)
        arrays = dict(zip(without_consts(first).constvars, consts_of(first), strict=True))
        self._own = [id(arrays.get(x)) for x in me.invars[: len(me.invars) - num_args]]

    def __call__(
        self, eqn: Any, values: list[Any], run: Callable, apart: Callable, held: Mapping[int, Any]
    ) -> list[Any]:
        name, num_own = eqn.primitive.name, len(self._own)
        if name != "custom_jvp_call" or self._of(name, eqn.params) != self._key:
            return run()
        if any(held.get(x) is not y for x, y in zip(self._own, values[:num_own], strict=True)):
            return run()  # it closes over other arrays
        types = [v.aval for v in eqn.outvars]
        results = tuple((t.shape, t.dtype.name, bool(t.weak_type)) for t in types)
        return custom_itself_p.bind(*values[num_own:], results=results)


custom_itself_p = Primitive("custom_itself")
custom_itself_p.multiple_results = True


@custom_itself_p.def_abstract_eval
def _types_of_results(*_: Any, results: Sequence[tuple]) -> list[ShapedArray]:
    return [ShapedArray(shape, np.dtype(dtype), weak_type=weak) for shape, dtype, weak in results]


def _refuse_forward_mode(*_: Any) -> Any:
    raise TypeError("can't apply forward-mode autodiff (jvp) to a custom_vjp function.")


reverse_only_p = Primitive("reverse_only")  # returns its argument
reverse_only_p.def_impl(lambda x: x)
reverse_only_p.def_abstract_eval(lambda x: x)
batching.defvectorized(reverse_only_p)
ad.primitive_jvps[reverse_only_p] = _refuse_forward_mode
mlir.register_lowering(reverse_only_p, lambda _, x: [x])


def _in_reverse(
    eqn: Any, values: list[Any], run: Callable, apart: Callable, _: Mapping[int, Any]
) -> list[Any]:
    """Runs a call of a function with a rule in a rule for the reverse.

    That is differentiated in forward mode alone, in which JAX refuses those for the reverse.
    """
    if eqn.primitive.name == "custom_jvp_call":
        return run()
    return [reverse_only_p.bind(x) if has_gradient(x.dtype) else x for x in apart()]


def _taken_apart(
    eqn: Any, values: list[Any], run: Callable, apart: Callable, _: Mapping[int, Any]
) -> list[Any]:
    """Runs a call of a function with a rule where nobody differentiates it."""
    return apart()


def _closed(program: Any, captured: Sequence[Any], of_call: Callable = _taken_apart) -> Any:
    """The program with what it closes over as first arguments.

    A call of a function with a rule becomes `of_call(equation, values, run, apart, held)`, where
    `run` calls it, `apart` runs its program without the rule, and `held` has what is closed over.
    """
    places = {id(x): k for k, x in enumerate(captured)}

    def evaluate(
        inner: Any, consts: Sequence[Any], args: Sequence[Any], held: Mapping[int, Any]
    ) -> list[Any]:
        def rule(eqn: Any, values: list[Any]) -> list[Any]:
            run = functools.partial(run_equation, inner, eqn, values)
            if eqn.primitive.name not in CUSTOM_CALLS:
                return run()
            body = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
            inside = without_consts(body), consts_of(body), values, held
            return of_call(eqn, values, run, functools.partial(evaluate, *inside), held)

        return interpret(inner, consts, args, rule)

    def call(arrays, *args):
        consts = [
            arrays[places[id(c)]] if id(c) in places else owned(c) for c in consts_of(program)
        ]
        held = dict(zip(map(id, consts_of(program)), consts, strict=True))
        return evaluate(without_consts(program), consts, args, held)

    types = [jax.typeof(x) for x in captured]
    return jax.make_jaxpr(call)(types, *program.in_avals)
