"""Derivatives of programs whose loops JAX cannot reverse: of any order, in both modes.

A program of ours is a loop over batches. JAX can push tangents through it, but not pull cotangents
back; that we do by a program of our own, the reverse sweep. `jax.custom_vjp` says so once: what
has such a rule has no forward mode, and its rule is a loop again that cannot be reversed. So here
is a primitive instead, with parameters that say how to run it and how to pull cotangents back. Its
tangents are a primitive too, linear and with a transpose:

    program(x)      -jvp->        with_tangents(x, dx)     (results and tangents in one loop)
    with_tangents   -linearize->  known(x), tangents(x, residuals, dx)
    tangents        -transpose->  pull_back(x, residuals, cotangents)

`pull_back` binds such primitives, hence it is differentiable by the same rules, again and again.
A program may ask its arguments first where they are zeros, and leave out what follows from these.
That must not hold of their tangents too: where an argument is 0, its tangent need not be. So these
are asked as well (`DifferentiableProgram.marks`).

What is transposed in a program with tangents follows from the program alone: it is the program on
numbers a + b e, with e e = 0, and its transpose is the transpose on such numbers, where the parts
a and b of cotangents are exchanged.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive, Var, set_current_trace
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jedbatch._jaxpr.configuration import without_mesh
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.meshes import (
    cut_as,
    on_mesh_of,
    on_no_mesh,
    run_on_no_mesh,
    varying_alike,
)
from jedbatch._jaxpr.versions import Equation, token_program
from jedbatch._support.types import Array

Partial = Sequence[Array]  # values, or None, which stands for zeros


class DifferentiableProgram:
    """A function of arrays that is run, and differentiated, as a whole.

    Attributes:
      run: from arrays to a list of arrays.
      known: from the same arrays to (results, residuals), where cotangents will be pulled back.
      pull_back: from (arguments, residuals, cotangents of the results, for each argument whether
        its cotangent is wanted) to cotangents of the arguments.
      types: from the types of the arguments to those of the results; None if tracing `run` tells.
      marks: from (arguments, some numbers for each, or None) to a list of bool[...]: where these
        numbers, the arguments or tangents of theirs, are not zeros. None if `run` does not ask.
      run_marked: from (marks, arguments) to what `run` returns.
      on_mesh: whether it runs on the devices of a mesh by itself, and so is told of meshes.
    """

    def __init__(
        self,
        run: Callable,
        pull_back: Callable,
        run_known: Callable | None = None,
        types: Callable | None = None,
        marks: Callable | None = None,
    ):
        """Prepares a program; `run` takes marks first if there are `marks`."""
        self.marks = marks
        self.on_mesh = False
        self.run_marked: Callable = run if marks else lambda _, *args: run(*args)
        self.run: Callable = self._run_asking if marks else run
        self.pull_back = pull_back
        self.types = types
        self.known: Callable = run_known or (lambda *args: (bind_program(self, args), []))

    def like(self, other: "DifferentiableProgram") -> Self:
        """Returns this program, which runs where another one does."""
        self.on_mesh = other.on_mesh
        return self

    def _run_asking(self, *args: Array) -> list[Array]:
        """Returns what the program returns; its arguments are asked first where they are zeros."""
        assert self.marks is not None
        return list(self.run_marked(self.marks(args, args), *args))

    @functools.cached_property
    def traced(self) -> Callable:
        """`run`, which JAX traces once for all uses of the program in a program of its own."""
        return jax.jit(self.run)


class WithTangents(DifferentiableProgram):
    """A program of arguments and of tangents of some of them, with tangents as further results.

    Attributes:
      of: the program.
      moving: which of its arguments have a tangent.
      num_args: how many arguments it has.
      flags: for each of its results, whether it has a tangent; known once it has run.
    """

    def __init__(self, of: DifferentiableProgram, which: Sequence[bool]):
        run = self._run_marked if of.marks else functools.partial(self._run_marked, ())
        super().__init__(run, self._pull_back, marks=of.marks and self._marks)
        self.like(of)
        self.of = of
        self.moving = [i for i, there in enumerate(which) if there]
        self.num_args = len(which)
        self.flags: list[bool] = []

    def note(self, results: Sequence[Any]) -> None:
        """Notes what the results of the program, or their types, are."""
        self.flags = [has_gradient(x.dtype) for x in results]

    def spread(self, tangents: Sequence[Array]) -> list[Array]:
        """The tangents of the results, None where there is none."""
        return spread_to(tangents, [i for i, there in enumerate(self.flags) if there], self.flags)

    def tangents_only(self) -> DifferentiableProgram:
        """The program without the results that are no tangents; to be used once it has run."""
        nothing = [None] * len(self.flags)

        def pull_back(
            args: Partial, _: Any, cotangents: Partial, wanted: Sequence[bool]
        ) -> list[Array]:
            return self._pull_back(args, (), [*nothing, *cotangents], wanted)

        def run(*args: Any) -> list[Array]:
            return list(self.run_marked(*args))[len(nothing) :]

        if self.marks is None:
            run = functools.partial(run, ())
        return DifferentiableProgram(run, pull_back, marks=self.marks).like(self)

    def _marks(self, operands: Partial, numbers: Partial) -> list[Array]:
        """Returns where some numbers, or the tangents among them, are not zeros."""
        assert self.of.marks is not None
        args, count = operands[: self.num_args], self.num_args
        parts = numbers[:count], spread_to(numbers[count:], self.moving, args)
        return [x | y for x, y in zip(*(self.of.marks(args, part) for part in parts), strict=True)]

    def _run_marked(self, marks: Sequence[Array], *operands: Array) -> list[Array]:
        args, tangents = operands[: self.num_args], operands[self.num_args :]

        def run(*moved: Array) -> tuple[list[Array], list[Array]]:
            full = with_replaced(args, self.moving, moved)
            results = list(self.of.run_marked(marks, *full))
            return list(filter(has_tangent, results)), results

        moved = [args[i] for i in self.moving]
        with reverse_mode_only("a batched program"):
            _, pushed, results = jax.jvp(run, moved, list(tangents), has_aux=True)
        self.note(results)
        return [*results, *pushed]

    def _pull_back(
        self, operands: Partial, _: Any, cotangents: Partial, wanted: Sequence[bool]
    ) -> list[Array]:
        args, tangents = operands[: self.num_args], list(operands[self.num_args :])
        wanted = wanted[: self.num_args]
        of_results = list(cotangents[: len(self.flags)])
        of_tangents = self.spread(cotangents[len(self.flags) :])
        if all(c is None for c in of_tangents):
            back = pull_back_through(self.of, args, of_results, wanted)
            return [*back, *([None] * len(tangents))]
        moving_results = [i for i, c in enumerate(of_results) if c is not None]
        for i in moving_results:
            if of_tangents[i] is None:
                of_tangents[i] = jnp.zeros_like(of_results[i])
        there: list[int] = []

        def transposed(moved: Partial, exchanged: Partial) -> list[Array]:
            full = with_replaced(args, self.moving, moved)
            back = pull_back_through(
                self.of, full, with_replaced(of_tangents, moving_results, exchanged), wanted
            )
            there[:] = [i for i, x in enumerate(back) if x is not None]
            return [back[i] for i in there]

        at = [args[i] for i in self.moving], [of_tangents[i] for i in moving_results]
        a, b = jax.jvp(transposed, at, (tangents, [of_results[i] for i in moving_results]))
        back = spread_to(a, there, args)
        return [*spread_to(b, there, args), *(back[i] for i in self.moving)]


def pull_back_through(
    program: DifferentiableProgram, args: Partial, cotangents: Partial, wanted: Sequence[bool]
) -> list[Any]:
    """Cotangents of the arguments of a program."""
    if all(c is None for c in cotangents):
        return [None] * len(args)
    _, residuals = program.known(*args)
    return program.pull_back(args, residuals, cotangents, wanted)


def push_forward_through(
    program: DifferentiableProgram, args: Sequence[Array], tangents: Partial
) -> list[Array]:
    """Tangents of the results of a program that are not numbers of a discrete kind."""
    moving = [i for i, t in enumerate(tangents) if t is not None]

    def run(*moved: Array) -> list[Array]:
        return list(filter(has_tangent, bind_program(program, with_replaced(args, moving, moved))))

    return jax.jvp(run, [args[i] for i in moving], [tangents[i] for i in moving])[1]


def _batched(
    program: DifferentiableProgram, axis: Any, dims: Sequence[Any], of_residuals: Any = 0
) -> DifferentiableProgram:
    """A program of which some arguments, and residuals, are many along some axis.

    Args:
      program: the program.
      axis: JAX's description of the axis.
      dims: for each argument where the axis is, None where it is not; it is the first of results.
      of_residuals: the same for each residual, or for all.
    """

    def mapped(function: Callable, in_axes: Any) -> Callable:
        return jax.vmap(
            function,
            in_axes,
            axis_size=axis.size,
            axis_name=axis.name,
            spmd_axis_name=axis.spmd_name,
        )

    def pull_back(
        args: Partial, residuals: Partial, cotangents: Partial, wanted: Sequence[bool]
    ) -> Any:
        there: list[int] = []

        def each(args: object, residuals: Partial, cotangents: Partial) -> list[Array]:
            back = program.pull_back(args, residuals, cotangents, wanted)
            there[:] = [i for i, x in enumerate(back) if x is not None]
            return [back[i] for i in there]

        axes = list(dims), of_residuals, [None if c is None else 0 for c in cotangents]
        back = mapped(each, axes)(list(args), list(residuals), list(cotangents))
        return spread_to([_to(dims[i], x) for i, x in zip(there, back, strict=True)], there, args)

    axes = tuple(dims)
    run, known = mapped(program.run, axes), mapped(program.known, axes)
    marks_of_one = program.marks
    if marks_of_one is None:
        return DifferentiableProgram(run, pull_back, known).like(program)

    def marks(args: Partial, numbers: Partial) -> Any:
        there = [None if x is None else dim for x, dim in zip(numbers, dims, strict=True)]
        found = mapped(marks_of_one, [list(dims), there])(list(args), list(numbers))
        return list(found)

    run = mapped(program.run_marked, (0, *axes))
    return DifferentiableProgram(run, pull_back, known, marks=marks).like(program)


def _to(dim: int | None, x: Array) -> Array:
    """The cotangent of what has its axis at a place, from one that has it at the front."""
    return x.sum(0) if dim is None else jnp.moveaxis(x, 0, dim)


def bind_program(program: DifferentiableProgram, args: Sequence[Array]) -> list[Array]:
    """Runs a program, whatever transforms it."""
    primitive = with_tangents_p if isinstance(program, WithTangents) else program_p
    args = args if program.on_mesh else varying_alike(args)
    return primitive.bind(*args, program=program, token=token_program())


def with_replaced(values: Sequence[Array], places: Sequence[int], by: Sequence[Any]) -> list[Array]:
    replaced = list(values)
    for i, x in zip(places, by, strict=True):
        replaced[i] = x
    return replaced


def spread_to(values: Sequence[Array], places: Sequence[int], like: Sequence[Any]) -> list[Array]:
    return with_replaced([None] * len(like), places, values)


def pull_back_some(
    run: Callable,
    args: Sequence[Array],
    moving: Sequence[int],
    returned: Sequence[int],
    cotangents: Sequence[Array],
) -> list[Any]:
    """Returns the cotangents of some arguments of a function; None of the others.

    Args:
      run: from a list of arguments to the results.
      args: the arguments.
      moving: the places of those that have a cotangent.
      returned: the places of results that have one.
      cotangents: of all results.
    """

    def forward(some: Sequence[Array]) -> list[Array]:
        results = run(with_replaced(args, moving, some))
        return [results[i] for i in returned]

    _, back = jax.vjp(forward, [args[i] for i in moving])
    (found,) = back([cotangents[i] for i in returned])
    return with_replaced([None] * len(args), moving, found)


def has_tangent(x: object) -> bool:
    return has_gradient(jax.typeof(x).dtype)


@contextlib.contextmanager
def reverse_mode_only(
    name: str,
    reason: str = "a function in it has a rule for reverse mode only (`jax.custom_vjp`); expected "
    "functions that JAX can differentiate, or `jax.custom_jvp`, or forward over reverse, as in "
    "`jax.jacfwd(jax.grad(f))`",
) -> Iterator[None]:
    """Inside runs what may have reverse mode only; `name` says what, and `reason` why."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"{name} is differentiated in forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`), "
            f"and {reason}. Write `jax.vjp`, `jax.grad` or `jax.jacrev`."
        ) from error


# --- rules ---


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


program_p = _primitive("batched_program")
with_tangents_p = _primitive("batched_program_with_tangents")
tangents_p = _primitive("tangents_of_batched_program")


def _run_program(*args: Array, program: DifferentiableProgram, **_: Any) -> list[Array]:
    return list(program.run(*args))


def _run_traced(*args: Array, program: DifferentiableProgram, **_: Any) -> list[Array]:
    return list(program.traced(*args))


def _result_types(*avals: Any, program: DifferentiableProgram, **_: Any) -> list[Any]:
    if not isinstance(program, WithTangents):
        if program.on_mesh:
            return list(jax.make_jaxpr(program.traced)(*avals).out_avals)
        with without_mesh():
            of_no_mesh = list(map(on_no_mesh, avals))
            if program.types is not None:
                results = list(program.types(*of_no_mesh))
            else:
                results = list(jax.make_jaxpr(program.traced)(*of_no_mesh).out_avals)
        return [on_mesh_of(avals, x) for x in results]
    results = _result_types(*avals[: program.num_args], program=program.of)
    program.note(results)
    return [*results, *(x.to_tangent_aval() for x in results if has_gradient(x.dtype))]


def _running(run: Callable) -> Callable:
    """Returns the rule by which a program runs on arrays that are there: as on no mesh."""

    def rule(*args: Array, program: DifferentiableProgram, **params: Any) -> list[Array]:
        own = functools.partial(run, program=program, **params)
        return own(*args) if program.on_mesh else run_on_no_mesh(own, args)

    return rule


def _lowering(run: Callable) -> Callable:
    """Returns the rule by which XLA gets what runs a program: as on no mesh."""
    lower = mlir.lower_fun(run, multiple_results=True)

    def rule(context: Any, *args: Any, **params: Any) -> Any:
        if params["program"].on_mesh:
            return lower(context, *args, **params)
        avals = [list(map(on_no_mesh, x)) for x in (context.avals_in, context.avals_out)]
        with without_mesh():
            return lower(context.replace(avals_in=avals[0], avals_out=avals[1]), *args, **params)

    return rule


def _push(
    primals: Partial, tangents: Partial, *, program: DifferentiableProgram, **_: Any
) -> tuple[list[Array], list[Array]]:
    """The rule of forward mode."""
    which = [
        not isinstance(t, ad.Zero) and has_tangent(x)
        for x, t in zip(primals, tangents, strict=True)
    ]
    if not any(which):
        results = bind_program(program, primals)
        return results, [ad.Zero(_tangent_type(x)) for x in results]
    pushed = WithTangents(program, which)
    outs = bind_program(pushed, [*primals, *(tangents[i] for i in pushed.moving)])
    count = len(pushed.flags)
    dots = pushed.spread(outs[count:])
    results = outs[:count]
    return results, [
        ad.Zero(_tangent_type(x)) if t is None else t for x, t in zip(results, dots, strict=True)
    ]


def _tangent_type(x: object) -> Any:
    return jax.typeof(x).to_tangent_aval()


def _batch(axis: Any, args: Partial, dims: Any, *, program: DifferentiableProgram, **_: Any) -> Any:
    if all(d is None for d in dims):
        results = bind_program(program, args)
        return results, [None] * len(results)
    if isinstance(program, WithTangents) and all(d is None for d in dims[: program.num_args]):
        # `jax.jacfwd` expects results that are the same for all tangents.
        results = bind_program(program.of, args[: program.num_args])
        program.note(results)
        outs = bind_program(_batched(program.tangents_only(), axis, dims), args)
        return [*results, *outs], [*([None] * len(results)), *([0] * len(outs))]
    results = bind_program(_batched(program, axis, dims), args)
    return results, [0] * len(results)


for _p in (program_p, with_tangents_p):
    _p.def_impl(_running(_run_program))
    _p.def_abstract_eval(_result_types)
    ad.primitive_jvps[_p] = _push
    batching.fancy_primitive_batchers[_p] = _batch
    mlir.register_lowering(_p, _lowering(_run_traced))


def _split(trace: object, *tracers: Array, program: WithTangents, **_: Any) -> list[Any]:
    """Linearizes: what is known is computed, the tangents wait for theirs."""
    values = [t.pval.get_known() for t in tracers]
    args = values[: program.num_args]
    if not any(x is None for x in values):
        return bind_program(program, values)
    if any(x is None for x in args):
        with set_current_trace(trace):
            return program_p.bind(*tracers, program=program, token=token_program())
    results, residuals = program.of.known(*args)
    program.note(results)
    avals = tuple(_tangent_type(x) for x in results if has_tangent(x))
    with set_current_trace(trace):
        outs = tangents_p.bind(
            *args,
            *residuals,
            *tracers[program.num_args :],
            program=program,
            count=len(residuals),
            avals=avals,
            token=token_program(),
        )
    return [*results, *outs]


def _split_equation(saveable: Any, unknown: Any, there: Any, eqn: Equation) -> Any:
    """The same for an equation, where `jax.checkpoint` and loops ask for it."""
    program = eqn.params["program"]
    count = program.num_args
    known_vars = [v for v, is_there in zip(eqn.invars, there, strict=True) if not is_there]
    missing = [v for v in known_vars if isinstance(v, Var)]
    results = len(eqn.outvars)
    if any(unknown[:count]):
        return None, eqn, [True] * results, [True] * results, missing
    if not any(unknown):
        return eqn, None, [False] * results, [False] * results, []
    k = len(program.flags)
    primal = eqn.replace(
        invars=eqn.invars[:count],
        outvars=eqn.outvars[:k],
        primitive=with_tangents_p if isinstance(program.of, WithTangents) else program_p,
        params={**eqn.params, "program": program.of},
    )
    return primal, eqn, [i >= k for i in range(results)], [True] * results, missing


pe.custom_partial_eval_rules[with_tangents_p] = _split
pe.partial_eval_jaxpr_custom_rules[with_tangents_p] = _split_equation


def _split_operands(
    operands: Sequence[Array], program: WithTangents, count: int
) -> tuple[Any, Any, Any]:
    """(arguments, residuals, tangents) of `tangents_p`."""
    start = program.num_args
    return operands[:start], operands[start : start + count], operands[start + count :]


def _run_tangents(
    *operands: Array, program: WithTangents, count: int, avals: Any, **_: Any
) -> list[Array]:
    args, _, tangents = _split_operands(operands, program, count)
    return program.run(*args, *tangents)[-len(avals) :] if avals else []


def _push_tangents(
    primals: Partial, dots: Partial, *, program: WithTangents, count: int, avals: Any, **_: Any
) -> tuple[Any, Any]:
    """Forward mode over tangents; residuals follow from arguments, so they do not move."""
    args, _, tangents = _split_operands(primals, program, count)
    of_args, _, of_tangents = _split_operands(dots, program, count)
    results, tangents_out = _push((*args, *tangents), (*of_args, *of_tangents), program=program)
    first = len(results) - len(avals)
    return results[first:], tangents_out[first:]


def _transpose_tangents(
    cotangents: Partial, *operands: Array, program: WithTangents, count: int, avals: Any, **_: Any
) -> list[Any]:
    args, residuals, tangents = _split_operands(operands, program, count)
    received = [None if isinstance(c, ad.Zero) else c for c in cotangents]
    linear = list(map(ad.is_undefined_primal, tangents))
    back: list[Any] = [None] * len(args)
    if any(c is not None for c in received):
        moving = [i for i, is_linear in zip(program.moving, linear, strict=True) if is_linear]
        wanted = [i in moving for i in range(len(args))]
        back = program.of.pull_back(args, residuals, program.spread(received), wanted)
    return [
        *([None] * (len(args) + len(residuals))),
        *(
            (ad.Zero(t.aval) if back[i] is None else cut_as(t.aval, back[i])) if is_linear else None
            for i, t, is_linear in zip(program.moving, tangents, linear, strict=True)
        ),
    ]


def _batch_tangents(
    axis: Any,
    operands: Partial,
    dims: Any,
    *,
    program: WithTangents,
    count: int,
    avals: Any,
    token: Any,
) -> Any:
    args, residuals, tangents = map(list, _split_operands(operands, program, count))
    dims, of_residuals, of_tangents = map(list, _split_operands(dims, program, count))
    for k, i in enumerate(program.moving):
        if dims[i] is not None or of_tangents[k] is not None:
            args[i] = _at_front(args[i], dims[i], axis.size)
            tangents[k] = _at_front(tangents[k], of_tangents[k], axis.size)
            dims[i] = 0
    many = WithTangents(
        _batched(program.of, axis, dims, of_residuals),
        [i in program.moving for i in range(program.num_args)],
    )
    many.flags = program.flags
    outs = tangents_p.bind(
        *args,
        *residuals,
        *tangents,
        program=many,
        count=count,
        avals=tuple(on_mesh_of(avals, ShapedArray((axis.size, *a.shape), a.dtype)) for a in avals),
        token=token,
    )
    return outs, [0] * len(outs)


def _at_front(x: Array, dim: int | None, size: int) -> Any:
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


tangents_p.def_impl(_running(_run_tangents))
tangents_p.def_abstract_eval(lambda *_, avals, **__: list(avals))
ad.primitive_jvps[tangents_p] = _push_tangents
ad.primitive_transposes[tangents_p] = _transpose_tangents
batching.fancy_primitive_batchers[tangents_p] = _batch_tangents
mlir.register_lowering(tangents_p, _lowering(_run_tangents))
