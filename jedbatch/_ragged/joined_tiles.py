"""The program of a node as one node that reads all tiles of its arrays.

A loop along the rows of an array, attention among them or a sort takes all rows together, so that
it has no steps on tiles (see `_ragged.tile_steps`). A node that does so reads the tiles of its
arrays side by side, as arrays that are padded, and gives tiles of its results:

    x0 x1 x2 [T, 4], n  →  x [3T, 4], of which n rows exist  →  y [3T, 4]  →  y0 y1 y2 [T, 4]

It has as many operands as there are tiles, so there is a type for each of a few numbers of tiles.
Where there are fewer, the last one is read again. Rows beyond the n-th repeat that one, of arrays
and of results, as those of the arrays of an instance do.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.interpret import run_equations, used_variables, value_of
from jedbatch._jaxpr.padding.axis_rules import MAKE_MORE, CannotMergeError, mixed_axes
from jedbatch._jaxpr.padding.flat_programs import flattened
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.padding.singular import positioned
from jedbatch._jaxpr.symbolic_dims import ragged_axes, symbols_in
from jedbatch._jaxpr.versions import ClosedProgram
from jedbatch._ragged.needed_rows import extents_of, nonempty_extents
from jedbatch._ragged.tile_steps import refuse_uncut
from jedbatch._support.types import Array, AxisSize


def tiles_joined(counts: np.ndarray) -> np.ndarray:
    """Returns how many tiles a node reads of arrays that have at most so many: 2ᵏ, or 3 · 2ᵏ."""
    counts = np.maximum(counts, 1)
    powers = 1 << np.frexp(counts - 1)[1].astype(np.int64)
    fewer = powers * 3 // 4
    return np.where(counts <= fewer, fewer, powers)


class RowAxis(NamedTuple):
    """The rows of an array.

    Attributes:
      axis: along which they are.
      symbol: how many there are.
    """

    axis: int
    symbol: str


@dataclass(frozen=True, eq=False)
class JoinedProgram:
    """The program of a node that reads all tiles of its arrays.

    Attributes:
      closed: the program. Its first arguments are shared.
      extents: of the rows of what it reads and gives, by symbol.
      operands: for each operand its rows; None if it has none.
      results: the same for each result.
      nonempty: extents that must not be 0, each with the operation that says so.
      makes_more: whether it computes values in padding which may be too large, or zero.
      positioned: see `_jaxpr.padding.singular`.
    """

    closed: ClosedProgram
    extents: dict[str, AxisSize]
    operands: tuple[RowAxis | None, ...]
    results: tuple[RowAxis | None, ...]
    nonempty: tuple[tuple[AxisSize, str], ...]
    makes_more: bool
    positioned: frozenset[int]

    def run(
        self,
        shared: Sequence[Array],
        operands: Sequence[Array],
        size: int,
        tiles: int,
        guarded: bool,
    ) -> tuple[Array, ...]:
        """Returns the results for arrays of at most so many tiles.

        Args:
          shared: what all instances share.
          operands: those without rows, the lengths of the others, and the tiles of each of these.
          size: rows of a tile.
          tiles: how many are read of each array.
          guarded: whether a length may be 0.

        Returns:
          Those without rows, and the tiles of each of the others.
        """
        count = self.operands.count(None)
        singles, joined = operands[:count], list(operands[count + len(self.extents) :])
        lengths = dict(zip(self.extents, operands[count:], strict=False))
        guarded = guarded or self.makes_more
        padded = Padded(
            dict.fromkeys(lengths, tiles * size),
            lengths,
            guarded,
            positioned=self.positioned,
        )
        jaxpr = self.closed.jaxpr
        env: dict[Any, Array] = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, shared, strict=False))
        without_rows = iter(singles)
        repeats = tiles > 1 and (len(lengths) > 1 or tiles_joined(np.array(tiles - 1)) == tiles)
        own = jaxpr.invars[len(jaxpr.invars) - len(self.operands) :]
        for v, rows in zip(own, self.operands, strict=True):
            if rows is None:
                env[v] = next(without_rows)
            else:
                env[v] = jnp.concatenate(joined[:tiles], rows.axis)
                del joined[:tiles]
                if repeats:  # the last tile is there again, and not all of its rows are the last
                    env[v] = _repeating(env[v], lengths[rows.symbol], rows.axis)
        run_equations(jaxpr.eqns, env, padded.run)
        values = [value_of(v, env) for v in jaxpr.outvars]
        pairs = list(zip(values, self.results, strict=True))
        results = [x for x, rows in pairs if rows is None]
        for x, rows in pairs:
            if rows is not None:
                x = _repeating(x, lengths[rows.symbol], rows.axis)
                ends = itertools.pairwise(range(0, (tiles + 1) * size, size))
                results += [lax.slice_in_dim(x, *part, axis=rows.axis) for part in ends]
        return tuple(results)


def _repeating(x: Array, count: Array, axis: int) -> Array:
    """Returns an array whose rows beyond the last of so many repeat it."""
    last = lax.dynamic_index_in_dim(x, jnp.maximum(count - 1, 0), axis)
    exists = lax.iota(jnp.int32, x.shape[axis]) < count
    return jnp.where(lax.expand_dims(exists, [a for a in range(x.ndim) if a != axis]), x, last)


def find_joined(closed: ClosedProgram, num_shared: int) -> JoinedProgram:
    """Returns a program of symbolic shapes as one that reads all tiles of its arrays.

    Args:
      closed: the program.
      num_shared: how many of its first arguments all instances share.

    Raises:
      CannotMergeError: it cannot run on arrays that are padded.
    """
    closed = flattened(closed)
    used = used_variables(closed.jaxpr)
    equations = [eqn for eqn in closed.jaxpr.eqns if used.intersection(eqn.outvars)]
    for eqn in equations:
        mixed_axes(eqn)  # complains of what is not known
    own, returned = closed.jaxpr.invars[num_shared:], closed.jaxpr.outvars
    for v in (*own, *returned):
        refuse_uncut(v)
    extents = {str(e): e for v in (*own, *returned) for e in extents_of(v)}
    if set(extents) != symbols_in(closed):
        raise CannotMergeError("rows of arrays that are not there are taken together")
    return JoinedProgram(
        closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations)),
        extents,
        tuple(map(_rows, own)),
        tuple(map(_rows, returned)),
        tuple(nonempty_extents(equations)),
        any(eqn.primitive.name in MAKE_MORE for eqn in equations),
        positioned(equations),
    )


def _rows(v: Any) -> RowAxis | None:
    """Returns the rows of a variable; None if it has none."""
    for axis in ragged_axes(v.aval.shape):
        return RowAxis(axis, str(v.aval.shape[axis]))
    return None
