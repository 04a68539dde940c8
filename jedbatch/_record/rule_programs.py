"""Functions with a derivative rule of their own, traced: the function and its rule as programs.

A rule runs when somebody differentiates, long after it was made. What it reads besides its
arguments, arrays and numbers, is an operand of its programs, so that one function made of these
programs serves all that differ in nothing else.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jedbatch._graph.operations import PrimitiveKey
from jedbatch._jaxpr.closed_over import closed_over
from jedbatch._jaxpr.interpret import (
    has_gradient,
    interpret,
    run_equation,
)
from jedbatch._jaxpr.numbers import Number, numbers_of, run_program
from jedbatch._jaxpr.versions import consts_of, without_consts
from jedbatch._record.cell import pause
from jedbatch._record.closures import Described
from jedbatch._record.keys import Keys
from jedbatch._record.shared_values import owned
from jedbatch._support.types import Array, Leaf

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
        are_tracers = [isinstance(x, Tracer) for x in self.captured]
        num_captured = len(self.captured)
        # JAX keeps what follows, for longer than tracers live.
        programs = ProgramsOfNumbers(self.programs, tuple(lifted))
        differentiate = _with_forward_rule if len(self.programs) == 2 else _with_reverse
        num_results = len(without_consts(self.programs[0]).outvars)
        whole = differentiate(programs, num_results, self.is_inexact)

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


class ProgramsOfNumbers(Described):
    """The programs of a function and its rule, some of whose numbers are given.

    Args:
      programs: the programs.
      lifted: positions of these numbers.
    """

    def __init__(self, programs: Sequence[Any], lifted: tuple[int, ...]):
        self._programs = programs
        self._lifted = lifted
        self._first = [0, *itertools.accumulate(len(list(numbers_of(x))) for x in programs)]

    def run(
        self, place: int, held: Sequence[Any], *args: Any, itself: Callable | None = None
    ) -> list[Any]:
        """Runs one of the programs with the numbers `held`; `itself` is the function."""
        numbers = dict(zip(self._lifted, held, strict=True))
        replaced = {} if itself is None else {"custom_itself": itself}
        inputs = self._programs[place], self._first[place], *args
        return run_program(numbers, *inputs, replaced=replaced)

    def identity(self, program_key: Callable[[Any], Hashable]) -> Hashable:
        """The programs without the numbers that are given."""
        parts: list[Hashable] = [self._lifted]
        for first, last, program in zip(self._first, self._first[1:], self._programs, strict=False):
            key: Any = program_key(program)
            if first < last:
                skeleton, *numbers = key
                constant = [x for k, x in enumerate(numbers, first) if k not in self._lifted]
                key = skeleton, *constant
            parts.append(key)
        return tuple(parts)


def _with_forward_rule(
    programs: ProgramsOfNumbers, num_results: int, is_inexact: tuple[bool, ...]
) -> Callable:
    """Returns the function of numbers, of what it closes over, and of its arguments."""

    @jax.custom_jvp
    def function(held, captured, *args):
        return programs.run(0, held, *captured, *args)

    @function.defjvp
    def rule(primals, tangents):
        held, captured, *args = primals
        moving = itertools.compress(tangents[2:], is_inexact)
        itself = lambda *xs: function(held, captured, *xs)  # noqa: E731
        results = programs.run(1, held, *captured, *args, *moving, itself=itself)
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


def _with_reverse(
    programs: ProgramsOfNumbers, num_results: int, is_inexact: tuple[bool, ...]
) -> Callable:
    """Returns the same with a rule for the reverse."""

    @jax.custom_vjp
    def function(held, captured, *args):
        return programs.run(0, held, *captured, *args)

    def forward(held, captured, *args):
        results = programs.run(1, held, *captured, *args)
        return results[:num_results], (held, captured, results[num_results:])

    def backward(kept, slopes):
        held, captured, residuals = kept
        moving = [x for x in slopes if has_gradient(x.dtype)]
        found = iter(programs.run(2, held, *captured, *residuals, *moving))
        return None, None, *(next(found) if has_slope else None for has_slope in is_inexact)

    function.defvjp(forward, backward)
    return function


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
