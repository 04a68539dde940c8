"""Derivatives of second order: a reverse that is a loop, pulled back by symmetry.

The reverse of a program is a loop that JAX cannot reverse either. But it is a gradient, hence the
Jacobian of reverse and results together is symmetric, and cotangents are pulled back through it by
pushing tangents forward, which JAX can do. Programs that do so serve any order: the reverse of the
reverse is again such a program (`Symmetric`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jedbatch._jaxpr.derivatives import (
    DifferentiableProgram,
    Partial,
    bind_program,
    has_tangent,
    push_forward_through,
    spread_to,
)
from jedbatch._jaxpr.interpret import any_performs
from jedbatch._jaxpr.versions import Equation
from jedbatch._support.types import Array, PyTree


class Symmetric(DifferentiableProgram):
    """A program whose reverse is a loop too, which JAX cannot reverse either.

    With its cotangents c, the reverse gives the gradient with respect to x of the number <c, f(x)>.
    That number's gradient with respect to x and c is the reverse and the results, so their Jacobian
    is symmetric: what is pulled back through both is what is pushed forward through both, and JAX
    pushes tangents through loops. A rule of the user's (`jax.custom_vjp`) need not be a derivative,
    and then the Jacobian need not be symmetric; so that is an error. Of `jax.custom_jvp` we take it
    to be one.
    """

    def __init__(
        self,
        run: Callable,
        known: Callable,
        pull_back: Callable,
        refuse: Callable[[], None] = lambda: None,
        types: Callable | None = None,
        marks: Callable | None = None,
        on_mesh: bool = False,
    ):
        """Prepares a program.

        Args:
          run: see `DifferentiableProgram`.
          known: see `DifferentiableProgram`.
          pull_back: see `DifferentiableProgram`; if there are `marks`, it takes them too, last.
          refuse: raises an error if the reverse need not be a derivative, since it is a rule of the
            user's.
          types: see `DifferentiableProgram`.
          marks: from (arguments, cotangents of the results, None where there is none) to a list of
            bool[...]: where these are not zeros. None if `pull_back` does not ask.
          on_mesh: see `DifferentiableProgram`.
        """
        super().__init__(run, self._pull_back, self._known, types)
        self.run_known = known
        self.marks_of_cotangents = marks
        self.sweep: Callable = pull_back if marks else lambda *args: pull_back(*args[:-1])
        self.refuse = refuse
        self.on_mesh = on_mesh
        self.save = DifferentiableProgram(self._save, self._pull_back_save).like(self)
        self.num_results = 0  # known once it has run
        self._reverses: dict[tuple, _Reverse] = {}

    def _known(self, *args: Array) -> tuple[list[Array], list[Array]]:
        outs = bind_program(self.save, args)
        return outs[: self.num_results], outs[self.num_results :]

    def _save(self, *args: Array) -> list[Array]:
        results, residuals = self.run_known(*args)
        self.num_results = len(results)
        return [*results, *residuals]

    def _pull_back_save(
        self, args: Partial, _: Any, cotangents: Partial, wanted: Sequence[bool]
    ) -> Any:
        of_results, of_residuals = cotangents[: self.num_results], cotangents[self.num_results :]
        assert all(c is None for c in of_residuals)  # all that is theirs goes to the arguments
        return self._pull_back(args, self._known(*args)[1], of_results, wanted)

    def _pull_back(
        self, args: Partial, residuals: Partial, cotangents: Partial, wanted: Sequence[bool]
    ) -> Any:
        key = len(args), tuple(c is None for c in cotangents), tuple(wanted)
        if key not in self._reverses:
            self._reverses[key] = _Reverse(self, len(args), cotangents, wanted)
        reverse = self._reverses[key]
        present = [c for c in cotangents if c is not None]
        return reverse.spread(bind_program(reverse, [*args, *residuals, *present]))


class _Reverse(DifferentiableProgram):
    """The reverse of a program, from (arguments, residuals, cotangents), as a program.

    One `with_results` takes no residuals, which it computes, and returns a cotangent for every
    argument and then the results. That is what pulls back by pushing forward.

    Attributes:
      of: the program.
      num_args: how many arguments that has.
      num_results: how many results it has.
      exist: which of these have a cotangent.
      wanted: see `DifferentiableProgram.pull_back`.
      with_results: see above.
      places: of the cotangents that come out among those of all arguments; known once it has run.
    """

    def __init__(
        self,
        of: Symmetric,
        num_args: int,
        cotangents: Partial,
        wanted: Sequence[bool],
        with_results: bool = False,
    ):
        run = self._run if of.marks_of_cotangents else functools.partial(self._run, ())
        super().__init__(run, self._pull_back, marks=of.marks_of_cotangents and self._marks)
        self.like(of)
        self.of = of
        self.num_args = num_args
        self.num_results = len(cotangents)
        self.exist = [i for i, c in enumerate(cotangents) if c is not None]
        self.wanted = wanted
        self.with_results = with_results
        self.places: list[int] = []

    def spread(self, values: Sequence[Array]) -> list[Array]:
        """Cotangents of all arguments of the program, None where there is none."""
        return spread_to(values, self.places, [None] * self.num_args)

    def _cut(self, operands: Sequence[Array]) -> tuple[Any, Any, Any]:
        """(arguments, residuals, cotangents of those results that have one)."""
        end = len(operands) - len(self.exist)
        return operands[: self.num_args], operands[self.num_args : end], operands[end:]

    def _of_results(self, cotangents: Partial) -> list[Array]:
        return spread_to(cotangents, self.exist, [None] * self.num_results)

    def _marks(self, operands: Partial, numbers: Partial) -> Any:
        """Returns the marks of the cotangents that exist, or of tangents of theirs."""
        assert self.of.marks_of_cotangents is not None
        cotangents = self._of_results(self._cut(numbers)[2])
        return self.of.marks_of_cotangents(operands[: self.num_args], cotangents)

    def _run(self, marks: Sequence[Array], *operands: Array) -> list[Array]:
        args, residuals, cotangents = self._cut(operands)
        results: Sequence[Array] = ()
        if self.with_results:
            results, residuals = self.of.run_known(*args)
        of_results = self._of_results(cotangents)
        back = list(self.of.sweep(args, residuals, of_results, self.wanted, marks))
        if not self.with_results:
            self.places = [i for i, x in enumerate(back) if x is not None]
            return [back[i] for i in self.places]
        nothing = [jnp.zeros_like(x) if has_tangent(x) else x for x in args]
        of_args = [x if c is None else c for x, c in zip(nothing, back, strict=True)]
        return [*of_args, *(results[i] for i in self.exist)]

    def _pull_back(
        self, operands: Partial, _: Any, cotangents: Partial, wanted: Sequence[bool]
    ) -> list[Array]:
        if self.with_results:
            self.of.refuse()
            tangents = [
                c if has_tangent(x) else None for x, c in zip(operands, cotangents, strict=True)
            ]
            return spread_tangents(push_forward_through(self, operands, tangents), operands)
        args, residuals, of_results = self._cut(operands)
        union = [a or b for a, b in zip(self.wanted, wanted, strict=False)]
        given = self._of_results(of_results)
        joint = _Reverse(self.of, self.num_args, given, union, with_results=True)
        received = [*self.spread(cotangents), *([None] * len(of_results))]
        back = joint.pull_back([*args, *of_results], (), received, wanted)
        nothing = [None] * len(residuals)  # they follow from the arguments, which get it all
        return [*back[: self.num_args], *nothing, *back[self.num_args :]]


def spread_tangents(tangents: Sequence[Array], like: Sequence[Any]) -> list[Array]:
    """The tangents of those that have one, None for others."""
    return spread_to(tangents, [i for i, x in enumerate(like) if has_tangent(x)], like)


class DifferentiableFunction:
    """A function with loops in both halves, differentiable in both modes and to any order.

    It is traced once, and differentiated once, for all calls with arguments of the same types.
    Where calls are differentiated in reverse mode, `run` itself is not traced.
    """

    def __init__(
        self,
        run: Callable,
        known: Callable,
        pull_back: Callable,
        refuse: Callable[[], None],
        types: Callable[[], Sequence[tuple[tuple[int, ...], Any]]],
        marks: Callable | None = None,
    ):
        """Prepares a function, which must not close over values that are being traced.

        Args:
          run: from arguments, a pytree, to a list of results.
          known: from arguments to (results, residuals), lists.
          pull_back: from (arguments, results, residuals, cotangents of the results, None where
            there is none, for each argument whether its cotangent is wanted, and the marks of
            those of the results if there are `marks`) to cotangents of the arguments, None where
            there is none.
          refuse: see `Symmetric`.
          types: returns (shape, dtype) of each result.
          marks: see `Symmetric`.
        """
        self._run, self._known, self._pull_back = run, known, pull_back
        self._refuse, self._types, self._marks = refuse, types, marks
        self._programs: dict[Any, Symmetric] = {}

    def __call__(self, args: PyTree) -> list[Array]:
        """Returns the results of some arguments."""
        leaves, structure = jax.tree.flatten(args)
        if structure not in self._programs:
            self._programs[structure] = self._program(structure)
        return bind_program(self._programs[structure], leaves)

    def _program(self, tree: Any) -> Symmetric:
        """Returns the function of the leaves of such arguments."""

        def run(*leaves: Array) -> list[Array]:
            return list(self._run(jax.tree.unflatten(tree, leaves)))

        def known(*leaves: Array) -> tuple[list[Array], list[Array]]:
            results, residuals = self._known(jax.tree.unflatten(tree, leaves))
            return list(results), [*results, *residuals]

        def pull_back(
            leaves: Any, saved: Any, cotangents: Partial, wanted: Sequence[bool], *marks: Any
        ) -> list[Array]:
            arguments, its = jax.tree.unflatten(tree, leaves), jax.tree.unflatten(tree, wanted)
            results, residuals = saved[: len(cotangents)], saved[len(cotangents) :]
            back = self._pull_back(arguments, results, residuals, cotangents, its, *marks)
            return tree.flatten_up_to(back)

        def marks(leaves: Any, cotangents: Partial) -> Any:
            assert self._marks is not None
            return self._marks(jax.tree.unflatten(tree, leaves), cotangents)

        def types(*_: Any) -> list[ShapedArray]:
            return [ShapedArray(shape, dtype) for shape, dtype in self._types()]

        asks = marks if self._marks else None
        return Symmetric(run, known, pull_back, self._refuse, types, asks)


def refuse_rules(subject: str, equations: Sequence[Equation]) -> None:
    """Raises an error if some equation has a rule of the user's for the reverse.

    `subject` says what is differentiated in reverse mode twice, for the message.
    """
    if any_performs(equations, "custom_vjp_call"):
        raise TypeError(
            f"{subject} is differentiated in reverse mode twice, and has a rule of its own for "
            "that (`jax.custom_vjp`), of which the transpose is not known; expected functions "
            "that JAX can differentiate, or `jax.custom_jvp`. Or write forward over reverse, as in "
            "`jax.jvp(jax.grad(f), (x,), (v,))` or `jax.hessian(f)`."
        )
