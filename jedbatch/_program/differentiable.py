"""Batched programs as differentiable functions.

A program of a minibatch has two halves, the loop over its batches and the sweep back. Together they
are a program in the sense of `_jaxpr.derivatives`:

    run        x -> results
    known      x -> results, and the values that the sweep reads
    pull_back  x, values, c -> cotangents of x, from cotangents c of the results
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jedbatch._graph.types import operation_of
from jedbatch._jaxpr.derivatives import bind_program
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.symmetric import Symmetric, refuse_rules
from jedbatch._jaxpr.transfers import unguarded
from jedbatch._program.alive import origin_of_inputs
from jedbatch._program.pullback import Pullback
from jedbatch._program.returned import Pieces
from jedbatch._program.signature import Signature
from jedbatch._support.types import Array, PyTree


class Differentiable:
    """`run(shared, inputs, table, reverse_table)` with derivatives of any order.

    It returns pieces (see `_program.returned`).
    """

    def __init__(
        self,
        executor_of: Callable[[], Any],
        pullback: Pullback,
        permit: Callable[[], None],
        refuse: Callable[[], None] | None = None,
        on_mesh: bool = False,
    ):
        """Prepares a program.

        Args:
          executor_of: returns who runs it.
          pullback: its reverse.
          permit: raises an error if it must not be differentiated.
          refuse: raises an error if it must not be differentiated in reverse mode twice; by default
            if some kernel has rules of the user's for the reverse.
          on_mesh: whether it runs on the devices of a mesh by itself.
        """
        self.executor_of = executor_of
        self.pullback = pullback
        self.permit = permit
        # of arguments, results and what is kept; known once it has run
        self.tree = self.pieces = self.state = jax.tree.structure(None)
        refuse = refuse or functools.partial(refuse_rules_of, pullback.signature)
        self.program = Symmetric(self._run, self._known, self._pull_back, refuse, on_mesh=on_mesh)

    def __call__(self, *args: Any) -> Pieces:
        """The rows returned from each arena, in pieces."""
        leaves, self.tree = jax.tree.flatten(args)
        outs = bind_program(self.program, leaves)
        return jax.tree.unflatten(self.pieces, outs)

    def _given(self, args: Sequence[Array]) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """(shared values, inputs, table, reverse table)."""
        return jax.tree.unflatten(self.tree, args)

    def _split(self, outputs: Any) -> list[Array]:
        pieces, self.pieces = jax.tree.flatten(self.pullback.split(outputs))
        return pieces

    def _run(self, *args: Any) -> list[Array]:
        arguments = self._given(args)[:3]
        return self._split(self.executor_of().infer(*arguments))

    def _known(self, *args: Any) -> tuple[list[Any], list[Any]]:
        self.permit()
        arguments = self._given(args)[:3]
        outputs, values = self.executor_of().save(*arguments)
        leaves, self.state = jax.tree.flatten(values)
        return self._split(outputs), leaves

    @unguarded
    def _pull_back(
        self, args: Sequence[Array], values: Sequence[Array], cotangents: PyTree, wanted: Any
    ) -> list[Array]:
        numbers = jax.tree.unflatten(self.pieces, range(len(cotangents)))
        pieces = tuple([cotangents[i] for i in positions] for positions in numbers)
        outputs, exist = self.pullback.join(pieces)
        shared, inputs, table, reverse_table = self._given(args)
        moving = origins_of(*self._given(wanted)[:2])
        reverse, *tables = self.pullback.tables(reverse_table, exist, moving)
        arguments = shared, (table, *tables), jax.tree.unflatten(self.state, values), outputs
        of_arguments = self.executor_of().reverse(reverse, *arguments)
        pairs = zip([*of_arguments[0], *of_arguments[1]], [*shared, *inputs], strict=True)
        back = [c if c is not None and _moves(x) else None for c, x in pairs]
        return [*back, *([None] * (len(args) - len(back)))]


def _moves(x: Array) -> bool:
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
        origins |= perturbed * origin_of_inputs(a)
    return origins
