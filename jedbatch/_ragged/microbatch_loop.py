"""Running a program on one microbatch after another (see `_ragged.microbatches`).

The reverse runs each of them again, so that nothing it computes on the way outlives it, and adds up
the gradients of what they share.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.derivatives import with_replaced
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.symmetric import DifferentiableFunction, refuse_rules
from jedbatch._jaxpr.versions import Atom, Equation
from jedbatch._program.arenas import put, row, slice_rows
from jedbatch._program.tables import TableLayout
from jedbatch._ragged.packing import PackedBatch
from jedbatch._support.types import Array

# From (shared values, operands, table) of one microbatch to its results.
RunOne = Callable[[Sequence[Array], Sequence[Array], Array], Sequence[Array]]


class MicrobatchLoop:
    """A program as a function of all microbatches."""

    def __init__(
        self,
        run_one: RunOne,
        form: TableLayout,
        results: Sequence[Atom],
        batch: PackedBatch,
        equations: Sequence[Equation],
    ):
        """Prepares a loop.

        Args:
          run_one: runs the program on one microbatch.
          form: of the table of all.
          results: the variables that it returns.
          batch: what is known of every microbatch.
          equations: of the program.
        """
        self._run_one, self._form, self._results, self._batch = run_one, form, results, batch
        refuse = functools.partial(refuse_rules, "what is done to arrays of any length", equations)
        self._function = DifferentiableFunction(
            self._forward,
            lambda arguments: (self._forward(arguments), []),
            self._reverse,
            refuse,
            self._kinds,
        )

    def run(self, shared: Sequence[Array], operands: Sequence[Array], table: Array) -> list[Array]:
        """Returns the results of all microbatches, those of each one after the other.

        Args:
          shared: values that all calls share.
          operands: rows, or values, of all microbatches one after the other.
          table: see `PackedProgram.table`.
        """
        return self._function((list(shared), list(operands), table))

    def _trips(self, table: Array) -> Array:
        return row(self._form, table, ("trips",))[0]

    def _cut(self, i: Array, operands: Sequence[Array], table: Array) -> tuple[list[Array], Array]:
        """Returns (operands, table) of microbatch number i."""
        most = self._batch.capacity.microbatches
        own = [slice_rows(x, i * (len(x) // most), len(x) // most) for x in operands]
        size = self._form.places[("microbatches",)][1][-1]
        return own, row(self._form, table, ("microbatches",), 0, start=i * size, size=size)

    def _kinds(self) -> list[Kind]:
        """Returns (shape, dtype) of each result, of all microbatches."""
        most = self._batch.capacity.microbatches
        of_one = map(self._batch.kind, self._results)
        return [((most * shape[0], *shape[1:]), dtype) for shape, dtype in of_one]

    def _forward(self, arguments: Any) -> list[Array]:
        shared, operands, table = arguments
        found = [jnp.zeros(shape, dtype) for shape, dtype in self._kinds()]

        def body(i, found):
            new = self._run_one(shared, *self._cut(i, operands, table))
            return [put(x, y, i * len(y)) for x, y in zip(found, new, strict=True)]

        return lax.fori_loop(0, self._trips(table), body, found)

    def _reverse(
        self,
        arguments: Any,
        results: Any,
        residuals: Any,
        cotangents: Sequence[Array | None],
        wanted: Any,
    ) -> Any:
        shared, operands, table = arguments
        most = self._batch.capacity.microbatches
        returned = [k for k, x in enumerate(cotangents) if x is not None]
        sent = [x for x in cotangents if x is not None]
        moving_shared, moving = (
            [k for k, x in enumerate(values) if has_gradient(x.dtype) and of_values[k]]
            for values, of_values in ((shared, wanted[0]), (operands, wanted[1]))
        )

        def body(i, sums):
            own, own_table = self._cut(i, operands, table)

            def forward(some_shared, some_operands):
                all_shared = with_replaced(shared, moving_shared, some_shared)
                all_own = with_replaced(own, moving, some_operands)
                found = self._run_one(all_shared, all_own, own_table)
                return [found[k] for k in returned]

            _, pull_back = jax.vjp(
                forward, [shared[k] for k in moving_shared], [own[k] for k in moving]
            )
            sizes = [len(x) // most for x in sent]
            of_shared, of_own = pull_back(
                [slice_rows(x, i * n, n) for x, n in zip(sent, sizes, strict=True)]
            )
            return (
                [a + b for a, b in zip(sums[0], of_shared, strict=True)],
                [put(x, y, i * len(y)) for x, y in zip(sums[1], of_own, strict=True)],
            )

        zeros = (
            [jnp.zeros_like(shared[k]) for k in moving_shared],
            [jnp.zeros_like(operands[k]) for k in moving],
        )
        of_shared, of_operands = lax.fori_loop(0, self._trips(table), body, zeros)
        nones: tuple[list[Any], list[Any]] = [None] * len(shared), [None] * len(operands)
        return (
            with_replaced(nones[0], moving_shared, of_shared),
            with_replaced(nones[1], moving, of_operands),
            None,
        )
