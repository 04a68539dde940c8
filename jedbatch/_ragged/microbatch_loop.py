"""Running a program on one microbatch after another (see `_ragged.microbatches`).

The reverse runs each of them again, so that nothing it computes on the way outlives it, and adds up
the gradients of what they share.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.derivatives import pull_back_some, spread_to
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
        most, count = self._batch.capacity.microbatches, len(shared)
        args, asked = [*shared, *operands], [*wanted[0], *wanted[1]]
        moving = [k for k, x in enumerate(args) if asked[k] and has_gradient(x.dtype)]
        returned = [k for k, x in enumerate(cotangents) if x is not None]

        def body(i, sums):
            own, own_table = self._cut(i, operands, table)
            sizes = [0 if x is None else len(x) // most for x in cotangents]
            pairs = zip(cotangents, sizes, strict=True)
            sent = [None if x is None else slice_rows(x, i * n, n) for x, n in pairs]

            def run(given):
                return self._run_one(given[:count], given[count:], own_table)

            found = pull_back_some(run, [*shared, *own], moving, returned, sent)
            return [
                x + found[k] if k < count else put(x, found[k], i * len(found[k]))
                for k, x in zip(moving, sums, strict=True)
            ]

        zeros = [jnp.zeros_like(args[k]) for k in moving]
        sums = lax.fori_loop(0, self._trips(table), body, zeros)
        found = spread_to(sums, moving, args)
        return found[:count], found[count:], None
