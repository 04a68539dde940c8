"""`Pullback`: the reverse of a program, and its tables, by what of the results is differentiated.

A loss may read some results and not others. What it does not read has no cotangent, which is less
than zeros: zero times an infinite derivative is NaN. So the sweep back has to know which of the
rows returned have one, in one of three ways:

    planned   the reverse is planned for these rows, once they are known
    bits      its table has the results that each value leads to as bits; those that are
              differentiated are a number. That will do if of no result some rows are and others not
    marks     the sweep marks the cotangents that exist, row by row
"""

import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._kernel.vjp import KernelVjp
from jedbatch._program.alive import MAX_RESULTS
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.placement import Placement
from jedbatch._program.returned import Pieces, joined, joined_pieces, leaf_numbers, split_outputs
from jedbatch._program.signature import Signature

EVERYTHING = -1  # as `moving` of `Pullback.tables`

Planned = tuple[ReverseSignature, Any]  # and its table


@dataclass(frozen=True, eq=False)
class Pullback:
    """The reverse of a program, whatever of its results is differentiated.

    Attributes:
      signature: the program.
      form: how the rows that it returns become results.
      refuse: is called with a kernel and the number of one of its results that would have to be
        differentiated and cannot be, and raises an error.
      reverse: the program of the reverse; None if it is planned once it is known what for.
      placed, plan: the minibatch, and what plans it then: from it, the program, and, by the name
        `wanted`, what is differentiated (see `find_readers`).
      counts: on the devices of a mesh, the rows of each piece of each arena (see `OnDevices`).
      is_fixed: whether `reverse` runs as it is, compiled before.
    """

    signature: Signature
    form: OutputSpec
    refuse: Callable[[Any, int], object]
    reverse: ReverseSignature | None = None
    placed: Placement | None = None
    plan: Callable[..., Planned] | None = None
    counts: Sequence[int] | None = None
    is_fixed: bool = False

    def split(self, outputs: Sequence[Any]) -> Pieces:
        """Returns what the program returns in pieces."""
        return split_outputs(outputs, self.form, self.signature.arenas)

    def join(self, cotangents: Pieces) -> tuple[Any, list[np.ndarray]]:
        """(what the reverse takes, for each arena bool[pieces], which have a cotangent).

        Cotangents of pieces are None where there is none.
        """
        arenas, batch = self.signature.arenas, self.form.batch
        exist = [
            np.array([x is not None and has_gradient(dtype) for x in pieces], bool)
            for (_, dtype), pieces in zip(arenas, cotangents, strict=True)
        ]
        if self.counts is not None:
            return joined_pieces(arenas, cotangents, batch, self.counts), exist
        return joined(arenas, cotangents, batch, self.signature.outputs), exist

    def tables(
        self, table: Any, exist: Sequence[np.ndarray], moving: int
    ) -> tuple[ReverseSignature, Any, Any]:
        """Returns the program of the reverse, its table, and what is differentiated.

        The latter are bits or marks, or None (see `Backward`).

        Args:
          table: that `reverse` has for the minibatch.
          exist: for each arena bool[pieces], which have a cotangent.
          moving: with respect to what is differentiated, as the bits of `Refused.origins`.
        """
        rows = [np.repeat(x, self.form.batch or 1) for x in exist]
        if self.reverse is None:
            reverse, table = self._planned(*(x.tobytes() for x in rows))
            self._check(reverse, None, moving)
            return reverse.with_constants(moving), table, None
        reverse, tells = self.reverse, self.reverse.tells
        states = self._states(exist, tells)
        bits = sum(1 << leaf for leaf, found in states.items() if True in found) if tells else None
        self._check(reverse, bits, moving)
        if not self.is_fixed:
            reverse = reverse.with_constants(moving)
            reverse = replace(reverse, marks=any(len(found) > 1 for found in states.values()))
        if not reverse.marks:
            return reverse, table, None if bits is None else np.array([bits], np.int32)
        if self.counts is None:
            rooms = zip(rows, self.signature.outputs, strict=True)
            rows = [np.pad(x, (0, room - len(x))) for x, room in rooms]
        return reverse, table, rows

    @functools.cached_property
    def _planned(self) -> Callable[..., Planned]:
        """Plans the reverse for rows that have a cotangent, which are bytes of bool[outputs].

        A trace asks for the types of a program, and then for the program.
        """
        return functools.cache(self._planned_anew)

    def _planned_anew(self, *rows: bytes) -> Planned:
        placed, plan, signature = self.placed, self.plan, self.signature
        assert placed is not None
        assert plan is not None
        wanted = [
            np.frombuffer(rows[signature.arena_ids[kind]], bool)[: len(outputs)]
            for kind, outputs in zip(placed.arenas, placed.outputs, strict=True)
        ]
        pairs = zip(placed.arenas, wanted, strict=True)
        everything = all(x.all() for (_, dtype), x in pairs if has_gradient(dtype))
        return plan(placed, signature, wanted=None if everything else wanted)

    def _states(self, exist: Sequence[np.ndarray], tells: bool) -> dict[int, set[bool]]:
        """For each result that bits tell apart, whether its pieces are differentiated, or both."""
        arenas, states = self.signature.arenas, collections.defaultdict(set)
        numbers = leaf_numbers(self.form, arenas)
        for (_, dtype), positions, flags in zip(arenas, numbers, exist, strict=True):
            if has_gradient(dtype):
                for leaf, flag in zip(positions.tolist(), flags.tolist(), strict=False):
                    states[min(leaf, MAX_RESULTS - 1) if tells else 0].add(flag)
        return states

    def _check(self, reverse: ReverseSignature, bits: int | None, moving: int) -> None:
        """Refuses what is to be differentiated, of results that `bits` name, and cannot be."""
        for x in reverse.refused:
            if (bits is None or x.leads_to & bits) and x.origins & moving:
                self.refuse(reverse.forward.kernels[x.kernel], x.result)


def refuse_derivative(name: str, kernel: Any, result: int) -> None:
    """Raises the error of JAX for a result of a kernel, while something is differentiated."""
    try:
        KernelVjp(kernel, [result])
    except Exception as error:
        error.add_note(
            f"This happened while {name} was differentiated: it depends on result {result} of "
            f"`{kernel.node_type}`. If no gradient is wanted through it, write "
            "`jax.lax.stop_gradient` around it."
        )
        raise
