"""The program of a node on arrays of any length, as a program on padded arrays.

Where arrays [n, ...] are the states of a recursion, as the rows [sites, 4] of every node of a
phylogenetic tree are, an array is padded to one of a few lengths, its *capacity*, and what n is
comes as an operand if the program reads it:

    x [n, 4]  →  y [n, 4]          becomes          x [64, 4], n  →  y [64, 4]

Rows beyond the n-th repeat that one, of arrays and of results, so that what is computed of them is
nothing that is not computed anyway. What takes rows together leaves them out (see
`_jaxpr.padding.padded_rules`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.interpret import run_equations, used_variables, value_of
from jedbatch._jaxpr.padding.axis_rules import MAKE_MORE, CannotMergeError, mixed_axes
from jedbatch._jaxpr.padding.flat_programs import flattened
from jedbatch._jaxpr.padding.padded_loops import runs_inside
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.padding.singular import makes_others, positioned
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import extent_at, is_ragged, ragged_axes, shape_at, symbols_in
from jedbatch._jaxpr.versions import Atom, ClosedProgram
from jedbatch._ragged.needed_rows import NeededRows, refuse_shrinking
from jedbatch._support.types import Array, AxisSize

SHORTEST = 8  # capacity of an array


def capacities(lengths: np.ndarray) -> np.ndarray:
    """Returns the capacity of arrays of some lengths: 8, 16, 32, 64, 128 rows, and so on.

    Every capacity is a type of its own for what is done to arrays. More of them would save rows,
    and cost batches.
    """
    return 1 << np.frexp(np.maximum(lengths, SHORTEST) - 1)[1].astype(np.int64)


def capacities_up_to(most: int) -> list[int]:
    """Returns all capacities up to that of so many rows, ascending."""
    return np.unique(capacities(np.arange(most + 1))).tolist()


@dataclass(frozen=True, eq=False)
class PaddedProgram:
    """The program of a node whose arrays are padded.

    Attributes:
      closed: the program. Its first arguments are shared.
      num_shared: how many.
      symbols: of which its extents are made, in order.
      needed: the rows that instances must have.
      repeats: whether results are given padding anew.
      guards: whether values are kept out of padding whatever the lengths: they may be too large
        there, or zero, or an array is shorter than the length, and may be empty.
      positioned: see `_jaxpr.padding.singular`.
    """

    closed: ClosedProgram
    num_shared: int
    symbols: tuple[str, ...]
    needed: NeededRows
    repeats: bool
    guards: bool
    positioned: frozenset[int]
    _reads: dict[bool, tuple[int, ...]] = field(default_factory=dict)

    def run(
        self,
        shared: Sequence[Array],
        operands: Sequence[Array],
        sizes: Mapping[str, int],
        lengths: Mapping[str, Any],
        guarded: bool,
    ) -> tuple[Array, ...]:
        """Returns the results, padded.

        Args:
          shared: what all instances share.
          operands: with the rows of their capacities.
          sizes: the capacity for every symbol.
          lengths: its value, of those that the program reads (see `reads`).
          guarded: whether a length may be 0.
        """
        jaxpr = self.closed.jaxpr
        values = {s: lengths.get(s, jnp.int32(0)) for s in self.symbols}
        guarded = guarded or self.guards
        padded = Padded(sizes, values, guarded, positioned=self.positioned)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, (*shared, *operands), strict=True))
        run_equations(jaxpr.eqns, env, padded.run)
        results = [value_of(v, env) for v in jaxpr.outvars]
        if self.repeats or guarded:
            results = [
                _repeating(padded, v, x) for v, x in zip(jaxpr.outvars, results, strict=True)
            ]
        return tuple(results)

    def reads(self, guarded: bool) -> tuple[int, ...]:
        """Returns the symbols, by number, whose values it reads.

        Raises:
          CannotMergeError: it cannot run on arrays that are padded.
        """
        if guarded not in self._reads:
            sizes = dict.fromkeys(self.symbols, SHORTEST)
            kinds = [
                jax.ShapeDtypeStruct(shape_at(v.aval.shape, sizes), v.aval.dtype)
                for v in self.closed.jaxpr.invars
            ]
            length = jax.ShapeDtypeStruct((), np.dtype(np.int32))

            def run(lengths: Sequence[Any], values: Sequence[Any]) -> tuple[Array, ...]:
                named = dict(zip(self.symbols, lengths, strict=True))
                shared, operands = values[: self.num_shared], values[self.num_shared :]
                return self.run(shared, operands, sizes, named, guarded)

            traced = jax.make_jaxpr(run)([length] * len(self.symbols), kinds).jaxpr
            used, symbols = used_variables(traced), range(len(self.symbols))
            self._reads[guarded] = tuple([k for k in symbols if traced.invars[k] in used])
        return self._reads[guarded]


def _repeating(padded: Padded, variable: Atom, x: Array) -> Array:
    """Returns an array whose rows beyond the last one that exists repeat it."""
    shape = variable.aval.shape
    for axis in ragged_axes(shape):
        last = jnp.maximum(padded.length(shape[axis]) - 1, 0)
        last = lax.dynamic_index_in_dim(x, last, axis)
        x = jnp.where(padded.exists(shape, axis), x, last)
    return x


def find_padded(closed: ClosedProgram, num_shared: int, symbols: Sequence[str]) -> PaddedProgram:
    """Returns a program of symbolic shapes as one on padded arrays.

    Args:
      closed: the program.
      num_shared: how many of its first arguments all instances share.
      symbols: of which its extents are made, in order.

    Raises:
      CannotMergeError: it cannot run on arrays that are padded.
    """
    closed = flattened(closed)
    used = used_variables(closed.jaxpr)
    equations = [eqn for eqn in closed.jaxpr.eqns if used.intersection(eqn.outvars)]
    for eqn in equations:
        mixed_axes(eqn)  # complains of what is not known
    values = [v.aval for v in (*closed.jaxpr.invars[num_shared:], *closed.jaxpr.outvars)]
    for aval in values:
        reason = why_unpadded(aval.shape, aval.dtype)
        if reason is not None:
            raise CannotMergeError(reason)
    closed = closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations))
    needed = NeededRows.of(closed.jaxpr, equations)
    refuse_shrinking(needed.extents)
    program = PaddedProgram(
        closed,
        num_shared,
        tuple(symbols),
        needed,
        makes_others(equations) or any(map(runs_inside, equations)),
        any(eqn.primitive.name in MAKE_MORE for eqn in equations)
        or any((beyond_length(x.shape[a]) or 0) < 0 for x in values for a in ragged_axes(x.shape)),
        positioned(equations),
    )
    program.reads(False)
    return program


def why_unpadded(shape: Sequence[AxisSize], dtype: Any) -> str | None:
    """Returns why arrays are not kept padded between nodes; None if they can be."""
    for extent in (shape[a] for a in ragged_axes(shape)):
        if beyond_length(extent) is None:
            return f"an array of {extent} rows, which is no length of an array"
    return "an array of random keys is ragged" if is_ragged(shape) and is_key(dtype) else None


def beyond_length(extent: AxisSize) -> int | None:
    """Returns how many rows more than the length of an array there are; None of other extents.

    They are 0 of `n`, 1 of `n + 1` and -1 of `n - 1`. What trees join end to end, as `n + m`, has
    another number of rows for every tree.
    """
    symbols = symbols_in(extent)
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    few, many = (extent_at(extent, {symbol: n}) - n for n in (SHORTEST, 8 * SHORTEST))
    return few if few == many else None
