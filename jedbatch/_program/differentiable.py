"""Batched programs as differentiable functions.

A program of a minibatch has two halves, the loop over its batches and the sweep back. Here they
become programs in the sense of `_jaxpr.derivatives`:

    Run    x -> results, the one that is called
    Save   x -> results, and the values that the sweep reads
    Sweep  x, values, c -> cotangents of x, from cotangents c of the results
    Both   x, c -> cotangents of x, and those results that have a cotangent

`Run` is linearized by `Save` and transposed by `Sweep`. What follows is for derivatives of
derivatives. `Both` is the gradient of the number <c, f(x)> with respect to x and to c, hence its
Jacobian is symmetric, and what is pulled back through it is what is pushed forward through it.
That gives the transpose of `Sweep` too, whose `values` follow from x and so get nothing: all
goes to x. A rule of the user's (`jax.custom_vjp`) need not be a derivative, and then the
Jacobian need not be symmetric; so that is an error. Of `jax.custom_jvp` we take it to be one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jedbatch._graph.types import operation_of
from jedbatch._jaxpr.derivatives import Program, bind, pushed_forward, refuse_rules
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.transfers import unguarded
from jedbatch._kernel.vjp import SLOTS
from jedbatch._program.returned import WHOLE, Pieces, joined, split
from jedbatch._program.signature import Signature


class Differentiable:
    """`run(shared, inputs, table, reverse_table)` with the reverse rule of the program.

    It returns pieces (see `_program.returned`).
    """

    def __init__(
        self,
        executor_of: Callable,
        signature: Signature,
        batch: int | None,
        permit: Callable,
        reverse_of: Callable,
    ):
        """Prepares a program.

        Args:
          executor_of: who runs it on some values, which may be traced or not.
          signature: the program.
          batch: rows of a piece; None if each row is one.
          permit: raises an error if it must not be differentiated.
          reverse_of: from the reverse table, for each arena bool[pieces] that have a cotangent, and
            what it is differentiated with respect to (see `Refused.origins`), to the reverse
            signature and its tables, when they are needed.
        """
        self.executor_of = executor_of
        self.signature = signature
        self.batch = batch
        self.permit = permit
        self.reverse_of = reverse_of
        self.whole = Program(self._run, self._pull_back, self._known)
        self.save = Program(self._save, self._pull_back_save)

    def __call__(self, *args: Any) -> Pieces:
        """The rows returned from each arena, in pieces."""
        given, self.tree = jax.tree.flatten(args)
        self.num_args = len(given)
        found = bind(self.whole, given)
        return jax.tree.unflatten(self.pieces, found)

    def _given(self, args: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """(shared values, inputs, table, reverse table)."""
        return jax.tree.unflatten(self.tree, args)

    def _split(self, outputs: Sequence[Any]) -> list[Any]:
        pieces, self.pieces = jax.tree.flatten(split(outputs, self.batch))
        self.num_pieces = len(pieces)
        return pieces

    # --- the program that is called ---

    def _run(self, *args: Any) -> list[Any]:
        given = self._given(args)[:3]
        return self._split(self.executor_of(given).infer(*given))

    def _known(self, *args: Any) -> tuple[list[Any], list[Any]]:
        self.permit()
        found = bind(self.save, args)
        count = len(self.signature.arenas)
        return self._split(found[:count]), found[count:]

    @unguarded
    def _pull_back(
        self, args: Sequence[Any], values: Sequence[Any], cotangents: Any, wanted: Any
    ) -> list[Any]:
        pieces = self._pieces_of(cotangents)
        outputs, exist = joined(self.signature.arenas, self.signature.outputs, pieces, self.batch)
        sweep = Sweep(self, args, exist, outputs, wanted)
        return sweep.cotangents(bind(sweep.program, sweep.arguments(args, values)))

    def _pieces_of(self, leaves: Sequence[Any]) -> Pieces:
        numbers = jax.tree.unflatten(self.pieces, range(len(leaves)))
        return tuple([leaves[i] for i in mine] for mine in numbers)

    # --- its half that is kept ---

    def _save(self, *args: Any) -> list[Any]:
        given = self._given(args)[:3]
        outputs, values = self.executor_of(given).save(*given)
        leaves, self.state = jax.tree.flatten(values)
        return [*outputs, *leaves]

    @unguarded
    def _pull_back_save(
        self, args: Sequence[Any], _: Any, cotangents: Sequence[Any], wanted: Any
    ) -> list[Any]:
        arenas, counts = self.signature.arenas, self.signature.outputs
        of_outputs, of_values = cotangents[: len(arenas)], cotangents[len(arenas) :]
        assert all(c is None for c in of_values)  # all that is theirs goes to the arguments
        pieces = tuple([x] for x in of_outputs)
        outputs, exist = joined(arenas, counts, pieces, WHOLE)
        numbers = [len(mine) for mine in self._pieces_of(range(self.num_pieces))]
        exist = [np.repeat(flag, count) for flag, count in zip(exist, numbers, strict=True)]
        sweep = Sweep(self, args, exist, outputs, wanted)
        return sweep.cotangents(bind(sweep.both, sweep.arguments(args)))


class Sweep:
    """The sweep back of a program for some cotangents of its results."""

    def __init__(
        self,
        of: Differentiable,
        args: Sequence[Any],
        exist: Sequence[np.ndarray],
        outputs: Sequence[Any],
        wanted: Sequence[bool],
    ):
        """Prepares a sweep.

        Args:
          of: the program.
          args: its arguments.
          exist: for each arena bool[pieces], which have a cotangent.
          outputs: for each arena the cotangents of its rows, or None.
          wanted: of which arguments cotangents are wanted.
        """
        self.of = of
        *_, reverse_table = of._given(args)
        origins = origins_of(*of._given(wanted)[:2])
        self.reverse, *tables = of.reverse_of(reverse_table, exist, origins)
        self.rest, self.tree = jax.tree.flatten((tables, outputs))
        self.program = Program(self._run, self._pull_back)
        self.both = Program(self._run_both, self._pull_back_both)
        self.places: list[int] = []  # the arguments that get a cotangent

    def arguments(self, args: Sequence[Any], values: Sequence[Any] = ()) -> list[Any]:
        """Arguments of the programs; without values of `both`."""
        return [*args, *self.rest, *values]

    def cotangents(self, found: Sequence[Any]) -> list[Any]:
        """Cotangents of the arguments of the program from the results of a sweep."""
        back: list[Any] = [None] * self.of.num_args
        for i, x in zip(self.places, found, strict=False):
            back[i] = x
        return back

    def _cut(self, args: Sequence[Any]) -> tuple[Any, Any, Any]:
        """(arguments of the program, the tables and cotangents, values)."""
        start = self.of.num_args
        end = start + len(self.rest)
        return args[:start], args[start:end], args[end:]

    def _run(self, *args: Any) -> list[Any]:
        first, rest, values = self._cut(args)
        return self._sweep(first, rest, jax.tree.unflatten(self.of.state, values))

    def _sweep(self, args: Any, rest: Any, values: Any) -> list[Any]:
        of = self.of
        shared, inputs, table, _ = of._given(args)
        tables, outputs = jax.tree.unflatten(self.tree, rest)
        tables = (table, *tables)
        executor = of.executor_of((shared, tables, values, outputs))
        found = executor.reverse(self.reverse, shared, tables, values, outputs)
        given = zip([*shared, *inputs], [*found[0], *found[1]], strict=True)
        kept = [(i, c) for i, (x, c) in enumerate(given) if c is not None and _moves(x)]
        self.places = [i for i, _ in kept]
        return [c for _, c in kept]

    @unguarded
    def _pull_back(
        self, args: Sequence[Any], _: Any, cotangents: Sequence[Any], wanted: Any
    ) -> list[Any]:
        first, rest, values = self._cut(args)
        given = [*cotangents, *([None] * (len(rest)))]
        return [*self._pull_back_both([*first, *rest], (), given, wanted), *([None] * len(values))]

    def _run_both(self, *args: Any) -> list[Any]:
        first, rest, _ = self._cut(args)
        given = self.of._given(first)[:3]
        results, values = self.of.executor_of(given).save(*given)
        _, outputs = jax.tree.unflatten(self.tree, rest)
        found = [x for x, c in zip(results, outputs, strict=True) if c is not None]
        return [*self._sweep(first, rest, values), *found]

    @unguarded
    def _pull_back_both(
        self, args: Sequence[Any], _: Any, cotangents: Sequence[Any], wanted: Any
    ) -> list[Any]:
        refuse_rules_of(self.of.signature)
        first, rest, _ = self._cut(args)
        back = self.cotangents(cotangents)
        moving = [i for i, x in enumerate(rest) if _moves(x)]
        of_rest = [None] * len(rest)
        for i, c in zip(moving, cotangents[len(self.places) :], strict=False):
            of_rest[i] = c
        found = pushed_forward(self.both, [*first, *rest], [*back, *of_rest])
        of_rest = [None] * len(rest)
        for i, c in zip(moving, found[len(self.places) :], strict=True):
            of_rest[i] = c
        return [*self.cotangents(found), *of_rest]


def _moves(x: Any) -> bool:
    return has_gradient(jax.typeof(x).dtype)


def refuse_rules_of(signature: Signature) -> None:
    """Raises an error if some kernel has rules of the user's for the reverse."""
    for kernel in signature.kernels:
        equations = operation_of(kernel.node_type).jaxpr.jaxpr.eqns
        refuse_rules(f"`{kernel.node_type}` of a batched program", equations)


def origins_of(shared: Sequence[bool], inputs: Sequence[bool]) -> int:
    """Returns which of these are perturbed, as the bits of `Refused.origins`."""
    origins = int(any(shared))
    for a, perturbed in enumerate(inputs):
        origins |= perturbed << 1 + min(a, SLOTS - 1)
    return origins
